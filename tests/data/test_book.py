"""Questions about a book: where it is cut, what is asked, and that every answer stands in the document before it."""

import pytest

from data.book import book_questions, chunks, missing_word
from data.examples import tokenize
from data.text import train_tokenizer
from data.vocabulary import Vocabulary

NAMES = ["amber", "basil", "cedar", "dahlia", "elder", "fennel", "ginger", "hazel", "indigo", "jasmine"]
BOOK = " ".join(
    f"In the garden of house number {number} there grows a {name}{number % 7}x tree. Its owner is called {name.title()}"
    f"son and he waters it well every single morning."
    for number, name in enumerate(NAMES * 12)
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return train_tokenizer([BOOK], tmp_path_factory.mktemp("t") / "t.model", size=220)


def test_chunks_are_whole_words_and_lose_nothing(tokenizer):
    pieces = chunks(BOOK, tokenizer, 100)
    assert len(pieces) > 20
    assert " ".join(pieces) == BOOK
    assert max(len(tokenizer.encode(piece)) for piece in pieces) <= 101
    assert chunks("x" * 400, tokenizer, 50)  # no words to cut between


def test_the_missing_word_is_missed_nowhere_else():
    question, word = missing_word(BOOK[:150] + " Nothing else was ever planted by anybody around here.")
    assert question.startswith('Which word is missing? "')
    assert "____" in question
    assert word not in question
    assert missing_word("Too short. No.") is None
    assert missing_word("") is None


@pytest.mark.parametrize("pairs", [None, [(f"Question {k}?", f"Answer {k}.") for k in range(9)]])
def test_examples_fit_and_ask_at_the_end(tokenizer, pairs):
    made = list(book_questions(BOOK, tokenizer, max_tokens=800, chunk_tokens=150, pairs=pairs, id="b", source="b.txt"))
    assert len(made) > 3
    assert [example.id for example in made] == [f"b#{k}" for k in range(1, len(made) + 1)]
    tokenized = [tokenize(example, tokenizer, Vocabulary(300)) for example in made]
    assert max(map(len, tokenized)) <= 800
    assert sum(map(len, tokenized)) > 0.7 * 800 * (len(made) - 1)
    answers = []
    for example in made:
        document, *rest = example.spans
        assert not document.learn
        assert [span.learn for span in rest] == [False, True] * (len(rest) // 2)
        answers += [span.text for span in rest[1::2]]
        if pairs is None:
            assert all(span.text in document.text for span in rest[1::2])
    if pairs is not None:
        assert answers == [answer for _, answer in pairs]


def test_a_chunk_that_does_not_fit_is_refused(tokenizer):
    with pytest.raises(ValueError, match="make the chunks shorter or max_tokens larger"):
        list(book_questions(BOOK, tokenizer, max_tokens=120, chunk_tokens=150))
    with pytest.raises(ValueError, match="chunk_tokens is 0"):
        chunks(BOOK, tokenizer, 0)
