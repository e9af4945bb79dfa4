"""SentencePiece tokenizers: train one, load any `.model`, encode and decode.

`encode` never adds BOS or EOS: templates put them where they belong (`data.examples`), never inside a field.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

VISION_START = "<vision>"
VISION_END = "</vision>"
# Below this size the 256 byte pieces would crowd out the words.
_BYTE_FALLBACK_FROM = 4096
_PRINTABLE = string.digits + string.ascii_letters + string.punctuation + "\n"


class TextTokenizer:
    """A SentencePiece model. size: number of pieces; bos_id, eos_id; fingerprint: sha256 of the model file."""

    def __init__(self, model: bytes, source: str = "the model") -> None:
        import sentencepiece

        try:
            self._processor: Any = sentencepiece.SentencePieceProcessor(model_proto=model)
        except (RuntimeError, OSError, ValueError) as error:
            raise ValueError(f"{source} is not a SentencePiece model ({_one_line(error)})") from None
        self._model = model
        self.size: int = self._processor.get_piece_size()
        self.bos_id: int = self._processor.bos_id()
        self.eos_id: int = self._processor.eos_id()
        self.fingerprint: str = hashlib.sha256(model).hexdigest()
        if self.size == 0:
            raise ValueError(f"{source} is not a SentencePiece model (it has no pieces)")
        for field, value in (("BOS", self.bos_id), ("EOS", self.eos_id)):
            if value < 0:
                raise ValueError(
                    f"{source} has no {field} piece; train it with one (SentencePiece --{field.lower()}_id)"
                )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TextTokenizer:
        """Loads any SentencePiece `.model`; ValueError when it is missing, no model, or lacks BOS or EOS."""
        try:
            model = Path(path).read_bytes()
        except OSError as error:
            raise ValueError(f"tokenizer {os.fspath(path)} cannot be read: {error.strerror}") from None
        return cls(model, f"tokenizer {os.fspath(path)}")

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without BOS or EOS; the empty string has none."""
        return self._processor.encode(text)

    def decode(self, ids: Sequence[int] | NDArray[np.integer[Any]]) -> str:
        """Text of `ids`, where BOS and EOS are nothing; ValueError for an id that is not a text id."""
        wanted = [int(i) for i in ids]
        for i in wanted:
            if not 0 <= i < self.size:
                raise ValueError(f"id {i} is not a text id; this tokenizer has 0 .. {self.size - 1}")
        return self._processor.decode(wanted)

    def starts_word(self, ids: Sequence[int] | NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
        """Which ids begin with a space, so that text may be cut or inserted there; bool, shaped as `ids`."""
        return self._word_starts[np.asarray(ids, np.int64)]

    @functools.cached_property
    def _word_starts(self) -> NDArray[np.bool_]:
        return np.array([self._processor.id_to_piece(i).startswith("\u2581") for i in range(self.size)])

    def __reduce__(self) -> tuple[Callable[[bytes], TextTokenizer], tuple[bytes]]:
        return TextTokenizer, (self._model,)

    def __repr__(self) -> str:
        return f"TextTokenizer({self.size} pieces, {self.fingerprint[:12]})"


def train_tokenizer(
    texts: Iterable[str],
    path: str | os.PathLike[str],
    *,
    size: int,
    symbols: Sequence[str] = (VISION_START, VISION_END),
    byte_fallback: bool | None = None,
    required_chars: str = _PRINTABLE,
) -> TextTokenizer:
    """Trains a byte-pair SentencePiece model of `size` pieces on `texts`, writes it to `path` and loads it.

    Every digit is a piece of its own, spaces and line breaks survive a round trip, and the same texts give the same
    file. Ids: 0 unknown, 1 BOS, 2 EOS (as in LLaMA), then `symbols`, each always one piece.

    byte_fallback: write characters outside the vocabulary as bytes; on from 4096 pieces when None.
    required_chars: characters that are pieces even where the texts lack them.

    ValueError when there is no text, the size does not suit it, or `path` cannot be written.
    """
    import sentencepiece

    if size < 1:
        raise ValueError(f"tokenizer size is {size}; it must be at least 1")
    model = io.BytesIO()
    lines = _Lines(texts)
    with_bytes = size >= _BYTE_FALLBACK_FROM if byte_fallback is None else byte_fallback
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=size,
            user_defined_symbols=list(symbols),
            required_chars=required_chars,
            # Bytes stand in for rare characters; without them every character that occurs must be a piece.
            byte_fallback=with_bytes,
            character_coverage=0.9995 if with_bytes else 1.0,
            split_digits=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            max_sentence_length=1 << 30,
            num_threads=1,
            minloglevel=2,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
        )
    except (RuntimeError, OSError, ValueError) as error:
        if lines.count == 0:
            raise ValueError("there is no text to train the tokenizer on; give it at least one line") from None
        reason = _one_line(error).rsplit("] ", 1)[-1]
        raise ValueError(f"a tokenizer of {size} pieces cannot be trained on these texts: {reason}") from None
    tokenizer = TextTokenizer(model.getvalue(), f"tokenizer {os.fspath(path)}")
    _write_whole(Path(path), model.getvalue())
    return tokenizer


class TextError(ValueError):
    """A text file that cannot be read; the message names the file and the reason."""


def read_text(path: str | os.PathLike[str]) -> str:
    """A UTF-8 text file; TextError (a ValueError) naming it when it is missing, empty or not UTF-8."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TextError(f"{os.fspath(path)} is not UTF-8 text (byte {error.start}); convert it first") from None
    except OSError as error:
        raise TextError(f"text file {os.fspath(path)} cannot be read: {error.strerror}") from None
    if not text.strip():
        raise TextError(f"text file {os.fspath(path)} is empty; give it text or leave it out")
    return text


class _Lines:
    """The non-empty lines of texts, counted: SentencePiece wants sentences, and pieces must not span lines."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = texts
        self.count = 0

    def __iter__(self) -> Iterator[str]:
        for text in self._texts:
            for line in text.splitlines():
                if line.strip():
                    self.count += 1
                    yield line


def _write_whole(path: Path, content: bytes) -> None:
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content)
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise ValueError(f"tokenizer {path} cannot be written: {error.strerror}") from None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
