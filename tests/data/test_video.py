"""Frames by timestamp, against clips whose pixels say which frame they are."""

import importlib.util
import struct
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data.container import Index
from data.readers import seek_frames, worth_seeking
from data.video import FrameStream, Sampling, VideoError, read_frames, read_image, seconds_of

# importlib mode keeps the tests' folder off the path.
_spec = importlib.util.spec_from_file_location("clips", Path(__file__).with_name("clips.py"))
clips = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(clips)
write_clip, number_of = clips.write_clip, clips.number_of


def numbers(frames):
    return [number_of(picture) for picture in frames.pixels]


CLASSES = {
    "h264.mp4": {},
    "no_b.mp4": {"options": {"bf": "0"}},
    "h264.mkv": {},
    "h264.mov": {},
    "h264.ts": {},
    "h264.flv": {},
    "open_gop.mp4": {"keyframe_every": 6, "options": {"x264-params": "open-gop=1:scenecut=0:bframes=2"}},
    "intra_refresh.mkv": {"keyframe_every": 6, "options": {"x264-params": "intra-refresh=1:scenecut=0:bframes=0"}},
    "hevc.mp4": {"codec": "libx265", "options": {"x265-params": "log-level=none"}},
    "open_gop_hevc.mkv": {
        "codec": "libx265",
        "keyframe_every": 6,
        "options": {"x265-params": "log-level=none:open-gop=1:keyint=6:min-keyint=6:scenecut=0:bframes=2"},
    },
    "vp8.webm": {"codec": "libvpx"},
    "vp9.webm": {"codec": "libvpx-vp9", "keyframe_every": 6, "options": {"deadline": "realtime", "cpu-used": "8"}},
    "vp9.mkv": {"codec": "libvpx-vp9", "options": {"deadline": "realtime", "cpu-used": "8"}},
    "av1.mp4": {"codec": "libsvtav1", "keyframe_every": 6, "options": {"preset": "12"}},
    "av1.webm": {"codec": "libsvtav1", "options": {"preset": "12"}},
    "wmv2.wmv": {"codec": "wmv2"},
    "prores.mov": {"codec": "prores_ks", "pixel_format": "yuv422p10le"},
    "mpeg2.mpg": {"codec": "mpeg2video", "fps": 25},
    "mpeg4_b.avi": {"codec": "mpeg4", "options": {"bf": "2"}},
    "mpeg4_b.mp4": {"codec": "mpeg4", "options": {"bf": "2"}},
    "mjpeg.mov": {"codec": "mjpeg", "pixel_format": "yuvj420p"},
    "ffv1.mkv": {"codec": "ffv1"},
    "moving.gif": {"codec": "gif", "pixel_format": "rgb8"},
}


@pytest.mark.parametrize("name", CLASSES)
def test_every_frame_of_every_class_is_the_right_one(tmp_path, name):
    options = CLASSES[name]
    fps = options.get("fps", 10)
    path = write_clip(tmp_path / name, 20, **options)
    frames = read_frames(path)
    assert frames.pixels.dtype == np.uint8
    assert frames.pixels.shape == (20, 64, 64, 3)
    assert frames.seconds.dtype == np.float64
    assert numbers(frames) == list(range(20))
    np.testing.assert_allclose(frames.seconds, np.arange(20) / fps, atol=6e-4)
    assert frames.truncated_at is None
    # Every 4th frame, then the middles of four equal parts: 2.5, 7.5, 12.5, 17.5 frames in.
    assert numbers(read_frames(path, fps=fps / 4)) == [0, 4, 8, 12, 16]
    assert numbers(read_frames(path, num_frames=4)) == [2, 7, 12, 17]
    assert numbers(read_frames(path, start=3 / fps, end=7 / fps)) == [3, 4, 5, 6]


LONG = {
    "h264.mp4": {"keyframe_every": 6},
    "sub.mkv": {"keyframe_every": 6},
    "open_gop.mp4": CLASSES["open_gop.mp4"],
    "open_gop_hevc.mkv": CLASSES["open_gop_hevc.mkv"],
    "intra_refresh.mkv": CLASSES["intra_refresh.mkv"],
    "vp9.webm": CLASSES["vp9.webm"],
    "av1.mp4": CLASSES["av1.mp4"],
    "h264.ts": {"keyframe_every": 6},
    "mpeg4_b.mp4": {**CLASSES["mpeg4_b.mp4"], "keyframe_every": 6},
    "mjpeg.mov": CLASSES["mjpeg.mov"],
}
SEEKS = {"h264.mp4", "sub.mkv", "open_gop_hevc.mkv", "vp9.webm", "av1.mp4", "mjpeg.mov"}


@pytest.mark.parametrize("name", LONG)
def test_going_from_key_frame_to_key_frame_gives_the_frames_of_reading_on(tmp_path, name):
    path = write_clip(tmp_path / name, 120, fps=4, **LONG[name])
    index = Index.of(path)
    assert worth_seeking(index, [30, 60, 90]) == (name in SEEKS)
    for options in ({"fps": 0.2}, {"fps": 0.13, "start": 3.1, "end": 27}, {"num_frames": 4}, {"fps": 1, "start": 20.2}):
        ours, plain = read_frames(path, **options), read_frames(path, **options, reader="pyav")
        np.testing.assert_array_equal(ours.seconds, plain.seconds)
        np.testing.assert_array_equal(ours.pixels, plain.pixels)
        assert numbers(ours) == (plain.seconds * 4).round().astype(int).tolist()
        assert ours.truncated_at is None


def test_every_frame_reached_through_key_frames_is_bit_for_bit_the_same(tmp_path):
    path = write_clip(tmp_path / "a.mp4", 60, fps=4, keyframe_every=7)
    index, whole = Index.of(path), read_frames(path, reader="pyav").pixels
    for wanted in ([0], [13, 13, 14], [59], [5, 6, 7, 8, 35, 41, 42, 58]):
        shown = list(seek_frames(path, index, wanted))
        assert [float(frame.seconds) for frame in shown] == [number / 4 for number in wanted]
        for number, frame in zip(wanted, shown, strict=True):
            np.testing.assert_array_equal(frame.pixels(), whole[number])


def test_damage_met_on_the_way_from_key_frame_to_key_frame(tmp_path):
    """Reading from the start takes over, and ends before the damage as it always does."""
    whole = write_clip(
        tmp_path / "whole.mp4", 120, fps=4, keyframe_every=6, container_options={"movflags": "faststart"}
    )
    content = bytearray(whole.read_bytes())
    start, end = (clips.packet_positions(whole)[packet] for packet in (60, 64))
    content[start:end] = bytes(end - start)
    damaged = tmp_path / "a.mp4"
    damaged.write_bytes(content)
    assert worth_seeking(Index.of(damaged), [20, 62, 100])
    ours, plain = read_frames(damaged, fps=0.5), read_frames(damaged, fps=0.5, reader="pyav")
    np.testing.assert_array_equal(ours.pixels, plain.pixels)
    assert ours.truncated_at == plain.truncated_at
    assert 10 < plain.truncated_at <= 15.5


@pytest.mark.parametrize("rate", [Fraction(30000, 1001), 30, 24])
@pytest.mark.parametrize("name", ["a.mp4", "a.mkv"])
def test_asking_for_the_files_own_rate_gives_every_frame_once(tmp_path, name, rate):
    path = write_clip(tmp_path / name, 40, fps=rate)
    assert numbers(read_frames(path, fps=float(rate))) == list(range(40))


MOMENTS = [0, 100, 150, 400, 1000, 1010, 1500, 3000]


@pytest.mark.parametrize(("name", "codec"), [("a.mp4", "libx264"), ("a.mkv", "libx264"), ("a.webm", "libvpx-vp9")])
def test_variable_frame_rate_is_read_by_the_clock(tmp_path, name, codec):
    path = write_clip(tmp_path / name, len(MOMENTS), codec=codec, milliseconds=MOMENTS)
    frames = read_frames(path)
    assert numbers(frames) == list(range(8))
    np.testing.assert_allclose(frames.seconds, np.array(MOMENTS) / 1000, atol=6e-4)
    sampled = read_frames(path, fps=5, end=3.05)
    expected = [max(k for k, moment in enumerate(MOMENTS) if moment <= 200 * step) for step in range(16)]
    assert numbers(sampled) == expected
    np.testing.assert_allclose(sampled.seconds, [MOMENTS[k] / 1000 for k in expected], atol=6e-4)


def test_start_end_fps_and_count_together(tmp_path):
    path = write_clip(tmp_path / "a.mp4", 30)
    assert numbers(read_frames(path, fps=5, start=1.0, end=2.0)) == [10, 12, 14, 16, 18]
    assert numbers(read_frames(path, fps=5, start=1.0, num_frames=3)) == [10, 12, 14]
    assert numbers(read_frames(path, num_frames=2, start=1.0, end=2.0)) == [12, 17]
    assert numbers(read_frames(path, fps=20, end=0.3)) == [0, 0, 1, 1, 2, 2]
    assert numbers(read_frames(path, num_frames=40))[:4] == [0, 1, 1, 2]
    with pytest.raises(VideoError, match=r"a\.mp4: nothing between 9\.0 s and the end; the video lasts 3\.000 s"):
        read_frames(path, fps=1, start=9.0)


@pytest.mark.parametrize("shape", [(64, 96), (96, 64), (50, 130)])
def test_short_side_scaled_and_centre_kept(tmp_path, shape):
    height, width = shape
    path = write_clip(tmp_path / "a.mkv", 3, codec="ffv1", height=height, width=width)
    frames = read_frames(path, size=32)
    assert frames.pixels.shape == (3, 32, 32, 3)
    whole = Image.fromarray(read_frames(path, num_frames=1).pixels[0])
    scale = 32 / min(shape)
    tall, wide = round(height * scale), round(width * scale)
    left, top = (wide - 32) // 2, (tall - 32) // 2
    resized = whole.resize((wide, tall), Image.Resampling.BICUBIC).crop((left, top, left + 32, top + 32))
    np.testing.assert_array_equal(frames.pixels[1], np.asarray(resized))


def track_matrix(path):
    """a, b, c, d of the first tkhd box (ISO/IEC 14496-12): pixel (x, y) is shown at (a x + c y, b x + d y)."""
    content = path.read_bytes()
    at = content.index(b"tkhd") + 4 + 40
    a, b, _, c, d, *_ = (value / 65536 for value in struct.unpack(">9i", content[at : at + 36]))
    return np.array([[a, c], [b, d]])


@pytest.mark.parametrize("rotation", [0, 90, 180, -90])
def test_rotation_in_the_header_is_applied(tmp_path, rotation):
    path = write_clip(tmp_path / "a.mp4", 2, height=64, width=128, rotation=rotation)
    upright = read_frames(path).pixels[1]
    # Frame 1 is white only in its top left block; see where the header's matrix sends that block's middle.
    middle = np.array([16.0, 16.0]) - np.array([64.0, 32.0])
    height, width = (64, 128) if rotation in (0, 180) else (128, 64)
    assert upright.shape == (height, width, 3)
    x, y = (track_matrix(path) @ middle + np.array([width / 2, height / 2])).astype(int)
    assert upright[y - 3 : y + 3, x - 3 : x + 3].mean() > 200
    assert upright.mean() < 60


def test_pixels_that_are_not_square_are_made_so(tmp_path):
    path = write_clip(tmp_path / "a.mp4", 2, aspect=Fraction(2, 1))
    assert read_frames(path).pixels.shape == (2, 64, 128, 3)
    assert read_frames(path, size=32).pixels.shape == (2, 32, 32, 3)


def test_edit_lists_hide_what_stands_before_the_cut(tmp_path):
    whole = write_clip(tmp_path / "whole.mp4", 40, keyframe_every=15)
    cut = clips.cut_without_decoding(whole, tmp_path / "cut.mp4", 2.0)
    assert b"elst" in cut.read_bytes()
    frames = read_frames(cut)
    assert numbers(frames) == list(range(20, 40))
    assert frames.truncated_at is None
    assert numbers(read_frames(cut, num_frames=4)) == [22, 27, 32, 37]
    with pytest.raises(VideoError, match=r"decord.*edit list"):
        read_frames(cut, reader="decord")


@pytest.mark.parametrize("options", [{"size": 48, "fps": 2.5}, {"num_frames": 3}, {"start": 0.5}])
@pytest.mark.parametrize("name", ["h264.mp4", "no_b.mp4"])
def test_decord_agrees_bit_for_bit_where_it_is_accepted(tmp_path, name, options):
    pytest.importorskip("decord", reason="decord ships no wheel for this machine")
    path = write_clip(tmp_path / name, 20, **CLASSES[name])
    ours, theirs = read_frames(path, reader="pyav", **options), read_frames(path, reader="decord", **options)
    np.testing.assert_array_equal(ours.pixels, theirs.pixels)
    np.testing.assert_array_equal(ours.seconds, theirs.seconds)


@pytest.mark.parametrize(
    "name", [name for name in CLASSES if not name.startswith(("h264.m", "no_b", "open_gop.")) or name == "h264.mkv"]
)
def test_decord_is_refused_where_it_is_wrong(tmp_path, name):
    path = write_clip(tmp_path / name, 5, **CLASSES[name])
    with pytest.raises(VideoError, match=r"decord.*not exact"):
        read_frames(path, reader="decord")


def test_decord_is_refused_for_a_variable_rate(tmp_path):
    path = write_clip(tmp_path / "a.mp4", len(MOMENTS), milliseconds=MOMENTS)
    with pytest.raises(VideoError, match="variable frame rate"):
        read_frames(path, reader="decord")


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.webm"])
def test_a_file_cut_short_keeps_its_good_frames(tmp_path, name):
    codec = "libvpx-vp9" if name.endswith("webm") else "libx264"
    faststart = {"movflags": "faststart"} if name.endswith("mp4") else None
    whole = write_clip(tmp_path / f"whole_{name}", 60, codec=codec, container_options=faststart)
    cut = tmp_path / name
    cut.write_bytes(whole.read_bytes()[: clips.packet_positions(whole)[40] + 5])
    frames = read_frames(cut)
    count = len(frames.seconds)
    # Frames wait for later ones in the decoder; those are lost with the packet that was cut.
    assert 34 <= count <= 40
    assert numbers(frames) == list(range(count))
    assert frames.truncated_at == pytest.approx(count / 10, abs=2e-3)
    spread = read_frames(cut, num_frames=4)
    assert spread.pixels.shape[0] == 4
    assert spread.truncated_at == frames.truncated_at
    assert max(numbers(spread)) < count
    # What was asked for stands before the damage: nothing is missing.
    assert read_frames(cut, fps=10, num_frames=5).truncated_at is None


def test_damage_in_the_middle_ends_the_good_frames(tmp_path):
    whole = write_clip(tmp_path / "whole.mp4", 60, container_options={"movflags": "faststart"})
    content = bytearray(whole.read_bytes())
    start, end = (clips.packet_positions(whole)[packet] for packet in (30, 31))
    content[start:end] = bytes(end - start)
    damaged = tmp_path / "a.mp4"
    damaged.write_bytes(content)
    frames = read_frames(damaged)
    count = len(frames.seconds)
    assert 24 <= count <= 30
    assert numbers(frames) == list(range(count))
    assert frames.truncated_at == pytest.approx(count / 10)
    spread = read_frames(damaged, num_frames=2)
    assert numbers(spread) == [count // 4, count * 3 // 4]
    assert spread.truncated_at == pytest.approx(count / 10)


def test_a_stream_joined_midway_starts_at_its_first_good_frame(tmp_path):
    whole = write_clip(tmp_path / "whole.ts", 40, keyframe_every=10, options={"bf": "0", "sc_threshold": "0"})
    joined = tmp_path / "a.ts"
    joined.write_bytes(whole.read_bytes()[188 * 8 :])
    frames = read_frames(joined)
    first = numbers(frames)[0]
    assert first % 10 == 0
    assert numbers(frames) == list(range(first, 40))
    assert frames.seconds[0] == 0


def test_streaming_gives_the_same_frames(tmp_path):
    path = write_clip(tmp_path / "a.mp4", 20)
    stream = FrameStream(path, Sampling(fps=5, size=32))
    streamed = list(stream)
    whole = read_frames(path, fps=5, size=32)
    np.testing.assert_array_equal(np.stack([picture for picture, _ in streamed]), whole.pixels)
    assert [moment for _, moment in streamed] == whole.seconds.tolist()
    assert stream.truncated_at is None


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.webp", "a.bmp"])
def test_images_come_through_the_same_door(tmp_path, name):
    Image.fromarray(clips.numbered_frame(37, 64, 96)).save(tmp_path / name)
    frames = read_frames(tmp_path / name)
    assert frames.pixels.shape == (1, 64, 96, 3)
    assert numbers(frames) == [37]
    assert frames.seconds.tolist() == [0.0]
    small = read_frames(tmp_path / name, size=32, num_frames=1).pixels
    assert small.shape == (1, 32, 32, 3)
    np.testing.assert_array_equal(read_image((tmp_path / name).read_bytes(), size=32), small[0])
    assert seconds_of(tmp_path / name) == 0


def test_transparent_pixels_become_white_and_exif_turns_the_picture(tmp_path):
    layer = np.zeros((8, 8, 4), np.uint8)
    layer[:4] = [10, 20, 30, 255]
    Image.fromarray(layer).save(tmp_path / "a.png")
    (picture,) = read_frames(tmp_path / "a.png").pixels
    assert picture[0, 0].tolist() == [10, 20, 30]
    assert picture[7, 7].tolist() == [255, 255, 255]
    exif = Image.Exif()
    exif[0x0112] = 6  # shown after a quarter turn clockwise
    Image.fromarray(clips.numbered_frame(1, 64, 96)).save(tmp_path / "turned.jpg", exif=exif, quality=95)
    (turned,) = read_frames(tmp_path / "turned.jpg").pixels
    assert turned.shape == (96, 64, 3)
    assert turned[:20, 36:].mean() > 240


def make_sound_only(path):
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (None, "there is no such file"),
        (lambda path: path.mkdir(), "not a file"),
        (lambda path: path.write_bytes(b""), "the file is empty"),
        (lambda path: path.write_text("hello " * 100), "not a video"),
        (lambda path: path.write_bytes(np.random.default_rng(0).bytes(5000)), "not a video"),
        (make_sound_only, "there is no video"),
        (lambda path: path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(50)), "no frame"),
    ],
)
@pytest.mark.parametrize("options", [{}, {"num_frames": 3}])
def test_what_cannot_be_read_is_named_with_its_reason(tmp_path, make, reason, options):
    path = tmp_path / "odd.mp4"
    if make is not None:
        make(path)
    with pytest.raises(VideoError, match=rf"odd\.mp4: .*({reason})") as caught:
        read_frames(path, **options)
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)


def test_a_header_without_frames_is_named(tmp_path):
    whole = write_clip(tmp_path / "whole.mp4", 20, container_options={"movflags": "faststart"})
    content = whole.read_bytes()
    (tmp_path / "a.mp4").write_bytes(content[: content.index(b"mdat") + 8])
    with pytest.raises(VideoError, match=r"a\.mp4: .*(no frame|not a video)"):
        read_frames(tmp_path / "a.mp4")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fps": 0}, "fps is 0"),
        ({"fps": float("nan")}, "fps is nan"),
        ({"num_frames": -1}, "num_frames is -1"),
        ({"size": 0}, "size is 0"),
        ({"start": -1}, "start is -1"),
        ({"start": 2, "end": 1}, "end is 1; it must be after start"),
        ({"reader": "opencv"}, "reader is 'opencv'; it must be one of auto, pyav, decord"),
    ],
)
def test_impossible_requests_name_the_argument(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        read_frames(tmp_path / "a.mp4", **options)
