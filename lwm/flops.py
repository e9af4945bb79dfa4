"""Floating-point operations that a training step needs, and what devices can do: the two sides of MFU."""

import math
from collections.abc import Mapping

import numpy as np

from lwm.config import ModelConfig
from lwm.sharding import parameter_table

# Peak dense bfloat16 FLOP/s of one device, by the start of jax's `device_kind` (vendors' data sheets).
PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "TPU7x": 2307e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
}


def peak_flops(device_kind: str, dtype: str, configured: float | None = None) -> float | None:
    """FLOP/s of one device in `dtype`: as `configured`, or from the table; None where neither knows."""
    if configured is not None or dtype != "bfloat16":
        return configured
    return next((peak for kind, peak in PEAK_FLOPS.items() if device_kind.startswith(kind)), None)


def visible_pairs(batch: Mapping[str, np.ndarray]) -> int:
    """Query-key pairs of a packed causal batch: each token sees its segment up to itself (positions start at 0)."""
    return int(np.sum(np.where(batch["segment_ids"] > 0, batch["positions"] + 1, 0), dtype=np.int64))


def step_flops(config: ModelConfig, tokens: float, pairs: float, targets: Mapping[str, float]) -> float:
    """Operations of one step, forward and backward, without recomputation.

    tokens: real tokens (no padding). pairs: see `visible_pairs`. targets: learned targets of each modality, which alone
    need their head. A multiply-add counts as two; the backward pass costs twice the forward.
    """
    weights = sum(
        math.prod(entry.shape)
        for path, entry in parameter_table(config).items()
        if path.startswith("layers/") and entry.init == "normal"
    )
    sizes = {"text": config.text_vocab_size, "vision": config.vision_vocab_size}
    heads = sum(config.hidden_size * sizes[name] * count for name, count in targets.items())
    attention = 2 * config.num_layers * config.num_heads * config.head_dim * pairs
    return 6.0 * (weights * tokens + heads + attention)
