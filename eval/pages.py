"""Sheets of video frames: the needle in its place, originals against reconstructions, generated frames.

Drawn pixel by pixel on a dark sheet, which looks the same on light and dark pages. Frames are uint8 [T, H, W, 3].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from eval.plots import Picture, percent

_SHEET = (22, 25, 30)
_INK = (232, 235, 239)
_MUTED = (154, 164, 176)
_TRACK = (58, 65, 74)
_MARK = (255, 176, 46)
_THUMB = 112
_GAP = 12
_MARGIN = 28


@cache
def _font(size: int, bold: bool = False) -> ImageFont.FreeTypeFont:
    # matplotlib carries this font on every platform; PIL's own is one size only.
    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name), size)


def _fit(text: str, font: ImageFont.FreeTypeFont, width: float) -> str:
    """`text`, cut with an ellipsis where it is wider than `width` pixels."""
    text = " ".join(text.split())
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "…") > width:
        text = text[:-1]
    return text.rstrip() + "…"


def _thumb(frame: np.ndarray) -> Image.Image:
    """A frame at the sheet's size; small ones are enlarged by whole pixels first, so that they stay crisp."""
    if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
        raise ValueError(f"a frame has shape {frame.shape} and dtype {frame.dtype}; frames are uint8 [H, W, 3]")
    image = Image.fromarray(np.ascontiguousarray(frame))
    factor = max(1, -(-_THUMB // max(image.size)))
    image = image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    scale = _THUMB / max(image.size)
    return image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.LANCZOS)


class _Sheet:
    """A dark sheet `columns` frames wide that grows downwards."""

    def __init__(self, columns: int, title: str, lines: Sequence[str]) -> None:
        self.columns = columns
        self.width = 2 * _MARGIN + columns * _THUMB + (columns - 1) * _GAP
        self.y = _MARGIN
        self._image = Image.new("RGB", (self.width, 200), _SHEET)
        self.text(title, 21, bold=True)
        for line in lines:
            self.text(line, 14, colour=_MUTED)

    def _grow(self, height: int) -> ImageDraw.ImageDraw:
        if self.y + height > self._image.height:
            taller = Image.new("RGB", (self.width, max(self.y + height, 2 * self._image.height)), _SHEET)
            taller.paste(self._image)
            self._image = taller
        return ImageDraw.Draw(self._image)

    def text(self, text: str, size: int, *, bold: bool = False, colour: tuple[int, int, int] = _INK) -> None:
        font = _font(size, bold)
        self._grow(size + 10).text(
            (_MARGIN, self.y), _fit(text, font, self.width - 2 * _MARGIN), font=font, fill=colour
        )
        self.y += round(size * 1.5)

    def timeline(self, num_frames: int, marks: Mapping[int, str]) -> None:
        """A bar for the whole video with a tick where each needle lies."""
        draw = self._grow(40)
        left, right, y = _MARGIN, self.width - _MARGIN, self.y + 6
        draw.rounded_rectangle((left, y, right, y + 6), 3, fill=_TRACK)
        for index in marks:
            x = left + (right - left) * (index + 0.5) / num_frames
            draw.rounded_rectangle((x - 3, y - 5, x + 3, y + 11), 3, fill=_MARK)
        draw.text((left, y + 14), "0", font=_font(12), fill=_MUTED)
        draw.text((right, y + 14), f"{num_frames - 1}", font=_font(12), fill=_MUTED, anchor="ra")
        self.y += 48

    def frames(self, frames: Sequence[np.ndarray], labels: Sequence[str], marked: Sequence[bool]) -> None:
        """Frames in rows, each with its label below it; a marked one is framed."""
        for start in range(0, len(frames), self.columns):
            row = [_thumb(frame) for frame in frames[start : start + self.columns]]
            height = max(image.height for image in row)
            labelled = any(labels[start : start + self.columns])
            draw = self._grow(height + 40)
            for column, image in enumerate(row):
                x = _MARGIN + column * (_THUMB + _GAP)
                self._image.paste(image, (x, self.y))
                mark = marked[start + column]
                if mark:
                    box = (x - 5, self.y - 5, x + image.width + 4, self.y + image.height + 4)
                    draw.rounded_rectangle(box, 4, outline=_MARK, width=4)
                font = _font(12, mark)
                label = _fit(labels[start + column], font, _THUMB + _GAP - 2)
                draw.text((x, self.y + height + 7), label, font=font, fill=_MARK if mark else _MUTED)
            self.y += height + (30 if labelled else _GAP)

    def save(self, path: str | Path) -> Path:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._image.crop((0, 0, self.width, self.y + _MARGIN - _GAP)).save(path)
        return path


def chosen_frames(num_frames: int, keep: Sequence[int], limit: int) -> list[int]:
    """At most `limit` frame indices, ascending: those in `keep`, their neighbours, and an even choice of the others."""
    if num_frames <= limit:
        return list(range(num_frames))
    chosen = {index for index in keep if 0 <= index < num_frames}
    chosen |= {near for index in sorted(chosen) for near in (index - 1, index + 1) if 0 <= near < num_frames}
    # Fewer and fewer evenly spaced ones, until all fit beside the ones that must be there.
    for count in range(limit, 0, -1):
        union = chosen | set(np.linspace(0, num_frames - 1, count).round().astype(int).tolist())
        if len(union) <= limit:
            return sorted(union)
    return sorted(chosen)


def contact_sheet(
    path: str | Path,
    frames: np.ndarray,
    needles: Mapping[int, str],
    *,
    title: str = "A needle in its place",
    lines: Sequence[str] = (),
    max_frames: int = 40,
    columns: int = 8,
) -> Picture:
    """The haystack's frames in order with the needles marked, each with its frame index and its depth.

    frames: uint8 [T, H, W, 3]. needles: {frame index: what to call it}. A long video shows `max_frames` of its frames,
    among them every needle and its two neighbours; a bar shows where in the whole video the needles lie.
    """
    outside = [index for index in needles if not 0 <= index < len(frames)]
    if outside:
        raise ValueError(f"needle frame {outside[0]} lies outside the video's {len(frames)} frames")
    chosen = chosen_frames(len(frames), list(needles), max_frames)
    depths = {index: percent(index / max(len(frames) - 1, 1)) for index in needles}
    sheet = _Sheet(columns, title, lines)
    for index, name in sorted(needles.items()):
        sheet.text(f"{name}: frame {index} of {len(frames)}, depth {depths[index]}", 14, colour=_MARK)
    sheet.y += 10
    sheet.timeline(len(frames), needles)
    labels = []
    for index in chosen:
        labels.append(f"frame {index} · {depths[index]}" if index in needles else f"{index}")
    sheet.frames([frames[index] for index in chosen], labels, [index in needles for index in chosen])
    shown = f"{len(chosen)} of {len(frames)} frames" if len(chosen) < len(frames) else f"all {len(frames)} frames"
    return Picture(sheet.save(path), title, f"{shown}, labelled with their index; the needle with its depth as well.")


def reconstructions(
    path: str | Path,
    originals: np.ndarray,
    decoded: np.ndarray,
    *,
    psnr_db: float | None = None,
    title: str = "Frames through the vision tokenizer",
    columns: int = 8,
) -> Picture:
    """Originals above what the VQGAN decodes from their codes; both uint8 [T, H, W, 3], `columns` frames a row."""
    if originals.shape != decoded.shape:
        raise ValueError(
            f"originals are {originals.shape} and decoded frames {decoded.shape}; the shapes must be equal"
        )
    quality = "" if psnr_db is None else f" ({psnr_db:.1f} dB PSNR)"
    columns = min(columns, max(len(originals), 4))
    sheet = _Sheet(columns, title, [f"Original above, decoded from its tokens below{quality}."])
    sheet.y += 10
    for start in range(0, len(originals), columns):
        for frames in (originals[start : start + columns], decoded[start : start + columns]):
            sheet.frames(list(frames), [""] * len(frames), [False] * len(frames))
        sheet.y += _GAP
    sheet.y -= _GAP
    return Picture(sheet.save(path), title, f"Original frames and their reconstructions{quality}.")


def generated(
    path: str | Path, clips: Sequence[tuple[str, np.ndarray]], *, title: str = "Generated frames", columns: int = 8
) -> Picture:
    """One strip of frames per clip under its prompt: (prompt, uint8 [T, H, W, 3]) each."""
    longest = max((len(frames) for _, frames in clips), default=0)
    if longest == 0:
        raise ValueError("there are no generated frames to show")
    sheet = _Sheet(min(columns, max(longest, 4)), title, [])
    sheet.y += 10
    for prompt, frames in clips:
        sheet.text(f"“{prompt}”", 15)
        sheet.y += 4
        sheet.frames(list(frames), [f"{index}" for index in range(len(frames))], [False] * len(frames))
        sheet.y += _GAP
    sheet.y -= _GAP
    return Picture(sheet.save(path), title, "Frames sampled token by token from the prompt above them.")
