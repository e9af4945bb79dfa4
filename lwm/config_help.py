"""The table of every configuration field that `--help` prints: name, type, default, meaning."""

import re
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from lwm.config import RunConfig
from lwm.config_io import nested_model, walk_fields


class Row(NamedTuple):
    """One field as people see it."""

    name: str
    kind: str
    default: str
    meaning: str


def field_rows(prefix: str = "", model: type[BaseModel] = RunConfig) -> Iterator[Row]:
    """Every field at or below `prefix`, by its dotted name; `*` in `stages.*.mesh.sp` is an entry's index or name."""
    wanted = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", prefix)
    for name, info, _ in walk_fields(model):
        if name == wanted or name.startswith(f"{wanted}." if wanted else ""):
            yield Row(name, kind_of(info.annotation, info.metadata), _default_of(info), info.description or "")


def kind_of(annotation: Any, metadata: Any = ()) -> str:
    """A type as a reader of YAML would say it: `integer > 0`, `ring | ulysses`, `list of text`, `number or null`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = FieldInfo.from_annotation(annotation)
        return kind_of(inner.annotation, inner.metadata)
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin in (Union, types.UnionType):
        kinds = [kind_of(each) for each in arguments if each is not type(None)]
        return " or ".join([*kinds, "null"]) if type(None) in arguments else " or ".join(kinds)
    if origin is tuple:
        return f"list of {kind_of(arguments[0])}"
    if nested_model(annotation) is not None:
        return "section"
    name = {int: "integer", float: "number", bool: "true | false", str: "text"}[annotation]
    return " ".join([name, *(text for text in map(_bound, metadata) if text)])


def _bound(constraint: Any) -> str:
    for attribute, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<=")):
        if (limit := getattr(constraint, attribute, None)) is not None:
            return f"{sign} {limit}"
    return ""


def _default_of(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    if nested_model(info.annotation) is not None:
        return "null" if info.default is None else "as below"
    if info.default is None:
        return "null"
    if isinstance(info.default, bool):
        return str(info.default).lower()
    if isinstance(info.default, tuple):
        return str(list(info.default))
    # A zero that the field itself would refuse stands for a value derived from other fields.
    if info.default == 0 and any(getattr(each, "gt", None) == 0 for each in info.metadata):
        return "derived"
    return f"{info.default:g}" if isinstance(info.default, float) else str(info.default)


def field_table(prefix: str = "") -> str:
    """The rows as aligned text, each meaning on the line of its field."""
    rows = list(field_rows(prefix))
    heading = Row("field", "type", "default", "meaning")
    widths = [max(len(row[column]) for row in [heading, *rows]) for column in range(3)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row.meaning])
        for row in [heading, *rows]
    ]
    return "\n".join(line.rstrip() for line in lines)
