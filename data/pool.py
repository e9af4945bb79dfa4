"""Work spread over processes: results in order, and a task that takes its process down takes nothing else along.

Processes are spawned, never forked: neither PyAV nor decord survives a fork, nor does a parent that runs jax.
"""

from __future__ import annotations

import itertools
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")

_TASKS_PER_WORKER = 2
_function: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class Crashed(Generic[Task]):
    """In place of a result: this task ended the process that worked on it, twice."""

    task: Task


def ordered_map(
    function: Callable[[Task], Result], tasks: Iterable[Task], workers: int
) -> Iterator[Result | Crashed[Task]]:
    """`function` of each task, in order; `workers` processes work ahead, two tasks each at most. 0: in this process.

    function, tasks and results must be picklable. What `function` raises is raised here. A task whose process dies (a
    decoder's bug, out of memory) is tried once more alone, and is `Crashed` if it dies again.
    """
    if workers < 0:
        raise ValueError(f"workers is {workers}; it must be 0 (this process) or more")
    if workers == 0:
        yield from map(function, tasks)
        return
    waiting: deque[tuple[Task, Future[Result]]] = deque()
    remaining = iter(tasks)
    pool = _Pool(function, workers)
    try:
        while True:
            for task in itertools.islice(remaining, _TASKS_PER_WORKER * workers - len(waiting)):
                waiting.append((task, pool.submit(task)))
            if not waiting:
                return
            task, future = waiting.popleft()
            try:
                result: Result | Crashed[Task] = future.result()
            except BrokenProcessPool:
                # All that waited is lost, and any of it may be to blame: each is done again with nothing beside it.
                pool.renew()
                lost = [task, *(each for each, _ in waiting)]
                waiting.clear()
                for each in lost:
                    yield pool.alone(each)
                continue
            yield result
    finally:
        pool.close()


class _Pool:
    def __init__(self, function: Callable[[Any], Any], workers: int) -> None:
        self._function, self._workers = function, workers
        self._executor = self._new()

    def _new(self) -> ProcessPoolExecutor:
        spawn = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(self._workers, spawn, initializer=_begin, initargs=(self._function,))

    def submit(self, task: Any) -> Future[Any]:
        try:
            return self._executor.submit(_call, task)
        except BrokenProcessPool as error:
            broken: Future[Any] = Future()
            broken.set_exception(error)
            return broken

    def alone(self, task: Any) -> Any:
        try:
            return self.submit(task).result()
        except BrokenProcessPool:
            self.renew()
            return Crashed(task)

    def renew(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._executor = self._new()

    def close(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)


def _begin(function: Callable[[Any], Any]) -> None:
    """First thing in a worker: the function comes once and not with every task."""
    global _function
    _function = function
    # An interrupt reaches the whole group of processes; the parent alone answers it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _call(task: Any) -> Any:
    assert _function is not None
    return _function(task)
