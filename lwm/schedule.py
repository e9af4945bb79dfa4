"""What a compiled program does, read from its text: loops and their trip counts, collectives, what hides behind what.

The text of a compiled module lists each computation's instructions in the order in which they run. An asynchronous
collective is a `-start` and a `-done`; whatever computes between them hides the transfer. On TPUs each fusion also
carries the compiler's estimate of its cycles.
"""

import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

KINDS = ("collective-permute", "all-gather", "reduce-scatter", "all-reduce", "all-to-all")
HOST_COPY = "host-copy"
_BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5}
_FREE = ("get-tuple-element", "tuple", "bitcast", "parameter", "constant", "partition-id", "after-all", "iota")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^  (ROOT )?%?([\w.\-]+) = ")
_HOST_SPACE = "S(5)"


@dataclass(frozen=True)
class Instruction:
    """One line of a computation. `result` is its type as written, `rest` its operands and attributes."""

    name: str
    opcode: str
    result: str
    rest: str

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of what it reads."""
        return tuple(re.findall(r"%([\w.\-]+)", self.rest[: _closing(self.rest)]))

    @functools.cached_property
    def cycles(self) -> int:
        """The compiler's estimate, 0 where it gives none."""
        match = re.search(r'"estimated_cycles":"(\d+)"', self.rest)
        return int(match[1]) if match else 0

    def attribute(self, name: str) -> str | None:
        """The computation that an attribute such as `body` names."""
        match = re.search(rf"\b{name}=%?([\w.\-]+)", self.rest)
        return match[1] if match else None

    @property
    def source(self) -> str:
        """The program's own name for it, such as `jit(step)/transpose(jvp())/while/body/...`."""
        match = re.search(r'op_name="([^"]*)"', self.rest)
        return match[1] if match else ""


@dataclass(frozen=True)
class Loop:
    """A `while`: `trips` is None where they depend on data."""

    body: str
    trips: int | None


@dataclass(frozen=True)
class Transfer:
    """A collective, or a copy between device and host, somewhere in the program.

    Attributes:
        kind: one of KINDS, or HOST_COPY.
        axes: the mesh axes it runs over, joined by "+".
        num_bytes: what one device sends each time.
        times: how often it runs in one call of the program.
        hidden_by: names of the computing instructions between its start and its done; None where it is synchronous.
        source: the program's own name for it.
        computation: where it stands.
    """

    kind: str
    axes: str
    num_bytes: float
    times: int
    hidden_by: tuple[str, ...] | None
    source: str
    computation: str

    @property
    def exposed(self) -> bool:
        """Whether nothing at all computes while it travels."""
        return not self.hidden_by


@dataclass
class Module:
    """A compiled program: computations by name, in order."""

    entry: str
    computations: dict[str, dict[str, Instruction]]
    times: dict[str, int] = field(default_factory=dict)

    def loop(self, instruction: Instruction) -> Loop | None:
        """What `instruction` repeats, if it is a loop."""
        body, condition = instruction.attribute("body"), instruction.attribute("condition")
        if instruction.opcode != "while" or body is None or condition is None:
            return None
        return Loop(body, self._trips(instruction, condition))

    def _trips(self, loop: Instruction, condition: str) -> int | None:
        if match := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.rest):
            return int(match[1])
        inside = self.computations[condition]
        test = next((each for each in inside.values() if "direction=LT" in each.rest), None)
        if test is None or len(test.operands) != 2:
            return None
        index, bound = (inside.get(name) for name in test.operands)
        if index is None or bound is None or (stop := _constant(bound)) is None:
            return None
        place = re.search(r"index=(\d+)", index.rest)
        start = self._initial(loop, int(place[1])) if place else None
        return max(0, stop - (start or 0))

    def _initial(self, loop: Instruction, place: int) -> int | None:
        for instructions in self.computations.values():
            if instructions.get(loop.name) is loop:
                state = instructions.get(loop.operands[0])
                while state is not None and state.opcode == "tuple":
                    state = instructions.get(state.operands[place])
                    while state is not None and state.opcode in ("copy", "bitcast"):
                        state = instructions.get(state.operands[0])
                return None if state is None else _constant(state)
        return None

    def seconds(self, name: str, cost: "Cost") -> float:
        """Estimated time of one run of a computation."""
        return sum(self.seconds_of(each, cost) for each in self.computations[name].values())

    def seconds_of(self, instruction: Instruction, cost: "Cost") -> float:
        """Estimated time of one instruction with everything it calls; collectives and copies take none of it."""
        if loop := self.loop(instruction):
            trips = cost.visits(instruction) if loop.trips is None else loop.trips
            return trips * self.seconds(loop.body, cost)
        if instruction.opcode == "conditional":
            return max((self.seconds(branch, cost) for branch in _branches(instruction)), default=0.0)
        if instruction.opcode == "call" and (callee := instruction.attribute("to_apply")):
            return self.seconds(callee, cost)
        if is_kernel(instruction):
            return kernel_flops(instruction) / cost.kernel_rate if cost.kernel_rate else 0.0
        return instruction.cycles / cost.clock

    def instructions(self) -> Iterator[tuple[int, Instruction]]:
        """Every instruction that runs, with how often."""
        for name, count in self.times.items():
            for instruction in self.computations[name].values():
                yield count, instruction


@dataclass(frozen=True)
class Cost:
    """What the text alone does not say: turns of each data-dependent loop, FLOP/s in a kernel of our own."""

    clock: float
    visits: Callable[[Instruction], float]
    kernel_rate: float = 0.0


def is_kernel(instruction: Instruction) -> bool:
    """Whether it is a hand-written kernel, of which the compiler estimates nothing."""
    return instruction.opcode == "custom-call" and "tpu_custom_call" in instruction.rest


def kernel_flops(instruction: Instruction) -> int:
    """What a kernel says of itself to the compiler; 0 where it says nothing."""
    match = re.search(r'"cost_estimate":\{"flops":"(\d+)"', instruction.rest)
    return int(match[1]) if match else 0


def parse(text: str) -> Module:
    """The module whose `compiled.as_text()` is `text`."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if current is None:
            if match := _HEADER.match(line):
                current = computations.setdefault(match[2], {})
                entry = match[2] if match[1] else entry
        elif line.startswith("}"):
            current = None
        elif match := _INSTRUCTION.match(line):
            result, rest = _split_type(line[match.end() :])
            opcode, _, rest = rest.partition("(")
            current[match[2]] = Instruction(match[2], opcode.strip(), result, rest)
    module = Module(entry, computations)
    module.times = _times(module)
    return module


def _split_type(text: str) -> tuple[str, str]:
    if not text.startswith("("):
        result, _, rest = text.partition(" ")
        return result, rest
    stop = _closing(text[1:]) + 2
    return text[:stop], text[stop:].lstrip()


def _closing(text: str) -> int:
    """Where the parenthesis that is open at the start of `text` closes."""
    depth = 1
    for index, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return index
    return len(text)


def _constant(instruction: Instruction) -> int | None:
    if instruction.opcode != "constant":
        return None
    match = re.match(r"(-?\d+)\)", instruction.rest)
    return int(match[1]) if match else None


def _branches(instruction: Instruction) -> list[str]:
    if match := re.search(r"branch_computations=\{([^}]*)\}", instruction.rest):
        return re.findall(r"%?([\w.\-]+)", match[1])
    return [each for name in ("true_computation", "false_computation") if (each := instruction.attribute(name))]


def _times(module: Module) -> dict[str, int]:
    """How often each computation runs; inside loops whose trips depend on data, per trip."""
    times: dict[str, int] = {}

    def walk(name: str, count: int) -> None:
        times[name] = times.get(name, 0) + count
        for instruction in module.computations[name].values():
            if loop := module.loop(instruction):
                walk(loop.body, count * (1 if loop.trips is None else loop.trips))
            elif instruction.opcode == "conditional":
                for branch in _branches(instruction):
                    walk(branch, count)
            elif instruction.opcode in ("call", "async-start", "fusion"):
                callee = instruction.attribute("to_apply") or instruction.attribute("calls")
                if callee in module.computations:
                    walk(callee, count)

    walk(module.entry, 1)
    return times


def type_bytes(text: str) -> list[float]:
    """Bytes of each array in a type as written, padding of layouts apart."""
    sizes = []
    for kind, dims in re.findall(r"\b([a-z]+[0-9]*(?:e[0-9]m[0-9][a-z]*)?)\[([\d,]*)\]", text):
        if kind in ("token", "opaque"):
            continue
        bits = re.search(r"\d+", kind)
        width = _BYTES.get(kind, int(bits[0]) / 8 if bits else 1)
        sizes.append(width * math.prod(int(dim) for dim in dims.split(",") if dim))
    return sizes


def transfers(module: Module, mesh: Sequence[tuple[str, int]]) -> list[Transfer]:
    """Every collective and host copy of the program, `mesh` giving the axes in the order of its devices."""
    found = []
    for name, count in module.times.items():
        instructions = list(module.computations[name].values())
        for place, instruction in enumerate(instructions):
            if (kind := _kind(module, instruction)) is None:
                continue
            hidden_by: tuple[str, ...] | None = None
            if instruction.opcode.endswith("-start"):
                hidden_by = tuple(each.name for each in _until_done(module, instructions[place:]))
            size, axes = _size_and_axes(kind, _described(module, instruction), mesh)
            found.append(Transfer(kind, axes, size, count, hidden_by, instruction.source, name))
    return found


def _kind(module: Module, instruction: Instruction) -> str | None:
    base = instruction.opcode.removesuffix("-start")
    if base in KINDS:
        return base
    if instruction.opcode == "copy-start" and _HOST_SPACE in instruction.result:
        return HOST_COPY
    if instruction.opcode == "async-start":
        inner = _described(module, instruction)
        return inner.opcode if inner.opcode in KINDS else None
    return None


def _described(module: Module, instruction: Instruction) -> Instruction:
    """The collective itself where `instruction` only starts a computation that holds it."""
    if instruction.opcode == "async-start" and (callee := instruction.attribute("calls")) in module.computations:
        inside = module.computations[callee].values()
        return next((each for each in inside if each.opcode in KINDS), instruction)
    return instruction


def _until_done(module: Module, instructions: Sequence[Instruction]) -> Iterator[Instruction]:
    """The computing instructions between a start and its done."""
    start, carriers = instructions[0], {instructions[0].name}
    for instruction in instructions[1:]:
        if instruction.opcode in ("async-update", "bitcast") and carriers.intersection(instruction.operands):
            carriers.add(instruction.name)
        if instruction.opcode.endswith("-done") and carriers.intersection(instruction.operands):
            return
        if _computes(module, instruction):
            yield instruction
    assert start.opcode.endswith("-start"), start.opcode


def _computes(module: Module, instruction: Instruction) -> bool:
    opcode = instruction.opcode
    if opcode in _FREE or opcode.endswith(("-start", "-done")) or opcode in KINDS or opcode == "copy":
        return False
    return module.loop(instruction) is not None or not _is_scalar(instruction.result)


def _is_scalar(result: str) -> bool:
    return sum(type_bytes(result)) <= 8


def _size_and_axes(kind: str, instruction: Instruction, mesh: Sequence[tuple[str, int]]) -> tuple[float, str]:
    if kind == HOST_COPY:
        return max(type_bytes(instruction.result), default=0.0), "host"
    group = _group(instruction, math.prod(size for _, size in mesh))
    count, axes = len(group), _axes(group, mesh)
    sizes = type_bytes(instruction.result)
    if instruction.opcode.endswith("-start"):
        # The result repeats the operands, then the outputs, then contexts.
        sizes = [size for size in sizes if size > 4]
        sizes = sizes[: len(sizes) // 2] if kind == "reduce-scatter" else sizes[len(sizes) // 2 :]
        total = sum(sizes)
    else:
        total = sum(sizes) * (count if kind == "reduce-scatter" else 1)
    if kind == "collective-permute":
        return total, axes
    share = (count - 1) / count
    return total * share * (2 if kind == "all-reduce" else 1), axes


def _group(instruction: Instruction, num_devices: int) -> list[int]:
    """The places in the mesh of the devices of one group."""
    text = instruction.rest
    if match := re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", text):
        pairs = re.findall(r"\{(\d+),(\d+)\}", text[match.start() : text.index("}}", match.start()) + 2])
        following, first = dict(pairs), match[1]
        ring = [first]
        while (after := following.get(ring[-1])) is not None and after != first and len(ring) <= len(pairs):
            ring.append(after)
        return [int(each) for each in ring]
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", text):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", match[1])}
        used = re.findall(r"'([^']*)'", match[2])
        places = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        index = tuple(slice(None) if name in used else 0 for name in sizes)
        return [int(each) for each in places[index].reshape(-1)]
    if match := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]*)\](?:T\(([\d,]*)\))?", text):
        shape = [int(each) for each in match[3].split(",")]
        places = np.arange(math.prod(shape)).reshape(shape)
        if match[4]:
            places = places.transpose([int(each) for each in match[4].split(",")])
        return [int(each) for each in places.reshape(int(match[1]), int(match[2]))[0]]
    if match := re.search(r"replica_groups=\{\{([\d,]+)\}", text):
        return [int(each) for each in match[1].split(",")]
    return list(range(num_devices))


def _axes(group: Sequence[int], mesh: Sequence[tuple[str, int]]) -> str:
    """The mesh axes along which the devices of a group differ."""
    places = np.unravel_index(np.asarray(group), tuple(size for _, size in mesh))
    names = [name for (name, _), place in zip(mesh, places, strict=True) if len(set(place.tolist())) > 1]
    return "+".join(names) or "none"


@dataclass(frozen=True)
class DataLoop:
    """A loop whose trips depend on data: how often it is entered (inside another such loop: per trip of that one, whose
    instruction is `inside`), and whether it holds no further such loop."""

    instruction: Instruction
    entered: int
    inside: str | None
    innermost: bool


def data_dependent_loops(module: Module) -> dict[str, DataLoop]:
    """The loops whose trips depend on data, by the name of their instruction."""
    bodies: dict[str, str] = {}
    found: list[tuple[str, int, Instruction]] = []
    for computation, count in module.times.items():
        for instruction in module.computations[computation].values():
            if (loop := module.loop(instruction)) is not None and loop.trips is None:
                bodies[loop.body] = instruction.name
                found.append((computation, count, instruction))
    holding = {bodies[computation] for computation, _, _ in found if computation in bodies}
    return {
        each.name: DataLoop(each, count, bodies.get(computation), each.name not in holding)
        for computation, count, each in found
    }
