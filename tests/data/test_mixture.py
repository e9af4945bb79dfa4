"""Mixtures: every example once an epoch, shares over any run of rows, no replay, and how full the rows are."""

from __future__ import annotations

import hashlib
import time

import numpy as np
import pytest

from data.mixture import Mixture


def mixture(lengths, shares=None, *, seq_len=64, seed=0, **options):
    identities = {name: f"fingerprint of {name}" for name in lengths}
    shares = dict.fromkeys(lengths, 1.0) if shares is None else shares
    return Mixture(lengths, identities, shares, seq_len=seq_len, seed=seed, **options)


def chat_lengths(count, seed=0):
    """Short turns with a long tail, in slots, for rows of 4096."""
    return np.clip(np.random.default_rng(seed).lognormal(5.5, 0.9, count).astype(np.int32), 2, 4096)


def video_lengths(count, seed=0):
    """Clips of 1 to 16 frames of 257 tokens with a caption: two of 8 frames do not fit in 4096."""
    rng = np.random.default_rng(seed)
    frames = rng.choice([1, 2, 4, 8, 15], size=count, p=[0.2, 0.2, 0.2, 0.3, 0.1])
    return (257 * frames + rng.integers(10, 200, count)).astype(np.int32)


def same(a, b):
    return all(
        np.array_equal(getattr(a, name), getattr(b, name))
        for name in ("offsets", "corpus", "example", "start", "length")
    )


def test_rows_hold_whole_examples_and_never_overflow():
    lengths = np.random.default_rng(1).integers(1, 65, 5000)
    rows = mixture({"a": lengths}).rows(0, 3000)
    used = np.add.reduceat(rows.length, rows.offsets[:-1])
    assert (np.diff(rows.offsets) > 0).all()
    assert used.max() <= 64
    np.testing.assert_array_equal(rows.length, lengths[rows.example])
    assert not rows.start.any()


@pytest.mark.parametrize("packing", ["masked", "pad"])
def test_an_epoch_visits_every_example_once(packing):
    num_examples = 512 * 130 + 3 if packing == "pad" else 250_000
    lengths = np.random.default_rng(2).integers(1, 40, num_examples)
    plan = mixture({"a": lengths}, packing=packing)
    # An epoch is W windows, W the least that is enough for all examples.
    seen, orders, row = np.zeros(num_examples, int), [], 0
    for _ in range(2):
        start = row
        while seen.min() == 0:
            rows = plan.rows(row, plan.rows_per_window)
            np.add.at(seen, rows.example, 1)
            row += plan.rows_per_window
        orders.append(plan.rows(start, 600).example)
        # Repeats only where a row would have been empty, at most one a window here.
        assert (seen - 1).sum() <= (row - start) // plan.rows_per_window
        seen[:] = 0
    assert len(np.intersect1d(orders[0], orders[1])) < 0.1 * len(orders[0])
    if packing == "pad":
        assert (np.diff(plan.rows(0, 2000).offsets) == 1).all()


def test_a_small_corpus_repeats_evenly_in_a_new_order():
    lengths = np.random.default_rng(3).integers(1, 65, 1500)
    plan = mixture({"a": lengths})
    for num_windows in (1, 5, 20, 100):
        counts = np.bincount(plan.rows(0, num_windows * plan.rows_per_window).example, minlength=1500)
        assert abs(counts - counts.mean()).max() <= 4
    counts = np.bincount(plan.rows(0, 128 * plan.rows_per_window).example)
    assert counts.min() == counts.max()
    first = plan.rows(0, plan.rows_per_window).example
    assert all(
        not np.array_equal(first, plan.rows(w * plan.rows_per_window, plan.rows_per_window).example)
        for w in range(1, 10)
    )


def test_one_single_example_fills_every_row():
    rows = mixture({"a": np.array([5])}).rows(10**12, 100)
    assert rows.length.sum() > 0.98 * 100 * 60
    assert not rows.example.any()


def test_rows_depend_on_nothing_but_their_number():
    lengths = {"a": chat_lengths(3000) % 200 + 1, "b": chat_lengths(50, 1) % 64 + 1}
    whole = mixture(lengths).rows(0, 3000)
    fresh = mixture(lengths)
    assert same(fresh.rows(1700, 900), whole[1700:2600])
    assert same(fresh.rows(3, 1), whole[3:4])
    assert same(mixture(dict(reversed(lengths.items()))).rows(0, 3000), whole)
    assert len(fresh.rows(5, 0)) == 0
    assert not same(mixture(lengths, seed=1).rows(0, 3000), whole)
    other = Mixture(lengths, {"a": "changed", "b": "fingerprint of b"}, {"a": 1, "b": 1}, seq_len=64, seed=0)
    assert not same(other.rows(0, 3000), whole)


def test_the_plan_is_pinned():
    # Resuming relies on it. If this changes on purpose, raise data.loader.PLAN_FORMAT.
    lengths = {"a": np.arange(3000) * 7919 % 100 + 1, "b": np.arange(70) * 31 % 50 + 1}
    rows = mixture(lengths, {"a": 0.7, "b": 0.3}).rows(12345, 700)
    digest = hashlib.sha256()
    for array in (rows.offsets, rows.corpus, rows.example, rows.start, rows.length):
        digest.update(array.astype("<i8").tobytes())
    assert digest.hexdigest()[:16] == "ba69e115c471f279"


@pytest.mark.parametrize("packing", ["masked", "pad"])
@pytest.mark.parametrize("unit", ["tokens", "examples"])
def test_shares_hold_over_any_run_of_rows(unit, packing):
    lengths = {"chat": chat_lengths(20_000), "video": video_lengths(3000), "needles": np.full(40, 60), "book": [9000]}
    shares = {"chat": 5, "video": 3, "needles": 1, "book": 1}
    plan = mixture(lengths, shares, seq_len=4096, share_unit=unit, packing=packing)
    expected = np.array([shares[name] / 10 for name in plan.names])
    # A padded row is one example, and the largest shares of tokens come from a few dozen rows.
    count = 8000 if packing == "pad" else 1500
    for first in (0, 200, 777, 12_345, 90_001, 10**9):
        rows = plan.rows(first, count)
        whole = np.concatenate([np.asarray(lengths[name]) for name in plan.names])
        base = np.cumsum([0] + [len(lengths[name]) for name in plan.names])
        pieces = rows.length if unit == "tokens" else rows.length / whole[base[rows.corpus] + rows.example]
        found = np.bincount(rows.corpus, pieces, minlength=4)
        np.testing.assert_allclose(found / found.sum(), expected, atol=0.01)


def test_long_examples_are_cut_into_consecutive_pieces():
    lengths = np.array([1000, 64, 65, 10] * 50)
    plan = mixture({"a": lengths})
    rows = plan.rows(0, 20 * plan.rows_per_window)
    seen = [np.zeros(n, int) for n in lengths]
    for example, start, length in zip(rows.example, rows.start, rows.length, strict=True):
        assert start % 64 == 0
        assert length == min(64, lengths[example] - start)
        seen[example][start : start + length] += 1
    counts = np.concatenate(seen)
    assert counts.min() > 0
    assert abs(counts - counts.mean()).max() <= 4


def test_corpora_packed_apart_share_no_row():
    lengths = {"a": chat_lengths(3000) % 60 + 1, "b": chat_lengths(500, 1) % 30 + 1}
    joined, apart = mixture(lengths).rows(0, 500), mixture(lengths, join=False).rows(0, 500)
    num_kinds = [
        [len(np.unique(rows.corpus[a:b])) for a, b in zip(rows.offsets, rows.offsets[1:], strict=False)]
        for rows in (joined, apart)
    ]
    assert max(num_kinds[0]) == 2
    assert max(num_kinds[1]) == 1


def fill_of(plan, num_rows):
    return plan.rows(0, num_rows).length.sum() / (num_rows * plan.seq_len)


def test_how_full_the_rows_are():
    assert fill_of(mixture({"chat": chat_lengths(200_000)}, seq_len=4096), 20_000) > 0.995
    video = video_lengths(30_000)
    assert fill_of(mixture({"video": video}, seq_len=4096, least_fill=0.975), 5000) > 0.97
    # Nothing that fits is cut unless asked, and short text fills what clips leave.
    whole = mixture({"video": video}, seq_len=4096).rows(0, 5000)
    assert not whole.start.any()
    assert fill_of(mixture({"video": video, "chat": chat_lengths(30_000)}, seq_len=4096), 5000) > 0.99


def test_a_million_examples_are_planned_in_seconds():
    lengths = chat_lengths(1_000_000)
    begin = time.thread_time()
    plan = mixture({"a": lengths}, seq_len=4096)
    rows = plan.rows(0, int(lengths.sum() / 4096))
    assert time.thread_time() - begin < 10
    assert len(np.unique(rows.example)) > 990_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_len": 1}, "seq_len is 1; it must be at least 2"),
        ({"share_unit": "rows"}, "share_unit is 'rows'"),
        ({"least_fill": 1.0}, "least_fill is 1.0"),
        ({"shares": {}}, "shares is empty"),
        ({"shares": {"a": 1, "nobody": 1}}, "shares names the corpus 'nobody', which is not loaded"),
        ({"shares": {"a": 0}}, r"shares\.a is 0; it must be a positive number"),
        ({"shares": {"a": float("nan")}}, r"shares\.a is nan"),
        ({"lengths": {"a": np.zeros(0, np.int32)}}, "the corpus 'a' has no example of two tokens or more"),
        ({"lengths": {"a": np.zeros(3, np.int32)}}, "the corpus 'a' has no example of two tokens or more"),
    ],
)
def test_bad_input_is_one_clear_sentence(change, message):
    settings = {"lengths": {"a": np.array([3, 4])}, "shares": {"a": 1.0}, **change}
    with pytest.raises(ValueError, match=message) as caught:
        mixture(settings.pop("lengths"), settings.pop("shares"), **settings)
    assert "\n" not in str(caught.value)
