"""The safetensors format: a length, a JSON table of tensors, their bytes.

https://huggingface.co/docs/safetensors
"""

import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from lwm.weights.pieces import MappedFile

DTYPES: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F64": np.float64}
_MAX_HEADER = 100_000_000
_INDEX = "model.safetensors.index.json"


class Tensor(NamedTuple):
    """A tensor that is still in its file."""

    file: MappedFile
    array: np.ndarray


class Planned(NamedTuple):
    """A tensor to be written: `make` is called when its turn has come, and gives an array of this shape."""

    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]


def open_directory(directory: Path) -> dict[str, Tensor]:
    """Every tensor of a directory's *.safetensors files by name, mapped from disk rather than read."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ValueError(f"there is no *.safetensors file in {directory}; convert the model to safetensors first")
    return {name: tensor for file in files for name, tensor in _tensors(MappedFile(file))}


def _tensors(mapped: MappedFile) -> Iterator[tuple[str, Tensor]]:
    file, size = mapped.path, mapped.size
    length = struct.unpack("<Q", mapped.view[:8])[0] if size >= 8 else size
    if length > min(size - 8, _MAX_HEADER):
        raise ValueError(f"{file} is not a whole safetensors file; fetch it again")
    try:
        table = json.loads(bytes(mapped.view[8 : 8 + length]))
    except ValueError as error:
        raise ValueError(f"{file} is not a safetensors file: {error}") from error
    for name, entry in table.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{file}: {name} has dtype {entry['dtype']}; only {', '.join(DTYPES)} can be read")
        dtype, shape = np.dtype(DTYPES[entry["dtype"]]), tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        if end - begin != math.prod(shape) * dtype.itemsize or 8 + length + end > size:
            raise ValueError(f"{file} is damaged or cut short at {name}; fetch it again")
        content = mapped.view[8 + length + begin : 8 + length + end]
        yield name, Tensor(mapped, np.frombuffer(content, dtype).reshape(shape))


def write_directory(
    directory: Path, tensors: Mapping[str, Planned], dtype: str, *, max_bytes: int = 5 << 30
) -> list[Path]:
    """Write tensors to files of at most `max_bytes` (one tensor at least), as Hugging Face names them; returns them.

    dtype: a name of `DTYPES`. One tensor at a time is in memory. Several files get an index beside them.
    """
    kind = np.dtype(DTYPES[dtype])
    sizes = {name: math.prod(planned.shape) * kind.itemsize for name, planned in tensors.items()}
    groups: list[list[str]] = [[]]
    for name, size in sizes.items():
        if groups[-1] and sum(sizes[each] for each in groups[-1]) + size > max_bytes:
            groups.append([])
        groups[-1].append(name)
    count = len(groups)
    names = [
        f"model-{i:05d}-of-{count:05d}.safetensors" if count > 1 else "model.safetensors" for i in range(1, count + 1)
    ]
    for file, group in zip(names, groups, strict=True):
        _write(directory / file, group, tensors, sizes, dtype)
    if count > 1:
        places = {name: file for file, group in zip(names, groups, strict=True) for name in group}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        (directory / _INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
    return [directory / name for name in names]


def _write(
    path: Path, names: Sequence[str], tensors: Mapping[str, Planned], sizes: Mapping[str, int], dtype: str
) -> None:
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in names:
        table[name] = {
            "dtype": dtype,
            "shape": list(tensors[name].shape),
            "data_offsets": [offset, offset + sizes[name]],
        }
        offset += sizes[name]
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for name in names:
            array = np.ascontiguousarray(tensors[name].make(), DTYPES[dtype])
            assert array.shape == tensors[name].shape, (name, array.shape, tensors[name].shape)
            file.write(array.tobytes() if dtype == "BF16" else array.data)
        file.flush()
        os.fsync(file.fileno())
