"""The same global batches whoever makes them: real processes, several workers, and from any step at once."""

import hashlib
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from data.build import build_corpus
from data.examples import TokenizedExample
from data.vocabulary import Vocabulary

ROWS, LENGTH, STEPS, LATER = 8, 64, 4, 1003
VOCABULARY = Vocabulary(50, 30, 32)

# Process `index` of four; prints, for each way of sharing the work, hashes of its part of the steps.
PROGRAM = textwrap.dedent("""
    import hashlib, json, sys
    import numpy as np
    from data.corpus import Corpus
    from data.loader import Loader

    root, index = sys.argv[1], int(sys.argv[2])
    corpora = {name: Corpus.open(f"{root}/{name}") for name in ("clips", "books")}
    order = np.arange(64).reshape(4, 16).T.reshape(-1)
    said = {}
    for count in (1, 2, 4):
        if index >= count:
            continue
        # Four share rows two by two, and the sequence as well.
        parts = {1: (8, 64), 2: (4, 64), 4: (4, 32)}[count]
        row, column = (index // 2 * 4, index % 2 * 32) if count == 4 else (index * parts[0], 0)
        for workers in (0, 4):
            for start in (0, 1003):
                loader = Loader(
                    corpora, {"clips": 2, "books": 1}, seq_len=64, batch_rows=8, seed=3, permutation=order,
                    rows=slice(row, row + parts[0]), columns=slice(column, column + parts[1]),
                )
                batches = list(loader.iterate(start, 4, workers=workers, stop_step=start + 4))
                said[f"{count} {workers} {start}"] = {
                    "fingerprint": loader.fingerprint,
                    "at": [row, column],
                    "hashes": [{n: hashlib.sha256(a.tobytes()).hexdigest() for n, a in b.items()} for b in batches],
                }
    print(json.dumps(said))
""")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("corpora")
    rng = np.random.default_rng(0)
    for name, count, low, high in (("clips", 300, 5, 40), ("books", 10, 100, 300)):
        sizes = rng.integers(low, high, count)
        examples = [
            TokenizedExample(rng.integers(0, 82, n), rng.random(n) < 0.7, f"{name}{k}") for k, n in enumerate(sizes)
        ]
        build_corpus(root / name, name, examples, vocabulary=VOCABULARY, input_fingerprint="x")
    return root


def test_processes_workers_and_starting_steps_make_the_same_batches(root):
    from data.corpus import Corpus
    from data.loader import Loader

    command = [sys.executable, "-c", PROGRAM, str(root)]
    repository = Path(__file__).parents[2]
    running = [
        subprocess.Popen([*command, str(index)], cwd=repository, stdout=subprocess.PIPE, text=True)
        for index in range(4)
    ]
    said = [json.loads(process.communicate()[0]) for process in running]
    assert [process.returncode for process in running] == [0] * 4

    corpora = {name: Corpus.open(root / name) for name in ("clips", "books")}
    order = np.arange(LENGTH).reshape(4, 16).T.reshape(-1)
    here = Loader(corpora, {"clips": 2, "books": 1}, seq_len=LENGTH, batch_rows=ROWS, seed=3, permutation=order)
    expected = {start: [here.batch(start + k) for k in range(STEPS)] for start in (0, LATER)}
    assert any((here.plan(k).start > 0).any() for k in range(STEPS)), "no example is cut"
    shapes = {1: (8, 64), 2: (4, 64), 4: (4, 32)}
    for count, shape in shapes.items():
        for workers in (0, 4):
            for start in (0, LATER):
                seen = set()
                for process in said[:count]:
                    part = process[f"{count} {workers} {start}"]
                    row, column = part["at"]
                    seen.add((row, column))
                    assert part["fingerprint"] == here.fingerprint
                    for batch, hashes in zip(expected[start], part["hashes"], strict=True):
                        for name, array in batch.items():
                            mine = np.ascontiguousarray(array[row : row + shape[0], column : column + shape[1]])
                            assert hashes[name] == hashlib.sha256(mine.tobytes()).hexdigest(), (count, name)
                assert len(seen) * shape[0] * shape[1] == ROWS * LENGTH
