"""Packing: pieces and bins, filled arrays slot by slot, and the weighted loss against the padded one."""

from __future__ import annotations

import dataclasses
import itertools
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.packing import (
    Rows,
    best_fit_decreasing,
    cut,
    fill,
    hash64,
    lay_out,
    learned_counts,
    piece_scale,
    shuffled,
)

TEXT_SIZE = 50


class Tokens(NamedTuple):
    tokens: np.ndarray
    learn: np.ndarray


def make_example(rng, num_tokens, vision=0.5, learned=0.6):
    is_vision = rng.random(num_tokens) < vision
    tokens = np.where(is_vision, rng.integers(TEXT_SIZE, 90, num_tokens), rng.integers(0, TEXT_SIZE, num_tokens))
    return Tokens(tokens.astype(np.int32), rng.random(num_tokens) < learned)


def make_rows(*rows):
    """Rows of (example, start, length) pieces of corpus 0."""
    pieces = np.array([piece for row in rows for piece in row], np.int64).reshape(-1, 3)
    offsets = np.cumsum([0] + [len(row) for row in rows]).astype(np.int64)
    return Rows(offsets, np.zeros(len(pieces), np.int64), pieces[:, 0], pieces[:, 1], pieces[:, 2])


def scale_of(rows, examples, weighting="example", text_only=False):
    whole = np.array([learned_counts(examples[e], 0, len(examples[e].tokens), TEXT_SIZE) for e in rows.example])
    part = np.array(
        [
            learned_counts(examples[e], s, s + n, TEXT_SIZE)
            for e, s, n in zip(rows.example, rows.start, rows.length, strict=True)
        ]
    )
    covered = rows.length / np.array([len(examples[e].tokens) - 1 for e in rows.example])
    return piece_scale(whole, part, covered, np.full(len(rows.example), text_only), weighting)


def fill_rows(rows, examples, seq_len, mode="masked", weighting="example", text_only=False):
    scale = scale_of(rows, examples, weighting, text_only)
    return fill(rows, [examples[e] for e in rows.example], scale, seq_len=seq_len, text_size=TEXT_SIZE, mode=mode)


def padded_loss(examples, nll, text_only=False):
    """The padded loss: every example alone in its row, nll[e][i] that of token i given those before it."""
    total = 0.0
    for example, losses in zip(examples, nll, strict=True):
        learn, vision = example.learn[1:], example.tokens[1:] >= TEXT_SIZE
        kinds = [learn] if text_only else [learn & ~vision, learn & vision]
        total += sum(losses[1:][kind].mean() for kind in kinds if kind.any()) / len(kinds)
    return total / len(examples)


def packed_loss(batch, rows, nll):
    """sum(weight * nll), the losses laid where the rows put their tokens."""
    losses = np.zeros(batch["loss_weights"].shape)
    for row in range(len(rows)):
        column = 0
        for piece in range(rows.offsets[row], rows.offsets[row + 1]):
            start, length = rows.start[piece], rows.length[piece]
            losses[row, column : column + length] = nll[rows.example[piece]][start + 1 : start + length + 1]
            column += length
    return float((batch["loss_weights"].astype(np.float64) * losses).sum())


def test_cut_covers_every_slot_once_in_order():
    example, start, length = cut([0, 3, 8, 9, 20], 8)
    assert example.tolist() == [1, 2, 3, 3, 4, 4, 4]
    assert start.tolist() == [0, 0, 0, 8, 0, 8, 16]
    assert length.tolist() == [3, 8, 8, 1, 8, 8, 4]


@given(st.lists(st.integers(1, 20), max_size=60), st.integers(20, 30))
@settings(deadline=None)
def test_best_fit_never_overfills_and_never_opens_a_needless_bin(sizes, capacity):
    bins, num_bins = best_fit_decreasing(sizes, capacity)
    used = np.bincount(bins, sizes, minlength=num_bins) if sizes else np.zeros(0)
    assert (used <= capacity).all()
    assert len(set(bins.tolist())) == num_bins
    # Any two bins together hold more than one could.
    assert all(a + b > capacity for a, b in itertools.combinations(used, 2))


@given(st.lists(st.integers(1, 10), min_size=1, max_size=7))
@settings(deadline=None, max_examples=50)
def test_best_fit_is_within_its_known_bound_of_the_best_possible(sizes):
    def fewest(rest, gaps):
        if not rest:
            return len(gaps)
        options = [
            fewest(rest[1:], (*gaps[:i], gap - rest[0], *gaps[i + 1 :])) for i, gap in enumerate(gaps) if gap >= rest[0]
        ]
        return min([*options, fewest(rest[1:], (*gaps, 10 - rest[0]))])

    _, num_bins = best_fit_decreasing(sizes, 10)
    assert num_bins <= 11 / 9 * fewest(tuple(sizes), ()) + 6 / 9


@given(st.lists(st.integers(1, 16), min_size=1, max_size=50), st.floats(0, 0.99))
@settings(deadline=None)
def test_layout_places_every_slot_once_and_fills_what_it_promises(sizes, least_fill):
    layout = lay_out(sizes, 16, least_fill)
    held = [np.zeros(size, int) for size in sizes]
    used = np.zeros(layout.num_bins, int)
    for item, start, stop, at in zip(layout.item, layout.start, layout.stop, layout.bin, strict=True):
        held[item][start:stop] += 1
        used[at] += stop - start
    assert all((item == 1).all() for item in held)
    assert (used <= 16).all()
    if least_fill:
        assert layout.num_bins <= -(-sum(sizes) // max(1, int(16 * least_fill)))


def test_bins_are_alike_where_they_can_be():
    sizes = np.clip(np.random.default_rng(0).lognormal(5.5, 0.9, 5000), 2, 4096).astype(int)
    plain, num_bins = best_fit_decreasing(sizes, 4096)
    layout = lay_out(sizes, 4096)
    assert layout.num_bins == num_bins
    assert np.bincount(layout.bin).std() < 0.3 * np.bincount(plain).std()


def test_layout_without_least_fill_cuts_nothing():
    layout = lay_out([9] * 10, 16)
    assert layout.num_bins == 10
    assert layout.start.tolist() == [0] * 10
    assert lay_out([9] * 10, 16, 0.9).num_bins < 8


@pytest.mark.parametrize("size", [1, 2, 3, 7, 128, 1000])
def test_shuffled_is_a_permutation_for_every_key(size):
    keys = hash64(5, np.arange(20))
    places = np.stack([shuffled(index, size, keys) for index in range(size)])
    assert (np.sort(places, axis=0) == np.arange(size)[:, None]).all()
    if size >= 128:
        assert len({tuple(column) for column in places.T}) == 20


def test_shuffled_is_uniform():
    places = shuffled(3, 10, hash64(1, np.arange(50_000)))
    counts = np.bincount(places, minlength=10)
    # chi-square with 9 degrees of freedom: 27.9 is passed once in a thousand.
    assert ((counts - 5000) ** 2 / 5000).sum() < 27.9


def test_shuffled_reaches_far_into_a_huge_range():
    places = shuffled(123_456_789, 1_000_000_007, hash64(9, np.arange(1000)))
    assert 0 <= places.min() < 2e7
    assert 9.8e8 < places.max() < 1_000_000_007


@pytest.mark.parametrize("mode", ["masked", "concat", "pad"])
def test_filled_arrays_slot_by_slot(mode):
    rng = np.random.default_rng(0)
    examples = [make_example(rng, n) for n in (5, 9, 24, 3)]
    rows = make_rows([(1, 0, 8), (0, 0, 4), (3, 0, 2)], [(2, 0, 16)], [], [(2, 16, 7), (0, 0, 4)])
    if mode == "pad":
        rows = make_rows([(1, 0, 8)], [(2, 0, 16)], [], [(2, 16, 7)])
    rows = dataclasses.replace(rows, corpus=np.arange(rows.example.size) % 3)
    scale = scale_of(rows, examples)
    batch = fill(rows, [examples[e] for e in rows.example], scale, seq_len=16, text_size=TEXT_SIZE, mode=mode)

    names = ("tokens", "targets", "positions", "segment_ids", "sources")
    expected = {name: np.zeros((4, 16), np.int32) for name in names}
    expected["loss_weights"] = np.zeros((4, 16), np.float32)
    for row in range(4):
        column = 0
        for segment, piece in enumerate(range(rows.offsets[row], rows.offsets[row + 1])):
            example, start = examples[rows.example[piece]], int(rows.start[piece])
            for i in range(start, start + int(rows.length[piece])):
                target = example.tokens[i + 1]
                expected["tokens"][row, column] = example.tokens[i]
                expected["targets"][row, column] = target
                expected["positions"][row, column] = column if mode == "concat" else i
                expected["sources"][row, column] = piece % 3
                expected["segment_ids"][row, column] = 1 if mode == "concat" else segment + 1
                if example.learn[i + 1]:
                    expected["loss_weights"][row, column] = scale[piece, int(target >= TEXT_SIZE)]
                column += 1
    assert batch.keys() == expected.keys()
    for name, array in expected.items():
        assert batch[name].dtype == array.dtype
        np.testing.assert_array_equal(batch[name], array, err_msg=name)


@pytest.mark.parametrize("text_only", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_packed_loss_equals_padded_loss(seed, text_only):
    rng = np.random.default_rng(seed)
    vision = 0.0 if text_only else 0.5
    examples = [make_example(rng, int(n), vision) for n in rng.integers(2, 30, 12)]
    if not text_only:
        # One example learns no text, one no vision, one nothing at all.
        examples[0] = examples[0]._replace(learn=examples[0].tokens >= TEXT_SIZE)
        examples[1] = examples[1]._replace(learn=examples[1].tokens < TEXT_SIZE)
    examples[2] = examples[2]._replace(learn=np.zeros(len(examples[2].tokens), bool))
    # Rows of 16 slots: the longer examples are cut, all their pieces are in the batch.
    example, start, length = cut([len(e.tokens) - 1 for e in examples], 16)
    bins, num_bins = best_fit_decreasing(length, 16)
    assert len(example) > len(examples)
    rows = make_rows(
        *[[(example[p], start[p], length[p]) for p in np.flatnonzero(bins == row)] for row in range(num_bins)]
    )
    nll = [rng.exponential(2.0, len(e.tokens)) for e in examples]
    batch = fill_rows(rows, examples, 16, text_only=text_only)
    assert packed_loss(batch, rows, nll) == pytest.approx(padded_loss(examples, nll, text_only), rel=1e-6)
    assert batch["loss_weights"].sum() <= 1 + 1e-6


def test_token_weighting_is_the_plain_mean():
    rng = np.random.default_rng(3)
    examples = [make_example(rng, n) for n in (9, 30, 12)]
    rows = make_rows([(0, 0, 8)], [(1, 0, 16)], [(1, 16, 13)], [(2, 0, 11)])
    nll = [rng.exponential(2.0, len(e.tokens)) for e in examples]
    learned = np.concatenate([losses[1:][e.learn[1:]] for e, losses in zip(examples, nll, strict=True)])
    batch = fill_rows(rows, examples, 16, weighting="token")
    assert packed_loss(batch, rows, nll) == pytest.approx(learned.mean(), rel=1e-6)


def test_a_piece_counts_as_the_weight_it_carries():
    rng = np.random.default_rng(4)
    whole, split = make_example(rng, 9), make_example(rng, 33)
    split = split._replace(learn=np.arange(33) > 20)  # the first piece of 16 slots learns nothing
    examples = [whole, split]
    alone = fill_rows(make_rows([(0, 0, 8)]), examples, 16)
    beside_unlearned = fill_rows(make_rows([(0, 0, 8)], [(1, 0, 16)]), examples, 16)
    np.testing.assert_array_equal(beside_unlearned["loss_weights"][0], alone["loss_weights"][0])
    # The second piece carries all of it, so it weighs what the whole example would.
    beside_learned = fill_rows(make_rows([(0, 0, 8)], [(1, 16, 16)]), examples, 16)
    np.testing.assert_allclose(beside_learned["loss_weights"][0], alone["loss_weights"][0] / 2, rtol=1e-6)
    assert beside_learned["loss_weights"].sum() == pytest.approx(1, rel=1e-6)


def test_a_batch_of_unlearned_pieces_weighs_nothing():
    examples = [make_example(np.random.default_rng(0), 33)._replace(learn=np.arange(33) > 20)]
    batch = fill_rows(make_rows([(0, 0, 16)]), examples, 16)
    assert not batch["loss_weights"].any()
    assert np.isfinite(batch["loss_weights"]).all()
