"""The TPU kernel run by Pallas' interpreter, against dense float64: values, gradients, and what it refuses."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ring
from ring import pallas_tpu, reference, softmax
from ring.blockwise import Residual
from ring.exponential import LOG2_E
from ring.mask import FULL, NONE, Keys, Queries, classify, queries
from ring.pallas_tpu_blocks import NOTHING, unpack
from ring.softmax import Running

LENGTH, BLOCK = 384, 128
MASKS: list[dict[str, Any]] = [
    {},
    {"causal": False},
    {"window": 70},
    {"causal": False, "window": 130},
    {"prefix": 150},
    {"block": 50},
    {"block": 50, "window": 90, "prefix": 30},
]


@functools.lru_cache
def attend(soft_cap: float | None = None, dim: int = 64) -> Callable:
    """One compiled program for every mask, order and packing: who sees whom is data."""
    kernel = pallas_tpu.Kernel(dim**-0.5, BLOCK, BLOCK, BLOCK, soft_cap, interpret=True)

    @jax.jit
    def run(q: jax.Array, kv: jax.Array, dout: jax.Array, query: Queries, key: Keys) -> tuple[jax.Array, ...]:
        rows = jnp.zeros(q.shape[:3], jnp.float32)
        running = Running(jnp.zeros(q.shape, jnp.float32), rows + softmax.LOWEST, rows)
        out, lse = softmax.finish(pallas_tpu.forward(kernel, running, q, kv, query, key))
        residual = Residual(q, dout, lse * LOG2_E, jnp.sum(out * dout.astype(jnp.float32), axis=-1))
        dq = pallas_tpu.start_dq(residual, kv.shape[2], num_hops=2)
        dq, dkv = pallas_tpu.backward(kernel, dq, jnp.zeros(kv.shape, dq.dtype), residual, kv, query, key)
        return out, dq, dkv[0], dkv[1]

    return run


def compare(
    positions: np.ndarray,
    segments: np.ndarray,
    mask: dict[str, Any],
    *,
    heads: int = 2,
    groups: int = 1,
    dim: int = 64,
    dtype: Any = jnp.float32,
    soft_cap: float | None = None,
    poison: np.ndarray | None = None,
) -> dict[str, float]:
    """Errors relative to the largest element of out, dq, dk, dv; hidden rows must be exactly 0."""
    rng = np.random.default_rng(0)
    batch, length = positions.shape

    def draw(num_heads: int) -> np.ndarray:
        x = jnp.asarray(rng.standard_normal((batch, length, num_heads, dim)), dtype)
        return np.asarray(x, np.float64)

    q, k, v, dout = draw(heads), draw(groups), draw(groups), draw(heads)
    visible = reference.visibility(positions, segments, **mask)
    expected = reference.attention(q, k, v, visible, dout=dout, soft_cap=soft_cap)
    if poison is not None:
        k, v = (np.where(poison[:, :, None, None], np.nan, x) for x in (k, v))
    first = lambda x: jnp.asarray(np.swapaxes(x, 1, 2), dtype)
    meta = (jnp.asarray(positions), jnp.asarray(segments))
    arrays = attend(soft_cap, dim)(
        first(q), jnp.stack([first(k), first(v)]), first(dout), queries(ring.Mask(**mask), *meta), Keys(*meta)
    )
    result = dict(zip(("out", "dq", "dk", "dv"), (np.swapaxes(np.asarray(x), 1, 2) for x in arrays), strict=True))
    for name in ("out", "dq"):
        assert not result[name][~visible.any(2)].any(), f"{name} of a query that sees nothing must be exactly 0"
    for name in ("dk", "dv"):
        assert not result[name][~visible.any(1)].any(), f"{name} of a key that nobody sees must be exactly 0"
    return {
        name: float(np.abs(x - getattr(expected, name)).max() / np.abs(getattr(expected, name)).max())
        for name, x in result.items()
    }


def assert_exact(errors: dict[str, float]) -> None:
    for name, error in errors.items():
        assert error <= (2e-6 if name == "out" else 1e-5), f"{name} is off by {error:.1e} of the largest element"


@pytest.mark.parametrize("layout", ["contiguous", "striped"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_masks(pack_rows: Callable, mask: dict[str, Any], layout: str) -> None:
    for documents, padding in ((1, 0), (4, 150)):
        positions, segments = pack_rows(np.random.default_rng(1), 2, LENGTH, documents, padding)
        order = ring.layout.permutation(layout, LENGTH, 4)
        assert_exact(compare(positions[:, order], segments[:, order], mask))


def test_soft_cap_and_grouped_heads(pack_rows: Callable) -> None:
    positions, segments = pack_rows(np.random.default_rng(2), 1, LENGTH, 3, 20)
    assert_exact(compare(positions, segments, {}, heads=6, groups=2, soft_cap=2.0))


def test_bfloat16_products_and_head_dim_128(pack_rows: Callable) -> None:
    positions, segments = pack_rows(np.random.default_rng(3), 1, LENGTH, 2, 9)
    for name, error in compare(positions, segments, {}, dim=128, dtype=jnp.bfloat16).items():
        assert error <= 2**-7, f"{name} is off by {error:.1e} of the largest element"


def test_blocks_that_nobody_sees_are_not_computed() -> None:
    """A block that took part, however hidden, would spread its NaNs."""
    positions = np.tile(np.arange(LENGTH, dtype=np.int32), (2, 1))
    segments = np.ones((2, LENGTH), np.int32)
    segments[0, BLOCK:] = 0
    segments[1, :BLOCK] = 0
    assert_exact(compare(positions, segments, {}, poison=segments == 0))


def test_nothing_to_see() -> None:
    meta = np.zeros((2, LENGTH), np.int32)
    q = jnp.ones((2, 2, LENGTH, 64))
    nobody = queries(ring.Mask(), jnp.asarray(meta), jnp.asarray(meta))
    for x in attend()(
        q, jnp.full((2, 2, 1, LENGTH, 64), jnp.nan), q, nobody, Keys(jnp.asarray(meta), jnp.asarray(meta))
    ):
        assert not np.asarray(x).any()


@pytest.mark.parametrize("by_key", [False, True])
def test_the_list_holds_the_visible_pairs_in_order(pack_rows: Callable, by_key: bool) -> None:
    positions, segments = (jnp.asarray(x) for x in pack_rows(np.random.default_rng(4), 3, 80, 5, 12))
    query, key = queries(ring.Mask(window=20), positions, segments), Keys(positions, segments)
    kernel = pallas_tpu.Kernel(1.0, 8, 8, 8)
    steps = pallas_tpu._steps(kernel, query, key, 1, by_key=by_key)
    kinds = np.asarray(classify(query, key, 8, 8))
    kinds = (kinds.swapaxes(1, 2) if by_key else kinds).reshape(30, 10)
    rows, columns = np.nonzero(kinds != NONE)
    assert (kinds == FULL).any()
    assert int(steps.count) == len(rows) < kinds.size
    entry = unpack(steps.entries[: len(rows)], steps.column_bits)
    np.testing.assert_array_equal(entry.row, rows)
    np.testing.assert_array_equal(entry.column, columns)
    np.testing.assert_array_equal(entry.kind, kinds[rows, columns])
    np.testing.assert_array_equal(entry.first, np.diff(rows, prepend=-1) != 0)
    np.testing.assert_array_equal(entry.last, np.diff(rows, append=99) != 0)
    assert set(np.asarray(steps.entries[len(rows) :]).tolist()) <= {NOTHING}


@pytest.mark.parametrize(
    "case",
    [
        {"axes": {"sp": 4}, "layout": "striped", "sinks": True, "soft_cap": 2.0},
        {"axes": {"sp": 3}, "layout": "zigzag", "last_visible": True, "shape": (1, 400, 2, 2, 64)},
        {"axes": {"sp": 2, "ulysses": 2}, "strategy": "usp", "shape": (1, 512, 4, 2, 64), "mask": {"window": 99}},
    ],
    ids=str,
)
def test_in_the_ring(check_exact: Callable, case: dict[str, Any]) -> None:
    check_exact(backend="pallas_interpret", **({"shape": (1, 512, 2, 1, 64), "strategy": "ring"} | case))


@pytest.mark.parametrize(
    ("fields", "dim", "sentence"),
    [
        ({"backend": "pallas_tpu"}, 64, "the devices are cpu"),
        ({"query_block": 100}, 64, "query_block is 100 and the TPU kernel's blocks are multiples of 128"),
        ({"key_block": 64}, 64, "key_block is 64"),
        ({}, 80, "head dim 80 and the TPU kernel takes 64, 128, 256"),
    ],
)
def test_refusals(fields: dict[str, Any], dim: int, sentence: str) -> None:
    x, meta = jax.ShapeDtypeStruct((1, 256, 1, dim), jnp.float32), jax.ShapeDtypeStruct((1, 256), jnp.int32)
    plan = ring.Plan(**({"backend": "pallas_interpret"} | fields))
    with pytest.raises(ValueError, match=sentence):
        jax.eval_shape(lambda x, p: ring.attention(x, x, x, positions=p, plan=plan), x, meta)


def test_more_pairs_of_blocks_than_scalar_memory_holds() -> None:
    x, meta = jax.ShapeDtypeStruct((1, 2**20, 1, 128), jnp.bfloat16), jax.ShapeDtypeStruct((1, 2**20), jnp.int32)
    attend = lambda plan: jax.eval_shape(lambda x, p: ring.attention(x, x, x, positions=p, plan=plan), x, meta)
    with pytest.raises(ValueError, match="give a larger Plan.query_block and key_block, or more shards"):
        attend(ring.Plan(backend="pallas_interpret", query_block=1024, key_block=1024))
    assert attend(ring.Plan(backend="pallas_interpret", query_block=4096, key_block=4096)).shape == x.shape
