"""Checkpoints: one orbax step per save, written under another name and committed by a rename.

A step directory is `checkpoints/<steps of the whole run>` and holds `params`, `optimizer` and `manifest.json`. It gets
that name when all of it is on disk, so what a killed process leaves behind is never taken for a checkpoint.
"""

import errno
import json
import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import Mesh, SingleDeviceSharding

from lwm.config import ModelConfig
from lwm.sharding import Params, abstract_parameters, flatten
from lwm.step import TrainState

FORMAT = 1
MANIFEST_FILE = "manifest.json"
_PARTIAL = ".partial"


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is, beside its arrays.

    `step` counts the whole run, `stage_step` the stage; together with `data_fingerprint` it is the data position.
    `stages` are the records of the stages so far, the last one still growing. `leaves`: path -> [dtype, shape].
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
    format: int = FORMAT
    leaves: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    unix_time: float = 0.0


class Checkpoints:
    """The checkpoints of one run directory; `keep_last` of them stay."""

    def __init__(self, directory: str | Path, keep_last: int = 2):
        self.directory = Path(directory).absolute()
        self.keep_last = keep_last
        self._orbax = ocp.Checkpointer(ocp.CompositeCheckpointHandler())

    def steps(self) -> list[int]:
        """Committed steps in ascending order."""
        return _steps(self.directory)

    def path(self, step: int) -> Path:
        """The directory of `step`."""
        return self.directory / f"{step:08d}"

    def latest(self) -> Manifest | None:
        """The manifest of the last committed step, None without any."""
        steps = self.steps()
        return read_manifest(self.path(steps[-1])) if steps else None

    def save(self, state: TrainState, manifest: Manifest) -> Path:
        """Write `state` as step `manifest.step`, then drop all but the last `keep_last` steps.

        Raises OSError when the directory cannot be written or the disk is full; nothing is left of the attempt, and
        older checkpoints stay.
        """
        final = self.path(manifest.step)
        partial = final.with_name(final.name + _PARTIAL)
        manifest = _complete(manifest, state)
        try:
            if jax.process_index() == 0:
                self.directory.mkdir(parents=True, exist_ok=True)
                self._clear_partial()
            _barrier("cleared")
            items = {"params": state.params} | ({} if state.opt_state is None else {"optimizer": state.opt_state})
            arguments = {name: ocp.args.PyTreeSave(tree) for name, tree in items.items()}
            self._orbax.save(partial, args=ocp.args.Composite(**arguments))
            if jax.process_index() == 0:
                _write_durably(partial / MANIFEST_FILE, json.dumps(asdict(manifest), indent=1))
                if final.exists():
                    shutil.rmtree(final)
                os.rename(partial, final)
                for step in self.steps()[: -self.keep_last]:
                    shutil.rmtree(self.path(step))
            _barrier("committed")
        except Exception as error:
            if jax.process_index() == 0:
                self._clear_partial()
            reason = _disk_error(error, partial)
            if reason is None:
                raise
            raise reason from error
        return final

    def restore(self, manifest: Manifest, abstract: TrainState, *, optimizer: bool = True) -> TrainState:
        """The state of `manifest`'s step, placed as `abstract` says, bitwise whatever mesh wrote it.

        Without `optimizer` only the parameters are read, and `opt_state` is None. ValueError when the checkpoint is of
        another model or cannot be read.
        """
        path = self.path(manifest.step)
        wanted = {"params": abstract.params} | ({"optimizer": abstract.opt_state} if optimizer else {})
        items = _read(path, manifest, wanted)
        counters = (manifest.stage_step, manifest.skipped, manifest.skipped_in_a_row)
        likes = (abstract.step, abstract.skipped, abstract.skipped_in_a_row)
        placed = (
            jax.device_put(np.asarray(value, np.int32), like.sharding)
            for value, like in zip(counters, likes, strict=True)
        )
        typical = jax.device_put(np.asarray(manifest.typical, np.float32), abstract.typical.sharding)
        return TrainState(items["params"], items.get("optimizer"), *placed, typical)

    def check(self, manifest: Manifest, config: ModelConfig) -> None:
        """ValueError when the checkpoint's parameters are not those of `config`: names the first that differs."""
        _check_leaves(self.path(manifest.step), manifest, abstract_parameters(config))

    def _clear_partial(self) -> None:
        """Remove what an earlier process did not finish writing."""
        for leftover in self.directory.glob(f"*{_PARTIAL}*"):
            shutil.rmtree(leftover, ignore_errors=True)


def load_params(directory: str | Path, mesh: Mesh | None = None, config: ModelConfig | None = None) -> Params:
    """The parameters of a checkpoint for inference, on `mesh` (None: on the first device).

    `directory` is a run directory, its `checkpoints`, or one step in it; of several steps the last is read. `config`
    (default: the checkpoint's own, `load_model_config`) must describe the same parameters.

    Raises ValueError when there is no checkpoint, or it is of another model: names the first leaf that differs.
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
    return Checkpoints(directory).save(TrainState(params, None, zero, zero, zero, jnp.zeros(2)), manifest)


def find_checkpoint(directory: str | Path) -> Path:
    """The step directory that `directory` names or holds; ValueError when there is none."""
    root = Path(directory).absolute()
    if (root / MANIFEST_FILE).is_file():
        return root
    for parent in (root, root / "checkpoints"):
        if steps := _steps(parent):
            return parent / f"{steps[-1]:08d}"
    raise ValueError(
        f"there is no checkpoint in {directory}; give a run directory, its checkpoints directory, or one step in it"
    )


def read_manifest(path: Path) -> Manifest:
    """The manifest of a step directory; ValueError when it is damaged or of another format."""
    file = path / MANIFEST_FILE
    try:
        values = json.loads(file.read_text())
        manifest = Manifest(**values)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"checkpoint {path} cannot be read ({error}); remove it to use the one before") from error
    if manifest.format != FORMAT:
        raise ValueError(
            f"checkpoint {path} has format {manifest.format}; this version reads format {FORMAT}, so use the version "
            "that wrote it"
        )
    return manifest


def _steps(directory: Path) -> list[int]:
    if not directory.is_dir():
        return []
    names = (each.name for each in directory.iterdir() if (each / MANIFEST_FILE).is_file())
    return sorted(int(name) for name in names if re.fullmatch(r"\d+", name))


def _read(path: Path, manifest: Manifest, wanted: Mapping[str, Any]) -> dict[str, Any]:
    _check_leaves(path, manifest, wanted["params"])
    arguments = {
        name: ocp.args.PyTreeRestore(tree, restore_args=ocp.checkpoint_utils.construct_restore_args(tree))
        for name, tree in wanted.items()
    }
    try:
        restored = ocp.Checkpointer(ocp.CompositeCheckpointHandler()).restore(
            path, args=ocp.args.Composite(**arguments)
        )
    except Exception as error:  # orbax raises bare Exceptions for damaged files
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(f"checkpoint {path} cannot be read ({reason}); remove it to use the one before") from error
    return {name: restored[name] for name in wanted}


def _check_leaves(path: Path, manifest: Manifest, params: Params) -> None:
    """Orbax casts dtypes silently, and its errors on shapes are long: compare with the manifest first."""
    there = {name: f"{dtype}{list(shape)}" for name, (dtype, shape) in manifest.leaves.items()}
    here = {name: _text(leaf) for name, leaf in flatten(params).items()}
    for name in [*here, *there]:
        if here.get(name) != there.get(name):
            found, expected = there.get(name, "missing"), here.get(name, "absent")
            raise ValueError(
                f"checkpoint {path} is of another model: {name} is {found} there and {expected} in this configuration; "
                "set another output_dir, or the model of the checkpoint"
            )


def _text(leaf: Any) -> str:
    return f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"


def _complete(manifest: Manifest, state: TrainState) -> Manifest:
    leaves = {name: (np.dtype(leaf.dtype).name, tuple(leaf.shape)) for name, leaf in flatten(state.params).items()}
    versions = {name: metadata.version(name) for name in ("jax", "flax", "optax", "orbax-checkpoint", "numpy")}
    values = {name: getattr(manifest, name) for name in manifest.__dataclass_fields__}
    return Manifest(**values | {"leaves": leaves, "versions": versions, "unix_time": time.time()})


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


def _barrier(name: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"checkpoint {name}")
