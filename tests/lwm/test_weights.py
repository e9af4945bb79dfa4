"""Weights in and out: every bit must survive, and no more than a slice of a model may be in memory."""

import io
import json
from pathlib import Path
from typing import Any

import jax
import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lwm import checkpoint, cli, sharding
from lwm.config import MeshConfig, ModelConfig, RopeScalingConfig
from lwm.weights import export_hf, hf, import_hf, import_lwm, lwm_params, msgpack_view, pieces, safetensors, store
from lwm.weights.hf_export import write_hf

GOLDEN = Path(__file__).parents[3] / "shared" / "golden"
needs_golden = pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"the golden files are missing: no folder {GOLDEN}")

CONFIG = ModelConfig(
    text_vocab_size=24,
    vision_vocab_size=16,
    hidden_size=16,
    intermediate_size=24,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    rope_theta=5e5,
    rope_scaling=RopeScalingConfig(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_seq_len=64),
)


def random_params(config: ModelConfig, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    table = sharding.parameter_table(config)
    return sharding.nest({path: rng.standard_normal(row.shape, np.float32) for path, row in table.items()})


def same(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


def refusal(*arguments: str) -> str:
    stderr = io.StringIO()
    assert cli.run(arguments, stderr) == 2
    return stderr.getvalue()


@needs_golden
@pytest.mark.parametrize("name", ["llama2_mha", "llama3_gqa", "tied_gqa"])
def test_hugging_face_models_come_back_as_they_were(name: str, tmp_path: Path) -> None:
    """Through a checkpoint, written and read slice by slice: tensors bitwise, and the same model."""
    source = GOLDEN / "hf" / name
    assert cli.run(["import", "hf", str(source), "--out", str(tmp_path / "in")]) == 0
    assert cli.run(["export", "hf", "--checkpoint", str(tmp_path / "in"), "--out", str(tmp_path / "out")]) == 0
    theirs, ours = (safetensors.open_directory(each) for each in (source, tmp_path / "out"))
    assert theirs.keys() == ours.keys()
    for tensor, tensor_out in ((theirs[each].array, ours[each].array) for each in theirs):
        assert (tensor.dtype, tensor.shape) == (tensor_out.dtype, tensor_out.shape)
        assert tensor.tobytes() == tensor_out.tobytes()
    assert hf.read_config(tmp_path / "out" / "config.json") == hf.read_config(source / "config.json")
    config, params = import_hf(source)
    assert checkpoint.load_model_config(tmp_path / "in") == config
    mesh = sharding.make_mesh(MeshConfig(fsdp=2, sp=4))
    same(checkpoint.load_params(tmp_path / "in", mesh), params)


def test_a_model_with_vision_ids_in_several_files(tmp_path: Path) -> None:
    params = random_params(CONFIG)

    def read(path: str, layer: int | None) -> np.ndarray:
        whole = sharding.flatten(params)[path]
        return whole if layer is None else whole[layer]

    write_hf(CONFIG, read, tmp_path / "parts", max_bytes=4000)
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "parts").glob("*.safetensors"))
    assert len(files) > 3
    assert sorted(set(index["weight_map"].values())) == files
    config, read_back = import_hf(tmp_path / "parts")
    assert config == CONFIG
    same(read_back, params)

    export_hf(CONFIG, params, tmp_path / "half", dtype="bfloat16")
    _, rounded = import_hf(tmp_path / "half")
    expected = jax.tree.map(lambda leaf: np.asarray(jax.numpy.asarray(leaf, "bfloat16"), np.float32), params)
    same(rounded, expected)
    with pytest.raises(ValueError, match="is there already"):
        export_hf(CONFIG, params, tmp_path / "half")
    with pytest.raises(ValueError, match="dtype is 'int8'"):
        export_hf(CONFIG, params, tmp_path / "x", dtype="int8")


@needs_golden
def test_released_checkpoints_with_arrays_in_chunks(tmp_path: Path) -> None:
    """Arrays above 1 GB are written as flat chunks that end anywhere, also inside a layer."""
    source, config_json = GOLDEN / "lwm" / "streaming_params", GOLDEN / "lwm" / "lwm_config.json"
    with open(source, "rb") as stream, open(tmp_path / "params", "wb") as target:
        for key, data in msgpack.Unpacker(stream, max_buffer_size=0):
            shape, dtype, content = msgpack.unpackb(msgpack.unpackb(data).data)
            flat = np.frombuffer(content, dtype)
            cuts = [flat[: flat.size // 5], flat[flat.size // 5 : flat.size // 2], flat[flat.size // 2 :]]
            chunks = {
                str(i): msgpack.ExtType(1, msgpack.packb((part.shape, dtype, part.tobytes())))
                for i, part in enumerate(cuts)
            }
            sizes = {str(i): size for i, size in enumerate(shape)}
            value = {"__msgpack_chunked_array__": True, "shape": sizes, "chunks": chunks}
            target.write(msgpack.packb((key, msgpack.packb(value))))
    config, params = import_lwm(source, config_json)
    chunked_config, chunked = import_lwm(tmp_path / "params", config_json)
    assert config == chunked_config
    same(params, chunked)
    given, read = lwm_params.read_lwm(source, config)
    same(pieces.collect(given, read), params)

    command = ["import", "lwm", str(tmp_path / "params"), "--out", str(tmp_path / "out")]
    assert "there is no config.json" in refusal(*command)
    assert cli.run([*command, "--config", str(config_json)]) == 0
    same(checkpoint.load_params(tmp_path / "out"), params)
    assert "is there already and not empty" in refusal(*command, "--config", str(config_json))


def test_a_source_that_ends_early_leaves_nothing(tmp_path: Path) -> None:
    params = sharding.flatten(random_params(CONFIG))
    some = [pieces.Piece("final_norm", None, params["final_norm"])]
    with pytest.raises(ValueError, match="embed/text.* was not given"):
        store.write(tmp_path / "out", CONFIG, some)
    assert list(tmp_path.iterdir()) == []


def test_a_released_vision_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not GOLDEN.is_dir():
        pytest.skip(f"the golden files are missing: no folder {GOLDEN}")
    source, shape = GOLDEN / "lwm" / "vqgan", GOLDEN / "lwm" / "vqgan_config.json"
    assert cli.run(["import", "vqgan", str(source), "--config", str(shape), "--out", str(tmp_path / "v")]) == 0
    from lwm import vqgan
    from lwm.vision_tokenizer import VisionTokenizer

    loaded = VisionTokenizer.load(tmp_path / "v")
    golden = np.load(GOLDEN / "lwm" / "lwm_vqgan.npz")
    codes = vqgan.encode(loaded.config, loaded.params, golden["pixels"])
    np.testing.assert_array_equal(np.asarray(codes).reshape(golden["codes"].shape), golden["codes"])
    capsys.readouterr()


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=5), inner, max_size=20),
    max_leaves=40,
)


@settings(max_examples=40, deadline=None)
@given(values)
def test_msgpack_is_read_as_its_library_reads_it(value: Any) -> None:
    packed = msgpack.packb(value)
    assert msgpack_view.read(memoryview(packed)) == (msgpack.unpackb(packed), len(packed))
    for cut in range(0, len(packed), 5):
        with pytest.raises(msgpack_view.Cut):
            msgpack_view.read(memoryview(packed[:cut]))


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 8, 16, 255, 256, 65535, 65536])
def test_msgpack_binary_data_is_a_view(size: int) -> None:
    content = bytes(range(256)) * 257
    packed = memoryview(msgpack.packb([content[:size], msgpack.ExtType(5, content[:size])]))
    (binary, extension), end = msgpack_view.read(packed)
    assert end == len(packed)
    assert bytes(binary) == bytes(extension.data) == content[:size]
    assert extension.code == 5
    assert binary.obj is packed.obj
