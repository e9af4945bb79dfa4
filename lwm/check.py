"""`lwm check`: does a configuration fit its devices, and roughly how much memory does each of them need.

Everything is abstract: the train step is traced on a mesh of as many devices as the run is written for, and none of
them need exist. Byte counts of parameters, gradients and optimizer follow from the parameter table; activations are an
estimate by the formula of `activation_bytes`, not the compiler's word.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
from jax.sharding import AbstractMesh, AxisType
from rich.console import Console
from rich.table import Table

from lwm import sharding, step
from lwm.config import ConfigError, ModelConfig, ResolvedStage, RunConfig, StageConfig, resolve_stage
from lwm.telemetry import format_count

FLOAT32_BYTES = 4
ADAM_MOMENTS = 2


@dataclass(frozen=True)
class StageMemory:
    """Bytes on one device in one stage, and how they come about.

    Attributes:
        resolved: the stage on its mesh.
        num_devices: devices of the mesh.
        num_parameters: parameters of the whole model.
        parameters: float32 master weights of this device.
        gradients: float32 gradients of this device.
        optimizer: Adam's two float32 moments of this device.
        activations: estimate of what the forward pass keeps plus the working set of one layer and the loss.
    """

    resolved: ResolvedStage
    num_devices: int
    num_parameters: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """Everything together."""
        return self.parameters + self.gradients + self.optimizer + self.activations


def parameter_counts(config: ModelConfig, mesh_sizes: dict[str, int]) -> tuple[int, int]:
    """Parameters of the whole model, and of one device; ValueError where a dim does not divide over the mesh."""
    table = sharding.parameter_table(config)
    specs = sharding.parameter_specs(config, mesh_sizes)
    total = local = 0
    for path, entry in table.items():
        count = math.prod(entry.shape)
        names = [
            axis
            for names in specs[path]
            if names is not None
            for axis in ((names,) if isinstance(names, str) else names)
        ]
        total += count
        local += count // math.prod(mesh_sizes[axis] for axis in names)
    return total, local


def kept_bytes(resolved: ResolvedStage) -> int:
    """Bytes on one device that one layer keeps from the forward pass for the backward pass.

    Its input (remat full), also attention's output and logsumexp (attention), or every intermediate (none). What goes
    to the host's memory is not counted.
    """
    stage, config = resolved.stage, resolved.model
    heads = config.num_heads * config.head_dim // resolved.mesh_sizes["tp"]
    lse = FLOAT32_BYTES * config.num_heads // resolved.mesh_sizes["tp"]
    width = _width(stage)
    per_token = {
        "full": width * config.hidden_size,
        "attention": width * (config.hidden_size + heads) + lse,
        "none": _layer_bytes_per_token(resolved),
        "offload": 0,
        "offload_attention": lse,
    }
    return _tokens_at_once(resolved) * per_token[stage.remat]


def _tokens_at_once(resolved: ResolvedStage) -> int:
    return resolved.tokens_per_device // resolved.stage.accumulate


def _width(stage: StageConfig) -> int:
    return 2 if stage.compute_dtype == "bfloat16" else FLOAT32_BYTES


def _layer_bytes_per_token(resolved: ResolvedStage) -> int:
    """All intermediates of one layer outside of a blockwise feed-forward, on one device, per token."""
    stage, config, tp = resolved.stage, resolved.model, resolved.mesh_sizes["tp"]
    heads, kv_heads = (count * config.head_dim // tp for count in (config.num_heads, config.num_kv_heads))
    # Two norms each keep their input and their scaled input in float32, and their output for the products after them.
    norms = 2 * (2 * FLOAT32_BYTES + _width(stage)) * config.hidden_size
    attention = _width(stage) * (2 * heads + 2 * kv_heads) + FLOAT32_BYTES * config.num_heads // tp
    # gate, up, and their gated product.
    feed_forward = 0 if stage.mlp_chunk else 3 * _width(stage) * config.intermediate_size // tp
    return norms + attention + feed_forward


def activation_bytes(resolved: ResolvedStage) -> int:
    """Estimated bytes of activations on one device at their peak.

    What all layers keep (`kept_bytes`), and once: the intermediates of the layer at work and as much again for their
    gradients, its weights gathered in the compute dtype, and one chunk of float32 logits with its gradient.
    """
    stage, config, tp = resolved.stage, resolved.model, resolved.mesh_sizes["tp"]
    tokens, width = _tokens_at_once(resolved), _width(stage)
    vocabulary = max(config.text_vocab_size, config.vision_vocab_size) // tp
    # At work, silu, its derivative and its product live beside what is kept.
    at_work = 6 * min(tokens, stage.mlp_chunk) if stage.mlp_chunk else 3 * tokens
    layer = tokens * _layer_bytes_per_token(resolved) + at_work * width * config.intermediate_size // tp
    head_dims = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
    weights = width * config.hidden_size * (head_dims + 3 * config.intermediate_size) // tp
    logits = 2 * FLOAT32_BYTES * min(tokens, stage.loss_chunk or tokens) * vocabulary
    return config.num_layers * kept_bytes(resolved) + 2 * layer + weights + logits


def stage_memory(config: RunConfig, stage: StageConfig, num_devices: int) -> StageMemory:
    """Memory of one stage; ValueError names what does not divide."""
    resolved = resolve_stage(config, stage, num_devices)
    try:
        total, local = parameter_counts(resolved.model, resolved.mesh_sizes)
    except ValueError as error:
        raise ConfigError(f"stage {stage.name}: {error}") from None
    size = local * FLOAT32_BYTES
    return StageMemory(
        resolved=resolved,
        num_devices=num_devices,
        num_parameters=total,
        parameters=size,
        # The sum so far, and those of the part at work.
        gradients=size if stage.accumulate == 1 else 2 * size,
        optimizer=ADAM_MOMENTS * size,
        activations=activation_bytes(resolved),
    )


def abstract_mesh(sizes: dict[str, int]) -> AbstractMesh:
    """A mesh without devices, with the axes in the order of `lwm.sharding`."""
    names = sharding.MESH_AXIS_NAMES
    return AbstractMesh(tuple(sizes[name] for name in names), names, axis_types=(AxisType.Auto,) * len(names))


def trace(resolved: ResolvedStage) -> None:
    """Trace the train step of a stage on its mesh: forward, backward and optimizer, nothing computed.

    Raises:
        ValueError: whatever the model, its attention, the objective or the optimizer refuses at trace time.
    """
    config, stage = resolved.model, resolved.stage
    mesh = abstract_mesh(resolved.mesh_sizes)
    state, batch = step.abstract_state(config, stage, mesh), step.abstract_batch(stage, mesh)
    after, metrics = jax.eval_shape(step.train_step(config, stage, step.compute_of(stage, mesh)), state, batch)
    before = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), after) == before, "a step must keep the state's shapes"
    assert metrics.loss.shape == (), metrics.loss.shape


def check(config: RunConfig, num_devices: int | None = None) -> list[StageMemory]:
    """Validate every stage on `num_devices` (default: what the configuration is written for) and trace it.

    Raises:
        ConfigError: one sentence naming the stage, the field, its value and what to change.
    """
    devices = num_devices or config.devices or config.simulated_devices
    if devices is None:
        raise ConfigError(f"{config.name}: devices is not set; set it, or say --devices N")
    reports = []
    for stage in config.stages:
        report = stage_memory(config, stage, devices)
        try:
            trace(report.resolved)
        except ValueError as error:
            raise ConfigError(f"stage {stage.name}: {error}") from error
        reports.append(report)
    return reports


def format_bytes(size: float) -> str:
    """`512 kB`, `1.23 GB`, `22 TB`; decimal units, as memory of accelerators is quoted."""
    unit, one = next(
        ((unit, one) for unit, one in (("kB", 1e3), ("MB", 1e6), ("GB", 1e9)) if size < 1e3 * one), ("TB", 1e12)
    )
    return f"{size / one:.3g} {unit}"


def memory_table(config: RunConfig, reports: Sequence[StageMemory]) -> Table:
    """One row per stage."""
    first = reports[0]
    table = Table(
        title=f"{config.name}: {first.num_parameters:,} parameters, memory per device on {first.num_devices} devices",
        caption="activations are an estimate: kept layer inputs, the layer at work, one chunk of logits",
    )
    table.add_column("stage")
    for column in ("seq_len", "rows", "steps", "mesh", "attention", "remat"):
        table.add_column(column, justify="right" if column in ("seq_len", "rows", "steps") else "left")
    for column in ("params", "grads", "adam", "activations", "total"):
        table.add_column(column, justify="right")
    for report in reports:
        stage = report.resolved.stage
        mesh = " ".join(f"{axis}={size}" for axis, size in report.resolved.mesh if size > 1) or "1 device"
        sizes = (report.parameters, report.gradients, report.optimizer, report.activations, report.total)
        table.add_row(
            stage.name,
            str(stage.seq_len),
            str(stage.batch_rows),
            str(stage.steps),
            mesh,
            f"{stage.attention.strategy}, {stage.attention.layout}",
            stage.remat,
            *map(format_bytes, sizes),
        )
    return table


def print_report(config: RunConfig, reports: Sequence[StageMemory], console: Console) -> None:
    """The table, and how much training the stages come to."""
    console.print(memory_table(config, reports))
    tokens = sum(report.resolved.stage.tokens_per_step * report.resolved.stage.steps for report in reports)
    amount = format_count(tokens).replace("G", "B")
    console.print(f"{len(reports)} stages divide over {reports[0].num_devices} devices; {amount} tokens in all")
