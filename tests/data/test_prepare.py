"""Records prepared and encoded: the rules for what is too long, sharing, bad files, and processes."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from data.examples import BadExample, Span, chat, document, from_text, to_text, tokenize, untokenize
from data.manifest import Record
from data.prepare import Encoder, Limits, Preparer, Worker, prepared
from data.text import train_tokenizer
from data.vocabulary import Vocabulary

_spec = importlib.util.spec_from_file_location("clips", Path(__file__).with_name("clips.py"))
clips = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(clips)

WORDS = " ".join(f"word{number}" for number in range(400))
VOCABULARY = Vocabulary(300, 256, 258)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return train_tokenizer([WORDS + "Describe the video of a"], tmp_path_factory.mktemp("t") / "t.model", size=140)


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """10 s, a frame a second, each saying which it is."""
    return str(clips.write_clip(tmp_path_factory.mktemp("c") / "a.mkv", 40, codec="ffv1", fps=4))


def frame_numbers(pixels):
    return np.array([[clips.number_of(picture)] * 4 for picture in pixels])


def items(examples, tokenizer, **limits):
    preparer = Preparer(tokenizer, Limits(**limits), codes_per_frame=4)
    return [item for _, item in Encoder(VOCABULARY, frame_numbers)([(0, preparer(examples))])]


def frames_in(item, tokenizer):
    return [
        piece[:, 0].tolist() for piece in untokenize(item.tokens, tokenizer, VOCABULARY) if not isinstance(piece, str)
    ]


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"fps": 1}, [[0, 4, 8, 12, 16, 20, 24, 28, 32, 36]]),
        ({"fps": 1, "max_frames": 4, "long_video": "first"}, [[0, 4, 8, 12]]),
        ({"fps": 1, "max_frames": 4, "long_video": "spread"}, [[5, 15, 25, 35]]),
        ({"fps": 1, "max_frames": 4, "long_video": "split"}, [[0, 4, 8, 12], [16, 20, 24, 28], [32, 36]]),
        ({"fps": 1, "max_frames": 10}, [[0, 4, 8, 12, 16, 20, 24, 28, 32, 36]]),
        ({"fps": 0.5, "max_frames": 5}, [[0, 8, 16, 24, 32]]),
    ],
)
def test_long_videos_by_the_rule(clip, tokenizer, limits, expected):
    made = items([to_text(Span("video", path=clip), "a word1", id="e")], tokenizer, **limits)
    assert [frames_in(item, tokenizer) for item in made] == [[frames] for frames in expected]
    if len(made) > 1:
        assert [item.id for item in made] == ["e#1", "e#2", "e#3"]
    texts = [
        [piece for piece in untokenize(item.tokens, tokenizer, VOCABULARY) if isinstance(piece, str)] for item in made
    ]
    assert all(words == texts[0] for words in texts)


def test_videos_leave_out_frames_to_fit_in_max_tokens(clip, tokenizer):
    example = to_text(Span("video", path=clip), "a word1")
    (whole,) = items([example], tokenizer)
    num_words = len(whole) - 50
    (item,) = items([example], tokenizer, max_tokens=num_words + 29)
    assert len(item) == num_words + 25
    assert frames_in(item, tokenizer) == [[4, 12, 20, 28, 36]]


def test_long_documents_are_split_so_that_each_token_is_learned_once(tokenizer):
    (whole,) = items([document(WORDS, id="d")], tokenizer)
    parts = items([document(WORDS, id="d")], tokenizer, max_tokens=100)
    assert len(parts) > 5
    assert max(map(len, parts)) == 100
    np.testing.assert_array_equal(np.concatenate([part.tokens[1:] for part in parts]), whole.tokens[1:])
    np.testing.assert_array_equal(np.concatenate([part.learn[1:] for part in parts]), whole.learn[1:])
    assert all(a.tokens[-1] == b.tokens[0] for a, b in zip(parts, parts[1:], strict=False))
    (cropped,) = items([document(WORDS)], tokenizer, max_tokens=100, long_text="crop")
    np.testing.assert_array_equal(cropped.tokens, whole.tokens[:100])
    # An answer must not be torn from its question: rows are cut by packing, which keeps positions and weights.
    (talk,) = items([chat([(WORDS, "word1")])], tokenizer, max_tokens=100)
    assert len(talk) > 100


def test_what_is_prepared_and_encoded_is_what_tokenize_gives(clip, tokenizer):
    examples = [
        to_text(Span("video", path=clip, num_frames=3), "word1", id="a", source="s"),
        from_text("word2", Span("video", True, path=clip, num_frames=3)),
        chat([("word1", "word2")]),
        to_text(Span("image", pixels=clips.numbered_frame(9)[None]), "word3"),
        from_text("word2", Span("video", True, codes=np.full((2, 4), 7))),
    ]
    calls = []

    def encode(pixels):
        calls.append(len(pixels))
        return frame_numbers(pixels)

    record = Preparer(tokenizer)(examples)
    assert [len(each) for each in record.clips] == [3, 1, 2]  # the two of one clip share its frames
    encoder = Encoder(VOCABULARY, encode)
    made = [item for _, item in encoder([(0, record)])]
    for item, example in zip(made, examples, strict=True):
        expected = tokenize(example, tokenizer, VOCABULARY, frame_numbers)
        np.testing.assert_array_equal(item.tokens, expected.tokens)
        np.testing.assert_array_equal(item.learn, expected.learn)
        assert (item.id, item.source) == (expected.id, expected.source)
    assert calls == [4]
    assert (encoder.frames, encoder.tokens) == (4, sum(map(len, made)))


def test_frames_of_several_records_are_encoded_together(clip, tokenizer):
    sizes = []

    def encode(pixels):
        sizes.append(len(pixels))
        return frame_numbers(pixels)

    record = Preparer(tokenizer)([to_text(Span("video", path=clip, num_frames=3), "word1")])
    done = []
    found = list(Encoder(VOCABULARY, encode, frames_at_once=6)([(n, record) for n in range(5)], done.append))
    assert [number for number, _ in found] == [0, 1, 2, 3, 4] == done
    assert sizes == [6, 6, 3]


def test_processes_give_the_same_and_bad_files_are_named(clip, tokenizer, tmp_path):
    (tmp_path / "b.mp4").write_text("no")
    (tmp_path / "empty.txt").write_text(" ")
    lines = [
        {"template": ["video->text", "text->video"], "path": clip, "caption": "word1"},
        {"template": "video->text", "path": "b.mp4", "caption": "c"},
        *({"template": "document", "text": f"word{number}"} for number in range(70)),
        {"template": "document", "path": "empty.txt"},
        {"template": "video", "path": clip},
    ]
    records = [Record(line, f"line {k}", str(tmp_path), f"r{k}", "m") for k, line in enumerate(lines)]
    worker = Worker(Preparer(tokenizer, codes_per_frame=4))
    encoded = [
        list(Encoder(VOCABULARY, frame_numbers)(prepared(records, 100, worker, processes))) for processes in (0, 2)
    ]
    for (number, here), (other, there) in zip(*encoded, strict=True):
        assert number == other
        assert here.id == there.id
        if isinstance(here, BadExample):
            assert here == there
        else:
            np.testing.assert_array_equal(here.tokens, there.tokens)
    bad = {number: item.reason for number, item in encoded[0] if isinstance(item, BadExample)}
    assert set(bad) == {101, 172}
    assert "b.mp4: not a video" in bad[101]
    assert "empty.txt is empty" in bad[172]
    assert [item.id for number, item in encoded[0] if number == 100] == ["r0 video->text", "r0 text->video"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"fps": 0}, "fps is 0"),
        ({"max_frames": 0}, "max_frames is 0"),
        ({"max_tokens": 1}, "max_tokens is 1; it must be at least 2"),
        ({"long_video": "middle"}, "long_video is 'middle'; it must be one of spread, first, split"),
        ({"long_text": "drop"}, "long_text is 'drop'; it must be one of split, crop"),
    ],
)
def test_impossible_limits_name_the_field(fields, message):
    with pytest.raises(ValueError, match=message):
        Limits(**fields)


def test_pixels_without_an_encoder_are_refused(tokenizer):
    record = Preparer(tokenizer)([to_text(Span("image", pixels=clips.numbered_frame(9)[None]), "word3")])
    with pytest.raises(ValueError, match="need a vision tokenizer"):
        list(Encoder(VOCABULARY)([(0, record)]))
