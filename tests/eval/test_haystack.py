"""Footage is real, in order and depends on the generator alone; grids are whole and stable."""

import numpy as np
import pytest

from eval.grid import specs
from eval.haystack import VideoHaystack, blind_prompt


@pytest.mark.parametrize("length", [1, 5, 23])
def test_footage_is_what_its_sources_say(length):
    clips = tuple(np.arange(100 * i, 100 * i + 2 * t).reshape(t, 2) for i, t in enumerate((3, 5, 1)))
    haystack = VideoHaystack(clips)
    sources = haystack.take(length, np.random.default_rng(1))
    codes = haystack.codes(sources)
    assert sources.shape == codes.shape == (length, 2)
    assert codes.dtype == np.int32
    for (clip, frame), row in zip(sources, codes, strict=True):
        np.testing.assert_array_equal(row, clips[clip][frame])
    np.testing.assert_array_equal(sources, haystack.take(length, np.random.default_rng(1)))


def test_bad_haystacks_are_refused():
    with pytest.raises(ValueError, match="at least one clip"):
        VideoHaystack(())
    with pytest.raises(ValueError, match=r"clips have shapes \(2, 3\), \(2, 4\)"):
        VideoHaystack((np.zeros((2, 3), int), np.zeros((2, 4), int)))


def test_blind_prompt_is_the_question_alone(tokenizer):
    prompt = blind_prompt("What is it?", tokenizer)
    assert prompt[0] == tokenizer.bos_id
    assert prompt.dtype == np.int32
    assert tokenizer.decode(prompt[1:]) == "\nUSER: What is it? ASSISTANT:"


def test_grid_is_whole():
    grid = list(specs([64, 128], [0, 0.5, 1], 4, 7, distractor_rounds=2, control_rounds=3))
    assert len(grid) == len({(s.kind, s.length, s.depth, s.round) for s in grid})
    count = {kind: sum(s.kind == kind for s in grid) for kind in ("single", "distractors", "no_needle", "blind")}
    assert count == {"single": 24, "distractors": 12, "no_needle": 6, "blind": 6}
    draws = [s.rng().integers(2**60) for s in grid]
    assert len(set(draws)) == len(grid)


def test_a_grown_grid_keeps_its_cases():
    small = {(s.kind, s.length, s.depth, s.round): s.rng().integers(2**60) for s in specs([64], [0.0, 0.5], 2, 7)}
    grown = {
        (s.kind, s.length, s.depth, s.round): s.rng().integers(2**60) for s in specs([32, 64], [0, 0.25, 0.5], 3, 7)
    }
    assert small.items() <= grown.items()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], [0.5], 1, 0), r"lengths is \[\]"),
        (([64, 64], [0.5], 1, 0), "each once"),
        (([0], [0.5], 1, 0), "lengths has 0"),
        (([64], [1.5], 1, 0), "a depth lies between 0"),
        (([64], [float("nan")], 1, 0), "a depth lies between 0"),
        (([64], [0.5], 0, 0), "rounds is 0; it must be at least 1"),
        (([64], [0.5], 1, -1), "seed is -1; it must be at least 0"),
    ],
)
def test_bad_grids_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        list(specs(*arguments))
