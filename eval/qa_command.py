"""The command `lwm eval video-qa`. Heavy imports are inside it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lwm.options import (
    DummyOption,
    EndpointModelOption,
    EndpointOption,
    EvalCheckpointOption,
    MaxLengthOption,
    OutOption,
    OverridesArgument,
    RunConfigOption,
    SeedOption,
    SystemOption,
)


def eval_video_qa(
    dataset: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="Questions: Video-MME, MVBench, LongVideoBench, EgoSchema, NExT-QA, "
            "MSVD/MSRVTT/ActivityNet-QA (..._q.json), VNBench; json, jsonl or csv.",
        ),
    ],
    out: OutOption,
    overrides: OverridesArgument = None,
    videos: Annotated[Path | None, typer.Option(metavar="DIR", help="Where the videos are.")] = None,
    answers: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Answers, where they are apart [default: ..._a.json beside it].")
    ] = None,
    checkpoint: EvalCheckpointOption = None,
    model: DummyOption = None,
    endpoint: EndpointOption = None,
    endpoint_model: EndpointModelOption = "default",
    config: RunConfigOption = None,
    circular: Annotated[
        bool, typer.Option("--circular", help="Ask with the options in every turn; right is who is right in all.")
    ] = False,
    blind: Annotated[bool, typer.Option("--blind", help="Without the videos: the guess rate.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="The first questions only.")] = None,
    frames: Annotated[
        int | None, typer.Option(min=1, help="Frames of each video [default: 32, or what fits the context].")
    ] = None,
    order: Annotated[str, typer.Option(help="question-first or media-first, as in training.")] = "question-first",
    system: SystemOption = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 32,
    max_length: MaxLengthOption = None,
    seed: SeedOption = 0,
) -> None:
    """Answer a benchmark's questions about videos."""
    import dataclasses

    from eval import qa_formats, video_qa
    from lwm.telemetry import Progress

    if sum(each is not None for each in (checkpoint, model, endpoint)) != 1:
        raise ValueError("give one of --checkpoint DIR, --model oracle|random|first-k and --endpoint URL")
    questions = qa_formats.read_questions(dataset, answers)
    if limit is not None:
        questions = dataclasses.replace(questions, questions=questions.questions[:limit])
    if videos is None and not blind and model is None:
        raise ValueError("give --videos DIR, or --blind to ask without videos")
    if videos is not None and not videos.is_dir():
        raise ValueError(f"--videos {videos} is not a folder")
    player: Any
    if checkpoint is not None:
        from data.examples import SYSTEM
        from eval.sampler_qa import SamplerVideoModel
        from lwm.serving import open_run

        run = open_run(checkpoint, config, overrides or (), max_length=max_length, max_batch=1, one_row=True)
        opening = SYSTEM if system is None else system
        player = SamplerVideoModel(run, num_frames=frames, order=order, system=opening, max_new_tokens=max_new_tokens)
        identity = f"{run.identity} {frames} {order} {opening!r} {max_new_tokens} {run.sampler.max_length}"
    elif endpoint is not None:
        from eval.endpoint import Endpoint, EndpointVideoModel

        client = Endpoint(endpoint, endpoint_model, max_new_tokens=max_new_tokens)
        player = EndpointVideoModel(client, num_frames=frames or 32)
        identity = f"{endpoint} {endpoint_model} {frames} {max_new_tokens}"
    else:
        assert model is not None
        player, identity = video_qa.Dummy(model, questions, circular=circular, seed=seed), f"{model}-{seed}"
    total = sum(1 for _ in video_qa.turns(questions.questions, circular=circular))
    with Progress("video questions", total, unit="cases") as bar:
        summary = video_qa.run(
            questions,
            player,
            out,
            # A dummy sees no video; a folder that is not there must not make it fail.
            videos=videos,
            model_id=identity,
            circular=circular,
            blind=blind or (model is not None and videos is None),
            progress=lambda done, right: bar(done, f"{right} right"),
        )
    print(f"{questions.format}: {summary['num_cases']} cases, {summary['num_errors']} failed")
    if summary["accuracy"] is None:
        print(f"no answers to compare with: the predictions are in {out / 'submission.json'}")
        return
    low, high = summary["interval"]
    chance = "" if not summary["chance"] else f", guessing {summary['chance']:.1%}"
    print(f"accuracy {summary['accuracy']:.1%} ({low:.1%} to {high:.1%}{chance})")
    if summary["circular_accuracy"] is not None:
        print(f"right in every turn: {summary['circular_accuracy']:.1%}")
    for name, group in summary["groups"].items():
        shown = ", ".join(f"{value} {each['accuracy']:.0%} of {each['total']}" for value, each in group.items())
        print(f"{name}: {shown}")
    for failed in summary["errors"]:
        print(f"failed {failed['id']}: {failed['error']}")
