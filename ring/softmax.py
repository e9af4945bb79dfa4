"""Partial softmax results and their merge, safe where a row sees nothing.

A running row holds (out, top, total): the unnormalised output and the sum of 2**(score log2(e) - top). ``top``
starts at a large negative but finite number and hidden scores are -inf, so that no difference is ever
inf - inf and a row that has seen nothing has total exactly 0.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ring.exponential import LN_2, LOG2_E, exp2

LOWEST = -1e30


class Running(NamedTuple):
    """out [..., D], top [...] (base 2), total [...], all float32 (float64 for float64 inputs)."""

    out: jax.Array
    top: jax.Array
    total: jax.Array


def start(shape: tuple[int, ...], dtype: jnp.dtype, *, heads_first: bool = False) -> Running:
    """out [B,S,H,D], or [B,H,S,D], = ``shape``, top and total [B,H,S], of rows that have seen nothing."""
    rows = shape[:3] if heads_first else (shape[0], shape[2], shape[1])
    return Running(jnp.zeros(shape, dtype), jnp.full(rows, LOWEST, dtype), jnp.zeros(rows, dtype))


def normalise(top: jax.Array, total: jax.Array, sink: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """(factor that turns ``out`` into the average, natural logsumexp), both of ``top``'s shape.

    A row that saw nothing has factor 0 and logsumexp +inf, which makes exp(score - logsumexp) exactly 0 in
    the backward pass. ``sink`` is a logit that takes part in the normalisation and has no value.
    """
    seen = total > 0
    shrink = jnp.ones_like(total)
    if sink is not None:
        sink = sink * LOG2_E
        new_top = jnp.maximum(top, sink)
        shrink = exp2(top - new_top)
        top, total = new_top, total * shrink + exp2(sink - new_top)
    safe = jnp.where(seen, total, jnp.ones_like(total))
    return (
        jnp.where(seen, shrink / safe, jnp.zeros_like(total)),
        jnp.where(seen, (top + jnp.log2(safe)) * LN_2, jnp.full_like(top, jnp.inf)),
    )


def finish(running: Running, sink: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """(out [..., D], logsumexp [...]) of rows in one order; a row that saw nothing gives out 0."""
    factor, lse = normalise(running.top, running.total, sink)
    return running.out * factor[..., None], lse


def merge(out: jax.Array, top: jax.Array, total: jax.Array) -> Running:
    """Combines partials stacked on the first dimension: out [P, ..., D], top [P, ...], total [P, ...]."""
    new_top = jnp.max(top, axis=0)
    weight = exp2(top - new_top[None])
    return Running(jnp.sum(out * weight[..., None], axis=0), new_top, jnp.sum(total * weight, axis=0))
