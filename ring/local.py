"""One device's part of sharded attention, forward and backward, for every strategy.

A strategy is a ``Route``: over which mesh axes heads are exchanged for sequence, over which the keys and
values are gathered, and over which they rotate. All of them end in the same block kernel.

Shapes: B batch, S tokens of this device, H query heads, G key/value heads, R = H / G, D head dim.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from ring import exchange, pallas_tpu, rotate, softmax, transit
from ring.blockwise import Kernel, Residual, accumulation_dtype
from ring.exponential import LOG2_E, exp2
from ring.mask import Keys, Mask, Queries, pad_keys, pad_queries, queries
from ring.transit import Parcel

# Measured on CPUs: shards that fit into the cache lose less to masked pairs in small blocks.
_SMALL_BLOCK, _LARGE_BLOCK, _LARGE_SHARD = 128, 256, 2048


@dataclasses.dataclass(frozen=True)
class Route:
    """Mesh axes and their sizes for each means of communication."""

    exchange: tuple[str, ...] = ()
    gather: tuple[str, ...] = ()
    ring: tuple[str, ...] = ()
    exchange_size: int = 1
    gather_size: int = 1
    ring_size: int = 1


@dataclasses.dataclass(frozen=True)
class Spec:
    """Everything about a call that is known while tracing."""

    route: Route
    mask: Mask
    scale: float
    soft_cap: float | None
    query_block: int | None
    key_block: int | None
    transit_dtype: str | None = None
    platform: str = "cpu"
    device_kind: str = ""
    backend: str = "xla"


@dataclasses.dataclass(frozen=True)
class _Prepared:
    kernel: Kernel | pallas_tpu.Kernel
    query: Queries
    key: Keys
    query_length: int
    key_length: int


def forward(
    spec: Spec, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None, meta: tuple[jax.Array | None, ...]
) -> tuple[jax.Array, jax.Array]:
    """(out [B,S,H,D] in q's dtype, lse [B, H / exchange, S * exchange] float32)."""
    ready = _prepare(spec, q.shape[3], _here(spec, meta, q))
    q_rows = _enter_queries(spec, ready, q)
    own = rotate.start(_enter_keys(spec, ready, k, v), jnp.stack(ready.key), spec.route.ring, spec.route.ring_size)
    heads_first = ready.kernel.heads_first
    running = softmax.start(q_rows.shape, accumulation_dtype(q.dtype), heads_first=heads_first)
    running = rotate.forward(ready.kernel, running, q_rows, own, ready.query, spec.route.ring, spec.route.ring_size)
    factor, lse = softmax.normalise(running.top, running.total, _rows_of_sinks(spec, sinks, running.top))
    out = running.out * (factor if heads_first else jnp.swapaxes(factor, 1, 2))[..., None]
    return _leave_queries(spec, ready, out.astype(q.dtype)), lse[:, :, : ready.query_length]


def backward(
    spec: Spec,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    meta: tuple[jax.Array | None, ...],
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Cotangents of q, k, v and this device's share of the cotangent of ``sinks``, in their dtypes."""
    route, num_groups = spec.route, k.shape[2]
    ready = _prepare(spec, q.shape[3], _here(spec, meta, q))
    own = rotate.start(_enter_keys(spec, ready, k, v), jnp.stack(ready.key), route.ring, route.ring_size)
    delta_BSH = jnp.sum(out.astype(lse.dtype) * dout.astype(lse.dtype), axis=-1)
    delta = jnp.swapaxes(exchange.split_heads(delta_BSH, route.exchange, heads=2, sequence=1), 1, 2)
    q_rows = _enter_queries(spec, ready, q)
    # Padded queries are hidden from every key, so their logsumexp is never used.
    residual = Residual(
        q_rows,
        _enter_queries(spec, ready, dout.astype(q.dtype)),
        _pad(lse * LOG2_E, 2, ready.query.segment.shape[1]),
        _pad(delta, 2, ready.query.segment.shape[1]),
    )
    dsinks = _cotangent_of_sinks(spec, sinks, residual)
    # Transfers between the devices of one CPU do not run beside computation.
    dq, dkv = rotate.backward(
        ready.kernel, residual, own, ready.query, route.ring, route.ring_size, in_place=spec.platform == "cpu"
    )
    dq = _leave_queries(spec, ready, dq.astype(q.dtype))
    dk, dv = (x.astype(k.dtype) for x in _leave_keys(spec, ready, dkv, num_groups))
    if route.ring_size > 1:
        # What comes home may be used only once dq is there, too: behind its kernel that last transfer can hide.
        dq, dk, dv = lax.optimization_barrier((dq, dk, dv))
    return dq, dk, dv, dsinks


def _here(spec: Spec, meta: tuple[jax.Array | None, ...], q: jax.Array) -> tuple[jax.Array | None, ...]:
    """``meta``, known once q is. A scan over layers runs what does not depend on its layer once, before the first, and
    keeps it: here the positions of every hop, memory that grows with the ring."""
    if spec.route.ring_size == 1:
        return meta
    return lax.optimization_barrier((meta, q[:1, :1, :1, :1]))[0]


def _prepare(spec: Spec, head_dim: int, meta: tuple[jax.Array | None, ...]) -> _Prepared:
    positions, segments, last = meta
    assert positions is not None
    assert segments is not None
    own = jnp.stack([positions, segments] if last is None else [positions, segments, last])
    group = exchange.gather(own, spec.route.exchange, sequence=2)
    shared = exchange.gather(group[:2], spec.route.gather, sequence=2)
    query = queries(spec.mask, group[0], group[1], None if last is None else group[2])
    query_length, key_length = group.shape[2], shared.shape[2]
    kernel = _kernel(spec, head_dim, query_length, key_length)
    return _Prepared(
        kernel,
        pad_queries(query, _round_up(query_length, kernel.query_block)),
        pad_keys(Keys(shared[0], shared[1]), _round_up(key_length, kernel.key_block)),
        query_length,
        key_length,
    )


def _kernel(spec: Spec, head_dim: int, query_length: int, key_length: int) -> Kernel | pallas_tpu.Kernel:
    if spec.backend == "xla":
        query_block, key_block = block_size(query_length, spec.query_block), block_size(key_length, spec.key_block)
        return Kernel(spec.scale, query_block, key_block, spec.soft_cap, cached=spec.platform == "cpu")
    requested = (spec.query_block, spec.key_block)
    blocks = pallas_tpu.choose_blocks(spec.device_kind, head_dim, query_length, key_length, *requested)
    return pallas_tpu.Kernel(spec.scale, *blocks, spec.soft_cap, interpret=spec.backend == "pallas_interpret")


def block_size(length: int, requested: int | None) -> int:
    """The requested block, or the largest of equal ones up to the default; never above ``length``."""
    if requested is not None:
        return max(1, min(requested, length))
    num_blocks = max(1, -(-length // (_LARGE_BLOCK if length >= _LARGE_SHARD else _SMALL_BLOCK)))
    return max(1, -(-length // num_blocks))


def _enter_queries(spec: Spec, ready: _Prepared, x_BSHD: jax.Array) -> jax.Array:
    """[B,S,H,D] of the heads this device attends with, in whole blocks of tokens and the kernel's order of dims."""
    x = exchange.split_heads(x_BSHD, spec.route.exchange, heads=2, sequence=1)
    x = _pad(x, 1, ready.query.segment.shape[1])
    return jnp.swapaxes(x, 1, 2) if ready.kernel.heads_first else x


def _leave_queries(spec: Spec, ready: _Prepared, x: jax.Array) -> jax.Array:
    x_BSHD = jnp.swapaxes(x, 1, 2) if ready.kernel.heads_first else x
    return exchange.join_heads(x_BSHD[:, : ready.query_length], spec.route.exchange, heads=2, sequence=1)


def _enter_keys(spec: Spec, ready: _Prepared, k_BSGD: jax.Array, v_BSGD: jax.Array) -> Parcel:
    """[B,S,G,D] twice -> [2,B,G,T,D] as it travels: keys and values in one message."""

    def enter(x: jax.Array) -> jax.Array:
        x = exchange.repeat_groups(x, _repeats(spec, k_BSGD.shape[2]), heads=3)
        x = exchange.split_heads(x, spec.route.exchange, heads=3, sequence=2)
        x = exchange.gather(jnp.swapaxes(x, 2, 3), spec.route.gather, sequence=3)
        return _pad(x, 3, ready.key.segment.shape[1])

    kv = jnp.stack([k_BSGD, v_BSGD])
    return jax.tree.map(enter, transit.encode(kv, spec.transit_dtype, as_bits=spec.platform == "cpu"))


def _leave_keys(spec: Spec, ready: _Prepared, dkv: jax.Array, num_groups: int) -> tuple[jax.Array, jax.Array]:
    dkv = exchange.scatter_sum(dkv[:, :, :, : ready.key_length], spec.route.gather, sequence=3)
    dkv = exchange.join_heads(jnp.swapaxes(dkv, 2, 3), spec.route.exchange, heads=3, sequence=2)
    dkv = exchange.sum_groups(dkv, _repeats(spec, num_groups), heads=3)
    return dkv[0], dkv[1]


def _repeats(spec: Spec, num_groups: int) -> int:
    return max(1, spec.route.exchange_size // num_groups)


def _rows_of_sinks(spec: Spec, sinks: jax.Array | None, like: jax.Array) -> jax.Array | None:
    if sinks is None:
        return None
    return jnp.broadcast_to(_my_sinks(spec, sinks, like.shape[1]).astype(like.dtype)[:, None], like.shape)


def _my_sinks(spec: Spec, sinks: jax.Array, num_heads: int) -> jax.Array:
    if not spec.route.exchange:
        return sinks
    return lax.dynamic_slice(sinks, (lax.axis_index(spec.route.exchange) * num_heads,), (num_heads,))


def _cotangent_of_sinks(spec: Spec, sinks: jax.Array | None, residual: Residual) -> jax.Array | None:
    if sinks is None:
        return None
    # The sink has no value: its score's cotangent is weight * (0 - delta). Empty rows have lse = +inf.
    rows = _rows_of_sinks(spec, sinks, residual.lse)
    assert rows is not None
    own = -jnp.sum(exp2(rows * LOG2_E - residual.lse) * residual.delta, axis=(0, 2))
    if spec.route.exchange:
        start = lax.axis_index(spec.route.exchange) * own.shape[0]
        own = lax.dynamic_update_slice(jnp.zeros(sinks.shape, own.dtype), own, (start,))
    return own.astype(sinks.dtype)


def _pad(x: jax.Array, dim: int, length: int) -> jax.Array:
    missing = length - x.shape[dim]
    if missing == 0:
        return x
    return jnp.pad(x, [(0, missing if d == dim else 0) for d in range(x.ndim)])


def _round_up(length: int, block: int) -> int:
    return -(-length // block) * block
