"""Reading LLaMA checkpoints of Hugging Face: config.json and safetensors files.

Format: https://huggingface.co/docs/safetensors ; a length, a JSON table of tensors, their bytes.
"""

import json
import math
import struct
from collections.abc import Callable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from lwm.config import ModelConfig, RopeScalingConfig
from lwm.sharding import Params, nest, parameter_table

_DTYPES: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F64": np.float64}
_MAX_HEADER = 100_000_000

# Ours -> (theirs, how their matrix becomes ours); matrices there are [out, in].
_Rule = tuple[str, Callable[[np.ndarray, ModelConfig], np.ndarray]]


def _transposed(weight: np.ndarray, _: ModelConfig) -> np.ndarray:
    return weight.T


def _as_is(weight: np.ndarray, _: ModelConfig) -> np.ndarray:
    return weight


def _to_heads(weight: np.ndarray, config: ModelConfig) -> np.ndarray:
    return weight.T.reshape(config.hidden_size, -1, config.head_dim)


def _from_heads(weight: np.ndarray, config: ModelConfig) -> np.ndarray:
    return weight.T.reshape(config.num_heads, config.head_dim, config.hidden_size)


_LAYER_RULES: dict[str, _Rule] = {
    "attention_norm": ("input_layernorm.weight", _as_is),
    "query": ("self_attn.q_proj.weight", _to_heads),
    "key": ("self_attn.k_proj.weight", _to_heads),
    "value": ("self_attn.v_proj.weight", _to_heads),
    "output": ("self_attn.o_proj.weight", _from_heads),
    "mlp_norm": ("post_attention_layernorm.weight", _as_is),
    "gate": ("mlp.gate_proj.weight", _transposed),
    "up": ("mlp.up_proj.weight", _transposed),
    "down": ("mlp.down_proj.weight", _transposed),
}
_RULES: dict[str, _Rule] = {
    "embed/text": ("model.embed_tokens.weight", _as_is),
    "final_norm": ("model.norm.weight", _as_is),
    "head/text": ("lm_head.weight", _transposed),
}


def import_hf(directory: str | PathLike[str]) -> tuple[ModelConfig, Params]:
    """A LlamaForCausalLM directory -> (ModelConfig, float32 parameters as numpy arrays).

    Rotary positions rotate halves there as here, so weights keep their order. Raises ValueError for a file that is
    missing or damaged, an architecture that is not LLaMA's, a missing or left-over tensor.
    """
    root = Path(directory)
    config = read_config(root / "config.json")
    tensors = open_safetensors(root)
    flat: dict[str, np.ndarray] = {}
    for path, entry in parameter_table(config).items():
        if path.startswith("layers/"):
            name, rule = _LAYER_RULES[path.removeprefix("layers/")]
            flat[path] = np.empty(entry.shape, np.float32)
            for layer in range(config.num_layers):
                source = f"model.layers.{layer}.{name}"
                flat[path][layer] = _take(tensors, root, source, rule, config, entry.shape[1:])
        else:
            source, rule = _RULES[path]
            flat[path] = np.ascontiguousarray(_take(tensors, root, source, rule, config, entry.shape), np.float32)
    ignored = {name for name in tensors if name.endswith("rotary_emb.inv_freq")}
    if config.tie_embeddings:
        ignored.add("lm_head.weight")
    if left := sorted(tensors.keys() - ignored):
        raise ValueError(f"{root} has a tensor {left[0]!r} that a LLaMA model does not; only LLaMA models can be read")
    return config, nest(flat)


def read_config(file: str | PathLike[str]) -> ModelConfig:
    """A LLaMA config.json -> ModelConfig; rotary settings may stand at the top level or in rope_parameters."""
    values = read_json(Path(file))
    allowed = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    for name, wanted in allowed.items():
        if values.get(name, wanted) != wanted:
            raise ValueError(f"{file}: {name} is {values[name]!r}; only LLaMA models with {wanted!r} can be read")
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    scaling = None
    if kind == "llama3":
        scaling = RopeScalingConfig(
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_seq_len=int(rope["original_max_position_embeddings"]),
        )
    elif kind != "default":
        raise ValueError(f"{file}: rope type {kind!r} is not supported; use default or llama3")
    try:
        return ModelConfig(
            text_vocab_size=values["vocab_size"],
            hidden_size=values["hidden_size"],
            intermediate_size=values["intermediate_size"],
            num_layers=values["num_hidden_layers"],
            num_heads=values["num_attention_heads"],
            num_kv_heads=values.get("num_key_value_heads") or values["num_attention_heads"],
            head_dim=values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"],
            norm_eps=float(values["rms_norm_eps"]),
            rope_theta=float(rope.get("rope_theta", values.get("rope_theta", 1e4))),
            rope_scaling=scaling,
            tie_embeddings=values.get("tie_word_embeddings", False),
            init_std=float(values.get("initializer_range", 0.02)),
        )
    except KeyError as error:
        raise ValueError(f"{file} lacks {error}; is it a LLaMA model's config.json?") from None


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object; ValueError names the file when it is missing or is none."""
    try:
        values = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file} must hold a JSON object, and holds a {type(values).__name__}")
    return values


def open_safetensors(directory: Path) -> dict[str, np.ndarray]:
    """Every tensor of a directory's *.safetensors files by name, mapped from disk rather than read."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ValueError(f"there is no *.safetensors file in {directory}; convert the model to safetensors first")
    return {name: tensor for file in files for name, tensor in _tensors(file)}


def _tensors(file: Path) -> Iterator[tuple[str, np.ndarray]]:
    size = file.stat().st_size
    with open(file, "rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > min(size - 8, _MAX_HEADER):
            raise ValueError(f"{file} is not a whole safetensors file; fetch it again")
        try:
            table = json.loads(stream.read(length))
        except ValueError as error:
            raise ValueError(f"{file} is not a safetensors file: {error}") from error
    for name, entry in table.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"{file}: {name} has dtype {entry['dtype']}; only {', '.join(_DTYPES)} can be read")
        dtype, shape = np.dtype(_DTYPES[entry["dtype"]]), tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        if end - begin != math.prod(shape) * dtype.itemsize or 8 + length + end > size:
            raise ValueError(f"{file} is damaged or cut short at {name}; fetch it again")
        yield name, np.memmap(file, dtype, "r", offset=8 + length + begin, shape=shape)


def _take(
    tensors: dict[str, np.ndarray],
    root: Path,
    name: str,
    rule: Callable[[np.ndarray, ModelConfig], np.ndarray],
    config: ModelConfig,
    shape: tuple[int, ...],
) -> np.ndarray:
    """The tensor in our shape; it is taken out of `tensors`, so that what is left over can be named."""
    if name not in tensors:
        raise ValueError(f"{root} lacks the tensor {name!r}; its files are incomplete or it is not a LLaMA model")
    weight = tensors.pop(name)
    try:
        taken = rule(weight, config)
    except ValueError:
        taken = weight
    if taken.shape != shape:
        raise ValueError(f"{root}: {name} has shape {weight.shape}, which does not fit its config.json")
    return taken
