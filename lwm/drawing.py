"""Drawing the next id: temperature, top-k, top-p and guidance, all traced, so that settings compile nothing anew.

Legend: B batch, V vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

_ALL = 2**30


class Settings(NamedTuple):
    """Scalars: float32 `temperature`, int32 `top_k`, float32 `top_p`, float32 `guidance`."""

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    guidance: jax.Array


def make_settings(temperature: float, top_k: int | None, top_p: float | None, guidance: float | None) -> Settings:
    """Checked settings; None leaves everything in. ValueError names what is out of range."""
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature is {temperature}; give 0 for the likeliest id, or a positive number")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k is {top_k}; give at least 1, or None for all ids")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}; give a share above 0 and at most 1, or None for all ids")
    if guidance is not None and not 0 <= guidance < float("inf"):
        raise ValueError(f"guidance is {guidance}; give a number from 0, 1 being the prompt alone, or None for none")
    return Settings(
        jnp.asarray(temperature, jnp.float32),
        jnp.asarray(_ALL if top_k is None else min(top_k, _ALL), jnp.int32),
        jnp.asarray(1.0 if top_p is None else top_p, jnp.float32),
        jnp.asarray(1.0 if guidance is None else guidance, jnp.float32),
    )


def guide(logits_BV: jax.Array, settings: Settings) -> jax.Array:
    """Rows 2i (with the prompt) and 2i + 1 (without) both become without + guidance * (with - without)."""
    pairs = logits_BV.reshape(-1, 2, logits_BV.shape[-1])
    given, free = pairs[:, 0], pairs[:, 1]
    return jnp.repeat(free + settings.guidance * (given - free), 2, axis=0)


def draw(logits_BV: jax.Array, keys_B: jax.Array, step: jax.Array, settings: Settings) -> jax.Array:
    """int32 [B]: one id of each row, drawn with fold_in(keys_B[b], step); logits of -inf are never drawn.

    The cut to `top_k` comes first; `top_p` then keeps the fewest likeliest ids that reach its share of what is left.
    Ids as likely as the last one kept are kept too.
    """
    scaled_BV = logits_BV / settings.temperature
    sorted_BV = jnp.sort(scaled_BV, axis=-1, descending=True)
    ranks_V = jnp.arange(logits_BV.shape[-1], dtype=jnp.int32)
    sorted_BV = jnp.where(ranks_V[None] < settings.top_k, sorted_BV, -jnp.inf)
    shares_BV = jax.nn.softmax(sorted_BV, axis=-1)
    before_BV = jnp.cumsum(shares_BV, axis=-1) - shares_BV
    kept_BV = (before_BV < settings.top_p) & (sorted_BV > -jnp.inf)
    least_B1 = jnp.min(jnp.where(kept_BV, sorted_BV, jnp.inf), axis=-1, keepdims=True)
    cut_BV = jnp.where(scaled_BV >= least_B1, scaled_BV, -jnp.inf)
    fresh_B = jax.vmap(jax.random.fold_in, (0, None))(keys_B, step)
    return jax.vmap(jax.random.categorical)(fresh_B, cut_BV).astype(jnp.int32)
