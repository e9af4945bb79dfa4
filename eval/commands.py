"""The commands `lwm eval ...`: build the cases, put them to a model, score, draw. Heavy imports are inside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    EvalCheckpointOption,
    EvalConfigOption,
    FirstKOption,
    LengthsOption,
    MaxLengthOption,
    OutOption,
    OverridesArgument,
    RoundsOption,
    SeedOption,
)

if TYPE_CHECKING:
    import numpy as np

    from data.text import TextTokenizer
    from eval.protocol import Case
    from lwm.config import RunConfig
    from lwm.serving import OpenRun

app = typer.Typer(help="Measure what a model can do.", no_args_is_help=True, rich_markup_mode=None)
app.command("video-qa")(eval_video_qa)

_DEPTHS = "0,0.25,0.5,0.75,1"
_SHORTEST = 512
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
    seed: SeedOption = 0,
    first_k: FirstKOption = _SHORTEST,
    batch_size: BatchOption = 8,
    batch_tokens: BatchTokensOption = None,
    max_length: MaxLengthOption = None,
) -> None:
    """Find a number in a long text."""
    from data.synthetic import Haystack
    from eval import needle_text

    texts = _texts(haystack or [], seed)
    player = _open(out, checkpoint, model, config, overrides, max_length, batch_size, texts)
    cases = needle_text.build_cases(
        _lengths(lengths, player.longest),
        _numbers("--depths", depths, float),
        rounds,
        seed,
        player.text,
        Haystack(texts, player.text),
        num_distractors=distractors,
        distractor_rounds=distractor_rounds,
        control_rounds=control_rounds,
    )
    _play(
        out, player, cases, needle_text.reader(player.text), "Needles in text", first_k, seed, batch_size, batch_tokens
    )


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
    seed: SeedOption = 0,
    first_k: FirstKOption = _SHORTEST,
    batch_size: BatchOption = 8,
    batch_tokens: BatchTokensOption = None,
    max_length: MaxLengthOption = None,
) -> None:
    """Find a number plate in a long video."""
    from eval import needle_video
    from eval.haystack import VideoHaystack

    player = _open(out, checkpoint, model, config, overrides, max_length, batch_size, _texts([], seed))
    encode, size = _vision(player)
    pixels = _clips(videos or [], size, fps, seed)
    plates = needle_video.encode_plates(encode, size)
    if ambiguous := needle_video.num_ambiguous(plates):
        print(f"{ambiguous} of {len(plates)} plates have the same codes as another one: they cannot be told apart")
    cases = needle_video.build_cases(
        _lengths(lengths, player.longest),
        _numbers("--depths", depths, float),
        rounds,
        seed,
        player.text,
        VideoHaystack(tuple(encode(clip) for clip in pixels)),
        vocabulary=player.vocabulary,
        plates=plates,
        control_rounds=control_rounds,
    )
    read = needle_video.reader(player.text, player.vocabulary, plates)
    _play(out, player, cases, read, "Needles in video", first_k, seed, batch_size, batch_tokens)
    longest = [case for case in cases if case.kind == "single" and case.length == max(c.length for c in cases)]
    shown = needle_video.picture(out / "needle_in_place.png", longest[len(longest) // 2], pixels)
    print(f"one of the videos: {shown.path}")


@dataclass(frozen=True, eq=False)
class _Player:
    """Who answers, and in which ids. run: an open checkpoint; dummy: the name of a model that needs none."""

    text: TextTokenizer
    vocabulary: Any
    longest: int
    config: RunConfig | None
    run: OpenRun | None
    dummy: str | None


def _open(
    out: Path,
    checkpoint: Path | None,
    dummy: str | None,
    config: str | None,
    overrides: Sequence[str] | None,
    max_length: int | None,
    max_batch: int,
    texts: Sequence[str],
) -> _Player:
    if (checkpoint is None) == (dummy is None):
        raise ValueError("give either --checkpoint DIR or --model oracle, random or first-k")
    from data.vocabulary import Vocabulary

    if checkpoint is not None:
        from lwm.serving import open_run

        run = open_run(checkpoint, config, overrides or (), max_length=max_length, max_batch=max_batch)
        return _Player(run.text, run.vocabulary, run.sampler.max_length, run.config, run, None)
    longest = max_length or _LONGEST_DUMMY
    if config is not None:
        from lwm.config import load_config
        from lwm.corpora import text_tokenizer_of, vocabulary_of

        loaded = load_config(config, overrides or ())
        return _Player(text_tokenizer_of(loaded), vocabulary_of(loaded), longest, loaded, None, dummy)
    from data.text import TextTokenizer, train_tokenizer

    path = out / "text.model"
    text = TextTokenizer.load(path) if path.exists() else train_tokenizer(texts, path, size=512)
    return _Player(text, Vocabulary(text.size, 512, 514), longest, None, None, dummy)


def _play(
    out: Path,
    player: _Player,
    cases: Sequence[Case],
    read: Any,
    title: str,
    first_k: int,
    seed: int,
    batch_size: int,
    batch_tokens: int | None,
) -> None:
    from eval import dummies, plots, runner
    from eval.haystack import answer_decoder
    from lwm.telemetry import Progress

    model: Any
    if player.run is not None:
        model, identity = player.run.sampler, player.run.identity
    else:
        assert player.dummy is not None
        model = dummies.make(player.dummy, read, player.text.encode, first_k=first_k, seed=seed)
        identity = f"{player.dummy}-{first_k}-{seed}" if player.dummy == "first-k" else f"{player.dummy}-{seed}"
    with Progress(title.lower(), len(cases), unit="cases") as bar:
        summary = runner.evaluate(
            cases,
            model,
            out,
            model_id=identity,
            decode=answer_decoder(player.text),
            stop_id=player.text.eos_id,
            batch_size=batch_size,
            batch_tokens=batch_tokens,
            progress=lambda now: bar(now.done, f"{now.correct} right"),
        )
    plots.heatmap(out / "heatmap", summary, title=title)
    by_length = ", ".join(f"{length}: {value:.0%}" for length, value in summary["accuracy_by_length"].items())
    print(f"{title.lower()}: {summary['accuracy']:.1%} right ({by_length})")
    for name in ("distractor_accuracy", "control_accuracy"):
        if summary[name] is not None:
            print(f"{name.replace('_', ' ')}: {summary[name]:.1%}")
    print(f"{out / runner.SUMMARY_NAME}, {out / 'heatmap.png'}")
    if player.run is not None:
        print(player.run.sampler.usage)


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
