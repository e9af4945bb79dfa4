"""Packing: examples cut and fitted into rows, rows filled with arrays, and the weight of every learned target.

An example of n tokens takes n - 1 slots: inputs `tokens[:-1]`, targets `tokens[1:]`. What is longer than a row is cut
into consecutive pieces; a piece keeps its offset, so positions continue and its targets weigh what they would whole.

Legend: B rows of a batch, S slots of a row, P pieces, M modalities (0 text, 1 vision).
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

Packing = Literal["masked", "concat", "pad"]
Weighting = Literal["example", "token"]
Batch = dict[str, NDArray]

_HASH_STEP = 0x9E3779B97F4A7C15
_MASK64 = (1 << 64) - 1
_FEISTEL_ROUNDS = 5
_EVEN_BELOW = (1, 2, 4, 8)
_TAILS = (0.0, 0.05, 0.1, 0.2, 0.3)


class Tokenized(Protocol):
    """One example: `tokens` int32 [n] and `learn` bool [n]; learn[i] says that token i is a learned target."""

    @property
    def tokens(self) -> NDArray[np.int32]: ...

    @property
    def learn(self) -> NDArray[np.bool_]: ...


@dataclass(frozen=True)
class Rows:
    """What stands in each of a run of rows, in order, without any token: pieces of examples, row after row.

    offsets: int64 [rows + 1], row r holds pieces offsets[r] .. offsets[r + 1] - 1.
    corpus, example, start, length: int64 [P], slots start .. start + length - 1 of that example of that corpus.
    """

    offsets: NDArray[np.int64]
    corpus: NDArray[np.int64]
    example: NDArray[np.int64]
    start: NDArray[np.int64]
    length: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, rows: slice) -> Rows:
        first, stop, step = rows.indices(len(self))
        assert step == 1, "rows are taken in runs"
        stop = max(first, stop)
        pieces = slice(self.offsets[first], self.offsets[stop])
        offsets = self.offsets[first : stop + 1] - self.offsets[first]
        return Rows(offsets, self.corpus[pieces], self.example[pieces], self.start[pieces], self.length[pieces])

    @staticmethod
    def join(parts: Sequence[Rows]) -> Rows:
        """Runs of rows one after another."""
        if len(parts) == 1:
            return parts[0]
        counts = np.concatenate([np.diff(part.offsets) for part in parts])
        return Rows(
            np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]),
            np.concatenate([part.corpus for part in parts]),
            np.concatenate([part.example for part in parts]),
            np.concatenate([part.start for part in parts]),
            np.concatenate([part.length for part in parts]),
        )


def hash64(*parts: ArrayLike) -> NDArray[np.uint64]:
    """A uniform 64-bit number per entry of the broadcast parts (splitmix64, chained): all randomness of the plan."""
    state = np.zeros(1, np.uint64)
    for part in parts:
        state = (state ^ np.asarray(part).astype(np.uint64)) + np.uint64(_HASH_STEP)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return state


def shuffled(index: int, size: int, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Where `index` goes under one random permutation of range(size) per key: int64 [len(keys)].

    A Feistel network that walks its cycle until it lands inside, so nothing of size `size` is ever made.
    """
    assert 0 <= index < size
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    low = np.uint64((1 << int(half)) - 1)
    rotation = keys % np.uint64(size)
    value = (np.uint64(index) + rotation) % np.uint64(size)
    outside = np.arange(len(keys))
    while outside.size:
        walker, key = value[outside], keys[outside]
        left, right = walker >> half, walker & low
        for turn in range(_FEISTEL_ROUNDS):
            left, right = right, left ^ (hash64(key, turn, right) & low)
        walker = (left << half) | right
        value[outside] = walker
        outside = outside[walker >= size]
    return value.astype(np.int64)


def cut(lengths: ArrayLike, seq_len: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Examples of these many slots as pieces of at most seq_len: (example, start, length), each int64 [P].

    Examples without a slot (fewer than two tokens) have no piece.
    """
    slots = np.asarray(lengths, np.int64)
    num_pieces = -(-np.maximum(slots, 0) // seq_len)
    example = np.repeat(np.arange(slots.size), num_pieces)
    start = (np.arange(example.size) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)) * seq_len
    return example, start, np.minimum(slots[example] - start, seq_len)


def best_fit_decreasing(
    lengths: ArrayLike, capacity: int, *, most_bins: int | None = None, free: ArrayLike = ()
) -> tuple[NDArray[np.int64], int]:
    """Fits items into bins of `capacity`, longest first, each into the fullest bin that still takes it.

    free: int [bins], what is left in bins that are there already; most_bins: how many there may be in the end.
    Returns the bin of each item, int64 like `lengths`, -1 where none is left that takes it, and the number of bins.
    Lengths lie in 1 .. capacity.
    """
    sizes = np.asarray(lengths, np.int64)
    assert sizes.size == 0 or (sizes.min() >= 1 and sizes.max() <= capacity)
    order = np.argsort(-sizes, kind="stable")
    bin_of = np.full(sizes.size, -1, np.int64)
    bins_with: dict[int, list[int]] = {}
    left = np.asarray(free, np.int64).tolist()
    for at, gap in enumerate(left):
        bins_with.setdefault(gap, []).append(at)
    num_bins = len(left)
    gaps = sorted(bins_with)  # distinct free sizes
    for item, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        at = bisect.bisect_left(gaps, size)
        if at < len(gaps):
            gap = gaps[at]
            chosen = bins_with[gap].pop()
            if not bins_with[gap]:
                del bins_with[gap], gaps[at]
        elif num_bins == most_bins:
            continue
        else:
            chosen, gap = num_bins, capacity
            num_bins += 1
        bin_of[item] = chosen
        gap -= size
        if gap:
            if gap not in bins_with:
                bins_with[gap] = []
                bisect.insort(gaps, gap)
            bins_with[gap].append(chosen)
    return bin_of, num_bins


def _even_fit(
    sizes: NDArray[np.int64], capacity: int, num_bins: int, longest: int, tail: float
) -> NDArray[np.int64] | None:
    """Items up to `longest` each into the emptiest bin; None if they do not all fit.

    Best fit places the longer ones before, and after them the shortest, which fill the share `tail` of all slots.
    """
    order = np.argsort(-sizes, kind="stable")
    num_long = int((sizes > longest).sum())
    begin_tail = max(num_long, int(np.searchsorted(np.cumsum(sizes[order]), (1 - tail) * sizes.sum())))
    long, middle, short = order[:num_long], order[num_long:begin_tail], order[begin_tail:]
    bin_of = np.empty(sizes.size, np.int64)
    bin_of[long], _ = best_fit_decreasing(sizes[long], capacity, most_bins=num_bins)
    if (bin_of[long] < 0).any():
        return None
    free = np.full(num_bins, capacity, np.int64)
    np.subtract.at(free, bin_of[long], sizes[long])
    gaps = [(-gap, at) for at, gap in enumerate(free.tolist())]
    heapq.heapify(gaps)
    for item, size in zip(middle.tolist(), sizes[middle].tolist(), strict=True):
        gap, at = gaps[0]
        if gap + size > 0:
            return None
        heapq.heapreplace(gaps, (gap + size, at))
        bin_of[item] = at
    np.subtract.at(free, bin_of[middle], sizes[middle])
    bin_of[short], _ = best_fit_decreasing(sizes[short], capacity, most_bins=num_bins, free=free)
    return None if (bin_of[short] < 0).any() else bin_of


@dataclass(frozen=True)
class Layout:
    """Items in `num_bins` bins: int64 arrays, one entry a part, which is slots start .. stop - 1 of `item` in `bin`."""

    item: NDArray[np.int64]
    start: NDArray[np.int64]
    stop: NDArray[np.int64]
    bin: NDArray[np.int64]
    num_bins: int


def lay_out(lengths: ArrayLike, capacity: int, least_fill: float = 0.0) -> Layout:
    """As many bins as best-fit decreasing needs, or as few as fill `least_fill` of them, and then some items are cut.

    Lengths lie in 1 .. capacity; least_fill is a share below 1. Few items are cut, into the widest gaps first.
    """
    sizes = np.asarray(lengths, np.int64)
    bin_of, num_bins = best_fit_decreasing(sizes, capacity)
    target = -(-int(sizes.sum()) // max(1, int(least_fill * capacity))) if least_fill > 0 else num_bins
    if target < num_bins:
        num_bins = target
        bin_of, _ = best_fit_decreasing(sizes, capacity, most_bins=num_bins)
    else:
        # Best fit leaves the short items to the last bins, dozens in each, and the long ones alone in theirs. Weights
        # share a batch out among its examples, so they are even from batch to batch only if the bins are alike.
        for divisor, tail in itertools.product(_EVEN_BELOW, _TAILS):
            even = _even_fit(sizes, capacity, num_bins, capacity // divisor, tail)
            if even is not None:
                bin_of = even
                break
    whole = np.flatnonzero(bin_of >= 0)
    parts = [(int(i), 0, int(sizes[i]), int(bin_of[i])) for i in whole]
    free = np.full(num_bins, capacity, np.int64)
    np.subtract.at(free, bin_of[whole], sizes[whole])
    gaps = [(-int(gap), at) for at, gap in enumerate(free) if gap > 0]
    heapq.heapify(gaps)
    for item in np.flatnonzero(bin_of < 0).tolist():
        start = 0
        while start < sizes[item]:
            gap, at = heapq.heappop(gaps)
            stop = min(int(sizes[item]), start - gap)
            parts.append((item, start, stop, at))
            if stop - start < -gap:
                heapq.heappush(gaps, (gap + stop - start, at))
            start = stop
    columns = np.array(parts, np.int64).reshape(-1, 4).T
    return Layout(columns[0], columns[1], columns[2], columns[3], num_bins)


def fill(
    rows: Rows,
    examples: Sequence[Tokenized],
    scale: NDArray[np.float64],
    *,
    seq_len: int,
    text_size: int,
    mode: Packing,
) -> Batch:
    """The arrays of these rows, each [B, S], before any permutation of the slots.

    examples: the example of each piece of `rows`, in order. scale: float64 [P, M], the weight of one learned target of
    each piece by modality (`piece_scale`). Returns tokens, targets, positions, segment_ids, sources (the number of the
    slot's corpus) int32 and loss_weights float32; unused slots are 0 in all of them. `concat` makes one segment of a
    row, positions counting through it; the other modes start a segment per piece, positions counting from the piece's
    offset in its example.
    """
    num_rows, length = len(rows), rows.length
    total = int(length.sum())
    shape = (num_rows, seq_len)
    names = ("tokens", "targets", "positions", "segment_ids", "sources")
    batch: Batch = {name: np.zeros(shape, np.int32) for name in names}
    batch["loss_weights"] = np.zeros(shape, np.float32)
    if total == 0:
        return batch
    spans = list(zip(examples, rows.start.tolist(), (rows.start + length).tolist(), strict=True))
    # Piece p brings length[p] + 1 ids, so slot i of the run reads id i + p, and its target the id after.
    ids = np.concatenate([example.tokens[start : stop + 1] for example, start, stop in spans])
    learn = np.concatenate([example.learn[start + 1 : stop + 1] for example, start, stop in spans])
    piece = np.repeat(np.arange(length.size), length)
    slot = np.arange(total)
    targets = ids[slot + piece + 1]

    before = np.cumsum(length) - length  # slots before each piece in the run, then in its row
    row_of = np.repeat(np.arange(num_rows), np.diff(rows.offsets))
    row_begin = np.concatenate([before, [total]])[rows.offsets[:-1]]
    column = (slot - row_begin[row_of][piece]) + row_of[piece] * seq_len
    batch["tokens"].reshape(-1)[column] = ids[slot + piece]
    batch["targets"].reshape(-1)[column] = targets
    if mode == "concat":
        batch["positions"].reshape(-1)[column] = column % seq_len
        batch["segment_ids"].reshape(-1)[column] = 1
    else:
        batch["positions"].reshape(-1)[column] = slot + (rows.start - before)[piece]
        batch["segment_ids"].reshape(-1)[column] = (np.arange(length.size) - rows.offsets[row_of] + 1)[piece]
    batch["sources"].reshape(-1)[column] = rows.corpus[piece]
    weights = scale.reshape(-1)[piece * 2 + (targets >= text_size)]
    batch["loss_weights"].reshape(-1)[column] = np.where(learn, weights, 0.0)
    return batch


def learned_counts(example: Tokenized, start: int, stop: int, text_size: int) -> NDArray[np.int64]:
    """Learned targets in slots start .. stop - 1 of an example by modality, int64 [M]."""
    learn = example.learn[start + 1 : stop + 1]
    vision = int((learn & (example.tokens[start + 1 : stop + 1] >= text_size)).sum())
    return np.array([int(learn.sum()) - vision, vision], np.int64)


def piece_scale(
    in_example: NDArray[np.int64],
    in_piece: NDArray[np.int64],
    covered: NDArray[np.float64],
    text_only: NDArray[np.bool_],
    weighting: Weighting,
) -> NDArray[np.float64]:
    """The weight of one learned target of every piece of a global batch, by modality: float64 [P, M].

    in_example, in_piece: int64 [P, M], learned targets of the whole example, and of the piece. covered: [P], the
    piece's share of its example's slots. text_only: [P], whether the piece's corpus has no vision tokens at all.

    `example`: 1 / (2 E n(e, m)), and 1 / (E n(e)) for text-only corpora, n over the whole example, as in the padded
    loss L = 1/2 1/E sum_e [mean over e's vision targets + mean over e's text targets]. E is the number of examples
    in the batch, where a piece counts as the share of its example's weight that it carries:
    (sum_m in_piece / in_example) / (number of modalities e learns). So a whole example counts 1, an example all of
    whose pieces are in the batch counts 1, and one of which only the unlearned part is there counts 0: the weights of
    a batch never sum to more than 1. (An example without any learned target counts by its slots.)
    `token`: 1 / (learned targets in the batch), the plain mean.
    """
    if weighting == "token":
        return np.full(in_piece.shape, 1.0 / max(1, int(in_piece.sum())))
    learns = in_example > 0
    safe = np.maximum(in_example, 1)
    num_modalities = learns.sum(1)
    carried = (in_piece / safe).sum(1)
    share = np.where(num_modalities > 0, carried / np.maximum(num_modalities, 1), covered)
    num_examples = float(share.sum())
    if num_examples == 0.0:
        return np.zeros(in_piece.shape)
    return np.where(learns, 1.0 / (np.where(text_only, 1, 2)[:, None] * num_examples * safe), 0.0)
