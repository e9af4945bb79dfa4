"""Whole runs of a tiny model on a tiny corpus: stages, resuming, stopping, and what is refused."""

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from data.loader import Batches
from lwm import checkpoint, model, stages, trainer
from lwm.config import RunConfig
from lwm.lifecycle import NonFiniteLoss, Preempted, StopSignal
from lwm.sharding import flatten, make_mesh
from lwm.step import abstract_state
from lwm.telemetry import Telemetry, read_metrics

pytestmark = pytest.mark.usefixtures("kept_programs")


@pytest.fixture(scope="module")
def corpus(tiny_corpus: Path) -> Path:
    return tiny_corpus


def stage(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "seq_len": 32,
        "batch_rows": 8,
        "steps": 6,
        "rope_theta": 1e4,
        "mesh": {"fsdp": 8},
        "optimizer": {"peak_lr": 3e-3, "warmup_steps": 2},
        "mixture": ({"corpus": "tiny", "share": 1.0},),
        "remat": "none",
        "compute_dtype": "float32",
    } | changes


LONGER = stage("long", seq_len=64, batch_rows=4, rope_theta=1e5, mesh={"fsdp": 2, "sp": 4}, carry="all")


def run_config(corpus: Path, output: Path, *run_stages: dict[str, Any], **changes: Any) -> RunConfig:
    values = {
        "name": "test",
        "output_dir": str(output),
        "model": {
            "text_vocab_size": 32,
            "vision_vocab_size": 16,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
        },
        "corpora": ({"name": "tiny", "directory": str(corpus)},),
        "stages": run_stages,
        "checkpoint": {"every_steps": 4},
        "telemetry": {"wandb": "off", "peak_flops": 1e9},
    }
    return RunConfig.model_validate(values | changes)


def train(config: RunConfig, **options: Any) -> tuple[list[stages.Record], str]:
    """The records, and what was said."""
    console = io.StringIO()
    with Telemetry(config.output_dir, console=console) as telemetry:
        records = trainer.train(config, telemetry=telemetry, **options)
    return records, console.getvalue()


def leaves(config: RunConfig) -> dict[str, np.ndarray]:
    """Every array of the last checkpoint."""
    saved = checkpoint.Checkpoints(Path(config.output_dir) / "checkpoints")
    manifest = saved.latest()
    assert manifest is not None
    last = config.stages[-1]
    last_model = config.model.model_copy(update={"rope_theta": last.rope_theta})
    state = saved.restore(manifest, abstract_state(last_model, last, make_mesh(last.mesh)))
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(state)}


def losses(config: RunConfig) -> list[tuple[int, float]]:
    records = read_metrics(Path(config.output_dir) / "metrics.jsonl")
    return [(record["step"], record["train/loss"]) for record in records if "train/loss" in record]


class StopAt(StopSignal):
    """Asks to stop when it has been looked at `count` times: the loop does so once a step."""

    def __init__(self, count: int):
        super().__init__()
        self.count = count

    @property
    def requested(self) -> bool:
        self.count -= 1
        if self.count <= 0:
            self.request("test")
        return super().requested


@pytest.fixture(scope="module")
def undisturbed(
    kept_programs: None, corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[RunConfig, list[stages.Record], str]:
    config = run_config(corpus, tmp_path_factory.mktemp("straight"), stage("short"), LONGER)
    return config, *train(config)


def test_records_and_metrics(undisturbed: tuple[RunConfig, list[stages.Record], str]) -> None:
    config, (short, long), said = undisturbed
    assert short["name"] == "short"
    assert short["mesh"] == {"fsdp": 8}
    assert long["mesh"] == {"fsdp": 2, "sp": 4}
    assert (long["seq_len"], long["steps"], long["layout"], long["strategy"]) == (64, 6, "striped", "ring")
    assert short["compilations"] == long["compilations"] == 1
    assert 0 < short["tokens"] <= 6 * 8 * 32
    assert long["loss_last"] < short["loss_first"]
    assert [step for step, _ in losses(config)] == list(range(1, 13))
    metrics = read_metrics(Path(config.output_dir) / "metrics.jsonl")
    assert {"train/loss_text", "train/loss_vision", "perf/mfu", "data/tokens_seen"} <= metrics[-1].keys()
    assert metrics[-1]["train/source_fraction/tiny"] == 1
    by_modality = sorted(metrics[-1][f"train/loss_{name}"] for name in ("text", "vision"))
    assert by_modality[0] <= metrics[-1]["train/source_loss/tiny"] <= by_modality[1]
    assert metrics[-1]["data/tokens_seen"] == short["tokens"] + long["tokens"]
    assert "step 6/6 100%" in said
    assert "compiled in" in said


@pytest.mark.parametrize("looks", [3, 6, 9])
def test_interrupted_run_ends_bitwise_where_a_straight_one_ends(
    undisturbed: tuple[RunConfig, list[stages.Record], str], corpus: Path, tmp_path: Path, looks: int
) -> None:
    """Stops inside the first stage, at the boundary, and inside the second."""
    straight, records, _ = undisturbed
    config = run_config(corpus, tmp_path, *(each.model_dump() for each in straight.stages))
    with pytest.raises(Preempted, match="test: saved after step"):
        train(config, stop=StopAt(looks))
    resumed, said = train(config)
    assert "resuming after step" in said
    assert losses(config) == losses(straight)
    kept = ("name", "tokens", "loss_first", "loss_last")
    assert [[each[name] for name in kept] for each in resumed] == [[each[name] for name in kept] for each in records]
    expected, found = leaves(straight), leaves(config)
    assert expected.keys() == found.keys()
    for name, leaf in expected.items():
        np.testing.assert_array_equal(found[name], leaf, err_msg=name)


def test_finished_run_says_so_at_once(undisturbed: tuple[RunConfig, list[stages.Record], str]) -> None:
    config, records, _ = undisturbed
    again, said = train(config)
    assert again == records
    assert "run test was finished before: all 2 stages are done" in said
    assert "compil" not in said


def test_stage_end_is_called_once_even_when_it_was_interrupted(corpus: Path, tmp_path: Path) -> None:
    config = run_config(corpus, tmp_path, stage("only", steps=2))
    called: list[str] = []

    def on_stage_end(ended: trainer.Ended) -> None:
        called.append(ended.stage.name)
        assert ended.step == 2
        assert flatten(ended.params)["layers/query"].sharding.mesh == ended.mesh
        if len(called) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, on_stage_end=on_stage_end)
    train(config, on_stage_end=on_stage_end)
    train(config, on_stage_end=on_stage_end)
    assert called == ["only", "only"]


def test_refusals(undisturbed: tuple[RunConfig, list[stages.Record], str], corpus: Path, tmp_path: Path) -> None:
    straight, *_ = undisturbed
    output = Path(straight.output_dir)
    first, second = (each.model_dump() for each in straight.stages)

    def refused(message: str, config: Callable[[], RunConfig]) -> None:
        with pytest.raises(ValueError, match=message) as caught:
            train(config())
        assert "\n" not in str(caught.value)

    deeper = straight.model.model_dump() | {"intermediate_size": 64}
    refused(
        r"of another model: layers/gate is float32\[2, 32, 32\] there and float32\[2, 32, 64\] in this configuration",
        lambda: run_config(corpus, output, first, second, model=deeper),
    )
    refused("stands in stage 'long', which is not in the configuration", lambda: run_config(corpus, output, first))
    refused(
        "checkpoint.resume is never", lambda: run_config(corpus, output, first, second, checkpoint={"resume": "never"})
    )
    refused("checkpoint.resume is must", lambda: run_config(corpus, tmp_path, first, checkpoint={"resume": "must"}))
    refused(
        r"was trained on data \w+, but stage long now has \w+",
        lambda: run_config(corpus, output, first, second | {"steps": 7}, seed=1),
    )
    wider = straight.model.model_dump() | {"text_vocab_size": 34}
    refused("corpus 'tiny' has 32 text and 16 vision ids", lambda: run_config(corpus, tmp_path, first, model=wider))


def test_a_process_that_cannot_read_its_data_saves_what_it_has(
    undisturbed: tuple[RunConfig, list[stages.Record], str],
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The disk fails after three batches: they are saved, the step without one counts nowhere, a restart goes on."""
    straight, _, _ = undisturbed
    config = run_config(corpus, tmp_path, *(each.model_dump() for each in straight.stages))
    read, left = Batches.__next__, [3]

    def failing(self: Batches) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(5, "Input/output error", str(corpus))
        return read(self)

    # A process before this one was killed before its first save: its records must not stay beside those to come.
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 9.0}\n{"step": 2, "train/loss": 9.0}\n')
    with monkeypatch.context() as patched:
        patched.setattr(Batches, "__next__", failing)
        with pytest.raises(ValueError, match="no batch after step 3 of stage short, which is saved: .*Input/output"):
            train(config)
    assert checkpoint.Checkpoints(tmp_path / "checkpoints").steps() == [3]
    train(config)
    assert losses(config) == losses(straight)


def test_a_damaged_record_is_left_out_and_named(
    undisturbed: tuple[RunConfig, list[stages.Record], str], corpus: Path, tmp_path: Path
) -> None:
    """A bit of the corpus on disk flips: the examples behind it are padding, or, where they are too many, the end."""
    straight, _, _ = undisturbed
    shutil.copytree(corpus, tmp_path / "corpus")
    (records,) = (tmp_path / "corpus").rglob("*.array_record-*")
    content = bytearray(records.read_bytes())
    written = np.flatnonzero(np.frombuffer(content, np.uint8))  # the rest of the file's block is empty
    content[written[written.size // 2]] ^= 1
    records.write_bytes(content)
    short = straight.stages[0].model_dump()
    message = "of the 40 examples of the corpus 'tiny' are damaged, and max_damaged is 0.001"
    with pytest.raises(ValueError, match=message):
        train(run_config(tmp_path / "corpus", tmp_path / "strict", short))
    config = run_config(tmp_path / "corpus", tmp_path / "run", short | {"max_damaged": 0.2})
    _, said = train(config)
    lines = [json.loads(line) for line in (tmp_path / "run" / trainer.DAMAGED_FILE).read_text().splitlines()]
    numbers = {line["example"] for line in lines}
    assert len(lines) == len(numbers) > 0
    assert all(f"example {number} of corpus tiny is left out" in said for number in numbers)
    last = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    assert last["data/damaged_examples"] == len(numbers)
    assert np.isfinite(last["train/loss"])


def test_non_finite_gradients_are_skipped_and_end_the_run(corpus: Path, tmp_path: Path) -> None:
    """With weights of 1e30 every gradient overflows: nothing changes, and after k steps the run gives up."""
    config = run_config(corpus, tmp_path, stage("wild", steps=20), checkpoint={"every_steps": 50})
    huge = config.model.model_copy(update={"init_std": 1e30})
    config = config.model_copy(update={"model": huge})
    with pytest.raises(NonFiniteLoss, match=r"the updates of 1\d steps in a row were skipped"):
        train(config)
    saved = checkpoint.load_params(tmp_path)
    drawn = model.init(huge, jax.random.key(0), make_mesh(config.stages[0].mesh))
    for name, leaf in flatten(drawn).items():
        np.testing.assert_array_equal(flatten(saved)[name], leaf, err_msg=name)
    lines = [json.loads(line) for line in (tmp_path / trainer.SKIPPED_FILE).read_text().splitlines()]
    assert [line["stage_step"] for line in lines] == list(range(1, len(lines) + 1))
    assert len(lines) >= 10
    assert all(line["reason"] == "not finite" and line["examples"]["tiny"] for line in lines)
