"""What a run's time went into, over all its restarts.

Seconds by name: `train` (steps whose update was made), `skipped` (steps without one), `data` (waiting for batches),
`compile`, `restore`, `save` (what saving held training up), `evaluate`, `lost` (steps that a kill undid) and `down`
(from the last sign of life to the next start).
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

NAMES = ("train", "skipped", "data", "compile", "restore", "save", "evaluate", "lost", "down")


class Goodput:
    """Adds up seconds; survives restarts in the manifest."""

    def __init__(self, seconds: Mapping[str, float] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = {name: float((seconds or {}).get(name, 0.0)) for name in NAMES}
        self._clock = clock

    def add(self, name: str, seconds: float) -> None:
        """Count `seconds` as `name`."""
        self.seconds[name] += max(0.0, seconds)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Count what happens inside as `name`."""
        begin = self._clock()
        try:
            yield
        finally:
            self.add(name, self._clock() - begin)

    def resumed(self, records: Sequence[Mapping[str, Any]], step: int, saved_at: float, now: float) -> None:
        """Count what lies between a checkpoint of global step `step`, saved at Unix time `saved_at`, and `now`.

        `records` are those of metrics.jsonl before it is rewound: steps after `step` are lost.
        """
        undone = [each for each in records if each.get("step", 0) > step and "perf/step_seconds" in each]
        self.add("lost", sum(float(each["perf/step_seconds"]) for each in undone))
        alive = max([saved_at, *(float(each.get("time", 0.0)) for each in records)])
        self.add("down", now - alive)

    def metrics(self) -> dict[str, float]:
        """For the records: the share of the time that made the model better, and the seconds of everything."""
        total = sum(self.seconds.values())
        share = {"goodput/productive_fraction": self.seconds["train"] / total} if total else {}
        return share | {f"goodput/{name}_seconds": round(seconds, 3) for name, seconds in self.seconds.items()}
