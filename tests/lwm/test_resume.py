"""What a run does with damaged, foreign and missing checkpoints, full disks and changed data; all of it provoked."""

import io
import json
import os
import random
import resource
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lwm import checkpoint, cli, resume, step, trainer
from lwm.checkpoint import Checkpoints, DamagedCheckpoint
from lwm.config import RunConfig
from lwm.digest import digests, named_leaves
from lwm.goodput import Goodput
from lwm.lifecycle import RunLock
from lwm.sharding import make_mesh
from lwm.step import TrainState
from lwm.telemetry import StepReport, Telemetry, read_metrics

pytestmark = pytest.mark.usefixtures("kept_programs")

Say = Callable[[str], None]


def train(config: RunConfig, at_step: Callable[[int], None] = lambda step: None) -> str:
    """What was said; `at_step` is called after each step of the run."""
    console = io.StringIO()
    with Telemetry(config.output_dir, console=console) as telemetry:
        report = telemetry.step

        def hooked(done: StepReport) -> None:
            report(done)
            at_step(done.global_step)

        with mock.patch.object(telemetry, "step", hooked):
            trainer.train(config, telemetry=telemetry)
    return console.getvalue()


def tiny(worker: ModuleType, corpus: Path, output: Path, *changes: str) -> RunConfig:
    config = worker.override(worker.tiny_config(str(corpus), str(output)), list(changes))
    return config.model_copy(update={"stages": config.stages[:1]})


@pytest.fixture(scope="module")
def finished(
    kept_programs: None, worker: ModuleType, tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> RunConfig:
    """Five steps of six, each of them saved."""
    config = tiny(worker, tiny_corpus, tmp_path_factory.mktemp("run") / "run", "checkpoint.every_steps=1")
    config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"keep_last": 9})})
    train(config)
    shutil.rmtree(Checkpoints(Path(config.output_dir) / "checkpoints").path(6))
    return config


def copied(config: RunConfig, place: Path) -> tuple[RunConfig, Checkpoints]:
    shutil.copytree(config.output_dir, place)
    return config.model_copy(update={"output_dir": str(place)}), Checkpoints(place / "checkpoints")


def start(config: RunConfig, checkpoints: Checkpoints) -> tuple[resume.Start, str]:
    said: list[str] = []
    return resume.find_start(config, checkpoints, Goodput(), said.append), "\n".join(said)


def expected_state(config: RunConfig, number: int) -> Any:
    saved = Checkpoints(Path(config.output_dir) / "checkpoints")
    stage = config.stages[0]
    model = config.model.model_copy(update={"rope_theta": stage.rope_theta})
    abstract = step.abstract_state(model, stage, make_mesh(stage.mesh))
    return saved.restore(checkpoint.read_manifest(saved.path(number)), abstract)


def assert_same(found: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), jax.device_get(expected))


def data_files(path: Path) -> list[Path]:
    """Those that hold numbers; beside them are JSON files, most of whose bytes say nothing that is needed."""
    return sorted(path.glob("params/d/*")) + sorted(path.glob("optimizer/d/*"))


def test_no_flipped_bit_goes_unnoticed(finished: RunConfig, tmp_path: Path) -> None:
    """Either the step is set aside and the one before it used, or the bit was in a byte that says nothing."""
    whole, before = expected_state(finished, 5), expected_state(finished, 4)
    config, saved = copied(finished, tmp_path / "run")
    rng = random.Random(0)
    files = [each for each in saved.path(5).rglob("*") if each.is_file() and each.stat().st_size]
    noticed = 0
    for number in range(24):
        file = rng.choice(data_files(saved.path(5)) if number % 4 else files)
        content = bytearray(file.read_bytes())
        at, bit = rng.randrange(len(content)), rng.randrange(8)
        content[at] ^= 1 << bit
        file.write_bytes(bytes(content))
        found, said = start(config, saved)
        assert found.saved is not None
        if found.saved.step == 5:
            assert_same(found.state, whole)
        else:
            noticed += 1
            assert found.saved.step == 4
            assert_same(found.state, before)
            assert said.startswith(f"warning: checkpoint {saved.path(5)} ")
            assert "\n" not in said
            (aside,) = saved.set_aside_ones(".damaged")
            os.rename(saved.directory / aside, saved.path(5))
        content[at] ^= 1 << bit
        file.write_bytes(bytes(content))
    assert noticed >= 12


def test_what_is_left_of_a_step_is_set_aside(finished: RunConfig, tmp_path: Path) -> None:
    """Truncated, missing, unreadable, empty: the step before is used; when none is whole, nothing begins anew."""
    config, saved = copied(finished, tmp_path / "run")
    shutil.copytree(saved.path(5), saved.directory / "00000006.orbax-checkpoint-tmp")
    largest = max(data_files(saved.path(5)), key=lambda each: each.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    lost = max(data_files(saved.path(4)), key=lambda each: each.stat().st_size)
    lost.unlink()
    in_the_way = saved.path(3) / checkpoint.MANIFEST_FILE
    in_the_way.unlink()
    in_the_way.mkdir()
    shutil.rmtree(saved.path(2))
    saved.path(2).mkdir()
    found, said = start(config, saved)
    assert found.saved is not None
    assert found.saved.step == 1
    assert_same(found.state, expected_state(finished, 1))
    reasons = said.splitlines()
    assert [f"{number:08d}.damaged" in reason for number, reason in zip((5, 4, 3, 2), reasons, strict=True)] == [
        True
    ] * 4
    assert not list(saved.directory.glob("*orbax*"))
    (saved.path(1) / checkpoint.MANIFEST_FILE).write_text("{")
    for _ in range(2):  # the second time there are only damaged ones
        with pytest.raises(ValueError, match=r"all checkpoints in \S+ are damaged; bring a whole one back"):
            start(config, saved)


def test_other_data_is_refused_unless_it_is_meant(
    finished: RunConfig, worker: ModuleType, tiny_corpus: Path, tmp_path: Path
) -> None:
    config, saved = copied(finished, tmp_path / "run")
    print_of = checkpoint.read_manifest(saved.path(5)).data_fingerprint[:12]
    changed = config.model_copy(update={"seed": 7})
    with pytest.raises(ValueError, match="seed was 0 and is 7") as caught:
        start(changed, saved)
    message = str(caught.value)
    assert f"trained on data {print_of}, but stage short now has " in message
    assert "set checkpoint.data_change=accept" in message
    wider = config.stages[0].model_copy(update={"batch_rows": 16})
    with pytest.raises(ValueError, match="batch_rows was 8 and is 16"):
        start(config.model_copy(update={"stages": (wider,)}), saved)
    meant = changed.checkpoint.model_copy(update={"data_change": "accept"})
    found, _ = start(changed.model_copy(update={"checkpoint": meant}), saved)
    assert found.saved is not None
    assert found.saved.step == 5


def test_another_optimizer_or_dtype_names_the_leaf(finished: RunConfig) -> None:
    saved = Checkpoints(Path(finished.output_dir) / "checkpoints")
    manifest = checkpoint.read_manifest(saved.path(5))
    stage = finished.stages[0]
    abstract = step.abstract_state(finished.model, stage, make_mesh(stage.mesh))

    def narrow(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        dtype = jnp.bfloat16 if leaf.dtype == jnp.float32 else leaf.dtype
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)

    halves = replace(abstract, opt_state=jax.tree.map(narrow, abstract.opt_state))
    expected = r"0/mu/embed/text is float32\[32, 32\] there and bfloat16\[32, 32\] in this"
    with pytest.raises(ValueError, match=expected) as caught:
        saved.restore(manifest, halves)
    assert not isinstance(caught.value, DamagedCheckpoint)


def test_a_step_that_is_not_there_lists_those_that_are(finished: RunConfig, tmp_path: Path) -> None:
    _, saved = copied(finished, tmp_path / "run")
    for ask in (lambda: saved.rewind(9), lambda: checkpoint.find_checkpoint(saved.path(9)), lambda: saved.verify(9)):
        with pytest.raises(ValueError, match="there is no step 9 in .*; its steps are 1, 2, 3, 4, 5"):
            ask()
    saved.rewind(3)
    assert saved.steps() == [1, 2, 3]
    assert saved.set_aside_ones(".rewound") == ["00000004.rewound", "00000005.rewound"]
    assert saved.verify(3) > 20


def test_the_commands(finished: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """list, show, verify and rewind; verify reads whole checkpoints and exits with 2 when one is damaged."""
    _, saved = copied(finished, tmp_path / "run")
    run = str(tmp_path / "run")
    assert cli.run(["checkpoint", "list", run]) == 0
    assert capsys.readouterr().out.count("│ short │") == 5
    assert cli.run(["checkpoint", "show", run, "--step", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["stage_step"] == 2
    assert cli.run(["checkpoint", "verify", run]) == 0
    assert capsys.readouterr().out.count("arrays are as they were saved") == 5
    (file, *_) = sorted(data_files(saved.path(4)), key=lambda each: -each.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(bytes(content))
    stderr = io.StringIO()
    assert cli.run(["checkpoint", "verify", run], stderr) == 2
    assert stderr.getvalue() == "lwm: 1 of 5 checkpoints are damaged: 4\n"
    assert f"step 4: checkpoint {saved.path(4)} " in capsys.readouterr().out
    assert cli.run(["checkpoint", "rewind", run, "--step", "3"]) == 0
    assert saved.steps() == [1, 2, 3]
    assert cli.run(["checkpoint", "rewind", run, "--step", "7"], stderr) == 2
    assert "its steps are 1, 2, 3" in stderr.getvalue()
    assert cli.run(["checkpoint", "list", str(tmp_path / "none")], stderr) == 2


def test_a_second_job_is_refused_and_the_first_goes_on(finished: RunConfig, tmp_path: Path) -> None:
    config, _ = copied(finished, tmp_path / "run")
    with RunLock(config.output_dir), pytest.raises(ValueError, match="is in use by process"):
        train(config)


def test_a_full_disk_costs_saves_but_not_steps(worker: ModuleType, tiny_corpus: Path, tmp_path: Path) -> None:
    """Between the second and the fourth step no file may grow beyond 2 kB, which the kernel enforces."""
    config = tiny(worker, tiny_corpus, tmp_path / "run", "checkpoint.every_steps=1", "telemetry.log_every=100")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    saved = Checkpoints(tmp_path / "run" / "checkpoints")

    def limit(size: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))

    def fill_up(step: int, until: int = 4) -> None:
        while step == 2 and saved.steps() != [1]:
            time.sleep(0.01)  # the save of the first step goes on in the background
        if step in (2, until):
            limit(2048 if step == 2 else soft)
        elif step == 3:
            assert saved.steps() == [1], "the only checkpoint is kept while others fail"

    try:
        said = train(config, fill_up)
    finally:
        limit(soft)
    assert said.count("in a row failed") == 2
    assert "File too large); training goes on" in said
    assert saved.steps() == [5, 6]
    manifest = saved.latest()
    assert manifest is not None
    assert manifest.counters["failed_saves"] == 2
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [each["step"] for each in records if "train/loss" in each] == [1, 2, 3, 4, 5, 6]

    config = tiny(worker, tiny_corpus, tmp_path / "small", "checkpoint.every_steps=1", "checkpoint.max_failed_saves=2")
    saved = Checkpoints(tmp_path / "small" / "checkpoints")
    try:
        with pytest.raises(OSError, match="File too large"):
            train(config, lambda step: fill_up(step, until=6))
    finally:
        limit(soft)
    assert saved.steps() == [1]


def test_digests_do_not_depend_on_sharding_or_on_who_computes_them() -> None:
    """One device, eight devices in two ways, and numpy; and every single changed bit changes them."""
    rng = np.random.default_rng(0)
    # Above the size that is left to the host, so that the devices compute it.
    large = rng.normal(size=(2, 8, 1 << 17)).astype(np.float32)
    host = digests({"x": large[:, :, : 1 << 10]})
    for sizes in ((8, 1), (2, 4)):
        mesh = jax.make_mesh(sizes, ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "a", "b"))
        placed = jax.device_put(large, where)
        assert digests({"x": placed}) == digests({"x": large})
        assert digests({"x": placed[:, :, : 1 << 10]}) == host
    small = rng.normal(size=(3, 5)).astype(np.float32)
    seen = {digests({"x": small})[0]["x"]}
    for at in range(15):
        for bit in range(32):
            flipped = small.copy()
            flipped.view(np.uint32).flat[at] ^= np.uint32(1 << bit)
            seen.add(digests({"x": flipped})[0]["x"])
    assert len(seen) == 1 + 15 * 32
    assert digests({"x": np.float32([1, np.inf]), "y": np.int32([1])})[1] == ["x"]
    assert digests({"x": jnp.asarray([1, jnp.nan], jnp.bfloat16)})[1] == ["x"]
    swapped = small.copy()
    swapped[0, 0], swapped[2, 4] = small[2, 4], small[0, 0]
    assert digests({"x": swapped})[0]["x"] not in seen


def test_a_state_that_is_not_finite_is_never_saved(finished: RunConfig, tmp_path: Path) -> None:
    state: TrainState = expected_state(finished, 5)
    params = {**state.params, "final_norm": state.params["final_norm"].at[3].set(jnp.inf)}
    saved = Checkpoints(tmp_path / "checkpoints")
    manifest = checkpoint.read_manifest(Checkpoints(Path(finished.output_dir) / "checkpoints").path(5))
    with pytest.raises(checkpoint.NonFiniteParameters, match="params/final_norm is not finite after step 5"):
        saved.save(replace(state, params=params), manifest)
    assert saved.newest() is None


def test_the_manifest_says_where_a_checkpoint_comes_from(finished: RunConfig) -> None:
    saved = Checkpoints(Path(finished.output_dir) / "checkpoints", keep_last=1, keep_every=2)
    manifest = json.loads((saved.path(5) / checkpoint.MANIFEST_FILE).read_text())
    state = expected_state(finished, 5)
    names = {*named_leaves(state.params, "params"), *named_leaves(state.opt_state, "optimizer")}
    assert manifest["digests"].keys() == names
    assert manifest["data"]["corpora"].keys() == {"tiny"}
    assert manifest["mesh"] == {"fsdp": 8}
    assert {"jax", "orbax-checkpoint"} <= manifest["versions"].keys()
    assert (manifest["num_processes"], manifest["stage_step"], manifest["seed"]) == (1, 5, 0)
    assert manifest["tokens"] > 0
    assert manifest["counters"]["goodput"]["train"] > 0
