"""Chunked feed-forward and cross-entropy: equal to the whole, gradients too, with one chunk alive."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ring
from ring import chunked


@pytest.mark.parametrize("chunk", [3, 4, 64])
def test_feed_forward_equals_the_whole(mesh_of: Callable, chunk: int) -> None:
    rng = np.random.default_rng(0)
    plan = ring.Plan(mesh=mesh_of({"sp": 4}))
    x, dout = (jnp.asarray(rng.standard_normal((2, 40, 8)), jnp.float32) for _ in range(2))
    up = jnp.asarray(rng.standard_normal((8, 32)), jnp.float32)

    def whole(up: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ up) @ up.T

    def in_chunks(up: jax.Array, x: jax.Array) -> jax.Array:
        return chunked.feed_forward(lambda y: whole(up, y), x, chunk=chunk, plan=plan)

    expected, pull_expected = jax.vjp(whole, up, x)
    actual, pull_actual = jax.vjp(jax.jit(in_chunks), up, x)
    for a, e in zip((actual, *pull_actual(dout)), (expected, *pull_expected(dout)), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(e), rtol=1e-5, atol=1e-5 * float(jnp.abs(e).max()))


def test_cross_entropy_equals_float64() -> None:
    rng = np.random.default_rng(0)
    hidden, head = rng.standard_normal((2, 11, 8)), rng.standard_normal((8, 50))
    targets = rng.integers(0, 50, (2, 11)).astype(np.int32)
    logits = hidden @ head
    weight = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = -np.log(np.take_along_axis(weight, targets[..., None], -1))[..., 0]
    call = lambda x, w: chunked.cross_entropy(x, w, jnp.asarray(targets), chunk=4)
    actual, pull_back = jax.vjp(call, jnp.asarray(hidden, jnp.float32), jnp.asarray(head, jnp.float32))
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=1e-5)
    dlogits = weight - np.eye(50)[targets]
    dhidden, dhead = pull_back(jnp.ones((2, 11)))
    np.testing.assert_allclose(np.asarray(dhidden), dlogits @ head.T, atol=2e-5)
    np.testing.assert_allclose(np.asarray(dhead), np.einsum("bse,bsv->ev", hidden, dlogits), atol=2e-5)


def test_memory_is_one_chunk_per_device_and_nothing_is_sent(mesh_of: Callable) -> None:
    plan = ring.Plan(mesh=mesh_of({"sp": 4}))
    mesh = plan.mesh
    assert mesh is not None
    length, vocabulary = 1024, 512

    def compiled(chunk: int) -> jax.stages.Compiled:
        def loss(x: jax.Array, targets: jax.Array) -> jax.Array:
            head = jnp.ones((8, vocabulary))
            return jnp.sum(chunked.cross_entropy(x, head, targets, chunk=chunk, plan=plan))

        tokens = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "sp"))
        arguments = (
            jax.ShapeDtypeStruct((1, length, 8), jnp.float32, sharding=tokens),
            jax.ShapeDtypeStruct((1, length), jnp.int32, sharding=tokens),
        )
        return jax.jit(jax.value_and_grad(loss)).lower(*arguments).compile()

    whole, small = compiled(length), compiled(16)
    before, after = whole.memory_analysis(), small.memory_analysis()
    assert before is not None
    assert after is not None
    assert after.temp_size_in_bytes < before.temp_size_in_bytes / 4
    assert "all-gather" not in (small.as_text() or "")
    assert "all-to-all" not in (small.as_text() or "")


def test_what_does_not_fit_is_named(mesh_of: Callable) -> None:
    plan = ring.Plan(mesh=mesh_of({"sp": 4}))
    with pytest.raises(ValueError, match="10 tokens over 4 devices"):
        chunked.feed_forward(lambda x: x, jnp.zeros((1, 10, 2)), chunk=2, plan=plan)
    with pytest.raises(ValueError, match="chunk is 0"):
        chunked.feed_forward(lambda x: x, jnp.zeros((1, 8, 2)), chunk=0, plan=plan)
