"""The commands that train tokenizers: `lwm tokenizer train|train-text|train-vision`. Heavy imports are inside them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lwm.options import ConfigArgument, ConfigCommand, OverridesArgument

if TYPE_CHECKING:
    import numpy as np

    from lwm.config import RunConfig

app = typer.Typer(help="Train tokenizers.", no_args_is_help=True, rich_markup_mode=None)

StepsOption = Annotated[int, typer.Option(min=1, help="Training steps of the VQGAN.")]
BatchOption = Annotated[int, typer.Option(min=1, help="Frames in one step.")]
FpsOption = Annotated[float, typer.Option(min=0.001, help="Frames per second that are read.")]
MostOption = Annotated[int, typer.Option(min=1, help="Frames in all, at most, spread evenly over the files.")]
AdversarialOption = Annotated[
    float, typer.Option(min=0.0, help="Weight of a patch discriminator, such as 0.1: sharper pictures, lower PSNR.")
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")]


@app.command("train", cls=ConfigCommand)
def train(
    config: ConfigArgument,
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="What `lwm data build` takes: a folder of clips ...")
    ],
    overrides: OverridesArgument = None,
    steps: StepsOption = 2000,
    batch: BatchOption = 16,
    fps: FpsOption = 2.0,
    max_frames: MostOption = 8192,
    adversarial: AdversarialOption = 0.0,
    overwrite: OverwriteOption = False,
) -> None:
    """Train CONFIG's text tokenizer on a source's words, and its VQGAN on its frames where it has any.

    What is there already stays, so that the same command goes on where it was stopped.
    """
    from data.sources import open_source
    from lwm import tokenizer_training
    from lwm.config import load_config

    run = load_config(config, overrides or ())
    opened = open_source(source)
    text = None if run.tokenizers.text is None else Path(run.tokenizers.text)
    directory = _vision_directory(run, None, True) if opened.has_media else None
    kept = [path for path in (text, directory) if path is not None and path.exists() and not overwrite]
    if len(kept) == (1 if directory is None else 2):
        raise ValueError(f"{' and '.join(map(str, kept))} are there already; give --overwrite to replace them")
    for path in kept:
        print(f"{path} is there already and stays; --overwrite replaces it")
    if text not in kept:
        tokenizer = tokenizer_training.train_text(run, opened)
        print(f"{text}: {tokenizer.size} pieces, fingerprint {tokenizer.fingerprint}")
    if directory is not None and directory not in kept and run.vqgan is not None:
        media = tokenizer_training.media_of(opened)
        frames, problems = tokenizer_training.read_sample(media, run.vqgan.resolution, fps=fps, most=max_frames)
        _train_vision(run, frames, len(media), problems, steps, batch, adversarial, directory, overwrite)


@app.command("train-text")
def train_text(
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


@app.command("train-vision", cls=ConfigCommand)
def train_vision(
    config: ConfigArgument,
    videos: Annotated[list[Path], typer.Option("--videos", metavar="PATH", help="A video, image or folder of them.")],
    overrides: OverridesArgument = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The tokenizer's directory [default: tokenizers.vision].")
    ] = None,
    steps: StepsOption = 2000,
    batch: BatchOption = 16,
    fps: FpsOption = 2.0,
    max_frames: MostOption = 8192,
    adversarial: AdversarialOption = 0.0,
    overwrite: OverwriteOption = False,
) -> None:
    """Train CONFIG's VQGAN on the frames of videos and images."""
    from data.sources import open_source
    from lwm import tokenizer_training
    from lwm.config import load_config

    run = load_config(config, overrides or ())
    directory = _vision_directory(run, out, overwrite)
    assert run.vqgan is not None
    media = [span for path in videos for span in tokenizer_training.media_of(open_source(path))]
    frames, problems = tokenizer_training.read_sample(media, run.vqgan.resolution, fps=fps, most=max_frames)
    _train_vision(run, frames, len(media), problems, steps, batch, adversarial, directory, overwrite)


def _vision_directory(run: "RunConfig", out: Path | None, overwrite: bool) -> Path:
    directory = out or (None if run.tokenizers.vision is None else Path(run.tokenizers.vision))
    if run.vqgan is None or directory is None:
        raise ValueError(f"{run.name}: set {'vqgan' if run.vqgan is None else 'tokenizers.vision'} to train one")
    if directory.exists() and not overwrite:
        raise ValueError(f"{directory} is there already; give --overwrite to replace it, or another directory as --out")
    return directory


def _train_vision(
    run: "RunConfig",
    frames: "np.ndarray",
    num_files: int,
    problems: list[str],
    steps: int,
    batch: int,
    adversarial: float,
    directory: Path,
    overwrite: bool,
) -> None:
    from lwm import tokenizer_training
    from lwm.vqgan_training import Recipe

    if problems:
        print(f"{len(problems)} files could not be read; the first: {problems[0]}")
    tokenizer = tokenizer_training.train_vision(
        run,
        frames,
        steps=steps,
        batch=batch,
        directory=directory,
        recipe=Recipe(adversarial=adversarial),
        overwrite=overwrite,
    )
    metrics = tokenizer.metrics
    print(
        f"{directory}: {len(frames)} frames of {num_files - len(problems)} files, psnr {metrics['psnr_db']:.1f} dB on "
        f"frames set aside, {metrics['codes_used']} of {tokenizer.config.num_embeddings} codes used, "
        f"fingerprint {tokenizer.fingerprint}"
    )
