"""A checkpoint's parameters, written and read one piece at a time, so that no model has to fit into memory.

Orbax keeps every parameter as a zarr array inside one OCDBT database. It saves whole arrays only, so the checkpoint is
made with arrays of one element, and each is then replaced by one of its real shape, layer by layer.
"""

import contextlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from lwm import checkpoint
from lwm.checkpoint import MANIFEST_FILE, find_checkpoint, load_model_config
from lwm.config import ModelConfig
from lwm.digest import digest_of, piece_words
from lwm.sharding import Parameter, nest, parameter_table
from lwm.weights.pieces import Piece

# Restoring onto a mesh reads whole chunks, so a chunk is no larger than a small part of a layer.
_CHUNK_BYTES = 16 << 20


def write(
    directory: str | Path, config: ModelConfig, pieces: Iterable[Piece], progress: Callable[[int], None] | None = None
) -> Path:
    """Write pieces as a checkpoint of bare parameters, like `lwm.checkpoint.save_params`; returns the step's directory.

    progress: called with the number of pieces so far. ValueError where there is a checkpoint already, or a piece is
    missing; nothing is left of an attempt that failed.
    """
    root = Path(directory).absolute()
    if root.exists() and any(root.iterdir()):
        raise ValueError(f"{directory} is there already and not empty; give --out a new directory")
    existed = root.exists()
    work = root / ".import.partial"
    shutil.rmtree(work, ignore_errors=True)
    try:
        table = parameter_table(config)
        small = nest({path: np.zeros((1,) * len(entry.shape), entry.dtype) for path, entry in table.items()})
        step = checkpoint.save_params(work, config, small)
        arrays = {path: _create(step, path, entry) for path, entry in table.items()}
        words = _write_pieces(arrays, table, pieces, progress)
        manifest = json.loads((step / MANIFEST_FILE).read_text())
        manifest["digests"] = {f"params/{path}": digest_of(each) for path, each in words.items()}
        manifest["leaves"] = {path: [entry.dtype, list(entry.shape)] for path, entry in table.items()}
        (step / MANIFEST_FILE).write_text(json.dumps(manifest, indent=1))
        final = root / step.name
        os.rename(step, final)
        work.rmdir()
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        if not existed:
            with contextlib.suppress(OSError):
                root.rmdir()
        raise
    return final


def _write_pieces(
    arrays: dict[str, Any],
    table: dict[str, Parameter],
    pieces: Iterable[Piece],
    progress: Callable[[int], None] | None,
) -> dict[str, np.ndarray]:
    """Writes them all; returns the words of each parameter's digest."""
    words = {path: np.zeros(2, np.uint32) for path in table}
    missing = {
        (path, layer)
        for path, entry in table.items()
        for layer in (range(entry.shape[0]) if path.startswith("layers/") else (None,))
    }
    for done, (path, layer, array) in enumerate(pieces, 1):
        target = arrays[path] if layer is None else arrays[path][layer]
        target.write(array).result()
        missing.discard((path, layer))
        for first, rows in _rows(array, layer):
            words[path] += piece_words(rows, first)
        if progress is not None:
            progress(done)
    if missing:
        raise ValueError(f"{min(str(each) for each in missing)} was not given; the source is incomplete")
    return words


def _rows(array: np.ndarray, layer: int | None) -> Iterator[tuple[int, np.ndarray]]:
    """A piece as parts of its parameter's first dim, small enough that what is computed from them is small, too."""
    if layer is not None:
        yield layer, array[None]
        return
    count = max(1, _CHUNK_BYTES // max(1, array[:1].nbytes))
    for first in range(0, len(array), count):
        yield first, array[first : first + count]


def reader(directory: str | Path) -> tuple[ModelConfig, Callable[[str, int | None], np.ndarray]]:
    """A checkpoint's model, and read(path, layer) -> that piece as float32 (see `lwm.weights.pieces.Piece`)."""
    step = find_checkpoint(directory)
    config = load_model_config(step)
    opened: dict[str, Any] = {}

    def read(path: str, layer: int | None) -> np.ndarray:
        if path not in opened:
            opened[path] = ts.open(_spec(step, path), open=True).result()
        source = opened[path] if layer is None else opened[path][layer]
        return np.asarray(source.read().result(), np.float32)

    return config, read


def _spec(step: Path, path: str) -> dict[str, Any]:
    return {
        "driver": "zarr",
        "kvstore": {
            "driver": "ocdbt",
            "base": {"driver": "file", "path": f"{step / 'params'}{os.sep}"},
            "path": f"{path.replace('/', '.')}/",
        },
        # Nothing is read twice.
        "recheck_cached_data": False,
        "context": {"cache_pool": {"total_bytes_limit": 0}},
    }


def _create(step: Path, path: str, entry: Parameter) -> Any:
    spec = _spec(step, path)
    spec["metadata"] = {
        "shape": list(entry.shape),
        "chunks": _chunks(entry.shape, layered=path.startswith("layers/")),
        "dtype": np.dtype(entry.dtype).str,
        "compressor": {"id": "zstd", "level": 1},
    }
    return ts.open(spec, create=True, delete_existing=True).result()


def _chunks(shape: tuple[int, ...], *, layered: bool) -> list[int]:
    """One layer at most, halved along its largest dims until a chunk is small."""
    chunks = [1, *shape[1:]] if layered else list(shape)
    while math.prod(chunks) * 4 > _CHUNK_BYTES:
        largest = chunks.index(max(chunks))
        chunks[largest] = -(-chunks[largest] // 2)
    return chunks
