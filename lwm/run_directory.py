"""A run directory's own copy of its configuration: what the checkpoints in it are of."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from lwm.checkpoint import find_checkpoint
from lwm.config import ConfigError, RunConfig, load_config

RUN_FILE = "run.json"


def save_run(config: RunConfig) -> Path:
    """Write the configuration into its run directory, so that the checkpoints there explain themselves."""
    path = Path(config.output_dir) / RUN_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(config.model_dump(mode="json"), indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)
    return path


def find_run(checkpoint_dir: str | Path, config: str | None = None, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration of a checkpoint: `config` (a file or a shipped name), else the one saved in its run directory.

    ValueError when there is neither.
    """
    if config is not None:
        return load_config(config, overrides)
    step = find_checkpoint(checkpoint_dir)
    for directory in (step, step.parent, step.parent.parent):
        if (directory / RUN_FILE).is_file():
            return load_config(directory / RUN_FILE, [*_moved(directory), *overrides])
    raise ConfigError(
        f"{checkpoint_dir} has no {RUN_FILE} that says which tokenizers its model reads; give the configuration that "
        "it was trained with as --config CONFIG"
    )


def _moved(directory: Path) -> list[str]:
    """Overrides that find tokenizers whose paths were relative to where the run was started, when that is elsewhere."""
    values = json.loads((directory / RUN_FILE).read_text(encoding="utf-8"))
    output = Path(values.get("output_dir") or "")
    if output.is_absolute() or directory.parts[-len(output.parts) :] != output.parts:
        return []
    start = Path(*directory.parts[: -len(output.parts)])
    found = []
    for name, given in (values.get("tokenizers") or {}).items():
        if given and not Path(given).exists() and (start / given).exists():
            found.append(f"tokenizers.{name}={start / given}")
    return found
