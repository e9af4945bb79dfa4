"""Finding media files, and writing frames to them: png (frames side by side), gif and mp4; whole or not at all."""

import os
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

IMAGES, VIDEOS = (".png",), (".gif", ".mp4")


def check_name(path: str | Path) -> str:
    """The ending of `path` in lower case; ValueError when it is none of those that `write` knows."""
    suffix = Path(path).suffix.lower()
    if suffix not in IMAGES + VIDEOS:
        raise ValueError(f"{path} ends in {suffix or 'nothing'}; give a name in {', '.join(IMAGES + VIDEOS)}")
    return suffix


def find(paths: Sequence[str | Path]) -> list[Path]:
    """The files among `paths`, and those in folders among them (by name, not deeper); ValueError where one has none."""
    files: list[Path] = []
    for path in map(Path, paths):
        found = [path]
        if path.is_dir():
            found = sorted(each for each in path.iterdir() if each.is_file() and not each.name.startswith("."))
            if not found:
                raise ValueError(f"folder {path} has no files")
        files += found
    return files


def write(path: str | Path, frames: np.ndarray, *, fps: float = 4.0) -> Path:
    """Write frames uint8 [T, H, W, 3]; the ending decides the format. Returns the path.

    A gif shows each frame for a whole number of hundredths of a second. ValueError for another ending, OSError when the
    file cannot be written.
    """
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[-1] != 3 or not len(frames):
        raise ValueError(
            f"frames are {frames.dtype} of shape {frames.shape}; give uint8 [T, H, W, 3] with T at least 1"
        )
    if not 0 < fps <= 1000:
        raise ValueError(f"fps is {fps}; give a number above 0 and at most 1000")
    path = Path(path)
    save: Callable[[Path, np.ndarray, float], None] = {".png": _png, ".gif": _gif, ".mp4": _mp4}[check_name(path)]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.stem}.partial{path.suffix.lower()}")
    try:
        save(partial, frames, fps)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _png(path: Path, frames: np.ndarray, fps: float) -> None:
    from PIL import Image

    Image.fromarray(np.concatenate(list(frames), axis=1)).save(path)


def _gif(path: Path, frames: np.ndarray, fps: float) -> None:
    from PIL import Image

    first, *rest = (Image.fromarray(frame) for frame in frames)
    duration = max(10, round(100 / fps) * 10)
    first.save(path, save_all=True, append_images=rest, duration=duration, loop=0)


def _mp4(path: Path, frames: np.ndarray, fps: float) -> None:
    import av

    # Subsampled colour needs even sides: the last row or column is repeated.
    frames = np.pad(frames, ((0, 0), (0, frames.shape[1] % 2), (0, frames.shape[2] % 2), (0, 0)), mode="edge")
    codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream(codec, rate=Fraction(fps).limit_denominator(1000))
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        if codec == "libx264":
            stream.options = {"crf": "12"}
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
