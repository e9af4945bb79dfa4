"""Which ids may come next: text outside of media, and inside exactly the frames that the vocabulary defines.

Legend: B batch, V vocabulary. Everything is traced, so that one compiled program serves every modality.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from data.vocabulary import Vocabulary

MODALITIES = ("text", "vision", "mixed", "any")


class Rules(NamedTuple):
    """What all rows of a call keep to; int32 scalars, but bool for the first two.

    `constrained`: False allows every id. `inside`: whether generation starts inside media. `vision_start`: the text id
    that opens media, -1 for none. `codes_per_frame` and `num_frames`: 0 leaves the number to the model.
    """

    constrained: jax.Array
    inside: jax.Array
    vision_start: jax.Array
    codes_per_frame: jax.Array
    num_frames: jax.Array


class State(NamedTuple):
    """Where each row stands: inside media or not, codes so far in this frame, whole frames so far."""

    inside_B: jax.Array
    codes_B: jax.Array
    frames_B: jax.Array


def make_rules(
    modality: str, *, vision_start: int | None, codes_per_frame: int | None, num_frames: int | None
) -> Rules:
    """The rules of a call; ValueError for an unknown modality or a frame of no codes."""
    if modality not in MODALITIES:
        raise ValueError(f"modality is {modality!r}; choose one of {', '.join(MODALITIES)}")
    for name, value in (("codes_per_frame", codes_per_frame), ("num_frames", num_frames)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; give at least 1, or None to leave it to the model")
    if modality == "mixed" and vision_start is None:
        raise ValueError("modality is 'mixed', but vision_start is not given; give the id of <vision>")
    return Rules(
        jnp.asarray(modality != "any"),
        jnp.asarray(modality == "vision"),
        jnp.asarray(vision_start if modality == "mixed" else -1, jnp.int32),
        jnp.asarray(codes_per_frame or 0, jnp.int32),
        jnp.asarray(num_frames or 0, jnp.int32),
    )


def start(rules: Rules, batch: int) -> State:
    """The state of `batch` rows before their first new id."""
    zeros_B = jnp.zeros(batch, jnp.int32)
    return State(jnp.broadcast_to(rules.inside, batch), zeros_B, zeros_B)


def allowed(vocabulary: Vocabulary, rules: Rules, state: State, size: int) -> jax.Array:
    """bool [B, size]: the ids that may come next; at least one in every row."""
    ids_V = jnp.arange(size, dtype=jnp.int32)
    text_V = ids_V < vocabulary.text_size
    if not vocabulary.has_vision:
        return jnp.broadcast_to(~rules.constrained | text_V[None], (state.codes_B.shape[0], size))
    counted = rules.codes_per_frame > 0
    may_code_B = ~counted | (state.codes_B < rules.codes_per_frame)
    may_end_B = jnp.where(counted, state.codes_B == rules.codes_per_frame, state.codes_B > 0)
    last_B = (rules.num_frames > 0) & (state.frames_B + 1 >= rules.num_frames)
    may_eov_B = may_end_B & ((rules.num_frames == 0) | last_B)
    inside_BV = (
        ((ids_V >= vocabulary.text_size) & (ids_V < vocabulary.eof))[None] & may_code_B[:, None]
        | (ids_V == vocabulary.eof)[None] & (may_end_B & ~last_B)[:, None]
        | (ids_V == vocabulary.eov)[None] & may_eov_B[:, None]
    )
    return ~rules.constrained | jnp.where(state.inside_B[:, None], inside_BV, text_V[None])


def advance(vocabulary: Vocabulary, rules: Rules, state: State, token_B: jax.Array) -> State:
    """The state after each row's next id."""
    if not vocabulary.has_vision:
        return state
    is_eof_B, is_eov_B = token_B == vocabulary.eof, token_B == vocabulary.eov
    opens_B = ~state.inside_B & (token_B == rules.vision_start)
    inside_B = (state.inside_B | opens_B) & ~is_eov_B
    fresh_B = opens_B | is_eof_B | is_eov_B
    return State(
        inside_B,
        jnp.where(fresh_B, 0, state.codes_B + state.inside_B.astype(jnp.int32)),
        jnp.where(opens_B, 0, state.frames_B + (is_eof_B | is_eov_B).astype(jnp.int32)),
    )
