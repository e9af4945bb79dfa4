"""Keys and values as they travel: in their own dtype, or quantized with one scale per token and head.

Quantized once, where they live; every device, the owner too, then attends to the same rounded values, so
the error does not grow with the number of hops and the result does not depend on how it is spread: it is
exact attention to the rounded keys and values. Gradients pass straight through the rounding and travel
in float32. Every element x of a head's vector whose largest magnitude is m is off by at most

    int8             m / 254
    float8_e4m3fn    max(|x| / 16, m / 2**18)

so outputs move by at most that for v, and scores by |q|_1 scale times that for k.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

TRANSIT_DTYPES = ("int8", "float8_e4m3fn")


class Parcel(NamedTuple):
    """``values`` [..., D] in the travelling dtype and, if quantized, ``scale`` float32 [..., 1]."""

    values: jax.Array
    scale: jax.Array | None


def encode(x: jax.Array, transit_dtype: str | None, *, as_bits: bool = False) -> Parcel:
    """What is sent for ``x`` [..., D]; ``as_bits`` sends 16-bit floats as integers of their bits.

    XLA's collectives on CPUs would carry them as float32.
    """
    if transit_dtype is None:
        hide = as_bits and x.dtype in (jnp.bfloat16, jnp.float16)
        return Parcel(lax.bitcast_convert_type(x, jnp.uint16) if hide else x, None)
    wide = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=-1, keepdims=True)
    top = 127.0 if transit_dtype == "int8" else 448.0
    scale = jnp.where(largest > 0, largest / top, 1.0)
    if transit_dtype == "int8":
        return Parcel(jnp.round(wide / scale).astype(jnp.int8), scale)
    assert transit_dtype == "float8_e4m3fn", transit_dtype
    # As bytes: not every backend's collectives know the type.
    return Parcel(lax.bitcast_convert_type((wide / scale).astype(jnp.float8_e4m3fn), jnp.uint8), scale)


def decode(parcel: Parcel, dtype: jnp.dtype) -> jax.Array:
    """``x`` as every device sees it."""
    if parcel.scale is None:
        values = parcel.values
        return lax.bitcast_convert_type(values, dtype) if values.dtype == jnp.uint16 else values
    values = parcel.values
    if values.dtype == jnp.uint8:
        values = lax.bitcast_convert_type(values, jnp.float8_e4m3fn)
    return (values.astype(jnp.float32) * parcel.scale).astype(dtype)
