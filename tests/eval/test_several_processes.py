"""A model that two processes hold together: needles at the end of training, and `lwm ask`, from the command line."""

import io
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from eval.after_stage import NeedlesAfterStage
from eval.runner import read_records
from lwm import serving, trainer
from lwm.config import RunConfig
from lwm.prompts import TextTalk
from lwm.telemetry import Telemetry

Environs = Callable[[int], list[dict[str, str]]]
PATIENCE = 540


def lwm(environs: Environs, count: int, *arguments: str) -> list[tuple[int, str, str]]:
    """(exit code, standard output, standard error) of each of `count` processes of one command."""
    command = [sys.executable, "-c", "from lwm.cli import main; main()", *arguments]
    started = [
        subprocess.Popen(command, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for environ in environs(count)
    ]
    try:
        said = [process.communicate(timeout=PATIENCE) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    for number, (_, error) in enumerate(said):
        print(f"--- process {number}", error[-3000:], sep="\n")
    return [(process.returncode, *each) for process, each in zip(started, said, strict=True)]


def answers(run: Path) -> dict[str, str]:
    """What was answered to the needles after the stage, by case and model."""
    return {
        key: each["output"] for key, each in read_records(run / "needles" / "only" / "text" / "cases.jsonl").items()
    }


@pytest.mark.usefixtures("ordered_collectives")
def test_two_processes_ask_as_one(needles_config: RunConfig, environs: Environs, tmp_path: Path) -> None:
    config = needles_config
    path, run = tmp_path / "run.yaml", Path(config.output_dir)
    path.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    ended = lwm(environs, 2, "train", str(path))
    assert [code for code, *_ in ended] == [0, 0]
    asked = answers(run)
    assert len(asked) == 3
    # The same checkpoint asked again, by one process.
    shutil.rmtree(run / "needles")
    shutil.rmtree(run / "stage_ends")
    with Telemetry(run, console=io.StringIO()) as telemetry:
        trainer.train(config, telemetry=telemetry, on_stage_end=NeedlesAfterStage(config))
    assert answers(run) == asked

    (tmp_path / "text.txt").write_text("A bicycle stands on the bridge. The river is cold.")

    ask = ["ask", "--checkpoint", str(run), "--max-new-tokens", "5", "--system", "", "--text"]
    questions = ["--question", "Where is it?", "--question", "How is it?"]
    ended = lwm(environs, 2, *ask, str(tmp_path / "text.txt"), *questions)
    assert [code for code, *_ in ended] == [0, 0]
    assert "read in" not in ended[1][2], "only the first process answers"
    opened = serving.open_run(run, max_batch=1, one_row=True)
    talk = TextTalk((tmp_path / "text.txt").read_text(), opened.text, system="")
    expected = []
    for question in questions[1::2]:
        (ids,) = opened.sampler.generate([talk.prompt(question)], max_new_tokens=5, stop_id=opened.text.eos_id)
        talk.answered(ids)
        expected.append(opened.text.decode(ids))
    said = [line for line in ended[0][1].splitlines() if not line.startswith((">", "[Gloo]"))]
    assert said == expected

    ended = lwm(environs, 2, *ask, str(tmp_path / "nothing.txt"), *questions)
    assert [code for code, *_ in ended] == [2, 0]
    assert "nothing.txt: No such file" in ended[0][2]
