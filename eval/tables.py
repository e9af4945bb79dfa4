"""The numbers of an evaluation as CSV, for spreadsheets and other plotting programs."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eval import scoring

CELLS_NAME = "cells.csv"
CASES_NAME = "cases.csv"
_CELLS = (
    "length",
    "depth",
    "correct",
    "total",
    "accuracy",
    "low",
    "high",
    "digit_accuracy",
    "num_tokens",
    "real_depth",
)
_CASES = ("case", "model", "task", "kind", "length", "num_tokens", "depth", "real_depth", "token_position", "frame",
          "num_frames", "round", "answer", "output", "score")  # fmt: skip


def write_csv(out_dir: Path, summary: Mapping[str, Any], records: Iterable[Mapping[str, Any]]) -> list[Path]:
    """`cells.csv`, the grid of the single needles, and `cases.csv`, every case of the summary's model; returns them."""
    mine = [{**r, "score": scoring.score(r)} for r in records if r["model"] == summary["model"]]
    _write(out_dir / CELLS_NAME, _CELLS, summary["cells"])
    _write(out_dir / CASES_NAME, _CASES, mine)
    return [out_dir / CELLS_NAME, out_dir / CASES_NAME]


def _write(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    os.replace(partial, path)
