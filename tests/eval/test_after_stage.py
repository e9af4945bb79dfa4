"""Needles at the end of a stage of a real, tiny run: asked once, recorded, drawn; what cannot be asked is refused."""

import io
from pathlib import Path

import numpy as np
import pytest

from data.build import build_corpus
from data.examples import TokenizedExample
from data.text import train_tokenizer
from data.vocabulary import Vocabulary
from eval.after_stage import NeedlesAfterStage
from lwm import trainer
from lwm.config import RunConfig
from lwm.telemetry import Telemetry, read_metrics


@pytest.fixture
def config(tmp_path: Path, texts: list[str]) -> RunConfig:
    model_file = tmp_path / "text.model"
    tokenizer = train_tokenizer(texts, model_file, size=360)

    def example(number: int) -> TokenizedExample:
        tokens = np.asarray(tokenizer.encode(texts[number]), np.int32)
        return TokenizedExample(tokens, np.arange(tokens.size) > 0, str(number), "test")

    build_corpus(
        tmp_path / "corpus",
        "text",
        map(example, range(64)),
        vocabulary=Vocabulary(tokenizer.size),
        input_fingerprint="test",
    )
    stage = {
        "name": "only",
        "seq_len": 128,
        "batch_rows": 8,
        "steps": 2,
        "rope_theta": 1e4,
        "optimizer": {"peak_lr": 1e-3, "warmup_steps": 0},
        "mixture": ({"corpus": "text", "share": 1.0},),
        "needles": {"lengths": (96,), "depths": (0.5,), "rounds": 1},
    }
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_layers": 1, "num_heads": 4}
    return RunConfig.model_validate(
        {
            "name": "needles",
            "output_dir": str(tmp_path / "run"),
            "model": {"text_vocab_size": tokenizer.size, **sizes},
            "tokenizers": {"text": str(model_file)},
            "corpora": ({"name": "text", "directory": str(tmp_path / "corpus")},),
            "stages": (stage,),
            "telemetry": {"wandb": "off"},
        }
    )


def test_needles_are_asked_once_and_recorded(config: RunConfig) -> None:
    for _ in range(2):  # the second time the run is finished
        console = io.StringIO()
        with Telemetry(config.output_dir, console=console) as telemetry:
            trainer.train(config, telemetry=telemetry, on_stage_end=NeedlesAfterStage(config))
    run = Path(config.output_dir)
    records = read_metrics(run / "metrics.jsonl")
    (asked,) = [each for each in records if "eval/needle_text_accuracy" in each]
    assert asked["step"] == 2
    assert 0 <= asked["eval/needle_text_accuracy_96"] <= 1
    assert "eval/needle_text_control_accuracy" in asked
    (pictured,) = [each for each in records if "image/eval/needle_text" in each]
    assert Path(pictured["image/eval/needle_text"]).read_bytes().startswith(b"\x89PNG")
    assert (run / "needles" / "only" / "text" / "cases.jsonl").exists()


def test_what_a_stage_cannot_ask_is_refused_before_training(config: RunConfig) -> None:
    stage = config.stages[0]
    assert stage.needles is not None
    longer = stage.model_copy(update={"needles": stage.needles.model_copy(update={"lengths": (96, 129)})})
    with pytest.raises(ValueError, match=r"stage only: needles.lengths has 129, above its seq_len 128"):
        NeedlesAfterStage(config.model_copy(update={"stages": (longer,)}))
    seeing = stage.model_copy(update={"needles": stage.needles.model_copy(update={"video": ("clips",)})})
    with pytest.raises(ValueError, match="there is no vision tokenizer"):
        NeedlesAfterStage(config.model_copy(update={"stages": (seeing,)}))
