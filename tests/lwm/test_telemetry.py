"""Step lines, metrics.jsonl under kills and full disks, progress with and without a terminal, the tracker's queue."""

import io
import json
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lwm import telemetry, tracking
from lwm.config import load_config
from lwm.telemetry import MetricsFile, Progress, StepReport, Telemetry, read_metrics, step_line
from lwm.tracking import WandbTracker

ROOT = Path(__file__).parents[2]


def report(step: int = 1200, **changes: Any) -> StepReport:
    values: dict[str, Any] = {
        "step": step,
        "num_steps": 10000,
        "global_step": step,
        "stage": "long",
        "loss": 2.345,
        "grad_norm": 0.81,
        "learning_rate": 3e-4,
        "seconds": 1.23,
        "tokens": 103_443,
        "data_seconds": 0.025,
        "mfu": 0.412,
    }
    return StepReport(**(values | changes))


def test_step_line() -> None:
    expected = "step 1200/10000 12% loss 2.345 gnorm 0.81 lr 3e-4 | 1.23s 84.1k tok/s mfu 41.2% data 2% | eta 3h12m"
    assert step_line(report(), 3 * 3600 + 12 * 60) == expected
    assert " mfu " not in step_line(report(mfu=None), 60)
    assert "loss nan" in step_line(report(loss=float("nan")), 60)


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (telemetry.format_duration, 0.4, "0s"),
        (telemetry.format_duration, 59.7, "1m00s"),
        (telemetry.format_duration, 725, "12m05s"),
        (telemetry.format_duration, 3600 * 26, "1d02h"),
        (telemetry.format_duration, float("inf"), "?"),
        (telemetry.format_count, 950, "950"),
        (telemetry.format_count, 999.6, "1.00k"),
        (telemetry.format_count, 99_960, "100k"),
        (telemetry.format_count, 1.234e6, "1.23M"),
        (telemetry.format_count, 5e12, "5.00T"),
        (telemetry.format_rate, 1.25e-5, "1.25e-5"),
        (telemetry.format_rate, 1e-10, "1e-10"),
        (telemetry.format_rate, 0.0, "0"),
        (telemetry.format_seconds, 0.0854, "85ms"),
        (telemetry.format_seconds, 12.34, "12.3s"),
        (telemetry.format_seconds, 125.0, "2m05s"),
    ],
)
def test_numbers_for_people(function: Callable[[float], str], value: float, text: str) -> None:
    assert function(value) == text


@given(st.floats(1e-3, 9e14))
@settings(max_examples=200, deadline=None)
def test_counts_keep_three_digits(value: float) -> None:
    text = telemetry.format_count(value)
    scale = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}.get(text[-1], 1.0)
    assert float(text.rstrip("kMGT")) * scale == pytest.approx(value, rel=0.006, abs=0.5)


def test_the_first_last_and_every_nth_step_are_said_and_every_step_is_recorded(tmp_path: Path) -> None:
    console = io.StringIO()
    with Telemetry(tmp_path, log_every=4, console=console, wall=lambda: 1000.0) as voice:
        for step in range(1, 11):
            voice.step(report(step, num_steps=10, metrics={"train/loss_text": 1.5}))
        voice.log({"eval/needle_text_accuracy": 0.9}, step=10)
    said = [line.split()[1] for line in console.getvalue().splitlines()]
    assert said == ["1/10", "4/10", "8/10", "10/10"]
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == [*range(1, 11), 10]
    assert records[0] == {
        "step": 1,
        "time": 1000.0,
        "stage": "long",
        "stage_step": 1,
        "train/loss": 2.345,
        "optim/grad_norm": 0.81,
        "optim/lr": 3e-4,
        "perf/step_seconds": 1.23,
        "perf/tokens_per_second": 103_443 / 1.23,
        "data/wait_fraction": 0.025 / 1.23,
        "perf/mfu": 0.412,
        "perf/eta_seconds": 1.23 * 9,
        "train/loss_text": 1.5,
    }


def test_eta_follows_the_typical_step_not_the_compilation(tmp_path: Path) -> None:
    console = io.StringIO()
    with Telemetry(tmp_path, console=console) as voice:
        voice.step(report(1, num_steps=100, seconds=60.0))
        for step in range(2, 11):
            voice.step(report(step, num_steps=100, seconds=1.0))
    assert console.getvalue().splitlines()[-1].endswith("eta 1m30s")


def test_other_processes_are_silent(tmp_path: Path) -> None:
    console = io.StringIO()
    with Telemetry(tmp_path, console=console, active=False) as voice:
        voice.step(report())
        voice.say("hello")
        voice.rewind(3)
    assert console.getvalue() == ""
    assert list(tmp_path.iterdir()) == []


def test_a_resumed_run_continues_and_a_torn_line_is_dropped(tmp_path: Path) -> None:
    with Telemetry(tmp_path, console=io.StringIO()) as voice:
        for step in range(1, 6):
            voice.log({"train/loss": float(step)}, step=step)
    path = tmp_path / "metrics.jsonl"
    with path.open("ab") as file:
        file.write(b'{"step": 6, "train/lo')
    with Telemetry(tmp_path, console=io.StringIO()) as voice:
        voice.rewind(3)
        for step in range(4, 8):
            voice.log({"train/loss": float(10 * step)}, step=step)
    records = read_metrics(path)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6, 7]
    assert [record["train/loss"] for record in records] == [1, 2, 3, 40, 50, 60, 70]


@given(st.binary(max_size=40).filter(lambda tail: b"\n" not in tail), st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_any_torn_tail_leaves_the_whole_lines(
    tmp_path_factory: pytest.TempPathFactory, tail: bytes, lines: int
) -> None:
    path = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    path.write_bytes(b"".join(b'{"step": %d}\n' % step for step in range(lines)) + tail)
    file = MetricsFile(path)
    file.write({"step": 99})
    file.close()
    assert [record["step"] for record in read_metrics(path)] == [*range(lines), 99]


def test_a_line_longer_than_the_search_window_is_found_when_torn(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + b'{"x": "' + b"y" * 200_000)
    file = MetricsFile(path)
    file.write({"step": 2})
    file.close()
    assert [record["step"] for record in read_metrics(path)] == [1, 2]


def test_not_a_number_stays_readable(tmp_path: Path) -> None:
    with Telemetry(tmp_path, console=io.StringIO()) as voice:
        voice.log({"train/loss": float("nan"), "x": [float("inf"), 1]}, step=1)
    text = (tmp_path / "metrics.jsonl").read_text()
    record = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (record["train/loss"], record["x"]) == ("nan", ["inf", 1])


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: not a JSON record"):
        read_metrics(path)
    assert read_metrics(tmp_path / "absent.jsonl") == []


FULL_DISK = """
import io, resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)   # a write beyond the limit then fails with an OSError, as on a full disk
from lwm.telemetry import Telemetry
console = io.StringIO()
with Telemetry(sys.argv[1], console=console, wall=lambda: 0.0) as voice:
    for step in range(1, 31):
        if step == 10:
            resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.RLIM_INFINITY))
        if step == 20:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        voice.log({"train/loss": float(step)}, step=step)
print(console.getvalue(), end="")
"""


def test_a_full_disk_delays_records_and_loses_none(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.count("cannot write") == 1
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, 31))


class Clock:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_progress_in_plain_lines() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress("encode frames", 300, unit="frames", stream=stream, clock=clock, every=5) as progress:
        for _ in range(300):
            clock.now += 0.25
            progress.advance(note="psnr 21.5")
    lines = stream.getvalue().splitlines()
    assert lines[0] == "encode frames 20/300 6% | 4 frames/s psnr 21.5 | eta 1m10s"
    assert lines[-1] == "encode frames 300/300 done in 1m15s"
    assert len(lines) == 300 * 0.25 / 5 + 1


def test_progress_without_a_total_and_when_stopped() -> None:
    stream, clock = io.StringIO(), Clock()

    def stopped() -> None:
        with Progress("read lines", None, stream=stream, clock=clock, every=1) as progress:
            clock.now = 2.0
            progress(5000)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        stopped()
    assert stream.getvalue().splitlines() == ["read lines 5000 | 2.50k/s | 2s", "read lines 5000 stopped in 2s"]


def test_progress_on_a_terminal_is_a_bar() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with Progress("build corpus", 10, stream=stream) as progress:
        progress(4)
        progress(10)
    assert "10/10" in stream.getvalue()
    assert "build corpus" in stream.getvalue()


class FakeRun:
    """Records what a tracker sends."""

    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []
        self.finished = False

    def log(self, data: dict[str, Any]) -> None:
        self.logged.append(data)

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def said() -> list[str]:
    return []


def test_tracker_receives_metrics_and_pictures_in_order(tmp_path: Path, said: list[str]) -> None:
    run = FakeRun()
    with Telemetry(tmp_path, console=io.StringIO()) as voice:
        voice.track(WandbTracker(lambda: (run, lambda path, caption: (Path(path).name, caption)), said.append))
        voice.log({"train/loss": 1.0}, step=1)
        voice.image("heatmap", tmp_path / "heatmap.png", step=2, caption="needles")
    assert run.logged[0] == {"train/loss": 1.0, "step": 1}
    assert run.logged[-1] == {"heatmap": ("heatmap.png", "needles"), "step": 2}
    assert run.finished
    assert said == []


def test_a_tracker_that_hangs_costs_no_time_and_drops_are_counted(said: list[str]) -> None:
    release = threading.Event()

    def start() -> tuple[FakeRun, Any]:
        release.wait(30)
        return FakeRun(), None

    tracker = WandbTracker(start, said.append, capacity=10, finish_seconds=0.05)
    begin = time.monotonic()
    for step in range(1000):
        tracker.log({"train/loss": 1.0}, step)
    assert time.monotonic() - begin < 1.0
    tracker.close()
    assert tracker.dropped == 990
    assert said == [
        "wandb: not finished after 0.05 s; left behind, metrics.jsonl is complete",
        "wandb: 990 records were dropped because it fell behind; metrics.jsonl has them",
    ]
    release.set()


def test_a_tracker_that_breaks_is_said_once_and_ignored(said: list[str]) -> None:
    class Broken(FakeRun):
        def log(self, data: dict[str, Any]) -> None:
            raise ConnectionError("the service\nwas killed")

    def start() -> tuple[FakeRun, Any]:
        return Broken(), None

    tracker = WandbTracker(start, said.append)
    for step in range(5):
        tracker.log({}, step)
    tracker.close()
    assert said == ["wandb: stopped (the service was killed); metrics.jsonl goes on"]


def test_run_id_is_kept_across_restarts(tmp_path: Path) -> None:
    first = tracking.run_id(tmp_path / "run")
    assert tracking.run_id(tmp_path / "run") == first
    assert tracking.run_id(tmp_path / "other") != first


def test_key_is_found_in_environment_or_netrc(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    assert not tracking.has_key(home)
    assert tracking.has_key({**home, "WANDB_API_KEY": "x"})
    netrc = tmp_path / ".netrc"
    netrc.write_text("machine api.wandb.ai\n login user\n password x\n")
    netrc.chmod(0o600)
    assert tracking.has_key(home)
    assert not tracking.has_key({**home, "WANDB_BASE_URL": "https://wandb.example.org"})


def wandb_records(path: Path) -> list[Any]:
    """The records of one of W&B's transaction logs: protobuf messages in LevelDB's log format."""
    from wandb.proto import wandb_internal_pb2

    content, block = path.read_bytes(), 32768
    assert content[:4] == b":W&B"
    records, parts, at = [], b"", 7
    while at < len(content):
        if block - at % block < 7:
            at += block - at % block  # what is left of a block is too small for a header
            continue
        _, size, kind = struct.unpack_from("<IHB", content, at)
        parts += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            records.append(wandb_internal_pb2.Record.FromString(parts))
            parts = b""
    return records


def test_the_real_thing_runs_offline_without_a_key(tmp_path: Path) -> None:
    """Metrics, a picture, configuration and id are in W&B's own files; TensorBoard's are beside them."""
    program = (
        # wandb's first import may take longer than the end of a run waits for it, where a machine is busy.
        "import sys, wandb; from pathlib import Path; from PIL import Image\n"
        "from lwm.config import load_config; from lwm.tracking import open_telemetry\n"
        "run = Path(sys.argv[1])\n"
        "with open_telemetry(load_config('tiny', [f'output_dir={run}', 'telemetry.tensorboard=true'])) as voice:\n"
        "    voice.log({'train/loss': 1.25}, step=1)\n"
        "    Image.new('RGB', (7, 5), (200, 0, 0)).save(run / 'red.png')\n"
        "    voice.image('eval/red', run / 'red.png', step=1, caption='all red')\n"
    )
    environ = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environ |= {"HOME": str(tmp_path), "NETRC": str(tmp_path / "none")}
    run_dir = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-c", program, str(run_dir)], cwd=ROOT, env=environ, capture_output=True, text=True, check=True
    )
    identity = (run_dir / "wandb_id").read_text().strip()
    assert f"wandb: run {identity} (offline" in done.stdout
    assert [path.name for path in (run_dir / "wandb").glob("offline-run-*/*.wandb")] == [f"run-{identity}.wandb"]
    assert len(read_metrics(run_dir / "metrics.jsonl")) == 2
    (log,) = (run_dir / "wandb").glob("offline-run-*/*.wandb")
    records = wandb_records(log)
    (run,) = [record.run for record in records if record.HasField("run")]
    settings_there = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert (run.run_id, run.project, run.display_name) == (identity, "lwm-tiny", "tiny")
    assert settings_there["model"]["hidden_size"] == 128
    assert settings_there["fingerprint"]
    history: dict[str, Any] = {}
    for record in records:
        for item in record.history.item:
            name = item.key or "/".join(item.nested_key)
            history.setdefault(name, json.loads(item.value_json))
    assert history["train/loss"] == 1.25
    assert history["step"] == 1
    assert any(name.startswith("eval/red") for name in history)
    assert [each.stat().st_size > 50 for each in log.parent.glob("files/media/images/eval/*.png")] == [True]
    events = b"".join(path.read_bytes() for path in (run_dir / "tensorboard").iterdir())
    assert b"train/loss" in events
    assert b"eval/red" in events


def test_off_means_off(tmp_path: Path) -> None:
    config = load_config("tiny", [f"output_dir={tmp_path}", "telemetry.wandb=off"])
    with tracking.open_telemetry(config, console=io.StringIO()) as voice:
        voice.log({"train/loss": 1.0}, step=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl"]
