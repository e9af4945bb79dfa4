"""Logits of other programs' models, recorded in golden files, against ours from the same weights."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import pytest

import ring
from lwm import model, sharding
from lwm.config import MeshConfig, ModelConfig
from lwm.sharding import Params
from lwm.weights.hf import import_hf, read_config
from lwm.weights.lwm_params import import_lwm

GOLDEN = Path(__file__).parents[3] / "shared" / "golden"
TOLERANCE = 1e-4
HF_MODELS = ("llama2_mha", "llama3_gqa", "tied_gqa")

pytestmark = pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"the golden files are missing: no folder {GOLDEN}")


@pytest.mark.parametrize("name", HF_MODELS)
def test_hugging_face_logits(name: str) -> None:
    config, params = import_hf(GOLDEN / "hf" / name)
    golden = np.load(GOLDEN / "hf" / name / "logits.npz")
    ours = model.logits(config, params, golden["input_ids"])
    assert ours.shape == golden["logits"].shape
    np.testing.assert_allclose(ours, golden["logits"], atol=TOLERANCE, rtol=0)


def test_lwm_text_logits() -> None:
    config, params = import_lwm(GOLDEN / "lwm" / "streaming_params_text", GOLDEN / "lwm" / "lwm_config.json")
    assert config.vision_vocab_size == 0
    golden = np.load(GOLDEN / "lwm" / "lwm_text_llama.npz")
    ours = model.logits(config, params, golden["input_ids"], golden["position_ids"], golden["segment_ids"] + 1)
    np.testing.assert_allclose(ours, golden["logits"], atol=TOLERANCE, rtol=0)


def vision_case() -> tuple[ModelConfig, Params, dict[str, np.ndarray]]:
    config, params = import_lwm(GOLDEN / "lwm" / "streaming_params", GOLDEN / "lwm" / "lwm_config.json")
    golden = dict(np.load(GOLDEN / "lwm" / "lwm_vision_llama.npz"))
    tokens = golden["input_ids"] + np.where(golden["vision_masks"], config.text_vocab_size, 0)
    logits = np.concatenate([golden["text_logits"], golden["vision_logits"]], axis=-1)
    batch = {"tokens": tokens, "positions": golden["position_ids"], "segment_ids": golden["segment_ids"] + 1}
    return config, params, batch | {"logits": logits}


def test_lwm_vision_logits() -> None:
    config, params, golden = vision_case()
    ours = model.logits(config, params, golden["tokens"], golden["positions"], golden["segment_ids"])
    np.testing.assert_allclose(ours, golden["logits"], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("strategy", "sizes", "layout"),
    [
        ("ring", {"fsdp": 2, "sp": 4}, "striped"),
        ("ring", {"tp": 2, "sp": 4}, "zigzag"),
        ("ulysses", {"fsdp": 2, "ulysses": 4}, "contiguous"),
        ("all_gather", {"fsdp": 2, "sp": 4}, "zigzag"),
        ("usp", {"fsdp": 2, "sp": 2, "ulysses": 2}, "striped"),
    ],
)
def test_lwm_vision_logits_on_eight_devices(strategy: str, sizes: dict[str, int], layout: str) -> None:
    config, params, golden = vision_case()
    mesh = sharding.make_mesh(MeshConfig(**{"fsdp": 1} | sizes))
    compute = model.Compute(plan=ring.Plan(mesh=mesh, strategy=strategy, layout=layout))
    params = jax.device_put(params, sharding.parameter_shardings(config, mesh))
    order = ring.layout.permutation(layout, golden["tokens"].shape[1], 4)
    arrays = [golden[name][:, order] for name in ("tokens", "positions", "segment_ids")]
    compiled = jax.jit(lambda params, *arrays: model.logits(config, params, *arrays, compute=compute))
    ours = compiled(params, *map(jnp.asarray, arrays))
    np.testing.assert_allclose(ours, golden["logits"][:, order], atol=TOLERANCE, rtol=0)


def test_rotary_settings_of_older_configurations(tmp_path: Path) -> None:
    """transformers 4 wrote rope_theta and rope_scaling at the top level."""
    values = json.loads((GOLDEN / "hf" / "llama3_gqa" / "config.json").read_text())
    rope = values.pop("rope_parameters")
    values |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert read_config(tmp_path / "config.json") == read_config(GOLDEN / "hf" / "llama3_gqa" / "config.json")


def test_unstacked_layers_are_read_alike(tmp_path: Path) -> None:
    """Released files exist with layers one by one and inside a `params` level."""
    file = tmp_path / "params"
    with open(GOLDEN / "lwm" / "streaming_params", "rb") as source, open(file, "wb") as target:
        for key, data in msgpack.Unpacker(source, max_buffer_size=0):
            if "scan_decoder" not in key:
                target.write(msgpack.packb((["params", *key], data)))
                continue
            extension = msgpack.unpackb(data)
            shape, dtype, content = msgpack.unpackb(extension.data)
            for layer, part in enumerate(np.frombuffer(content, dtype).reshape(shape)):
                one = msgpack.packb((part.shape, dtype, part.tobytes()))
                names = ["params", *(str(layer) if name == "scan_decoder" else name for name in key)]
                target.write(msgpack.packb((names, msgpack.packb(msgpack.ExtType(1, one)))))
    config, params = import_lwm(file, GOLDEN / "lwm" / "lwm_config.json")
    expected_config, expected = import_lwm(GOLDEN / "lwm" / "streaming_params", GOLDEN / "lwm" / "lwm_config.json")
    assert config == expected_config
    jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_bad_files_are_refused_in_one_sentence(tmp_path: Path) -> None:
    whole = (GOLDEN / "lwm" / "streaming_params").read_bytes()
    config_json = GOLDEN / "lwm" / "lwm_config.json"
    bad = tmp_path / "bad"
    for content, message in (
        (whole[: len(whole) // 2], "lacks layers"),
        (b"no checkpoint at all", "not a streaming checkpoint"),
        (msgpack.packb((["lm_head", "kernel"], msgpack.packb(msgpack.ExtType(2, b"x")))), "object of kind 2"),
    ):
        bad.write_bytes(content)
        with pytest.raises(ValueError, match=message) as caught:
            import_lwm(bad, config_json)
        assert "\n" not in str(caught.value)
    values = json.loads(config_json.read_text()) | {"hidden_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match="but the configuration gives"):
        import_lwm(GOLDEN / "lwm" / "streaming_params", tmp_path / "config.json")

    source = GOLDEN / "hf" / "llama2_mha"
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    tensors = (source / "model.safetensors").read_bytes()
    for content, message in ((tensors[:100], "not a whole"), (tensors[:-8], "cut short")):
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(ValueError, match=message):
            import_hf(tmp_path)
    (tmp_path / "config.json").write_text((GOLDEN / "hf" / "tied_gqa" / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(tensors)
    with pytest.raises(ValueError, match="self_attn.k_proj.weight has shape"):
        import_hf(tmp_path)
