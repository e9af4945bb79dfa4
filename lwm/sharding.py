"""The mesh, and one table per model: shape, dtype, logical axes and initialiser of every parameter.

Abstract shapes, shardings and initial values all derive from `parameter_table`. A logical axis names what a dimension
means; `MESH_AXES` says which mesh axes it is split over. Weights split over `fsdp` and the sequence group (`sp`,
`ulysses`) together, and over `tp`; activations split batch over (dp, fsdp), sequence over (sp, ulysses), heads over tp.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from lwm.config import MeshConfig, ModelConfig, resolve_mesh
from lwm.placement import ring_order

Params = dict[str, Any]
# A mesh of devices, or only its shape, to compile for devices that are not there.
AnyMesh = Mesh | AbstractMesh

# tp varies fastest: its collectives are the most frequent, so its devices are the nearest neighbours.
MESH_AXIS_NAMES = ("dp", "fsdp", "sp", "ulysses", "tp")
BATCH_AXES = ("dp", "fsdp")
SEQUENCE_AXES = ("sp", "ulysses")
# The sequence group holds the same tokens' weights, so it shares their storage with fsdp.
WEIGHT_AXES = ("fsdp", "sp", "ulysses")

MESH_AXES: dict[str, tuple[str, ...]] = {
    "embed": WEIGHT_AXES,
    # Looked-up tables split along the features alone: any vocabulary size divides, and a lookup needs no masks.
    "lookup_embed": ("tp", *WEIGHT_AXES),
    "heads": ("tp",),
    "kv_heads": ("tp",),
    "mlp": ("tp",),
    "vocab": ("tp",),
    "batch": BATCH_AXES,
    "sequence": SEQUENCE_AXES,
}

# Which config field decides a logical axis's size, for error messages.
_FIELDS = {
    "embed": "model.hidden_size",
    "lookup_embed": "model.hidden_size",
    "heads": "model.num_heads",
    "kv_heads": "model.num_kv_heads",
    "mlp": "model.intermediate_size",
    "vocab": "the vocabulary size",
    "batch": "batch_rows",
    "sequence": "seq_len",
}

Axes = tuple[str | None, ...]


class Parameter(NamedTuple):
    """One row of the table. `init` is "normal" (mean 0, deviation `std`) or "ones"."""

    shape: tuple[int, ...]
    axes: Axes
    init: str
    std: float = 0.0
    dtype: str = "float32"


def parameter_table(config: ModelConfig) -> dict[str, Parameter]:
    """Every parameter of the decoder by its "/"-joined path; layers are stacked on the leading dim.

    Weights are normal with deviation `init_std`; the two projections that write to the residual stream are divided by
    sqrt(2 * num_layers), so that its variance does not grow with depth (Radford et al. 2019).
    """
    num_layers, embed, mlp = config.num_layers, config.hidden_size, config.intermediate_size
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    std = config.init_std
    residual_std = std / math.sqrt(2 * num_layers)

    def layer(shape: tuple[int, ...], axes: Axes, init: str = "normal", std: float = std) -> Parameter:
        return Parameter((num_layers, *shape), (None, *axes), init, std)

    vocabularies = {"text": config.text_vocab_size}
    if config.vision_vocab_size:
        vocabularies["vision"] = config.vision_vocab_size
    table = {
        f"embed/{name}": Parameter((size, embed), (None, "lookup_embed"), "normal", std)
        for name, size in vocabularies.items()
    }
    table |= {
        "layers/attention_norm": layer((embed,), (None,), "ones"),
        "layers/query": layer((embed, heads, head_dim), ("embed", "heads", None)),
        "layers/key": layer((embed, kv_heads, head_dim), ("embed", "kv_heads", None)),
        "layers/value": layer((embed, kv_heads, head_dim), ("embed", "kv_heads", None)),
        "layers/output": layer((heads, head_dim, embed), ("heads", None, "embed"), std=residual_std),
        "layers/mlp_norm": layer((embed,), (None,), "ones"),
        "layers/gate": layer((embed, mlp), ("embed", "mlp")),
        "layers/up": layer((embed, mlp), ("embed", "mlp")),
        "layers/down": layer((mlp, embed), ("mlp", "embed"), std=residual_std),
        "final_norm": Parameter((embed,), (None,), "ones"),
    }
    for name, size in vocabularies.items():
        if not config.tie_embeddings:
            table[f"head/{name}"] = Parameter((embed, size), ("embed", "vocab"), "normal", std)
    return table


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of a stage over `devices` (all of them by default); ValueError where the sizes do not fit them.

    Neighbours along `sp`, over which keys and values travel in a ring, are neighbours on a TPU's torus, too.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = resolve_mesh(config, len(devices))
    shape = tuple(sizes[name] for name in MESH_AXIS_NAMES)
    # An axis may be wider than the slice's own dimensions, as tp=16 is on 4x8x8 chips.
    placed = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return Mesh(_with_rings(placed), MESH_AXIS_NAMES, axis_types=(AxisType.Auto,) * len(MESH_AXIS_NAMES))


def _with_rings(placed: np.ndarray) -> np.ndarray:
    """`placed` with its places along sp in another order, the same everywhere."""
    axis = MESH_AXIS_NAMES.index("sp")
    first = np.moveaxis(placed, axis, -1)[(0,) * (placed.ndim - 1)]
    if len(first) < 4 or not all(hasattr(device, "coords") for device in first):
        return placed
    order = ring_order([tuple(device.coords) for device in first])
    return placed if order is None else np.take(placed, order, axis=axis)


def storage_axes(sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes that weights are split over. Along a sequence axis whose size is no power of two (the 3 of a ring
    of 6144 devices) they are whole, because no model's width divides by it."""
    return tuple(
        axis
        for axis in axis_names(WEIGHT_AXES, sizes)
        if axis not in SEQUENCE_AXES or sizes[axis] & (sizes[axis] - 1) == 0
    )


def copy_axes(sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which weights are whole while tokens are not: gradients are summed over them."""
    stored = storage_axes(sizes)
    return tuple(axis for axis in axis_names(("dp", *WEIGHT_AXES), sizes) if axis not in stored)


def axis_names(axes: Sequence[str], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Those of `axes` that the mesh has with more than one device."""
    return tuple(axis for axis in axes if sizes.get(axis, 1) > 1)


def spec_for(
    axes: Axes, sizes: Mapping[str, int], shape: Sequence[int] | None = None, name: str = "array"
) -> PartitionSpec:
    """The PartitionSpec of a tensor with these logical axes on a mesh with these axis sizes.

    With `shape`, a dim that does not divide raises ValueError naming the tensor, the field and the mesh axes.
    """
    entries: list[tuple[str, ...] | str | None] = []
    used: set[str] = set()
    for dim, axis in enumerate(axes):
        names = axis_names(MESH_AXES[axis], sizes) if axis is not None else ()
        if axis in ("embed", "lookup_embed"):
            names = tuple(name for name in names if name == "tp" or name in storage_axes(sizes))
        assert used.isdisjoint(names), f"{name}: mesh axis used twice in {axes}"
        used.update(names)
        parts = math.prod(sizes[each] for each in names)
        if shape is not None and axis is not None and shape[dim] % parts:
            mesh_text = " * ".join(f"{each}={sizes[each]}" for each in names)
            raise ValueError(
                f"{name}: {_FIELDS[axis]} ({shape[dim]}) does not divide over the mesh's {mesh_text} ({parts} parts); "
                f"choose a multiple of {parts} or smaller mesh axes"
            )
        entries.append(None if not names else names[0] if len(names) == 1 else names)
    return PartitionSpec(*entries)


def mesh_sizes(mesh: AnyMesh | None) -> dict[str, int]:
    """Axis name -> number of devices; empty without a mesh."""
    return {} if mesh is None else dict(mesh.shape)


def constrain(x: jax.Array, axes: Axes, mesh: AnyMesh | None) -> jax.Array:
    """`x` with the sharding its logical axes ask for; unchanged without a mesh."""
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec_for(axes, mesh_sizes(mesh))))


def nest(flat: Mapping[str, Any]) -> Params:
    """{"a/b": x} -> {"a": {"b": x}}."""
    nested: Params = {}
    for path, leaf in flat.items():
        *parents, name = path.split("/")
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return nested


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The inverse of `nest`."""
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        flat |= flatten(value, f"{prefix}{name}/") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def parameter_specs(config: ModelConfig, sizes: Mapping[str, int]) -> dict[str, PartitionSpec]:
    """Path -> PartitionSpec for mesh axis sizes (no devices needed); ValueError where a dim does not divide."""
    return {path: spec_for(entry.axes, sizes, entry.shape, path) for path, entry in parameter_table(config).items()}


def parameter_shardings(config: ModelConfig, mesh: AnyMesh) -> Params:
    """The nested dict of NamedShardings of the parameters on `mesh`."""
    return nest({path: NamedSharding(mesh, spec) for path, spec in parameter_specs(config, mesh_sizes(mesh)).items()})


def abstract_parameters(config: ModelConfig, mesh: AnyMesh | None = None) -> Params:
    """The parameters as ShapeDtypeStructs, with their shardings when a mesh is given."""
    table = parameter_table(config)
    specs = parameter_specs(config, mesh_sizes(mesh))
    return nest(
        {
            path: jax.ShapeDtypeStruct(
                entry.shape, entry.dtype, sharding=NamedSharding(mesh, specs[path]) if mesh is not None else None
            )
            for path, entry in table.items()
        }
    )


def init_parameters(config: ModelConfig, key: jax.Array) -> Params:
    """Initial parameters. Each draws from its own key, so adding one leaves the others as they were."""

    def draw(path: str, entry: Parameter) -> jax.Array:
        if entry.init == "ones":
            return jnp.ones(entry.shape, entry.dtype)
        assert entry.init == "normal", entry.init
        number = int.from_bytes(hashlib.sha256(path.encode()).digest()[:4], "big") & 0x7FFFFFFF
        return entry.std * jax.random.normal(jax.random.fold_in(key, number), entry.shape, entry.dtype)

    return nest({path: draw(path, entry) for path, entry in parameter_table(config).items()})
