"""Scores from records: exact match, per-digit match, Wilson intervals, cells of the grid, effective length.

Nothing here runs a model: a record holds what was asked and what was answered, so a change of metric costs no new run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from eval.protocol import CONTROLS, TEXT_FAMILIES, VIDEO_FAMILIES

Record = Mapping[str, Any]

# A number does not start or end inside a word or a longer number: 1482, 4.82, 1,482 and x482 are not 482.
_NUMBER = re.compile(r"(?<![\w])(?<!\d[.,])\d+(?!\w)(?![.,]\d)")
_DIGITS = re.compile(r"\d+")


def matches(output: str, answer: str) -> bool:
    """True when the output names `answer`, word-bounded, and no other number with as many digits.

    The second half keeps a model that lists numbers from being right by chance.
    """
    named = {number for number in _NUMBER.findall(output) if len(number) == len(answer)}
    return named == {answer}


def score(record: Record) -> float:
    """0 to 1: how right a record's output is, by its metric (see `eval.protocol.Metric`)."""
    metric, output = record.get("metric", "number"), record["output"]
    if metric == "number":
        return float(matches(output, record["answer"]))
    references = record["answers"]
    if metric == "share":
        # RULER's string_match_all, on whole words.
        return sum(_names(output, reference) for reference in references) / len(references)
    size = len(references[0])
    return float([number for number in _NUMBER.findall(output) if len(number) == size] == list(references))


def is_right(record: Record) -> bool:
    """Whether nothing is missing from a record's output."""
    return score(record) == 1.0


def _names(output: str, reference: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(reference)}(?!\w)", output) is not None


def digit_accuracy(output: str, answer: str) -> float:
    """Share of the answer's digits that stand in their place in the output's first number; guessing gives 0.1."""
    found = _DIGITS.search(output)
    digits = found.group() if found else ""
    return sum(a == b for a, b in zip(digits, answer, strict=False)) / len(answer)


def wilson(successes: int, total: int, z: float = 1.959963984540054) -> tuple[float, float]:
    """Wilson score interval of a proportion (Wilson 1927); 95% for the default z. Nothing tried: (0, 1)."""
    if not 0 <= successes <= total:
        raise ValueError(f"successes is {successes} of {total}; it must lie between 0 and the total")
    if total == 0:
        return 0.0, 1.0
    share = successes / total
    scale = 1 + z * z / total
    centre = (share + z * z / (2 * total)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    # At 0 and 1 the exact bound is 0 and 1; rounding would leave 1e-17 in its place.
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == total else min(1.0, centre + half)
    return low, high


def tail_probability(successes: int, total: int, chance: float) -> float:
    """Probability of at least `successes` right out of `total` for one who guesses with probability `chance`."""
    if not 0 < chance < 1:
        raise ValueError(f"chance is {chance}; it must lie strictly between 0 and 1")
    if successes == 0:
        return 1.0
    # Logarithms: a binomial coefficient of a few thousand cases does not fit a float.
    log_terms = (
        math.lgamma(total + 1)
        - math.lgamma(k + 1)
        - math.lgamma(total - k + 1)
        + k * math.log(chance)
        + (total - k) * math.log1p(-chance)
        for k in range(successes, total + 1)
    )
    return min(1.0, math.fsum(math.exp(term) for term in log_terms))


def tally(records: Iterable[Record]) -> dict[str, Any]:
    """{correct, total, accuracy, low, high, digit_accuracy} of some records; accuracy is None when there are none."""
    records = list(records)
    total = len(records)
    correct = sum(map(is_right, records))
    low, high = wilson(correct, total)
    digits = sum(digit_accuracy(r["output"], r["answer"]) for r in records)
    return {
        "correct": correct,
        "total": total,
        "accuracy": correct / total if total else None,
        "low": low,
        "high": high,
        "digit_accuracy": digits / total if total else None,
    }


def group(records: Iterable[Record], by: Callable[[Record], Any]) -> dict[Any, list[Record]]:
    """Records by key, keys ascending."""
    groups: dict[Any, list[Record]] = {}
    for record in records:
        groups.setdefault(by(record), []).append(record)
    return {key: groups[key] for key in sorted(groups)}


def cells(records: Iterable[Record]) -> list[dict[str, Any]]:
    """The grid: one tally per requested (length, depth), with the tokens and the depth that were really reached."""
    result = []
    for (length, depth), members in group(records, lambda r: (r["length"], r["depth"])).items():
        result.append(
            {
                "length": length,
                "depth": depth,
                **tally(members),
                "num_tokens": max(r["num_tokens"] for r in members),
                "real_depth": sum(r["real_depth"] for r in members) / len(members),
            }
        )
    return result


def effective_length(accuracy_by_length: Mapping[int, float], threshold: float = 0.85) -> int:
    """The largest length at which, and below which, accuracy stays at or above the threshold; 0 when there is none.

    0.85 is RULER's bar (Hsieh et al. 2024). A length that passes after a shorter one failed does not count.
    """
    reached = 0
    for length in sorted(accuracy_by_length):
        if accuracy_by_length[length] < threshold:
            break
        reached = length
    return reached


def families(records: Iterable[Record], threshold: float = 0.85) -> dict[str, dict[str, Any]]:
    """Kind -> its mean `score` (also by length), how many answers were wholly right with Wilson bounds, and
    `effective_context_length`: the largest length at which, and below which, the score stays at the threshold.
    """
    result = {}
    asked = [r for r in records if r["kind"] in TEXT_FAMILIES + VIDEO_FAMILIES]
    for kind, members in group(asked, lambda r: r["kind"]).items():
        lengths = group(members, lambda r: r["length"])
        by_length = {length: sum(map(score, each)) / len(each) for length, each in lengths.items()}
        counts = tally(members)
        result[kind] = {
            "score": sum(map(score, members)) / len(members),
            **{name: counts[name] for name in ("correct", "total", "low", "high")},
            "score_by_length": {str(length): value for length, value in by_length.items()},
            "effective_context_length": effective_length(by_length, threshold),
        }
    return result


def _by(records: Sequence[Record], field: str) -> dict[str, float]:
    return {str(key): tally(members)["accuracy"] for key, members in group(records, lambda r: r[field]).items()}


def summarize(records: Sequence[Record], *, threshold: float = 0.85, num_failures: int = 20) -> dict[str, Any]:
    """Everything the report shows, as JSON values.

    `accuracy`, `accuracy_by_length`, `accuracy_by_depth`, `cells` and `effective_context_length` are of the single
    needles; `distractor_*` of the prompts with several; `families` of the other ways to ask (see `families`);
    `control_accuracy` of both controls together, `controls` of each, with the probability that a guesser does at least
    as well. Keys of the by-length dicts are strings (JSON). A value that nothing was measured for is None.
    """
    single = [r for r in records if r["kind"] == "single"]
    distractors = [r for r in records if r["kind"] == "distractors"]
    control = [r for r in records if r["kind"] in CONTROLS]
    overall, crowded, guessed = tally(single), tally(distractors), tally(control)
    plain = [r for r in records if r["kind"] not in TEXT_FAMILIES + VIDEO_FAMILIES]
    chance = 10.0 ** -max((len(r["answer"]) for r in plain), default=3)
    by_length = _by(single, "length")
    failures = [r for r in single if not matches(r["output"], r["answer"])]
    measured = families(records, threshold)
    shown = ("case", "length", "depth", "answer", "output")
    return {
        "accuracy": overall["accuracy"],
        "interval": [overall["low"], overall["high"]],
        "digit_accuracy": overall["digit_accuracy"],
        "num_cases": overall["total"],
        "accuracy_by_length": by_length,
        "by_length": {str(k): tally(v) for k, v in group(single, lambda r: r["length"]).items()},
        "accuracy_by_depth": _by(single, "depth"),
        "cells": cells(single),
        "effective_context_length": effective_length({int(k): v for k, v in by_length.items()}, threshold),
        "effective_threshold": threshold,
        "distractor_accuracy": crowded["accuracy"],
        "distractor_interval": [crowded["low"], crowded["high"]],
        "distractor_accuracy_by_length": _by(distractors, "length"),
        "distractor_cells": cells(distractors),
        "families": measured,
        "chance": chance,
        "control_accuracy": guessed["accuracy"],
        "control_interval": [guessed["low"], guessed["high"]],
        "control_digit_accuracy": guessed["digit_accuracy"],
        "controls": {
            kind: {**counts, "guesser_probability": tail_probability(counts["correct"], counts["total"], chance)}
            for kind in CONTROLS
            if (counts := tally(r for r in control if r["kind"] == kind))["total"]
        },
        "failures": [{field: r[field] for field in shown} for r in failures[:num_failures]],
    }
