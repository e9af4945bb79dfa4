"""The run's report: report.json, and report.html that shows it, in one file that needs nothing else to be read.

`write` takes what was measured as a dict and the pictures as files. Sections whose key is missing are left out, so the
report of a run that stopped early shows what there is.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from eval import plots
from eval.plots import Picture, StageCurve, percent, short_count
from eval.runner import write_json

JSON_NAME = "report.json"
HTML_NAME = "report.html"
NEEDLES = {"needle_text": "Needle in text", "needle_video": "Needle in video"}

_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --card: #f6f8fa; --ink: #1b1f24; --muted: #626b76; --rule: #d5dae0;
  --accent: #1d5c96; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171b; --card: #1c2026; --ink: #e8ebef; --muted: #9aa4b0;
  --rule: #3a414a; --accent: #7fb8e6; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2.5rem 1.5rem 4rem; max-width: 68rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.7rem; margin: 0 0 .2rem; line-height: 1.2; }
h2 { font-size: 1.2rem; margin: 2.8rem 0 .8rem; }
h3 { font-size: 1rem; margin: 1.6rem 0 .5rem; }
p { margin: .4rem 0; } .muted, figcaption, summary { color: var(--muted); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(13rem, 1fr)); gap: .8rem; margin: 1.6rem 0 0; }
.tile { background: var(--card); border-radius: .6rem; padding: .9rem 1.1rem; }
.tile b { display: block; font-size: 1.8rem; line-height: 1.25; color: var(--accent); }
.tile span { display: block; font-size: .9rem; } .tile .muted { font-size: .82rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .38rem .8rem; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th { font-weight: 600; color: var(--muted); } th:first-child, td:first-child, .left { text-align: left; }
.pair { display: flex; flex-wrap: wrap; gap: 1.5rem; align-items: flex-start; }
figure { margin: 1rem 0; } figure img { max-width: 100%; height: auto; display: block; border-radius: .4rem; }
figcaption { font-size: .85rem; margin-top: .4rem; }
td .bar { height: .7rem; min-width: 2px; background: var(--accent); border-radius: .2rem; }
td.wide { width: 60%; } details { margin: .8rem 0; } code { font-size: .92em; }
"""


def write(
    out_dir: str | Path,
    report: Mapping[str, Any],
    *,
    title: str = "Training report",
    curves: Sequence[StageCurve] = (),
    pictures: Iterable[Picture] = (),
) -> Path:
    """Write report.json, the charts and report.html under out_dir; returns the page's path.

    report: stages (list of {name, seq_len, steps, tokens, loss_first, loss_last, mesh, layout, strategy}), needle_text
    and needle_video (as `scoring.summarize` returns them), packing_efficiency, vqgan {psnr_db, codes_used},
    wall_seconds by phase, peak_rss_mb, versions; and if wanted answers (list of {source, question, answer}). All JSON
    values.
    curves: the loss of each stage. pictures: shown after the needles, in order (see eval/pages.py).
    """
    out_dir = Path(out_dir)
    write_json(out_dir / JSON_NAME, report)
    charts = {
        key: plots.heatmap(out_dir / key, report[key], title=name)
        for key, name in NEEDLES.items()
        if report.get(key, {}).get("cells")
    }
    loss = [plots.loss_curves(out_dir / "loss", curves)] if any(len(curve.steps) for curve in curves) else []
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="muted">{escape(_subtitle(report))}</p>',
        _tiles(report),
        _stages(report.get("stages", []), loss),
        _needles(report, charts),
        _answers(report.get("answers", [])),
        _pictures(pictures),
        _seconds(report.get("wall_seconds", {})),
        _versions(report.get("versions", {})),
    ]
    page = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + "\n</body>\n</html>\n"
    )
    path = out_dir / HTML_NAME
    path.write_text(page, encoding="utf-8")
    return path


def duration(seconds: float) -> str:
    """8.2 s, 1 min 05 s, 3 h 12 min."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def interval(low: float, high: float) -> str:
    """A 95% interval of shares in percent: 91–100%."""
    return f"{100 * low:.0f}–{100 * high:.0f}%"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = ()) -> str:
    """A table of ready HTML cells; columns in `left`, and the first, are aligned left."""
    classes = ['class="left"' if index in left else "" for index in range(len(head))]

    def row(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag} {c}>{v}</{tag}>" for c, v in zip(classes, cells, strict=True)) + "</tr>"

    lines = [row("th", head), *(row("td", cells) for cells in rows)]
    return '<div class="scroll"><table>' + "\n".join(lines).replace(" >", ">") + "</table></div>"


def _embedded(path: Path) -> str:
    kind = "svg+xml" if path.suffix == ".svg" else path.suffix.removeprefix(".").replace("jpg", "jpeg")
    return f"data:image/{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def _figure(picture: Picture) -> str:
    dark = ""
    if picture.dark:
        dark = f'<source media="(prefers-color-scheme: dark)" srcset="{_embedded(picture.dark)}">'
    image = f'<img alt="{escape(picture.title)}" src="{_embedded(picture.vector or picture.path)}">'
    return f"<figure><picture>{dark}{image}</picture><figcaption>{escape(picture.caption)}</figcaption></figure>"


def _subtitle(report: Mapping[str, Any]) -> str:
    parts = []
    if stages := report.get("stages"):
        lengths = " → ".join(short_count(stage["seq_len"]) for stage in stages)
        parts.append(f"{len(stages)} context stages ({lengths} tokens)")
        parts.append(f"{short_count(sum(stage['tokens'] for stage in stages))} tokens trained")
    if seconds := report.get("wall_seconds"):
        parts.append(duration(sum(seconds.values())))
    return ", ".join(parts)


def _tiles(report: Mapping[str, Any]) -> str:
    tiles: list[tuple[str, str, str]] = []
    for key, name in NEEDLES.items():
        by_length = report.get(key, {}).get("accuracy_by_length", {})
        if by_length:
            longest = max(by_length, key=int)
            counts = report[key].get("by_length", {}).get(longest)
            note = "exact answers"
            if counts:
                note = (
                    f"{counts['correct']} of {counts['total']}, 95% interval {interval(counts['low'], counts['high'])}"
                )
            tiles.append((percent(by_length[longest]), f"{name}, {short_count(int(longest))} tokens", note))
    guesses = [
        report[key]["control_accuracy"] for key in NEEDLES if report.get(key, {}).get("control_accuracy") is not None
    ]
    if guesses:
        tiles.append((percent(max(guesses)), "Without the needle", "no-needle and blind controls, the worse task"))
    if (share := report.get("packing_efficiency")) is not None:
        tiles.append((percent(share), "Packing efficiency", "slots that hold real tokens"))
    if vqgan := report.get("vqgan"):
        note = f"{vqgan['codes_used']} codes used" if "codes_used" in vqgan else ""
        tiles.append((f"{vqgan['psnr_db']:.1f} dB", "Vision tokenizer PSNR", note))
    if (memory := report.get("peak_rss_mb")) is not None:
        tiles.append((f"{memory / 1024:.1f} GB", "Peak memory", "resident, of the whole run"))
    cards = (
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span>'
        f'<span class="muted">{escape(note)}</span></div>'
        for value, name, note in tiles
    )
    return f'<div class="tiles">{"".join(cards)}</div>' if tiles else ""


def _mesh(mesh: Any) -> str:
    if not isinstance(mesh, Mapping):
        return escape(str(mesh))
    return " × ".join(f"{escape(str(axis))} {size}" for axis, size in mesh.items() if size != 1) or "1 device"


def _stages(stages: Sequence[Mapping[str, Any]], loss: Sequence[Picture]) -> str:
    if not stages and not loss:
        return ""
    rows = [
        (
            escape(stage["name"]),
            f"{stage['seq_len']:,}",
            f"{stage['steps']:,}",
            f"{stage['tokens']:,}",
            f"{stage['loss_first']:.3f} → {stage['loss_last']:.3f}",
            _mesh(stage["mesh"]),
            escape(stage["layout"]),
            escape(stage["strategy"]),
        )
        for stage in stages
    ]
    head = ("stage", "sequence", "steps", "tokens", "loss, first → last", "mesh", "layout", "attention")
    table = _table(head, rows, left=(5, 6, 7)) if rows else ""
    return "<h2>Training</h2>" + table + "".join(_figure(picture) for picture in loss)


def _needles(report: Mapping[str, Any], charts: Mapping[str, Picture]) -> str:
    parts = [
        _needle(report[key], name) for key, name in NEEDLES.items() if report.get(key, {}).get("accuracy_by_length")
    ]
    figures = "".join(_figure(picture) for picture in charts.values())
    if not parts:
        return ""
    return f'<h2>Needles</h2><div class="pair">{figures}</div>' + "".join(parts)


def _needle(summary: Mapping[str, Any], name: str) -> str:
    by_length = summary.get("by_length", {})
    crowded = summary.get("distractor_accuracy_by_length", {})
    rows = []
    for length in sorted(summary["accuracy_by_length"], key=int):
        counts = by_length.get(length)
        row = [f"{int(length):,} tokens", percent(summary["accuracy_by_length"][length])]
        row += (
            [f"{counts['correct']}/{counts['total']}", interval(counts["low"], counts["high"])] if counts else ["", ""]
        )
        if crowded:
            row.append(percent(crowded[length]) if length in crowded else "")
        rows.append(row)
    for kind, words in (("no_needle", "no needle in the haystack"), ("blind", "question alone")):
        if counts := summary.get("controls", {}).get(kind):
            row = [f"control: {words}", percent(counts["accuracy"]), f"{counts['correct']}/{counts['total']}"]
            rows.append([*row, interval(counts["low"], counts["high"]), *([""] if crowded else [])])
    head = ["", "right", "cases", "95% interval", *(["with distractors"] if crowded else [])]
    notes = []
    if effective := summary.get("effective_context_length"):
        bar = percent(summary.get("effective_threshold", 0.85))
        notes.append(f"Effective context length: {effective:,} tokens (at least {bar} right up to there).")
    if (chance := summary.get("chance")) is not None:
        notes.append(f"A guess is right with probability {chance:g}.")
    if (digits := summary.get("control_digit_accuracy")) is not None:
        notes.append(f"Controls have {percent(digits)} of single digits right; guessing gives 10%.")
    missed = ""
    if failures := summary.get("failures"):
        failed = [
            (f"{f['length']:,}", percent(f["depth"]), escape(f["answer"]), f"<code>{escape(f['output'])}</code>")
            for f in failures
        ]
        table = _table(("length", "depth", "right answer", "the model's"), failed, left=(3,))
        missed = f"<details><summary>{len(failed)} wrong answers</summary>{table}</details>"
    return f'<h3>{escape(name)}</h3>{_table(head, rows)}<p class="muted">{" ".join(notes)}</p>{missed}'


def _answers(answers: Sequence[Mapping[str, Any]]) -> str:
    if not answers:
        return ""
    rows = [[escape(str(a.get(field, ""))) for field in ("source", "question", "answer")] for a in answers]
    return "<h2>Questions and answers</h2>" + _table(("about", "question", "answer"), rows, left=(1, 2))


def _pictures(pictures: Iterable[Picture]) -> str:
    figures = "".join(_figure(picture) for picture in pictures)
    return f"<h2>Pictures</h2>{figures}" if figures else ""


def _seconds(seconds: Mapping[str, float]) -> str:
    if not seconds:
        return ""
    most = max(*seconds.values(), 1e-9)
    rows = [
        (escape(phase), duration(value), f'<div class="bar" style="width:{100 * value / most:.1f}%"></div>')
        for phase, value in seconds.items()
    ]
    rows.append(("<b>together</b>", f"<b>{duration(sum(seconds.values()))}</b>", ""))
    table = _table(("phase", "time", ""), rows).replace('<td><div class="bar"', '<td class="wide"><div class="bar"')
    return "<h2>Time</h2>" + table


def _versions(versions: Mapping[str, str]) -> str:
    if not versions:
        return ""
    listed = ", ".join(f"{escape(str(name))} {escape(str(version))}" for name, version in versions.items())
    return f'<h2>Versions</h2><p class="muted">{listed}</p>'
