"""A needle in text: a sentence with a number somewhere in a long text, asked for at the end.

The needle's sentence, its place and the prompt come from data.synthetic, as in training; the numbers are the ones that
training never shows. Every prompt is read back: what a case says about its needles was found in its tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import takewhile

import numpy as np

from data import synthetic
from data.synthetic import CITIES, Haystack, needle_question, needle_sentence
from data.text import TextTokenizer
from eval.dummies import Reader
from eval.grid import Spec, specs
from eval.haystack import blind_prompt, question_tokens
from eval.protocol import Case, Placed


def build_cases(
    lengths: Sequence[int],
    depths: Sequence[float],
    rounds: int,
    seed: int,
    tokenizer: TextTokenizer,
    haystack: Haystack,
    *,
    num_distractors: int = 0,
    distractor_rounds: int | None = None,
    control_rounds: int | None = None,
) -> list[Case]:
    """All cases of the grid (see `eval.grid.specs`), every one with a number that training never shows.

    lengths: tokens of context, question and answer together, so that a model trained at a length is asked at it. A
    prompt is shorter than that by its answer and by less than one word. depths: 0 (start) to 1 (end).
    num_distractors: other cities' needles beside the asked one in the cases of kind "distractors"; 0 makes no such
    cases. distractor_rounds: as many as rounds when None.
    """
    crowded = 0 if num_distractors == 0 else rounds if distractor_rounds is None else distractor_rounds
    find = finder(tokenizer)
    grid = specs(lengths, depths, rounds, seed, distractor_rounds=crowded, control_rounds=control_rounds)
    return [_build(spec, tokenizer, haystack, find, num_distractors) for spec in grid]


def _build(
    spec: Spec,
    tokenizer: TextTokenizer,
    haystack: Haystack,
    find: Callable[[np.ndarray], list[Placed]],
    num_distractors: int,
) -> Case:
    rng = spec.rng()
    number = synthetic.draw_number(rng, held_out=True)
    if spec.kind == "blind":
        prompt = blind_prompt(needle_question(), tokenizer)
        return Case("text", "blind", prompt.size, None, spec.round, prompt, synthetic.spell(number))
    placed = synthetic.place_text_needle(
        rng,
        haystack,
        tokenizer,
        spec.length,
        number=number,
        depth=spec.depth,
        num_distractors=num_distractors if spec.kind == "distractors" else 0,
        present=spec.kind != "no_needle",
    )
    asked = question_tokens(needle_question(placed.key), tokenizer)
    assert np.array_equal(placed.tokens[-asked.size :], asked), "the prompt does not end in its question"
    needles = _measured(find(placed.tokens), placed.tokens.size - 1 - asked.size, placed.position)
    expected = 0 if spec.kind == "no_needle" else 1 + placed.num_distractors
    answers = [needle.number for needle in needles if needle.asked]
    if len(needles) != expected or (expected and answers != [placed.answer]):
        raise ValueError(
            f"a prompt of {spec.length} tokens reads back with {len(needles)} needles instead of {expected}; the "
            "haystack must hold no needles of its own, and the tokenizer must keep digits and letters"
        )
    return Case("text", spec.kind, spec.length, spec.depth, spec.round, placed.tokens, placed.answer, tuple(needles))


def _measured(found: Sequence[Placed], context_size: int, position: int | None) -> list[Placed]:
    """Found needles with their depths in the haystack, needles not counted; the asked one starts at `position`."""
    hay = context_size - sum(needle.token_end - needle.token_start for needle in found)
    result, needle_tokens = [], 0
    for needle in found:
        before = needle.token_start - 1 - needle_tokens
        needle_tokens += needle.token_end - needle.token_start
        depth = before / hay if hay else 0.0
        asked = needle.token_start == position
        result.append(Placed(needle.number, needle.key, depth, needle.token_start, needle.token_end, asked=asked))
    return result


def finder(tokenizer: TextTokenizer) -> Callable[[np.ndarray], list[Placed]]:
    """Finds every needle among tokens, int32 [n], in order; their depths are not measured (0)."""
    heads: dict[str | None, bytes] = {}
    for key in (None, *CITIES):
        # What the sentences of two numbers have in common is the part before the number.
        pair = (tokenizer.encode(needle_sentence(number, key)) for number in (111, 222))
        common = [a for a, _ in takewhile(lambda ab: ab[0] == ab[1], zip(*pair, strict=False))]
        heads[key] = np.asarray(common, np.int32).tobytes()

    def find(tokens: np.ndarray) -> list[Placed]:
        tokens = np.ascontiguousarray(tokens, np.int32)
        content = tokens.tobytes()
        found = []
        for key, head in heads.items():
            start = content.find(head)
            while start >= 0:
                if start % 4 == 0 and (needle := _parse(tokens, start // 4, key, tokenizer)):
                    found.append(needle)
                start = content.find(head, start + 1)
        return sorted(found, key=lambda needle: needle.token_start)

    return find


def _parse(tokens: np.ndarray, start: int, key: str | None, tokenizer: TextTokenizer) -> Placed | None:
    """The needle that starts at `start`, or None when it is cut off before its end."""
    size = len(tokenizer.encode(needle_sentence(111, key)))
    rest = tokens[start : start + size + 4]
    named = re.search(r"(\d{3})\.", synthetic.hear(tokenizer.decode(rest[rest < tokenizer.size])))
    if not named:
        return None
    sentence = tokenizer.encode(needle_sentence(int(named[1]), key))
    if not np.array_equal(tokens[start : start + len(sentence)], sentence):
        return None
    return Placed(named[1], key, 0.0, start, start + len(sentence))


def reader(tokenizer: TextTokenizer) -> Reader:
    """Reads the asked needle's number from a prompt's first tokens, as a perfect model would."""
    find = finder(tokenizer)
    questions = {key: question_tokens(needle_question(key), tokenizer) for key in (None, *CITIES)}

    def read(prompt: np.ndarray, limit: int) -> str | None:
        keys = [key for key, asked in questions.items() if np.array_equal(prompt[-asked.size :], asked)]
        found = [needle.number for needle in find(prompt[:limit]) if needle.key in keys]
        return found[0] if found else None

    return read
