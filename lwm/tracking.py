"""Trackers. Weights & Biases is behind a queue: training hands over metrics and never waits, whatever the service does.

Everything that touches the service (import, login, upload) happens in one background thread. Without a key, or when the
service does not answer, the run is kept offline in the run directory, for `wandb sync` later.
"""

import netrc
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TextIO
from urllib.parse import urlparse

from lwm.config import RunConfig, TelemetryConfig, fingerprint
from lwm.provenance import git_revision
from lwm.telemetry import Clock, Telemetry

ID_FILE = "wandb_id"
INIT_SECONDS = 20
FINISH_SECONDS = 30


class Run(Protocol):
    """The part of a wandb run that is used here."""

    def log(self, data: dict[str, Any]) -> None: ...

    def finish(self) -> None: ...


# start() -> (run, picture): the running tracker, and how it wraps a picture's path and caption.
Picture = Callable[[str, str], Any]
Start = Callable[[], tuple[Run, Picture]]


class WandbTracker:
    """Feeds one wandb run from a bounded queue.

    Args:
        start: opens the run, in the background thread; may take as long as it likes, or raise.
        say: for one-line notices to people.
        capacity: records that may wait; beyond it new ones are dropped and counted (metrics.jsonl has them all).
        finish_seconds: how long `close` waits for the last records.
    """

    def __init__(
        self,
        start: Start,
        say: Callable[[str], None],
        *,
        capacity: int = 10_000,
        finish_seconds: float = FINISH_SECONDS,
    ) -> None:
        self._say = say
        self._finish_seconds = finish_seconds
        self._queue: queue.Queue[Callable[[Run, Picture], None] | None] = queue.Queue(capacity)
        self._broken = threading.Event()
        self.dropped = 0
        self._thread = threading.Thread(target=self._work, args=(start,), name="wandb", daemon=True)
        self._thread.start()

    def _work(self, start: Start) -> None:
        try:
            run, picture = start()
            while (job := self._queue.get()) is not None:
                job(run, picture)
            run.finish()
        except Exception as error:  # whatever a tracker raises, training goes on; the reason is said once
            if self._broken.is_set():
                return  # already left behind: an error while the process ends is no news
            self._broken.set()
            reason = " ".join(str(error).split()) or type(error).__name__
            self._say(f"wandb: stopped ({reason}); metrics.jsonl goes on")

    def _put(self, job: Callable[[Run, Picture], None]) -> None:
        if self._broken.is_set():
            return
        try:
            self._queue.put_nowait(job)
        except queue.Full:
            self.dropped += 1

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Hand over metrics of a global step."""
        # "step" is a metric of its own: wandb's internal step must only grow, and a resumed run goes back.
        data = {**metrics, "step": step}
        self._put(lambda run, _: run.log(data))

    def image(self, name: str, path: Path, step: int, caption: str) -> None:
        """Hand over a picture file."""
        self._put(lambda run, picture: run.log({name: picture(str(path), caption), "step": step}))

    def close(self) -> None:
        """Send what is waiting, for a bounded time."""
        if not self._broken.is_set():
            deadline = time.monotonic() + self._finish_seconds
            try:
                self._queue.put(None, timeout=self._finish_seconds)
                self._thread.join(max(0.0, deadline - time.monotonic()))
            except queue.Full:
                pass
            if self._thread.is_alive():
                self._broken.set()
                self._say(
                    f"wandb: not finished after {self._finish_seconds:g} s; left behind, metrics.jsonl is complete"
                )
        if self.dropped:
            self._say(f"wandb: {self.dropped} records were dropped because it fell behind; metrics.jsonl has them")


class TensorBoardTracker:
    """Writes TensorBoard files to `directory`; tensorboardX queues them and writes in a thread of its own.

    Raises ValueError when tensorboardX is not installed.
    """

    def __init__(self, directory: Path, say: Callable[[str], None]) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise ValueError(
                "telemetry.tensorboard is true, but tensorboardX is not installed; pip install 'lwm[tensorboard]', or "
                "set it to false"
            ) from None
        self._say, self._broken = say, False
        self._writer = SummaryWriter(logdir=str(directory))

    def _try(self, write: Callable[[], object]) -> None:
        if self._broken:
            return
        try:
            write()
        except Exception as error:  # whatever a tracker raises, training goes on; the reason is said once
            self._broken = True
            self._say(f"tensorboard: stopped ({' '.join(str(error).split())}); metrics.jsonl goes on")

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Write the numbers among the metrics of a global step."""
        numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        for name, value in numbers.items():
            self._try(partial(self._writer.add_scalar, name, value, step))

    def image(self, name: str, path: Path, step: int, caption: str) -> None:
        """Write a picture."""

        def write() -> None:
            import numpy as np
            from PIL import Image

            with Image.open(path) as picture:
                self._writer.add_image(name, np.asarray(picture.convert("RGB")), step, dataformats="HWC")

        self._try(write)

    def close(self) -> None:
        """Write what is waiting."""
        self._try(self._writer.close)


def run_id(run_dir: str | Path) -> str:
    """The run's id, made at the first start and kept in the run directory across restarts."""
    path = Path(run_dir) / ID_FILE
    if path.exists() and (kept := path.read_text().strip()):
        return kept
    fresh = secrets.token_hex(4)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(fresh + "\n")
    return fresh


def has_key(environ: Mapping[str, str]) -> bool:
    """Whether wandb could log in: a key in the environment, or an entry for its host in ~/.netrc."""
    if environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    file = environ.get("NETRC") or os.path.join(environ.get("HOME", ""), ".netrc")
    try:
        return netrc.netrc(file).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def wandb_start(
    config: RunConfig, run_dir: Path, say: Callable[[str], None], environ: Mapping[str, str] = os.environ
) -> Start:
    """What opens the real wandb run for `config`: online with a key and an answering service, else offline."""

    def start() -> tuple[Run, Picture]:
        import wandb

        telemetry = config.telemetry
        online = telemetry.wandb in ("auto", "online") and has_key(environ)
        if telemetry.wandb == "online" and not online:
            say("wandb: no API key (set WANDB_API_KEY or run `wandb login`); keeping the run offline")
        modes = ("online", "offline") if online else ("offline",)
        for mode in modes:
            try:
                run = wandb.init(**_init_arguments(config, telemetry, run_dir, mode), settings=_settings(wandb))
            except Exception as error:
                if mode == "offline":
                    raise
                reason = " ".join(str(error).split())[:200]
                say(f"wandb: cannot reach the service ({reason}); keeping the run offline")
                wandb.teardown()
                continue
            run.define_metric("step")
            run.define_metric("*", step_metric="step")
            where = run.url if mode == "online" else f"offline, `wandb sync {Path(run.dir).parent}` uploads it"
            say(f"wandb: run {run.id} ({where})")
            return run, lambda path, caption: wandb.Image(path, caption=caption or None)
        raise AssertionError("offline either starts or raises")

    return start


def _init_arguments(config: RunConfig, telemetry: TelemetryConfig, run_dir: Path, mode: str) -> dict[str, Any]:
    return {
        "project": telemetry.wandb_project,
        "entity": telemetry.wandb_entity,
        "name": config.name,
        "id": run_id(run_dir),
        "resume": "allow" if mode == "online" else None,
        "mode": mode,
        "dir": str(run_dir),
        "config": {**config.model_dump(mode="json"), "fingerprint": fingerprint(config), "git": git_revision()},
    }


def _settings(wandb: Any) -> Any:
    wanted = {
        "init_timeout": INIT_SECONDS,
        "finish_timeout": FINISH_SECONDS,
        "silent": True,
        "console": "off",
    }
    known = wandb.Settings.model_fields
    return wandb.Settings(**{name: value for name, value in wanted.items() if name in known})


def open_telemetry(
    config: RunConfig, *, console: TextIO | None = None, wall: Clock = time.time, active: bool = True
) -> Telemetry:
    """The run's telemetry as its configuration asks for it.

    Args:
        config: the run; its output_dir gets metrics.jsonl.
        console: stream for people, standard output by default.
        wall: Unix time.
        active: False in every process but the first.
    """
    run_dir = Path(config.output_dir)
    telemetry = Telemetry(run_dir, log_every=config.telemetry.log_every, console=console, wall=wall, active=active)
    if active and config.telemetry.wandb != "off":
        telemetry.track(WandbTracker(wandb_start(config, run_dir, telemetry.say), telemetry.say))
    if active and config.telemetry.tensorboard:
        telemetry.track(TensorBoardTracker(run_dir / "tensorboard", telemetry.say))
    return telemetry
