"""Endless text and footage to hide needles in, from whatever text and clips there are.

A haystack is read from a random place and around its end, so it fills any length; which part is read depends on the
generator alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


class Tokenizer(Protocol):
    """The part of a text tokenizer that evaluation needs (data.text.TextTokenizer)."""

    size: int
    bos_id: int
    eos_id: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True, eq=False)
class TextHaystack:
    """A stream of text tokens, int32 [n]."""

    tokens: np.ndarray

    def __post_init__(self) -> None:
        if self.tokens.ndim != 1 or self.tokens.size == 0:
            raise ValueError(f"a text haystack has tokens of shape {self.tokens.shape}; it needs at least one token")

    @classmethod
    def from_texts(cls, texts: Iterable[str], tokenizer: Tokenizer) -> TextHaystack:
        """Texts one after another, each on lines of its own."""
        ids = [token for text in texts for token in tokenizer.encode(text.strip() + "\n")]
        return cls(np.asarray(ids, np.int32))

    def take(self, num_tokens: int, rng: np.random.Generator) -> np.ndarray:
        """int32 [num_tokens] from a random place on."""
        start = int(rng.integers(self.tokens.size))
        return np.take(self.tokens, np.arange(start, start + num_tokens), mode="wrap").astype(np.int32)


@dataclass(frozen=True, eq=False)
class VideoHaystack:
    """Clips as vision codes, int [T_i, n] each with the same n."""

    clips: tuple[np.ndarray, ...]

    def __post_init__(self) -> None:
        if not self.clips:
            raise ValueError("a video haystack needs at least one clip")
        widths = {clip.shape[1:] for clip in self.clips}
        if any(clip.ndim != 2 or 0 in clip.shape for clip in self.clips) or len(widths) > 1:
            shapes = ", ".join(str(clip.shape) for clip in self.clips)
            raise ValueError(
                f"a video haystack's clips have shapes {shapes}; they must be [frames, codes], codes equal"
            )

    @property
    def codes_per_frame(self) -> int:
        return int(self.clips[0].shape[1])

    def take(self, num_frames: int, rng: np.random.Generator) -> np.ndarray:
        """Where each of num_frames frames comes from: int32 [num_frames, 2], clip and frame within it.

        The first clip starts at a random frame; clips follow each other in random order, and again when all are used.
        """
        parts: list[np.ndarray] = []
        found = 0
        while found < num_frames:
            for index in rng.permutation(len(self.clips)):
                length = len(self.clips[index])
                start = int(rng.integers(length)) if not parts else 0
                frames = np.arange(start, length)
                parts.append(np.stack([np.full(len(frames), index), frames], axis=1))
                found += len(frames)
        if not parts:
            return np.zeros((0, 2), np.int32)
        return np.concatenate(parts)[:num_frames].astype(np.int32)

    def codes(self, sources: np.ndarray) -> np.ndarray:
        """int32 [T, n] codes of the frames that `take` chose."""
        if not len(sources):
            return np.zeros((0, self.codes_per_frame), np.int32)
        return np.stack([self.clips[clip][frame] for clip, frame in sources]).astype(np.int32)
