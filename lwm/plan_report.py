"""What `lwm plan` prints and draws for people."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lwm.check import format_bytes
from lwm.config import RunConfig
from lwm.plan import StagePlan, format_seconds, verdict
from lwm.prediction import Prediction
from lwm.telemetry import format_count

PICTURES = (".png", ".svg", ".pdf")
_PARTS = ("parameters", "gradients", "optimizer", "activations")
# Below this part of what may be used, nobody looks for more memory.
_ROOMY = 0.5
# A saving below this part of the peak is not worth a line.
_WORTHWHILE = 0.05


def print_report(config: RunConfig, plans: Sequence[StagePlan], console: Console) -> None:
    """Tables and sentences for people."""
    console.print(memory_table(config, plans))
    console.print(time_table(plans))
    for plan in plans:
        if plan.compiled.traffic:
            console.print(transfer_table(plan))
        for line in explain(plan):
            console.print(line, soft_wrap=True)


def memory_table(config: RunConfig, plans: Sequence[StagePlan]) -> Table:
    """One row per stage: memory on a device against the chip."""
    first = plans[0]
    table = Table(
        title=f"{config.name}: {first.num_parameters:,} parameters on {first.where.name}, "
        f"{first.where.num_devices} devices of {first.where.generation.chip.name}",
        caption="memory of one device, as the compiler counts it; host: of the host's memory, for each device",
    )
    table.add_column("stage")
    table.add_column("tokens x rows", justify="right")
    table.add_column("mesh")
    for name in ("params", "adam", "grads", "activations", "peak", "of", "host", "fits"):
        table.add_column(name, justify="right")
    for plan in plans:
        stage, memory = plan.resolved.stage, plan.compiled.memory
        mesh = " ".join(f"{axis}={size}" for axis, size in plan.resolved.mesh if size > 1) or "1 device"
        sizes = (plan.parameters, plan.optimizer, plan.gradients, plan.activations, memory.peak)
        table.add_row(
            stage.name,
            f"{stage.seq_len:,} x {stage.batch_rows}",
            mesh,
            *map(format_bytes, sizes),
            format_bytes(plan.compiled.usable_bytes),
            format_bytes(memory.host) if memory.host else "-",
            "yes" if plan.fits else "NO",
        )
    return table


def time_table(plans: Sequence[StagePlan]) -> Table:
    """One row per stage: FLOPs, the prediction for a step and for the whole stage."""
    table = Table(caption="FLOPs: with recomputation; step, MFU, tokens/s and stage: predictions, nobody ran this")
    table.add_column("stage")
    names = ("FLOP a step", "a device", "step", "MFU", "tokens/s", "stage takes", "for tokens")
    for name in (*names, "exposed permutes", "compiled in"):
        table.add_column(name, justify="right")
    for plan in plans:
        stage, predicted = plan.resolved.stage, plan.predicted
        table.add_row(
            stage.name,
            f"{plan.work.executed * plan.where.num_devices:.3g}",
            f"{plan.work.executed:.3g}",
            *predicted_cells(predicted),
            "-" if predicted is None else format_seconds(predicted.stage_hours * 3600),
            format_count(stage.tokens_per_step * stage.steps),
            f"{plan.exposed_permutes:.3g} a layer",
            format_seconds(plan.compiled.compile_seconds),
        )
    return table


def predicted_cells(predicted: Prediction | None) -> tuple[str, str, str]:
    """A step's seconds, MFU and tokens a second, for a table."""
    if predicted is None:
        return "-", "-", "-"
    rate = format_count(predicted.tokens_per_second)
    return format_seconds(predicted.step_seconds), f"{predicted.mfu:.1%}", rate


def transfer_table(plan: StagePlan) -> Table:
    """What travels in one step of one device, and what of it the schedule hides."""
    table = Table(
        title=f"{plan.resolved.stage.name}: transfers of one step on one device",
        caption="exposed: next to nothing computes meanwhile; time: predicted; waits: beyond what hides it",
    )
    for name in ("kind", "axes"):
        table.add_column(name)
    for name in ("number", "exposed", "bytes", "time", "waits"):
        table.add_column(name, justify="right")
    for each in plan.compiled.traffic:
        table.add_row(
            each.kind,
            each.axes,
            f"{each.count:,}",
            f"{each.exposed:,}",
            format_bytes(each.num_bytes),
            format_seconds(each.seconds),
            format_seconds(each.exposed_seconds),
        )
    return table


def explain(plan: StagePlan) -> list[str]:
    """Sentences under the tables."""
    lines = [verdict(plan)]
    predicted, peak = plan.predicted, plan.compiled.memory.peak
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
    if not plan.fits or peak > _ROOMY * plan.compiled.usable_bytes:
        worthwhile = [each for each in plan.advice if each.saved_bytes > _WORTHWHILE * peak]
        lines += [f"  less memory: {each.change} (about {format_bytes(each.saved_bytes)})" for each in worthwhile[:3]]
    return lines


def draw(plans: Sequence[StagePlan], path: Path) -> None:
    """A picture: memory of each stage against the chip's, and where the step's time should go."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.4 + 0.55 * len(plans)), layout="constrained")
    memory, times = figure.subplots(1, 2)
    usable = max(plan.compiled.usable_bytes for plan in plans)
    peak = max(plan.compiled.memory.peak for plan in plans)
    scale, unit = (1e9, "GB") if peak >= 1e8 else (1e6, "MB")
    names = [plan.resolved.stage.name for plan in plans]
    left = [0.0] * len(plans)
    for part in _PARTS:
        sizes = [getattr(plan, part) / scale for plan in plans]
        memory.barh(names, sizes, left=left, label=part)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    for name, end, plan in zip(names, left, plans, strict=True):
        share = plan.compiled.memory.peak / plan.compiled.usable_bytes
        memory.text(end, name, f" {100 * share:.2g}%", va="center", fontsize="small")
    if 4 * peak > usable:  # a line far to the right would leave no room for the bars
        memory.axvline(usable / scale, color="black", linestyle="--", label="usable")
        peak = max(peak, usable)
    memory.set_xlim(right=1.15 * peak / scale)
    memory.set_xlabel(f"{unit} on one device, and its share of {format_bytes(usable)} (the compiler's count)")
    done = [(plan.resolved.stage.name, plan.predicted) for plan in plans if plan.predicted is not None]
    compute = [predicted.compute_seconds for _, predicted in done]
    waits = [predicted.exposed_seconds for _, predicted in done]
    labels = [name for name, _ in done]
    times.barh(labels, compute, label="compute")
    times.barh(labels, waits, left=compute, label="waiting for transfers")
    for name, predicted in done:
        text = f" {format_seconds(predicted.step_seconds)}, MFU {predicted.mfu:.1%}"
        times.text(predicted.compute_seconds + predicted.exposed_seconds, name, text, va="center", fontsize="small")
    times.set_xlabel("seconds a step (predicted)")
    times.set_xlim(right=1.7 * max((p.step_seconds for _, p in done), default=1))
    figure.suptitle(f"{plans[0].where.name}, {plans[0].where.num_devices} devices", fontsize="medium")
    for axes in (memory, times):
        axes.invert_yaxis()
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=5, fontsize="x-small", frameon=False)
    figure.savefig(path, dpi=120)
