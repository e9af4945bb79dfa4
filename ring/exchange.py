"""Head exchange and gathering: the collectives of Ulysses, USP and all-gather attention.

Ulysses (arXiv:2309.14509) trades heads for sequence: before attention every device of a group sends
each other device its tokens of that device's heads, after it the outputs go back. USP (arXiv:2405.07719)
does so inside small groups and runs the ring between them. All-gather attention collects the keys and
values of every device (Llama 3's training, arXiv:2407.21783, section 3.3.2).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

Axes = tuple[str, ...]


def split_heads(x: jax.Array, axes: Axes, *, heads: int, sequence: int) -> jax.Array:
    """All heads of my tokens -> my heads of the group's tokens; ``heads`` and ``sequence`` are dim numbers."""
    return lax.all_to_all(x, axes, split_axis=heads, concat_axis=sequence, tiled=True) if axes else x


def join_heads(x: jax.Array, axes: Axes, *, heads: int, sequence: int) -> jax.Array:
    """The inverse of ``split_heads``."""
    return lax.all_to_all(x, axes, split_axis=sequence, concat_axis=heads, tiled=True) if axes else x


def gather(x: jax.Array, axes: Axes, *, sequence: int) -> jax.Array:
    """Every device's tokens, in order."""
    return lax.all_gather(x, axes, axis=sequence, tiled=True) if axes else x


def scatter_sum(x: jax.Array, axes: Axes, *, sequence: int) -> jax.Array:
    """The transpose of ``gather``: sums over devices, each keeps its own tokens."""
    return lax.psum_scatter(x, axes, scatter_dimension=sequence, tiled=True) if axes else x


def repeat_groups(kv: jax.Array, times: int, *, heads: int) -> jax.Array:
    """Every key/value head ``times`` over, so that a group larger than their number can share them out."""
    return jnp.repeat(kv, times, axis=heads) if times > 1 else kv


def sum_groups(dkv: jax.Array, times: int, *, heads: int) -> jax.Array:
    """The transpose of ``repeat_groups``."""
    if times == 1:
        return dkv
    shape = dkv.shape
    return jnp.sum(dkv.reshape(*shape[:heads], shape[heads] // times, times, *shape[heads + 1 :]), axis=heads + 1)
