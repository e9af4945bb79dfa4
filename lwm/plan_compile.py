"""Compiles the train step of one stage for devices that are not there, and reads what the compiler made of it.

`compile_elsewhere` does so in a child process with an environment of its own: the TPU compiler is a library that wants
to own its process, and ordinary runs never load it. `python -m lwm.plan_compile` is that child: a JSON request on its
standard input, a JSON answer in the file that the request names.
"""

import contextlib
import importlib.util
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lwm import prediction, schedule, topology, tpu_compiler
from lwm.config import ResolvedStage, RunConfig, StageConfig, resolve_stage
from lwm.prediction import Link
from lwm.schedule import Instruction, Module, Transfer
from lwm.topology import Topology

_REQUEST_ENV = {
    "JAX_PLATFORMS": "cpu",
    # libtpu must not look for the TPU that is not there, nor for a lock that another process may hold.
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_MIN_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
# How the compiler reports memory that it could not find.
_OUT_OF_MEMORY = re.compile(
    r"(?:Used|HLO temporaries) \(?([\d.]+)([KMGT])\w*\)? (?:of|exceeds available HBM) \(?([\d.]+)([KMGT])\w*"
)
# Positions and segments travel beside keys, values and their gradients: permutes below this part of the largest.
_SMALL = 0.1
# A transfer is exposed where what runs beside it takes less than this part of its time.
_NEXT_TO_NOTHING = 0.1
_UNITS = {"K": 2.0**10, "M": 2.0**20, "G": 2.0**30, "T": 2.0**40}


@dataclass(frozen=True)
class Memory:
    """Bytes of one device as the compiler counts them; `host` is in the host's memory, for this device."""

    peak: int
    arguments: int
    outputs: int
    temporaries: int
    aliased: int
    host: int


@dataclass(frozen=True)
class Traffic:
    """Transfers of one kind over the same axes in one step of one device.

    `count`: how many; `exposed`: behind how many of them nothing, or next to nothing, computes; `synchronous`: how many
    are not even started ahead. `num_bytes`, `seconds`: all together. `exposed_seconds`: what they take beyond the
    computation between start and done.
    """

    kind: str
    axes: str
    count: int
    exposed: int
    synchronous: int
    num_bytes: float
    seconds: float
    exposed_seconds: float


@dataclass(frozen=True)
class Compiled:
    """One stage, compiled. `error` is the compiler's reason where it could not; then the rest is what is known.

    `compute_seconds`: of one step by the compiler's estimates, 0 where it makes none. `ring_hops`: links between ring
    neighbours that are the farthest apart. `child_bytes`: memory of the host that compiling took. `compile_seconds` on
    the clock, `cpu_seconds` of all the host's cores together.
    `kernel_launches`: of hand-written kernels in one step; attention then takes what `ring.cost` assumes of its FLOPs.
    """

    memory: Memory
    usable_bytes: int
    traffic: tuple[Traffic, ...]
    compute_seconds: float
    ring_hops: int
    compile_seconds: float
    child_bytes: int
    kernel_launches: int = 0
    cpu_seconds: float = 0.0
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        """For the parent process, files and people."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Compiled":
        """The inverse of `to_json`."""
        traffic = tuple(Traffic(**each) for each in values["traffic"])
        return cls(**{**values, "memory": Memory(**values["memory"]), "traffic": traffic})


def compile_elsewhere(
    config: RunConfig, stage: StageConfig, where: Topology, *, keep_text: Path | None = None
) -> Compiled:
    """The stage compiled for `where`, in a child process.

    `keep_text`: a file for the compiled program's text. ValueError where the stage cannot be built that way (one
    sentence), or where the TPU compiler is not installed.
    """
    if where.is_tpu and importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            f"--topology {where.name} needs the TPU compiler, the package libtpu; install it with "
            "`pip install lwm[plan]`, or plan for cpu:N"
        )
    environment = os.environ | child_environment(where)
    root = str(Path(__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as directory:
        answer = Path(directory) / "answer.json"
        request = {
            "config": config.model_dump(mode="json"),
            "stage": stage.model_dump(mode="json"),
            "topology": where.name,
            "answer": str(answer),
            "text": None if keep_text is None else str(keep_text.absolute()),
        }
        child = subprocess.run(
            [sys.executable, "-m", "lwm.plan_compile"],
            input=json.dumps(request),
            env=environment,
            capture_output=True,
            text=True,
        )
        if not answer.exists():
            last = [line for line in child.stderr.splitlines() if line.strip()][-1:]
            raise ValueError(
                f"stage {stage.name}: the compiler's process for {where.name} ended with code {child.returncode} and no"
                f" answer ({' '.join(last) or 'it said nothing'}); see --debug, or try fewer devices"
            )
        values = json.loads(answer.read_text())
    if "refused" in values:
        raise ValueError(values["refused"])
    return Compiled.from_json(values)


def child_environment(where: Topology) -> dict[str, str]:
    """What a process must find in its environment to compile for `where`, before it imports jax."""
    if not where.is_tpu:
        devices = f"--xla_force_host_platform_device_count={where.num_devices}"
        return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": devices}
    kind = {"v5e": "v5litepod-4"}.get(where.kind, f"{where.kind}-8")
    arguments = tpu_compiler.init_args(where.kind, os.environ.get(tpu_compiler.VARIABLE, ""))
    return _REQUEST_ENV | {"TPU_ACCELERATOR_TYPE": kind, tpu_compiler.VARIABLE: arguments}


def main() -> None:
    """The child process."""
    request = json.load(sys.stdin)
    answer = Path(request["answer"])
    config = RunConfig.model_validate_json(json.dumps(request["config"]))
    stage = StageConfig.model_validate_json(json.dumps(request["stage"]))
    where = topology.parse(request["topology"])
    try:
        result = compile_here(config, stage, where, None if request["text"] is None else Path(request["text"]))
        values = result.to_json()
    except ValueError as error:
        values = {"refused": f"stage {stage.name}: {str(error).removeprefix(f'stage {stage.name}: ')}"}
    answer.write_text(json.dumps(values))


def compile_here(config: RunConfig, stage: StageConfig, where: Topology, keep_text: Path | None = None) -> Compiled:
    """The stage compiled for `where` in this process, whose environment must be the child's."""
    import jax

    from lwm import sharding
    from lwm.step import CompiledStep

    resolved = resolve_stage(config, stage, where.num_devices)
    devices = _devices(where)
    mesh = sharding.make_mesh(stage.mesh, devices)
    begin, cpu = time.monotonic(), time.process_time()
    try:
        compiled = CompiledStep(resolved.model, stage, mesh).compiled
    except jax.errors.JaxRuntimeError as error:
        return _failed(str(error), where, time.monotonic() - begin)
    seconds, cpu = time.monotonic() - begin, time.process_time() - cpu
    text = compiled.as_text() or ""
    if keep_text is not None:
        keep_text.write_text(text)
    memory = _memory(compiled.memory_analysis(), where)
    return replace(read(resolved, where, text, memory, mesh.devices, seconds), cpu_seconds=cpu)


def read(
    resolved: ResolvedStage, where: Topology, text: str, memory: Memory, devices: Any, compile_seconds: float
) -> Compiled:
    """What the compiled `text` says, `devices` being the array of the mesh."""
    module = schedule.parse(text)
    cost = _cost(module, resolved, where)
    mesh = [(name, resolved.mesh_sizes[name]) for name in _axis_names()]
    links = _links(devices, where, [name for name, _ in mesh])
    traffic: dict[tuple[str, str], Traffic] = {}
    found = schedule.transfers(module, mesh)
    largest = max((each.num_bytes for each in found if each.kind == "collective-permute"), default=0.0)
    for transfer in found:
        one = _traffic(module, transfer, cost, links(transfer.axes), where)
        if one.kind == "collective-permute" and transfer.num_bytes < _SMALL * largest:
            one = replace(one, kind="small permute")
        before = traffic.get((one.kind, one.axes))
        traffic[one.kind, one.axes] = one if before is None else _added(before, one)
    return Compiled(
        memory=memory,
        usable_bytes=where.generation.usable_bytes,
        traffic=tuple(sorted(traffic.values(), key=lambda each: -each.num_bytes)),
        compute_seconds=module.seconds(module.entry, cost) if where.is_tpu else 0.0,
        ring_hops=links("sp" if resolved.mesh_sizes["sp"] > 1 else "ulysses").hops,
        compile_seconds=compile_seconds,
        child_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        kernel_launches=sum(count for count, each in module.instructions() if schedule.is_kernel(each)),
    )


def _axis_names() -> tuple[str, ...]:
    from lwm.sharding import MESH_AXIS_NAMES

    return MESH_AXIS_NAMES


def _devices(where: Topology) -> Any:
    if not where.is_tpu:
        import jax

        return jax.devices("cpu")[: where.num_devices]
    from jax.experimental import topologies

    # One device a chip, as these chips run: both cores together.
    options = {"chip_config_name": "megacore"} if where.kind == "v4" else {}
    with contextlib.redirect_stdout(sys.stderr):
        return topologies.get_topology_desc(where.name, "tpu", **options).devices


def _memory(analysis: Any, where: Topology) -> Memory:
    peak = analysis.peak_memory_in_bytes
    host = analysis.host_temp_size_in_bytes + analysis.host_argument_size_in_bytes
    # The CPU's peak leaves the temporaries out; a TPU program with arrays in the host's memory gives the peak of the
    # fuller of the two memories.
    if not where.is_tpu or host:
        outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
        peak = analysis.argument_size_in_bytes + outputs + analysis.temp_size_in_bytes
    return Memory(
        peak=peak,
        arguments=analysis.argument_size_in_bytes,
        outputs=analysis.output_size_in_bytes,
        temporaries=analysis.temp_size_in_bytes,
        aliased=analysis.alias_size_in_bytes,
        host=host,
    )


def _failed(message: str, where: Topology, seconds: float) -> Compiled:
    """What a compiler that gave up says about memory; ValueError where it gave up for another reason."""
    match = _OUT_OF_MEMORY.search(message)
    if match is None:
        raise ValueError(f"the compiler refuses it: {' '.join(message.split())[:400]}")
    used, limit = (int(float(match[i]) * _UNITS[match[i + 1]]) for i in (1, 3))
    memory = Memory(peak=used, arguments=0, outputs=0, temporaries=0, aliased=0, host=0)
    child = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Compiled(memory, limit, (), 0.0, 0, seconds, child, error=" ".join(message.split())[:400])


def _cost(module: Module, resolved: ResolvedStage, where: Topology) -> schedule.Cost:
    """Turns of the attention and loss loops, and seconds of an attention kernel, from what the stage has to do."""
    stage, layers = resolved.stage, resolved.model.num_layers
    loops = schedule.data_dependent_loops(module)
    attention = {name: each for name, each in loops.items() if each.entered >= layers * stage.accumulate}
    # An outer loop walks over one side's blocks; the innermost ones share the visits of their pass between them.
    outer = prediction.outer_blocks(resolved)
    entries: dict[str, float] = {}
    for each in attention.values():
        if each.innermost:
            which = _pass(each.instruction)
            entries[which] = entries.get(which, 0) + each.entered * (outer if each.inside else 1)
    visited = prediction.visits(resolved) * layers * stage.accumulate
    heads = 2 if resolved.model.vision_vocab_size else 1
    tokens = resolved.tokens_per_device / stage.accumulate
    learned = tokens / heads / (stage.loss_chunk or tokens)

    def visits(loop: Instruction) -> float:
        if loop.name not in attention:
            return max(learned, 1.0)
        return visited / entries[_pass(loop)] if attention[loop.name].innermost else outer

    # Kernels say how they compare with each other; together they take what the chip needs for the stage's attention.
    said = sum(count * schedule.kernel_flops(each) for count, each in module.instructions() if schedule.is_kernel(each))
    chip = where.generation.chip
    seconds = prediction.work(resolved, where.num_devices).attention / (chip.flops * chip.efficiency)
    return schedule.Cost(where.generation.clock, visits, said / seconds)


def _pass(loop: Instruction) -> str:
    if "rematted_computation" in loop.source:
        return "recomputed"
    return "backward" if "transpose(" in loop.source else "forward"


def _links(devices: Any, where: Topology, names: list[str]) -> Callable[[str], Link]:
    """Axes joined by "+" -> how their devices are connected."""

    def of(axes: str) -> Link:
        places = [names.index(axis) for axis in axes.split("+") if axis in names]
        size = 1
        for place in places:
            size *= devices.shape[place]
        if not where.is_tpu or size == 1:
            return Link(size=size)
        index = tuple(slice(None) if place in places else 0 for place in range(len(names)))
        coords = [tuple(device.coords)[: len(where.shape)] for device in devices[index].reshape(-1)]
        dims = sum(len(set(each)) > 1 for each in zip(*coords, strict=True))
        return Link(dims=dims, hops=topology.ring_hops(coords, where.shape), size=size)

    return of


def _traffic(module: Module, transfer: Transfer, cost: schedule.Cost, link: Link, where: Topology) -> Traffic:
    seconds = prediction.transfer_seconds(transfer.kind, transfer.num_bytes, link, where.generation)
    seconds += where.generation.chip.launch_seconds
    here = module.computations[transfer.computation]
    hiding = sum(module.seconds_of(here[name], cost) for name in transfer.hidden_by or ())
    return Traffic(
        kind=transfer.kind,
        axes=transfer.axes,
        count=transfer.times,
        exposed=transfer.times if transfer.exposed or hiding < _NEXT_TO_NOTHING * seconds else 0,
        synchronous=transfer.times if transfer.hidden_by is None else 0,
        num_bytes=transfer.num_bytes * transfer.times,
        seconds=seconds * transfer.times,
        exposed_seconds=max(0.0, seconds - hiding) * transfer.times,
    )


def _added(a: Traffic, b: Traffic) -> Traffic:
    summed = {name: getattr(a, name) + getattr(b, name) for name in Traffic.__annotations__ if name not in _KEY}
    return Traffic(kind=a.kind, axes=a.axes, **summed)


_KEY = ("kind", "axes")


if __name__ == "__main__":
    main()
