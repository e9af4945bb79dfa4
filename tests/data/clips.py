"""Clips written for the tests: every frame carries its number as blocks of black and white."""

from fractions import Fraction

import av
import numpy as np

BITS = 8
SIZE = 64


def numbered_frame(number, height=SIZE, width=SIZE):
    """Eight blocks (2 rows of 4) hold the number's bits, least first; grey elsewhere never occurs."""
    bits = np.array([number >> k & 1 for k in range(BITS)], np.uint8).reshape(2, 4)
    rows, columns = np.arange(height) * 2 // height, np.arange(width) * 4 // width
    return np.repeat((bits[rows][:, columns] * 255)[..., None], 3, axis=2).astype(np.uint8)


def number_of(picture):
    """Reads the number back from the middles of the blocks, whatever the picture's size."""
    height, width = picture.shape[:2]
    middles = [(height * (2 * r + 1) // 4, width * (2 * c + 1) // 8) for r in range(2) for c in range(4)]
    levels = [float(picture[y - 1 : y + 2, x - 1 : x + 2].mean()) for y, x in middles]
    assert all(level < 80 or level > 175 for level in levels), f"blurred blocks: {levels}"
    return sum((level > 128) << k for k, level in enumerate(levels))


def write_clip(
    path,
    num_frames=20,
    *,
    codec="libx264",
    fps=10,
    height=SIZE,
    width=SIZE,
    pixel_format="yuv420p",
    options=None,
    container_options=None,
    milliseconds=None,
    rotation=None,
    aspect=None,
    keyframe_every=None,
):
    """Writes frames 0, 1, ...; `milliseconds` gives each its own time instead of a constant rate."""
    with av.open(str(path), "w", options=container_options or {}) as container:
        stream = container.add_stream(codec, rate=fps)
        stream.height, stream.width, stream.pix_fmt = height, width, pixel_format
        stream.options = options or {}
        if keyframe_every is not None:
            stream.gop_size = keyframe_every
        if aspect is not None:
            stream.codec_context.sample_aspect_ratio = aspect
        if milliseconds is not None:
            stream.codec_context.time_base = stream.time_base = Fraction(1, 1000)
        if rotation is not None:
            stream.set_display_rotation(rotation)
        for number in range(num_frames):
            frame = av.VideoFrame.from_ndarray(numbered_frame(number, height, width), format="rgb24")
            if milliseconds is not None:
                frame.pts, frame.time_base = milliseconds[number], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def cut_without_decoding(source, target, seconds):
    """What `ffmpeg -ss SECONDS -c copy` does: packets from the key frame before, an edit list hiding the first ones."""
    with av.open(str(source)) as old, av.open(str(target), "w", options={"avoid_negative_ts": "disabled"}) as new:
        stream = old.streams.video[0]
        copy = new.add_stream_from_template(stream)
        shift = round(seconds / stream.time_base)
        old.seek(shift, stream=stream)
        for packet in old.demux(stream):
            if packet.dts is None:
                continue
            packet.pts -= shift
            packet.dts -= shift
            packet.stream = copy
            new.mux(packet)
    return target


def packet_positions(path):
    """Where in the file each packet of video starts, in the order of the file."""
    with av.open(str(path)) as container:
        return [packet.pos for packet in container.demux(video=0) if packet.size]
