"""Looking up token embeddings from tables that are split over the mesh.

Legend: B batch, S sequence, E features, V the ids of all tables, one after the other.
"""

from functools import partial

import jax
import jax.numpy as jnp

from lwm.collectives import all_gather, on_each_device, own_part, psum, psum_scatter
from lwm.sharding import AnyMesh, Axes, axis_names, copy_axes, mesh_sizes, storage_axes

TABLE_AXES: Axes = (None, "lookup_embed")

_Tables = tuple[jax.Array, ...]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def lookup(dtype: str, mesh: AnyMesh | None, token_axes: Axes, tables: _Tables, tokens_BS: jax.Array) -> jax.Array:
    """Rows of the float32 `tables` (each [V, E], ids counted through all of them) in `dtype`: [B, S, E].

    The tables are gathered in `dtype`; their gradient is summed in float32, whatever `dtype` is, because a frequent
    token adds up thousands of small terms. Ids outside the tables are clipped to the nearest one.
    """
    sizes = mesh_sizes(mesh)

    def local(tables: _Tables, tokens_BS: jax.Array) -> jax.Array:
        table_VE = jnp.concatenate([each.astype(dtype) for each in tables])
        table_VE = all_gather(table_VE, storage_axes(sizes), 1)
        return all_gather(jnp.take(table_VE, tokens_BS, axis=0, mode="clip"), axis_names(("tp",), sizes), 2)

    axes_in = (tuple(TABLE_AXES for _ in tables), token_axes)
    return on_each_device(local, mesh, axes_in, (*token_axes, None))(tables, tokens_BS)


def _lookup_forward(
    dtype: str, mesh: AnyMesh | None, token_axes: Axes, tables: _Tables, tokens_BS: jax.Array
) -> tuple[jax.Array, tuple[_Tables, jax.Array]]:
    return lookup(dtype, mesh, token_axes, tables, tokens_BS), (tables, tokens_BS)


def _lookup_backward(
    dtype: str, mesh: AnyMesh | None, token_axes: Axes, saved: tuple[_Tables, jax.Array], dx_BSE: jax.Array
) -> tuple[_Tables, None]:
    assert token_axes == ("batch", "sequence"), "gradients are summed over the devices that the tokens are split over"
    tables, tokens_BS = saved
    sizes = mesh_sizes(mesh)
    tp, shared, dp = axis_names(("tp",), sizes), storage_axes(sizes), copy_axes(sizes)
    lengths = [each.shape[0] for each in tables]

    def local(dx_BSE: jax.Array, tokens_BS: jax.Array) -> _Tables:
        dx_BSE = own_part(dx_BSE, tp, 2).astype(jnp.float32)
        dtable_VE = jnp.zeros((sum(lengths), dx_BSE.shape[-1]), jnp.float32)
        dtable_VE = dtable_VE.at[jnp.clip(tokens_BS, 0, sum(lengths) - 1)].add(dx_BSE)
        dtable_VE = psum_scatter(psum(dtable_VE, dp), shared, 1)
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        return tuple(dtable_VE[start : start + length] for start, length in zip(starts, lengths, strict=True))

    backward = on_each_device(local, mesh, ((*token_axes, None), token_axes), tuple(TABLE_AXES for _ in tables))
    gradients = backward(dx_BSE, tokens_BS)
    return tuple(gradient.astype(each.dtype) for gradient, each in zip(gradients, tables, strict=True)), None


lookup.defvjp(_lookup_forward, _lookup_backward)
