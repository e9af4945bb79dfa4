"""What is put to a model outside of training, in the very templates it was trained with (`data.examples`)."""

from pathlib import Path

import numpy as np

from data.examples import SYSTEM, Example, Span, chat, generation_prompt, question, tokenize
from data.text import VISION_START, TextTokenizer
from data.video import read_frames
from data.vocabulary import Vocabulary
from lwm.vision_tokenizer import VisionTokenizer

ORDERS = ("question-first", "media-first")


def look(
    path: str | Path, vision: VisionTokenizer, *, image: bool = False, num_frames: int | None = None, fps: float = 1.0
) -> Span:
    """An image, or frames of a video, as codes: `num_frames`, or else `fps` a second. VideoError names the file."""
    frames = read_frames(
        path,
        fps=None if image or num_frames else fps,
        num_frames=1 if image else num_frames,
        size=vision.config.resolution,
    )
    return Span("image" if image else "video", codes=vision.encode(frames.pixels))


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
    if order not in ORDERS:
        raise ValueError(f"order is {order!r}; choose one of {', '.join(ORDERS)}")
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
