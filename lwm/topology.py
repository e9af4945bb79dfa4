"""Names of accelerator slices, and what one device of each has.

A name is a generation with its shape in chips (`v5p:8x8x16`), Google's product name (`v5p-2048`, which counts
TensorCores for v4 and v5p and chips for v5e and v6e), or `cpu:8` for simulated devices.
"""

import math
import re
from dataclasses import dataclass, replace

from ring import cost

_GIB = 2**30


@dataclass(frozen=True)
class Generation:
    """One kind of chip, one device a chip. Bytes are per device, rates per second.

    Attributes:
        chip: peak FLOP/s, bandwidths and links, as `ring.cost` calculates with.
        clock: cycles per second of the cores, as peak FLOP/s and the number of multipliers imply.
        cores: TensorCores of a chip, which product names may count; 0 where they count chips.
        dims: dimensions of a slice's torus.
        usable_bytes: memory that a program may fill; the runtime keeps the rest.
        host_bytes: memory of a host for each of its chips (Google's VM shapes).
    """

    chip: cost.Chip
    clock: float
    cores: int
    dims: int
    usable_bytes: int
    host_bytes: int


GENERATIONS = {
    "v4": Generation(cost.CHIPS["tpu_v4"], 1.05e9, 2, 3, int(30.75 * _GIB), 407 * _GIB // 4),
    "v5p": Generation(cost.CHIPS["tpu_v5p"], 1.75e9, 2, 3, int(95.73 * _GIB), 448 * _GIB // 4),
    "v5e": Generation(cost.CHIPS["tpu_v5e"], 1.5e9, 0, 2, int(15.75 * _GIB), 384 * _GIB // 8),
    "v6e": Generation(cost.CHIPS["tpu_v6e"], 1.75e9, 0, 2, int(31.25 * _GIB), 1440 * _GIB // 8),
    "cpu": Generation(cost.CHIPS["cpu"], 2e9, 0, 1, int(cost.CHIPS["cpu"].hbm_bytes), 0),
}
_ALIASES = {"v5litepod": "v5e", "v5lite": "v5e"}
_SMALL_3D = {4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4)}
_EXAMPLES = "v4:8x8x8, v5p:8x8x16, v5e:16x16, v6e:16x16, v5p-2048 or cpu:8"


@dataclass(frozen=True)
class Topology:
    """A slice: `shape` in chips, of which each is one device."""

    kind: str
    shape: tuple[int, ...]

    @property
    def generation(self) -> Generation:
        """What each device is."""
        return GENERATIONS[self.kind]

    @property
    def num_devices(self) -> int:
        """Devices of the slice."""
        return math.prod(self.shape)

    @property
    def name(self) -> str:
        """`v5p:8x8x16`, which `parse` reads."""
        return f"{self.kind}:{'x'.join(map(str, self.shape))}"

    @property
    def is_tpu(self) -> bool:
        """Whether the TPU compiler is needed."""
        return self.kind != "cpu"


def parse(name: str) -> Topology:
    """The slice that `name` means; ValueError says which names there are."""
    if match := re.fullmatch(r"(?:tpu_)?([a-z0-9]+):(\d+(?:x\d+)*)", name.strip().lower()):
        kind = _ALIASES.get(match[1], match[1])
        if kind in GENERATIONS:
            return _checked(name, Topology(kind, tuple(map(int, match[2].split("x")))))
    if match := re.fullmatch(r"(v[0-9a-z]+?)-(\d+)", name.strip().lower()):
        kind = _ALIASES.get(match[1], match[1])
        if kind in GENERATIONS:
            return _of_product(name, kind, int(match[2]))
    raise ValueError(f"--topology {name!r} is not a known slice; give one such as {_EXAMPLES}")


def _checked(name: str, topology: Topology) -> Topology:
    dims = topology.generation.dims
    if len(topology.shape) == 1 and dims > 1:
        raise ValueError(
            f"--topology {name!r} has one number, but {topology.kind} slices have {dims} dimensions; write it as "
            f"{topology.kind}:{'x'.join(['4'] * dims)}, or use the product name ({topology.kind}-N)"
        )
    if len(topology.shape) != dims or not all(topology.shape):
        raise ValueError(f"--topology {name!r}: {topology.kind} takes {dims} sizes of at least 1, as in {_EXAMPLES}")
    return topology


def _of_product(name: str, kind: str, size: int) -> Topology:
    generation = GENERATIONS[kind]
    unit = max(generation.cores, 1)
    chips = size // unit
    shape = None if size % unit or not chips else _slice_shape(chips, generation.dims)
    if shape is None:
        counts = "TensorCores, two a chip" if generation.cores else "chips"
        raise ValueError(
            f"--topology {name!r}: {kind}-N counts {counts}, and no slice has {size}; use a power of two, or give the "
            "shape in chips"
        )
    return Topology(kind, shape)


def _slice_shape(chips: int, dims: int) -> tuple[int, ...] | None:
    """The most cubic shape, smallest dimension first; from 64 chips on, 3D slices are made of cubes of four."""
    if dims == 3 and chips < 64:
        return _SMALL_3D.get(chips)
    unit = 4 if dims == 3 else 1
    shapes: list[tuple[int, ...]]
    sides = [side for side in range(unit, chips + 1, unit) if chips % side == 0]
    if dims == 2:
        shapes = [(a, chips // a) for a in sides if a <= chips // a]
    else:
        shapes = [
            (a, b, chips // (a * b))
            for a in sides
            for b in sides
            if a <= b and chips % (a * b) == 0 and chips // (a * b) >= b and chips // (a * b) % unit == 0
        ]
    return min(shapes, key=lambda shape: shape[-1] / shape[0], default=None)


def ring_hops(coords: list[tuple[int, ...]], shape: tuple[int, ...]) -> int:
    """Links between the two most distant neighbours of a ring through `coords` on a torus of `shape`."""

    def distance(a: tuple[int, ...], b: tuple[int, ...]) -> int:
        steps = (abs(x - y) for x, y in zip(a, b, strict=True))
        return sum(min(step, size - step) for step, size in zip(steps, shape, strict=True))

    following = [*coords[1:], coords[0]]
    return max((distance(a, b) for a, b in zip(coords, following, strict=True)), default=0)


def with_memory(topology: Topology, usable_bytes: int) -> Generation:
    """The generation with the limit that a compiler stated."""
    return replace(topology.generation, usable_bytes=usable_bytes)
