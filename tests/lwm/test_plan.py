"""`lwm plan`: real compilations for slices that are not there, in child processes; verdicts and sentences."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lwm import cli, suggest, tpu_compiler
from lwm.config import RunConfig, StageConfig
from lwm.plan import StagePlan, judge, plan_stage, verdict
from lwm.plan_compile import Compiled, Memory, Traffic, compile_elsewhere
from lwm.plan_report import draw
from lwm.topology import Topology, parse

ROOT = Path(__file__).resolve().parents[2]
SMALL = """
name: small
output_dir: {out}
model: {{text_vocab_size: 256, hidden_size: 256, intermediate_size: 512, num_layers: 2, num_heads: 2}}
corpora: [{{name: none, directory: nowhere}}]
stages:
  - name: only
    seq_len: 2048
    batch_rows: 1
    steps: 10
    rope_theta: 1e4
    mesh: {{fsdp: 1, sp: -1}}
    attention: {{layout: contiguous}}
    optimizer: {{peak_lr: 1e-3, warmup_steps: 1}}
    mixture: [{{corpus: none, share: 1}}]
    mlp_chunk: 128
    remat: full
"""
needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="the TPU compiler is missing: pip install lwm[plan]"
)


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("plan")
    path = directory / "small.yaml"
    path.write_text(SMALL.format(out=directory / "run"))
    return path


@pytest.fixture(scope="module")
def config(config_file: Path) -> RunConfig:
    from lwm.config import load_config

    return load_config(config_file)


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = cli.run(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@needs_compiler
def test_a_stage_compiles_for_tpus_that_are_not_there(
    config_file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The ring's permutes are found, as many as it has hops, with something computing behind those of the loop."""
    picture = tmp_path / "plan.png"
    code, out, err = run(["plan", str(config_file), "--topology", "v5e:2x2", "--json", "--plot", str(picture)], capsys)
    assert code == 0, err
    (stage,) = json.loads(out)["stages"]
    assert (stage["devices"], stage["mesh"]["sp"], stage["fits"]) == (4, 4, True)
    assert 0 < stage["memory"]["peak"] < stage["usable_bytes"] == int(15.75 * 2**30)
    # 2 layers: forward and recomputed 3 hops each; backward 3 hops, and dK, dV as often and once more to come home.
    permutes = [each for each in stage["transfers"] if each["kind"] == "collective-permute"]
    assert {each["axes"] for each in permutes} == {"sp"}
    kv_bytes = 2 * (2048 // 4) * 256 * 2
    most = 2 * (9 * kv_bytes + 4 * 2 * kv_bytes)
    # So few hops leave no loop: the compiler lets the backward pass use what the recomputed forward pass received,
    # and brings dK, dV home in bfloat16.
    least = 2 * (6 * kv_bytes + 3 * 2 * kv_bytes + kv_bytes)
    assert least <= sum(each["num_bytes"] for each in permutes) <= 1.02 * most
    assert sum(each["exposed"] for each in permutes) < sum(each["count"] for each in permutes)
    prediction = stage["prediction"]
    assert prediction["from_schedule"]
    assert prediction["roofline_seconds"] <= prediction["step_seconds"]
    assert picture.stat().st_size > 10_000


def test_a_plan_for_simulated_cpus(config: RunConfig) -> None:
    plan = plan_stage(config, config.stages[0], parse("cpu:2"))
    assert plan.fits
    assert plan.compiled.memory.peak > plan.parameters * 4
    assert any(each.kind == "collective-permute" for each in plan.compiled.traffic)
    assert plan.predicted is not None
    assert not plan.predicted.from_schedule


def compiled(**changes: Any) -> Compiled:
    memory = Memory(peak=8 * 10**9, arguments=1, outputs=1, temporaries=1, aliased=1, host=0)
    traffic = (Traffic("collective-permute", "sp", 60, 2, 0, 1e9, 1.0, 0.25),)
    return replace(Compiled(memory, 15 * 10**9, traffic, 2.0, 1, 3.0, 10**9), **changes)


def judged(config: RunConfig, found: Compiled) -> StagePlan:
    from lwm.config import resolve_stage

    return judge(resolve_stage(config, config.stages[0], 4), parse("v5e:2x2"), found, 1000, 250)


def test_what_does_not_fit_names_a_knob(config: RunConfig, tmp_path: Path) -> None:
    good = judged(config, compiled())
    assert good.fits
    assert good.exposed_permutes == 1.0  # two, in two layers
    assert good.predicted is not None
    assert good.predicted.step_seconds == 2.25
    full = judged(config, compiled(memory=replace(compiled().memory, peak=16 * 10**9)))
    assert not full.fits
    assert "does not fit v5e:2x2: 16.0 GB a device, of which 15.0 may be used; remat=offload" in verdict(full)
    refused = judged(config, compiled(error="no memory", memory=replace(compiled().memory, peak=40 * 10**9)))
    assert refused.predicted is None
    assert not refused.fits
    host = judged(config, compiled(memory=replace(compiled().memory, host=10**12)))
    assert "does not fit the hosts of v5e:2x2: 1000.0 GB" in verdict(host)
    draw([good, full, refused], tmp_path / "plan.png")


def test_suggest_ranks_what_was_compiled(config: RunConfig) -> None:
    """The formula's order is overruled by what the compiler says, and the stage as it is takes part."""
    seen: list[StageConfig] = []

    def compile_stage(_: RunConfig, stage: StageConfig, where: Topology) -> Compiled:
        seen.append(stage)
        if len(seen) == 2:
            raise ValueError("heads do not divide")
        return compiled(compute_seconds=10.0 - len(seen))

    ranking = suggest.search(config, config.stages[0], parse("v5e:2x2"), 3, compile_stage=compile_stage)
    assert len({(stage.mesh, stage.attention.strategy, stage.remat) for stage in seen}) == 3
    assert [plan.compiled.compute_seconds for _, plan in ranking.plans] == [7.0, 9.0]
    assert [option.own for option, _ in ranking.plans] == [False, True]
    assert ranking.plans[-1][0].label == "mesh {fsdp: 1, sp: 4}, ring, remat full (as it is)"
    assert ranking.considered >= 3
    for stage in seen:
        assert stage.mesh.fsdp == 1  # there is one row
    ranking.check()
    with pytest.raises(ValueError, match="nothing that was compiled fits"):
        suggest.search(
            config, config.stages[0], parse("v5e:2x2"), 1, compile_stage=lambda *_: compiled(error="no")
        ).check()


def test_suggest_makes_a_stage_fit(config: RunConfig) -> None:
    """Rows that do not fit a device together are taken in parts; what fits nowhere is tried from the smallest on."""
    many = config.stages[0].model_copy(update={"batch_rows": 2**12, "seq_len": 2**15})
    found = suggest.candidates(config, many, parse("v5e:2x2"))
    usable = parse("v5e:2x2").generation.usable_bytes
    assert found[0].num_bytes <= usable
    assert found[0].stage.accumulate > 1
    huge = suggest.candidates(config, many.model_copy(update={"batch_rows": 1, "seq_len": 2**28}), parse("v5e:2x2"))
    sizes = [each.num_bytes for each in huge]
    assert sizes[0] > usable
    assert sizes == sorted(sizes)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--topology", "v9-8"], "is not a known slice"),
        (["--topology", "v5e:2x2", "--stage", "other"], "there is no stage 'other'"),
        (["--topology", "v5e:2x2", "stages.only.seq_len=2047"], "cannot be split"),
        (["--topology", "v5e:2x2", "stages.only.mesh.sp=8"], "needs 8 devices but there are 4"),
    ],
)
def test_impossible_plans_end_with_one_sentence(
    config_file: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    code, out, err = run(["plan", str(config_file), *arguments], capsys)
    assert code == 2
    assert reason in err
    assert len([line for line in err.splitlines() if line.startswith("lwm: ")]) == 1


def test_without_the_compiler_it_says_what_to_install(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lwm.plan_compile.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs the TPU compiler, the package libtpu; install it with"):
        compile_elsewhere(config, config.stages[0], parse("v5e:2x2"))


def test_flags_are_for_the_chips_that_are_here_and_the_users_go_first(tmp_path: Path) -> None:
    for name, vendor, device in (("a", "0x8086", "0x005e"), ("b", "0x1ae0", "0x005e")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(f"{vendor}\n")
        (tmp_path / name / "device").write_text(f"{device}\n")
    assert tpu_compiler.local_generation(tmp_path) == "v4"
    assert tpu_compiler.local_generation(tmp_path / "a") is None
    given = "--xla_enable_async_all_gather=false --xla_tpu_other=1"
    both = tpu_compiler.init_args("v4", given).split()
    assert both[:2] == given.split()
    assert both[2:] == [flag for flag in tpu_compiler.FLAGS["v4"] if "async_all_gather=true" not in flag]
    assert tpu_compiler.init_args("v5p", given) == given


@needs_compiler
def test_an_installed_compiler_stays_out_of_ordinary_runs() -> None:
    """Where no TPU is, nothing loads it and nothing complains, whatever the platform is set to."""
    environment = {key: value for key, value in os.environ.items() if key != "JAX_PLATFORMS"}
    script = (
        "from lwm import tpu_compiler; tpu_compiler.prepare();"
        "import jax; print(jax.devices()[0].platform);"
        "print(any('libtpu' in line for line in open('/proc/self/maps')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert (done.stdout.split(), done.stderr) == (["cpu", "False"], "")
