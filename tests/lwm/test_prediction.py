"""Predictions against closed forms worked out by hand."""

from typing import Any

import pytest

from lwm import prediction
from lwm.config import ModelConfig, ResolvedStage, StageConfig
from lwm.prediction import Link
from lwm.topology import GENERATIONS

MODEL = ModelConfig(text_vocab_size=1000, hidden_size=64, intermediate_size=128, num_layers=3, num_heads=4)
WEIGHTS = 3 * (4 * 64 * 64 + 3 * 64 * 128)


def resolve(mesh: dict[str, int] | None = None, **changes: Any) -> ResolvedStage:
    values = {
        "name": "test",
        "seq_len": 4096,
        "batch_rows": 2,
        "steps": 100,
        "rope_theta": 1e4,
        "attention": {"query_block": 256, "key_block": 256},
        "optimizer": {"peak_lr": 1e-2, "warmup_steps": 0},
        "mixture": ({"corpus": "none", "share": 1.0},),
        "remat": "full",
    }
    stage = StageConfig.model_validate(values | changes)
    sizes = {"dp": 1, "fsdp": 2, "tp": 1, "sp": 4, "ulysses": 1} | (mesh or {})
    return ResolvedStage(
        stage, MODEL, tuple(sizes.items()), sizes["dp"] * sizes["fsdp"], sizes["sp"] * sizes["ulysses"]
    )


def test_flops() -> None:
    """6 per weight and token, 12 per layer, feature and visible pair; recomputation on top of it."""
    tokens, seen = 2 * 4096, 2 * 4096 * 4097 / 2
    attention = 4 * 3 * 64 * seen
    needed = 6 * tokens * (WEIGHTS + 64 * 1000) + 3 * attention
    done = prediction.work(resolve(), 8)
    assert done.needed == pytest.approx(needed / 8)
    again = 2 * tokens * 3 * (4 * 64 * 64 + 2 * 64 * 128)
    assert done.attention == pytest.approx(4.5 * attention / 8)
    assert done.executed == pytest.approx((needed + 1.5 * attention + again) / 8)
    kept = prediction.work(resolve(remat="none"), 8)
    assert kept.executed == pytest.approx((needed + 0.5 * attention) / 8)
    assert prediction.work(resolve(remat="offload_attention"), 8).attention == pytest.approx(3.5 * attention / 8)


def test_visits_count_the_blocks_of_a_causal_mask() -> None:
    """1024 tokens on each of four devices are four blocks: per hop ten of sixteen pairs, striped."""
    assert prediction.visits(resolve()) == 4 * 10
    assert prediction.outer_blocks(resolve()) == 4
    blocks = {"query_block": 256, "key_block": 256}
    assert prediction.visits(resolve(attention=blocks | {"head_parts": 2})) == 4 * 10 * 2
    assert prediction.visits(resolve(attention=blocks | {"layout": "contiguous"})) == 4 * 16
    # Exchanged heads: one device holds the whole row, 16 blocks, and no hops.
    exchanged = resolve({"sp": 1, "ulysses": 4}, attention=blocks | {"strategy": "ulysses"})
    assert prediction.visits(exchanged) == 16 * 17 / 2
    both = resolve({"sp": 2, "ulysses": 2}, attention=blocks | {"strategy": "usp"})
    assert prediction.visits(both) == 2 * 8 * 9 / 2


def test_transfers() -> None:
    v4 = GENERATIONS["v4"]
    one = 268e9 / 6
    assert prediction.transfer_seconds("collective-permute", one, Link(hops=2), v4) == pytest.approx(2)
    assert prediction.transfer_seconds("all-gather", one, Link(dims=3), v4) == pytest.approx(1 / 6)
    assert prediction.transfer_seconds("all-to-all", one, Link(size=8), v4) == pytest.approx(1)
    assert prediction.transfer_seconds("host-copy", 12.5e9, Link(), v4) == pytest.approx(1)


def test_a_step_is_compute_and_what_waits() -> None:
    v4, resolved = GENERATIONS["v4"], resolve()
    done = prediction.work(resolved, 8)
    given = {"exposed_seconds": 2.0, "link_seconds": 0.5, "local_parameters": 10}
    scheduled = prediction.predict(resolved, 8, v4, compute_seconds=3.0, **given)
    assert (scheduled.step_seconds, scheduled.from_schedule) == (5.0, True)
    assert scheduled.mfu == pytest.approx(done.needed / (5 * 275e12))
    assert scheduled.tokens_per_second == pytest.approx(8192 / 5)
    assert scheduled.stage_hours == pytest.approx(100 * 5 / 3600)
    assert scheduled.roofline_seconds == 0.5  # the links are slowest here
    assumed = prediction.predict(resolved, 8, v4, compute_seconds=0.0, **given)
    assert assumed.compute_seconds == pytest.approx(done.executed / (275e12 * 0.5))
    assert not assumed.from_schedule


def test_advice_frees_what_it_says() -> None:
    """Layer inputs: 3 layers x 64 features x 2 bytes x 1024 tokens; two rows on one group can be taken in turn."""
    inputs = 3 * 64 * 2 * 1024
    found = {each.change: each.saved_bytes for each in prediction.advice(resolve())}
    assert found["remat=offload"] == inputs
    assert found["accumulate=2 with half the fsdp and twice the sp"] == inputs / 2
    two_rows = {each.change: each.saved_bytes for each in prediction.advice(resolve({"fsdp": 1, "sp": 8}))}
    assert two_rows["accumulate=2"] == inputs / 2
    offloaded = [each.change for each in prediction.advice(resolve(remat="offload"))]
    assert not [change for change in offloaded if change.startswith("remat")]
    saved = [each.saved_bytes for each in prediction.advice(resolve(remat="none"))]
    assert saved == sorted(saved, reverse=True)
    assert prediction.advice(resolve(remat="none"))[0].change in ("remat=full", "remat=offload")
