"""The train step: one compiled function from (state, batch) to (state, metrics), everything placed by the table."""

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

BATCH_KEYS = ("tokens", "targets", "positions", "segment_ids", "loss_weights")

Batch = Mapping[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """What a step changes. Counters are int32 scalars and start at 0 in each stage.

    `step`: steps taken, skipped ones included. `skipped`: steps whose gradient was not finite. `skipped_in_a_row`: how
    many the latest steps were.
    """

    params: Params
    opt_state: Any
    step: jax.Array
    skipped: jax.Array
    skipped_in_a_row: jax.Array


class Metrics(NamedTuple):
    """Of one step, all replicated: float32 scalars, int32 counters, and the objective's sums."""

    loss: jax.Array
    grad_norm: jax.Array
    learning_rate: jax.Array
    skipped: jax.Array
    skipped_in_a_row: jax.Array
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
    return model.Compute(plan=plan, dtype=stage.compute_dtype, remat=stage.remat, mlp_chunk=stage.mlp_chunk)


def fresh_state(config: ModelConfig, stage: StageConfig, params: Params, opt_state: Any = None) -> TrainState:
    """The state at the start of a stage, around `params` and (None: new) optimizer state; traceable."""
    if opt_state is None:
        opt_state = optimizer.make_optimizer(config, stage.optimizer).init(params)
    zero = jnp.zeros((), jnp.int32)
    return TrainState(params, opt_state, zero, zero, zero)


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
    return {key: jax.ShapeDtypeStruct(shape, dtype, sharding=where) for key, dtype in dtypes.items()}


def batch_sharding(mesh: AnyMesh) -> NamedSharding:
    """Rows over (dp, fsdp), tokens over (sp, ulysses)."""
    return NamedSharding(mesh, sharding.spec_for(("batch", "sequence"), sharding.mesh_sizes(mesh)))


def place_batch(
    batch: Mapping[str, np.ndarray], stage: StageConfig, mesh: Mesh, first_row: int = 0
) -> dict[str, jax.Array]:
    """The global batch on `mesh` from the rows of it that this process has, which start at `first_row`."""
    where = batch_sharding(mesh)
    shape = (stage.batch_rows, stage.seq_len)

    def place(array: np.ndarray) -> jax.Array:
        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            first, stop, _ = index[0].indices(shape[0])
            return array[first - first_row : stop - first_row, index[1]]

        return jax.make_array_from_callback(shape, where, part)

    return {key: place(batch[key]) for key in BATCH_KEYS}


def train_step(
    config: ModelConfig, stage: StageConfig, compute: model.Compute
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The uncompiled step of a stage: loss, gradients, AdamW.

    Where the loss or the gradient is not finite, parameters and optimizer state stay as they were: every device sees
    the same norm, so all of them skip, and the step still counts.
    """
    descent = optimizer.make_optimizer(config, stage.optimizer)
    rate = optimizer.learning_rate(stage.optimizer, stage.steps)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        def loss(params: Params) -> tuple[jax.Array, objective.Tally]:
            arrays = (batch[key] for key in ("tokens", "positions", "segment_ids", "targets", "loss_weights"))
            return objective.loss(config, params, *arrays, compute=compute, chunk=stage.loss_chunk)

        (value, tally), gradients = jax.value_and_grad(loss, has_aux=True)(state.params)
        norm, lr = optimizer.global_norm(gradients), rate(state.step)
        finite = jnp.isfinite(value) & jnp.isfinite(norm)
        clipped = optimizer.clip(stage.optimizer, gradients, norm)
        directions, opt_state = descent.update(clipped, state.opt_state, state.params)
        params = jax.tree.map(lambda weight, direction: weight - lr * direction, state.params, directions)

        def keep(new: Any, old: Any) -> Any:
            return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)

        skipped = state.skipped + jnp.where(finite, 0, 1)
        in_a_row = jnp.where(finite, 0, state.skipped_in_a_row + 1)
        new_state = TrainState(
            params=keep(params, state.params),
            opt_state=keep(opt_state, state.opt_state),
            step=state.step + 1,
            skipped=skipped,
            skipped_in_a_row=in_a_row,
        )
        return new_state, Metrics(value, norm, lr, skipped, in_a_row, tally)

    return step


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
