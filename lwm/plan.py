"""`lwm plan`: each stage's real train step, compiled for a slice that is not there, and what to make of it.

Memory is the compiler's own count. Times are predictions (`lwm.prediction`), and labelled so.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lwm import prediction
from lwm.check import format_bytes, parameter_counts
from lwm.config import ConfigError, ResolvedStage, RunConfig, StageConfig, resolve_stage
from lwm.plan_compile import Compiled, compile_elsewhere
from lwm.prediction import Advice, Prediction
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
        """Permutes of keys, values and their gradients in one layer, all passes, that next to nothing hides."""
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
            "compile_cpu_seconds": compiled.cpu_seconds,
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
            link_seconds=sum(
                # Starts can overlap, so they bound nothing.
                each.seconds - each.count * where.generation.chip.launch_seconds
                for each in compiled.traffic
                if each.kind != "host-copy"
            ),
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
        return (
            f"stage {stage.name} fits {plan.where.name}: {format_bytes(memory.peak)} of {format_bytes(limit)} a device"
        )
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


def format_seconds(seconds: float) -> str:
    """`8 us`, `12 ms`, `3.4 s`, `5.6 min`, `7.8 h`, `9.1 days`."""
    if seconds == 0:
        return "0"
    for limit, unit, name in (
        (1e-3, 1e-6, "us"),
        (1, 1e-3, "ms"),
        (60, 1, "s"),
        (3600, 60, "min"),
        (48 * 3600, 3600, "h"),
    ):
        if seconds < limit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 86400:.3g} days"


def to_json(config: RunConfig, plans: Sequence[StagePlan]) -> str:
    """The report for machines."""
    return json.dumps({"config": config.name, "stages": [plan.to_json() for plan in plans]}, indent=1)
