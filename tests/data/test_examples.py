"""Spans to tokens: where BOS, EOS and the markers stand, what is learned, and the templates' words."""

import numpy as np
import pytest
from PIL import Image

from data.examples import (
    Example,
    Span,
    TokenizedExample,
    chat,
    document,
    from_text,
    question,
    to_text,
    tokenize,
    untokenize,
)
from data.text import train_tokenizer
from data.vocabulary import Vocabulary

SYSTEM = "You are a helpful assistant."


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return train_tokenizer(
        ["You are a helpful assistant. USER: Describe the video. ASSISTANT: the cat"] * 5,
        tmp_path_factory.mktemp("text") / "t.model",
        size=150,
    )


@pytest.fixture(scope="module")
def vocabulary(tokenizer):
    return Vocabulary(tokenizer.size, num_codes=256, vision_size=300)


def mean_codes(pixels):
    """A vision tokenizer of four codes a frame: the mean level of each quarter."""
    num_frames, height, width, _ = pixels.shape
    quarters = pixels.reshape(num_frames, 2, height // 2, 2, width // 2, 3)
    return quarters.mean(axis=(2, 4, 5)).astype(int).reshape(num_frames, 4)


CODES = np.array([[1, 2, 3], [4, 5, 6]])


def test_a_document_is_bos_text_eos_all_learned_but_bos(tokenizer, vocabulary):
    made = tokenize(document("the cat", id="d", source="s"), tokenizer, vocabulary)
    text = tokenizer.encode("the cat")
    assert made.tokens.tolist() == [tokenizer.bos_id, *text, tokenizer.eos_id]
    assert made.learn.tolist() == [False] + [True] * (len(text) + 1)
    assert (made.id, made.source) == ("d", "s")
    assert made.tokens.dtype == np.int32
    assert made.learn.dtype == np.bool_


def test_chat_ends_every_answer_with_eos(tokenizer, vocabulary):
    made = tokenize(chat([("a?", "b"), ("c?", "d")]), tokenizer, vocabulary)
    encode = tokenizer.encode
    fields = [
        (encode(f"{SYSTEM} USER: a? ASSISTANT:"), False),
        ([*encode("b"), tokenizer.eos_id], True),
        (encode("USER: c? ASSISTANT:"), False),
        ([*encode("d"), tokenizer.eos_id], True),
    ]
    assert made.tokens.tolist() == [tokenizer.bos_id] + [i for ids, _ in fields for i in ids]
    assert made.learn.tolist() == [False] + [learn for ids, learn in fields for _ in ids]
    assert (made.tokens == tokenizer.bos_id).sum() == 1


def test_a_video_question_has_the_released_models_shape(tokenizer, vocabulary):
    made = tokenize(question(Span("video", codes=CODES), "what?", "cat"), tokenizer, vocabulary)
    encode = tokenizer.encode
    t = tokenizer.size
    expected = [tokenizer.bos_id, *encode(f"{SYSTEM} USER: what?\n"), *encode("<vision>")]
    expected += [t + 1, t + 2, t + 3, t + 256, t + 4, t + 5, t + 6, t + 257]
    expected += [*encode("</vision>"), *encode("ASSISTANT:")]
    answer = [*encode("cat"), tokenizer.eos_id]
    assert made.tokens.tolist() == expected + answer
    assert made.learn.tolist() == [False] * len(expected) + [True] * len(answer)


def test_generation_learns_frames_and_the_closing_marker_but_not_the_opening_one(tokenizer, vocabulary):
    made = tokenize(from_text("a cat", Span("video", learn=True, codes=CODES)), tokenizer, vocabulary)
    prompt = [*tokenizer.encode(f"{SYSTEM} USER: Generate a video of a cat ASSISTANT:"), *tokenizer.encode("<vision>")]
    learned = [*vocabulary.vision_tokens(CODES), *tokenizer.encode("</vision>"), tokenizer.eos_id]
    assert made.tokens.tolist() == [tokenizer.bos_id, *prompt, *learned]
    assert made.learn.tolist() == [False] * (1 + len(prompt)) + [True] * len(learned)


def test_interleaved_spans_share_one_eos(tokenizer, vocabulary):
    spans = (Span("text", learn=True, text="the"), Span("image", learn=True, codes=CODES[:1]), Span("text", text="cat"))
    made = tokenize(Example(spans), tokenizer, vocabulary)
    assert (made.tokens == tokenizer.eos_id).sum() == 1
    assert made.tokens[made.learn][-1] == tokenizer.eos_id
    assert not made.learn[-1]


def test_templates_without_a_system_prompt(tokenizer, vocabulary):
    spans = to_text(Span("image", codes=CODES[:1]), "the cat", system="").spans
    assert spans[0].text == "USER: Describe the image.\n"
    assert from_text("x", Span("image", learn=True, codes=CODES[:1]), system="").spans[0].text == (
        "USER: Generate an image of x ASSISTANT:"
    )


def test_untokenize_shows_text_and_clips_in_order(tokenizer, vocabulary):
    made = tokenize(question(Span("video", codes=CODES), "what?", "cat", system=""), tokenizer, vocabulary)
    before, codes, after = untokenize(made.tokens, tokenizer, vocabulary)
    assert before == "USER: what?"
    np.testing.assert_array_equal(codes, CODES)
    assert after == "ASSISTANT: cat"
    (end,) = np.nonzero(made.tokens == vocabulary.eov)
    cut = untokenize(made.tokens[: end[0] - 1], tokenizer, vocabulary)
    np.testing.assert_array_equal(cut[1], CODES[:1])


@pytest.fixture
def picture(tmp_path):
    pixels = np.zeros((40, 60, 3), np.uint8)
    pixels[:20, :30], pixels[:20, 30:], pixels[20:, :30], pixels[20:, 30:] = 10, 60, 120, 240
    Image.fromarray(pixels).save(tmp_path / "a.png")
    return tmp_path / "a.png"


def test_files_are_read_at_the_frame_size_and_encoded(tokenizer, vocabulary, picture):
    shapes = []

    def encode(pixels):
        shapes.append((pixels.dtype, pixels.shape))
        return mean_codes(pixels).reshape(-1, 2, 2)

    made = tokenize(to_text(Span("image", path=str(picture)), "c"), tokenizer, vocabulary, encode, frame_size=20)
    assert shapes == [(np.uint8, (1, 20, 20, 3))]
    _, codes, _ = untokenize(made.tokens, tokenizer, vocabulary)
    assert np.abs(codes - [[10, 60, 120, 240]]).max() <= 10


def test_what_does_not_fit_together_is_refused(tokenizer, vocabulary, picture):
    example = to_text(Span("image", path=str(picture)), "c")
    with pytest.raises(ValueError, match="needs a vision tokenizer"):
        tokenize(example, tokenizer, vocabulary)
    with pytest.raises(ValueError, match=r"codes of shape \(4,\) from 1 frames"):
        tokenize(example, tokenizer, vocabulary, lambda pixels: mean_codes(pixels)[0])
    with pytest.raises(ValueError, match=r"text tokenizer has 150 pieces, vocabulary\.text_size is 100"):
        tokenize(document("a"), tokenizer, Vocabulary(100))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "sound"}, "kind is 'sound'; it must be one of text, image, video"),
        ({"kind": "text"}, "text is empty"),
        ({"kind": "text", "text": "a", "path": "b"}, "path is given in a text span"),
        ({"kind": "video"}, "needs one of path, content, pixels and codes; it has none"),
        ({"kind": "video", "path": "a", "codes": CODES}, r"it has \['path', 'codes'\]"),
        ({"kind": "image", "path": "a", "fps": 1.0}, "fps is given"),
        ({"kind": "video", "path": "a", "text": "b"}, "text is given in a span of kind video"),
    ],
)
def test_impossible_spans_name_the_field(fields, message):
    with pytest.raises(ValueError, match=message):
        Span(**fields)


def test_an_example_must_have_something_to_learn():
    with pytest.raises(ValueError, match="spans is empty"):
        Example(())
    with pytest.raises(ValueError, match="learn: true"):
        Example((Span("text", text="a"),))
    with pytest.raises(ValueError, match=r"'e' has tokens of shape \(2,\)"):
        TokenizedExample([1, 2], [True], "e")
