"""Records of a manifest: examples as spans or through templates, checked field by field.

    {"spans": [{"kind": "video", "path": "a.mp4", "fps": 1}, {"kind": "text", "text": "A dog.", "learn": true}]}
    {"template": "video->text", "path": "a.mp4", "caption": "A dog runs.", "num_frames": 8}
    {"template": ["video->text", "text->video"], "path": "a.mp4", "caption": "A dog runs."}
    {"template": "chat", "turns": [["What is 2 + 2?", "4"]]}
    {"template": "document questions", "text": "A long text ...", "turns": [["Who did it?", "The gardener."]]}
    {"template": "book", "path": "book.txt"}
    {"template": "video", "path": "a.mp4"}

A list of templates makes an example by each; documents have a `text`, or the `path` of one; `book` makes questions
(`data.book`) where it has no `turns`. Paths are relative to the manifest. Every error names the file, the line
and the field.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.examples import (
    SYSTEM,
    Example,
    Span,
    alone,
    chat,
    document,
    document_questions,
    from_text,
    question,
    to_text,
)
from data.text import read_text

MakeBook = Callable[..., Iterable[Example]]

_FRAMES = {"fps": float, "num_frames": int, "start": float, "end": float}
_SPAN = {"kind": str, "learn": bool, "text": str, "path": str, **_FRAMES}
_EXAMPLE = {"id": str, "source": str}
_PROMPTED = {**_EXAMPLE, "system": str}
# Fields of each template: name -> type; those of _REQUIRED must be there.
_TEMPLATES: dict[str, dict[str, type]] = {
    "document": {**_EXAMPLE, "text": str, "path": str},
    "chat": {**_PROMPTED, "turns": list},
    "document questions": {**_PROMPTED, "text": str, "path": str, "turns": list},
    "book": {**_PROMPTED, "text": str, "path": str, "turns": list},
    "image": {**_EXAMPLE, "path": str},
    "video": {**_EXAMPLE, "path": str, **_FRAMES},
    "text->image": {**_PROMPTED, "path": str, "caption": str},
    "image->text": {**_PROMPTED, "path": str, "caption": str},
    "text->video": {**_PROMPTED, "path": str, "caption": str, **_FRAMES},
    "video->text": {**_PROMPTED, "path": str, "caption": str, **_FRAMES},
    "image question": {**_PROMPTED, "path": str, "question": str, "answer": str},
    "video question": {**_PROMPTED, "path": str, "question": str, "answer": str, **_FRAMES},
}
TEMPLATES = tuple(_TEMPLATES)
BOOK = "book"
# Templates of long texts, which may stand in a file of their own.
_TEXTS = ("document", "document questions", BOOK)
_REQUIRED = {"text", "turns", "path", "caption", "question", "answer"}
_TYPE_NAMES = {str: "a string", bool: "true or false", float: "a number", int: "a whole number", list: "a list"}


@dataclass(frozen=True)
class Record:
    """One line of a manifest, or what stands for one: JSON text or its fields, and where it came from.

    place: how errors call it. folder: what paths are relative to. id, source: for examples that have none of their own.
    content: the bytes of an image file, in place of a path. problem: why it cannot be used, if it cannot.
    """

    line: str | Mapping[str, Any]
    place: str
    folder: str
    id: str
    source: str
    content: bytes | None = None
    problem: str = ""


def read_manifest(path: str | os.PathLike[str]) -> Iterator[Example]:
    """Examples of a manifest, one line at a time; ValueError `FILE line N: field: what is wrong`."""
    for record in read_lines(path):
        yield from make_examples(record)


def read_lines(path: str | os.PathLike[str]) -> Iterator[Record]:
    """The lines of a JSONL file that are not empty, unchecked; ValueError where it cannot be read or has none."""
    manifest = Path(path)
    try:
        with open(manifest, encoding="utf-8") as lines:
            count = 0
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    count += 1
                    place = f"{manifest} line {number}"
                    yield Record(line, place, str(manifest.parent), f"{manifest.stem}:{number}", str(manifest))
    except UnicodeDecodeError:
        raise ValueError(f"manifest {manifest} is not UTF-8 text; convert it first") from None
    except OSError as error:
        raise ValueError(f"manifest {manifest} cannot be read: {error.strerror}") from None
    if count == 0:
        raise ValueError(f"manifest {manifest} is empty; it needs one example a line")


def fields_of(record: Record) -> Mapping[str, Any]:
    """The fields of a record; ValueError where its line is no JSON object."""
    if not isinstance(record.line, str):
        return record.line
    try:
        fields = json.loads(record.line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{record.place}: not JSON ({error.msg} at column {error.colno})") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{record.place}: must be an object in braces, not {type(fields).__name__}")
    return fields


def make_examples(record: Record, book: MakeBook | None = None) -> list[Example]:
    """The examples of a record, by each of its templates; ValueError `FILE line N: field: what is wrong`.

    book: `data.book.book_questions` with its tokenizer and length.
    """
    fields, folder = fields_of(record), Path(record.folder)
    base = {"id": record.id, "source": record.source}
    names = fields.get("template")
    if names is None:
        return [_from_spans(fields, record.place, folder, base)]
    if not isinstance(names, list):
        return _from_template(fields, record.place, folder, base, record.content, book)
    if not names:
        raise ValueError(f"{record.place}: template: the list is empty; name at least one of {', '.join(_TEMPLATES)}")
    examples: list[Example] = []
    for name in names:
        one = {**fields, "template": name, "id": f"{fields.get('id', record.id)} {name}"}
        examples += _from_template(one, record.place, folder, base, record.content, book)
    return examples


def _from_spans(record: Mapping[str, Any], where: str, folder: Path, base: dict[str, str]) -> Example:
    fields = _checked(record, {**_EXAMPLE, "spans": list}, {"spans"}, where)
    spans: list[Span] = []
    for index, item in enumerate(fields.pop("spans")):
        place = f"{where}: spans[{index}]"
        if not isinstance(item, dict):
            raise ValueError(f"{place}: must be an object in braces, not {item!r}")
        spans.append(_made(Span, place, **_checked(item, _SPAN, {"kind"}, place, folder)))
    return _made(Example, where, spans=tuple(spans), **{**base, **fields})


def _from_template(
    record: Mapping[str, Any],
    where: str,
    folder: Path,
    base: dict[str, str],
    content: bytes | None,
    book: MakeBook | None,
) -> list[Example]:
    name = record["template"]
    if not isinstance(name, str) or name not in _TEMPLATES:
        raise ValueError(f"{where}: template: {name!r} is not one of {', '.join(_TEMPLATES)}")
    allowed = {"template": str, **_TEMPLATES[name]}
    required = _REQUIRED & set(allowed) - ({"path"} if content is not None or name in _TEXTS else set())
    if name in _TEXTS and "path" in record:
        required -= {"text"}
    fields = {**base, **_checked(record, allowed, required - ({"turns"} if name == BOOK else set()), where, folder)}
    del fields["template"]
    if name in _TEXTS and "path" in fields:
        if "text" in fields:
            raise ValueError(f"{where}: path: given beside text; give one of them")
        fields["text"] = read_text(fields.pop("path"))
    if name == "document":
        return [_made(document, where, **fields)]
    if name == BOOK:
        return _book(fields, where, book)
    if name in ("chat", "document questions"):
        fields.setdefault("system", SYSTEM)
        turns = _turns(fields.pop("turns"), where)
        if name == "chat":
            return [_made(chat, f"{where}: turns", turns=turns, **fields)]
        return [_made(document_questions, f"{where}: turns", pairs=turns, **fields)]
    kind = "image" if "image" in name else "video"
    generated = name.startswith("text->") or name == kind
    options = {key: fields.pop(key) for key in ("path", *_FRAMES) if key in fields}
    media = _made(Span, where, kind=kind, learn=generated, content=content, **options)
    if name == kind:
        return [_made(alone, where, media=media, **fields)]
    fields.setdefault("system", SYSTEM)
    if generated:
        return [_made(from_text, where, media=media, **fields)]
    return [_made(question if "question" in fields else to_text, where, media=media, **fields)]


def _book(fields: dict[str, Any], where: str, book: MakeBook | None) -> list[Example]:
    if book is None:
        raise ValueError(f"{where}: template: book examples are made when a corpus is built, which knows their length")
    turns = fields.pop("turns", None)
    pairs = None if turns is None else _turns(turns, where)
    return _made(lambda **given: list(book(**given)), where, pairs=pairs, **{"system": SYSTEM, **fields})


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
