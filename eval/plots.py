"""Charts: accuracy over length and depth, loss over steps. Every chart is written as PNG, SVG and SVG for dark pages.

Figures are built as objects; nothing touches pyplot or any other state that outlives a call. Colours run from vermilion
to blue, which every common kind of colour blindness tells apart, and every cell also says its number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

ACCURACY = LinearSegmentedColormap.from_list(
    "accuracy", ["#a63603", "#e6803c", "#f4d3b0", "#bcd7ea", "#5a9bc9", "#1d5c96"]
)
_DPI = 160


@dataclass(frozen=True)
class Theme:
    """Colours of one page background; charts themselves are transparent in SVG."""

    paper: str
    ink: str
    muted: str
    rule: str
    band: str
    lines: tuple[str, str, str]  # all, text, vision


LIGHT = Theme("#ffffff", "#1b1f24", "#626b76", "#d5dae0", "#f1f4f7", ("#1d5c96", "#b8860b", "#12805c"))
DARK = Theme("#14171b", "#e8ebef", "#9aa4b0", "#3a414a", "#1f242a", ("#7fb8e6", "#e3b95a", "#62c9a3"))


@dataclass(frozen=True)
class Picture:
    """A picture on disk for the report. dark: the same for dark pages; vector: the same as SVG."""

    path: Path
    title: str
    caption: str = ""
    vector: Path | None = None
    dark: Path | None = None


@dataclass(frozen=True)
class StageCurve:
    """Loss of one training stage. losses: float [n], one per logged step; text and vision may be missing."""

    name: str
    seq_len: int
    rope_theta: float
    steps: Sequence[int]  # steps within the stage, ascending
    losses: Sequence[float]
    text_losses: Sequence[float] | None = None
    vision_losses: Sequence[float] | None = None


def short_count(value: float) -> str:
    """512, 4K, 1M: powers of two keep their usual names, other numbers are rounded to three digits."""
    for unit, size, decimal in (("M", 2**20, 1e6), ("K", 2**10, 1e3)):
        if value >= size and value % size == 0:
            return f"{value / size:.0f}{unit}"
        if value >= decimal:
            return f"{value / decimal:.3g}{unit}"
    return f"{value:g}"


def percent(value: float) -> str:
    """0.5 -> 50%. Rounds towards the middle, so that only a perfect score reads 100% and only none reads 0%."""
    rounded = round(100 * value)
    if rounded == 100 and value < 1:
        return f"{np.floor(1000 * value) / 10:g}%"
    if rounded == 0 and value > 0:
        return "<1%"
    return f"{rounded}%"


def _save(draw: Any, stem: Path, title: str, caption: str) -> Picture:
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = {theme: stem.with_name(f"{stem.name}{suffix}.svg") for theme, suffix in ((LIGHT, ""), (DARK, "-dark"))}
    for theme, path in paths.items():
        # The date would make every run's file differ.
        draw(theme).savefig(path, transparent=True, metadata={"Date": None})
    png = stem.with_name(f"{stem.name}.png")
    draw(LIGHT).savefig(png, dpi=_DPI, facecolor=LIGHT.paper)
    return Picture(png, title, caption, vector=paths[LIGHT], dark=paths[DARK])


def _bare(axes: Axes) -> None:
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.patch.set_visible(False)


def _tile(axes: Axes, x: float, y: float, theme: Theme, counts: Mapping[str, Any] | None, size: float) -> None:
    """One rounded cell, centred at (x, y) in units of cells, with its accuracy and its counts."""
    value = None if counts is None else counts["accuracy"]
    shape = "round,pad=0,rounding_size=0.07"
    face = to_rgb(theme.band if value is None else ACCURACY(value))
    axes.add_patch(FancyBboxPatch((x - 0.47, y - 0.46), 0.94, 0.92, boxstyle=shape, linewidth=0, facecolor=face))
    if counts is None or value is None:
        axes.text(x, y, "–", ha="center", va="center", fontsize=size, color=theme.muted)
        return
    red, green, blue = face
    ink = "#1b1f24" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.55 else "#ffffff"
    detailed = size >= 9
    axes.text(
        x,
        y - (0.1 if detailed else 0),
        percent(value),
        ha="center",
        va="center",
        fontsize=size,
        color=ink,
        weight="bold",
    )
    if detailed:
        counted = f"{counts['correct']}/{counts['total']}"
        axes.text(x, y + 0.24, counted, ha="center", va="center", fontsize=size * 0.68, color=ink, alpha=0.85)


def heatmap(
    stem: str | Path, summary: Mapping[str, Any], *, title: str, cells: str = "cells", unit: str = "tokens"
) -> Picture:
    """Accuracy over context length (across) and needle depth (down), with a row for all depths together.

    summary: what `scoring.summarize` returns; cells: "cells" or "distractor_cells". Writes stem.png, stem.svg and
    stem-dark.svg. A cell of the grid without cases shows a dash.
    """
    grid = {(c["length"], c["depth"]): c for c in summary[cells]}
    if not grid:
        raise ValueError(
            f"summary.{cells} is empty: there is nothing to draw; run at least one case with a needle first"
        )
    lengths = sorted({length for length, _ in grid})
    depths = sorted({depth for _, depth in grid})
    columns: dict[int, dict[str, Any]] = {}
    for length in lengths:
        members = [grid[length, depth] for depth in depths if (length, depth) in grid]
        correct, total = (sum(m[field] for m in members) for field in ("correct", "total"))
        columns[length] = {"correct": correct, "total": total, "accuracy": correct / total}
    num_cases = sum(c["total"] for c in columns.values())
    num_right = sum(c["correct"] for c in columns.values())

    # Sizes in inches: a cell shrinks only when there are many.
    width = min(1.05, 11 / len(lengths))
    height = min(0.62, 7 / len(depths))
    size = min(12.0, 13.5 * width, 20 * height)
    left, right, top, bottom, gap = 0.85, 1.0, 0.95, 0.62, 0.14
    grid_width, grid_height = width * len(lengths), height * len(depths)
    page_width = max(left + grid_width + right, 4.6)
    page_height = top + grid_height + gap + height + bottom

    def draw(theme: Theme) -> Figure:
        figure = Figure(figsize=(page_width, page_height))

        def place(x: float, y: float, w: float, h: float) -> Axes:
            return figure.add_axes((x / page_width, 1 - (y + h) / page_height, w / page_width, h / page_height))

        figure.text(0.2 / page_width, 1 - 0.22 / page_height, title, va="top", size=13, weight="bold", color=theme.ink)
        counted = f"{percent(num_right / num_cases)} of {num_cases} answers right"
        figure.text(0.2 / page_width, 1 - 0.54 / page_height, counted, va="top", size=9.5, color=theme.muted)

        main = place(left, top, grid_width, grid_height)
        for x, length in enumerate(lengths):
            for y, depth in enumerate(depths):
                _tile(main, x, y, theme, grid.get((length, depth)), size)
        main.set(xlim=(-0.5, len(lengths) - 0.5), ylim=(len(depths) - 0.5, -0.5), xticks=[], yticks=range(len(depths)))
        main.set_yticklabels([percent(depth) for depth in depths], color=theme.muted, size=9)
        main.set_ylabel("needle depth", color=theme.ink, size=9.5, labelpad=5)
        _bare(main)

        row = place(left, top + grid_height + gap, grid_width, height)
        for x, length in enumerate(lengths):
            _tile(row, x, 0, theme, columns[length], size)
        row.set(xlim=(-0.5, len(lengths) - 0.5), ylim=(0.5, -0.5), xticks=range(len(lengths)), yticks=[0])
        row.set_yticklabels(["all"], color=theme.muted, size=9)
        row.set_xticklabels([short_count(length) for length in lengths], color=theme.muted, size=9)
        row.set_xlabel(f"context length ({unit})", color=theme.ink, size=9.5, labelpad=5)
        _bare(row)

        bar = place(left + grid_width + 0.22, top, 0.13, max(grid_height, 1.2))
        bar.imshow(np.linspace(1, 0, 256)[:, None], cmap=ACCURACY, vmin=0, vmax=1, aspect="auto", extent=(0, 1, 0, 1))
        bar.yaxis.tick_right()
        bar.set(xticks=[], yticks=[0, 0.5, 1])
        bar.set_yticklabels(["0%", "50%", "100%"], color=theme.muted, size=8)
        _bare(bar)
        return figure

    return _save(draw, Path(stem), title, f"Share of exact answers over {num_cases} needles never seen in training.")


def smooth(values: Sequence[float] | np.ndarray, window: float) -> np.ndarray:
    """Moving average, float64 [n], of two exponential windows of mean age `window`, one from each side.

    One from the left alone would lag behind a falling loss.
    """
    decay = window / (window + 1)

    def one_sided(values: np.ndarray) -> np.ndarray:
        result = np.empty(len(values))
        total = weight = 0.0
        for index, value in enumerate(values):
            total = decay * total + (1 - decay) * value
            weight = decay * weight + 1 - decay
            result[index] = total / weight
        return result

    values = np.asarray(values, float)
    return (one_sided(values) + one_sided(values[::-1])[::-1]) / 2


def spread(centres: Sequence[float], widths: Sequence[float], low: float, high: float) -> list[float]:
    """Centres of labels, moved so that none overlaps the next and all stay in [low, high]; their order is kept.

    Where they cannot all fit they overlap at the left.
    """
    edge, moved = low, []
    for centre, width in zip(centres, widths, strict=True):
        moved.append(max(centre, edge + width / 2))
        edge = moved[-1] + width / 2
    edge = high
    for index in range(len(moved) - 1, -1, -1):
        moved[index] = min(moved[index], edge - widths[index] / 2)
        edge = moved[index] - widths[index] / 2
    return moved


def loss_curves(stem: str | Path, curves: Sequence[StageCurve], *, title: str = "Training loss") -> Picture:
    """Loss over all stages' steps, one band per stage named with its sequence length and RoPE theta.

    Writes stem.png, stem.svg and stem-dark.svg. Points that are not finite are left out.
    """
    curves = [curve for curve in curves if len(curve.steps)]
    if not curves:
        raise ValueError("no stage has a loss to draw; give at least one StageCurve with steps and losses")
    sizes = np.array([max(curve.steps) + 1 for curve in curves])
    starts = np.concatenate([[0], np.cumsum(sizes)])
    series = [values for c in curves for values in (c.losses, c.text_losses, c.vision_losses) if values is not None]
    finite = np.concatenate([np.asarray(values, float)[np.isfinite(values)] for values in series])
    ceiling = float(finite.max()) * 1.05 if finite.size else 1.0
    width = max(10.0, 1.2 + 0.95 * len(curves))
    left, right = 0.7, 0.25
    steps_per_inch = starts[-1] / (width - left - right)
    details = [(f"{short_count(c.seq_len)} tokens", f"θ {short_count(c.rope_theta)}") for c in curves]
    # Inches that bold 9.5 pt and plain 8 pt letters take on average, and some air.
    inches = [
        max(0.095 * len(c.name), *(0.075 * len(d) for d in ds)) + 0.1 for c, ds in zip(curves, details, strict=True)
    ]
    centres = spread((starts[:-1] + starts[1:]) / 2, [steps_per_inch * i for i in inches], 0, starts[-1])

    def draw(theme: Theme) -> Figure:
        figure = Figure(figsize=(width, 4.4))
        axes = figure.add_axes((left / width, 0.14, 1 - (left + right) / width, 0.61))
        figure.text(0.2 / width, 0.95, title, va="top", size=13, weight="bold", color=theme.ink)
        named: set[str] = set()
        for index, curve in enumerate(curves):
            begin, end = starts[index], starts[index + 1]
            if index % 2 == 0:
                axes.add_patch(Rectangle((begin, 0), end - begin, ceiling, facecolor=theme.band, linewidth=0, zorder=0))
            if index:
                axes.axvline(begin, color=theme.rule, linewidth=1, zorder=1)
            above: dict[str, Any] = {"ha": "center", "va": "bottom", "transform": axes.get_xaxis_transform()}
            axes.text(centres[index], 1.13, curve.name, size=9.5, weight="bold", color=theme.ink, **above)
            axes.text(centres[index], 1.07, details[index][0], size=8, color=theme.muted, **above)
            axes.text(centres[index], 1.012, details[index][1], size=8, color=theme.muted, **above)
            kinds = (("loss", curve.losses), ("text", curve.text_losses), ("vision", curve.vision_losses))
            for (name, losses), colour in zip(kinds, theme.lines, strict=True):
                if losses is None:
                    continue
                values = np.asarray(losses, float)
                known = np.isfinite(values)
                x, values = begin + np.asarray(curve.steps)[known], values[known]
                if name == "loss":
                    axes.plot(x, values, color=colour, linewidth=0.7, alpha=0.35, zorder=2)
                legend = name if name not in named else None
                named.add(name)
                thick, over = (2.0, 4) if name == "loss" else (1.2, 3)
                axes.plot(x, smooth(values, len(values) / 60), color=colour, label=legend, linewidth=thick, zorder=over)
        axes.set(xlim=(0, starts[-1]), ylim=(0, ceiling))
        axes.set_xlabel("step", color=theme.ink, size=9.5)
        axes.set_ylabel("loss (nats per token)", color=theme.ink, size=9.5)
        axes.tick_params(colors=theme.muted, labelsize=9, length=3, color=theme.rule)
        axes.grid(axis="y", color=theme.rule, linewidth=0.6, zorder=1)
        axes.set_axisbelow(True)
        for side, spine in axes.spines.items():
            spine.set_visible(side == "bottom")
            spine.set_color(theme.rule)
        if len(named) > 1:
            box = axes.legend(loc="upper right", frameon=True, fontsize=9, labelcolor=theme.ink)
            box.get_frame().set(facecolor=theme.paper, edgecolor=theme.rule, alpha=0.9)
            box.set_zorder(5)
        return figure

    return _save(draw, Path(stem), title, "Each stage lengthens the context; a step up at a border is the new length.")
