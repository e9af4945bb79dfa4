"""Partial softmax results and their merge, safe where a row sees nothing.

A running row holds (out, top, total): the unnormalised output and the sum of exp(score - top). ``top``
starts at a large negative but finite number and hidden scores are -inf, so that no difference is ever
inf - inf and a row that has seen nothing has total exactly 0.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

LOWEST = -1e30


class Running(NamedTuple):
    """out [..., D], top [...], total [...], all float32 (float64 for float64 inputs)."""

    out: jax.Array
    top: jax.Array
    total: jax.Array


def start(shape: tuple[int, ...], dtype: jnp.dtype) -> Running:
    """Rows of ``shape`` [..., D] that have seen nothing."""
    return Running(jnp.zeros(shape, dtype), jnp.full(shape[:-1], LOWEST, dtype), jnp.zeros(shape[:-1], dtype))


def finish(running: Running, sink: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """(out [..., D], logsumexp [...]); a row that saw nothing gives out 0 and logsumexp +inf.

    +inf makes exp(score - logsumexp) exactly 0 in the backward pass. ``sink`` [...] is a logit that
    takes part in the normalisation and has no value.
    """
    out, top, total = running
    seen = total > 0
    if sink is not None:
        new_top = jnp.maximum(top, sink)
        shrink = jnp.exp(top - new_top)
        out, top, total = out * shrink[..., None], new_top, total * shrink + jnp.exp(sink - new_top)
    safe = jnp.where(seen, total, jnp.ones_like(total))
    return (
        jnp.where(seen[..., None], out / safe[..., None], jnp.zeros_like(out)),
        jnp.where(seen, top + jnp.log(safe), jnp.full_like(top, jnp.inf)),
    )


def merge(out: jax.Array, top: jax.Array, total: jax.Array) -> Running:
    """Combines partials stacked on the first dimension: out [P, ..., D], top [P, ...], total [P, ...]."""
    new_top = jnp.max(top, axis=0)
    weight = jnp.exp(top - new_top[None])
    return Running(jnp.sum(out * weight[..., None], axis=0), new_top, jnp.sum(total * weight, axis=0))
