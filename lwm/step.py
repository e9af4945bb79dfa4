"""The train step: one compiled function from (state, batch) to (state, metrics), everything placed by the table."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ring
from lwm import model, objective, optimizer, sharding
from lwm.config import ModelConfig, StageConfig
from lwm.sharding import AnyMesh, Params

BATCH_KEYS = ("tokens", "targets", "positions", "segment_ids", "loss_weights", "sources")
# What a process may say with its batch; the largest of all processes is in the step's metrics everywhere.
VOTE_NONE, VOTE_STOP, VOTE_NO_BATCH = 0, 1, 2
# The part of a new value in the running means that spikes are judged by.
_NEW_IN_TYPICAL = 0.02

Batch = Mapping[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """What a step changes. Counters are int32 scalars and start at 0 in each stage.

    `step`: steps taken, skipped ones included. `skipped`: steps whose update was not made. `skipped_in_a_row`: how many
    the latest steps were. `typical`: float32 [2], running means of loss and gradient norm over the other steps.
    """

    params: Params
    opt_state: Any
    step: jax.Array
    skipped: jax.Array
    skipped_in_a_row: jax.Array
    typical: jax.Array


class Metrics(NamedTuple):
    """Of one step, all replicated: float32 scalars, int32 counters, and the objective's sums.

    `tokens` are real ones (no padding), `pairs` (float32) the query-key pairs that see each other, `vote` the largest
    of what the processes said.
    """

    loss: jax.Array
    grad_norm: jax.Array
    learning_rate: jax.Array
    skipped: jax.Array
    skipped_in_a_row: jax.Array
    tokens: jax.Array
    pairs: jax.Array
    vote: jax.Array
    tally: objective.Tally


def compute_of(stage: StageConfig, mesh: AnyMesh | None) -> model.Compute:
    """How a stage runs the model on `mesh`."""
    attention = stage.attention
    plan = ring.Plan(
        mesh=mesh,
        strategy=attention.strategy,
        layout=attention.layout,
        query_block=attention.query_block,
        key_block=attention.key_block,
        transit_dtype=attention.transit_dtype,
        backend=attention.backend,
    )
    return model.Compute(
        plan=plan,
        dtype=stage.compute_dtype,
        remat=stage.remat,
        mlp_chunk=stage.mlp_chunk,
        head_parts=attention.head_parts,
    )


def fresh_state(config: ModelConfig, stage: StageConfig, params: Params, opt_state: Any = None) -> TrainState:
    """The state at the start of a stage, around `params` and (None: new) optimizer state; traceable."""
    if opt_state is None:
        opt_state = optimizer.make_optimizer(config, stage.optimizer).init(params)
    zero = jnp.zeros((), jnp.int32)
    return TrainState(params, opt_state, zero, zero, zero, jnp.zeros(2, jnp.float32))


def abstract_state(config: ModelConfig, stage: StageConfig, mesh: AnyMesh | None) -> TrainState:
    """The state as ShapeDtypeStructs, placed on `mesh`: moments lie where their parameters lie."""
    params = sharding.abstract_parameters(config, mesh)
    state = jax.eval_shape(lambda params: fresh_state(config, stage, params), params)
    structure: Any = jax.tree.structure(params)

    def is_params(node: Any) -> bool:
        return bool(structure == jax.tree.structure(node))

    def place(node: Any) -> Any:
        if is_params(node):
            return jax.tree.map(lambda leaf, like: _struct(leaf, like.sharding), node, params)
        return _struct(node, None if mesh is None else NamedSharding(mesh, PartitionSpec()))

    return jax.tree.map(place, state, is_leaf=is_params)


def _struct(leaf: Any, where: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)


def abstract_batch(stage: StageConfig, mesh: AnyMesh | None) -> dict[str, jax.ShapeDtypeStruct]:
    """The batch of a stage as ShapeDtypeStructs placed on `mesh`."""
    where = None if mesh is None else batch_sharding(mesh)
    dtypes = {key: jnp.float32 if key == "loss_weights" else jnp.int32 for key in BATCH_KEYS}
    shape = (stage.batch_rows, stage.seq_len)
    batch = {key: jax.ShapeDtypeStruct(shape, dtype, sharding=where) for key, dtype in dtypes.items()}
    each_device = None if mesh is None else _vote_sharding(mesh)
    num_devices = 1 if mesh is None else math.prod(sharding.mesh_sizes(mesh).values())
    return batch | {"votes": jax.ShapeDtypeStruct((num_devices,), jnp.int32, sharding=each_device)}


def batch_sharding(mesh: AnyMesh) -> NamedSharding:
    """Rows over (dp, fsdp), tokens over (sp, ulysses)."""
    return NamedSharding(mesh, sharding.spec_for(("batch", "sequence"), sharding.mesh_sizes(mesh)))


def _vote_sharding(mesh: AnyMesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(sharding.MESH_AXIS_NAMES))


def place_batch(
    batch: Mapping[str, np.ndarray],
    stage: StageConfig,
    mesh: Mesh,
    first_row: int = 0,
    vote: int = VOTE_NONE,
    first_column: int = 0,
) -> dict[str, jax.Array]:
    """The global batch on `mesh` from the part of it that this process has, which starts at first_row, first_column.

    `vote`: what this process has to say to the others (VOTE_...); they hear it in the metrics of the step.
    """
    where = batch_sharding(mesh)
    shape = (stage.batch_rows, stage.seq_len)

    def place(array: np.ndarray) -> jax.Array:
        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            (first, stop, _), (left, right, _) = index[0].indices(shape[0]), index[1].indices(shape[1])
            return array[first - first_row : stop - first_row, left - first_column : right - first_column]

        return jax.make_array_from_callback(shape, where, part)

    votes = np.full(mesh.size, vote, np.int32)
    placed = jax.make_array_from_callback(votes.shape, _vote_sharding(mesh), lambda index: votes[index])
    return {key: place(batch[key]) for key in BATCH_KEYS} | {"votes": placed}


def train_step(
    config: ModelConfig, stage: StageConfig, compute: model.Compute
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The uncompiled step of a stage: loss, gradients, AdamW.

    Where the loss or the gradient is not finite, or is a spike (`stage.guard`), parameters and optimizer state stay as
    they were: every device sees the same numbers, so all of them skip, and the step still counts. Where a process has
    no batch (VOTE_NO_BATCH), nothing changes and the step does not count.
    """
    descent = optimizer.make_optimizer(config, stage.optimizer)
    rate = optimizer.learning_rate(stage.optimizer, stage.steps)
    gradients_of = _accumulated(config, stage, compute)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        value, tally, gradients = gradients_of(state.params, batch)
        norm, lr = optimizer.global_norm(gradients), rate(state.step)
        now, vote = jnp.stack([value, norm]), jnp.max(batch["votes"])
        counts, accepted = vote < VOTE_NO_BATCH, state.step - state.skipped
        good = jnp.all(jnp.isfinite(now)) & ~_spikes(stage, now, state.typical, accepted)
        clipped = optimizer.clip(stage.optimizer, gradients, norm)
        directions, opt_state = descent.update(clipped, state.opt_state, state.params)
        params = jax.tree.map(lambda weight, direction: weight - lr * direction, state.params, directions)
        typical = jnp.where(accepted == 0, now, state.typical + _NEW_IN_TYPICAL * (now - state.typical))

        def keep(new: Any, old: Any) -> Any:
            return jax.tree.map(lambda a, b: jnp.where(good & counts, a, b), new, old)

        one = counts.astype(jnp.int32)
        new_state = TrainState(
            params=keep(params, state.params),
            opt_state=keep(opt_state, state.opt_state),
            step=state.step + one,
            skipped=state.skipped + jnp.where(good, 0, one),
            skipped_in_a_row=jnp.where(good & counts, 0, state.skipped_in_a_row + one),
            typical=keep(typical, state.typical),
        )
        tokens, pairs = _amounts(batch)
        skips = (new_state.skipped, new_state.skipped_in_a_row)
        return new_state, Metrics(value, norm, lr, *skips, tokens, pairs, vote, tally)

    return step


def _spikes(stage: StageConfig, now: jax.Array, typical: jax.Array, accepted: jax.Array) -> jax.Array:
    """Whether loss or gradient norm (float32 [2]) are too far above what they have typically been."""
    factors = (stage.guard.loss_factor, stage.guard.norm_factor)
    limits = jnp.asarray([np.inf if factor is None else factor for factor in factors], jnp.float32)
    # inf * 0 is nan, which nothing is above; a mean of exactly 0 says that there is nothing to compare with.
    return (accepted >= stage.guard.after_steps) & jnp.any(now > limits * typical)


def _amounts(batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Real tokens (int32) and visible query-key pairs (float32: there may be 10^13) of a packed causal batch."""
    real = batch["segment_ids"] > 0
    pairs = jnp.where(real, batch["positions"].astype(jnp.float32) + 1, 0.0)
    return jnp.sum(real, dtype=jnp.int32), jnp.sum(pairs)


def _accumulated(
    config: ModelConfig, stage: StageConfig, compute: model.Compute
) -> Callable[[Params, Batch], tuple[jax.Array, objective.Tally, Params]]:
    """(loss, tally, gradients) of a batch, taken in `stage.accumulate` parts one after the other.

    The loss is a sum over tokens whose weights are those of the whole batch, so the parts are simply added.
    """
    keys = ("tokens", "positions", "segment_ids", "targets", "loss_weights", "sources")

    def whole(params: Params, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, objective.Tally, Params]:
        def loss(params: Params) -> tuple[jax.Array, objective.Tally]:
            sources = len(stage.mixture)
            return objective.loss(config, params, *arrays, compute=compute, chunk=stage.loss_chunk, num_sources=sources)

        (value, tally), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        return value, tally, gradients

    def take(params: Params, batch: Batch) -> tuple[jax.Array, objective.Tally, Params]:
        arrays = tuple(batch[key] for key in keys)
        if stage.accumulate == 1:
            return whole(params, arrays)

        def split(array: jax.Array) -> jax.Array:
            # Each device's rows are neighbours, so every part takes one of every `accumulate` rows of each device.
            parts = array.reshape(stage.batch_rows // stage.accumulate, stage.accumulate, stage.seq_len)
            return sharding.constrain(parts.swapaxes(0, 1), (None, "batch", "sequence"), compute.mesh)

        def add(total: Any, part: tuple[jax.Array, ...]) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, whole(params, part)), None

        rows = stage.batch_rows // stage.accumulate
        parts = tuple(jax.ShapeDtypeStruct((rows, *array.shape[1:]), array.dtype) for array in arrays)
        abstract = jax.eval_shape(whole, params, parts)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract)
        total, _ = jax.lax.scan(add, zeros, tuple(map(split, arrays)))
        value, tally, gradients = total
        return value, tally, gradients

    return take


class CompiledStep:
    """A stage's step, compiled once, ahead of time: other shapes or placements raise rather than compile again.

    `seconds` is what compiling took; `compilations` how often it happened; `flops` counts those of one device as the
    compiler sees them.
    """

    def __init__(self, config: ModelConfig, stage: StageConfig, mesh: Mesh):
        begin = time.monotonic()
        self.compilations = 0
        uncompiled = train_step(config, stage, compute_of(stage, mesh))

        def counted(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
            self.compilations += 1
            return uncompiled(state, batch)

        state, batch = abstract_state(config, stage, mesh), abstract_batch(stage, mesh)
        placements = jax.tree.map(lambda leaf: leaf.sharding, state), NamedSharding(mesh, PartitionSpec())
        self._call = jax.jit(counted, donate_argnums=0, out_shardings=placements)
        self.compiled = self._call.lower(state, batch).compile()
        self.seconds = time.monotonic() - begin

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        return self.compiled(state, batch)
