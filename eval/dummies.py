"""Models that test the harness instead of themselves: they read the prompt's tokens and nothing else.

oracle reads the whole prompt, first-k its first k tokens, random nothing; who finds no needle guesses. So the oracle
must score 1 wherever a needle was really placed, random must score chance, and first-k must be right in shallow cells
only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np


class Reader(Protocol):
    """Finds the asked number among a prompt's first `limit` tokens; the question may be read wherever it stands."""

    def __call__(self, prompt: np.ndarray, limit: int) -> str | None: ...


class Dummy:
    """A Model (see eval/protocol.py) that answers with what `read` finds, else with a random number."""

    def __init__(
        self,
        read: Reader,
        encode: Callable[[str], Sequence[int]],
        *,
        limit: int | None,
        num_digits: int = 3,
        seed: int = 0,
    ) -> None:
        """limit: tokens read of each prompt, None for all of them; encode: text -> ids, the tokenizer's."""
        self._read = read
        self._encode = encode
        self._limit = limit
        self._num_digits = num_digits
        self._rng = np.random.default_rng(seed)

    def generate(self, prompts: Sequence[np.ndarray], *, max_new_tokens: int, stop_id: int) -> list[list[int]]:
        return [self._answer(prompt)[:max_new_tokens] for prompt in prompts]

    def _answer(self, prompt: np.ndarray) -> list[int]:
        limit = len(prompt) if self._limit is None else min(self._limit, len(prompt))
        number = self._read(prompt, limit) if limit else None
        if number is None:
            number = str(self._rng.integers(10**self._num_digits)).zfill(self._num_digits)
        return list(self._encode(number))


def make(
    name: str, read: Reader, encode: Callable[[str], Sequence[int]], *, first_k: int = 512, seed: int = 0
) -> Dummy:
    """The dummy called oracle, random or first-k; first_k is the tokens that first-k reads."""
    limits: dict[str, int | None] = {"oracle": None, "random": 0, "first-k": first_k}
    if name not in limits:
        raise ValueError(f"unknown model {name!r}; the models that need no checkpoint are {', '.join(limits)}")
    return Dummy(read, encode, limit=limits[name], seed=seed)
