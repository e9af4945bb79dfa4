"""Golden losses of the tiny configuration: bitwise the same twice on one machine, and to rounding on any other."""

import io
from pathlib import Path

import numpy as np
import pytest

from data.build import build_corpus
from data.examples import TokenizedExample
from data.vocabulary import Vocabulary
from lwm import trainer
from lwm.config import RunConfig, load_config
from lwm.telemetry import Telemetry, read_metrics

pytestmark = pytest.mark.usefixtures("kept_programs")

# Of `recorded` below, in float32 on a CPU; other orders of summation move the last digits.
GOLDEN = [(3.456558, 2.373841), (3.201640, 3.162369), (2.786623, 2.824626), (2.442721, 2.356274)]


def recorded(tmp_path: Path, name: str) -> list[tuple[float, float]]:
    """(loss, gradient norm) of four steps of `configs/tiny.yaml`'s first stage, on shorter rows of counting tokens."""
    config = load_config("tiny", [f"output_dir={tmp_path / name}", "telemetry.wandb=off"])
    vocabulary = Vocabulary(config.model.text_vocab_size, 1024, config.model.vision_vocab_size)
    rng = np.random.default_rng(0)

    def example(number: int) -> TokenizedExample:
        start, size = int(rng.integers(512)), int(rng.integers(16, 60))
        tokens = (start + np.arange(size)) % 512 if number % 2 else 512 + (start + np.arange(size)) % 1024
        return TokenizedExample(tokens.astype(np.int32), np.arange(size) >= 2, str(number), "test")

    directory = tmp_path / "corpus"
    if not directory.exists():
        build_corpus(directory, "counting", map(example, range(64)), vocabulary=vocabulary, input_fingerprint="test")
    changes = {"seq_len": 128, "steps": 4, "compute_dtype": "float32", "mixture": ({"corpus": "text", "share": 1.0},)}
    stage = config.stages[0].model_dump()
    stage |= changes | {"optimizer": stage["optimizer"] | {"warmup_steps": 2}}
    config = RunConfig.model_validate(
        config.model_dump() | {"stages": (stage,), "corpora": ({"name": "text", "directory": str(directory)},)}
    )
    with Telemetry(config.output_dir, console=io.StringIO()) as telemetry:
        trainer.train(config, telemetry=telemetry)
    records = read_metrics(tmp_path / name / "metrics.jsonl")
    return [(each["train/loss"], each["optim/grad_norm"]) for each in records if "train/loss" in each]


def test_the_tiny_configuration_loses_what_it_lost_before(tmp_path: Path) -> None:
    first = recorded(tmp_path, "first")
    assert recorded(tmp_path, "second") == first
    np.testing.assert_allclose(first, GOLDEN, rtol=1e-5)
