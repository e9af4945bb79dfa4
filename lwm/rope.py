"""Rotary position embeddings (Su et al., arXiv 2104.09864), halves convention, from a positions array."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from lwm.config import RopeScalingConfig

# Positions are split into a multiple of this and a rest, so that float32 angles stay small and exact.
_SPLIT = 1024


def frequencies(head_dim: int, theta: float, scaling: RopeScalingConfig | None = None) -> np.ndarray:
    """Radians per position, float64 [head_dim / 2]; `scaling` is Llama 3.1's (long wavelengths are stretched)."""
    rates = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is None:
        return rates
    wavelengths = 2 * math.pi / rates
    turns = scaling.original_seq_len / wavelengths
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return rates * ((1 - smooth) / scaling.factor + smooth)


def rotation(
    positions_BS: jax.Array, head_dim: int, theta: float, scaling: RopeScalingConfig | None = None
) -> tuple[jax.Array, jax.Array]:
    """cos and sin of the angles, float32 [B, S, head_dim / 2], for int32 positions.

    A float32 product position * rate is off by 0.06 rad at a million; splitting the position keeps it below 1e-3.
    """
    rates = frequencies(head_dim, theta, scaling)
    coarse = np.asarray(np.mod(rates * _SPLIT, 2 * math.pi), np.float32)
    blocks_BS = (positions_BS // _SPLIT).astype(jnp.float32)
    rest_BS = (positions_BS % _SPLIT).astype(jnp.float32)
    angles_BSF = (
        blocks_BS[..., None] * coarse[None, None, :] + rest_BS[..., None] * np.asarray(rates, np.float32)[None, None, :]
    )
    return jnp.cos(angles_BSF), jnp.sin(angles_BSF)


def rotate(x_BSHD: jax.Array, cos_BSF: jax.Array, sin_BSF: jax.Array) -> jax.Array:
    """Rotates the pairs (i, i + D/2) of each head; float32 inside, the result in x's dtype."""
    first, second = jnp.split(x_BSHD.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos_BSF[:, :, None, :], sin_BSF[:, :, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BSHD.dtype)
