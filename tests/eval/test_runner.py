"""The runner: resuming, batching, torn files, foretelling the end."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eval import plots, runner, tracking
from eval.protocol import Case, Placed


def _case(length, number, *, kind="single", depth=0.5, round=0):
    prompt = np.full(length - 2, int(number), np.int32)
    needles = (Placed(number, None, depth, 1, 2),) if kind == "single" else ()
    return Case("text", kind, length, depth if kind == "single" else None, round, prompt, number, needles)


class Repeater:
    """Answers with the prompt's first token; remembers what it was asked and may be killed after some batches."""

    def __init__(self, kill_after=None):
        self.batches = []
        self.kill_after = kill_after

    def generate(self, prompts, *, max_new_tokens, stop_id):
        if self.kill_after is not None and len(self.batches) == self.kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
        self.batches.append([len(p) for p in prompts])
        return [[int(p[0])] for p in prompts]


OPTIONS: dict[str, Any] = {"model_id": "m", "decode": lambda ids: " ".join(f"{i:03d}" for i in ids), "stop_id": 2}
CASES = [
    _case(length, f"{100 * i + round:03d}", round=round) for i, length in enumerate((64, 32, 16)) for round in range(5)
]


def test_batches_are_of_one_length_and_shortest_first(tmp_path):
    model = Repeater()
    records = runner.run(CASES, model, path=tmp_path / "cases.jsonl", batch_size=3, **OPTIONS)
    assert model.batches == [[14] * 3, [14] * 2, [30] * 3, [30] * 2, [62] * 3, [62] * 2]
    assert [r["answer"] for r in records] == [c.answer for c in CASES]
    assert all(r["output"] == r["answer"] for r in records)


def test_token_budget_limits_a_batch():
    sizes = [len(b) for b in runner.batches(CASES, batch_size=4, batch_tokens=70)]
    assert sizes == [4, 1, 2, 2, 1, 1, 1, 1, 1, 1]


def run_and_die() -> None:
    """The run that is killed, in a process of its own."""
    path = os.environ["CASES"]
    runner.run(CASES, Repeater(kill_after=2), path=path, batch_size=3, **OPTIONS)


def test_killed_run_continues(tmp_path):
    path, here = tmp_path / "cases.jsonl", Path(__file__)
    program = f"import sys; sys.path.insert(0, {str(here.parent)!r}); import {here.stem} as tests; tests.run_and_die()"
    environ = os.environ | {"PYTHONPATH": str(here.parents[2]), "CASES": str(path)}
    assert subprocess.run([sys.executable, "-c", program], env=environ, check=False).returncode == -signal.SIGKILL
    assert len(path.read_text().splitlines()) == 5
    second = Repeater()
    records = runner.run(CASES, second, path=path, batch_size=3, **OPTIONS)
    assert sum(map(len, second.batches)) == 10
    third = Repeater()
    assert runner.run(CASES, third, path=path, batch_size=3, **OPTIONS) == records
    assert third.batches == []


@pytest.mark.parametrize("tear", [1, 10, 100])
def test_torn_last_line_is_dropped(tmp_path, tear):
    path = tmp_path / "cases.jsonl"
    whole = runner.run(CASES, Repeater(), path=path, batch_size=5, **OPTIONS)
    content = path.read_bytes()
    path.write_bytes(content[:-tear])
    model = Repeater()
    assert runner.run(CASES, model, path=path, batch_size=5, **OPTIONS) == whole
    assert model.batches == [[62]]
    assert path.read_bytes() == content


def test_zeros_after_a_power_cut_are_dropped(tmp_path):
    path = tmp_path / "cases.jsonl"
    runner.run(CASES, Repeater(), path=path, **OPTIONS)
    content = path.read_bytes()
    path.write_bytes(content + b"\0" * 50)
    assert len(runner.read_records(path)) == 15
    assert path.read_bytes() == content


def test_a_bad_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "cases.jsonl"
    runner.run(CASES, Repeater(), path=path, **OPTIONS)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], "oops\n", *lines[1:]]))
    with pytest.raises(ValueError, match=r"cases\.jsonl: line 2 is not a record"):
        runner.read_records(path)


def test_another_model_is_asked_again(tmp_path):
    path = tmp_path / "cases.jsonl"
    runner.run(CASES, Repeater(), path=path, **OPTIONS)
    model = Repeater()
    records = runner.run(CASES, model, path=path, **{**OPTIONS, "model_id": "other"})
    assert sum(map(len, model.batches)) == 15
    assert {r["model"] for r in records} == {"other"}
    assert len(runner.read_records(path)) == 30


def test_case_keys_differ_in_every_respect():
    base = _case(64, "123")
    others = [
        _case(64, "124"),
        _case(64, "123", depth=0.25),
        _case(64, "123", round=1),
        _case(64, "123", kind="no_needle"),
    ]
    others.append(_case(65, "123"))
    keys = {c.key for c in (base, *others)}
    assert len(keys) == 6
    assert _case(64, "123").key == base.key


def test_progress_and_eta_follow_the_tokens(tmp_path):
    seconds = iter(range(100))
    seen: list[runner.Progress] = []
    runner.run(
        CASES[5:],
        Repeater(),
        path=tmp_path / "c.jsonl",
        batch_size=5,
        progress=seen.append,
        clock=lambda: float(next(seconds)),
        **OPTIONS,
    )
    assert [(p.done, p.total, p.correct) for p in seen] == [(0, 10, 0), (5, 10, 5), (10, 10, 10)]
    # 70 tokens took one second, 150 are left.
    assert [p.eta_seconds for p in seen] == [None, pytest.approx(150 / 70), 0.0]
    assert str(seen[1]) == "case 5/10 right 100% | eta 2s"


def test_wrong_number_of_answers_is_an_error(tmp_path):
    class Short:
        def generate(self, prompts, *, max_new_tokens, stop_id):
            return []

    with pytest.raises(ValueError, match="gave 0 answers to 5 prompts"):
        runner.run(CASES, Short(), path=tmp_path / "c.jsonl", **OPTIONS)


def test_evaluate_writes_the_summary(tmp_path):
    summary = runner.evaluate(CASES, Repeater(), tmp_path, **OPTIONS)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert summary["accuracy"] == 1.0
    assert summary["accuracy_by_length"] == {"16": 1.0, "32": 1.0, "64": 1.0}
    assert summary["effective_context_length"] == 64
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cases.jsonl", "summary.json"]


def test_answers_that_are_no_text_are_shown_as_such():
    class Letters:
        size, bos_id, eos_id = 10, 8, 9

        def encode(self, text):
            return [int(c) for c in text]

        def decode(self, ids):
            assert all(0 <= i < 10 for i in ids)
            return "".join(map(str, ids))

    letters: Any = Letters()
    decode = runner.text_decoder(letters)
    assert decode([4, 8, 2]) == "482"
    assert decode(np.array([4, 8, 12, 900, 2]).tolist()) == "48\ufffd2"
    assert decode([]) == ""


def test_json_with_nan_leaves_the_old_file(tmp_path):
    path = tmp_path / "summary.json"
    runner.write_json(path, {"a": 1})
    with pytest.raises(ValueError):
        runner.write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": 1}


def test_a_tracker_gets_the_numbers_and_the_picture(tmp_path):
    summary = runner.evaluate(CASES, Repeater(), tmp_path, **OPTIONS)
    picture = plots.heatmap(tmp_path / "heatmap", summary, title="Needles")
    logged: list[dict[str, Any]] = []

    class Run:
        def log(self, data):
            logged.append(data)

        def finish(self):
            logged.append({})

    tracking.log(tmp_path, summary, picture, lambda: (Run(), lambda path, caption: (path, caption)), print)
    numbers, image, end = logged
    assert numbers["eval/accuracy"] == numbers["eval/accuracy_64"] == 1.0
    assert "eval/distractor_accuracy" not in numbers
    assert image["eval/heatmap"] == (str(tmp_path / "heatmap.png"), picture.caption)
    assert end == {}
