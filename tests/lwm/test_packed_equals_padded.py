"""Packing changes nothing: the loss and every gradient are those of examples in rows of their own, on every mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ring
from data.examples import TokenizedExample
from data.packing import Rows, best_fit_decreasing, cut, fill, learned_counts, piece_scale
from lwm import model, objective, step
from lwm.config import ModelConfig, StageConfig
from lwm.sharding import Params, flatten, make_mesh

MODEL = ModelConfig(
    text_vocab_size=24,
    vision_vocab_size=8,
    hidden_size=32,
    intermediate_size=32,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    init_std=0.2,
)
ROWS, LENGTH, TEXT = 4, 32, 24


def make_examples() -> list[TokenizedExample]:
    """Mixed ones, one that learns no text, one that learns no vision, one of text alone, and one longer than a row."""
    rng = np.random.default_rng(5)
    made = []
    for kind, size in [("both", 14), ("no text", 12), ("no vision", 9), ("text", 6), ("both", 45), ("both", 20)]:
        tokens = rng.integers(0, TEXT if kind == "text" else 32, size)
        learn = rng.random(size) < 0.7
        learn &= {"no text": tokens >= TEXT, "no vision": tokens < TEXT}.get(kind, True)
        made.append(TokenizedExample(tokens, learn))
    return made


def pack(examples: list[TokenizedExample]) -> tuple[Rows, dict[str, np.ndarray]]:
    """All pieces of all examples in ROWS rows."""
    example, start, length = cut([len(each) - 1 for each in examples], LENGTH)
    bins, _ = best_fit_decreasing(length, LENGTH)
    order = np.argsort(bins, kind="stable")
    example, start, length = example[order], start[order], length[order]
    offsets = np.concatenate([[0], np.cumsum(np.bincount(bins, minlength=ROWS))])
    assert len(offsets) == ROWS + 1
    rows = Rows(offsets, np.zeros(len(example), np.int64), example, start, length)
    in_example = np.array([learned_counts(examples[e], 0, len(examples[e]), TEXT) for e in example])
    in_piece = np.array(
        [learned_counts(examples[e], s, s + n, TEXT) for e, s, n in zip(example, start, length, strict=True)]
    )
    covered = length / np.array([len(examples[e]) - 1 for e in example])
    scale = piece_scale(in_example, in_piece, covered, np.full(len(example), False), "example")
    batch = fill(rows, [examples[e] for e in example], scale, seq_len=LENGTH, text_size=TEXT, mode="masked")
    assert (np.diff(offsets) > 1).any()
    assert (start > 0).any()
    return rows, batch


def padded_loss(params: Params, rows: Rows, examples: list[TokenizedExample]) -> jax.Array:
    """1/2 1/E sum over examples of the means of their text and vision losses, each piece padded in its own row."""
    count = len(rows.example)
    tokens, targets, positions, segments = (np.zeros((count, LENGTH), np.int32) for _ in range(4))
    for p, (e, s, n) in enumerate(zip(rows.example, rows.start, rows.length, strict=True)):
        tokens[p, :n], targets[p, :n] = examples[e].tokens[s : s + n], examples[e].tokens[s + 1 : s + n + 1]
        positions[p, :n], segments[p, :n] = np.arange(s, s + n), 1
    logits = model.logits(MODEL, params, tokens, positions, segments)
    of_text = jax.nn.log_softmax(logits[..., :TEXT])
    of_vision = jax.nn.log_softmax(logits[..., TEXT:])
    likely = jnp.concatenate([of_text, of_vision], -1)
    nll = -jnp.take_along_axis(likely, jnp.asarray(targets)[..., None], -1)[..., 0]
    total = jnp.zeros(())
    for e, example in enumerate(examples):
        pieces = [
            (p, s, n) for p, (w, s, n) in enumerate(zip(rows.example, rows.start, rows.length, strict=True)) if w == e
        ]
        losses = jnp.concatenate([nll[p, :n] for p, _, n in sorted(pieces, key=lambda piece: piece[1])])
        learn, vision = example.learn[1:], example.tokens[1:] >= TEXT
        for kind in (learn & ~vision, learn & vision):
            if kind.any():
                total = total + losses[np.flatnonzero(kind)].mean()
    return total / 2 / len(examples)


@pytest.fixture(scope="module")
def padded() -> tuple[Params, float, Params]:
    """Parameters, and the padded loss and its gradients."""
    params = jax.device_get(model.init(MODEL, jax.random.key(0)))
    examples = make_examples()
    rows, _ = pack(examples)
    value, gradients = jax.jit(jax.value_and_grad(lambda params: padded_loss(params, rows, examples)))(params)
    return params, float(value), jax.device_get(gradients)


@pytest.mark.parametrize("sizes", [{}, {"dp": 2}, {"dp": 4}, {"sp": 4}], ids=str)
def test_packed_loss_and_gradients_are_the_padded_ones(
    padded: tuple[Params, float, Params], sizes: dict[str, int]
) -> None:
    params, loss, gradients = padded
    stage = StageConfig.model_validate(
        {
            "name": "test", "seq_len": LENGTH, "batch_rows": ROWS, "steps": 1, "rope_theta": 1e4,
            "mesh": {"fsdp": 1} | sizes, "attention": {"layout": "striped"},
            "optimizer": {"peak_lr": 1e-2, "warmup_steps": 0}, "mixture": ({"corpus": "none", "share": 1.0},),
            "compute_dtype": "float32", "remat": "none", "loss_chunk": 16,
        }
    )  # fmt: skip
    mesh = make_mesh(stage.mesh, jax.devices()[: int(np.prod(list(sizes.values()), initial=1))])
    order = ring.layout.permutation("striped", LENGTH, stage.mesh.sp)
    _, batch = pack(make_examples())
    placed = step.place_batch({name: array[:, order] for name, array in batch.items()}, stage, mesh)
    arrays = [placed[key] for key in ("tokens", "positions", "segment_ids", "targets", "loss_weights")]
    compute = step.compute_of(stage, mesh)

    @jax.jit
    def packed(params: Params) -> tuple[jax.Array, Params]:
        return jax.value_and_grad(lambda params: objective.loss(MODEL, params, *arrays, compute=compute, chunk=16)[0])(
            params
        )

    where = jax.tree.map(lambda leaf: leaf.sharding, step.abstract_state(MODEL, stage, mesh).params)
    value, found = packed(jax.device_put(params, where))
    assert float(value) == pytest.approx(loss, rel=1e-6)
    for path, leaf in flatten(gradients).items():
        limit = 1e-5 * float(np.abs(leaf).max())
        np.testing.assert_allclose(flatten(jax.device_get(found))[path], leaf, atol=limit, rtol=0, err_msg=path)
