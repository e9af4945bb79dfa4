"""The chunked loss against float64 numpy, and the packed, weighted loss against the padded one it stands for."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

import ring
from data.examples import TokenizedExample
from data.loader import Loader
from data.vocabulary import Vocabulary
from lwm import model, objective, sharding
from lwm.config import MeshConfig, ModelConfig

Float = NDArray[np.float64]
TEXT, VISION, EMBED, ROWS, LENGTH, SOURCES = 26, 18, 16, 8, 16, 3


def case() -> dict[str, np.ndarray]:
    """Random hidden states, a third of the targets learned, one row of text alone and one that learns nothing."""
    rng = np.random.default_rng(0)
    targets = rng.integers(0, TEXT + VISION, (ROWS, LENGTH)).astype(np.int32)
    targets[0] %= TEXT
    weights = rng.random((ROWS, LENGTH)).astype(np.float32) * (rng.random((ROWS, LENGTH)) < 0.3) / 40
    weights[1] = 0
    return {
        "x": rng.normal(size=(ROWS, LENGTH, EMBED)).astype(np.float32),
        "targets": targets,
        "weights": weights.astype(np.float32),
        "sources": rng.integers(0, SOURCES, targets.shape).astype(np.int32),
        "text": rng.normal(size=(EMBED, TEXT)).astype(np.float32),
        "vision": rng.normal(size=(EMBED, VISION)).astype(np.float32),
    }


def oracle(arrays: Mapping[str, np.ndarray]) -> tuple[Float, dict[str, Float]]:
    """Sums [4, 2, 3] as in Tally, and the gradients of sum(weight * nll), in float64."""
    x, targets, weights = arrays["x"].astype(np.float64), arrays["targets"], arrays["weights"].astype(np.float64)
    sums, dx, gradients = np.zeros((4, 2, SOURCES)), np.zeros_like(x), {}
    for index, (name, first, size) in enumerate((("text", 0, TEXT), ("vision", TEXT, VISION))):
        head = arrays[name].astype(np.float64)
        logits = x @ head
        logp = logits - logits.max(-1, keepdims=True)
        logp -= np.log(np.exp(logp).sum(-1, keepdims=True))
        hit = targets[..., None] == first + np.arange(size)
        mine = (targets >= first) & (targets < first + size) & (weights > 0)
        nll = -np.where(hit, logp, 0).sum(-1)
        right = logits.argmax(-1) == targets - first
        for source in range(SOURCES):
            own = mine & (arrays["sources"] == source)
            sums[:, index, source] = [(weights * nll)[own].sum(), nll[own].sum(), own.sum(), (right & own).sum()]
        dlogits = np.where(mine, weights, 0)[..., None] * (np.exp(logp) - hit)
        dx += dlogits @ head.T
        gradients[name] = np.einsum("bse,bsv->ev", x, dlogits)
    return sums, gradients | {"x": dx}


@pytest.mark.parametrize(
    ("sizes", "chunk"),
    [(None, None), (None, 7), ({"fsdp": 8}, 3), ({"fsdp": 2, "tp": 2, "sp": 2}, 5), ({"dp": 2, "fsdp": 1, "sp": 4}, 4)],
)
def test_values_and_gradients_equal_float64(sizes: dict[str, int] | None, chunk: int | None) -> None:
    arrays = case()
    mesh = None if sizes is None else sharding.make_mesh(MeshConfig(**sizes))

    def function(x: jax.Array, heads: tuple[jax.Array, ...]) -> tuple[jax.Array, objective.Tally]:
        loss, tally = objective.cross_entropy(
            chunk, SOURCES, mesh, x, *(jnp.asarray(arrays[name]) for name in ("targets", "weights", "sources")), heads
        )
        return 3 * loss, tally

    compiled = jax.jit(jax.value_and_grad(function, argnums=(0, 1), has_aux=True))
    (loss, tally), (dx, dheads) = compiled(arrays["x"], (arrays["text"], arrays["vision"]))
    sums, expected = oracle(arrays)
    np.testing.assert_allclose(np.stack(tally), sums, rtol=1e-5)
    np.testing.assert_allclose(loss, 3 * sums[0].sum(), rtol=1e-5)
    for found, name in ((dx, "x"), (dheads[0], "text"), (dheads[1], "vision")):
        limit = 1e-5 * np.abs(expected[name]).max()
        np.testing.assert_allclose(found / 3, expected[name], atol=3 * limit, rtol=0, err_msg=name)
    assert not np.asarray(dx)[1].any(), "a row that learns nothing sends no gradient"


def test_without_gradients_the_sums_are_the_same() -> None:
    arrays = case()
    loss, tally = objective.cross_entropy(
        5,
        SOURCES,
        None,
        *(arrays[name] for name in ("x", "targets", "weights", "sources")),
        (arrays["text"], arrays["vision"]),
    )
    sums, _ = oracle(arrays)
    np.testing.assert_allclose(np.stack(tally), sums, rtol=1e-5)
    np.testing.assert_allclose(loss, sums[0].sum(), rtol=1e-5)


def test_summary_leaves_out_what_has_no_targets() -> None:
    config = ModelConfig(
        text_vocab_size=4, vision_vocab_size=4, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1
    )
    tally = objective.Tally(*(jnp.asarray([[0.0, x], [0.0, 0.0]]) for x in (0.1, 6.0, 3.0, 1.0)))
    assert objective.summarize(config, tally) == {"loss_text": 2.0, "accuracy_text": pytest.approx(1 / 3)}
    by_source = objective.summarize(config, tally, ("empty", "full"))
    assert by_source == {
        "loss_text": 2.0,
        "accuracy_text": pytest.approx(1 / 3),
        "source_loss/full": 2.0,
        "source_fraction/full": 1.0,
    }


class Corpus:
    """Examples in memory."""

    def __init__(self, vocabulary: Vocabulary, examples: Sequence[TokenizedExample]):
        self.vocabulary, self.examples = vocabulary, examples
        self.fingerprint = "test"
        self.lengths = np.array([len(example) - 1 for example in examples], np.int32)
        vision = [vocabulary.is_vision(example.tokens) for example in examples]
        learned = [
            [int((each.learn[1:] & ~is_vision[1:]).sum()), int((each.learn[1:] & is_vision[1:]).sum())]
            for each, is_vision in zip(examples, vision, strict=True)
        ]
        self.learned = np.array(learned, np.int32)
        self.counts = {"vision_tokens": int(sum(each.sum() for each in vision))}

    def read(self, indices: Sequence[int]) -> list[TokenizedExample]:
        return [self.examples[index] for index in indices]


@pytest.mark.parametrize("sizes", [None, {"fsdp": 2, "sp": 4}])
def test_packed_weighted_loss_equals_the_padded_formula(sizes: dict[str, int] | None) -> None:
    """L = 1/2 1/E sum_e [mean over e's vision targets + mean over e's text targets], each example alone in its row."""
    vocabulary = Vocabulary(text_size=20, num_codes=10, vision_size=12)
    rng = np.random.default_rng(1)
    examples = []
    for number in range(12):
        text, vision = rng.integers(0, 20, 4 + number % 5), rng.integers(20, 32, (number % 3) * 4)
        tokens = np.concatenate([text, vision])
        examples.append(TokenizedExample(tokens.astype(np.int32), rng.random(tokens.size) < 0.8, str(number)))
    config = ModelConfig(
        text_vocab_size=20,
        vision_vocab_size=12,
        hidden_size=16,
        intermediate_size=16,
        num_layers=2,
        num_heads=2,
        init_std=0.5,
    )
    mesh = None if sizes is None else sharding.make_mesh(MeshConfig(**sizes))
    params = model.init(config, jax.random.key(0), mesh)
    length, rows = 32, 4
    order = ring.layout.permutation("zigzag", length, 4)
    corpus = Corpus(vocabulary, examples)
    loader = Loader({"mixed": corpus}, {"mixed": 1.0}, seq_len=length, batch_rows=rows, seed=0, permutation=order)
    batch, plan = loader.batch(0), loader.plan(0)
    assert (plan.length == corpus.lengths[plan.example]).all(), "this case is about whole examples"
    compute = model.Compute(plan=ring.Plan(mesh=mesh, layout="zigzag"))

    @jax.jit
    def packed(params: sharding.Params, batch: dict[str, jax.Array]) -> jax.Array:
        names = ("tokens", "positions", "segment_ids", "targets", "loss_weights")
        loss, _ = objective.loss(config, params, *(batch[name] for name in names), compute=compute, chunk=5)
        return loss

    alone = jax.device_get(params)
    width = max(map(len, examples))
    tokens = np.zeros((len(examples), width), np.int32)
    for row, example in zip(tokens, examples, strict=True):
        row[: len(example)] = example.tokens
    logits = np.asarray(jax.jit(lambda params, tokens: model.logits(config, params, tokens))(alone, tokens), np.float64)

    total = 0.0
    for number in plan.example.tolist():
        example = examples[number]
        targets, learn = example.tokens[1:], example.learn[1:]
        for first, stop in ((0, 20), (20, 32)):
            block = logits[number, : len(targets), first:stop]
            logp = block - np.log(np.exp(block).sum(-1, keepdims=True))
            mine = learn & (targets >= first) & (targets < stop)
            if mine.any():
                total -= logp[mine, targets[mine] - first].mean()
    expected = 0.5 * total / len(plan.example)
    np.testing.assert_allclose(packed(params, batch), expected, rtol=1e-6)
