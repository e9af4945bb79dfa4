"""Needles at the end of a stage of a real, tiny run: asked once, recorded, drawn; what cannot be asked is refused."""

import io
from pathlib import Path

import pytest

from eval.after_stage import NeedlesAfterStage
from lwm import trainer
from lwm.config import RunConfig
from lwm.telemetry import Telemetry, read_metrics


def test_needles_are_asked_once_and_recorded(needles_config: RunConfig) -> None:
    config = needles_config
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


def test_what_a_stage_cannot_ask_is_refused_before_training(needles_config: RunConfig) -> None:
    config, stage = needles_config, needles_config.stages[0]
    assert stage.needles is not None
    longer = stage.model_copy(update={"needles": stage.needles.model_copy(update={"lengths": (96, 129)})})
    with pytest.raises(ValueError, match=r"stage only: needles.lengths has 129, above its seq_len 128"):
        NeedlesAfterStage(config.model_copy(update={"stages": (longer,)}))
    shorter = stage.model_copy(update={"needles": stage.needles.model_copy(update={"lengths": (40, 96)})})
    with pytest.raises(ValueError, match=r"stage only: needles cannot be asked: length is 40; .* take \d+ tokens"):
        NeedlesAfterStage(config.model_copy(update={"stages": (shorter,)}))
    seeing = stage.model_copy(update={"needles": stage.needles.model_copy(update={"video": ("clips",)})})
    with pytest.raises(ValueError, match="there is no vision tokenizer"):
        NeedlesAfterStage(config.model_copy(update={"stages": (seeing,)}))
