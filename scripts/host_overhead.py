"""What the training loop costs per step beyond the device's own time.

    python scripts/host_overhead.py [--devices 1] [--steps 300]

The same compiled step runs twice: bare, one batch again and again with nothing around it, and in the trainer with its
loader, metrics, metrics.jsonl, memory and goodput records. A tiny model keeps the device quick, so that what is left is
the host. Printed: medians and the quickest tenth (a busy machine delays all of them), and their difference.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "lwm"), str(ROOT / "scripts")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1, help="simulated CPU devices [1]")
    parser.add_argument("--steps", type=int, default=300, help="steps of either kind [300]")
    arguments = parser.parse_args()
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={arguments.devices}"
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

    import io

    import jax
    import numpy as np
    from kill_resume import make_corpus
    from run_worker import override, tiny_config

    from lwm import stages, trainer
    from lwm.step import place_batch
    from lwm.telemetry import Telemetry, read_metrics

    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        make_corpus(work / "corpus")
        changes = [f"stages.0.steps={arguments.steps}", "checkpoint.every_steps=100000", "stages.0.mesh.fsdp=-1"]
        config = override(tiny_config(str(work / "corpus"), str(work / "run")), changes)
        config = config.model_copy(update={"stages": config.stages[:1]})

        run = stages.prepare(config, 0)
        compiled = stages.compile_step(config, run, print)
        state = stages.begin(config, run, None, print)
        placed = place_batch(run.loader.batch(0), run.stage, run.mesh, run.first_row)
        bare = []
        for _ in range(arguments.steps):
            begin = time.perf_counter()
            state, metrics = compiled(state, placed)
            jax.block_until_ready(metrics)
            bare.append(time.perf_counter() - begin)

        with Telemetry(config.output_dir, console=io.StringIO(), log_every=50) as telemetry:
            trainer.train(config, telemetry=telemetry)
        records = read_metrics(work / "run" / "metrics.jsonl")
        looped = [each["perf/step_seconds"] for each in records if "perf/step_seconds" in each]
        placing = [each["perf/host_seconds"] for each in records if "perf/host_seconds" in each]

    def line(name: str, seconds: list[float]) -> tuple[float, float]:
        kept = np.asarray(seconds[20:]) * 1e3
        median, quick = float(np.median(kept)), float(np.quantile(kept, 0.1))
        print(f"{name:<44} median {median:7.2f} ms   quickest tenth {quick:7.2f} ms")
        return median, quick

    print(f"{arguments.devices} devices, {arguments.steps} steps")
    first = line("the compiled step alone", bare)
    second = line("a step of the trainer", looped)
    line("of which placing the batch and dispatching", placing)
    print(
        f"{'the difference':<44} median {second[0] - first[0]:7.2f} ms   quickest tenth {second[1] - first[1]:7.2f} ms"
    )


if __name__ == "__main__":
    main()
