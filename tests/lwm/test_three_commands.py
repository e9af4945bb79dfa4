"""From a folder of videos with captions to a trained model, by the three commands that the README gives."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data import synthetic
from data.corpus import Corpus
from lwm import cli, media
from lwm.telemetry import METRICS_FILE, read_metrics

README = Path(__file__).parents[2] / "README.md"
# The same commands for a model that is trained in seconds, on the devices that there are.
SMALLER = [
    "model.hidden_size=32", "model.intermediate_size=32", "model.num_layers=1", "model.num_heads=2",
    "vqgan.hidden_channels=4", "vqgan.channel_mult=[1,1]", "vqgan.resolution=16", "vqgan.num_embeddings=16",
    "stages.s2048.seq_len=160", "stages.s2048.steps=2", "stages.s2048.remat=none",
    "stages.s2048.optimizer.warmup_steps=0",
    "telemetry.wandb=off",
]  # fmt: skip


def commands() -> list[list[str]]:
    text = README.read_text(encoding="utf-8")
    section = text[text.index("## Train on your own videos") :]
    block = re.search(r"```\n(.*?)```", section, re.DOTALL)
    assert block is not None
    return [shlex.split(line, comments=True)[1:] for line in block.group(1).splitlines()]


def test_the_readmes_three_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    Path("my_clips").mkdir()
    lines = ["file_name,caption"]
    for number in range(4):
        pixels, caption = synthetic.shape_clip(rng, 12, 32)
        media.write(f"my_clips/{number}.mp4", pixels, fps=4.0)
        lines.append(f'{number}.mp4,"{caption}"')
    Path("my_clips/captions.csv").write_text("\n".join(lines))
    Path("my_clips/broken.mp4").write_bytes(b"nothing")

    tokenize, build, train = commands()
    assert (tokenize[:2], build[:2], train[:1]) == (["tokenizer", "train"], ["data", "build"], ["train"])
    assert cli.run([*tokenize, *SMALLER, "--steps", "2", "--batch", "2"]) == 0
    out = capsys.readouterr().out
    assert "1 files could not be read; the first: " in out
    assert Image.open("runs/clips/vqgan/training.png").size[0] > 500
    trained = Path("runs/clips/vqgan/vision_tokenizer.json").read_text()
    assert cli.run([*tokenize, *SMALLER]) == 2, "both are there"
    Path("runs/clips/text.model").unlink()
    assert cli.run([*tokenize, *SMALLER]) == 0
    assert "vqgan is there already and stays" in capsys.readouterr().out
    assert Path("runs/clips/vqgan/vision_tokenizer.json").read_text() == trained
    # Of nine examples one is lost with the broken file.
    assert cli.run([*build, *SMALLER, "--max-bad", "0.2"]) == 0
    out = capsys.readouterr().out
    assert "1 of 5 files have no caption" in out
    assert "broken.mp4: not a video" in out
    corpus = Corpus.open("runs/clips/corpora/clips")
    assert len(corpus) == 8
    assert int(np.max(corpus.lengths)) <= 160
    look = ["data", "inspect", "runs/clips/corpora/clips", "--config", "clips", "--out", "look", "--examples", "2"]
    assert cli.run(look) == 2, "the configuration without the overrides has another vision tokenizer"
    assert cli.run(["data", "verify", "runs/clips/corpora/clips"]) == 0
    assert cli.run([*train, *SMALLER]) == 0
    losses = [
        record["train/loss"] for record in read_metrics(Path("runs/clips") / METRICS_FILE) if "train/loss" in record
    ]
    assert len(losses) == 2
    assert all(0 < loss < 20 for loss in losses)


def test_inspect_decodes_what_it_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from data.build import build_corpus
    from data.examples import document, tokenize
    from data.text import train_tokenizer
    from data.vocabulary import Vocabulary

    sentences = [f"number {k} is here" for k in range(40)]
    tokenizer = train_tokenizer(sentences, tmp_path / "t.model", size=110)
    vocabulary = Vocabulary(512, 1024, 1056)
    examples = [tokenize(document(" ".join(sentences[: k + 1]), id=f"d{k}"), tokenizer, vocabulary) for k in range(40)]
    made_with = {"text": tokenizer.fingerprint}
    build_corpus(tmp_path / "c", "text", examples, vocabulary=vocabulary, input_fingerprint="x", tokenizers=made_with)
    command = ["data", "inspect", str(tmp_path / "c"), "--config", "tiny", "--out", str(tmp_path / "look")]
    config = tmp_path / "tiny.yaml"
    from lwm.config import find_config

    config.write_text(find_config("tiny").read_text().replace("runs/demo/text.model", str(tmp_path / "t.model")))
    capsys.readouterr()
    assert cli.run([*command[:4], str(config), *command[5:]]) == 0
    out = capsys.readouterr().out
    assert "text: number 0 is here number 1 is here" in out
    assert re.search(r"rows of 512 \(stage s512\): masked \d+\.\d+% full, one example a row \d+", out)
    assert Image.open(tmp_path / "look" / "lengths.png").size == (960, 480)
