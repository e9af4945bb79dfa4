"""Questions about videos: put to a model one by one, answered by letter or in words, scored plainly and in turns.

A question with options may be asked once for every turn of them (circular evaluation, arXiv 2307.06281): one that is
right in every turn was not guessed from an option's place. A video that cannot be read is a failed case, not the end.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
import string
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from eval import scoring
from eval.qa_formats import LETTERS, Dataset, Question
from eval.runner import RECORDS_NAME, SUMMARY_NAME, read_records, write_json

INSTRUCTION = "Answer with the option's letter from the given choices directly."
OPEN_INSTRUCTION = "Answer with a single word or phrase."
_ENDINGS = ("", ".mp4", ".mkv", ".webm", ".avi", ".mov", ".gif", ".png", ".jpg")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_LETTER = re.compile(r"(?<![A-Za-z])([A-Z])(?![A-Za-z'])")
_LETTER_FIRST = re.compile(
    r"^\s*(?:(?:the )?(?:answer|option)(?: is)?:?\s*)?(?:\(?([A-Za-z])\)?(?=[).:,]|\s*$)|([B-Z])(?=\s))"
)


@dataclass(frozen=True)
class Ask:
    """A text about a video, of which `start` to `end` (seconds) counts; video None: blind, the text alone."""

    id: str
    video: Path | None
    text: str
    start: float | None = None
    end: float | None = None


class VideoModel(Protocol):
    """Whatever answers a question about a video: this project's sampler, a dummy, a client of somebody's server."""

    def answer(self, ask: Ask) -> str:
        """The answer in words.

        ValueError where this one cannot be answered: a failed case. Anything else ends the run, to be gone on with.
        """
        ...


@dataclass(frozen=True)
class Turn:
    """A question with its options in one order; `answer` is the letter, or the text of an open answer."""

    question: Question
    options: tuple[str, ...]
    answer: str | None
    turn: int

    @property
    def text(self) -> str:
        """What is asked, without the video."""
        if not self.options:
            return f"{self.question.question}\n{OPEN_INSTRUCTION}"
        listed = "\n".join(f"{letter}. {option}" for letter, option in zip(LETTERS, self.options, strict=False))
        return f"{self.question.question}\n{listed}\n{INSTRUCTION}"

    @property
    def id(self) -> str:
        return f"{self.question.id}#{self.turn}"


def turns(questions: Iterable[Question], *, circular: bool = False) -> Iterator[Turn]:
    """Every question as it stands, or `circular`ly: once for each place its first option can have."""
    for question in questions:
        count = len(question.options)
        for turn in range(max(1, count) if circular else 1):
            options = question.options[turn:] + question.options[:turn]
            answer = question.answer
            if isinstance(answer, int):
                answer = LETTERS[(answer - turn) % count]
            yield Turn(question, options, answer, turn)


def read_choice(output: str, options: Sequence[str]) -> str | None:
    """The letter that an answer names: first thing in it, alone in it, or by the words of exactly one option."""
    allowed = LETTERS[: len(options)]
    first = _LETTER_FIRST.match(output)
    # An A before other words is an article more often than an answer.
    letter = (first[1] or first[2]) if first else ""
    if letter and letter.upper() in allowed and (letter.isupper() or len(output.strip()) <= 3):
        return letter.upper()
    said, words = normalise(output), [normalise(option) for option in options]
    named = [i for i, word in enumerate(words) if _contains(said, word)]
    # An option within another one is meant only where the longer one is not.
    named = [i for i in named if not any(j != i and _contains(words[j], words[i]) for j in named)]
    if len(named) == 1:
        return LETTERS[named[0]]
    letters = {letter for letter in _LETTER.findall(output) if letter in allowed and letter != "A"}
    letters |= {"A"} if re.search(r"(?<![A-Za-z])A(?=[).:,]|\s*$)", output) else set()
    return letters.pop() if len(letters) == 1 else None


def _contains(text: str, part: str) -> bool:
    return bool(part) and re.search(rf"(?<!\w){re.escape(part)}(?!\w)", text) is not None


def normalise(text: str) -> str:
    """Lower case, without punctuation and articles, one space between words (as for VQA and SQuAD answers)."""
    text = text.lower().translate(str.maketrans(string.punctuation, " " * len(string.punctuation)))
    return " ".join(_ARTICLES.sub(" ", text).split())


def is_right(record: Mapping[str, Any]) -> bool:
    """Whether a record's prediction is its answer."""
    if record["prediction"] is None or record["answer"] is None:
        return False
    if record["options"]:
        return record["prediction"] == record["answer"]
    return normalise(record["prediction"]) == normalise(record["answer"])


def find_video(directory: Path | None, name: str) -> Path:
    """The file called `name`, with or without an ending, in `directory` or below it; ValueError where there is none."""
    if directory is None:
        raise ValueError(f"no folder of videos was given for {name}")
    for ending in _ENDINGS:
        if (directory / f"{name}{ending}").is_file():
            return directory / f"{name}{ending}"
    below = sorted(path for path in directory.rglob(f"{_escaped(Path(name).name)}*") if path.is_file())
    for path in below:
        if path.name == Path(name).name or path.stem == Path(name).name:
            return path
    raise ValueError(f"there is no video {name} in {directory}")


def _escaped(name: str) -> str:
    return re.sub(r"([*?\[])", r"[\1]", name)


def run(
    dataset: Dataset,
    model: VideoModel,
    out_dir: str | Path,
    *,
    videos: Path | None,
    model_id: str,
    circular: bool = False,
    blind: bool = False,
    progress: Callable[[int, int], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Ask everything `out_dir` has no record of, score, and write cases.jsonl, summary.json and the submission.

    blind: the questions without their videos, for the guess rate. model_id: changes when the model's answers may.
    progress: called with (cases done, right so far). Returns the summary.
    """
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    path = out_dir / RECORDS_NAME
    records = read_records(path)
    asked = list(turns(dataset.questions, circular=circular))
    keys = [_key(turn, model_id, blind) for turn in asked]
    right = 0
    with path.open("ab") as file:
        for done, (key, turn) in enumerate(zip(keys, asked, strict=True), 1):
            if key not in records:
                begin = clock()
                record = {"key": key, "model": model_id, "blind": blind, **_ask(turn, model, videos, blind)}
                record["seconds"] = round(clock() - begin, 3)
                file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
                records[key] = record
            right += is_right(records[key])
            if progress:
                progress(done, right)
    wanted = [records[key] for key in keys]
    summary = {"model": model_id, "format": dataset.format, "blind": blind, **summarize(wanted)}
    write_json(out_dir / SUMMARY_NAME, summary)
    write_submission(out_dir, dataset.format, wanted)
    return summary


def _key(turn: Turn, model_id: str, blind: bool) -> str:
    question = turn.question
    parts = (question.id, question.video, turn.text, turn.answer, turn.turn, question.start, question.end)
    return hashlib.sha256(repr((*parts, model_id, blind)).encode()).hexdigest()


def _ask(turn: Turn, model: VideoModel, videos: Path | None, blind: bool) -> dict[str, Any]:
    question = turn.question
    record: dict[str, Any] = {
        "id": question.id,
        "turn": turn.turn,
        "series": question.series if question.series is not None else question.id,
        "video": question.video,
        "question": question.question,
        "options": list(turn.options),
        "answer": turn.answer,
        "groups": dict(question.groups),
        "output": None,
        "prediction": None,
        "error": None,
    }
    try:
        video = None if blind else find_video(videos, question.video)
        output = model.answer(Ask(turn.id, video, turn.text, question.start, question.end))
    except ValueError as error:
        return record | {"error": " ".join(str(error).split())}
    prediction = read_choice(output, turn.options) if turn.options else output.strip()
    return record | {"output": output, "prediction": prediction}


def summarize(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Everything a report shows, as JSON values.

    `accuracy`, its Wilson `interval` and `groups` are over every case that has an answer; `circular_accuracy` over
    series of turns, all of which must be right (None where nothing was asked in turns). Errors and answers that name no
    option are wrong, and counted. Without any answers the accuracies are None.
    """
    known = [record for record in records if record["answer"] is not None]
    series: dict[str, list[bool]] = {}
    for record in known:
        series.setdefault(record["series"], []).append(is_right(record))
    turned = [all(each) for each in series.values() if len(each) > 1]
    by_group: dict[str, dict[str, Any]] = {}
    for name in sorted({name for record in known for name in record["groups"]}):
        values: dict[str, list[bool]] = {}
        for record in known:
            if name in record["groups"]:
                values.setdefault(record["groups"][name], []).append(is_right(record))
        by_group[name] = {value: _tally(values[value]) for value in sorted(values)}
    chances = [1 / len(record["options"]) for record in known if record["options"]]
    overall = _tally([is_right(record) for record in known])
    return {
        "accuracy": overall["accuracy"],
        "interval": [overall["low"], overall["high"]],
        "num_cases": len(records),
        "num_answered": sum(record["prediction"] is not None for record in records),
        "num_errors": sum(record["error"] is not None for record in records),
        "chance": sum(chances) / len(known) if known else None,
        "circular_accuracy": sum(turned) / len(turned) if turned else None,
        "circular": _tally(turned) if turned else None,
        "groups": by_group,
        "errors": [{"id": r["id"], "error": r["error"]} for r in records if r["error"] is not None][:20],
    }


def _tally(right: Sequence[bool]) -> dict[str, Any]:
    low, high = scoring.wilson(sum(right), len(right))
    accuracy = sum(right) / len(right) if right else None
    return {"correct": sum(right), "total": len(right), "accuracy": accuracy, "low": low, "high": high}


def write_submission(out_dir: Path, format: str, records: Sequence[Mapping[str, Any]]) -> Path:
    """The predictions of the unturned questions, as the benchmark's server takes them where it says how.

    EgoSchema: submission.csv of q_uid and the option's index, 0 where there is no prediction. Others: submission.json,
    a list of {id, video, prediction}; the prediction is a letter, or the text of an open answer.
    """
    plain = [record for record in records if record["turn"] == 0]
    if format == "EgoSchema":
        path = out_dir / "submission.csv"
        partial = path.with_name(f".{path.name}.partial")
        with partial.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["q_uid", "answer"])
            for record in plain:
                prediction = record["prediction"]
                writer.writerow([record["id"], 0 if prediction is None else LETTERS.index(prediction)])
        os.replace(partial, path)
        return path
    path = out_dir / "submission.json"
    rows = [{"id": r["id"], "video": r["video"], "prediction": r["prediction"]} for r in plain]
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(partial, path)
    return path


class Dummy:
    """Answers without looking: "oracle" knows every answer, "random" draws an option, "first-k" says the first one."""

    def __init__(self, name: str, dataset: Dataset, *, circular: bool = False, seed: int = 0):
        if name not in ("oracle", "random", "first-k"):
            raise ValueError(f"unknown model {name!r}; the models that need no checkpoint are oracle, random, first-k")
        self._name, self._seed = name, seed
        self._turns = {turn.id: turn for turn in turns(dataset.questions, circular=circular)}

    def answer(self, ask: Ask) -> str:
        turn = self._turns[ask.id]
        if self._name == "oracle" and turn.answer is not None:
            return turn.answer
        if not turn.options:
            return "nothing"
        if self._name == "first-k":
            return "A"
        digest = hashlib.sha256(f"{self._seed} {ask.id}".encode()).digest()
        return LETTERS[int(np.random.default_rng(list(digest)).integers(len(turn.options)))]
