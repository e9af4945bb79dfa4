"""Who sees whom, as a function of positions and segments; never an S x S object.

Every mask here is an interval: query ``i`` sees key ``j`` when both are in the same segment and
``first_i <= position_j <= last_i``. Ordered by (segment, position), the keys a query sees are therefore
one contiguous range, and the smallest and largest such pair of a block decide whether anybody in a
block of queries can see anybody in a block of keys.

Shapes: B batch, S sequence, N blocks.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

FAR = 2**30
"""Positions lie strictly between -FAR and FAR."""

NONE, PARTIAL, FULL = 0, 1, 2
"""What a block of queries sees of a block of keys."""

_PADDED_QUERY = -1  # Differs from a padded key's segment 0, so that padding does not see padding.


@dataclasses.dataclass(frozen=True)
class Mask:
    """Visibility within a segment, by position.

    causal: a query sees keys at positions up to its own. False: all of its segment.
    window: a query sees only keys at distance less than ``window`` behind it (itself included) and, if
        not causal, less than ``window`` ahead of it.
    prefix: with causal, keys at positions below ``prefix`` are seen by every query behind ``window``'s
        limit, so the first ``prefix`` tokens of a segment see each other (prefix-LM).
    block: with causal, a query sees to the end of its own block of ``block`` positions (block-causal:
        the tokens of one video frame see each other whole).
    """

    causal: bool = True
    window: int | None = None
    prefix: int | None = None
    block: int | None = None

    def __post_init__(self) -> None:
        for field in ("window", "prefix", "block"):
            value = getattr(self, field)
            if value is not None and not 1 <= value < FAR:
                raise ValueError(
                    f"Mask.{field} is {value}; give a whole number from 1 to {FAR - 1}, or None for no {field}"
                )
            if value is not None and field != "window" and not self.causal:
                raise ValueError(f"Mask.{field} is {value} but causal is False, where all is visible; set causal=True")


CAUSAL = Mask(causal=True)


class Queries(NamedTuple):
    """What decides the visibility of queries: int32 [B, S] each."""

    first: jax.Array
    last: jax.Array
    segment: jax.Array


class Keys(NamedTuple):
    """What decides the visibility of keys: int32 [B, S] each."""

    position: jax.Array
    segment: jax.Array


def queries(mask: Mask, position_BS: jax.Array, segment_BS: jax.Array, last_BS: jax.Array | None = None) -> Queries:
    """The interval of positions every query sees; ``last_BS`` extends it, as prefix and block do."""
    far = jnp.full_like(position_BS, FAR)
    first = -far if mask.window is None else position_BS - (mask.window - 1)
    if mask.causal:
        last = position_BS
        if mask.prefix is not None:
            last = jnp.maximum(last, mask.prefix - 1)
        if mask.block is not None:
            last = jnp.maximum(last, (position_BS // mask.block + 1) * mask.block - 1)
    else:
        last = far if mask.window is None else position_BS + (mask.window - 1)
    if last_BS is not None:
        last = jnp.maximum(last, last_BS)
    return Queries(first, last, jnp.where(segment_BS == 0, _PADDED_QUERY, segment_BS))


def pad_queries(meta: Queries, length: int) -> Queries:
    """Padded to ``length`` with queries that see nothing."""
    width = ((0, 0), (0, length - meta.segment.shape[1]))
    first, last = jnp.pad(meta.first, width), jnp.pad(meta.last, width)
    return Queries(first, last, jnp.pad(meta.segment, width, constant_values=_PADDED_QUERY))


def pad_keys(meta: Keys, length: int) -> Keys:
    """Padded to ``length`` with keys that nothing sees."""
    width = ((0, 0), (0, length - meta.segment.shape[1]))
    return Keys(jnp.pad(meta.position, width), jnp.pad(meta.segment, width))


def visible(query: Queries, key: Keys) -> jax.Array:
    """bool [..., Q, K] for metadata [..., Q] and [..., K]."""
    position, segment = key.position[..., None, :], key.segment[..., None, :]
    return (
        (query.segment[..., None] == segment)
        & (query.first[..., None] <= position)
        & (position <= query.last[..., None])
    )


class _Range(NamedTuple):
    """Smallest and largest (segment, position) pair per block, and what a FULL block needs; int32 [..., N]."""

    low_segment: jax.Array
    low: jax.Array
    high_segment: jax.Array
    high: jax.Array
    uniform: jax.Array  # bool: one segment, no padding
    inner_low: jax.Array  # queries: largest first; keys: smallest position
    inner_high: jax.Array  # queries: smallest last; keys: largest position


def _range(first: jax.Array, last: jax.Array, segment: jax.Array, block: int, *, of_keys: bool) -> _Range:
    first, last, segment = (x.reshape(*x.shape[:-1], -1, block) for x in (first, last, segment))
    low_segment = jnp.min(jnp.where(segment > 0, segment, FAR), axis=-1)
    high_segment = jnp.max(segment, axis=-1)
    low = jnp.min(jnp.where(segment == low_segment[..., None], first, FAR), axis=-1)
    high = jnp.max(jnp.where(segment == high_segment[..., None], last, -FAR), axis=-1)
    uniform = jnp.min(segment, axis=-1) == high_segment
    if of_keys:
        inner_low, inner_high = jnp.min(first, axis=-1), jnp.max(last, axis=-1)
    else:
        inner_low, inner_high = jnp.max(first, axis=-1), jnp.min(last, axis=-1)
    return _Range(low_segment, low, high_segment, high, uniform & (high_segment > 0), inner_low, inner_high)


def classify(query: Queries, key: Keys, query_block: int, key_block: int) -> jax.Array:
    """NONE, PARTIAL or FULL for every pair of blocks: int32 [..., num_query_blocks, num_key_blocks].

    NONE is certain; a PARTIAL block may turn out to be empty only where segments are not in order.
    Lengths must be multiples of the blocks; leading dimensions broadcast.
    """
    q = _Range(*(x[..., None] for x in _range(query.first, query.last, query.segment, query_block, of_keys=False)))
    k = _Range(*(x[..., None, :] for x in _range(key.position, key.position, key.segment, key_block, of_keys=True)))
    starts_in_time = (k.low_segment < q.high_segment) | ((k.low_segment == q.high_segment) & (k.low <= q.high))
    ends_in_time = (k.high_segment > q.low_segment) | ((k.high_segment == q.low_segment) & (k.high >= q.low))
    some = starts_in_time & ends_in_time & (q.high_segment > 0) & (k.high_segment > 0)
    full = q.uniform & k.uniform & (q.high_segment == k.high_segment)
    full &= (q.inner_low <= k.inner_low) & (k.inner_high <= q.inner_high)
    return jnp.where(some, jnp.where(full, FULL, PARTIAL), NONE)
