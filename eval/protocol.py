"""What evaluation asks of a model, and the record of one question put to it.

Any object with `generate` can be scored: this project's own sampler, a dummy, or a client of somebody else's server.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol, get_args

import numpy as np

Kind = Literal[
    "single", "distractors", "no_needle", "blind",
    "multi_value", "multi_query", "variables", "several", "ordering", "counting", "clip", "overlay",
]  # fmt: skip
CONTROLS: tuple[Kind, ...] = ("no_needle", "blind")
# Questions that ask for more than one needle's number, or hide it in another way.
TEXT_FAMILIES: tuple[Kind, ...] = ("multi_value", "multi_query", "variables")
VIDEO_FAMILIES: tuple[Kind, ...] = ("several", "ordering", "counting", "clip", "overlay")
# How an answer counts: names the number and no other; the share of the references it names; names them in their order.
Metric = Literal["number", "share", "sequence"]


class Model(Protocol):
    """A language model that continues prompts of token ids."""

    def generate(self, prompts: Sequence[np.ndarray], *, max_new_tokens: int, stop_id: int) -> list[list[int]]:
        """Continue every prompt greedily.

        prompts: int32 [n_i] each, possibly of different lengths, never padded. Returns for each prompt, in order, the
        generated ids: neither the prompt nor `stop_id`, at most `max_new_tokens` of them.
        """
        ...


@dataclass(frozen=True)
class Placed:
    """Proof of where one needle lies in a prompt."""

    number: str
    key: str | None  # what tells it from other needles (a city); None when it is alone
    depth: float  # real depth: share of the haystack before the needle, 0..1
    token_start: int  # half-open token range of the needle in the prompt
    token_end: int
    frame: int | None = None  # index of the needle among the video's frames; None in text
    asked: bool = True  # False for a distractor


@dataclass(frozen=True, eq=False)
class Case:
    """One prompt with its right answer.

    length: requested tokens, question and answer included (a blind control has no haystack, and its own size).
    depth: requested depth, 0..1; None for controls, where nothing is placed.
    prompt: int32 [num_tokens], num_tokens <= length.
    answers, metric: the references where there are several, and how they count.
    """

    task: str
    kind: Kind
    length: int
    depth: float | None
    round: int
    prompt: np.ndarray
    answer: str
    needles: tuple[Placed, ...] = ()
    num_frames: int | None = None
    frame_sources: np.ndarray | None = None  # int32 [T, 2]: clip and frame within it, -1 for the needle
    answers: tuple[str, ...] = ()
    metric: Metric = "number"

    def __post_init__(self) -> None:
        assert self.kind in get_args(Kind), self.kind
        assert (self.prompt.ndim, self.prompt.dtype) == (1, np.int32), (self.prompt.shape, self.prompt.dtype)
        assert len(self.prompt) <= self.length, (len(self.prompt), self.length)
        self.prompt.setflags(write=False)

    @property
    def asked(self) -> Placed | None:
        """The needle the question is about, or None in a control."""
        return next((needle for needle in self.needles if needle.asked), None)

    @property
    def key(self) -> str:
        """sha256 of everything that makes this case what it is; the same case has the same key in every process."""
        parts: tuple = (self.task, self.kind, self.length, self.depth, self.round, self.answer)
        if self.metric != "number":
            parts += (self.answers, self.metric)
        digest = hashlib.sha256(repr(parts).encode())
        digest.update(self.prompt.astype("<i4").tobytes())
        return digest.hexdigest()

    def describe(self) -> dict[str, Any]:
        """The case as JSON values, without the prompt itself."""
        asked = self.asked
        return {
            "case": self.key,
            "task": self.task,
            "kind": self.kind,
            "length": self.length,
            "num_tokens": len(self.prompt),
            "depth": self.depth,
            "real_depth": None if asked is None else asked.depth,
            "token_position": None if asked is None else asked.token_start,
            "frame": None if asked is None else asked.frame,
            "num_frames": self.num_frames,
            "round": self.round,
            "answer": self.answer,
            "answers": list(self.answers or (self.answer,)),
            "metric": self.metric,
            "needles": [asdict(needle) for needle in self.needles],
        }
