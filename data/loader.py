"""Global batch for step n, and this process's rows of it: a pure function of (corpora, settings, step).

State is the step and the loader's fingerprint; to resume is to ask for another step. What stands in which row comes
from `Mixture`; here it is read, filled in, weighted over the global batch and put in the layout's order.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from data.corpus import DamagedExamples
from data.mixture import Mixture, ShareUnit
from data.packing import Batch, Packing, Rows, Tokenized, Weighting, fill, learned_counts, piece_scale
from data.vocabulary import Vocabulary

PLAN_FORMAT = 1  # part of the fingerprint: raise it when the same settings would give other batches
_TOKENS_KEPT = 1 << 22
_STEPS_AT_ONCE = 256
_LAST_STEP = 1 << 40


class Corpus(Protocol):
    """What the loader needs of a corpus; `data.build.Corpus` is one.

    lengths: int [N], slots of each example (its tokens less one). learned: int [N, 2], its learned text and vision
    targets. counts["vision_tokens"]: 0 says that the corpus is text only. read: examples by index, in order;
    DamagedExamples where their records are not what was written.
    """

    @property
    def fingerprint(self) -> str: ...

    @property
    def vocabulary(self) -> Vocabulary: ...

    @property
    def lengths(self) -> NDArray[np.int32]: ...

    @property
    def learned(self) -> NDArray[np.int32]: ...

    @property
    def counts(self) -> Mapping[str, int]: ...

    def read(self, indices: Sequence[int]) -> Sequence[Tokenized]: ...


class Loader:
    """Batches of packed rows for any step.

    corpora: by name; all of one vocabulary (text-only ones may lack its vision half). shares: relative share of each
    corpus used. permutation: int [S], the order of the slots that is sharded (`ring.layout.permutation`), applied to
    every array. rows: the rows of the global batch to fill, by default this process's even part. columns: the run of
    slots (after the permutation) to fill, by default all; examples that have none of them are not read.
    packing: "masked" keeps examples of a row apart by segment; "concat" fits the same examples into the same rows as
    one segment; "pad" gives each a row. weighting: see `data.packing.piece_scale`; weights count the whole global
    batch whatever part is filled. join, least_fill: see `data.mixture.Mixture`. max_damaged: the share of a corpus's
    examples that may turn out to be damaged when they are read. Where one should stand is then padding that counts for
    nothing, and `damaged` has its corpus, its number and the reason.

    `fingerprint` (sha256) covers what decides the global batches; layout and number of processes are not in it.
    `last_wait_seconds` is how long the latest `next` of an iterator made them wait.
    ValueError, one sentence, for settings and corpora that cannot work.
    """

    def __init__(
        self,
        corpora: Mapping[str, Corpus],
        shares: Mapping[str, float],
        *,
        seq_len: int,
        batch_rows: int,
        seed: int,
        permutation: ArrayLike | None = None,
        packing: Packing = "masked",
        weighting: Weighting = "example",
        share_unit: ShareUnit = "tokens",
        join: bool = True,
        least_fill: float = 0.0,
        max_damaged: float = 0.0,
        process_index: int = 0,
        process_count: int = 1,
        rows: slice | None = None,
        columns: slice | None = None,
    ) -> None:
        if packing not in get_args(Packing):
            raise ValueError(f"packing is {packing!r}; it must be one of {', '.join(get_args(Packing))}")
        if weighting not in get_args(Weighting):
            raise ValueError(f"weighting is {weighting!r}; it must be one of {', '.join(get_args(Weighting))}")
        self.seq_len, self.batch_rows, self.packing, self.weighting = seq_len, batch_rows, packing, weighting
        self._rows = _own_rows(batch_rows, process_index, process_count, rows)
        self._mixture = Mixture(
            {name: corpus.lengths for name, corpus in corpora.items()},
            {name: corpus.fingerprint for name, corpus in corpora.items()},
            shares,
            seq_len=seq_len,
            seed=seed,
            packing=packing,
            share_unit=share_unit,
            join=join,
            least_fill=least_fill,
        )
        self.names = self._mixture.names
        self._corpora = [corpora[name] for name in self.names]
        self._text_size = _text_size(self.names, self._corpora)
        for name, corpus in zip(self.names, self._corpora, strict=True):
            if not (np.asarray(corpus.learned) > 0).any():
                raise ValueError(
                    f"the corpus {name!r} has no learned target in any of its {len(corpus.lengths)} examples; "
                    "mark what is to be learned when building it, or take it out of shares"
                )
        self._text_only = np.array([corpus.counts["vision_tokens"] == 0 for corpus in self._corpora])
        self._slots = _own_slots(_permutation(permutation, seq_len), seq_len, columns)
        self._records = _Records(self.names, self._corpora, max_damaged)
        self.last_wait_seconds = 0.0
        settings = {
            "plan": PLAN_FORMAT,
            "corpora": {name: corpus.fingerprint for name, corpus in zip(self.names, self._corpora, strict=True)},
            "shares": {name: float(shares[name]) for name in self.names},
            "seq_len": seq_len,
            "batch_rows": batch_rows,
            "seed": seed,
            "packing": packing,
            "weighting": weighting,
            "share_unit": share_unit,
            "join": join,
            "least_fill": float(least_fill),
        }
        self.fingerprint = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()

    @property
    def damaged(self) -> dict[tuple[str, int], str]:
        """(corpus, number of the example) -> why it could not be read, in the order met by this process."""
        return dict(self._records.damaged)

    def plan(self, step: int) -> Rows:
        """What stands in the rows of the global batch of `step`; corpora are numbered as in `names`."""
        _check_step("step", step)
        return self._mixture.rows(step * self.batch_rows, self.batch_rows)

    def batch(self, step: int) -> Batch:
        """This process's part of the global batch of `step`, 0 being the first.

        Returns tokens, targets, positions, segment_ids, sources (which of `names`; 0 in unused slots) int32 and
        loss_weights float32, each [rows, columns].
        """
        plan = self.plan(step)
        scale = self._scale(plan)
        mine = plan[self._rows]
        first = int(plan.offsets[self._rows.start])
        batch = fill(
            mine,
            self._examples(mine),
            scale[first : first + mine.example.size],
            seq_len=self.seq_len,
            text_size=self._text_size,
            mode=self.packing,
        )
        if self._slots is not None:
            batch = {name: array[:, self._slots] for name, array in batch.items()}
        return batch

    def _examples(self, rows: Rows) -> list[Tokenized]:
        """The example of every piece; a blank where this process has none of its slots."""
        if self._slots is None or self._slots.size == self.seq_len:
            return self._records.read(rows.corpus, rows.example)
        ours = np.zeros(self.seq_len + 1, np.int64)
        ours[self._slots + 1] = 1
        before = np.cumsum(ours)  # how many of a row's first slots are ours
        stop = np.cumsum(rows.length) - np.repeat(
            np.concatenate([[0], np.cumsum(rows.length)])[rows.offsets[:-1]], np.diff(rows.offsets)
        )
        (needed,) = np.nonzero(before[stop] > before[stop - rows.length])
        read = dict(zip(needed.tolist(), self._records.read(rows.corpus[needed], rows.example[needed]), strict=True))
        lasts = (rows.start + rows.length + 1).tolist()
        return [read.get(piece) or _Blank(last) for piece, last in enumerate(lasts)]

    def iterate(
        self, start_step: int = 0, prefetch: int = 2, *, stop_step: int | None = None, workers: int = 1
    ) -> Batches:
        """Batches of start_step, start_step + 1, ... made ahead of time, at most `prefetch`, in `workers` threads.

        Without stop_step it never ends; close it, or use it in a `with`, to stop the threads. prefetch=0 makes each
        batch when it is asked for. What goes wrong in a thread is raised by `next`.
        """
        _check_step("start_step", start_step)
        if prefetch < 0 or workers < 0:
            raise ValueError(f"prefetch is {prefetch} and workers is {workers}; neither may be below 0")
        stop = _LAST_STEP if stop_step is None else stop_step
        return Batches(self, start_step, max(start_step, stop), prefetch, workers)

    def efficiency(self, num_steps: int) -> float:
        """The share of the slots of the first `num_steps` global batches that hold a token, from lengths alone."""
        if num_steps < 1:
            raise ValueError(f"num_steps is {num_steps}; it must be at least 1")
        num_tokens = 0
        for step in range(0, num_steps, _STEPS_AT_ONCE):
            count = min(_STEPS_AT_ONCE, num_steps - step) * self.batch_rows
            num_tokens += int(self._mixture.rows(step * self.batch_rows, count).length.sum())
        return num_tokens / (num_steps * self.batch_rows * self.seq_len)

    def _scale(self, plan: Rows) -> NDArray[np.float64]:
        """Weight of a learned target of every piece of the global batch, by modality: float64 [P, 2]."""
        in_example = np.empty((plan.example.size, 2), np.int64)
        slots = np.empty(plan.example.size, np.int64)
        for c, corpus in enumerate(self._corpora):
            of_corpus = plan.corpus == c
            in_example[of_corpus] = corpus.learned[plan.example[of_corpus]]
            slots[of_corpus] = corpus.lengths[plan.example[of_corpus]]
        in_piece = in_example.copy()
        # Only examples cut to pieces need reading beyond this process's own rows.
        (cut,) = np.nonzero(plan.length < slots)
        examples = self._records.read(plan.corpus[cut], plan.example[cut])
        for piece, example in zip(cut.tolist(), examples, strict=True):
            start = int(plan.start[piece])
            in_piece[piece] = learned_counts(example, start, start + int(plan.length[piece]), self._text_size)
        return piece_scale(in_example, in_piece, plan.length / slots, self._text_only[plan.corpus], self.weighting)


class _Blank:
    """In place of an example that is not needed, or not there: any length, no memory."""

    def __init__(self, length: int) -> None:
        self.tokens = np.broadcast_to(np.int32(0), length)
        self.learn = np.broadcast_to(np.False_, length)


class Batches(Iterator[Batch]):
    """An iterator over batches with a name for its place: `next_step`. Closing it stops its threads."""

    def __init__(self, loader: Loader, start_step: int, stop_step: int, prefetch: int, workers: int) -> None:
        import grain  # it imports jax, which planning and building corpora do without

        self.next_step = start_step
        self._loader = loader
        options = grain.ReadOptions(num_threads=min(workers, prefetch), prefetch_buffer_size=prefetch)
        source: Any = _Steps(loader, start_step, stop_step)
        self._batches = iter(grain.MapDataset.source(source).to_iter_dataset(options))
        self._closed = False

    def __next__(self) -> Batch:
        if self._closed:
            raise StopIteration
        begin = time.perf_counter()
        try:
            batch = next(self._batches)
        except BaseException:
            self.close()
            raise
        self._loader.last_wait_seconds = time.perf_counter() - begin
        self.next_step += 1
        return batch

    def close(self) -> None:
        """Stops making batches; returns at once, and a batch under way is thrown away."""
        if not self._closed:
            self._closed = True
            self._batches.close()

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Steps:
    """A loader's batches as a random-access source."""

    def __init__(self, loader: Loader, start: int, stop: int) -> None:
        self._loader, self._start, self._stop = loader, start, stop

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, index: int) -> Batch:
        return self._loader.batch(self._start + index)

    def __repr__(self) -> str:
        return f"batches of {self._loader.fingerprint[:12]} from step {self._start}"


class _Records:
    """Examples by (corpus, index), those of a batch read together, the latest few million tokens kept."""

    def __init__(self, names: Sequence[str], corpora: Sequence[Corpus], max_damaged: float) -> None:
        self._names, self._corpora, self._max_damaged = names, corpora, max_damaged
        self.damaged: dict[tuple[str, int], str] = {}
        self._kept: OrderedDict[tuple[int, int], Tokenized] = OrderedDict()
        self._tokens_kept = 0
        self._lock = threading.Lock()

    def read(self, corpus: NDArray[np.int64], example: NDArray[np.int64]) -> list[Tokenized]:
        wanted = list(zip(corpus.tolist(), example.tolist(), strict=True))
        found: dict[tuple[int, int], Tokenized] = {}
        with self._lock:
            for key in wanted:
                record = self._kept.get(key)
                if record is not None:
                    self._kept.move_to_end(key)
                    found[key] = record
        missing = sorted(set(wanted) - found.keys())
        for c in sorted({c for c, _ in missing}):
            indices = [index for at, index in missing if at == c]
            records = self._read(c, indices)
            for index, record in zip(indices, records, strict=True):
                if len(record.tokens) - 1 != int(self._corpora[c].lengths[index]):
                    raise ValueError(
                        f"example {index} of the corpus {self._names[c]!r} has {len(record.tokens)} tokens where its "
                        f"lengths promise {int(self._corpora[c].lengths[index]) + 1}; build the corpus again"
                    )
                found[c, index] = record
        with self._lock:
            for key in missing:
                if key not in self._kept:
                    self._kept[key] = found[key]
                    self._tokens_kept += len(found[key].tokens)
            while self._tokens_kept > _TOKENS_KEPT:
                _, dropped = self._kept.popitem(last=False)
                self._tokens_kept -= len(dropped.tokens)
        return [found[key] for key in wanted]

    def _read(self, c: int, indices: list[int]) -> Sequence[Tokenized]:
        try:
            return self._corpora[c].read(indices)
        except DamagedExamples as error:
            if len(indices) > 1:
                return [record for index in indices for record in self._read(c, [index])]
            name, lengths = self._names[c], self._corpora[c].lengths
            with self._lock:
                self.damaged[name, indices[0]] = str(error)
                count = sum(corpus == name for corpus, _ in self.damaged)
            if count > self._max_damaged * len(lengths):
                raise DamagedExamples(
                    f"{count} of the {len(lengths)} examples of the corpus {name!r} are damaged, and max_damaged is "
                    f"{self._max_damaged:g}: {error}"
                ) from None
            return [_Blank(int(lengths[indices[0]]) + 1)]


def _own_rows(batch_rows: int, process_index: int, process_count: int, rows: slice | None) -> slice:
    if batch_rows < 1:
        raise ValueError(f"batch_rows is {batch_rows}; a batch needs at least 1 row")
    if rows is not None:
        first, stop, step = rows.indices(batch_rows)
        if step != 1 or first >= stop:
            raise ValueError(f"rows is {rows} of a batch of {batch_rows} rows; give a run of rows such as slice(0, 2)")
        return slice(first, stop)
    if process_count < 1 or not 0 <= process_index < process_count:
        raise ValueError(
            f"process_index is {process_index} of process_count {process_count}; it must be 0 .. process_count - 1"
        )
    if batch_rows % process_count:
        raise ValueError(
            f"batch_rows is {batch_rows}, which {process_count} processes cannot share evenly; make it a multiple of "
            f"{process_count}, or give each process its rows"
        )
    each = batch_rows // process_count
    return slice(process_index * each, (process_index + 1) * each)


def _text_size(names: Sequence[str], corpora: Sequence[Corpus]) -> int:
    """Where vision ids begin; ValueError when two corpora disagree about any id both could hold."""
    main = max(range(len(corpora)), key=lambda c: corpora[c].vocabulary.vision_size)
    expected = corpora[main].vocabulary
    for name, corpus in zip(names, corpora, strict=True):
        found = corpus.vocabulary
        if found.text_size != expected.text_size or (found.vision_size > 0 and found != expected):
            raise ValueError(
                f"the corpora {names[main]!r} and {name!r} have different vocabularies ({expected} and {found}); "
                "build both with the same tokenizers"
            )
    return expected.text_size


def _permutation(permutation: ArrayLike | None, seq_len: int) -> NDArray[np.int64] | None:
    if permutation is None:
        return None
    order = np.asarray(permutation)
    if order.shape != (seq_len,) or not np.array_equal(np.sort(order), np.arange(seq_len)):
        raise ValueError(
            f"permutation has shape {order.shape}; it must hold every slot 0 .. {seq_len - 1} of a row of seq_len "
            f"{seq_len} once"
        )
    return None if np.array_equal(order, np.arange(seq_len)) else order.astype(np.int64)


def _own_slots(order: NDArray[np.int64] | None, seq_len: int, columns: slice | None) -> NDArray[np.int64] | None:
    """The slots this process has, in the order it has them; None for all as they stand."""
    if columns is None:
        return order
    first, stop, step = columns.indices(seq_len)
    if step != 1 or first >= stop:
        raise ValueError(f"columns is {columns} of rows of {seq_len} slots; give a run of slots such as slice(0, 2)")
    return (np.arange(seq_len) if order is None else order)[first:stop]


def _check_step(name: str, step: int) -> None:
    if step < 0:
        raise ValueError(f"{name} is {step}; the first step is 0")
