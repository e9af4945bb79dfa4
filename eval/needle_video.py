"""A needle in video: one frame is a plate with a number, asked for after the video.

The plate, its place and the prompt come from data.synthetic, as in training; the numbers are the ones that training
never shows. Every prompt is read back: the needle was really sampled, at the frame the case names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from data import synthetic
from data.synthetic import PLATE_QUESTION
from data.text import TextTokenizer
from data.vocabulary import Vocabulary
from eval import pages
from eval.dummies import Reader
from eval.grid import Spec, specs
from eval.haystack import VideoHaystack, blind_prompt, question_tokens
from eval.plots import Picture
from eval.protocol import Case, Placed

Plates = Mapping[int, np.ndarray]


def encode_plates(
    encode_frames: Callable[[np.ndarray], ArrayLike], size: int, numbers: Sequence[int] | None = None
) -> dict[int, np.ndarray]:
    """Codes int32 [n] of each number's plate; the numbers that training never shows when None.

    encode_frames: uint8 [T, size, size, 3] -> int codes [T, n] or [T, h, w].
    """
    numbers = sorted(synthetic.held_out_numbers()) if numbers is None else numbers
    codes = np.asarray(encode_frames(np.stack([synthetic.needle_frame(number, size) for number in numbers])))
    return dict(zip(numbers, codes.reshape(len(numbers), -1).astype(np.int32), strict=True))


def num_ambiguous(plates: Plates) -> int:
    """How many plates have the same codes as another one: a vision tokenizer that bad leaves no model a chance."""
    counts: dict[bytes, int] = {}
    for codes in plates.values():
        counts[codes.tobytes()] = counts.get(codes.tobytes(), 0) + 1
    return sum(count for count in counts.values() if count > 1)


def build_cases(
    lengths: Sequence[int],
    depths: Sequence[float],
    rounds: int,
    seed: int,
    tokenizer: TextTokenizer,
    haystack: VideoHaystack,
    *,
    vocabulary: Vocabulary,
    plates: Plates,
    control_rounds: int | None = None,
) -> list[Case]:
    """All cases of the grid (see `eval.grid.specs`), every one with a number that training never shows.

    lengths: tokens of video, question and answer together; a prompt is shorter than that by its answer and by less than
    one frame. depths: 0 (first frame) to 1 (last). plates: codes of every number's plate (see `encode_plates`).
    """
    read = reader(tokenizer, vocabulary, plates)
    grid = specs(lengths, depths, rounds, seed, control_rounds=control_rounds)
    return [_build(spec, tokenizer, haystack, vocabulary, plates, read) for spec in grid]


def _build(
    spec: Spec, tokenizer: TextTokenizer, haystack: VideoHaystack, vocabulary: Vocabulary, plates: Plates, read: Reader
) -> Case:
    rng = spec.rng()
    number = synthetic.draw_number(rng, held_out=True)
    if spec.kind == "blind":
        prompt = blind_prompt(PLATE_QUESTION, tokenizer)
        return Case("video", "blind", prompt.size, None, spec.round, prompt, synthetic.spell(number))
    present = spec.kind != "no_needle"
    num_frames = synthetic.frames_that_fit(spec.length, haystack.codes_per_frame, tokenizer, vocabulary)
    sources = haystack.take(num_frames, rng)
    codes = haystack.codes(sources)
    placed = synthetic.video_needle(
        codes, plates[number], number, spec.depth or 0.0, tokenizer, vocabulary, present=present
    )
    asked = question_tokens(PLATE_QUESTION, tokenizer)
    assert np.array_equal(placed.tokens[-asked.size :], asked), "the prompt does not end in its question"
    needles: tuple[Placed, ...] = ()
    if present:
        assert placed.frame is not None
        assert placed.position is not None
        sources[placed.frame] = -1
        end = placed.position + haystack.codes_per_frame + 1
        depth = placed.frame / max(num_frames - 1, 1)
        needles = (Placed(placed.answer, None, depth, placed.position, end, placed.frame),)
        shown = placed.tokens[placed.position : end - 1] - vocabulary.text_size
        assert np.array_equal(shown, plates[number]), "the plate is not where the placement says"
    elif read(placed.tokens, placed.tokens.size) is not None:
        raise ValueError("the haystack's own frames have the codes of a number plate; give it clips without plates")
    return Case(
        "video",
        spec.kind,
        spec.length,
        spec.depth,
        spec.round,
        placed.tokens,
        placed.answer,
        needles,
        num_frames,
        frame_sources=sources,
    )


def tokens_of_frames(num_frames: int, codes_per_frame: int, tokenizer: TextTokenizer, vocabulary: Vocabulary) -> int:
    """Tokens of a case of `num_frames` frames, with its question and answer: the least length that holds them."""
    codes = np.zeros((num_frames, codes_per_frame), np.int32)
    return synthetic.video_needle(codes, codes[0], 0, 0.0, tokenizer, vocabulary).length


def frame_codes(prompt: np.ndarray, vocabulary: Vocabulary, codes_per_frame: int) -> np.ndarray:
    """int32 [T, n]: the codes of the prompt's whole frames, wherever it is cut off."""
    ids = prompt[vocabulary.is_vision(prompt)]
    whole = ids[: ids.size // (codes_per_frame + 1) * (codes_per_frame + 1)].reshape(-1, codes_per_frame + 1)
    return whole[:, :codes_per_frame] - np.int32(vocabulary.text_size)


def reader(tokenizer: TextTokenizer, vocabulary: Vocabulary, plates: Plates) -> Reader:
    """Reads the plate's number from a prompt's first tokens, as a perfect model would."""
    numbers = {codes.astype(np.int32).tobytes(): synthetic.spell(number) for number, codes in plates.items()}
    width = next(iter(plates.values())).size
    asked = question_tokens(PLATE_QUESTION, tokenizer)

    def read(prompt: np.ndarray, limit: int) -> str | None:
        if not np.array_equal(prompt[-asked.size :], asked):
            return None
        frames = (numbers.get(codes.tobytes()) for codes in frame_codes(prompt[:limit], vocabulary, width))
        return next((number for number in frames if number is not None), None)

    return read


def case_frames(case: Case, clips: Sequence[np.ndarray]) -> np.ndarray:
    """The case's video as pixels, uint8 [T, H, W, 3]; clips: the pixels of the haystack's clips, in its order."""
    assert case.frame_sources is not None, "a case without a video has no frames"
    size = clips[0].shape[1]
    plate = synthetic.needle_frame(int(case.answer), size)
    return np.stack([plate if clip < 0 else clips[clip][frame] for clip, frame in case.frame_sources])


def picture(path: str | Path, case: Case, clips: Sequence[np.ndarray], *, output: str | None = None) -> Picture:
    """A contact sheet of the case's video with its needle marked, the question and, if given, the model's output."""
    lines = [f"{PLATE_QUESTION}  {case.num_frames} frames, {len(case.prompt):,} tokens"]
    if output is not None:
        lines.append(f"The model: “{output.strip()}”")
    marks = {needle.frame: f"Needle {needle.number}" for needle in case.needles if needle.frame is not None}
    return pages.contact_sheet(path, case_frames(case, clips), marks, title="A needle in a video", lines=lines)
