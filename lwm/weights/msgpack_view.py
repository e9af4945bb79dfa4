"""Reading msgpack in place: strings and numbers are copied, binary data stays where it is, as views of the buffer.

A checkpoint's arrays are gigabytes inside one value, so a reader that copies them cannot take one layer at a time.
https://github.com/msgpack/msgpack/blob/master/spec.md
"""

import struct
from typing import Any, NamedTuple


class Extension(NamedTuple):
    """An application's own kind of value."""

    code: int
    data: memoryview


class Cut(ValueError):
    """The buffer ends in the middle of a value."""


_LENGTHS = (">B", ">H", ">I")
# First byte -> (format of the length that follows, kind).
_SIZED = {
    **{0xC4 + i: (fmt, "bin") for i, fmt in enumerate(_LENGTHS)},
    **{0xC7 + i: (fmt, "ext") for i, fmt in enumerate(_LENGTHS)},
    **{0xD9 + i: (fmt, "str") for i, fmt in enumerate(_LENGTHS)},
    0xDC: (">H", "array"),
    0xDD: (">I", "array"),
    0xDE: (">H", "map"),
    0xDF: (">I", "map"),
}
_SCALARS = {0xCA: ">f", 0xCB: ">d"} | {0xCC + i: f">{letter}" for i, letter in enumerate("BHIQbhiq")}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_MAX_DEPTH = 16


def read(view: memoryview, start: int = 0) -> tuple[Any, int]:
    """The value at `start` and where it ends. bin is a memoryview.

    ValueError for what is no msgpack, `Cut` where the buffer ends too soon.
    """
    return _value(view, start, 0)


def _take(view: memoryview, start: int, length: int) -> memoryview:
    if start + length > len(view):
        raise Cut("it is cut short")
    return view[start : start + length]


def _value(view: memoryview, at: int, depth: int) -> tuple[Any, int]:
    if depth > _MAX_DEPTH:
        raise ValueError("its values are nested too deeply")
    first = _take(view, at, 1)[0]
    at += 1
    if first <= 0x7F or first >= 0xE0:
        return (first if first <= 0x7F else first - 256), at
    if first <= 0x8F:
        return _map(view, at, first & 0x0F, depth)
    if first <= 0x9F:
        return _array(view, at, first & 0x0F, depth)
    if first <= 0xBF:
        return str(_take(view, at, first & 0x1F), "utf-8"), at + (first & 0x1F)
    if first in _CONSTANTS:
        return _CONSTANTS[first], at
    if first in _SCALARS:
        size = struct.calcsize(_SCALARS[first])
        return struct.unpack(_SCALARS[first], _take(view, at, size))[0], at + size
    if 0xD4 <= first <= 0xD8:
        return _extension(view, at, 1 << (first - 0xD4))
    if first not in _SIZED:
        raise ValueError("it is no msgpack")
    fmt, kind = _SIZED[first]
    width = struct.calcsize(fmt)
    (length,) = struct.unpack(fmt, _take(view, at, width))
    at += width
    if kind == "array":
        return _array(view, at, length, depth)
    if kind == "map":
        return _map(view, at, length, depth)
    if kind == "ext":
        return _extension(view, at, length)
    content = _take(view, at, length)
    return (content if kind == "bin" else str(content, "utf-8")), at + length


def _extension(view: memoryview, at: int, length: int) -> tuple[Extension, int]:
    (code,) = struct.unpack(">b", _take(view, at, 1))
    return Extension(code, _take(view, at + 1, length)), at + 1 + length


def _array(view: memoryview, at: int, length: int, depth: int) -> tuple[list[Any], int]:
    values = []
    for _ in range(length):
        value, at = _value(view, at, depth + 1)
        values.append(value)
    return values, at


def _map(view: memoryview, at: int, length: int, depth: int) -> tuple[dict[Any, Any], int]:
    values = {}
    for _ in range(length):
        key, at = _value(view, at, depth + 1)
        if not isinstance(key, str | int):
            raise ValueError(f"it has a {type(key).__name__} for a key")
        values[key], at = _value(view, at, depth + 1)
    return values, at
