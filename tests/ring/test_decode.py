"""Decoding against a sharded cache: every new token must come out as full attention would have it."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ring
from ring import decode, reference

B, C, H, G, D = 2, 32, 8, 4, 8


def _setup(rng: np.random.Generator, dtype: jnp.dtype) -> tuple[np.ndarray, ...]:
    return tuple(np.asarray(jnp.asarray(rng.standard_normal((B, C, n, D)), dtype), np.float32) for n in (H, G, G))


@pytest.mark.parametrize(
    ("axes", "dtype", "tolerance"),
    [
        ({}, jnp.float32, 2e-6),
        ({"sp": 8}, jnp.float32, 2e-6),
        ({"dp": 2, "sp": 2, "tp": 2}, jnp.float32, 2e-6),
        ({"sp": 2, "ulysses": 4}, jnp.bfloat16, 1e-2),
    ],
    ids=str,
)
def test_tokens_appended_one_by_one_equal_full_attention(
    mesh_of: Callable, axes: dict[str, int], dtype: jnp.dtype, tolerance: float
) -> None:
    """Prefill of different lengths per row in striped order, then decoding in place, sinks and window on."""
    rng = np.random.default_rng(0)
    plan = ring.Plan(mesh=mesh_of(axes))
    q, k, v = _setup(rng, dtype)
    sinks = rng.standard_normal(H).astype(np.float32)
    prefilled, num_steps = np.array([9, 20]), 4
    place = ring.layout.inverse("striped", C, plan.num_shards)
    positions = np.tile(np.arange(C, dtype=np.int32), (B, 1))
    visible = reference.visibility(positions, np.ones((B, C), np.int32), window=12)
    expected = reference.attention(q, k, v, visible, sinks=sinks).out

    order = ring.layout.permutation("striped", C, plan.num_shards)
    filled = (positions < prefilled[:, None])[:, order]
    # What an empty slot holds must not matter.
    k_cache = jnp.asarray(np.where(filled[..., None, None], k[:, order], 1e4), dtype)
    v_cache = jnp.asarray(np.where(filled[..., None, None], v[:, order], 1e4), dtype)
    cache_positions, cache_segments = jnp.asarray(positions[:, order]), jnp.asarray(filled, jnp.int32)

    @jax.jit
    def step(cache: tuple, q_new: jax.Array, k_new: jax.Array, v_new: jax.Array, now: jax.Array) -> tuple:
        k_cache, v_cache, cache_positions, cache_segments = cache
        slots = jnp.asarray(place)[now]
        k_cache = decode.append(k_cache, k_new, slots, plan=plan, heads=True)
        v_cache = decode.append(v_cache, v_new, slots, plan=plan, heads=True)
        cache_positions = decode.append(cache_positions, now, slots, plan=plan)
        cache_segments = decode.append(cache_segments, jnp.ones_like(now), slots, plan=plan)
        out = decode.decode_attention(
            q_new, k_cache, v_cache, positions=now, cache_positions=cache_positions,
            cache_segment_ids=cache_segments, mask=ring.Mask(window=12), plan=plan, sinks=jnp.asarray(sinks),
        )  # fmt: skip
        return (k_cache, v_cache, cache_positions, cache_segments), out

    cache = (k_cache, v_cache, cache_positions, cache_segments)
    for n in range(num_steps):
        now = np.asarray(2 * n + prefilled[:, None] + np.arange(2), np.int32)
        rows = np.arange(B)[:, None]
        new = (jnp.asarray(x[rows, now], dtype) for x in (q, k, v))
        cache, out = step(cache, *new, jnp.asarray(now))
        error = np.abs(np.asarray(out, np.float64) - expected[rows, now]).max()
        assert error <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize(
    ("axes", "layout", "options"),
    [
        ({}, "contiguous", {"query_block": 5, "key_block": 7}),
        ({"sp": 8}, "striped", {}),
        ({"dp": 2, "sp": 2, "tp": 2}, "zigzag", {"query_block": 4, "key_block": 8}),
        ({"sp": 2, "ulysses": 4}, "striped", {}),
    ],
    ids=str,
)
def test_a_chunk_equals_full_attention(
    mesh_of: Callable, axes: dict[str, int], layout: str, options: dict[str, int]
) -> None:
    """The second chunk of a prompt: rows of different lengths, a chunk's end that is padding, free slots of garbage."""
    rng = np.random.default_rng(1)
    plan = ring.Plan(mesh=mesh_of(axes), layout=layout, **options)
    q, k, v = _setup(rng, jnp.float32)
    starts, counts, length = np.array([5, 11]), np.array([16, 9]), 16
    positions = np.tile(np.arange(C, dtype=np.int32), (B, 1))
    visible = reference.visibility(positions, np.ones((B, C), np.int32), window=14)
    expected = reference.attention(q, k, v, visible).out

    order = ring.layout.permutation(layout, C, plan.num_shards)
    filled = (positions < (starts + counts)[:, None])[:, order]
    k_cache, v_cache = (jnp.asarray(np.where(filled[..., None, None], x[:, order], 1e4)) for x in (k, v))
    now = np.asarray(starts[:, None] + np.arange(length), np.int32)
    real = np.arange(length) < counts[:, None]
    run = jax.jit(
        lambda q, k, v, now, real, filled: decode.chunk_attention(
            q,
            k,
            v,
            positions=now,
            segment_ids=real,
            cache_positions=jnp.asarray(positions[:, order]),
            cache_segment_ids=filled,
            mask=ring.Mask(window=14),
            plan=plan,
            soft_cap=None,
        )  # fmt: skip
    )
    rows = np.arange(B)[:, None]
    out = run(q[rows, now].astype(np.float32), k_cache, v_cache, now, real.astype(np.int32), filled.astype(np.int32))
    assert np.abs(np.asarray(out) - expected[rows, now])[real].max() <= 2e-6 * np.abs(expected).max()
    assert not np.any(np.asarray(out)[~real])


def test_a_query_that_sees_nothing_returns_zero(mesh_of: Callable) -> None:
    plan = ring.Plan(mesh=mesh_of({"sp": 4}))
    cache = jnp.ones((1, 8, 2, D))
    positions = jnp.zeros((1, 8), jnp.int32)
    call = jax.jit(
        lambda segments, own: decode.decode_attention(
            jnp.ones((1, 1, 2, D)),
            cache,
            cache,
            positions=jnp.zeros((1, 1), jnp.int32),
            segment_ids=own,
            cache_positions=positions,
            cache_segment_ids=segments,
            plan=plan,
        )  # fmt: skip
    )
    one = jnp.ones((1, 1), jnp.int32)
    assert not np.any(np.asarray(call(jnp.zeros((1, 8), jnp.int32), one)))
    assert not np.any(np.asarray(call(jnp.zeros((1, 8), jnp.int32), jnp.zeros_like(one))))
    assert not np.any(np.asarray(call(jnp.full((1, 8), 2, jnp.int32), one)))
    np.testing.assert_allclose(np.asarray(call(jnp.ones((1, 8), jnp.int32), one)), 1.0, rtol=1e-6)


@pytest.mark.parametrize("groups", [2, 16])
def test_few_and_many_groups(groups: int) -> None:
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 12, 32, 4)).astype(np.float32)
    k, v = (rng.standard_normal((2, 12, groups, 4)).astype(np.float32) for _ in range(2))
    positions, segments = np.tile(np.arange(12, dtype=np.int32), (2, 1)), np.ones((2, 12), np.int32)
    expected = reference.attention(q, k, v, reference.visibility(positions, segments)).out[:, -3:]
    out = decode.decode_attention(
        jnp.asarray(q[:, -3:]), jnp.asarray(k), jnp.asarray(v), positions=jnp.asarray(positions[:, -3:]),
        cache_positions=jnp.asarray(positions), cache_segment_ids=jnp.asarray(segments),
    )  # fmt: skip
    assert np.abs(np.asarray(out) - expected).max() <= 2e-6 * np.abs(expected).max()


def test_append_writes_in_place_and_skips_slots_outside(mesh_of: Callable) -> None:
    plan = ring.Plan(mesh=mesh_of({"sp": 4, "dp": 2}))
    assert plan.mesh is not None
    sharding = jax.sharding.NamedSharding(plan.mesh, plan.spec("batch", "sequence", None, None))
    cache = jax.device_put(jnp.zeros((B, 8, G, D)), sharding)
    new = jnp.ones((B, 2, G, D)) * jnp.asarray([[1.0, 2.0], [3.0, 4.0]])[:, :, None, None]
    slots = jnp.asarray([[7, -1], [0, 8]], jnp.int32)
    write = jax.jit(lambda c, n, s: decode.append(c, n, s, plan=plan, heads=True), donate_argnums=0)
    compiled = write.lower(cache, new, slots).compile()
    memory, program = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None
    assert program is not None
    assert memory.alias_size_in_bytes == cache.nbytes // 8
    assert "all-gather" not in program
    assert "collective-permute" not in program
    expected = np.zeros((B, 8, G, D))
    expected[0, 7], expected[1, 0] = 1, 3
    np.testing.assert_array_equal(np.asarray(write(cache, new, slots)), expected)


def test_a_step_sends_one_message_whatever_the_length(mesh_of: Callable) -> None:
    plan = ring.Plan(mesh=mesh_of({"sp": 8}))

    def collectives(slots: int) -> list[str]:
        cache, meta = jnp.zeros((B, slots, G, D)), jnp.zeros((B, slots), jnp.int32)
        lowered = jax.jit(
            lambda q, c, m: decode.decode_attention(
                q, c, c, positions=m[:, :1], cache_positions=m, cache_segment_ids=m, plan=plan
            )
        ).lower(jnp.zeros((B, 1, H, D)), cache, meta)
        return [line.strip() for line in lowered.as_text().splitlines() if "stablehlo.all_" in line]

    short, long = collectives(64), collectives(512)
    assert len(short) == len(long) == 1
    assert short[0].split(" : ")[-1] == long[0].split(" : ")[-1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": 30}, "30 slots over 4 devices"),
        ({"heads": 6}, "must divide"),
        ({"batch": 3}, "do not divide"),
    ],
)
def test_shapes_that_do_not_fit_are_named(mesh_of: Callable, change: dict[str, int], message: str) -> None:
    plan = ring.Plan(mesh=mesh_of({"dp": 2, "sp": 4}))
    batch, slots, heads = change.get("batch", 2), change.get("slots", 32), change.get("heads", 8)
    meta = jnp.zeros((batch, slots), jnp.int32)
    cache = jnp.zeros((batch, slots, G, D))
    with pytest.raises(ValueError, match=message):
        decode.decode_attention(
            jnp.zeros((batch, 1, heads, D)), cache, cache, positions=meta[:, :1],
            cache_positions=meta, cache_segment_ids=meta, plan=plan,
        )  # fmt: skip
