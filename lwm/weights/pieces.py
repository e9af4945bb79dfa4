"""Parameters on their way in, one piece at a time: a piece is one layer of a parameter, or all of one without layers.

Readers yield pieces in any order; what takes them decides whether a model ever lies in memory whole.
"""

import mmap
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lwm.config import ModelConfig
from lwm.sharding import Params, nest, parameter_table


class Piece(NamedTuple):
    """`array` float32 of the parameter at `path` of `lwm.sharding.parameter_table`; `layer` None: it has no layers."""

    path: str
    layer: int | None
    array: np.ndarray


class MappedFile:
    """A file's bytes without reading them, as the memoryview `view`. OSError where it cannot be opened."""

    def __init__(self, path: Path):
        self.path = path
        with open(path, "rb") as file:
            self.size = file.seek(0, 2)
            # An empty file cannot be mapped.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self.size else None
        self.view = memoryview(self._map if self._map is not None else b"")

    def release(self) -> None:
        """Give back the memory of the pages read so far; the operating system reads them again where needed."""
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


def collect(config: ModelConfig, pieces: Iterable[Piece]) -> Params:
    """All pieces as the nested dict of parameters, layers stacked."""
    table = parameter_table(config)
    flat: dict[str, np.ndarray] = {}
    for path, layer, array in pieces:
        if layer is None:
            flat[path] = array
        else:
            flat.setdefault(path, np.empty(table[path].shape, np.float32))[layer] = array
    return nest(flat)
