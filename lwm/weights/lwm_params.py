"""Reading the Large World Model's released transformers: streaming msgpack files of flax arrays.

A file is a sequence of pairs (path, bytes); the bytes are one array as flax serialises it: msgpack's extension 1 around
(shape, dtype name, data), or a dict of such chunks for arrays above 1 GB. Nothing in it is code, and nothing is run.
The file is mapped, not read: layers may be stacked in one array of many gigabytes, and are taken out one by one.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from lwm.config import ModelConfig
from lwm.sharding import Params, parameter_table
from lwm.weights import msgpack_view
from lwm.weights.hf import read_json
from lwm.weights.pieces import MappedFile, Piece, collect

_NDARRAY = 1
_CHUNKED = "__msgpack_chunked_array__"
_DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "float64": np.float64,
    "bfloat16": ml_dtypes.bfloat16,
}

_LAYER_NAMES = {
    "attention/wq": "query",
    "attention/wk": "key",
    "attention/wv": "value",
    "attention/wo": "output",
    "attention_norm": "attention_norm",
    "feed_forward/w1": "gate",
    "feed_forward/w2": "down",
    "feed_forward/w3": "up",
    "ffn_norm": "mlp_norm",
}
_NAMES = {
    "transformer/wte/embedding": "embed/text",
    "transformer/vte/embedding": "embed/vision",
    "transformer/ln_f/kernel": "final_norm",
    "lm_head/kernel": "head/text",
    "vision_head/kernel": "head/vision",
}
_LAYERS = "transformer/h/"


@dataclass(frozen=True)
class _Stored:
    """An array still in the file: its elements in C order are `parts`, one after the other."""

    shape: tuple[int, ...]
    parts: tuple[np.ndarray, ...]

    def take(self, layer: int | None = None) -> np.ndarray:
        """A copy of all of it, or of one index of its first dim."""
        shape = self.shape if layer is None else self.shape[1:]
        size = math.prod(shape)
        begin = 0 if layer is None else layer * size
        flat = np.empty(size, self.parts[0].dtype)
        at = 0
        for part in self.parts:
            low, high = max(begin, at), min(begin + size, at + part.size)
            if low < high:
                flat[low - begin : high - begin] = part[low - at : high - at]
            at += part.size
        return flat.reshape(shape)


def import_lwm(params_file: str | PathLike[str], config_json: str | PathLike[str]) -> tuple[ModelConfig, Params]:
    """A released transformer -> (ModelConfig, float32 parameters as numpy arrays).

    A file without the vision embedding is a text model. The released code rotates neighbouring pairs of each head;
    query and key features are put in the order where halves rotate, so scores are the same. Layers may be stacked or
    one by one. Raises ValueError for a damaged file, an unknown array, or shapes that the configuration does not give.
    """
    config, pieces = read_lwm(params_file, config_json)
    return config, collect(config, pieces)


def read_lwm(
    params_file: str | PathLike[str], config: str | PathLike[str] | ModelConfig
) -> tuple[ModelConfig, Iterator[Piece]]:
    """As `import_lwm`, one piece at a time; `config` may also be a model that is known already."""
    file = Path(params_file)
    mapped, arrays = _open(file)
    vision = "transformer/vte/embedding" in arrays
    if isinstance(config, ModelConfig):
        model = config if vision else config.model_copy(update={"vision_vocab_size": 0})
        if vision and not model.vision_vocab_size:
            raise ValueError(f"{file} has vision ids, but the model's vision_vocab_size is 0; set it")
        source = "the configuration"
    else:
        model, source = _config(read_json(Path(config)), Path(config), vision=vision), str(config)
    table = parameter_table(model)
    seen: dict[str, set[int | None]] = {}
    for name in arrays:
        path, layer = _place(file, name)
        if path not in table:
            raise ValueError(f"{file} has an array {name!r} that this model does not")
        if layer is not None and layer >= model.num_layers:
            raise ValueError(f"{file} has an array {name!r}, but the model has {model.num_layers} layers")
        seen.setdefault(path, set()).add(layer)
    for path in table:
        layers = seen.get(path, set())
        if None not in layers and len(layers) != model.num_layers:
            raise ValueError(f"{file} lacks {path}; it is incomplete, or {source} is of another model")
    return model, _pieces(file, mapped, arrays, model)


def _pieces(file: Path, mapped: MappedFile, arrays: Mapping[str, _Stored], config: ModelConfig) -> Iterator[Piece]:
    table = parameter_table(config)
    for name, stored in arrays.items():
        path, layer = _place(file, name)
        wanted = table[path].shape
        stacked = layer is None and path.startswith("layers/")
        if stacked and (not stored.shape or stored.shape[0] != config.num_layers):
            _check_shape(file, name, stored.shape, wanted)
        for index in range(config.num_layers) if stacked else (None,):
            array = _ours(path, stored.take(index), config)
            _check_shape(file, name, array.shape, wanted[1:] if path.startswith("layers/") else wanted)
            yield Piece(path, index if stacked else layer, np.ascontiguousarray(array, np.float32))
            mapped.release()


def _config(values: Mapping[str, Any], file: Path, *, vision: bool) -> ModelConfig:
    try:
        return ModelConfig(
            text_vocab_size=values["vocab_size"],
            vision_vocab_size=values.get("vision_vocab_size", 8448) if vision else 0,
            hidden_size=values["hidden_size"],
            intermediate_size=values["intermediate_size"],
            num_layers=values["num_hidden_layers"],
            num_heads=values["num_attention_heads"],
            norm_eps=float(values["rms_norm_eps"]),
            rope_theta=float(values["theta"]),
            init_std=float(values.get("initializer_range", 0.02)),
        )
    except KeyError as error:
        raise ValueError(f"{file} lacks {error}; it must be the JSON of a released model's configuration") from None


def _open(file: Path) -> tuple[MappedFile, dict[str, _Stored]]:
    """The file and its arrays by path; the values stay in the file. What a cut file still holds whole is there."""
    arrays: dict[str, _Stored] = {}
    try:
        mapped = MappedFile(file)
        at = 0
        while at < mapped.size:
            pair, at = msgpack_view.read(mapped.view, at)
            if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], list):
                raise ValueError("it is no sequence of names and arrays")
            names = [str(part) for part in pair[0] if part != "params"]
            value, _ = msgpack_view.read(memoryview(pair[1]))
            arrays["/".join(names)] = _stored(value)
    except msgpack_view.Cut:
        pass
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} is not a streaming checkpoint, or is damaged: {error}") from error
    return mapped, arrays


def _stored(value: Any) -> _Stored:
    if isinstance(value, dict) and _CHUNKED in value:
        shape = tuple(int(value["shape"][str(index)]) for index in range(len(value["shape"])))
        parts = tuple(_array(value["chunks"][str(index)]).reshape(-1) for index in range(len(value["chunks"])))
    else:
        array = _array(value)
        shape, parts = array.shape, (array.reshape(-1),)
    if not parts or sum(part.size for part in parts) != math.prod(shape):
        raise ValueError(f"it holds an array of shape {shape} with other than {math.prod(shape)} elements")
    return _Stored(shape, parts)


def _array(value: Any) -> np.ndarray:
    if not isinstance(value, msgpack_view.Extension):
        raise ValueError(f"it holds a {type(value).__name__} where an array should be")
    if value.code != _NDARRAY:
        raise ValueError(f"it holds an object of kind {value.code}, and only arrays are read")
    shape, dtype, content = msgpack_view.read(value.data)[0]
    if dtype not in _DTYPES:
        raise ValueError(f"it holds an array of dtype {dtype!r}, and only floats are read")
    return np.frombuffer(content, _DTYPES[dtype]).reshape(shape)


def _place(file: Path, name: str) -> tuple[str, int | None]:
    """Our path of one of their arrays, and which layer it is of (None: all of them, or none)."""
    if name in _NAMES:
        return _NAMES[name], None
    if name.startswith(_LAYERS):
        which, _, rest = name.removeprefix(_LAYERS).partition("/")
        ours = _LAYER_NAMES.get(rest.removesuffix("/kernel"))
        if ours is not None and (which == "scan_decoder" or which.isdigit()):
            return f"layers/{ours}", None if which == "scan_decoder" else int(which)
    raise ValueError(f"{file} has an array {name!r} that a released model does not")


def _ours(path: str, array: np.ndarray, config: ModelConfig) -> np.ndarray:
    heads, head_dim, embed = config.num_heads, config.head_dim, config.hidden_size
    if path in ("layers/query", "layers/key", "layers/value") and array.size % (embed * heads * head_dim) == 0:
        array = array.reshape(*array.shape[:-1], heads, head_dim)
        if path != "layers/value":
            pairs = array.reshape(*array.shape[:-1], head_dim // 2, 2)
            array = np.swapaxes(pairs, -1, -2).reshape(array.shape)
    elif path == "layers/output" and array.size % (embed * heads * head_dim) == 0:
        array = array.reshape(*array.shape[:-2], heads, head_dim, array.shape[-1])
    return array


def _check_shape(file: Path, name: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if shape != wanted:
        raise ValueError(f"{file}: {name} has shape {shape}, but the configuration gives {wanted}")
