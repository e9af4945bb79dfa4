"""RULER's other needle tasks in text (Hsieh et al., arXiv 2404.06654): several values, several queries, variables.

multi_value: one city has several numbers, and all are asked for. multi_query: several cities are asked for at once,
among as many others. variables: a variable has a number, others are said to be the same as the one before, along a
chain; asked for are the names of all that have the number, and a second chain has another one.
(RULER's several keys are the cases with distractors of `eval.needle_text`.)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from data.synthetic import CITIES, Haystack, draw_number, hear, insert_needles, needle_sentence, say, spell
from data.text import TextTokenizer
from eval.dummies import Reader
from eval.grid import Spec, family_specs
from eval.haystack import question_tokens
from eval.protocol import TEXT_FAMILIES, Case, Kind, Placed

# Capitals that even a small tokenizer has pieces for.
_CAPITALS = "ABDEGHIJLMNOPRST"
_NAME = f"[{_CAPITALS}]{{3}}"
_NEEDLE = re.compile(r"The special magic (\w+) number is: (\d{3})\.")
_HAS = re.compile(rf"Variable ({_NAME}) is (\d{{3}})\.")
_SAME = re.compile(rf"Variable ({_NAME}) is variable ({_NAME})\.")


class _Asked(NamedTuple):
    """sentences in the order they stand in the text, each with what it says; question, answer text and references."""

    sentences: list[tuple[str, Placed]]
    question: str
    answer: str
    references: tuple[str, ...]


def build_cases(
    families: Sequence[Kind],
    lengths: Sequence[int],
    rounds: int,
    seed: int,
    tokenizer: TextTokenizer,
    haystack: Haystack,
    *,
    num_needles: int = 4,
) -> list[Case]:
    """All cases of the families; `lengths` as in `eval.needle_text.build_cases`.

    num_needles: values, queries or names asked for.
    """
    if unknown := [name for name in families if name not in TEXT_FAMILIES]:
        raise ValueError(f"there is no family {unknown[0]!r}; choose of {', '.join(TEXT_FAMILIES)}")
    if not 2 <= num_needles <= len(CITIES) // 2:
        raise ValueError(f"num_needles is {num_needles}; it must lie between 2 and {len(CITIES) // 2}")
    specs = family_specs(families, lengths, rounds, seed)
    return [_build(spec, tokenizer, haystack, num_needles) for spec in specs]


def _build(spec: Spec, tokenizer: TextTokenizer, haystack: Haystack, num_needles: int) -> Case:
    rng = spec.rng()
    makers = {"multi_value": _multi_value, "multi_query": _multi_query, "variables": _variables}
    made = makers[spec.kind](rng, num_needles)
    ids = [np.asarray(tokenizer.encode(sentence), np.int32) for sentence, _ in made.sentences]
    asked = question_tokens(made.question, tokenizer)
    answer_size = len(tokenizer.encode(made.answer)) + 1
    fixed = 1 + sum(each.size for each in ids) + asked.size + answer_size
    if fixed > spec.length:
        raise ValueError(f"length is {spec.length}; needles, question and answer alone take {fixed} tokens")
    text, sentences, words = haystack.cut(rng, spec.length - fixed)
    depths = np.sort(rng.random(len(ids)))
    context, starts = insert_needles(text, list(zip(depths.tolist(), ids, strict=True)), sentences, words)
    tokens = np.concatenate([np.asarray([tokenizer.bos_id], np.int32), context, asked])
    needles = []
    before = 0
    for start, each, (sentence, said) in zip(starts, ids, made.sentences, strict=True):
        begin, end = 1 + start, 1 + start + each.size
        if hear(tokenizer.decode(tokens[begin:end])).strip() != hear(sentence):
            raise ValueError(
                f"{sentence!r} reads back as {tokenizer.decode(tokens[begin:end])!r}; use another tokenizer"
            )
        depth = (start - before) / text.size if text.size else 0.0
        needles.append(Placed(said.number, said.key, depth, begin, end, asked=said.asked))
        before += each.size
    return Case(
        "text",
        spec.kind,
        spec.length,
        None,
        spec.round,
        tokens.astype(np.int32),
        ", ".join(made.references),
        tuple(needles),
        answers=made.references,
        metric="share",
    )


def _said(number: int, key: str, *, asked: bool = True) -> Placed:
    return Placed(spell(number), key, 0.0, 0, 0, asked=asked)


def _numbers(rng: np.random.Generator, count: int) -> list[int]:
    """Different numbers that training never shows."""
    numbers: list[int] = []
    while len(numbers) < count:
        number = draw_number(rng, held_out=True)
        numbers += [] if number in numbers else [number]
    return numbers


def _multi_value(rng: np.random.Generator, count: int) -> _Asked:
    city = str(rng.choice(CITIES))
    numbers = _numbers(rng, count)
    sentences = [(needle_sentence(number, city), _said(number, city)) for number in numbers]
    answer = ", ".join(map(say, numbers))
    return _Asked(sentences, f"What are all the special magic {city} numbers?", answer, tuple(map(spell, numbers)))


def _multi_query(rng: np.random.Generator, count: int) -> _Asked:
    cities = [str(city) for city in rng.choice(CITIES, 2 * count, replace=False)]
    numbers = _numbers(rng, 2 * count)
    wanted = cities[:count]
    order = rng.permutation(2 * count)
    sentences = [
        (needle_sentence(numbers[i], cities[i]), _said(numbers[i], cities[i], asked=cities[i] in wanted)) for i in order
    ]
    question = f"What are the special magic numbers of {', '.join(wanted[:-1])} and {wanted[-1]}?"
    return _Asked(sentences, question, ", ".join(map(say, numbers[:count])), tuple(map(spell, numbers[:count])))


def _variables(rng: np.random.Generator, count: int) -> _Asked:
    names: list[str] = []
    while len(names) < 2 * count:
        name = "".join(rng.choice(list(_CAPITALS), 3))
        names += [] if name in names else [name]
    number, other = _numbers(rng, 2)
    chains = []
    for value, chain, asked in ((number, names[:count], True), (other, names[count:], False)):
        said = [f"Variable {chain[0]} is {say(value)}."]
        said += [f"Variable {name} is variable {before}." for before, name in zip(chain, chain[1:], strict=False)]
        chains.append([(text, _said(value, name, asked=asked)) for text, name in zip(said, chain, strict=True)])
    # The two chains are shuffled into one another; each keeps its order.
    first = set(rng.choice(2 * count, count, replace=False).tolist())
    parts = [iter(chain) for chain in chains]
    sentences = [next(parts[0] if place in first else parts[1]) for place in range(2 * count)]
    return _Asked(sentences, f"Which variables are {say(number)}?", ", ".join(names[:count]), tuple(names[:count]))


def reader(tokenizer: TextTokenizer) -> Reader:
    """Reads what a family's question asks for from a prompt's first tokens, as a perfect model would."""

    def read(prompt: np.ndarray, limit: int) -> str | None:
        question = hear(_decoded(prompt[-200:], tokenizer)).rpartition("USER:")[2]
        if not re.search(r"special magic numbers of|all the special magic|Which variables", question):
            return None
        text = hear(_decoded(prompt[:limit], tokenizer))
        if asked := re.search(r"Which variables are (\d{3})\?", question):
            values = dict(_HAS.findall(text))
            for name, source in _SAME.findall(text):
                values[name] = values.get(source)
            found = [name for name, value in values.items() if value == asked[1]]
        else:
            cities = [city for city in CITIES if re.search(rf"\b{city}\b", question)]
            found = [number for city, number in _NEEDLE.findall(text) if city in cities]
        return ", ".join(found) if found else None

    return read


def _decoded(ids: np.ndarray, tokenizer: TextTokenizer) -> str:
    return " ".join(tokenizer.decode(ids[ids < tokenizer.size]).split())
