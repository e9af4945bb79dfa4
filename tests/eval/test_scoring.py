"""Scores against closed forms and independent sums."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval import scoring


@pytest.mark.parametrize(
    ("output", "right"),
    [
        ("482", True),
        (" 482", True),
        ("It is 482.", True),
        ("482, and again 482", True),
        ("plate 1 reads 482", True),
        ("1482", False),
        ("4823", False),
        ("x482", False),
        ("482nd", False),
        ("4.82", False),
        ("482.5", False),
        ("1,482", False),
        ("4 8 2", False),
        ("481 or 482", False),
        ("", False),
    ],
)
def test_match_is_exact_and_word_bounded(output, right):
    assert scoring.matches(output, "482") is right


def test_leading_zeros_count():
    assert scoring.matches("007", "007")
    assert not scoring.matches("7", "007")


@pytest.mark.parametrize(
    ("output", "share"), [("482", 1.0), ("492", 2 / 3), ("no 824.", 0.0), ("48", 2 / 3), ("", 0.0), ("n 4x", 1 / 3)]
)
def test_digit_accuracy(output, share):
    assert scoring.digit_accuracy(output, "482") == pytest.approx(share, abs=1e-15)


def test_guessing_every_number_gives_chance():
    numbers = [f"{n:03d}" for n in range(1000)]
    assert sum(scoring.matches(n, "482") for n in numbers) == 1
    assert math.fsum(scoring.digit_accuracy(n, "482") for n in numbers) / 1000 == pytest.approx(0.1, abs=1e-12)


def test_wilson_known_values():
    # Closed form at the edges: z^2 / (n + z^2).
    z2 = 1.959963984540054**2
    assert scoring.wilson(0, 10) == (0.0, pytest.approx(z2 / (10 + z2), abs=1e-14))
    assert scoring.wilson(10, 10) == (pytest.approx(10 / (10 + z2), abs=1e-14), 1.0)
    # Newcombe (1998), table I: 81 of 263 is 0.2553 to 0.3662, 15 of 148 is 0.0624 to 0.1605.
    assert scoring.wilson(81, 263) == (pytest.approx(0.2553, abs=5e-5), pytest.approx(0.3662, abs=5e-5))
    assert scoring.wilson(15, 148) == (pytest.approx(0.0624, abs=5e-5), pytest.approx(0.1605, abs=5e-5))
    assert scoring.wilson(0, 0) == (0.0, 1.0)


@given(st.integers(1, 500), st.data())
def test_wilson_bounds_solve_the_score_equation(total, data):
    successes = data.draw(st.integers(0, total))
    share = successes / total
    low, high = scoring.wilson(successes, total)
    assert 0 <= low <= share <= high <= 1
    for bound in (low, high):
        if 0 < bound < 1:
            z = abs(share - bound) / math.sqrt(bound * (1 - bound) / total)
            assert z == pytest.approx(1.959963984540054, abs=1e-6)


def test_wilson_rejects_impossible_counts():
    with pytest.raises(ValueError, match="successes is 3 of 2"):
        scoring.wilson(3, 2)


@given(st.integers(0, 60), st.data())
def test_tail_probability_is_the_binomial_sum(total, data):
    successes = data.draw(st.integers(0, total))
    p = Fraction(1, 1000)
    exact = sum(math.comb(total, k) * p**k * (1 - p) ** (total - k) for k in range(successes, total + 1))
    assert scoring.tail_probability(successes, total, 0.001) == pytest.approx(float(exact), rel=1e-9)


def test_tail_probability_of_many_cases():
    # Poisson limit: at least one of 5000 at 1/1000 is 1 - exp(-5), to a thousandth.
    assert scoring.tail_probability(1, 5000, 0.001) == pytest.approx(1 - math.exp(-5), abs=1e-3)


def test_effective_length_stops_at_the_first_failure():
    assert scoring.effective_length({256: 1.0, 1024: 0.9, 4096: 0.5, 8192: 1.0}) == 1024
    assert scoring.effective_length({256: 0.84, 1024: 1.0}) == 0
    assert scoring.effective_length({4096: 0.85, 256: 0.85}) == 4096
    assert scoring.effective_length({}) == 0


def _record(kind, length, depth, answer, output):
    return {
        "case": "c",
        "kind": kind,
        "length": length,
        "depth": depth,
        "answer": answer,
        "output": output,
        "num_tokens": length - 1,
        "real_depth": None if depth is None else depth + 0.01,
    }


def test_summary_counts_each_kind_apart():
    records = [
        _record("single", 256, 0.0, "482", "482"),
        _record("single", 256, 0.0, "482", "481"),
        _record("single", 256, 1.0, "007", "007"),
        _record("single", 1024, 0.0, "007", "nothing"),
        _record("distractors", 256, 0.0, "111", "222"),
        _record("no_needle", 256, None, "333", "383"),
        _record("blind", 30, None, "444", "444"),
    ]
    summary = scoring.summarize(records)
    assert summary["accuracy"] == 0.5
    assert summary["num_cases"] == 4
    assert summary["accuracy_by_length"] == {"256": 2 / 3, "1024": 0.0}
    assert summary["accuracy_by_depth"] == {"0.0": 1 / 3, "1.0": 1.0}
    assert [(c["length"], c["depth"], c["correct"], c["total"]) for c in summary["cells"]] == [
        (256, 0.0, 1, 2),
        (256, 1.0, 1, 1),
        (1024, 0.0, 0, 1),
    ]
    assert summary["cells"][0]["real_depth"] == pytest.approx(0.01)
    assert summary["distractor_accuracy"] == 0.0
    assert summary["distractor_accuracy_by_length"] == {"256": 0.0}
    assert summary["control_accuracy"] == 0.5
    assert summary["chance"] == 0.001
    assert summary["controls"]["no_needle"]["digit_accuracy"] == pytest.approx(2 / 3)
    assert summary["controls"]["no_needle"]["guesser_probability"] == 1.0
    assert summary["controls"]["blind"]["guesser_probability"] == pytest.approx(0.001)
    assert summary["effective_context_length"] == 0
    assert len(summary["failures"]) == 2


def test_summary_of_nothing_says_nothing():
    summary = scoring.summarize([])
    assert summary["accuracy"] is None
    assert summary["control_accuracy"] is None
    assert summary["cells"] == []
    assert summary["controls"] == {}
