"""Quantized transit: the stated bound, exactness on the rounded values, and what goes over the wire."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ring
from ring import reference, transit


@pytest.mark.parametrize("dtype", transit.TRANSIT_DTYPES)
def test_rounding_stays_within_the_stated_bound(dtype: str) -> None:
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((200, 64)) * 10.0 ** rng.integers(-6, 6, (200, 1))).astype(np.float32)
    x[0] = 0
    x[1, 1:] = 0
    rounded = np.asarray(transit.decode(transit.encode(jnp.asarray(x), dtype), jnp.dtype(jnp.float32)), np.float64)
    largest = np.abs(x).max(-1, keepdims=True).astype(np.float64)
    bound = np.broadcast_to(largest / 254, x.shape) if dtype == "int8" else np.maximum(np.abs(x) / 16, largest / 2**18)
    assert np.all(np.abs(rounded - x) <= bound * (1 + 1e-5))


@pytest.mark.parametrize("strategy", ["ring", "usp", "all_gather"])
@pytest.mark.parametrize("dtype", transit.TRANSIT_DTYPES)
def test_attention_is_exact_for_the_rounded_keys_and_values(mesh_of: Callable, strategy: str, dtype: str) -> None:
    rng = np.random.default_rng(0)
    plan = ring.Plan(mesh=mesh_of({"sp": 2, "ulysses": 2}), strategy=strategy, transit_dtype=dtype)
    q, k, v, dout = (rng.standard_normal((1, 32, 4, 8)).astype(np.float32) for _ in range(4))
    positions = ring.layout.permutation("striped", 32, 4)[None]
    call = lambda q, k, v: ring.attention(q, k, v, positions=jnp.asarray(positions), plan=plan)
    out, pull_back = jax.vjp(jax.jit(call), q, k, v)
    k_seen, v_seen = (np.asarray(transit.decode(transit.encode(jnp.asarray(x), dtype), x.dtype)) for x in (k, v))
    visible = reference.visibility(positions, np.ones_like(positions))
    expected = reference.attention(q, k_seen, v_seen, visible, dout=dout)
    for actual, wanted in zip((out, *pull_back(jnp.asarray(dout))), expected[:4], strict=True):
        assert wanted is not None
        assert np.abs(np.asarray(actual) - wanted).max() <= 1e-5 * np.abs(wanted).max()
    exact = reference.attention(q, k, v, visible).out
    # v moves outputs by at most its own rounding, k moves scores by at most |q|_1 scale times its rounding.
    step = {"int8": 1 / 254, "float8_e4m3fn": 1 / 16}[dtype]
    shift = np.abs(q).sum(-1).max() / np.sqrt(8) * step * np.abs(k).max()
    bound = step * np.abs(v).max() + (np.exp(2 * shift) - 1) * np.abs(v).max()
    assert np.abs(np.asarray(out) - exact).max() <= bound


def test_one_byte_per_element_travels(mesh_of: Callable) -> None:
    plan = ring.Plan(mesh=mesh_of({"sp": 8}), transit_dtype="int8")
    x, positions = jax.ShapeDtypeStruct((1, 64, 2, 32), jnp.bfloat16), jax.ShapeDtypeStruct((1, 64), jnp.int32)
    text = jax.jit(lambda x, p: ring.attention(x, x, x, positions=p, plan=plan)).lower(x, positions).as_text()
    sent = [line.split(" -> ")[-1] for line in text.splitlines() if "stablehlo.collective_permute" in line]
    where = ["tensor<2x1x8xi32>"] * 2  # one hop ahead of the rest
    assert sorted(sent) == ["tensor<2x1x2x8x1xf32>", "tensor<2x1x2x8x32xi8>", *where]


def test_an_unknown_transit_dtype_is_named() -> None:
    with pytest.raises(ValueError, match="Plan.transit_dtype is 'int4'.*int8, float8_e4m3fn"):
        ring.Plan(transit_dtype="int4")
