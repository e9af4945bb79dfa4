"""The command `lwm plan`."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lwm.options import OverridesArgument

if TYPE_CHECKING:
    from rich.console import Console

    from lwm.config import RunConfig, StageConfig
    from lwm.plan import StagePlan
    from lwm.topology import Topology


def plan(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file, or the name of a shipped one.")],
    topology: Annotated[
        str, typer.Option(metavar="NAME", help="A slice: v5p:8x8x16 (chips), v5p-2048 (Google's name), or cpu:8.")
    ],
    overrides: OverridesArgument = None,
    stage: Annotated[str | None, typer.Option(metavar="NAME", help="Only this stage [default: all].")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")] = False,
    suggest: Annotated[
        bool, typer.Option("--suggest", help="Search meshes and strategies; compile and rank the best few.")
    ] = False,
    candidates: Annotated[
        int | None, typer.Option(min=1, help="With --suggest: how many are compiled [default: 3].")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw memory and predicted time into this .png, .svg or .pdf.")
    ] = None,
    keep: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the text of each compiled program here.")
    ] = None,
) -> None:
    """Compile CONFIG's train steps for accelerators that are not here, and report memory, transfers and time."""
    from lwm.config import load_config
    from lwm.topology import parse

    _check_options(suggest, candidates, plot, keep)
    run, where = load_config(config, overrides or ()), parse(topology)
    # Nothing is computed here: keep a TPU or GPU that another job is using out of it.
    os.environ["JAX_PLATFORMS"] = "cpu"
    from lwm import plan as planning
    from lwm import plan_report

    stages = run.stages if stage is None else (run.stage(stage),)
    if suggest:
        _suggest(run, stages, where, candidates or 3, as_json)
        return
    plans = _plan_all(run, stages, where, keep, plot)
    if as_json:
        print(planning.to_json(run, plans))
    else:
        plan_report.print_report(run, plans, _console())
    if plot is not None:
        plan_report.draw(plans, plot)
        print(f"plot: {plot}", file=sys.stderr if as_json else sys.stdout)
    failed = [each for each in plans if not each.fits]
    if failed:
        raise ValueError("; ".join(planning.verdict(each) for each in failed))


def _check_options(suggest: bool, candidates: int | None, plot: Path | None, keep: Path | None) -> None:
    """ValueError for what would be ignored, or fail after minutes of compiling."""
    from lwm.plan_report import PICTURES

    if plot is not None and plot.suffix not in PICTURES:
        raise ValueError(f"--plot {plot} is not a picture; give a file that ends in {', '.join(PICTURES)}")
    if suggest and (plot is not None or keep is not None):
        raise ValueError("--suggest prints a ranking and takes no --plot or --keep; plan the stage that you choose")
    if candidates is not None and not suggest:
        raise ValueError("--candidates says how many --suggest compiles; give --suggest, too")


def _console() -> "Console":
    from rich.console import Console

    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160)


def _plan_all(
    run: "RunConfig", stages: "Sequence[StageConfig]", where: "Topology", keep: Path | None, plot: Path | None
) -> "list[StagePlan]":
    from lwm import plan as planning
    from lwm.config import resolve_stage
    from lwm.plan_compile import compile_elsewhere
    from lwm.telemetry import Progress

    for each in stages:  # what cannot be divided is refused before anything is compiled
        resolve_stage(run, each, where.num_devices)
    for folder in (keep, None if plot is None else plot.parent):
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    plans = []
    with Progress(f"compile for {where.name}", len(stages), unit="stages") as progress:
        for number, each in enumerate(stages):
            progress(number, each.name)
            text = None if keep is None else keep / f"{run.name}-{each.name}-{where.kind}.txt"
            plans.append(
                planning.plan_stage(
                    run, each, where, lambda *given, text=text: compile_elsewhere(*given, keep_text=text)
                )
            )
        progress(len(stages))
    return plans


def _suggest(
    run: "RunConfig", stages: "Sequence[StageConfig]", where: "Topology", candidates: int, as_json: bool
) -> None:
    from lwm import suggest as searching
    from lwm.telemetry import Progress

    with Progress(f"search for {where.name}", len(stages) * candidates, unit="compilations") as progress:
        found = [searching.search(run, each, where, candidates, progress=progress.advance) for each in stages]
    if as_json:
        print(searching.to_json(run, found))
    else:
        searching.print_ranking(found, _console())
    for ranking in found:
        ranking.check()
