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
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TextIO

import typer
from typer.core import TyperCommand

from eval.commands import app as eval_app
from lwm import cluster
from lwm.checkpoint_commands import app as checkpoint_app
from lwm.commands import ask, generate
from lwm.lifecycle import EXIT_BAD_INPUT, EXIT_INTERRUPTED, RunStopped
from lwm.options import OverridesArgument
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
data_app = typer.Typer(help="Build, inspect and verify tokenized corpora.", no_args_is_help=True, rich_markup_mode=None)
tokenizer_app = typer.Typer(help="Train tokenizers.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(data_app, name="data")
app.add_typer(tokenizer_app, name="tokenizer")
app.add_typer(eval_app, name="eval")
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(import_app, name="import")
app.add_typer(export_app, name="export")


class _ConfigCommand(TyperCommand):
    """A command that takes a configuration: its help explains every field that can be overridden."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from lwm.config_help import field_table

        super().format_help(ctx, formatter)
        formatter.write("\nFields of CONFIG, to override as field=value (* is an entry's index or name):\n\n")
        formatter.write(field_table() + "\n")


ConfigArgument = Annotated[
    str, typer.Argument(metavar="CONFIG", help="A YAML file, or the name of a shipped one (tiny).")
]


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


@app.command(cls=_ConfigCommand)
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
    trainer.train(run, only=stage)


@app.command(cls=_ConfigCommand)
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


@data_app.command("build", cls=_ConfigCommand)
def data_build(
    config: ConfigArgument,
    manifest: Annotated[Path, typer.Argument(metavar="MANIFEST", help="JSONL, one example a line.")],
    overrides: OverridesArgument = None,
    corpus: Annotated[
        str | None, typer.Option(metavar="NAME", help="Which of CONFIG's corpora [default: the manifest's name].")
    ] = None,
    fps: Annotated[float, typer.Option(min=0.001, help="Frames per second of videos that do not say.")] = 1.0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a corpus made from other input.")] = False,
) -> None:
    """Tokenize a manifest into one of CONFIG's corpora."""
    run = _load(config, overrides)
    from lwm.corpora import build_from_manifest, has_media, vision_tokenizer_of
    from lwm.telemetry import Progress

    name = corpus or manifest.stem
    vision = vision_tokenizer_of(run) if has_media(manifest) else None
    with Progress(f"build {name}", None, unit="examples") as progress:
        built = build_from_manifest(
            run,
            name,
            manifest,
            encode_frames=None if vision is None else vision.encode,
            encoder_fingerprint="" if vision is None else vision.fingerprint,
            fps=fps,
            overwrite=overwrite,
            progress=progress,
        )
    print(f"{built.directory}: {len(built)} examples, fingerprint {built.fingerprint}")


@data_app.command("inspect")
def data_inspect(
    directory: Annotated[Path, typer.Argument(help="A corpus directory.")],
    examples: Annotated[int, typer.Option(min=0, help="Number of examples to show.")] = 3,
) -> None:
    """Say what a corpus holds, and show its first examples."""
    import numpy as np

    from data.build import Corpus

    corpus = Corpus.open(directory)
    lengths = np.asarray(corpus.lengths)
    print(f"{corpus.name}: {len(corpus)} examples, {lengths.sum()} tokens to predict, fingerprint {corpus.fingerprint}")
    if len(lengths):
        p10, median, p90 = np.percentile(lengths, [10, 50, 90]).astype(int)
        print(f"lengths: shortest {lengths.min()}, 10% {p10}, median {median}, 90% {p90}, longest {lengths.max()}")
    for index in range(min(examples, len(corpus))):
        example = corpus[index]
        shown = " ".join(map(str, example.tokens[:16]))
        more = " ..." if len(example.tokens) > 16 else ""
        print(f"example {index}: {len(example.tokens)} tokens, {int(np.sum(example.learn))} learned: {shown}{more}")


@data_app.command("verify")
def data_verify(directory: Annotated[Path, typer.Argument(help="A corpus directory.")]) -> None:
    """Read a whole corpus and compare it with its manifest."""
    from data.build import Corpus

    corpus = Corpus.open(directory)
    corpus.verify()
    print(f"{corpus.name}: {len(corpus)} examples are as they were written")


@tokenizer_app.command("train-text")
def tokenizer_train_text(
    texts: Annotated[list[Path], typer.Argument(help="Text files, UTF-8.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The SentencePiece model to write.")],
    size: Annotated[int, typer.Option(min=16, help="Number of pieces.")] = 32000,
) -> None:
    """Train a SentencePiece model on text files."""
    from data.text import read_text, train_tokenizer

    for path in texts:  # the trainer takes an iterator and would report a missing file as the end of the text
        path.open("rb").close()
    tokenizer = train_tokenizer((read_text(path) for path in texts), out, size=size)
    print(f"{out}: {tokenizer.size} pieces, fingerprint {tokenizer.fingerprint}")


@tokenizer_app.command("train-vision", cls=_ConfigCommand)
def tokenizer_train_vision(
    config: ConfigArgument,
    videos: Annotated[list[Path], typer.Option("--videos", metavar="PATH", help="A video, image or folder of them.")],
    overrides: OverridesArgument = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The tokenizer's directory [default: tokenizers.vision].")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 2000,
    batch: Annotated[int, typer.Option(min=1, help="Frames in one step.")] = 16,
    fps: Annotated[float, typer.Option(min=0.001, help="Frames per second that are read.")] = 2.0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the tokenizer that is there.")] = False,
) -> None:
    """Train CONFIG's VQGAN on the frames of videos and images."""
    run = _load(config, overrides)
    directory = out or (None if run.tokenizers.vision is None else Path(run.tokenizers.vision))
    if run.vqgan is None or directory is None:
        raise ValueError(f"{run.name}: set {'vqgan' if run.vqgan is None else 'tokenizers.vision'} to train one")
    if directory.exists() and not overwrite:
        raise ValueError(f"{directory} is there already; give --overwrite to replace it, or another directory as --out")
    import numpy as np

    from data.video import read_frames
    from lwm import vqgan_training
    from lwm.media import find
    from lwm.telemetry import Progress
    from lwm.vision_tokenizer import VisionTokenizer

    files = find(videos)
    clips = []
    with Progress("read the frames", len(files), unit="files") as progress:
        for file in files:
            clips.append(read_frames(file, fps=fps, size=run.vqgan.resolution).pixels)
            progress(len(clips))
    frames = np.concatenate(clips)
    with Progress("train the vision tokenizer", steps, unit="steps") as progress:
        params, metrics = vqgan_training.train(
            run.vqgan,
            frames,
            steps=steps,
            batch=batch,
            seed=run.seed,
            progress=lambda now: progress(now.step, f"psnr {now.psnr_db:.1f} dB"),
        )
    tokenizer = VisionTokenizer(run.vqgan, params, metrics)
    tokenizer.save(directory, overwrite=overwrite)
    print(
        f"{directory}: {len(frames)} frames of {len(files)} files, psnr {metrics['psnr_db']:.1f} dB on frames set "
        f"aside, {metrics['codes_used']} of {run.vqgan.num_embeddings} codes used, fingerprint {tokenizer.fingerprint}"
    )


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
    return cluster.leave(code, together=isinstance(error, RunStopped | cluster.Disagreement))


def main() -> NoReturn:
    """Entry point of the program."""
    sys.exit(run(sys.argv[1:]))
