"""Names of slices: chips, products, and sentences for what is neither."""

import pytest

from lwm.topology import GENERATIONS, parse, ring_hops


@pytest.mark.parametrize(
    ("name", "shape", "devices"),
    [
        ("v5p:8x8x16", (8, 8, 16), 1024),
        ("v4:8x8x8", (8, 8, 8), 512),
        ("V5E:2x4", (2, 4), 8),
        ("cpu:8", (8,), 8),
        # Cores, two a chip: Google's tables of TPU configurations.
        ("v4-8", (2, 2, 1), 4),
        ("v4-512", (4, 8, 8), 256),
        ("v4-1024", (8, 8, 8), 512),
        ("v4-4096", (8, 16, 16), 2048),
        ("v5p-2048", (8, 8, 16), 1024),
        ("v5p-12288", (16, 16, 24), 6144),
        # Chips.
        ("v5litepod-8", (2, 4), 8),
        ("v6e-256", (16, 16), 256),
    ],
)
def test_names(name: str, shape: tuple[int, ...], devices: int) -> None:
    topology = parse(name)
    assert (topology.shape, topology.num_devices) == (shape, devices)
    assert parse(topology.name) == topology


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("v9-8", "not a known slice; give one such as v4:8x8x8"),
        ("h100:8", "not a known slice"),
        ("v4:512", "v4 slices have 3 dimensions; write it as v4:4x4x4"),
        ("v5p:8x8", "takes 3 sizes"),
        ("cpu:0", "at least 1"),
        ("v5p-3", "counts TensorCores, two a chip, and no slice has 3"),
        ("v5p-24", "no slice has 24"),
    ],
)
def test_what_is_no_slice_is_refused_in_one_sentence(name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse(name)


def test_peaks_are_what_the_multipliers_can_do() -> None:
    """Peak = cores x arrays x 128^2 (v6e: 256^2) x 2 x clock."""
    for kind, arrays, side in (("v4", 2 * 4, 128), ("v5p", 2 * 4, 128), ("v5e", 4, 128), ("v6e", 4, 256)):
        generation = GENERATIONS[kind]
        assert generation.chip.flops == pytest.approx(2 * arrays * side**2 * generation.clock, rel=0.01)


def test_ring_hops_go_around_the_torus() -> None:
    line = [(0, 0, z) for z in range(8)]
    assert ring_hops(line, (8, 8, 8)) == 1  # the last is the first one's neighbour
    assert ring_hops(line[:5], (8, 8, 8)) == 4
    assert ring_hops([(0, y, z) for y in range(2) for z in range(8)], (8, 8, 8)) == 2
