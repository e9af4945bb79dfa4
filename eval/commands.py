"""The commands `lwm eval ...`: build the cases, put them to a model, score, draw. Heavy imports are inside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eval.qa_command import eval_video_qa
from lwm.options import (
    BatchOption,
    BatchTokensOption,
    ControlsOption,
    DepthsOption,
    DummyOption,
    EndpointModelOption,
    EndpointOption,
    EvalCheckpointOption,
    EvalConfigOption,
    FamilyRoundsOption,
    FirstKOption,
    LengthsOption,
    MaxLengthOption,
    NeedlesOption,
    OutOption,
    OverridesArgument,
    RoundsOption,
    SeedOption,
    StepOption,
    WandbOption,
)

if TYPE_CHECKING:
    import numpy as np

    from data.text import TextTokenizer
    from eval.dummies import Reader
    from eval.protocol import Case, Kind
    from lwm.config import RunConfig
    from lwm.serving import OpenRun

app = typer.Typer(help="Measure what a model can do.", no_args_is_help=True, rich_markup_mode=None)
app.command("video-qa")(eval_video_qa)

_DEPTHS = "0,0.25,0.5,0.75,1"
_SHORTEST = 512
# Which model was asked last: its records are the ones that are scored.
_ASKED = "asked.json"
# Without a checkpoint there is no context to go by.
_LONGEST_DUMMY = 4096


@app.command("needle-text")
def eval_needle_text(
    out: OutOption,
    overrides: OverridesArgument = None,
    checkpoint: EvalCheckpointOption = None,
    model: DummyOption = None,
    config: EvalConfigOption = None,
    haystack: Annotated[
        list[Path] | None, typer.Option("--haystack", metavar="FILE", help="Text to hide needles in.")
    ] = None,
    distractors: Annotated[int, typer.Option(min=0, help="Other needles in the cases with distractors.")] = 3,
    distractor_rounds: Annotated[int, typer.Option(min=0, help="Such cases per length and depth.")] = 1,
    lengths: LengthsOption = None,
    depths: DepthsOption = _DEPTHS,
    rounds: RoundsOption = 4,
    control_rounds: ControlsOption = None,
    families: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Also: multi_value, multi_query, variables (RULER), or all.")
    ] = None,
    family_rounds: FamilyRoundsOption = 4,
    needles: NeedlesOption = 4,
    step: StepOption = "all",
    wandb: WandbOption = None,
    endpoint: EndpointOption = None,
    endpoint_model: EndpointModelOption = "default",
    seed: SeedOption = 0,
    first_k: FirstKOption = _SHORTEST,
    batch_size: BatchOption = 8,
    batch_tokens: BatchTokensOption = None,
    max_length: MaxLengthOption = None,
) -> None:
    """Find a number in a long text."""
    from data.synthetic import Haystack
    from eval import needle_text, text_families
    from eval.protocol import TEXT_FAMILIES

    steps = _steps(step)
    if steps & {"build", "run"}:
        texts = _texts(haystack or [], seed)
        player = _open(out, checkpoint, model, config, overrides, max_length, batch_size, texts, endpoint, steps)
        player = replace(player, endpoint_model=endpoint_model)
        tokens = _lengths(lengths, player.longest)

        def build() -> list[Case]:
            hay = Haystack(texts, player.text)
            cases = needle_text.build_cases(
                tokens,
                _numbers("--depths", depths, float),
                rounds,
                seed,
                player.text,
                hay,
                num_distractors=distractors,
                distractor_rounds=distractor_rounds,
                control_rounds=control_rounds,
            )
            chosen = _families(families, TEXT_FAMILIES)
            return cases + text_families.build_cases(
                chosen, tokens, family_rounds, seed, player.text, hay, num_needles=needles
            )

        cases = _cases(out, steps, player, build)
        read = _either(text_families.reader(player.text), needle_text.reader(player.text))
        if "run" in steps:
            _run(out, player, cases, read, "Needles in text", first_k, seed, batch_size, batch_tokens)
    _finish(out, steps, "Needles in text", wandb)


@app.command("needle-video")
def eval_needle_video(
    out: OutOption,
    overrides: OverridesArgument = None,
    checkpoint: EvalCheckpointOption = None,
    model: DummyOption = None,
    config: EvalConfigOption = None,
    videos: Annotated[
        list[Path] | None, typer.Option("--videos", metavar="PATH", help="A video, or a folder of them, as haystack.")
    ] = None,
    fps: Annotated[float, typer.Option(min=0.001, help="Frames per second of the haystack.")] = 1.0,
    lengths: LengthsOption = None,
    depths: DepthsOption = _DEPTHS,
    rounds: RoundsOption = 4,
    control_rounds: ControlsOption = None,
    unit: Annotated[
        str, typer.Option("--length-unit", help="What --lengths counts: tokens, frames or minutes of video.")
    ] = "tokens",
    families: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="Also: several, ordering, counting, clip, overlay, or all."),
    ] = None,
    family_rounds: FamilyRoundsOption = 4,
    needles: NeedlesOption = 4,
    step: StepOption = "all",
    wandb: WandbOption = None,
    seed: SeedOption = 0,
    first_k: FirstKOption = _SHORTEST,
    batch_size: BatchOption = 8,
    batch_tokens: BatchTokensOption = None,
    max_length: MaxLengthOption = None,
) -> None:
    """Find a number plate in a long video."""
    from eval import needle_video, video_families
    from eval.haystack import VideoHaystack
    from eval.protocol import VIDEO_FAMILIES

    steps = _steps(step)
    if steps & {"build", "run"}:
        player = _open(out, checkpoint, model, config, overrides, max_length, batch_size, _texts([], seed), None, steps)
        encode, size = _vision(player)
        plates = needle_video.encode_plates(encode, size)
        if ambiguous := needle_video.num_ambiguous(plates):
            print(f"{ambiguous} of {len(plates)} plates have the same codes as another one: they cannot be told apart")

        def build() -> list[Case]:
            pixels = _clips(videos or [], size, fps, seed)
            hay = VideoHaystack(tuple(encode(clip) for clip in pixels))
            tokens = _video_lengths(lengths, unit, fps, player, hay.codes_per_frame)
            cases = needle_video.build_cases(
                tokens,
                _numbers("--depths", depths, float),
                rounds,
                seed,
                player.text,
                hay,
                vocabulary=player.vocabulary,
                plates=plates,
                control_rounds=control_rounds,
            )
            longest = [case for case in cases if case.kind == "single" and case.length == max(tokens)]
            shown = needle_video.picture(out / "needle_in_place.png", longest[len(longest) // 2], pixels)
            print(f"one of the videos: {shown.path}")
            return cases + video_families.build_cases(
                _families(families, VIDEO_FAMILIES),
                tokens,
                family_rounds,
                seed,
                player.text,
                video_families.Footage(hay, plates, pixels, encode),
                vocabulary=player.vocabulary,
                num_needles=needles,
            )

        cases = _cases(out, steps, player, build)
        drawn = video_families.drawn_codes(cases, player.vocabulary)
        read = _either(
            video_families.reader(player.text, player.vocabulary, plates, drawn),
            needle_video.reader(player.text, player.vocabulary, plates),
        )
        if "run" in steps:
            _run(out, player, cases, read, "Needles in video", first_k, seed, batch_size, batch_tokens)
    _finish(out, steps, "Needles in video", wandb)


@dataclass(frozen=True, eq=False)
class _Player:
    """Who answers, and in which ids. run: an open checkpoint; dummy: the name of a model that needs none."""

    text: TextTokenizer
    vocabulary: Any
    longest: int
    config: RunConfig | None
    run: OpenRun | None = None
    dummy: str | None = None
    endpoint: str | None = None
    endpoint_model: str = "default"


def _open(
    out: Path,
    checkpoint: Path | None,
    dummy: str | None,
    config: str | None,
    overrides: Sequence[str] | None,
    max_length: int | None,
    max_batch: int,
    texts: Sequence[str],
    endpoint: str | None,
    steps: set[str],
) -> _Player:
    chosen = sum(each is not None for each in (checkpoint, dummy, endpoint))
    if chosen > 1 or (chosen == 0 and "run" in steps):
        raise ValueError(
            "give either --checkpoint DIR or --model oracle, random or first-k (or --endpoint URL, for text)"
        )
    from data.vocabulary import Vocabulary

    if checkpoint is not None:
        from lwm.serving import open_run

        run = open_run(checkpoint, config, overrides or (), max_length=max_length, max_batch=max_batch)
        return _Player(run.text, run.vocabulary, run.sampler.max_length, run.config, run)
    longest = max_length or _LONGEST_DUMMY
    if config is not None:
        from lwm.config import load_config
        from lwm.corpora import text_tokenizer_of, vocabulary_of

        loaded = load_config(config, overrides or ())
        text, vocabulary = text_tokenizer_of(loaded), vocabulary_of(loaded)
        return _Player(text, vocabulary, longest, loaded, dummy=dummy, endpoint=endpoint)
    from data.text import TextTokenizer, train_tokenizer

    path = out / "text.model"
    text = TextTokenizer.load(path) if path.exists() else train_tokenizer(texts, path, size=512)
    return _Player(text, Vocabulary(text.size, 512, 514), longest, None, dummy=dummy, endpoint=endpoint)


def _steps(step: str) -> set[str]:
    known = ("build", "run", "score", "plot")
    chosen = set(known) if step == "all" else set(step.split(","))
    if unknown := sorted(chosen - set(known)):
        raise ValueError(f"--step is {step!r}: there is no {unknown[0]!r}; give all, or some of {', '.join(known)}")
    return chosen


def _families(text: str | None, known: Sequence[Kind]) -> list[Kind]:
    if text is None:
        return []
    names = {str(name): name for name in known}
    chosen = list(names) if text == "all" else text.split(",")
    if unknown := [name for name in chosen if name not in names]:
        raise ValueError(f"there is no family {unknown[0]!r}; choose of {', '.join(known)}")
    return [names[name] for name in chosen]


def _either(first: Reader, second: Reader) -> Reader:
    return lambda prompt, limit: first(prompt, limit) or second(prompt, limit)


def _cases(out: Path, steps: set[str], player: _Player, build: Callable[[], list[Case]]) -> list[Case]:
    """The manifest's cases: built and written, or read from an earlier run's."""
    from dataclasses import asdict

    from eval import manifest

    about = {"text_tokenizer": player.text.fingerprint, "vocabulary": asdict(player.vocabulary)}
    path = out / manifest.NAME
    if "build" in steps:
        cases = build()
        manifest.write(path, cases, about)
        print(f"{path}: {len(cases)} cases, sha256 {manifest.fingerprint(cases)[:16]}")
        return cases
    head, cases = manifest.read(path)
    if {name: head.get(name) for name in about} != about:
        raise ValueError(f"{path} was built with other tokenizers than this model's; build it again for this one")
    return cases


def _run(
    out: Path,
    player: _Player,
    cases: Sequence[Case],
    read: Reader,
    title: str,
    first_k: int,
    seed: int,
    batch_size: int,
    batch_tokens: int | None,
) -> None:
    from eval import dummies, runner
    from eval.haystack import answer_decoder
    from lwm.telemetry import Progress

    model: Any
    if player.run is not None:
        model, identity = player.run.sampler, player.run.identity
    elif player.endpoint is not None:
        from eval.endpoint import Endpoint, EndpointTextModel

        model = EndpointTextModel(Endpoint(player.endpoint, player.endpoint_model, max_new_tokens=128), player.text)
        identity = f"{player.endpoint} {player.endpoint_model}"
    else:
        assert player.dummy is not None
        model = dummies.make(player.dummy, read, player.text.encode, first_k=first_k, seed=seed)
        identity = f"{player.dummy}-{first_k}-{seed}" if player.dummy == "first-k" else f"{player.dummy}-{seed}"
    most = max((len(case.answers) for case in cases), default=0)
    with Progress(title.lower(), len(cases), unit="cases") as bar:
        runner.run(
            cases,
            model,
            path=out / runner.RECORDS_NAME,
            model_id=identity,
            decode=answer_decoder(player.text),
            stop_id=player.text.eos_id,
            max_new_tokens=max(16, 12 * most),
            batch_size=batch_size,
            batch_tokens=batch_tokens,
            progress=lambda now: bar(now.done, f"{now.correct} right"),
        )
    runner.write_json(out / _ASKED, {"model": identity})
    if player.run is not None:
        print(player.run.sampler.usage)


def _finish(out: Path, steps: set[str], title: str, wandb: str | None) -> None:
    """Score the records of the model that was asked last, and draw."""
    import json

    from eval import manifest, plots, runner, tables, tracking

    if "score" in steps:
        _, cases = manifest.read(out / manifest.NAME)
        try:
            identity = json.loads((out / _ASKED).read_text())["model"]
        except OSError:
            raise ValueError(f"{out} has no answers yet; ask a model with --step run") from None
        summary = runner.score(cases, out, model_id=identity)
        tables.write_csv(out, summary, runner.read_records(out / runner.RECORDS_NAME).values())
        _tell(summary, title)
    if "plot" in steps:
        try:
            summary = json.loads((out / runner.SUMMARY_NAME).read_text())
        except OSError:
            raise ValueError(f"{out} has no {runner.SUMMARY_NAME}; score first, with --step score") from None
        picture = plots.heatmap(out / "heatmap", summary, title=title)
        print(f"{out / runner.SUMMARY_NAME}, {out / 'heatmap.png'}")
        if wandb is not None:
            tracking.log(out, summary, picture, tracking.wandb_start(wandb, title, out, summary), print)


def _tell(summary: dict[str, Any], title: str) -> None:
    by_length = ", ".join(f"{length}: {value:.0%}" for length, value in summary["accuracy_by_length"].items())
    print(f"{title.lower()}: {summary['accuracy']:.1%} right ({by_length})")
    print(f"effective context length: {summary['effective_context_length']} tokens")
    for name in ("distractor_accuracy", "control_accuracy"):
        if summary[name] is not None:
            print(f"{name.replace('_', ' ')}: {summary[name]:.1%}")
    for name, family in summary["families"].items():
        print(f"{name}: score {family['score']:.1%}, wholly right {family['correct']} of {family['total']}")


def _numbers(option: str, text: str, kind: Callable[[str], Any]) -> list[Any]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} is {text!r}; give numbers separated by commas") from None


def _lengths(text: str | None, longest: int) -> list[int]:
    if text is not None:
        lengths = _numbers("--lengths", text, int)
        if max(lengths) > longest:
            raise ValueError(
                f"--lengths has {max(lengths)}, but the context is {longest} tokens; shorten it, or raise --max-length"
            )
        return lengths
    doubled = [_SHORTEST << k for k in range(40) if _SHORTEST << k <= longest]
    return doubled or [longest]


def _video_lengths(lengths: str | None, unit: str, fps: float, player: _Player, codes_per_frame: int) -> list[int]:
    """--lengths in tokens, whatever they count."""
    if unit not in ("tokens", "frames", "minutes"):
        raise ValueError(f"--length-unit is {unit!r}; give tokens, frames or minutes")
    if unit == "tokens" or lengths is None:
        return _lengths(lengths, player.longest)
    from eval.needle_video import tokens_of_frames

    factor = 1.0 if unit == "frames" else 60 * fps
    counts = [max(1, round(factor * value)) for value in _numbers("--lengths", lengths, float)]
    tokens = [tokens_of_frames(count, codes_per_frame, player.text, player.vocabulary) for count in counts]
    shown = ", ".join(f"{count} frames: {size}" for count, size in zip(counts, tokens, strict=True))
    print(f"lengths in tokens: {shown}")
    return _lengths(",".join(map(str, tokens)), player.longest)


def _texts(files: Sequence[Path], seed: int) -> list[str]:
    """Files, else the demo's text that its training leaves out, else sentences from a small grammar."""
    if files:
        from lwm.prompts import read_document

        return [read_document(file) for file in files]
    try:
        from lwm.demo_world import chapters

        return list(chapters(held_out=True).values())
    except ValueError as error:
        import numpy as np

        from data.synthetic import sentences

        print(f"haystack of generated sentences: {error}")
        return list(sentences(np.random.default_rng(seed), 2000))


def _clips(paths: Sequence[Path], size: int, fps: float, seed: int) -> list[np.ndarray]:
    """Pixels of files, else of the demo's clips, else of moving shapes."""
    import numpy as np

    from data.demo_material import demo_clips
    from data.synthetic import shape_clip
    from data.video import read_frames
    from lwm.media import find

    try:
        files = find(paths) if paths else list(demo_clips().values())
    except ValueError as error:
        if paths:
            raise
        print(f"haystack of moving shapes: {error}")
        rng = np.random.default_rng(seed)
        return [shape_clip(rng, 16, size)[0] for _ in range(8)]
    return [read_frames(file, fps=fps, size=size).pixels for file in files]


def _vision(player: _Player) -> tuple[Callable[[np.ndarray], np.ndarray], int]:
    """What turns frames into codes, and the size of the frames."""
    if player.run is not None:
        vision = player.run.need_vision()
        return vision.encode, vision.config.resolution
    if player.config is not None:
        from lwm.corpora import vision_tokenizer_of

        vision = vision_tokenizer_of(player.config)
        return vision.encode, vision.config.resolution
    return _patch_names, 64


def _patch_names(pixels: np.ndarray) -> np.ndarray:
    """Codes [T, 16] that tell 16 x 16 patches apart and mean nothing: enough for models that read without seeing."""
    import zlib

    import numpy as np

    T, H, W, _ = pixels.shape
    patches = pixels.reshape(T, H // 16, 16, W // 16, 16, 3).swapaxes(2, 3).reshape(-1, 16 * 16 * 3)
    names = [zlib.crc32(patch.tobytes()) % 512 for patch in patches]
    return np.asarray(names, np.int32).reshape(T, -1)
