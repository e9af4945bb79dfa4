"""The grid of an evaluation: which cases there are, and a random generator for each that no other case disturbs.

A case depends on the seed and on itself alone, so a grid that grows keeps the cases (and the records) it had.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from eval.protocol import TEXT_FAMILIES, VIDEO_FAMILIES, Kind

# A kind's place seeds its cases: new ones come last.
_KINDS: tuple[Kind, ...] = ("single", "distractors", "no_needle", "blind", *TEXT_FAMILIES, *VIDEO_FAMILIES)


@dataclass(frozen=True)
class Spec:
    """One case to build. depth is None in controls, length is 0 in blind ones, which have no haystack."""

    kind: Kind
    length: int
    depth: float | None
    round: int
    seed: int

    def rng(self) -> np.random.Generator:
        depth = 0 if self.depth is None else 1 + round(1e6 * self.depth)
        return np.random.default_rng([self.seed, _KINDS.index(self.kind), self.length, depth, self.round])


def specs(
    lengths: Sequence[int],
    depths: Sequence[float],
    rounds: int,
    seed: int,
    *,
    distractor_rounds: int = 0,
    control_rounds: int | None = None,
) -> Iterator[Spec]:
    """Every (length, depth, round) with a single needle, (length, depth, distractor round) with several, and controls.

    control_rounds: controls of each kind per length; as many as rounds when None.
    """
    for name, values in (("lengths", lengths), ("depths", depths)):
        if not len(values) or len(set(values)) != len(values):
            raise ValueError(f"{name} is {list(values)}; give at least one value, each once")
    if min(lengths) < 1:
        raise ValueError(f"lengths has {min(lengths)}; a length is a number of tokens, at least 1")
    if not (min(depths) >= 0 and max(depths) <= 1):
        raise ValueError(f"depths is {list(depths)}; a depth lies between 0 (start) and 1 (end)")
    control_rounds = rounds if control_rounds is None else control_rounds
    counts = {"seed": seed, "distractor_rounds": distractor_rounds, "control_rounds": control_rounds}
    for name, value in {"rounds": rounds, **counts}.items():
        if value < (name == "rounds"):
            raise ValueError(f"{name} is {value}; it must be at least {int(name == 'rounds')}")
    for length in map(int, lengths):
        for depth in map(float, depths):
            for index in range(rounds):
                yield Spec("single", length, depth, index, seed)
            for index in range(distractor_rounds):
                yield Spec("distractors", length, depth, index, seed)
        for index in range(control_rounds):
            yield Spec("no_needle", length, None, index, seed)
    for index in range(control_rounds * len(lengths)):
        yield Spec("blind", 0, None, index, seed)


def family_specs(families: Sequence[Kind], lengths: Sequence[int], rounds: int, seed: int) -> Iterator[Spec]:
    """Every (family, length, round); their needles lie at random depths."""
    for kind in families:
        for length in map(int, lengths):
            for index in range(rounds):
                yield Spec(kind, length, None, index, seed)
