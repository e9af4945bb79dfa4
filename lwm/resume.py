"""Where a run goes on: the last whole checkpoint, checked against the configuration and read onto the mesh it needs."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from lwm import cluster, stages
from lwm.checkpoint import DAMAGED, Checkpoints, DamagedCheckpoint, Manifest, read_manifest
from lwm.config import RunConfig, canonical_json, fingerprint
from lwm.goodput import Goodput
from lwm.run_directory import RUN_FILE
from lwm.stages import PreparedStage
from lwm.step import TrainState, abstract_state

Say = Callable[[str], None]


@dataclass(frozen=True)
class Start:
    """Where to begin.

    `index` is the first stage to run, `saved` the checkpoint's manifest (None: a new run). `run` is that stage, made
    ready, None when all stages are done. `state` is what the stage goes on with or (`begins`) what the stage before it
    left, None when there is nothing to carry.
    """

    index: int
    saved: Manifest | None = None
    run: PreparedStage | None = None
    state: TrainState | None = None
    begins: bool = True


def find_start(config: RunConfig, checkpoints: Checkpoints, goodput: Goodput, say: Say) -> Start:
    """The last checkpoint that is whole, read; damaged ones are set aside, with the reason said.

    Collective. Raises ValueError where `checkpoint.resume` forbids it, the checkpoint does not fit the configuration,
    or there are checkpoints and all of them are damaged.
    """
    first_process = jax.process_index() == 0
    if first_process and checkpoints.directory.is_dir():
        checkpoints.clear_leftovers()
    damaged = 0
    while (step := int(cluster.exchange("resume", str(_or_none(checkpoints.newest())))[0])) >= 0:
        if config.checkpoint.resume == "never":
            raise ValueError(
                f"checkpoint.resume is never, but {checkpoints.directory} has a checkpoint of step {step}; "
                "set it to auto to continue, or set another output_dir"
            )
        try:
            saved = _manifest(checkpoints.path(step))
            with goodput.timed("restore"):
                return _open(config, checkpoints, saved)
        except DamagedCheckpoint as error:
            damaged += 1
            if first_process:
                aside = checkpoints.set_aside(step, DAMAGED)
                say(f"warning: {error} -- set aside as {aside.name}")
            cluster.barrier("set aside")
    if damaged or checkpoints.set_aside_ones(DAMAGED):
        raise ValueError(
            f"all checkpoints in {checkpoints.directory} are damaged; bring a whole one back, or set another "
            "output_dir to start a new run"
        )
    if config.checkpoint.resume == "must":
        raise ValueError(
            f"checkpoint.resume is must, but {checkpoints.directory} has no checkpoint; set it to auto to start a new "
            "run, or output_dir to the run to continue"
        )
    return Start(0)


def _or_none(step: int | None) -> int:
    return -1 if step is None else step


def _manifest(path: Path) -> Manifest:
    try:
        manifest, problem = read_manifest(path), None
    except DamagedCheckpoint as error:
        manifest, problem = None, str(error)
    if problems := cluster.agree("manifest", problem):
        raise DamagedCheckpoint(problems[0])
    assert manifest is not None
    return manifest


def _open(config: RunConfig, checkpoints: Checkpoints, saved: Manifest) -> Start:
    checkpoints.check(saved, config.model)
    names = [stage.name for stage in config.stages]
    path = checkpoints.path(saved.step)
    if saved.stage not in names:
        raise ValueError(
            f"checkpoint {path} stands in stage {saved.stage!r}, which is not in the configuration "
            f"({', '.join(names)}); set another output_dir, or keep the stage's name"
        )
    index = names.index(saved.stage)
    if saved.stage_step < config.stages[index].steps:
        run = stages.prepare(config, index)
        _check_data(config, run, saved, path)
        state = checkpoints.restore(saved, abstract_state(run.model, run.stage, run.mesh))
        return Start(index, saved, run, state, begins=False)
    if index + 1 == len(names):
        return Start(index + 1, saved)
    run = stages.prepare(config, index + 1)
    if run.stage.init_from != "previous":
        return Start(index + 1, saved, run)
    abstract = abstract_state(run.model, run.stage, run.mesh)
    return Start(index + 1, saved, run, checkpoints.restore(saved, abstract, optimizer=run.stage.carry == "all"))


def _check_data(config: RunConfig, run: PreparedStage, saved: Manifest, path: Path) -> None:
    if saved.data_fingerprint == run.loader.fingerprint or config.checkpoint.data_change == "accept":
        return
    now = json.loads(json.dumps(stages.data_settings(config, run)))
    changed = ", ".join(
        f"{name} was {saved.data.get(name)} and is {now[name]}" for name in now if saved.data.get(name) != now[name]
    )
    raise ValueError(
        f"checkpoint {path} was trained on data {saved.data_fingerprint[:12]}, but stage {run.stage.name} now has "
        f"{run.loader.fingerprint[:12]} ({changed or 'corpora or packing changed'}); restore them, set another "
        "output_dir, or set checkpoint.data_change=accept to go on with the new data from the same step"
    )


def changed_fields(config: RunConfig, run_dir: Path) -> list[str]:
    """Fields whose value differs from the configuration the run directory was last trained with, as `name: old -> new`.

    Nothing where there is no such configuration, or it cannot be read.
    """
    try:
        before = json.loads((run_dir / RUN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    old, new = _fields(before), _fields(json.loads(canonical_json(config)))
    names = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
    return [f"{name}: {old.get(name)} -> {new.get(name)}" for name in names]


def _fields(tree: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(tree, Mapping):
        items = [(str(key), value) for key, value in tree.items()]
    elif isinstance(tree, list):
        items = [
            (str(value.get("name", at)) if isinstance(value, dict) else str(at), value) for at, value in enumerate(tree)
        ]
    else:
        return {prefix: tree}
    fields: dict[str, Any] = {}
    for key, value in items:
        fields |= _fields(value, f"{prefix}.{key}" if prefix else key)
    return fields


def facts(config: RunConfig, code: str, versions: Mapping[str, str]) -> dict[str, str]:
    """What all hosts of a run must have in common, for `cluster.preflight`.

    A corpus that cannot be read is one of the facts: its stage will say so when it comes, but on all hosts or on none.
    """
    from data.build import Corpus

    def fingerprint_of(directory: str) -> str:
        try:
            return Corpus.open(directory).fingerprint[:12]
        except (ValueError, OSError):
            return "that cannot be read"

    corpora = {corpus.name: corpus.directory for corpus in config.corpora}
    used = sorted({name for stage in config.stages for name in stage.shares})
    return {
        "configuration": fingerprint(config)[:12],
        "code": code[:12],
        **{f"package {name}": version for name, version in versions.items()},
        **{f"corpus {name}": fingerprint_of(corpora[name]) for name in used},
    }
