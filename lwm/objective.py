"""Cross-entropy in chunks, each target under the softmax of its own modality.

Legend: B batch, S sequence, N tokens of one device, C tokens of one chunk, E features, V one modality's vocabulary,
M modalities, K sources.

Logits exist for one chunk at a time and only for learned targets: each device sorts its own tokens by the modality of
their target and walks through the text ones with the text head, then through the vision ones with the vision head.
The gradients are taken in the same walk, because the loss is a sum whose cotangent is one number: nothing is computed
twice, and nothing of the vocabulary's size is kept or crosses the sequence axes but the heads' own gradients.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lwm import model
from lwm.collectives import all_gather, on_each_device, pmax, psum, psum_scatter
from lwm.config import ModelConfig
from lwm.sharding import (
    BATCH_AXES,
    SEQUENCE_AXES,
    AnyMesh,
    Axes,
    Params,
    axis_names,
    copy_axes,
    mesh_sizes,
    storage_axes,
)

_HEAD: Axes = ("embed", "vocab")
_TOKENS: Axes = ("batch", "sequence")


class Tally(NamedTuple):
    """Sums over the learned targets of the global batch by modality and source; float32 [M, K].

    `loss` is the part of sum(weight * nll), `nll` the unweighted sum, `targets` their number, `correct` those whose
    logit is the largest of their modality. A source is a corpus of the mixture, in the order of their names.
    """

    loss: jax.Array
    nll: jax.Array
    targets: jax.Array
    correct: jax.Array


def loss(
    config: ModelConfig,
    params: Params,
    tokens_BS: jax.Array,
    positions_BS: jax.Array,
    segment_ids_BS: jax.Array,
    targets_BS: jax.Array,
    loss_weights_BS: jax.Array,
    sources_BS: jax.Array | None = None,
    *,
    compute: model.Compute,
    chunk: int | None = None,
    num_sources: int = 1,
) -> tuple[jax.Array, Tally]:
    """(sum(weight * nll), Tally) of a packed batch; float32. Targets of weight 0 are not looked at.

    `chunk`: learned targets of one device whose logits exist at once (None: as many as it has tokens).
    `sources_BS`: int32, which of `num_sources` a target comes from (None: all from one).
    """
    x_BSE = model.hidden(config, params, tokens_BS, positions_BS, segment_ids_BS, compute)
    heads = tuple(model.heads(config, params).values())
    sources_BS = jnp.zeros_like(targets_BS) if sources_BS is None else sources_BS
    return cross_entropy(chunk, num_sources, compute.mesh, x_BSE, targets_BS, loss_weights_BS, sources_BS, heads)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def cross_entropy(
    chunk: int | None,
    num_sources: int,
    mesh: AnyMesh | None,
    x_BSE: jax.Array,
    targets_BS: jax.Array,
    weights_BS: jax.Array,
    sources_BS: jax.Array,
    heads: tuple[jax.Array, ...],
) -> tuple[jax.Array, Tally]:
    """(sum(weight * nll), Tally) of hidden states under the [E, V] `heads`, whose ids follow one another.

    nll is -log softmax over the target's own head. Differentiable in `x_BSE` and `heads`, through the sum alone.
    """
    tally, _, _ = _walk(chunk, num_sources, mesh, False, x_BSE, targets_BS, weights_BS, sources_BS, heads)
    return jnp.sum(tally.loss), tally


_Saved = tuple[jax.Array, tuple[jax.Array, ...]]


def _forward(
    chunk: int | None,
    num_sources: int,
    mesh: AnyMesh | None,
    x_BSE: jax.Array,
    targets_BS: jax.Array,
    weights_BS: jax.Array,
    sources_BS: jax.Array,
    heads: tuple[jax.Array, ...],
) -> tuple[tuple[jax.Array, Tally], _Saved]:
    tally, dx_BSE, dheads = _walk(chunk, num_sources, mesh, True, x_BSE, targets_BS, weights_BS, sources_BS, heads)
    dheads = tuple(gradient.astype(head.dtype) for gradient, head in zip(dheads, heads, strict=True))
    return (jnp.sum(tally.loss), tally), (dx_BSE, dheads)


def _backward(
    chunk: int | None, num_sources: int, mesh: AnyMesh | None, saved: _Saved, cotangents: tuple[jax.Array, Tally]
) -> tuple[jax.Array, None, None, None, tuple[jax.Array, ...]]:
    dx_BSE, dheads = saved
    dloss, _ = cotangents
    dheads = tuple(each * dloss.astype(each.dtype) for each in dheads)
    return dx_BSE * dloss.astype(dx_BSE.dtype), None, None, None, dheads


cross_entropy.defvjp(_forward, _backward)


def _walk(
    chunk: int | None,
    num_sources: int,
    mesh: AnyMesh | None,
    with_gradients: bool,
    x_BSE: jax.Array,
    targets_BS: jax.Array,
    weights_BS: jax.Array,
    sources_BS: jax.Array,
    heads: tuple[jax.Array, ...],
) -> tuple[Tally, jax.Array, tuple[jax.Array, ...]]:
    """Tally, and (without `with_gradients`: zeros) the gradients of the loss in x (x's dtype) and heads (float32)."""
    sizes = mesh_sizes(mesh)
    tp, shared, dp = axis_names(("tp",), sizes), storage_axes(sizes), copy_axes(sizes)
    everyone = axis_names((*BATCH_AXES, *SEQUENCE_AXES), sizes)
    first_ids = [sum(head.shape[1] for head in heads[:i]) for i in range(len(heads))]

    def local(
        x_BSE: jax.Array,
        targets_BS: jax.Array,
        weights_BS: jax.Array,
        sources_BS: jax.Array,
        heads: Sequence[jax.Array],
    ) -> Any:
        x_NE = x_BSE.reshape(-1, x_BSE.shape[-1])
        targets_N, weights_N, sources_N = (jnp.asarray(a).reshape(-1) for a in (targets_BS, weights_BS, sources_BS))
        modality_N = sum((targets_N >= first).astype(jnp.int32) for first in first_ids[1:])
        group_N = jnp.where(weights_N != 0, modality_N, len(heads))
        order_N = jnp.argsort(group_N, stable=True)
        x_NE = x_NE[order_N]
        facts = (targets_N[order_N], weights_N[order_N], sources_N[order_N])
        dx_NE = jnp.zeros_like(x_NE)
        start = jnp.int32(0)
        tallies, dheads = [], []
        for number, (first, head) in enumerate(zip(first_ids, heads, strict=True)):
            stop = start + jnp.sum(group_N == number, dtype=jnp.int32)
            used_EV = all_gather(head.astype(x_NE.dtype), shared, 0)
            walk = partial(_walk_one, chunk or x_NE.shape[0], num_sources, tp, with_gradients, first, used_EV)
            tally, dx_NE, dhead_EV = walk(x_NE, *facts, start, stop, dx_NE)
            tallies.append(tally)
            dheads.append(psum_scatter(psum(dhead_EV, dp), shared, 0) if with_gradients else jnp.zeros_like(head))
            start = stop
        tally_4MK = psum(jnp.stack(tallies, axis=1), everyone)
        dx_NE = psum(dx_NE[jnp.argsort(order_N)], tp) if with_gradients else dx_NE
        return tuple(tally_4MK), dx_NE.reshape(x_BSE.shape), tuple(dheads)

    head_axes = tuple(_HEAD for _ in heads)
    out_axes = (((None, None),) * 4, (*_TOKENS, None), head_axes)
    everywhere = on_each_device(local, mesh, ((*_TOKENS, None), _TOKENS, _TOKENS, _TOKENS, head_axes), out_axes)
    sums, dx_BSE, dheads = everywhere(x_BSE, targets_BS, weights_BS, sources_BS, heads)
    return Tally(*sums), dx_BSE, dheads


def _walk_one(
    chunk: int,
    num_sources: int,
    tp: tuple[str, ...],
    with_gradients: bool,
    first_id: int,
    head_EV: jax.Array,
    x_NE: jax.Array,
    targets_N: jax.Array,
    weights_N: jax.Array,
    sources_N: jax.Array,
    start: jax.Array,
    stop: jax.Array,
    dx_NE: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One modality's targets, tokens [start, stop): its sums [4, K], dx with theirs added, and the head's gradient.

    `head_EV` is this device's part of the vocabulary when tp splits it; dx and the sums over V are then partial.
    """
    chunk = min(chunk, x_NE.shape[0])
    size = head_EV.shape[1]
    own_first_id = first_id + jax.lax.axis_index(tp) * size if tp else first_id
    ids_V = jnp.arange(size, dtype=jnp.int32)[None, :]
    sources_K = jnp.arange(num_sources, dtype=jnp.int32)[None, :]
    State = tuple[jax.Array, jax.Array, jax.Array]

    def step(index: jax.Array, state: State) -> State:
        sums, dx_NE, dhead_EV = state
        begin = start + index * chunk
        # The last chunk may reach past the end of the array: it is moved back, and what it sees again is masked.
        at = jnp.minimum(begin, x_NE.shape[0] - chunk)
        rows_C = at + jnp.arange(chunk, dtype=jnp.int32)
        mine_C = (rows_C >= begin) & (rows_C < stop)
        arrays = (x_NE, targets_N, weights_N, sources_N)
        x_CE, targets_C, weights_C, sources_C = (jax.lax.dynamic_slice_in_dim(a, at, chunk) for a in arrays)
        weights_C = jnp.where(mine_C, weights_C, 0.0)
        logits_CV = jnp.dot(x_CE, head_EV, preferred_element_type=jnp.float32)
        hit_CV = ids_V == (targets_C - own_first_id)[:, None]
        top_C = pmax(jnp.max(logits_CV, axis=-1), tp)
        powers_CV = jnp.exp(logits_CV - top_C[:, None])
        target_C = jnp.sum(jnp.where(hit_CV, logits_CV, 0.0), axis=-1)
        total_C, target_C = psum(jnp.stack([jnp.sum(powers_CV, axis=-1), target_C]), tp)
        nll_C = jnp.log(total_C) + top_C - target_C
        correct_C = mine_C & (target_C >= top_C)
        terms = (weights_C * nll_C, jnp.where(mine_C, nll_C, 0.0), mine_C, correct_C)
        from_CK = sources_C[:, None] == sources_K
        by_source = [jnp.where(from_CK, term[:, None].astype(jnp.float32), 0.0) for term in terms]
        sums = sums + jnp.stack([jnp.sum(each, axis=0) for each in by_source])
        if with_gradients:
            dlogits_CV = powers_CV * (weights_C / total_C)[:, None] - jnp.where(hit_CV, weights_C[:, None], 0.0)
            dlogits_CV = dlogits_CV.astype(x_CE.dtype)
            dx_CE = jnp.dot(dlogits_CV, head_EV.T) + jax.lax.dynamic_slice_in_dim(dx_NE, at, chunk)
            dx_NE = jax.lax.dynamic_update_slice_in_dim(dx_NE, dx_CE, at, 0)
            dhead_EV = dhead_EV + jnp.einsum("CE,CV->EV", x_CE, dlogits_CV, preferred_element_type=jnp.float32)
        return sums, dx_NE, dhead_EV

    zeros = jnp.zeros(head_EV.shape if with_gradients else (0, 0), jnp.float32)
    steps = (stop - start + chunk - 1) // chunk
    return jax.lax.fori_loop(0, steps, step, (jnp.zeros((4, num_sources), jnp.float32), dx_NE, zeros))


def summarize(config: ModelConfig, tally: Tally, sources: Sequence[str] = ()) -> dict[str, float]:
    """Means over the learned targets by name, leaving out what has none.

    `loss_text`, `accuracy_text`, ... by modality, and by source `source_loss/NAME` and `source_fraction/NAME` (of the
    learned targets), in the order of `sources`.
    """
    nll_MK, targets_MK, correct_MK = (
        np.asarray(each, np.float64) for each in (tally.nll, tally.targets, tally.correct)
    )
    means: dict[str, float] = {}
    for name, nll, count, correct in zip(
        model.modalities(config), nll_MK.sum(1), targets_MK.sum(1), correct_MK.sum(1), strict=True
    ):
        if count:
            means |= {f"loss_{name}": nll / count, f"accuracy_{name}": correct / count}
    for name, nll, count in zip(sources, nll_MK.sum(0), targets_MK.sum(0), strict=bool(sources)):
        if count:
            means |= {f"source_loss/{name}": nll / count, f"source_fraction/{name}": count / targets_MK.sum()}
    return {name: float(value) for name, value in means.items()}
