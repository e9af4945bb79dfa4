"""Digests of arrays that do not depend on how they are sharded: what was saved is what was restored, on any mesh.

Every element's bits are mixed with its coordinates by bijections of 32-bit words (murmur3's finalizer), and the words
are summed modulo 2^32, twice. One changed element always changes the sum, because its word is another one; where
several change, the sums agree by chance once in 2^64. Adding is commutative, so each device sums what it has.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

# Below this many elements a host is faster than compiling for a device.
_ON_HOST = 1 << 20
_FIRST, _SECOND = 0x85EBCA6B, 0xC2B2AE35
_STRIDES = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1, 0xD3A2646D, 0xFD7046C5, 0xB55A4F09)
_SECOND_LANE = 0x5BD1E995


def named_leaves(tree: Any, prefix: str) -> dict[str, Any]:
    """Path -> leaf, `prefix` in front: `params/layers/gate`, `optimizer/0/mu/layers/gate`."""
    named = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        parts = (str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)
        named["/".join((prefix, *parts))] = leaf
    return named


def digests(leaves: dict[str, Any]) -> tuple[dict[str, str], list[str]]:
    """(name -> digest, names of leaves that hold a number that is not finite). Collective: all processes call it."""
    words = {name: _words(leaf) for name, leaf in leaves.items()}  # all dispatched before the first is waited for
    found = {name: np.asarray(each) for name, each in words.items()}
    names = {name: digest_of(words) for name, words in found.items()}
    return names, [name for name, (_, _, bad) in found.items() if bad]


def piece_words(piece: np.ndarray, first: int) -> np.ndarray:
    """uint32 [2] of some indices of a leaf's first dim, from `first` on; those of all pieces add up to the leaf's."""
    with np.errstate(over="ignore"):
        return _mixed(np, piece, first)[:2]


def digest_of(words: np.ndarray) -> str:
    """The digest of a leaf from the sum of its pieces' words."""
    return f"{int(words[0]):08x}{int(words[1]):08x}"


def _words(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        if leaf.size > _ON_HOST or not leaf.is_fully_addressable:
            return _on_devices(leaf)
        leaf = jax.device_get(leaf)
    leaf = np.asarray(leaf)
    return _mixed(np, leaf) if leaf.size <= _ON_HOST else _on_devices(jnp.asarray(leaf))


def _on_devices(leaf: jax.Array) -> jax.Array:
    where = leaf.sharding
    everywhere = NamedSharding(where.mesh, PartitionSpec()) if isinstance(where, NamedSharding) else None
    return jax.jit(lambda leaf: _mixed(jnp, leaf), out_shardings=everywhere)(leaf)


def _mixed(xp: Any, leaf: Any, first: int = 0) -> Any:
    """uint32 [3]: two sums of words, and how many elements are not finite; by numpy or jax.numpy.

    first: where the first dim begins, when `leaf` is a part of one.
    """
    word = xp.uint32
    unsigned = xp.dtype(f"uint{8 * leaf.dtype.itemsize}") if xp is np else jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")
    assert leaf.dtype.itemsize <= 4, leaf.dtype
    bits = jax.lax.bitcast_convert_type(leaf, unsigned) if xp is jnp else np.ascontiguousarray(leaf).view(unsigned)
    x = _scramble(xp, bits.reshape(leaf.shape).astype(word))
    for dim, size in enumerate(leaf.shape):
        places = xp.arange(size, dtype=word) + word(first if dim == 0 else 0)
        along = (places * word(_STRIDES[dim])).reshape((size,) + (1,) * (leaf.ndim - dim - 1))
        x = _scramble(xp, x ^ along)
    second = _scramble(xp, x ^ word(_SECOND_LANE))
    # bfloat16 is an extension type, which numpy alone does not take for a float.
    floating = jnp.issubdtype(leaf.dtype, jnp.floating)
    bad = xp.sum(~xp.isfinite(leaf), dtype=word) if floating else word(0)
    return xp.stack([xp.sum(x, dtype=word), xp.sum(second, dtype=word), bad])


def _scramble(xp: Any, x: Any) -> Any:
    """Murmur3's finalizer: every bit of the input moves every bit of the output, and no two inputs meet."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> 16)) * xp.uint32(_FIRST)
        x = (x ^ (x >> 13)) * xp.uint32(_SECOND)
        return x ^ (x >> 16)
