"""Questions about a book, all at its end: contexts of any length in which what is learned lies far behind.

As in the Large World Model (arXiv 2402.08268, section 3.2): a book is cut into chunks of about 1000 tokens, each with a
question and its answer; neighbouring chunks are joined to the length wanted, and their questions come after all. The
paper's questions came from a language model; give those of yours. Without any, a chunk's question is a sentence of it
with one word left out, which is found nowhere else in the chunk.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from data.examples import SYSTEM, Example, document_questions
from data.text import TextTokenizer

Pair = tuple[str, str]

CHUNK_TOKENS = 1000
_SENTENCE = re.compile(r"[^.!?]+[.!?]")
_WORD = re.compile(r"[A-Za-z]{5,}")
_FEWEST_WORDS, _MOST_WORDS = 6, 40
# BOS, and what the templates put around each part, may tokenize to a little more than the parts do.
_MARGIN = 8


def book_questions(
    text: str,
    tokenizer: TextTokenizer,
    *,
    max_tokens: int,
    pairs: Sequence[Pair] | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
    system: str = SYSTEM,
    id: str = "",
    source: str = "",
) -> Iterator[Example]:
    """Examples of at most `max_tokens` tokens: some chunks of the book, and then their questions and answers, learned.

    pairs: questions and answers in the order of the book, spread evenly over its chunks; None makes them from it.
    ValueError where a chunk and its question do not fit in `max_tokens`.
    """
    pieces = chunks(text, tokenizer, chunk_tokens)
    asked: list[list[Pair]] = [[] for _ in pieces]
    if pairs is None:
        asked = [[made] if (made := missing_word(piece)) else [] for piece in pieces]
    else:
        for number, pair in enumerate(pairs):
            asked[number * len(pieces) // len(pairs)].append(pair)

    def cost(piece: str, of_piece: Sequence[Pair]) -> int:
        words = [piece, *(f" USER: {question} ASSISTANT: {answer}" for question, answer in of_piece)]
        return sum(len(tokenizer.encode(each)) + _MARGIN for each in words)

    costs = [cost(piece, of_piece) for piece, of_piece in zip(pieces, asked, strict=True)]
    room = max_tokens - len(tokenizer.encode(system)) - _MARGIN
    if max(costs, default=0) > room:
        raise ValueError(
            f"a chunk of {chunk_tokens} tokens and its questions take {max(costs)} tokens, and max_tokens {max_tokens} "
            f"leaves {room}; make the chunks shorter or max_tokens larger"
        )
    groups: list[list[int]] = [[]]
    for number, price in enumerate(costs):
        if groups[-1] and sum(costs[each] for each in groups[-1]) + price > room:
            groups.append([])
        groups[-1].append(number)
    for count, group in enumerate(groups, start=1):
        questions = [pair for number in group for pair in asked[number]]
        if questions:
            document = " ".join(pieces[number] for number in group)
            yield document_questions(document, questions, system=system, id=f"{id}#{count}", source=source)


def chunks(text: str, tokenizer: TextTokenizer, chunk_tokens: int) -> list[str]:
    """The text in pieces of at most `chunk_tokens` tokens, cut between words where there are any."""
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}; it must be at least 1")
    ids = np.asarray(tokenizer.encode(text), np.int64)
    starts = tokenizer.starts_word(ids)
    cuts = [0]
    while len(ids) - cuts[-1] > chunk_tokens:
        (words,) = np.nonzero(starts[cuts[-1] + 1 : cuts[-1] + chunk_tokens + 1])
        cuts.append(cuts[-1] + (int(words[-1]) + 1 if words.size else chunk_tokens))
    cuts.append(len(ids))
    return [piece for begin, end in pairwise(cuts) if (piece := tokenizer.decode(ids[begin:end]).strip())]


def missing_word(piece: str) -> Pair | None:
    """A sentence of the piece with a word left out that the piece has nowhere else, and the word; None without any."""
    counts = Counter(word.lower() for word in _WORD.findall(piece))
    found: list[Pair] = []
    for match in _SENTENCE.finditer(piece):
        sentence = " ".join(match.group().split())
        if not _FEWEST_WORDS <= len(sentence.split()) <= _MOST_WORDS:
            continue
        for word in _WORD.finditer(sentence):
            if counts[word.group().lower()] == 1:
                gap = f"{sentence[: word.start()]}____{sentence[word.end() :]}"
                found.append((f'Which word is missing? "{gap}"', word.group()))
    if not found:
        return None
    draw = int.from_bytes(hashlib.sha256(piece.encode()).digest()[:8], "big")
    return found[draw % len(found)]
