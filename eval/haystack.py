"""What the needle tasks share: footage that remembers where it came from, and the question without its haystack.

Needles are placed by data.synthetic, the same functions that make the training examples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from data.examples import chat
from data.synthetic import haystack_frames, hear
from data.text import TextTokenizer
from eval.runner import text_decoder


def question_tokens(question: str, tokenizer: TextTokenizer) -> np.ndarray:
    """The question as it stands after a haystack, up to where the answer begins; int32 [n]."""
    asked = chat([(question, "0")], system="").spans[0].text
    return np.asarray(tokenizer.encode(f"\n{asked}"), np.int32)


def answer_decoder(tokenizer: TextTokenizer) -> Callable[[Sequence[int]], str]:
    """Ids of an answer -> its text, with numbers as digits (`data.synthetic.hear`)."""
    decode = text_decoder(tokenizer)
    return lambda ids: hear(decode(ids))


def blind_prompt(question: str, tokenizer: TextTokenizer) -> np.ndarray:
    """The question with no haystack before it; int32 [n]. Who answers it right has guessed or remembers."""
    return np.concatenate([np.asarray([tokenizer.bos_id], np.int32), question_tokens(question, tokenizer)])


@dataclass(frozen=True, eq=False)
class VideoHaystack:
    """Clips as vision codes, int [T_i, n] each with the same n."""

    clips: tuple[np.ndarray, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "clips", tuple(np.asarray(clip) for clip in self.clips))
        if not self.clips:
            raise ValueError("a video haystack needs at least one clip")
        if any(clip.ndim != 2 or 0 in clip.shape for clip in self.clips) or len({c.shape[1] for c in self.clips}) > 1:
            shapes = ", ".join(str(clip.shape) for clip in self.clips)
            raise ValueError(
                f"a video haystack's clips have shapes {shapes}; they must be [frames, codes], with as many codes each"
            )

    @property
    def codes_per_frame(self) -> int:
        return int(self.clips[0].shape[1])

    def take(self, num_frames: int, rng: np.random.Generator) -> np.ndarray:
        """Where each of num_frames frames comes from: int32 [num_frames, 2], clip and frame within it."""
        indices = [np.stack([np.full(len(c), i), np.arange(len(c))], axis=1) for i, c in enumerate(self.clips)]
        return haystack_frames(rng, indices, num_frames)

    def codes(self, sources: np.ndarray) -> np.ndarray:
        """int32 [T, n]: the codes of the frames that `take` chose."""
        return np.stack([self.clips[clip][frame] for clip, frame in sources]).astype(np.int32)
