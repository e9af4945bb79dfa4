"""Reading compiled programs: a small one written by hand, whose every number can be counted."""

import pytest

from lwm import schedule

# A layer loop of 3 trips; in it a ring loop from 1 to 4 (3 hops), whose permute hides behind a data-dependent loop.
TEXT = """HloModule jit_step, is_scheduled=true

%cond.ring (p: (s32[], bf16[8,128])) -> pred[] {
  %limit = s32[]{:T(128)} constant(4)
  %p = (s32[]{:T(128)}, bf16[8,128]{1,0:T(8,128)(2,1)}) parameter(0)
  %at = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt = pred[] compare(%at, %limit), direction=LT
}

%cond.data (p: (s32[], s32[])) -> pred[] {
  %p = (s32[], s32[]) parameter(0)
  %at = s32[] get-tuple-element(%p), index=0
  %until = s32[] get-tuple-element(%p), index=1
  ROOT %lt = pred[] compare(%at, %until), direction=LT
}

%body.data (p: (s32[], s32[])) -> (s32[], s32[]) {
  %p = (s32[], s32[]) parameter(0)
  %block = f32[256,256]{1,0} fusion(%p), kind=kLoop, calls=%fused, backend_config={"estimated_cycles":"1000"}
  ROOT %out = (s32[], s32[]) tuple(%p)
}

%body.ring (p: (s32[], bf16[8,128])) -> (s32[], bf16[8,128]) {
  %p = (s32[]{:T(128)}, bf16[8,128]{1,0:T(8,128)(2,1)}) parameter(0)
  %kv = bf16[8,128]{1,0:T(8,128)(2,1)} get-tuple-element(%p), index=1
  %go = (bf16[8,128]{1,0}, bf16[8,128]{1,0}, u32[], u32[]) collective-permute-start(%kv), PAIRS
  %blocks = (s32[], s32[]) while(%p), condition=%cond.data, body=%body.data, metadata={op_name="jit(step)/jvp()/while"}
  %kv.2 = bf16[8,128]{1,0} collective-permute-done(%go)
  %lone = (bf16[8,128]{1,0}, bf16[8,128]{1,0}, u32[], u32[]) collective-permute-start(%kv.2), PAIRS
  %b = bf16[8,128]{1,0} bitcast(%kv.2)
  %kv.3 = bf16[8,128]{1,0} collective-permute-done(%lone)
  ROOT %out = (s32[], bf16[8,128]) tuple(%p, %kv.3)
}

%cond.layer (p: (s32[])) -> pred[] {
  %three = s32[] constant(3)
  %p = (s32[]) parameter(0)
  %at = s32[] get-tuple-element(%p), index=0
  ROOT %lt = pred[] compare(%at, %three), direction=LT
}

%body.layer (p: (s32[])) -> (s32[]) {
  %p = (s32[]) parameter(0)
  %one = s32[] constant(1)
  %init = (s32[], bf16[8,128]) tuple(%one, %p)
  %ring = (s32[], bf16[8,128]) while(%init), condition=%cond.ring, body=%body.ring
  %weights = f32[64,32]{1,0} all-gather(%p), replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}
  %sum = (f32[64,32], f32[16]) all-reduce(%weights, %p), replica_groups=mesh['sp'=4,'tp'=2] {'tp'}, to_apply=%add
  %part = f32[16,32]{1,0} reduce-scatter(%weights), replica_groups={{0,2,4,6},{1,3,5,7}}, dimensions={0}
  %fetch = (f32[4]{0}, f32[4]{0:S(5)}, u32[]) copy-start(%part)
  %work = f32[64,32] fusion(%weights), kind=kLoop, calls=%fused, backend_config={"estimated_cycles":"50"}
  %fetched = f32[4]{0:S(5)} copy-done(%fetch)
  ROOT %out = (s32[]) tuple(%p)
}

%fused (p: f32[4]) -> f32[4] {
  ROOT %p = f32[4] parameter(0)
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %zero = s32[] constant(0)
  %copied = s32[] copy(%zero)
  %init = (s32[]) tuple(%copied)
  ROOT %layers = (s32[]) while(%init), condition=%cond.layer, body=%body.layer
}
""".replace("PAIRS", "source_target_pairs={{0,2},{2,4},{4,6},{6,0},{1,3},{3,5},{5,7},{7,1}}")
MESH = [("sp", 4), ("tp", 2)]


@pytest.fixture(scope="module")
def module() -> schedule.Module:
    return schedule.parse(TEXT)


def test_loops_turn_as_often_as_their_bounds_say(module: schedule.Module) -> None:
    times = {name: module.times.get(name) for name in ("main", "body.layer", "body.ring", "body.data")}
    assert times == {"main": 1, "body.layer": 3, "body.ring": 9, "body.data": 9}
    (loop,) = schedule.data_dependent_loops(module).values()
    assert (loop.instruction.name, loop.entered, loop.inside, loop.innermost) == ("blocks", 9, None, True)


def test_seconds_follow_loops(module: schedule.Module) -> None:
    """3 layers x (3 hops x 5 visits x 1000 cycles + 50 cycles), at 1000 cycles a second."""
    cost = schedule.Cost(clock=1000, visits=lambda loop: 5.0)
    assert module.seconds(module.entry, cost) == pytest.approx(3 * (3 * 5 * 1 + 0.05))


def test_bytes_axes_and_what_hides_them(module: schedule.Module) -> None:
    found = {(t.kind, t.axes, t.exposed): t for t in schedule.transfers(module, MESH)}
    permute = 8 * 128 * 2
    expected = {
        ("collective-permute", "sp", False): (permute, 9),
        ("collective-permute", "sp", True): (permute, 9),
        ("all-gather", "sp", True): (64 * 32 * 4 * 3 / 4, 3),
        ("all-reduce", "tp", True): (2 * (64 * 32 + 16) * 4 / 2, 3),
        ("reduce-scatter", "sp", True): (4 * 16 * 32 * 4 * 3 / 4, 3),
        (schedule.HOST_COPY, "host", False): (16, 3),
    }
    assert {key: (t.num_bytes, t.times) for key, t in found.items()} == expected
    assert found["collective-permute", "sp", False].hidden_by == ("blocks",)
    assert found["collective-permute", "sp", True].hidden_by == ()
    assert found["all-gather", "sp", True].hidden_by is None
