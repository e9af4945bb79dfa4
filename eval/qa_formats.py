"""Video question files of other people's benchmarks, each read into the same record; the format shows in its fields.

JSON (a list, or an object of lists), JSONL or CSV. See `FORMATS` for what is known.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_LETTERED = re.compile(r"^\s*\(?([A-Z])[).:]\s*(.*)$", re.DOTALL)


@dataclass(frozen=True)
class Question:
    """One question about one video.

    video: its name, with or without ending. options: none for an open question. answer: an index into options, the text
    of an open answer, or None where the file does not tell. groups: what results are split by. series: questions of
    one series are the same one with its options turned, and count as right together only. start, end: seconds.
    """

    id: str
    video: str
    question: str
    options: tuple[str, ...] = ()
    answer: int | str | None = None
    groups: Mapping[str, str] = field(default_factory=dict)
    series: str | None = None
    start: float | None = None
    end: float | None = None


@dataclass(frozen=True)
class Dataset:
    """The questions of a file, and the name of its format."""

    format: str
    questions: tuple[Question, ...]


def read_questions(path: str | Path, answers: str | Path | None = None) -> Dataset:
    """Read a file of questions; `answers` is the file that some formats keep them in.

    For `..._q.json` the file `..._a.json` beside it is taken where `answers` is None. Raises ValueError that names the
    file and the row for what cannot be read, a format that is not known, or an id that appears twice.
    """
    path = Path(path)
    rows = _rows(path)
    if not rows:
        raise ValueError(f"{path} has no questions")
    name = next((name for name, (fields, _) in FORMATS.items() if all(_has(rows[0], each) for each in fields)), None)
    if name is None:
        raise ValueError(
            f"{path}: rows with the fields {', '.join(rows[0])} are of no known format; known are {', '.join(FORMATS)}"
        )
    if answers is None and name == "open" and path.stem.endswith("_q"):
        beside = path.with_name(f"{path.stem[:-2]}_a{path.suffix}")
        answers = beside if beside.exists() else None
    given = {} if answers is None else _answers(Path(answers))
    questions: list[Question] = []
    for number, row in enumerate(rows, 1):
        try:
            questions += FORMATS[name][1](row, given)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{path}: row {number} is not a question of the format {name}: {reason}") from error
    seen: set[str] = set()
    for question in questions:
        if question.id in seen:
            raise ValueError(f"{path}: the id {question.id!r} appears twice; ids must be unique")
        seen.add(question.id)
    return Dataset(name, tuple(questions))


def _rows(path: Path) -> list[Row]:
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix.lower() in (".csv", ".tsv"):
            return list(csv.DictReader(text.splitlines(), delimiter="\t" if path.suffix.lower() == ".tsv" else ","))
        if path.suffix.lower() == ".jsonl":
            return [json.loads(line) for line in text.splitlines() if line.strip()]
        content = json.loads(text)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if isinstance(content, Mapping):
        lists = [value for value in content.values() if isinstance(value, list)]
        content = lists[0] if len(lists) == 1 else content
    if not isinstance(content, list) or not all(isinstance(row, Mapping) for row in content):
        raise ValueError(f"{path} must hold a list of objects, and holds something else")
    return content


def _answers(path: Path) -> dict[str, Any]:
    """{id: answer}, or rows with question_id and answer (and what else there is, such as the type)."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if isinstance(content, Mapping):
        return dict(content)
    try:
        return {str(row["question_id"]): row for row in content}
    except (KeyError, TypeError):
        raise ValueError(f"{path} must hold {{id: answer}} or rows with question_id and answer") from None


def _has(row: Row, field: str) -> bool:
    """`a|b`: either of them."""
    return any(name in row for name in field.split("|"))


def _text(row: Row, *names: str) -> str:
    for name in names:
        if row.get(name) not in (None, ""):
            return str(row[name]).strip()
    raise KeyError(names[0])


def _groups(row: Row, **names: str) -> dict[str, str]:
    """group name -> value, of those the row has."""
    return {group: str(row[name]) for group, name in names.items() if row.get(name) not in (None, "")}


def _option(text: Any) -> str:
    """An option without the letter it may begin with."""
    lettered = _LETTERED.match(str(text))
    return (lettered[2] if lettered else str(text)).strip()


def _options(value: Any) -> tuple[str, ...]:
    """A list, or a string that holds one, as tables have it."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = [part for part in value.splitlines() if part.strip()]
    if not isinstance(value, Sequence) or len(value) < 2 or len(value) > len(LETTERS):
        raise ValueError(f"options are {value!r}; there must be 2 to {len(LETTERS)}")
    return tuple(map(_option, value))


def _index(answer: Any, options: tuple[str, ...]) -> int | None:
    """The option that an answer names: by index if it is an int, else by its text or its letter."""
    if answer is None or answer == "":
        return None
    text = str(answer).strip()
    if isinstance(answer, int):
        index = answer
    elif text in options:
        return options.index(text)
    elif re.fullmatch(r"\(?[A-Z]\)?\.?", text):
        index = LETTERS.index(text.strip("()."))
    elif _option(text) in options:
        index = options.index(_option(text))
    else:
        raise ValueError(f"the answer {answer!r} is none of the options {list(options)}")
    if not 0 <= index < len(options):
        raise ValueError(f"the answer {answer!r} is beyond the {len(options)} options")
    return index


def _time(row: Row, name: str) -> float | None:
    return None if row.get(name) in (None, "") else float(row[name])


def _video_mme(row: Row, _: Mapping[str, Any]) -> Iterator[Question]:
    about = _groups(row, duration="duration", domain="domain", sub_category="sub_category")
    for each in row["questions"]:
        yield _video_mme_one({**row, **each}, about)


def _video_mme_flat(row: Row, _: Mapping[str, Any]) -> Iterator[Question]:
    yield _video_mme_one(row, _groups(row, duration="duration", domain="domain", sub_category="sub_category"))


def _video_mme_one(row: Row, about: Mapping[str, str]) -> Question:
    options = _options(row["options"])
    groups = {**about, **_groups(row, task_type="task_type")}
    answer = _index(row.get("answer"), options)
    # The table calls the file by videoID, and video_id counts the videos.
    video = _text(row, "videoID", "video_id")
    return Question(_text(row, "question_id"), video, _text(row, "question"), options, answer, groups)


def _mvbench(row: Row, _: Mapping[str, Any]) -> Iterator[Question]:
    options = tuple(map(str, row["candidates"]))
    video, question = _text(row, "video"), _text(row, "question")
    span = (_time(row, "start"), _time(row, "end"))
    identity = str(row.get("question_id") or f"{video}/{question}" + (f"/{span[0]}" if span[0] is not None else ""))
    groups = _groups(row, task_type="task_type")
    yield Question(identity, video, question, options, _index(row.get("answer"), options), groups, None, *span)


def _long_video_bench(row: Row, _: Mapping[str, Any]) -> Iterator[Question]:
    options = tuple(map(str, row["candidates"]))
    choice = row.get("correct_choice")
    answer = None if choice in (None, "", -1, "-1") else _index(int(choice), options)
    groups = _groups(row, duration_group="duration_group", question_category="question_category")
    video, question = _text(row, "video_path"), _text(row, "question")
    yield Question(str(row.get("id") or f"{video}/{question}"), video, question, options, answer, groups)


def _ego_schema(row: Row, answers: Mapping[str, Any]) -> Iterator[Question]:
    numbers = sorted(int(name.split()[1]) for name in row if re.fullmatch(r"option \d+", name))
    options = tuple(str(row[f"option {number}"]) for number in numbers)
    identity = _text(row, "q_uid")
    answer = answers.get(identity, row.get("answer"))
    answer = None if answer in (None, "") else int(answer)
    yield Question(identity, identity, _text(row, "question"), options, _index(answer, options))


def _next_qa(row: Row, _: Mapping[str, Any]) -> Iterator[Question]:
    options = tuple(str(row[name]) for name in sorted(name for name in row if re.fullmatch(r"a\d", str(name))))
    video = _text(row, "video")
    identity = f"{video}/{_text(row, 'qid', 'question')}"
    answer = row.get("answer")
    yield Question(
        identity,
        video,
        _text(row, "question"),
        options,
        None if answer in (None, "") else _index(int(answer), options),
        _groups(row, type="type"),
    )


def _open(row: Row, answers: Mapping[str, Any]) -> Iterator[Question]:
    identity = _text(row, "question_id")
    known = answers.get(identity, row)
    known = known if isinstance(known, Mapping) else {"answer": known}
    answer = known.get("answer")
    yield Question(
        identity,
        _text(row, "video_name"),
        _text(row, "question"),
        (),
        None if answer in (None, "") else str(answer),
        _groups(known, type="type"),
    )


def _vnbench(row: Row, _: Mapping[str, Any]) -> Iterator[Question]:
    options = tuple(map(str, row["options"]))
    video, question = _text(row, "video"), _text(row, "question")
    series = f"{video}/{question}"
    identity = f"{series}/{row.get('try', 0)}"
    yield Question(
        identity, video, question, options, _index(str(row["gt"]), options), _groups(row, type="type"), series
    )


# Name -> (fields of a row that tell it, its reader); the first that fits is taken.
FORMATS: dict[str, tuple[tuple[str, ...], Callable[[Row, Mapping[str, Any]], Iterator[Question]]]] = {
    "Video-MME": (("video_id", "questions"), _video_mme),
    "Video-MME table": (("video_id", "question_id", "question", "options"), _video_mme_flat),
    "LongVideoBench": (("video_path", "candidates", "question"), _long_video_bench),
    "MVBench": (("video", "question", "candidates"), _mvbench),
    "EgoSchema": (("q_uid", "question", "option 0"), _ego_schema),
    "VNBench": (("video", "question", "options", "gt"), _vnbench),
    "NExT-QA": (("video", "question", "a0", "a1"), _next_qa),
    "open": (("video_name", "question", "question_id"), _open),
}
