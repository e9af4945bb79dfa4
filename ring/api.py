"""Exact attention whose sequence is sharded over a device mesh, in one call."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from ring import cost, local, pallas_tpu
from ring.local import Spec
from ring.mask import CAUSAL, Mask
from ring.plan import ONE_DEVICE, Plan

Meta = tuple[jax.Array, jax.Array, jax.Array | None]


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    positions: jax.Array,
    segment_ids: jax.Array | None = None,
    mask: Mask = CAUSAL,
    plan: Plan = ONE_DEVICE,
    last_visible: jax.Array | None = None,
    sinks: jax.Array | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
) -> jax.Array:
    """softmax(q k^T scale) v over the keys each query may see, exact for any sharding of the sequence.

    q [B, S, H, D], k and v [B, S, G, D] of one float dtype; G divides H, and query head h reads key/value
    head h // (H / G). positions, segment_ids int32 [B, S], already in the order of ``plan.layout``, as are
    q, k and v. Segment 0 is padding: it sees nothing and nothing sees it. -> [B, S, H, D] in q's dtype.

    last_visible int32 [B, S]: lets a query see up to this position of its segment, beyond what a causal
        mask allows (a prefix or video frame of any length).
    sinks [H]: a logit per head that takes part in the softmax and has no value.
    soft_cap: scores become soft_cap * tanh(score / soft_cap).  scale: 1 / sqrt(D) by default.

    Arrays are global; any S works (padded inside, masked). A query that sees nothing returns exactly 0
    and sends exactly 0 gradient. Accumulates in float32; cotangents have their inputs' dtypes. The output
    and its logsumexp carry the checkpoint names "ring_out" and "ring_lse": a remat policy that saves both
    keeps the backward pass from running the ring again. Reverse-mode differentiation only.
    ValueError for shapes, dtypes or meshes that do not fit, at trace time.
    """
    return _attention(
        q, k, v, positions, segment_ids, mask, plan, last_visible, sinks, soft_cap, scale, inside=plan.mesh is None
    )


def attention_local(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    positions: jax.Array,
    segment_ids: jax.Array | None = None,
    mask: Mask = CAUSAL,
    plan: Plan = ONE_DEVICE,
    last_visible: jax.Array | None = None,
    sinks: jax.Array | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
) -> jax.Array:
    """``attention`` for callers inside their own ``shard_map``: every array is this device's shard.

    The mesh axes of ``plan`` must be bound; S, B and the head counts are per device. With
    ``plan.mesh`` None the sequence axes that happen to be bound are used.
    """
    return _attention(q, k, v, positions, segment_ids, mask, plan, last_visible, sinks, soft_cap, scale, inside=True)


def _attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array | None,
    mask: Mask,
    plan: Plan,
    last_visible: jax.Array | None,
    sinks: jax.Array | None,
    soft_cap: float | None,
    scale: float | None,
    *,
    inside: bool,
) -> jax.Array:
    if segment_ids is None:
        segment_ids = jnp.ones(positions.shape, jnp.int32)
    _check_arrays(q, k, v, positions, segment_ids, last_visible, sinks, soft_cap)
    heads_here, groups_here = _check_mesh(q, k, plan, inside)
    strategy = _choose(plan, q, heads_here, groups_here, inside)
    spec = Spec(
        route=plan.route(strategy),
        mask=mask,
        scale=1 / math.sqrt(q.shape[-1]) if scale is None else float(scale),
        soft_cap=None if soft_cap is None else float(soft_cap),
        query_block=plan.query_block,
        key_block=plan.key_block,
        transit_dtype=plan.transit_dtype if plan.num_shards > 1 else None,
        platform=plan.platform,
        backend=_backend(plan, q),
        device_kind=plan.device_kind,
    )
    _check_route(spec, strategy, heads_here, groups_here)
    meta: Meta = (positions, segment_ids, last_visible)
    if inside:
        return _attend(_Inside(spec), q, k, v, sinks, meta)
    length, missing = q.shape[1], -q.shape[1] % plan.num_shards
    if missing:
        q, k, v = (jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0))) for x in (q, k, v))
        meta = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, missing))), meta)
    out = _attend(_Sharded(spec, plan), q, k, v, sinks, meta)
    return out[:, :length] if missing else out


@dataclasses.dataclass(frozen=True)
class _Inside:
    """Runs the local program as it is: the caller has bound the mesh axes."""

    spec: Spec

    def forward(self, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None, meta: Meta) -> tuple:
        return local.forward(self.spec, q, k, v, sinks, meta)

    def backward(self, *arguments: Any) -> tuple:
        return local.backward(self.spec, *arguments)


@dataclasses.dataclass(frozen=True)
class _Sharded:
    """Runs the local program on every device of the plan's mesh.

    Differentiation happens outside of ``shard_map``: both passes are plain programs over global arrays.
    """

    spec: Spec
    plan: Plan

    def forward(self, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None, meta: Meta) -> tuple:
        return self._map(functools.partial(local.forward, self.spec), self._inputs(), (self._tokens, self._lse))(
            q, k, v, sinks, meta
        )

    def backward(
        self, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None, meta: Meta, *rest: jax.Array
    ) -> tuple:
        plan = self.plan
        replicated = plan.axes("batch") + plan.sequence_axes

        def run(*arguments: Any) -> tuple:
            *cotangents, dsinks = local.backward(self.spec, *arguments)
            if dsinks is not None and replicated:
                dsinks = jax.lax.psum(dsinks, replicated)
            return *cotangents, dsinks

        tokens = self._tokens
        return self._map(
            run, (*self._inputs(), tokens, self._lse, tokens), (tokens, tokens, tokens, plan.spec("heads"))
        )(q, k, v, sinks, meta, *rest)

    @property
    def _tokens(self) -> jax.sharding.PartitionSpec:
        return self.plan.spec("batch", "sequence", "heads", None)

    @property
    def _lse(self) -> jax.sharding.PartitionSpec:
        # After a head exchange a device holds fewer heads of more tokens.
        plan, exchanged = self.plan, self.spec.route.exchange
        heads = plan.axes("heads") + exchanged
        sequence = tuple(axis for axis in plan.sequence_axes if axis not in exchanged)
        return jax.sharding.PartitionSpec(plan.axes("batch") or None, heads or None, sequence or None)

    def _inputs(self) -> tuple:
        return (self._tokens,) * 3 + (self.plan.spec("heads"), self.plan.spec("batch", "sequence"))

    def _map(self, function: Callable, in_specs: tuple, out_specs: tuple) -> Callable:
        return jax.shard_map(function, mesh=self.plan.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    runner: _Inside | _Sharded, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None, meta: Meta
) -> jax.Array:
    return runner.forward(q, k, v, sinks, meta)[0]


def _attend_forward(
    runner: _Inside | _Sharded, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None, meta: Meta
) -> tuple[jax.Array, tuple]:
    out, lse = runner.forward(q, k, v, sinks, meta)
    out, lse = checkpoint_name(out, "ring_out"), checkpoint_name(lse, "ring_lse")
    return out, (q, k, v, sinks, meta, out, lse)


def _attend_backward(runner: _Inside | _Sharded, residual: tuple, dout: jax.Array) -> tuple:
    *cotangents, dsinks = runner.backward(*residual, dout)
    return *cotangents, dsinks, None


_attend.defvjp(_attend_forward, _attend_backward)


def _choose(plan: Plan, q: jax.Array, heads: int, groups: int, inside: bool) -> str:
    if plan.strategy != "auto":
        return plan.strategy
    if plan.num_shards == 1:
        return "ring"
    batch = q.shape[0] if inside else q.shape[0] // plan.size(plan.batch_axes)
    length = q.shape[1] * (plan.num_shards if inside else 1)
    shape = cost.Shape(batch, length, heads, groups, q.shape[3], q.dtype.itemsize)
    chip = plan.hardware()
    sizes = {"ring_size": plan.axis_size(plan.ring_axis), "ulysses_size": plan.axis_size(plan.ulysses_axis)}
    return cost.choose(shape, chip, cost.candidates(shape, chip, **sizes)).best.strategy


def _backend(plan: Plan, q: jax.Array) -> str:
    on_tpu = plan.platform == "tpu"
    if plan.backend == "xla" or (plan.backend == "auto" and not on_tpu):
        return "xla"
    if plan.backend == "pallas_tpu" and not on_tpu:
        raise ValueError(
            f"Plan.backend is 'pallas_tpu' and the devices are {plan.device_kind}; "
            f"use 'auto' or 'xla', or 'pallas_interpret' to test the kernel here"
        )
    try:
        pallas_tpu.check(plan.query_block, plan.key_block, q.shape[3], q.dtype)
    except ValueError:
        if plan.backend == "auto":
            return "xla"
        raise
    return "pallas_tpu" if plan.backend == "auto" else plan.backend


def _check_arrays(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    last_visible: jax.Array | None,
    sinks: jax.Array | None,
    soft_cap: float | None,
) -> None:
    if q.ndim != 4 or k.shape != v.shape or k.ndim != 4 or (*q.shape[:2], q.shape[3]) != (*k.shape[:2], k.shape[3]):
        raise ValueError(f"q, k, v are {q.shape}, {k.shape}, {v.shape}; give q [B, S, H, D] and k, v [B, S, G, D]")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(f"q has {q.shape[2]} heads and k {k.shape[2]}; the number of key/value heads must divide q's")
    if not (q.dtype == k.dtype == v.dtype and jnp.issubdtype(q.dtype, jnp.floating)):
        raise ValueError(
            f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; give one floating dtype, casting before the call"
        )
    for name, x in (("positions", positions), ("segment_ids", segment_ids), ("last_visible", last_visible)):
        if x is not None and (x.shape != q.shape[:2] or x.dtype != np.int32):
            raise ValueError(f"{name} is {x.dtype}{list(x.shape)}; give int32 [B, S] = {list(q.shape[:2])}")
    if sinks is not None and sinks.shape != q.shape[2:3]:
        raise ValueError(f"sinks is {list(sinks.shape)}; give one logit per query head, [{q.shape[2]}]")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap is {soft_cap}; give a positive number, or None for no cap")


def _check_mesh(q: jax.Array, k: jax.Array, plan: Plan, inside: bool) -> tuple[int, int]:
    """Number of query and key/value heads on each device."""
    if inside:
        return q.shape[2], k.shape[2]
    batch, heads = plan.size(plan.batch_axes), plan.axis_size(plan.head_axis)
    if q.shape[0] % batch:
        raise ValueError(
            f"batch is {q.shape[0]} and mesh axes {plan.batch_axes} hold {batch} devices; "
            f"give a multiple of {batch}, or a Plan with fewer batch_axes"
        )
    if k.shape[2] % heads:
        raise ValueError(
            f"k has {k.shape[2]} heads and mesh axis {plan.head_axis!r} has size {heads}; "
            f"choose a size that divides the key/value heads"
        )
    return q.shape[2] // heads, k.shape[2] // heads


def _check_route(spec: Spec, strategy: str, heads: int, groups: int) -> None:
    size = spec.route.exchange_size
    if heads % size or (groups % size and size % groups):
        raise ValueError(
            f"strategy {strategy!r} exchanges heads among {size} devices, and each holds {heads} query and {groups} "
            f"key/value heads; use strategy 'ring', or mesh axes whose size divides the heads"
        )
