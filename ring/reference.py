"""Dense attention in float64 with numpy: the oracle of the tests, slow and plain on purpose.

Shares no code with the package: visibility is spelled out pair by pair.
Shapes: B batch, S sequence, H query heads, G key/value heads, D head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Result(NamedTuple):
    """out [B,S,H,D] and, where ``dout`` was given, the cotangents of q, k, v and sinks; float64."""

    out: np.ndarray
    dq: np.ndarray | None = None
    dk: np.ndarray | None = None
    dv: np.ndarray | None = None
    dsinks: np.ndarray | None = None


def visibility(
    positions: np.ndarray,
    segment_ids: np.ndarray,
    *,
    causal: bool = True,
    window: int | None = None,
    prefix: int | None = None,
    block: int | None = None,
    last_visible: np.ndarray | None = None,
) -> np.ndarray:
    """bool [B, S, S]: query (second dim) sees key (third)."""
    query, key = positions[:, :, None].astype(np.int64), positions[:, None, :].astype(np.int64)
    same = (segment_ids[:, :, None] == segment_ids[:, None, :]) & (segment_ids[:, None, :] != 0)
    if not causal:
        allowed = np.ones_like(same) if window is None else np.abs(query - key) < window
    else:
        allowed = key <= query
        if prefix is not None:
            allowed |= key < prefix
        if block is not None:
            allowed |= key // block == query // block
        if last_visible is not None:
            allowed |= key <= last_visible[:, :, None]
        if window is not None:
            allowed &= query - key < window
    return same & allowed


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    visible: np.ndarray,
    *,
    dout: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
) -> Result:
    """Attention and its gradients where ``visible`` [B,S,S]; a row that sees nothing is 0."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    batch, length, heads, dim = q.shape
    groups = k.shape[2]
    scale = dim**-0.5 if scale is None else scale
    k_all, v_all = (np.repeat(x, heads // groups, axis=2) for x in (k, v))
    raw = np.einsum("bqhd,bkhd->bhqk", q, k_all) * scale
    capped = raw if soft_cap is None else soft_cap * np.tanh(raw / soft_cap)
    score = np.where(visible[:, None], capped, -np.inf)
    seen = np.any(visible, axis=-1, keepdims=True)[:, None]
    top = np.where(seen, score.max(-1, keepdims=True), 0.0)
    sink = None if sinks is None else np.asarray(sinks, np.float64)[None, :, None, None]
    if sink is not None:
        top = np.maximum(top, sink)
    weight = np.exp(score - top)
    total = weight.sum(-1, keepdims=True) + (0.0 if sink is None else np.exp(sink - top))
    weight = np.where(seen, weight / np.where(total == 0, 1.0, total), 0.0)
    out = np.einsum("bhqk,bkhd->bqhd", weight, v_all)
    if dout is None:
        return Result(out)
    dout = np.asarray(dout, np.float64)
    dweight = np.einsum("bqhd,bkhd->bhqk", dout, v_all)
    delta = np.einsum("bqhd,bqhd->bhq", dout, out)[..., None]
    dscore = weight * (dweight - delta)
    if soft_cap is not None:
        dscore = dscore * (1 - np.tanh(raw / soft_cap) ** 2)
    dscore = dscore * scale
    fold = lambda x: x.reshape(batch, length, groups, heads // groups, dim).sum(3)
    dsinks = None
    if sink is not None:
        dsinks = -np.sum(np.where(seen, np.exp(sink - top) / total, 0.0) * delta, axis=(0, 2, 3))
    return Result(
        out,
        np.einsum("bhqk,bkhd->bqhd", dscore, k_all),
        fold(np.einsum("bhqk,bqhd->bkhd", dscore, q)),
        fold(np.einsum("bhqk,bqhd->bkhd", weight, dout)),
        dsinks,
    )
