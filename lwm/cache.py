"""The key-value cache of all layers, sharded along the sequence: filled whole, chunk by chunk or step by step.

A cache has C slots. The token at position p of its row stands in the slot where the plan's layout puts it in a sequence
of C tokens, so new tokens are spread over the devices as evenly as the prompt's, and whether a slot is filled follows
from its position and the row's length. Nothing in the cache ever moves.

Legend: L layers, B batch, C slots, T tokens of a chunk, G key/value heads, D head dim, E features, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

import ring
from lwm import model, sharding
from lwm.config import ModelConfig
from lwm.model import Compute, Rotation
from lwm.sharding import AnyMesh, Params

# A device keeps a whole copy of the weights (but for tp) up to this size, so that a new token gathers none of them.
REPLICATED_BYTES = 2 << 30


# What a loop over layers carries: activations, keys and values of all layers (changed in place), the layer's number.
_Carry = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


class Cache(NamedTuple):
    """Rotated keys and values [L, B, C, G, D] in the compute dtype, and the number of tokens of each row, int32 [B]."""

    keys_LBCGD: jax.Array
    values_LBCGD: jax.Array
    lengths_B: jax.Array


def plan_of(compute: Compute) -> ring.Plan:
    """The attention plan, which is one device's without a mesh."""
    return ring.Plan() if compute.plan is None else compute.plan


def positions_of_slots(compute: Compute, num_slots: int) -> np.ndarray:
    """int32 [C]: the position of the token that belongs in each slot."""
    plan = plan_of(compute)
    return ring.layout.permutation(plan.layout, num_slots, plan.num_shards)


def slots_of_positions(compute: Compute, num_slots: int) -> np.ndarray:
    """int32 [C]: the slot of the token at each position."""
    plan = plan_of(compute)
    return ring.layout.inverse(plan.layout, num_slots, plan.num_shards)


def serving_params(
    config: ModelConfig, params: Params, compute: Compute, replicate: bool | None = None
) -> tuple[Params, bool]:
    """Weights as generation wants them: matrices in the compute dtype, and whether they are whole on every device.

    `replicate` None: where a copy (its tp part) stays below REPLICATED_BYTES. Training shards weights over devices that
    would all have to send theirs for every new token.
    """
    table = sharding.parameter_table(config)
    sizes = sharding.mesh_sizes(compute.mesh)
    dtypes = {path: jnp.dtype(compute.dtype) if row.init == "normal" else row.dtype for path, row in table.items()}
    if replicate is None:
        size = sum(int(np.prod(row.shape)) * jnp.dtype(dtypes[path]).itemsize for path, row in table.items())
        replicate = size / sizes.get("tp", 1) <= REPLICATED_BYTES

    def cast(params: Params) -> Params:
        flat = sharding.flatten(params)
        return sharding.nest({path: flat[path].astype(dtypes[path]) for path in table})

    mesh = compute.mesh
    if mesh is None:
        return jax.jit(cast)(params), True
    specs = sharding.parameter_specs(config, sizes)
    if replicate:
        whole = {"embed": None, "lookup_embed": None}
        specs = {
            path: sharding.spec_for(tuple(whole.get(axis, axis) if axis else None for axis in row.axes), sizes)
            for path, row in table.items()
        }
    places = sharding.nest({path: NamedSharding(mesh, spec) for path, spec in specs.items()})
    # Parameters from elsewhere (one device, another mesh) come to this mesh first, split as it splits them.
    params = jax.device_put(params, sharding.parameter_shardings(config, mesh))
    return jax.jit(cast, out_shardings=places)(params), replicate


def cache_shardings(mesh: AnyMesh) -> Any:
    """Where the arrays of a `Cache` lie, as one."""
    sizes = sharding.mesh_sizes(mesh)
    slots = NamedSharding(mesh, sharding.spec_for((None, "batch", "sequence", "kv_heads", None), sizes))
    return Cache._make((slots, slots, NamedSharding(mesh, sharding.spec_for(("batch",), sizes))))


def prefill(
    config: ModelConfig,
    params: Params,
    tokens_BC: jax.Array,
    lengths_B: jax.Array,
    compute: Compute,
    *,
    replicated: bool = False,
) -> tuple[jax.Array, Cache]:
    """Prompts int32 [B, C], in the order of the slots -> float32 logits [B, V] of the next id, and the cache.

    Of row b the first lengths_B[b] positions count, the rest of its slots stay free; a row of length 0 is nothing.
    """
    plan = plan_of(compute)
    num_slots = tokens_BC.shape[1]
    positions_BC = jnp.broadcast_to(positions_of_slots(compute, num_slots), tokens_BC.shape)
    segments_BC = (positions_BC < lengths_B[:, None]).astype(jnp.int32)
    positions_BC, segments_BC = (
        sharding.constrain(x, compute.token_axes, compute.mesh) for x in (positions_BC, segments_BC)
    )
    rotation = model.rotation(config, positions_BC)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        out = ring.attention(q, k, v, positions=positions_BC, segment_ids=segments_BC, plan=plan)
        return out, (k, v)

    def layer(x_BCE: jax.Array, weights: Params) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        return model.block(config, weights, x_BCE, rotation, attend, compute)

    x_BCE, (keys, values) = jax.lax.scan(
        layer, _embed(config, params, tokens_BC, compute, replicated), params["layers"]
    )
    last_BC = positions_BC == lengths_B[:, None] - 1
    # A sum with one term: nothing but that term leaves its device.
    x_B1E = jnp.sum(jnp.where(last_BC[..., None], x_BCE, 0), axis=1, keepdims=True)
    return _next_logits(config, params, x_B1E, _decoding(compute)), Cache(keys, values, lengths_B)


def shapes(config: ModelConfig, compute: Compute, rows: int, num_slots: int) -> Cache:
    """A cache of `rows` rows as ShapeDtypeStructs, with their shardings on a mesh."""
    where = Cache._make([None] * 3) if compute.mesh is None else cache_shardings(compute.mesh)
    size = (config.num_layers, rows, num_slots, config.num_kv_heads, config.head_dim)
    slots = jax.ShapeDtypeStruct(size, compute.dtype, sharding=where.keys_LBCGD)
    return Cache._make((slots, slots, jax.ShapeDtypeStruct((rows,), jnp.int32, sharding=where.lengths_B)))


def empty(config: ModelConfig, compute: Compute, rows: int, num_slots: int) -> Cache:
    """A cache that holds nothing yet."""
    abstract = shapes(config, compute, rows, num_slots)
    places = None if compute.mesh is None else cache_shardings(compute.mesh)
    return jax.jit(
        lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract), out_shardings=places
    )()


def extend(
    config: ModelConfig,
    params: Params,
    tokens_BT: jax.Array,
    counts_B: jax.Array,
    logits_BV: jax.Array,
    cache: Cache,
    compute: Compute,
    *,
    replicated: bool = False,
) -> tuple[jax.Array, Cache]:
    """The next `counts_B` tokens of each row, int32 [B, T] in their natural order -> logits [B, V], and the cache.

    Beside the cache only this chunk's activations are in memory, however long the prompt is. Rows that get
    no tokens keep `logits_BV`, those after their last one. T is a multiple of the number of sequence shards.
    """
    plan = plan_of(compute)
    num_slots = cache.keys_LBCGD.shape[2]
    offsets_T = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)
    positions_BT = cache.lengths_B[:, None] + offsets_T
    real_BT = offsets_T < counts_B[:, None]
    slots_BT = jnp.take(slots_of_positions(compute, num_slots), positions_BT, mode="clip")
    slots_BT = jnp.where(real_BT & (positions_BT < num_slots), slots_BT, -1)
    positions_BC = jnp.broadcast_to(positions_of_slots(compute, num_slots), (tokens_BT.shape[0], num_slots))
    positions_BC = sharding.constrain(positions_BC, compute.token_axes, compute.mesh)
    lengths_B = cache.lengths_B + counts_B
    filled_BC = (positions_BC < lengths_B[:, None]).astype(jnp.int32)
    positions_BT, segments_BT = (
        sharding.constrain(x, compute.token_axes, compute.mesh) for x in (positions_BT, real_BT.astype(jnp.int32))
    )
    rotation = model.rotation(config, positions_BT)

    def attend(q: jax.Array, keys_BCGD: jax.Array, values_BCGD: jax.Array) -> jax.Array:
        return ring.decode.chunk_attention(
            q,
            keys_BCGD,
            values_BCGD,
            positions=positions_BT,
            segment_ids=segments_BT,
            cache_positions=positions_BC,
            cache_segment_ids=filled_BC,
            plan=plan,
        )

    x_BTE = _embed(config, params, tokens_BT, compute, replicated)
    x_BTE, keys, values = _through_layers(config, params, x_BTE, rotation, slots_BT, cache, attend, compute)
    last_BT = offsets_T == counts_B[:, None] - 1
    x_B1E = jnp.sum(jnp.where(last_BT[..., None], x_BTE, 0), axis=1, keepdims=True)
    fresh_BV = _next_logits(config, params, x_B1E, _decoding(compute))
    return jnp.where((counts_B > 0)[:, None], fresh_BV, logits_BV), Cache(keys, values, lengths_B)


def step(
    config: ModelConfig,
    params: Params,
    token_B: jax.Array,
    active_B: jax.Array,
    cache: Cache,
    compute: Compute,
    *,
    replicated: bool = False,
) -> tuple[jax.Array, Cache]:
    """The next id of each row -> float32 logits [B, V] of the one after it, and the cache with this one in it.

    Rows that are not active leave the cache as it is, and their logits mean nothing.
    """
    plan, one = plan_of(compute), _decoding(compute)
    batch, num_slots = cache.keys_LBCGD.shape[1:3]
    position_B1 = cache.lengths_B[:, None]
    slot_B1 = jnp.take(slots_of_positions(compute, num_slots), position_B1, mode="clip")
    slot_B1 = jnp.where(active_B[:, None] & (position_B1 < num_slots), slot_B1, -1)
    positions_BC = jnp.broadcast_to(positions_of_slots(compute, num_slots), (batch, num_slots))
    positions_BC = sharding.constrain(positions_BC, compute.token_axes, compute.mesh)
    filled_BC = (positions_BC <= position_B1).astype(jnp.int32)
    rotation = model.rotation(config, position_B1)

    def attend(q: jax.Array, keys_BCGD: jax.Array, values_BCGD: jax.Array) -> jax.Array:
        return ring.decode.decode_attention(
            q,
            keys_BCGD,
            values_BCGD,
            positions=position_B1,
            cache_positions=positions_BC,
            cache_segment_ids=filled_BC,
            plan=plan,
        )

    x_B1E = _embed(config, params, token_B[:, None], one, replicated)
    x_B1E, keys, values = _through_layers(config, params, x_B1E, rotation, slot_B1, cache, attend, one)
    lengths_B = cache.lengths_B + active_B.astype(jnp.int32)
    return _next_logits(config, params, x_B1E, one), Cache(keys, values, lengths_B)


def _through_layers(
    config: ModelConfig,
    params: Params,
    x_BTE: jax.Array,
    rotation: Rotation,
    slots_BT: jax.Array,
    cache: Cache,
    attend: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    compute: Compute,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """New tokens through all layers: each writes their keys and values to `slots_BT`, then lets them attend.

    Returns what they come to, and the keys and values of all layers.
    """
    plan = plan_of(compute)

    def layer(carry: _Carry, weights: Params) -> tuple[_Carry, None]:
        x_BTE, keys_LBCGD, values_LBCGD, index = carry

        def write_and_attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            keys = ring.decode.append(keys_LBCGD, k, slots_BT, plan=plan, heads=True, layer=index)
            values = ring.decode.append(values_LBCGD, v, slots_BT, plan=plan, heads=True, layer=index)
            return attend(q, keys[index], values[index]), (keys, values)

        x_BTE, (keys, values) = model.block(config, weights, x_BTE, rotation, write_and_attend, compute)
        return (x_BTE, keys, values, index + 1), None

    begin = (x_BTE, cache.keys_LBCGD, cache.values_LBCGD, jnp.zeros((), jnp.int32))
    (x_BTE, keys, values, _), _ = jax.lax.scan(layer, begin, params["layers"])
    return x_BTE, keys, values


def _decoding(compute: Compute) -> Compute:
    return Compute(plan=compute.plan, dtype=compute.dtype, token_axes=("batch", None))


def _embed(config: ModelConfig, params: Params, tokens_BS: jax.Array, compute: Compute, replicated: bool) -> jax.Array:
    if not replicated:
        return model.embed(config, params, tokens_BS, compute)
    x_BSE = jnp.take(params["embed"]["text"], tokens_BS, axis=0, mode="clip")
    if "vision" in params["embed"]:
        size = config.text_vocab_size
        vision_BSE = jnp.take(params["embed"]["vision"], tokens_BS - size, axis=0, mode="clip")
        x_BSE = jnp.where((tokens_BS >= size)[..., None], vision_BSE, x_BSE)
    return sharding.constrain(x_BSE, (*compute.token_axes, None), compute.mesh)


def _next_logits(config: ModelConfig, params: Params, x_B1E: jax.Array, compute: Compute) -> jax.Array:
    x_B1E = sharding.constrain(x_B1E, ("batch", None, None), compute.mesh)
    logits_B1V = model.head_logits(config, params, model.final_norm(config, params, x_B1E), compute)
    return sharding.constrain(logits_B1V[:, 0], ("batch", None), compute.mesh)
