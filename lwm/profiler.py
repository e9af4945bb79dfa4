"""A window of steps recorded by jax's profiler: chosen in the configuration, or by touching a file in a live run."""

from collections.abc import Callable
from pathlib import Path

import jax

from lwm.config import TelemetryConfig

TRIGGER_FILE, PROFILE_DIR = "profile", "profiles"


class Profiler:
    """Told before each step; starts and stops the trace.

    `touch RUN_DIR/profile` records the next `profile_steps` steps, again and again; the file is removed when the trace
    starts. `say` is told where the trace is.
    """

    def __init__(self, run_dir: Path, config: TelemetryConfig, say: Callable[[str], None], active: bool = True) -> None:
        self._trigger, self._out = run_dir / TRIGGER_FILE, run_dir / PROFILE_DIR
        self._config, self._say, self._active = config, say, active
        self._stop_at: int | None = None

    def before_step(self, step: int) -> None:
        """`step` of the whole run is about to be dispatched."""
        if not self._active:
            return
        if self._stop_at is not None:
            if step >= self._stop_at:
                self.close()
            return
        asked = self._trigger.exists()
        if not asked and step != self._config.profile_from:
            return
        self._trigger.unlink(missing_ok=True)
        self._stop_at = step + self._config.profile_steps
        jax.profiler.start_trace(str(self._out / f"step-{step:08d}"))
        self._say(f"profiling {self._config.profile_steps} steps from step {step}")

    def close(self) -> None:
        """End a trace that is being recorded."""
        if self._stop_at is not None:
            self._stop_at = None
            jax.profiler.stop_trace()
            self._say(f"profile written to {self._out} (xprof or tensorboard --logdir opens it)")
