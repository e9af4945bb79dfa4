"""The ways in which sharded attention is known to go wrong, one named test each."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ring
from ring import local, reference, softmax

COLLECTIVES = {"ppermute", "all_gather", "all_to_all", "psum", "reduce_scatter", "psum_scatter"}


def _inner(value: Any) -> Iterator[Any]:
    for item in value if isinstance(value, (tuple, list)) else [value]:
        item = getattr(item, "jaxpr", item)
        if hasattr(item, "eqns"):
            yield item


def _equations(jaxpr: Any, times: int = 1, branched: bool = False) -> Iterator[tuple[Any, int, bool]]:
    """(equation, how often it runs, whether devices may disagree on running it)."""
    for equation in jaxpr.eqns:
        yield equation, times, branched
        name = equation.primitive.name
        inner_times = times * equation.params["length"] if name == "scan" else times
        for value in equation.params.values():
            for sub in _inner(value):
                yield from _equations(sub, inner_times, branched or name in ("cond", "while"))


def _arguments(batch: int, length: int, heads: int, groups: int, dim: int, dtype: Any = jnp.float32) -> tuple:
    q = jax.ShapeDtypeStruct((batch, length, heads, dim), dtype)
    kv = jax.ShapeDtypeStruct((batch, length, groups, dim), dtype)
    return q, kv, kv, jax.ShapeDtypeStruct((batch, length), jnp.int32)


def _loss(plan: ring.Plan, **options: Any) -> Callable:
    def loss(q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array) -> jax.Array:
        return jnp.sum(ring.attention(q, k, v, positions=positions, plan=plan, **options).astype(jnp.float32))

    return loss


def _count_permutes(jaxpr: Any, dtype: Any) -> int:
    return sum(
        times
        for equation, times, _ in _equations(jaxpr)
        if equation.primitive.name == "ppermute" and equation.invars[0].aval.dtype == dtype
    )


@pytest.mark.parametrize("strategy", ["ring", "usp"])
def test_rows_of_padding_only_are_exactly_zero(errors_of: Callable, strategy: str) -> None:
    """``errors_of`` asserts exact zeros of outputs and gradients; here nothing at all is visible, sinks or not."""
    for sinks in (False, True):
        errors = errors_of(
            axes={"sp": 2, "ulysses": 2},
            strategy=strategy,
            shape=(1, 16, 4, 2, 8),
            num_documents=1,
            padding=16,
            sinks=sinks,
        )
        assert not any(errors.values())


def test_merging_partials_that_saw_nothing() -> None:
    rng = np.random.default_rng(0)
    score, value = rng.standard_normal((3, 5)), rng.standard_normal((3, 5, 4))
    score[1] = -np.inf  # the second device's keys are all hidden
    empty = softmax.Running(jnp.zeros((1, 4)), jnp.full((1,), softmax.LOWEST), jnp.zeros((1,)))

    def combined(value: jax.Array, score: jax.Array) -> jax.Array:
        score = score * np.log2(np.e)
        top = jnp.maximum(jnp.max(score, axis=1, keepdims=True), softmax.LOWEST)
        weight = jnp.exp2(score - top)
        out = jnp.sum(weight[:, :, None] * value, axis=1, keepdims=True)
        merged = softmax.merge(out, top, jnp.sum(weight, axis=1, keepdims=True))
        both = softmax.merge(*(jnp.stack(x) for x in zip(merged, empty, strict=True)))
        return softmax.finish(both)[0]

    weight = np.exp(score)
    expected = (weight[..., None] * value).sum((0, 1)) / weight.sum()
    arguments = jnp.asarray(value, jnp.float32), jnp.asarray(score, jnp.float32)
    np.testing.assert_allclose(np.asarray(combined(*arguments))[0], expected, rtol=2e-6)
    assert np.isfinite(np.asarray(jax.grad(lambda v, s: jnp.sum(combined(v, s)))(*arguments))).all()
    nothing = softmax.merge(*(jnp.stack(x) for x in zip(empty, empty, strict=True)))
    out, lse = softmax.finish(nothing)
    assert not np.any(np.asarray(out))
    assert np.all(np.asarray(lse) == np.inf)


def test_logsumexp_stays_in_float32() -> None:
    spec = local.Spec(local.Route(), ring.Mask(), 1.0, None, None, None)
    q = jnp.full((1, 4, 1, 4), 5.0, jnp.bfloat16)  # every score is 100
    positions = jnp.arange(4, dtype=jnp.int32)[None]
    _, lse = local.forward(spec, q, q, q, None, (positions, jnp.ones_like(positions), None))
    assert lse.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(lse)[0, 0], 100 + np.log([1, 2, 3, 4]), rtol=1e-6)


def test_bfloat16_error_does_not_grow_with_the_number_of_hops(errors_of: Callable) -> None:
    """Neither partial outputs nor dK and dV are rounded on the way."""
    case: dict[str, Any] = {"shape": (1, 256, 2, 1, 32), "dtype": jnp.bfloat16, "num_documents": 1, "padding": 0}
    one, eight = errors_of(**case, layout="striped"), errors_of(**case, axes={"sp": 8}, layout="striped")
    for name in one:
        assert eight[name] <= 1.5 * one[name], name


@pytest.mark.parametrize("layout", ["contiguous", "striped", "zigzag"])
def test_packing_with_balance_in_lengths_that_do_not_divide(check_exact: Callable, layout: str) -> None:
    check_exact(axes={"sp": 4}, layout=layout, shape=(2, 59, 2, 1, 8), num_documents=7, padding=9)


def test_positions_are_data_in_any_order(mesh_of: Callable) -> None:
    """A random order of the tokens, that no layout describes, gives the same outputs in that order."""
    rng = np.random.default_rng(0)
    plan = ring.Plan(mesh=mesh_of({"sp": 4}), query_block=4, key_block=8)
    x = [jnp.asarray(rng.standard_normal((1, 64, 2, 8)), jnp.float32) for _ in range(3)]
    positions = jnp.arange(64, dtype=jnp.int32)[None] % 32
    segments = jnp.arange(64, dtype=jnp.int32)[None] // 32 + 1
    order = rng.permutation(64)
    call = jax.jit(lambda q, k, v, p, s: ring.attention(q, k, v, positions=p, segment_ids=s, plan=plan))
    straight = call(*x, positions, segments)
    shuffled = call(*(y[:, order] for y in x), positions[:, order], segments[:, order])
    np.testing.assert_allclose(np.asarray(shuffled), np.asarray(straight)[:, order], atol=1e-6)


def test_gradients_of_keys_are_right_on_every_shard(mesh_of: Callable) -> None:
    """Backward with stale keys is right on some shards only; compare shard by shard."""
    rng = np.random.default_rng(0)
    plan = ring.Plan(mesh=mesh_of({"sp": 8}), layout="contiguous")
    q, k, v, dout = (rng.standard_normal((1, 64, 2, 8)).astype(np.float32) for _ in range(4))
    positions = np.arange(64, dtype=np.int32)[None]
    expected = reference.attention(q, k, v, reference.visibility(positions, positions * 0 + 1), dout=dout)
    call = lambda q, k, v: ring.attention(q, k, v, positions=jnp.asarray(positions), plan=plan)
    _, dk, dv = jax.jit(lambda *x: jax.vjp(call, *x[:3])[1](x[3]))(q, k, v, dout)
    for actual, wanted in ((dk, expected.dk), (dv, expected.dv)):
        assert wanted is not None
        for shard in range(8):
            here = np.s_[:, 8 * shard : 8 * shard + 8]
            error = np.abs(np.asarray(actual)[here] - wanted[here]).max()
            assert error <= 1e-5 * np.abs(wanted[here]).max(), shard


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
def test_window_counts_the_query_itself(mesh_of: Callable, strategy: str) -> None:
    plan = ring.Plan(mesh=mesh_of({"sp": 4}), strategy=strategy)
    order = ring.layout.permutation("striped", 32, 4)
    positions = jnp.asarray(order)[None]
    v = jnp.asarray(np.random.default_rng(0).standard_normal((1, 32, 1, 8)), jnp.float32)
    call = jax.jit(
        lambda window: ring.attention(v * 0, v * 0, v, positions=positions, plan=plan, mask=ring.Mask(window=window)),
        static_argnums=0,
    )
    np.testing.assert_allclose(np.asarray(call(1)), np.asarray(v), rtol=1e-6)
    straight = np.asarray(v)[:, ring.layout.inverse("striped", 32, 4)]
    expected = straight.copy()
    expected[:, 1:] = (straight[:, 1:] + straight[:, :-1]) / 2
    np.testing.assert_allclose(np.asarray(call(2)), expected[:, order], rtol=1e-5, atol=1e-6)


def test_remat_does_not_run_the_ring_again_when_out_and_lse_are_saved(mesh_of: Callable) -> None:
    loss, arguments = _loss(ring.Plan(mesh=mesh_of({"sp": 8}))), _arguments(1, 64, 2, 1, 8, jnp.bfloat16)
    policy = jax.checkpoint_policies.save_only_these_names("ring_out", "ring_lse")
    # Queries come from a matrix product, so that something is left to recompute.
    wrapped = lambda q, *rest: loss(q @ jnp.eye(8, dtype=q.dtype), *rest)

    def permutes(policy: Any) -> int:
        grad = jax.grad(jax.checkpoint(wrapped, policy=policy), argnums=(0, 1, 2))
        return _count_permutes(jax.make_jaxpr(grad)(*arguments).jaxpr, jnp.uint16)

    assert permutes(None) == 3 * 7, "forward, forward again, backward"
    assert permutes(policy) == 2 * 7, "forward, backward"


@pytest.mark.parametrize("strategy", ["ring", "usp", "ulysses", "all_gather"])
def test_no_collective_stands_in_a_branch_devices_may_disagree_on(mesh_of: Callable, strategy: str) -> None:
    plan = ring.Plan(mesh=mesh_of({"sp": 2, "ulysses": 2, "tp": 2}), strategy=strategy)
    jaxpr = jax.make_jaxpr(jax.grad(_loss(plan), argnums=(0, 1, 2)))(*_arguments(1, 64, 8, 8, 8)).jaxpr
    found = [(e.primitive.name, branched) for e, _, branched in _equations(jaxpr) if e.primitive.name in COLLECTIVES]
    assert found
    assert not any(branched for _, branched in found)


def test_a_million_tokens_trace_in_a_second_and_hold_nothing_quadratic(mesh_of: Callable) -> None:
    length = 2**20
    loss = _loss(ring.Plan(mesh=mesh_of({"sp": 8})))
    arguments = _arguments(1, length, 8, 8, 64, jnp.bfloat16)
    start = time.process_time()
    jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(*arguments).jaxpr
    assert time.process_time() - start < 1
    largest = max(v.aval.size for e, _, _ in _equations(jaxpr) for v in e.outvars if hasattr(v.aval, "size"))
    assert largest <= 2 * length * 8 * 64


def test_one_permute_less_than_devices_in_the_dtype_of_the_keys(mesh_of: Callable) -> None:
    """P - 1 messages with keys and values forward, P - 1 backward, and P with their float32 gradients.

    On CPUs bfloat16 travels as the integers of its bits, or the compiler would send float32.
    """
    plan = ring.Plan(mesh=mesh_of({"sp": 8}))
    arguments = _arguments(1, 64, 4, 2, 8, jnp.bfloat16)
    forward = jax.make_jaxpr(_loss(plan))(*arguments).jaxpr
    assert _count_permutes(forward, jnp.uint16) == 7
    assert _count_permutes(forward, jnp.float32) == 0
    both = jax.make_jaxpr(jax.grad(_loss(plan), argnums=(0, 1, 2)))(*arguments).jaxpr
    assert _count_permutes(both, jnp.uint16) == 14
    assert _count_permutes(both, jnp.float32) == 8
    widest = max(e.invars[0].aval.size for e, _, _ in _equations(both) if e.primitive.name == "ppermute")
    assert widest == 2 * (64 // 8) * 2 * 8, "only the two key/value heads travel, not the four query heads"


def test_the_next_shard_is_sent_for_before_the_current_one_is_used(mesh_of: Callable) -> None:
    jaxpr = jax.make_jaxpr(jax.grad(_loss(ring.Plan(mesh=mesh_of({"sp": 8}))), argnums=(0, 1, 2)))(
        *_arguments(1, 64, 2, 1, 8)
    ).jaxpr
    hops = [
        [e.primitive.name for e in sub.eqns]
        for equation, _, _ in _equations(jaxpr)
        if equation.primitive.name == "scan"
        for value in equation.params.values()
        for sub in _inner(value)
    ]
    assert len(hops) == 2
    for names in hops:
        last_permute = max(n for n, name in enumerate(names) if name == "ppermute")
        assert last_permute < names.index("while")


def test_no_layer_keeps_the_positions_of_every_hop(mesh_of: Callable) -> None:
    """They travel in every layer and pass: a scan over layers would else collect them once, before its first layer, and
    keep 8 bytes for every token of the whole sequence on each device."""
    attend = lambda x, positions: ring.attention(x, x, x, positions=positions, plan=ring.Plan(mesh=mesh_of({"sp": 8})))

    def loss(x: jax.Array, scales: jax.Array, positions: jax.Array) -> jax.Array:
        layer = jax.checkpoint(lambda x, scale: (attend(x * scale, positions), None), prevent_cse=False)
        return jnp.sum(jax.lax.scan(layer, x, scales)[0])

    jaxpr = jax.make_jaxpr(jax.grad(loss))(jnp.ones((1, 64, 2, 8)), jnp.ones(3), jnp.zeros((1, 64), jnp.int32)).jaxpr
    assert _count_permutes(jaxpr, jnp.int32) == 3 * 3 * 8, "3 layers; forward, forward again, backward"


@pytest.mark.parametrize("length", [1, 7, 50])
def test_blocks_that_do_not_divide_the_shard(check_exact: Callable, length: int) -> None:
    check_exact(shape=(1, length, 2, 2, 8), query_block=8, key_block=6, num_documents=2, padding=0)
