"""Generation against the plain model: every id must be what `model.logits` of the whole sequence says."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data.vocabulary import Vocabulary
from lwm import model, sharding
from lwm.config import MeshConfig, ModelConfig
from lwm.sample import Sampler

VOCABULARY = Vocabulary(40, 10, 16)
# Large initial weights, so that the likeliest ids differ from one another clearly and depend on the whole prompt.
CONFIG = ModelConfig(
    text_vocab_size=40,
    vision_vocab_size=16,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    init_std=0.3,
)
STOP = 2


@pytest.fixture(scope="module")
def params() -> Any:
    return model.init(CONFIG, jax.random.key(0))


def prompts(*lengths: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, CONFIG.vocab_size, length).astype(np.int32) for length in lengths]


_LENGTH = 112
_logits = jax.jit(lambda params, tokens: model.logits(CONFIG, params, tokens))


def next_logits(params: Any, sequences: list[list[int]]) -> np.ndarray:
    """float32 [N, V]: the plain model's logits after each sequence, in one call (causality hides the padding)."""
    tokens = np.zeros((len(sequences), _LENGTH), np.int32)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = sequence
    logits = np.asarray(_logits(params, jnp.asarray(tokens)))
    return logits[np.arange(len(sequences)), [len(sequence) - 1 for sequence in sequences]]


def greedy(params: Any, rows: list[np.ndarray], steps: int, allowed: slice = slice(None)) -> list[list[int]]:
    """The likeliest ids, one at a time, each from the whole sequence before it; never a near tie."""
    sequences = [row.tolist() for row in rows]
    for _ in range(steps):
        logits = next_logits(params, sequences)[:, allowed]
        top = np.sort(logits, axis=1)
        assert (top[:, -1] - top[:, -2]).min() > 1e-3, "the oracle is undecided; choose another seed"
        for sequence, choice in zip(sequences, logits.argmax(axis=1), strict=True):
            sequence.append(int(choice) + (allowed.start or 0))
    return [sequence[len(row) :] for sequence, row in zip(sequences, rows, strict=True)]


def make(params: Any, mesh: dict[str, int] | None = None, **options: Any) -> Sampler:
    where = None if mesh is None else sharding.make_mesh(MeshConfig(**mesh))
    return Sampler(CONFIG, params, mesh=where, vocabulary=VOCABULARY, **{"max_length": 200, **options})


MESHES: dict[str, dict[str, Any]] = {
    "one device": {},
    "striped ring": {"mesh": {"fsdp": 2, "sp": 4}, "layout": "striped"},
    "zigzag with tp, sharded weights": {
        "mesh": {"fsdp": 2, "tp": 2, "sp": 2},
        "layout": "zigzag",
        "replicate_weights": False,
    },
    "contiguous usp": {
        "mesh": {"dp": 2, "fsdp": 1, "sp": 2, "ulysses": 2},
        "layout": "contiguous",
        "strategy": "usp",
        "query_block": 16,
        "key_block": 8,
    },
}


@pytest.mark.parametrize("name", MESHES)
def test_cache_equals_teacher_forcing(params: Any, name: str) -> None:
    """Rows of different lengths in one batch; with contiguous shards, new ids fill the last two of them."""
    rows = prompts(57, 3, 90, 64, 1)
    sampler = make(params, **MESHES[name])
    expected = greedy(params, rows, 20)
    assert sampler.generate(rows, max_new_tokens=20, modality="any") == expected
    assert len(sampler.programs) == 1
    # The same programs serve other lengths, fewer rows and fewer ids.
    assert sampler.generate(rows[3:1:-1], max_new_tokens=9, modality="any") == [row[:9] for row in expected[3:1:-1]]
    assert len(sampler.programs) == 1
    assert sampler.usage.new_tokens == 5 * 20 + 2 * 9
