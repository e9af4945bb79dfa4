"""The configuration: frozen, typed, hashable models; one file is one run.

The program sees only these objects. Parsing has no side effects; values that depend on others or on the number of
devices are derived once, on the final object (`resolve_stage`). Files and overrides are read by `load_config`.
"""

import difflib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from lwm import config_io
from lwm.config_io import ConfigError
from lwm.config_sections import (
    CheckpointConfig,
    ClusterConfig,
    GuardConfig,
    Name,
    NeedlesConfig,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
    TelemetryConfig,
    rule_error,
)

MESH_AXES = ("dp", "fsdp", "tp", "sp", "ulysses")


class RopeScalingConfig(Section):
    """Llama 3's scaling of rotary frequencies for contexts longer than the pretrained one."""

    kind: Literal["llama3"] = Field(default="llama3", description="the scaling rule")
    factor: PositiveFloat = Field(description="how many times longer the context is than the pretrained one")
    low_freq_factor: PositiveFloat = Field(
        default=1.0, description="wavelengths above original_seq_len / it are stretched"
    )
    high_freq_factor: PositiveFloat = Field(default=4.0, description="wavelengths below original_seq_len / it are kept")
    original_seq_len: Positive = Field(description="context length of pretraining, in tokens")


class ModelConfig(Section):
    """A decoder-only transformer of the LLaMA family, with a second vocabulary for vision."""

    text_vocab_size: Positive = Field(description="number of text token ids; vision ids start here")
    vision_vocab_size: NonNegative = Field(
        default=0, description="number of vision token ids (codes, <eof>, <eov>); 0: text only"
    )
    hidden_size: Positive = Field(description="width of the residual stream")
    intermediate_size: Positive = Field(description="width inside the feed-forward block")
    num_layers: Positive = Field(description="number of transformer layers")
    num_heads: Positive = Field(description="number of query heads")
    num_kv_heads: Positive = Field(
        default=0, description="number of key-value heads, a divisor of num_heads (default: num_heads)"
    )
    head_dim: Positive = Field(default=0, description="width of one head, even (default: hidden_size / num_heads)")
    norm_eps: PositiveFloat = Field(default=1e-5, description="epsilon inside RMSNorm")
    rope_theta: PositiveFloat = Field(default=1e4, description="rotary base; a stage's own replaces it")
    rope_scaling: RopeScalingConfig | None = Field(default=None, description="rotary scaling, as in Llama 3.1")
    tie_embeddings: bool = Field(default=False, description="use the embedding tables as output heads as well")
    init_std: PositiveFloat = Field(default=0.02, description="standard deviation of the initial weights")

    @property
    def vocab_size(self) -> int:
        """Text and vision ids together."""
        return self.text_vocab_size + self.vision_vocab_size

    @model_validator(mode="before")
    @classmethod
    def _fill_heads(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        filled = dict(values)
        heads, hidden = filled.get("num_heads"), filled.get("hidden_size")
        if type(heads) is not int or heads <= 0 or type(hidden) is not int:
            return filled
        if filled.get("num_kv_heads") is None:
            filled["num_kv_heads"] = heads
        if filled.get("head_dim") is None:
            if hidden % heads:
                raise rule_error(
                    "hidden_size",
                    f"hidden_size {hidden} is not a multiple of num_heads {heads}; change one, or set head_dim",
                )
            filled["head_dim"] = hidden // heads
        return filled

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise rule_error(
                "num_kv_heads",
                f"num_kv_heads {self.num_kv_heads} does not divide num_heads {self.num_heads}; use a divisor",
            )
        if self.head_dim % 2:
            raise rule_error(
                "head_dim", f"head_dim {self.head_dim} is odd; rotary embeddings turn pairs, so use an even one"
            )
        return self


class VQGANConfig(Section):
    """The vision tokenizer: a frame becomes (resolution / 2^(levels-1))^2 codes."""

    resolution: Positive = Field(description="side of the square frames, in pixels")
    num_channels: Positive = Field(default=3, description="colour channels")
    hidden_channels: Positive = Field(description="channels at full resolution")
    channel_mult: tuple[Positive, ...] = Field(
        min_length=1, description="channel multiplier of each level, finest first"
    )
    num_res_blocks: Positive = Field(description="residual blocks per level")
    attn_resolutions: tuple[Positive, ...] = Field(default=(), description="resolutions with self-attention")
    no_attn_mid_block: bool = Field(default=True, description="leave self-attention out of the middle block")
    z_channels: Positive = Field(description="channels of the latent before quantisation")
    num_embeddings: Positive = Field(description="number of codebook vectors")
    quantized_embed_dim: Positive = Field(description="length of a codebook vector")
    resample_with_conv: bool = Field(default=True, description="convolve when changing resolution")

    @model_validator(mode="after")
    def _check_resolution(self) -> Self:
        step = 2 ** (len(self.channel_mult) - 1)
        if self.resolution % step:
            raise rule_error(
                "resolution",
                f"resolution {self.resolution} is not a multiple of {step}, the reduction of"
                f" {len(self.channel_mult)} levels in channel_mult; change one of them",
            )
        return self

    @property
    def codes_per_frame(self) -> int:
        """Codes of one frame."""
        return (self.resolution // 2 ** (len(self.channel_mult) - 1)) ** 2


class MeshConfig(Section):
    """Sizes of the mesh axes; their product is the number of devices, and one of them may be -1: whatever is left."""

    dp: int = Field(default=1, description="data parallel: weights copied, batch rows split")
    fsdp: int = Field(default=-1, description="fully sharded data parallel: weights and batch rows split")
    tp: int = Field(default=1, description="tensor parallel: heads and feed-forward split")
    sp: int = Field(default=1, description="ring over the sequence")
    ulysses: int = Field(default=1, description="exchange of heads for sequence, inside one ring position")

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        for axis in MESH_AXES:
            if (size := getattr(self, axis)) < 1 and size != -1:
                raise rule_error(axis, f"mesh axis {axis} is {size}; it must be at least 1, or -1 for what is left")
        if len(free := [axis for axis in MESH_AXES if getattr(self, axis) == -1]) > 1:
            raise rule_error(free[-1], f"mesh axes {' and '.join(free)} are both -1; only one can take what is left")
        return self


class AttentionConfig(Section):
    """How attention is spread over the sequence axes of the mesh."""

    strategy: Literal["ring", "ulysses", "all_gather", "usp", "auto"] = Field(
        default="ring", description="how queries meet the keys of other devices"
    )
    layout: Literal["contiguous", "striped", "zigzag"] = Field(
        default="striped", description="order of tokens over devices; striped and zigzag balance causal work"
    )
    query_block: Positive | None = Field(default=None, description="queries per block of the kernel (default: chosen)")
    key_block: Positive | None = Field(default=None, description="keys per block of the kernel (default: chosen)")
    head_parts: Positive = Field(
        default=1, description="parts of the heads that are worked through in turn, for less memory"
    )
    transit_dtype: Literal["bfloat16", "float16", "int8"] | None = Field(
        default=None, description="dtype of keys and values between devices (default: as computed)"
    )
    backend: Literal["auto", "xla", "pallas_tpu"] = Field(
        default="auto", description="the local kernel; auto: pallas_tpu on TPUs, xla elsewhere"
    )


class OptimizerConfig(Section):
    """AdamW with warm-up; the learning rate restarts with each stage."""

    peak_lr: PositiveFloat = Field(description="learning rate after warm-up")
    min_lr: NonNegativeFloat = Field(default=0.0, description="learning rate at the end of a cosine or linear schedule")
    warmup_steps: NonNegative = Field(description="steps of linear warm-up from 0")
    schedule: Literal["constant", "cosine", "linear"] = Field(default="constant", description="shape after warm-up")
    b1: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.9, description="decay of Adam's first moment")
    b2: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.95, description="decay of Adam's second moment")
    eps: PositiveFloat = Field(default=1e-8, description="Adam's epsilon")
    weight_decay: NonNegativeFloat = Field(default=0.1, description="decoupled weight decay")
    clip_norm: PositiveFloat | None = Field(default=1.0, description="gradient norm to clip to; null: no clipping")

    @model_validator(mode="after")
    def _check_rates(self) -> Self:
        if self.min_lr > self.peak_lr:
            raise rule_error("min_lr", f"min_lr {self.min_lr:g} is above peak_lr {self.peak_lr:g}; lower it")
        return self


class MixtureEntry(Section):
    """One corpus and its part of a stage's data."""

    corpus: Name = Field(description="name of an entry of corpora")
    share: PositiveFloat = Field(description="weight of the corpus; shares are relative to their sum")


class StageConfig(Section):
    """One stage of progressive training: everything that may change as the context grows."""

    name: Name = Field(description="name of the stage, unique in the run")
    seq_len: Annotated[int, Field(ge=2)] = Field(description="tokens in one row")
    batch_rows: Positive = Field(description="rows in one global batch; a step sees batch_rows * seq_len tokens")
    steps: Positive = Field(description="optimizer steps in this stage")
    rope_theta: PositiveFloat = Field(description="rotary base of this stage")
    mesh: MeshConfig = Field(default=MeshConfig(), description="how devices are arranged")
    attention: AttentionConfig = Field(default=AttentionConfig(), description="how attention is spread over devices")
    optimizer: OptimizerConfig = Field(description="AdamW and its schedule")
    accumulate: Positive = Field(
        default=1, description="parts of the batch whose gradients are taken one after the other and added"
    )
    guard: GuardConfig = Field(default=GuardConfig(), description="updates that are not made: not finite, or spikes")
    mixture: tuple[MixtureEntry, ...] = Field(min_length=1, description="corpora and their shares")
    share_unit: Literal["tokens", "examples"] = Field(default="tokens", description="what the shares count")
    packing: Literal["masked", "concat", "pad"] = Field(
        default="masked",
        description="masked: rows of examples that do not see each other; concat: one stream; pad: one a row",
    )
    least_fill: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0,
        description="where whole examples fill less than this share of a row, some are cut to fill more; 0: only those "
        "longer than a row are",
    )
    max_damaged: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.001,
        description="share of a corpus's examples that may turn out damaged when they are read: each is left out and "
        "listed in damaged_examples.jsonl; more end the run",
    )
    pack_together: bool = Field(
        default=True, description="rows may hold examples of several corpora; false: each row those of one"
    )
    weighting: Literal["example", "token"] = Field(
        default="example", description="example: examples and modalities count alike, as if padded; token: each token"
    )
    carry: Literal["weights", "all"] = Field(
        default="weights", description="what comes from the stage before: weights, or also the optimizer's moments"
    )
    init_from: str = Field(
        default="previous",
        min_length=1,
        description="previous (the stage before; the first starts from scratch), scratch, or a checkpoint directory",
    )
    needles: NeedlesConfig | None = Field(
        default=None, description="needles to look for at the end of the stage; null: none"
    )
    remat: Literal["full", "attention", "none", "offload", "offload_attention"] = Field(
        default="full",
        description="what the backward pass recomputes: everything, everything but attention, nothing; offload,"
        " offload_attention: as full and attention, with what is kept in the host's memory",
    )
    compute_dtype: Literal["bfloat16", "float32"] = Field(default="bfloat16", description="dtype of activations")
    mlp_chunk: Positive | None = Field(
        default=None, description="tokens at a time in the feed-forward, per device; null: all"
    )
    loss_chunk: Positive | None = Field(
        default=None, description="learned tokens at a time in the loss, per device; null: all"
    )

    @property
    def tokens_per_step(self) -> int:
        """Slots in one global batch."""
        return self.batch_rows * self.seq_len

    @property
    def shares(self) -> dict[str, float]:
        """Corpus name -> share, as the loader takes them."""
        return {entry.corpus: entry.share for entry in self.mixture}

    @model_validator(mode="after")
    def _check_stage(self) -> Self:
        names = [entry.corpus for entry in self.mixture]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise rule_error(
                    f"mixture.{index}.corpus", f"stage {self.name}: corpus {name!r} is in the mixture twice"
                )
        if self.optimizer.warmup_steps > self.steps:
            raise rule_error(
                "optimizer.warmup_steps",
                f"stage {self.name}: warmup_steps {self.optimizer.warmup_steps} is above steps {self.steps}; lower it",
            )
        if self.mesh.sp != -1 and self.mesh.ulysses != -1:
            _check_split(self, self.mesh.sp * self.mesh.ulysses)
        return self


class TokenizersConfig(Section):
    """Files of the two tokenizers."""

    text: str | None = Field(default=None, description="SentencePiece model file")
    vision: str | None = Field(default=None, description="directory of VQGAN weights")


class CorpusConfig(Section):
    """A tokenized corpus on disk."""

    name: Name = Field(description="name by which mixtures refer to it")
    directory: str = Field(min_length=1, description="directory written by `lwm data build`")


class RunConfig(Section):
    """One run: a model, its data and its stages."""

    name: Name = Field(description="name of the run")
    seed: NonNegative = Field(default=0, description="seed of weights, data order and sampling")
    output_dir: str = Field(min_length=1, description="run directory: checkpoints, metrics, reports")
    devices: Positive | None = Field(
        default=None, description="number of accelerator devices the run is written for; `lwm check` assumes it"
    )
    simulated_devices: Positive | None = Field(
        default=None, description="number of devices to simulate when the run finds itself on a CPU"
    )
    model: ModelConfig = Field(description="the transformer")
    vqgan: VQGANConfig | None = Field(default=None, description="the vision tokenizer; null: none")
    tokenizers: TokenizersConfig = Field(default=TokenizersConfig(), description="tokenizer files")
    corpora: tuple[CorpusConfig, ...] = Field(min_length=1, description="tokenized corpora")
    stages: tuple[StageConfig, ...] = Field(min_length=1, description="stages, in order")
    checkpoint: CheckpointConfig = Field(default=CheckpointConfig(), description="saving and resuming")
    cluster: ClusterConfig = Field(default=ClusterConfig(), description="processes on several hosts")
    telemetry: TelemetryConfig = Field(default=TelemetryConfig(), description="console, files and trackers")

    def stage(self, name: str) -> StageConfig:
        """The stage called `name`; ValueError lists those there are."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise ConfigError(
            f"there is no stage {name!r}; the stages are {', '.join(stage.name for stage in self.stages)}"
        )

    @model_validator(mode="after")
    def _check_run(self) -> Self:
        stage_names = [stage.name for stage in self.stages]
        corpus_names = [corpus.name for corpus in self.corpora]
        for kind, names in (("stages", stage_names), ("corpora", corpus_names)):
            for index, name in enumerate(names):
                if name in names[:index]:
                    raise rule_error(
                        f"{kind}.{index}.name", f"{kind} has two entries named {name!r}; names must be unique"
                    )
        for index, stage in enumerate(self.stages):
            for position, entry in enumerate(stage.mixture):
                if entry.corpus not in corpus_names:
                    raise rule_error(
                        f"stages.{index}.mixture.{position}.corpus",
                        f"stage {stage.name}: corpus {entry.corpus!r} is not in corpora ({', '.join(corpus_names)})",
                    )
            _check_heads_split(self.model, stage, f"stages.{index}.")
        if self.vqgan is not None and self.model.vision_vocab_size < self.vqgan.num_embeddings + 2:
            raise rule_error(
                "model.vision_vocab_size",
                f"model.vision_vocab_size {self.model.vision_vocab_size} is too small for vqgan.num_embeddings"
                f" {self.vqgan.num_embeddings} codes and <eof>, <eov>; use at least {self.vqgan.num_embeddings + 2}",
            )
        return self


def _check_split(stage: StageConfig, shards: int) -> None:
    layout = stage.attention.layout
    pieces = 2 * shards if layout == "zigzag" else shards
    if stage.seq_len % pieces:
        nearest = max(stage.seq_len // pieces, 1) * pieces
        raise rule_error(
            "seq_len",
            f"stage {stage.name}: seq_len {stage.seq_len} cannot be split by the {layout} layout over {shards} sequence"
            f" shards (sp * ulysses); use a multiple of {pieces}, such as {nearest}",
        )


def _check_heads_split(model: ModelConfig, stage: StageConfig, prefix: str) -> None:
    tp, ulysses = max(stage.mesh.tp, 1), max(stage.mesh.ulysses, 1)
    for name, heads in (("num_heads", model.num_heads), ("num_kv_heads", model.num_kv_heads)):
        if heads % tp:
            raise rule_error(
                f"{prefix}mesh.tp",
                f"stage {stage.name}: model.{name} {heads} is not a multiple of mesh axis tp {tp};"
                f" use a divisor of {heads}",
            )
    parts = stage.attention.head_parts
    if model.num_kv_heads % (tp * parts):
        raise rule_error(
            f"{prefix}attention.head_parts",
            f"stage {stage.name}: model.num_kv_heads {model.num_kv_heads} is not a multiple of tp * head_parts ="
            f" {tp * parts}; use fewer head_parts",
        )
    # A plain ring only rotates over the axis; heads are not exchanged.
    if stage.attention.strategy != "ring" and model.num_heads % (tp * ulysses):
        raise rule_error(
            f"{prefix}mesh.ulysses",
            f"stage {stage.name}: model.num_heads {model.num_heads} is not a multiple of tp * ulysses = {tp * ulysses};"
            " use a smaller ulysses and a larger sp",
        )


def resolve_mesh(mesh: MeshConfig, num_devices: int) -> dict[str, int]:
    """Sizes of all five axes in mesh order, with the -1 replaced.

    Raises:
        ConfigError: the sizes do not multiply to `num_devices`.
    """
    sizes = {axis: int(getattr(mesh, axis)) for axis in MESH_AXES}
    text = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
    fixed = 1
    for size in sizes.values():
        fixed *= size if size != -1 else 1
    free = [axis for axis, size in sizes.items() if size == -1]
    if free and num_devices % fixed == 0:
        sizes[free[0]] = num_devices // fixed
    elif free:
        raise ConfigError(
            f"mesh ({text}) does not divide {num_devices} devices: the fixed sizes multiply to {fixed};"
            f" change them or use a multiple of {fixed} devices"
        )
    elif fixed != num_devices:
        raise ConfigError(
            f"mesh ({text}) needs {fixed} devices but there are {num_devices}; change the sizes or set one to -1"
        )
    return sizes


@dataclass(frozen=True)
class ResolvedStage:
    """What a stage comes to on a given number of devices: derived once, used everywhere.

    Attributes:
        stage: the stage as configured.
        model: the model with this stage's rope_theta.
        mesh: (axis, size) pairs in mesh order, no -1 left.
        data_shards: dp * fsdp, the parts the batch rows are split into.
        sequence_shards: sp * ulysses, the parts a row is split into.
    """

    stage: StageConfig
    model: ModelConfig
    mesh: tuple[tuple[str, int], ...]
    data_shards: int
    sequence_shards: int

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """Axis -> size, in mesh order."""
        return dict(self.mesh)

    @property
    def tokens_per_device(self) -> int:
        """Slots of one global batch that one device holds (tensor-parallel devices hold the same ones)."""
        return self.stage.tokens_per_step // (self.data_shards * self.sequence_shards)


def resolve_stage(config: RunConfig, stage: StageConfig, num_devices: int) -> ResolvedStage:
    """Fit one stage to `num_devices`.

    Raises:
        ConfigError: the mesh, the rows, the sequence or the heads cannot be split that way; names the stage.
    """
    try:
        sizes = resolve_mesh(stage.mesh, num_devices)
    except ConfigError as error:
        raise ConfigError(f"stage {stage.name}: {error}") from None
    data_shards = sizes["dp"] * sizes["fsdp"]
    if stage.batch_rows % data_shards:
        raise ConfigError(
            f"stage {stage.name}: batch_rows {stage.batch_rows} is not a multiple of dp * fsdp = {data_shards} on"
            f" {num_devices} devices; use a multiple of {data_shards}, or more tp or sp"
        )
    if stage.batch_rows % (data_shards * stage.accumulate):
        raise ConfigError(
            f"stage {stage.name}: batch_rows {stage.batch_rows} cannot be taken in accumulate {stage.accumulate} parts"
            f" on dp * fsdp = {data_shards}; use a multiple of {data_shards * stage.accumulate}, or a smaller"
            " accumulate"
        )
    sequence_shards = sizes["sp"] * sizes["ulysses"]
    try:
        _check_split(stage, sequence_shards)
        _check_heads_split(config.model, stage.model_copy(update={"mesh": MeshConfig(**sizes)}), "")
    except PydanticCustomError as error:
        raise ConfigError(error.message()) from None
    model = config.model.model_copy(update={"rope_theta": stage.rope_theta})
    return ResolvedStage(stage, model, tuple(sizes.items()), data_shards, sequence_shards)


def shipped_configs() -> dict[str, Path]:
    """Name -> file of the configurations that come with the package."""
    directory = Path(str(resources.files("configs")))
    return {path.stem: path for path in sorted(directory.glob("*.yaml"))}


def find_config(name_or_path: str | Path) -> Path:
    """A file as it is, or a shipped configuration by its name (`tiny`).

    Raises:
        ConfigError: neither; lists the shipped names.
    """
    path = Path(name_or_path)
    if path.is_file():
        return path
    shipped = shipped_configs()
    name = str(name_or_path).removesuffix(".yaml")
    if name in shipped:
        return shipped[name]
    close = difflib.get_close_matches(name, shipped, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"shipped configurations are {', '.join(shipped)}"
    raise ConfigError(f"there is no configuration file {str(name_or_path)!r}; {hint}")


def load_config(path_or_name: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read, override and validate a configuration.

    Args:
        path_or_name: a YAML file, or the name of a shipped one.
        overrides: `a.b=value`; list entries by index or name: `stages.0.steps=10`, `stages.long.mesh.sp=4`.

    Raises:
        ConfigError: one sentence with the file, the line, the field, the value and what is allowed.
    """
    tree = config_io.read_tree(find_config(path_or_name))
    config_io.apply_overrides(tree, overrides)
    try:
        return RunConfig.model_validate(config_io.freeze(tree.values))
    except ValidationError as error:
        raise ConfigError(config_io.describe(error, RunConfig, tree)) from error


def canonical_json(config: BaseModel) -> str:
    """The one text that equal configurations share: keys sorted, no spaces."""
    return json.dumps(config.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))


def fingerprint(config: BaseModel) -> str:
    """sha256 (hex) of the canonical JSON: the same in every process, unlike `hash`."""
    return hashlib.sha256(canonical_json(config).encode()).hexdigest()
