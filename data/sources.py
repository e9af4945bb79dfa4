"""What a corpus can be built from: a manifest, rows of a data set (parquet, JSONL), text files, a folder of anything.

Every source is a numbered sequence of records, read lazily and from any number on; a record becomes examples by itself,
in any process (`data.prepare.Worker`), so that the work can be spread and a build that ended early can go on.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.columns import Columns, from_row, roles_of
from data.manifest import BOOK, TEMPLATES, Record, fields_of, read_lines

VIDEO_ENDINGS = (
    ".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".ts", ".mts", ".m2ts", ".mpg", ".mpeg", ".flv", ".wmv", ".ogv",
    ".3gp", ".gif",
)  # fmt: skip
IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
TEXT_ENDINGS = (".txt", ".md")
_ROW_ENDINGS = (".jsonl", ".parquet")
_CAPTION_FILES = ("captions", "metadata")
_CAPTION_KEYS = ("caption", "text", "description", "title")
_NAME_KEYS = ("file_name", "filename", "file", "path", "video", "image")


@dataclass(frozen=True)
class Source:
    """records: from a number on. total: how many there are. fingerprint: sha256 (hex) that changes with what they say.

    has_media: whether any has images or videos. without_caption: media files that have no words. what: for people.
    """

    records: Callable[[int], Iterator[Record]]
    total: int
    fingerprint: str
    has_media: bool
    what: str
    without_caption: int = 0


def open_source(
    path: str | os.PathLike[str], *, templates: Sequence[str] = (), columns: Mapping[str, str] | None = None
) -> Source:
    """The source at `path`: a JSONL or parquet file, a text file, a video or image, or a folder of any of these.

    templates: for media with captions, by default both directions; for texts "document". columns: role -> column of
    rows whose names do not say it (`data.columns`). ValueError, one sentence, for what cannot be a source.
    """
    place = Path(path)
    for name in templates:
        if name not in TEMPLATES:
            raise ValueError(f"template {name!r} is not one of {', '.join(TEMPLATES)}")
    if not place.exists():
        raise ValueError(f"{place}: there is no such file or folder; give a manifest, a data set's file, or a folder")
    if place.suffix.lower() in _ROW_ENDINGS and place.is_file():
        return _rows([place], templates, columns or {})
    if place.is_dir():
        return _folder(place, templates, columns or {})
    if place.suffix.lower() in (*VIDEO_ENDINGS, *IMAGE_ENDINGS, *TEXT_ENDINGS):
        return _files([place], place.parent, templates)
    endings = ", ".join((*_ROW_ENDINGS, *TEXT_ENDINGS))
    raise ValueError(
        f"{place} is not a source; give a folder, or a file that ends in {endings}, or is a video or image"
    )


def _folder(folder: Path, templates: Sequence[str], columns: Mapping[str, str]) -> Source:
    files = sorted(
        file
        for file in folder.rglob("*")
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    )
    media = [file for file in files if file.suffix.lower() in (*VIDEO_ENDINGS, *IMAGE_ENDINGS)]
    if media:
        return _files(media, folder, templates)
    rows = [file for file in files if file.suffix.lower() in _ROW_ENDINGS]
    if rows:
        return _rows(rows, templates, columns)
    texts = [file for file in files if file.suffix.lower() in TEXT_ENDINGS]
    if texts:
        return _files(texts, folder, templates)
    raise ValueError(f"folder {folder} has no videos, images, texts, parquet or JSONL files")


# Media and text files.


def _files(files: list[Path], folder: Path, templates: Sequence[str]) -> Source:
    captions = _captions(folder) if files[0].suffix.lower() not in TEXT_ENDINGS else {}
    records = [_file_record(file, folder, templates, captions) for file in files]
    facts = [[record.line, os.stat(file).st_size] for record, file in zip(records, files, strict=True)]
    has_media = any(file.suffix.lower() not in TEXT_ENDINGS for file in files)
    return Source(
        records=lambda first: iter(records[first:]),
        total=len(records),
        fingerprint=hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest(),
        has_media=has_media,
        what=f"{len(files)} {'videos and images' if has_media else 'texts'}",
        without_caption=sum(has_media and "caption" not in record.line for record in records),
    )


def _file_record(file: Path, folder: Path, templates: Sequence[str], captions: Mapping[str, str]) -> Record:
    name = file.relative_to(folder).as_posix()
    ending = file.suffix.lower()
    fields: dict[str, Any] = {"path": name}
    if ending in TEXT_ENDINGS:
        questions = file.with_name(f"{file.stem}.questions.jsonl")
        if BOOK in templates and questions.is_file():
            fields["turns"] = [_question(record) for record in read_lines(questions)]
        fields["template"] = list(templates) if len(templates) > 1 else (templates or ["document"])[0]
        return Record(fields, str(file), str(folder), name, str(file))
    kind = "image" if ending in IMAGE_ENDINGS else "video"
    caption = captions.get(name) or captions.get(file.name) or _sidecar(file)
    if caption:
        fields["caption"] = caption
        wanted = [each for each in templates if kind in each] or [f"{kind}->text", f"text->{kind}"]
        fields["template"] = wanted if len(wanted) > 1 else wanted[0]
    else:
        fields["template"] = kind
    return Record(fields, str(file), str(folder), name, str(file))


def _question(record: Record) -> list[str]:
    fields = fields_of(record)
    pair = [fields.get("question"), fields.get("answer")]
    if not all(isinstance(side, str) and side for side in pair):
        raise ValueError(f"{record.place}: needs a question and an answer, two strings; it has {', '.join(fields)}")
    return [str(side) for side in pair]


def _sidecar(file: Path) -> str | None:
    """The caption in `clip.txt` or `clip.json` beside `clip.mp4`."""
    try:
        if (text := file.with_suffix(".txt")).is_file():
            return " ".join(text.read_text(encoding="utf-8").split()) or None
        if (facts := file.with_suffix(".json")).is_file():
            fields = json.loads(facts.read_text(encoding="utf-8"))
            return next((str(fields[key]) for key in _CAPTION_KEYS if fields.get(key)), None)
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"the caption beside {file} cannot be read ({error}); mend or remove it") from None
    return None


def _captions(folder: Path) -> dict[str, str]:
    """File name -> caption from `captions.jsonl`, `captions.csv`, `metadata.jsonl` or `metadata.csv` of the folder."""
    for stem, ending in itertools.product(_CAPTION_FILES, (".jsonl", ".csv")):
        file = folder / f"{stem}{ending}"
        if file.is_file():
            rows: Iterator[tuple[str, Mapping[str, Any]]]
            if ending == ".jsonl":
                rows = ((record.place, fields_of(record)) for record in read_lines(file))
            else:
                rows = _csv_rows(file)
            return dict(_caption_row(place, row) for place, row in rows)
    return {}


def _csv_rows(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with open(file, encoding="utf-8-sig", newline="") as handle:
        for number, row in enumerate(csv.DictReader(handle), start=2):
            yield f"{file} line {number}", row


def _caption_row(place: str, row: Mapping[str, Any]) -> tuple[str, str]:
    name = next((row[key] for key in _NAME_KEYS if row.get(key)), None)
    caption = next((row[key] for key in _CAPTION_KEYS if row.get(key)), None)
    if not isinstance(name, str) or not isinstance(caption, str):
        raise ValueError(
            f"{place}: needs a file's name (one of {', '.join(_NAME_KEYS)}) and its caption (one of "
            f"{', '.join(_CAPTION_KEYS)}); it has {', '.join(map(str, row))}"
        )
    return name, caption


# Rows: manifests, and data sets as Hugging Face has them.


def _rows(files: Sequence[Path], templates: Sequence[str], columns: Mapping[str, str]) -> Source:
    counts = [_count(file) for file in files]
    roles = [_roles(file, columns) for file in files]
    digest = hashlib.sha256()
    for file in files:
        with open(file, "rb") as handle:
            digest.update(hashlib.file_digest(handle, "sha256").digest())
    digest.update(json.dumps([list(templates), dict(columns)], sort_keys=True).encode())

    def records(first: int) -> Iterator[Record]:
        for file, count, role in zip(files, counts, roles, strict=True):
            if first < count:
                yield from _of_file(file, first, role, templates)
            first = max(0, first - count)

    media = any(_has_media(file, role) for file, role in zip(files, roles, strict=True))
    what = f"{sum(counts)} rows of {len(files)} files" if len(files) > 1 else f"{sum(counts)} rows of {files[0].name}"
    return Source(records, sum(counts), digest.hexdigest(), media, what)


def _of_file(file: Path, first: int, roles: Columns | None, templates: Sequence[str]) -> Iterator[Record]:
    if file.suffix.lower() == ".parquet":
        assert roles is not None
        for number, row in _parquet_rows(file, first, roles):
            place, id = f"{file} row {number + 1}", f"{file.stem}:{number + 1}"
            yield _checked_row(row, roles, templates, Record({}, place, str(file.parent), id, str(file)))
        return
    for record in itertools.islice(read_lines(file), first, None):
        # A manifest's line is checked where it is used.
        yield record if roles is None else _checked_row(fields_of(record), roles, templates, record)


def _checked_row(row: Mapping[str, Any], roles: Columns, templates: Sequence[str], base: Record) -> Record:
    """Of a data set of millions, a few rows may be unfit: they are counted, as unreadable files are."""
    try:
        return from_row(row, roles, templates, base)
    except ValueError as error:
        return dataclasses.replace(base, line={}, problem=str(error))


def _roles(file: Path, columns: Mapping[str, str]) -> Columns | None:
    """Which column is what; None for a manifest, whose fields say it themselves."""
    if file.suffix.lower() == ".parquet":
        return roles_of(_parquet(file).schema_arrow.names, columns, str(file))
    first = next(read_lines(file))
    fields = fields_of(first)
    if "spans" in fields or "template" in fields:
        if columns:
            raise ValueError(f"{file} is a manifest: its fields have fixed names, so leave out the columns")
        return None
    return roles_of(list(fields), columns, first.place)


def _has_media(file: Path, roles: Columns | None) -> bool:
    if roles is not None:
        return "path" in roles
    return any('"path"' in str(record.line) for record in read_lines(file))


def _count(file: Path) -> int:
    if file.suffix.lower() == ".parquet":
        return int(_parquet(file).metadata.num_rows)
    return sum(1 for _ in read_lines(file))


def _parquet(file: Path) -> Any:
    import pyarrow
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{file} cannot be read as parquet ({' '.join(str(error).split())[:160]})") from None


def _parquet_rows(file: Path, first: int, roles: Columns) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows from a number on, a few hundred in memory at a time, and only the columns that are used."""
    opened, begin = _parquet(file), 0
    for group in range(opened.num_row_groups):
        count = opened.metadata.row_group(group).num_rows
        if begin + count > first:
            number = begin
            for batch in opened.iter_batches(256, row_groups=[group], columns=list(roles.values())):
                for row in batch.to_pylist():
                    if number >= first:
                        yield number, row
                    number += 1
        begin += count
