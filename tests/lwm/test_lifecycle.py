"""Stop signals and the run lock, with real signals and real processes."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lwm import lifecycle
from lwm.lifecycle import Hang, NonFiniteLoss, Preempted, RunLock, RunStopped, StopSignal

ROOT = Path(__file__).parents[2]


def start(program: str, *arguments: str) -> subprocess.Popen[str]:
    """A Python process, returned once it has printed `ready`."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line == "ready\n", (line, process.communicate()[1])
    return process


def test_exit_codes() -> None:
    assert [each.exit_code for each in (Preempted, Hang, NonFiniteLoss)] == [42, 43, 44]
    assert all(issubclass(each, RunStopped) for each in (Preempted, Hang, NonFiniteLoss))
    assert not issubclass(RunStopped, ValueError | OSError)
    assert (lifecycle.EXIT_DONE, lifecycle.EXIT_BAD_INPUT, lifecycle.EXIT_INTERRUPTED) == (0, 2, 130)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_sets_the_flag_and_handlers_come_back(number: signal.Signals) -> None:
    before = {each: signal.getsignal(each) for each in StopSignal.SIGNALS}
    with StopSignal() as stop:
        assert not stop.requested
        signal.raise_signal(number)
        assert stop.requested
        assert stop.reason == number.name
    assert {each: signal.getsignal(each) for each in StopSignal.SIGNALS} == before


def test_a_second_sigterm_while_saving_changes_nothing() -> None:
    with StopSignal() as stop:
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert stop.reason == "SIGTERM"


def test_control_c_twice_gives_up_waiting(request: pytest.FixtureRequest) -> None:
    # A shell starts background jobs with SIGINT ignored, and this suite may be one.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))

    def twice() -> None:
        with StopSignal():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        twice()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_in_another_thread_it_is_a_plain_flag() -> None:
    seen = []

    def work() -> None:
        with StopSignal() as stop:
            stop.request("the test")
            stop.request("later")
            seen.append((stop.requested, stop.reason))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(True, "the test")]


LOOP = """
import sys, time
from lwm import lifecycle
with lifecycle.StopSignal() as stop:
    print("ready", flush=True)
    for step in range(10_000):
        time.sleep(0.005)
        if stop.requested:
            print("saved", flush=True)
            sys.exit(lifecycle.EXIT_PREEMPTED)
"""


def test_a_process_told_to_stop_saves_and_says_so_by_its_exit_code() -> None:
    process = start(LOOP)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=20)
    assert out == "saved\n"
    assert process.returncode == 42


HOLD = """
import sys, time
from lwm.lifecycle import RunLock
with RunLock(sys.argv[1]):
    print("ready", flush=True)
    time.sleep(60)
"""


def test_the_second_job_is_refused_until_the_first_is_gone_however_it_went(tmp_path: Path) -> None:
    process = start(HOLD, str(tmp_path / "run"))
    with pytest.raises(ValueError) as error:
        RunLock(tmp_path / "run").acquire()
    message = str(error.value)
    assert f"run directory {tmp_path / 'run'} is in use by process {process.pid} on {os.uname().nodename}" in message
    assert "set another output_dir" in message
    assert "\n" not in message
    process.kill()
    process.communicate(timeout=20)
    with RunLock(tmp_path / "run"):
        assert f"process {os.getpid()} on" in (tmp_path / "run" / "lock").read_text()


def test_the_lock_can_be_taken_again_and_is_exclusive_within_a_process(tmp_path: Path) -> None:
    with RunLock(tmp_path), pytest.raises(ValueError, match="is in use by process"):
        RunLock(tmp_path).acquire()
    with RunLock(tmp_path):
        pass
    lock = RunLock(tmp_path).acquire()
    lock.release()
    lock.release()
    with RunLock(tmp_path):
        pass
