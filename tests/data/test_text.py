"""SentencePiece: round trips, digits one by one, determinism, and errors that name the file."""

import hashlib
import pickle

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from data.text import TextTokenizer, read_text, train_tokenizer

TEXTS = [
    "In the beginning was the word, and the word was long.\nThe quick brown fox jumps over the lazy dog.",
    "She sells sea shells by the sea shore; the shells she sells are sea shells, she is sure.",
    "How much wood would a woodchuck chuck if a woodchuck could chuck wood?",
] * 10


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return train_tokenizer(iter(TEXTS), tmp_path_factory.mktemp("text") / "small.model", size=160)


def pieces(tokenizer, text):
    return [tokenizer.decode([i]) for i in tokenizer.encode(text)]


def test_llama_ids_and_size(tokenizer):
    assert (tokenizer.size, tokenizer.bos_id, tokenizer.eos_id) == (160, 1, 2)


def test_no_bos_or_eos_inside_a_field(tokenizer):
    assert tokenizer.encode("") == []
    assert not {1, 2} & set(tokenizer.encode("<s> In the beginning </s>"))


def test_digits_are_pieces_of_their_own(tokenizer):
    assert [p for p in pieces(tokenizer, "number 48213.") if p.isdigit()] == list("48213")


def test_markers_are_one_piece_each(tokenizer):
    with_markers, without = (len(tokenizer.encode(text)) for text in ("the<vision></vision>sea", "thesea"))
    assert with_markers <= without + 3
    assert {"<vision>", "</vision>"} <= set(pieces(tokenizer, "the<vision></vision>sea"))


@settings(deadline=None)
@given(st.text(alphabet=st.characters(min_codepoint=33, max_codepoint=126) | st.sampled_from(" \n"), max_size=60))
def test_printable_text_survives_a_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_word_starts_are_where_the_words_begin(tokenizer):
    ids = tokenizer.encode("the quick sea shells")
    starts = tokenizer.starts_word(ids)
    cuts = [*(int(k) for k in starts.nonzero()[0]), len(ids)]
    words = [tokenizer.decode(ids[a:b]) for a, b in zip(cuts, cuts[1:], strict=False)]
    assert words == ["the", "quick", "sea", "shells"]


def test_bytes_stand_in_for_unseen_characters(tmp_path):
    tokenizer = train_tokenizer(TEXTS, tmp_path / "b.model", size=420, byte_fallback=True)
    assert tokenizer.decode(tokenizer.encode("naïve 猫 🙂")) == "naïve 猫 🙂"


def test_the_same_texts_give_the_same_file(tmp_path, tokenizer):
    again = train_tokenizer(TEXTS, tmp_path / "again" / "x.model", size=160)
    assert again.fingerprint == tokenizer.fingerprint
    assert hashlib.sha256((tmp_path / "again" / "x.model").read_bytes()).hexdigest() == again.fingerprint
    assert [entry.name for entry in (tmp_path / "again").iterdir()] == ["x.model"]


def test_loading_matches_sentencepiece_itself(tmp_path):
    path = tmp_path / "x.model"
    train_tokenizer(TEXTS, path, size=160)
    loaded = TextTokenizer.load(path)
    reference = sentencepiece.SentencePieceProcessor(model_file=str(path))
    assert loaded.encode("the sea 12") == reference.encode("the sea 12")
    assert pickle.loads(pickle.dumps(loaded)).encode("the sea") == reference.encode("the sea")


@pytest.mark.parametrize("i", [-1, 160])
def test_ids_outside_text_are_refused(tokenizer, i):
    with pytest.raises(ValueError, match=rf"id {i} is not a text id.*0 .. 159"):
        tokenizer.decode([3, i])


@pytest.mark.parametrize("content", [None, b"", b"not a model"])
def test_what_is_no_model_is_named(tmp_path, content):
    path = tmp_path / "odd.model"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=r"odd\.model"):
        TextTokenizer.load(path)


def test_a_model_without_eos_is_refused(tmp_path):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_prefix=str(tmp_path / "m"), vocab_size=50, eos_id=-1, minloglevel=2
    )
    with pytest.raises(ValueError, match="has no EOS"):
        TextTokenizer.load(tmp_path / "m.model")


@pytest.mark.parametrize(
    ("texts", "size", "message"),
    [([], 160, "no text"), (["", " \n "], 160, "no text"), (TEXTS, 20, "20 pieces"), (TEXTS, 0, "at least 1")],
)
def test_impossible_training_is_one_sentence(tmp_path, texts, size, message):
    with pytest.raises(ValueError, match=message) as caught:
        train_tokenizer(texts, tmp_path / "x.model", size=size)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_path_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written"):
        train_tokenizer(TEXTS, tmp_path / "file" / "x.model", size=160)


@pytest.mark.parametrize(("content", "message"), [(None, "cannot be read"), (b" \n", "empty"), (b"a\xff", "UTF-8")])
def test_bad_text_files_are_named(tmp_path, content, message):
    path = tmp_path / "page.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"page\.txt.*{message}"):
        read_text(path)


def test_reading_a_text_file(tmp_path):
    (tmp_path / "page.txt").write_text("œuvre\n", encoding="utf-8")
    assert read_text(tmp_path / "page.txt") == "œuvre\n"
