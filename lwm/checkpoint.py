"""Checkpoints: one orbax step per save, written in the background under another name and committed by a rename.

A step directory is `checkpoints/<steps of the whole run>` and holds `params`, `optimizer` and `manifest.json`. It gets
that name when all of it is on disk, so what a killed process leaves behind is never taken for a checkpoint. The
manifest has a digest of every leaf (`lwm.digest`), which is compared when the step is read: orbax notices no flipped
bit.
"""

import copy
import errno
import json
import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, SingleDeviceSharding

from lwm import cluster, provenance
from lwm.config import ModelConfig
from lwm.digest import digests, named_leaves
from lwm.sharding import Params, abstract_parameters, flatten
from lwm.step import TrainState

FORMAT = 2
MANIFEST_FILE = "manifest.json"
# What follows the step's number in the name of a directory that is set aside.
DAMAGED, REWOUND, _REPLACED = ".damaged", ".rewound", ".replaced"
_TEMPORARY = ".orbax-checkpoint-tmp"
# How long the processes wait for each other's part of a save.
_SAVE_SECONDS = 1200


class DamagedCheckpoint(ValueError):
    """A checkpoint that is not what was written: the one before it may be whole."""


class NonFiniteParameters(ValueError):
    """The state to be saved holds a number that is not finite; it was not saved."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is, beside its arrays.

    `step` counts the whole run, `stage_step` the stage; together with `data_fingerprint` it is the data position.
    `stages` are the records of the stages so far, the last one still growing. `leaves`, `optimizer_leaves`: path ->
    [dtype, shape]. `digests`: path with `params/` or `optimizer/` in front -> digest. `data`: what the fingerprint is
    of. `typical`: see `step.TrainState`. There is no random state: batches and initial weights follow from `seed` and
    the step.
    """

    step: int
    stage: str
    stage_step: int
    skipped: int
    skipped_in_a_row: int
    tokens: int
    data_fingerprint: str
    config_fingerprint: str
    model: Mapping[str, Any]
    stages: Sequence[Mapping[str, Any]]
    progress: Mapping[str, Any]
    typical: Sequence[float] = (0.0, 0.0)
    seed: int = 0
    data: Mapping[str, Any] = field(default_factory=dict)
    counters: Mapping[str, Any] = field(default_factory=dict)
    mesh: Mapping[str, int] = field(default_factory=dict)
    num_processes: int = 1
    wandb_id: str = ""
    git: str = ""
    format: int = FORMAT
    leaves: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    optimizer_leaves: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    unix_time: float = 0.0


class Checkpoints:
    """The checkpoints of one run directory; the last `keep_last` of them stay, and multiples of `keep_every`."""

    def __init__(self, directory: str | Path, keep_last: int = 2, keep_every: int | None = None):
        self.directory = Path(directory).absolute()
        self.keep_last, self.keep_every = keep_last, keep_every
        self._orbax: ocp.AsyncCheckpointer | None = None
        self._under_way: Manifest | None = None
        self._problem: Exception | None = None

    @property
    def under_way(self) -> bool:
        """Whether a save was begun and not finished."""
        return self._under_way is not None

    def steps(self) -> list[int]:
        """Committed steps in ascending order."""
        return _steps(self.directory)

    def path(self, step: int) -> Path:
        """The directory of `step`."""
        return self.directory / _name(step)

    def latest(self) -> Manifest | None:
        """The manifest of the last committed step, None without any."""
        steps = self.steps()
        return read_manifest(self.path(steps[-1])) if steps else None

    def newest(self) -> int | None:
        """The last step that has a directory, whole or not."""
        names = [each.name for each in self.directory.iterdir()] if self.directory.is_dir() else []
        return max((int(name) for name in names if re.fullmatch(r"\d{8,}", name)), default=None)

    def set_aside_ones(self, suffix: str) -> list[str]:
        """Names of the directories that were set aside with `suffix`, in order."""
        return sorted(each.name for each in self.directory.glob(f"*{suffix}*")) if self.directory.is_dir() else []

    def set_aside(self, step: int, suffix: str) -> Path:
        """Rename a step so that nothing takes it for a checkpoint; returns its new place. Of the first process only."""
        target = self.directory / (_name(step) + suffix)
        number = 1
        while target.exists():
            number += 1
            target = self.directory / f"{_name(step)}{suffix}-{number}"
        os.rename(self.path(step), target)
        return target

    def clear_leftovers(self) -> list[str]:
        """Remove what an earlier process did not finish, put back what it had replaced; returns what was removed."""
        removed = []
        for leftover in [*self.directory.glob(f"*{_TEMPORARY}*"), *self.directory.glob(f"*{_REPLACED}*")]:
            if _REPLACED in leftover.name and not (self.directory / leftover.name.split(".")[0]).exists():
                os.rename(leftover, self.directory / leftover.name.split(".")[0])
                continue
            shutil.rmtree(leftover, ignore_errors=True)
            removed.append(leftover.name)
        return removed

    def save(self, state: TrainState, manifest: Manifest) -> Path:
        """`begin_save`, then `finish`."""
        self.begin_save(state, manifest)
        self.finish()
        return self.path(manifest.step)

    def begin_save(self, state: TrainState, manifest: Manifest) -> None:
        """Copy all of it to the host and begin to write it as step `manifest.step`; training can go on when it returns.

        Whether it succeeded is for `finish` to say. Raises NonFiniteParameters before anything is written.
        """
        assert self._under_way is None, "finish the save that is under way"
        items = {"params": state.params} | ({} if state.opt_state is None else {"optimizer": state.opt_state})
        leaves: dict[str, Any] = {}
        for name, tree in items.items():
            leaves |= named_leaves(tree, name)
        found, bad = digests(leaves)
        if bad:
            raise NonFiniteParameters(
                f"{bad[0]} is not finite after step {manifest.stage_step} of stage {manifest.stage}, so it was not "
                f"saved ({len(bad)} of {len(leaves)} arrays are affected); the checkpoints before it are whole"
            )
        # Written at the end of the save, when training has gone on counting in the lists that came in.
        self._under_way, self._problem = _complete(copy.deepcopy(manifest), items, found), None
        arguments = {name: ocp.args.PyTreeSave(tree) for name, tree in items.items()}
        try:
            if jax.process_index() == 0:
                self.directory.mkdir(parents=True, exist_ok=True)
                self.clear_leftovers()
                if self.path(manifest.step).exists():
                    self.set_aside(manifest.step, _REPLACED)
            if self._orbax is None:
                self._orbax = ocp.AsyncCheckpointer(
                    ocp.CompositeCheckpointHandler(),
                    async_options=ocp.options.AsyncOptions(
                        timeout_secs=_SAVE_SECONDS, post_finalization_callback=self._write_manifest
                    ),
                )
            self._orbax.save(self.path(manifest.step), args=ocp.args.Composite(**arguments))
        except Exception as error:  # tensorstore's errors are ValueErrors, orbax raises bare Exceptions
            self._problem = error

    def finish(self) -> Manifest | None:
        """Wait for the save that is under way, then drop old steps; returns what was saved, None if nothing was.

        Raises OSError when the directory cannot be written or the disk is full, in this process or another; nothing is
        left of the attempt, and older checkpoints stay.
        """
        manifest, problem = self._under_way, self._problem
        if manifest is None:
            return None
        try:
            if problem is None and self._orbax is not None:
                self._orbax.wait_until_finished()
        except Exception as error:
            problem = error
        self._under_way = None
        path = self.path(manifest.step)
        reason = None if problem is None else _disk_error(problem, path)
        text = None if problem is None else str(reason or problem) or repr(problem)
        problems = cluster.agree("save", text, seconds=_SAVE_SECONDS)
        if not problems:
            if jax.process_index() == 0:
                self._prune()
            return manifest
        if jax.process_index() == 0:
            self.clear_leftovers()
        if reason is not None:
            raise reason from problem
        if problem is not None and not isinstance(problem, ValueError | OSError):
            raise problem
        raise OSError(errno.EIO, problems[0], str(path)) from problem

    def close(self) -> None:
        """Stop the threads that write; a save under way is waited for."""
        if self._orbax is not None:
            self._orbax.close()
            self._orbax = None

    def _write_manifest(self) -> None:
        """The last file of a step, written just before orbax renames its directory."""
        assert self._under_way is not None
        (temporary,) = self.directory.glob(f"{_name(self._under_way.step)}{_TEMPORARY}*")
        _write_durably(temporary / MANIFEST_FILE, json.dumps(asdict(self._under_way), indent=1))

    def _prune(self) -> None:
        for step in self.steps()[: -self.keep_last]:
            if self.keep_every is None or step % self.keep_every:
                shutil.rmtree(self.path(step))
        for replaced in self.directory.glob(f"*{_REPLACED}*"):
            shutil.rmtree(replaced)

    def restore(self, manifest: Manifest, abstract: TrainState, *, optimizer: bool = True) -> TrainState:
        """The state of `manifest`'s step, placed as `abstract` says, bitwise whatever mesh wrote it.

        Without `optimizer` only the parameters are read, and `opt_state` is None.

        Raises:
            ValueError: the checkpoint is of another model or optimizer; names the leaf.
            DamagedCheckpoint: it cannot be read, or is not what was saved.
        """
        path = self.path(manifest.step)
        wanted = {"params": abstract.params} | ({"optimizer": abstract.opt_state} if optimizer else {})
        items = _read(path, manifest, wanted)
        return TrainState(
            params=items["params"],
            opt_state=items.get("optimizer"),
            step=_place(np.int32(manifest.stage_step), abstract.step.sharding),
            skipped=_place(np.int32(manifest.skipped), abstract.skipped.sharding),
            skipped_in_a_row=_place(np.int32(manifest.skipped_in_a_row), abstract.skipped_in_a_row.sharding),
            typical=_place(np.asarray(manifest.typical, np.float32), abstract.typical.sharding),
        )

    def check(self, manifest: Manifest, config: ModelConfig) -> None:
        """ValueError when the checkpoint's parameters are not those of `config`: names the first that differs."""
        _check_leaves(self.path(manifest.step), manifest.leaves, abstract_parameters(config))

    def rewind(self, step: int) -> list[Path]:
        """Set aside all steps after `step`, so that the run continues from there; returns where they are now.

        Raises ValueError when there is no such step, listing those there are.
        """
        if step not in self.steps():
            raise ValueError(_no_such_step(self.path(step)))
        return [self.set_aside(each, REWOUND) for each in self.steps() if each > step]

    def verify(self, step: int) -> int:
        """Read a whole step and compare it with its digests; returns the number of arrays.

        Raises DamagedCheckpoint, or ValueError when there is no such step.
        """
        if not self.path(step).is_dir():
            raise ValueError(_no_such_step(self.path(step)))
        manifest = read_manifest(self.path(step))
        wanted: dict[str, Any] = {}
        handler = ocp.PyTreeCheckpointHandler()
        for name, leaves in (("params", manifest.leaves), ("optimizer", manifest.optimizer_leaves)):
            if not leaves:
                continue
            item = self.path(step) / name
            try:
                # As numpy arrays: the devices that it was saved from need not be here.
                tree = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), handler.metadata(item).tree)
                wanted[name] = handler.restore(item, args=ocp.args.PyTreeRestore(restore_args=tree))
            except Exception as error:
                raise _cannot_be_read(self.path(step), error) from error
        _check_digests(self.path(step), manifest, wanted)
        return len(manifest.digests)


def _place(value: Any, where: Any) -> jax.Array:
    """A small host array on devices of which some may be another process's."""
    return jax.make_array_from_callback(np.shape(value), where, lambda index: np.asarray(value)[index])


def load_params(directory: str | Path, mesh: Mesh | None = None, config: ModelConfig | None = None) -> Params:
    """The parameters of a checkpoint for inference, on `mesh` (None: on the first device).

    `directory` is a run directory, its `checkpoints`, or one step in it; of several steps the last is read. `config`
    (default: the checkpoint's own, `load_model_config`) must describe the same parameters.

    Raises ValueError when there is no checkpoint, it is damaged, or it is of another model: names the first leaf that
    differs.
    """
    path = find_checkpoint(directory)
    manifest = read_manifest(path)
    config = config or ModelConfig(**manifest.model)
    params = abstract_parameters(config, mesh)
    if mesh is None:
        first = SingleDeviceSharding(jax.devices()[0])
        params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=first), params)
    return _read(path, manifest, {"params": params})["params"]


def load_model_config(directory: str | Path) -> ModelConfig:
    """The model of a checkpoint (see `load_params` for `directory`), with the rope_theta it was last trained with."""
    return ModelConfig(**read_manifest(find_checkpoint(directory)).model)


def save_params(directory: str | Path, config: ModelConfig, params: Params) -> Path:
    """Write bare parameters, such as imported ones, as a checkpoint that stages can start from and tools can load."""
    zero = jnp.zeros((), jnp.int32)
    manifest = Manifest(0, "", 0, 0, 0, 0, "", "", config.model_dump(mode="json"), (), {})
    checkpoints = Checkpoints(directory)
    path = checkpoints.save(TrainState(params, None, zero, zero, zero, jnp.zeros(2)), manifest)
    checkpoints.close()
    return path


def find_checkpoint(directory: str | Path) -> Path:
    """The step directory that `directory` names or holds; ValueError when there is none."""
    root = Path(directory).absolute()
    if (root / MANIFEST_FILE).is_file():
        return root
    for parent in (root, root / "checkpoints"):
        if steps := _steps(parent):
            return parent / _name(steps[-1])
    if re.fullmatch(r"\d+", root.name) and _steps(root.parent):
        raise ValueError(_no_such_step(root))
    raise ValueError(
        f"there is no checkpoint in {directory}; give a run directory, its checkpoints directory, or one step in it"
    )


def read_manifest(path: Path) -> Manifest:
    """The manifest of a step directory; DamagedCheckpoint when it cannot be read, ValueError when it is of another
    format."""
    file = path / MANIFEST_FILE
    try:
        values = json.loads(file.read_text())
        manifest = Manifest(**{"format": 0, **values})
    except (OSError, ValueError, TypeError) as error:
        raise _cannot_be_read(path, error) from error
    if manifest.format != FORMAT:
        raise ValueError(
            f"checkpoint {path} has format {manifest.format}; this version reads format {FORMAT}, so use the version "
            "that wrote it"
        )
    return manifest


def _name(step: int) -> str:
    return f"{step:08d}"


def _steps(directory: Path) -> list[int]:
    if not directory.is_dir():
        return []
    names = (each.name for each in directory.iterdir() if (each / MANIFEST_FILE).is_file())
    return sorted(int(name) for name in names if re.fullmatch(r"\d+", name))


def _no_such_step(path: Path) -> str:
    steps = ", ".join(map(str, _steps(path.parent))) or "none"
    return f"there is no step {int(path.name)} in {path.parent}; its steps are {steps}"


def _cannot_be_read(path: Path, error: Exception) -> DamagedCheckpoint:
    reason = " ".join(str(error).split())[:300] or type(error).__name__
    return DamagedCheckpoint(f"checkpoint {path} cannot be read ({reason}); remove it to use the one before")


def _read(path: Path, manifest: Manifest, wanted: Mapping[str, Any]) -> dict[str, Any]:
    _check_leaves(path, manifest.leaves, wanted["params"])
    if "optimizer" in wanted:
        _check_leaves(path, manifest.optimizer_leaves, _flat(wanted["optimizer"]))
    arguments = {
        name: ocp.args.PyTreeRestore(tree, restore_args=ocp.checkpoint_utils.construct_restore_args(tree))
        for name, tree in wanted.items()
    }
    damage, restored = None, {}
    try:
        # The handler alone: a checkpointer would make processes wait for one that could not read its part.
        restored = ocp.CompositeCheckpointHandler().restore(path, args=ocp.args.Composite(**arguments))
    except Exception as error:  # orbax raises bare Exceptions for damaged files
        damage = _cannot_be_read(path, error)
    if problems := cluster.agree("restore", None if damage is None else str(damage)):
        raise damage or DamagedCheckpoint(problems[0])
    items = {name: restored[name] for name in wanted}
    _check_digests(path, manifest, items)
    return items


def _check_digests(path: Path, manifest: Manifest, items: Mapping[str, Any]) -> None:
    leaves: dict[str, Any] = {}
    for name, tree in items.items():
        leaves |= named_leaves(tree, name)
    found, _ = digests(leaves)
    wrong = [name for name, digest in found.items() if manifest.digests.get(name) != digest]
    missing = [name for name in manifest.digests if name.split("/")[0] in items and name not in found]
    if wrong or missing:
        raise DamagedCheckpoint(
            f"checkpoint {path} is damaged: {(wrong + missing)[0]} is not what was saved "
            f"({len(wrong) + len(missing)} of {len(manifest.digests)} arrays are affected); remove it to use the one "
            "before"
        )


def _check_leaves(path: Path, leaves: Mapping[str, Sequence[Any]], tree: Mapping[str, Any]) -> None:
    """Orbax casts dtypes silently, and its errors on shapes are long: compare with the manifest first."""
    there = {name: f"{dtype}{list(shape)}" for name, (dtype, shape) in leaves.items()}
    here = {name: _text(leaf) for name, leaf in flatten(tree).items()}
    for name in [*here, *there]:
        if here.get(name) != there.get(name):
            found, expected = there.get(name, "missing"), here.get(name, "absent")
            raise ValueError(
                f"checkpoint {path} is of another model: {name} is {found} there and {expected} in this configuration; "
                "set another output_dir, or the model of the checkpoint"
            )


def _flat(optimizer: Any) -> dict[str, Any]:
    return {name.removeprefix("/"): leaf for name, leaf in named_leaves(optimizer, "").items()}


def _text(leaf: Any) -> str:
    return f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"


def _shapes(leaves: Mapping[str, Any]) -> dict[str, Sequence[Any]]:
    return {name: (np.dtype(leaf.dtype).name, tuple(leaf.shape)) for name, leaf in leaves.items()}


def _complete(manifest: Manifest, items: Mapping[str, Any], found: Mapping[str, str]) -> Manifest:
    return replace(
        manifest,
        leaves=_shapes(flatten(items["params"])),
        optimizer_leaves=_shapes(_flat(items["optimizer"])) if "optimizer" in items else {},
        digests=found,
        versions=provenance.versions(),
        git=provenance.git_revision(),
        num_processes=jax.process_count(),
        unix_time=time.time(),
    )


def _write_durably(file: Path, text: str) -> None:
    with open(file, "w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _disk_error(error: Exception, path: Path) -> OSError | None:
    """The error as an OSError that names the path, when it is the disk's."""
    if isinstance(error, OSError):
        return OSError(error.errno or errno.EIO, error.strerror or str(error), str(path))
    if code := re.search(r"os_error_code='(\d+)'", str(error)):  # tensorstore's errors are ValueErrors
        return OSError(int(code[1]), os.strerror(int(code[1])), str(path))
    return None
