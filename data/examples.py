"""Examples as ordered spans of text, image and video: templates, and spans -> tokens.

An example becomes BOS, then its spans in order. Text is encoded as it stands. An image or a video is `<vision>`, the
ids of its frames (`data.vocabulary`), `</vision>`; the two markers are text (arXiv 2402.08268, section 4). EOS follows
every run of learned spans, as its last learned token: the end of a document or of an answer, never inside a field.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from data.text import VISION_END, VISION_START, TextTokenizer
from data.video import Frames, read_frames, read_image
from data.vocabulary import Vocabulary

KINDS = ("text", "image", "video")
SYSTEM = "You are a helpful assistant."

EncodeFrames = Callable[[NDArray[np.uint8]], ArrayLike]


@dataclass(frozen=True, eq=False)
class Span:
    """One piece of an example: text, or an image or video given by exactly one of path, content, pixels and codes.

    kind: "text", "image" or "video". learn: whether the model is trained to produce it.
    text: for kind "text". path: a file to read; content: the bytes of an image file; pixels: uint8 [T, H, W, 3];
    codes: int [T, n], already encoded.
    fps, num_frames, start, end: which frames of the file, as in `data.video.read_frames`.
    """

    kind: str
    learn: bool = False
    text: str | None = None
    path: str | None = None
    content: bytes | None = None
    pixels: NDArray[np.uint8] | None = None
    codes: NDArray[np.integer] | None = None
    fps: float | None = None
    num_frames: int | None = None
    start: float | None = None
    end: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind is {self.kind!r}; it must be one of {', '.join(KINDS)}")
        media = [name for name in ("path", "content", "pixels", "codes") if getattr(self, name) is not None]
        if self.kind == "text":
            if not self.text:
                raise ValueError("text is empty or missing; a text span needs it")
            if media:
                raise ValueError(f"{media[0]} is given in a text span; give it in a span of kind image or video")
        elif self.text is not None:
            raise ValueError(f"text is given in a span of kind {self.kind}; give it in a text span of its own")
        elif len(media) != 1:
            raise ValueError(
                f"a span of kind {self.kind} needs one of path, content, pixels and codes; it has {media or 'none'}"
            )
        elif self.content is not None and self.kind != "image":
            raise ValueError("content is given in a span of kind video; only images can be given as bytes")
        chosen = [name for name in ("fps", "num_frames", "start", "end") if getattr(self, name) is not None]
        if chosen and (self.kind != "video" or self.path is None):
            raise ValueError(f"{chosen[0]} is given, but only a video with a path has frames to choose")


@dataclass(frozen=True, eq=False)
class Example:
    """Ordered spans, at least one of them learned; id and source say where it came from."""

    spans: tuple[Span, ...]
    id: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "spans", tuple(self.spans))
        if not self.spans:
            raise ValueError("spans is empty; an example needs at least one")
        if not any(span.learn for span in self.spans):
            raise ValueError("spans has none with learn: true; nothing would be learned from this example")


@dataclass(frozen=True, eq=False)
class TokenizedExample:
    """tokens int32 [n]; learn bool [n]: token i is a learned target; id and source say where it came from.

    damage: what of its files could not be read; corpora list it.
    """

    tokens: NDArray[np.int32]
    learn: NDArray[np.bool_]
    id: str = ""
    source: str = ""
    damage: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", np.asarray(self.tokens, np.int32))
        object.__setattr__(self, "learn", np.asarray(self.learn, np.bool_))
        if self.tokens.ndim != 1 or self.learn.shape != self.tokens.shape:
            raise ValueError(
                f"example {self.id!r} has tokens of shape {self.tokens.shape} and learn of shape {self.learn.shape}; "
                "both must have the same single dimension"
            )

    def __len__(self) -> int:
        return self.tokens.size


@dataclass(frozen=True)
class BadExample:
    """An example that could not be made, and why; corpora count these instead of stopping at the first."""

    id: str
    source: str
    reason: str


# Templates. The prompts are those of the released model; `system` may be empty where tokens are dear.


def document(text: str, *, id: str = "", source: str = "") -> Example:
    """A plain document, all of it learned."""
    return Example((Span("text", learn=True, text=text),), id, source)


def chat(turns: Sequence[tuple[str, str]], *, system: str = SYSTEM, id: str = "", source: str = "") -> Example:
    """Turns of (question, answer), the answers learned: `{system} USER: {question} ASSISTANT:` {answer} ..."""
    spans: list[Span] = []
    for number, (question, answer) in enumerate(turns):
        opening = f"{system} USER:" if system and number == 0 else "USER:"
        spans.append(Span("text", text=f"{opening} {question} ASSISTANT:"))
        spans.append(Span("text", learn=True, text=answer))
    return Example(tuple(spans), id, source)


def question(
    media: Span, question: str, answer: str, *, system: str = SYSTEM, id: str = "", source: str = ""
) -> Example:
    """A question about an image or video: `{system} USER: {question}`, line break, the media, `ASSISTANT:` {answer}."""
    opening = f"{system} USER:" if system else "USER:"
    spans = (
        Span("text", text=f"{opening} {question}\n"),
        media,
        Span("text", text="ASSISTANT:"),
        Span("text", learn=True, text=answer),
    )
    return Example(spans, id, source)


def to_text(media: Span, caption: str, *, system: str = SYSTEM, id: str = "", source: str = "") -> Example:
    """image->text and video->text: the media, then its caption, learned."""
    return question(media, f"Describe the {media.kind}.", caption, system=system, id=id, source=source)


def from_text(caption: str, media: Span, *, system: str = SYSTEM, id: str = "", source: str = "") -> Example:
    """text->image and text->video: `USER: Generate an image of {caption} ASSISTANT:`, then the media, learned."""
    return Example((Span("text", text=generation_prompt(caption, media.kind, system)), media), id, source)


def alone(media: Span, *, id: str = "", source: str = "") -> Example:
    """An image or video without words, learned: what follows `<vision>` where nothing was asked for."""
    return Example((media,), id, source)


def document_questions(
    text: str, pairs: Sequence[tuple[str, str]], *, system: str = SYSTEM, id: str = "", source: str = ""
) -> Example:
    """A document, then questions about it and their learned answers, all at its end: `USER: {question} ASSISTANT:`."""
    spans = [Span("text", text=f"{system} {text}" if system else text)]
    for asked, answer in pairs:
        spans.append(Span("text", text=f" USER: {asked} ASSISTANT:"))
        spans.append(Span("text", learn=True, text=answer))
    return Example(tuple(spans), id, source)


def generation_prompt(caption: str, kind: str, system: str = SYSTEM) -> str:
    """What stands before `<vision>` when an image or a video is asked for."""
    opening = f"{system} USER:" if system else "USER:"
    article = "an" if kind == "image" else "a"
    return f"{opening} Generate {article} {kind} of {caption} ASSISTANT:"


def tokenize(
    example: Example,
    tokenizer: TextTokenizer,
    vocabulary: Vocabulary,
    encode_frames: EncodeFrames | None = None,
    *,
    frame_size: int | None = None,
    fps: float = 1.0,
) -> TokenizedExample:
    """Reads, encodes and joins the spans of an example.

    encode_frames: uint8 [T, H, W, 3] -> int codes [T, n] (or [T, h, w]); needed where a span is not text.
    frame_size: frames read from files are scaled and cropped to frame_size x frame_size.
    fps: for videos that say neither fps nor num_frames.
    Media that are learned leave `<vision>` to the prompt; their ids and `</vision>` are learned.

    VideoError names a file that cannot be read; ValueError where tokenizer, vocabulary and encoder do not fit.
    """
    check_fit(tokenizer, vocabulary)
    pieces = [
        (
            vocabulary.vision_tokens(_codes(piece, encode_frames, frame_size, fps))
            if isinstance(piece, Span)
            else piece,
            learn,
        )
        for piece, learn in lay_out(example, tokenizer)
    ]
    return joined(pieces, example.id, example.source)


def check_fit(tokenizer: TextTokenizer, vocabulary: Vocabulary) -> None:
    """ValueError where the tokenizer has ids that the vocabulary gives to something else."""
    if tokenizer.size > vocabulary.text_size:
        raise ValueError(
            f"the text tokenizer has {tokenizer.size} pieces, vocabulary.text_size is {vocabulary.text_size}; "
            "they must be made for each other"
        )


def lay_out(example: Example, tokenizer: TextTokenizer) -> list[tuple[NDArray[np.int32] | Span, bool]]:
    """The pieces of an example in order, and whether each is learned: ids of text and markers, and spans of media."""
    pieces: list[tuple[NDArray[np.int32] | Span, bool]] = []

    def add(ids: ArrayLike, learned: bool) -> None:
        pieces.append((np.asarray(ids, np.int32), learned))

    add([tokenizer.bos_id], False)
    for position, span in enumerate(example.spans):
        if span.text is not None:
            add(tokenizer.encode(span.text), span.learn)
        else:
            add(tokenizer.encode(VISION_START), False)
            pieces.append((span, span.learn))
            add(tokenizer.encode(VISION_END), span.learn)
        run_ends = position + 1 == len(example.spans) or not example.spans[position + 1].learn
        if span.learn and run_ends:
            add([tokenizer.eos_id], True)
    return pieces


def joined(
    pieces: Sequence[tuple[NDArray[np.int32], bool]], id: str, source: str, damage: str = ""
) -> TokenizedExample:
    """Pieces of ids as one example."""
    learn = np.repeat([learned for _, learned in pieces], [ids.size for ids, _ in pieces])
    return TokenizedExample(np.concatenate([ids for ids, _ in pieces]), learn, id, source, damage)


def untokenize(
    tokens: ArrayLike, tokenizer: TextTokenizer, vocabulary: Vocabulary
) -> list[str | NDArray[np.int32]]:  # fmt: skip
    """Tokens as pieces to look at, in order: text as strings, clips as codes [T, n] (a cut clip: what is whole of it).

    BOS, EOS and the markers around media leave no trace in the text.
    """
    ids = np.asarray(tokens, np.int64)
    vision = vocabulary.is_vision(ids)
    (changes,) = np.nonzero(np.diff(vision))
    pieces: list[str | NDArray[np.int32]] = []
    for run in np.split(ids, changes + 1):
        if run.size == 0:
            continue
        if vocabulary.is_vision(run[0]):
            pieces.append(_whole_frames(run, vocabulary))
        elif text := tokenizer.decode(run).replace(VISION_START, "").replace(VISION_END, "").strip():
            pieces.append(text)
    return pieces


def _whole_frames(run: NDArray[np.int64], vocabulary: Vocabulary) -> NDArray[np.int32]:
    (ends,) = np.nonzero((run == vocabulary.eof) | (run == vocabulary.eov))
    if ends.size == 0:
        return np.zeros((0, 0), np.int32)
    whole = run[: ends[-1] + 1].copy()
    whole[-1] = vocabulary.eov
    return vocabulary.split_frames(whole)


def _codes(span: Span, encode_frames: EncodeFrames | None, frame_size: int | None, fps: float) -> NDArray[np.integer]:
    if span.codes is not None:
        return np.asarray(span.codes)
    if encode_frames is None:
        raise ValueError(f"a span of kind {span.kind} needs a vision tokenizer, and none was given")
    return checked_codes(encode_frames, frames_of(span, frame_size, fps).pixels)


def frames_of(span: Span, frame_size: int | None, fps: float) -> Frames:
    """The frames of a span of media, read where they are not given; `fps` where it does not say."""
    if span.pixels is not None:
        return Frames(span.pixels, np.arange(len(span.pixels), dtype=np.float64))
    if span.content is not None:
        return Frames(read_image(span.content, size=frame_size)[None], np.zeros(1))
    assert span.path is not None
    chosen = span.fps is not None or span.num_frames is not None or span.kind == "image"
    return read_frames(
        span.path,
        fps=span.fps if chosen else fps,
        num_frames=1 if span.kind == "image" else span.num_frames,
        size=frame_size,
        start=span.start,
        end=span.end,
    )


def checked_codes(encode_frames: EncodeFrames, pixels: NDArray[np.uint8]) -> NDArray[np.integer]:
    """Codes int [T, n] of pixels [T, H, W, 3]; ValueError where the encoder gives anything else."""
    codes = np.asarray(encode_frames(pixels))
    if codes.ndim < 2 or codes.shape[0] != pixels.shape[0]:
        raise ValueError(
            f"encode_frames made codes of shape {codes.shape} from {pixels.shape[0]} frames; it must give [frames, n]"
        )
    return codes.reshape(codes.shape[0], -1)
