"""Writing a model as a LlamaForCausalLM directory: config.json and safetensors files.

A model with vision ids has one table there, text ids first and vision ids after them, and so the logits that
`lwm.model.logits` gives; `lwm.weights.import_hf` splits it again.
"""

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from lwm.config import ModelConfig
from lwm.sharding import Params, flatten
from lwm.weights import safetensors
from lwm.weights.hf import LAYER_RULES, VISION_FIELD
from lwm.weights.safetensors import Planned

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}

# read(path, layer) -> one layer of a parameter, or all of one without layers (layer None); float32.
Read = Callable[[str, int | None], np.ndarray]


def export_hf(
    config: ModelConfig,
    params: Params,
    directory: str | PathLike[str],
    *,
    dtype: str = "float32",
    max_length: int = 4096,
) -> Path:
    """Write parameters (see `lwm.sharding.parameter_table`) as a Hugging Face directory; returns it.

    dtype: float32 loads back bitwise; bfloat16 and float16 are rounded. max_length: the context that config.json gives.
    ValueError where `directory` is there already; nothing is left of an attempt that failed.
    """
    flat = flatten(params)

    def read(path: str, layer: int | None) -> np.ndarray:
        return np.asarray(flat[path] if layer is None else flat[path][layer], np.float32)

    return write_hf(config, read, directory, dtype=dtype, max_length=max_length)


def write_hf(
    config: ModelConfig,
    read: Read,
    directory: str | PathLike[str],
    *,
    dtype: str = "float32",
    max_length: int = 4096,
    max_bytes: int = 5 << 30,
    progress: Callable[[int], None] | None = None,
) -> Path:
    """As `export_hf`, with `read` called once for each piece as it is written, so that no more is in memory.

    max_bytes: size of one file. progress: called with the number of tensors written so far.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; choose one of {', '.join(DTYPES)}")
    final = Path(directory).absolute()
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise ValueError(f"{directory} is there already; give --out a new directory")
    tensors = _plan(config, read)
    if progress is not None:
        tensors = _counted(tensors, progress)
    partial_directory = final.with_name(f".{final.name}.partial")
    shutil.rmtree(partial_directory, ignore_errors=True)
    partial_directory.mkdir(parents=True)
    try:
        safetensors.write_directory(partial_directory, tensors, DTYPES[dtype], max_bytes=max_bytes)
        text = json.dumps(hf_config(config, dtype, max_length), indent=1)
        (partial_directory / "config.json").write_text(text + "\n", encoding="utf-8")
        if final.exists():
            final.rmdir()
        os.rename(partial_directory, final)
    except BaseException:
        shutil.rmtree(partial_directory, ignore_errors=True)
        raise
    return final


def hf_config(config: ModelConfig, dtype: str, max_length: int) -> dict[str, Any]:
    """The values of config.json; rotary settings both where transformers 5 and where transformers 4 looks for them."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        scaling = config.rope_scaling
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_seq_len,
        }
    values = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope,
        "rope_theta": config.rope_theta,
        "rope_scaling": rope if config.rope_scaling is not None else None,
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.init_std,
        "max_position_embeddings": max_length,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": dtype,
    }
    return values | ({VISION_FIELD: config.vision_vocab_size} if config.vision_vocab_size else {})


def _plan(config: ModelConfig, read: Read) -> dict[str, Planned]:
    """Their tensors by name, in the order of the layers; ours become [out, in]."""
    embed, vocab, heads = config.hidden_size, config.vocab_size, config.num_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "attention_norm": (embed,),
        "query": (heads, embed),
        "key": (kv, embed),
        "value": (kv, embed),
        "output": (embed, heads),
        "mlp_norm": (embed,),
        "gate": (config.intermediate_size, embed),
        "up": (config.intermediate_size, embed),
        "down": (embed, config.intermediate_size),
    }
    names = ("text", "vision") if config.vision_vocab_size else ("text",)

    def table(group: str) -> np.ndarray:
        parts = [read(f"{group}/{name}", None) for name in names]
        return np.concatenate([part.T if group == "head" else part for part in parts])

    def layer_tensor(name: str, layer: int) -> np.ndarray:
        weight = read(f"layers/{name}", layer)
        if name == "output":
            return weight.reshape(heads, embed).T
        return weight if weight.ndim == 1 else weight.reshape(weight.shape[0], -1).T

    tensors = {"model.embed_tokens.weight": Planned((vocab, embed), partial(table, "embed"))}
    for layer in range(config.num_layers):
        for name, (theirs, _) in LAYER_RULES.items():
            tensors[f"model.layers.{layer}.{theirs}"] = Planned(shapes[name], partial(layer_tensor, name, layer))
    tensors["model.norm.weight"] = Planned((embed,), partial(read, "final_norm", None))
    if not config.tie_embeddings:
        tensors["lm_head.weight"] = Planned((vocab, embed), partial(table, "head"))
    return tensors


def _counted(tensors: dict[str, Planned], progress: Callable[[int], None]) -> dict[str, Planned]:
    done = 0

    def counting(make: Callable[[], np.ndarray]) -> np.ndarray:
        nonlocal done
        made = make()
        done += 1
        progress(done)
        return made

    return {name: Planned(each.shape, partial(counting, each.make)) for name, each in tensors.items()}
