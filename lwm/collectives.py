"""Collectives over the mesh axes that a mesh really has, and `on_each_device` to run a function shard by shard.

All take a tuple of axis names and do nothing for an empty one, so that the same code runs on one device and on many.
"""

from collections.abc import Callable
from typing import Any

import jax

from lwm.sharding import AnyMesh, mesh_sizes, spec_for

AxisNames = tuple[str, ...]


def on_each_device(
    function: Callable[..., Any], mesh: AnyMesh | None, in_axes: Any, out_axes: Any
) -> Callable[..., Any]:
    """`function` applied to every device's shards of its arguments (called directly without a mesh).

    `in_axes` and `out_axes` are trees of logical axes, one tuple per array.
    """
    if mesh is None:
        return function
    sizes = mesh_sizes(mesh)

    def specs(axes: Any) -> Any:
        return jax.tree.map(lambda each: spec_for(each, sizes), axes, is_leaf=_is_axes)

    # The callers write their own gradients, so nothing differentiates through the replication that this would track.
    return jax.shard_map(function, mesh=mesh, in_specs=specs(in_axes), out_specs=specs(out_axes), check_vma=False)


def _is_axes(node: Any) -> bool:
    return isinstance(node, tuple) and all(each is None or isinstance(each, str) for each in node)


def all_gather(x: jax.Array, axes: AxisNames, dim: int) -> jax.Array:
    """The shards of dimension `dim` joined."""
    return jax.lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x


def psum(x: jax.Array, axes: AxisNames) -> jax.Array:
    """The sum over the devices of `axes`."""
    return jax.lax.psum(x, axes) if axes else x


def pmax(x: jax.Array, axes: AxisNames) -> jax.Array:
    """The maximum over the devices of `axes`."""
    return jax.lax.pmax(x, axes) if axes else x


def psum_scatter(x: jax.Array, axes: AxisNames, dim: int) -> jax.Array:
    """The sum over the devices of `axes`, of which each keeps its part of dimension `dim`."""
    return jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True) if axes else x


def own_part(x: jax.Array, axes: AxisNames, dim: int) -> jax.Array:
    """This device's part of dimension `dim` when it is split over `axes`."""
    if not axes:
        return x
    size = x.shape[dim] // jax.lax.axis_size(axes)
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axes) * size, size, axis=dim)
