"""Corpora on disk: what goes in comes out, and nothing unfinished or damaged is taken for whole."""

import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from data.build import Corpus, Job, begin_shards, build_corpus, write_shard
from data.examples import BadExample, TokenizedExample
from data.vocabulary import Vocabulary

VOCABULARY = Vocabulary(text_size=50, num_codes=8, vision_size=16)


def make_examples(count, seed=0):
    rng = np.random.default_rng(seed)
    for index in range(count):
        size = int(rng.integers(2, 40))
        learn = rng.random(size) < 0.5
        learn[-1] = True
        yield TokenizedExample(rng.integers(0, 66, size), learn, id=f"é{index}", source=f"file{index % 3}")


def build(directory, examples=None, **options):
    options = {"input_fingerprint": "input-a", "vocabulary": VOCABULARY, "tokenizers": {"text": "t"}} | options
    return build_corpus(directory, "small", make_examples(30) if examples is None else examples, **options)


@pytest.mark.parametrize(("part_tokens", "most_parts"), [(1 << 20, 1), (100, 10), (1, 30)])
def test_examples_come_back_in_order_with_lengths_and_counts(tmp_path, part_tokens, most_parts):
    done = []
    corpus = build(tmp_path / "c", part_tokens=part_tokens, progress=done.append)
    expected = list(make_examples(30))
    assert done == list(range(1, 31))
    assert len(corpus) == 30
    assert corpus.name == "small"
    assert corpus.vocabulary == VOCABULARY
    assert corpus.tokenizers == {"text": "t"}
    files = list((tmp_path / "c").glob("part-*/tokens/1.0.0/*.array_record*"))
    assert most_parts // 2 < len(files) == len(corpus.manifest["parts"]) <= most_parts
    for index in [29, 0, 17, *range(30)]:
        got = corpus[index]
        np.testing.assert_array_equal(got.tokens, expected[index].tokens)
        np.testing.assert_array_equal(got.learn, expected[index].learn)
        assert got.tokens.dtype == np.int32
        assert got.learn.dtype == np.bool_
        assert (got.id, got.source) == (expected[index].id, expected[index].source)
    assert corpus.lengths.dtype == np.int32
    assert corpus.lengths.tolist() == [len(example) - 1 for example in expected]
    vision = [(example.tokens >= 50)[1:] for example in expected]
    learned = [
        [int((e.learn[1:] & ~v).sum()), int((e.learn[1:] & v).sum())] for e, v in zip(expected, vision, strict=True)
    ]
    assert corpus.learned.tolist() == learned
    assert corpus.counts["tokens"] == sum(len(example) for example in expected)
    assert corpus.counts["learned"] == int(np.sum(learned))
    with pytest.raises(IndexError):
        corpus[30]
    with pytest.raises(IndexError):
        corpus[-1]
    mixed = [29, 3, 28, 3]
    assert [example.id for example in corpus.read(mixed)] == [f"é{index}" for index in mixed]
    corpus.verify()
    assert len(list(iter(corpus))) == 30


def test_no_leftovers_beside_a_finished_corpus(tmp_path):
    build(tmp_path / "c")
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]
    assert sorted(entry.name for entry in (tmp_path / "c").iterdir()) == [
        "learned.npy", "lengths.npy", "manifest.json", "part-00000",
    ]  # fmt: skip


def test_the_fingerprint_depends_on_content_alone(tmp_path):
    first = build(tmp_path / "a").fingerprint
    assert build(tmp_path / "b", part_tokens=50, input_fingerprint="other").fingerprint == first
    assert build(tmp_path / "c", make_examples(30, seed=1)).fingerprint != first
    assert build(tmp_path / "d", tokenizers={"text": "other"}).fingerprint != first


def test_a_corpus_survives_pickling(tmp_path):
    corpus = pickle.loads(pickle.dumps(build(tmp_path / "c")))
    assert corpus[3].id == "é3"


def test_a_finished_corpus_is_returned_without_touching_the_examples(tmp_path):
    built = build(tmp_path / "c")

    def explode():
        raise AssertionError("examples were read")
        yield

    assert build(tmp_path / "c", explode()).fingerprint == built.fingerprint


def test_other_input_is_refused_or_replaces_when_asked(tmp_path):
    old = build(tmp_path / "c").fingerprint
    with pytest.raises(ValueError, match="made from other input"):
        build(tmp_path / "c", make_examples(30, seed=1), input_fingerprint="input-b")
    assert Corpus.open(tmp_path / "c").fingerprint == old
    new = build(tmp_path / "c", make_examples(30, seed=1), input_fingerprint="input-b", overwrite=True)
    assert new.fingerprint != old
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]


def test_a_killed_build_leaves_no_corpus_and_the_next_one_finishes(tmp_path):
    program = textwrap.dedent("""
        import os, signal, sys
        sys.path[:0] = [sys.argv[1], os.path.dirname(sys.argv[2])]
        from test_build import build, make_examples
        def examples():
            for index, example in enumerate(make_examples(30)):
                if index == 20:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield example
        build(sys.argv[3], examples())
    """)
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", program, str(root), __file__, str(tmp_path / "c")]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert not (tmp_path / "c").exists()
    with pytest.raises(ValueError, match="no corpus"):
        Corpus.open(tmp_path / "c")
    assert len(build(tmp_path / "c")) == 30
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]


def test_two_builders_do_not_mix(tmp_path):
    def meddled():
        yield from make_examples(10)
        with pytest.raises(ValueError, match="another process"):
            build(tmp_path / "c")
        yield from make_examples(10, seed=5)

    assert len(build(tmp_path / "c", meddled())) == 20


def test_errors_in_the_examples_pass_through_and_leave_nothing(tmp_path):
    class Odd(Exception):
        def __init__(self, a, b):
            super().__init__(a)
            self.b = b

    def broken():
        yield from make_examples(3)
        raise Odd("inside", 7)

    with pytest.raises(Odd) as caught:
        build(tmp_path / "c", broken())
    assert caught.value.b == 7
    assert list(tmp_path.iterdir()) == []


def test_unusable_examples_are_listed_up_to_a_share(tmp_path):
    bad = [
        BadExample("x", "x.mp4", "x.mp4: no video stream"),
        TokenizedExample([1], [True], "short", ""),
        TokenizedExample([1, 2], [True, False], "unlearned", ""),
    ]
    corpus = build(tmp_path / "c", [*bad, *make_examples(30)])
    assert corpus.counts["skipped"] == 3
    assert [record["id"] for record in corpus.manifest["skipped"]] == ["x", "short", "unlearned"]
    with pytest.raises(ValueError, match=r"3 of 13 examples are unusable.*no video stream"):
        build(tmp_path / "d", [*bad, *make_examples(10)])
    with pytest.raises(ValueError, match="empty: 3 examples"):
        build(tmp_path / "d", bad)
    with pytest.raises(ValueError, match="empty: 0 examples"):
        build(tmp_path / "d", [])
    assert not (tmp_path / "d").exists()


def test_ids_outside_the_vocabulary_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"'e'.*0 .. 65"):
        build(tmp_path / "c", [TokenizedExample([1, 66], [True, True], "e", "")])


def test_opening_what_is_no_corpus_says_so_in_one_sentence(tmp_path):
    with pytest.raises(ValueError, match="no such directory"):
        Corpus.open(tmp_path / "absent")
    with pytest.raises(ValueError, match="no finished corpus"):
        Corpus.open(tmp_path)
    (tmp_path / "mine.txt").write_text("kept")
    with pytest.raises(ValueError, match="not a corpus"):
        build(tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "kept"


def damage_manifest(directory):
    (directory / "manifest.json").write_text("{")


def damage_format(directory):
    (directory / "manifest.json").write_text(json.dumps({"format": 99}))


def damage_fields(directory):
    (directory / "manifest.json").write_text(json.dumps({"format": 1}))


def cut_records(directory):
    (file,) = directory.glob("part-*/tokens/1.0.0/*.array_record*")
    os.truncate(file, file.stat().st_size - 1)


def remove_lengths(directory):
    (directory / "lengths.npy").unlink()


@pytest.mark.parametrize("damage", [damage_manifest, damage_format, damage_fields, cut_records, remove_lengths])
def test_a_damaged_corpus_is_refused_and_built_again(tmp_path, damage):
    build(tmp_path / "c")
    damage(tmp_path / "c")
    with pytest.raises(ValueError, match="build it again") as caught:
        Corpus.open(tmp_path / "c")
    assert "\n" not in str(caught.value)
    assert len(build(tmp_path / "c")) == 30


def test_a_flipped_bit_is_found(tmp_path):
    corpus = build(tmp_path / "c")
    (file,) = (tmp_path / "c").glob("part-*/tokens/1.0.0/*.array_record*")
    content = bytearray(file.read_bytes())
    content[70] ^= 4
    file.write_bytes(content)
    with pytest.raises(ValueError, match="has changed"):
        Corpus.open(tmp_path / "c").verify()
    del corpus


@pytest.mark.parametrize(
    ("place", "reason"), [("/proc/corpus", "cannot be written"), ("{tmp}/file/corpus", "cannot be written")]
)
def test_a_directory_that_cannot_be_written_is_one_sentence(tmp_path, place, reason):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=reason) as caught:
        build(place.format(tmp=tmp_path))
    assert "\n" not in str(caught.value)


def test_a_full_disk_is_one_sentence(tmp_path, monkeypatch):
    from array_record.python import array_record_module

    class Full(array_record_module.ArrayRecordWriter):
        def write(self, record):
            raise RuntimeError("write() failed: No space left on device; writing somewhere")

    monkeypatch.setattr(array_record_module, "ArrayRecordWriter", Full)
    with pytest.raises(ValueError, match="No space left on device; free some space"):
        build(tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_a_build_that_ends_early_goes_on_behind_its_whole_parts(tmp_path):
    """What was left out is counted once, the examples of a record stay together, and all is as if made at once."""
    bad = BadExample("bad", "bad.mp4", "bad.mp4: no video stream")
    records = [[bad if k == 7 else example, example] for k, example in enumerate(make_examples(30))]
    asked = []

    def items(first, stop=30):
        asked.append(first)
        for number in range(first, 30):
            if number == stop:
                raise RuntimeError("the power failed")
            for item in records[number]:
                yield number, item

    whole = build(tmp_path / "whole", items)
    with pytest.raises(RuntimeError, match="power"):
        build(tmp_path / "c", lambda first: items(first, 20), part_tokens=150)
    parts = sorted((tmp_path / ".c.partial").glob("part-*"))
    assert len(parts) > 3
    # The last part loses its mark: it counts as half-written.
    (parts[-1] / "part.json").unlink()
    corpus = build(tmp_path / "c", items, part_tokens=150)
    assert asked[:2] == [0, 0]
    assert 7 < asked[2] < 20
    assert corpus.fingerprint == whole.fingerprint
    assert corpus.counts == whole.counts
    assert corpus.counts["skipped"] == 1
    np.testing.assert_array_equal(corpus.lengths, whole.lengths)
    corpus.verify()
    assert json.loads((corpus.directory / "skipped.jsonl").read_text())["reason"].endswith("no video stream")
    assert not list(corpus.directory.rglob("part.json"))
    # Parts of other input are not taken over.
    with pytest.raises(RuntimeError, match="power"):
        build(tmp_path / "d", lambda first: items(first, 20), part_tokens=150)
    build(tmp_path / "d", items, part_tokens=150, input_fingerprint="other")
    assert asked[-1] == 0


def test_shards_written_in_any_order_make_the_same_corpus(tmp_path):
    examples = list(make_examples(30))

    def items(records):
        return ((number, examples[number]) for number in records)

    job = Job("small", VOCABULARY, "input-a", {"text": "t"})
    shards = [range(0, 12), range(12, 13), range(13, 30)]
    begin_shards(tmp_path / "c", job, [range(0, 20), range(20, 25), range(25, 30)])
    write_shard(tmp_path / "c", job, 1, range(20, 25), items)
    begin_shards(tmp_path / "c", job, shards)  # of other shards nothing is kept
    for part in (2, 0):
        write_shard(tmp_path / "c", job, part, shards[part], items)
    assert begin_shards(tmp_path / "c", job, shards) is None
    counts = [write_shard(tmp_path / "c", job, part, records, items) for part, records in enumerate(shards)]
    assert counts == [12, 1, 17]
    corpus = build(tmp_path / "c", lambda first: items(range(first, 30)))
    assert begin_shards(tmp_path / "c", job, shards).fingerprint == corpus.fingerprint
    assert corpus.manifest["parts"] == counts
    assert corpus.fingerprint == build(tmp_path / "whole").fingerprint
    corpus.verify()
