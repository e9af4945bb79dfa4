"""Corpora from sources: a folder of ordinary clips, each frame the right one, and what is wrong reported."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from data.corpus import Corpus
from data.examples import untokenize
from data.prepare import Limits
from data.sources import open_source
from data.text import TextTokenizer, train_tokenizer
from lwm import corpora
from lwm.config import RunConfig, load_config
from lwm.corpora import BuildOptions


def _clips() -> ModuleType:
    spec = importlib.util.spec_from_file_location("clips", Path(__file__).parents[1] / "data" / "clips.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


clips = _clips()


class Reads:
    """In place of a vision tokenizer: a frame's codes say which number its pixels show."""

    fingerprint = "reads numbers"
    codes_per_frame = 64

    def encode(self, pixels: np.ndarray) -> np.ndarray:
        assert pixels.shape[1:] == (64, 64, 3)
        return np.array([[clips.number_of(picture)] * self.codes_per_frame for picture in pixels])


ORDINARY: dict[str, dict[str, Any]] = {
    "h264.mp4": {},
    "h264.mkv": {},
    "h264.mov": {},
    "h264.ts": {},
    "hevc.mp4": {"codec": "libx265", "options": {"x265-params": "log-level=none"}},
    "vp9.webm": {"codec": "libvpx-vp9", "options": {"deadline": "realtime", "cpu-used": "8"}},
    "av1.mp4": {"codec": "libsvtav1", "options": {"preset": "12"}},
    "av1.webm": {"codec": "libsvtav1", "options": {"preset": "12"}},
    "deep/h264.flv": {},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("folder")
    (root / "deep").mkdir()
    for name, options in ORDINARY.items():
        clips.write_clip(root / name, 40, fps=4, **options)
    clips.write_clip(root / "turned.mp4", 40, fps=4, rotation=180)
    hidden = clips.write_clip(root / ".whole.mp4", 60, fps=4, keyframe_every=15)
    clips.cut_without_decoding(hidden, root / "stream_copy.mp4", 5.0)
    faststart = {"movflags": "faststart"}
    whole = clips.write_clip(root / ".fast.mp4", 60, fps=4, options={"bf": "0"}, container_options=faststart)
    cut = whole.read_bytes()[: clips.packet_positions(whole)[30] + 5]
    (root / "damaged.mp4").write_bytes(cut)
    (root / "junk.mp4").write_bytes(b"not a video at all")
    captions = [{"file_name": name, "text": "numbers"} for name in (*ORDINARY, "damaged.mp4", "junk.mp4")]
    (root / "captions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in captions))
    return root


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.model"
    train_tokenizer(["Describe the video. Generate a video of numbers"] * 3, path, size=130)
    return path


def config_for(text: Path, directory: Path) -> RunConfig:
    return load_config("tiny", [f"tokenizers.text={text}", f"corpora.text.directory={directory}"])


# Any: it has of a vision tokenizer what building a corpus needs.
READS: Any = Reads()


def build(config: RunConfig, folder: Path, **options: Any) -> Corpus:
    return corpora.build_from_source(config, "text", open_source(folder), BuildOptions(**options), vision=READS)


def test_a_folder_of_ordinary_clips(folder: Path, text: Path, tmp_path: Path) -> None:
    config = config_for(text, tmp_path / "corpus")
    heard: list[tuple[int, str]] = []
    corpus = corpora.build_from_source(
        config,
        "text",
        open_source(folder),
        BuildOptions(Limits(fps=2), processes=2, max_bad=0.2),
        vision=READS,
        progress=lambda done, note: heard.append((done, note)),
    )
    tokenizer = TextTokenizer.load(text)
    shown = {}
    for example in corpus:
        numbers = [
            piece for piece in untokenize(example.tokens, tokenizer, corpus.vocabulary) if not isinstance(piece, str)
        ]
        assert len(numbers) == 1
        shown[example.id] = numbers[0][:, 0].tolist()
    every = list(range(0, 40, 2))
    for name in ORDINARY:
        assert shown[f"{name} video->text"] == shown[f"{name} text->video"] == every, name
    # Half a turn puts the eight bits in the opposite order.
    assert shown["turned.mp4"] == [int(f"{number:08b}"[::-1], 2) for number in every]
    assert shown["stream_copy.mp4"] == list(range(20, 60, 2))
    damaged = shown["damaged.mp4 video->text"]
    assert damaged == every[: len(damaged)]
    assert len(damaged) in (14, 15)
    assert len(shown) == 2 * len(ORDINARY) + 4
    lost = {entry["id"]: entry["reason"] for entry in corpus.manifest["skipped"]}
    assert set(lost) == {"junk.mp4 video->text", "junk.mp4 text->video"}
    assert "junk.mp4: not a video" in lost["junk.mp4 video->text"]
    reported = [json.loads(line) for line in (corpus.directory / "damaged.jsonl").read_text().splitlines()]
    assert {entry["id"] for entry in reported} == {"damaged.mp4 video->text", "damaged.mp4 text->video"}
    assert "damaged.mp4: damaged or cut, good up to 7." in reported[0]["reason"]
    assert heard[-1][0] == len(ORDINARY) + 4
    assert "frames/s" in heard[-1][1]
    corpus.verify()


def test_other_rules_are_other_corpora_and_too_much_that_is_bad_is_refused(
    folder: Path, text: Path, tmp_path: Path
) -> None:
    config = config_for(text, tmp_path / "corpus")
    with pytest.raises(ValueError, match=r"2 of 24 examples are unusable, more than the allowed 5%; the first: 'junk"):
        build(config, folder, limits=Limits(max_frames=4), max_bad=0.05)
    first = build(config, folder, limits=Limits(max_frames=4))
    assert int(np.max(first.lengths)) < 4 * 65 + 100
    with pytest.raises(ValueError, match="made from other input"):
        build(config, folder, limits=Limits(max_frames=5))
    assert build(config, folder, limits=Limits(max_frames=4)).fingerprint == first.fingerprint
