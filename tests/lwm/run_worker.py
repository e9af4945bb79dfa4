"""One process of a tiny run, for tests that start, signal and kill real ones; it is a program, not a test.

    python run_worker.py CORPUS OUTPUT [--events FILE] [field=value ...]

Each finished step is one line on standard output: `step N loss` (of the first process). What else it is to do at a step
comes as `--at STEP:WHAT`: `stop` (SIGSTOP to itself), `term`, `kill`, `break-data` (its loader raises from there on).
"""

import argparse
import os
import signal
import sys
from typing import Any
from unittest import mock

from lwm import cli, cluster
from lwm.config import RunConfig


def tiny_config(corpus: str, output: str) -> dict[str, Any]:
    """Two stages on eight devices, the second on another mesh with the optimizer carried over."""
    first = {
        "name": "short",
        "seq_len": 32,
        "batch_rows": 8,
        "steps": 6,
        "rope_theta": 1e4,
        "mesh": {"fsdp": 8},
        "optimizer": {"peak_lr": 3e-3, "warmup_steps": 2},
        "mixture": ({"corpus": "tiny", "share": 1.0},),
        "remat": "none",
        "compute_dtype": "float32",
    }
    longer = {"name": "long", "seq_len": 64, "rope_theta": 1e5, "mesh": {"fsdp": 2, "sp": 4}}
    return {
        "name": "test",
        "output_dir": output,
        "model": {
            "text_vocab_size": 32,
            "vision_vocab_size": 16,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
        },
        "corpora": ({"name": "tiny", "directory": corpus},),
        "stages": (first, first | longer | {"carry": "all"}),
        "checkpoint": {"every_steps": 2},
        "cluster": {"init_seconds": 120, "heartbeat_seconds": 10},
        "telemetry": {"wandb": "off"},
    }


def override(values: dict[str, Any], assignments: list[str]) -> RunConfig:
    """`values` with `a.b=value` applied; values are Python literals or text."""
    import ast

    config = RunConfig.model_validate(values).model_dump()
    for assignment in assignments:
        name, _, text = assignment.partition("=")
        *parents, last = name.split(".")
        node: Any = config
        for parent in parents:
            node = node[int(parent)] if parent.isdigit() else node[parent]
        try:
            node[last] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            node[last] = text
    return RunConfig.model_validate(config)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("corpus")
    parser.add_argument("output")
    parser.add_argument("--at", action="append", default=[])
    parser.add_argument("--stage")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    todo = {int(each.split(":")[0]): each.split(":")[1] for each in arguments.at}
    config = override(tiny_config(arguments.corpus, arguments.output), arguments.overrides)

    import typer

    program = typer.Typer(pretty_exceptions_enable=False)

    @program.command()
    def run() -> None:
        cluster.connect(config.cluster)
        import jax

        from lwm import trainer
        from lwm.telemetry import StepReport
        from lwm.tracking import open_telemetry

        telemetry = open_telemetry(config, active=jax.process_index() == 0)
        report = telemetry.step

        def step(done: StepReport) -> None:
            report(done)
            what = todo.get(done.global_step)
            if what in ("term", "kill", "stop"):
                number = {"term": signal.SIGTERM, "kill": signal.SIGKILL, "stop": signal.SIGSTOP}[what]
                os.kill(os.getpid(), number)
            if what == "break-data":
                from data.loader import Batches

                def broken(self: Any) -> Any:
                    raise OSError(5, "Input/output error", "corpus")

                mock.patch.object(Batches, "__next__", broken).start()

        with telemetry, mock.patch.object(telemetry, "step", step):
            trainer.train(config, telemetry=telemetry, only=arguments.stage)

    sys.exit(cli.run([], program=program))


if __name__ == "__main__":
    main()
