"""The vision tokenizer: a VQGAN turns a frame into a grid of codes and back.

The shape is the Large World Model's (arXiv 2402.08268, after VQGAN, arXiv 2012.09841): residual blocks of group
normalization, swish and 3x3 convolutions, resampling by convolution, no attention, a 1x1 convolution on either side of
the codebook, the nearest codebook vector by Euclidean distance. Parameters are a nested dict of float32 arrays whose
names and shapes come from one table, `table(config)`.

Shape suffixes: B batch, T frames, H height, W width, C channels; h, w the code grid, K codebook size, D code dim.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lwm.config import VQGANConfig
from lwm.weights import lwm_vqgan

Params = dict[str, Any]

# Codes are data written to disk: every backend must agree on them, so no reduced-precision products.
PRECISION = lax.Precision.HIGHEST
NORM_EPSILON = 1e-6
# Batches that are computed while the one before them is fetched.
_UNDER_WAY = 3


class Weight(NamedTuple):
    """One parameter: its shape and how it starts ("fan_in", "ones" or "zeros")."""

    shape: tuple[int, ...]
    init: str


def downsampling(config: VQGANConfig) -> int:
    """Pixels per code along one side: 2 ** (number of levels - 1)."""
    return 2 ** (len(config.channel_mult) - 1)


def num_groups(channels: int) -> int:
    """Groups of a normalization over `channels`: 32 as released; fewer where channels are few.

    Groups of one channel would erase every channel's mean, and with it the colour of a flat frame, so below 32
    channels a group has four of them.
    """
    return math.gcd(32, channels) if channels >= 32 else math.gcd(max(channels // 4, 1), channels)


def check_supported(config: VQGANConfig) -> None:
    """Raise ValueError where the config asks for what this tokenizer has not."""
    if config.attn_resolutions or not config.no_attn_mid_block:
        raise ValueError(
            f"vqgan: attention is not built (attn_resolutions={config.attn_resolutions}, "
            f"no_attn_mid_block={config.no_attn_mid_block}); use attn_resolutions=() and no_attn_mid_block=True, "
            "as the released tokenizer does"
        )


def _conv(size: int, channels_in: int, channels_out: int, init: str = "fan_in") -> dict[str, Weight]:
    return {
        "kernel": Weight((size, size, channels_in, channels_out), init),
        "bias": Weight((channels_out,), "zeros"),
    }


def _norm(channels: int) -> dict[str, Weight]:
    return {"scale": Weight((channels,), "ones"), "bias": Weight((channels,), "zeros")}


def _res(channels_in: int, channels_out: int) -> dict[str, Any]:
    block = {
        "norm_0": _norm(channels_in),
        "conv_0": _conv(3, channels_in, channels_out),
        "norm_1": _norm(channels_out),
        # Blocks that start as identities, and a decoder that starts from grey, learn faster.
        "conv_1": _conv(3, channels_out, channels_out, "zeros"),
    }
    if channels_in != channels_out:
        block["shortcut"] = _conv(1, channels_in, channels_out)
    return block


def table(config: VQGANConfig) -> dict[str, Any]:
    """Every parameter of the tokenizer as a nested dict of `Weight`; init, import and checks derive from it.

    `encoder.level_i` and `decoder.level_i` are the blocks at resolution / 2**i.
    """
    check_supported(config)
    widths = [config.hidden_channels * mult for mult in config.channel_mult]
    last = len(widths) - 1
    middle = {"res_0": _res(widths[last], widths[last]), "res_1": _res(widths[last], widths[last])}

    def level(channels_in: int, channels_out: int, num_blocks: int) -> dict[str, Any]:
        return {f"res_{i}": _res(channels_out if i else channels_in, channels_out) for i in range(num_blocks)}

    encoder: dict[str, Any] = {"conv_in": _conv(3, config.num_channels, config.hidden_channels)}
    for i, width in enumerate(widths):
        encoder[f"level_{i}"] = level(widths[i - 1] if i else config.hidden_channels, width, config.num_res_blocks)
        if i < last and config.resample_with_conv:
            encoder[f"level_{i}"]["downsample"] = _conv(3, width, width)
    encoder |= {
        "middle": middle,
        "norm_out": _norm(widths[last]),
        "conv_out": _conv(3, widths[last], config.z_channels),
    }

    decoder: dict[str, Any] = {"conv_in": _conv(3, config.z_channels, widths[last]), "middle": middle}
    for i in range(last, -1, -1):
        decoder[f"level_{i}"] = level(widths[min(i + 1, last)], widths[i], config.num_res_blocks + 1)
        if i > 0 and config.resample_with_conv:
            decoder[f"level_{i}"]["upsample"] = _conv(3, widths[i], widths[i])
    decoder |= {"norm_out": _norm(widths[0]), "conv_out": _conv(3, widths[0], config.num_channels, "zeros")}

    return {
        "encoder": encoder,
        "quant_conv": _conv(1, config.z_channels, config.quantized_embed_dim),
        "codebook": Weight((config.num_embeddings, config.quantized_embed_dim), "fan_in"),
        "post_quant_conv": _conv(1, config.quantized_embed_dim, config.z_channels),
        "decoder": decoder,
    }


def _is_weight(leaf: object) -> bool:
    return isinstance(leaf, Weight)


@partial(jax.jit, static_argnums=0)
def init(config: VQGANConfig, key: jax.Array) -> Params:
    """Fresh float32 parameters: nested dict, convolutions normal with variance 1 / fan-in, or zero."""
    weights, structure = jax.tree.flatten(table(config), is_leaf=_is_weight)
    # One draw cut into pieces: a draw per weight would take XLA many times as long to compile.
    sizes = [math.prod(weight.shape) for weight in weights]
    draws = jnp.split(jax.random.normal(key, (sum(sizes),)), np.cumsum(sizes)[:-1])

    def initial(weight: Weight, draw: jax.Array) -> jax.Array:
        if weight.init == "ones":
            return jnp.ones(weight.shape)
        if weight.init == "zeros":
            return jnp.zeros(weight.shape)
        assert weight.init == "fan_in", weight.init
        return draw.reshape(weight.shape) / math.sqrt(math.prod(weight.shape[:-1]))

    return jax.tree.unflatten(structure, [initial(*pair) for pair in zip(weights, draws, strict=True)])


def _apply_conv(p: Params, x_BHWC: jax.Array, stride: int = 1, padding: Any = "SAME") -> jax.Array:
    y = lax.conv_general_dilated(
        x_BHWC, p["kernel"], (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"), precision=PRECISION
    )
    return y + p["bias"]


def _apply_norm(p: Params, x_BHWC: jax.Array) -> jax.Array:
    """Group normalization over space and the group's channels, then scale and bias per channel."""
    channels = x_BHWC.shape[-1]
    groups = num_groups(channels)
    # Moments per channel first, then over the group: x itself is never reshaped, which XLA fuses better.
    mean_BG = x_BHWC.mean((1, 2)).reshape(-1, groups, channels // groups).mean(-1)
    square_BG = jnp.square(x_BHWC).mean((1, 2)).reshape(-1, groups, channels // groups).mean(-1)
    inverse_BG = lax.rsqrt(jnp.maximum(square_BG - jnp.square(mean_BG), 0.0) + NORM_EPSILON)
    scale_BC = jnp.repeat(inverse_BG, channels // groups, axis=-1) * p["scale"]
    shift_BC = p["bias"] - jnp.repeat(mean_BG, channels // groups, axis=-1) * scale_BC
    return x_BHWC * scale_BC[:, None, None, :] + shift_BC[:, None, None, :]


def _apply_res(p: Params, x_BHWC: jax.Array) -> jax.Array:
    h = _apply_conv(p["conv_0"], jax.nn.swish(_apply_norm(p["norm_0"], x_BHWC)))
    h = _apply_conv(p["conv_1"], jax.nn.swish(_apply_norm(p["norm_1"], h)))
    return h + (_apply_conv(p["shortcut"], x_BHWC) if "shortcut" in p else x_BHWC)


def _apply_blocks(p: Params, x_BHWC: jax.Array) -> jax.Array:
    for i in range(sum(name.startswith("res_") for name in p)):
        x_BHWC = _apply_res(p[f"res_{i}"], x_BHWC)
    return x_BHWC


def _downsample(p: Params | None, x_BHWC: jax.Array) -> jax.Array:
    if p is None:
        total = lax.reduce_window(x_BHWC, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return total / 4
    # The released model pads on the right and below only.
    return _apply_conv(p, x_BHWC, stride=2, padding=((0, 1), (0, 1)))


def _upsample(p: Params | None, x_BHWC: jax.Array) -> jax.Array:
    B, H, W, C = x_BHWC.shape
    x_BHWC = jnp.broadcast_to(x_BHWC[:, :, None, :, None, :], (B, H, 2, W, 2, C)).reshape(B, 2 * H, 2 * W, C)
    return x_BHWC if p is None else _apply_conv(p, x_BHWC)


def latents(config: VQGANConfig, params: Params, pixels_BHWC: jax.Array) -> jax.Array:
    """Encoder output before the codebook: pixels [B,H,W,3] in [-1, 1] -> float32 [B,h,w,D]."""
    step = downsampling(config)
    if pixels_BHWC.ndim != 4 or pixels_BHWC.shape[-1] != config.num_channels:
        raise ValueError(f"vqgan: pixels have shape {pixels_BHWC.shape}; expected [B, H, W, {config.num_channels}]")
    if pixels_BHWC.shape[1] % step or pixels_BHWC.shape[2] % step:
        raise ValueError(
            f"vqgan: frames of {pixels_BHWC.shape[1]} x {pixels_BHWC.shape[2]} pixels cannot be cut into codes of "
            f"{step} x {step}; resize them to multiples of {step}"
        )
    p = params["encoder"]
    x = _apply_conv(p["conv_in"], pixels_BHWC)
    last = len(config.channel_mult) - 1
    for i in range(last + 1):
        x = _apply_blocks(p[f"level_{i}"], x)
        if i < last:
            x = _downsample(p[f"level_{i}"].get("downsample"), x)
    x = _apply_blocks(p["middle"], x)
    x = _apply_conv(p["conv_out"], jax.nn.swish(_apply_norm(p["norm_out"], x)))
    return _apply_conv(params["quant_conv"], x)


def nearest(codebook_KD: jax.Array, x: jax.Array) -> jax.Array:
    """Index of the nearest codebook vector: float [..., D] -> int32 [...]; the lowest index wins a tie."""
    # |x - e|^2 without |x|^2, which is the same for all e.
    distances = jnp.sum(jnp.square(codebook_KD), -1) - 2 * jnp.matmul(x, codebook_KD.T, precision=PRECISION)
    return jnp.argmin(distances, -1).astype(jnp.int32)


def reconstruct(config: VQGANConfig, params: Params, quantized_BhwD: jax.Array) -> jax.Array:
    """Decoder: codebook vectors [B,h,w,D] -> pixels [B,H,W,3], not clipped."""
    p = params["decoder"]
    x = _apply_conv(params["post_quant_conv"], quantized_BhwD)
    x = _apply_blocks(p["middle"], _apply_conv(p["conv_in"], x))
    for i in range(len(config.channel_mult) - 1, -1, -1):
        x = _apply_blocks(p[f"level_{i}"], x)
        if i > 0:
            x = _upsample(p[f"level_{i}"].get("upsample"), x)
    return _apply_conv(p["conv_out"], jax.nn.swish(_apply_norm(p["norm_out"], x)))


@partial(jax.jit, static_argnums=0)
def encode(config: VQGANConfig, params: Params, pixels_BHWC: jax.Array) -> jax.Array:
    """Pixels float [B,H,W,3] in [-1, 1] -> codes int32 [B,h,w]; H and W multiples of `downsampling(config)`."""
    return nearest(params["codebook"], latents(config, params, pixels_BHWC))


@partial(jax.jit, static_argnums=0)
def decode(config: VQGANConfig, params: Params, codes_Bhw: jax.Array) -> jax.Array:
    """Codes int32 [B,h,w] in [0, K) -> pixels float32 [B,H,W,3] in [-1, 1]. A code out of range is clamped to it."""
    quantized = jnp.take(params["codebook"], codes_Bhw, axis=0, mode="clip")
    return jnp.clip(reconstruct(config, params, quantized), -1.0, 1.0)


def to_float(pixels_uint8: jax.Array) -> jax.Array:
    """uint8 pixels -> float32 in [-1, 1]: x / 127.5 - 1."""
    return pixels_uint8.astype(jnp.float32) / 127.5 - 1.0


@partial(jax.jit, static_argnums=0)
def _encode_bytes(config: VQGANConfig, params: Params, pixels: jax.Array) -> jax.Array:
    return encode(config, params, to_float(pixels))


@partial(jax.jit, static_argnums=0)
def _decode_bytes(config: VQGANConfig, params: Params, codes: jax.Array) -> jax.Array:
    return jnp.round((decode(config, params, codes) + 1.0) * 127.5).astype(jnp.uint8)


def batches(array: np.ndarray, batch: int) -> Iterator[np.ndarray]:
    """Slices of `batch` rows; the last one repeats its first row to be full, so that one compilation serves all."""
    for start in range(0, len(array), batch):
        rows = array[start : start + batch]
        yield np.concatenate([rows, np.repeat(rows[:1], batch - len(rows), axis=0)])


@cache
def _on_all(
    function: Callable[[VQGANConfig, Params, jax.Array], jax.Array],
    config: VQGANConfig,
    devices: tuple[jax.Device, ...],
) -> tuple[Callable[[Params, jax.Array], jax.Array], NamedSharding, NamedSharding]:
    """`function` with every device's own rows, and where parameters and rows go.

    Each device runs the program that a single one would run, so that codes do not depend on how many there are.
    """
    mesh = Mesh(np.array(devices), ("frames",))
    specs = (PartitionSpec(), PartitionSpec("frames"))
    mapped = jax.shard_map(
        partial(function, config), mesh=mesh, in_specs=specs, out_specs=PartitionSpec("frames"), check_vma=False
    )
    return jax.jit(mapped), NamedSharding(mesh, specs[0]), NamedSharding(mesh, specs[1])


def _in_batches(
    function: Callable[[VQGANConfig, Params, Any], jax.Array],
    config: VQGANConfig,
    params: Params,
    rows: np.ndarray,
    batch: int,
    devices: Sequence[jax.Device] | None,
) -> np.ndarray:
    """`function` of all rows, `batch` a device at a time, the next ones under way before the first are fetched."""
    if devices is None:
        # Simulated devices share one processor: several of them would only take turns.
        local = jax.local_devices()
        devices = local[:1] if local[0].platform == "cpu" else local
    used = min(len(devices), -(-len(rows) // batch))
    if used <= 1 and devices[0] == jax.local_devices()[0]:
        run: Callable[[np.ndarray], jax.Array] = partial(function, config, params)
    else:
        program, everywhere, by_row = _on_all(function, config, tuple(devices[:used]))
        placed = jax.device_put(params, everywhere)
        run = lambda part: program(placed, jax.device_put(part, by_row))
    done: list[np.ndarray] = []
    waiting: deque[jax.Array] = deque()
    for part in batches(rows, batch * used):
        waiting.append(run(part))
        if len(waiting) > _UNDER_WAY:
            done.append(np.asarray(waiting.popleft()))
    return np.concatenate([*done, *map(np.asarray, waiting)])[: len(rows)]


def encode_frames(
    config: VQGANConfig,
    params: Params,
    pixels: np.ndarray,
    *,
    batch: int = 32,
    devices: Sequence[jax.Device] | None = None,
) -> np.ndarray:
    """Frames uint8 [T,H,W,3] -> codes int32 [T, h*w], row by row from the top left.

    `batch` frames at once on each of `devices` (default: all of this process's accelerators). A frame's codes depend on
    that frame and `batch` alone, wherever it stands among the others and however many devices there are.
    """
    if pixels.dtype != np.uint8 or pixels.ndim != 4:
        raise ValueError(f"vqgan: frames are {pixels.dtype} of shape {pixels.shape}; expected uint8 [T, H, W, 3]")
    if not len(pixels):
        return np.zeros((0, config.codes_per_frame), np.int32)
    return _in_batches(_encode_bytes, config, params, pixels, batch, devices).reshape(len(pixels), -1)


def decode_frames(
    config: VQGANConfig,
    params: Params,
    codes: np.ndarray,
    *,
    batch: int = 32,
    devices: Sequence[jax.Device] | None = None,
) -> np.ndarray:
    """Codes int [T, n] of square frames (or [T,h,w] of any) -> uint8 [T,H,W,3].

    `batch` and `devices` as in `encode_frames`. ValueError where a code is not in the codebook or n is not a square.
    """
    codes = np.asarray(codes)
    if codes.ndim == 2:
        side = math.isqrt(codes.shape[1])
        if side * side != codes.shape[1]:
            raise ValueError(f"vqgan: {codes.shape[1]} codes a frame make no square; pass codes as [T, h, w]")
        codes = codes.reshape(len(codes), side, side)
    if codes.ndim != 3:
        raise ValueError(f"vqgan: codes have shape {codes.shape}; expected [T, n] or [T, h, w]")
    if not len(codes):
        step = downsampling(config)
        return np.zeros((0, codes.shape[1] * step, codes.shape[2] * step, config.num_channels), np.uint8)
    low, high = int(codes.min()), int(codes.max())
    if low < 0 or high >= config.num_embeddings:
        raise ValueError(
            f"vqgan: code {low if low < 0 else high} is not in the codebook of {config.num_embeddings}; "
            f"codes run from 0 to {config.num_embeddings - 1}"
        )
    return _in_batches(_decode_bytes, config, params, codes.astype(np.int32), batch, devices)


def import_lwm(pickle_file: str | PathLike[str], config_json: str | PathLike[str]) -> tuple[VQGANConfig, Params]:
    """Read the released VQGAN: its pickle of arrays and its shape as JSON -> (config, float32 params).

    The pickle is read as hostile input: anything but plain arrays of floats raises ValueError, as does a missing,
    extra or misshapen weight, named.
    """
    try:
        config = VQGANConfig.model_validate_json(Path(config_json).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{config_json} is not a VQGAN config: {error}") from error
    leaves, structure = jax.tree.flatten_with_path(table(config), is_leaf=_is_weight)
    expected: dict[str, Weight] = {".".join(part.key for part in path): weight for path, weight in leaves}
    found = lwm_vqgan.rename(lwm_vqgan.read_arrays(pickle_file), len(config.channel_mult))
    if missing := sorted(expected.keys() - found.keys()):
        raise ValueError(f"{pickle_file} lacks the weight {missing[0]} that {config_json} asks for")
    if extra := sorted(found.keys() - expected.keys()):
        raise ValueError(f"{pickle_file} has the weight {extra[0]} that {config_json} has no place for")
    for name, weight in expected.items():
        if found[name].shape != weight.shape:
            raise ValueError(
                f"{pickle_file}: the weight {name} has shape {found[name].shape}; {config_json} asks for {weight.shape}"
            )
    return config, jax.tree.unflatten(structure, [jnp.asarray(found[name], jnp.float32) for name in expected])
