"""Reading LLaMA checkpoints of Hugging Face: config.json and safetensors files."""

import json
from collections.abc import Callable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from lwm.config import ModelConfig, RopeScalingConfig
from lwm.sharding import Params, parameter_table
from lwm.weights.pieces import Piece, collect
from lwm.weights.safetensors import Tensor, open_directory

# What `lwm.weights.hf_export` adds to config.json for a model with vision ids; its tables hold text, then vision.
VISION_FIELD = "vision_vocab_size"

# Theirs -> ours; matrices there are [out, in].
Rule = Callable[[np.ndarray, ModelConfig], np.ndarray]


def _transposed(weight: np.ndarray, _: ModelConfig) -> np.ndarray:
    return weight.T


def _as_is(weight: np.ndarray, _: ModelConfig) -> np.ndarray:
    return weight


def _to_heads(weight: np.ndarray, config: ModelConfig) -> np.ndarray:
    return weight.T.reshape(config.hidden_size, -1, config.head_dim)


def _from_heads(weight: np.ndarray, config: ModelConfig) -> np.ndarray:
    return weight.T.reshape(config.num_heads, config.head_dim, config.hidden_size)


# Our name -> (theirs, how their matrix becomes ours).
LAYER_RULES: dict[str, tuple[str, Rule]] = {
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


def _text(weight: np.ndarray, config: ModelConfig) -> np.ndarray:
    return weight[: config.text_vocab_size]


def _vision(weight: np.ndarray, config: ModelConfig) -> np.ndarray:
    return weight[config.text_vocab_size :]


RULES: dict[str, tuple[str, Rule]] = {
    "embed/text": ("model.embed_tokens.weight", _text),
    "embed/vision": ("model.embed_tokens.weight", _vision),
    "final_norm": ("model.norm.weight", _as_is),
    "head/text": ("lm_head.weight", lambda weight, config: _text(weight, config).T),
    "head/vision": ("lm_head.weight", lambda weight, config: _vision(weight, config).T),
}


def import_hf(directory: str | PathLike[str]) -> tuple[ModelConfig, Params]:
    """A LlamaForCausalLM directory -> (ModelConfig, float32 parameters as numpy arrays).

    Rotary positions rotate halves there as here, so weights keep their order. Raises ValueError for a file that is
    missing or damaged, an architecture that is not LLaMA's, a missing or left-over tensor.
    """
    config, pieces = read_hf(directory)
    return config, collect(config, pieces)


def read_hf(directory: str | PathLike[str]) -> tuple[ModelConfig, Iterator[Piece]]:
    """As `import_hf`, one piece at a time. What is wrong with the names shows at once, with a shape at its piece."""
    root = Path(directory)
    config = read_config(root / "config.json")
    tensors = open_directory(root)
    plan: list[tuple[str, int | None, str, Rule]] = []
    for path in parameter_table(config):
        if path.startswith("layers/"):
            name, rule = LAYER_RULES[path.removeprefix("layers/")]
            plan += [(path, layer, f"model.layers.{layer}.{name}", rule) for layer in range(config.num_layers)]
        else:
            name, rule = RULES[path]
            plan.append((path, None, name, rule))
    for _, _, name, _ in plan:
        if name not in tensors:
            raise ValueError(f"{root} lacks the tensor {name!r}; its files are incomplete or it is not a LLaMA model")
    known = {name for _, _, name, _ in plan} | {name for name in tensors if name.endswith("rotary_emb.inv_freq")}
    if config.tie_embeddings:
        known.add("lm_head.weight")
    if left := sorted(tensors.keys() - known):
        raise ValueError(f"{root} has a tensor {left[0]!r} that a LLaMA model does not; only LLaMA models can be read")
    return config, _pieces(root, config, plan, tensors)


def _pieces(
    root: Path, config: ModelConfig, plan: list[tuple[str, int | None, str, Rule]], tensors: dict[str, Tensor]
) -> Iterator[Piece]:
    table = parameter_table(config)
    for path, layer, name, rule in plan:
        file, weight = tensors[name]
        try:
            taken = rule(weight, config)
        except ValueError:
            taken = weight
        if taken.shape != (table[path].shape if layer is None else table[path].shape[1:]):
            raise ValueError(f"{root}: {name} has shape {weight.shape}, which does not fit its config.json")
        yield Piece(path, layer, np.array(taken, np.float32, order="C"))
        file.release()


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
    vision = int(values.get(VISION_FIELD, 0))
    try:
        return ModelConfig(
            text_vocab_size=values["vocab_size"] - vision,
            vision_vocab_size=vision,
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
