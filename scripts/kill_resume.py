"""Kill a training run at random moments until it is done, and compare its end with an undisturbed run, bit by bit.

    python scripts/kill_resume.py --kills 100

A tiny run (two stages on eight simulated devices, a save every second step) is started again and again and killed with
SIGKILL: in three of four rounds between start and end of the program (imports, compilation, restoring, saving
included), in the others right after a step was reported, when a save is likely to be under way. After each kill the
newest checkpoint must be whole, and no later than one that was committed before; at the end every array, every loss and
all counters must be those of the run that was left alone. Exit code 1 and the first difference when they are not.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np

from data.build import build_corpus
from data.examples import TokenizedExample
from data.vocabulary import Vocabulary
from lwm.checkpoint import Checkpoints, read_manifest
from lwm.telemetry import Progress, read_metrics

ROOT = Path(__file__).resolve().parents[1]

# What may differ between two runs that took the same steps.
_CLOCKS = ("seconds", "unix_time", "counters", "wandb_id", "git", "compilations")


def make_corpus(directory: Path) -> None:
    rng = np.random.default_rng(0)

    def example(number: int) -> TokenizedExample:
        tokens = ((int(rng.integers(32)) + np.arange(int(rng.integers(6, 30)))) % (48 if number % 2 else 32)).astype(
            np.int32
        )
        return TokenizedExample(tokens, np.arange(tokens.size) >= 4, str(number), "test")

    vocabulary = Vocabulary(text_size=32, num_codes=14, vision_size=16)
    build_corpus(directory, "tiny", map(example, range(40)), vocabulary=vocabulary, input_fingerprint="test")


class Runner:
    """Starts the run in `work/NAME` as a process of its own."""

    def __init__(self, work: Path, steps: int, stage: str | None) -> None:
        self.work, self.corpus = work, work / "corpus"
        self.changes = [f"stages.{number}.steps={steps}" for number in (0, 1)]
        self.changes += [] if stage is None else ["--stage", stage]
        flags = "--xla_force_host_platform_device_count=8 --xla_cpu_collective_call_terminate_timeout_seconds=600"
        self.environ = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": flags,
            "PYTHONPATH": str(ROOT),
        }

    def start(self, name: str) -> subprocess.Popen[str]:
        program = [
            sys.executable,
            str(ROOT / "tests" / "lwm" / "run_worker.py"),
            str(self.corpus),
            str(self.work / name),
        ]
        return subprocess.Popen(
            [*program, *self.changes], env=self.environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def finish(self, name: str) -> tuple[str, float]:
        begin = time.monotonic()
        process = self.start(name)
        said, _ = process.communicate()
        if process.returncode != 0:
            raise SystemExit(f"the run ended with exit code {process.returncode}:\n{said[-3000:]}")
        return said, time.monotonic() - begin


def kill(process: subprocess.Popen[str], rng: random.Random, seconds: float) -> bool:
    """Whether the process was killed before it was done."""
    assert process.stdout is not None
    if rng.random() < 0.25:
        reports = 0
        for line in process.stdout:
            reports += line.startswith("step ")
            if reports >= 1 + rng.randrange(3):
                time.sleep(rng.random() * 0.05)
                break
    else:
        deadline = time.monotonic() + rng.random() * seconds
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
    killed = process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    return killed


def differences(work: Path, undisturbed: str, killed: str) -> list[str]:
    """What differs between the ends of two runs, in words."""
    ends = [Checkpoints(work / name / "checkpoints") for name in (undisturbed, killed)]
    steps = [end.steps()[-1] for end in ends]
    found = [] if steps[0] == steps[1] else [f"the last step is {steps[1]} instead of {steps[0]}"]
    for end, step in zip(ends, steps, strict=True):
        end.verify(step)
    first, second = (_manifest(end, step) for end, step in zip(ends, steps, strict=True))
    found += [f"manifest: {key} is {second[key]} instead of {first[key]}" for key in first if first[key] != second[key]]
    losses = []
    for name in (undisturbed, killed):
        records = read_metrics(work / name / "metrics.jsonl")
        kept = ("train/loss", "optim/grad_norm", "optim/lr", "data/tokens_seen", "optim/skipped_steps")
        losses.append([[each["step"], *(each[key] for key in kept)] for each in records if "train/loss" in each])
    if losses[0] != losses[1]:
        found.append(f"metrics.jsonl differs: {len(losses[1])} steps instead of {len(losses[0])}, or other numbers")
    return found


def _manifest(end: Checkpoints, step: int) -> dict[str, Any]:
    def without_clocks(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: without_clocks(value) for key, value in node.items() if key not in _CLOCKS}
        return [without_clocks(each) for each in node] if isinstance(node, list) else node

    values = without_clocks(json.loads(json.dumps(asdict(read_manifest(end.path(step))))))
    del values["config_fingerprint"]  # output_dir is in it
    return values


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="kills in all [100]")
    parser.add_argument("--steps", type=int, default=6, help="steps of each of the two stages [6]")
    parser.add_argument("--stage", help="only this one: short [both: short, long]")
    parser.add_argument("--seed", type=int, default=0, help="decides when to kill [0]")
    parser.add_argument("--work", type=Path, help="directory to work in [a temporary one]")
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        runner = Runner(work, arguments.steps, arguments.stage)
        make_corpus(runner.corpus)
        _, seconds = runner.finish("undisturbed")
        kills, rounds, committed = 0, 1, -1
        with Progress("kill", arguments.kills, unit="kills") as progress:
            while kills < arguments.kills:
                name = f"killed-{rounds}"
                process = runner.start(name)
                was_killed = kill(process, rng, seconds)
                kills += was_killed
                found = Checkpoints(work / name / "checkpoints")
                newest = (found.steps() or [-1])[-1]
                if newest < committed:
                    raise SystemExit(f"step {committed} was committed, but after a kill the newest is {newest}")
                committed = newest
                if newest >= 0:
                    found.verify(newest)
                if not was_killed:
                    if problems := differences(work, "undisturbed", name):
                        raise SystemExit(f"run {rounds}: {problems[0]}")
                    rounds, committed = rounds + 1, -1
                progress(kills, f"{rounds} runs, step {max(committed, 0)}")
        runner.finish(f"killed-{rounds}")
        if problems := differences(work, "undisturbed", f"killed-{rounds}"):
            raise SystemExit(f"run {rounds}: {problems[0]}")
    print(f"{kills} kills in {rounds} runs: every end is bitwise that of the undisturbed run")
    return 0


if __name__ == "__main__":
    sys.exit(main())
