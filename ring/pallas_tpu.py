"""The local kernel for TPUs: ``blockwise``'s contract, written with Pallas for the matrix unit.

The pairs of blocks that somebody sees are listed on the device and prefetched as scalars, four bytes a
pair. The list is the grid: its length is a number that the device computes, so a pair that nobody sees is
neither fetched nor computed and does not even cost a step. Wholly visible pairs are not compared.

Running results are updated in place: the rows of a block are read when the list comes to it and written
when it goes on, in float32. A hop needs no separate merge and leaves rows it does not touch alone.
FlashAttention-2, arXiv:2307.08691; the list as a grid follows MegaBlocks, arXiv:2211.15841.

Shapes: B batch, S sequence (T of the keys), H query heads, G key/value heads, R = H / G, D head dim, N pairs of
blocks. Arrays have their heads before the sequence, so that a block of one head is whole tiles of memory.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ring import cost
from ring import pallas_tpu_blocks as bodies
from ring.blockwise import Residual
from ring.mask import NONE, Keys, Queries, classify
from ring.pallas_tpu_blocks import FLAG_BITS, LANES, Tile
from ring.softmax import Running

HEAD_DIMS = (64, 128, 256)
DTYPES = (jnp.bfloat16, jnp.float32)


class Blocks(NamedTuple):
    """Tokens per block of queries and of keys, and of one product inside a block."""

    query: int
    key: int
    chunk: int


_BLOCKS = {
    "tpu_v4": {64: Blocks(1024, 1024, 512), 128: Blocks(1024, 1024, 512), 256: Blocks(512, 512, 512)},
    "tpu_v5e": {64: Blocks(1024, 1024, 512), 128: Blocks(1024, 1024, 512), 256: Blocks(512, 512, 512)},
    "tpu_v5p": {64: Blocks(1024, 1024, 512), 128: Blocks(1024, 1024, 512), 256: Blocks(512, 512, 512)},
    "tpu_v6e": {64: Blocks(1024, 1024, 512), 128: Blocks(1024, 1024, 512), 256: Blocks(512, 512, 512)},
}
_SCALAR_BYTES = 768 * 1024  # of 1 MiB of scalar memory
_END_OF_LIST = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What the kernel needs to know besides arrays; blocks are multiples of 128 tokens."""

    scale: float
    query_block: int
    key_block: int
    chunk: int
    soft_cap: float | None = None
    interpret: bool = False
    heads_first: ClassVar[bool] = True  # queries are [B,H,S,D]
    # Two hops in one iteration of the ring's loop trade places in memory; one would copy the shard it sends.
    unroll: ClassVar[int] = 2


def forward(kernel: Kernel, running: Running, q: jax.Array, kv: jax.Array, query: Queries, key: Keys) -> Running:
    """Adds what ``q`` [B,H,S,D] sees of ``kv`` [2,B,G,T,D] to ``running`` (out [B,H,S,D], rows [B,H,S])."""
    groups, dim = kv.shape[2], kv.shape[4]
    heads = q.shape[1] // groups
    steps = _steps(kernel, query, key, heads, by_key=False)
    stat = lambda x: x[:, :, None]
    rows, stats = steps.queries(dim), steps.stats()
    out, top, total = pl.pallas_call(
        functools.partial(bodies.forward, _tile(kernel, steps)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(groups, heads, steps.count),
            in_specs=[rows, steps.keys(0, dim), steps.keys(1, dim), *steps.meta(), rows, stats, stats],
            out_specs=[rows, stats, stats],
            scratch_shapes=[pltpu.VMEM((kernel.query_block, LANES), jnp.float32)] * 2,
        ),
        out_shape=[_like(running.out), _like(stat(running.top)), _like(stat(running.total))],
        input_output_aliases={6: 0, 7: 1, 8: 2},
        interpret=kernel.interpret,
        compiler_params=_parameters("parallel", "parallel", "arbitrary"),
        cost_estimate=_cost(q, kv, products=2),
        name="ring_forward",
    )(steps.entries, q, kv, kv, *_meta(query, key), running.out, stat(running.top), stat(running.total))
    return Running(out, top[:, :, 0], total[:, :, 0])


def start_dq(residual: Residual, groups: int, *, num_hops: int) -> jax.Array:
    """What ``backward`` adds to: float32, or the dtype of q where no second hop will add to it."""
    return jnp.zeros(residual.q.shape, jnp.float32 if num_hops > 1 else residual.q.dtype)


def finish_dq(dq: jax.Array) -> jax.Array:
    """[B,H,S,D] of what ``backward`` added to."""
    return dq


def backward(
    kernel: Kernel,
    dq: jax.Array,
    dkv: jax.Array,
    residual: Residual,
    kv: jax.Array,
    query: Queries,
    key: Keys,
) -> tuple[jax.Array, jax.Array]:
    """``dq`` [B,H,S,D] and ``dkv`` [2,B,G,T,D] and what these shards add to them.

    Rows of ``residual`` are [B,H,S] and, of q and dout, [B,H,S,D].
    """
    groups, dim = kv.shape[2], kv.shape[4]
    heads = residual.q.shape[1] // groups
    stat = lambda x: x[:, :, None]
    operands = (residual.q, residual.dout, kv, kv, stat(residual.lse), stat(residual.delta), *_meta(query, key))

    def inputs(steps: _Steps) -> list[pl.BlockSpec]:
        rows, stats = steps.queries(dim), steps.stats()
        return [rows, rows, steps.keys(0, dim), steps.keys(1, dim), stats, stats, *steps.meta()]

    steps = _steps(kernel, query, key, heads, by_key=False)
    column = pltpu.VMEM((kernel.query_block, LANES), jnp.float32)
    dq = pl.pallas_call(
        functools.partial(bodies.backward_queries, _tile(kernel, steps)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(groups, heads, steps.count),
            in_specs=[*inputs(steps), steps.queries(dim)],
            out_specs=steps.queries(dim),
            scratch_shapes=[pltpu.VMEM((kernel.query_block, dim), jnp.float32), column, column],
        ),
        out_shape=_like(dq),
        input_output_aliases={9: 0},
        interpret=kernel.interpret,
        compiler_params=_parameters("parallel", "parallel", "arbitrary"),
        cost_estimate=_cost(residual.q, kv, products=3),
        name="ring_backward_queries",
    )(steps.entries, *operands, dq)

    steps = _steps(kernel, query, key, heads, by_key=True)
    dkv = pl.pallas_call(
        functools.partial(bodies.backward_keys, _tile(kernel, steps)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(groups, steps.count, heads),
            in_specs=[*inputs(steps), steps.both_keys(dim)],
            out_specs=steps.both_keys(dim),
            scratch_shapes=[pltpu.VMEM((kernel.key_block, dim), jnp.float32)] * 2,
        ),
        out_shape=_like(dkv),
        input_output_aliases={9: 0},
        interpret=kernel.interpret,
        compiler_params=_parameters("parallel", "arbitrary", "arbitrary"),
        cost_estimate=_cost(residual.q, kv, products=4),
        name="ring_backward_keys",
    )(steps.entries, *operands, dkv)
    return dq, dkv


def check(query_block: int | None, key_block: int | None, head_dim: int, dtype: jnp.dtype) -> None:
    """ValueError for what the kernel cannot do, with what to change."""
    for field, size in (("query_block", query_block), ("key_block", key_block)):
        if size is not None and size % LANES:
            raise ValueError(
                f"Plan.{field} is {size} and the TPU kernel's blocks are multiples of {LANES}; "
                f"give such a number, None, or backend='xla'"
            )
    if head_dim not in HEAD_DIMS:
        raise ValueError(
            f"q has head dim {head_dim} and the TPU kernel takes {', '.join(map(str, HEAD_DIMS))}; "
            f"pad q, k and v to one of them (and give scale), or use backend='xla'"
        )
    if dtype not in DTYPES:
        raise ValueError(f"q is {dtype} and the TPU kernel takes bfloat16 and float32; cast, or use backend='xla'")


def choose_blocks(
    device_kind: str, head_dim: int, query_length: int, key_length: int, query_block: int | None, key_block: int | None
) -> Blocks:
    """The requested blocks, or equal ones up to the table's size for the chip, in whole lanes."""
    try:
        chip = cost.chip_of(device_kind).name
    except ValueError:
        chip = ""
    largest = _BLOCKS.get(chip, _BLOCKS["tpu_v4"])[head_dim]

    def even(length: int, most: int) -> int:
        num_blocks = max(1, -(-length // most))
        return max(1, -(-length // (num_blocks * LANES))) * LANES

    return Blocks(
        even(query_length, query_block or largest.query), even(key_length, key_block or largest.key), largest.chunk
    )


@dataclasses.dataclass(frozen=True)
class _Steps:
    """The list that the grid walks, and which blocks of the operands belong to an entry of it.

    entries: int32 [N], the visible pairs of blocks. count: int32, how many there are.
    """

    entries: jax.Array
    count: jax.Array
    column_bits: int
    kernel: Kernel
    rows_per_batch: int
    heads: int
    by_key: bool

    def queries(self, dim: int) -> pl.BlockSpec:
        def index(*arguments: Any) -> tuple:
            b, g, r, i, _ = self._locate(arguments)
            return b, g * self.heads + r, i, 0

        return pl.BlockSpec((None, None, self.kernel.query_block, dim), index)

    def stats(self) -> pl.BlockSpec:
        def index(*arguments: Any) -> tuple:
            b, g, r, i, _ = self._locate(arguments)
            return b, g * self.heads + r, 0, i

        return pl.BlockSpec((None, None, 1, self.kernel.query_block), index)

    def keys(self, which: int, dim: int) -> pl.BlockSpec:
        def index(*arguments: Any) -> tuple:
            b, g, _, _, j = self._locate(arguments)
            return which, b, g, j, 0

        return pl.BlockSpec((None, None, None, self.kernel.key_block, dim), index)

    def both_keys(self, dim: int) -> pl.BlockSpec:
        def index(*arguments: Any) -> tuple:
            b, g, _, _, j = self._locate(arguments)
            return 0, b, g, j, 0

        return pl.BlockSpec((2, None, None, self.kernel.key_block, dim), index)

    def meta(self) -> tuple[pl.BlockSpec, pl.BlockSpec]:
        def of_queries(*arguments: Any) -> tuple:
            b, _, _, i, _ = self._locate(arguments)
            return b, 0, i

        def of_keys(*arguments: Any) -> tuple:
            b, _, _, _, j = self._locate(arguments)
            return b, 0, j

        return (
            pl.BlockSpec((None, len(Queries._fields), self.kernel.query_block), of_queries),
            pl.BlockSpec((None, len(Keys._fields), self.kernel.key_block), of_keys),
        )

    def _locate(self, arguments: tuple) -> tuple:
        """(batch row, group, head in the group, block of queries, block of keys) of a step."""
        *place, entries = arguments
        g, n, r = place if self.by_key else (place[0], place[2], place[1])
        entry = bodies.unpack(entries[n], self.column_bits)
        b, block = jax.lax.div(entry.row, self.rows_per_batch), jax.lax.rem(entry.row, self.rows_per_batch)
        return (b, g, r, entry.column, block) if self.by_key else (b, g, r, block, entry.column)


def _steps(kernel: Kernel, query: Queries, key: Keys, heads: int, *, by_key: bool) -> _Steps:
    kind = classify(query, key, kernel.query_block, kernel.key_block)
    if by_key:
        kind = jnp.swapaxes(kind, 1, 2)
    batch, rows, columns = kind.shape
    column_bits = (columns - 1).bit_length()
    num_pairs = kind.size
    if num_pairs * 4 > _SCALAR_BYTES or (batch * rows) << (column_bits + FLAG_BITS) >= _END_OF_LIST:
        raise ValueError(
            f"a device would hold {num_pairs} pairs of blocks of {kernel.query_block} queries and {kernel.key_block} "
            f"keys, more than the {_SCALAR_BYTES // 4} that fit a TPU's scalar memory; "
            f"give a larger Plan.query_block and key_block, or more shards"
        )
    row = jax.lax.broadcasted_iota(jnp.int32, (batch * rows, columns), 0)
    column = jax.lax.broadcasted_iota(jnp.int32, (batch * rows, columns), 1)
    kind = kind.reshape(row.shape)
    seen = kind != NONE
    packed = jnp.where(seen, bodies.pack(row, column, kind, column_bits), _END_OF_LIST)
    count = jnp.sum(seen, dtype=jnp.int32)
    entries = jnp.sort(packed.reshape(-1))
    # Where there is nothing to see, one step passes its block through.
    listed = jnp.arange(num_pairs, dtype=jnp.int32) < count
    entries = jnp.where(listed, bodies.mark(entries, column_bits), bodies.NOTHING)
    return _Steps(entries, jnp.maximum(count, 1), column_bits, kernel, rows, heads, by_key)


def _tile(kernel: Kernel, steps: _Steps) -> Tile:
    return Tile(kernel.scale, kernel.soft_cap, kernel.chunk, steps.column_bits)


def _meta(query: Queries, key: Keys) -> tuple[jax.Array, jax.Array]:
    return jnp.stack(query, axis=1), jnp.stack(key, axis=1)


def _like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _parameters(*semantics: Literal["parallel", "arbitrary"]) -> pltpu.CompilerParams:
    return pltpu.CompilerParams(dimension_semantics=semantics)


def _cost(q: jax.Array, kv: jax.Array, products: int) -> pl.CostEstimate:
    """What the compiler's scheduler puts transfers behind: of all pairs half are visible, but the scheduler expects a
    kernel to reach the chip's peak, and this one is expected to reach half of it."""
    batch, heads, length, dim = q.shape
    pairs = batch * heads * length * kv.shape[3]
    bytes_accessed = (q.size * 4 + kv.size) * q.dtype.itemsize
    return pl.CostEstimate(flops=2 * products * pairs * dim, transcendentals=pairs, bytes_accessed=bytes_accessed)
