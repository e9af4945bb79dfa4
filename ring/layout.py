"""Orders of the sequence: how tokens are spread over the devices that share it.

``x[:, permutation(layout, length, num_shards)]`` is the order that is cut into ``num_shards`` equal,
contiguous shards. With a causal mask, contiguous shards give the last device twice the mean work.

contiguous  shard r holds tokens [r c, (r + 1) c)
striped     shard r holds tokens r, r + P, r + 2 P, ... (Striped Attention, arXiv:2311.09431)
zigzag      shard r holds chunks r and 2 P - 1 - r of 2 P (as in Llama 3's training, arXiv:2407.21783)
"""

from __future__ import annotations

import numpy as np

LAYOUTS = ("contiguous", "striped", "zigzag")


def permutation(layout: str, length: int, num_shards: int) -> np.ndarray:
    """int32 [length]: the token that stands at each place of the sharded order.

    Any length works, no token is ever lost. Where ``divides`` is False the shards are cut out of an
    order padded at its end, and balance is approximate.
    """
    check(layout, num_shards)
    if length < 0:
        raise ValueError(f"length is {length}; give a number of tokens, at least 0")
    order = np.arange(length, dtype=np.int32)
    if layout == "striped":
        return np.concatenate([order[r::num_shards] for r in range(num_shards)])
    if layout == "zigzag":
        chunks = np.array_split(order, 2 * num_shards)
        return np.concatenate([c for r in range(num_shards) for c in (chunks[r], chunks[-1 - r])])
    return order


def inverse(layout: str, length: int, num_shards: int) -> np.ndarray:
    """int32 [length]: ``y[:, inverse]`` undoes ``y = x[:, permutation]``; the place where each token stands."""
    return np.argsort(permutation(layout, length, num_shards)).astype(np.int32)


def divides(layout: str, length: int, num_shards: int) -> bool:
    """True if the layout cuts ``length`` into equal shards without padding."""
    check(layout, num_shards)
    return length % (2 * num_shards if layout == "zigzag" and num_shards > 1 else num_shards) == 0


def check(layout: str, num_shards: int) -> None:
    """ValueError for an unknown layout or a number of shards below 1."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; choose one of {', '.join(LAYOUTS)}")
    if num_shards < 1:
        raise ValueError(f"num_shards is {num_shards}; give at least 1")
