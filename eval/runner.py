"""Put cases to a model, one JSONL record per case, and never ask the same model the same case twice.

`cases.jsonl` is append-only. A killed run leaves at most one torn last line, which the next run drops.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.text import TextTokenizer
from eval import scoring
from eval.protocol import Case, Model

RECORDS_NAME = "cases.jsonl"
SUMMARY_NAME = "summary.json"


@dataclass(frozen=True)
class Progress:
    """How far a run is. Records found from an earlier run count as done at the start."""

    done: int
    total: int
    correct: int
    seconds: float  # since this run began
    eta_seconds: float | None  # None until the first batch is back

    def __str__(self) -> str:
        share = self.correct / self.done if self.done else 0.0
        text = f"case {self.done}/{self.total} right {share:.0%}"
        if self.eta_seconds is not None:
            minutes, seconds = divmod(round(self.eta_seconds), 60)
            text += f" | eta {minutes}m{seconds:02d}s" if minutes else f" | eta {seconds}s"
        return text


def record_key(case: Case, model_id: str) -> str:
    """sha256 that tells this case put to this model from every other pair."""
    return hashlib.sha256(f"{case.key}\n{model_id}".encode()).hexdigest()


def text_decoder(tokenizer: TextTokenizer) -> Callable[[Sequence[int]], str]:
    """ids -> text for answers, where a model may say anything: each run of ids that are no text becomes one \ufffd."""

    def decode(ids: Sequence[int]) -> str:
        runs = itertools.groupby((int(i) for i in ids), lambda i: 0 <= i < tokenizer.size)
        return "".join(tokenizer.decode(list(run)) if is_text else "\ufffd" for is_text, run in runs)

    return decode


def read_records(path: Path) -> dict[str, dict[str, Any]]:
    """Records by key. A torn last line is cut off the file; a bad line anywhere else is a ValueError."""
    if not path.exists():
        return {}
    content = path.read_bytes()
    records: dict[str, dict[str, Any]] = {}
    start, number = 0, 0
    while start < len(content):
        number += 1
        newline = content.find(b"\n", start)
        end = len(content) if newline < 0 else newline + 1
        record = None if newline < 0 else _parse(content[start:newline])
        if record is None:
            if end < len(content):
                raise ValueError(
                    f"{path}: line {number} is not a record of an evaluation; move the file away or delete that line"
                )
            os.truncate(path, start)
            break
        records[record["key"]] = record
        start = end
    return records


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:  # also UnicodeDecodeError, when a crash left anything at all
        return None
    return record if isinstance(record, dict) and "key" in record else None


def batches(cases: Sequence[Case], *, batch_size: int, batch_tokens: int | None = None) -> Iterator[list[Case]]:
    """Cases grouped by requested length, shortest first: at most batch_size cases and batch_tokens tokens each.

    A case longer than batch_tokens goes alone. The last batch of a length may be smaller.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
    # Real sizes differ by a few tokens within a length; sorted, a batch wastes the least padding.
    for members in scoring.group([{"case": c} for c in cases], lambda r: r["case"].length).values():
        ordered = sorted((m["case"] for m in members), key=lambda c: len(c.prompt))
        longest = len(ordered[-1].prompt)
        size = batch_size if batch_tokens is None else max(1, min(batch_size, batch_tokens // longest))
        for start in range(0, len(ordered), size):
            yield ordered[start : start + size]


def run(
    cases: Sequence[Case],
    model: Model,
    *,
    path: str | Path,
    model_id: str,
    decode: Callable[[Sequence[int]], str],
    stop_id: int,
    max_new_tokens: int = 16,
    batch_size: int = 8,
    batch_tokens: int | None = None,
    progress: Callable[[Progress], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> list[dict[str, Any]]:
    """Answer every case that `path` has no record of, and return the records of all cases in the cases' order.

    model_id: anything that changes when the model's answers may (a checkpoint's fingerprint and step).
    decode: ids -> text (see `text_decoder`). Records of other cases or models in the file stay there untouched.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    records = read_records(path)
    keys = [record_key(case, model_id) for case in cases]
    missing = {key: case for key, case in zip(keys, cases, strict=True) if key not in records}
    key_of = {id(case): key for key, case in missing.items()}

    begin = clock()
    tokens_left = sum(len(case.prompt) for case in missing.values())
    tokens_done = 0
    done = [records[key] for key in keys if key in records]
    correct = sum(scoring.is_right(r) for r in done)
    num_done = len(done)
    total = num_done + len(missing)
    if progress:
        progress(Progress(num_done, total, correct, 0.0, None if missing else 0.0))
    if missing:
        with path.open("ab") as file:
            for batch in batches(list(missing.values()), batch_size=batch_size, batch_tokens=batch_tokens):
                prompts = [case.prompt for case in batch]
                outputs = model.generate(prompts, max_new_tokens=max_new_tokens, stop_id=stop_id)
                if len(outputs) != len(batch):
                    raise ValueError(
                        f"the model gave {len(outputs)} answers to {len(batch)} prompts; it must give one each"
                    )
                for case, ids in zip(batch, outputs, strict=True):
                    record = {
                        "key": key_of[id(case)],
                        "model": model_id,
                        **case.describe(),
                        "output": decode(ids),
                        "output_ids": [int(token) for token in ids],
                    }
                    records[record["key"]] = record
                    correct += scoring.is_right(record)
                    file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
                num_done += len(batch)
                # Long cases come last and cost the most: tokens foretell the rest better than cases do.
                spent = sum(len(prompt) for prompt in prompts)
                tokens_done, tokens_left = tokens_done + spent, tokens_left - spent
                seconds = clock() - begin
                if progress:
                    progress(Progress(num_done, total, correct, seconds, seconds * tokens_left / tokens_done))
    return [records[key] for key in keys]


def write_json(path: str | Path, value: Mapping[str, Any]) -> None:
    """Write JSON whole or not at all; a NaN is an error, since no other reader of JSON takes it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(partial, path)


def evaluate(
    cases: Sequence[Case], model: Model, out_dir: str | Path, *, threshold: float = 0.85, **options: Any
) -> dict[str, Any]:
    """Run, score and write `out_dir/cases.jsonl` and `out_dir/summary.json`; returns the summary.

    options: those of `run` but `path`.
    """
    out_dir = Path(out_dir)
    run(cases, model, path=out_dir / RECORDS_NAME, **options)
    return score(cases, out_dir, model_id=options["model_id"], threshold=threshold)


def score(cases: Sequence[Case], out_dir: str | Path, *, model_id: str, threshold: float = 0.85) -> dict[str, Any]:
    """Score what `out_dir/cases.jsonl` says, and write `out_dir/summary.json`; returns the summary.

    ValueError where a case was not asked yet.
    """
    out_dir = Path(out_dir)
    records = read_records(out_dir / RECORDS_NAME)
    keys = [record_key(case, model_id) for case in cases]
    if missing := [key for key in keys if key not in records]:
        raise ValueError(
            f"{out_dir / RECORDS_NAME} lacks {len(missing)} of {len(keys)} cases of {model_id}; ask it with --step run"
        )
    summary = {"model": model_id, **scoring.summarize([records[key] for key in keys], threshold=threshold)}
    write_json(out_dir / SUMMARY_NAME, summary)
    return summary
