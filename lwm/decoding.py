"""The loop over new ids, compiled: draw an id for each row, run it through the model, until every row is done.

Legend: B batch, T new ids, V vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from data.vocabulary import Vocabulary
from lwm import cache as caching
from lwm import constraints, drawing
from lwm.cache import Cache
from lwm.config import ModelConfig
from lwm.constraints import Rules
from lwm.drawing import Settings
from lwm.model import Compute
from lwm.sharding import Params

# Fewer slots or new ids than these cost next to nothing, and are not worth another program.
_MIN_SLOTS, _MIN_NEW = 64, 16


class Shape(NamedTuple):
    """What programs are compiled for.

    `guided`: rows come in pairs, one with the prompt and one without. `chunked`: prompts are read in chunks.
    """

    rows: int
    prompt_slots: int
    new_slots: int
    sampled: bool
    guided: bool
    chunked: bool = False

    @classmethod
    def of(cls, rows: int, length: int, new: int, sampled: bool, guided: bool, chunked: bool = False) -> "Shape":
        """Sizes rounded up to a few, so that few programs are compiled."""
        return cls(rows, _rounded(length, _MIN_SLOTS), _rounded(new, _MIN_NEW), sampled, guided, chunked)

    def serves(self, wanted: "Shape") -> bool:
        """Whether its programs do for `wanted` as well: too many rows or slots can be cheaper than compiling."""
        slots, needed = (each.prompt_slots + each.new_slots for each in (self, wanted))
        large_enough = all(a >= b for a, b in zip(self[:3], wanted[:3], strict=True))
        return large_enough and self[3:] == wanted[3:] and slots <= needed * 5 // 4


def _rounded(count: int, least: int) -> int:
    """`count` rounded up, at most four sizes to an octave and none below `least`."""
    unit = max(1, 1 << max(0, (count - 1).bit_length() - 3))
    return max(least, -(-count // unit) * unit)


class Request(NamedTuple):
    """What is asked of a batch, beside its prompts: int32 [B] `limits_B` and `indices_B`, scalars, and a key's data."""

    limits_B: jax.Array | np.ndarray
    indices_B: jax.Array | np.ndarray
    stop: jax.Array | np.ndarray
    key: jax.Array | np.ndarray
    settings: Settings
    rules: Rules


class Loop(NamedTuple):
    """Where the loop stands; `new_BT` int32 are the ids so far, `counts_B` how many of them each row has."""

    step: jax.Array
    token_B: jax.Array
    cache: Cache
    state: constraints.State
    new_BT: jax.Array
    counts_B: jax.Array
    done_B: jax.Array


def begin(
    config: ModelConfig, vocabulary: Vocabulary, shape: Shape, logits_BV: jax.Array, cache: Cache, request: Request
) -> Loop:
    """The first id of each row, from the logits after the prompts."""
    zeros_B = jnp.zeros_like(request.limits_B)
    new_BT = jnp.zeros((shape.rows, shape.new_slots), jnp.int32)
    state = constraints.start(request.rules, shape.rows)
    loop = Loop(jnp.zeros((), jnp.int32), zeros_B, cache, state, new_BT, zeros_B, request.limits_B == 0)
    return _take(config, vocabulary, shape, loop, logits_BV, request)


def go_on(
    config: ModelConfig,
    vocabulary: Vocabulary,
    shape: Shape,
    params: Params,
    loop: Loop,
    request: Request,
    until: jax.Array,
    *,
    compute: Compute,
    replicated: bool,
) -> Loop:
    """More ids, until every row is done or has `until` of them."""

    def more(loop: Loop) -> Loop:
        logits_BV, cache = caching.step(
            config, params, loop.token_B, ~loop.done_B, loop.cache, compute, replicated=replicated
        )
        return _take(config, vocabulary, shape, loop._replace(cache=cache), logits_BV, request)

    return jax.lax.while_loop(lambda loop: ~jnp.all(loop.done_B) & (loop.step < until), more, loop)


def decode(
    config: ModelConfig,
    vocabulary: Vocabulary,
    shape: Shape,
    params: Params,
    logits_BV: jax.Array,
    cache: Cache,
    request: Request,
    *,
    compute: Compute,
    replicated: bool,
) -> tuple[jax.Array, jax.Array, Cache]:
    """From the logits after the prompts to the new ids int32 [B, T], how many of them each row has, and the cache."""
    loop = begin(config, vocabulary, shape, logits_BV, cache, request)
    until = jnp.asarray(shape.new_slots, jnp.int32)
    loop = go_on(config, vocabulary, shape, params, loop, request, until, compute=compute, replicated=replicated)
    return loop.new_BT, loop.counts_B, loop.cache


def _take(
    config: ModelConfig,
    vocabulary: Vocabulary,
    shape: Shape,
    loop: Loop,
    logits_BV: jax.Array,
    request: Request,
) -> Loop:
    """Draw an id for each row and write it down."""
    if shape.guided:
        logits_BV = drawing.guide(logits_BV, request.settings)
    may_BV = constraints.allowed(vocabulary, request.rules, loop.state, config.vocab_size)
    logits_BV = jnp.where(may_BV, logits_BV, -jnp.inf)
    if shape.sampled:
        keys_B = jax.vmap(jax.random.fold_in, (None, 0))(
            jax.random.wrap_key_data(jnp.asarray(request.key)), request.indices_B
        )
        token_B = drawing.draw(logits_BV, keys_B, loop.step, request.settings)
    else:
        token_B = jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    keep_B = ~loop.done_B & (token_B != request.stop)
    counts_B = loop.counts_B + keep_B.astype(jnp.int32)
    return Loop(
        loop.step + 1,
        token_B,
        loop.cache,
        constraints.advance(vocabulary, request.rules, loop.state, token_B),
        loop.new_BT.at[:, loop.step].set(jnp.where(keep_B, token_B, 0)),
        counts_B,
        ~keep_B | (counts_B >= request.limits_B),
    )
