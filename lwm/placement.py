"""Where the places of a ring lie on a torus of chips: next to each other, so that a hop crosses one link."""

from collections.abc import Sequence

import numpy as np

Place = tuple[int, ...]


def ring_order(coords: Sequence[Place]) -> list[int] | None:
    """Indices of `coords` in an order whose neighbours, the last and the first among them, are one step apart.

    `coords` are those of a box of chips, every combination of some values along each dimension. A cycle through all of
    them exists within the box where one side is even and another is longer than one; otherwise the path through them
    closes only over the torus's own wrap-around. None where the coordinates are no box.
    """
    values = [sorted(set(each)) for each in zip(*coords, strict=True)]
    sides = [len(each) for each in values]
    where = {place: index for index, place in enumerate(coords)}
    if len(where) != len(coords) or int(np.prod(sides)) != len(coords):
        return None
    places = [tuple(axis[at] for axis, at in zip(values, place, strict=True)) for place in _cycle(sides)]
    return [where[place] for place in places]


def _cycle(sides: Sequence[int]) -> list[Place]:
    even = next((dim for dim, side in enumerate(sides) if side % 2 == 0), None)
    if even is None:
        return _path(sides)
    columns = _path([side for dim, side in enumerate(sides) if dim != even])
    rows = range(sides[even])

    def place(row: int, column: Place) -> Place:
        return (*column[:even], row, *column[even:])

    if len(columns) == 1:
        return [place(row, columns[0]) for row in rows]
    # Along the first row, then back and forth through the others, leaving their first column free for the way home.
    out = [place(row, column) for row in rows for column in (columns[1:] if row % 2 == 0 else columns[:0:-1])]
    return [place(0, columns[0]), *out, *(place(row, columns[0]) for row in reversed(rows[1:]))]


def _path(sides: Sequence[int]) -> list[Place]:
    """Every place of a box once, each one step from the one before: back and forth along the last dimension."""
    if not sides:
        return [()]
    inner = _path(sides[1:])
    return [(first, *rest) for first in range(sides[0]) for rest in (inner if first % 2 == 0 else inner[::-1])]
