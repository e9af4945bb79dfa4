"""The released pickle is hostile input: arrays come out of it and nothing else happens."""

import json
import os
import pickle

import jax
import numpy as np
import pytest

from lwm import vqgan
from lwm.config import VQGANConfig
from lwm.weights import lwm_vqgan

CONFIG = VQGANConfig(
    resolution=8,
    hidden_channels=4,
    channel_mult=(1, 2),
    num_res_blocks=2,
    z_channels=3,
    num_embeddings=7,
    quantized_embed_dim=5,
)


def released_names(params):
    """Our tree under the released names: the oracle for the import, written the other way round."""

    def res(block):
        names = {"norm_0": "GroupNorm_0", "norm_1": "GroupNorm_1", "conv_0": "Conv_0", "conv_1": "Conv_1"}
        return {names.get(name, "Conv_2"): leaf for name, leaf in block.items()}

    def blocks(level):
        out = {}
        for name, value in level.items():
            if name.startswith("res_"):
                out[f"ResnetBlock_{name[4:]}"] = res(value)
            else:
                out[f"{name.capitalize()}_0"] = {"Conv_0": value}
        return out

    def half(tree, levels, kind):
        out = {f"{kind}samplingBlock_{i}": blocks(tree[f"level_{level}"]) for i, level in enumerate(levels)}
        out["MidBlock_0"] = blocks(tree["middle"])
        return out | {"Conv_0": tree["conv_in"], "GroupNorm_0": tree["norm_out"], "Conv_1": tree["conv_out"]}

    return {
        "encoder": half(params["encoder"], (0, 1), "Down"),
        "decoder": half(params["decoder"], (1, 0), "Up"),
        "quantize": {"embeddings": params["codebook"]},
        "quant_conv": params["quant_conv"],
        "post_quant_conv": params["post_quant_conv"],
    }


@pytest.fixture
def params():
    fresh = vqgan.init(CONFIG, jax.random.key(0))
    leaves, structure = jax.tree.flatten(fresh)
    rng = np.random.default_rng(0)
    return jax.tree.unflatten(structure, [rng.normal(size=x.shape).astype(np.float32) for x in leaves])


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(CONFIG.model_dump_json())
    return path


def write(tmp_path, thing, protocol=4):
    path = tmp_path / "weights"
    path.write_bytes(thing if isinstance(thing, bytes) else pickle.dumps(thing, protocol=protocol))
    return path


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_every_weight_lands_under_our_name(tmp_path, params, config_file, protocol):
    config, found = vqgan.import_lwm(write(tmp_path, released_names(params), protocol), config_file)
    assert config == CONFIG
    assert jax.tree.structure(found) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, found, params)


def test_byte_order_memory_order_and_dtype_are_honoured(tmp_path):
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4) / 7
    tree = {
        "big": array.astype(">f4"),
        "fortran": np.asfortranarray(array),
        "double": array.astype(np.float64),
        "half": array.astype(np.float16),
        "nested": {"scalar": np.array(3.5, np.float32), "empty": np.zeros((0, 2), np.float32)},
    }
    found = lwm_vqgan.read_arrays(write(tmp_path, tree))
    for name in ("big", "fortran", "double", "half"):
        np.testing.assert_array_equal(found[name], tree[name])
        assert found[name].dtype.isnative
    assert found["nested.scalar"] == 3.5
    assert found["nested.empty"].shape == (0, 2)


class Call:
    """Pickles as a call of `function` on `arguments`."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


def test_nothing_that_is_not_an_array_is_made(tmp_path):
    mark = tmp_path / "ran"
    hostile = {
        "a command": {"w": Call(os.system, f"touch {mark}")},
        "an evaluation": {"w": Call(eval, f"open({str(mark)!r}, 'w')")},
        "numpy that reads files": {"w": Call(np.load, str(mark))},
        "a number": {"w": 3.0},
        "a list": {"w": [np.zeros(2, np.float32)]},
        "no dict": np.zeros(2, np.float32),
        "integers": {"w": np.zeros(2, np.int64)},
        "objects": {"w": np.array([None, 1], dtype=object)},
        "records": {"w": np.zeros(2, [("x", "f4")])},
        "a dtype": {"w": np.dtype("f4")},
        "a class": {"w": np.ndarray},
    }
    for what, thing in hostile.items():
        path = write(tmp_path, thing)
        with pytest.raises(ValueError, match="is not a pickle of nested dicts of float arrays"):
            lwm_vqgan.read_arrays(path)
        assert not mark.exists(), what


def test_damage_is_refused(tmp_path):
    whole = pickle.dumps({"w": np.arange(300, dtype=np.float32)}, protocol=4)
    for cut in range(0, len(whole), 37):
        with pytest.raises(ValueError, match="is not a pickle"):
            lwm_vqgan.read_arrays(write(tmp_path, whole[:cut]))
    # A shape that claims more than the bytes there are (300 -> 301) is not read past its end.
    wrong = whole.replace(b"M" + (300).to_bytes(2, "little"), b"M" + (301).to_bytes(2, "little"))
    assert wrong != whole
    with pytest.raises(ValueError, match=r"shape \(301,\) with 1200 bytes"):
        lwm_vqgan.read_arrays(write(tmp_path, wrong))
    with pytest.raises(ValueError, match="cannot be read"):
        lwm_vqgan.read_arrays(tmp_path / "absent")


def test_a_file_that_rewrites_what_it_was_given_spoils_nothing_for_the_next(tmp_path):
    good = {"w": np.ones(3, np.float32)}
    # BUILD with a pair as state sets attributes on the object before it: here on the stand-in for numpy.dtype.
    hostile = b"\x80\x04}(X\x01\x00\x00\x00wcnumpy\ndtype\n(N}X\x07\x00\x00\x00resolveNstbu."
    with pytest.raises(ValueError, match="is not a pickle"):
        lwm_vqgan.read_arrays(write(tmp_path, hostile))
    np.testing.assert_array_equal(lwm_vqgan.read_arrays(write(tmp_path, good))["w"], good["w"])


def test_a_missing_extra_or_misshapen_weight_is_named(tmp_path, params, config_file):
    tree = released_names(params)
    del tree["decoder"]["UpsamplingBlock_0"]["Upsample_0"]
    with pytest.raises(ValueError, match=r"lacks the weight decoder\.level_1\.upsample\.bias"):
        vqgan.import_lwm(write(tmp_path, tree), config_file)
    tree = released_names(params)
    tree["encoder"]["MidBlock_0"]["AttnBlock_0"] = {"Conv_0": tree["quant_conv"]}
    with pytest.raises(ValueError, match=r"has the weight encoder\.middle\.AttnBlock_0\.Conv_0\.bias"):
        vqgan.import_lwm(write(tmp_path, tree), config_file)
    tree = released_names(params)
    tree["quantize"]["embeddings"] = np.zeros((8, 5), np.float32)
    with pytest.raises(ValueError, match=r"codebook has shape \(8, 5\).*asks for \(7, 5\)"):
        vqgan.import_lwm(write(tmp_path, tree), config_file)


def test_a_bad_config_is_named(tmp_path):
    for text in ("{", json.dumps({"resolution": 8}), json.dumps([1])):
        path = tmp_path / "bad.json"
        path.write_text(text)
        with pytest.raises(ValueError, match=r"bad\.json is not a VQGAN config"):
            vqgan.import_lwm(tmp_path / "weights", path)
