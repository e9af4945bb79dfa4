"""The headline table of the README: train steps of millions of tokens, compiled for TPU pods from this machine.

    python scripts/plan_headlines.py                       # every row, one after the other; minutes each
    python scripts/plan_headlines.py --only 8m --json      # one row, as JSON
    python scripts/plan_headlines.py --table               # the table of what has been compiled so far

Each compiled row is kept in docs/plan/headlines.json, from which the table is written into the README. GB are 10^9
bytes. Memory is the TPU compiler's count; steps and MFU are predictions (see lwm/prediction.py).
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lwm.config import load_config
from lwm.plan import StagePlan, format_seconds, plan_stage
from lwm.plan_compile import compile_elsewhere
from lwm.topology import parse

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "plan" / "headlines.json"
BEGIN, END = "<!-- headlines: scripts/plan_headlines.py -->", "<!-- end of headlines -->"
_GB = 1e9


@dataclass(frozen=True)
class Row:
    """A stage of a shipped configuration, a slice, and the most memory a device may need (GB; None: what it has)."""

    name: str
    config: str
    stage: str
    topology: str
    bar_gb: float | None = None
    overrides: tuple[str, ...] = ()


def _offloaded(name: str, stage: str, topology: str, bar_gb: float | None) -> Row:
    return Row(name, "lwm_7b_long", stage, topology, bar_gb, (f"stages.{stage}.remat=offload",))


ROWS = (
    Row("8m", "lwm_7b_long", "8m", "v4:8x8x8"),
    Row("16m", "lwm_7b_long", "16m", "v4:8x8x16"),
    Row("32m", "lwm_7b_long", "32m", "v4:8x8x8", 28),
    Row("100m", "lwm_7b_long", "100m", "v5p:8x8x16", 43),
    _offloaded("32m-offload", "32m", "v4:8x8x8", 17),
    _offloaded("64m-offload", "64m", "v4:8x8x8", None),
    _offloaded("100m-offload", "100m", "v4:8x8x16", 25),
    Row("200m", "lwm_7b_long", "200m", "v5p:8x8x16"),
    # 6144 = 2048 x 3: the ring goes over both axes, and weights are split 2048 ways.
    Row("1b", "lwm_7b_long", "1b", "v5p:16x16x24", None, ("stages.1b.mesh.sp=2048", "stages.1b.mesh.ulysses=3")),
    *(Row(stage, "lwm_text_7b", stage, "v4-512") for stage in ("text-32k", "text-128k", "text-256k")),
    *(Row(stage, "lwm_text_7b", stage, "v4-512") for stage in ("text-512k", "text-1m")),
    *(Row(stage, "lwm_7b", stage, "v4-1024") for stage in ("vision-1k", "vision-8k")),
    *(Row(stage, "lwm_7b", stage, "v4-1024") for stage in ("chat-32k", "chat-128k", "chat-1m")),
)


def compile_row(row: Row, keep: Path | None) -> dict[str, Any]:
    """Compile one row; the values of its line in the table."""
    run, where = load_config(row.config, row.overrides), parse(row.topology)
    text = None if keep is None else keep / f"{row.name}.txt"
    plan = plan_stage(run, run.stage(row.stage), where, lambda *given: compile_elsewhere(*given, keep_text=text))
    return as_row(row, plan)


def as_row(row: Row, plan: StagePlan) -> dict[str, Any]:
    """The values of a line from its plan."""
    stage, memory, predicted = plan.resolved.stage, plan.compiled.memory, plan.predicted
    peak = memory.peak / _GB
    return {
        "name": row.name,
        "tokens": stage.seq_len,
        "rows": stage.batch_rows,
        "topology": plan.where.name,
        "devices": plan.where.num_devices,
        "peak_hbm_gb": round(peak, 2),
        "hbm_gb": round(plan.where.generation.chip.hbm_bytes / _GB, 1),
        "usable_gb": round(plan.compiled.usable_bytes / _GB, 1),
        "kernel": "pallas" if plan.compiled.kernel_launches else "xla",
        "host_gb": round(memory.host / _GB, 2),
        "host_limit_gb": round(plan.where.generation.host_bytes / _GB, 1),
        "fits": plan.fits,
        "bar_gb": row.bar_gb,
        "within_bar": plan.fits and (row.bar_gb is None or peak <= row.bar_gb),
        "exposed_permutes": plan.exposed_permutes,
        "exposed_collectives": sum(each.exposed for each in plan.compiled.traffic if each.kind != "host-copy"),
        "predicted_mfu": None if predicted is None else round(predicted.mfu, 4),
        "predicted_step_s": None if predicted is None else round(predicted.step_seconds, 1),
        "predicted_exposed_s": None if predicted is None else round(predicted.exposed_seconds, 2),
        "roofline_step_s": None if predicted is None else round(predicted.roofline_seconds, 1),
        "compile_s": round(plan.compiled.compile_seconds, 1),
        "compile_cpu_s": round(plan.compiled.cpu_seconds, 1),
        "compile_host_gb": round(plan.compiled.child_bytes / _GB, 2),
    }


def table(results: dict[str, dict[str, Any]]) -> str:
    """Markdown, in the order of ROWS, of the rows that have been compiled."""
    lines = [
        "| row | tokens x rows | slice | chips | kernel | peak HBM | may be | host | within "
        "| exposed a layer: KV, others | predicted step | predicted MFU | compiled in (CPU) |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        if (one := results.get(row.name)) is None:
            continue
        limit = f"{row.bar_gb:g} GB" if row.bar_gb is not None else f"{one['usable_gb']} GB"
        host = f"{one['host_gb']} of {one['host_limit_gb']} GB" if one["host_gb"] else "-"
        step = "-" if one["predicted_step_s"] is None else format_seconds(one["predicted_step_s"])
        mfu = "-" if one["predicted_mfu"] is None else f"{one['predicted_mfu']:.1%}"
        cells = [row.name, f"{one['tokens']:,} x {one['rows']}", one["topology"], str(one["devices"]), one["kernel"]]
        cells += [f"{one['peak_hbm_gb']} GB", limit, host, "yes" if one["within_bar"] else "**no**"]
        took = format_seconds(one["compile_s"])
        if one.get("compile_cpu_s"):
            took += f" ({format_seconds(one['compile_cpu_s'])})"
        layers = load_config(row.config).model.num_layers
        others = one["exposed_collectives"] / layers - one["exposed_permutes"]
        cells += [f"{one['exposed_permutes']:.3g}, {others:.3g}", step, mfu, took]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write_readme(results: dict[str, dict[str, Any]], readme: Path = ROOT / "README.md") -> None:
    """Replace the table between the markers."""
    before, _, rest = readme.read_text().partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"{readme} lacks the lines {BEGIN} and {END}")
    readme.write_text(f"{before}{BEGIN}\n{table(results)}\n{END}{after}")


def main() -> None:
    """Compile what is asked for and write it down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME", action="append", help="this row; may be given again")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--table", action="store_true", help="compile nothing; print and write the table")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the text of each compiled program here")
    arguments = parser.parse_args()
    unknown = set(arguments.only or ()) - {row.name for row in ROWS}
    if unknown:
        parser.error(f"no row is called {', '.join(sorted(unknown))}; rows are {', '.join(row.name for row in ROWS)}")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    done = []
    try:
        for row in () if arguments.table else ROWS:
            if arguments.only and row.name not in arguments.only:
                continue
            print(f"compiling {row.name} for {row.topology}", file=sys.stderr, flush=True)
            done.append(compile_row(row, arguments.keep))
            results[row.name] = done[-1]
            RESULTS.parent.mkdir(parents=True, exist_ok=True)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    except ValueError as error:
        sys.exit(f"plan_headlines: {error}")
    if arguments.json:
        print(json.dumps(done[0] if len(done) == 1 else done))
    else:
        print(table(results))
    if not arguments.only:
        write_readme(results)


if __name__ == "__main__":
    main()
