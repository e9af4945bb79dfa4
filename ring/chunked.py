"""The rest of a blockwise transformer: feed-forward and cross-entropy with one chunk of activations alive.

With attention out of the way, the widest activations of a layer are those of the feed-forward, and of the
model the logits. Both act on tokens one by one: they run over chunks of tokens, and the backward pass
computes each chunk again (Blockwise Parallel Transformers, arXiv:2305.19370).

A chunk takes the same number of tokens from every shard of the sequence, so that all devices work on every
chunk and nothing is sent. Shapes: B batch, S sequence, E features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from ring.plan import ONE_DEVICE, Plan


def feed_forward(
    function: Callable[[jax.Array], jax.Array], x: jax.Array, *, chunk: int, plan: Plan = ONE_DEVICE
) -> jax.Array:
    """``function(x)`` for x [B, S, E], at most ``chunk`` tokens of each shard at a time.

    ``function`` maps [B, n, E] to [B, n, F], token by token; it may close over weights, whose gradients are
    summed over the chunks. -> [B, S, F]. ValueError if the shards of the sequence do not divide S.
    """
    return _by_chunks(function, (x,), chunk, plan)


def cross_entropy(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, *, chunk: int, plan: Plan = ONE_DEVICE
) -> jax.Array:
    """-log softmax(hidden head)[target] in nats: float32 [B, S], at most ``chunk`` tokens' logits of each shard alive.

    hidden [B, S, E], head [E, V] of one dtype, targets int32 [B, S] in [0, V). Logits are float32.
    ValueError if the shards of the sequence do not divide S.
    """

    def nll(x_BNE: jax.Array, targets_BN: jax.Array) -> jax.Array:
        logits = jnp.einsum("bne,ev->bnv", x_BNE, head, preferred_element_type=jnp.float32)
        picked = jnp.take_along_axis(logits, targets_BN[..., None], axis=-1)[..., 0]
        return jax.nn.logsumexp(logits, axis=-1) - picked

    return _by_chunks(nll, (hidden, targets), chunk, plan)


def _by_chunks(function: Callable[..., jax.Array], arrays: tuple[jax.Array, ...], chunk: int, plan: Plan) -> jax.Array:
    batch, length = arrays[0].shape[:2]
    shards = 1 if plan.mesh is None else plan.num_shards
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; give at least 1 token")
    if length % shards:
        raise ValueError(f"the sequence has {length} tokens over {shards} devices; give a multiple of {shards}")
    here = length // shards
    num_chunks = -(-here // chunk)
    chunk = -(-here // num_chunks)
    padding = num_chunks * chunk - here

    def split(x: jax.Array) -> jax.Array:
        x = x.reshape(batch, shards, here, *x.shape[2:])
        x = jnp.pad(x, [(0, padding if dim == 2 else 0) for dim in range(x.ndim)])
        return jnp.moveaxis(x.reshape(batch, shards, num_chunks, chunk, *x.shape[3:]), 2, 0)

    def step(_: None, parts: tuple[jax.Array, ...]) -> tuple[None, jax.Array]:
        flat = [x.reshape(batch, shards * chunk, *x.shape[3:]) for x in parts]
        out = function(*flat)
        return None, out.reshape(batch, shards, chunk, *out.shape[2:])

    _, outs = lax.scan(jax.checkpoint(step), None, tuple(split(x) for x in arrays))
    outs = jnp.moveaxis(outs, 0, 2)
    outs = outs.reshape(batch, shards, num_chunks * chunk, *outs.shape[4:])[:, :, :here]
    return outs.reshape(batch, length, *outs.shape[3:])
