"""The comparison every exactness test makes: a call of ring against the dense float64 oracle."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import ring
from ring import reference


def make_mesh(axes: dict[str, int]) -> jax.sharding.Mesh | None:
    if not axes:
        return None
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def pack(
    rng: np.random.Generator, batch: int, length: int, num_documents: int, padding: int
) -> tuple[np.ndarray, np.ndarray]:
    """(positions, segment_ids) int32 [B, S]: documents of random lengths, then padding."""
    positions, segments = np.zeros((2, batch, length), np.int32)
    filled = length - padding
    for b in range(batch):
        cuts = np.sort(
            rng.choice(np.arange(1, max(filled, 2)), min(num_documents - 1, max(filled - 1, 0)), replace=False)
        )
        for n, document in enumerate(np.split(np.arange(filled), cuts)):
            positions[b, document] = np.arange(len(document))
            segments[b, document] = n + 1
    return positions, segments


def relative_error(actual: Any, expected: np.ndarray, terms: float = 0.0) -> float:
    """Largest difference over the largest element, or over ``terms`` where what they add up to cancels to 0.

    A query that sees one key has the score cotangent weight * (v . dout - out . dout) = 0: two sums of the same
    numbers, each with its own rounding.
    """
    difference = np.abs(np.asarray(actual, np.float64) - expected).max()
    largest = np.abs(expected).max()
    return float(difference / max(largest if largest > 1e-12 * terms else terms, 1e-30))


def compare(
    *,
    axes: dict[str, int] | None = None,
    shape: tuple[int, int, int, int, int] = (2, 64, 4, 2, 8),
    mask: dict[str, Any] | None = None,
    dtype: Any = jnp.float32,
    num_documents: int = 4,
    padding: int = 5,
    sinks: bool = False,
    soft_cap: float | None = None,
    last_visible: bool = False,
    local: bool = False,
    seed: int = 0,
    **plan_fields: Any,
) -> dict[str, float]:
    """Relative errors of out and of every cotangent; shape is B, S, H, G, D."""
    rng = np.random.default_rng(seed)
    batch, length, heads, groups, dim = shape
    plan = ring.Plan(mesh=make_mesh(axes or {}), **plan_fields)
    order = ring.layout.permutation(plan.layout, length, plan.num_shards)
    positions, segments = pack(rng, batch, length, num_documents, padding)
    last = np.minimum(positions + rng.integers(0, 9, positions.shape, dtype=np.int32), length) if last_visible else None

    def draw(num_heads: int) -> np.ndarray:
        x = jnp.asarray(rng.standard_normal((batch, length, num_heads, dim)), dtype)
        return np.asarray(x, np.float64)

    q, k, v, dout = draw(heads), draw(groups), draw(groups), draw(heads)
    sink = rng.standard_normal(heads).astype(np.float32) if sinks else None
    visible = reference.visibility(positions, segments, last_visible=last, **(mask or {}))
    expected = reference.attention(q, k, v, visible, dout=dout, sinks=sink, soft_cap=soft_cap)

    def run(
        q: jax.Array, k: jax.Array, v: jax.Array, sink: jax.Array | None, dout: jax.Array, *meta: jax.Array
    ) -> tuple:
        def call(q: jax.Array, k: jax.Array, v: jax.Array, sink: jax.Array | None) -> jax.Array:
            return (ring.attention_local if local else ring.attention)(
                q, k, v, positions=meta[0], segment_ids=meta[1], last_visible=meta[2] if last_visible else None,
                mask=ring.Mask(**(mask or {})), plan=plan, sinks=sink, soft_cap=soft_cap,
            )  # fmt: skip

        out, pull_back = jax.vjp(call, q, k, v, sink)
        return out, *pull_back(dout)

    if local:
        tokens = plan.spec("batch", "sequence", "heads", None)
        rest = plan.spec("batch", "sequence")
        run = jax.shard_map(
            run, mesh=plan.mesh, check_vma=False,
            in_specs=(tokens, tokens, tokens, plan.spec("heads"), tokens, *[rest] * (3 if last_visible else 2)),
            out_specs=(tokens, tokens, tokens, tokens, plan.spec("heads")),
        )  # fmt: skip
    arrays = [jnp.asarray(x[:, order], dtype) for x in (q, k, v)]
    meta = [jnp.asarray(x[:, order]) for x in (positions, segments, last) if x is not None]
    out, dq, dk, dv, dsinks = jax.jit(run)(*arrays, sink, jnp.asarray(dout[:, order], dtype), *meta)
    for cotangent, like in ((dq, q), (dk, k), (dv, v)):
        assert cotangent.dtype == dtype
        assert cotangent.shape == like.shape
    assert expected.dq is not None
    assert expected.dk is not None
    assert expected.dv is not None
    hidden = ~visible.any(-1)[:, order]
    assert not np.any(np.asarray(out, np.float32)[hidden]), "a query that sees nothing must return exactly 0"
    assert not np.any(np.asarray(dq, np.float32)[hidden]), "a query that sees nothing must have exactly 0 gradient"
    unseen = ~visible.any(1)[:, order]
    assert not np.any(np.asarray(dk, np.float32)[unseen]), "a key nobody sees must have exactly 0 gradient"
    assert not np.any(np.asarray(dv, np.float32)[unseen]), "a value nobody sees must have exactly 0 gradient"
    terms = np.abs(v).max() * np.abs(dout).max()
    errors = {
        "out": relative_error(out, expected.out[:, order]),
        "dq": relative_error(dq, expected.dq[:, order], terms * np.abs(k).max()),
        "dk": relative_error(dk, expected.dk[:, order], terms * np.abs(q).max()),
        "dv": relative_error(dv, expected.dv[:, order]),
    }
    if expected.dsinks is not None:
        errors["dsinks"] = relative_error(dsinks, expected.dsinks)
    return errors


def check(**case: Any) -> None:
    """``compare`` in float32, within the package's promise."""
    for name, error in compare(**case).items():
        assert error <= (2e-6 if name == "out" else 1e-5), f"{name} is off by {error:.1e} of the largest element"


@pytest.fixture(scope="session")
def check_exact() -> Callable[..., None]:
    return check


@pytest.fixture(scope="session")
def errors_of() -> Callable[..., dict[str, float]]:
    return compare


@pytest.fixture(scope="session")
def mesh_of() -> Callable[[dict[str, int]], jax.sharding.Mesh | None]:
    return make_mesh


@pytest.fixture(scope="session")
def pack_rows() -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    return pack


@pytest.fixture(autouse=True)
def strict():
    """Nothing in ring leans on implicit promotion of dtypes or ranks."""
    with jax.numpy_rank_promotion("raise"):
        yield
