"""The commands that train tokenizers: `lwm tokenizer train-text|train-vision`. Heavy imports are inside them."""

from pathlib import Path
from typing import Annotated

import typer

from lwm.options import ConfigArgument, ConfigCommand, OverridesArgument

app = typer.Typer(help="Train tokenizers.", no_args_is_help=True, rich_markup_mode=None)


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
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 2000,
    batch: Annotated[int, typer.Option(min=1, help="Frames in one step.")] = 16,
    fps: Annotated[float, typer.Option(min=0.001, help="Frames per second that are read.")] = 2.0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the tokenizer that is there.")] = False,
) -> None:
    """Train CONFIG's VQGAN on the frames of videos and images."""
    from lwm.config import load_config

    run = load_config(config, overrides or ())
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
