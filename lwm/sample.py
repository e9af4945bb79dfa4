"""Generation: prompts of different lengths are read together with ring attention, then continued id by id.

A short prompt is read at once, a long one in chunks, and what an earlier call has read need not be read again. Reading
is one compiled program and the whole loop over new ids another (`lwm.decoding`); both work on a cache that is sharded
over the sequence (`lwm.cache`). Sizes are rounded up to a few, so that few programs are compiled.

Legend: B batch, C cache slots, T new ids or tokens of a chunk, V vocabulary.
"""

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

import ring
from data.vocabulary import Vocabulary
from lwm import cache as caching
from lwm import constraints, decoding, drawing, sharding
from lwm.cache import Cache
from lwm.config import ModelConfig, StageConfig
from lwm.decoding import Loop, Request, Shape
from lwm.following import led
from lwm.model import Compute
from lwm.sharding import Params

# Longer prompts are read in chunks: a chunk's activations are small beside any cache it helps to fill.
PREFILL_CHUNK = 8192
# What is left of a prompt after what was read before may be a short question.
_SMALL_CHUNK = 128
# Slots kept free for the next question where a cache is kept.
_ROOM = 1024
# New ids between two reports of a stream.
_STREAM_STEPS = 4

# on_tokens(index of the prompt, its new ids since the last call)
OnTokens = Callable[[int, list[int]], None]


class Programs(NamedTuple):
    """The compiled halves of generation, None where they were not needed yet, and the seconds that compiling took."""

    prefill: Any
    decode: Any
    seconds: float


class _Held(NamedTuple):
    """A cache kept for the next call: what stands in each of its rows."""

    shape: Shape
    rows: list[np.ndarray]
    cache: Cache


@dataclass
class Usage:
    """Totals since the sampler was made: tokens without padding, seconds of the device without compiling.

    `first_token_seconds` is of the last call: from its beginning to the first new id of its first batch.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    new_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    first_token_seconds: float = 0.0

    def __str__(self) -> str:
        fill, rate = self.prefill_seconds, self.new_tokens / max(self.decode_seconds, 1e-9)
        again = f" and {self.reused_tokens} not read again" if self.reused_tokens else ""
        return (
            f"{self.prompt_tokens} tokens read in {fill:.2f}s ({self.prompt_tokens / max(fill, 1e-9):.0f}/s){again}, "
            f"{self.new_tokens} written in {self.decode_seconds:.2f}s ({rate:.0f}/s), the last answer's first after "
            f"{self.first_token_seconds:.2f}s"
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
        prefill_chunk: prompts longer than this are read in chunks of this many tokens.
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
        prefill_chunk: int = PREFILL_CHUNK,
        replicate_weights: bool | None = None,
    ):
        sizes = (vocabulary.text_size, vocabulary.vision_size)
        if sizes[0] != config.text_vocab_size or sizes[1] > config.vision_vocab_size:
            raise ValueError(
                f"the vocabulary has {sizes[0]} text and {sizes[1]} vision ids, but the model's text_vocab_size is "
                f"{config.text_vocab_size} and its vision_vocab_size {config.vision_vocab_size}; use the tokenizers "
                "it was trained with"
            )
        for name, value in (("max_length", max_length), ("max_batch", max_batch), ("prefill_chunk", prefill_chunk)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        plan = ring.Plan(mesh=mesh, strategy=strategy, layout=layout, query_block=query_block, key_block=key_block)
        self.config, self.vocabulary = config, vocabulary
        self.max_length, self.max_batch, self.mesh = max_length, max_batch, mesh
        self.compute = Compute(plan, dtype, mlp_chunk=mlp_chunk)
        self.params, self._replicated = caching.serving_params(config, params, self.compute, replicate_weights)
        unit = self.plan.num_shards
        self.prefill_chunk = -(-prefill_chunk // unit) * unit
        self.programs: dict[Shape, Programs] = {}
        self._others: dict[Hashable, Any] = {}
        self._held: _Held | None = None
        self._began = 0.0
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

    @led
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
        reuse: bool = False,
        on_tokens: OnTokens | None = None,
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

        reuse: keep the cache for the next call that says so too, and begin with what the last one left: where a prompt
        starts like the one before it in the same row, or goes on after its answer, only the rest is read.
        on_tokens: called with ids as they come, a few at a time.

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
        if reuse and (guided or len(arrays) > self.max_batch):
            raise ValueError(
                f"reuse is set for {len(arrays)} prompts{' with guidance' if guided else ''}; give at most max_batch = "
                f"{self.max_batch} of them, without guidance"
            )
        if not reuse:
            self._held = None
        rows_per_prompt = 2 if guided else 1
        size = max(1, self.max_batch // rows_per_prompt)
        outputs: list[list[int]] = []
        for first in range(0, len(arrays), size):
            rows = arrays[first : first + size]
            indices = np.repeat(np.arange(first, first + len(rows)), rows_per_prompt)
            if guided:
                rows = [each for row in rows for each in (row, other)]
            limits = np.minimum(max_new_tokens, self.max_length - np.array([len(row) for row in rows]))
            if guided:
                # A pair shares its ids, and so the tighter limit.
                limits = np.repeat(limits.reshape(-1, 2).min(axis=1), 2)
            report = None if on_tokens is None else partial(_report, on_tokens, first, rows_per_prompt)
            request = Request(
                limits.astype(np.int32),
                indices.astype(np.int32),
                np.asarray(-1 if stop_id is None else stop_id, np.int32),
                np.asarray(jax.random.key_data(jax.random.key(seed))),
                settings,
                rules,
            )
            ids = self._batch(rows, request, temperature > 0, guided, reuse, report, timed=first == 0)
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

    @property
    def plan(self) -> ring.Plan:
        """How attention is spread over the devices."""
        return caching.plan_of(self.compute)

    def _batch(
        self,
        prompts: list[np.ndarray],
        request: Request,
        sampled: bool,
        guided: bool,
        reuse: bool,
        report: Callable[[list[list[int]]], None] | None,
        *,
        timed: bool,
    ) -> list[list[int]]:
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        chunked = reuse or int(lengths.max()) > self.prefill_chunk
        sizes = (len(prompts), int(lengths.max()), int(np.max(request.limits_B)))
        shape = self._shape(*sizes, sampled, guided, chunked, reuse)
        missing = shape.rows - len(prompts)
        request = jax.tree.map(lambda x: self._place(x, ()), request)._replace(
            limits_B=self._place(np.pad(request.limits_B, (0, missing)), ("batch",)),
            indices_B=self._place(np.pad(request.indices_B, (0, missing)), ("batch",)),
        )
        programs = self._programs(shape, request, streamed=report is not None)
        if chunked:
            logits_BV, cache = self._read_in_chunks(shape, prompts, reuse)
        else:
            logits_BV, cache = self._read_at_once(shape, prompts, programs)
        filled = time.monotonic()
        new: np.ndarray
        if report is None:
            # The cache after the last id goes on in the buffers of the prefill, updated in place.
            new_BT, counts_B, cache = programs.decode(self.params, logits_BV, cache, request)
            new, counts = np.asarray(new_BT), np.asarray(counts_B)
            first_token = filled
        else:
            new, counts, cache, first_token = self._stream(shape, logits_BV, cache, request, len(prompts), report)
        self.usage.decode_seconds += time.monotonic() - filled
        self.usage.new_tokens += int(counts.sum())
        if timed:
            self.usage.first_token_seconds = first_token - self._began
        ids = [new[row, : counts[row]].tolist() for row in range(len(prompts))]
        if reuse:
            # The last id of a row was never run through the model, and is not in the cache.
            ends = multihost_utils.process_allgather(cache.lengths_B, tiled=True)
            rows = [np.asarray([*p, *i], np.int32)[:end] for p, i, end in zip(prompts, ids, ends, strict=False)]
            self._held = _Held(shape, rows, cache)
        return ids

    def _read_at_once(self, shape: Shape, prompts: list[np.ndarray], programs: Programs) -> tuple[jax.Array, Cache]:
        num_slots = self._num_slots(shape)
        natural_BC = np.zeros((shape.rows, num_slots), np.int32)
        for row, prompt in enumerate(prompts):
            natural_BC[row, : len(prompt)] = prompt
        lengths_B = np.zeros(shape.rows, np.int32)
        lengths_B[: len(prompts)] = [len(prompt) for prompt in prompts]
        order_C = caching.positions_of_slots(self.compute, num_slots)
        tokens_BC = self._place(natural_BC[:, order_C], ("batch", "sequence"))
        lengths_dev = self._place(lengths_B, ("batch",))
        self._began = time.monotonic()
        logits_BV, cache = jax.block_until_ready(programs.prefill(self.params, tokens_BC, lengths_dev))
        self.usage.prefill_seconds += time.monotonic() - self._began
        self.usage.prompt_tokens += int(lengths_B.sum())
        return logits_BV, cache

    def _read_in_chunks(self, shape: Shape, prompts: list[np.ndarray], reuse: bool) -> tuple[jax.Array, Cache]:
        """The logits after the prompts, and the cache with them in it: what a held cache lacks, chunk by chunk."""
        known = np.zeros(shape.rows, np.int32)
        held, self._held = self._held, None
        if reuse and held is not None and held.shape == shape:
            cache = held.cache
            for row, (prompt, before) in enumerate(zip(prompts, held.rows, strict=False)):
                # The last token is read again: its logits were not kept.
                known[row] = min(_common(prompt, before), len(prompt) - 1)
        else:
            cache = caching.empty(self.config, self.compute, shape.rows, self._num_slots(shape))
        cache = cache._replace(lengths_B=self._place(known, ("batch",)))
        lengths = np.zeros(shape.rows, np.int32)
        lengths[: len(prompts)] = [len(prompt) for prompt in prompts]
        small = -(-_SMALL_CHUNK // self.plan.num_shards) * self.plan.num_shards
        chunk = min(small, self.prefill_chunk) if int((lengths - known).max()) <= 2 * small else self.prefill_chunk
        logits_BV = self._place(np.zeros((shape.rows, self.config.vocab_size), np.float32), ("batch", None))
        program = self._chunk_program(shape, chunk, logits_BV, cache)
        self._began = time.monotonic()
        for start in range(0, int((lengths - known).max()), chunk):
            counts_B = np.clip(lengths - known - start, 0, chunk).astype(np.int32)
            tokens_BT = np.zeros((shape.rows, chunk), np.int32)
            for row, prompt in enumerate(prompts):
                part = prompt[known[row] + start : known[row] + start + counts_B[row]]
                tokens_BT[row, : len(part)] = part
            placed = self._place(tokens_BT, ("batch", "sequence")), self._place(counts_B, ("batch",))
            logits_BV, cache = program(self.params, *placed, logits_BV, cache)
        jax.block_until_ready(logits_BV)
        self.usage.prefill_seconds += time.monotonic() - self._began
        self.usage.prompt_tokens += int((lengths - known).sum())
        self.usage.reused_tokens += int(known.sum())
        return logits_BV, cache

    def _stream(
        self,
        shape: Shape,
        logits_BV: jax.Array,
        cache: Cache,
        request: Request,
        num_rows: int,
        report: Callable[[list[list[int]]], None],
    ) -> tuple[np.ndarray, np.ndarray, Cache, float]:
        start, go_on = self._others[shape, "begin"], self._others[shape, "go on"]
        loop: Loop = start(logits_BV, cache, request)
        told = np.zeros(shape.rows, int)
        first_token = 0.0
        until = 1
        while True:
            new, counts, done = (np.asarray(x) for x in (loop.new_BT, loop.counts_B, loop.done_B))
            first_token = first_token or time.monotonic()
            report([new[row, told[row] : counts[row]].tolist() for row in range(num_rows)])
            told = counts
            if done.all():
                return new, counts, loop.cache, first_token
            until += _STREAM_STEPS
            loop = go_on(self.params, loop, request, self._place(np.asarray(until, np.int32), ()))

    def _place(self, array: Any, axes: sharding.Axes) -> jax.Array:
        """On the mesh; every process gives the whole array."""
        if self.mesh is None:
            return jnp.asarray(array)
        where = NamedSharding(self.mesh, sharding.spec_for(axes, sharding.mesh_sizes(self.mesh)))
        # Not device_put: among several processes it would compare their values first.
        whole = np.asarray(array)
        return jax.make_array_from_callback(whole.shape, where, lambda index: whole[index])

    def _shape(
        self, rows: int, length: int, new: int, sampled: bool, guided: bool, chunked: bool, reuse: bool
    ) -> Shape:
        unit = self.plan.size(self.plan.axes("batch")) * (2 if guided else 1)
        needed = -(-rows // unit) * unit
        wanted = Shape.of(needed, length, new, sampled, guided, chunked)
        if reuse:
            # The cache that is there, as long as it has room.
            held = None if self._held is None else self._held.shape
            fits = held is not None and (held.rows, held.sampled) == (needed, sampled)
            if held is not None and fits and held.new_slots >= new and held.prompt_slots >= length:
                return held
            room = min(length + _ROOM, max(length, self.max_length - new))
            return Shape.of(needed, room, new, sampled, guided, chunked)
        return min((shape for shape in self.programs if shape.serves(wanted)), default=wanted)

    def _num_slots(self, shape: Shape) -> int:
        pieces = self.plan.num_shards * (2 if self.plan.layout == "zigzag" else 1)
        return -(-(shape.prompt_slots + shape.new_slots) // pieces) * pieces

    def _programs(self, shape: Shape, request: Request, *, streamed: bool) -> Programs:
        """Those that are needed: a stream has its own loop."""
        programs = self.programs.get(shape, Programs(None, None, 0.0))
        begin = time.monotonic()
        logits, cache = self._filled(shape)
        if programs.prefill is None and not shape.chunked:
            fill = partial(caching.prefill, self.config, **self._how)
            tokens = self._abstract((shape.rows, self._num_slots(shape)), jnp.int32, ("batch", "sequence"))
            lengths = self._abstract((shape.rows,), jnp.int32, ("batch",))
            prefill = self._compile(fill, (self.params, tokens, lengths), out=(logits, cache))
            programs = programs._replace(prefill=prefill)
        if programs.decode is None and not streamed:
            run = partial(decoding.decode, self.config, self.vocabulary, shape, **self._how)
            new = self._abstract((shape.rows, shape.new_slots), jnp.int32, ())
            counts = self._abstract((shape.rows,), jnp.int32, ())
            decode = self._compile(run, (self.params, logits, cache, request), donate=2, out=(new, counts, cache))
            programs = programs._replace(decode=decode)
        if streamed:
            self._stream_programs(shape, request)
        programs = programs._replace(seconds=programs.seconds + time.monotonic() - begin)
        self.programs[shape] = programs
        return programs

    def _chunk_program(self, shape: Shape, chunk: int, logits_BV: jax.Array, cache: Cache) -> Any:
        name = (shape.rows, self._num_slots(shape), chunk)
        if name not in self._others:
            tokens = self._abstract((shape.rows, chunk), jnp.int32, ("batch", "sequence"))
            counts = self._abstract((shape.rows,), jnp.int32, ("batch",))
            extend = partial(caching.extend, self.config, **self._how)
            arguments = (self.params, tokens, counts, logits_BV, cache)
            self._others[name] = self._compile(extend, arguments, donate=4, out=self._filled(shape))
        return self._others[name]

    def _stream_programs(self, shape: Shape, request: Request) -> None:
        """The loop over new ids in two parts that stop in between."""
        if (shape, "begin") in self._others:
            return
        logits, cache = self._filled(shape)
        parts = (self.config, self.vocabulary, shape)
        start = partial(decoding.begin, *parts)
        loop = jax.eval_shape(start, logits, cache, request)
        whole = jax.tree.map(lambda leaf: self._abstract(leaf.shape, leaf.dtype, ()), loop)._replace(cache=cache)
        self._others[shape, "begin"] = self._compile(start, (logits, cache, request), donate=1, out=whole)
        until = self._abstract((), jnp.int32, ())
        go_on = partial(decoding.go_on, *parts, **self._how)
        arguments = (self.params, whole, request, until)
        self._others[shape, "go on"] = self._compile(go_on, arguments, donate=1, out=whole)

    @property
    def _how(self) -> dict[str, Any]:
        return {"compute": self.compute, "replicated": self._replicated}

    def _filled(self, shape: Shape) -> tuple[Any, Any]:
        """The logits and the cache after the prompts, as ShapeDtypeStructs."""
        logits = self._abstract((shape.rows, self.config.vocab_size), jnp.float32, ("batch", None))
        return logits, caching.shapes(self.config, self.compute, shape.rows, self._num_slots(shape))

    def _abstract(self, shape: tuple[int, ...], dtype: Any, axes: sharding.Axes) -> jax.ShapeDtypeStruct:
        where = None
        if self.mesh is not None:
            where = NamedSharding(self.mesh, sharding.spec_for(axes, sharding.mesh_sizes(self.mesh)))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    def _compile(self, function: Callable, arguments: tuple, *, out: Any, donate: int | None = None) -> Any:
        """The program of `function` for arguments like these; its results lie where `out` says."""
        places = None if self.mesh is None else jax.tree.map(lambda leaf: leaf.sharding, out)
        donated = () if donate is None else donate
        return jax.jit(function, donate_argnums=donated, out_shardings=places).lower(*arguments).compile()


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens two rows have in common from their beginning."""
    size = min(len(a), len(b))
    differ = np.flatnonzero(a[:size] != b[:size])
    return int(differ[0]) if differ.size else size


def _report(on_tokens: OnTokens, first: int, rows_per_prompt: int, news: list[list[int]]) -> None:
    for index, new in enumerate(news[::rows_per_prompt]):
        if new:
            on_tokens(first + index, new)
