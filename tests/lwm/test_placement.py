"""Rings on a torus: consecutive places are one link apart."""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from lwm import sharding
from lwm.placement import ring_order


def longest_step(places: list[tuple[int, ...]]) -> int:
    """Within the box, without wrap-around."""
    return max(sum(abs(x - y) for x, y in zip(a, b, strict=True)) for a, b in itertools.pairwise([*places, places[0]]))


@pytest.mark.parametrize(
    "sides", [(8, 8, 8), (4, 8, 8), (1, 2, 2), (3, 4), (2, 3, 5), (5, 6, 1), (16, 16, 24)], ids=str
)
def test_a_cycle_through_a_box(sides: tuple[int, ...]) -> None:
    coords = list(itertools.product(*map(range, sides)))
    order = ring_order(coords)
    assert order is not None
    assert sorted(order) == list(range(len(coords)))
    assert longest_step([coords[index] for index in order]) == 1


def test_a_path_where_no_cycle_exists() -> None:
    """An odd number of places: all steps but the last are single."""
    coords = list(itertools.product(range(3), range(5)))
    order = ring_order(coords)
    assert order is not None
    assert all(
        sum(abs(x - y) for x, y in zip(coords[a], coords[b], strict=True)) == 1 for a, b in itertools.pairwise(order)
    )


def test_what_is_no_box_stays_as_it_is() -> None:
    assert ring_order([(0, 0), (0, 1), (1, 0)]) is None
    assert ring_order([(0, 0), (0, 0)]) is None


@dataclass(frozen=True)
class Chip:
    coords: tuple[int, ...]


def test_every_ring_of_a_mesh_is_one() -> None:
    """Two fsdp rows of 4 x 4 chips each: the rows keep their chips, and in both, neighbours along sp are neighbours."""
    placed: Any = np.empty((1, 2, 16, 1, 1), object)
    for x, y, z in itertools.product(range(2), range(4), range(4)):
        placed[0, x, 4 * y + z, 0, 0] = Chip((x, y, z))
    ringed = sharding._with_rings(placed)
    for row in range(2):
        places = [chip.coords for chip in ringed[0, row, :, 0, 0]]
        assert set(places) == {chip.coords for chip in placed[0, row, :, 0, 0]}
        assert longest_step(places) == 1
