"""Examples as ordered spans of text, image and video, and as tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class TokenizedExample:
    """tokens int32 [n]; learn bool [n]: token i is a learned target; id and source say where it came from."""

    tokens: NDArray[np.int32]
    learn: NDArray[np.bool_]
    id: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", np.asarray(self.tokens, np.int32))
        object.__setattr__(self, "learn", np.asarray(self.learn, np.bool_))
        if self.tokens.ndim != 1 or self.learn.shape != self.tokens.shape:
            raise ValueError(
                f"example {self.id!r} has tokens of shape {self.tokens.shape} and learn of shape {self.learn.shape}; "
                "both must have the same single dimension"
            )

    def __len__(self) -> int:
        return self.tokens.size


@dataclass(frozen=True)
class BadExample:
    """An example that could not be made, and why; corpora count these instead of stopping at the first."""

    id: str
    source: str
    reason: str
