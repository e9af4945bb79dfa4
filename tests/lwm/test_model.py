"""The decoder against a dense float64 one, packed against unpacked, every way of computing it against the plain one."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

import ring
from lwm import model, rope, sharding
from lwm.config import MeshConfig, ModelConfig, RopeScalingConfig
from lwm.embedding import lookup
from lwm.sharding import Params, flatten

CONFIG = ModelConfig(
    text_vocab_size=40,
    vision_vocab_size=24,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    init_std=0.3,
)
LENGTHS = (13, 7, 9)
Float = NDArray[np.float64]


@pytest.fixture(scope="module")
def params() -> Params:
    return model.init(CONFIG, jax.random.key(0))


def packed_batch(rows: int = 8, length: int = 32) -> dict[str, np.ndarray]:
    """Rows of three segments and a little padding."""
    rng = np.random.default_rng(1)
    padding = length - sum(LENGTHS)
    positions = np.concatenate([*map(np.arange, LENGTHS), np.zeros(padding)]).astype(np.int32)
    segments = np.repeat([1, 2, 3, 0], [*LENGTHS, padding]).astype(np.int32)
    tokens = rng.integers(0, CONFIG.vocab_size, (rows, length)).astype(np.int32)
    return {"tokens": tokens, "positions": np.tile(positions, (rows, 1)), "segment_ids": np.tile(segments, (rows, 1))}


def dense_logits(params: Params, tokens: np.ndarray) -> Float:
    """One sequence [S] -> logits [S, V] in float64, straight from the equations."""
    p = {path: np.asarray(leaf, np.float64) for path, leaf in flatten(params).items()}
    heads, kv_heads, dim = CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim
    length = len(tokens)
    angles = np.outer(np.arange(length), CONFIG.rope_theta ** (-np.arange(0, dim, 2) / dim))
    turn = np.exp(1j * angles)[:, None, :]

    def norm(x: Float, weight: Float) -> Float:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + CONFIG.norm_eps) * weight

    def rotated(x: Float) -> Float:
        y = (x[..., : dim // 2] + 1j * x[..., dim // 2 :]) * turn
        return np.concatenate([y.real, y.imag], -1)

    x = np.concatenate([p["embed/text"], p["embed/vision"]])[tokens]
    for layer in range(CONFIG.num_layers):
        w = {path.removeprefix("layers/"): leaf[layer] for path, leaf in p.items() if path.startswith("layers/")}
        y = norm(x, w["attention_norm"])
        q = rotated(np.einsum("se,ehd->shd", y, w["query"]))
        k = np.repeat(rotated(np.einsum("se,ehd->shd", y, w["key"])), heads // kv_heads, 1)
        v = np.repeat(np.einsum("se,ehd->shd", y, w["value"]), heads // kv_heads, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(dim)
        scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        x = x + np.einsum("hqk,khd,hde->qe", weights, v, w["output"])
        y = norm(x, w["mlp_norm"])
        gate = y @ w["gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (y @ w["up"])) @ w["down"]
    y = norm(x, p["final_norm"])
    return np.concatenate([y @ p["head/text"], y @ p["head/vision"]], -1)


def test_packed_logits_equal_dense_float64_ones_of_each_segment(params: Params) -> None:
    batch = packed_batch(rows=2)
    ours = np.asarray(model.logits(CONFIG, params, batch["tokens"], batch["positions"], batch["segment_ids"]))
    assert ours.dtype == np.float32
    starts = [0, *itertools.accumulate(LENGTHS)]
    for row, (start, length) in itertools.product(range(2), zip(starts[:-1], LENGTHS, strict=True)):
        part = slice(start, start + length)
        expected = dense_logits(params, batch["tokens"][row, part])
        np.testing.assert_allclose(ours[row, part], expected, atol=1e-5 * np.abs(expected).max())


def test_packed_gradients_equal_the_unpacked_ones(params: Params) -> None:
    """float32, 1e-5 of each parameter's largest entry."""
    batch = packed_batch(rows=1)
    directions = np.random.default_rng(2).normal(size=(1, 32, CONFIG.vocab_size)).astype(np.float32)
    directions[:, sum(LENGTHS) :] = 0

    def packed(params: Params) -> jax.Array:
        logits = model.logits(CONFIG, params, batch["tokens"], batch["positions"], batch["segment_ids"])
        return jnp.sum(logits * directions)

    def unpacked(params: Params) -> jax.Array:
        total, start = jnp.zeros(()), 0
        for length in LENGTHS:
            part = slice(start, start + length)
            total = total + jnp.sum(model.logits(CONFIG, params, batch["tokens"][:, part]) * directions[:, part])
            start += length
        return total

    assert_close(jax.jit(jax.grad(packed))(params), jax.jit(jax.grad(unpacked))(params), 1e-5)


def assert_close(found: Params, expected: Params, tolerance: float) -> None:
    for path, leaf in flatten(expected).items():
        limit = tolerance * float(np.abs(leaf).max())
        np.testing.assert_allclose(flatten(found)[path], leaf, atol=limit, rtol=0, err_msg=path)


def value_and_grads(params: Params, compute: model.Compute, layout: str = "contiguous") -> tuple[float, Params]:
    """A random linear function of the hidden states of the real tokens, and its gradients."""
    batch = packed_batch()
    mesh = compute.mesh
    directions = np.random.default_rng(3).normal(size=(8, 32, CONFIG.hidden_size)).astype(np.float32)
    directions[:, sum(LENGTHS) :] = 0
    shards = 1 if mesh is None else mesh.shape["sp"] * mesh.shape["ulysses"]
    order = ring.layout.permutation(layout, 32, shards)

    def function(params: Params) -> jax.Array:
        tokens, positions, segments = (jnp.asarray(batch[name][:, order]) for name in batch)
        hidden = model.hidden(CONFIG, params, tokens, positions, segments, compute)
        return jnp.sum(hidden.astype(jnp.float32) * directions[:, order])

    if mesh is not None:
        params = jax.device_put(params, sharding.parameter_shardings(CONFIG, mesh))
    value, gradients = jax.jit(jax.value_and_grad(function))(params)
    return float(value), jax.device_get(gradients)


@pytest.fixture(scope="module")
def plain(params: Params) -> tuple[float, Params]:
    return value_and_grads(params, model.Compute())


@pytest.mark.parametrize(("remat", "chunk"), [("full", None), ("attention", 50), ("none", 64)])
def test_remat_and_chunks_change_nothing(
    params: Params, plain: tuple[float, Params], remat: str, chunk: int | None
) -> None:
    value, gradients = value_and_grads(params, model.Compute(remat=remat, mlp_chunk=chunk))
    assert value == pytest.approx(plain[0], rel=1e-5)
    assert_close(gradients, plain[1], 1e-5)


@pytest.mark.parametrize(
    ("sizes", "layout", "chunk"),
    [
        ({"fsdp": 8}, "contiguous", None),
        ({"fsdp": 2, "tp": 2, "sp": 2}, "zigzag", 16),
        ({"fsdp": 2, "sp": 4}, "striped", None),
        ({"dp": 2, "fsdp": 1, "tp": 2, "sp": 2}, "contiguous", None),
    ],
)
def test_eight_devices_equal_one(
    params: Params, plain: tuple[float, Params], sizes: dict[str, int], layout: str, chunk: int | None
) -> None:
    mesh = sharding.make_mesh(MeshConfig(**sizes))
    compute = model.Compute(plan=ring.Plan(mesh=mesh, layout=layout), remat="attention", mlp_chunk=chunk)
    value, gradients = value_and_grads(params, compute, layout)
    assert value == pytest.approx(plain[0], rel=1e-5)
    assert_close(gradients, plain[1], 1e-5)


def test_bfloat16_stays_near_float32(params: Params) -> None:
    batch = packed_batch(rows=1)
    exact = model.logits(CONFIG, params, batch["tokens"], compute=model.Compute())
    rough = model.logits(CONFIG, params, batch["tokens"], compute=model.Compute(dtype="bfloat16"))
    assert rough.dtype == jnp.float32
    assert float(jnp.abs(rough - exact).max()) < 0.05 * float(jnp.abs(exact).max())


def test_rows_that_do_not_divide_are_named(params: Params) -> None:
    mesh = sharding.make_mesh(MeshConfig(fsdp=8))
    with pytest.raises(ValueError, match=r"tokens: batch_rows \(3\) does not divide over the mesh's fsdp=8"):
        model.logits(CONFIG, params, np.zeros((3, 8), np.int32), compute=model.Compute(plan=ring.Plan(mesh=mesh)))


def test_lookup_sums_gradients_of_repeated_ids_in_float32() -> None:
    """4096 bfloat16 gradients of 1/4096 for one id: a bfloat16 sum would stop far below 1."""
    tables = (jnp.zeros((3, 8)), jnp.zeros((2, 8)))
    tokens = jnp.full((8, 512), 4)
    mesh = sharding.make_mesh(MeshConfig(fsdp=2, tp=2, sp=2))

    def total(tables: tuple[jax.Array, ...]) -> jax.Array:
        return jnp.sum(lookup("bfloat16", mesh, ("batch", "sequence"), tables, tokens)) / 4096

    text, vision = jax.grad(total)(tables)
    assert text.dtype == jnp.float32
    np.testing.assert_array_equal(text, 0)
    np.testing.assert_array_equal(vision, [[0] * 8, [1] * 8])


def test_rotary_angles_at_ten_million_positions() -> None:
    """A plain float32 product is off by half a radian there."""
    positions = np.array([[0, 1, 1023, 1024, 999_999, 1_048_575, 9_999_999]], np.int32)
    cos, sin = rope.rotation(jnp.asarray(positions), 128, 5e7)
    angles = positions[..., None].astype(np.float64) * rope.frequencies(128, 5e7)
    np.testing.assert_allclose(cos, np.cos(angles), atol=5e-3)
    np.testing.assert_allclose(sin, np.sin(angles), atol=5e-3)
    assert np.abs(np.asarray(cos) - np.cos(angles))[:, :6].max() < 1e-3


def test_llama3_scaling_keeps_short_wavelengths_and_stretches_long_ones() -> None:
    scaling = RopeScalingConfig(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_seq_len=8192)
    plain, scaled = rope.frequencies(128, 5e5), rope.frequencies(128, 5e5, scaling)
    wavelengths = 2 * np.pi / plain
    short, long = wavelengths < 8192 / 4, wavelengths > 8192
    np.testing.assert_array_equal(scaled[short], plain[short])
    np.testing.assert_allclose(scaled[long], plain[long] / 8)
    between = ~short & ~long
    assert between.any()
    assert ((scaled[between] < plain[between]) & (scaled[between] > plain[between] / 8)).all()
