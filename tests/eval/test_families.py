"""Needles of the other kinds: where they lie, what a perfect reader finds, how answers to them count."""

import numpy as np
import pytest

from data.synthetic import hear, spell
from eval import dummies, scoring, text_families, video_families
from eval.haystack import answer_decoder
from eval.protocol import TEXT_FAMILIES, VIDEO_FAMILIES
from eval.video_families import Footage
from tests.eval.conftest import encode_frames


def answers(cases, read, tokenizer, name):
    """What a dummy says to each case, as records are scored."""
    dummy = dummies.make(name, read, tokenizer.encode, first_k=150)
    outputs = dummy.generate([case.prompt for case in cases], max_new_tokens=200, stop_id=tokenizer.eos_id)
    decode = answer_decoder(tokenizer)
    return [{**case.describe(), "output": decode(ids)} for case, ids in zip(cases, outputs, strict=True)]


@pytest.fixture(scope="module")
def text_cases(tokenizer, text_haystack):
    return text_families.build_cases(TEXT_FAMILIES, [600, 900], 3, 0, tokenizer, text_haystack, num_needles=3)


def test_text_needles_lie_where_their_case_says(text_cases, tokenizer):
    for case in text_cases:
        assert len(case.prompt) <= case.length
        assert len(case.needles) == (3 if case.kind == "multi_value" else 6)
        for needle in case.needles:
            said = hear(tokenizer.decode(case.prompt[needle.token_start : needle.token_end]))
            assert needle.key in said
            assert (needle.number in said) == ("is variable" not in said)
        asked = {needle.key if case.kind == "variables" else needle.number for needle in case.needles if needle.asked}
        assert asked == set(case.answers)
        assert [n.token_start for n in case.needles] == sorted(n.token_start for n in case.needles)
    assert len({case.key for case in text_cases}) == len(text_cases)


def test_a_chain_of_variables_is_in_order(text_cases):
    for case in (case for case in text_cases if case.kind == "variables"):
        assert [needle.key for needle in case.needles if needle.asked] == list(case.answers)


def test_the_oracle_finds_all_and_others_do_not(text_cases, tokenizer):
    read = text_families.reader(tokenizer)
    whole = scoring.families(answers(text_cases, read, tokenizer, "oracle"))
    assert {name: each["score"] for name, each in whole.items()} == dict.fromkeys(sorted(TEXT_FAMILIES), 1.0)
    assert whole["variables"]["effective_context_length"] == 900
    guessed = scoring.families(answers(text_cases, read, tokenizer, "random"))
    assert all(each["score"] < 0.3 for each in guessed.values())
    begun = scoring.families(answers(text_cases, read, tokenizer, "first-k"))
    assert all(begun[name]["score"] < 1.0 for name in TEXT_FAMILIES)


@pytest.fixture(scope="module")
def video_cases(tokenizer, video_haystack, plates, clips, vocabulary):
    footage = Footage(video_haystack, plates, clips, lambda pixels: encode_frames(pixels).reshape(len(pixels), -1))
    return video_families.build_cases(
        VIDEO_FAMILIES, [300, 500], 3, 0, tokenizer, footage, vocabulary=vocabulary, num_needles=3
    )


def test_video_needles_lie_where_their_case_says(video_cases, plates, vocabulary):
    for case in video_cases:
        assert len(case.prompt) <= case.length
        for needle in case.needles:
            codes = case.prompt[needle.token_start : needle.token_end - 1] - vocabulary.text_size
            assert np.array_equal(codes, plates[int(needle.number)]) == (case.kind != "overlay")
            assert case.frame_sources[needle.frame].tolist() == [-1, -1]
        frames = [needle.frame for needle in case.needles]
        assert frames == sorted(set(frames))
        assert case.kind != "clip" or np.ptp(frames) == 2


def test_a_perfect_reader_of_video(video_cases, tokenizer, vocabulary, plates):
    drawn = video_families.drawn_codes(video_cases, vocabulary)
    read = video_families.reader(tokenizer, vocabulary, plates, drawn)
    # Single plates belong to the plain reader's question.
    asked = [case for case in video_cases if case.kind in ("several", "ordering", "counting")]
    whole = scoring.families(answers(asked, read, tokenizer, "oracle"))
    assert {name: each["score"] for name, each in whole.items()} == {"several": 1.0, "ordering": 1.0, "counting": 1.0}


def test_overlays_show_the_plate_in_a_real_frame(clips):
    frame = clips[0][3]
    drawn = video_families.overlay(frame, 482)
    assert drawn.shape == frame.shape
    np.testing.assert_array_equal(drawn[:16], frame[:16])
    assert (drawn[16:, 16:] != frame[16:, 16:]).mean() > 0.5


@pytest.mark.parametrize(
    ("metric", "references", "output", "score"),
    [
        ("share", ["123", "456"], "456 and 123", 1.0),
        ("share", ["123", "456"], "it is 1234, 456", 0.5),
        ("share", ["ABD", "EGH"], "ABD.", 0.5),
        ("sequence", ["123", "456"], "123, then 456", 1.0),
        ("sequence", ["123", "456"], "456, 123", 0.0),
        ("sequence", ["123", "456"], "123, 456, 789", 0.0),
        ("number", ["3"], "There are 3.", 1.0),
        ("number", ["3"], "3 or 4", 0.0),
    ],
)
def test_metrics(metric, references, output, score):
    record = {"metric": metric, "answers": references, "answer": references[0], "output": output}
    assert scoring.score(record) == score


def test_bad_settings_are_named(tokenizer, text_haystack, video_haystack, plates, vocabulary):
    with pytest.raises(ValueError, match="no family 'riddles'"):
        text_families.build_cases(["riddles"], [500], 1, 0, tokenizer, text_haystack)
    with pytest.raises(ValueError, match="needles, question and answer alone take"):
        text_families.build_cases(["multi_query"], [40], 1, 0, tokenizer, text_haystack)
    footage = Footage(video_haystack, plates)
    with pytest.raises(ValueError, match="overlay needs"):
        video_families.build_cases(["overlay"], [300], 1, 0, tokenizer, footage, vocabulary=vocabulary)
    assert spell(7) == "007"
