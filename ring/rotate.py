"""The ring: keys and values travel from device to device while every device attends to what it holds.

After t hops the device at place r holds the keys and values of place r - t. The transfer of the next
shard is issued before the current one is used, so it runs behind the computation; the last shard is
not sent on. In the backward pass dK and dV travel in float32 one hop behind the keys and values they
belong to, and one more hop brings them home. Ring Attention, arXiv:2310.01889.

Collectives stand outside every branch and data-dependent loop, which devices may run differently often.
Positions and segments (8 bytes a token) travel one hop ahead of the keys and values they describe: what a hop
has to see is then known before its keys arrive, and nothing on a device grows with the number of devices.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from ring import blockwise, pallas_tpu, transit
from ring.blockwise import Kernel, Residual
from ring.mask import Keys, Queries
from ring.softmax import Running
from ring.transit import Parcel

Tree = TypeVar("Tree")


class Shard(NamedTuple):
    """What travels: keys and values [2,B,G,T,D], their positions and segments int32 [2,B,T], and those of the next."""

    kv: Parcel
    where: jax.Array
    where_next: jax.Array

    @property
    def key(self) -> Keys:
        """What decides the visibility of the keys."""
        return Keys(self.where[0], self.where[1])


def start(kv: Parcel, where: jax.Array, axes: tuple[str, ...], size: int) -> Shard:
    """This device's own keys and values, as the first hop has them."""
    return Shard(kv, where, send_on(where, axes, size) if size > 1 else where)


def _pass_on(shard: Shard, axes: tuple[str, ...], size: int) -> Shard:
    kv, where_next = send_on((shard.kv, shard.where_next), axes, size)
    return Shard(kv, shard.where_next, where_next)


def send_on(x: Tree, axes: tuple[str, ...], size: int) -> Tree:
    """Every device's ``x`` moves to the next place of the ring."""
    to_next = [(r, (r + 1) % size) for r in range(size)]
    return jax.tree.map(lambda leaf: lax.ppermute(leaf, axes, to_next), x)


def forward(
    kernel: Kernel | pallas_tpu.Kernel,
    running: Running,
    q: jax.Array,
    own: Shard,
    query: Queries,
    axes: tuple[str, ...],
    size: int,
) -> Running:
    """Attention of q [B,S,H,D] to every device's keys and values; ``own`` is this device's shard of them.

    Queries and what belongs to them are in the order of dims that ``kernel`` works in.
    """
    local = _local(kernel)

    def attend(running: Running, shard: Shard) -> Running:
        return local.forward(kernel, running, q, transit.decode(shard.kv, q.dtype), query, shard.key)

    def hop(_: jax.Array, carry: tuple[Shard, Running]) -> tuple[Shard, Running]:
        shard, running = carry
        arriving = _pass_on(shard, axes, size)
        return arriving, attend(running, shard)

    if size > 1:
        own, running = lax.fori_loop(0, size - 1, hop, (own, running), unroll=kernel.unroll)
    return attend(running, own)


def backward(
    kernel: Kernel | pallas_tpu.Kernel,
    residual: Residual,
    own: Shard,
    query: Queries,
    axes: tuple[str, ...],
    size: int,
    *,
    in_place: bool,
) -> tuple[jax.Array, jax.Array]:
    """(dq [B,S,H,D] in the kernel's order of dims, dkv [2,B,G,T,D]); sums over hops are in the accumulation dtype.

    The travelling dkv is added after the computation, behind which its transfer can hide. Where nothing hides,
    the computation adds to it ``in_place`` instead, which saves the memory and the time of one more dkv.
    """
    local = _local(kernel)
    dq = local.start_dq(residual, own.kv.values.shape[2], num_hops=size)
    nothing = jnp.zeros(own.kv.values.shape, dq.dtype)

    def attend(dq: jax.Array, dkv: jax.Array, shard: Shard) -> tuple[jax.Array, jax.Array]:
        kv = transit.decode(shard.kv, residual.q.dtype)
        return local.backward(kernel, dq, dkv, residual, kv, query, shard.key)

    def add(dq: jax.Array, following: jax.Array, shard: Shard) -> tuple[jax.Array, jax.Array]:
        if in_place:
            return attend(dq, following, shard)
        dq, added = attend(dq, nothing, shard)
        return dq, following + added

    if size == 1:
        dq, dkv = attend(dq, nothing, own)
        return local.finish_dq(dq), dkv

    arriving = _pass_on(own, axes, size)
    dq, dkv = attend(dq, nothing, own)

    def hop(_: jax.Array, carry: tuple[Shard, jax.Array, jax.Array]) -> tuple[Shard, jax.Array, jax.Array]:
        shard, dq, dkv = carry
        arriving, following = _pass_on(shard, axes, size), send_on(dkv, axes, size)
        return arriving, *add(dq, following, shard)

    shard, dq, dkv = lax.fori_loop(1, size - 1, hop, (arriving, dq, dkv), unroll=kernel.unroll)
    dq, dkv = add(dq, send_on(dkv, axes, size), shard)
    return local.finish_dq(dq), send_on(dkv, axes, size)


def _local(kernel: Kernel | pallas_tpu.Kernel) -> ModuleType:
    return pallas_tpu if isinstance(kernel, pallas_tpu.Kernel) else blockwise
