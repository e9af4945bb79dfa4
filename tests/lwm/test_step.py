"""The train step: equal on every mesh, compiled once, indifferent to gradients that are not finite."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import ring
from lwm import model, step
from lwm.config import ModelConfig, StageConfig
from lwm.sharding import flatten, make_mesh
from lwm.step import TrainState

MODEL = ModelConfig(
    text_vocab_size=24,
    vision_vocab_size=8,
    hidden_size=32,
    intermediate_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    init_std=0.2,
)
ROWS, LENGTH = 8, 32


def make_stage(sizes: dict[str, int], layout: str = "striped", **changes: Any) -> StageConfig:
    values = {
        "name": "test",
        "seq_len": LENGTH,
        "batch_rows": ROWS,
        "steps": 10,
        "rope_theta": 1e4,
        "mesh": {"fsdp": 1} | sizes,
        "attention": {"layout": layout},
        "optimizer": {"peak_lr": 1e-2, "warmup_steps": 0, "eps": 1e-3},
        "mixture": ({"corpus": "none", "share": 1.0},),
        "remat": "attention",
        "compute_dtype": "float32",
        "loss_chunk": 7,
    }
    return StageConfig.model_validate(values | changes)


def make_batch(stage: StageConfig) -> dict[str, np.ndarray]:
    """Two segments and padding in each row, in the order of the stage's layout."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, MODEL.vocab_size, (ROWS, LENGTH + 1)).astype(np.int32)
    segments = np.tile(np.repeat([1, 2, 0], [13, 15, 4]), (ROWS, 1)).astype(np.int32)
    positions = np.tile(np.concatenate([np.arange(13), np.arange(15), np.zeros(4)]), (ROWS, 1)).astype(np.int32)
    weights = np.where(segments > 0, rng.random((ROWS, LENGTH)), 0)
    batch = {
        "tokens": np.where(segments > 0, tokens[:, :-1], 0),
        "targets": np.where(segments > 0, tokens[:, 1:], 0),
        "positions": positions,
        "segment_ids": segments,
        "loss_weights": (weights / weights.sum()).astype(np.float32),
        "sources": np.zeros_like(segments),
    }
    order = ring.layout.permutation(stage.attention.layout, LENGTH, stage.mesh.sp * stage.mesh.ulysses)
    return {name: np.ascontiguousarray(array[:, order]) for name, array in batch.items()}


@functools.cache
def compiled_step(stage: StageConfig, num_devices: int = 8) -> tuple[step.CompiledStep, Mesh]:
    mesh = make_mesh(stage.mesh, jax.devices()[:num_devices])
    return step.CompiledStep(MODEL, stage, mesh), mesh


def make_state(stage: StageConfig, mesh: Mesh) -> TrainState:
    places = jax.tree.map(lambda leaf: leaf.sharding, step.abstract_state(MODEL, stage, mesh))
    params = jax.device_put(jax.device_get(model.init(MODEL, jax.random.key(0))), places.params)
    return jax.jit(lambda params: step.fresh_state(MODEL, stage, params), out_shardings=places)(params)


def run(stage: StageConfig, num_devices: int) -> tuple[list[float], list[float], dict[str, np.ndarray]]:
    """Losses and gradient norms of two steps, and the parameters after them."""
    compiled, mesh = compiled_step(stage, num_devices)
    state, batch = make_state(stage, mesh), step.place_batch(make_batch(stage), stage, mesh)
    losses, norms = [], []
    for _ in range(2):
        state, metrics = compiled(state, batch)
        losses.append(float(metrics.loss))
        norms.append(float(metrics.grad_norm))
    assert compiled.compilations == 1
    assert int(state.step) == 2
    for name, leaf in flatten(step.abstract_state(MODEL, stage, mesh).params).items():
        assert flatten(state.params)[name].sharding.is_equivalent_to(leaf.sharding, leaf.ndim)
    return losses, norms, flatten(jax.device_get(state.params))


@pytest.fixture(scope="module")
def single() -> tuple[list[float], list[float], dict[str, np.ndarray]]:
    return run(make_stage({}, "contiguous"), 1)


@pytest.mark.parametrize(
    ("sizes", "layout", "changes"),
    [
        ({"fsdp": 8}, "striped", {}),
        ({"fsdp": 2, "tp": 2, "sp": 2}, "zigzag", {"remat": "offload_attention"}),
        ({"fsdp": 2, "sp": 4}, "striped", {"remat": "offload", "attention": {"head_parts": 2}}),
    ],
)
def test_eight_devices_take_the_steps_of_one(
    single: tuple[list[float], list[float], dict[str, np.ndarray]],
    sizes: dict[str, int],
    layout: str,
    changes: dict[str, Any],
) -> None:
    """Losses and gradients to 1e-5, the parameters as far as Adam's division allows; with layer inputs in the host's
    memory and with heads in parts as well."""
    losses, norms, params = run(make_stage(sizes, **{"attention": {"layout": layout}} | changes), 8)
    np.testing.assert_allclose(losses, single[0], rtol=1e-5)
    np.testing.assert_allclose(norms, single[1], rtol=1e-5)
    for name, leaf in single[2].items():
        np.testing.assert_allclose(params[name], leaf, atol=1e-5, err_msg=name)


def test_a_step_without_finite_gradient_changes_nothing_but_the_counters() -> None:
    stage = make_stage({"fsdp": 8})
    compiled, mesh = compiled_step(stage)
    good = make_batch(stage)
    bad = good | {"loss_weights": good["loss_weights"].copy()}
    bad["loss_weights"][0, 0] = np.nan
    state = make_state(stage, mesh)
    before = jax.device_get((state.params, state.opt_state))
    for count in (1, 2):
        state, metrics = compiled(state, step.place_batch(bad, stage, mesh))
        assert (int(metrics.skipped), int(metrics.skipped_in_a_row)) == (count, count)
        assert not np.isfinite(float(metrics.loss))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get((state.params, state.opt_state)), before)
    state, metrics = compiled(state, step.place_batch(good, stage, mesh))
    assert (int(state.step), int(metrics.skipped), int(metrics.skipped_in_a_row)) == (3, 2, 0)
    changed = jax.tree.map(lambda new, old: bool((new != old).any()), jax.device_get(state.params), before[0])
    assert all(jax.tree.leaves(changed))


def test_parts_taken_one_after_the_other_are_the_whole_batch(
    single: tuple[list[float], list[float], dict[str, np.ndarray]],
) -> None:
    losses, norms, params = run(make_stage({"fsdp": 2, "sp": 2}, accumulate=2), 4)
    np.testing.assert_allclose(losses, single[0], rtol=1e-5)
    np.testing.assert_allclose(norms, single[1], rtol=1e-5)
    for name, leaf in single[2].items():
        np.testing.assert_allclose(params[name], leaf, atol=1e-5, err_msg=name)


def test_spikes_are_skipped_and_a_process_without_a_batch_stops_everything() -> None:
    stage = make_stage({"fsdp": 2, "sp": 4}, guard={"loss_factor": 3.0, "norm_factor": 100.0, "after_steps": 2})
    compiled, mesh = compiled_step(stage)
    good = make_batch(stage)
    # The loss is linear in its weights: twenty times the weights are twenty times the loss and the gradient.
    spike = good | {"loss_weights": good["loss_weights"] * 20}
    state = make_state(stage, mesh)

    def take(batch: dict[str, np.ndarray], vote: int = step.VOTE_NONE) -> step.Metrics:
        nonlocal state
        state, metrics = compiled(state, step.place_batch(batch, stage, mesh, vote=vote))
        return metrics

    first = take(spike)  # nothing is typical yet
    assert int(first.skipped) == 0
    np.testing.assert_array_equal(state.typical, [first.loss, first.grad_norm])
    take(good)
    np.testing.assert_allclose(state.typical[0], first.loss * 0.98 + 0.02 * first.loss / 20, rtol=0.05)
    state = replace(state, typical=state.typical / 20)
    before = jax.device_get((state.params, state.opt_state, state.typical))
    metrics = take(spike)
    assert (int(metrics.skipped), int(metrics.skipped_in_a_row), int(state.step)) == (1, 1, 3)
    assert np.isfinite(float(metrics.loss))
    for vote in (step.VOTE_NO_BATCH, step.VOTE_NO_BATCH):
        metrics = take(good, vote)
        assert int(metrics.vote) == vote
        assert (int(metrics.skipped), int(metrics.skipped_in_a_row), int(state.step)) == (1, 1, 3)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get((state.params, state.opt_state, state.typical)), before)
    metrics = take(good, step.VOTE_STOP)
    assert (int(metrics.vote), int(metrics.skipped_in_a_row), int(state.step)) == (step.VOTE_STOP, 0, 4)
    assert int(metrics.tokens) == ROWS * 28
    assert float(metrics.pairs) == ROWS * (13 * 14 / 2 + 15 * 16 / 2)


def test_another_shape_is_refused_rather_than_compiled() -> None:
    stage = make_stage({"fsdp": 8})
    compiled, mesh = compiled_step(stage)
    batch = step.place_batch(make_batch(stage), stage, mesh)
    with pytest.raises(TypeError):
        compiled(make_state(stage, mesh), batch | {"tokens": jnp.zeros((ROWS, LENGTH // 2), jnp.int32)})
    assert compiled.compilations == 1


def test_a_process_places_its_own_rows() -> None:
    """Rows that start further down in the global batch land where they belong."""
    stage = make_stage({"fsdp": 2}, "contiguous")
    mesh = make_mesh(stage.mesh, jax.devices()[:2])
    batch = make_batch(stage)
    lower = {name: np.concatenate([array, array]) for name, array in batch.items()}
    right = {name: np.concatenate([array, array], axis=1) for name, array in batch.items()}
    for first_row, first_column, part in ((0, 0, batch), (-ROWS, 0, lower), (0, -LENGTH, right)):
        placed = step.place_batch(part, stage, mesh, first_row, first_column=first_column)
        for name, array in batch.items():
            np.testing.assert_array_equal(placed[name], array)
            assert placed[name].sharding.shard_shape(array.shape) == (ROWS // 2, LENGTH)
