"""The decoder-only transformer: LLaMA (Touvron et al., arXiv 2302.13971) with a text and a vision vocabulary.

Legend: B batch, S sequence, E features, H query heads, G key and value heads, D features of a head, F half of D,
V vocabulary. Parameters are a nested dict of float32 arrays (`lwm.sharding.parameter_table`), layers stacked on a
leading dim. The Flax modules below define what a layer computes from its slice of that dict; they keep nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

import ring
from lwm import embedding, rope, sharding
from lwm.config import ModelConfig
from lwm.feedforward import GATHERED, feed_forward, project
from lwm.sharding import AnyMesh, Axes, Params, constrain

LAYER_INPUT = "layer_input"

Rotation = tuple[jax.Array, jax.Array]
# attend(q_BSHD, k_BSGD, v_BSGD) -> (out_BSHD, state): queries and keys are rotated; `state` is what the caller wants
# back from the layer, such as a key-value cache (None in training).
Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]


@dataclass(frozen=True)
class Compute:
    """How to run the model, as opposed to what it computes: hashable, a static argument of compiled functions.

    `plan` carries the mesh and the attention strategy (None: one device). `dtype` is the dtype of activations and of
    weights in products. `remat`: "full" keeps only the input of each layer for the backward pass, "attention" also the
    attention's result, "none" all activations; gathered weights are never kept. "offload" and "offload_attention" keep
    what "full" and "attention" do in the host's memory. `mlp_chunk`: tokens of a device in the feed-forward at once
    (None: all). `head_parts`: parts of the heads that attention works through one after the other. `token_axes` are
    the logical axes of [B, S]: decoding sets (None, None) or ("batch", None).
    """

    plan: ring.Plan | None = None
    dtype: str = "float32"
    remat: str = "none"
    mlp_chunk: int | None = None
    head_parts: int = 1
    token_axes: Axes = ("batch", "sequence")

    @property
    def mesh(self) -> AnyMesh | None:
        return None if self.plan is None else self.plan.mesh


def init(config: ModelConfig, key: jax.Array, mesh: AnyMesh | None = None) -> Params:
    """Initial float32 parameters, placed by the table's shardings when a mesh is given.

    The values are the same on every mesh, up to the rounding of the last bit.
    """
    shardings = None if mesh is None else sharding.parameter_shardings(config, mesh)
    # Runs once: on a CPU, LLVM's later passes would take several times longer than what they save.
    options = {"xla_backend_optimization_level": 1} if jax.default_backend() == "cpu" else None
    draw = jax.jit(lambda key: sharding.init_parameters(config, key), out_shardings=shardings, compiler_options=options)
    return draw(key)


class RMSNorm(nnx.Module):
    """x / rms(x) * weight over the features (Zhang & Sennrich, arXiv 1910.07467), in float32, result in x's dtype."""

    def __init__(self, weight_E: jax.Array, eps: float):
        self.weight = nnx.Param(weight_E)
        self.eps = eps

    def __call__(self, x_BSE: jax.Array) -> jax.Array:
        x = x_BSE.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps)
        return (x * scale * self.weight[...][None, None, :].astype(jnp.float32)).astype(x_BSE.dtype)


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions around an `attend` callable."""

    def __init__(self, layer: Mapping[str, jax.Array], compute: Compute):
        self.query, self.key, self.value = (nnx.Param(layer[name]) for name in ("query", "key", "value"))
        self.output = nnx.Param(layer["output"])
        self.compute = compute

    def __call__(self, x_BSE: jax.Array, rotation: Rotation, attend: Attend) -> tuple[jax.Array, Any]:
        mesh, tokens = self.compute.mesh, self.compute.token_axes

        def heads(weight: nnx.Param, axis: str) -> jax.Array:
            result = project("BSE,EHD->BSHD", ("embed", axis, None), mesh, x_BSE, weight[...])
            return constrain(result, (*tokens, axis, None), mesh)

        q_BSHD = rope.rotate(heads(self.query, "heads"), *rotation)
        k_BSGD = rope.rotate(heads(self.key, "kv_heads"), *rotation)
        out_BSHD, state = attend(q_BSHD, k_BSGD, heads(self.value, "kv_heads"))
        out_BSHD = constrain(out_BSHD.astype(x_BSE.dtype), (*tokens, "heads", None), mesh)
        out_BSE = project("BSHD,HDE->BSE", ("heads", None, "embed"), mesh, out_BSHD, self.output[...])
        return constrain(out_BSE, (*tokens, None), mesh), state


class FeedForward(nnx.Module):
    """SwiGLU, blockwise over tokens where `compute.mlp_chunk` says so."""

    def __init__(self, layer: Mapping[str, jax.Array], compute: Compute):
        self.gate, self.up, self.down = (nnx.Param(layer[name]) for name in ("gate", "up", "down"))
        self.compute = compute

    def __call__(self, x_BSE: jax.Array) -> jax.Array:
        mesh = self.compute.mesh
        y_BSE = feed_forward(
            x_BSE, self.gate[...], self.up[...], self.down[...], chunk=self.compute.mlp_chunk, mesh=mesh
        )
        return constrain(y_BSE, (*self.compute.token_axes, None), mesh)


class Block(nnx.Module):
    """One pre-norm layer: x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: ModelConfig, layer: Mapping[str, jax.Array], compute: Compute):
        self.attention_norm = RMSNorm(layer["attention_norm"], config.norm_eps)
        self.attention = Attention(layer, compute)
        self.mlp_norm = RMSNorm(layer["mlp_norm"], config.norm_eps)
        self.feed_forward = FeedForward(layer, compute)

    def __call__(self, x_BSE: jax.Array, rotation: Rotation, attend: Attend) -> tuple[jax.Array, Any]:
        attended_BSE, state = self.attention(self.attention_norm(x_BSE), rotation, attend)
        x_BSE = x_BSE + attended_BSE
        return x_BSE + self.feed_forward(self.mlp_norm(x_BSE)), state


def block(
    config: ModelConfig,
    layer: Mapping[str, jax.Array],
    x_BSE: jax.Array,
    rotation: Rotation,
    attend: Attend,
    compute: Compute,
) -> tuple[jax.Array, Any]:
    """One layer from its parameters (no leading layer dim); returns the new x [B, S, E] and what `attend` gave back."""
    return Block(config, layer, compute)(x_BSE, rotation, attend)


def embed(config: ModelConfig, params: Params, tokens_BS: jax.Array, compute: Compute) -> jax.Array:
    """Embeddings [B, S, E] in the compute dtype; ids from `text_vocab_size` on are looked up in the vision table.

    ValueError where the batch or the sequence does not divide over the mesh.
    """
    sharding.spec_for(compute.token_axes, sharding.mesh_sizes(compute.mesh), tokens_BS.shape, "tokens")
    tables = tuple(params["embed"][name] for name in modalities(config))
    return embedding.lookup(compute.dtype, compute.mesh, compute.token_axes, tables, tokens_BS)


def rotation(config: ModelConfig, positions_BS: jax.Array) -> Rotation:
    """cos and sin, float32 [B, S, F], of the rotary angles at int32 positions."""
    return rope.rotation(positions_BS, config.head_dim, config.rope_theta, config.rope_scaling)


def final_norm(config: ModelConfig, params: Params, x_BSE: jax.Array) -> jax.Array:
    """The normalised output of the last layer, which the heads read."""
    return RMSNorm(params["final_norm"], config.norm_eps)(x_BSE)


def modalities(config: ModelConfig) -> tuple[str, ...]:
    """The vocabulary blocks in the order of their ids."""
    return ("text", "vision") if config.vision_vocab_size else ("text",)


def heads(config: ModelConfig, params: Params) -> dict[str, jax.Array]:
    """The output projection of each modality, [E, V] (the embedding tables transposed when tied)."""
    if config.tie_embeddings:
        return {name: params["embed"][name].T for name in modalities(config)}
    return {name: params["head"][name] for name in modalities(config)}


def head_logits(config: ModelConfig, params: Params, x_BSE: jax.Array, compute: Compute) -> jax.Array:
    """float32 logits [B, S, V] of normalised hidden states: the text block, then the vision block."""
    blocks = [
        project("BSE,EV->BSV", ("embed", "vocab"), compute.mesh, x_BSE, head).astype(jnp.float32)
        for head in heads(config, params).values()
    ]
    return jnp.concatenate(blocks, axis=-1)


def hidden(
    config: ModelConfig,
    params: Params,
    tokens_BS: jax.Array,
    positions_BS: jax.Array,
    segment_ids_BS: jax.Array | None,
    compute: Compute,
) -> jax.Array:
    """Normalised hidden states [B, S, E] in the compute dtype; everything [B, S] is in the order of the plan's layout.

    `positions_BS` int32 are the rotary positions and decide causality; segments (int32, 0: padding) do not see each
    other.
    """
    rotation_BSF = rotation(config, positions_BS)
    plan = ring.Plan() if compute.plan is None else compute.plan

    def attention(q_BSHD: jax.Array, k_BSGD: jax.Array, v_BSGD: jax.Array) -> jax.Array:
        return ring.attention(
            q_BSHD,
            k_BSGD,
            v_BSGD,
            positions=positions_BS,
            segment_ids=segment_ids_BS,
            mask=ring.Mask(causal=True),
            plan=plan,
        )

    def attend(q_BSHD: jax.Array, k_BSGD: jax.Array, v_BSGD: jax.Array) -> tuple[jax.Array, None]:
        return _by_heads(attention, compute, q_BSHD, k_BSGD, v_BSGD), None

    def layer(x_BSE: jax.Array, weights: Params) -> tuple[jax.Array, None]:
        x_BSE = checkpoint_name(x_BSE, LAYER_INPUT)
        return block(config, weights, x_BSE, rotation_BSF, attend, compute)

    x_BSE, _ = jax.lax.scan(_remat(layer, compute.remat), embed(config, params, tokens_BS, compute), params["layers"])
    return final_norm(config, params, x_BSE)


def _by_heads(
    attention: Callable[..., jax.Array], compute: Compute, q_BSHD: jax.Array, k_BSGD: jax.Array, v_BSGD: jax.Array
) -> jax.Array:
    """`attention` over parts of the heads in turn: its float32 accumulators then take the memory of one part."""
    parts, tp = compute.head_parts, sharding.mesh_sizes(compute.mesh).get("tp", 1)
    if parts == 1:
        return attention(q_BSHD, k_BSGD, v_BSGD)
    axes: Axes = (None, *compute.token_axes, "heads", None)

    def split(x_BSHD: jax.Array) -> jax.Array:
        # Every part takes heads of every tensor-parallel device.
        batch, length, heads, dim = x_BSHD.shape
        x = x_BSHD.reshape(batch, length, tp, parts, heads // (tp * parts), dim)
        return constrain(jnp.moveaxis(x, 3, 0).reshape(parts, batch, length, heads // parts, dim), axes, compute.mesh)

    def one(_: None, part: tuple[jax.Array, ...]) -> tuple[None, jax.Array]:
        return None, attention(*part)

    _, out = jax.lax.scan(one, None, tuple(split(x) for x in (q_BSHD, k_BSGD, v_BSGD)))
    batch, length, heads, dim = q_BSHD.shape
    out = constrain(out, axes, compute.mesh).reshape(parts, batch, length, tp, heads // (tp * parts), dim)
    return jnp.moveaxis(out, 0, 3).reshape(batch, length, heads, dim)


def _remat(layer: Callable[..., Any], remat: str) -> Callable[..., Any]:
    policies = jax.checkpoint_policies

    def offload(*names: str, keep: tuple[str, ...] = ()) -> Callable[..., Any]:
        return policies.save_and_offload_only_these_names(
            names_which_can_be_saved=keep,
            names_which_can_be_offloaded=names,
            offload_src="device",
            offload_dst="pinned_host",
        )

    saved = {
        "full": policies.nothing_saveable,
        "attention": policies.save_only_these_names("ring_out", "ring_lse"),
        "none": _is_activation,
        "offload": offload(LAYER_INPUT),
        # The logsumexp is a hundredth of the output: not worth its transfers.
        "offload_attention": offload(LAYER_INPUT, "ring_out", keep=("ring_lse",)),
    }
    # Inside a scan nothing can be merged across the two passes, so the barriers against it would only cost time.
    return jax.checkpoint(layer, policy=saved[remat], prevent_cse=False)


def _is_activation(primitive: Any, *_: Any, **options: Any) -> bool:
    # A gathered weight appears twice, as the result of its sharding constraint and of its name; a constraint on an
    # activation costs nothing to apply again.
    return primitive.name != "sharding_constraint" and options.get("name") != GATHERED


def logits(
    config: ModelConfig,
    params: Params,
    tokens_BS: ArrayLike,
    positions_BS: ArrayLike | None = None,
    segment_ids_BS: ArrayLike | None = None,
    *,
    compute: Compute | None = None,
) -> jax.Array:
    """float32 logits [B, S, V], V the text block and then the vision block (a vision id is its code + text_vocab_size).

    Without positions the tokens count 0, 1, 2, ... and must be in their natural order.
    """
    compute = compute or Compute()
    tokens = jnp.asarray(tokens_BS, jnp.int32)
    if positions_BS is None:
        positions_BS = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    segments = None if segment_ids_BS is None else jnp.asarray(segment_ids_BS, jnp.int32)
    x_BSE = hidden(config, params, tokens, jnp.asarray(positions_BS, jnp.int32), segments, compute)
    return head_logits(config, params, x_BSE, compute)
