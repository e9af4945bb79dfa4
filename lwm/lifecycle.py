"""How a run begins, is interrupted and ends: exit codes, stop signals, one job per run directory.

Nothing here relies on cleanup code running: a killed process leaves a lock the kernel has already released.
"""

import faulthandler
import fcntl
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import ClassVar, Self

EXIT_DONE = 0
EXIT_BAD_INPUT = 2
EXIT_PREEMPTED = 42
EXIT_HANG = 43
EXIT_NON_FINITE = 44
EXIT_INTERRUPTED = 130


class RunStopped(Exception):
    """A run that ended before it was done; launchers decide by `exit_code` whether to start it again."""

    exit_code: ClassVar[int]


class Preempted(RunStopped):
    """Stopped by a signal after saving: starting the same command again continues."""

    exit_code = EXIT_PREEMPTED


class Hang(RunStopped):
    """No step completed for too long."""

    exit_code = EXIT_HANG


class NonFiniteLoss(RunStopped):
    """Too many steps in a row had a loss or gradient that is not finite."""

    exit_code = EXIT_NON_FINITE


_Handler = Callable[[int, FrameType | None], object] | int | signal.Handlers | None


class StopSignal:
    """Turns SIGTERM and SIGINT into a flag that the training loop reads between steps.

    The first signal sets the flag, so that the loop can save and raise `Preempted`. Later SIGTERMs change nothing: the
    save they would interrupt is the one they ask for. A second SIGINT (Ctrl-C pressed twice) raises KeyboardInterrupt.
    Enter it only once there is something to save: until then the default action, a prompt exit, is the right one.
    Signals reach Python's main thread only; in another thread this is a flag nobody but `request` sets.
    """

    SIGNALS: ClassVar[tuple[signal.Signals, ...]] = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self._event = threading.Event()
        self._name = ""
        self._previous: dict[signal.Signals, _Handler] = {}

    @property
    def requested(self) -> bool:
        """Whether the run was asked to stop."""
        return self._event.is_set()

    @property
    def reason(self) -> str:
        """Name of the signal that asked (`SIGTERM`), or what `request` was given; empty before that."""
        return self._name

    def request(self, reason: str) -> None:
        """Ask the run to stop, as a signal would."""
        if not self._event.is_set():
            self._name = reason
            self._event.set()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT and self._name == "SIGINT":
            raise KeyboardInterrupt
        self.request(signal.Signals(number).name)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in self.SIGNALS:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            # None is a handler that was not installed from Python; it cannot be put back, the default is nearest.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()


class Watchdog:
    """Ends the process when nothing was completed for `seconds` (None: never): stacks of all threads, exit code 43.

    What counts is what came back from the devices (`beat`), not what was sent to them: a hang in a collective leaves
    the main thread waiting for ever, and a peer that stopped does the same to everybody.

    Args:
        seconds: between two beats, at most.
        stacks: file that gets the stacks, beside standard error.
        leave: how the process ends; it must not wait for anything.
    """

    def __init__(self, seconds: float | None, stacks: Path, leave: Callable[[int], object] = os._exit) -> None:
        self._seconds, self._stacks, self._leave = seconds, stacks, leave
        self._done = threading.Event()
        self._last, self._what = time.monotonic(), "the start"
        self._thread: threading.Thread | None = None

    def beat(self, what: str) -> None:
        """Something was completed; `what` is named if nothing follows."""
        self._last, self._what = time.monotonic(), what

    def __enter__(self) -> Self:
        if self._seconds is not None:
            self._done.clear()
            self._last = time.monotonic()
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def _watch(self) -> None:
        assert self._seconds is not None
        while not self._done.wait(max(0.01, self._last + self._seconds - time.monotonic())):
            if time.monotonic() - self._last < self._seconds:
                continue
            text = f"lwm: nothing was completed for {self._seconds:g} s after {self._what}; the stacks of all threads:"
            print(text, file=sys.stderr, flush=True)
            faulthandler.dump_traceback(2)
            try:
                with open(self._stacks, "w") as file:
                    print(text, file=file, flush=True)
                    faulthandler.dump_traceback(file)
            finally:
                self._leave(EXIT_HANG)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None


class RunLock:
    """At most one job in a run directory.

    The lock is the kernel's (`flock`), so it ends with the process however that ends; the file's text only serves the
    message for the second job. In a run of several processes the first one holds it for all.
    """

    FILE: ClassVar[str] = "lock"

    def __init__(self, run_dir: str | Path) -> None:
        self._path = Path(run_dir) / self.FILE
        self._descriptor: int | None = None

    def acquire(self) -> Self:
        """Take the lock, creating the directory.

        Raises:
            ValueError: another job holds it; names directory, process and host.
            OSError: the directory cannot be written.
        """
        assert self._descriptor is None, "the lock is already held"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 200).decode(errors="replace").strip() or "another process"
            os.close(descriptor)
            raise ValueError(
                f"run directory {self._path.parent} is in use by {holder};"
                " wait for it, stop it, or set another output_dir"
            ) from None
        except OSError:
            os.close(descriptor)
            raise
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        self._descriptor = descriptor
        return self

    def release(self) -> None:
        """Give the lock back; the file stays, because removing it would race with a job that is opening it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()
