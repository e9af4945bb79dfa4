"""The manifest of an evaluation: every case with its prompt, in one file that anybody can be asked from.

The first line says what the cases were made from and their sha256; each other line is one case. The same file asked of
two models is the same evaluation.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eval.protocol import Case, Placed

NAME = "manifest.jsonl"
FORMAT = 1


def fingerprint(cases: Sequence[Case]) -> str:
    """sha256 (hex) of all cases in their order."""
    return hashlib.sha256("\n".join(case.key for case in cases).encode()).hexdigest()


def write(path: str | Path, cases: Sequence[Case], about: Mapping[str, Any]) -> Path:
    """Write cases and what they are `about` (JSON values; such as fingerprints of tokenizers), whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    head = {"format": FORMAT, "sha256": fingerprint(cases), "num_cases": len(cases), **about}
    with partial.open("w", encoding="utf-8") as file:
        file.write(json.dumps(head, ensure_ascii=False) + "\n")
        for case in cases:
            sources = None if case.frame_sources is None else case.frame_sources.tolist()
            record = {**case.describe(), "prompt": _pack(case.prompt), "frame_sources": sources}
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    return path


def read(path: str | Path) -> tuple[dict[str, Any], list[Case]]:
    """What the cases are about, and the cases; ValueError where the file is missing, damaged or was changed."""
    path = Path(path)
    try:
        with path.open(encoding="utf-8") as file:
            head = json.loads(file.readline())
            cases = [_case(json.loads(line)) for line in file]
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); write it with --step build") from error
    except (ValueError, KeyError, TypeError, zlib.error) as error:
        raise ValueError(f"{path} is not a manifest, or is damaged: {error}") from error
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise ValueError(f"{path} is not a manifest of format {FORMAT}")
    if head["sha256"] != fingerprint(cases):
        raise ValueError(f"{path} was changed after it was written: its cases do not have its sha256; build it again")
    return head, cases


def _pack(tokens: np.ndarray) -> str:
    return base64.b64encode(zlib.compress(tokens.astype("<i4").tobytes(), 6)).decode()


def _case(record: Mapping[str, Any]) -> Case:
    prompt = np.frombuffer(zlib.decompress(base64.b64decode(record["prompt"])), "<i4").astype(np.int32)
    sources = record["frame_sources"]
    return Case(
        record["task"],
        record["kind"],
        record["length"],
        record["depth"],
        record["round"],
        prompt,
        record["answer"],
        tuple(Placed(**needle) for needle in record["needles"]),
        record["num_frames"],
        None if sources is None else np.asarray(sources, np.int32),
        tuple(record["answers"]) if record["metric"] != "number" else (),
        record["metric"],
    )
