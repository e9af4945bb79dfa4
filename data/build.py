"""Writing corpora: a tensorflow-datasets builder in ArrayRecord, part by part, resumable and all or nothing.

A corpus is written beside its final place and renamed when whole, the manifest last, so that a directory that opens is
a corpus that was finished. Parts that are whole (`part.json` says so, written after them) survive a build that ends
early: the next one with the same input reads them back and goes on behind them. Where a part ends is decided by the
examples alone, so any process may write any of them (`write_shard`, for a cluster).
"""

from __future__ import annotations

import array
import contextlib
import errno
import functools
import itertools
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.corpus import (
    DATA_SET,
    FORMAT,
    MANIFEST,
    READ_ERRORS,
    VERSION,
    ContentDigest,
    Corpus,
    CorpusError,
    Part,
    errno_of,
    fingerprint_of,
    learned_targets,
    part_name,
    reason_of,
    sha256_of,
)
from data.examples import BadExample, TokenizedExample
from data.vocabulary import Vocabulary

__all__ = ["Corpus", "CorpusError", "Job", "begin_shards", "build_corpus", "write_shard"]

_LOCK, _JOB, _PART_DONE = "build.lock", "build.json", "part.json"
_SKIPPED, _DAMAGED = "skipped.jsonl", "damaged.jsonl"
_MAX_LISTED = 100
PART_TOKENS = 1 << 24

Item = TokenizedExample | BadExample
# Items from record number `first` on, each with the number of the record it was made from (rising, not always by one).
Items = Callable[[int], Iterable[tuple[int, Item]]]


@dataclass(frozen=True)
class Job:
    """What decides a corpus: name, ids, tokenizers (name -> fingerprint), any string that changes with its input."""

    name: str
    vocabulary: Vocabulary
    input_fingerprint: str
    tokenizers: Mapping[str, str]
    part_tokens: int = PART_TOKENS

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", self.name):
            raise ValueError(
                f"corpus name {self.name!r} must be letters, digits, '_', '-' or '.', starting with none of the last"
            )
        if self.part_tokens < 1:
            raise ValueError(f"part_tokens is {self.part_tokens}; it must be at least 1")

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "name": self.name,
            "vocabulary": self.vocabulary.to_dict(),
            "input_fingerprint": self.input_fingerprint,
            "tokenizers": dict(self.tokenizers),
        }


def build_corpus(
    directory: str | os.PathLike[str],
    name: str,
    examples: Iterable[Item] | Items,
    *,
    vocabulary: Vocabulary,
    input_fingerprint: str,
    tokenizers: Mapping[str, str] | None = None,
    part_tokens: int = PART_TOKENS,
    overwrite: bool = False,
    max_skipped_share: float = 0.1,
    progress: Callable[[int], None] | None = None,
) -> Corpus:
    """Writes `examples` as a corpus in `directory` and opens it; returns at once when it is already there and whole.

    examples: in order, the same ones every time; or a function that gives them from a record on (`Items`), so that a
        build that goes on need not make again what is written.
    input_fingerprint: any string that changes when the examples would (manifest, tokenizers, options); a finished
        corpus made from other input is an error unless `overwrite`.
    tokenizers: name -> fingerprint, kept in the manifest.
    part_tokens: tokens to a part, each one TFDS data set of one ArrayRecord file, and what a build that ends early can
        lose. A part is held in memory while it is written (TFDS without TensorFlow cannot spill to disk, and fails
        beyond 1 GB), about 10 bytes a token.
    max_skipped_share: BadExamples, and examples with no slot or no learned target, are left out and listed (in
        `skipped.jsonl`, the first in the manifest); CorpusError when they are more than this share of all.
    progress: called with the number of examples seen so far, after each.

    Errors in `examples` pass through. CorpusError (a ValueError) when nothing is left to write, or the directory
    cannot be written (full, not permitted, being built by another process).
    """
    path = Path(directory).absolute()
    job = Job(name, vocabulary, input_fingerprint, dict(tokenizers or {}), part_tokens)
    if not 0 <= max_skipped_share <= 1:
        raise ValueError(f"max_skipped_share is {max_skipped_share}; it must lie between 0 and 1")
    finished = _finished(path, name, input_fingerprint, overwrite)
    if finished is not None:
        return finished
    partial = partial_directory(path)
    try:
        with _claim(partial):
            # Another process may have finished it between the look above and the claim.
            finished = _finished(path, name, input_fingerprint, overwrite)
            if finished is not None:
                shutil.rmtree(partial, ignore_errors=True)
                return finished
            tally = _Tally(job, progress)
            try:
                _keep_whole_parts(partial, job, tally)
                _write_parts(partial, examples if callable(examples) else _numbered(examples), tally)
                _check_skipped(partial, tally, max_skipped_share)
                _write_manifest(partial, tally)
                _move_into_place(partial, path)
            except BaseException:
                if not tally.parts:
                    shutil.rmtree(partial, ignore_errors=True)
                raise
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "free some space" if full else "choose a writable directory"
        raise CorpusError(f"corpus {name!r} cannot be written at {path}: {reason_of(error)}; {advice}") from error
    return Corpus.open(path)


def partial_directory(directory: str | os.PathLike[str]) -> Path:
    """Where a corpus of `directory` is written before it is whole."""
    path = Path(directory).absolute()
    return path.with_name(f".{path.name}.partial")


def write_shard(
    directory: str | os.PathLike[str],
    job: Job,
    part: int,
    records: range,
    items: Callable[[range], Iterable[tuple[int, Item]]],
) -> int:
    """Writes part number `part` of a corpus, made of these records, unless it is there; returns its number of examples.

    For a cluster: `begin_shards` once, then shards in any order by any process, a shard again where its writer died,
    and `build_corpus` with the same input at the end, which finds all parts whole and puts the corpus in place.
    """
    partial = partial_directory(directory)
    done = _read_json(partial / part_name(part) / _PART_DONE)
    if done is not None:
        return int(done["examples"])
    tally = _Tally(job, None)
    examples = [example for _, example in tally.good(items(records))]
    # Two workers may be given the same shard: each writes its own, and the first to finish has it.
    mine = partial / f".{part_name(part)}.{os.getpid()}.{uuid.uuid4().hex}"
    _write_part(mine, examples, records, tally.losses(records))
    try:
        mine.rename(partial / part_name(part))
    except OSError:
        shutil.rmtree(mine)
        if _read_json(partial / part_name(part) / _PART_DONE) is None:
            raise
    return len(examples)


def begin_shards(
    directory: str | os.PathLike[str], job: Job, shards: Sequence[range], overwrite: bool = False
) -> Corpus | None:
    """Makes the directory that `write_shard` writes to, and keeps what is there of the same shards of the same job.

    Returns the finished corpus where there is one already. CorpusError as in `build_corpus`.
    """
    path = Path(directory).absolute()
    finished = _finished(path, job.name, job.input_fingerprint, overwrite)
    if finished is None:
        partial = partial_directory(path)
        with _claim(partial):
            same = _read_json(partial / _JOB) == job.to_json()
            kept = [_LOCK, _JOB] if same else [_LOCK]
            for index, records in enumerate(shards if same else ()):
                done = _read_json(partial / part_name(index) / _PART_DONE)
                if done is not None and (done["first"], done["next"]) == (records.start, records.stop):
                    kept.append(part_name(index))
            _clear(partial, kept, job)
    return finished


def _finished(path: Path, name: str, input_fingerprint: str, overwrite: bool) -> Corpus | None:
    """The corpus at `path` if it is whole and made from this input; None when there is something to build."""
    if not path.exists():
        return None
    if not path.is_dir() or (any(path.iterdir()) and not (path / MANIFEST).exists()):
        raise CorpusError(f"{path} exists and is not a corpus; choose another directory for corpus {name!r}")
    try:
        corpus = Corpus.open(path)
    except CorpusError:
        return None
    if corpus.name == name and corpus.manifest["input_fingerprint"] == input_fingerprint:
        return corpus
    if overwrite:
        return None
    raise CorpusError(
        f"{path} holds corpus {corpus.name!r} made from other input ({corpus.manifest['input_fingerprint'][:12]}, now "
        f"{name!r} from {input_fingerprint[:12]}); overwrite it or choose another directory"
    )


@contextlib.contextmanager
def _claim(partial: Path) -> Iterator[None]:
    """Makes `partial` this process's own until the block ends; the claim dies with its process."""
    import fcntl

    lock = partial / _LOCK
    while True:
        partial.mkdir(parents=True, exist_ok=True)
        with open(lock, "a+b") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CorpusError(f"{partial} is being written by another process; wait for it to end") from None
            # The owner before us may have moved or removed the directory after we opened the lock in it.
            if not (lock.exists() and os.path.samestat(os.stat(lock), os.fstat(handle.fileno()))):
                continue
            yield
            return


def _numbered(examples: Iterable[Item]) -> Items:
    return lambda first: itertools.islice(enumerate(examples), first, None)


def _keep_whole_parts(partial: Path, job: Job, tally: _Tally) -> None:
    """Counts in the parts that an earlier build of the same job finished, and removes everything else."""
    same = _read_json(partial / _JOB) == job.to_json()
    kept = [_LOCK, _JOB] if same else [_LOCK]
    for index in itertools.count():
        directory = partial / part_name(index)
        done = _read_json(directory / _PART_DONE) if same else None
        if done is None or done["first"] != tally.next_record or not tally.take_part(directory, done):
            break
        kept.append(directory.name)
    _clear(partial, kept, job)


def _clear(partial: Path, kept: Sequence[str], job: Job) -> None:
    """Leaves what is kept, and the name of the job."""
    for entry in partial.iterdir():
        if entry.name not in kept:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    if _JOB not in kept:
        _write_json(partial / _JOB, job.to_json())


class _Tally:
    """What is known of the examples so far: lengths, counts, a digest, what was left out, and the parts written."""

    def __init__(self, job: Job, progress: Callable[[int], None] | None) -> None:
        self.job = job
        self._progress = progress
        self.lengths = array.array("i")
        self.learned = array.array("i")
        self.counts = dict.fromkeys(("examples", "tokens", "vision_tokens", "learned", "skipped"), 0)
        # By the number of their record: examples left out, and those kept whose files were not whole.
        self.skipped: list[tuple[int, dict[str, str]]] = []
        self.damaged: list[tuple[int, dict[str, str]]] = []
        self.digest = ContentDigest()
        self.parts: list[int] = []
        self.next_record = 0

    def good(self, items: Iterable[tuple[int, Item]]) -> Iterator[tuple[int, TokenizedExample]]:
        """Passes usable examples on and counts them in; keeps apart what is left out."""
        seen = self.counts["examples"] + self.counts["skipped"]
        for done, (record, item) in enumerate(items, start=seen + 1):
            reason = item.reason if isinstance(item, BadExample) else self._take(item)
            if reason is not None:
                self.counts["skipped"] += 1
                self.skipped.append((record, {"id": item.id, "source": item.source, "reason": reason}))
            elif isinstance(item, TokenizedExample):
                if item.damage:
                    self.damaged.append((record, {"id": item.id, "source": item.source, "reason": item.damage}))
                yield record, item
            if self._progress is not None:
                self._progress(done)

    def take_part(self, directory: Path, done: Mapping[str, Any]) -> bool:
        """Counts in a part on disk; False where it cannot be read back."""
        examples: list[TokenizedExample] = []
        if done["examples"]:
            try:
                part = Part(directory)
                if len(part) != done["examples"]:
                    return False
                examples = part.read(range(len(part)))
            except READ_ERRORS:
                return False
        for example in examples:
            unusable = self._take(example)
            assert unusable is None, unusable
        self.skipped += [(int(done["next"]) - 1, record) for record in done["skipped"]]
        self.damaged += [(int(done["next"]) - 1, record) for record in done["damaged"]]
        self.counts["skipped"] += len(done["skipped"])
        self.parts.append(len(examples))
        self.next_record = int(done["next"])
        return True

    def losses(self, records: range) -> dict[str, list[dict[str, str]]]:
        """What these records lost."""
        return {
            name: [entry for number, entry in entries if number in records]
            for name, entries in (("skipped", self.skipped), ("damaged", self.damaged))
        }

    def _take(self, example: TokenizedExample) -> str | None:
        """Counts an example in, or says why it is left out."""
        tokens = example.tokens
        if tokens.size < 2:
            return f"{tokens.size} tokens; at least 2 are needed to predict one from another"
        vocabulary = self.job.vocabulary
        if int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary.size:
            raise ValueError(
                f"example {example.id!r} has ids {int(tokens.min())} .. {int(tokens.max())}; the vocabulary has "
                f"0 .. {vocabulary.size - 1}, so it was made with other tokenizers"
            )
        targets = learned_targets(example, vocabulary)
        if not any(targets):
            return "no learned target"
        self.lengths.append(tokens.size - 1)
        self.learned.extend(targets)
        self.counts["examples"] += 1
        self.counts["tokens"] += tokens.size
        self.counts["vision_tokens"] += int(vocabulary.is_vision(tokens).sum())
        self.counts["learned"] += sum(targets)
        self.digest.add(example)
        return None


def _write_parts(partial: Path, items: Items, tally: _Tally) -> None:
    good = tally.good(items(tally.next_record))
    # One example ahead, to know whether the one before was the last of its record.
    waiting = next(good, None)
    first = tally.next_record
    while waiting is not None:
        part: list[TokenizedExample] = []
        num_tokens, record = 0, waiting[0]
        while waiting is not None:
            over = num_tokens + len(waiting[1]) > tally.job.part_tokens
            if part and over and waiting[0] != record:
                break
            record, example = waiting
            part.append(example)
            num_tokens += len(example)
            waiting = next(good, None)
        stop = record + 1 if waiting is None else waiting[0]
        records = range(first, stop)
        _write_part(partial / part_name(len(tally.parts)), part, records, tally.losses(records))
        tally.parts.append(len(part))
        first = stop


def _check_skipped(partial: Path, tally: _Tally, max_skipped_share: float) -> None:
    seen = tally.counts["examples"] + tally.counts["skipped"]
    if tally.counts["skipped"] <= max_skipped_share * seen and tally.counts["examples"]:
        return
    # What was left out may be mended before the next try: only parts without any of it are kept.
    for index in range(_first_part_with_skips(partial, tally), len(tally.parts)):
        shutil.rmtree(partial / part_name(index))
        tally.parts.pop()
    reason = ""
    if tally.skipped:
        entry = tally.skipped[0][1]
        reason = f"; the first: {entry['id']!r}, {entry['reason']}"
    name = tally.job.name
    if not tally.counts["examples"]:
        raise CorpusError(f"corpus {name!r} would be empty: {seen} examples were given, none usable{reason}")
    raise CorpusError(
        f"corpus {name!r}: {tally.counts['skipped']} of {seen} examples are unusable, more than the allowed "
        f"{max_skipped_share:.0%}{reason}"
    )


def _first_part_with_skips(partial: Path, tally: _Tally) -> int:
    for index in range(len(tally.parts)):
        done = _read_json(partial / part_name(index) / _PART_DONE)
        if done is None or done["skipped"]:
            return index
    return len(tally.parts)


def _write_part(
    directory: Path, examples: Sequence[TokenizedExample], records: range, losses: Mapping[str, Any]
) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    if examples:
        _write_data_set(directory, examples)
    for file in directory.rglob("*"):
        if file.is_file():
            _flush(file)
    _write_json(
        directory / _PART_DONE, {"examples": len(examples), "first": records.start, "next": records.stop, **losses}
    )


def _write_data_set(directory: Path, examples: Sequence[TokenizedExample]) -> None:
    import tensorflow_datasets as tfds

    tfds.disable_progress_bar()
    downloads = directory / "downloads"
    builder = _builder_class()(examples, data_dir=str(directory))
    config = tfds.download.DownloadConfig(try_download_gcs=False, num_shards=1)
    try:
        builder.download_and_prepare(download_dir=str(downloads), download_config=config)
    except RuntimeError as error:
        # What the ArrayRecord writer raises, whatever the system's reason.
        raise OSError(errno_of(error), reason_of(error)) from error
    shutil.rmtree(downloads, ignore_errors=True)


@functools.cache
def _builder_class() -> Any:
    """The TFDS builder, made on first use because importing TFDS takes a while."""
    import tensorflow_datasets as tfds

    class Tokens(tfds.core.GeneratorBasedBuilder):
        """Token ids and learned flags of one part of a corpus, one record an example, in the order given."""

        name = DATA_SET
        VERSION = tfds.core.Version(VERSION)
        # Where TFDS would look for citations and checksums; searching for them needs a package TFDS does not require.
        pkg_dir_path = Path(__file__).parent
        code_path = None

        def __init__(self, examples: Sequence[TokenizedExample], *, data_dir: str) -> None:
            self._examples = examples
            super().__init__(data_dir=data_dir, file_format="array_record")

        def _info(self) -> Any:
            features = tfds.features.FeaturesDict(
                {
                    "tokens": tfds.features.Tensor(shape=(None,), dtype=np.int32, encoding="bytes"),
                    "learn": tfds.features.Tensor(shape=(None,), dtype=np.uint8, encoding="bytes"),
                    "id": tfds.features.Text(),
                    "source": tfds.features.Text(),
                }
            )
            return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

        def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
            return {"train": self._generate_examples()}

        def _generate_examples(self) -> Iterator[tuple[int, dict[str, Any]]]:
            for index, example in enumerate(self._examples):
                record = {"tokens": example.tokens, "learn": example.learn.astype(np.uint8)}
                yield index, {**record, "id": example.id, "source": example.source}

        def _log_download_bytes(self) -> None:
            """Nothing is downloaded; the caller reports progress."""

        _log_download_done = _log_download_bytes

    return Tokens


def _write_manifest(partial: Path, tally: _Tally) -> None:
    job = tally.job
    np.save(partial / "lengths.npy", np.asarray(tally.lengths, np.int32))
    np.save(partial / "learned.npy", np.asarray(tally.learned, np.int32).reshape(-1, 2))
    for name, entries in ((_SKIPPED, tally.skipped), (_DAMAGED, tally.damaged)):
        if entries:
            lines = (json.dumps(entry, ensure_ascii=False) for _, entry in entries)
            (partial / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    ours = (_LOCK, _JOB, _PART_DONE)
    files = sorted(file for file in partial.rglob("*") if file.is_file() and file.name not in ours)
    for file in files:
        _flush(file)
    manifest = {
        **job.to_json(),
        "fingerprint": fingerprint_of(job.name, job.vocabulary, job.tokenizers, tally.digest.hexdigest()),
        "counts": tally.counts,
        "parts": tally.parts,
        "skipped": [entry for _, entry in tally.skipped[:_MAX_LISTED]],
        "damaged": [entry for _, entry in tally.damaged[:_MAX_LISTED]],
        "files": {
            file.relative_to(partial).as_posix(): {"bytes": file.stat().st_size, "sha256": sha256_of(file)}
            for file in files
        },
    }
    _write_json(partial / MANIFEST, manifest)
    # From here on it is a corpus: nothing says any more that it was a build.
    for leftover in (partial / _JOB, *partial.glob(f"*/{_PART_DONE}")):
        leftover.unlink()


def _move_into_place(partial: Path, path: Path) -> None:
    old = path.with_name(f".{path.name}.replaced")
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
    partial.rename(path)
    # The lock moves along with the directory and goes last, so that nobody claims it half-way.
    (path / _LOCK).unlink(missing_ok=True)
    shutil.rmtree(old, ignore_errors=True)


def _write_json(file: Path, content: Any) -> None:
    """Whole or not at all: what reads it takes its being there for the mark of something finished."""
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    _flush(partial)
    partial.replace(file)


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _flush(file: Path) -> None:
    with open(file, "rb") as handle:
        os.fsync(handle.fileno())
