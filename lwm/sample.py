"""Generation: prompts of different lengths are prefilled together with ring attention, then continued id by id.

The prefill is one compiled program and the whole loop over new ids another; both work on a cache that is sharded over
the sequence (`lwm.cache`). Sizes are rounded up to a few, so that few programs are compiled.

Legend: B batch, C cache slots, T new ids, V vocabulary.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

import ring
from data.vocabulary import Vocabulary
from lwm import cache as caching
from lwm import constraints, drawing, sharding
from lwm.cache import Cache
from lwm.config import ModelConfig, StageConfig
from lwm.constraints import Rules
from lwm.drawing import Settings
from lwm.model import Compute
from lwm.sharding import Params

# Fewer slots or new ids than these cost next to nothing, and are not worth another program.
_MIN_SLOTS, _MIN_NEW = 64, 16


class Shape(NamedTuple):
    """What programs are compiled for. `guided`: rows come in pairs, one with the prompt and one without."""

    rows: int
    prompt_slots: int
    new_slots: int
    sampled: bool
    guided: bool


class Programs(NamedTuple):
    """The two compiled halves of generation, and the seconds that compiling them took."""

    prefill: Any
    decode: Any
    seconds: float


@dataclass
class Usage:
    """Totals since the sampler was made: tokens without padding, seconds of the device without compiling."""

    prompt_tokens: int = 0
    new_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    def __str__(self) -> str:
        fill, rate = self.prefill_seconds, self.new_tokens / max(self.decode_seconds, 1e-9)
        return (
            f"{self.prompt_tokens} tokens read in {fill:.2f}s ({self.prompt_tokens / max(fill, 1e-9):.0f}/s), "
            f"{self.new_tokens} written in {self.decode_seconds:.2f}s ({rate:.0f}/s)"
        )


class Sampler:
    """A trained model that continues prompts, on one device (mesh None) or on a mesh. `eval.protocol.Model` is this.

    Args:
        config: the model, with the rope_theta it was last trained with.
        params: its parameters, wherever they lie; the sampler keeps a copy in `dtype`.
        vocabulary: the id space; says what is text and what is vision.
        max_length: the context: a prompt and what follows it never exceed this many tokens.
        max_batch: rows at once; more prompts are done one batch after the other.
        dtype, mlp_chunk: as in `lwm.model.Compute`; strategy, layout, query_block, key_block: as in `ring.Plan`.
        replicate_weights: whole weights on every device (but for tp), or sharded as in training; None: whole where a
            copy is small (`lwm.cache.REPLICATED_BYTES`).

    `programs` holds what has been compiled, `usage` what has been done. ValueError where the parts do not fit.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        *,
        vocabulary: Vocabulary,
        max_length: int,
        max_batch: int = 8,
        mesh: Mesh | None = None,
        dtype: str = "float32",
        strategy: str = "ring",
        layout: str = "striped",
        query_block: int | None = None,
        key_block: int | None = None,
        mlp_chunk: int | None = None,
        replicate_weights: bool | None = None,
    ):
        sizes = (vocabulary.text_size, vocabulary.vision_size)
        if sizes[0] != config.text_vocab_size or sizes[1] > config.vision_vocab_size:
            raise ValueError(
                f"the vocabulary has {sizes[0]} text and {sizes[1]} vision ids, but the model's text_vocab_size is "
                f"{config.text_vocab_size} and its vision_vocab_size {config.vision_vocab_size}; use the tokenizers "
                "it was trained with"
            )
        for name, value in (("max_length", max_length), ("max_batch", max_batch)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        plan = ring.Plan(mesh=mesh, strategy=strategy, layout=layout, query_block=query_block, key_block=key_block)
        self.config, self.vocabulary = config, vocabulary
        self.max_length, self.max_batch, self.mesh = max_length, max_batch, mesh
        self.compute = Compute(plan, dtype, mlp_chunk=mlp_chunk)
        self.params, self._replicated = caching.serving_params(config, params, self.compute, replicate_weights)
        self.programs: dict[Shape, Programs] = {}
        self.usage = Usage()

    @classmethod
    def for_stage(
        cls,
        config: ModelConfig,
        params: Params,
        stage: StageConfig,
        mesh: Mesh | None,
        *,
        vocabulary: Vocabulary,
        **options: Any,
    ) -> "Sampler":
        """A sampler that runs as `stage` does: its mesh, attention, dtype and rope_theta.

        options: other arguments of `Sampler`; max_length is the stage's seq_len and max_batch its batch_rows, unless
        they are given.
        """
        attention = stage.attention
        defaults = {
            "max_length": stage.seq_len,
            "max_batch": stage.batch_rows,
            "dtype": stage.compute_dtype,
            "strategy": attention.strategy,
            "layout": attention.layout,
            "query_block": attention.query_block,
            "key_block": attention.key_block,
            "mlp_chunk": stage.mlp_chunk,
        }
        config = config.model_copy(update={"rope_theta": stage.rope_theta})
        return cls(config, params, mesh=mesh, vocabulary=vocabulary, **{**defaults, **options})

    def generate(
        self,
        prompts: Sequence[np.ndarray],
        *,
        max_new_tokens: int,
        stop_id: int | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        modality: str = "text",
        vision_start: int | None = None,
        codes_per_frame: int | None = None,
        num_frames: int | None = None,
        guidance: float | None = None,
        unconditional: np.ndarray | None = None,
    ) -> list[list[int]]:
        """Continue every prompt, int32 [n_i], never padded; returns the new ids of each, in order.

        The ids end before `stop_id`, after `max_new_tokens`, or where prompt and ids fill the context.

        temperature 0 takes the likeliest id; above 0, ids are drawn from softmax(logits / temperature), cut to the
        `top_k` likeliest and to the fewest that hold `top_p` of the probability. A prompt's draws depend on `seed` and
        on its index alone, not on how prompts are batched.

        modality: "text" allows text ids; "vision" the inside of media, up to `<eov>`, after which it is text again;
        "mixed" text, and media after the id `vision_start`; "any" every id. Inside media, `codes_per_frame` and
        `num_frames` fix the sizes, where given; `<eof>` and `<eov>` come where they must.

        guidance: logits are moved from those of the prompt `unconditional` towards the prompt's own and, above 1,
        beyond (Ho & Salimans, arXiv 2207.12598).

        ValueError for a prompt that is empty, has unknown ids or leaves no room in the context, and for bad settings.
        """
        arrays = [self._checked(prompt, f"prompt {index}") for index, prompt in enumerate(prompts)]
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
        settings = drawing.make_settings(temperature, top_k, top_p, guidance)
        rules = constraints.make_rules(
            modality, vision_start=vision_start, codes_per_frame=codes_per_frame, num_frames=num_frames
        )
        if modality in ("vision", "mixed") and not self.vocabulary.has_vision:
            raise ValueError(f"modality is {modality!r}, but this model has no vision ids; use text")
        guided = guidance is not None
        if guided:
            if unconditional is None:
                raise ValueError("guidance is given without unconditional, the prompt to be guided away from")
            other = self._checked(unconditional, "unconditional")
        rows_per_prompt = 2 if guided else 1
        size = max(1, self.max_batch // rows_per_prompt)
        outputs: list[list[int]] = []
        for first in range(0, len(arrays), size):
            rows = arrays[first : first + size]
            indices = np.repeat(np.arange(first, first + len(rows)), rows_per_prompt)
            if guided:
                rows = [each for row in rows for each in (row, other)]
            ids = self._batch(rows, indices, max_new_tokens, stop_id, temperature > 0, guided, settings, rules, seed)
            outputs += ids[::rows_per_prompt]
        return outputs

    def generate_video(
        self,
        prompt: np.ndarray,
        *,
        num_frames: int,
        codes_per_frame: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        guidance: float | None = None,
        unconditional: np.ndarray | None = None,
    ) -> np.ndarray:
        """Codes int32 [num_frames, codes_per_frame] of a clip (or of an image, when num_frames is 1).

        prompt: ids int32 [n] up to and with `<vision>`. unconditional: the prompt to guide away from; when None, the
        prompt's first and last ids, BOS and `<vision>`. The rest is as in `generate`.

        ValueError where the clip does not fit into the context.
        """
        needed = num_frames * (codes_per_frame + 1)
        if len(prompt) + needed > self.max_length:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens and {num_frames} frames of {codes_per_frame} codes take {needed},"
                f" but the model's context is {self.max_length}; ask for fewer frames"
            )
        if guidance is not None and unconditional is None:
            unconditional = np.asarray(prompt)[[0, -1]]
        (ids,) = self.generate(
            [prompt],
            max_new_tokens=needed,
            stop_id=self.vocabulary.eov,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            modality="vision",
            codes_per_frame=codes_per_frame,
            num_frames=num_frames,
            guidance=guidance,
            unconditional=unconditional,
        )
        return self.vocabulary.split_frames([*ids, self.vocabulary.eov])

    def _checked(self, prompt: np.ndarray, name: str) -> np.ndarray:
        ids = np.asarray(prompt)
        if ids.ndim != 1 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(
                f"{name} is {ids.dtype} of shape {ids.shape}; give at least one integer id, in one dimension"
            )
        if ids.min() < 0 or ids.max() >= self.config.vocab_size:
            raise ValueError(
                f"{name} has ids from {ids.min()} to {ids.max()}; the model knows 0 to {self.config.vocab_size - 1}"
            )
        if ids.size >= self.max_length:
            raise ValueError(
                f"{name} has {ids.size} tokens, but the model's context is {self.max_length} and must hold at least"
                f" one more; shorten it by {ids.size - self.max_length + 1}"
            )
        return ids.astype(np.int32)

    def _batch(
        self,
        prompts: list[np.ndarray],
        indices: np.ndarray,
        max_new_tokens: int,
        stop_id: int | None,
        sampled: bool,
        guided: bool,
        settings: Settings,
        rules: Rules,
        seed: int,
    ) -> list[list[int]]:
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        limits = np.minimum(max_new_tokens, self.max_length - lengths)
        if guided:
            # A pair shares its ids, and so the tighter limit.
            limits = np.repeat(limits.reshape(-1, 2).min(axis=1), 2)
        shape = self._shape(len(prompts), int(lengths.max()), int(limits.max()), sampled, guided)
        num_slots = self._num_slots(shape)
        missing = shape.rows - len(prompts)
        positions_C = caching.positions_of_slots(self.compute, num_slots)
        natural_BC = np.zeros((shape.rows, num_slots), np.int32)
        for row, prompt in enumerate(prompts):
            natural_BC[row, : len(prompt)] = prompt
        lengths_B, limits_B, indices_B = (np.pad(x.astype(np.int32), (0, missing)) for x in (lengths, limits, indices))
        tokens_BC = self._place(natural_BC[:, positions_C], ("batch", "sequence"))
        lengths_dev, limits_dev, indices_dev = (self._place(x, ("batch",)) for x in (lengths_B, limits_B, indices_B))
        stop = jnp.asarray(-1 if stop_id is None else stop_id, jnp.int32)
        key = jax.random.key(seed)
        scalars = jax.tree.map(lambda x: self._place(x, ()), (stop, key, settings, rules))
        programs = self._programs(shape, (tokens_BC, lengths_dev), (limits_dev, indices_dev, *scalars))

        begin = time.monotonic()
        logits_BV, cache = jax.block_until_ready(programs.prefill(self.params, tokens_BC, lengths_dev))
        filled = time.monotonic()
        # The cache after the last id is given up: its buffers are those of the prefill, updated in place.
        new_BT, counts_B, _ = programs.decode(self.params, logits_BV, cache, limits_dev, indices_dev, *scalars)
        new, counts = np.asarray(new_BT), np.asarray(counts_B)
        self.usage.prefill_seconds += filled - begin
        self.usage.decode_seconds += time.monotonic() - filled
        self.usage.prompt_tokens += int(lengths.sum())
        self.usage.new_tokens += int(counts.sum())
        return [new[row, : counts[row]].tolist() for row in range(len(prompts))]

    def _place(self, array: Any, axes: sharding.Axes) -> jax.Array:
        """On the mesh; every process gives the whole array."""
        if self.mesh is None:
            return jnp.asarray(array)
        where = NamedSharding(self.mesh, sharding.spec_for(axes, sharding.mesh_sizes(self.mesh)))
        return jax.device_put(array, where)

    def _shape(self, rows: int, length: int, new: int, sampled: bool, guided: bool) -> Shape:
        plan = caching.plan_of(self.compute)
        unit = plan.size(plan.axes("batch")) * (2 if guided else 1)
        needed = -(-rows // unit) * unit
        wanted = Shape(needed, _rounded(length, _MIN_SLOTS), _rounded(new, _MIN_NEW), sampled, guided)
        return min((shape for shape in self.programs if _serves(shape, wanted)), default=wanted)

    def _num_slots(self, shape: Shape) -> int:
        plan = caching.plan_of(self.compute)
        pieces = plan.num_shards * (2 if plan.layout == "zigzag" else 1)
        return -(-(shape.prompt_slots + shape.new_slots) // pieces) * pieces

    def _programs(self, shape: Shape, prompt: tuple, rest: tuple) -> Programs:
        if shape not in self.programs:
            begin = time.monotonic()
            parts: dict[str, Any] = {"compute": self.compute, "replicated": self._replicated}
            fill = partial(caching.prefill, self.config, **parts)
            extend = partial(_decode, self.config, self.vocabulary, shape, **parts)
            filled = jax.eval_shape(fill, self.params, *prompt)
            if self.mesh is None:
                prefill, decode = jax.jit(fill), jax.jit(extend, donate_argnums=2)
            else:
                sizes = sharding.mesh_sizes(self.mesh)
                rows = NamedSharding(self.mesh, sharding.spec_for(("batch",), sizes))
                whole = NamedSharding(self.mesh, sharding.spec_for((), sizes))
                slots = caching.cache_shardings(self.mesh)
                prefill = jax.jit(fill, out_shardings=(rows, slots))
                decode = jax.jit(extend, donate_argnums=2, out_shardings=(whole, whole, slots))
                filled = jax.tree.map(
                    lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
                    filled,
                    (rows, slots),
                )
            compiled = (
                prefill.lower(self.params, *prompt).compile(),
                decode.lower(self.params, *filled, *rest).compile(),
            )
            self.programs[shape] = Programs(*compiled, time.monotonic() - begin)
        return self.programs[shape]


def _serves(shape: Shape, wanted: Shape) -> bool:
    """Whether programs for `shape` do for `wanted` as well: too many rows or slots can be cheaper than compiling."""
    slots, needed = (each.prompt_slots + each.new_slots for each in (shape, wanted))
    large_enough = all(a >= b for a, b in zip(shape[:3], wanted[:3], strict=True))
    return large_enough and shape[3:] == wanted[3:] and slots <= needed * 5 // 4


def _rounded(count: int, least: int) -> int:
    """`count` rounded up, at most four sizes to an octave and none below `least`."""
    unit = max(1, 1 << max(0, (count - 1).bit_length() - 3))
    return max(least, -(-count // unit) * unit)


class _Loop(NamedTuple):
    step: jax.Array
    token_B: jax.Array
    cache: Cache
    state: constraints.State
    new_BT: jax.Array
    counts_B: jax.Array
    done_B: jax.Array


def _decode(
    config: ModelConfig,
    vocabulary: Vocabulary,
    shape: Shape,
    params: Params,
    logits_BV: jax.Array,
    cache: Cache,
    limits_B: jax.Array,
    indices_B: jax.Array,
    stop: jax.Array,
    key: jax.Array,
    settings: Settings,
    rules: Rules,
    *,
    compute: Compute,
    replicated: bool,
) -> tuple[jax.Array, jax.Array, Cache]:
    """From the logits after the prompts to the new ids int32 [B, T], how many of them each row has, and the cache."""
    keys_B = jax.vmap(jax.random.fold_in, (None, 0))(key, indices_B)

    def take(loop: _Loop, logits_BV: jax.Array) -> _Loop:
        """Draw an id for each row and write it down."""
        if shape.guided:
            logits_BV = drawing.guide(logits_BV, settings)
        may_BV = constraints.allowed(vocabulary, rules, loop.state, config.vocab_size)
        logits_BV = jnp.where(may_BV, logits_BV, -jnp.inf)
        if shape.sampled:
            token_B = drawing.draw(logits_BV, keys_B, loop.step, settings)
        else:
            token_B = jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
        keep_B = ~loop.done_B & (token_B != stop)
        counts_B = loop.counts_B + keep_B
        return _Loop(
            loop.step + 1,
            token_B,
            loop.cache,
            constraints.advance(vocabulary, rules, loop.state, token_B),
            loop.new_BT.at[:, loop.step].set(jnp.where(keep_B, token_B, 0)),
            counts_B,
            ~keep_B | (counts_B >= limits_B),
        )

    def more(loop: _Loop) -> _Loop:
        logits_BV, cache = caching.step(
            config, params, loop.token_B, ~loop.done_B, loop.cache, compute, replicated=replicated
        )
        return take(loop._replace(cache=cache), logits_BV)

    zeros_B = jnp.zeros_like(limits_B)
    new_BT = jnp.zeros((shape.rows, shape.new_slots), jnp.int32)
    state = constraints.start(rules, shape.rows)
    loop = _Loop(jnp.zeros((), jnp.int32), zeros_B, cache, state, new_BT, zeros_B, limits_B == 0)
    loop = jax.lax.while_loop(lambda loop: ~jnp.all(loop.done_B), more, take(loop, logits_BV))
    return loop.new_BT, loop.counts_B, loop.cache
