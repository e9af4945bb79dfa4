"""Checkpoints: bitwise on any mesh, whole or not there, and refused in one sentence when they do not fit."""

import json
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lwm import checkpoint, model, step
from lwm.checkpoint import Checkpoints, Manifest
from lwm.config import MeshConfig, ModelConfig, StageConfig
from lwm.sharding import flatten, make_mesh
from lwm.step import TrainState

MODEL = ModelConfig(
    text_vocab_size=10, vision_vocab_size=6, hidden_size=16, intermediate_size=16, num_layers=2, num_heads=2
)
STAGE = StageConfig.model_validate(
    {
        "name": "test",
        "seq_len": 8,
        "batch_rows": 8,
        "steps": 10,
        "rope_theta": 1e4,
        "optimizer": {"peak_lr": 1e-2, "warmup_steps": 0},
        "mixture": ({"corpus": "none", "share": 1.0},),
    }
)
MANIFEST = Manifest(
    step=3,
    stage="test",
    stage_step=3,
    skipped=1,
    skipped_in_a_row=0,
    tokens=123,
    data_fingerprint="data",
    config_fingerprint="config",
    model=MODEL.model_dump(mode="json"),
    stages=(),
    progress={},
)


@pytest.fixture(scope="module")
def state() -> TrainState:
    """A state whose every leaf differs from every other."""
    mesh = make_mesh(MeshConfig(fsdp=2, tp=2, sp=2))
    rng = np.random.default_rng(0)

    def fill(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.device_put(rng.normal(size=leaf.shape).astype(leaf.dtype), leaf.sharding)

    filled = jax.tree.map(fill, step.abstract_state(MODEL, STAGE, mesh))
    return replace(filled, step=jnp.int32(3), skipped=jnp.int32(1), skipped_in_a_row=jnp.int32(0), typical=jnp.zeros(2))


def assert_same(found: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), jax.device_get(expected))


@pytest.mark.parametrize("sizes", [{"fsdp": 8}, {"fsdp": 1, "tp": 2, "sp": 4}])
def test_restores_bitwise_onto_another_mesh(state: TrainState, tmp_path: Path, sizes: dict[str, int]) -> None:
    saved = Checkpoints(tmp_path)
    saved.save(state, MANIFEST)
    manifest = saved.latest()
    assert manifest is not None
    assert manifest.tokens == 123
    abstract = step.abstract_state(MODEL, STAGE, make_mesh(MeshConfig(**sizes)))
    found = saved.restore(manifest, abstract)
    assert_same(found, state)
    assert jax.tree.map(lambda leaf: leaf.sharding, found) == jax.tree.map(lambda leaf: leaf.sharding, abstract)
    assert saved.restore(manifest, abstract, optimizer=False).opt_state is None


def test_keeps_the_last_ones_and_replaces_a_step_of_the_same_number(state: TrainState, tmp_path: Path) -> None:
    saved = Checkpoints(tmp_path / "new" / "checkpoints", keep_last=2)
    assert saved.latest() is None
    for number in (3, 7, 10, 10):
        saved.save(state, replace(MANIFEST, step=number))
    assert saved.steps() == [7, 10]
    assert {each.name for each in saved.directory.iterdir()} == {"00000007", "00000010"}


def test_what_is_counted_while_a_save_is_under_way_is_not_in_it(state: TrainState, tmp_path: Path) -> None:
    saved, losses = Checkpoints(tmp_path), [1.5]
    saved.begin_save(state, replace(MANIFEST, progress={"first": losses}))
    losses.append(1.25)
    saved.finish()
    manifest = saved.latest()
    assert manifest is not None
    assert manifest.progress == {"first": [1.5]}


def test_half_written_steps_are_never_picked_up(state: TrainState, tmp_path: Path) -> None:
    saved = Checkpoints(tmp_path)
    saved.save(state, MANIFEST)
    shutil.copytree(saved.path(3), tmp_path / "00000009.orbax-checkpoint-tmp")
    shutil.copytree(saved.path(3), tmp_path / "00000008")
    (tmp_path / "00000008" / "manifest.json").unlink()
    assert saved.steps() == [3]
    assert checkpoint.find_checkpoint(tmp_path) == saved.path(3)
    saved.save(state, replace(MANIFEST, step=4))
    assert not (tmp_path / "00000009.orbax-checkpoint-tmp").exists()


def test_a_save_killed_half_way_leaves_the_one_before(state: TrainState, tmp_path: Path) -> None:
    """A process saves step after step until it is killed: what is found afterwards is whole."""
    program = f"""
import jax
from dataclasses import replace
from lwm import model
from lwm.checkpoint import Checkpoints, Manifest
from lwm.config import ModelConfig
from lwm.step import TrainState
import jax.numpy as jnp
config = ModelConfig.model_validate_json({MODEL.model_dump_json()!r})
params = model.init(config, jax.random.key(0))
zero = jnp.int32(0)
manifest = Manifest(0, "s", 0, 0, 0, 0, "", "", config.model_dump(mode="json"), (), {{}})
saved = Checkpoints({str(tmp_path)!r})
for number in range(1, 10_000):
    saved.save(TrainState(params, None, zero, zero, zero, zero), replace(manifest, step=number))
    print(number, flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        for _ in range(3):
            last = int(process.stdout.readline())
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    steps = Checkpoints(tmp_path).steps()
    assert steps[-1] >= last
    drawn = flatten(model.init(MODEL, jax.random.key(0)))
    for name, leaf in flatten(checkpoint.load_params(tmp_path)).items():
        np.testing.assert_array_equal(leaf, drawn[name])


def test_load_params_takes_a_run_its_checkpoints_or_a_step(state: TrainState, tmp_path: Path) -> None:
    saved = Checkpoints(tmp_path / "checkpoints")
    saved.save(state, MANIFEST)
    mesh = make_mesh(MeshConfig(fsdp=8))
    for directory in (tmp_path, saved.directory, saved.path(3)):
        assert_same(checkpoint.load_params(directory), state.params)
    found = checkpoint.load_params(tmp_path, mesh, MODEL)
    assert_same(found, state.params)
    assert flatten(found)["layers/query"].sharding.mesh == mesh
    assert checkpoint.load_model_config(tmp_path) == MODEL


def test_imported_parameters_can_be_saved_bare(tmp_path: Path) -> None:
    params = jax.device_get(model.init(MODEL, jax.random.key(1)))
    checkpoint.save_params(tmp_path, MODEL, params)
    assert_same(checkpoint.load_params(tmp_path), params)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 3}, r"layers/attention_norm is float32\[2, 16\] there and float32\[3, 16\] in this"),
        ({"vision_vocab_size": 0}, r"embed/vision is float32\[6, 16\] there and absent in this"),
        ({"text_vocab_size": 12}, r"embed/text is float32\[10, 16\] there and float32\[12, 16\] in this"),
        ({"tie_embeddings": True}, r"head/text is float32\[16, 10\] there and absent in this"),
    ],
)
def test_another_model_is_refused(state: TrainState, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    Checkpoints(tmp_path).save(state, MANIFEST)
    other = ModelConfig.model_validate(MODEL.model_dump() | changes)
    with pytest.raises(ValueError, match=f"is of another model: {message}") as caught:
        checkpoint.load_params(tmp_path, None, other)
    assert "\n" not in str(caught.value)


def test_what_is_damaged_or_absent_is_named(state: TrainState, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no checkpoint in .*nothing"):
        checkpoint.load_params(tmp_path / "nothing")
    path = Checkpoints(tmp_path).save(state, MANIFEST)
    manifest = path / "manifest.json"
    whole = manifest.read_text()
    for text, message in (
        (whole[:50], "cannot be read"),
        ("{}", "cannot be read"),
        (json.dumps(json.loads(whole) | {"format": 99}), "has format 99"),
    ):
        manifest.write_text(text)
        with pytest.raises(ValueError, match=message) as caught:
            checkpoint.load_params(tmp_path)
        assert "\n" not in str(caught.value)
    manifest.write_text(whole)
    for file in (path / "params").rglob("*"):
        if file.is_file() and file.stat().st_size > 1000:
            file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match="cannot be read .*; remove it to use the one before") as caught:
        checkpoint.load_params(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_directory_that_cannot_be_written(state: TrainState, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="Not a directory"):
        Checkpoints(tmp_path / "file" / "checkpoints").save(state, MANIFEST)


def test_a_failed_save_leaves_nothing_and_keeps_the_older_one(tmp_path: Path) -> None:
    """The process may not write files above 4 kB, as if the disk were full."""
    program = f"""
import resource, signal, sys
import jax, jax.numpy as jnp, numpy as np
from dataclasses import replace
from lwm import checkpoint
from lwm.checkpoint import Checkpoints, Manifest
from lwm.config import ModelConfig
from lwm.step import TrainState
config = ModelConfig.model_validate_json({MODEL.model_dump_json()!r})
checkpoint.save_params({str(tmp_path)!r}, config, {{"a": jnp.zeros(4)}})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
noise = {{"a": jnp.asarray(np.random.default_rng(0).normal(size=1 << 16))}}
zero = jnp.int32(0)
manifest = Manifest(5, "s", 0, 0, 0, 0, "", "", {{}}, (), {{}})
try:
    Checkpoints({str(tmp_path)!r}).save(TrainState(noise, None, zero, zero, zero, zero), manifest)
except OSError as error:
    print(f"{{error.filename}}: {{error.strerror}}", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "00000005" in done.stdout, done.stderr[-2000:]
    assert Checkpoints(tmp_path).steps() == [0]
    assert {each.name for each in tmp_path.iterdir()} == {"00000000"}
