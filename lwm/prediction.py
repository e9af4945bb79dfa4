"""What a compiled step should take: a prediction from its schedule and the chip's data sheet, nothing measured.

    compute     the compiler's own estimate of cycles / clock; loops over attention blocks turn as often as a causal
                mask lets them see. Where the compiler gives no estimate (CPU, kernels of our own): FLOPs executed /
                (peak x the efficiency that `ring.cost` assumes).
    exposed     what a transfer takes beyond what is computed between its start and its done
    step        compute + exposed, at least the roofline
    roofline    the slowest of FLOPs executed / peak, bytes / link and bytes / memory: no schedule can be faster

A permute moves its bytes over one link, twice as slowly where some neighbours of the ring are several links apart and
share them; gathers and reductions use both links of every torus dimension that their group spans; an all-to-all of n
devices moves n / 4 times its bytes (half the ring). Each transfer takes `ring.cost`'s launch_seconds to begin with.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from lwm import flops
from lwm.config import ResolvedStage
from lwm.sharding import parameter_table
from lwm.topology import Generation
from ring.local import block_size

# Bytes per second between a chip and its host's memory: one PCIe 3.0 x16 port, of which 12.5 GB/s is what moves.
HOST_BANDWIDTH = 12.5e9
_FLOAT32 = 4


@dataclass(frozen=True)
class Work:
    """FLOPs of one step on one device: `needed` without recomputation, `executed` with it, `attention` the part of
    those that attention executes."""

    needed: float
    executed: float
    attention: float


def pairs(resolved: ResolvedStage) -> float:
    """Query-key pairs of one global batch whose rows are one segment each: the most that a causal mask shows."""
    length = resolved.stage.seq_len
    return resolved.stage.batch_rows * length * (length + 1) / 2


def attention_recomputed(resolved: ResolvedStage) -> bool:
    """Whether the backward pass runs the forward attention again."""
    return resolved.stage.remat in ("full", "offload")


def work(resolved: ResolvedStage, num_devices: int) -> Work:
    """FLOPs of one step of a stage. Every token is learned, half by each head where there are two."""
    stage, config = resolved.stage, resolved.model
    tokens, seen = stage.tokens_per_step, pairs(resolved)
    modalities = ("text", "vision") if config.vision_vocab_size else ("text",)
    needed = flops.step_flops(config, tokens, seen, {name: tokens / len(modalities) for name in modalities})
    table = parameter_table(config)
    projections, feed_forward = (
        sum(math.prod(table[f"layers/{name}"].shape) for name in names)
        for names in (("query", "key", "value", "output"), ("gate", "up", "down"))
    )
    one_attention = 4 * config.num_layers * config.num_heads * config.head_dim * seen
    # A flash backward computes the scores once more: 5 products where the forward has 2.
    attention = one_attention * (2.5 + (2 if attention_recomputed(resolved) else 1))
    again = 0.0 if stage.remat == "none" else 2 * tokens * projections
    # Blockwise, gate and up are computed again in the backward pass, and only there.
    if stage.mlp_chunk or stage.remat != "none":
        again += 2 * tokens * feed_forward * 2 / 3
    executed = needed - 3 * one_attention + attention + again
    return Work(needed / num_devices, executed / num_devices, attention / num_devices)


class _Blocks(NamedTuple):
    """Of one pass over one layer on one device."""

    rows: int
    hops: int
    queries: int
    keys: int


def _blocks(resolved: ResolvedStage) -> _Blocks:
    stage, sizes = resolved.stage, resolved.mesh_sizes
    attention, shards = stage.attention, resolved.sequence_shards
    exchanged = {"ulysses": shards, "usp": sizes["ulysses"]}.get(attention.strategy, 1)
    hops = {"ulysses": 1, "all_gather": 1, "usp": sizes["sp"]}.get(attention.strategy, shards)
    queries, keys = stage.seq_len // shards * exchanged, stage.seq_len // hops
    rows = max(1, stage.batch_rows // (resolved.data_shards * stage.accumulate))
    down = -(-queries // block_size(queries, attention.query_block))
    return _Blocks(rows, hops, down, -(-keys // block_size(keys, attention.key_block)))


def visits(resolved: ResolvedStage) -> float:
    """Pairs of attention blocks that the busiest device visits in one pass over one layer, all hops together; once for
    each part of the heads.

    A balanced layout shows each device half of all pairs; contiguous, the last device sees everything.
    """
    blocks = _blocks(resolved)
    pairs: float = blocks.keys * blocks.queries
    if resolved.stage.attention.layout != "contiguous" or resolved.sequence_shards == 1:
        pairs = (pairs + min(blocks.keys, blocks.queries)) / 2
    return blocks.rows * blocks.hops * resolved.stage.attention.head_parts * pairs


def outer_blocks(resolved: ResolvedStage) -> int:
    """Blocks of queries that one device walks over in one hop of one part of the heads."""
    blocks = _blocks(resolved)
    return blocks.rows * blocks.queries


@dataclass(frozen=True)
class Link:
    """How the devices of a collective are connected: torus dimensions they span, and links between ring neighbours."""

    dims: int = 1
    hops: int = 1
    size: int = 1


def transfer_seconds(kind: str, num_bytes: float, link: Link, generation: Generation) -> float:
    """Time of one transfer that has its links to itself."""
    one = generation.chip.link_bandwidth
    if kind == "host-copy":
        return num_bytes / HOST_BANDWIDTH
    if kind == "collective-permute":
        return num_bytes * min(max(link.hops, 1), 2) / one
    if kind == "all-to-all":
        return num_bytes * max(link.size / 4, 1) / (2 * one)
    links = min(2 * max(link.dims, 1), generation.chip.links)
    return num_bytes / (links * one)


@dataclass(frozen=True)
class Prediction:
    """Of one step, labelled as what it is: nobody ran it. Seconds, shares of 1, tokens per second of the whole slice.

    `from_schedule`: whether compute comes from the compiler's cycles, or from FLOPs at an assumed efficiency.
    """

    compute_seconds: float
    exposed_seconds: float
    step_seconds: float
    roofline_seconds: float
    mfu: float
    roofline_mfu: float
    tokens_per_second: float
    stage_hours: float
    from_schedule: bool


def memory_bytes(resolved: ResolvedStage, local_parameters: int) -> float:
    """Bytes that a device must read or write at least: the optimizer's update, weights gathered for three passes, layer
    inputs written and read."""
    config, stage = resolved.model, resolved.stage
    width = 2 if stage.compute_dtype == "bfloat16" else _FLOAT32
    weights = sum(
        math.prod(entry.shape) for path, entry in parameter_table(config).items() if path.startswith("layers/")
    )
    gathered = 2 * 3 * width * weights / resolved.mesh_sizes["tp"] * stage.accumulate
    inputs = 2 * width * config.num_layers * config.hidden_size * resolved.tokens_per_device
    return 7 * _FLOAT32 * local_parameters + gathered + inputs


def predict(
    resolved: ResolvedStage,
    num_devices: int,
    generation: Generation,
    *,
    compute_seconds: float,
    exposed_seconds: float,
    link_seconds: float,
    local_parameters: int,
) -> Prediction:
    """Put together what a step takes.

    `compute_seconds`: by the compiler's estimates, for one device and step; 0 for none. `link_seconds`: all transfers
    of the step, hidden or not.
    """
    done = work(resolved, num_devices)
    peak = generation.chip.flops
    compute = compute_seconds or done.executed / (peak * generation.chip.efficiency)
    memory = memory_bytes(resolved, local_parameters) / generation.chip.hbm_bandwidth
    roofline = max(done.executed / peak, link_seconds, memory)
    # Transfers that hide behind the same computation still share the links.
    step = max(compute + exposed_seconds, roofline)
    stage = resolved.stage
    return Prediction(
        compute_seconds=compute,
        exposed_seconds=exposed_seconds,
        step_seconds=step,
        roofline_seconds=roofline,
        mfu=done.needed / (step * peak),
        roofline_mfu=done.needed / (roofline * peak),
        tokens_per_second=stage.tokens_per_step / step,
        stage_hours=step * stage.steps / 3600,
        from_schedule=compute_seconds > 0,
    )


@dataclass(frozen=True)
class Advice:
    """A change of one field and the bytes of device memory it should free."""

    change: str
    saved_bytes: float


def advice(resolved: ResolvedStage) -> list[Advice]:
    """Changes of a stage that lower its memory, the most helpful first; estimates by formula."""
    stage, config, sizes = resolved.stage, resolved.model, resolved.mesh_sizes
    tokens = resolved.tokens_per_device // stage.accumulate
    width = 2 if stage.compute_dtype == "bfloat16" else _FLOAT32
    inputs = width * config.num_layers * config.hidden_size * tokens
    found = []

    def add(change: str, saved: float) -> None:
        if saved > 0:
            found.append(Advice(change, saved))

    attended = width * config.num_layers * config.num_heads * config.head_dim * tokens / sizes["tp"]
    if stage.remat == "none":
        hidden = 3 * width * config.num_layers * config.intermediate_size * tokens / sizes["tp"]
        add("remat=full", 4 * inputs + attended + (0 if stage.mlp_chunk else hidden))
    elif stage.remat == "attention":
        add("remat=full", attended)
        add("remat=offload_attention", inputs + attended)
    if stage.remat != "offload" and stage.remat != "offload_attention":
        add("remat=offload", inputs + (attended if stage.remat != "full" else 0))
    if sizes["tp"] > 1:
        add(f"mesh.tp=1 and {sizes['tp']} times the sp", (1 - 1 / sizes["tp"]) * inputs)
    rows = stage.batch_rows // (resolved.data_shards * stage.accumulate)
    if rows > 1:
        add(f"accumulate={2 * stage.accumulate}", inputs / 2)
    elif resolved.data_shards > 1 and stage.batch_rows > 1:
        add(f"accumulate={2 * stage.accumulate} with half the fsdp and twice the sp", inputs / 2)
    hidden_now = min(tokens, stage.mlp_chunk or tokens) * config.intermediate_size / sizes["tp"]
    if stage.mlp_chunk is None or stage.mlp_chunk > 1024:
        smaller = min(1024, tokens)
        add(f"mlp_chunk={smaller}", 6 * width * (hidden_now - smaller * config.intermediate_size / sizes["tp"]))
    vocabulary = max(config.text_vocab_size, config.vision_vocab_size) / sizes["tp"]
    learned = min(tokens, stage.loss_chunk or tokens)
    if learned > 512:
        add("loss_chunk=512", 2 * _FLOAT32 * (learned - 512) * vocabulary)
    return sorted(found, key=lambda each: -each.saved_bytes)
