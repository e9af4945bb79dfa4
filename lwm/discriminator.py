"""A patch discriminator: how real each patch of an image looks (PatchGAN, arXiv 1611.07004; hinge losses, 1705.02894).

Optional in the training of the vision tokenizer (VQGAN, arXiv 2012.09841), where it sharpens what the decoder draws.
Shape suffixes: B batch, H height, W width, C channels; h, w the grid of patches.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Params = dict[str, Any]

WIDTH = 32


def init(key: jax.Array, num_channels: int, width: int = WIDTH) -> Params:
    """Fresh float32 parameters: two convolutions that halve the image, and one that scores."""
    sizes = {"conv_0": (4, num_channels, width), "conv_1": (4, width, 2 * width), "score": (3, 2 * width, 1)}
    params: Params = {}
    for number, (name, (side, channels_in, channels_out)) in enumerate(sizes.items()):
        shape = (side, side, channels_in, channels_out)
        draw = jax.random.normal(jax.random.fold_in(key, number), shape)
        params[name] = {"kernel": draw / math.sqrt(side * side * channels_in), "bias": jnp.zeros(channels_out)}
    return params


def scores(params: Params, x_BHWC: jax.Array) -> jax.Array:
    """Pixels in [-1, 1] -> [B, h, w], above 0 where a patch looks real; h and w are a quarter of H and W."""

    def conv(p: Params, x: jax.Array, stride: int) -> jax.Array:
        y = lax.conv_general_dilated(
            x, p["kernel"], (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return y + p["bias"]

    for name in ("conv_0", "conv_1"):
        x_BHWC = jax.nn.leaky_relu(conv(params[name], x_BHWC, 2), 0.2)
    return conv(params["score"], x_BHWC, 1)[..., 0]


def critic_loss(params: Params, real_BHWC: jax.Array, drawn_BHWC: jax.Array) -> jax.Array:
    """Hinge loss of the discriminator: real patches are to score above 1, drawn ones below -1."""
    real, drawn = scores(params, real_BHWC), scores(params, drawn_BHWC)
    return (jnp.mean(jax.nn.relu(1.0 - real)) + jnp.mean(jax.nn.relu(1.0 + drawn))) / 2


def drawing_loss(params: Params, drawn_BHWC: jax.Array) -> jax.Array:
    """What the decoder lowers: minus the mean score of what it draws."""
    return -jnp.mean(scores(params, drawn_BHWC))
