"""Small worlds: the needle is where it says it is, held-out numbers stay out, plates keep their digits apart."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.synthetic import (
    CITIES,
    Haystack,
    clip_captions,
    draw_number,
    frames_that_fit,
    haystack_frames,
    hear,
    held_out_numbers,
    is_held_out,
    needle_frame,
    needle_question,
    needle_sentence,
    place_text_needle,
    place_video_needle,
    say,
    sentences,
    shape_clip,
    spell,
    video_needle,
)
from data.text import train_tokenizer
from data.vocabulary import Vocabulary


@pytest.fixture(scope="module")
def texts():
    return list(sentences(np.random.default_rng(0), 400))


@pytest.fixture(scope="module")
def tokenizer(texts, tmp_path_factory):
    return train_tokenizer(texts, tmp_path_factory.mktemp("text") / "t.model", size=200)


@pytest.fixture(scope="module")
def haystack(texts, tokenizer):
    return Haystack([" ".join(texts[k : k + 20]) for k in range(0, 400, 20)], tokenizer)


@pytest.fixture(scope="module")
def vocabulary(tokenizer):
    return Vocabulary(tokenizer.size, num_codes=64, vision_size=80)


def test_a_fixed_fifth_is_held_out_and_never_drawn_for_training():
    assert len(held_out_numbers()) == 200
    # The set is part of what a reported accuracy means: it must not move.
    assert sorted(held_out_numbers())[:5] == [4, 5, 7, 27, 31]
    rng = np.random.default_rng(0)
    trained = {draw_number(rng) for _ in range(20000)}
    assert trained == set(range(1000)) - held_out_numbers()
    assert all(is_held_out(draw_number(rng, held_out=True)) for _ in range(100))


def test_the_words_of_a_needle():
    assert needle_sentence(482) == "The special magic number is: red4 green8 blue2."
    assert needle_sentence(7, "Oslo") == "The special magic Oslo number is: red0 green0 blue7."
    assert needle_question() == "What is the special magic number?"
    assert needle_question("Oslo") == "What is the special magic Oslo number?"
    with pytest.raises(ValueError, match="number is 1000"):
        spell(1000)


def test_numbers_in_words_are_heard_as_digits():
    assert all(hear(say(number)) == spell(number) for number in range(1000))
    assert hear("It is red4, green8, blue2.") == "It is 482."
    assert hear("red 4 green 8 blue 2 and red0 green0 blue7") == "482 and 007"
    for other in ("red4 green8", "red4 blue2 green8", "red44 green8 blue2", "infrared4 green8 blue2"):
        assert hear(other) == other


@settings(deadline=None, max_examples=60)
@given(
    length=st.integers(120, 700),
    depth=st.floats(0, 1),
    num_distractors=st.integers(0, 2),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_needle_is_where_it_says(tokenizer, haystack, length, depth, num_distractors, seed):
    length += 60 * num_distractors
    rng = np.random.default_rng(seed)
    placed = place_text_needle(rng, haystack, tokenizer, length, depth=depth, num_distractors=num_distractors)
    assert length - 12 < placed.length <= length
    sentence = needle_sentence(placed.number, placed.key)
    ids = tokenizer.encode(sentence)
    assert placed.tokens[placed.position : placed.position + len(ids)].tolist() == ids
    text = tokenizer.decode(placed.tokens)
    assert text.count(sentence) == 1
    assert text.count("The special magic") == 1 + num_distractors
    assert text.endswith(f"\nUSER: {needle_question(placed.key)} ASSISTANT:")
    # The needle stands between words: taking it out leaves words that were there.
    assert text.replace(sentence, "").split("USER")[0].count("  ") <= 1
    assert placed.answer == spell(placed.number)
    assert tokenizer.decode(placed.answer_tokens) == say(placed.number)
    assert placed.answer_tokens[-1] == tokenizer.eos_id
    assert placed.tokens[0] == tokenizer.bos_id
    assert not is_held_out(placed.number)


def test_depth_is_kept_to_a_tenth(tokenizer, haystack):
    rng = np.random.default_rng(0)
    question = len(tokenizer.encode(f"\nUSER: {needle_question()} ASSISTANT:"))
    needle = len(tokenizer.encode(needle_sentence(123)))
    for depth in (0.0, 0.25, 0.5, 0.75, 1.0):
        for _ in range(20):
            placed = place_text_needle(rng, haystack, tokenizer, 400, depth=depth, number=123)
            around = placed.tokens.size - 1 - needle - question
            assert abs((placed.position - 1) / around - depth) <= 0.1
    assert placed.position - 1 == around


def test_a_needle_stands_between_sentences_where_it_can(tokenizer, haystack):
    rng = np.random.default_rng(0)
    for _ in range(20):
        placed = place_text_needle(rng, haystack, tokenizer, 500, depth=0.5)
        before = tokenizer.decode(placed.tokens[: placed.position])
        assert before.endswith(".")


def test_the_control_has_the_question_and_no_needle(tokenizer, haystack):
    placed = place_text_needle(np.random.default_rng(1), haystack, tokenizer, 300, number=482, present=False)
    text = tokenizer.decode(placed.tokens)
    assert "482" not in hear(text)
    assert "The special magic" not in text
    assert text.endswith("What is the special magic number? ASSISTANT:")
    assert placed.position is None
    assert 280 < placed.length <= 300


def test_distractors_have_other_cities_and_other_trained_numbers(tokenizer, haystack):
    rng = np.random.default_rng(0)
    for _ in range(20):
        placed = place_text_needle(rng, haystack, tokenizer, 800, num_distractors=5, number=min(held_out_numbers()))
        text = hear(tokenizer.decode(placed.tokens)).split("USER")[0]
        found = [sentence.split(".")[0].split() for sentence in text.split("The special magic ")[1:]]
        cities, numbers = [words[0] for words in found], [int(words[-1]) for words in found]
        assert len(set(cities)) == len(set(numbers)) == 6
        assert set(cities) <= set(CITIES)
        assert [number for number in numbers if is_held_out(number)] == [placed.number]
        assert placed.key == cities[numbers.index(placed.number)]


def test_only_the_answer_is_learned(tokenizer, haystack):
    placed = place_text_needle(np.random.default_rng(0), haystack, tokenizer, 200)
    example = placed.example(id="n1", source="text needle")
    assert example.tokens[example.learn].tolist() == placed.answer_tokens.tolist()
    assert example.learn.sum() == placed.answer_tokens.size
    assert len(example) == placed.length
    assert (example.id, example.source) == ("n1", "text needle")


def test_short_text_repeats_to_fill_any_length(tokenizer):
    placed = place_text_needle(np.random.default_rng(0), Haystack(["One day. Two days."], tokenizer), tokenizer, 2000)
    assert 1985 < placed.length <= 2000


@pytest.mark.parametrize(
    ("length", "options", "message"),
    [
        (40, {}, "length is 40; needles, question and answer alone take"),
        (400, {"depth": 1.5}, "depth is 1.5"),
        (400, {"num_distractors": 40}, "num_distractors is 40"),
        (400, {"num_distractors": 1, "keyed": False}, "keyed is False"),
        (400, {"number": -1}, "number is -1"),
    ],
)
def test_impossible_needles_name_the_argument(tokenizer, haystack, length, options, message):
    with pytest.raises(ValueError, match=message):
        place_text_needle(np.random.default_rng(0), haystack, tokenizer, length, **options)


def test_the_same_seed_gives_the_same_needle(tokenizer, haystack):
    first, second = (place_text_needle(np.random.default_rng(9), haystack, tokenizer, 300) for _ in range(2))
    np.testing.assert_array_equal(first.tokens, second.tokens)
    assert first.answer == second.answer


@pytest.mark.parametrize("size", [32, 64, 128, 256])
def test_plates_are_all_different_and_keep_their_digits_apart(size):
    patch = size // 4
    plates = {number: needle_frame(number, size) for number in (482, 82, 412, 489, 999, 111)}
    for plate in plates.values():
        assert plate.shape == (size, size, 3)
        assert plate.dtype == np.uint8
    # Another digit in one slot changes that slot's column of patches and nothing else.
    for slot, other in enumerate((82, 412, 489)):
        changed = (plates[482] != plates[other]).any(axis=(0, 2))
        (columns,) = np.nonzero(changed)
        assert slot * patch <= columns.min()
        assert columns.max() < (slot + 1) * patch
        (rows,) = np.nonzero((plates[482] != plates[other]).any(axis=(1, 2)))
        assert patch <= rows.min()
        assert rows.max() < 3 * patch
    corners = plates[482][0, [0, patch, 2 * patch]].astype(int)
    assert corners.argmax(axis=1).tolist() == [0, 1, 2]


def test_every_number_has_its_own_plate():
    assert len({needle_frame(number, 32).tobytes() for number in range(1000)}) == 1000


@pytest.mark.parametrize("size", [16, 66])
def test_plates_of_odd_sizes_are_refused(size):
    with pytest.raises(ValueError, match=f"size is {size}"):
        needle_frame(1, size)


@pytest.mark.parametrize(("depth", "frame"), [(0.0, 0), (0.5, 4), (1.0, 8)])
def test_a_video_needle_replaces_one_frame(depth, frame):
    codes = np.arange(36).reshape(9, 4)
    placed, where = place_video_needle(codes, [60, 61, 62, 63], depth)
    assert where == frame
    expected = codes.copy()
    expected[frame] = [60, 61, 62, 63]
    np.testing.assert_array_equal(placed, expected)
    assert codes.max() == 35
    with pytest.raises(ValueError, match="must match"):
        place_video_needle(codes, [1, 2], 0.5)


def test_a_video_question_holds_the_plate_at_its_position(tokenizer, vocabulary):
    codes = np.random.default_rng(0).integers(0, 60, (9, 4))
    needle = np.array([60, 61, 62, 63])
    placed = video_needle(codes, needle, 482, 0.5, tokenizer, vocabulary)
    assert placed.frame == 4
    at = placed.position
    np.testing.assert_array_equal(placed.tokens[at : at + 4] - vocabulary.text_size, needle)
    assert placed.tokens[at - 1] == vocabulary.eof
    assert tokenizer.decode(placed.answer_tokens) == "red4 green8 blue2"
    tail = placed.tokens[placed.tokens.tolist().index(vocabulary.eov) + 1 :]
    assert tokenizer.decode(tail) == "</vision> \nUSER: What number is on the plate? ASSISTANT:"
    control = video_needle(codes, needle, 482, 0.5, tokenizer, vocabulary, present=False)
    assert control.length == placed.length
    vision = vocabulary.is_vision(control.tokens)
    np.testing.assert_array_equal(vocabulary.split_frames(control.tokens[vision]), codes)
    assert control.position is None


@pytest.mark.parametrize("codes_per_frame", [4, 16])
def test_frames_fill_the_length_and_no_more(tokenizer, vocabulary, codes_per_frame):
    for length in (100, 101, 333):
        count = frames_that_fit(length, codes_per_frame, tokenizer, vocabulary)
        made = [
            video_needle(np.zeros((t, codes_per_frame), int), [1] * codes_per_frame, 1, 0.0, tokenizer, vocabulary)
            for t in (count, count + 1)
        ]
        assert made[0].length <= length < made[1].length
    with pytest.raises(ValueError, match="length is 20; one frame"):
        frames_that_fit(20, codes_per_frame, tokenizer, vocabulary)


def test_haystack_frames_come_from_the_clips_in_their_order():
    clips = [np.arange(7)[:, None], 100 + np.arange(3)[:, None]]
    frames = haystack_frames(np.random.default_rng(0), clips, 40)
    assert frames.shape == (40, 1)
    steps = np.diff(frames[:, 0])
    assert set(np.unique(frames)) == {0, 1, 2, 3, 4, 5, 6, 100, 101, 102}
    assert (steps == 1).sum() > 20
    assert haystack_frames(np.random.default_rng(0), clips, 2).shape == (2, 1)
    with pytest.raises(ValueError, match="no clips"):
        haystack_frames(np.random.default_rng(0), [], 2)


def test_captions_say_what_the_file_is_called():
    assert clip_captions("/x/MyDog_2.mp4") == ("mydog 2", "a video of mydog 2", "a clip showing mydog 2")
    assert all("rabbit" in caption for caption in clip_captions("bigbuckbunny.mp4"))


@pytest.mark.parametrize("seed", range(8))
def test_shapes_do_what_their_caption_says(seed):
    pixels, caption = shape_clip(np.random.default_rng(seed), 6, 32)
    assert pixels.shape == (6, 32, 32, 3)
    assert pixels.dtype == np.uint8
    _, colour, _, _, direction = caption.split()
    lit = pixels.max(axis=-1) > 100
    middles = np.array([np.argwhere(frame).mean(axis=0) for frame in lit])
    down, right = middles[-1] - middles[0]
    assert {"left": right < -10, "right": right > 10, "up": down < -10, "down": down > 10}[direction]
    mean = pixels[lit].mean(axis=0)
    assert {
        "red": mean.argmax() == 0 and mean[1] < 100,
        "green": mean.argmax() == 1,
        "blue": mean.argmax() == 2,
        "yellow": mean[2] < 100 < mean[1],
    }[colour]
