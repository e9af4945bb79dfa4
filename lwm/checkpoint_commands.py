"""The commands `lwm checkpoint ...`: what a run directory holds, whether it is whole, and going back to a step."""

import json
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from lwm.checkpoint import Checkpoints

app = typer.Typer(help="List, verify, show and rewind checkpoints.", no_args_is_help=True, rich_markup_mode=None)

RunArgument = Annotated[Path, typer.Argument(metavar="DIR", help="A run directory, or its checkpoints directory.")]


def _open(directory: Path) -> "Checkpoints":
    from lwm.checkpoint import Checkpoints

    inner = directory / "checkpoints"
    found = Checkpoints(inner if inner.is_dir() else directory)
    if found.newest() is None:
        raise ValueError(f"there is no checkpoint in {directory}; give a run directory or its checkpoints directory")
    return found


@app.command("list")
def list_steps(directory: RunArgument) -> None:
    """One line a checkpoint, oldest first, and what was set aside."""
    from rich.console import Console
    from rich.table import Table

    from lwm.checkpoint import DAMAGED, REWOUND, read_manifest
    from lwm.telemetry import format_count

    found = _open(directory)
    table = Table()
    for column in ("step", "stage", "step of stage", "tokens", "size", "saved", "mesh", "git"):
        table.add_column(column)
    for step in found.steps():
        path = found.path(step)
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        try:
            saved = read_manifest(path)
        except ValueError as error:
            table.add_row(str(step), f"cannot be read: {error}")
            continue
        table.add_row(
            str(step),
            saved.stage,
            str(saved.stage_step),
            format_count(saved.tokens),
            f"{format_count(size)}B",
            datetime.fromtimestamp(saved.unix_time).isoformat(" ", "seconds"),
            " ".join(f"{axis}={count}" for axis, count in saved.mesh.items()) or "one device",
            saved.git[:12],
        )
    Console(width=160, highlight=False).print(table)
    for name in (*found.set_aside_ones(DAMAGED), *found.set_aside_ones(REWOUND)):
        print(f"set aside: {found.directory / name}")


@app.command()
def verify(
    directory: RunArgument,
    step: Annotated[int | None, typer.Option(min=0, help="Only this step [default: all of them].")] = None,
) -> None:
    """Read checkpoints whole and compare every array with its digest; exit code 2 when one is damaged."""
    from lwm.checkpoint import DamagedCheckpoint
    from lwm.telemetry import Progress

    found = _open(directory)
    steps = found.steps() if step is None else [step]
    damaged = []
    with Progress("verify", len(steps), unit="checkpoints") as progress:
        for each in steps:
            try:
                print(f"step {each}: {found.verify(each)} arrays are as they were saved")
            except DamagedCheckpoint as error:
                damaged.append(each)
                print(f"step {each}: {error}")
            progress.advance()
    if damaged:
        raise ValueError(f"{len(damaged)} of {len(steps)} checkpoints are damaged: {', '.join(map(str, damaged))}")


@app.command()
def show(
    directory: RunArgument,
    step: Annotated[int | None, typer.Option(min=0, help="Which step [default: the last].")] = None,
    digests: Annotated[bool, typer.Option("--digests", help="Also every array's shape, dtype and digest.")] = False,
) -> None:
    """Print a checkpoint's manifest as JSON."""
    from lwm.checkpoint import find_checkpoint, read_manifest

    found = _open(directory)
    path = found.directory if step is None else found.path(step)
    values = asdict(read_manifest(find_checkpoint(path)))
    if not digests:
        for name in ("leaves", "optimizer_leaves", "digests"):
            values[name] = f"{len(values[name])} arrays (--digests lists them)"
    print(json.dumps(values, indent=1))


@app.command()
def rewind(
    directory: RunArgument,
    step: Annotated[int, typer.Option(min=0, help="The step that `lwm train` is to continue from.")],
) -> None:
    """Set the checkpoints after a step aside, so that training continues from there; nothing is deleted."""
    from lwm.lifecycle import RunLock

    found = _open(directory)
    with RunLock(found.directory.parent if found.directory.name == "checkpoints" else found.directory):
        moved = found.rewind(step)
    for path in moved:
        print(f"set aside: {path}")
    print(f"the last checkpoint is step {step}")
