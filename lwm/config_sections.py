"""Sections of the configuration about running and surviving, and what all of them share (see `lwm.config`)."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$", max_length=80)]


class Section(BaseModel):
    """Unknown keys, lists and lossy conversions ("1" for 1, True for 1.0) are refused, so equal means equal."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=False)


def rule_error(field: str, message: str) -> PydanticCustomError:
    """An error of a rule that joins several fields, reported at the line of `field`."""
    return PydanticCustomError("rule", "{message}", {"message": message, "field": field})


class GuardConfig(Section):
    """Which updates are not made. One whose loss or gradient is not finite never is; spikes only where a factor says.

    What is typical is a running mean over the stage's updates so far, about the last 50 of them.
    """

    loss_factor: Annotated[float, Field(gt=1)] | None = Field(
        default=None, description="skip updates whose loss is above this many times the typical one; null: none"
    )
    norm_factor: Annotated[float, Field(gt=1)] | None = Field(
        default=None, description="skip updates whose gradient norm is above this many times the typical; null: none"
    )
    after_steps: NonNegative = Field(default=50, description="updates of a stage before spikes are looked for")
    max_in_a_row: Positive = Field(
        default=10, description="skipped updates in a row after which the run saves and ends with exit code 44"
    )


class NeedlesConfig(Section):
    """Needles to look for at the end of a stage; accuracies and pictures go to the run's telemetry."""

    lengths: tuple[Positive, ...] = Field(min_length=1, description="context lengths in tokens, none above seq_len")
    depths: tuple[Annotated[float, Field(ge=0, le=1)], ...] = Field(
        default=(0.0, 0.25, 0.5, 0.75, 1.0), min_length=1, description="places of the needle, from 0 (start) to 1 (end)"
    )
    rounds: Positive = Field(default=2, description="cases per length and depth")
    haystack: tuple[str, ...] = Field(
        default=(), description="text files to hide needles in; none: generated sentences"
    )
    video: tuple[str, ...] = Field(
        default=(), description="videos, or folders of them, to hide number plates in; none: needles in text only"
    )


class CheckpointConfig(Section):
    """When to save and what to keep."""

    every_steps: Positive = Field(default=100, description="steps between saves; a stage's last step is always saved")
    keep_last: Positive = Field(default=2, description="number of most recent checkpoints kept")
    keep_every: Positive | None = Field(
        default=None, description="also keep, for ever, checkpoints whose step of the run divides by this; null: none"
    )
    max_failed_saves: Positive = Field(
        default=3, description="failed saves in a row, such as on a full disk, after which the run ends"
    )
    data_change: Literal["refuse", "accept"] = Field(
        default="refuse",
        description="whether a stage may continue on other data (seed, batch, corpora, packing) than it began with",
    )
    resume: Literal["auto", "must", "never"] = Field(
        default="auto",
        description="auto: continue where there is something; must: refuse a fresh start; never: refuse an old run",
    )


class ClusterConfig(Section):
    """How processes on several hosts find and lose each other, and when a run counts as stuck."""

    join: Literal["auto", "yes", "no"] = Field(
        default="auto", description="join other processes; auto: when Slurm, MPI, a TPU pod or the launcher says so"
    )
    init_seconds: Positive = Field(default=300, description="how long processes wait for each other at the start")
    heartbeat_seconds: Positive = Field(
        default=100, description="silence after which a process counts as dead and the others end"
    )
    hang_seconds: PositiveFloat | None = Field(
        default=1800.0,
        description="time without a completed step or save after which the run ends with exit code 43; null: never",
    )


class TelemetryConfig(Section):
    """What is reported, where and how often. Metrics always go to metrics.jsonl in the run directory."""

    log_every: Positive = Field(default=1, description="steps between console lines")
    wandb: Literal["auto", "online", "offline", "off"] = Field(
        default="auto", description="Weights & Biases; auto: online with a key, else offline; never delays training"
    )
    wandb_project: str = Field(default="lwm", min_length=1, description="Weights & Biases project")
    wandb_entity: str | None = Field(default=None, description="Weights & Biases team or user")
    tensorboard: bool = Field(
        default=False, description="also write TensorBoard files to the run directory; needs the package tensorboardX"
    )
    profile_from: Positive | None = Field(
        default=None, description="step of the run whose trace is recorded; null: only where RUN_DIR/profile is touched"
    )
    profile_steps: Positive = Field(default=3, description="steps in one trace of jax's profiler")
    peak_flops: PositiveFloat | None = Field(
        default=None, description="peak FLOP/s of one device, for MFU, where the device is not a known TPU or GPU"
    )
