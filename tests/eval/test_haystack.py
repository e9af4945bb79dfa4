"""Haystacks fill any length with real material, in order, and depend on the generator alone."""

import numpy as np
import pytest

from eval.haystack import TextHaystack, VideoHaystack


@pytest.mark.parametrize("length", [0, 1, 7, 100])
def test_text_wraps_around(length):
    haystack = TextHaystack(np.arange(10, dtype=np.int32))
    taken = haystack.take(length, np.random.default_rng(3))
    assert taken.dtype == np.int32
    assert taken.shape == (length,)
    assert ((np.diff(taken) - 1) % 10 == 0).all()
    np.testing.assert_array_equal(taken, haystack.take(length, np.random.default_rng(3)))


def test_text_starts_everywhere():
    haystack = TextHaystack(np.arange(4, dtype=np.int32))
    assert {int(haystack.take(1, np.random.default_rng(seed))[0]) for seed in range(40)} == {0, 1, 2, 3}


@pytest.mark.parametrize("length", [0, 1, 5, 23])
def test_footage_follows_its_clips(length):
    clips = tuple(np.arange(100 * i, 100 * i + 2 * t).reshape(t, 2) for i, t in enumerate((3, 5, 1)))
    haystack = VideoHaystack(clips)
    sources = haystack.take(length, np.random.default_rng(1))
    codes = haystack.codes(sources)
    assert sources.shape == (length, 2)
    assert codes.shape == (length, 2)
    assert codes.dtype == np.int32
    for (clip, frame), row in zip(sources, codes, strict=True):
        np.testing.assert_array_equal(row, clips[clip][frame])
    for (clip, frame), (next_clip, next_frame) in zip(sources[:-1], sources[1:], strict=True):
        assert (next_clip, next_frame) == (clip, frame + 1) or (frame == len(clips[clip]) - 1 and next_frame == 0)
    if length >= 18:
        assert {0, 1, 2} == set(sources[:, 0].tolist())


def test_empty_haystacks_are_refused():
    with pytest.raises(ValueError, match="at least one token"):
        TextHaystack(np.zeros(0, np.int32))
    with pytest.raises(ValueError, match="at least one clip"):
        VideoHaystack(())
    with pytest.raises(ValueError, match=r"clips have shapes \(2, 3\), \(2, 4\)"):
        VideoHaystack((np.zeros((2, 3), int), np.zeros((2, 4), int)))
