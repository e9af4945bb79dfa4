"""Attention of new tokens to a key/value cache that is sharded over the sequence: one by one, or a chunk of a prompt.

The cache never moves: every device attends to its part, and one collective merges the partial outputs
with their softmax statistics. What a step sends does not depend on the length of the cache.

A cache slot holds a key, a value, a position and a segment id; segment 0 marks an empty slot. Slots may
hold any token in any order, so a cache filled by a prefill in any layout can be used as it stands.

Shapes: B batch, T new tokens, C cache slots, H query heads, G key/value heads, D head dim.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from ring import blockwise, softmax
from ring.blockwise import Kernel, accumulation_dtype
from ring.exponential import LOG2_E, exp2
from ring.local import block_size
from ring.mask import CAUSAL, Keys, Mask, pad_keys, pad_queries, queries, visible
from ring.plan import ONE_DEVICE, Plan

# Up to here, products with other groups' zeros cost less than the copy of the cache that they avoid.
_MOST_GROUPS_AT_ONCE = 8


def decode_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    *,
    positions: jax.Array,
    cache_positions: jax.Array,
    cache_segment_ids: jax.Array,
    segment_ids: jax.Array | None = None,
    mask: Mask = CAUSAL,
    plan: Plan = ONE_DEVICE,
    last_visible: jax.Array | None = None,
    sinks: jax.Array | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
) -> jax.Array:
    """Attention of q [B, T, H, D] to k_cache, v_cache [B, C, G, D] -> [B, T, H, D] in q's dtype.

    positions, segment_ids int32 [B, T] of the new tokens (segment ids default to 1); cache_positions,
    cache_segment_ids int32 [B, C], segment 0 for empty slots. Append the new tokens' own keys and values
    first (``append``) for them to be seen. Dim C is sharded over the plan's sequence axes, B over its
    batch axes, heads over its head axis; T is small and not sharded. Rows may have different lengths: only
    filled slots count. A query that sees nothing, and one of segment 0, returns exactly 0.
    The other arguments are those of ``ring.attention``. ValueError for shapes that do not fit.
    """
    _check(q, k_cache, v_cache, positions, cache_positions, cache_segment_ids, plan)
    if segment_ids is None:
        segment_ids = jnp.ones(positions.shape, jnp.int32)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    run = functools.partial(_decode_local, mask=mask, scale=scale, soft_cap=soft_cap, axes=plan.sequence_axes)
    arguments = (
        q, k_cache, v_cache, sinks, (positions, segment_ids, last_visible), (cache_positions, cache_segment_ids)
    )  # fmt: skip
    if plan.mesh is None:
        return run(*arguments)
    fresh, cache = plan.spec("batch", None, "heads", None), plan.spec("batch", "sequence", "heads", None)
    specs = (fresh, cache, cache, plan.spec("heads"), plan.spec("batch", None), plan.spec("batch", "sequence"))
    return jax.shard_map(run, mesh=plan.mesh, in_specs=specs, out_specs=fresh, check_vma=False)(*arguments)


def chunk_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    *,
    positions: jax.Array,
    cache_positions: jax.Array,
    cache_segment_ids: jax.Array,
    segment_ids: jax.Array | None = None,
    mask: Mask = CAUSAL,
    plan: Plan = ONE_DEVICE,
    soft_cap: float | None = None,
    scale: float | None = None,
) -> jax.Array:
    """As ``decode_attention``, for many new tokens: q [B, T, H, D] with T sharded over the plan's sequence axes.

    Queries travel instead of keys: every device gathers the chunk's queries, attends with all of them to its part of
    the cache, block by block without those that nobody sees, and the merged outputs are scattered back. A device
    sends and receives two chunks, however long the cache is (pass-Q, arXiv:2411.01783). Tokens may have any order;
    blocks are skipped best when positions rise along T and along each device's slots. No gradients.
    """
    _check(q, k_cache, v_cache, positions, cache_positions, cache_segment_ids, plan)
    if plan.mesh is not None and q.shape[1] % plan.num_shards:
        raise ValueError(
            f"q has {q.shape[1]} tokens over {plan.num_shards} devices; give a multiple of {plan.num_shards}"
        )
    if segment_ids is None:
        segment_ids = jnp.ones(positions.shape, jnp.int32)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    run = functools.partial(_chunk_local, mask=mask, scale=scale, soft_cap=soft_cap, plan=plan)
    arguments = (q, k_cache, v_cache, (positions, segment_ids), (cache_positions, cache_segment_ids))
    if plan.mesh is None:
        return run(*arguments)
    tokens, rows = plan.spec("batch", "sequence", "heads", None), plan.spec("batch", "sequence")
    return jax.shard_map(
        run, mesh=plan.mesh, in_specs=(tokens, tokens, tokens, rows, rows), out_specs=tokens, check_vma=False
    )(*arguments)


def append(
    cache: jax.Array,
    new: jax.Array,
    slots: jax.Array,
    *,
    plan: Plan = ONE_DEVICE,
    heads: bool = False,
    layer: jax.Array | None = None,
) -> jax.Array:
    """``cache`` [B, C, ...] with ``new`` [B, T, ...] written to ``slots`` int32 [B, T] of each row.

    ``layer``: the cache has a leading dim for layers, and only this one is written, so that a loop over layers can
    carry the whole cache and change it in place.

    For keys and values (``heads=True``: dim 2 is sharded over the plan's head axis), positions and segment
    ids alike. Each device writes what falls into its shard, in place when the cache is donated or carried;
    nothing is sent. A slot outside [0, C) writes nothing, so rows that are done can pass -1.
    """
    shape = cache.shape if layer is None else cache.shape[1:]
    if new.ndim != len(shape) or new.shape[2:] != shape[2:] or slots.shape != new.shape[:2]:
        raise ValueError(
            f"cache, new, slots are {shape}, {new.shape}, {slots.shape}; "
            f"give cache [B, C, ...], new [B, T, ...] and slots [B, T]"
        )
    _check_length(shape[1], plan)
    new = new.astype(cache.dtype)
    axes = plan.sequence_axes
    if plan.mesh is None:
        return _append_local(cache, new, slots, layer, axes=axes)
    rest = ["heads" if heads and dim == 2 else None for dim in range(2, len(shape))]
    layers = [] if layer is None else [None]
    shard, fresh = plan.spec(*layers, "batch", "sequence", *rest), plan.spec("batch", None, *rest)
    return jax.shard_map(
        functools.partial(_append_local, axes=axes),
        mesh=plan.mesh,
        in_specs=(shard, fresh, plan.spec("batch", None), plan.spec()),
        out_specs=shard,
        check_vma=False,
    )(cache, new, slots, layer)


def _decode_local(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    fresh: tuple[jax.Array, jax.Array, jax.Array | None],
    cached: tuple[jax.Array, jax.Array],
    *,
    mask: Mask,
    scale: float,
    soft_cap: float | None,
    axes: tuple[str, ...],
) -> jax.Array:
    batch, length, heads, dim = q.shape
    groups = k.shape[2]
    sees = visible(queries(mask, *fresh), Keys(*cached))
    rows = q.reshape(batch, length, groups, heads // groups, dim)
    score = _products(rows, k.astype(q.dtype)) * scale
    if soft_cap is not None:
        score = soft_cap * jnp.tanh(score / soft_cap)
    score = score * LOG2_E
    score = jnp.where(sees[:, None, None], score, -jnp.inf)
    top = jnp.maximum(jnp.max(score, axis=-1), softmax.LOWEST)
    weight = exp2(score - top[..., None])
    total = jnp.sum(weight, axis=-1)
    out = _averages(weight.astype(q.dtype), v.astype(q.dtype))
    if axes:
        # One message holds the partial output and its statistics.
        packed = jnp.concatenate([out, top[..., None], total[..., None]], axis=-1)
        everywhere = lax.all_gather(packed, axes)
        running = softmax.merge(everywhere[..., :dim], everywhere[..., dim], everywhere[..., dim + 1])
    else:
        running = softmax.Running(out, top, total)
    if sinks is not None:
        sinks = jnp.broadcast_to(sinks.astype(top.dtype).reshape(1, groups, heads // groups, 1), top.shape)
    out, _ = softmax.finish(running, sinks)
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape).astype(q.dtype)


def _chunk_local(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    fresh: tuple[jax.Array, jax.Array],
    cached: tuple[jax.Array, jax.Array],
    *,
    mask: Mask,
    scale: float,
    soft_cap: float | None,
    plan: Plan,
) -> jax.Array:
    axes = plan.sequence_axes
    if axes:
        q = lax.all_gather(q, axes, axis=1, tiled=True)
        everywhere = lax.all_gather(jnp.stack(fresh), axes, axis=2, tiled=True)
        fresh = everywhere[0], everywhere[1]
    length, dim = q.shape[1], q.shape[3]
    slots = k.shape[1]
    kernel = Kernel(
        scale, block_size(length, plan.query_block), block_size(slots, plan.key_block), soft_cap, plan.platform == "cpu"
    )
    query_length, key_length = (
        -(-n // block) * block for n, block in ((length, kernel.query_block), (slots, kernel.key_block))
    )
    query = pad_queries(queries(mask, *fresh), query_length)
    key = pad_keys(Keys(*cached), key_length)
    rows = jnp.pad(q, ((0, 0), (0, query_length - length), (0, 0), (0, 0)))
    kv = jnp.stack([k, v]).astype(q.dtype).swapaxes(2, 3)
    kv = jnp.pad(kv, ((0, 0), (0, 0), (0, 0), (0, key_length - slots), (0, 0)))
    running = blockwise.forward(kernel, softmax.start(rows.shape, accumulation_dtype(q.dtype)), rows, kv, query, key)
    out, top, total = running.out[:, :length], running.top[..., :length], running.total[..., :length]
    if axes:
        shrink = exp2(top - lax.pmax(top, axes))
        packed = jnp.concatenate([out, jnp.swapaxes(total, 1, 2)[..., None]], axis=-1)
        packed = packed * jnp.swapaxes(shrink, 1, 2)[..., None]
        packed = lax.psum_scatter(packed, axes, scatter_dimension=1, tiled=True)
        # Only whether anything was seen and the ratio of the two sums matter from here on.
        out, total = packed[..., :dim], jnp.swapaxes(packed[..., dim], 1, 2)
        top = jnp.zeros_like(total)
    factor, _ = softmax.normalise(top, total)
    return (out * jnp.swapaxes(factor, 1, 2)[..., None]).astype(q.dtype)


def _products(rows: jax.Array, k: jax.Array) -> jax.Array:
    """[B,T,G,R,D] and [B,C,G,D] -> scores [B,G,R,T,C]."""
    batch, length, groups, heads, dim = rows.shape
    product = functools.partial(jnp.einsum, preferred_element_type=accumulation_dtype(rows.dtype))
    if groups > _MOST_GROUPS_AT_ONCE:
        return product("btgrd,bcgd->bgrtc", rows, k)
    # Zeros in the other groups' places make this one product with the cache as it lies in memory; the
    # direct form copies the whole cache to bring the groups forward, at every step.
    spread = jnp.einsum("btgrd,gh->bgrthd", rows, jnp.eye(groups, dtype=rows.dtype))
    spread = spread.reshape(batch, groups * heads * length, groups * dim)
    score = product("bnx,bcx->bnc", spread, k.reshape(batch, -1, groups * dim))
    return score.reshape(batch, groups, heads, length, -1)


def _averages(weight: jax.Array, v: jax.Array) -> jax.Array:
    """Weights [B,G,R,T,C] and [B,C,G,D] -> [B,G,R,T,D]."""
    batch, groups, heads, length, slots = weight.shape
    product = functools.partial(jnp.einsum, preferred_element_type=accumulation_dtype(weight.dtype))
    if groups > _MOST_GROUPS_AT_ONCE:
        return product("bgrtc,bcgd->bgrtd", weight, v)
    flat = weight.reshape(batch, groups * heads * length, slots)
    out = product("bnc,bcx->bnx", flat, v.reshape(batch, slots, -1))
    return jnp.einsum("bgrtgd->bgrtd", out.reshape(batch, groups, heads, length, groups, -1))


def _append_local(
    cache: jax.Array, new: jax.Array, slots: jax.Array, layer: jax.Array | None, *, axes: tuple[str, ...]
) -> jax.Array:
    length = cache.shape[1 if layer is None else 2]
    local = slots - lax.axis_index(axes) * length if axes else slots
    local = jnp.where((local >= 0) & (local < length), local, length)
    rows = jnp.broadcast_to(jnp.arange(slots.shape[0], dtype=jnp.int32)[:, None], local.shape)
    if layer is None:
        return cache.at[rows, local].set(new, mode="drop")
    return cache.at[layer, rows, local].set(new, mode="drop")


def _check(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    cache_positions: jax.Array,
    cache_segment_ids: jax.Array,
    plan: Plan,
) -> None:
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ValueError(
            f"q, k_cache, v_cache are {q.shape}, {k.shape}, {v.shape}; give q [B, T, H, D] and caches [B, C, G, D]"
        )
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"q has {q.shape[2]} heads and the cache {k.shape[2]}; the cache's number must divide q's")
    if positions.shape != q.shape[:2]:
        raise ValueError(f"positions is {positions.shape}; give [B, T] = {q.shape[:2]}")
    for name, x in (("cache_positions", cache_positions), ("cache_segment_ids", cache_segment_ids)):
        if x.shape != k.shape[:2]:
            raise ValueError(f"{name} is {x.shape}; give [B, C] = {k.shape[:2]}")
    _check_length(k.shape[1], plan)
    batch, heads = plan.size(plan.axes("batch")), plan.size(plan.axes("heads"))
    if plan.mesh is not None and (q.shape[0] % batch or k.shape[2] % heads):
        raise ValueError(
            f"batch {q.shape[0]} and {k.shape[2]} cached heads do not divide over {batch} and {heads} devices of "
            f"{plan.batch_axes} and {plan.head_axis!r}; pad the batch or use a Plan whose mesh divides them"
        )


def _check_length(length: int, plan: Plan) -> None:
    if plan.mesh is not None and length % plan.num_shards:
        raise ValueError(
            f"the cache has {length} slots over {plan.num_shards} devices; give a multiple of {plan.num_shards}"
        )
