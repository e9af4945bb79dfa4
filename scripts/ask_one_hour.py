"""Measure a question about an hour of video, end to end: concatenate real clips, decode, tokenize, read, answer.

    python scripts/ask_one_hour.py CHECKPOINT [--hours 1] [--fps 0.5] [--out runs/one_hour]

CHECKPOINT is a run with a vision tokenizer, such as the demo's (`runs/demo`). The demo's clips are concatenated to a
file of the given length, 25 frames a second at 320 x 240; then `lwm ask` runs in a process of its own, and its wall
time and peak memory are printed. The context is raised to what the video needs: what is measured is the machinery, and
a model trained at 4096 tokens will not say anything sensible about 100,000.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import av
import numpy as np

from data.demo_material import demo_clips
from data.video import read_frames

_FPS, _WIDTH, _HEIGHT = 25, 320, 240


def write_hour(path: Path, hours: float) -> float:
    """The clips over and over, for `hours`; returns the seconds of video in the file."""
    clips = []
    for file in demo_clips().values():
        frames = read_frames(file, fps=_FPS).pixels
        clips.append(
            [av.VideoFrame.from_ndarray(frame, format="rgb24").reformat(_WIDTH, _HEIGHT, "yuv420p") for frame in frames]
        )
    total, count = round(hours * 3600 * _FPS), 0
    partial = path.with_name(f".{path.name}")
    with av.open(str(partial), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=_FPS, options={"preset": "ultrafast", "crf": "28"})
        stream.width, stream.height, stream.pix_fmt = _WIDTH, _HEIGHT, "yuv420p"
        order = np.random.default_rng(0)
        while count < total:
            for frame in clips[int(order.integers(len(clips)))]:
                if count == total:
                    break
                frame.pts = count
                container.mux(stream.encode(frame))
                count += 1
        container.mux(stream.encode())
    os.replace(partial, path)
    return count / _FPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--fps", type=float, default=0.5, help="frames per second that the model sees")
    parser.add_argument("--max-length", type=int, default=200_000, help="context in tokens")
    parser.add_argument("--out", type=Path, default=Path("runs/one_hour"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    video = options.out / f"{options.hours:g}h.mp4"
    if not video.exists():
        begin = time.monotonic()
        seconds = write_hour(video, options.hours)
        print(f"{video}: {seconds:.0f} s of video written in {time.monotonic() - begin:.0f} s")
    command = [
        sys.executable, "-c", "from lwm.cli import main; main()", "ask", "--checkpoint", str(options.checkpoint),
        "--video", str(video), "--fps", str(options.fps), "--max-length", str(options.max_length),
        "--system", "", "--order", "media-first", "--max-new-tokens", "16",
        "--question", "Describe the video.", "--question", "What number is on the plate?",
    ]  # fmt: skip
    begin = time.monotonic()
    subprocess.run(command, check=True)
    wall = time.monotonic() - begin
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    peak_gb = peak / (1 << 30 if sys.platform == "darwin" else 1 << 20)
    print(
        json.dumps({"hours": options.hours, "fps": options.fps, "wall_s": round(wall, 1), "peak_gb": round(peak_gb, 2)})
    )


if __name__ == "__main__":
    main()
