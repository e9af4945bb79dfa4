"""Values and gradients against dense float64 over strategies, layouts, masks, meshes and drawn cases."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ring
from ring import blockwise

MASKS: list[dict[str, Any]] = [
    {},
    {"causal": False},
    {"window": 7},
    {"causal": False, "window": 5},
    {"prefix": 6},
    {"block": 5},
    {"block": 5, "window": 9, "prefix": 3},
]


@pytest.mark.parametrize(
    "case",
    [
        {"axes": {"sp": 8}, "layout": "striped"},
        {"axes": {"sp": 4}, "layout": "zigzag", "query_block": 6, "key_block": 5},
        {"axes": {"sp": 3}, "layout": "striped", "shape": (1, 61, 4, 1, 8)},
        {"axes": {"sp": 2, "ulysses": 2}, "layout": "contiguous"},
        {"axes": {"dp": 2, "sp": 2, "tp": 2}, "sinks": True, "soft_cap": 2.0},
        {"axes": {"fsdp": 2, "sp": 4}, "mask": {"window": 7, "prefix": 3}, "last_visible": True},
    ],
    ids=str,
)
def test_ring(check_exact: Callable, case: dict[str, Any]) -> None:
    check_exact(strategy="ring", **case)


@pytest.mark.parametrize(
    "case",
    [
        {"strategy": "ulysses", "axes": {"sp": 4}, "shape": (2, 64, 8, 4, 8), "sinks": True},
        {"strategy": "ulysses", "axes": {"sp": 4}, "shape": (1, 61, 4, 2, 8), "layout": "zigzag"},
        {
            "strategy": "ulysses",
            "axes": {"sp": 2, "ulysses": 2, "tp": 2},
            "shape": (1, 32, 8, 8, 8),
            "mask": {"window": 9},
        },
        {"strategy": "usp", "axes": {"sp": 4, "ulysses": 2}, "sinks": True, "soft_cap": 2.0},
        {"strategy": "usp", "axes": {"sp": 2, "ulysses": 2, "fsdp": 2}, "layout": "zigzag", "last_visible": True},
        {"strategy": "all_gather", "axes": {"sp": 4, "dp": 2}, "layout": "zigzag", "query_block": 7},
        {"strategy": "all_gather", "axes": {"sp": 8}, "mask": {"causal": False}, "shape": (1, 61, 4, 2, 8)},
    ],
    ids=str,
)
def test_other_strategies(check_exact: Callable, case: dict[str, Any]) -> None:
    check_exact(**case)


def test_ring_whose_transfers_run_beside_the_computation(check_exact: Callable, monkeypatch: Any) -> None:
    """As on accelerators: gradients of keys and values are added after the computation, not in place."""
    monkeypatch.setattr(ring.Plan, "platform", "tpu")
    check_exact(axes={"sp": 4, "dp": 2}, layout="zigzag", sinks=True, mask={"window": 11})


@pytest.mark.parametrize(
    "shape", [(1, 96, 6, 6, 8), (2, 32, 12, 4, 16)], ids=["many groups", "groups of several heads"]
)
def test_heads_taken_a_few_at_a_time(check_exact: Callable, monkeypatch: Any, shape: tuple[int, ...]) -> None:
    monkeypatch.setattr(blockwise, "_CACHED_SCORES", 16 * 12 * 6)
    check_exact(shape=shape, query_block=16, key_block=12, axes={"sp": 2})


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_masks_on_one_device(check_exact: Callable, mask: dict[str, Any]) -> None:
    check_exact(mask=mask, query_block=16, key_block=12)


@pytest.mark.parametrize("strategy", ["ring", "usp"])
def test_attention_local_inside_the_callers_shard_map(check_exact: Callable, strategy: str) -> None:
    check_exact(axes={"sp": 4, "ulysses": 2}, local=True, strategy=strategy)


@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_drawn_cases(check_exact: Callable, data: st.DataObject) -> None:
    strategy = data.draw(st.sampled_from(["ring", "ring", "ulysses", "all_gather", "usp"]))
    sizes = [1, 2, 3, 4, 5, 7, 8] if strategy in ("ring", "all_gather") else [1, 2, 4]
    axes = {"sp": data.draw(st.sampled_from(sizes))}
    if strategy == "usp":
        axes["ulysses"] = 2
    groups = data.draw(st.sampled_from([1, 2, 4]))
    length = data.draw(st.integers(1, 70))
    check_exact(
        strategy=strategy,
        axes=axes,
        layout=data.draw(st.sampled_from(["contiguous", "striped", "zigzag"])),
        mask=data.draw(st.sampled_from(MASKS)),
        shape=(data.draw(st.integers(1, 2)), length, groups * data.draw(st.sampled_from([4])), groups, 8),
        num_documents=data.draw(st.integers(1, 6)),
        padding=data.draw(st.integers(0, min(10, length - 1))),
        query_block=data.draw(st.sampled_from([None, 3, 8])),
        key_block=data.draw(st.sampled_from([None, 5, 8])),
        sinks=data.draw(st.booleans()),
        soft_cap=data.draw(st.sampled_from([None, 1.5])),
        seed=data.draw(st.integers(0, 99)),
    )
