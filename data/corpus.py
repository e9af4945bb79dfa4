"""A tokenized corpus on disk, read: its examples at random, and what packing needs of them without reading any.

A corpus directory holds `part-00000/tokens/1.0.0/` and so on (each a TFDS data set that `tfds.builder_from_directory`
opens), `lengths.npy`, `learned.npy` and `manifest.json`; `skipped.jsonl` where something was left out, and
`damaged.jsonl` where something was made from files that are not whole. `data.build` writes it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.examples import TokenizedExample
from data.vocabulary import Vocabulary

FORMAT = 1
MANIFEST = "manifest.json"
DATA_SET = "tokens"
VERSION = "1.0.0"
FEATURES = ("tokens", "learn", "id", "source")
# What ArrayRecord, NumPy and this module raise on damaged records.
READ_ERRORS = (RuntimeError, ValueError, OSError, IndexError)
_READ_AT_ONCE = 1024
_NOTHING = TokenizedExample(np.zeros(0, np.int32), np.zeros(0, np.bool_))


class CorpusError(ValueError):
    """A corpus that cannot be written, opened or read; the message names the directory and says what to do."""


class DamagedExamples(CorpusError):
    """Records of a corpus that are not what was written: reading them again gives nothing else."""


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
        self._parts: dict[int, Part] = {}

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> Corpus:
        """Opens a finished corpus; CorpusError (a ValueError) when it is missing, unfinished, cut or not a corpus."""
        path = Path(directory)
        if not path.is_dir():
            raise CorpusError(f"no corpus at {path}: there is no such directory; build it first or correct the path")
        try:
            manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CorpusError(f"{path} holds no finished corpus (no {MANIFEST}); build it again") from None
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise CorpusError(f"the corpus at {path} has an unreadable {MANIFEST} ({error}); build it again") from None
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
            raise CorpusError(f"the corpus at {path} has a malformed {MANIFEST} ({error!r}); build it again") from None
        except OSError as error:
            raise CorpusError(f"the corpus at {path} cannot be read: {reason_of(error)}") from None
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
        """Several examples at once, in the order asked for; CorpusError where they cannot be read."""
        wanted = [int(index) for index in indices]
        for index in wanted:
            if not 0 <= index < len(self):
                raise IndexError(f"corpus {self.name} has examples 0 .. {len(self) - 1}, not {index}")
        parts = np.searchsorted(self._starts, wanted, side="right") - 1
        found: list[TokenizedExample] = [_NOTHING] * len(wanted)
        for part in np.unique(parts).tolist():
            (places,) = np.nonzero(parts == part)
            if part not in self._parts:
                self._parts[part] = Part(self.directory / part_name(part))
            within = [wanted[place] - int(self._starts[part]) for place in places.tolist()]
            try:
                examples = self._parts[part].read(within)
            except READ_ERRORS as error:
                kind = DamagedExamples if is_damage(error) else CorpusError
                raise kind(
                    f"the corpus at {self.directory} is damaged: examples {wanted[:4]} cannot be read "
                    f"({reason_of(error)}); build it again"
                ) from None
            for place, example in zip(places.tolist(), examples, strict=True):
                found[place] = example
        return found

    def verify(self, progress: Callable[[int], None] | None = None) -> None:
        """Reads everything back: file checksums, then every example against lengths, learned targets and fingerprint.

        progress: called with the number of examples read so far. CorpusError says what is not as it was written.
        """
        for relative, record in self.manifest["files"].items():
            if sha256_of(self.directory / relative) != record["sha256"]:
                raise CorpusError(f"the corpus at {self.directory} is damaged: {relative} has changed; build it again")
        digest = ContentDigest()
        for first in range(0, len(self), _READ_AT_ONCE):
            indices = range(first, min(first + _READ_AT_ONCE, len(self)))
            for index, example in zip(indices, self.read(indices), strict=True):
                facts = (len(example) - 1, *learned_targets(example, self.vocabulary))
                if facts != (int(self.lengths[index]), *self.learned[index].tolist()):
                    raise CorpusError(
                        f"the corpus at {self.directory} is damaged: example {index} ({example.id!r}) does not have "
                        "the length and learned targets listed for it; build it again"
                    )
                digest.add(example)
            if progress is not None:
                progress(indices.stop)
        if fingerprint_of(self.name, self.vocabulary, self.tokenizers, digest.hexdigest()) != self.fingerprint:
            raise CorpusError(f"the corpus at {self.directory} does not match its fingerprint; build it again")

    def __reduce__(self) -> tuple[Callable[[str], Corpus], tuple[str]]:
        return Corpus.open, (str(self.directory),)

    def __repr__(self) -> str:
        return f"Corpus({self.name!r}, {len(self)} examples, {str(self.directory)!r})"


class Part:
    """A part of a corpus: a TFDS data set in ArrayRecord, read at random without TFDS's decoding (ten times slower)."""

    def __init__(self, directory: Path) -> None:
        import tensorflow_datasets as tfds
        from tensorflow_datasets.proto import tf_example_pb2

        try:
            builder = tfds.builder_from_directory(str(directory / DATA_SET / VERSION))
            self._records: Any = builder.as_data_source(split="train").data_source
        except Exception as error:  # TFDS raises what its parsers raise, on files that are not what they were
            raise CorpusError(f"{directory} cannot be opened ({reason_of(error)}); build the corpus again") from None
        self._parse: Any = tf_example_pb2.Example.FromString

    def __len__(self) -> int:
        return len(self._records)

    def read(self, indices: Sequence[int]) -> list[TokenizedExample]:
        """Examples by their number in this part; READ_ERRORS where a record is not what it was."""
        if not len(indices):
            return []
        return [self._example(record) for record in self._records.__getitems__(list(indices))]

    def _example(self, record: bytes) -> TokenizedExample:
        try:
            features = self._parse(record).features.feature
        except Exception as error:  # protobuf's DecodeError has no home that its versions share
            raise ValueError(f"not a record of tokens: {error}") from None
        tokens, learn, id, source = (features[name].bytes_list.value[0] for name in FEATURES)
        return TokenizedExample(
            np.frombuffer(tokens, "<i4"), np.frombuffer(learn, np.uint8).astype(np.bool_), id.decode(), source.decode()
        )


def learned_targets(example: TokenizedExample, vocabulary: Vocabulary) -> tuple[int, int]:
    """Learned text and vision targets; the first token is never one, because nothing stands before it."""
    learn, vision = example.learn[1:], vocabulary.is_vision(example.tokens[1:])
    num_vision = int((learn & vision).sum())
    return int(learn.sum()) - num_vision, num_vision


class ContentDigest:
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


def fingerprint_of(name: str, vocabulary: Vocabulary, tokenizers: Mapping[str, str], content: str) -> str:
    facts = {"format": FORMAT, "name": name, "vocabulary": vocabulary.to_dict(), "tokenizers": dict(tokenizers)}
    return hashlib.sha256(json.dumps({**facts, "content": content}, sort_keys=True).encode()).hexdigest()


def sha256_of(file: Path) -> str:
    with open(file, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def errno_of(error: BaseException) -> int:
    """The writer's C++ errors carry the system's reason as text only."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    known = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EFBIG)
    return next((code for code in known if os.strerror(code) in str(error)), errno.EIO)


def is_damage(error: BaseException) -> bool:
    """Whether a record's bytes are wrong, rather than out of reach."""
    return not isinstance(error, OSError) and errno_of(error) == errno.EIO and os.strerror(errno.EIO) not in str(error)


def reason_of(error: BaseException) -> str:
    code = errno_of(error)
    if isinstance(error, OSError) or code != errno.EIO:
        return os.strerror(code)
    return " ".join(str(error).split())[:200] or type(error).__name__


def part_name(index: int) -> str:
    return f"part-{index:05d}"
