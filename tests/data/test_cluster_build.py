"""Corpora built by a cluster: by Beam's DirectRunner where Beam is installed, and a clear sentence where it is not."""

import importlib.util

import numpy as np
import pytest

from data.build import Job, build_corpus
from data.cluster_build import build_on_cluster, shard_ranges
from data.examples import BadExample, TokenizedExample
from data.vocabulary import Vocabulary

HAS_BEAM = importlib.util.find_spec("apache_beam") is not None
VOCABULARY = Vocabulary(50, 8, 16)
JOB = Job("small", VOCABULARY, "input", {"text": "t"})


def item(number):
    if number == 5:
        return BadExample("e5", "a.mp4", "a.mp4: no video")
    return TokenizedExample(np.random.default_rng(number).integers(0, 66, 20), np.ones(20, bool), f"e{number}")


def open_items():
    return lambda records: ((number, item(number)) for number in records)


def test_shards_cover_all_records_once():
    for num_records, num_shards in ((10, 3), (3, 10), (1, 1), (256, 256), (1000, 7)):
        shards = shard_ranges(num_records, num_shards)
        assert [number for shard in shards for number in shard] == list(range(num_records))
        assert len(shards) == min(num_records, num_shards)
        assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_a_cluster_builds_the_corpus_that_one_process_builds(tmp_path):
    def build():
        return build_on_cluster(tmp_path / "c", JOB, open_items, num_records=30, num_shards=4)

    if not HAS_BEAM:
        with pytest.raises(ValueError, match=r"needs Apache Beam, .* pip install 'lwm\[beam\]'"):
            build()
        assert not list(tmp_path.iterdir())
        return
    corpus = build()
    alone = build_corpus(
        tmp_path / "alone",
        "small",
        [item(number) for number in range(30)],
        vocabulary=VOCABULARY,
        input_fingerprint="input",
        tokenizers={"text": "t"},
    )
    assert corpus.fingerprint == alone.fingerprint
    assert corpus.counts == alone.counts
    assert corpus.counts["skipped"] == 1
    assert len(corpus.manifest["parts"]) == 4
    corpus.verify()
    assert build().fingerprint == corpus.fingerprint
