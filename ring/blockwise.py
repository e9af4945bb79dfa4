"""The local kernel in plain XLA: attention of one shard of queries to one shard of keys, block by block.

Blocks that nobody sees are not visited. The pairs of blocks are classified on the device; every block of
queries (of keys, in the backward pass) then has a list of the blocks it must visit, fully visible ones
first, which need no comparing. Two nested loops walk over the lists: what belongs to the outer block is
read once and stays in the inner loop's carry.
Blockwise Parallel Transformers, arXiv:2305.19370; FlashAttention-2's backward, arXiv:2307.08691.

Shapes: B batch, S sequence (T of the keys), H query heads, G key/value heads, R = H / G, D head dim, Q and K
rows of a block. Arrays are transposed where a copy is made anyway: queries when a block is cut out, keys and
values when they are packed for their journey. Scores are [G, RQ, K] in the forward pass and [G, K, RQ] in the
backward pass: XLA's CPU products are two to three times slower when the contracted dimension comes first in
both operands, and these orientations avoid that in all seven products.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ring.exponential import LOG2_E, exp2
from ring.mask import FULL, NONE, Keys, Queries, classify, visible
from ring.softmax import Running

_FEW_BLOCKS = 4
_CACHED_SCORES = 2**16  # a quarter of a megabyte in float32


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What the local kernel needs to know besides arrays."""

    scale: float
    query_block: int
    key_block: int
    soft_cap: float | None = None
    cached: bool = True  # few enough heads at a time for scores to stay in a core's cache; an accelerator takes all
    heads_first: ClassVar[bool] = False  # queries are [B,S,H,D]
    unroll: ClassVar[int] = 1  # hops of the ring in one iteration of its loop


class Residual(NamedTuple):
    """Row-wise inputs of the backward pass: q, dout [B,S,H,D], lse (base 2), delta = sum(out dout) [B,H,S]."""

    q: jax.Array
    dout: jax.Array
    lse: jax.Array
    delta: jax.Array


class _Work(NamedTuple):
    """Which blocks to visit: N outer blocks (of all batch rows), M inner ones.

    ``outer`` int32 [N] lists the outer blocks, those with anything to visit first, ``num_outer`` of them;
    ``inner`` int32 [N, M] the inner blocks of each, FULL before PARTIAL before NONE.
    """

    outer: jax.Array
    num_outer: jax.Array
    inner: jax.Array
    num_full: jax.Array
    num_visible: jax.Array


def accumulation_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """float32, or float64 for float64 inputs."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def forward(kernel: Kernel, running: Running, q: jax.Array, kv: jax.Array, query: Queries, key: Keys) -> Running:
    """Adds what ``q`` [B,S,H,D] sees of ``kv`` [2,B,G,T,D] to ``running`` (out [B,S,H,D], rows [B,H,S])."""
    cut = _Cutter.of(kernel, q.shape[2], kv.shape[2])
    work = _plan(classify(query, key, kernel.query_block, kernel.key_block))
    num_blocks = q.shape[1] // kernel.query_block

    def row(step: jax.Array, running: Running) -> Running:
        block, g = cut.split(step, work.num_outer)
        place = work.outer[block]
        b, i = place // num_blocks, (place % num_blocks) * kernel.query_block
        q_block = cut.rows(q, b, i, g)

        def visit(step: jax.Array, carry: Running, masked: bool) -> Running:
            out, top, total = carry
            j = work.inner[place, step] * kernel.key_block
            score = _dot("gqd,gkd->gqk", q_block, cut.keys(kv, 0, b, j, g))
            # The scale comes after the maximum, which so reads the product itself and not one more copy of it.
            scale = kernel.scale * LOG2_E
            if kernel.soft_cap is not None:
                score, scale = kernel.soft_cap * jnp.tanh(score * (kernel.scale / kernel.soft_cap)), LOG2_E
            if masked:
                hidden = _hidden(kernel, query, key, (b, i, j), out.dtype)
                score = (cut.per_row(score, rows=1) + hidden[None, None]).reshape(score.shape)
            new_top = jnp.maximum(top, jnp.max(score, axis=-1) * scale)
            weight = exp2(score * scale - new_top[..., None])
            shrink = exp2(top - new_top)
            new_out = _dot("gqk,gkd->gqd", weight.astype(kv.dtype), cut.keys(kv, 1, b, j, g))
            return Running(out * shrink[..., None] + new_out, new_top, total * shrink + jnp.sum(weight, axis=-1))

        start = Running(*(cut.rows(running.out, b, i, g), *(cut.stats(x, b, i, g) for x in running[1:])))
        out, top, total = _visits(work, place, visit, start)
        return Running(
            cut.put_rows(running.out, out, b, i, g),
            cut.put_stats(running.top, top, b, i, g),
            cut.put_stats(running.total, total, b, i, g),
        )

    return lax.fori_loop(0, work.num_outer * cut.num_steps, row, running)


def start_dq(residual: Residual, groups: int, *, num_hops: int) -> jax.Array:
    """What ``backward`` adds to: [B,G,D,R,S]."""
    batch, length, heads, dim = residual.q.shape
    return jnp.zeros((batch, groups, dim, heads // groups, length), residual.lse.dtype)


def finish_dq(dq: jax.Array) -> jax.Array:
    """[B,S,H,D] of what ``backward`` added to."""
    batch, groups, dim, repeats, length = dq.shape
    return dq.transpose(0, 4, 1, 3, 2).reshape(batch, length, groups * repeats, dim)


def backward(
    kernel: Kernel,
    dq: jax.Array,
    dkv: jax.Array,
    residual: Residual,
    kv: jax.Array,
    query: Queries,
    key: Keys,
) -> tuple[jax.Array, jax.Array]:
    """``dq`` [B,G,D,R,S] and ``dkv`` [2,B,G,T,D], in the accumulation dtype, and what these shards add to them."""
    cut = _Cutter.of(kernel, residual.q.shape[2], kv.shape[2])
    work = _plan(jnp.swapaxes(classify(query, key, kernel.query_block, kernel.key_block), -1, -2))
    num_blocks = kv.shape[3] // kernel.key_block
    dq_sizes = (1, cut.groups, kv.shape[4], cut.repeats, kernel.query_block)

    def column(step: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        dq, dkv = carry
        block, g = cut.split(step, work.num_outer)
        place = work.outer[block]
        b, j = place // num_blocks, (place % num_blocks) * kernel.key_block
        k_block, v_block = cut.keys(kv, 0, b, j, g), cut.keys(kv, 1, b, j, g)
        k_transposed = lax.optimization_barrier(jnp.swapaxes(k_block, -1, -2))

        def visit(step: jax.Array, carry: tuple[jax.Array, ...], masked: bool) -> tuple[jax.Array, ...]:
            dq, dk, dv = carry
            i = work.inner[place, step] * kernel.query_block
            q, dout = cut.rows(residual.q, b, i, g), cut.rows(residual.dout, b, i, g)
            lse, delta = cut.stats(residual.lse, b, i, g), cut.stats(residual.delta, b, i, g)
            score, scale = _dot("gkd,gqd->gkq", k_block, q), kernel.scale * LOG2_E
            if kernel.soft_cap is not None:
                score, scale = kernel.soft_cap * jnp.tanh(score * (kernel.scale / kernel.soft_cap)), LOG2_E
            shown = score * scale
            if masked:
                hidden = _hidden(kernel, query, key, (b, i, j), dq.dtype).T[None, :, None]
                shown = (cut.per_row(shown, rows=2) + hidden).reshape(score.shape)
            # Rounded once for both of its uses; only the narrow copy is written to memory.
            weight = exp2(shown - lse[:, None]).astype(dout.dtype)
            dv = dv + _dot("gkq,gqd->gkd", weight, dout)
            dscore = weight.astype(dq.dtype) * (_dot("gkd,gqd->gkq", v_block, dout) - delta[:, None])
            if kernel.soft_cap is not None:
                dscore = dscore * (1 - jnp.square(score / kernel.soft_cap))
            dscore = (dscore * kernel.scale).astype(q.dtype)
            dk = dk + _dot("gkq,gqd->gkd", dscore, q)
            start = (b, g, 0, 0, i)
            dq_block = lax.dynamic_slice(dq, start, dq_sizes)
            dq_block = dq_block + _dot("gdk,gkq->gdq", k_transposed, dscore).reshape(dq_sizes)
            return lax.dynamic_update_slice(dq, dq_block, start), dk, dv

        start = dq, cut.keys(dkv, 0, b, j, g), cut.keys(dkv, 1, b, j, g)
        dq, dk, dv = _visits(work, place, visit, start)
        return dq, lax.dynamic_update_slice(dkv, jnp.stack([dk, dv])[:, None], (0, b, g, j, 0))

    return lax.fori_loop(0, work.num_outer * cut.num_steps, column, (dq, dkv))


def _plan(seen: jax.Array) -> _Work:
    """``seen`` [B, N, M] classifies every pair of an outer and an inner block."""
    seen = seen.reshape(-1, seen.shape[-1])
    num_visible = jnp.sum(seen != NONE, axis=-1, dtype=jnp.int32)
    some = num_visible > 0
    return _Work(
        _first(jnp.where(some, 0, 1)),
        jnp.sum(some, dtype=jnp.int32),
        _first(FULL - seen),
        jnp.sum(seen == FULL, axis=-1, dtype=jnp.int32),
        num_visible,
    )


def _first(rank: jax.Array) -> jax.Array:
    """Indices of the last dim in the order of ``rank`` (0, 1 or 2), ties as they come."""
    size = rank.shape[-1]
    index = lax.broadcasted_iota(jnp.int32, rank.shape, rank.ndim - 1)
    return index if size == 1 else jnp.sort(rank.astype(jnp.int32) * size + index, axis=-1) % size


def _visits(work: _Work, place: jax.Array, visit: Callable, carry: Any) -> Any:
    """Visits the inner blocks of one outer block; one loop where a second, unmasked one would not pay for itself."""
    num_full, num_visible = work.num_full[place], work.num_visible[place]
    if work.inner.shape[-1] <= _FEW_BLOCKS:
        return lax.fori_loop(0, num_visible, functools.partial(visit, masked=True), carry)
    carry = lax.fori_loop(0, num_full, functools.partial(visit, masked=False), carry)
    return lax.fori_loop(num_full, num_visible, functools.partial(visit, masked=True), carry)


@dataclasses.dataclass(frozen=True)
class _Cutter:
    """Blocks of whole arrays, as the products want them: G of ``num_steps`` times G groups, R heads each."""

    groups: int
    num_steps: int
    repeats: int
    query_block: int
    key_block: int

    @classmethod
    def of(cls, kernel: Kernel, heads: int, groups: int) -> _Cutter:
        """All groups at once, or the most of them whose scores stay in a core's cache."""
        repeats, pair = heads // groups, kernel.query_block * kernel.key_block
        most = max(1, _CACHED_SCORES // (repeats * pair)) if kernel.cached else groups
        at_once = max(n for n in range(1, groups + 1) if groups % n == 0 and n <= most)
        return cls(at_once, groups // at_once, repeats, kernel.query_block, kernel.key_block)

    def split(self, step: jax.Array, num_outer: jax.Array) -> tuple[jax.Array, jax.Array | int]:
        """(outer block, first group) of a step: all blocks of some groups, then of the next ones."""
        return (step, 0) if self.num_steps == 1 else (step % num_outer, step // num_outer * self.groups)

    def rows(self, x: jax.Array, b: jax.Array, i: jax.Array, g: jax.Array | int) -> jax.Array:
        """[B,S,H,D] -> [G, RQ, D]."""
        dim = x.shape[3]
        sizes = (1, self.query_block, self.groups * self.repeats, dim)
        block = lax.dynamic_slice(x, (b, i, g * self.repeats, 0), sizes)
        block = block.reshape(self.query_block, self.groups, self.repeats, dim).transpose(1, 2, 0, 3)
        return block.reshape(self.groups, -1, dim)

    def put_rows(self, x: jax.Array, block: jax.Array, b: jax.Array, i: jax.Array, g: jax.Array | int) -> jax.Array:
        """The inverse of ``rows``: ``x`` with the block in its place."""
        dim = x.shape[3]
        block = block.reshape(self.groups, self.repeats, self.query_block, dim).transpose(2, 0, 1, 3)
        block = block.reshape(1, self.query_block, -1, dim)
        return lax.dynamic_update_slice(x, block, (b, i, g * self.repeats, 0))

    def stats(self, x: jax.Array, b: jax.Array, i: jax.Array, g: jax.Array | int) -> jax.Array:
        """[B,H,S] -> [G, RQ]."""
        sizes = (1, self.groups * self.repeats, self.query_block)
        return lax.dynamic_slice(x, (b, g * self.repeats, i), sizes).reshape(self.groups, -1)

    def put_stats(self, x: jax.Array, block: jax.Array, b: jax.Array, i: jax.Array, g: jax.Array | int) -> jax.Array:
        """The inverse of ``stats``."""
        return lax.dynamic_update_slice(x, block.reshape(1, -1, self.query_block), (b, g * self.repeats, i))

    def keys(self, kv: jax.Array, which: int, b: jax.Array, j: jax.Array, g: jax.Array | int) -> jax.Array:
        """[2,B,G,T,D] -> [G, K, D] of the keys (0) or the values (1)."""
        # One slice of the whole: indexing first would copy all keys out of the loop.
        return lax.dynamic_slice(kv, (which, b, g, j, 0), (1, 1, self.groups, self.key_block, kv.shape[4]))[0, 0]

    def per_row(self, score: jax.Array, rows: int) -> jax.Array:
        """[G, RQ, K], or [G, K, RQ], with dim ``rows`` split into heads and queries."""
        shape = score.shape
        return score.reshape(*shape[:rows], self.repeats, self.query_block, *shape[rows + 1 :])


def _hidden(kernel: Kernel, query: Queries, key: Keys, place: tuple, dtype: jnp.dtype) -> jax.Array:
    """[Q, K]: 0 where the query sees the key, -inf elsewhere; the barrier keeps heads from each comparing again."""
    b, i, j = place
    sees = visible(_meta(query, b, i, kernel.query_block), _meta(key, b, j, kernel.key_block))
    return lax.optimization_barrier(jnp.where(sees, jnp.zeros((), dtype), -jnp.inf))


def _dot(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(equation, x, y, preferred_element_type=accumulation_dtype(x.dtype), precision=precision)


def _meta(meta: Any, b: jax.Array, start: jax.Array, size: int) -> Any:
    return type(meta)(*(lax.dynamic_slice(x, (b, start), (1, size))[0] for x in meta))
