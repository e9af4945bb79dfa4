"""Tokenized corpora on disk: a tensorflow-datasets builder writing ArrayRecord, and the reader.

A corpus directory holds `part-00000/tokens/1.0.0/` and so on (each a TFDS data set that `tfds.builder_from_directory`
opens), `lengths.npy`, `learned.npy` and `manifest.json`. It is written beside its final place and renamed when whole,
the manifest last, so that a directory that opens is a corpus that was finished.
"""

from __future__ import annotations

import array
import contextlib
import errno
import functools
import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.examples import BadExample, TokenizedExample
from data.vocabulary import Vocabulary

FORMAT = 1
_MANIFEST = "manifest.json"
_LOCK = "build.lock"
_DATA_SET = "tokens"
_VERSION = "1.0.0"
_MAX_LISTED = 100


class CorpusError(ValueError):
    """A corpus that cannot be written, opened or read; the message names the directory and says what to do."""


class Corpus:
    """A finished corpus: random access to its examples, and everything packing needs without reading them.

    name: what mixtures call it. fingerprint: sha256 of its content, name, vocabulary and tokenizers.
    lengths: int32 [N], slots each example takes in a packed row (its tokens less one).
    learned: int32 [N, 2], learned targets of each example, text and vision.
    counts: totals (examples, tokens, vision_tokens, learned, skipped). tokenizers: name -> fingerprint.
    """

    def __init__(self, directory: Path, manifest: Mapping[str, Any]) -> None:
        self.directory = directory
        self.manifest = manifest
        self.name: str = manifest["name"]
        self.fingerprint: str = manifest["fingerprint"]
        self.vocabulary = Vocabulary(**manifest["vocabulary"])
        self.tokenizers: dict[str, str] = dict(manifest["tokenizers"])
        self.counts: dict[str, int] = dict(manifest["counts"])
        self.lengths: NDArray[np.int32] = np.load(directory / "lengths.npy", mmap_mode="r")
        self.learned: NDArray[np.int32] = np.load(directory / "learned.npy", mmap_mode="r")
        self._starts = np.cumsum([0, *manifest["parts"]])[:-1]
        self._sources: dict[int, Any] = {}

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> Corpus:
        """Opens a finished corpus; CorpusError (a ValueError) when it is missing, unfinished, cut or not a corpus."""
        path = Path(directory)
        if not path.is_dir():
            raise CorpusError(f"no corpus at {path}: there is no such directory; build it first or correct the path")
        try:
            manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CorpusError(f"{path} holds no finished corpus (no {_MANIFEST}); build it again") from None
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise CorpusError(f"the corpus at {path} has an unreadable {_MANIFEST} ({error}); build it again") from None
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            found = manifest.get("format") if isinstance(manifest, dict) else type(manifest).__name__
            raise CorpusError(f"the corpus at {path} has format {found!r}, this version reads {FORMAT}; build it again")
        try:
            for relative, record in manifest["files"].items():
                file = path / relative
                size = file.stat().st_size if file.is_file() else None
                if size != record["bytes"]:
                    state = "missing" if size is None else f"{size} bytes instead of {record['bytes']}"
                    raise CorpusError(f"the corpus at {path} is damaged: {relative} is {state}; build it again")
            corpus = cls(path, manifest)
        except (KeyError, TypeError, AttributeError) as error:
            raise CorpusError(f"the corpus at {path} has a malformed {_MANIFEST} ({error!r}); build it again") from None
        except OSError as error:
            raise CorpusError(f"the corpus at {path} cannot be read: {_reason(error)}") from None
        if not len(corpus.lengths) == len(corpus.learned) == corpus.counts["examples"]:
            raise CorpusError(
                f"the corpus at {path} lists {corpus.counts['examples']} examples but {len(corpus.lengths)} lengths; "
                "build it again"
            )
        return corpus

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> TokenizedExample:
        """Example `index` (0 .. len - 1) in the order it was built; IndexError outside."""
        return self.read([index])[0]

    def read(self, indices: Sequence[int]) -> list[TokenizedExample]:
        """Several examples at once, in the order asked for."""
        wanted = [int(index) for index in indices]
        for index in wanted:
            if not 0 <= index < len(self):
                raise IndexError(f"corpus {self.name} has examples 0 .. {len(self) - 1}, not {index}")
        try:
            records = self._records(wanted)
        except (RuntimeError, ValueError, OSError, IndexError) as error:
            raise CorpusError(
                f"the corpus at {self.directory} is damaged: examples {wanted[:4]} cannot be read "
                f"({_reason(error)}); build it again"
            ) from None
        return [
            TokenizedExample(
                tokens=record["tokens"],
                learn=np.asarray(record["learn"], np.bool_),
                id=_text(record["id"]),
                source=_text(record["source"]),
            )
            for record in records
        ]

    def verify(self) -> None:
        """Reads everything back: file checksums, then every example against the fingerprint. CorpusError if not so."""
        for relative, record in self.manifest["files"].items():
            if _sha256(self.directory / relative) != record["sha256"]:
                raise CorpusError(f"the corpus at {self.directory} is damaged: {relative} has changed; build it again")
        digest = _ContentDigest()
        for index in range(len(self)):
            digest.add(self[index])
        if _fingerprint(self.name, self.vocabulary, self.tokenizers, digest.hexdigest()) != self.fingerprint:
            raise CorpusError(f"the corpus at {self.directory} does not match its fingerprint; build it again")

    def _records(self, wanted: Sequence[int]) -> list[Any]:
        """TFDS records of the examples asked for, read part by part."""
        parts = np.searchsorted(self._starts, wanted, side="right") - 1
        records: list[Any] = [None] * len(wanted)
        for part in np.unique(parts):
            (places,) = np.nonzero(parts == part)
            within = [wanted[int(place)] - int(self._starts[part]) for place in places]
            for place, record in zip(places, self._source(int(part)).__getitems__(within), strict=True):
                records[place] = record
        return records

    def _source(self, part: int) -> Any:
        if part not in self._sources:
            import tensorflow_datasets as tfds

            builder = tfds.builder_from_directory(str(self.directory / _part_name(part) / _DATA_SET / _VERSION))
            self._sources[part] = builder.as_data_source(split="train")
        return self._sources[part]

    def __reduce__(self) -> tuple[Callable[[str], Corpus], tuple[str]]:
        return Corpus.open, (str(self.directory),)

    def __repr__(self) -> str:
        return f"Corpus({self.name!r}, {len(self)} examples, {str(self.directory)!r})"


def build_corpus(
    directory: str | os.PathLike[str],
    name: str,
    examples: Iterable[TokenizedExample | BadExample],
    *,
    vocabulary: Vocabulary,
    input_fingerprint: str,
    tokenizers: Mapping[str, str] | None = None,
    part_tokens: int = 1 << 24,
    overwrite: bool = False,
    max_skipped_share: float = 0.1,
    progress: Callable[[int], None] | None = None,
) -> Corpus:
    """Writes `examples` as a corpus in `directory` and opens it; returns at once when it is already there and whole.

    input_fingerprint: any string that changes when the examples would (manifest, tokenizers, options); a finished
        corpus made from other input is an error unless `overwrite`.
    tokenizers: name -> fingerprint, kept in the manifest.
    part_tokens: tokens to a part, each one TFDS data set of one ArrayRecord file. A part is held in memory while it is
        written (TFDS without TensorFlow cannot spill to disk, and fails beyond 1 GB), about 10 bytes a token.
    max_skipped_share: BadExamples, and examples with no slot or no learned target, are left out and listed in the
        manifest; CorpusError when they are more than this share of all.
    progress: called with the number of examples seen so far, after each.

    Errors in `examples` pass through. CorpusError (a ValueError) when nothing is left to write, or the directory
    cannot be written (full, not permitted, being built by another process).
    """
    path = Path(directory).absolute()
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
        raise ValueError(
            f"corpus name {name!r} must be letters, digits, '_', '-' or '.', starting with none of the last"
        )
    if not 0 <= max_skipped_share <= 1:
        raise ValueError(f"max_skipped_share is {max_skipped_share}; it must lie between 0 and 1")
    if part_tokens < 1:
        raise ValueError(f"part_tokens is {part_tokens}; it must be at least 1")
    finished = _finished(path, name, input_fingerprint, overwrite)
    if finished is not None:
        return finished
    partial = path.with_name(f".{path.name}.partial")
    try:
        with _claim(partial):
            # Another process may have finished it between the look above and the claim.
            finished = _finished(path, name, input_fingerprint, overwrite)
            if finished is not None:
                shutil.rmtree(partial, ignore_errors=True)
                return finished
            try:
                feed = _write_parts(partial, name, examples, vocabulary, part_tokens, max_skipped_share, progress)
                _write_manifest(partial, name, vocabulary, input_fingerprint, dict(tokenizers or {}), feed)
                _move_into_place(partial, path)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "free some space" if full else "choose a writable directory"
        raise CorpusError(f"corpus {name!r} cannot be written at {path}: {_reason(error)}; {advice}") from error
    return Corpus.open(path)


def _finished(path: Path, name: str, input_fingerprint: str, overwrite: bool) -> Corpus | None:
    """The corpus at `path` if it is whole and made from this input; None when there is something to build."""
    if not path.exists():
        return None
    if not path.is_dir() or (any(path.iterdir()) and not (path / _MANIFEST).exists()):
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
    """Makes `partial` empty and this process's own until the block ends; the claim dies with its process."""
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
            for entry in partial.iterdir():
                if entry.is_dir():
                    shutil.rmtree(entry)
                elif entry.name != _LOCK:
                    entry.unlink()
            yield
            return


class _Feed:
    """Passes good examples on, keeping their lengths and a digest; keeps apart what it left out and what went wrong."""

    def __init__(
        self,
        examples: Iterable[TokenizedExample | BadExample],
        vocabulary: Vocabulary,
        progress: Callable[[int], None] | None,
    ) -> None:
        self._examples = examples
        self._vocabulary = vocabulary
        self._progress = progress
        self.lengths = array.array("i")
        self.learned = array.array("i")
        self.counts = dict.fromkeys(("examples", "tokens", "vision_tokens", "learned", "skipped"), 0)
        self.skipped: list[dict[str, str]] = []
        self.digest = _ContentDigest()
        self.parts: list[int] = []

    def __iter__(self) -> Iterator[TokenizedExample]:
        for done, example in enumerate(self._examples, start=1):
            reason = example.reason if isinstance(example, BadExample) else self._take(example)
            if reason is not None:
                self.counts["skipped"] += 1
                if len(self.skipped) < _MAX_LISTED:
                    self.skipped.append({"id": example.id, "source": example.source, "reason": reason})
            elif isinstance(example, TokenizedExample):
                yield example
            if self._progress is not None:
                self._progress(done)

    def _take(self, example: TokenizedExample) -> str | None:
        """Counts an example in, or says why it is left out."""
        tokens, learn = example.tokens, example.learn
        if tokens.size < 2:
            return f"{tokens.size} tokens; at least 2 are needed to predict one from another"
        if int(tokens.min()) < 0 or int(tokens.max()) >= self._vocabulary.size:
            raise ValueError(
                f"example {example.id!r} has ids {int(tokens.min())} .. {int(tokens.max())}; the vocabulary has "
                f"0 .. {self._vocabulary.size - 1}, so it was made with other tokenizers"
            )
        vision = self._vocabulary.is_vision(tokens)
        # The first token is never a target: nothing stands before it.
        text_targets = int((learn & ~vision)[1:].sum())
        vision_targets = int((learn & vision)[1:].sum())
        if text_targets + vision_targets == 0:
            return "no learned target"
        self.lengths.append(tokens.size - 1)
        self.learned.extend((text_targets, vision_targets))
        self.counts["examples"] += 1
        self.counts["tokens"] += tokens.size
        self.counts["vision_tokens"] += int(vision.sum())
        self.counts["learned"] += text_targets + vision_targets
        self.digest.add(example)
        return None


def _write_parts(
    partial: Path,
    name: str,
    examples: Iterable[TokenizedExample | BadExample],
    vocabulary: Vocabulary,
    part_tokens: int,
    max_skipped_share: float,
    progress: Callable[[int], None] | None,
) -> _Feed:
    feed = _Feed(examples, vocabulary, progress)
    good = iter(feed)
    # One example ahead, because TFDS refuses a data set without any.
    waiting = list(itertools.islice(good, 1))
    while waiting:
        part = list(_take_part(waiting, good, part_tokens))
        feed.parts.append(len(part))
        _write_part(partial, len(feed.parts) - 1, part)
    seen = feed.counts["examples"] + feed.counts["skipped"]
    first = f"; the first: {feed.skipped[0]['id']!r}, {feed.skipped[0]['reason']}" if feed.skipped else ""
    if feed.counts["examples"] == 0:
        raise CorpusError(f"corpus {name!r} would be empty: {seen} examples were given, none usable{first}")
    if feed.counts["skipped"] > max_skipped_share * seen:
        raise CorpusError(
            f"corpus {name!r}: {feed.counts['skipped']} of {seen} examples are unusable, more than the allowed "
            f"{max_skipped_share:.0%}{first}"
        )
    np.save(partial / "lengths.npy", np.asarray(feed.lengths, np.int32))
    np.save(partial / "learned.npy", np.asarray(feed.learned, np.int32).reshape(-1, 2))
    return feed


def _take_part(
    waiting: list[TokenizedExample], good: Iterator[TokenizedExample], part_tokens: int
) -> Iterator[TokenizedExample]:
    """Examples until they hold `part_tokens`, at least one; the one too many stays in `waiting`."""
    num_tokens = 0
    while waiting:
        if num_tokens and num_tokens + len(waiting[0]) > part_tokens:
            return
        example = waiting.pop()
        num_tokens += len(example)
        yield example
        waiting.extend(itertools.islice(good, 1))


def _write_part(partial: Path, index: int, examples: Sequence[TokenizedExample]) -> None:
    import tensorflow_datasets as tfds

    tfds.disable_progress_bar()
    directory = partial / _part_name(index)
    downloads = directory / "downloads"
    builder = _builder_class()(examples, data_dir=str(directory))
    config = tfds.download.DownloadConfig(try_download_gcs=False, num_shards=1)
    try:
        builder.download_and_prepare(download_dir=str(downloads), download_config=config)
    except RuntimeError as error:
        # What the ArrayRecord writer raises, whatever the system's reason.
        raise OSError(_errno_of(error), _reason(error)) from error
    shutil.rmtree(downloads, ignore_errors=True)


@functools.cache
def _builder_class() -> Any:
    """The TFDS builder, made on first use because importing TFDS takes a while."""
    import tensorflow_datasets as tfds

    class Tokens(tfds.core.GeneratorBasedBuilder):
        """Token ids and learned flags of one part of a corpus, one record an example, in the order given."""

        name = _DATA_SET
        VERSION = tfds.core.Version(_VERSION)
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


def _part_name(index: int) -> str:
    return f"part-{index:05d}"


def _write_manifest(
    partial: Path, name: str, vocabulary: Vocabulary, input_fingerprint: str, tokenizers: dict[str, str], feed: _Feed
) -> None:
    files = sorted(file for file in partial.rglob("*") if file.is_file() and file.name != _LOCK)
    for file in files:
        _flush(file)
    manifest = {
        "format": FORMAT,
        "name": name,
        "fingerprint": _fingerprint(name, vocabulary, tokenizers, feed.digest.hexdigest()),
        "input_fingerprint": input_fingerprint,
        "vocabulary": vocabulary.to_dict(),
        "tokenizers": tokenizers,
        "counts": feed.counts,
        "parts": feed.parts,
        "skipped": feed.skipped,
        "files": {
            file.relative_to(partial).as_posix(): {"bytes": file.stat().st_size, "sha256": _sha256(file)}
            for file in files
        },
    }
    path = partial / _MANIFEST
    path.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    _flush(path)


def _move_into_place(partial: Path, path: Path) -> None:
    old = path.with_name(f".{path.name}.replaced")
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
    partial.rename(path)
    # The lock moves along with the directory and goes last, so that nobody claims it half-way.
    (path / _LOCK).unlink(missing_ok=True)
    shutil.rmtree(old, ignore_errors=True)


class _ContentDigest:
    """sha256 over ids, sources, tokens and learned flags, in order."""

    def __init__(self) -> None:
        self._sha = hashlib.sha256()

    def add(self, example: TokenizedExample) -> None:
        head = json.dumps([example.id, example.source, int(example.tokens.size)])
        self._sha.update(head.encode())
        self._sha.update(example.tokens.astype("<i4", copy=False).tobytes())
        self._sha.update(np.packbits(example.learn).tobytes())

    def hexdigest(self) -> str:
        return self._sha.hexdigest()


def _fingerprint(name: str, vocabulary: Vocabulary, tokenizers: Mapping[str, str], content: str) -> str:
    facts = {"format": FORMAT, "name": name, "vocabulary": vocabulary.to_dict(), "tokenizers": dict(tokenizers)}
    return hashlib.sha256(json.dumps({**facts, "content": content}, sort_keys=True).encode()).hexdigest()


def _sha256(file: Path) -> str:
    with open(file, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _flush(file: Path) -> None:
    with open(file, "rb") as handle:
        os.fsync(handle.fileno())


def _text(value: bytes | str) -> str:
    return value.decode("utf-8") if isinstance(value, bytes) else value


def _errno_of(error: BaseException) -> int:
    """The writer's C++ errors carry the system's reason as text only."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    known = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EFBIG)
    return next((code for code in known if os.strerror(code) in str(error)), errno.EIO)


def _reason(error: BaseException) -> str:
    code = _errno_of(error)
    if isinstance(error, OSError) or code != errno.EIO:
        return os.strerror(code)
    return " ".join(str(error).split())[:200] or type(error).__name__
