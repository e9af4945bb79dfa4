"""Examples made ready for the vision tokenizer: everything about them that needs no model, in any process.

Long videos and documents are fitted here, by rules that `Limits` states; what is too long in any other way stays whole,
and packing cuts it into rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.book import CHUNK_TOKENS, book_questions
from data.examples import (
    BadExample,
    EncodeFrames,
    Example,
    Span,
    TokenizedExample,
    checked_codes,
    frames_of,
    joined,
    lay_out,
)
from data.manifest import Record, make_examples
from data.pool import Crashed, ordered_map
from data.text import TextError, TextTokenizer
from data.video import Frames, VideoError, read_frames, seconds_of
from data.vocabulary import Vocabulary

LONG_VIDEO = ("spread", "first", "split")
LONG_TEXT = ("split", "crop")
Item = TokenizedExample | BadExample

_GROUP_RECORDS, _GROUP_CHARACTERS = 64, 1 << 18


@dataclass(frozen=True)
class Limits:
    """How much of a file becomes an example.

    fps: frames per second of videos that say neither fps nor num_frames.
    max_frames: frames of a video at most, and what happens to a longer one. long_video "spread": that many frames,
        spread evenly over it; "first": its first ones; "split": examples one after another, each with the next
        `max_frames` frames and the same words.
    max_tokens: tokens of a plain document at most. long_text "split": examples one after another, each beginning with
        the last token of the one before, so that every token is learned once; "crop": the first `max_tokens`.
        Videos are held to it too: no more frames than fit beside the words of their example.
    """

    fps: float = 1.0
    max_frames: int | None = None
    long_video: str = "spread"
    max_tokens: int | None = None
    long_text: str = "split"

    def __post_init__(self) -> None:
        if not self.fps > 0:
            raise ValueError(f"fps is {self.fps}; it must be more than 0")
        for name, least in (("max_frames", 1), ("max_tokens", 2)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}; it must be at least {least}, or left out")
        for name, known in (("long_video", LONG_VIDEO), ("long_text", LONG_TEXT)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(known)}")


@dataclass(frozen=True, eq=False)
class Prepared:
    """An example but for its codes. pieces: ids of text, or the number of a clip; and whether they are learned."""

    pieces: tuple[tuple[NDArray[np.int32] | int, bool], ...]
    id: str
    source: str

    def finish(
        self, codes: Sequence[NDArray[np.integer]], vocabulary: Vocabulary, damage: Mapping[int, str]
    ) -> TokenizedExample:
        """The example with the codes of its clips put in; `damage` of clips by number."""
        whole = [
            (vocabulary.vision_tokens(codes[piece]) if isinstance(piece, int) else piece, learn)
            for piece, learn in self.pieces
        ]
        found = dict.fromkeys(damage[clip] for clip, _ in self.pieces if isinstance(clip, int) and clip in damage)
        return joined(whole, self.id, self.source, "; ".join(found))


@dataclass(frozen=True, eq=False)
class PreparedRecord:
    """The examples of one record, and the clips they share: pixels uint8 [T, H, W, 3], or codes int [T, n].

    damage: of clips by number, what could not be read of the files behind them.
    """

    examples: list[Prepared | BadExample] = field(default_factory=list)
    clips: list[NDArray] = field(default_factory=list)
    damage: dict[int, str] = field(default_factory=dict)

    @property
    def num_frames(self) -> int:
        """Frames still to be encoded."""
        return sum(len(clip) for clip in self.clips if clip.ndim == 4)


@dataclass(frozen=True)
class Preparer:
    """Turns a record's examples into a `PreparedRecord`; picklable. codes_per_frame: 0 without a vision tokenizer."""

    tokenizer: TextTokenizer
    limits: Limits = Limits()
    frame_size: int | None = None
    codes_per_frame: int = 0

    def __call__(self, examples: Iterable[Example]) -> PreparedRecord:
        """Reads and tokenizes; a file that cannot be read makes BadExamples of the examples that need it."""
        record = PreparedRecord()
        known: dict[tuple, list[int]] = {}
        for example in examples:
            try:
                self._add(example, record, known)
            except VideoError as error:
                record.examples.append(BadExample(example.id, example.source, str(error)))
        return record

    def _add(self, example: Example, record: PreparedRecord, known: dict[tuple, list[int]]) -> None:
        pieces = lay_out(example, self.tokenizer)
        num_words = sum(piece.size for piece, _ in pieces if not isinstance(piece, Span))
        media = [piece for piece, _ in pieces if isinstance(piece, Span)]
        if not media:
            self._add_text(example, [(piece, learn) for piece, learn in pieces if not isinstance(piece, Span)], record)
            return
        # Examples of one record share what they show: the same frames are read and encoded once.
        clips = [self._clips(span, self._most_frames(num_words, media), record, known) for span in media]
        num_parts = len(clips[0]) if len(clips) == 1 else 1
        for part in range(num_parts):
            numbers = iter([clip[part] if num_parts > 1 else clip[0] for clip in clips])
            filled = tuple((next(numbers) if isinstance(piece, Span) else piece, learn) for piece, learn in pieces)
            name = f"{example.id}#{part + 1}" if num_parts > 1 else example.id
            record.examples.append(Prepared(filled, name, example.source))

    def _add_text(self, example: Example, pieces: list[tuple[NDArray[np.int32], bool]], record: PreparedRecord) -> None:
        limit = self.limits.max_tokens
        whole = joined(pieces, example.id, example.source)
        if limit is None or len(whole) <= limit or len(example.spans) > 1:
            record.examples.append(Prepared(tuple(pieces), example.id, example.source))
            return
        starts = range(0, len(whole) - 1, limit - 1) if self.limits.long_text == "split" else range(1)
        for number, start in enumerate(starts, start=1):
            tokens, learn = whole.tokens[start : start + limit], whole.learn[start : start + limit].copy()
            runs = np.split(np.arange(tokens.size), np.flatnonzero(np.diff(learn)) + 1)
            name = f"{example.id}#{number}" if len(starts) > 1 else example.id
            record.examples.append(
                Prepared(tuple((tokens[run], bool(learn[run[0]])) for run in runs), name, example.source)
            )

    def _most_frames(self, num_words: int, media: Sequence[Span]) -> int | None:
        """Frames a video may have: `max_frames`, or fewer where `max_tokens` leaves no room for them."""
        limits, videos = self.limits, sum(span.kind == "video" for span in media)
        if limits.max_tokens is None or not self.codes_per_frame or not videos:
            return limits.max_frames
        room = limits.max_tokens - num_words - (len(media) - videos) * (self.codes_per_frame + 1)
        fitting = max(1, room // (self.codes_per_frame + 1) // videos)
        return fitting if limits.max_frames is None else min(fitting, limits.max_frames)

    def _clips(self, span: Span, most: int | None, record: PreparedRecord, known: dict[tuple, list[int]]) -> list[int]:
        """Numbers of the clips that a span becomes: one, or several where a long video is split."""
        if span.codes is not None or span.path is None:
            codes = span.codes
            record.clips.append(frames_of(span, self.frame_size, 0.0).pixels if codes is None else np.asarray(codes))
            return [len(record.clips) - 1]
        key = (span.kind, span.path, span.fps, span.num_frames, span.start, span.end, most)
        if key not in known:
            frames = self._read(span, most)
            step = most if most is not None and self.limits.long_video == "split" else len(frames.pixels)
            known[key] = []
            for begin in range(0, len(frames.pixels), step):
                known[key].append(len(record.clips))
                record.clips.append(frames.pixels[begin : begin + step])
            if frames.truncated_at is not None:
                # Only the last part lacks something.
                record.damage[known[key][-1]] = f"{span.path}: damaged or cut, good up to {frames.truncated_at:.3f} s"
        return known[key]

    def _read(self, span: Span, most: int | None) -> Frames:
        limits = self.limits
        if span.kind == "image" or most is None:
            return frames_of(span, self.frame_size, limits.fps)
        assert span.path is not None
        spread_already = span.num_frames is not None and span.fps is None
        if limits.long_video == "split":
            return frames_of(span, self.frame_size, limits.fps)
        if spread_already:
            return frames_of(dataclasses.replace(span, num_frames=min(span.num_frames or 1, most)), self.frame_size, 0)
        fps = span.fps or limits.fps
        count = most if span.num_frames is None else min(most, span.num_frames)
        if limits.long_video == "spread":
            seconds = seconds_of(span.path, start=span.start, end=span.end)
            if math.ceil(seconds * fps - 1e-6) > count:
                return read_frames(span.path, num_frames=count, size=self.frame_size, start=span.start, end=span.end)
        return frames_of(dataclasses.replace(span, fps=fps, num_frames=count), self.frame_size, fps)


@dataclass(frozen=True)
class Worker:
    """Prepares records, in any process. What is bad in a file makes a BadExample, in a manifest a ValueError.

    chunk_tokens: see `data.book`.
    """

    prepare: Preparer
    chunk_tokens: int = CHUNK_TOKENS

    def __call__(self, records: Sequence[Record]) -> list[PreparedRecord]:
        return [self._one(record) for record in records]

    def _one(self, record: Record) -> PreparedRecord:
        if record.problem:
            return PreparedRecord([BadExample(record.id, record.source, record.problem)])
        try:
            return self.prepare(make_examples(record, self._book))
        except TextError as error:
            return PreparedRecord([BadExample(record.id, record.source, str(error))])

    def _book(self, **fields: Any) -> Iterator[Example]:
        longest = self.prepare.limits.max_tokens
        if longest is None:
            raise ValueError("template: book needs max_tokens, the length its examples are to have")
        return book_questions(
            tokenizer=self.prepare.tokenizer, max_tokens=longest, chunk_tokens=self.chunk_tokens, **fields
        )


def prepared(
    records: Iterable[Record], first: int, worker: Worker, processes: int
) -> Iterator[tuple[int, PreparedRecord]]:
    """Records numbered from `first`, prepared by so many processes (0: this one), in order.

    A record whose process dies (a decoder's bug, out of memory) becomes a BadExample.
    """
    number = first
    for done in ordered_map(worker, _grouped(records), processes):
        if isinstance(done, Crashed):
            # Whichever of the group it was: alone, the others go through.
            results = ordered_map(worker, ([record] for record in done.task), max(1, processes))
            done = [each for record, result in zip(done.task, results, strict=True) for each in _one(record, result)]
        for each in done:
            yield number, each
            number += 1


def _one(record: Record, result: list[PreparedRecord] | Crashed[Any]) -> list[PreparedRecord]:
    if not isinstance(result, Crashed):
        return result
    reason = "the process that read it died (a decoder's fault, or not enough memory)"
    return [PreparedRecord([BadExample(record.id, record.source, f"{record.source}: {reason}")])]


def _grouped(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Records of text many at a time, those with files one by one: tasks of a size worth sending to a process."""
    group: list[Record] = []
    size = 0
    for record in records:
        has_file = record.content is not None or "path" in record.line
        group.append(record)
        size += len(record.line) if isinstance(record.line, str) else 100 + len(str(record.line.get("text", "")))
        if has_file or size > _GROUP_CHARACTERS or len(group) >= _GROUP_RECORDS:
            yield group
            group, size = [], 0
    if group:
        yield group


class Encoder:
    """Puts codes into prepared records, many frames at once so that the accelerator is kept busy.

    `frames`, `tokens`: how many have come out so far.
    """

    def __init__(
        self, vocabulary: Vocabulary, encode_frames: EncodeFrames | None = None, frames_at_once: int = 256
    ) -> None:
        self._vocabulary, self._encode, self._at_once = vocabulary, encode_frames, frames_at_once
        self.frames = self.tokens = 0

    def __call__(
        self, records: Iterable[tuple[int, PreparedRecord]], report: Callable[[int], None] | None = None
    ) -> Iterator[tuple[int, Item]]:
        """Items of numbered records, in order; `report` hears of each record done (its number)."""
        waiting: list[tuple[int, PreparedRecord]] = []
        num_frames = 0
        for number, record in records:
            waiting.append((number, record))
            num_frames += record.num_frames
            if num_frames >= self._at_once or not num_frames:
                yield from self._finished(waiting, report)
                waiting, num_frames = [], 0
        yield from self._finished(waiting, report)

    def _finished(
        self, records: Sequence[tuple[int, PreparedRecord]], report: Callable[[int], None] | None
    ) -> Iterator[tuple[int, Item]]:
        pixels = [clip for _, record in records for clip in record.clips if clip.ndim == 4]
        codes = self._codes(pixels)
        self.frames += sum(len(clip) for clip in pixels)
        for number, record in records:
            clips = [next(codes) if clip.ndim == 4 else clip for clip in record.clips]
            for example in record.examples:
                item = (
                    example
                    if isinstance(example, BadExample)
                    else example.finish(clips, self._vocabulary, record.damage)
                )
                if isinstance(item, TokenizedExample):
                    self.tokens += len(item)
                yield number, item
            if report is not None:
                report(number)

    def _codes(self, clips: Sequence[NDArray[np.uint8]]) -> Iterator[NDArray[np.integer]]:
        if not clips:
            return iter(())
        if self._encode is None:
            raise ValueError("images and videos need a vision tokenizer, and none was given")
        # Frames that were not scaled may have any size.
        if any(clip.shape[1:] != clips[0].shape[1:] for clip in clips):
            return iter([checked_codes(self._encode, clip) for clip in clips])
        codes = checked_codes(self._encode, clips[0] if len(clips) == 1 else np.concatenate(clips))
        return iter(np.split(codes, np.cumsum([len(clip) for clip in clips])[:-1]))
