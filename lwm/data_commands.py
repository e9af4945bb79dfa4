"""The commands that make and look at corpora: `lwm data build|inspect|verify`. Heavy imports are inside them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lwm.options import ConfigArgument, ConfigCommand, OverridesArgument

if TYPE_CHECKING:
    from lwm.config import RunConfig

# So few records, of files and of text, are done before processes have started.
_FEW_FILES, _FEW_TEXTS = 32, 4096

app = typer.Typer(help="Build, inspect and verify tokenized corpora.", no_args_is_help=True, rich_markup_mode=None)


@app.command("build", cls=ConfigCommand)
def build(
    config: ConfigArgument,
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="A folder of videos and images (captions in clip.txt or clip.json beside each clip.mp4, or in "
            "captions.csv, captions.jsonl, metadata.csv or metadata.jsonl), a JSONL manifest, parquet or JSONL rows, "
            "or text files.",
        ),
    ],
    overrides: OverridesArgument = None,
    corpus: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Which of CONFIG's corpora [default: its only one, or the source's name]."),
    ] = None,
    template: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="What examples are made of clips with captions, or of texts; again for more [default: video->text and "
            "text->video, image->text and text->image; document].",
        ),
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ROLE=COLUMN",
            help="Which column of rows is the path, caption, question, answer, turns, text, system or id, where its "
            "name does not say it.",
        ),
    ] = None,
    fps: Annotated[float, typer.Option(min=0.001, help="Frames per second of videos that do not say.")] = 1.0,
    max_frames: Annotated[int | None, typer.Option(min=1, help="Frames of a video, at most.")] = None,
    long_video: Annotated[
        str,
        typer.Option(
            help="spread: a longer one gives that many frames, spread evenly; first: its first ones; split: several "
            "examples, one after another."
        ),
    ] = "spread",
    max_tokens: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens of a document, at most; and of examples of videos, by leaving out frames."),
    ] = None,
    stage: Annotated[
        str | None, typer.Option(metavar="NAME", help="A stage of CONFIG whose rows give --max-tokens.")
    ] = None,
    long_text: Annotated[
        str, typer.Option(help="split: a longer document gives several examples; crop: its start alone.")
    ] = "split",
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a book to a question (template book).")] = 1000,
    processes: Annotated[
        int | None, typer.Option(min=0, help="Processes that read and tokenize [default: one per processor; 0: none].")
    ] = None,
    max_bad: Annotated[
        float, typer.Option(min=0, max=1, help="Share of files and rows that may be unusable; they are listed.")
    ] = 0.1,
    beam: Annotated[
        str | None,
        typer.Option(
            metavar="FLAGS",
            help="Build on a cluster with Apache Beam: its flags in one string, such as '--runner=FlinkRunner "
            "--flink_master=host:8081'; '' runs it here. All workers must see SOURCE, tokenizers and the corpus.",
        ),
    ] = None,
    shards: Annotated[int, typer.Option(min=1, help="With --beam, into how many shards the records are cut.")] = 256,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a corpus made from other input.")] = False,
) -> None:
    """Tokenize a source into one of CONFIG's corpora; the same command again goes on where it stopped."""
    import dataclasses
    import shlex

    from data.prepare import Limits
    from data.sources import open_source
    from lwm.config import load_config
    from lwm.corpora import (
        BuildOptions,
        OpenItems,
        build_by_beam,
        build_from_source,
        corpus_directory,
        vision_tokenizer_of,
    )
    from lwm.telemetry import Progress

    run = load_config(config, overrides or ())
    name = corpus or (run.corpora[0].name if len(run.corpora) == 1 else source.stem)
    corpus_directory(run, name)
    templates, columns = tuple(template or ()), _columns(column or [])
    opened = open_source(source, templates=templates, columns=columns)
    if opened.without_caption:
        print(f"{source}: {opened.without_caption} of {opened.total} files have no caption: learned without words")
    vision = vision_tokenizer_of(run) if opened.has_media else None
    longest = _longest(run, stage, max_tokens)
    limits = Limits(fps, max_frames, long_video, longest, long_text)
    options = BuildOptions(
        limits, chunk_tokens, _processes(processes, opened.total, opened.has_media), max_bad, overwrite
    )
    if beam is not None:
        here = dataclasses.replace(options, processes=processes or 0)
        work = OpenItems(run, name, source.absolute(), templates, tuple(columns.items()), here)
        built = build_by_beam(work, opened, shards, shlex.split(beam))
    else:
        with Progress(f"build {name}", opened.total, unit="records") as progress:
            built = build_from_source(run, name, opened, options, vision=vision, progress=progress)
    print(f"{built.directory}: {len(built)} examples, fingerprint {built.fingerprint}")
    for kind, what in (("skipped", "left out"), ("damaged", "made from damaged files")):
        for first in built.manifest.get(kind, [])[:1]:
            print(f"examples {what} are listed in {built.directory / kind}.jsonl; the first: {first['reason']}")


def _columns(pairs: list[str]) -> dict[str, str]:
    for pair in pairs:
        if "=" not in pair:
            raise ValueError(f"--column {pair}: give it as ROLE=COLUMN, such as caption=title")
    return dict(pair.split("=", 1) for pair in pairs)


def _longest(run: "RunConfig", stage: str | None, max_tokens: int | None) -> int | None:
    """`max_tokens`, or what fills a row of the stage: an example of n tokens takes n - 1 slots."""
    if stage is None:
        return max_tokens
    if max_tokens is not None:
        raise ValueError(f"--max-tokens {max_tokens} is given beside --stage {stage}; give one of them")
    return run.stage(stage).seq_len + 1


def _processes(asked: int | None, records: int, has_media: bool) -> int:
    import os

    if asked is not None:
        return asked
    if records < (_FEW_FILES if has_media else _FEW_TEXTS):
        return 0
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@app.command("inspect")
def inspect(
    directory: Annotated[Path, typer.Argument(help="A corpus directory.")],
    config: Annotated[
        str | None,
        typer.Option(metavar="CONFIG", help="Whose tokenizers and stages: shows text, pictures and how rows fill."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the histogram and the pictures go [default: none made].")
    ] = None,
    examples: Annotated[int, typer.Option(min=0, help="Number of examples to show.")] = 3,
) -> None:
    """Say what a corpus holds and how it packs, and show its first examples, as text and pictures again."""
    from data.corpus import Corpus
    from lwm import inspection
    from lwm.config import load_config

    corpus = Corpus.open(directory)
    run = None if config is None else load_config(config)
    for line in inspection.describe(corpus):
        print(line)
    if run is not None:
        for line in inspection.packing(corpus, run):
            print(line)
    tokenizers = None if run is None else inspection.tokenizers_for(corpus, run)
    for line in inspection.show(corpus, examples, tokenizers, out):
        print(line)
    if out is not None:
        print(f"{inspection.draw_lengths(corpus, out)}: lengths of the examples")


@app.command("verify")
def verify(directory: Annotated[Path, typer.Argument(help="A corpus directory.")]) -> None:
    """Read a whole corpus and compare it with its manifest: checksums, every record, lengths, fingerprint."""
    from data.corpus import Corpus
    from lwm.telemetry import Progress

    corpus = Corpus.open(directory)
    with Progress(f"verify {corpus.name}", len(corpus), unit="examples") as progress:
        corpus.verify(progress)
    print(f"{corpus.name}: {len(corpus)} examples are as they were written")
