"""A video file without its pixels: opening it, what its header says, and when each of its frames appears."""

from __future__ import annotations

import array
import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

# FFmpeg renders any text file as a picture of a terminal.
_TEXT_FORMATS = {"tty", "bin", "xbin", "adf", "idf"}
# A file that ends this much earlier than its header says (or two frames, if longer) was cut; headers round.
SLACK = Fraction(1, 5)
# Containers whose own index leads to a packet, and codecs of which a key frame needs nothing before it.
_SEEKABLE_CONTAINERS = {"mov", "matroska"}
_SEEKABLE_CODECS = {"h264", "hevc", "vp8", "vp9", "av1", "mjpeg", "prores", "dnxhd"}


class VideoError(ValueError):
    """A video or image that cannot be read; the message names the file and the reason."""


@dataclass(frozen=True, eq=False)
class Index:
    """What the packets say without decoding, frames in order of presentation.

    pts, duration: int64 [N], in ticks; 0 where the file gives no duration. entries: int64 [E], numbers of the frames
    from which decoding can begin: every frame from there on comes out as it would have after all that precede it.
    entry_pts, entry_dts: int64 [E], their timestamps. complete: every packet has a timestamp.
    """

    container: str
    codec: str
    tick: Fraction
    interval: Fraction
    pts: NDArray[np.int64]
    duration: NDArray[np.int64]
    entries: NDArray[np.int64]
    entry_pts: NDArray[np.int64]
    entry_dts: NDArray[np.int64]
    complete: bool
    cut_by_edit_list: bool
    expected_end: Fraction | None

    @property
    def zero(self) -> int:
        """The first timestamp."""
        return int(self.pts[0]) if self.pts.size else 0

    def seconds(self, frame: int) -> Fraction:
        """When a frame appears, from the first one."""
        return (int(self.pts[frame]) - self.zero) * self.tick

    def lasts(self, frame: int) -> Fraction:
        """For how long a frame is shown."""
        return int(self.duration[frame]) * self.tick or self.interval

    @property
    def end(self) -> Fraction:
        return self.seconds(-1) + self.lasts(-1) if self.pts.size else Fraction(0)

    @property
    def is_short(self) -> bool:
        """Ends well before its header says."""
        slack = max(SLACK, 2 * self.lasts(-1)) if self.pts.size else SLACK
        return self.expected_end is not None and self.end + slack < self.expected_end

    @property
    def is_whole(self) -> bool:
        return self.complete and not self.is_short

    @property
    def can_seek(self) -> bool:
        """Whether frames reached through `entries` are those that decoding from the start gives, at the same times."""
        return (
            self.is_whole
            and not self.cut_by_edit_list
            and bool((np.diff(self.pts) > 0).all())
            and self.entries.size > 0
            and self.entries[0] == 0
        )

    def wrong_for_decord(self) -> str:
        """Why decord would not be exact, or the empty string."""
        if "mp4" not in self.container.split(","):
            return f"{self.container} files"
        if self.codec != "h264":
            return f"{self.codec} video"
        if self.cut_by_edit_list or self.zero:
            return "files with an edit list"
        if not self.is_whole:
            return "files without all their timestamps"
        steps = np.diff(self.pts)
        return "a variable frame rate" if steps.size and np.ptp(steps) > 1 else ""

    @classmethod
    def of(cls, path: Path) -> Index:
        """Reads every packet and decodes none."""
        with opened(path) as (container, stream):
            pts, dts, duration, key = (array.array("q") for _ in range(4))
            complete, cut = True, False
            is_entry = _entry_test(container, stream)
            with contextlib.suppress(av.error.FFmpegError):
                for packet in container.demux(stream):
                    if packet.size == 0:
                        continue
                    if packet.is_discard:
                        cut = True
                    elif packet.pts is None:
                        complete = False
                    else:
                        pts.append(packet.pts)
                        dts.append(packet.pts if packet.dts is None else packet.dts)
                        duration.append(packet.duration or 0)
                        key.append(packet.is_keyframe and is_entry(packet))
            return cls._of_packets(container, stream, pts, dts, duration, key, complete and bool(pts), cut)

    @classmethod
    def _of_packets(
        cls,
        container: Any,
        stream: Any,
        pts: array.array[int],
        dts: array.array[int],
        duration: array.array[int],
        key: array.array[int],
        complete: bool,
        cut: bool,
    ) -> Index:
        stamps = np.asarray(pts, np.int64)
        order = np.argsort(stamps, kind="stable")
        place = np.empty(order.size, np.int64)
        place[order] = np.arange(order.size)
        tick = fraction(stream.time_base) or Fraction(1, 1000)
        # Frames that are shown after a key frame but come before it in the file would be missed by beginning at it.
        before = np.maximum.accumulate(np.concatenate([[np.iinfo(np.int64).min], stamps[:-1]])) if pts else stamps
        (entries,) = np.nonzero((np.asarray(key, np.int64) != 0) & (before < stamps))
        zero = int(stamps.min()) if pts else 0
        return cls(
            container=container.format.name,
            codec=_codec_of(stream),
            tick=tick,
            interval=nominal_interval(stream),
            pts=stamps[order],
            duration=np.asarray(duration, np.int64)[order],
            entries=place[entries],
            entry_pts=stamps[entries],
            entry_dts=np.asarray(dts, np.int64)[entries],
            complete=complete,
            cut_by_edit_list=cut,
            expected_end=expected_end(container, stream, zero * tick),
        )


def _codec_of(stream: Any) -> str:
    """The codec, whichever decoder reads it here."""
    codec = stream.codec_context.codec
    return getattr(codec, "canonical_name", codec.name)


def _entry_test(container: Any, stream: Any) -> Any:
    """A test of key packets: whether decoding can begin at one. What a file calls a key frame is not always one."""
    codec = _codec_of(stream)
    if not _SEEKABLE_CONTAINERS & set(container.format.name.split(",")) or codec not in _SEEKABLE_CODECS:
        return lambda packet: False
    if codec not in ("h264", "hevc"):
        return lambda packet: True
    header = bytes(stream.codec_context.extradata or b"")
    at = 4 if codec == "h264" else 21
    if len(header) <= at or header[0] != 1:
        return lambda packet: False
    width = (header[at] & 3) + 1
    # ITU-T H.264 table 7-1: 5 is a slice of an IDR picture. H.265 table 7-1: 16 .. 21 are random access pictures.
    if codec == "h264":
        return lambda packet: any(head & 31 == 5 for head in _unit_heads(bytes(packet), width))
    return lambda packet: any(16 <= head >> 1 & 63 <= 21 for head in _unit_heads(bytes(packet), width))


def _unit_heads(content: bytes, width: int) -> Iterator[int]:
    """The first byte of every NAL unit of a packet whose units have their lengths before them."""
    at = 0
    while at + width < len(content):
        yield content[at + width]
        at += width + int.from_bytes(content[at : at + width], "big")


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[Any, Any]]:
    """The container and its first stream of video; VideoError where there is none."""
    try:
        container = av.open(str(path))
    except (av.error.FFmpegError, OSError, ValueError) as error:
        raise VideoError(f"{path}: not a video this build can read ({reason_of(error)})") from None
    with container:
        # The picture on a music file's cover is a video stream of one frame.
        streams = [s for s in container.streams.video if not s.disposition & av.stream.Disposition.attached_pic]
        if not streams or container.format.name in _TEXT_FORMATS:
            raise VideoError(f"{path}: there is no video in it")
        yield container, streams[0]


def check_file(path: Path) -> None:
    """VideoError for what is no file with something in it."""
    if not path.exists():
        raise VideoError(f"{path}: there is no such file")
    if not path.is_file():
        raise VideoError(f"{path}: not a file")
    if not os.access(path, os.R_OK):
        raise VideoError(f"{path}: no permission to read it")
    if path.stat().st_size == 0:
        raise VideoError(f"{path}: the file is empty")


def nominal_interval(stream: Any) -> Fraction:
    """Seconds from one frame to the next, as the header says."""
    rate = fraction(stream.average_rate) or fraction(stream.guessed_rate)
    return 1 / rate if rate else Fraction(1, 25)


def expected_end(container: Any, stream: Any, zero: Fraction) -> Fraction | None:
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


def fraction(value: Any) -> Fraction | None:
    """A rational of PyAV's as a fraction; None where it is missing, zero or undefined."""
    if value is None or not value.denominator or not value.numerator:
        return None
    return Fraction(value.numerator, value.denominator)


def reason_of(error: BaseException | None) -> str:
    text = getattr(error, "strerror", None) or str(error)
    return " ".join(str(text).split())[:160] or type(error).__name__
