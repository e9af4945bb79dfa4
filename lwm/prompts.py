"""What is put to a model outside of training, in the very templates it was trained with (`data.examples`)."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np

from data.examples import SYSTEM, Example, Span, chat, generation_prompt, question, tokenize
from data.text import VISION_START, TextTokenizer
from data.video import FrameStream, Sampling, read_frames
from data.vocabulary import Vocabulary
from lwm.vision_tokenizer import VisionTokenizer

_FRAMES_AT_ONCE = 64
ORDERS = ("question-first", "media-first")


def check_order(order: str) -> None:
    """ValueError for an order of question and media that there is not."""
    if order not in ORDERS:
        raise ValueError(f"order is {order!r}; choose one of {', '.join(ORDERS)}")


def look(
    path: str | Path,
    vision: VisionTokenizer,
    *,
    image: bool = False,
    num_frames: int | None = None,
    fps: float = 1.0,
    max_tokens: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Span:
    """An image, or frames of a video, as codes: `num_frames`, or else `fps` a second. VideoError names the file.

    Frames are encoded while the file is read, so an hour of video takes no more memory than a minute.
    max_tokens: ValueError, as soon as it shows, where the frames take as many tokens or more. progress: gets the number
    of frames so far.
    """
    size, frame_tokens = vision.config.resolution, vision.codes_per_frame + 1
    if image or num_frames is not None:
        _check_room(path, 1 if image else num_frames or 1, frame_tokens, max_tokens, "")
        pixels = read_frames(path, num_frames=1 if image else num_frames, size=size).pixels
        return Span("image" if image else "video", codes=vision.encode(pixels))
    parts: list[np.ndarray] = []
    batch: list[np.ndarray] = []
    count = 0
    for picture, _ in FrameStream(path, Sampling(fps=fps, size=size)):
        count += 1
        _check_room(path, count, frame_tokens, max_tokens, " or more")
        batch.append(picture)
        if len(batch) == _FRAMES_AT_ONCE:
            parts.append(vision.encode(np.stack(batch)))
            batch = []
            if progress:
                progress(count)
    if batch:
        parts.append(vision.encode(np.stack(batch)))
    if progress:
        progress(count)
    return Span("video", codes=np.concatenate(parts))


def _check_room(path: str | Path, num_frames: int, frame_tokens: int, max_tokens: int | None, more: str) -> None:
    if max_tokens is not None and num_frames * frame_tokens >= max_tokens:
        most = (max_tokens - 1) // frame_tokens
        raise ValueError(
            f"{path}: {num_frames}{more} frames of {frame_tokens} tokens take {num_frames * frame_tokens}{more}, but "
            f"the model's context is {max_tokens}; give --frames {most} at most, a lower --fps, or more --max-length"
        )


class Talk(Protocol):
    """Questions about one thing, put so that as much as possible of each prompt is the beginning of the next."""

    def prompt(self, asked: str) -> np.ndarray:
        """int32 [n]: all that comes before the answer to `asked`."""
        ...

    def answered(self, ids: list[int]) -> None:
        """Tells what the answer was."""
        ...


class TextTalk:
    """Questions about a document, each for itself."""

    def __init__(self, document: str, tokenizer: TextTokenizer, *, system: str = SYSTEM):
        self.document, self.tokenizer, self.system = document, tokenizer, system

    def prompt(self, asked: str) -> np.ndarray:
        return ask_about_text(asked, self.tokenizer, document=self.document, system=self.system)

    def answered(self, ids: list[int]) -> None:
        """The next question does not depend on it."""


class MediaTalk:
    """Questions about media: each for itself after the media ("media-first"), or turns of a conversation after them."""

    def __init__(
        self,
        media: Span,
        tokenizer: TextTokenizer,
        vocabulary: Vocabulary,
        *,
        system: str = SYSTEM,
        order: str = "question-first",
    ):
        check_order(order)
        self.media, self.tokenizer, self.vocabulary, self.system, self.order = (
            media, tokenizer, vocabulary, system, order
        )  # fmt: skip
        self._so_far: np.ndarray | None = None

    def prompt(self, asked: str) -> np.ndarray:
        if self._so_far is None or self.order == "media-first":
            made = ask_about_media(
                self.media, asked, self.tokenizer, self.vocabulary, system=self.system, order=self.order
            )
        else:
            turn = chat([(asked, "?")], system="").spans[0].text
            made = np.concatenate([self._so_far, np.asarray(self.tokenizer.encode(f"{turn}"), np.int32)])
        self._so_far = made
        return made

    def answered(self, ids: list[int]) -> None:
        assert self._so_far is not None
        self._so_far = np.concatenate([self._so_far, np.asarray([*ids, self.tokenizer.eos_id], np.int32)])


class Writer:
    """Writes an answer as its ids come; what is written is never taken back."""

    def __init__(self, tokenizer: TextTokenizer, write: Callable[[str], object]):
        self._tokenizer, self._write = tokenizer, write
        self._ids: list[int] = []
        self._written = ""

    def add(self, ids: list[int]) -> None:
        self._ids += ids
        text = answer_text(self._ids, self._tokenizer)
        # A character of several pieces is not whole before its last one, and a space may be the answer's last.
        if text.startswith(self._written) and "\ufffd" not in text[len(self._written) :]:
            self._write(text[len(self._written) :])
            sys.stdout.flush()
            self._written = text

    def end(self) -> None:
        text = answer_text(self._ids, self._tokenizer)
        if text.startswith(self._written):
            self._write(text[len(self._written) :])
        self._write("\n")
        sys.stdout.flush()


def ask_about_media(
    media: Span,
    asked: str,
    tokenizer: TextTokenizer,
    vocabulary: Vocabulary,
    *,
    system: str = SYSTEM,
    order: str = "question-first",
) -> np.ndarray:
    """int32 [n]: BOS, the question and the media (see `look`), up to `ASSISTANT:`.

    order: "question-first" is `data.examples.question`; "media-first" puts the media before everything else, as needle
    questions do.
    """
    check_order(order)
    example = question(media, asked, "?", system=system)
    if order == "media-first":
        turn = chat([(asked, "?")], system=system).spans
        example = Example((media, Span("text", text=f"\n{turn[0].text}"), turn[1]))
    made = tokenize(example, tokenizer, vocabulary)
    return made.tokens[: int(made.learn.argmax())]


def ask_about_text(asked: str, tokenizer: TextTokenizer, *, document: str = "", system: str = SYSTEM) -> np.ndarray:
    """int32 [n]: BOS, the document (if any) and the question after it, up to `ASSISTANT:`."""
    turn = chat([(asked, "?")], system=system).spans[0].text
    # Encoded apart, as in training: a tokenizer may write the start of a text differently from its middle.
    parts = [document.rstrip(), f"\n{turn}"] if document else [f"{turn}"]
    return np.asarray([tokenizer.bos_id, *(i for part in parts for i in tokenizer.encode(part))], np.int32)


def generation(caption: str, kind: str, tokenizer: TextTokenizer, *, system: str = SYSTEM) -> np.ndarray:
    """int32 [n]: BOS and the request for an image or a video of `caption`, up to and with `<vision>`."""
    ids = tokenizer.encode(generation_prompt(caption, kind, system)) + tokenizer.encode(VISION_START)
    return np.asarray([tokenizer.bos_id, *ids], np.int32)


def answer_text(ids: list[int], tokenizer: TextTokenizer) -> str:
    """Generated ids as text; ids that the tokenizer has no piece for are left out."""
    return tokenizer.decode([i for i in ids if i < tokenizer.size]).strip()


def read_document(path: Path) -> str:
    """A text file, whole; ValueError names the file when it is not UTF-8 or empty."""
    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text; convert it first") from None
    if not content.strip():
        raise ValueError(f"{path} is empty; there is nothing to ask about")
    return content
