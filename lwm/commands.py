"""The commands that use a trained model: `lwm ask` and `lwm generate`. Heavy imports are inside them."""

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lwm.options import (
    CheckpointOption,
    MaxLengthOption,
    OverridesArgument,
    PrefillChunkOption,
    RunConfigOption,
    SeedOption,
    SystemOption,
)

if TYPE_CHECKING:
    from lwm.prompts import Writer


def ask(
    checkpoint: CheckpointOption,
    question: Annotated[
        list[str] | None,
        typer.Option("--question", metavar="TEXT", help="Give it again to ask more [default: lines typed in]."),
    ] = None,
    overrides: OverridesArgument = None,
    video: Annotated[Path | None, typer.Option(metavar="FILE", help="The video that is asked about.")] = None,
    image: Annotated[Path | None, typer.Option(metavar="FILE", help="Or an image.")] = None,
    document: Annotated[Path | None, typer.Option("--text", metavar="FILE", help="Or a text.")] = None,
    config: RunConfigOption = None,
    system: SystemOption = None,
    order: Annotated[
        str,
        typer.Option(
            help="question-first: later questions go on with the conversation; media-first, as in needle questions: "
            "every question stands alone. As in training; nothing is read twice either way."
        ),
    ] = "question-first",
    frames: Annotated[int | None, typer.Option(min=1, help="Frames of the video, spread evenly.")] = None,
    fps: Annotated[float, typer.Option(min=0.001, help="Or frames per second.")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 128,
    max_length: MaxLengthOption = None,
    prefill_chunk: PrefillChunkOption = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest word.")] = 0.0,
    top_p: Annotated[float | None, typer.Option(help="Share of the probability to draw from.")] = None,
    seed: SeedOption = 0,
) -> None:
    """Ask about a video, an image or a text; the answer is printed as it comes. On a cluster, run it on every host."""
    about = [path for path in (video, image, document) if path is not None]
    if len(about) != 1:
        raise ValueError(f"give one of --video, --image and --text; there are {len(about)}")
    from data.examples import SYSTEM
    from lwm import prompts

    prompts.check_order(order)
    from lwm.serving import open_run
    from lwm.telemetry import Progress

    options = {} if prefill_chunk is None else {"prefill_chunk": prefill_chunk}
    run = open_run(checkpoint, config, overrides or (), max_length=max_length, max_batch=1, one_row=True, **options)
    opening = SYSTEM if system is None else system
    if document is not None:
        about_text = prompts.TextTalk(prompts.read_document(document), run.text, system=opening)
        talk: prompts.Talk = about_text
    else:
        with Progress(f"look at {about[0].name}", None, unit="frames") as progress:
            seen = prompts.look(
                about[0],
                run.need_vision(),
                image=image is not None,
                num_frames=frames,
                fps=fps,
                max_tokens=run.sampler.max_length,
                progress=progress,
            )
        talk = prompts.MediaTalk(seen, run.text, run.vocabulary, system=opening, order=order)
    asked_lines = _typed() if question is None else question
    for asked in asked_lines:
        if question is not None and len(question) > 1:
            print(f"> {asked}")
        writer = prompts.Writer(run.text, sys.stdout.write)
        (ids,) = run.sampler.generate(
            [talk.prompt(asked)],
            max_new_tokens=max_new_tokens,
            stop_id=run.text.eos_id,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            reuse=True,
            on_tokens=functools.partial(_write, writer),
        )
        writer.end()
        talk.answered(ids)
        print(run.sampler.usage, file=sys.stderr)


def _write(writer: "Writer", _: int, new: list[int]) -> None:
    writer.add(new)


def _typed() -> Iterator[str]:
    """Questions from the standard input, one a line, until it ends; a prompt where somebody types them."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


def generate(
    checkpoint: CheckpointOption,
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="What to show.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="A .png for an image, a .gif or .mp4 for a video.")],
    overrides: OverridesArgument = None,
    config: RunConfigOption = None,
    system: SystemOption = None,
    frames: Annotated[int | None, typer.Option(min=1, help="Frames [default: 1 for .png, else 8].")] = None,
    fps: Annotated[float, typer.Option(min=0.001, help="Frames per second of the file.")] = 4.0,
    max_length: MaxLengthOption = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest code.")] = 1.0,
    top_k: Annotated[int | None, typer.Option(min=1, help="Draw from this many likeliest codes.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Share of the probability to draw from.")] = None,
    guidance: Annotated[
        float | None, typer.Option(min=0.0, help="Strength of the prompt: above 1 exaggerates it.")
    ] = None,
    seed: SeedOption = 0,
) -> None:
    """Draw an image or a video from words. On a cluster, run it on every host."""
    from data.examples import SYSTEM
    from lwm import media, prompts
    from lwm.serving import open_run

    is_video = media.check_name(out) in media.VIDEOS
    run = open_run(checkpoint, config, overrides or (), max_length=max_length, max_batch=2)
    vision = run.need_vision()
    codes = run.sampler.generate_video(
        prompts.generation(
            prompt, "video" if is_video else "image", run.text, system=SYSTEM if system is None else system
        ),
        num_frames=frames or (8 if is_video else 1),
        codes_per_frame=vision.codes_per_frame,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        guidance=guidance,
    )
    pixels = vision.decode(codes)
    media.write(out, pixels, fps=fps)
    print(f"{out}: {len(pixels)} frames of {pixels.shape[2]} x {pixels.shape[1]} pixels")
    print(run.sampler.usage, file=sys.stderr)
