"""Loader: the same global batch however it is cut up or reached, its weights, prefetching, and bad input."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest

from data.corpus import DamagedExamples
from data.loader import Loader
from data.vocabulary import Vocabulary

VOCABULARY = Vocabulary(text_size=50, num_codes=30, vision_size=32)


class Tokens(NamedTuple):
    tokens: np.ndarray
    learn: np.ndarray


class MemoryCorpus:
    """A corpus in memory; `reads` counts the examples read."""

    def __init__(self, examples: Sequence[Tokens], fingerprint: str, vocabulary: Vocabulary = VOCABULARY) -> None:
        self.examples, self.fingerprint, self.vocabulary = examples, fingerprint, vocabulary
        self.lengths = np.array([len(e.tokens) - 1 for e in examples], np.int32)
        vision = [e.tokens[1:] >= vocabulary.text_size for e in examples]
        self.learned = np.array(
            [[(e.learn[1:] & ~v).sum(), (e.learn[1:] & v).sum()] for e, v in zip(examples, vision, strict=True)],
            np.int32,
        ).reshape(-1, 2)
        self.counts = {"vision_tokens": int(sum((e.tokens >= vocabulary.text_size).sum() for e in examples))}
        self.reads = 0

    def read(self, indices):
        self.reads += len(indices)
        return [self.examples[index] for index in indices]


def make_corpus(name, count, low, high, *, vision, learned=0.6, seed=0, vocabulary=VOCABULARY):
    rng = np.random.default_rng(seed)
    examples = []
    for num_tokens in rng.integers(low, high, count):
        ids = np.where(
            rng.random(num_tokens) < vision, rng.integers(50, 80, num_tokens), rng.integers(0, 50, num_tokens)
        )
        examples.append(Tokens(ids.astype(np.int32), rng.random(num_tokens) < learned))
    return MemoryCorpus(examples, f"fingerprint of {name}", vocabulary)


def make_corpora():
    return {
        "clips": make_corpus("clips", 60, 20, 60, vision=0.7, seed=1),
        "text": make_corpus("text", 200, 2, 20, vision=0.0, seed=2),
        "book": make_corpus("book", 3, 200, 300, vision=0.0, seed=3),
    }


SHARES = {"clips": 0.5, "text": 0.3, "book": 0.2}


def make_loader(corpora=None, shares=None, **settings):
    settings = {"seq_len": 64, "batch_rows": 4, "seed": 0, **settings}
    return Loader(make_corpora() if corpora is None else corpora, SHARES if shares is None else shares, **settings)


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def global_loss(loader, corpora, step, nll):
    """sum(weight * nll) of a batch, the losses laid where the plan puts their tokens."""
    plan, batch = loader.plan(step), loader.batch(step)
    losses = np.zeros(batch["tokens"].shape)
    for row in range(len(plan)):
        column = 0
        for p in range(plan.offsets[row], plan.offsets[row + 1]):
            start, length = plan.start[p], plan.length[p]
            losses[row, column : column + length] = nll[plan.corpus[p], plan.example[p]][start + 1 : start + length + 1]
            column += length
    return float((batch["loss_weights"].astype(np.float64) * losses).sum())


def padded_loss(loader, corpora, plan, nll):
    total = 0.0
    for c, e in zip(plan.corpus, plan.example, strict=True):
        corpus = corpora[loader.names[c]]
        example, losses = corpus.examples[e], nll[c, e][1:]
        learn, vision = example.learn[1:], example.tokens[1:] >= 50
        kinds = [learn & ~vision, learn & vision] if corpus.counts["vision_tokens"] else [learn]
        total += sum(losses[kind].mean() for kind in kinds if kind.any()) / len(kinds)
    return total / len(plan.example)


@pytest.mark.parametrize("packing", ["masked", "concat", "pad"])
def test_loss_of_a_batch_of_whole_examples_equals_the_padded_loss(packing):
    corpora = make_corpora()
    loader = make_loader(corpora, {"clips": 0.6, "text": 0.4}, packing=packing)
    rng = np.random.default_rng(0)
    nll = {
        (c, e): rng.exponential(2.0, len(example.tokens))
        for c, name in enumerate(loader.names)
        for e, example in enumerate(corpora[name].examples)
    }
    for step in (0, 7, 1000):
        loss = global_loss(loader, corpora, step, nll)
        assert loss == pytest.approx(padded_loss(loader, corpora, loader.plan(step), nll), rel=1e-6)


def test_weights_of_text_alone_sum_to_one_with_examples_cut_across_batches():
    corpora = {
        "text": make_corpus("text", 200, 2, 20, vision=0.0, learned=1.0),
        "book": make_corpus("book", 3, 200, 300, vision=0.0),
    }
    loader = make_loader(corpora, {"text": 1, "book": 1})
    plans = [loader.plan(step) for step in range(20)]
    assert any((plan.start > 0).any() for plan in plans)
    for step in range(20):
        assert loader.batch(step)["loss_weights"].sum() == pytest.approx(1, rel=1e-6)


def test_token_weighting_gives_every_learned_target_the_same():
    corpora = make_corpora()
    loader = make_loader(corpora, weighting="token")
    for step in range(5):
        plan, batch = loader.plan(step), loader.batch(step)
        num_learned = sum(
            int(corpora[loader.names[c]].examples[e].learn[s + 1 : s + n + 1].sum())
            for c, e, s, n in zip(plan.corpus, plan.example, plan.start, plan.length, strict=True)
        )
        weights = batch["loss_weights"]
        assert np.count_nonzero(weights) == num_learned
        np.testing.assert_allclose(weights[weights > 0], 1 / num_learned, rtol=1e-6)


def test_what_a_batch_is_made_of():
    loader = make_loader()
    batch, plan = loader.batch(3), loader.plan(3)
    padding = batch["segment_ids"] == 0
    for name, array in batch.items():
        assert array.shape == (4, 64)
        assert array.dtype == (np.float32 if name == "loss_weights" else np.int32)
        assert not array[padding].any()
    same_segment = (batch["segment_ids"][:, 1:] == batch["segment_ids"][:, :-1]) & ~padding[:, 1:]
    np.testing.assert_array_equal(batch["targets"][:, :-1][same_segment], batch["tokens"][:, 1:][same_segment])
    assert (np.diff(batch["positions"], axis=1)[same_segment] == 1).all()
    assert set(plan.corpus) == {0, 1, 2}, "this case is about three corpora"
    for row, sources in enumerate(batch["sources"]):
        pieces = slice(plan.offsets[row], plan.offsets[row + 1])
        expected = np.repeat(plan.corpus[pieces], plan.length[pieces])
        np.testing.assert_array_equal(sources[: expected.size], expected)


@pytest.mark.parametrize("weighting", ["example", "token"])
@pytest.mark.parametrize("packing", ["masked", "concat", "pad"])
def test_processes_fill_the_rows_of_one_global_batch(packing, weighting):
    settings = {"packing": packing, "weighting": weighting}
    for step in (0, 5, 400):
        whole = make_loader(**settings).batch(step)
        for process_count in (2, 4):
            parts = [
                make_loader(**settings, process_index=index, process_count=process_count).batch(step)
                for index in range(process_count)
            ]
            assert_same({name: np.concatenate([part[name] for part in parts]) for name in whole}, whole)
        assert_same(make_loader(**settings, rows=slice(1, 3)).batch(step), {k: v[1:3] for k, v in whole.items()})


@pytest.mark.parametrize("packing", ["masked", "concat"])
@pytest.mark.parametrize("shuffled", [False, True])
def test_processes_fill_their_part_of_the_sequence(packing, shuffled):
    order = np.random.default_rng(0).permutation(64) if shuffled else np.arange(64)
    whole = make_loader(packing=packing, permutation=order).batch(5)
    for rows, columns in ((None, slice(16, 48)), (slice(1, 3), slice(0, 8)), (slice(2, 4), slice(56, 64))):
        part = make_loader(packing=packing, permutation=order, rows=rows, columns=columns).batch(5)
        assert_same(part, {name: array[rows or slice(None), columns] for name, array in whole.items()})
    corpora = {"clips": make_corpora()["clips"]}
    loader = make_loader(corpora, {"clips": 1}, batch_rows=64, columns=slice(0, 4))
    loader.batch(0)
    # One piece of each row begins it; no piece is cut here.
    assert corpora["clips"].reads <= 64
    with pytest.raises(ValueError, match="columns is slice"):
        make_loader(columns=slice(4, 4))


def test_a_process_reads_only_its_rows_and_the_cut_examples():
    corpora = make_corpora()
    loader = make_loader(corpora, batch_rows=64, rows=slice(0, 1))
    loader.batch(0)
    row = loader.plan(0)[0:1]
    assert sum(corpus.reads for corpus in corpora.values()) <= len(row.example) + len(corpora["book"].examples)
    loader.batch(0)  # the second time all of it is kept
    assert sum(corpus.reads for corpus in corpora.values()) <= len(row.example) + len(corpora["book"].examples)


def test_the_permutation_moves_every_array():
    permutation = np.random.default_rng(0).permutation(64)
    plain, moved = make_loader().batch(2), make_loader(permutation=permutation).batch(2)
    assert_same(moved, {name: array[:, permutation] for name, array in plain.items()})


def test_fingerprint_covers_what_decides_the_batches_and_nothing_else():
    base = make_loader().fingerprint
    assert make_loader(permutation=np.arange(64)[::-1], process_index=1, process_count=2).fingerprint == base
    others: list[dict] = [
        {"seed": 1},
        {"seq_len": 32},
        {"batch_rows": 8},
        {"packing": "concat"},
        {"weighting": "token"},
        {"share_unit": "examples"},
        {"join": False},
        {"least_fill": 0.9},
        {"shares": {**SHARES, "book": 0.3}},
        {"corpora": {**make_corpora(), "book": make_corpus("other", 3, 200, 300, vision=0.0)}},
    ]
    assert len({base, *(make_loader(**other).fingerprint for other in others)}) == len(others) + 1


def test_efficiency_is_the_share_of_slots_that_hold_a_token():
    loader = make_loader()
    real = sum(int((loader.batch(step)["segment_ids"] > 0).sum()) for step in range(300))
    assert loader.efficiency(300) == pytest.approx(real / (300 * 4 * 64))


@pytest.mark.parametrize(("workers", "prefetch"), [(1, 2), (4, 4), (0, 0), (2, 0)])
def test_iterating_gives_the_batches_of_their_steps(workers, prefetch):
    loader, fresh = make_loader(), make_loader()
    with loader.iterate(11, prefetch, workers=workers) as batches:
        for step in range(11, 20):
            assert batches.next_step == step
            assert_same(next(batches), fresh.batch(step))
            assert 0 <= loader.last_wait_seconds < 60
    assert list(batches) == []


def test_iterating_stops_where_it_is_told():
    assert len(list(make_loader().iterate(3, stop_step=8))) == 5
    assert list(make_loader().iterate(3, stop_step=3)) == []


def count_threads():
    return sum("grain-prefetch" in thread.name for thread in threading.enumerate())


def wait_for_threads(at_most):
    deadline = time.monotonic() + 20
    while count_threads() > at_most and time.monotonic() < deadline:
        time.sleep(0.01)
    return count_threads()


def test_closing_ends_the_threads():
    before = count_threads()
    batches = make_loader().iterate(0, 3, workers=3)
    next(batches)
    assert count_threads() > before
    batches.close()
    batches.close()
    assert wait_for_threads(before) <= before


def test_what_goes_wrong_in_a_thread_reaches_the_caller():
    corpora = make_corpora()
    loader = make_loader(corpora)
    broken = ValueError("the corpus at clips is damaged")

    def fail(indices):
        raise broken

    before = count_threads()
    corpora["clips"].read = fail
    batches = loader.iterate(0, 2)
    with pytest.raises(ValueError, match="the corpus at clips is damaged"):
        next(batches)
    assert wait_for_threads(before) <= before


def test_damaged_examples_are_left_out_up_to_a_share():
    corpora = make_corpora()
    whole, read = make_loader().batch(1), corpora["text"].read
    plan = make_loader().plan(1)
    bad = int(plan.example[plan.corpus == 2][0])

    def damaged(indices):
        if bad in indices:
            raise DamagedExamples(f"examples {list(indices)} cannot be read")
        return read(indices)

    corpora["text"].read = damaged
    loader = make_loader(corpora, max_damaged=0.005)  # one of 200
    batch = loader.batch(1)
    assert loader.damaged == {("text", bad): f"examples [{bad}] cannot be read"}
    place = np.zeros(whole["tokens"].shape, bool)
    filled = np.arange(64) < np.add.reduceat(plan.length, plan.offsets[:-1])[:, None]
    place[filled] = np.repeat((plan.corpus == 2) & (plan.example == bad), plan.length)
    assert place.any()
    for name in ("tokens", "targets", "loss_weights"):
        assert not batch[name][place].any()
        np.testing.assert_array_equal(batch[name][~place], whole[name][~place], err_msg=name)
    message = "1 of the 200 examples of the corpus 'text' are damaged, and max_damaged is 0.004"
    with pytest.raises(ValueError, match=message):
        make_loader(corpora, max_damaged=0.004).batch(1)


def test_short_examples_are_filled_fast():
    corpus = make_corpus("short", 20_000, 20, 60, vision=0.5)
    loader = make_loader({"short": corpus}, {"short": 1}, seq_len=1024, batch_rows=8)
    loader.batch(0)
    # Processor time, the best of a few: other programs may be running.
    seconds = []
    for first in range(1, 51, 10):
        begin = time.thread_time()
        for step in range(first, first + 10):
            loader.batch(step)
        seconds.append(time.thread_time() - begin)
    assert 10 * 8192 / min(seconds) > 2e6


NO_TARGETS = make_corpus("silent", 5, 5, 9, vision=0.0, learned=0.0)
OTHER_IDS = make_corpus("other", 5, 5, 9, vision=0.0, vocabulary=Vocabulary(text_size=60))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shares": {"clips": 1, "clip": 1}}, "shares names the corpus 'clip', which is not loaded; .*'clips'"),
        ({"shares": {"clips": -1}}, r"shares\.clips is -1; it must be a positive number"),
        ({"corpora": {"a": MemoryCorpus([], "empty")}, "shares": {"a": 1}}, "'a' has no example of two tokens"),
        ({"corpora": {"a": NO_TARGETS}, "shares": {"a": 1}}, "'a' has no learned target in any of its 5 examples"),
        ({"corpora": {"a": NO_TARGETS, "b": OTHER_IDS}, "shares": {"a": 1, "b": 1}}, "different vocabularies"),
        ({"seq_len": 1}, "seq_len is 1; it must be at least 2"),
        ({"batch_rows": 0}, "batch_rows is 0"),
        ({"process_count": 3}, "batch_rows is 4, which 3 processes cannot share evenly; make it a multiple of 3"),
        ({"process_count": 2, "process_index": 2}, "process_index is 2 of process_count 2"),
        ({"rows": slice(2, 2)}, "rows is slice"),
        ({"packing": "dense"}, "packing is 'dense'; it must be one of masked, concat, pad"),
        ({"weighting": "row"}, "weighting is 'row'; it must be one of example, token"),
        ({"permutation": np.zeros(64, int)}, "permutation has shape"),
        ({"permutation": np.arange(32)}, "permutation has shape"),
    ],
)
def test_bad_input_is_one_clear_sentence(settings, message):
    with pytest.raises(ValueError, match=message) as caught:
        make_loader(**settings)
    assert "\n" not in str(caught.value)


def test_bad_steps_are_refused():
    loader = make_loader()
    with pytest.raises(ValueError, match="step is -1; the first step is 0"):
        loader.batch(-1)
    with pytest.raises(ValueError, match="start_step is -1; the first step is 0"):
        loader.iterate(-1)
    with pytest.raises(ValueError, match="prefetch is -1"):
        loader.iterate(0, -1)
    with pytest.raises(ValueError, match="num_steps is 0"):
        loader.efficiency(0)


def test_a_corpus_that_belies_its_lengths_is_named():
    corpora = make_corpora()
    corpora["clips"].lengths = corpora["clips"].lengths + 1
    with pytest.raises(ValueError, match="of the corpus 'clips' has .* build the corpus again"):
        make_loader(corpora, {"clips": 1}).batch(0)
