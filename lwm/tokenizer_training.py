"""Training both tokenizers on a source of data: its words, and a bounded number of its frames; and what came of it."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from data.examples import Example, Span
from data.manifest import make_examples
from data.sources import Source
from data.text import TextError, TextTokenizer, train_tokenizer
from data.video import VideoError, read_frames, read_image, seconds_of
from lwm import vqgan_training
from lwm.config import ConfigError, RunConfig
from lwm.telemetry import Progress
from lwm.vision_tokenizer import VisionTokenizer

_SHOWN = 8
_TOO_MANY = re.compile(r"Vocabulary size too high .*<= (\d+)")


def train_text(config: RunConfig, source: Source, *, characters: int = 100_000_000) -> TextTokenizer:
    """A SentencePiece model of the words of a source (its first `characters`), at `tokenizers.text`.

    It has `model.text_vocab_size` pieces, or as many as so few words allow.
    """
    if config.tokenizers.text is None:
        raise ConfigError(f"{config.name}: set tokenizers.text, the file to write")
    path, size = Path(config.tokenizers.text), config.model.text_vocab_size
    try:
        return train_tokenizer(_words(source, characters), path, size=size)
    except ValueError as error:
        most = _TOO_MANY.search(str(error))
        if most is None:
            raise
    return train_tokenizer(_words(source, characters), path, size=min(size, int(most.group(1))))


def _words(source: Source, characters: int) -> Iterator[str]:
    for example in _examples(source):
        for span in example.spans:
            if span.text is not None:
                yield span.text
                characters -= len(span.text)
        if characters <= 0:
            return


def _examples(source: Source) -> Iterator[Example]:
    """Examples of a source, without those that building will report as bad."""
    for record in source.records(0):
        if not record.problem:
            try:
                # A book's questions are made of its own words.
                fields = record.line
                if isinstance(fields, dict) and fields.get("template") == "book":
                    record = replace(record, line={"template": "document", "path": fields["path"]})
                yield from make_examples(record)
            except TextError:
                continue


def media_of(source: Source) -> list[Span]:
    """The images and videos of a source, each once."""
    found: dict[Any, Span] = {}
    for example in _examples(source):
        for span in example.spans:
            if span.path is not None or span.content is not None:
                found.setdefault((span.path, span.content, span.start, span.end), span)
    return list(found.values())


def read_sample(media: Sequence[Span], size: int, *, fps: float, most: int) -> tuple[np.ndarray, list[str]]:
    """At most `most` frames uint8 [N, size, size, 3], spread evenly over the files, and why some could not be read.

    ValueError where none could.
    """
    kept: list[np.ndarray] = []
    problems: list[str] = []
    # Where there are more files than frames, evenly spaced ones.
    chosen = [media[i] for i in np.linspace(0, len(media) - 1, min(len(media), most)).round().astype(int)]
    each = max(1, most // max(len(chosen), 1))
    with Progress("read the frames", len(chosen), unit="files") as progress:
        for span in chosen:
            try:
                kept.append(_read(span, size, fps, each))
            except VideoError as error:
                problems.append(str(error))
            progress.advance()
    if not kept:
        reason = f": {problems[0]}" if problems else ""
        raise ValueError(f"there is no frame to train a vision tokenizer on{reason}")
    return np.concatenate(kept), problems


def _read(span: Span, size: int, fps: float, most: int) -> np.ndarray:
    if span.content is not None:
        return read_image(span.content, size=size)[None]
    assert span.path is not None
    if span.kind == "image":
        return read_frames(span.path, num_frames=1, size=size).pixels
    if seconds_of(span.path, start=span.start, end=span.end) * fps > most:
        return read_frames(span.path, num_frames=most, size=size, start=span.start, end=span.end).pixels
    return read_frames(span.path, fps=fps, size=size, start=span.start, end=span.end).pixels


def train_vision(
    config: RunConfig,
    frames: np.ndarray,
    *,
    steps: int,
    batch: int,
    directory: Path,
    recipe: vqgan_training.Recipe | None = None,
    overwrite: bool = False,
) -> VisionTokenizer:
    """A VQGAN trained on frames uint8 [N, H, W, 3], saved in `directory` with curves and reconstructions beside it."""
    assert config.vqgan is not None
    history: list[vqgan_training.Progress] = []
    with Progress("train the vision tokenizer", steps, unit="steps") as progress:

        def report(now: vqgan_training.Progress) -> None:
            history.append(now)
            progress(now.step, f"psnr {now.psnr_db:.1f} dB, {now.codes_used} codes in use")

        params, metrics = vqgan_training.train(
            config.vqgan, frames, steps=steps, batch=batch, seed=config.seed, recipe=recipe, progress=report
        )
    tokenizer = VisionTokenizer(config.vqgan, params, metrics)
    tokenizer.save(directory, overwrite=overwrite)
    (directory / "training.jsonl").write_text("".join(json.dumps(now._asdict()) + "\n" for now in history))
    shown = frames[10::20] if len(frames) > 10 else frames
    draw_training(directory / "training.png", history, shown[:_SHOWN], tokenizer)
    return tokenizer


def draw_training(
    path: Path, history: Iterable[vqgan_training.Progress], frames: np.ndarray, tokenizer: VisionTokenizer
) -> None:
    """PSNR and codes in use by step, and frames above what is drawn from their codes."""
    from matplotlib.figure import Figure

    past = list(history)
    drawn = tokenizer.decode(tokenizer.encode(frames))
    figure = Figure(figsize=(10, 7), layout="constrained")
    grid = figure.add_gridspec(2, 1, height_ratios=(1, 1.1))
    left = figure.add_subplot(grid[0])
    steps = [now.step for now in past]
    left.plot(steps, [now.psnr_db for now in past], color="tab:blue")
    left.set(xlabel="step", ylabel="PSNR of the batch (dB)")
    left.yaxis.label.set_color("tab:blue")
    right = left.twinx()
    right.plot(steps, [now.codes_used for now in past], color="tab:orange")
    right.set_ylabel("codes used in a batch")
    right.yaxis.label.set_color("tab:orange")
    metrics = tokenizer.metrics
    left.set_title(
        f"{metrics['psnr_db']:.1f} dB on {metrics['held_out']} frames set aside; {metrics['codes_used']} of "
        f"{tokenizer.config.num_embeddings} codes used"
    )
    below = figure.add_subplot(grid[1])
    below.imshow(np.concatenate([np.concatenate(list(frames), 1), np.concatenate(list(drawn), 1)]))
    below.set_title("frames, and what their codes draw")
    below.axis("off")
    figure.savefig(path, dpi=120)
