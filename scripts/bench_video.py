"""Time and memory of reading videos, by reader and by how far apart the frames are.

    python scripts/bench_video.py                      # clips of every class, and an hour made of the demo's clips
    python scripts/bench_video.py --hours 0.1 --file my.mp4

Each measurement is a process of its own, so that its peak memory is its own. The hour is one real clip repeated without
re-encoding; `plain` is PyAV from the start, `auto` what `read_frames` does by itself. decord is timed through our own
reader: it is asked for one frame after another, which is where it is exact.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAM = """
import json, resource, sys, time
from pathlib import Path
from data.video import FrameStream, Sampling, read_frames
path, reader, options, stream = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), sys.argv[4] == "stream"
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
begin, cpu = time.perf_counter(), time.process_time()
if stream:
    count = sum(1 for _ in FrameStream(path, Sampling(**options), reader))
    kept = 0
else:
    frames = read_frames(path, reader=reader, **options)
    count, kept = len(frames.pixels), frames.pixels.nbytes
seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
above = (peak - before) / 1024 - kept / 2**20
print(json.dumps({"frames": count, "seconds": seconds, "cpu": cpu, "above": above, "kept": kept / 2**20}))
"""


def measure(path: Path, reader: str, options: dict[str, float], stream: bool = False) -> str:
    """One line of a table; the reason where the reader refuses the file."""
    command = [sys.executable, "-c", PROGRAM, str(path), reader, json.dumps(options), "stream" if stream else "read"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["died"])[-1].split(": ", 1)[-1][-90:]
    said = json.loads(done.stdout)
    return (
        f"{said['frames']:6d} frames {said['seconds']:7.2f} s ({said['cpu']:.1f} s of processors), peak "
        f"{said['above']:5.0f} MB above the {said['kept']:4.0f} MB kept"
    )


def repeated(clip: Path, target: Path, seconds: float) -> Path:
    """A clip after itself until it lasts so long, its packets copied."""
    import av

    with av.open(str(target), "w") as new:
        offset, copy = 0, None
        while True:
            with av.open(str(clip)) as old:
                stream = old.streams.video[0]
                if copy is None:
                    copy = new.add_stream_from_template(stream)
                end = 0
                for packet in old.demux(stream):
                    if packet.dts is None or packet.pts is None:
                        continue
                    end = max(end, packet.pts + (packet.duration or 0))
                    packet.pts += offset
                    packet.dts += offset
                    packet.stream = copy
                    new.mux(packet)
                offset += end
                if offset * float(stream.time_base) >= seconds:
                    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, help="a video of yours, in place of the long one")
    parser.add_argument("--hours", type=float, default=1.0, help="length of the long file [1]")
    parser.add_argument("--size", type=int, default=256, help="side of the frames [256]")
    arguments = parser.parse_args()
    from data.demo_material import demo_clips

    with tempfile.TemporaryDirectory() as folder:
        print("short clips, every frame")
        for name, clip in demo_clips().items():
            for reader in ("pyav", "decord"):
                print(f"  {name:20s} {reader:7s} {measure(clip, reader, {'size': arguments.size})}", flush=True)
        long = arguments.file
        if long is None:
            long = repeated(demo_clips()["bikes"], Path(folder) / "long.mp4", arguments.hours * 3600)
        print(f"{long.name}: {long.stat().st_size / 1e6:.0f} MB")
        for title, options in (
            ("every second", {"fps": 1.0}),
            ("every 20 s", {"fps": 0.05}),
            ("64 frames", {"num_frames": 64}),
        ):
            wanted = {**options, "size": arguments.size}
            for name, reader, stream in (
                ("auto", "auto", False),
                ("auto, streamed", "auto", True),
                ("plain", "pyav", False),
            ):
                print(f"  {title:13s} {name:15s} {measure(long, reader, wanted, stream)}", flush=True)


if __name__ == "__main__":
    main()
