"""Frames and their times from a video or image file, chosen by timestamp.

PyAV decodes sequentially and was exact on every class of file measured. decord returned wrong frames without an error
for MPEG-TS, MPEG-PS, MPEG-4 with B-frames and edit lists, so it is accepted only for h264 in mp4 without an edit list
and at a constant rate; on those it was at most as fast as PyAV (`scripts/bench_video.py`), so `auto` means PyAV. Where
frames are wanted far apart, and the file's packets show that its key frames can be trusted, PyAV goes from key frame to
key frame, to the same frames.

Time zero is the first good frame. The frame at time t is the last one whose timestamp is not after t (to half a
tick of the file's clock, because containers round). Times are exact fractions inside.
"""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from data.container import Index, VideoError, check_file, reason_of
from data.readers import CannotSeek, DecordSource, PyAVSource, Shown, Source, seek_frames, worth_seeking

__all__ = ["FrameStream", "Frames", "Sampling", "VideoError", "read_frames", "read_image", "seconds_of"]

READERS = ("auto", "pyav", "decord")
_IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
# Frames this far apart, or a first one this late, make a look at the file's packets worth its time.
_FAR_APART = Fraction(1)
_LATE = Fraction(10)
# Frames are collected in steps of about this many bytes, in place.
_STEP_BYTES = 16 << 20


@dataclass(frozen=True, eq=False)
class Frames:
    """pixels uint8 [T, H, W, 3] RGB; seconds float64 [T], timestamps of the frames shown, from the first frame.

    truncated_at: where the good frames end (seconds), for a file that is damaged or shorter than its header says; None
    when all that was asked for is there.
    """

    pixels: NDArray[np.uint8]
    seconds: NDArray[np.float64]
    truncated_at: float | None = None


@dataclass(frozen=True)
class Sampling:
    """Which frames of a clip: see `read_frames`."""

    fps: float | None = None
    num_frames: int | None = None
    size: int | None = None
    start: float | None = None
    end: float | None = None

    def __post_init__(self) -> None:
        for name, low in (("fps", 0), ("num_frames", 0), ("size", 0)):
            value = getattr(self, name)
            if value is not None and not value > low:
                raise ValueError(f"{name} is {value}; it must be more than {low}, or left out")
        if self.start is not None and not self.start >= 0:
            raise ValueError(f"start is {self.start}; it must be 0 or more seconds")
        if self.end is not None and not self.end > (self.start or 0):
            raise ValueError(f"end is {self.end}; it must be after start ({self.start or 0} seconds)")


def read_frames(
    path: str | os.PathLike[str],
    *,
    fps: float | None = None,
    num_frames: int | None = None,
    size: int | None = None,
    start: float | None = None,
    end: float | None = None,
    reader: str = "auto",
) -> Frames:
    """Reads frames of a video (or the one of a png, jpg, webp or bmp image), upright and with square pixels.

    fps: a frame every 1/fps seconds from `start`, up to `end` or the end of the last frame; with num_frames, that many
        at most.
    num_frames alone: the frames in the middle of that many equal parts (repeated where there are fewer).
    Neither: every frame.
    size: the short side is scaled to `size` and the centre size x size is kept; the display size when None.
    start, end: seconds from the first frame; end is excluded.
    reader: "auto", "pyav" or "decord".

    A damaged file gives its first good frames, up to `truncated_at`. VideoError, naming file and reason, when the file
    is missing, holds no video or no good frame, or has nothing between start and end.
    """
    sampling = Sampling(fps, num_frames, size, start, end)
    stream = FrameStream(path, sampling, reader)
    kept = _Kept()
    for picture, moment in stream:
        kept.add(picture, moment)
    if num_frames is not None and fps is None and len(kept.seconds) < num_frames and stream.truncated_at is not None:
        # The damage was found on the way: spread the frames over what is good.
        good = read_frames(
            path, num_frames=num_frames, size=size, start=start, end=stream.truncated_at, reader=reader
        )  # fmt: skip
        return Frames(good.pixels, good.seconds, stream.truncated_at)
    return Frames(kept.pixels(), np.asarray(kept.seconds, np.float64), stream.truncated_at)


def seconds_of(path: str | os.PathLike[str], *, start: float | None = None, end: float | None = None) -> float:
    """How long the good part of a video lasts between `start` and `end`; 0 for an image. Errors as `read_frames`."""
    file = Path(path).absolute()
    check_file(file)
    if _read_image(file) is not None:
        return 0.0
    stop, _ = _good_end(file, Index.of(file))
    return max(0.0, min(float(stop), float("inf") if end is None else end) - (start or 0.0))


def read_image(content: bytes, *, size: int | None = None, name: str = "an image") -> NDArray[np.uint8]:
    """The pixels uint8 [H, W, 3] of a png, jpg, webp or bmp file's bytes, as `read_frames` gives those of a file."""
    picture = _read_image(io.BytesIO(content), name)
    if picture is None:
        raise VideoError(f"{name}: not an image in one of the formats {', '.join(_IMAGE_FORMATS)}")
    return _shape(picture, size, Fraction(1), 0)


class _Kept:
    """Frames in one growing array: a list that is stacked in the end would take twice the memory."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._array: NDArray[np.uint8] | None = None

    def add(self, picture: NDArray[np.uint8], moment: float) -> None:
        if self._array is None:
            self._array = np.empty((1, *picture.shape), np.uint8)
        if len(self.seconds) == len(self._array):
            more = max(1, _STEP_BYTES // picture.nbytes)
            # The array is nobody else's, so that it can be moved without being copied.
            self._array.resize((len(self._array) + more, *self._array.shape[1:]), refcheck=False)
        # Only clips without `size` can change shape midway.
        self._array[len(self.seconds)] = _fit(picture, self._array.shape[1:])
        self.seconds.append(moment)

    def pixels(self) -> NDArray[np.uint8]:
        assert self._array is not None
        self._array.resize((len(self.seconds), *self._array.shape[1:]), refcheck=False)
        return self._array


class FrameStream:
    """The frames of `read_frames` one at a time, as (uint8 [H, W, 3], seconds), in constant memory.

    `truncated_at` is known when the iteration is over.
    """

    def __init__(self, path: str | os.PathLike[str], sampling: Sampling, reader: str = "auto") -> None:
        if reader not in READERS:
            raise ValueError(f"reader is {reader!r}; it must be one of {', '.join(READERS)}")
        self.path = Path(path).absolute()
        self.sampling = sampling
        self.reader = reader
        self.truncated_at: float | None = None

    def __iter__(self) -> Iterator[tuple[NDArray[np.uint8], float]]:
        check_file(self.path)
        picture = _read_image(self.path)
        if picture is not None:
            yield _shape(picture, self.sampling.size, Fraction(1), 0), 0.0
            return
        source: Source = DecordSource(self.path) if self.reader == "decord" else PyAVSource(self.path)
        count = 0
        last: tuple[Shown, NDArray[np.uint8]] | None = None
        for shown in self._choose(source):
            if last is None or last[0] is not shown:
                pixels = _shape(shown.pixels(), self.sampling.size, shown.aspect, shown.rotation)
                last = (shown, pixels)
            yield last[1], float(shown.seconds)
            count += 1
        if self.truncated_at is None and source.truncated_at is not None:
            self.truncated_at = float(source.truncated_at)
        if count == 0:
            raise VideoError(
                f"{self.path}: nothing between {self.sampling.start or 0} s and "
                f"{'the end' if self.sampling.end is None else f'{self.sampling.end} s'}; the video lasts "
                f"{float(source.end):.3f} s"
            )

    def _choose(self, source: Source) -> Iterator[Shown]:
        start = _exact(self.sampling.start or 0)
        end = None if self.sampling.end is None else _exact(self.sampling.end)
        if self.sampling.fps is not None:
            step = 1 / _exact(self.sampling.fps)
            times = itertools.islice((start + k * step for k in itertools.count()), self.sampling.num_frames)
            sparse = self.reader == "auto" and (step >= _FAR_APART or start >= _LATE)
            return self._at(source, times, end, Index.of(self.path) if sparse else None)
        if self.sampling.num_frames is not None:
            index = Index.of(self.path)
            stop, truncated_at = _good_end(self.path, index)
            if truncated_at is not None and (end is None or end > truncated_at):
                self.truncated_at = float(truncated_at)
            stop = stop if end is None else min(end, stop)
            step = (stop - start) / self.sampling.num_frames
            if step <= 0:
                source.end = stop
                return iter(())
            middles = (start + (k + Fraction(1, 2)) * step for k in range(self.sampling.num_frames))
            return self._at(source, middles, end, index if self.reader == "auto" else None)
        return _between(source, start, end)

    def _at(
        self, source: Source, times: Iterator[Fraction], end: Fraction | None, index: Index | None
    ) -> Iterator[Shown]:
        """The frames at these rising times, through key frames where that is exact and pays."""
        if index is None or not index.can_seek:
            yield from _at(source, times, end)
            return
        stop = index.end if end is None else min(end, index.end)
        wanted = list(itertools.takewhile(lambda moment: moment < stop, times))
        if not wanted:
            source.end = index.end
            return
        frames = _frames_at(index, wanted)
        done = 0
        if worth_seeking(index, frames):
            try:
                for shown in seek_frames(self.path, index, frames):
                    yield shown
                    done += 1
            except CannotSeek:
                pass  # damage, or an index that lies: reading from the start finds what is good
            else:
                return
        yield from itertools.islice(_at(source, iter(wanted), end), done, None)


def _frames_at(index: Index, times: list[Fraction]) -> list[int]:
    """For each of the times, the number of the last frame that is not after it."""
    latest = [int((moment + _tolerance(index.tick)) // index.tick) + index.zero for moment in times]
    return (np.searchsorted(index.pts, latest, side="right") - 1).tolist()


def _at(source: Source, times: Iterator[Fraction], end: Fraction | None) -> Iterator[Shown]:
    """For each of the rising times, the last frame that is not after it; stops at `end` or where the frames do."""
    shown: Shown | None = None
    wanted = next(times, None)
    for frame in source.frames():
        while shown is not None and wanted is not None and wanted + _tolerance(source.tick) < frame.seconds:
            if end is not None and wanted >= end:
                return
            yield shown
            wanted = next(times, None)
        if wanted is None or (end is not None and wanted >= end):
            return
        shown = frame
    while shown is not None and wanted is not None and wanted < source.end and (end is None or wanted < end):
        yield shown
        wanted = next(times, None)


def _tolerance(tick: Fraction) -> Fraction:
    """Half a tick, for timestamps that were rounded to it; the coarsest clock that rounds is Matroska's, of 1 ms."""
    return min(tick / 2, Fraction(1, 2000))


def _between(source: Source, start: Fraction, end: Fraction | None) -> Iterator[Shown]:
    for frame in source.frames():
        if end is not None and frame.seconds >= end:
            return
        if frame.seconds + _tolerance(source.tick) >= start:
            yield frame


def _good_end(path: Path, index: Index) -> tuple[Fraction, Fraction | None]:
    """Where the good frames end, and the same again if that is well before the header says."""
    if index.is_whole:
        return index.end, None
    # Only decoding tells which of the last frames of a cut file are good.
    source = PyAVSource(path)
    for _ in source.frames():
        pass
    return source.end, source.truncated_at


def _read_image(file: Path | io.BytesIO, name: str = "") -> NDArray[np.uint8] | None:
    """The pixels of a still image, turned as its EXIF says and on white where transparent; None for anything else."""
    try:
        with Image.open(file, formats=_IMAGE_FORMATS) as image:
            upright = ImageOps.exif_transpose(image)
            if upright.has_transparency_data:
                layer = upright.convert("RGBA")
                white = Image.new("RGBA", layer.size, "white")
                return np.asarray(Image.alpha_composite(white, layer).convert("RGB"))
            return np.asarray(upright.convert("RGB"))
    except Image.UnidentifiedImageError:
        return None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise VideoError(f"{name or file}: damaged image ({reason_of(error)})") from None


def _shape(picture: NDArray[np.uint8], size: int | None, aspect: Fraction, rotation: int) -> NDArray[np.uint8]:
    """Square pixels, upright, and cut to size x size if asked. rotation: degrees counter-clockwise."""
    height, width = picture.shape[:2]
    display = float(width * aspect)
    if size is None:
        target = (height, max(1, round(display)))
    else:
        scale = size / min(height, display)
        target = (max(size, round(height * scale)), max(size, round(display * scale)))
    picture = _fit(picture, target)
    if size is not None:
        top, left = (target[0] - size) // 2, (target[1] - size) // 2
        picture = picture[top : top + size, left : left + size]
    return np.ascontiguousarray(np.rot90(picture, rotation // 90 % 4))


def _fit(picture: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.uint8]:
    if picture.shape[:2] == tuple(shape[:2]):
        return picture
    image = Image.fromarray(np.ascontiguousarray(picture))
    return np.asarray(image.resize((shape[1], shape[0]), Image.Resampling.BICUBIC))


def _exact(value: float) -> Fraction:
    return Fraction(value).limit_denominator(1_000_000)
