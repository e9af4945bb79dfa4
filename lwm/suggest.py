"""`lwm plan --suggest`: search meshes and strategies by formula, compile the best few, rank what came out.

The formula is `ring.cost`'s attention, dense products at the chip's assumed efficiency, and the transfers of tensor
parallelism and gathered weights; memory is `lwm.check`'s estimate. Only what is compiled is reported.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from lwm import prediction
from lwm.check import format_bytes, stage_memory
from lwm.config import MeshConfig, RunConfig, StageConfig
from lwm.plan import Compile, StagePlan, format_seconds, plan_stage, verdict
from lwm.plan_compile import compile_elsewhere
from lwm.plan_report import predicted_cells
from lwm.sharding import parameter_table
from lwm.topology import Topology
from ring import cost

# Estimates that differ by less are taken for the same.
_ALIKE = 0.02


@dataclass(frozen=True)
class Candidate:
    """A stage with another mesh, strategy, remat or accumulation: estimated seconds of a step and bytes of a device.
    `own`: the stage as the configuration has it."""

    stage: StageConfig
    seconds: float
    num_bytes: int
    own: bool = False

    @property
    def label(self) -> str:
        """What to write into the configuration."""
        mesh = ", ".join(f"{axis}: {size}" for axis, size in self.stage.mesh if size != 1 or axis == "fsdp")
        label = f"mesh {{{mesh}}}, {self.stage.attention.strategy}, remat {self.stage.remat}"
        if self.stage.accumulate > 1:
            label += f", accumulate {self.stage.accumulate}"
        return f"{label} (as it is)" if self.own else label

    def same_as(self, other: "Candidate") -> bool:
        """Whether both compile to the same program."""
        return replace(self, own=False).label == replace(other, own=False).label


@dataclass(frozen=True)
class Ranking:
    """Candidates that were compiled, the best first: those that fit, by predicted step."""

    stage: StageConfig
    where: Topology
    considered: int
    plans: tuple[tuple[Candidate, StagePlan], ...]

    def check(self) -> None:
        """ValueError where nothing fits."""
        if not any(plan.fits for _, plan in self.plans):
            raise ValueError(f"nothing that was compiled fits: {verdict(self.plans[0][1])}")


def _splits(num_devices: int, heads: int, kv_heads: int) -> Iterator[tuple[int, int, int, int]]:
    """(fsdp, sp, ulysses, tp) whose product is `num_devices`, tp and ulysses dividing the heads."""
    divisors = [size for size in range(1, num_devices + 1) if num_devices % size == 0]
    for tp in (size for size in divisors if kv_heads % size == 0):
        for ulysses in (size for size in divisors if (heads // tp) % size == 0 and num_devices % (tp * size) == 0):
            rest = num_devices // (tp * ulysses)
            for sp in (size for size in divisors if rest % size == 0):
                yield rest // sp, sp, ulysses, tp


def candidates(config: RunConfig, stage: StageConfig, where: Topology) -> list[Candidate]:
    """Every mesh and strategy that can be built, the fastest that should fit first; of those that the formula cannot
    tell apart (`_ALIKE`), the one that changes and takes least. What should not fit comes last, the smallest first."""
    found = []
    usable = where.generation.usable_bytes
    model = config.model
    for fsdp, sp, ulysses, tp in _splits(where.num_devices, model.num_heads, model.num_kv_heads):
        strategy = "ring" if ulysses == 1 else "usp" if sp > 1 else "ulysses"
        attention = stage.attention.model_copy(update={"strategy": strategy})
        mesh = MeshConfig(dp=1, fsdp=fsdp, sp=sp, ulysses=ulysses, tp=tp)
        changed = stage.model_copy(update={"mesh": mesh, "attention": attention})
        tried = []
        for option in _smaller_and_smaller(changed):
            try:
                memory = stage_memory(config, option, where.num_devices)
            except ValueError:
                break  # does not divide
            tried.append(Candidate(option, estimate(memory.resolved, where), memory.total))
            if memory.total <= usable:
                break
        if tried:
            found.append(min(tried, key=lambda each: each.num_bytes))
    fastest = min((each.seconds for each in found if each.num_bytes <= usable), default=1.0)

    def order(each: Candidate) -> tuple[float, ...]:
        if each.num_bytes > usable:
            return math.inf, each.num_bytes
        changes = (each.stage.remat, each.stage.accumulate) != (stage.remat, stage.accumulate)
        return math.log(each.seconds / fastest) // math.log1p(_ALIKE), changes, each.num_bytes, each.seconds

    return sorted(found, key=order)


def _smaller_and_smaller(stage: StageConfig) -> Iterator[StageConfig]:
    """The stage, then with ever less memory and ever more to do: layer inputs in the host's memory, and the batch in
    more parts."""
    accumulate = stage.accumulate
    while stage.batch_rows % accumulate == 0:
        for remat in dict.fromkeys((stage.remat, "offload")):
            yield stage.model_copy(update={"remat": remat, "accumulate": accumulate})
        accumulate *= 2


def as_configured(config: RunConfig, stage: StageConfig, where: Topology) -> Candidate | None:
    """The stage with its own mesh, if that fits the slice's devices: what a suggestion has to beat."""
    try:
        memory = stage_memory(config, stage, where.num_devices)
    except ValueError:
        return None
    mesh = MeshConfig(**memory.resolved.mesh_sizes)
    return Candidate(stage.model_copy(update={"mesh": mesh}), estimate(memory.resolved, where), memory.total, own=True)


def estimate(resolved: Any, where: Topology) -> float:
    """Predicted seconds of one step by formula, nothing compiled."""
    stage, model, sizes, chip = resolved.stage, resolved.model, resolved.mesh_sizes, where.generation.chip
    width = 2 if stage.compute_dtype == "bfloat16" else 4
    tp, group = sizes["tp"], resolved.sequence_shards
    shape = cost.Shape(
        batch=stage.batch_rows // resolved.data_shards,
        length=stage.seq_len,
        heads=model.num_heads // tp,
        kv_heads=max(1, model.num_kv_heads // tp),
        head_dim=model.head_dim,
        bytes_per_element=width,
    )
    done = prediction.work(resolved, where.num_devices)
    peak = chip.flops * chip.efficiency
    name = "ring" if group == 1 else stage.attention.strategy
    attention = cost.estimate(shape, chip, name, ring_size=sizes["sp"], ulysses_size=sizes["ulysses"])
    waits = max(0.0, attention.seconds - attention.compute_seconds) * model.num_layers
    layers = sum(math.prod(e.shape) for path, e in parameter_table(model).items() if path.startswith("layers/"))
    links = 2 * chip.link_bandwidth
    gathered = 3 * width * layers / tp / links if where.num_devices > tp else 0.0
    # Two sums forward and two backward in each layer, each sent twice over.
    sums = 8 * width * resolved.tokens_per_device * model.hidden_size * model.num_layers / links if tp > 1 else 0.0
    dense = (done.executed - done.attention) / peak
    return done.attention / peak + waits + max(dense, gathered) + sums


def search(
    config: RunConfig,
    stage: StageConfig,
    where: Topology,
    num_compiled: int,
    *,
    compile_stage: Compile = compile_elsewhere,
    progress: Callable[[], None] = lambda: None,
) -> Ranking:
    """Compile the best `num_compiled` candidates, the stage as it is among them unless only one is asked for.

    ValueError where no mesh of this slice divides the stage, or nothing compiles.
    """
    options = candidates(config, stage, where)
    if not options:
        raise ValueError(
            f"stage {stage.name}: no mesh of {where.num_devices} devices divides {stage.batch_rows} rows of "
            f"{stage.seq_len} tokens, {config.model.num_heads} heads and width {config.model.hidden_size}; "
            "use another slice"
        )
    own = as_configured(config, stage, where)
    if own is not None and num_compiled > 1:
        options = [own, *(each for each in options if not each.same_as(own))]
    plans: list[tuple[Candidate, StagePlan]] = []
    refused: ValueError | None = None
    for option in options:
        try:
            plans.append((option, plan_stage(config, option.stage, where, compile_stage)))
        except ValueError as error:
            refused = error  # as attention refuses heads that a strategy cannot divide
            continue
        progress()
        if len(plans) == num_compiled:
            break
    if not plans and refused is not None:
        raise refused

    def order(entry: tuple[Candidate, StagePlan]) -> tuple[bool, float]:
        predicted = entry[1].predicted
        return not entry[1].fits, math.inf if predicted is None else predicted.step_seconds

    return Ranking(stage, where, len(options), tuple(sorted(plans, key=order)))


def print_ranking(rankings: Sequence[Ranking], console: Console) -> None:
    """One table per stage."""
    for ranking in rankings:
        table = Table(
            title=f"{ranking.stage.name} on {ranking.where.name}: best of {ranking.considered} that can be built",
            caption="memory: the compiler's count; step and MFU: predictions",
        )
        table.add_column("put into the stage")
        for name in ("peak", "of", "fits", "step", "MFU", "tokens/s", "waits", "formula said"):
            table.add_column(name, justify="right")
        for option, plan in ranking.plans:
            predicted = plan.predicted
            table.add_row(
                option.label,
                format_bytes(plan.compiled.memory.peak),
                format_bytes(plan.compiled.usable_bytes),
                "yes" if plan.fits else "NO",
                *predicted_cells(predicted),
                "-" if predicted is None else format_seconds(predicted.exposed_seconds),
                format_seconds(option.seconds),
            )
        console.print(table)


def to_json(config: RunConfig, rankings: Sequence[Ranking]) -> str:
    """The ranking for machines."""
    return json.dumps(
        {
            "config": config.name,
            "stages": [
                {
                    "stage": ranking.stage.name,
                    "topology": ranking.where.name,
                    "considered": ranking.considered,
                    "ranking": [
                        {"label": option.label, "formula_seconds": option.seconds, **plan.to_json()}
                        for option, plan in ranking.plans
                    ],
                }
                for ranking in rankings
            ],
        },
        indent=1,
    )
