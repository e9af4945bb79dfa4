"""The ring: keys and values travel from device to device while every device attends to what it holds.

After t hops the device at place r holds the keys and values of place r - t. The transfer of the next
shard is issued before the current one is used, so it runs behind the computation; the last shard is
not sent on. In the backward pass dK and dV travel in float32 one hop behind the keys and values they
belong to, and one more hop brings them home. Ring Attention, arXiv:2310.01889.

Collectives stand outside every branch and data-dependent loop, which devices may run differently often.
Positions and segments (8 bytes a token) are gathered once per pass: the visible pairs of blocks of all
hops are then known before the first hop, and the hops carry nothing but keys and values.
"""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from ring import blockwise, transit
from ring.blockwise import Kernel, Residual
from ring.mask import Keys, Queries
from ring.softmax import Running
from ring.transit import Parcel

Tree = TypeVar("Tree")


def keys_by_hop(key: Keys, axes: tuple[str, ...], size: int) -> Keys:
    """[size, B, T]: metadata of the keys this device holds after 0, 1, ... hops."""
    if size == 1:
        return Keys(*(x[None] for x in key))
    everywhere = lax.all_gather(jnp.stack(key), axes)
    source = (lax.axis_index(axes) - jnp.arange(size, dtype=jnp.int32)) % size
    arranged = jnp.take(everywhere, source, axis=0)
    return Keys(arranged[:, 0], arranged[:, 1])


def send_on(x: Tree, axes: tuple[str, ...], size: int) -> Tree:
    """Every device's ``x`` moves to the next place of the ring."""
    to_next = [(r, (r + 1) % size) for r in range(size)]
    return jax.tree.map(lambda leaf: lax.ppermute(leaf, axes, to_next), x)


def forward(
    kernel: Kernel,
    running: Running,
    q: jax.Array,
    kv: Parcel,
    query: Queries,
    key: Keys,
    axes: tuple[str, ...],
    size: int,
) -> Running:
    """Attention of q [B,G,R,S,D] to every device's kv [2,B,G,T,D]; ``key`` is this device's own [B, T]."""
    hops = keys_by_hop(key, axes, size)
    works = blockwise.plan_work(kernel, query, hops)

    def attend(hop: jax.Array | int, running: Running, kv: Parcel) -> Running:
        return blockwise.forward(
            kernel, running, q, transit.decode(kv, q.dtype), query, _at(hops, hop), _at(works, hop)
        )

    def hop(index: jax.Array, carry: tuple[Parcel, Running]) -> tuple[Parcel, Running]:
        kv, running = carry
        arriving = send_on(kv, axes, size)
        return arriving, attend(index, running, kv)

    if size > 1:
        kv, running = lax.fori_loop(0, size - 1, hop, (kv, running))
    return attend(size - 1, running, kv)


def backward(
    kernel: Kernel, residual: Residual, kv: Parcel, query: Queries, key: Keys, axes: tuple[str, ...], size: int
) -> tuple[jax.Array, jax.Array]:
    """(dq [B,G,D,R,S], dkv [2,B,G,T,D]), both in the accumulation dtype."""
    hops = keys_by_hop(key, axes, size)
    works = blockwise.plan_work(kernel, query, hops)
    batch, groups, heads, length, dim = residual.q.shape
    dq = jnp.zeros((batch, groups, dim, heads, length), residual.lse.dtype)

    def attend(hop: jax.Array | int, dq: jax.Array, kv: Parcel) -> tuple[jax.Array, jax.Array]:
        return blockwise.backward(
            kernel, dq, residual, transit.decode(kv, residual.q.dtype), query, _at(hops, hop), _at(works, hop)
        )

    if size == 1:
        return attend(0, dq, kv)

    arriving = send_on(kv, axes, size)
    dq, dkv = attend(0, dq, kv)

    def hop(index: jax.Array, carry: tuple[Parcel, jax.Array, jax.Array]) -> tuple[Parcel, jax.Array, jax.Array]:
        kv, dq, dkv = carry
        arriving, following = send_on((kv, dkv), axes, size)
        dq, own = attend(index, dq, kv)
        return arriving, dq, following + own

    kv, dq, dkv = lax.fori_loop(1, size - 1, hop, (arriving, dq, dkv))
    following = send_on(dkv, axes, size)
    dq, own = attend(size - 1, dq, kv)
    return dq, send_on(following + own, axes, size)


def _at(tree: Tree, hop: jax.Array | int) -> Tree:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, hop, keepdims=False), tree)
