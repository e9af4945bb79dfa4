"""Which examples stand in which rows: any row of an endless mixture of corpora, found directly from lengths.

Every corpus is sorted by length and cut into strata of W pieces of nearly equal length; a window of rows takes one
piece from every stratum. All windows therefore hold almost the same lengths, and one best-fit-decreasing layout of
the strata's longest lengths, made once, serves all of them: row r is in window r // R, and what it holds is one
evaluation of a permutation per stratum. Nothing is replayed or counted up to get there, and what the layout leaves
empty beyond its own gaps is less than the longest piece per corpus and window. The number of strata of a corpus
sets its share, so shares hold in every window. Within a stratum, each epoch visits every piece once in a new order;
a corpus too small for that many windows goes round k times in W windows.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from data.packing import Packing, Rows, cut, hash64, lay_out, shuffled

ShareUnit = Literal["tokens", "examples"]

_ROWS_PER_WINDOW = 512
_FEWEST_ROWS_PER_WINDOW = 16
_MOST_PIECES_PER_WINDOW = 65536
_FEWEST_WINDOWS = 128  # W is rounded, which moves a share by at most 1 / (2 W) of itself
_WINDOWS_KEPT = 4
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class _Strata:
    """One corpus, longest piece first, every piece `copies` times: `num_strata` strata of `num_windows` entries."""

    key: int
    example: NDArray[np.int64]
    start: NDArray[np.int64]
    length: NDArray[np.int64]
    num_strata: int
    num_windows: int
    copies: int

    @property
    def per_window(self) -> float:
        """Pieces in a window, on average; a little under `num_strata` where the last stratum is not full."""
        return self.copies * self.length.size / self.num_windows

    def capacities(self) -> NDArray[np.int64]:
        """The longest piece of every stratum, int64 [num_strata]."""
        return self.length[np.arange(self.num_strata) * self.num_windows // self.copies]

    def draw(self, window: int) -> NDArray[np.int64]:
        """The piece of every stratum in this window, int64 [num_strata]; -1 where the last stratum has none."""
        turn, at = divmod(window, self.num_windows)
        # A stratum's entries fall into `copies` rounds by index modulo `copies`, so that the copies of a piece, which
        # are neighbours, come in different rounds. Round sizes differ by one; longer and shorter rounds alternate, and
        # a golden stride deals the moduli of either size to their rounds so that neighbouring moduli lie far apart.
        fewest, num_longer = divmod(self.num_windows, self.copies)
        this_round = at * self.copies // self.num_windows
        begin = -(-this_round * self.num_windows // self.copies)
        size = -(-(this_round + 1) * self.num_windows // self.copies) - begin
        longer_before = begin - this_round * fewest
        stratum = np.arange(self.num_strata)
        if size > fewest:
            modulus = self._deal(longer_before, num_longer, turn)
        else:
            modulus = num_longer + self._deal(this_round - longer_before, self.copies - num_longer, turn)
        keys = hash64(self.key, turn, this_round, stratum)
        entry = stratum * self.num_windows + modulus + self.copies * shuffled(at - begin, size, keys)
        piece = entry // self.copies
        return np.where(piece < self.length.size, piece, -1)

    def _deal(self, index: int, count: int, turn: int) -> NDArray[np.int64]:
        offset = hash64(self.key, turn, count, np.arange(self.num_strata)) % np.uint64(count)
        return (index * _golden_stride(count) + offset.astype(np.int64)) % count


class Mixture:
    """An endless sequence of rows of `seq_len` slots, mixed from corpora: a function of lengths, identities and seed.

    lengths: slots of every example by corpus. identities: fingerprint of each corpus, which with `seed` decides its
    shuffles. shares: relative shares by corpus, positive, in tokens or in examples (a piece of a cut example counts
    as its share of one). packing "pad" gives every piece a row of its own. `join=False` packs every corpus into rows
    of its own. least_fill: where whole pieces fill less than this share of the rows, some strata are cut to fill
    more; at 0 only what is longer than a row is cut. Rows number corpora as `names` lists them, sorted.
    ValueError names the field, the value and the fix.
    """

    def __init__(
        self,
        lengths: Mapping[str, NDArray],
        identities: Mapping[str, str],
        shares: Mapping[str, float],
        *,
        seq_len: int,
        seed: int,
        packing: Packing = "masked",
        share_unit: ShareUnit = "tokens",
        join: bool = True,
        least_fill: float = 0.0,
    ) -> None:
        _check(lengths, shares, seq_len, share_unit, least_fill)
        self.names: tuple[str, ...] = tuple(sorted(shares))
        self.seq_len = seq_len
        pieces = [cut(lengths[name], seq_len) for name in self.names]
        # Plain Python sums: the same bits on every machine, since rounding decides where windows begin.
        total = float(sum(shares[name] for name in self.names))
        slots = [int(length.sum()) for _, _, length in pieces]
        whole = slots if share_unit == "tokens" else [int((np.asarray(lengths[name]) > 0).sum()) for name in self.names]
        # Pieces of each corpus per unit of mixture, then per window.
        rate = [
            shares[name] / total * piece[0].size / unit
            for name, piece, unit in zip(self.names, pieces, whole, strict=True)
        ]
        rate_of_slots = sum(r * n / piece[0].size for r, n, piece in zip(rate, slots, pieces, strict=True))
        num_pieces = _ROWS_PER_WINDOW * seq_len * sum(rate) / rate_of_slots
        if packing == "pad":
            num_pieces = float(_ROWS_PER_WINDOW)
        elif num_pieces > _MOST_PIECES_PER_WINDOW:
            num_pieces = max(_MOST_PIECES_PER_WINDOW, num_pieces * _FEWEST_ROWS_PER_WINDOW / _ROWS_PER_WINDOW)
        self._strata = [
            _strata(_key(seed, identities[name]), *piece, num_pieces * r / sum(rate))
            for name, piece, r in zip(self.names, pieces, rate, strict=True)
        ]
        self._key = _key(seed, *(identities[name] for name in self.names))
        self._lay_out(packing, join, least_fill)
        self._windows: OrderedDict[int, Rows] = OrderedDict()
        self._lock = threading.Lock()

    def rows(self, first: int, count: int) -> Rows:
        """Rows first .. first + count - 1 of the sequence."""
        assert first >= 0
        parts = []
        while count > 0:
            window, at = divmod(first, self.rows_per_window)
            taken = min(count, self.rows_per_window - at)
            parts.append(self._window(window)[at : at + taken])
            first, count = first + taken, count - taken
        return Rows.join(parts) if parts else self._window(0)[0:0]

    def _lay_out(self, packing: Packing, join: bool, least_fill: float) -> None:
        capacity = np.concatenate([strata.capacities() for strata in self._strata])
        corpus = np.repeat(np.arange(len(self._strata)), [strata.num_strata for strata in self._strata])
        if packing == "pad":
            groups = [np.array([slot]) for slot in range(capacity.size)]
        elif join:
            groups = [np.arange(capacity.size)]
        else:
            groups = [np.flatnonzero(corpus == c) for c in range(len(self._strata))]
        layouts = [lay_out(capacity[group], self.seq_len, least_fill) for group in groups]
        first_row = np.cumsum([0] + [layout.num_bins for layout in layouts])
        self.rows_per_window = int(first_row[-1])
        # A part of the layout takes slots start .. stop - 1 of whatever its stratum draws.
        self._stratum = np.concatenate([group[layout.item] for group, layout in zip(groups, layouts, strict=True)])
        self._part_start = np.concatenate([layout.start for layout in layouts])
        self._part_stop = np.concatenate([layout.stop for layout in layouts])
        self._part_row = np.concatenate([layout.bin + at for layout, at in zip(layouts, first_row[:-1], strict=True)])
        self._part_corpus = corpus[self._stratum]
        filled = np.zeros((self.rows_per_window, len(self._strata)))
        np.add.at(filled, (self._part_row, self._part_corpus), self._part_stop - self._part_start)
        self._num_parts = np.bincount(self._part_row, minlength=self.rows_per_window)
        self._rows_led_by = [np.flatnonzero(filled.argmax(1) == c) for c in range(len(self._strata))]
        self._draw_share = np.cumsum([strata.per_window for strata in self._strata])

    def _window(self, window: int) -> Rows:
        with self._lock:
            if window in self._windows:
                self._windows.move_to_end(window)
                return self._windows[window]
        rows = self._plan(window)
        with self._lock:
            self._windows[window] = rows
            while len(self._windows) > _WINDOWS_KEPT:
                self._windows.popitem(last=False)
        return rows

    def _plan(self, window: int) -> Rows:
        drawn = [strata.draw(window) for strata in self._strata]
        piece = np.concatenate(drawn)[self._stratum]

        def of_parts(arrays: list[NDArray[np.int64]]) -> NDArray[np.int64]:
            return np.concatenate([array[at] for array, at in zip(arrays, drawn, strict=True)])[self._stratum]

        slots = of_parts([strata.length for strata in self._strata])
        length = np.minimum(slots, self._part_stop) - self._part_start
        present = (piece >= 0) & (length > 0)
        example = of_parts([strata.example for strata in self._strata])[present]
        start = (of_parts([strata.start for strata in self._strata]) + self._part_start)[present]
        length, corpus, row = length[present], self._part_corpus[present], self._part_row[present]

        empty = np.setdiff1d(np.arange(self.rows_per_window), row)
        if empty.size:
            # A row nobody was drawn for takes any piece at all: a batch of padding alone would be a wasted step.
            extra = [self._any_piece(window, int(r)) for r in empty]
            columns = np.array(extra, np.int64).reshape(-1, 4).T
            corpus, example, start, length = (
                np.concatenate([old, new]) for old, new in zip((corpus, example, start, length), columns, strict=True)
            )
            row = np.concatenate([row, empty])

        place = self._order(window)[row]
        within = hash64(self._key, window, 1, np.arange(row.size))
        order = np.lexsort((within, place))
        counts = np.bincount(place, minlength=self.rows_per_window)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        return Rows(offsets, corpus[order], example[order], start[order], length[order])

    def _order(self, window: int) -> NDArray[np.int64]:
        """The place of every row of the layout in this window; rows led by one corpus are spread evenly.

        So are those of them with many pieces and with few, so that a run of rows has what the window has.
        """
        key = np.empty(self.rows_per_window)
        for c, rows in enumerate(self._rows_led_by):
            if rows.size:
                ranked = rows[np.lexsort((hash64(self._key, window, 2, rows), self._num_parts[rows]))]
                offset, phase = hash64(self._key, window, 3, c, np.arange(2)).tolist()
                dealt = (np.arange(rows.size) * _golden_stride(rows.size) + offset % rows.size) % rows.size
                key[ranked] = (dealt + phase / 2.0**64) / rows.size
        return np.argsort(np.argsort(key, kind="stable"))

    def _any_piece(self, window: int, row: int) -> tuple[int, int, int, int]:
        pick = float(hash64(self._key, window, 4, row)[0]) / 2.0**64 * self._draw_share[-1]
        c = min(int(np.searchsorted(self._draw_share, pick, side="right")), len(self._strata) - 1)
        strata = self._strata[c]
        piece = int(hash64(self._key, window, 5, row)[0] % np.uint64(strata.length.size))
        return c, int(strata.example[piece]), int(strata.start[piece]), int(strata.length[piece])


def _golden_stride(count: int) -> int:
    """A step through range(count) that meets every number once and leaves neighbouring numbers far apart in time."""
    stride = round(count * _GOLDEN)
    while math.gcd(stride, count) != 1:
        stride += 1
    return stride


def _strata(
    key: int, example: NDArray[np.int64], start: NDArray[np.int64], length: NDArray[np.int64], wanted: float
) -> _Strata:
    copies = max(1, int(np.ceil(_FEWEST_WINDOWS * wanted / length.size)))
    num_windows = max(1, round(copies * length.size / wanted))
    num_strata = -(-copies * length.size // num_windows)
    order = np.argsort(-length, kind="stable")
    return _Strata(key, example[order], start[order], length[order], num_strata, num_windows, copies)


def _key(seed: int, *identities: str) -> int:
    digest = hashlib.sha256("\n".join([str(seed), *identities]).encode()).digest()
    return int.from_bytes(digest[:8], "little")


def _check(
    lengths: Mapping[str, NDArray], shares: Mapping[str, float], seq_len: int, share_unit: str, least_fill: float
) -> None:
    if seq_len < 2:
        raise ValueError(f"seq_len is {seq_len}; it must be at least 2, so give the length of a row in tokens")
    if share_unit not in ("tokens", "examples"):
        raise ValueError(f"share_unit is {share_unit!r}; it must be 'tokens' or 'examples'")
    if not 0 <= least_fill < 1:
        raise ValueError(f"least_fill is {least_fill}; it must be a share of a row's slots from 0 to below 1")
    if not shares:
        raise ValueError("shares is empty; give at least one corpus a share")
    for name, share in shares.items():
        if name not in lengths:
            known: Sequence[str] = sorted(lengths)
            raise ValueError(f"shares names the corpus {name!r}, which is not loaded; the loaded corpora are {known}")
        if not (0 < share < float("inf")):
            raise ValueError(f"shares.{name} is {share}; it must be a positive number: leave the corpus out to skip it")
        if not (np.asarray(lengths[name]) > 0).any():
            raise ValueError(
                f"the corpus {name!r} has no example of two tokens or more; add some to it, or take it out of shares"
            )
