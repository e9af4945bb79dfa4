"""The vision tokenizer against another program's outputs and against dense float64 numpy."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from lwm import vqgan
from lwm.config import VQGANConfig

GOLDEN = Path(__file__).parents[3] / "shared" / "golden"
CONFIG = VQGANConfig(
    resolution=16,
    hidden_channels=8,
    channel_mult=(1, 2, 4),
    num_res_blocks=1,
    z_channels=6,
    num_embeddings=20,
    quantized_embed_dim=5,
)


@pytest.fixture(scope="module")
def params():
    fresh = vqgan.init(CONFIG, jax.random.key(0))
    # A codebook as wide as the latents, and biases and scales that matter.
    leaves, structure = jax.tree.flatten(fresh)
    rng = np.random.default_rng(1)
    return jax.tree.unflatten(structure, [x + (0.3 * rng.normal(size=x.shape)).astype(np.float32) for x in leaves])


def frames(num, side=16, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (num, side, side, 3), dtype=np.uint8)


# Dense float64 oracle, written from the architecture's description.


def conv64(p, x, stride=1, pad=None):
    kernel = np.asarray(p["kernel"], np.float64)
    size = kernel.shape[0]
    before, after = pad if pad else (size // 2, size // 2)
    x = np.pad(x, ((0, 0), (before, after), (before, after), (0, 0)))
    rows, cols = (x.shape[1] - size) // stride + 1, (x.shape[2] - size) // stride + 1
    out = np.zeros((x.shape[0], rows, cols, kernel.shape[3]))
    for row in range(rows):
        for col in range(cols):
            window = x[:, row * stride : row * stride + size, col * stride : col * stride + size]
            out[:, row, col] = np.einsum("bijc,ijcd->bd", window, kernel)
    return out + np.asarray(p["bias"], np.float64)


def norm64(p, x, groups):
    B, H, W, C = x.shape
    grouped = x.reshape(B, H, W, groups, C // groups)
    mean = grouped.mean((1, 2, 4), keepdims=True)
    var = grouped.var((1, 2, 4), keepdims=True)
    normal = ((grouped - mean) / np.sqrt(var + 1e-6)).reshape(x.shape)
    return normal * np.asarray(p["scale"], np.float64) + np.asarray(p["bias"], np.float64)


def swish64(x):
    return x / (1 + np.exp(-x))


GROUPS = {8: 2, 16: 4, 32: 32}


def res64(p, x):
    h = conv64(p["conv_0"], swish64(norm64(p["norm_0"], x, GROUPS[x.shape[-1]])))
    h = conv64(p["conv_1"], swish64(norm64(p["norm_1"], h, GROUPS[h.shape[-1]])))
    return h + (conv64(p["shortcut"], x) if "shortcut" in p else x)


def latents64(p, x, learned=True):
    e = p["encoder"]
    x = conv64(e["conv_in"], x)
    for level in (0, 1, 2):
        x = res64(e[f"level_{level}"]["res_0"], x)
        if level < 2 and learned:
            x = conv64(e[f"level_{level}"]["downsample"], x, stride=2, pad=(0, 1))
        elif level < 2:
            x = x.reshape(x.shape[0], x.shape[1] // 2, 2, x.shape[2] // 2, 2, -1).mean((2, 4))
    x = res64(e["middle"]["res_1"], res64(e["middle"]["res_0"], x))
    return conv64(p["quant_conv"], conv64(e["conv_out"], swish64(norm64(e["norm_out"], x, 32))))


def pixels64(p, quantized, learned=True):
    d = p["decoder"]
    x = conv64(d["conv_in"], conv64(p["post_quant_conv"], quantized))
    x = res64(d["middle"]["res_1"], res64(d["middle"]["res_0"], x))
    for level in (2, 1, 0):
        x = res64(d[f"level_{level}"]["res_1"], res64(d[f"level_{level}"]["res_0"], x))
        if level:
            x = x.repeat(2, axis=1).repeat(2, axis=2)
            x = conv64(d[f"level_{level}"]["upsample"], x) if learned else x
    return conv64(d["conv_out"], swish64(norm64(d["norm_out"], x, 2)))


@pytest.mark.parametrize("learned", [True, False])
def test_encoder_and_decoder_match_a_dense_float64_computation(params, learned):
    config = CONFIG.model_copy(update={"resample_with_conv": learned})
    if not learned:
        params = jax.tree.map(lambda x: x, params)
        for half, name in (("encoder", "downsample"), ("decoder", "upsample")):
            for level in params[half].values():
                level.pop(name, None)
    assert jax.tree.structure(params) == jax.tree.structure(vqgan.init(config, jax.random.key(0)))
    x = frames(2) / 127.5 - 1
    latents = jax.jit(vqgan.latents, static_argnums=0)(config, params, jnp.asarray(x, jnp.float32))
    expected = latents64(params, x, learned)
    np.testing.assert_allclose(latents, expected, atol=2e-5 * np.abs(expected).max())

    codebook = np.asarray(params["codebook"], np.float64)
    codes = ((expected[..., None, :] - codebook) ** 2).sum(-1).argmin(-1)
    assert len(np.unique(codes)) > 3
    np.testing.assert_array_equal(vqgan.encode(config, params, jnp.asarray(x, jnp.float32)), codes)
    drawn = pixels64(params, codebook[codes], learned)
    np.testing.assert_allclose(
        vqgan.decode(config, params, jnp.asarray(codes)), np.clip(drawn, -1, 1), atol=2e-5 * np.abs(drawn).max()
    )


def test_normalization_gradients_match_finite_differences_even_where_a_group_is_flat():
    rng = np.random.default_rng(2)
    x, direction = rng.normal(size=(2, 2, 3, 3, 8))
    x[1, :, :, 4:] = 0.5
    p = {"scale": rng.normal(size=8), "bias": rng.normal(size=8)}
    with jax.enable_x64(True):
        check_grads(
            jax.jit(lambda p, x: jnp.sum(direction * vqgan._apply_norm(p, x))),
            (p, x),
            order=1,
            modes=["rev"],
            eps=1e-6,
            atol=1e-5,
            rtol=1e-5,
        )


def test_nearest_takes_the_lowest_index_of_a_tie_and_agrees_with_brute_force():
    rng = np.random.default_rng(0)
    codebook = rng.normal(size=(40, 3)).astype(np.float32)
    codebook[30] = codebook[4]
    x = rng.normal(size=(7, 5, 3)).astype(np.float32)
    x[0, 0] = codebook[30]
    found = vqgan.nearest(jnp.asarray(codebook), jnp.asarray(x))
    assert found.dtype == jnp.int32
    assert found[0, 0] == 4
    np.testing.assert_array_equal(found, ((x[..., None, :] - codebook) ** 2).sum(-1).argmin(-1))


@pytest.mark.parametrize(("channels", "groups"), [(4, 1), (8, 2), (16, 4), (24, 6), (32, 32), (48, 16), (512, 32)])
def test_groups_are_32_as_released_and_of_four_channels_where_channels_are_few(channels, groups):
    assert vqgan.num_groups(channels) == groups


def test_a_flat_frame_keeps_its_colour(params):
    x = jnp.stack([jnp.full((16, 16, 3), value) for value in (-0.8, 0.1, 0.9)])
    latents = np.asarray(jax.jit(vqgan.latents, static_argnums=0)(CONFIG, params, x)).reshape(3, -1)
    assert np.abs(latents[0] - latents[1]).max() > 0.05
    assert np.abs(latents[1] - latents[2]).max() > 0.05


def test_frames_have_the_same_codes_in_any_company_with_one_compilation(params):
    movie = frames(11)
    before = vqgan._encode_bytes._cache_size()
    codes = vqgan.encode_frames(CONFIG, params, movie, batch=4)
    assert codes.shape == (11, 16)
    assert codes.dtype == np.int32
    order = np.random.default_rng(1).permutation(11)
    np.testing.assert_array_equal(vqgan.encode_frames(CONFIG, params, movie[order], batch=4), codes[order])
    np.testing.assert_array_equal(vqgan.encode_frames(CONFIG, params, movie[6:7], batch=4), codes[6:7])
    assert vqgan._encode_bytes._cache_size() == before + 1
    assert vqgan.encode_frames(CONFIG, params, movie[:0], batch=4).shape == (0, 16)


def test_any_number_of_devices_gives_the_same_codes_and_pixels(params):
    movie = frames(13)
    one = vqgan.encode_frames(CONFIG, params, movie, batch=2)
    four = vqgan.encode_frames(CONFIG, params, movie, batch=2, devices=jax.devices()[:4])
    np.testing.assert_array_equal(four, one)
    drawn = vqgan.decode_frames(CONFIG, params, one, batch=2)
    np.testing.assert_array_equal(vqgan.decode_frames(CONFIG, params, one, batch=2, devices=jax.devices()[1:4]), drawn)
    np.testing.assert_array_equal(
        vqgan.encode_frames(CONFIG, params, movie[:1], batch=2, devices=jax.devices()), one[:1]
    )


def test_decoded_frames_are_the_decoders_pixels_in_bytes(params):
    codes = np.random.default_rng(2).integers(0, 20, (5, 16))
    drawn = vqgan.decode_frames(CONFIG, params, codes, batch=4)
    assert drawn.shape == (5, 16, 16, 3)
    assert drawn.dtype == np.uint8
    exact = (np.asarray(vqgan.decode(CONFIG, params, jnp.asarray(codes.reshape(5, 4, 4)))) + 1) * 127.5
    assert np.abs(drawn - exact).max() <= 0.5 + 1e-3
    np.testing.assert_array_equal(
        vqgan.decode_frames(CONFIG, params, codes.reshape(5, 2, 8), batch=4).shape, (5, 8, 32, 3)
    )
    assert vqgan.decode_frames(CONFIG, params, codes[:0]).shape == (0, 16, 16, 3)


def test_bad_input_is_named(params):
    with pytest.raises(ValueError, match="uint8"):
        vqgan.encode_frames(CONFIG, params, frames(1).astype(np.float32))
    with pytest.raises(ValueError, match="18 x 16 pixels.*multiples of 4"):
        vqgan.encode_frames(CONFIG, params, np.zeros((1, 18, 16, 3), np.uint8))
    with pytest.raises(ValueError, match=r"expected \[B, H, W, 3\]"):
        vqgan.encode(CONFIG, params, jnp.zeros((1, 16, 16, 4)))
    with pytest.raises(ValueError, match="code 20 is not in the codebook of 20"):
        vqgan.decode_frames(CONFIG, params, np.full((1, 16), 20))
    with pytest.raises(ValueError, match="15 codes a frame make no square"):
        vqgan.decode_frames(CONFIG, params, np.zeros((1, 15), int))
    for bad, message in (
        ({"attn_resolutions": (16,)}, "attention is not built"),
        ({"no_attn_mid_block": False}, "attention is not built"),
    ):
        with pytest.raises(ValueError, match=message):
            vqgan.init(CONFIG.model_copy(update=bad), jax.random.key(0))


def released(name):
    path = GOLDEN / "lwm" / name
    if not path.exists():
        pytest.skip(f"parity with the released tokenizer needs {GOLDEN}, which is missing")
    return path


def test_parity_with_the_released_program():
    config, params = vqgan.import_lwm(released("vqgan"), released("vqgan_config.json"))
    assert config.channel_mult == tuple(json.loads(released("vqgan_config.json").read_text())["channel_mult"])
    golden = np.load(released("lwm_vqgan.npz"))
    np.testing.assert_array_equal(vqgan.encode(config, params, golden["pixels"]), golden["codes"])
    drawn = vqgan.decode(config, params, golden["codes"])
    np.testing.assert_allclose(drawn, golden["reconstruction"], atol=1e-4, rtol=0)
