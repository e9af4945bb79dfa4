"""JSONL manifests: one example a line, as spans or through a template.

    {"spans": [{"kind": "video", "path": "a.mp4", "fps": 1}, {"kind": "text", "text": "A dog.", "learn": true}]}
    {"template": "video->text", "path": "a.mp4", "caption": "A dog runs.", "num_frames": 8}
    {"template": "chat", "turns": [["What is 2 + 2?", "4"]]}

Paths are relative to the manifest. Every error names the file, the line and the field.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from data.examples import SYSTEM, Example, Span, chat, document, from_text, question, to_text

_FRAMES = {"fps": float, "num_frames": int, "start": float, "end": float}
_SPAN = {"kind": str, "learn": bool, "text": str, "path": str, **_FRAMES}
_EXAMPLE = {"id": str, "source": str}
_PROMPTED = {**_EXAMPLE, "system": str}
# Fields of each template: name -> type; those of _REQUIRED must be there.
_TEMPLATES: dict[str, dict[str, type]] = {
    "document": {**_EXAMPLE, "text": str},
    "chat": {**_PROMPTED, "turns": list},
    "text->image": {**_PROMPTED, "path": str, "caption": str},
    "image->text": {**_PROMPTED, "path": str, "caption": str},
    "text->video": {**_PROMPTED, "path": str, "caption": str, **_FRAMES},
    "video->text": {**_PROMPTED, "path": str, "caption": str, **_FRAMES},
    "image question": {**_PROMPTED, "path": str, "question": str, "answer": str},
    "video question": {**_PROMPTED, "path": str, "question": str, "answer": str, **_FRAMES},
}
_REQUIRED = {"text", "turns", "path", "caption", "question", "answer"}
_TYPE_NAMES = {str: "a string", bool: "true or false", float: "a number", int: "a whole number", list: "a list"}


def read_manifest(path: str | os.PathLike[str]) -> Iterator[Example]:
    """Examples of a manifest, one line at a time; ValueError `FILE line N: field: what is wrong`."""
    manifest = Path(path)
    try:
        with open(manifest, encoding="utf-8") as lines:
            count = 0
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    count += 1
                    yield _example(line, manifest, number)
    except UnicodeDecodeError:
        raise ValueError(f"manifest {manifest} is not UTF-8 text; convert it first") from None
    except OSError as error:
        raise ValueError(f"manifest {manifest} cannot be read: {error.strerror}") from None
    if count == 0:
        raise ValueError(f"manifest {manifest} is empty; it needs one example a line")


def _example(line: str, manifest: Path, number: int) -> Example:
    where = f"{manifest} line {number}"
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error.msg} at column {error.colno})") from None
    if not isinstance(record, dict):
        raise ValueError(f"{where}: must be an object in braces, not {type(record).__name__}")
    base = {"id": f"{manifest.stem}:{number}", "source": str(manifest)}
    if "template" in record:
        return _from_template(record, where, manifest.parent, base)
    fields = _checked(record, {**_EXAMPLE, "spans": list}, {"spans"}, where)
    spans: list[Span] = []
    for index, item in enumerate(fields.pop("spans")):
        place = f"{where}: spans[{index}]"
        if not isinstance(item, dict):
            raise ValueError(f"{place}: must be an object in braces, not {item!r}")
        spans.append(_made(Span, place, **_checked(item, _SPAN, {"kind"}, place, manifest.parent)))
    return _made(Example, where, spans=tuple(spans), **{**base, **fields})


def _from_template(record: Mapping[str, Any], where: str, folder: Path, base: dict[str, str]) -> Example:
    name = record["template"]
    if not isinstance(name, str) or name not in _TEMPLATES:
        raise ValueError(f"{where}: template: {name!r} is not one of {', '.join(_TEMPLATES)}")
    allowed = {"template": str, **_TEMPLATES[name]}
    fields = {**base, **_checked(record, allowed, _REQUIRED & set(allowed), where, folder)}
    del fields["template"]
    if name == "document":
        return _made(document, where, **fields)
    fields.setdefault("system", SYSTEM)
    if name == "chat":
        return _made(chat, f"{where}: turns", **{**fields, "turns": _turns(fields["turns"], where)})
    kind = "image" if "image" in name else "video"
    generated = name.startswith("text->")
    options = {key: fields.pop(key) for key in ("path", *_FRAMES) if key in fields}
    media = _made(Span, where, kind=kind, learn=generated, **options)
    if generated:
        return _made(from_text, where, media=media, **fields)
    return _made(question if "question" in fields else to_text, where, media=media, **fields)


def _turns(turns: list[Any], where: str) -> list[tuple[str, str]]:
    for index, turn in enumerate(turns):
        if not (isinstance(turn, list) and len(turn) == 2 and all(isinstance(side, str) and side for side in turn)):
            raise ValueError(f"{where}: turns[{index}]: must be [question, answer], two strings, not {turn!r}")
    return [(asked, answered) for asked, answered in turns]


def _checked(
    record: Mapping[str, Any], types: Mapping[str, type], required: set[str], where: str, folder: Path | None = None
) -> dict[str, Any]:
    """The fields of a record with their types checked and paths resolved against the manifest's folder."""
    for key, value in record.items():
        if key not in types:
            near = difflib.get_close_matches(key, types, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it must be one of {', '.join(types)}"
            raise ValueError(f"{where}: {key}: unknown field; {hint}")
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        right = number if types[key] is float else type(value) is types[key]
        if not right:
            raise ValueError(f"{where}: {key}: must be {_TYPE_NAMES[types[key]]}, not {value!r}")
    for key in sorted(required - set(record)):
        raise ValueError(f"{where}: {key}: missing")
    fields = dict(record)
    if folder is not None and "path" in fields:
        fields["path"] = str(folder / fields["path"])
    return fields


def _made(make: Any, where: str, **fields: Any) -> Any:
    try:
        return make(**fields)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
