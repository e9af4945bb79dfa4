"""Reading the Large World Model's released transformers: streaming msgpack files of flax arrays.

A file is a sequence of pairs (path, bytes); the bytes are one array as flax serialises it: msgpack's extension 1 around
(shape, dtype name, data), or a dict of such chunks for arrays above 1 GB. Nothing in it is code, and nothing is run.
"""

from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import ml_dtypes
import msgpack
import numpy as np

from lwm.config import ModelConfig
from lwm.sharding import Params, nest, parameter_table
from lwm.weights.hf import read_json

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


def import_lwm(params_file: str | PathLike[str], config_json: str | PathLike[str]) -> tuple[ModelConfig, Params]:
    """A released transformer -> (ModelConfig, float32 parameters as numpy arrays).

    A file without the vision embedding is a text model. The released code rotates neighbouring pairs of each head;
    query and key features are put in the order where halves rotate, so scores are the same. Layers may be stacked or
    one by one. Raises ValueError for a damaged file, an unknown array, or shapes that the configuration does not give.
    """
    file = Path(params_file)
    arrays = dict(_arrays(file))
    values = read_json(Path(config_json))
    config = _config(values, Path(config_json), vision="transformer/vte/embedding" in arrays)
    table = parameter_table(config)
    flat: dict[str, np.ndarray] = {}
    layers_seen: dict[str, int] = {}
    for name, array in arrays.items():
        path, layer = _place(file, name)
        if path not in table:
            raise ValueError(f"{file} has an array {name!r} that this model does not")
        array = _ours(path, array, config)
        shape = table[path].shape
        if layer is None:
            _check_shape(file, name, array, shape)
            flat[path] = np.ascontiguousarray(array, np.float32)
        else:
            _check_shape(file, name, array, shape[1:])
            if layer >= shape[0]:
                raise ValueError(f"{file} has an array {name!r}, but the model has {shape[0]} layers")
            flat.setdefault(path, np.empty(shape, np.float32))[layer] = array
            layers_seen[path] = layers_seen.get(path, 0) + 1
    for path in table:
        if path in flat and layers_seen.get(path, config.num_layers) == config.num_layers:
            continue
        raise ValueError(f"{file} lacks {path}; it is incomplete, or {config_json} is of another model")
    return config, nest(flat)


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


def _arrays(file: Path) -> Iterator[tuple[str, np.ndarray]]:
    """(path, array) in the file's order; an array lives no longer than its caller keeps it."""
    try:
        with open(file, "rb") as stream:
            for key, data in msgpack.Unpacker(stream, max_buffer_size=0, read_size=1 << 20):
                names = [part for part in key if part != "params"]
                yield "/".join(names), _array(msgpack.unpackb(data, ext_hook=_extension, strict_map_key=False))
    except (msgpack.exceptions.UnpackException, ValueError, TypeError) as error:
        raise ValueError(f"{file} is not a streaming checkpoint, or is damaged: {error}") from error


def _extension(code: int, data: bytes) -> Any:
    if code != _NDARRAY:
        raise ValueError(f"it holds an object of kind {code}, and only arrays are read")
    shape, dtype, content = msgpack.unpackb(data)
    if dtype not in _DTYPES:
        raise ValueError(f"it holds an array of dtype {dtype!r}, and only floats are read")
    return np.frombuffer(content, _DTYPES[dtype]).reshape(shape)


def _array(value: Any) -> np.ndarray:
    if isinstance(value, dict) and _CHUNKED in value:
        shape = [value["shape"][str(index)] for index in range(len(value["shape"]))]
        chunks = [value["chunks"][str(index)] for index in range(len(value["chunks"]))]
        value = np.concatenate([np.ravel(chunk) for chunk in chunks]).reshape(shape)
    if not isinstance(value, np.ndarray):
        raise ValueError(f"it holds a {type(value).__name__} where an array should be")
    return value


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


def _check_shape(file: Path, name: str, array: np.ndarray, wanted: tuple[int, ...]) -> None:
    if array.shape != wanted:
        raise ValueError(f"{file}: {name} has shape {array.shape}, but the configuration gives {wanted}")
