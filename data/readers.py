"""Decoders of video files: PyAV in order, PyAV from key frame to key frame, and decord, behind one interface.

Time zero is the first good frame. Times are exact fractions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

import av
import numpy as np
from numpy.typing import NDArray

from data.container import SLACK, Index, VideoError, expected_end, fraction, nominal_interval, opened, reason_of

# Seeking must spare this share of the decoding to be worth reading the file's packets beforehand.
_WORTH_SEEKING = 0.7


@dataclass(frozen=True, eq=False)
class Shown:
    """One decoded frame: when it appears, for how long, its pixel aspect and rotation, and its pixels when asked."""

    seconds: Fraction
    duration: Fraction
    aspect: Fraction
    rotation: int
    pixels: Callable[[], NDArray[np.uint8]]


class Source(Protocol):
    """Frames in order of presentation; `end` and `truncated_at` are known when they are through."""

    tick: Fraction
    end: Fraction
    truncated_at: Fraction | None

    def frames(self) -> Iterator[Shown]: ...


class CannotSeek(Exception):
    """A file does not give what its index promised; it is to be read from the start."""


@dataclass
class PyAVSource:
    """Every good frame, in order of presentation; stops at the first damage after the first good frame."""

    path: Path
    tick: Fraction = Fraction(0)
    end: Fraction = Fraction(0)
    truncated_at: Fraction | None = None
    _zero: Fraction | None = None
    _error: Exception | None = None

    def frames(self) -> Iterator[Shown]:
        with opened(self.path) as (container, stream):
            self.tick = fraction(stream.time_base) or Fraction(1, 1000)
            interval = nominal_interval(stream)
            before: Fraction | None = None
            for frame in self._decoded(container, stream):
                moment = None if frame.pts is None else frame.pts * (fraction(frame.time_base) or self.tick)
                # Clocks that stand still, run back or are missing: go on at the nominal rate.
                if before is not None and (moment is None or moment <= before):
                    moment = before + interval
                before = moment = moment or Fraction(0)
                if self._zero is None:
                    self._zero = moment
                duration = (frame.duration or 0) * self.tick or interval
                self.end = moment + duration - self._zero
                yield _shown(frame, stream, moment - self._zero, duration)
            if self._zero is None:
                reason = f" ({reason_of(self._error)})" if self._error is not None else ""
                raise VideoError(f"{self.path}: no frame could be decoded{reason}")
            expected = expected_end(container, stream, self._zero)
            if expected is not None and self.end + max(SLACK, 2 * interval) < expected:
                self.truncated_at = self.end

    def _decoded(self, container: Any, stream: Any) -> Iterator[Any]:
        """Frames up to the first damage; before the first good frame (a cut made anywhere) bad ones are passed over."""
        good = False
        packets = container.demux(stream)
        while True:
            try:
                packet = next(packets, None)
                frames = [] if packet is None else packet.decode()
            except av.error.EOFError:
                return
            except av.error.FFmpegError as error:
                if good:
                    self.truncated_at = self.end
                    return
                self._error = error
                continue
            if packet is None:
                return
            for frame in frames:
                if not frame.is_corrupt:
                    good = True
                    yield frame
                elif good:
                    self.truncated_at = self.end
                    return


def worth_seeking(index: Index, frames: Sequence[int]) -> bool:
    """Whether reaching these frames (rising) through key frames decodes enough less than reading from the start."""
    if not index.can_seek or not len(frames):
        return False
    wanted = np.unique(np.asarray(frames))
    entry = index.entries[np.searchsorted(index.entries, wanted, side="right") - 1]
    # Decoding goes on from the frame before where that is nearer than the key frame.
    begin = np.maximum(entry, np.concatenate([[0], wanted[:-1] + 1]))
    return int((wanted - begin + 1).sum()) < _WORTH_SEEKING * (int(wanted[-1]) + 1)


def seek_frames(path: Path, index: Index, frames: Sequence[int]) -> Iterator[Shown]:
    """These frames (numbers in order of presentation, not falling), decoded from the key frames before them.

    CannotSeek where the file does not give them, damage included.
    """
    with opened(path) as (container, stream):
        in_mov = "mov" in index.container.split(",")
        decoded: Iterator[Any] = iter(())
        at, shown = -1, None  # the number of the latest frame decoded
        for number in frames:
            if number == at and shown is not None:
                yield shown
                continue
            entry = int(np.searchsorted(index.entries, number, side="right")) - 1
            if at < 0 and entry == 0:
                decoded = _good_frames(container, stream)
            elif index.entries[entry] > at:
                # Each container's own index is in its own kind of time.
                stamp = index.entry_dts[entry] if in_mov else index.entry_pts[entry]
                try:
                    container.seek(int(stamp), stream=stream, backward=True)
                except av.error.FFmpegError as error:
                    raise CannotSeek(reason_of(error)) from None
                decoded = _good_frames(container, stream)
            wanted = int(index.pts[number])
            frame = next((frame for frame in decoded if frame.pts is not None and frame.pts >= wanted), None)
            if frame is None or frame.pts != wanted or frame.is_corrupt:
                raise CannotSeek("the frame is not where the index has it")
            at, shown = number, _shown(frame, stream, index.seconds(number), index.lasts(number))
            yield shown


def _good_frames(container: Any, stream: Any) -> Iterator[Any]:
    try:
        for packet in container.demux(stream):
            yield from packet.decode()
    except av.error.EOFError:
        return
    except av.error.FFmpegError as error:
        raise CannotSeek(reason_of(error)) from None


@dataclass
class DecordSource:
    """decord, for the files it reads exactly; VideoError for any other."""

    path: Path
    tick: Fraction = Fraction(0)
    end: Fraction = Fraction(0)
    truncated_at: Fraction | None = None
    _index: Index = field(init=False)

    def __post_init__(self) -> None:
        self._index = Index.of(self.path)
        wrong = self._index.wrong_for_decord()
        if wrong:
            raise VideoError(f"{self.path}: reader 'decord' is not exact for {wrong}; use 'auto' or 'pyav'")
        self.tick = self._index.tick
        self.end = self._index.end

    def frames(self) -> Iterator[Shown]:
        try:
            import decord
        except ImportError:
            raise VideoError(f"{self.path}: reader 'decord' is not installed here; use 'auto' or 'pyav'") from None
        first = next(PyAVSource(self.path).frames())
        try:
            video = decord.VideoReader(str(self.path), ctx=decord.cpu(0))
            if len(video) != len(self._index.pts):
                raise RuntimeError(f"decord counts {len(video)} frames, the file has {len(self._index.pts)}")
            for number in range(len(video)):
                begin, duration = self._index.seconds(number), self._index.lasts(number)
                yield Shown(begin, duration, first.aspect, first.rotation, self._converter(video, number))
            # decord goes on decoding ahead (gigabytes of it) unless it is sent back.
            video.seek(0)
        except (decord.DECORDError, RuntimeError) as error:
            raise VideoError(f"{self.path}: decord cannot read it ({reason_of(error)}); use 'auto' or 'pyav'") from None

    @staticmethod
    def _converter(video: Any, number: int) -> Callable[[], NDArray[np.uint8]]:
        return lambda: video[number].asnumpy()


def _shown(frame: Any, stream: Any, seconds: Fraction, duration: Fraction) -> Shown:
    aspect = fraction(stream.sample_aspect_ratio) or Fraction(1)
    # One thread: PyAV's conversion pool does not survive a fork.
    return Shown(
        seconds, duration, aspect, int(frame.rotation or 0), lambda: frame.to_ndarray(format="rgb24", threads=1)
    )
