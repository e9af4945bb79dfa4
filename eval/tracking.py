"""An evaluation's numbers and heatmap in Weights & Biases, as a run of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from eval.plots import Picture
from lwm.tracking import Picture as Wrap
from lwm.tracking import Run, Start, WandbTracker, has_key, run_id


def metrics(summary: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of `scoring.summarize`, flat: name -> value, those that were measured."""
    named = ("accuracy", "effective_context_length", "distractor_accuracy", "control_accuracy", "digit_accuracy")
    flat = {f"eval/{name}": summary[name] for name in named}
    flat |= {f"eval/accuracy_{length}": value for length, value in summary["accuracy_by_length"].items()}
    flat |= {f"eval/{name}_score": family["score"] for name, family in summary["families"].items()}
    return {name: float(value) for name, value in flat.items() if value is not None}


def log(out: Path, summary: Mapping[str, Any], picture: Picture, start: Start, say: Callable[[str], None]) -> None:
    """Hand over a summary and its heatmap, and wait for a bounded time until they are sent or kept offline in `out`."""
    tracker = WandbTracker(start, say)
    tracker.log(metrics(summary), step=0)
    tracker.image("eval/heatmap", picture.path, step=0, caption=picture.caption)
    tracker.close()


def wandb_start(project: str, name: str, out: Path, summary: Mapping[str, Any]) -> Start:
    """Opens the real run: online where there is a key, else offline in `out`, for `wandb sync`."""

    def start() -> tuple[Run, Wrap]:
        import wandb

        online = has_key(os.environ)
        run = wandb.init(
            project=project,
            name=name,
            id=run_id(out),
            dir=str(out),
            mode="online" if online else "offline",
            resume="allow" if online else None,
            config={"model": summary["model"], "num_cases": summary["num_cases"]},
        )
        return run, lambda path, caption: wandb.Image(path, caption=caption or None)

    return start
