"""The program `lwm`: one function per command, heavy imports inside them so that `lwm --help` is quick.

Exit codes: 0 done, 2 bad input or configuration, 42 preempted and saved, 43 hang, 44 non-finite loss, 130 interrupted.
"""

import errno
import importlib.metadata
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, TextIO

import typer

from eval.commands import app as eval_app
from lwm import cluster, tpu_compiler
from lwm.checkpoint_commands import app as checkpoint_app
from lwm.commands import ask, generate
from lwm.data_commands import app as data_app
from lwm.lifecycle import EXIT_BAD_INPUT, EXIT_INTERRUPTED, RunStopped
from lwm.options import ConfigArgument, ConfigCommand, OverridesArgument
from lwm.plan_command import plan
from lwm.tokenizer_commands import app as tokenizer_app
from lwm.weight_commands import export_app, import_app

if TYPE_CHECKING:
    from lwm.config import RunConfig

DEBUG = "LWM_DEBUG"

app = typer.Typer(
    name="lwm",
    help="Train and evaluate multimodal world models with million-token context.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(data_app, name="data")
app.add_typer(tokenizer_app, name="tokenizer")
app.add_typer(eval_app, name="eval")
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(import_app, name="import")
app.add_typer(export_app, name="export")


def _version(wanted: bool) -> None:
    if wanted:
        try:
            print(f"lwm {importlib.metadata.version('lwm')}")
        except importlib.metadata.PackageNotFoundError:
            print("lwm, run from its sources without being installed")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help=f"Show tracebacks of errors (or set {DEBUG}=1).")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if debug:
        os.environ[DEBUG] = "1"


def simulate_devices(num_devices: int | None, environ: dict[str, str] | os._Environ[str] = os.environ) -> None:
    """Ask XLA for `num_devices` CPU devices; must come before jax starts its backends.

    The flags concern the CPU platform alone, so on an accelerator they change nothing. A count that is already set in
    XLA_FLAGS stays.
    """
    flags = environ.get("XLA_FLAGS", "")
    if num_devices is None or "xla_force_host_platform_device_count" in flags:
        return
    # Simulated devices share few cores: one that waits for its turn must not be taken for dead.
    environ["XLA_FLAGS"] = (
        f"{flags} --xla_force_host_platform_device_count={num_devices}"
        " --xla_cpu_collective_call_warn_stuck_timeout_seconds=60"
        " --xla_cpu_collective_call_terminate_timeout_seconds=600"
    ).strip()


def _load(config: str, overrides: Sequence[str] | None) -> "RunConfig":
    from lwm.config import load_config

    return load_config(config, overrides or ())


@app.command(cls=ConfigCommand)
def train(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    stage: Annotated[
        str | None, typer.Option(metavar="NAME", help="Run this stage only, from the end of the one before it.")
    ] = None,
) -> None:
    """Train all stages; the same command again continues where it stopped. On a cluster, run it on every host."""
    run = _load(config, overrides)
    simulate_devices(run.simulated_devices)
    from lwm import trainer

    cluster.connect(run.cluster)
    from eval.after_stage import NeedlesAfterStage

    trainer.train(run, only=stage, on_stage_end=NeedlesAfterStage(run))


@app.command(cls=ConfigCommand)
def check(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    devices: Annotated[
        int | None, typer.Option(min=1, help="Number of devices [default: the configuration's].")
    ] = None,
) -> None:
    """Validate CONFIG, trace it on its mesh without the devices, and print memory per device."""
    run = _load(config, overrides)
    # Nothing is computed: keep a TPU or GPU that another job is using out of it.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from rich.console import Console

    from lwm import check as checking

    width = None if sys.stdout.isatty() else 200
    checking.print_report(run, checking.check(run, devices), Console(file=sys.stdout, width=width))


@app.command()
def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where corpora, checkpoints and the report go.")] = Path(
        "runs/demo"
    ),
) -> None:
    """The whole story on this machine's CPU, from clips and text to a report with pictures."""
    from lwm.config import load_config

    simulate_devices(load_config("tiny").simulated_devices)
    from lwm import demo as story

    story.run(out)


app.command(cls=ConfigCommand)(plan)
app.command()(ask)
app.command()(generate)


@app.command("config-help")
def config_help(
    prefix: Annotated[str, typer.Argument(help="Only fields below this one, such as stages.0.mesh.")] = "",
) -> None:
    """Explain every field of a configuration."""
    from lwm.config_help import field_table

    table = field_table(prefix)
    if "\n" not in table:
        raise ValueError(f"no field is called {prefix!r}; `lwm config-help` lists them all")
    print(table)


def sentence(error: BaseException) -> str:
    """One line for people from an exception."""
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        from lwm import config, config_io

        return config_io.describe(error, getattr(config, error.title, config.RunConfig))
    if isinstance(error, OSError) and error.strerror:
        named = f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return named + ("; free some space and run the same command again" if full else "")
    return " ".join(str(error).split()) or type(error).__name__


def run(arguments: Sequence[str], stderr: TextIO | None = None, program: typer.Typer = app) -> int:
    """Run one command of `program`; returns the exit code. Errors of the user's making become one line on `stderr`."""
    stream = stderr if stderr is not None else sys.stderr
    try:
        program(args=list(arguments), prog_name="lwm")
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    except (RunStopped, ValueError, OSError) as problem:
        error = problem
    except KeyboardInterrupt:
        print("lwm: interrupted", file=stream)
        return cluster.leave(EXIT_INTERRUPTED, together=False)
    except Exception:
        if cluster.several():
            traceback.print_exc(file=stream)
            cluster.leave(1, together=False)
        raise
    if os.environ.get(DEBUG):
        traceback.print_exception(error, file=stream)
    print(f"lwm: {sentence(error)}", file=stream, flush=True)
    code = error.exit_code if isinstance(error, RunStopped) else EXIT_BAD_INPUT
    # Processes that follow this one are dismissed at its end, and end together with it.
    together = cluster.leading() or isinstance(error, RunStopped | cluster.Disagreement)
    return cluster.leave(code, together)


def main() -> NoReturn:
    """Entry point of the program."""
    tpu_compiler.prepare()
    sys.exit(run(sys.argv[1:]))
