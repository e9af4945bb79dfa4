"""Command-line options that several commands share."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand


class ConfigCommand(TyperCommand):
    """A command that takes a configuration: its help explains every field that can be overridden."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from lwm.config_help import field_table

        super().format_help(ctx, formatter)
        formatter.write("\nFields of CONFIG, to override as field=value (* is an entry's index or name):\n\n")
        formatter.write(field_table() + "\n")


ConfigArgument = Annotated[
    str, typer.Argument(metavar="CONFIG", help="A YAML file, or the name of a shipped one (tiny).")
]


OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[field=value]...", help="Overrides: seed=1, stages.0.steps=10, stages.NAME.mesh.sp=4."),
]
CheckpointOption = Annotated[
    Path, typer.Option("--checkpoint", metavar="DIR", help="A run directory, its checkpoints, or one step in it.")
]
RunConfigOption = Annotated[
    str | None,
    typer.Option("--config", metavar="CONFIG", help="What the model was trained with [default: its run directory's]."),
]
EvalConfigOption = Annotated[
    str | None,
    typer.Option(
        "--config", metavar="CONFIG", help="Whose tokenizers to use [default: the checkpoint's; else made for this]."
    ),
]
SystemOption = Annotated[
    str | None, typer.Option("--system", help="What stands before USER:, as in training [default: the templates'].")
]
OutOption = Annotated[Path, typer.Option("--out", metavar="DIR", help="Where records, summary and pictures go.")]
LengthsOption = Annotated[
    str | None,
    typer.Option("--lengths", metavar="N,...", help="Context lengths in tokens [default: 512, 1024, ... that fit]."),
]
DepthsOption = Annotated[str, typer.Option("--depths", metavar="X,...", help="Places of the needle, 0 to 1.")]
RoundsOption = Annotated[int, typer.Option("--rounds", min=1, help="Cases per length and depth.")]
ControlsOption = Annotated[
    int | None, typer.Option("--control-rounds", min=0, help="Controls of each kind per length [default: the rounds].")
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Decides all that is random.")]
DummyOption = Annotated[
    str | None, typer.Option("--model", help="In place of a checkpoint: oracle, random or first-k.")
]
EndpointOption = Annotated[
    str | None,
    typer.Option(
        "--endpoint", metavar="URL", help="Or an OpenAI-compatible server; its key is what OPENAI_API_KEY holds."
    ),
]
EndpointModelOption = Annotated[str, typer.Option("--endpoint-model", metavar="NAME", help="The model's name there.")]
EvalCheckpointOption = Annotated[
    Path | None, typer.Option("--checkpoint", metavar="DIR", help="A run directory, its checkpoints, or one step.")
]
FamilyRoundsOption = Annotated[int, typer.Option("--family-rounds", min=1, help="Cases per family and length.")]
NeedlesOption = Annotated[int, typer.Option("--needles", min=2, help="Needles in a family's case, at most.")]
StepOption = Annotated[
    str,
    typer.Option(
        "--step",
        help="all, or some of build (the manifest), run (ask), score, plot; each goes on from what is in --out.",
    ),
]
WandbOption = Annotated[
    str | None, typer.Option("--wandb", metavar="PROJECT", help="Log numbers and heatmap to Weights & Biases, too.")
]
FirstKOption = Annotated[int, typer.Option("--first-k", min=1, help="Tokens that the model first-k reads.")]
BatchOption = Annotated[int, typer.Option("--batch-size", min=1, help="Prompts at once.")]
BatchTokensOption = Annotated[int | None, typer.Option("--batch-tokens", min=1, help="Tokens at once, at most.")]
PrefillChunkOption = Annotated[
    int | None, typer.Option("--prefill-chunk", min=1, help="Tokens of a long prompt that are read at once.")
]
MaxLengthOption = Annotated[
    int | None, typer.Option("--max-length", min=2, help="The context in tokens [default: the trained one].")
]
