"""What a run says while it works: step lines, metrics.jsonl, pictures, and progress of long phases.

Clocks and streams are passed in. Trackers such as Weights & Biases (`lwm.tracking`) are fed from here and can fail
without training noticing; `metrics.jsonl` is the record that is always complete.

Metric names have a room: train/ optim/ perf/ data/ mem/ eval/ goodput/, and end in their unit where they have one.
"""

import io
import json
import math
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TextIO

Clock = Callable[[], float]
METRICS_FILE = "metrics.jsonl"


def format_duration(seconds: float) -> str:
    """`45s`, `12m05s`, `3h12m`, `2d03h`."""
    if not math.isfinite(seconds):
        return "?"
    whole = max(0, round(seconds))
    days, rest = divmod(whole, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, secs = divmod(rest, 60)
    if days:
        return f"{days}d{hours:02}h"
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{secs:02}s" if minutes else f"{secs}s"


def format_count(value: float) -> str:
    """Three digits and a scale: `950`, `84.1k`, `1.23M`."""
    for limit, scale, suffix in (
        (1e3, 1.0, ""),
        (1e6, 1e3, "k"),
        (1e9, 1e6, "M"),
        (1e12, 1e9, "G"),
        (math.inf, 1e12, "T"),
    ):
        if abs(value) < limit * 0.9995:
            scaled = value / scale
            decimals = 0 if abs(scaled) >= 99.95 or not suffix else 1 if abs(scaled) >= 9.995 else 2
            return f"{scaled:.{decimals}f}{suffix}"
    raise AssertionError("the last scale takes everything")


def format_rate(value: float) -> str:
    """A learning rate as people write it: `3e-4`, `1.25e-5`, `0`."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def format_seconds(seconds: float) -> str:
    """Duration of one step: `85ms`, `1.23s`, `12.3s`, `2m05s`."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f}ms"
    if seconds >= 99.5:
        return format_duration(seconds)
    return f"{seconds:.2f}s" if seconds < 9.995 else f"{seconds:.1f}s"


@dataclass(frozen=True)
class StepReport:
    """One finished optimizer step.

    Attributes:
        step: steps done in this stage, from 1.
        num_steps: steps of this stage.
        global_step: steps done in the whole run.
        stage: the stage's name.
        loss: sum of weighted nll over the global batch.
        grad_norm: global gradient norm before clipping.
        learning_rate: the one used in this step.
        seconds: wall time of the step, from the end of the one before.
        tokens: slots in the global batch.
        data_seconds: part of `seconds` spent waiting for the batch.
        mfu: model FLOP/s over peak FLOP/s, 0 to 1; None where the peak is unknown.
        metrics: anything else to record, by full name (`train/loss_text`).
    """

    step: int
    num_steps: int
    global_step: int
    stage: str
    loss: float
    grad_norm: float
    learning_rate: float
    seconds: float
    tokens: int
    data_seconds: float = 0.0
    mfu: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


def step_line(report: StepReport, eta_seconds: float) -> str:
    """`step 1200/10000 12% loss 2.345 gnorm 0.81 lr 3e-4 | 1.23s 84.1k tok/s mfu 41.2% data 2% | eta 3h12m`."""
    seconds = max(report.seconds, 1e-9)
    mfu = "" if report.mfu is None else f" mfu {100 * report.mfu:.1f}%"
    return (
        f"step {report.step}/{report.num_steps} {100 * report.step // report.num_steps}%"
        f" loss {report.loss:.3f} gnorm {report.grad_norm:.2f} lr {format_rate(report.learning_rate)}"
        f" | {format_seconds(report.seconds)} {format_count(report.tokens / seconds)} tok/s{mfu}"
        f" data {100 * report.data_seconds / seconds:.0f}% | eta {format_duration(eta_seconds)}"
    )


def step_metrics(report: StepReport) -> dict[str, float]:
    """The report as named metrics, as written to metrics.jsonl and to trackers."""
    seconds = max(report.seconds, 1e-9)
    metrics = {
        "train/loss": report.loss,
        "optim/grad_norm": report.grad_norm,
        "optim/lr": report.learning_rate,
        "perf/step_seconds": report.seconds,
        "perf/tokens_per_second": report.tokens / seconds,
        "data/wait_fraction": report.data_seconds / seconds,
    }
    if report.mfu is not None:
        metrics["perf/mfu"] = report.mfu
    return metrics | dict(report.metrics)


def memory_metrics() -> dict[str, float]:
    """Gigabytes: the first device's memory now and at its peak, where it tells, and this process's peak on the host."""
    import resource

    import jax

    scale = 1e9 if sys.platform == "darwin" else 1e6  # ru_maxrss is in bytes there, in kB here
    metrics = {"mem/host_peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale}
    stats = jax.local_devices()[0].memory_stats() or {}
    for name, key in (("mem/device_gb", "bytes_in_use"), ("mem/device_peak_gb", "peak_bytes_in_use")):
        if key in stats:
            metrics[name] = stats[key] / 1e9
    return metrics


class Tracker(Protocol):
    """Where metrics and pictures go besides metrics.jsonl. No method may block or raise."""

    def log(self, metrics: Mapping[str, Any], step: int) -> None: ...

    def image(self, name: str, path: Path, step: int, caption: str) -> None: ...

    def close(self) -> None: ...


def _jsonable(value: Any) -> Any:
    # JSON has no NaN; a string keeps the line readable by every parser and the fact visible.
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    return value


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Records of a metrics file, without a last line that was torn by a kill.

    Raises:
        ValueError: a damaged line elsewhere; names file and line.
    """
    file = Path(path)
    if not file.exists():
        return []
    whole, _, _ = file.read_bytes().rpartition(b"\n")
    records = []
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            records.append(json.loads(line))
        except ValueError:
            raise ValueError(f"{file}:{number}: not a JSON record; delete the line to read the rest") from None
    return records


class MetricsFile:
    """Append-only JSON lines that survive kills and full disks.

    A torn last line is dropped when the file is opened. While a disk is full, records wait in memory and are written,
    in order, once there is room again.
    """

    MAX_PENDING = 100_000

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = io.FileIO(self.path, "ab")
        self._end = self._drop_torn_line()
        self._pending: deque[bytes] = deque(maxlen=self.MAX_PENDING)
        self.failures = 0

    def _drop_torn_line(self) -> int:
        size = os.fstat(self._file.fileno()).st_size
        with open(self.path, "rb") as file:
            end = size
            while end > 0:
                start = max(0, end - 65536)
                file.seek(start)
                newline = file.read(end - start).rfind(b"\n")
                if newline >= 0:
                    end = start + newline + 1
                    break
                end = start
        if end != size:
            self._file.truncate(end)
        return end

    def write(self, record: Mapping[str, Any]) -> bool:
        """Append one record; False when it had to be kept in memory because the disk refused it."""
        self._pending.append(json.dumps(_jsonable(record), allow_nan=False).encode() + b"\n")
        while self._pending:
            line = self._pending[0]
            try:
                written = 0
                while written < len(line):
                    written += self._file.write(line[written:]) or 0
            except OSError:
                self.failures += 1
                self._file.truncate(self._end)  # half a line would spoil the file for every reader
                return False
            self._end += len(line)
            self._pending.popleft()
        return True

    def rewind(self, keep: Callable[[dict[str, Any]], bool]) -> int:
        """Drop records that a resumed run will write again; returns how many. The file is replaced in one step."""
        records = read_metrics(self.path)
        kept = [json.dumps(record).encode() + b"\n" for record in records if keep(record)]
        if len(kept) == len(records):
            return 0
        temporary = self.path.with_suffix(".tmp")
        temporary.write_bytes(b"".join(kept))
        os.replace(temporary, self.path)
        self._file.close()
        self._file = io.FileIO(self.path, "ab")
        self._end = os.fstat(self._file.fileno()).st_size
        return len(records) - len(kept)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Telemetry:
    """The run's voice: one object the trainer talks to.

    Args:
        run_dir: where metrics.jsonl lives.
        log_every: steps between console lines; metrics.jsonl gets every step.
        console: stream for people.
        wall: Unix time for the records.
        active: False in processes other than the first: everything becomes a no-op.
    """

    def __init__(
        self,
        run_dir: str | Path,
        *,
        log_every: int = 1,
        console: TextIO | None = None,
        wall: Clock = time.time,
        active: bool = True,
    ) -> None:
        self._log_every = log_every
        self._console = console if console is not None else sys.stdout
        self._wall = wall
        self._trackers: list[Tracker] = []
        self._file = MetricsFile(Path(run_dir) / METRICS_FILE) if active else None
        self._durations: deque[float] = deque(maxlen=20)
        self._stage = ""

    def track(self, tracker: Tracker) -> None:
        """Send everything to `tracker` as well, from now on."""
        self._trackers.append(tracker)

    def say(self, text: str) -> None:
        """One line for people."""
        if self._file is not None:
            print(text, file=self._console, flush=True)

    def step(self, report: StepReport) -> None:
        """Record one step, and print its line when it is due."""
        if report.stage != self._stage:
            self._stage = report.stage
            self._durations.clear()
        self._durations.append(report.seconds)
        eta = statistics.median(self._durations) * (report.num_steps - report.step)
        metrics = step_metrics(report) | {"perf/eta_seconds": eta}
        self.log(metrics, step=report.global_step, stage=report.stage, stage_step=report.step)
        if report.step % self._log_every == 0 or report.step in (1, report.num_steps):
            self.say(step_line(report, eta))

    def log(self, metrics: Mapping[str, Any], *, step: int, **labels: Any) -> None:
        """Record metrics of global step `step`; `labels` (stage=...) are written beside them."""
        self._record({**labels, **metrics}, step)
        for tracker in self._trackers:
            tracker.log(metrics, step)

    def _record(self, values: Mapping[str, Any], step: int) -> None:
        if self._file is None:
            return
        failed_before = self._file.failures
        record = {"step": step, "time": round(self._wall(), 3), **values}
        if not self._file.write(record) and failed_before == 0:
            self.say(f"warning: cannot write {self._file.path} (is the disk full?); metrics wait in memory")

    def image(self, name: str, path: str | Path, *, step: int, caption: str = "") -> None:
        """Note a picture that was written to `path`, and hand it to the trackers."""
        self._record({"image/" + name: str(path)}, step)
        for tracker in self._trackers:
            tracker.image(name, Path(path), step, caption)

    def rewind(self, global_step: int) -> None:
        """Forget steps after `global_step`: a run resumed there takes them again, and each is recorded once."""
        if self._file is not None:
            self._file.rewind(lambda record: record.get("step", 0) <= global_step)

    def close(self) -> None:
        """Finish the trackers and close the file."""
        for tracker in self._trackers:
            tracker.close()
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Progress:
    """Progress of a long phase: a bar on a terminal, a line with ETA every few seconds elsewhere.

    Use it as a context manager; call it with the number done so far (`progress(done)`), or `advance()`.

    Args:
        title: the phase, as the start of each line.
        total: how many there are; None when unknown.
        unit: what is counted, for the rate.
        stream: where to write.
        clock: seconds, monotonic.
        every: seconds between lines where there is no terminal.
    """

    def __init__(
        self,
        title: str,
        total: int | None,
        *,
        unit: str = "",
        stream: TextIO | None = None,
        clock: Clock = time.monotonic,
        every: float = 5.0,
    ) -> None:
        self.title, self.total, self.done = title, total, 0
        self._unit = f" {unit}" if unit else ""
        self._stream = stream if stream is not None else sys.stderr
        self._clock = clock
        self._every = every
        self._start = self._last = clock()
        self._note = ""
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Self:
        self._start = self._last = self._clock()
        if self._stream.isatty():
            self._open_bar()
        return self

    def _open_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = [
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TextColumn("eta"),
            TimeRemainingColumn(),
        ]
        self._bar = Bar(*columns, console=Console(file=self._stream), get_time=self._clock)
        self._bar.start()
        self._task = self._bar.add_task(self.title, total=self.total, note="")

    def __call__(self, done: int, note: str = "") -> None:
        """Say that `done` are finished; `note` is a short addition such as `loss 0.12`."""
        self.done, self._note = done, note
        if self._bar is not None:
            self._bar.update(self._task, completed=done, note=note)
            return
        now = self._clock()
        if now - self._last >= self._every:
            self._last = now
            print(self.line(now), file=self._stream, flush=True)

    def advance(self, count: int = 1, note: str = "") -> None:
        """Say that `count` more are finished."""
        self(self.done + count, note)

    def line(self, now: float) -> str:
        """`encode frames 120/300 40% | 12.3 frames/s loss 0.1 | eta 15s`."""
        elapsed = max(now - self._start, 1e-9)
        rate = self.done / elapsed
        speed = (format_count(rate) if rate >= 10 else f"{rate:.2g}") + self._unit
        note = f" {self._note}" if self._note else ""
        if not self.total:
            return f"{self.title} {self.done} | {speed}/s{note} | {format_duration(elapsed)}"
        eta = (self.total - self.done) / rate if rate else math.inf
        return (
            f"{self.title} {self.done}/{self.total} {100 * self.done // self.total}%"
            f" | {speed}/s{note} | eta {format_duration(eta)}"
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            return
        outcome = "done" if kind is None else "stopped"
        total = f"/{self.total}" if self.total else ""
        elapsed = format_duration(self._clock() - self._start)
        print(f"{self.title} {self.done}{total} {outcome} in {elapsed}", file=self._stream, flush=True)
