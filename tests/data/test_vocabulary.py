"""Ids of text, codes, <eof> and <eov>, checked against the arithmetic of the released model."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.vocabulary import Vocabulary

SEVEN_B = Vocabulary(text_size=32000, num_codes=8192, vision_size=8448)


def test_released_layout():
    assert SEVEN_B.size == 40448
    assert SEVEN_B.eof == 40192
    assert SEVEN_B.eov == 40193
    assert SEVEN_B.is_vision([0, 31999, 32000, 40193]).tolist() == [False, False, True, True]


def test_a_clip_takes_257_tokens_a_frame_and_ends_in_eov():
    codes = np.arange(3 * 256).reshape(3, 256)
    ids = SEVEN_B.vision_tokens(codes)
    assert ids.dtype == np.int32
    assert ids.shape == (3 * 257,)
    assert [ids[256], ids[513], ids[770]] == [SEVEN_B.eof, SEVEN_B.eof, SEVEN_B.eov]
    assert ids[0] == 32000
    assert ids[257] == 32256


@given(
    st.integers(1, 5),
    st.integers(1, 7),
    st.integers(1, 50),
    st.integers(1, 40),
    st.integers(0, 3),
    st.integers(0, 2**32 - 1),
)
def test_split_frames_inverts_vision_tokens(num_frames, num_per_frame, num_codes, text_size, spare, seed):
    vocabulary = Vocabulary(text_size, num_codes, num_codes + 2 + spare)
    codes = np.random.default_rng(seed).integers(0, num_codes, (num_frames, num_per_frame))
    ids = vocabulary.vision_tokens(codes)
    assert vocabulary.is_vision(ids).all()
    assert ids.max() < vocabulary.size
    np.testing.assert_array_equal(vocabulary.split_frames(ids), codes)


SMALL = Vocabulary(text_size=10, num_codes=4, vision_size=6)  # codes 10..13, eof 14, eov 15


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([10, 11, 14, 12, 13], "end in <eov>"),
        ([10, 11, 14, 12, 15], "same number of codes"),
        ([10, 15, 11, 15], "before the last frame"),
        ([10, 3, 15], "must lie in 10 .. 13"),
        ([15], "same number of codes"),
        ([], "one dimension"),
    ],
)
def test_malformed_frames_are_refused(ids, message):
    with pytest.raises(ValueError, match=message):
        SMALL.split_frames(np.asarray(ids, np.int32))


@pytest.mark.parametrize(
    ("codes", "message"),
    [([[0, 4]], "run from 0 to 4"), ([[-1, 0]], "run from -1"), ([0, 1], "shape"), (np.zeros((0, 4), int), "shape")],
)
def test_codes_outside_the_codebook_are_refused(codes, message):
    with pytest.raises(ValueError, match=message):
        SMALL.vision_tokens(codes)


@pytest.mark.parametrize(
    ("sizes", "field"),
    [((0, 4, 6), "text_size"), ((10, 4, 5), "vision_size"), ((10, -1, 6), "num_codes"), ((10, 0, 6), "vision_size")],
)
def test_impossible_sizes_name_the_field(sizes, field):
    with pytest.raises(ValueError, match=rf"vocabulary\.{field}"):
        Vocabulary(*sizes)


def test_text_only():
    text = Vocabulary(text_size=10)
    assert text.size == 10
    assert not text.is_vision([9]).any()
    with pytest.raises(ValueError, match="text only"):
        text.vision_tokens([[0]])
