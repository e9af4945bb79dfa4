"""Video needles: the plate really is in the video, where the case says, and the dummies that test the harness."""

import numpy as np
import pytest

from data.synthetic import is_held_out, needle_frame, say
from eval import dummies, needle_video, runner
from eval.haystack import VideoHaystack

LENGTHS, DEPTHS = [96, 256, 512], [0.0, 0.4, 1.0]


@pytest.fixture(scope="module")
def cases(tokenizer, video_haystack, vocabulary, plates):
    return needle_video.build_cases(
        LENGTHS, DEPTHS, 2, 0, tokenizer, video_haystack, vocabulary=vocabulary, plates=plates, control_rounds=4
    )


def _codes(case, vocabulary):
    """Frames read by the vocabulary's own strict parser."""
    return vocabulary.split_frames(case.prompt[vocabulary.is_vision(case.prompt)])


def test_every_case_is_there(cases):
    count = {kind: sum(c.kind == kind for c in cases) for kind in ("single", "no_needle", "blind")}
    assert count == {"single": 18, "no_needle": 12, "blind": 12}
    assert len({c.key for c in cases}) == len(cases)
    assert all(is_held_out(int(c.answer)) for c in cases)


def test_plate_is_in_its_frame_and_nowhere_else(cases, vocabulary, plates):
    for case in (c for c in cases if c.kind == "single"):
        codes = _codes(case, vocabulary)
        (needle,) = case.needles
        here = (codes == plates[int(case.answer)]).all(1)
        assert here.nonzero()[0].tolist() == [needle.frame]
        assert len(codes) == case.num_frames
        assert needle.frame == round(case.depth * (case.num_frames - 1))
        assert needle.depth == pytest.approx(needle.frame / (case.num_frames - 1), abs=1e-12)
        shown = case.prompt[needle.token_start : needle.token_end]
        assert (shown[:-1] - vocabulary.text_size).tolist() == plates[int(case.answer)].tolist()
        assert shown[-1] in (vocabulary.eof, vocabulary.eov)


def test_other_frames_come_from_the_clips(cases, vocabulary, video_haystack):
    for case in (c for c in cases if c.kind != "blind"):
        for codes, (clip, frame) in zip(_codes(case, vocabulary), case.frame_sources, strict=True):
            if clip >= 0:
                np.testing.assert_array_equal(codes, video_haystack.clips[clip][frame])


def test_prompts_fill_their_length_and_end_in_the_question(cases, tokenizer, vocabulary):
    for case in cases:
        room = len(tokenizer.encode(say(int(case.answer)))) + 1
        text = tokenizer.decode(case.prompt[1:][~vocabulary.is_vision(case.prompt[1:])])
        assert text.endswith("\nUSER: What number is on the plate? ASSISTANT:")
        if case.kind == "blind":
            assert not vocabulary.is_vision(case.prompt).any()
        else:
            assert case.length - 5 < case.prompt.size + room <= case.length  # a frame takes 5 tokens


def test_controls_hold_no_plate(cases, vocabulary, plates):
    every = {codes.tobytes() for codes in plates.values()}
    for case in (c for c in cases if c.kind == "no_needle"):
        assert not every & {codes.tobytes() for codes in _codes(case, vocabulary)}
        assert case.needles == ()
        assert (case.frame_sources >= 0).all()


def test_plates_of_all_numbers_differ(plates):
    assert len(plates) == 200
    assert needle_video.num_ambiguous(plates) == 0
    same = {1: np.zeros(4, np.int32), 2: np.zeros(4, np.int32), 3: np.ones(4, np.int32)}
    assert needle_video.num_ambiguous(same) == 2


def test_a_haystack_with_a_plate_is_refused(tokenizer, vocabulary, plates):
    haystack = VideoHaystack((np.stack([plates[4]] * 9),))
    with pytest.raises(ValueError, match="give it clips without plates"):
        needle_video.build_cases([96], [0.5], 1, 0, tokenizer, haystack, vocabulary=vocabulary, plates=plates)


def test_too_short_a_length_is_refused(tokenizer, video_haystack, vocabulary, plates):
    with pytest.raises(ValueError, match=r"length is 20; one frame with question and answer takes \d+ tokens"):
        needle_video.build_cases([20], [0.5], 1, 0, tokenizer, video_haystack, vocabulary=vocabulary, plates=plates)


def test_whole_frames_of_a_cut_prompt(cases, vocabulary):
    case = next(c for c in cases if c.kind == "single" and c.length == 256)
    codes = _codes(case, vocabulary)
    first = int(vocabulary.is_vision(case.prompt).argmax())
    for extra in range(5):
        cut = needle_video.frame_codes(case.prompt[: first + 10 + extra], vocabulary, 4)
        np.testing.assert_array_equal(cut, codes[:2])


def test_case_as_pixels(cases, clips, tmp_path):
    case = next(c for c in cases if c.kind == "single" and c.length == 256 and c.depth == 0.4)
    pixels = needle_video.case_frames(case, clips)
    assert pixels.shape == (case.num_frames, 32, 32, 3)
    frame = case.needles[0].frame
    np.testing.assert_array_equal(pixels[frame], needle_frame(int(case.answer), 32))
    clip, index = case.frame_sources[frame + 1]
    np.testing.assert_array_equal(pixels[frame + 1], clips[clip][index])
    assert needle_video.picture(tmp_path / "sheet.png", case, clips, output=" 482").path.exists()


def _evaluate(name, cases, tokenizer, vocabulary, plates, tmp_path, **options):
    read = needle_video.reader(tokenizer, vocabulary, plates)
    model = dummies.make(name, read, tokenizer.encode, **options)
    decode = runner.text_decoder(tokenizer)
    return runner.evaluate(cases, model, tmp_path, model_id=name, decode=decode, stop_id=tokenizer.eos_id)


def test_oracle_is_always_right(cases, tokenizer, vocabulary, plates, tmp_path):
    summary = _evaluate("oracle", cases, tokenizer, vocabulary, plates, tmp_path)
    assert summary["accuracy"] == 1.0
    assert summary["distractor_accuracy"] is None
    assert all(counts["guesser_probability"] > 1e-3 for counts in summary["controls"].values())


def test_first_k_is_right_in_shallow_cells_only(cases, tokenizer, vocabulary, plates, tmp_path):
    singles = [c for c in cases if c.kind == "single"]
    summary = _evaluate("first-k", singles, tokenizer, vocabulary, plates, tmp_path, first_k=130)
    right = {(cell["length"], cell["depth"]): cell["accuracy"] for cell in summary["cells"]}
    assert right == {
        (length, depth): float(length == 96 or (length, depth) == (256, 0.4) or depth == 0.0)
        for length in LENGTHS
        for depth in DEPTHS
    }
