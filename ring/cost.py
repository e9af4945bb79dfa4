"""What attention over a sharded sequence costs on a chip, and which strategy is predicted to be fastest.

A model of one attention layer, forward and backward, on one device of the sequence group. Seconds are

    compute             FLOPs / (peak x efficiency), the backward pass 2.5 times the forward
    ring hops           max(compute of the hop, transfer of the hop) each, plus the traffic of the running
                        output and a launch; in the backward pass dK and dV (float32) share the link
    head exchange       exposed; all-to-all moves its bytes at half of a link pair's speed
    gathered keys       exposed; uses every link. Backward gathers again and reduce-scatters in float32

A hop hides its transfer when 4 c^2 H D / F >= 4 c G D / B (bfloat16), that is c >= F / B x G / H tokens per
device: Ring Attention's c >= F / B (arXiv:2310.01889, table 2) for G = H. Fewer key/value heads send
fewer bytes and lower it; a causal mask halves the work and doubles it (``visible_share``).

Bandwidths are bytes per second in one direction; F is dense bfloat16 FLOP/s.
"""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device. ``interconnect`` is the sum over its ``links``; a ring uses one of them."""

    name: str
    flops: float
    hbm_bytes: float
    hbm_bandwidth: float
    interconnect: float
    links: int = 1
    efficiency: float = 0.5
    launch_seconds: float = 5e-6

    @property
    def link_bandwidth(self) -> float:
        """Bytes per second between ring neighbours."""
        return self.interconnect / self.links


_GIB = 2.0**30
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("tpu_v4", 275e12, 32 * _GIB, 1.2e12, 268e9, links=6),
        Chip("tpu_v5e", 196e12, 16 * _GIB, 0.82e12, 186e9, links=4),
        Chip("tpu_v5p", 459e12, 95 * _GIB, 2.77e12, 540e9, links=6),
        Chip("tpu_v6e", 918e12, 32 * _GIB, 1.64e12, 360e9, links=4),
        Chip("a100", 312e12, 80e9, 2.04e12, 300e9),
        Chip("a100_infiniband", 312e12, 80e9, 2.04e12, 12.5e9),
        Chip("h100", 989e12, 80e9, 3.35e12, 450e9),
        Chip("h200", 989e12, 141e9, 4.8e12, 450e9),
        # Simulated devices of one host: transfers are copies in memory.
        Chip("cpu", 1e11, 8 * _GIB, 1e10, 5e9, launch_seconds=1e-4),
    )
}
_KINDS = {
    "tpu v4": "tpu_v4",
    "tpu v5 lite": "tpu_v5e",
    "tpu v5e": "tpu_v5e",
    "tpu v5p": "tpu_v5p",
    "tpu v5": "tpu_v5p",
    "tpu v6 lite": "tpu_v6e",
    "tpu v6e": "tpu_v6e",
    "a100": "a100",
    "h100": "h100",
    "h200": "h200",
    "cpu": "cpu",
}


def chip_of(name: str) -> Chip:
    """A chip of the table, by its name or by what jax calls the device kind ("TPU v5p", "NVIDIA H100 80GB HBM3")."""
    if name in CHIPS:
        return CHIPS[name]
    for kind, chip in _KINDS.items():
        if kind in name.lower():
            return CHIPS[chip]
    raise ValueError(f"chip is {name!r}; choose one of {', '.join(CHIPS)}, or pass a ring.cost.Chip of your own")


@dataclasses.dataclass(frozen=True)
class Shape:
    """One attention layer over the whole sequence group: batch and heads as each of its members has them."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    bytes_per_element: int = 2
    visible_share: float = 0.5  # of all pairs; 0.5 for a causal mask


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Of one strategy, per device and layer, forward and backward together."""

    strategy: str
    ring_size: int
    ulysses_size: int
    flops: float
    sent_bytes: float
    memory_bytes: float
    compute_seconds: float
    seconds: float

    @property
    def label(self) -> str:
        """As in "usp 16x4"."""
        return f"usp {self.ring_size}x{self.ulysses_size}" if self.strategy == "usp" else self.strategy


@dataclasses.dataclass(frozen=True)
class Choice:
    """The fastest estimate, all of them from fastest to slowest, and a sentence that says why."""

    best: Estimate
    estimates: tuple[Estimate, ...]
    reason: str


def smallest_chunk(
    chip: Chip, *, heads: int = 1, kv_heads: int = 1, visible_share: float = 1.0, bandwidth: float | None = None
) -> float:
    """Tokens per device from which a forward hop hides its transfer: F / B x G / H / visible_share.

    ``bandwidth`` defaults to the chip's whole interconnect, as in Ring Attention's table 2; pass
    ``chip.link_bandwidth`` for a ring that uses one link.
    """
    return chip.flops / (bandwidth or chip.interconnect) * kv_heads / heads / visible_share


def smallest_length(chip: Chip) -> float:
    """Smallest sequence per device in Ring Attention's table 2: six chunks."""
    return 6 * smallest_chunk(chip)


def hop_elements(batch: int, chunk: int, width: int, kv_width: int | None = None) -> int:
    """Elements a device holds during a hop: q, out, k, v and the next k and v; 6 b c d where all are as wide."""
    return batch * chunk * (2 * width + 4 * (width if kv_width is None else kv_width))


def estimate(shape: Shape, chip: Chip, strategy: str, *, ring_size: int = 1, ulysses_size: int = 1) -> Estimate:
    """Cost of ``strategy`` over ring_size x ulysses_size devices ("all_gather" gathers over all of them)."""
    num_devices = ring_size * ulysses_size
    gathers, exchanges = strategy == "all_gather", strategy in ("ulysses", "usp")
    hops = ring_size if strategy in ("ring", "usp") else 1
    if strategy == "ring":
        hops = num_devices
    elif strategy == "ulysses":
        ulysses_size, ring_size = num_devices, 1
    group = ulysses_size if exchanges else 1
    own = shape.length / num_devices
    rows = shape.batch * own * group  # tokens whose queries this device attends with, over heads / group
    q_width = shape.heads / group * shape.head_dim
    kv_width = max(1.0, shape.kv_heads / group) * shape.head_dim

    flops_forward = 4 * shape.batch * shape.length**2 * shape.visible_share * shape.heads * shape.head_dim / num_devices
    compute_forward = flops_forward / (chip.flops * chip.efficiency)
    kv_bytes = 2 * rows * kv_width * shape.bytes_per_element
    dkv_bytes = 2 * rows * kv_width * 4
    per_hop = 2 * rows * q_width * 4 / chip.hbm_bandwidth + chip.launch_seconds

    def ring_seconds(compute: float, sent: float) -> float:
        one = compute / hops
        return (hops - 1) * max(one, sent / chip.link_bandwidth) + one + hops * per_hop

    seconds = ring_seconds(compute_forward, kv_bytes) + ring_seconds(2.5 * compute_forward, kv_bytes + dkv_bytes)
    where_bytes = 8 * rows  # position and segment of every key
    sent = (hops - 1) * (2 * kv_bytes + dkv_bytes) + (dkv_bytes + 2 * hops * where_bytes if hops > 1 else 0)
    memory: float = shape.bytes_per_element * hop_elements(1, math.ceil(rows), math.ceil(q_width), math.ceil(kv_width))
    if exchanges:
        element_bytes = shape.batch * own * shape.head_dim * shape.bytes_per_element
        # Forward q, k, v, out; backward q, k, v, dout, dq and dk, dv in float32.
        exchanged = element_bytes * ((2 + 3) * shape.heads + (2 + 2 + 4) * max(shape.kv_heads, ulysses_size))
        pair = 2 * chip.link_bandwidth if chip.links > 1 else chip.link_bandwidth
        # On a torus axis of n chips an all-to-all of v bytes each takes n v / (4 pair); a switch passes v (n - 1) / n.
        spread = ulysses_size / 4 if chip.links > 1 else (ulysses_size - 1) / ulysses_size
        seconds += exchanged * spread / (pair / 2)
        sent += exchanged * (ulysses_size - 1) / ulysses_size
    if gathers:
        gathered = (num_devices - 1) * (2 * kv_bytes + dkv_bytes)
        seconds += gathered / chip.interconnect
        sent += gathered
        memory += num_devices * (kv_bytes + dkv_bytes)
    return Estimate(
        strategy, ring_size, ulysses_size, 3.5 * flops_forward, sent, memory, 3.5 * compute_forward, seconds
    )


def choose(shape: Shape, chip: Chip, candidates: list[Estimate]) -> Choice:
    """The fastest of ``candidates`` whose attention fits into half of the chip's memory."""
    if not candidates:
        raise ValueError("no strategy can split these heads over these devices; change the mesh or the number of heads")
    fitting = [e for e in candidates if e.memory_bytes <= chip.hbm_bytes / 2] or candidates
    ranked = tuple(sorted(fitting, key=lambda e: e.seconds))
    best = ranked[0]
    others = ", ".join(f"{e.label} {e.seconds * 1e3:.3g} ms" for e in ranked[1:]) or "nothing else fits"
    exposed = best.seconds - best.compute_seconds
    reason = (
        f"{best.label}: {best.seconds * 1e3:.3g} ms a layer predicted on {chip.name}, {exposed * 1e3:.2g} ms of it not "
        f"hidden behind {shape.length:,} tokens of attention; {others}"
    )
    return Choice(best, ranked, reason)


def candidates(shape: Shape, chip: Chip, *, ring_size: int, ulysses_size: int = 1) -> list[Estimate]:
    """Every strategy that a mesh of ring_size x ulysses_size devices along the sequence can run."""
    num_devices = ring_size * ulysses_size

    def splits(size: int) -> bool:
        even = shape.kv_heads % size == 0 or size % shape.kv_heads == 0
        return shape.heads % size == 0 and even

    names = ["ring", "all_gather"]
    if splits(num_devices):
        names.append("ulysses")
    if ring_size > 1 and ulysses_size > 1 and splits(ulysses_size):
        names.append("usp")
    return [estimate(shape, chip, name, ring_size=ring_size, ulysses_size=ulysses_size) for name in names]


def meshes(shape: Shape, chip: Chip, num_devices: int) -> list[Estimate]:
    """Every strategy over every way to split ``num_devices`` into ring x ulysses: for choosing the mesh itself."""
    found = candidates(shape, chip, ring_size=num_devices)
    for ulysses_size in range(2, num_devices):
        if num_devices % ulysses_size == 0:
            split = candidates(shape, chip, ring_size=num_devices // ulysses_size, ulysses_size=ulysses_size)
            found += [e for e in split if e.strategy == "usp"]
    return found
