"""How a call is spread over a device mesh."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from ring import layout as layouts
from ring.cost import Chip, chip_of
from ring.local import Route
from ring.transit import TRANSIT_DTYPES

STRATEGIES = ("ring", "ulysses", "all_gather", "usp", "auto")
BACKENDS = ("auto", "xla", "pallas_tpu", "pallas_interpret")


@dataclasses.dataclass(frozen=True)
class Plan:
    """Where and how attention runs. Hashable: a static argument of jit.

    mesh: the device mesh; None means one device (inside ``attention_local``: the axes that are bound).
    strategy: "ring" rotates keys and values; "ulysses" exchanges heads for sequence; "all_gather" collects
        keys and values; "usp" exchanges heads over ``ulysses_axis`` and rotates over ``ring_axis``; "auto" chooses.
    layout: how callers ordered the sequence (``ring.layout.permutation``); exactness never depends on it.
    query_block, key_block: tokens per block of the local kernel; None chooses.
    transit_dtype: None sends keys and values in their own dtype; "int8" and "float8_e4m3fn" quantize them, with
        the error that ``ring.transit`` states. Where nothing travels (one shard) nothing is quantized.
    backend: the local kernel. "xla" runs everywhere; "pallas_tpu" is ``ring.pallas_tpu``; "pallas_interpret" is the
        same run by Pallas' interpreter on any device, slowly, for tests. "auto" takes "pallas_tpu" on TPUs for what
        it can do, else "xla".
    chip: what strategy "auto" calculates with, a name of ``ring.cost.CHIPS``; None takes the mesh's own devices.
    batch_axes, head_axis, ring_axis, ulysses_axis: mesh axis names; one that the mesh lacks counts as size 1.
        The sequence is sharded over (ring_axis, ulysses_axis), ring_axis outermost.
    """

    mesh: Mesh | AbstractMesh | None = None
    strategy: str = "ring"
    layout: str = "striped"
    query_block: int | None = None
    key_block: int | None = None
    transit_dtype: str | None = None
    backend: str = "auto"
    chip: str | None = None
    batch_axes: tuple[str, ...] = ("dp", "fsdp")
    head_axis: str = "tp"
    ring_axis: str = "sp"
    ulysses_axis: str = "ulysses"

    def __post_init__(self) -> None:
        layouts.check(self.layout, 1)
        for field, allowed in (("strategy", STRATEGIES), ("backend", BACKENDS)):
            if getattr(self, field) not in allowed:
                raise ValueError(f"Plan.{field} is {getattr(self, field)!r}; choose one of {', '.join(allowed)}")
        for field in ("query_block", "key_block"):
            size = getattr(self, field)
            if size is not None and size < 1:
                raise ValueError(f"Plan.{field} is {size}; give at least 1 token, or None to let ring choose")
        if self.transit_dtype not in (None, *TRANSIT_DTYPES):
            raise ValueError(
                f"Plan.transit_dtype is {self.transit_dtype!r}; choose one of {', '.join(TRANSIT_DTYPES)}, "
                f"or None to send keys and values in their own dtype"
            )
        if self.chip is not None:
            chip_of(self.chip)
        if isinstance(self.batch_axes, str):
            raise ValueError(f"Plan.batch_axes is {self.batch_axes!r}; give a tuple of axis names")
        object.__setattr__(self, "batch_axes", tuple(self.batch_axes))

    @property
    def sequence_axes(self) -> tuple[str, ...]:
        """The mesh axes of size above 1 that the sequence is sharded over, outermost first."""
        return self._present((self.ring_axis, self.ulysses_axis))

    @property
    def num_shards(self) -> int:
        """Number of shards of the sequence."""
        return self.size(self.sequence_axes)

    def size(self, axes: tuple[str, ...]) -> int:
        """Number of devices along ``axes``; absent axes count as size 1."""
        return int(np.prod([self.axis_size(axis) for axis in axes], dtype=np.int64))

    def axis_size(self, axis: str) -> int:
        """Size of one mesh axis, 1 if absent."""
        if self.mesh is None:
            try:
                return int(jax.lax.axis_size(axis))
            except NameError:
                return 1
        return int(self.mesh.shape.get(axis, 1))

    def axes(self, dim: str) -> tuple[str, ...]:
        """Mesh axes of size above 1 that dim "batch", "sequence" or "heads" is sharded over."""
        if dim == "sequence":
            return self.sequence_axes
        return self._present(self.batch_axes if dim == "batch" else (self.head_axis,))

    def spec(self, *dims: str | None) -> PartitionSpec:
        """PartitionSpec of an array whose dims are "batch", "sequence", "heads" or None."""
        return PartitionSpec(*(None if dim is None else (self.axes(dim) or None) for dim in dims))

    @property
    def device_kind(self) -> str:
        """What jax calls the devices of the mesh, or else the default ones: "cpu", "TPU v5"."""
        return self._device("device_kind")

    @property
    def platform(self) -> str:
        """ "cpu", "gpu" or "tpu": that of the mesh's devices, or else of the default ones."""
        return self._device("platform")

    def _device(self, attribute: str) -> str:
        mesh = jax.sharding.get_abstract_mesh() if self.mesh is None else self.mesh
        if isinstance(mesh, Mesh):
            return getattr(mesh.devices.flat[0], attribute)
        # Inside a caller's shard_map for devices that are not there, only its mesh knows what they are.
        return getattr(getattr(mesh, "abstract_device", None) or jax.devices()[0], attribute)

    def hardware(self) -> Chip:
        """The chip that strategy "auto" calculates with; ValueError if the devices are not in the table."""
        if self.chip is not None:
            return chip_of(self.chip)
        try:
            return chip_of(self.device_kind)
        except ValueError as error:
            raise ValueError(f"strategy 'auto' needs Plan.chip here: {error}") from None

    def route(self, strategy: str) -> Route:
        """The collectives of a strategy on this mesh."""
        ring, ulysses = self._present((self.ring_axis,)), self._present((self.ulysses_axis,))
        both = self.sequence_axes
        none: tuple[str, ...] = ()
        exchange, gather, rotated = {
            "ring": (none, none, both),
            "ulysses": (both, none, none),
            "all_gather": (none, both, none),
            "usp": (ulysses, none, ring),
        }[strategy]
        return Route(exchange, gather, rotated, self.size(exchange), self.size(gather), self.size(rotated))

    def _present(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(axis for axis in axes if self.axis_size(axis) > 1)


ONE_DEVICE = Plan()
