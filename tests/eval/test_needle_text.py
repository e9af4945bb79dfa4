"""Text needles: where they are, how long prompts are, and the dummies that test the whole harness."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.synthetic import CITIES, Haystack, hear, is_held_out, needle_sentence, say
from eval import dummies, needle_text, runner

LENGTHS, DEPTHS = [96, 256, 512], [0.0, 0.5, 1.0]


@pytest.fixture(scope="module")
def cases(tokenizer, text_haystack):
    return needle_text.build_cases(LENGTHS, DEPTHS, 2, 0, tokenizer, text_haystack, num_distractors=1, control_rounds=4)


def _text(case, tokenizer):
    return tokenizer.decode(case.prompt[1:])


def test_every_case_is_there(cases):
    count = {kind: sum(c.kind == kind for c in cases) for kind in ("single", "distractors", "no_needle", "blind")}
    assert count == {"single": 18, "distractors": 18, "no_needle": 12, "blind": 12}
    assert len({c.key for c in cases}) == len(cases)


def test_numbers_were_never_trained_on(cases):
    assert all(is_held_out(int(c.answer)) and len(c.answer) == 3 for c in cases)


def test_prompts_fill_their_length_and_end_in_the_question(cases, tokenizer):
    longest_word = max(len(tokenizer.encode(word)) for word in ("Remembers", "remembers", "teacher", "carries"))
    for case in cases:
        room = len(tokenizer.encode(say(int(case.answer)))) + 1
        assert case.prompt[0] == tokenizer.bos_id
        assert case.prompt.dtype == np.int32
        if case.kind != "blind":
            assert case.length - longest_word <= case.prompt.size + room <= case.length
        city = next((needle.key for needle in case.needles if needle.asked and needle.key), None)
        question = f"What is the special magic {city + ' ' if city else ''}number?"
        assert _text(case, tokenizer).endswith(f"\nUSER: {question} ASSISTANT:")


def test_single_needle_stands_once_at_its_place(cases, tokenizer):
    for case in (c for c in cases if c.kind == "single"):
        sentence = f"The special magic number is: {say(int(case.answer))}."
        assert _text(case, tokenizer).count(sentence) == 1
        (needle,) = case.needles
        assert tokenizer.decode(case.prompt[needle.token_start : needle.token_end]).strip() == sentence
        before, after = (text.split("\nUSER:")[0] for text in _text(case, tokenizer).split(sentence))
        # The depth in letters is close to the depth in tokens, and both to the one asked for.
        assert len(before) / (len(before) + len(after)) == pytest.approx(needle.depth, abs=0.06)
        assert needle.depth == pytest.approx(case.depth, abs=0.11)
        if case.depth == 0:
            assert (needle.token_start, needle.depth) == (1, 0.0)
        if case.depth == 1:
            assert after.strip() == ""
            assert needle.depth == 1.0


def test_distractors_have_other_cities_and_numbers(cases, tokenizer):
    for case in (c for c in cases if c.kind == "distractors"):
        found = dict(re.findall(r"special magic (\w+) number is: (\d{3})\.", hear(_text(case, tokenizer))))
        assert found == {needle.key: needle.number for needle in case.needles}
        assert len(found) == 2
        assert set(found) <= set(CITIES)
        assert [needle.number for needle in case.needles if needle.asked] == [case.answer]
        assert all(0 <= needle.depth <= 1 for needle in case.needles)
        asked = next(needle for needle in case.needles if needle.asked)
        assert asked.depth == pytest.approx(case.depth, abs=0.16)


def test_controls_hold_no_needle(cases, tokenizer):
    for case in (c for c in cases if c.kind in ("no_needle", "blind")):
        assert "is:" not in _text(case, tokenizer)
        assert case.needles == ()
        assert case.describe()["real_depth"] is None
    assert {c.prompt.size for c in cases if c.kind == "blind"} == {c.length for c in cases if c.kind == "blind"}


def test_cases_depend_on_the_seed_alone(cases, tokenizer, text_haystack):
    options = {"num_distractors": 1, "control_rounds": 4}
    again = needle_text.build_cases(LENGTHS, DEPTHS, 2, 0, tokenizer, text_haystack, **options)
    assert [c.key for c in again] == [c.key for c in cases]
    other = needle_text.build_cases(LENGTHS, DEPTHS, 2, 1, tokenizer, text_haystack, **options)
    assert not {c.key for c in other if c.kind != "blind"} & {c.key for c in cases}


@settings(max_examples=40, deadline=None)
@given(length=st.integers(60, 400), depth=st.floats(0, 1), seed=st.integers(0, 2**31))
def test_any_length_and_depth(length, depth, seed, tokenizer, text_haystack):
    case = needle_text.build_cases([length], [depth], 1, seed, tokenizer, text_haystack, control_rounds=0)[0]
    assert case.prompt.size <= length
    (needle,) = case.needles
    sentence = tokenizer.encode(needle_sentence(int(case.answer)))
    assert case.prompt[needle.token_start : needle.token_end].tolist() == sentence
    assert 0 <= needle.depth <= 1


def test_too_short_a_length_is_refused(tokenizer, text_haystack):
    with pytest.raises(ValueError, match=r"length is 20; needles, question and answer alone take \d+ tokens"):
        needle_text.build_cases([20], [0.5], 1, 0, tokenizer, text_haystack)


def test_a_haystack_with_needles_of_its_own_is_refused(tokenizer, texts):
    haystack = Haystack([f"{needle_sentence(5)} {needle_sentence(5)} The king sees a boat."], tokenizer)
    with pytest.raises(ValueError, match="must hold no needles of its own"):
        needle_text.build_cases([256], [0.5], 1, 0, tokenizer, haystack)


def test_finder_takes_whole_needles_only(tokenizer, cases):
    case = next(c for c in cases if c.kind == "single")
    find = needle_text.finder(tokenizer)
    end = case.needles[0].token_end
    assert len(find(case.prompt[:end])) == 1
    assert all(find(case.prompt[: end - cut]) == [] for cut in (1, 2, 3, 4, 5))


def _evaluate(name, cases, tokenizer, tmp_path, **options):
    model = dummies.make(name, needle_text.reader(tokenizer), tokenizer.encode, **options)
    decode = runner.text_decoder(tokenizer)
    return runner.evaluate(cases, model, tmp_path, model_id=name, decode=decode, stop_id=tokenizer.eos_id)


def test_oracle_is_always_right(cases, tokenizer, tmp_path):
    summary = _evaluate("oracle", cases, tokenizer, tmp_path)
    assert summary["accuracy"] == 1.0
    assert summary["distractor_accuracy"] == 1.0
    assert summary["effective_context_length"] == 512
    # Without a needle even the oracle can only guess.
    assert all(counts["guesser_probability"] > 1e-3 for counts in summary["controls"].values())


def test_random_scores_chance(tokenizer, text_haystack, tmp_path):
    cases = needle_text.build_cases([96], DEPTHS, 200, 0, tokenizer, text_haystack, control_rounds=0)
    summary = _evaluate("random", cases, tokenizer, tmp_path)
    assert summary["num_cases"] == 600
    assert summary["accuracy"] < 0.01
    # 1800 digits, each right with probability 0.1: four standard deviations.
    assert summary["digit_accuracy"] == pytest.approx(0.1, abs=4 * (0.1 * 0.9 / 1800) ** 0.5)


def test_first_k_is_right_in_shallow_cells_only(cases, tokenizer, tmp_path):
    singles = [c for c in cases if c.kind == "single"]
    summary = _evaluate("first-k", singles, tokenizer, tmp_path, first_k=170)
    right = {(cell["length"], cell["depth"]): cell["accuracy"] for cell in summary["cells"]}
    assert right == {
        (length, depth): float(length == 96 or (length, depth) == (256, 0.5) or depth == 0.0)
        for length in LENGTHS
        for depth in DEPTHS
    }


def test_unknown_dummies_are_refused():
    with pytest.raises(ValueError, match="unknown model 'best'; .* oracle, random, first-k"):
        dummies.make("best", lambda prompt, limit: None, lambda text: [])
