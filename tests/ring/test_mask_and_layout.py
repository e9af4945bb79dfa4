"""Block classification against every pair, layouts as permutations, balance of work, refusals."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ring
from ring import mask as masks
from ring import reference

MASKS: list[dict[str, Any]] = [{}, {"causal": False}, {"window": 6}, {"prefix": 5}, {"block": 4, "window": 9}]


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fields=st.sampled_from(MASKS), documents=st.integers(1, 9), padding=st.integers(0, 20), seed=st.integers(0, 999))
def test_blocks_are_none_partial_or_full_as_their_pairs_say(
    pack_rows: Callable, fields: dict[str, Any], documents: int, padding: int, seed: int
) -> None:
    positions, segments = pack_rows(np.random.default_rng(seed), 2, 48, documents, padding)
    mask = ring.Mask(**fields)
    query = masks.queries(mask, jnp.asarray(positions), jnp.asarray(segments))
    key = masks.Keys(jnp.asarray(positions), jnp.asarray(segments))
    pairs = reference.visibility(positions, segments, **fields)
    np.testing.assert_array_equal(np.asarray(masks.visible(query, key)), pairs)
    blocks = pairs.reshape(2, 6, 8, 4, 12)
    kinds = np.asarray(masks.classify(query, key, 8, 12))
    assert not np.any(blocks.any((2, 4)) & (kinds == masks.NONE)), "a visible pair was skipped"
    np.testing.assert_array_equal(kinds == masks.FULL, blocks.all((2, 4)))


@pytest.mark.parametrize("layout", ["contiguous", "striped", "zigzag"])
@pytest.mark.parametrize("fields", [{}, {"window": 100}], ids=str)
def test_visited_blocks_are_nearly_all_needed_on_packed_rows(
    pack_rows: Callable, layout: str, fields: dict[str, Any]
) -> None:
    """Blocks visited over blocks with a visible pair, over every hop of a ring of 4: at most 1.1."""
    positions, segments = pack_rows(np.random.default_rng(1), 1, 4096, 16, 100)
    order = ring.layout.permutation(layout, 4096, 4)
    positions, segments = positions[:, order], segments[:, order]
    query = masks.queries(ring.Mask(**fields), jnp.asarray(positions), jnp.asarray(segments))
    key = masks.Keys(jnp.asarray(positions), jnp.asarray(segments))
    visited = np.sum(np.asarray(masks.classify(query, key, 64, 64)) != masks.NONE)
    pairs = reference.visibility(positions, segments, **fields)
    needed = np.sum(pairs.reshape(1, 64, 64, 64, 64).any((2, 4)))
    assert visited <= 1.1 * needed


@pytest.mark.parametrize("layout", ["striped", "zigzag"])
@pytest.mark.parametrize("shards", [4, 5, 8])
def test_balanced_layouts_give_every_device_the_same_work(layout: str, shards: int) -> None:
    length = 128 * shards
    order = ring.layout.permutation(layout, length, shards)
    visible = (order[None, :] <= order[:, None]).reshape(shards, -1)
    assert visible.sum(1).max() <= 1.05 * visible.sum(1).mean()


@pytest.mark.parametrize("layout", ["contiguous", "striped", "zigzag"])
@given(length=st.integers(0, 70), shards=st.integers(1, 9))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_layouts_lose_no_token_and_have_an_inverse(layout: str, length: int, shards: int) -> None:
    order = ring.layout.permutation(layout, length, shards)
    assert order.dtype == np.int32
    np.testing.assert_array_equal(np.sort(order), np.arange(length))
    np.testing.assert_array_equal(order[ring.layout.inverse(layout, length, shards)], np.arange(length))


def test_layouts_place_tokens_as_documented() -> None:
    assert ring.layout.permutation("contiguous", 8, 2).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert ring.layout.permutation("striped", 8, 2).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert ring.layout.permutation("zigzag", 8, 2).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert ring.layout.divides("striped", 12, 4)
    assert not ring.layout.divides("zigzag", 12, 4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ring.layout.permutation("snake", 8, 2), "'snake'.*contiguous, striped, zigzag"),
        (lambda: ring.Plan(strategy="rings"), "Plan.strategy is 'rings'"),
        (lambda: ring.Plan(layout="zig"), "layout is 'zig'"),
        (lambda: ring.Plan(query_block=0), "Plan.query_block is 0"),
        (lambda: ring.Mask(window=0), "Mask.window is 0"),
        (lambda: ring.Mask(causal=False, prefix=3), "Mask.prefix is 3 but causal is False"),
    ],
)
def test_wrong_settings_are_named(make: Callable, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_plans_are_hashable(mesh_of: Callable) -> None:
    mesh = mesh_of({"sp": 4})
    assert hash(ring.Plan(mesh=mesh)) == hash(ring.Plan(mesh=mesh))
    assert ring.Plan(mesh=mesh).num_shards == 4
    assert ring.Plan().num_shards == 1


@pytest.mark.parametrize(
    ("axes", "shape", "options", "message"),
    [
        ({}, (2, 16, 3, 2, 8), {}, "must divide"),
        ({"dp": 4, "sp": 2}, (2, 16, 4, 2, 8), {}, "batch is 2"),
        ({"tp": 4, "sp": 2}, (2, 16, 4, 2, 8), {}, "'tp' has size 4"),
        ({"sp": 8}, (2, 16, 4, 2, 8), {"strategy": "ulysses"}, "'ulysses' exchanges heads among 8"),
        ({}, (2, 16, 4, 2, 8), {"soft_cap": -1.0}, "soft_cap is -1.0"),
        ({}, (2, 16, 4, 2, 8), {"sinks": jnp.zeros(3)}, "sinks is"),
        ({}, (2, 16, 4, 2, 8), {"segment_ids": jnp.zeros((2, 8), jnp.int32)}, "segment_ids is"),
    ],
)
def test_what_does_not_fit_is_refused_while_tracing(
    mesh_of: Callable, axes: dict[str, int], shape: tuple[int, ...], options: dict[str, Any], message: str
) -> None:
    batch, length, heads, groups, dim = shape
    options = dict(options)
    plan = ring.Plan(mesh=mesh_of(axes), strategy=options.pop("strategy", "ring"))
    q, kv = jnp.zeros((batch, length, heads, dim)), jnp.zeros((batch, length, groups, dim))
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(
            lambda q, kv: ring.attention(
                q, kv, kv, positions=jnp.zeros((batch, length), jnp.int32), plan=plan, **options
            ),
            q,
            kv,
        )


def test_forward_mode_is_refused() -> None:
    x, positions = jnp.ones((1, 4, 1, 4)), jnp.zeros((1, 4), jnp.int32)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda q: ring.attention(q, x, x, positions=positions), (x,), (x,))


def test_vmap_equals_a_larger_batch(mesh_of: Callable) -> None:
    rng = np.random.default_rng(0)
    plan = ring.Plan(mesh=mesh_of({"sp": 2}))
    x = jnp.asarray(rng.standard_normal((3, 1, 16, 2, 8)), jnp.float32)
    positions = jnp.asarray(rng.integers(0, 16, (3, 1, 16)), jnp.int32)
    call = lambda x, positions: ring.attention(x, x, x, positions=positions, plan=plan)
    mapped = jax.jit(jax.vmap(call))(x, positions)
    whole = jax.jit(call)(x.reshape(3, 16, 2, 8), positions.reshape(3, 16))
    np.testing.assert_allclose(np.asarray(mapped).reshape(whole.shape), np.asarray(whole), atol=1e-6)
