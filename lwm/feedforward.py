"""Weight gathering products and the SwiGLU feed-forward (Shazeer, arXiv 2002.05202), whole or blockwise over tokens.

Legend: B batch, S sequence, E features, F hidden features of the feed-forward, N tokens of one device, C of one chunk.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from lwm.collectives import AxisNames, all_gather, on_each_device, psum, psum_scatter
from lwm.sharding import AnyMesh, Axes, axis_names, constrain, copy_axes, mesh_sizes, storage_axes

GATE_AXES: Axes = ("embed", "mlp")
DOWN_AXES: Axes = ("mlp", "embed")
TOKEN_AXES: Axes = ("batch", "sequence", None)
GATHERED = "gathered_weight"


def gathered(axes: Axes) -> Axes:
    """The axes of a weight in use: collected from the devices that share its storage, still split over tp."""
    return tuple(None if axis == "embed" else axis for axis in axes)


def _in_use(axes: Axes, mesh: AnyMesh | None, weight: jax.Array, dtype: DTypeLike) -> jax.Array:
    # Two constraints, so that the partitioner casts where the weight is stored and moves the smaller dtype.
    return constrain(constrain(weight.astype(dtype), axes, mesh), gathered(axes), mesh)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def project(equation: str, axes: Axes, mesh: AnyMesh | None, x: jax.Array, weight: jax.Array) -> jax.Array:
    """einsum of activations x with a `weight` of logical `axes`, computed and returned in x's dtype.

    The weight is cast and then gathered. What is gathered is named "gathered_weight" for remat policies, so that it
    need not be kept for the backward pass, which gathers it once more. The gradient of the float32 weight is
    accumulated in float32 and scattered back to where the weight is stored.
    """
    return jnp.einsum(equation, x, _in_use(axes, mesh, weight, x.dtype))


def _project_forward(
    equation: str, axes: Axes, mesh: AnyMesh | None, x: jax.Array, weight: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    assert weight.dtype == jnp.float32, "gradients are those of float32 master weights"
    used = checkpoint_name(_in_use(axes, mesh, weight, x.dtype), GATHERED)
    return jnp.einsum(equation, x, used), (x, used)


def _project_backward(
    equation: str, axes: Axes, mesh: AnyMesh | None, saved: tuple[jax.Array, jax.Array], dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, used = saved
    inputs, output = equation.split("->")
    x_dims, weight_dims = inputs.split(",")
    dx = jnp.einsum(f"{output},{weight_dims}->{x_dims}", dy, used)
    dweight = jnp.einsum(f"{x_dims},{output}->{weight_dims}", x, dy, preferred_element_type=jnp.float32)
    return dx, constrain(dweight, axes, mesh)


project.defvjp(_project_forward, _project_backward)


def feed_forward(
    x_BSE: jax.Array,
    gate_EF: jax.Array,
    up_EF: jax.Array,
    down_FE: jax.Array,
    *,
    chunk: int | None,
    mesh: AnyMesh | None,
) -> jax.Array:
    """down(silu(gate x) * up x) in x's dtype.

    With `chunk`, at most that many tokens of a device are in flight at once, forward and backward, so that the hidden
    activations take the memory of one chunk (Liu & Abbeel, arXiv 2305.19370); they are computed again in the backward.
    """
    if chunk:
        return _blockwise(chunk, mesh, x_BSE, gate_EF, up_EF, down_FE)
    gate_BSF = project("BSE,EF->BSF", GATE_AXES, mesh, x_BSE, gate_EF)
    up_BSF = project("BSE,EF->BSF", GATE_AXES, mesh, x_BSE, up_EF)
    return project("BSF,FE->BSE", DOWN_AXES, mesh, _gated(gate_BSF, up_BSF), down_FE)


def _swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    # In float32 and rounded once: rounding after each operation costs several times more than it saves on a CPU.
    return (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(gate.dtype)


@jax.custom_vjp
def _gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) * up, elementwise, in their dtype.

    Keeps its two inputs for the backward pass; what silu would keep in float32 is several times as much.
    """
    return _swiglu(gate, up)


def _gated_forward(gate: jax.Array, up: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _swiglu(gate, up), (gate, up)


def _gated_backward(saved: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    _, derivative = jax.vjp(_swiglu, *saved)
    return derivative(dy)


_gated.defvjp(_gated_forward, _gated_backward)


def chunk_length(num_tokens: int, chunk: int) -> int:
    """The largest divisor of `num_tokens` that is at most `chunk`."""
    return next(length for length in range(min(chunk, num_tokens), 0, -1) if num_tokens % length == 0)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _blockwise(
    chunk: int, mesh: AnyMesh | None, x_BSE: jax.Array, gate_EF: jax.Array, up_EF: jax.Array, down_FE: jax.Array
) -> jax.Array:
    tp, shared, _ = _axes(mesh)

    def local(x_BSE: jax.Array, *weights: jax.Array) -> jax.Array:
        gate_EF, up_EF, down_FE = _gather(weights, x_BSE.dtype, shared)

        def step(carry: None, x_CE: jax.Array) -> tuple[None, jax.Array]:
            return carry, _gated(x_CE @ gate_EF, x_CE @ up_EF) @ down_FE

        _, y = jax.lax.scan(step, None, _chunks(x_BSE, chunk))
        return psum(y.reshape(x_BSE.shape), tp)

    return on_each_device(local, mesh, (TOKEN_AXES, *_WEIGHTS), TOKEN_AXES)(x_BSE, gate_EF, up_EF, down_FE)


_Saved = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
_WEIGHTS = (GATE_AXES, GATE_AXES, DOWN_AXES)
# The dimension of each weight that is split over the devices sharing its storage.
_SHARED_DIMS = (0, 0, 1)


def _blockwise_forward(
    chunk: int, mesh: AnyMesh | None, x_BSE: jax.Array, gate_EF: jax.Array, up_EF: jax.Array, down_FE: jax.Array
) -> tuple[jax.Array, _Saved]:
    return _blockwise(chunk, mesh, x_BSE, gate_EF, up_EF, down_FE), (x_BSE, gate_EF, up_EF, down_FE)


def _blockwise_backward(chunk: int, mesh: AnyMesh | None, saved: _Saved, dy_BSE: jax.Array) -> _Saved:
    tp, shared, dp = _axes(mesh)

    def local(dy_BSE: jax.Array, x_BSE: jax.Array, *weights: jax.Array) -> tuple[jax.Array, ...]:
        gate_EF, up_EF, down_FE = _gather(weights, x_BSE.dtype, shared)
        Sums = tuple[jax.Array, ...]

        def step(sums: Sums, chunk_in: tuple[jax.Array, jax.Array]) -> tuple[Sums, jax.Array]:
            x_CE, dy_CE = chunk_in
            hidden_CF, derivative = jax.vjp(_gated, x_CE @ gate_EF, x_CE @ up_EF)
            dgate_CF, dup_CF = derivative(dy_CE @ down_FE.T)
            products = (_outer(x_CE, dgate_CF), _outer(x_CE, dup_CF), _outer(hidden_CF, dy_CE))
            sums = tuple(total + product for total, product in zip(sums, products, strict=True))
            return sums, dgate_CF @ gate_EF.T + dup_CF @ up_EF.T

        zeros = tuple(jnp.zeros(weight.shape, jnp.float32) for weight in (gate_EF, up_EF, down_FE))
        sums, dx = jax.lax.scan(step, zeros, (_chunks(x_BSE, chunk), _chunks(dy_BSE, chunk)))
        scattered = (psum_scatter(psum(total, dp), shared, dim) for total, dim in zip(sums, _SHARED_DIMS, strict=True))
        return psum(dx.reshape(x_BSE.shape), tp), *scattered

    backward = on_each_device(local, mesh, (TOKEN_AXES, TOKEN_AXES, *_WEIGHTS), (TOKEN_AXES, *_WEIGHTS))
    x, gate, up, down = saved
    dx, dgate, dup, ddown = backward(dy_BSE, x, gate, up, down)
    return dx.astype(x.dtype), dgate.astype(gate.dtype), dup.astype(up.dtype), ddown.astype(down.dtype)


_blockwise.defvjp(_blockwise_forward, _blockwise_backward)


def _axes(mesh: AnyMesh | None) -> tuple[AxisNames, AxisNames, AxisNames]:
    sizes = mesh_sizes(mesh)
    return axis_names(("tp",), sizes), storage_axes(sizes), copy_axes(sizes)


def _gather(weights: Sequence[jax.Array], dtype: DTypeLike, shared: AxisNames) -> list[jax.Array]:
    return [all_gather(each.astype(dtype), shared, dim) for each, dim in zip(weights, _SHARED_DIMS, strict=True)]


def _chunks(x_BSE: jax.Array, chunk: int) -> jax.Array:
    num_tokens = x_BSE.shape[0] * x_BSE.shape[1]
    return x_BSE.reshape(-1, chunk_length(num_tokens, chunk), x_BSE.shape[-1])


def _outer(a_CX: jax.Array, b_CY: jax.Array) -> jax.Array:
    return jnp.einsum("CX,CY->XY", a_CX, b_CY, preferred_element_type=jnp.float32)
