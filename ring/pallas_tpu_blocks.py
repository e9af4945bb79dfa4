"""What ``pallas_tpu`` does with one pair of blocks in vector memory: forward, dq, and dk with dv.

Every function is the body of a Pallas kernel whose grid walks a list of visible pairs of blocks. Scores
are [Q, K] in the forward pass and for dq, and [K, Q] for dk and dv: each product then contracts either
the last dims of both operands or a last with a first, and none needs a transposed copy of a tile of scores.
Numbers that belong to queries (maximum, logsumexp) stand in a column beside [Q, K]. Columns are kept
repeated over all 128 lanes, so that no step moves data across lanes to spread them.

Shapes: Q, K tokens of a block, C of a chunk, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ring.exponential import LOG2_E
from ring.mask import FULL, NONE, PARTIAL, Keys, Queries

LANES = 128
_KIND_BITS, _FIRST, _LAST = 2, 4, 8
FLAG_BITS = 4
NOTHING = NONE | _FIRST | _LAST
"""The entry of a list without visible pairs."""


class Entry(NamedTuple):
    """A pair of blocks: ``row`` and ``column`` in the list's order, NONE, PARTIAL or FULL, first or last of its row."""

    row: jax.Array
    column: jax.Array
    kind: jax.Array
    first: jax.Array
    last: jax.Array


def pack(row: jax.Array, column: jax.Array, kind: jax.Array, column_bits: int) -> jax.Array:
    """Entries without their first and last flags; sorting them sorts by row, then column."""
    return (((row << column_bits) | column) << FLAG_BITS) | kind


def mark(entries: jax.Array, column_bits: int) -> jax.Array:
    """Sets the flags of a sorted list."""
    row = entries >> (FLAG_BITS + column_bits)
    edge = jnp.full((1,), -1, row.dtype)
    first = row != jnp.concatenate([edge, row[:-1]])
    last = row != jnp.concatenate([row[1:], edge])
    return entries | jnp.where(first, _FIRST, 0) | jnp.where(last, _LAST, 0)


def unpack(entry: jax.Array, column_bits: int) -> Entry:
    """The entry that ``pack`` and ``mark`` made."""
    return Entry(
        row=entry >> (FLAG_BITS + column_bits),
        column=(entry >> FLAG_BITS) & ((1 << column_bits) - 1),
        kind=entry & ((1 << _KIND_BITS) - 1),
        first=(entry & _FIRST) != 0,
        last=(entry & _LAST) != 0,
    )


class Tile(NamedTuple):
    """Static facts of a kernel's body."""

    scale: float
    soft_cap: float | None
    chunk: int
    column_bits: int


def forward(tile: Tile, entries: Any, q: Any, k: Any, v: Any, query: Any, key: Any, *state: Any) -> None:
    """Online softmax over the keys of one block; grid (G, R, N)."""
    out_before, top_before, total_before, out, top, total, peak, mass = state
    entry = unpack(entries[pl.program_id(2)], tile.column_bits)

    @pl.when(entry.first)
    def _enter() -> None:
        out[...] = out_before[...]
        peak[...] = _column(top_before[...])
        # Lanes keep their own share of the sum, which is taken only when the row is left.
        share = _column(total_before[...])
        mass[...] = jnp.where(lax.broadcasted_iota(jnp.int32, share.shape, 1) == 0, share, 0.0)

    def visit(masked: bool) -> None:
        see = _queries_by_row(query) if masked else None
        for part in _chunks(k.shape[0], tile.chunk):
            score = _across(q[...], k[part, :])
            scale = tile.scale * LOG2_E
            if tile.soft_cap is not None:
                score, scale = jnp.tanh(score * (tile.scale / tile.soft_cap)), tile.soft_cap * LOG2_E
            if see is not None:
                score = jnp.where(_sees(see, key, part), score, -jnp.inf)
            before = peak[...]
            now = jnp.maximum(before, jnp.max(score, axis=1, keepdims=True) * scale)
            weight = jnp.exp2(score * scale - _widen(now, score.shape[1]))
            shrink = jnp.exp2(before - now)
            peak[...] = now
            mass[...] = mass[...] * shrink + _fold(weight)
            out[...] = out[...] * _widen(shrink, out.shape[1]) + _along(weight.astype(v.dtype), v[part, :])

    _by_kind(entry.kind, visit)

    @pl.when(entry.last)
    def _leave() -> None:
        top[...] = _row(peak[...])
        total[...] = jnp.sum(mass[...].T, axis=0, keepdims=True)


def backward_queries(tile: Tile, entries: Any, q: Any, dout: Any, k: Any, v: Any, *state: Any) -> None:
    """dq of one block of queries; grid (G, R, N)."""
    lse, delta, query, key, dq_before, dq, sum_dq, lse_column, delta_column = state
    entry = unpack(entries[pl.program_id(2)], tile.column_bits)

    @pl.when(entry.first)
    def _enter() -> None:
        lse_column[...] = _column(lse[...])
        delta_column[...] = _column(delta[...])
        sum_dq[...] = jnp.zeros_like(sum_dq)

    def visit(masked: bool) -> None:
        see = _queries_by_row(query) if masked else None
        for part in _chunks(k.shape[0], tile.chunk):
            score = _across(q[...], k[part, :])
            sees = None if see is None else _sees(see, key, part)
            width = score.shape[1]
            weight, slope = _weight(tile, score, _widen(lse_column[...], width), sees)
            dscore = weight * (_across(dout[...], v[part, :]) - _widen(delta_column[...], width))
            dscore = dscore if slope is None else dscore * slope
            sum_dq[...] += _along(dscore.astype(k.dtype), k[part, :])

    _by_kind(entry.kind, visit)

    @pl.when(entry.last)
    def _leave() -> None:
        added = sum_dq[...] * tile.scale
        dq[...] = (dq_before[...].astype(added.dtype) + added).astype(dq.dtype)


def backward_keys(tile: Tile, entries: Any, q: Any, dout: Any, k: Any, v: Any, *state: Any) -> None:
    """dk and dv of one block of keys, summed over the query heads that share them; grid (G, N, R)."""
    lse, delta, query, key, dkv_before, dkv, sum_dk, sum_dv = state
    entry = unpack(entries[pl.program_id(1)], tile.column_bits)

    @pl.when(entry.first & (pl.program_id(2) == 0))
    def _enter() -> None:
        sum_dk[...] = jnp.zeros_like(sum_dk)
        sum_dv[...] = jnp.zeros_like(sum_dv)

    def visit(masked: bool) -> None:
        keys = [_column(key[n : n + 1, :]) for n in range(len(Keys._fields))] if masked else None
        for part in _chunks(q.shape[0], tile.chunk):
            score = _across(k[...], q[part, :])
            sees = None
            if keys is not None:
                rows = Queries(*(query[n : n + 1, part] for n in range(len(Queries._fields))))
                sees = _interval(rows, Keys(*(_widen(x, score.shape[1]) for x in keys)))
            weight, slope = _weight(tile, score, lse[:, part], sees)
            sum_dv[...] += _along(weight.astype(dout.dtype), dout[part, :])
            dscore = weight * (_across(v[...], dout[part, :]) - delta[:, part])
            dscore = dscore if slope is None else dscore * slope
            sum_dk[...] += _along(dscore.astype(q.dtype), q[part, :])

    _by_kind(entry.kind, visit)

    @pl.when(entry.last & (pl.program_id(2) == pl.num_programs(2) - 1))
    def _leave() -> None:
        for n, added in enumerate((sum_dk[...] * tile.scale, sum_dv[...])):
            dkv[n] = (dkv_before[n].astype(added.dtype) + added).astype(dkv.dtype)


def _weight(tile: Tile, score: jax.Array, lse: jax.Array, sees: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    """The softmax of unscaled products, 0 where hidden, from ``lse`` (base 2), and the soft cap's slope."""
    scale, slope = tile.scale * LOG2_E, None
    if tile.soft_cap is not None:
        score, scale = jnp.tanh(score * (tile.scale / tile.soft_cap)), tile.soft_cap * LOG2_E
        slope = 1.0 - score * score
    if sees is not None:
        score = jnp.where(sees, score, -jnp.inf)
    return jnp.exp2(score * scale - lse), slope


def _by_kind(kind: jax.Array, visit: Callable[[bool], None]) -> None:
    @pl.when(kind == FULL)
    def _full() -> None:
        visit(False)

    @pl.when(kind == PARTIAL)
    def _partial() -> None:
        visit(True)


def _chunks(length: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, length)) for start in range(0, length, chunk))


def _across(x: jax.Array, y: jax.Array) -> jax.Array:
    """x y^T: [N, D], [M, D] -> [N, M] float32."""
    return _product(x, y, 1)


def _along(x: jax.Array, y: jax.Array) -> jax.Array:
    """x y: [N, M], [M, D] -> [N, D] float32."""
    return _product(x, y, 0)


def _product(x: jax.Array, y: jax.Array, dim: int) -> jax.Array:
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dims = (((1,), (dim,)), ((), ()))
    return lax.dot_general(x, y, dims, preferred_element_type=jnp.float32, precision=precision)


def _queries_by_row(query: Any) -> Queries:
    """[Q, LANES] each of a reference to [3, Q]."""
    return Queries(*(_column(query[n : n + 1, :]) for n in range(len(Queries._fields))))


def _sees(query: Queries, key: Any, part: slice) -> jax.Array:
    """bool [Q, C] of queries [Q, LANES] and a reference to keys [2, K]."""
    keys = Keys(*(key[n : n + 1, part] for n in range(len(Keys._fields))))
    return _interval(Queries(*(_widen(x, keys.segment.shape[1]) for x in query)), keys)


def _interval(query: Queries, key: Keys) -> jax.Array:
    inside = (query.first <= key.position) & (key.position <= query.last)
    return inside & (query.segment == key.segment)


def _column(row: jax.Array) -> jax.Array:
    """[1, N] -> [N, LANES], the same in every lane."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def _row(column: jax.Array) -> jax.Array:
    """[N, LANES] of equal lanes -> [1, N]."""
    return column.T[:1]


def _widen(column: jax.Array, width: int) -> jax.Array:
    """[N, LANES] of equal lanes -> [N, width]."""
    if width < LANES:
        return column[:, :width]
    assert width % LANES == 0, width
    return jnp.concatenate([column] * (width // LANES), axis=1)


def _fold(x: jax.Array) -> jax.Array:
    """[N, M] -> [N, LANES]: sums of the elements that stand in the same lane."""
    total = x[:, :LANES]
    for start in range(LANES, x.shape[1], LANES):
        total = total + x[:, start : start + LANES]
    return total
