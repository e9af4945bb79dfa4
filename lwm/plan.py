"""`lwm plan`: each stage's real train step, compiled for a slice that is not there, and what to make of it.

Memory is the compiler's own count. Times are predictions (`lwm.prediction`), and labelled so.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lwm import prediction
from lwm.check import parameter_counts
from lwm.config import ConfigError, ResolvedStage, RunConfig, StageConfig, resolve_stage
from lwm.plan_compile import Compiled, compile_elsewhere
from lwm.prediction import Advice, Prediction
from lwm.telemetry import format_count
from lwm.topology import Topology

_GB = 1e9
_FLOAT32 = 4
Compile = Callable[[RunConfig, StageConfig, Topology], Compiled]


@dataclass(frozen=True)
class StagePlan:
    """A stage on a slice: what was compiled, what it needs, how long it should take.

    Attributes:
        resolved: the stage on its mesh.
        where: the slice.
        compiled: the compiler's findings.
        parameters, gradients, optimizer: bytes on one device by the table of parameters, all float32.
        activations: the rest of the peak.
        predicted: None where the stage does not compile.
        advice: what would lower memory most.
    """

    resolved: ResolvedStage
    where: Topology
    compiled: Compiled
    num_parameters: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    work: prediction.Work
    predicted: Prediction | None
    advice: tuple[Advice, ...]

    @property
    def fits(self) -> bool:
        """Whether the peak is within what a program may use, on the device and on its host."""
        memory, generation = self.compiled.memory, self.where.generation
        host = generation.host_bytes == 0 or memory.host <= generation.host_bytes
        return self.compiled.error is None and memory.peak <= self.compiled.usable_bytes and host

    @property
    def exposed_permutes(self) -> float:
        """Permutes of keys, values and their gradients in one layer (all passes) behind which nothing computes."""
        count = sum(each.exposed for each in self.compiled.traffic if each.kind == "collective-permute")
        return count / (self.resolved.model.num_layers * self.resolved.stage.accumulate)

    def to_json(self) -> dict[str, Any]:
        """Everything, in bytes and seconds."""
        stage, compiled = self.resolved.stage, self.compiled
        return {
            "stage": stage.name,
            "topology": self.where.name,
            "devices": self.where.num_devices,
            "mesh": self.resolved.mesh_sizes,
            "tokens_per_row": stage.seq_len,
            "rows": stage.batch_rows,
            "parameters": self.num_parameters,
            "fits": self.fits,
            "usable_bytes": compiled.usable_bytes,
            "memory": asdict(compiled.memory),
            "parts": {
                "parameters": self.parameters,
                "gradients": self.gradients,
                "optimizer": self.optimizer,
                "activations": self.activations,
            },
            "error": compiled.error,
            "flops": {
                "needed_per_device": self.work.needed,
                "executed_per_device": self.work.executed,
                "needed": self.work.needed * self.where.num_devices,
                "executed": self.work.executed * self.where.num_devices,
            },
            "transfers": [asdict(each) for each in compiled.traffic],
            "exposed_permutes_per_layer": self.exposed_permutes,
            "ring_hops": compiled.ring_hops,
            "kernel_launches": compiled.kernel_launches,
            "prediction": None if self.predicted is None else asdict(self.predicted),
            "stage_tokens": stage.tokens_per_step * stage.steps,
            "advice": [asdict(each) for each in self.advice],
            "compile_seconds": compiled.compile_seconds,
            "compile_host_bytes": compiled.child_bytes,
        }


def plan_stage(
    config: RunConfig, stage: StageConfig, where: Topology, compile_stage: Compile = compile_elsewhere
) -> StagePlan:
    """Compile one stage for `where` and judge it; ValueError, one sentence, where it cannot be built."""
    resolved = resolve_stage(config, stage, where.num_devices)
    try:
        total, local = parameter_counts(resolved.model, resolved.mesh_sizes)
    except ValueError as error:
        raise ConfigError(f"stage {stage.name}: {error}") from None
    return judge(resolved, where, compile_stage(config, stage, where), total, local)


def judge(resolved: ResolvedStage, where: Topology, compiled: Compiled, total: int, local: int) -> StagePlan:
    """A plan from what the compiler found; `total` and `local` are numbers of parameters, of the model and a device."""
    work = prediction.work(resolved, where.num_devices)
    predicted = None
    if compiled.error is None:
        predicted = prediction.predict(
            resolved,
            where.num_devices,
            where.generation,
            compute_seconds=compiled.compute_seconds,
            exposed_seconds=sum(each.exposed_seconds for each in compiled.traffic),
            link_seconds=sum(each.seconds for each in compiled.traffic if each.kind != "host-copy"),
            local_parameters=local,
        )
    size = local * _FLOAT32
    return StagePlan(
        resolved=resolved,
        where=where,
        compiled=compiled,
        num_parameters=total,
        parameters=size,
        gradients=size,
        optimizer=2 * size,
        activations=max(0, compiled.memory.peak - 4 * size),
        work=work,
        predicted=predicted,
        advice=tuple(prediction.advice(resolved)),
    )


def verdict(plan: StagePlan) -> str:
    """One line: fits or not, and the knob that helps most."""
    memory, stage = plan.compiled.memory, plan.resolved.stage
    limit = plan.compiled.usable_bytes
    if plan.fits:
        return f"stage {stage.name} fits {plan.where.name}: {memory.peak / _GB:.1f} of {limit / _GB:.1f} GB a device"
    over = memory.peak - limit
    if over <= 0:
        host = plan.where.generation.host_bytes
        return (
            f"stage {stage.name} does not fit the hosts of {plan.where.name}: {memory.host / _GB:.1f} GB of host memory"
            f" for each device, of {host / _GB:.1f}; use remat=full, or more devices"
        )
    help_ = "use more devices, or a shorter row"
    if plan.advice:
        best = plan.advice[0]
        enough = next((each for each in plan.advice[::-1] if each.saved_bytes >= over), best)
        help_ = f"{enough.change} should free about {enough.saved_bytes / _GB:.1f} GB"
    return (
        f"stage {stage.name} does not fit {plan.where.name}: {memory.peak / _GB:.1f} GB a device, of which"
        f" {limit / _GB:.1f} may be used; {help_}"
    )


def summary_table(config: RunConfig, plans: Sequence[StagePlan]) -> Table:
    """One row per stage: memory on a device against the chip, FLOPs, the prediction."""
    first = plans[0]
    table = Table(
        title=f"{config.name}: {first.num_parameters:,} parameters on {first.where.name}, "
        f"{first.where.num_devices} devices of {first.where.generation.chip.name}",
        caption="memory: the compiler's count, one device; step, MFU and hours: predictions, nobody ran this",
    )
    table.add_column("stage")
    names = ("tokens x rows", "mesh", "params", "adam", "grads", "activations", "peak", "of", "host", "fits")
    for name in (*names, "TFLOP a device", "step", "MFU", "tokens/s", "stage", "exposed permutes", "compiled in"):
        table.add_column(name, justify="left" if name == "mesh" else "right")
    for plan in plans:
        stage, memory, predicted = plan.resolved.stage, plan.compiled.memory, plan.predicted
        mesh = " ".join(f"{axis}={size}" for axis, size in plan.resolved.mesh if size > 1) or "1 device"
        sizes = (plan.parameters, plan.optimizer, plan.gradients, plan.activations, memory.peak)
        times = ("-",) * 4
        if predicted is not None:
            times = (
                format_seconds(predicted.step_seconds),
                f"{predicted.mfu:.1%}",
                format_count(predicted.tokens_per_second),
                format_seconds(predicted.stage_hours * 3600),
            )
        table.add_row(
            stage.name,
            f"{stage.seq_len} x {stage.batch_rows}",
            mesh,
            *(f"{size / _GB:.2f} GB" for size in sizes),
            f"{plan.compiled.usable_bytes / _GB:.1f} GB",
            f"{memory.host / _GB:.1f} GB",
            "yes" if plan.fits else "NO",
            f"{plan.work.executed / 1e12:.4g}",
            *times,
            f"{plan.exposed_permutes:g} a layer",
            format_seconds(plan.compiled.compile_seconds),
        )
    return table


def transfer_table(plan: StagePlan) -> Table:
    """What travels in one step of one device, and what of it the schedule hides."""
    table = Table(
        title=f"{plan.resolved.stage.name}: transfers of one step on one device",
        caption="exposed: nothing computes between start and done; time: predicted; waits: beyond what hides it",
    )
    for name in ("kind", "axes"):
        table.add_column(name)
    for name in ("number", "exposed", "bytes", "time", "waits"):
        table.add_column(name, justify="right")
    for each in plan.compiled.traffic:
        table.add_row(
            each.kind,
            each.axes,
            str(each.count),
            str(each.exposed),
            f"{each.num_bytes / _GB:.4g} GB",
            format_seconds(each.seconds),
            format_seconds(each.exposed_seconds),
        )
    return table


def format_seconds(seconds: float) -> str:
    """`12 ms`, `3.4 s`, `5.6 min`, `7.8 h`, `9.1 days`."""
    for limit, unit, name in ((1, 1e-3, "ms"), (60, 1, "s"), (3600, 60, "min"), (48 * 3600, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 86400:.3g} days"


def explain(plan: StagePlan) -> list[str]:
    """Sentences under the tables."""
    lines = [verdict(plan)]
    predicted = plan.predicted
    if predicted is not None:
        source = "an assumed efficiency, without a schedule"
        if predicted.from_schedule:
            source = "the compiler's cycle estimates"
        if plan.compiled.kernel_launches:
            source += f" and {plan.where.generation.chip.efficiency:.0%} of the peak in the attention kernel"
        lines.append(
            f"  predicted from {source}: {format_seconds(predicted.step_seconds)} a step, of which "
            f"{format_seconds(predicted.exposed_seconds)} wait for transfers; no schedule could beat "
            f"{format_seconds(predicted.roofline_seconds)} (MFU {predicted.roofline_mfu:.1%})"
        )
    lines += [f"  less memory: {each.change} (about {each.saved_bytes / _GB:.2g} GB)" for each in plan.advice[:3]]
    return lines


def print_report(config: RunConfig, plans: Sequence[StagePlan], console: Console) -> None:
    """Tables and sentences for people."""
    console.print(summary_table(config, plans))
    for plan in plans:
        if plan.compiled.traffic:
            console.print(transfer_table(plan))
        for line in explain(plan):
            console.print(line, soft_wrap=True)


def to_json(config: RunConfig, plans: Sequence[StagePlan]) -> str:
    """The report for machines."""
    return json.dumps({"config": config.name, "stages": [plan.to_json() for plan in plans]}, indent=1)


def draw(plans: Sequence[StagePlan], path: Path) -> None:
    """A picture: memory of each stage against the chip's, and where the step's time should go."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.4 + 0.55 * len(plans)), layout="constrained")
    memory, times = figure.subplots(1, 2)
    names = [plan.resolved.stage.name for plan in plans]
    left = [0.0] * len(plans)
    for part in ("parameters", "gradients", "optimizer", "activations"):
        sizes = [getattr(plan, part) / _GB for plan in plans]
        memory.barh(names, sizes, left=left, label=part)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    memory.axvline(plans[0].compiled.usable_bytes / _GB, color="black", linestyle="--", label="usable")
    memory.set_xlabel(f"GB on one device of {plans[0].where.name} (the compiler's count)")
    done = [(plan.resolved.stage.name, plan.predicted) for plan in plans if plan.predicted is not None]
    compute = [predicted.compute_seconds for _, predicted in done]
    waits = [predicted.exposed_seconds for _, predicted in done]
    labels = [name for name, _ in done]
    times.barh(labels, compute, label="compute")
    times.barh(labels, waits, left=compute, label="waiting for transfers")
    for name, predicted in done:
        times.text(predicted.step_seconds, name, f" MFU {predicted.mfu:.1%}", va="center", fontsize="small")
    times.set_xlabel("seconds a step (predicted)")
    times.set_xlim(right=1.3 * max((p.step_seconds for _, p in done), default=1))
    for axes in (memory, times):
        axes.invert_yaxis()
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=5, fontsize="x-small", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
