"""Rows of data sets as Hugging Face has them: which column plays which role, and rows as records of a manifest."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from data.manifest import Record

Columns = dict[str, str]  # role -> column

# The names that a role has where none is given, most telling first.
ROLES: dict[str, tuple[str, ...]] = {
    "path": ("video", "image", "video_path", "image_path", "path", "file_name", "filename", "file"),
    "caption": ("caption", "text", "description", "title"),
    "question": ("question", "query", "instruction", "prompt"),
    "answer": ("answer", "response", "output", "completion"),
    "turns": ("messages", "conversations", "conversation", "turns"),
    "text": ("text", "content", "document"),
    "system": ("system",),
    "id": ("id",),
}
_SAYS, _ASKS, _ANSWERS = ("content", "value"), ("user", "human"), ("assistant", "gpt")


def roles_of(names: Sequence[str], given: Mapping[str, str], place: str) -> Columns:
    """Role -> column for columns of these names; `given` ones first. ValueError where they make no example."""
    for role, column in given.items():
        if role not in ROLES:
            raise ValueError(f"column {role}={column}: {role!r} is not a role; the roles are {', '.join(ROLES)}")
        if column not in names:
            raise ValueError(f"column {role}={column}: {place} has no such column; it has {', '.join(names)}")
    lower = {name.lower(): name for name in reversed(names)}
    roles = dict(given)
    for role, known in ROLES.items():
        found = next((lower[name] for name in known if name in lower), None)
        if role not in roles and found is not None and found not in roles.values():
            roles[role] = found
    if "path" not in roles and roles.get("caption") is not None and "text" not in roles:
        roles["text"] = roles.pop("caption")
    if not ({"path", "turns", "text"} & set(roles) or {"question", "answer"} <= set(roles)):
        raise ValueError(
            f"{place} has the columns {', '.join(names)}, and none is known to be a file's path, turns of a chat, a "
            "text, or a question with its answer; say which is which, such as --column text=body"
        )
    return roles


def from_row(row: Mapping[str, Any], roles: Columns, templates: Sequence[str], base: Record) -> Record:
    """A row as a record of a manifest; ValueError names the row and the column."""
    values = {role: row.get(column) for role, column in roles.items()}
    fields: dict[str, Any] = {role: values[role] for role in ("system", "id") if values.get(role)}
    fields = {role: str(value) for role, value in fields.items()}
    content = None
    if values.get("path") is not None:
        content = _add_media(fields, values, templates, roles, base)
    elif values.get("turns") is not None:
        turns, system = _turns(values["turns"], roles["turns"], base.place)
        fields |= {"template": "chat", "turns": turns} | ({"system": system} if system else {})
    elif values.get("question") and values.get("answer"):
        fields |= {"template": "chat", "turns": [[str(values["question"]), str(values["answer"])]]}
    elif values.get("text"):
        fields.pop("system", None)
        fields |= {"template": _one_or_list(templates or ["document"]), "text": str(values["text"])}
    else:
        raise ValueError(f"{base.place}: {', '.join(roles.values())}: all empty; remove the row")
    return dataclasses.replace(base, line=fields, content=content)


def _add_media(
    fields: dict[str, Any], values: Mapping[str, Any], templates: Sequence[str], roles: Columns, base: Record
) -> bytes | None:
    """Fills in a row with a file; returns the file's bytes where the row holds them (images only)."""
    path: Any = values["path"]
    content: bytes | None = None
    if isinstance(path, Mapping):  # as Hugging Face stores images and videos
        path, content = path.get("path"), path.get("bytes")
    if isinstance(path, bytes):
        path, content = None, path
    kind = _kind(path, roles["path"], content)
    if content is not None and kind == "video":
        raise ValueError(
            f"{base.place}: {roles['path']}: holds a video's bytes; write videos to files, and their paths to the rows"
        )
    if content is None:
        if not path:
            raise ValueError(f"{base.place}: {roles['path']}: empty; remove the row")
        fields["path"] = str(path)
    if values.get("question") and values.get("answer"):
        fields |= {"template": f"{kind} question", "question": values["question"], "answer": str(values["answer"])}
    elif values.get("caption"):
        wanted = [each for each in templates if kind in each] or [f"{kind}->text", f"text->{kind}"]
        fields |= {"template": _one_or_list(wanted), "caption": str(values["caption"])}
    else:
        fields.pop("system", None)
        fields["template"] = kind
    return content


def _kind(path: Any, column: str, content: bytes | None) -> str:
    ending = PurePath(str(path)).suffix.lower() if path else ""
    if ending in (".png", ".jpg", ".jpeg", ".webp", ".bmp"):
        return "image"
    if ending:
        return "video"
    return "image" if "image" in column.lower() or content is not None else "video"


def _turns(value: Any, column: str, place: str) -> tuple[list[list[str]], str]:
    """Messages with a role and words each, or pairs, as [question, answer] turns; and the system's words."""
    turns: list[list[str]] = []
    system = ""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ValueError(f"{place}: {column}: must be a list of messages, not {value!r}")
    for message in value:
        if isinstance(message, Sequence) and not isinstance(message, str) and len(message) == 2:
            turns.append([str(side) for side in message])
            continue
        role = message.get("role", message.get("from")) if isinstance(message, Mapping) else None
        words = next((message[key] for key in _SAYS if message.get(key)), None) if role is not None else None
        if role is None or not isinstance(words, str):
            raise ValueError(f"{place}: {column}: must be messages with a role and content each, not {message!r}")
        if role == "system":
            system = words
        elif role in _ASKS:
            turns.append([words])
        elif role in _ANSWERS and turns and len(turns[-1]) == 1:
            turns[-1].append(words)
        else:
            raise ValueError(f"{place}: {column}: a message of {role!r} stands where it cannot; they must take turns")
    whole = [turn for turn in turns if len(turn) == 2]
    if not whole or len(whole) < len(turns) - 1:
        raise ValueError(f"{place}: {column}: every question needs an answer after it")
    return whole, system


def _one_or_list(templates: Sequence[str]) -> str | list[str]:
    return templates[0] if len(templates) == 1 else list(templates)
