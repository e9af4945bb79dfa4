"""Needles in video beyond the single plate (after VNBench, arXiv 2406.09367): several of them, in order, counted,
inserted as a clip, drawn onto a real frame.

several: all plates' numbers. ordering: all of them in the order shown. counting: how many plates. clip: one plate for
some frames on end. overlay: one plate, small, in the corner of a frame of the haystack.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from data.examples import Span
from data.synthetic import PLATE_QUESTION, draw_number, needle_frame, say, spell
from data.text import TextTokenizer
from data.vocabulary import Vocabulary
from eval.dummies import Reader
from eval.grid import Spec, family_specs
from eval.haystack import VideoHaystack
from eval.needle_video import Plates, frame_codes
from eval.protocol import VIDEO_FAMILIES, Case, Kind, Metric, Placed
from lwm.prompts import ask_about_media

QUESTIONS = {
    "several": "What numbers are on the plates?",
    "ordering": "What numbers are on the plates, in order?",
    "counting": "How many plates are there?",
    "clip": PLATE_QUESTION,
    "overlay": PLATE_QUESTION,
}
_METRICS: dict[str, Metric] = {"several": "share", "ordering": "sequence"}
_CLIP_FRAMES = 3


@dataclass(frozen=True, eq=False)
class Footage:
    """What needles are made of. plates: codes of every number's plate; pixels: those of the haystack's clips, for
    `overlay`; encode: uint8 [T, H, W, 3] -> codes [T, n], for the same.
    """

    haystack: VideoHaystack
    plates: Plates
    pixels: Sequence[np.ndarray] = ()
    encode: Callable[[np.ndarray], np.ndarray] | None = None


def build_cases(
    families: Sequence[Kind],
    lengths: Sequence[int],
    rounds: int,
    seed: int,
    tokenizer: TextTokenizer,
    footage: Footage,
    *,
    vocabulary: Vocabulary,
    num_needles: int = 4,
) -> list[Case]:
    """All cases of the families; `lengths` as in `eval.needle_video.build_cases`. num_needles: plates, at most."""
    if unknown := [name for name in families if name not in VIDEO_FAMILIES]:
        raise ValueError(f"there is no family {unknown[0]!r}; choose of {', '.join(VIDEO_FAMILIES)}")
    if not 2 <= num_needles <= 9:
        raise ValueError(f"num_needles is {num_needles}; it must lie between 2 and 9")
    specs = family_specs(families, lengths, rounds, seed)
    return [_build(spec, tokenizer, footage, vocabulary, num_needles) for spec in specs]


def _build(spec: Spec, tokenizer: TextTokenizer, footage: Footage, vocabulary: Vocabulary, num_needles: int) -> Case:
    rng = spec.rng()
    count = {"clip": 1, "overlay": 1, "counting": int(rng.integers(1, num_needles + 1))}.get(spec.kind, num_needles)
    numbers: list[int] = []
    while len(numbers) < count:
        number = draw_number(rng, held_out=True)
        numbers += [] if number in numbers else [number]
    said = ", ".join(map(say, numbers))
    answer_size = len(tokenizer.encode(str(count) if spec.kind == "counting" else said)) + 1
    width = footage.haystack.codes_per_frame

    def prompt(codes: np.ndarray) -> np.ndarray:
        media = Span("video", codes=codes)
        return ask_about_media(media, QUESTIONS[spec.kind], tokenizer, vocabulary, system="", order="media-first")

    one = len(prompt(np.zeros((1, width), np.int32))) + answer_size
    num_frames = (spec.length - one) // (width + 1) + 1
    needed = _CLIP_FRAMES if spec.kind == "clip" else count
    if num_frames < needed:
        raise ValueError(f"length is {spec.length}; {needed} frames with question and answer take more")
    sources = footage.haystack.take(num_frames, rng)
    codes = footage.haystack.codes(sources)
    if spec.kind == "clip":
        first = int(rng.integers(num_frames - _CLIP_FRAMES + 1))
        places = {first + offset: numbers[0] for offset in range(_CLIP_FRAMES)}
    else:
        chosen = sorted(rng.choice(num_frames, count, replace=False).tolist())
        places = dict(zip(chosen, numbers, strict=True))
    for frame, number in places.items():
        codes[frame] = footage.plates[number] if spec.kind != "overlay" else _overlay(footage, sources[frame], number)
        sources[frame] = -1
    tokens = prompt(codes)
    opening = int(vocabulary.is_vision(tokens).argmax())
    needles = []
    for frame, number in places.items():
        start = opening + frame * (width + 1)
        assert np.array_equal(tokens[start : start + width] - vocabulary.text_size, codes[frame]), "it is not there"
        depth = frame / max(num_frames - 1, 1)
        needles.append(Placed(spell(number), None, depth, start, start + width + 1, frame))
    references = (str(count),) if spec.kind == "counting" else tuple(map(spell, numbers))
    return Case(
        "video",
        spec.kind,
        spec.length,
        None,
        spec.round,
        tokens,
        ", ".join(references),
        tuple(needles),
        num_frames,
        sources,
        references if spec.kind in _METRICS else (),
        _METRICS.get(spec.kind, "number"),
    )


def overlay(frame: np.ndarray, number: int) -> np.ndarray:
    """A frame uint8 [H, W, 3] with the number's plate over its lower right quarter."""
    size = min(frame.shape[:2])
    plate = Image.fromarray(needle_frame(number, max(32, size // 8 * 4))).resize((size // 2, size // 2))
    picture = Image.fromarray(frame)
    picture.paste(plate, (frame.shape[1] - size // 2, frame.shape[0] - size // 2))
    return np.asarray(picture)


def _overlay(footage: Footage, source: np.ndarray, number: int) -> np.ndarray:
    if not footage.pixels or footage.encode is None:
        raise ValueError("overlay needs the haystack's pixels and a vision tokenizer; leave it out of the families")
    clip, frame = source
    drawn = overlay(footage.pixels[clip][frame], number)
    return np.asarray(footage.encode(drawn[None])).reshape(-1).astype(np.int32)


def drawn_codes(cases: Sequence[Case], vocabulary: Vocabulary) -> dict[bytes, str]:
    """Codes of frames that needles were drawn onto -> their number: what a perfect model sees in them."""
    return {
        _codes_at(case, needle, vocabulary).tobytes(): needle.number
        for case in cases
        if case.kind == "overlay"
        for needle in case.needles
    }


def _codes_at(case: Case, needle: Placed, vocabulary: Vocabulary) -> np.ndarray:
    ids = case.prompt[needle.token_start : needle.token_end - 1]
    return (ids - vocabulary.text_size).astype(np.int32)


def reader(
    tokenizer: TextTokenizer, vocabulary: Vocabulary, plates: Plates, drawn: Mapping[bytes, str] | None = None
) -> Reader:
    """Reads what a question asks for from a prompt's first tokens, as a perfect model would. drawn: see above."""
    numbers = {codes.astype(np.int32).tobytes(): spell(number) for number, codes in plates.items()} | dict(drawn or {})
    width = next(iter(plates.values())).size

    def read(prompt: np.ndarray, limit: int) -> str | None:
        tail = prompt[-200:]
        question = " ".join(tokenizer.decode(tail[tail < tokenizer.size]).split()).rpartition("USER:")[2]
        kinds = ("ordering", "several", "counting", "clip")
        asked = next((kind for kind in kinds if QUESTIONS[kind] in question), None)
        if asked is None:
            return None
        frames = (numbers.get(codes.tobytes()) for codes in frame_codes(prompt[:limit], vocabulary, width))
        found = list(dict.fromkeys(number for number in frames if number is not None))
        if asked == "counting":
            return str(len(found))
        return ", ".join(found) if found else None

    return read
