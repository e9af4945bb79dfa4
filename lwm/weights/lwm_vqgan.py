"""The Large World Model's released VQGAN: a pickle of arrays, read without trusting it, under our names."""

import math
import pickle
import re
from os import PathLike
from typing import Any

import numpy as np

# Whether numpy 1 or numpy 2 wrote the file.
_RECONSTRUCT = {("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct")}
_FROM_BUFFER = {("numpy.core.numeric", "_frombuffer"), ("numpy._core.numeric", "_frombuffer")}
_FLOATS = ("f2", "f4", "f8")


def read_arrays(path: str | PathLike[str]) -> dict[str, np.ndarray]:
    """Load a pickle that holds nested dicts of float arrays and nothing else -> arrays by dotted name.

    Not even numpy's own constructors run: stand-ins note what the file says of each array, and only a plain float
    dtype, a shape and exactly the bytes that fill it make one. Everything else raises ValueError with the file's name.
    """
    try:
        with open(path, "rb") as file:
            return _flatten(_unpickler(file).load(), "")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    # A damaged or hostile file may raise anything from within the unpickler's operations.
    except Exception as error:
        raise ValueError(f"{path} is not a pickle of nested dicts of float arrays: {error}") from error


class _Stand:
    """Base of the stand-ins for numpy's objects: what the file says, unchecked."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _unpickler(file: Any) -> pickle.Unpickler:
    # Classes of this one call: a file that sets attributes on what it was given spoils nothing for the next.
    class Dtype(_Stand):
        def __init__(self, name: str, align: bool = False, copy: bool = False):
            self.name = name

        def resolve(self) -> np.dtype:
            if self.name not in _FLOATS:
                raise ValueError(f"an array of dtype {self.name!r}; only float16, float32 and float64 are admitted")
            order = self.state[1] if self.state is not None else "="
            if order not in ("<", ">", "="):
                raise ValueError(f"an array of byte order {order!r}")
            return np.dtype(order + self.name)

    class Array(_Stand):
        def resolve(self) -> np.ndarray:
            _, shape, dtype, fortran, content = self.state
            if not isinstance(dtype, Dtype) or not isinstance(content, bytes | bytearray):
                raise ValueError("an array of objects")
            if not all(isinstance(size, int) and size >= 0 for size in shape):
                raise ValueError(f"an array of shape {shape!r}")
            resolved = dtype.resolve()
            if len(content) != math.prod(shape) * resolved.itemsize:
                raise ValueError(f"an array of shape {shape} with {len(content)} bytes")
            array = np.frombuffer(content, resolved).reshape(shape, order="F" if fortran else "C")
            return array.astype(resolved.newbyteorder("="))

    class Marker:
        """What the file passes for the class of the array to make."""

    def reconstruct(kind: Any, shape: Any, code: Any) -> Array:
        return Array()

    def from_buffer(content: Any, dtype: Any, shape: Any, order: Any) -> Array:
        array = Array()
        array.state = (1, shape, dtype, order == "F", content)
        return array

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if (module, name) in _RECONSTRUCT:
                return reconstruct
            if (module, name) in _FROM_BUFFER:
                return from_buffer
            if (module, name) == ("numpy", "ndarray"):
                return Marker
            if (module, name) == ("numpy", "dtype"):
                return Dtype
            raise ValueError(f"it asks for {module}.{name}, and only arrays are admitted")

    return Unpickler(file)


def _flatten(tree: Any, name: str) -> dict[str, np.ndarray]:
    if isinstance(tree, dict):
        flat: dict[str, np.ndarray] = {}
        for key, value in tree.items():
            flat |= _flatten(value, f"{name}.{key}" if name else str(key))
        return flat
    array = tree.resolve() if name and hasattr(tree, "resolve") else None
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{name or 'the whole'} is a {type(tree).__name__}")
    return {name: array}


# In this order: the outermost convolutions and norms of each half first, then what is left belongs to the blocks.
_NAMES: tuple[tuple[str, str], ...] = (
    (r"^quantize\.embeddings$", "codebook"),
    (r"^(encoder|decoder)\.Conv_0\.", r"\1.conv_in."),
    (r"^(encoder|decoder)\.Conv_1\.", r"\1.conv_out."),
    (r"^(encoder|decoder)\.GroupNorm_0\.", r"\1.norm_out."),
    (r"\.MidBlock_0\.", ".middle."),
    (r"\.DownsamplingBlock_(\d+)\.", r".level_\1."),
    (r"\.Downsample_0\.Conv_0\.", ".downsample."),
    (r"\.Upsample_0\.Conv_0\.", ".upsample."),
    (r"\.ResnetBlock_(\d+)\.GroupNorm_(\d+)\.", r".res_\1.norm_\2."),
    (r"\.ResnetBlock_(\d+)\.Conv_2\.", r".res_\1.shortcut."),
    (r"\.ResnetBlock_(\d+)\.Conv_(\d+)\.", r".res_\1.conv_\2."),
)


def rename(released: dict[str, np.ndarray], num_levels: int) -> dict[str, np.ndarray]:
    """The released dotted names -> ours; a name this does not know stays as it is, for the caller to refuse.

    The released decoder counts its blocks in the order they run, ours by resolution as in the encoder.
    """

    def ours(name: str) -> str:
        for pattern, replacement in _NAMES:
            name = re.sub(pattern, replacement, name)
        return re.sub(r"\.UpsamplingBlock_(\d+)\.", lambda match: f".level_{num_levels - 1 - int(match[1])}.", name)

    return {ours(name): array for name, array in released.items()}
