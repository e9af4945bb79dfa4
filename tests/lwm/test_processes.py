"""Runs of several real processes that are signalled, stopped and killed: what they agree on and how they end.

Each process has some of eight simulated devices, and they talk over gloo. A process takes seconds to start, so the
scenarios are few and each of them is followed to its end.
"""

import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from lwm import trainer
from lwm.checkpoint import Checkpoints, Manifest
from lwm.cluster import sees_cluster
from lwm.config import RunConfig
from lwm.telemetry import read_metrics

pytestmark = pytest.mark.usefixtures("kept_programs")
Environs = Callable[[int], list[dict[str, str]]]
ROOT = Path(__file__).parents[2]
PATIENCE = 540


class Processes:
    """Starts the tiny run as one or more processes."""

    def __init__(self, corpus: Path, place: Path, environs: Environs) -> None:
        self.corpus, self.place, self.environs = corpus, place, environs

    def start(self, name: str, arguments: Sequence[Sequence[str]]) -> list[subprocess.Popen[str]]:
        """One process for each list of arguments, with 8 / their number devices each; output in NAME.N.log."""
        started = []
        for number, (each, variables) in enumerate(zip(arguments, self.environs(len(arguments)), strict=True)):
            command = [sys.executable, str(Path(__file__).with_name("run_worker.py"))]
            command += [str(self.corpus), str(self.place / name), *each]
            with open(self.log(name, number), "w") as log:
                started.append(subprocess.Popen(command, env=variables, stdout=log, stderr=log, text=True))
        return started

    def run(self, name: str, *arguments: Sequence[str]) -> list[int]:
        """Their exit codes."""
        started = self.start(name, arguments)
        try:
            return [process.wait(timeout=PATIENCE) for process in started]
        finally:
            for number, process in enumerate(started):
                process.kill()
                process.wait()
                print(f"--- process {number}", self.said(name, number)[-3000:], sep="\n")

    def log(self, name: str, number: int) -> Path:
        return self.place / f"{name}.{number}.log"

    def said(self, name: str, number: int = 0) -> str:
        return self.log(name, number).read_text()

    def last(self, name: str) -> Manifest:
        manifest = Checkpoints(self.place / name / "checkpoints").latest()
        assert manifest is not None
        return manifest


@pytest.fixture(scope="module")
def processes(tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory, environs: Environs) -> Processes:
    return Processes(tiny_corpus, tmp_path_factory.mktemp("processes"), environs)


def losses(run: Path) -> list[float]:
    records = [each for each in read_metrics(run / "metrics.jsonl") if "train/loss" in each]
    assert [each["step"] for each in records] == list(range(1, len(records) + 1))
    return [each["train/loss"] for each in records]


def config_of(worker: ModuleType, processes: Processes, name: str) -> RunConfig:
    return worker.override(worker.tiny_config(str(processes.corpus), str(processes.place / name)), [])


@pytest.fixture(scope="module")
def alone(kept_programs: None, worker: ModuleType, processes: Processes) -> list[float]:
    """The losses of one process with eight devices that nobody disturbs."""
    trainer.train(config_of(worker, processes, "alone"))
    return losses(processes.place / "alone")


@pytest.mark.usefixtures("ordered_collectives")
def test_two_processes_lose_nothing_to_signals_and_four_go_on(
    worker: ModuleType, processes: Processes, alone: list[float]
) -> None:
    """SIGTERM to one of two, SIGKILL of one of two in the next stage, then two processes to the end.

    They end bitwise where two undisturbed ones end. From the middle, four processes and one go on to the same losses,
    which are those of one process.
    """
    assert processes.run("straight", [], []) == [0, 0]
    straight = losses(processes.place / "straight")
    assert straight == pytest.approx(alone, rel=1e-5)

    assert processes.run("run", [], ["--at", "3:term"]) == [42, 42]
    stopped = processes.last("run")
    assert 3 <= stopped.stage_step <= 6
    for number in (0, 1):
        assert f"SIGTERM: saved after step {stopped.stage_step} of stage short" in processes.said("run", number)
    assert (stopped.num_processes, stopped.stage) == (2, "short")
    assert losses(processes.place / "run") == straight[: stopped.step]
    shutil.copytree(processes.place / "run", processes.place / "moved")

    codes = processes.run("run", [], ["--at", "9:kill"])
    assert codes[1] == -signal.SIGKILL
    assert codes[0] not in (0, 42), "the survivor must not take this for an end"
    assert 6 <= processes.last("run").step <= 9
    shutil.copytree(processes.place / "run", processes.place / "four")

    assert processes.run("run", [], []) == [0, 0]
    assert losses(processes.place / "run") == straight
    end, straight_end = processes.last("run"), processes.last("straight")
    assert end.step == straight_end.step == 12
    assert end.digests == straight_end.digests
    assert (end.tokens, end.skipped, end.typical) == (straight_end.tokens, straight_end.skipped, straight_end.typical)

    assert processes.run("four", [], [], [], []) == [0, 0, 0, 0]
    assert processes.last("four").num_processes == 4
    assert losses(processes.place / "four") == pytest.approx(alone, rel=1e-5)

    trainer.train(config_of(worker, processes, "moved"))
    assert losses(processes.place / "moved") == pytest.approx(alone, rel=1e-5)
    Checkpoints(processes.place / "moved" / "checkpoints").verify(12)


@pytest.mark.usefixtures("ordered_collectives")
def test_a_stopped_peer_is_noticed_by_what_is_not_completed(processes: Processes) -> None:
    """One of two processes is frozen by SIGSTOP: the other says where all of its threads are, and exits with 43."""
    slow = "cluster.heartbeat_seconds=400", "cluster.hang_seconds=30.0", "checkpoint.every_steps=100"
    started = processes.start("frozen", [slow, [*slow, "--at", "3:stop"]])
    try:
        assert started[0].wait(timeout=PATIENCE) == 43
        assert started[1].poll() is None, "a frozen process does not end by itself"
    finally:
        for process in started:
            process.kill()
            process.wait()
    said = processes.said("frozen")
    assert "nothing was completed for 30 s after step 3 of stage short; the stacks of all threads" in said
    stacks = (processes.place / "frozen" / "hang-process0.txt").read_text()
    assert "_fit" in stacks
    assert "Thread 0x" in stacks


@pytest.mark.usefixtures("ordered_collectives")
def test_where_one_has_no_data_all_stop_at_the_same_step(processes: Processes) -> None:
    """One of two cannot read its corpus any more: what both have done is saved, and both say why."""
    assert processes.run("starved", [], ["--at", "2:break-data"]) == [2, 2]
    stopped = processes.last("starved")
    assert (stopped.stage, stopped.num_processes) == ("short", 2)
    assert 2 <= stopped.stage_step <= 5
    assert len(losses(processes.place / "starved")) == stopped.step
    for number in (0, 1):
        said = processes.said("starved", number)
        assert f"no batch after step {stopped.stage_step} of stage short, which is saved: " in said
        assert "Input/output error" in said


def test_hosts_that_were_started_differently_are_refused(processes: Processes) -> None:
    """Before anything is computed or written; every process says which host it is and what differs."""
    assert processes.run("differing", [], ["seed=1"]) == [2, 2]
    host = socket.gethostname()
    for number in (0, 1):
        said = processes.said("differing", number)
        assert f"the hosts do not agree with process 0 on {host}: process 1 on {host} has configuration" in said
    assert not (processes.place / "differing" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, False),
        ({"JAX_COORDINATOR_ADDRESS": "host:1"}, True),
        ({"SLURM_NTASKS": "8"}, False),  # a batch script, which starts no process by itself
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, True),
        ({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, False),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, True),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, False),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, True),
    ],
)
def test_clusters_are_seen(environ: dict[str, str], expected: bool) -> None:
    assert sees_cluster(environ) == expected


def test_sigterm_before_there_is_anything_to_save_ends_at_once(processes: Processes) -> None:
    """During imports, initialisation or compilation: no checkpoint directory, and a prompt end."""
    rng = np.random.default_rng(0)
    (process,) = processes.start("early", [[]])
    time.sleep(0.5 + rng.random())
    process.send_signal(signal.SIGTERM)
    begin = time.monotonic()
    assert process.wait(timeout=60) == -signal.SIGTERM
    assert time.monotonic() - begin < 30
    assert not (processes.place / "early" / "checkpoints").exists()


def test_a_few_kills_lose_nothing(tmp_path: Path) -> None:
    """The short version of scripts/kill_resume.py, on the first stage."""
    command = [sys.executable, str(ROOT / "scripts" / "kill_resume.py"), "--kills", "2", "--stage", "short", "--work"]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "every end is bitwise that of the undisturbed run" in done.stdout
