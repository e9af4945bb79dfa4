"""Exact attention sharded along the sequence."""

from ring import chunked, cost, decode, layout
from ring.api import attention, attention_local
from ring.mask import Mask
from ring.plan import Plan

__all__ = ["Mask", "Plan", "attention", "attention_local", "chunked", "cost", "decode", "layout"]
