"""Frames and their times from a video or image file, chosen by timestamp.

PyAV decodes sequentially and was exact on every class of file measured. decord returned wrong frames without an error
for MPEG-TS, MPEG-PS, MPEG-4 with B-frames and edit lists, so it is accepted only for h264 in mp4 without an edit list
and at a constant rate; on those it was at most as fast as PyAV when frames are read in order, so `auto` means PyAV.

Time zero is the first good frame. The frame at time t is the last one whose timestamp is not after t (to half a
tick of the file's clock, because containers round). Times are exact fractions inside.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

READERS = ("auto", "pyav", "decord")
_IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
# FFmpeg renders any text file as a picture of a terminal.
_TEXT_FORMATS = {"tty", "bin", "xbin", "adf", "idf"}
# A file that ends this much earlier than its header says (or two frames, if longer) was cut; headers round.
_SLACK = Fraction(1, 5)


class VideoError(ValueError):
    """A video or image that cannot be read; the message names the file and the reason."""


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
    pixels: list[NDArray[np.uint8]] = []
    seconds: list[float] = []
    for picture, moment in stream:
        # Only clips without `size` can change shape midway.
        pixels.append(picture if not pixels or picture.shape == pixels[0].shape else _fit(picture, pixels[0].shape))
        seconds.append(moment)
    if num_frames is not None and fps is None and len(pixels) < num_frames and stream.truncated_at is not None:
        # The damage was found on the way: spread the frames over what is good.
        good = read_frames(
            path, num_frames=num_frames, size=size, start=start, end=stream.truncated_at, reader=reader
        )  # fmt: skip
        return Frames(good.pixels, good.seconds, stream.truncated_at)
    return Frames(np.stack(pixels), np.asarray(seconds, np.float64), stream.truncated_at)


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
        _check_file(self.path)
        picture = _read_image(self.path)
        if picture is not None:
            yield _shape(picture, self.sampling.size, Fraction(1), 0), 0.0
            return
        source: _Source = _DecordSource(self.path) if self.reader == "decord" else _PyAVSource(self.path)
        count = 0
        last: tuple[_Shown, NDArray[np.uint8]] | None = None
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

    def _choose(self, source: _Source) -> Iterator[_Shown]:
        start = _exact(self.sampling.start or 0)
        end = None if self.sampling.end is None else _exact(self.sampling.end)
        if self.sampling.fps is not None:
            step = 1 / _exact(self.sampling.fps)
            times = (start + k * step for k in itertools.count())
            return _at(source, itertools.islice(times, self.sampling.num_frames), end)
        if self.sampling.num_frames is not None:
            stop, truncated_at = _extent(self.path)
            if truncated_at is not None and (end is None or end > truncated_at):
                self.truncated_at = float(truncated_at)
            stop = stop if end is None else min(end, stop)
            step = (stop - start) / self.sampling.num_frames
            middles = (start + (k + Fraction(1, 2)) * step for k in range(self.sampling.num_frames))
            return _at(source, middles if step > 0 else iter(()), end)
        return _between(source, start, end)


@dataclass(frozen=True, eq=False)
class _Shown:
    """One decoded frame: when it appears, for how long, its pixel aspect and rotation, and its pixels when asked."""

    seconds: Fraction
    duration: Fraction
    aspect: Fraction
    rotation: int
    pixels: Callable[[], NDArray[np.uint8]]


class _Source(Protocol):
    tick: Fraction
    end: Fraction
    truncated_at: Fraction | None

    def frames(self) -> Iterator[_Shown]: ...


def _at(source: _Source, times: Iterator[Fraction], end: Fraction | None) -> Iterator[_Shown]:
    """For each of the rising times, the last frame that is not after it; stops at `end` or where the frames do."""
    shown: _Shown | None = None
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


def _between(source: _Source, start: Fraction, end: Fraction | None) -> Iterator[_Shown]:
    for frame in source.frames():
        if end is not None and frame.seconds >= end:
            return
        if frame.seconds + _tolerance(source.tick) >= start:
            yield frame


@dataclass
class _PyAVSource:
    """Every good frame, in order of presentation; stops at the first damage after the first good frame."""

    path: Path
    tick: Fraction = Fraction(0)
    end: Fraction = Fraction(0)
    truncated_at: Fraction | None = None
    _zero: Fraction | None = None
    _error: Exception | None = None

    def frames(self) -> Iterator[_Shown]:
        with _opened(self.path) as (container, stream):
            self.tick = _fraction(stream.time_base) or Fraction(1, 1000)
            interval = _interval(stream)
            before: Fraction | None = None
            for frame in self._decoded(container, stream):
                moment = None if frame.pts is None else frame.pts * (_fraction(frame.time_base) or self.tick)
                # Clocks that stand still, run back or are missing: go on at the nominal rate.
                if before is not None and (moment is None or moment <= before):
                    moment = before + interval
                before = moment = moment or Fraction(0)
                if self._zero is None:
                    self._zero = moment
                duration = (frame.duration or 0) * self.tick or interval
                self.end = moment + duration - self._zero
                aspect = _fraction(stream.sample_aspect_ratio) or Fraction(1)
                yield _Shown(moment - self._zero, duration, aspect, int(frame.rotation or 0), _converter(frame))
            if self._zero is None:
                reason = f" ({_reason(self._error)})" if self._error is not None else ""
                raise VideoError(f"{self.path}: no frame could be decoded{reason}")
            expected = _expected_end(container, stream, self._zero)
            if expected is not None and self.end + max(_SLACK, 2 * interval) < expected:
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


@dataclass
class _DecordSource:
    """decord, for the files it reads exactly; VideoError for any other."""

    path: Path
    tick: Fraction = Fraction(0)
    end: Fraction = Fraction(0)
    truncated_at: Fraction | None = None
    _index: _Index = field(init=False)

    def __post_init__(self) -> None:
        self._index = _Index.of(self.path)
        wrong = self._index.wrong_for_decord()
        if wrong:
            raise VideoError(f"{self.path}: reader 'decord' is not exact for {wrong}; use 'auto' or 'pyav'")
        self.tick = self._index.tick
        self.end = self._index.end

    def frames(self) -> Iterator[_Shown]:
        try:
            import decord
        except ImportError:
            raise VideoError(f"{self.path}: reader 'decord' is not installed here; use 'auto' or 'pyav'") from None
        first = next(_PyAVSource(self.path).frames())
        try:
            video = decord.VideoReader(str(self.path), ctx=decord.cpu(0))
            if len(video) != len(self._index.starts):
                raise RuntimeError(f"decord counts {len(video)} frames, the file has {len(self._index.starts)}")
            for number, (begin, duration) in enumerate(
                zip(self._index.starts, self._index.durations, strict=True)
            ):  # fmt: skip
                pixels = self._converter(video, number)
                yield _Shown(begin, duration, first.aspect, first.rotation, pixels)
            # decord goes on decoding ahead (gigabytes of it) unless it is sent back.
            video.seek(0)
        except (decord.DECORDError, RuntimeError) as error:
            raise VideoError(f"{self.path}: decord cannot read it ({_reason(error)}); use 'auto' or 'pyav'") from None

    @staticmethod
    def _converter(video: Any, number: int) -> Callable[[], NDArray[np.uint8]]:
        return lambda: video[number].asnumpy()


@dataclass(frozen=True)
class _Index:
    """What the packets say without decoding: when each frame starts, from the first, and what kind of file it is."""

    container: str
    codec: str
    tick: Fraction
    starts: list[Fraction]
    durations: list[Fraction]
    complete: bool
    cut_by_edit_list: bool
    expected_end: Fraction | None

    @property
    def end(self) -> Fraction:
        return self.starts[-1] + self.durations[-1] if self.starts else Fraction(0)

    @property
    def is_short(self) -> bool:
        """Ends well before its header says."""
        slack = max(_SLACK, 2 * self.durations[-1]) if self.durations else _SLACK
        return self.expected_end is not None and self.end + slack < self.expected_end

    @classmethod
    def of(cls, path: Path) -> _Index:
        with _opened(path) as (container, stream):
            tick = _fraction(stream.time_base) or Fraction(1, 1000)
            interval = _interval(stream)
            stamps: list[tuple[int, int]] = []
            complete, cut = True, False
            with contextlib.suppress(av.error.FFmpegError):
                for packet in container.demux(stream):
                    if packet.size == 0:
                        continue
                    if packet.is_discard:
                        cut = True
                    elif packet.pts is None:
                        complete = False
                    else:
                        stamps.append((packet.pts, packet.duration or 0))
            stamps.sort()
            zero = stamps[0][0] if stamps else 0
            return cls(
                container=container.format.name,
                codec=stream.codec_context.name,
                tick=tick,
                starts=[(pts - zero) * tick for pts, _ in stamps],
                durations=[duration * tick or interval for _, duration in stamps],
                complete=complete and bool(stamps),
                cut_by_edit_list=cut or zero != 0,
                expected_end=_expected_end(container, stream, zero * tick),
            )

    def wrong_for_decord(self) -> str:
        """Why decord would not be exact, or the empty string."""
        if "mp4" not in self.container.split(","):
            return f"{self.container} files"
        if self.codec != "h264":
            return f"{self.codec} video"
        if self.cut_by_edit_list:
            return "files with an edit list"
        if not self.complete or self.is_short:
            return "files without all their timestamps"
        steps = np.diff([float(start / self.tick) for start in self.starts])
        return "a variable frame rate" if steps.size and np.ptp(steps) > 1 else ""


def _extent(path: Path) -> tuple[Fraction, Fraction | None]:
    """Where the good frames end, and the same again if that is well before the header says."""
    index = _Index.of(path)
    if index.complete and not index.is_short:
        return index.end, None
    # Only decoding tells which of the last frames of a cut file are good.
    source = _PyAVSource(path)
    for _ in source.frames():
        pass
    return source.end, source.truncated_at


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, Any]]:
    try:
        container = av.open(str(path))
    except (av.error.FFmpegError, OSError, ValueError) as error:
        raise VideoError(f"{path}: not a video this build can read ({_reason(error)})") from None
    with container:
        # The picture on a music file's cover is a video stream of one frame.
        streams = [s for s in container.streams.video if not s.disposition & av.stream.Disposition.attached_pic]
        if not streams or container.format.name in _TEXT_FORMATS:
            raise VideoError(f"{path}: there is no video in it")
        yield container, streams[0]


def _check_file(path: Path) -> None:
    if not path.exists():
        raise VideoError(f"{path}: there is no such file")
    if not path.is_file():
        raise VideoError(f"{path}: not a file")
    if not os.access(path, os.R_OK):
        raise VideoError(f"{path}: no permission to read it")
    if path.stat().st_size == 0:
        raise VideoError(f"{path}: the file is empty")


def _read_image(path: Path) -> NDArray[np.uint8] | None:
    """The pixels of a still image, turned as its EXIF says and on white where transparent; None for anything else."""
    try:
        with Image.open(path, formats=_IMAGE_FORMATS) as image:
            upright = ImageOps.exif_transpose(image)
            if upright.has_transparency_data:
                layer = upright.convert("RGBA")
                white = Image.new("RGBA", layer.size, "white")
                return np.asarray(Image.alpha_composite(white, layer).convert("RGB"))
            return np.asarray(upright.convert("RGB"))
    except Image.UnidentifiedImageError:
        return None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise VideoError(f"{path}: damaged image ({_reason(error)})") from None


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


def _converter(frame: Any) -> Callable[[], NDArray[np.uint8]]:
    # One thread: PyAV's conversion pool does not survive a fork.
    return lambda: frame.to_ndarray(format="rgb24", threads=1)


def _interval(stream: Any) -> Fraction:
    rate = _fraction(stream.average_rate) or _fraction(stream.guessed_rate)
    return 1 / rate if rate else Fraction(1, 25)


def _expected_end(container: Any, stream: Any, zero: Fraction) -> Fraction | None:
    """Where the header says the video ends, from its first frame: the earliest of what it says in several places."""
    said: list[Fraction] = []
    if stream.duration is not None and stream.time_base is not None:
        said.append(stream.duration * Fraction(stream.time_base.numerator, stream.time_base.denominator))
    if container.duration is not None:
        said.append(Fraction(container.duration, av.time_base))
    clock = str(stream.metadata.get("DURATION", "")).split(":")
    if len(clock) == 3:
        with contextlib.suppress(ValueError):
            hours, minutes, seconds = (Fraction(part) for part in clock)
            said.append(hours * 3600 + minutes * 60 + seconds - zero)
    return min(said, default=None)


def _fraction(value: Any) -> Fraction | None:
    """A rational of PyAV's as a fraction; None where it is missing, zero or undefined."""
    if value is None or not value.denominator or not value.numerator:
        return None
    return Fraction(value.numerator, value.denominator)


def _exact(value: float) -> Fraction:
    return Fraction(value).limit_denominator(1_000_000)


def _reason(error: BaseException | None) -> str:
    text = getattr(error, "strerror", None) or str(error)
    return " ".join(str(text).split())[:160] or type(error).__name__
