"""The local kernel in plain XLA: attention of one shard of queries to one shard of keys, block by block.

Blocks that nobody sees are not visited: the pairs of blocks are classified on the device, the visible
ones sorted to the front, and a loop runs over just those (fully visible ones first, without comparing).
Blockwise Parallel Transformers, arXiv:2305.19370; FlashAttention-2's backward, arXiv:2307.08691.

Shapes: B batch, S sequence (T of the keys), G key/value heads, R query heads per key/value head, D head dim.
Scores are [G, R, Q, K] in the forward pass and [G, K, R, Q] in the backward pass: XLA's CPU products are
two to three times slower when the contracted dimension comes first in both operands, and these
orientations avoid that in all seven products.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ring.mask import FULL, NONE, Keys, Queries, classify, visible
from ring.softmax import Running

_FEW_PAIRS = 16


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What the local kernel needs to know besides arrays."""

    scale: float
    query_block: int
    key_block: int
    soft_cap: float | None = None


class Work(NamedTuple):
    """Visible pairs of blocks: ``order`` int32 [hops, N] lists them, fully visible ones first."""

    order: jax.Array
    num_full: jax.Array
    num_visible: jax.Array


def accumulation_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """float32, or float64 for float64 inputs."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def plan_work(kernel: Kernel, query: Queries, key: Keys) -> Work:
    """Which pairs of blocks to visit, per hop: ``query`` is [B, S], ``key`` [hops, B, T]."""
    everywhere = Queries(*(x[None] for x in query))
    seen = classify(everywhere, key, kernel.query_block, kernel.key_block)
    seen = seen.reshape(seen.shape[0], -1)
    if seen.shape[-1] == 1:
        order = jnp.zeros(seen.shape, jnp.int32)
    else:
        order = jnp.argsort(FULL - seen, axis=-1).astype(jnp.int32)
    count = lambda which: jnp.sum(which, axis=-1, dtype=jnp.int32)
    return Work(order, count(seen == FULL), count(seen != NONE))


def forward(
    kernel: Kernel,
    running: Running,
    q: jax.Array,
    kv: jax.Array,
    query: Queries,
    key: Keys,
    work: Work,
) -> Running:
    """Adds what ``q`` [B,G,R,S,D] sees of ``kv`` [2,B,G,T,D] to ``running`` (rows [B,G,R,S])."""
    _, groups, heads, q_len, dim = q.shape
    locate = _locator(kernel, q_len, kv.shape[3])

    def visit(step: jax.Array, running: Running, masked: bool) -> Running:
        b, i, j = locate(work.order[step])
        rows = lambda x: _slice(x, (b, 0, 0, i), (groups, heads, kernel.query_block))
        keys = lambda n: lax.dynamic_slice(kv, (n, b, 0, j, 0), (1, 1, groups, kernel.key_block, dim))[0, 0]
        q_block = _slice(q, (b, 0, 0, i, 0), (groups, heads, kernel.query_block, dim))
        score = _dot("grqd,gkd->grqk", q_block, keys(0))
        if kernel.soft_cap is not None:
            score = kernel.soft_cap * jnp.tanh(score * (kernel.scale / kernel.soft_cap))
        if masked:
            score = score + _hidden(kernel, query, key, (b, i, j), running.top)[None, None]
        top, total = rows(running.top), rows(running.total)
        out = _slice(running.out, (b, 0, 0, i, 0), (groups, heads, kernel.query_block, dim))
        # The scale comes after the maximum, which so reads the product itself and not one more copy of it.
        scale = kernel.scale if kernel.soft_cap is None else 1.0
        new_top = jnp.maximum(top, jnp.max(score, axis=-1) * scale)
        weight = jnp.exp(score * scale - new_top[..., None])
        shrink = jnp.exp(top - new_top)
        new_total = total * shrink + jnp.sum(weight, axis=-1)
        new_out = out * shrink[..., None] + _dot("grqk,gkd->grqd", weight.astype(kv.dtype), keys(1))
        return Running(
            _update(running.out, new_out, (b, 0, 0, i, 0)),
            _update(running.top, new_top, (b, 0, 0, i)),
            _update(running.total, new_total, (b, 0, 0, i)),
        )

    return _loop(kernel, work, visit, running, q_len, kv.shape[3])


class Residual(NamedTuple):
    """Row-wise inputs of the backward pass: q, dout [B,G,R,S,D], lse, delta = sum(out dout) [B,G,R,S]."""

    q: jax.Array
    dout: jax.Array
    lse: jax.Array
    delta: jax.Array


def backward(
    kernel: Kernel,
    dq: jax.Array,
    residual: Residual,
    kv: jax.Array,
    query: Queries,
    key: Keys,
    work: Work,
) -> tuple[jax.Array, jax.Array]:
    """(dq + what this shard of keys adds [B,G,D,R,S], dkv of this shard [2,B,G,T,D]), both float32."""
    _, groups, heads, q_len, dim = residual.q.shape
    key_len = kv.shape[3]
    locate = _locator(kernel, q_len, key_len)
    k_transposed = jnp.swapaxes(kv[0], -1, -2)

    def visit(step: jax.Array, carry: tuple[jax.Array, jax.Array], masked: bool) -> tuple[jax.Array, jax.Array]:
        dq, dkv = carry
        b, i, j = locate(work.order[step])
        rows = lambda x: _slice(x, (b, 0, 0, i, 0), (groups, heads, kernel.query_block, dim))
        stat = lambda x: _slice(x, (b, 0, 0, i), (groups, heads, kernel.query_block))
        keys = lambda n: lax.dynamic_slice(kv, (n, b, 0, j, 0), (1, 1, groups, kernel.key_block, dim))[0, 0]
        q, dout, lse, delta = rows(residual.q), rows(residual.dout), stat(residual.lse), stat(residual.delta)
        score = _dot("gkd,grqd->gkrq", keys(0), q) * kernel.scale
        if kernel.soft_cap is not None:
            score = kernel.soft_cap * jnp.tanh(score / kernel.soft_cap)
        shown = score
        if masked:
            shown = score + _hidden(kernel, query, key, (b, i, j), dq).T[None, :, None]
        weight = jnp.exp(shown - lse[:, None])
        dv = _dot("gkrq,grqd->gkd", weight.astype(dout.dtype), dout)
        dscore = weight * (_dot("gkd,grqd->gkrq", keys(1), dout) - delta[:, None])
        if kernel.soft_cap is not None:
            dscore = dscore * (1 - jnp.square(score / kernel.soft_cap))
        dscore = (dscore * kernel.scale).astype(q.dtype)
        dk = _dot("gkrq,grqd->gkd", dscore, q)
        k_block = _slice(k_transposed, (b, 0, 0, j), (groups, dim, kernel.key_block))
        dq_start, dkv_start = (b, 0, 0, 0, i), (0, b, 0, j, 0)
        dq_block = lax.dynamic_slice(dq, dq_start, (1, groups, dim, heads, kernel.query_block))
        dkv_block = lax.dynamic_slice(dkv, dkv_start, (2, 1, groups, kernel.key_block, dim))
        dq_block = dq_block + _dot("gdk,gkrq->gdrq", k_block, dscore)[None]
        dkv_block = dkv_block + jnp.stack([dk, dv])[:, None]
        return lax.dynamic_update_slice(dq, dq_block, dq_start), lax.dynamic_update_slice(dkv, dkv_block, dkv_start)

    return _loop(kernel, work, visit, (dq, jnp.zeros(kv.shape, dq.dtype)), q_len, key_len)


def _loop(kernel: Kernel, work: Work, visit: Callable, carry: Any, q_len: int, key_len: int) -> Any:
    """Visits every visible pair of blocks; one loop where a second, unmasked one would not pay for its compilation."""
    if (q_len // kernel.query_block) * (key_len // kernel.key_block) <= _FEW_PAIRS:
        return lax.fori_loop(0, work.num_visible, functools.partial(visit, masked=True), carry)
    carry = lax.fori_loop(0, work.num_full, functools.partial(visit, masked=False), carry)
    return lax.fori_loop(work.num_full, work.num_visible, functools.partial(visit, masked=True), carry)


def _hidden(kernel: Kernel, query: Queries, key: Keys, place: tuple, like: jax.Array) -> jax.Array:
    """[Q, K]: 0 where the query sees the key, -inf elsewhere; the barrier keeps heads from each comparing again."""
    b, i, j = place
    sees = visible(_meta(query, b, i, kernel.query_block), _meta(key, b, j, kernel.key_block))
    return lax.optimization_barrier(jnp.where(sees, jnp.zeros((), like.dtype), -jnp.inf))


def _locator(kernel: Kernel, q_len: int, key_len: int) -> Callable:
    num_q, num_k = q_len // kernel.query_block, key_len // kernel.key_block
    assert (num_q * kernel.query_block, num_k * kernel.key_block) == (q_len, key_len), "pad shards to whole blocks"

    def locate(index: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        pair, j = index // num_k, index % num_k
        return pair // num_q, (pair % num_q) * kernel.query_block, j * kernel.key_block

    return locate


def _dot(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(equation, x, y, preferred_element_type=accumulation_dtype(x.dtype), precision=precision)


def _slice(x: jax.Array, start: tuple, sizes: tuple[int, ...]) -> jax.Array:
    return lax.dynamic_slice(x, start, (1, *sizes))[0]


def _update(x: jax.Array, block: jax.Array, start: tuple) -> jax.Array:
    return lax.dynamic_update_slice(x, block[None], start)


def _meta(meta: Any, b: jax.Array, start: jax.Array, size: int) -> Any:
    return type(meta)(*(_slice(x, (b, start), (size,)) for x in meta))
