"""Progressive context: what each stage is made of, and how the state moves from one to the next.

A stage has its own mesh, layout, loader and compiled step. Between stages the parameters (and, where the stage says so,
the optimizer's moments) are laid out anew for the next mesh, in memory.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import ring
from data.build import Corpus
from data.loader import Loader
from lwm import checkpoint, model, sharding
from lwm.config import ModelConfig, ResolvedStage, RunConfig, StageConfig, resolve_stage
from lwm.sharding import Params
from lwm.step import CompiledStep, TrainState, abstract_state, batch_sharding, fresh_state

Record = dict[str, Any]
# Losses averaged at each end of a stage for its record.
_ENDS = 10


@dataclass(frozen=True)
class PreparedStage:
    """A stage ready to be compiled: everything but the state.

    first_row, first_column: where this process's part of the batch starts.
    """

    index: int
    stage: StageConfig
    model: ModelConfig
    mesh: Mesh
    loader: Loader
    first_row: int
    first_column: int = 0


@dataclass
class StageProgress:
    """What a stage's record is made from; grows by one step at a time and survives restarts in the manifest."""

    tokens: int = 0
    seconds: float = 0.0
    compilations: int = 0
    skipped_in_a_row: int = 0
    first: list[float] = field(default_factory=list)
    last: deque[float] = field(default_factory=lambda: deque(maxlen=_ENDS))

    def add(self, loss: float, tokens: int, seconds: float) -> None:
        """Count one finished step."""
        self.tokens += tokens
        self.seconds += seconds
        self.last.append(loss)
        if len(self.first) < _ENDS:
            self.first.append(loss)

    def to_json(self) -> dict[str, Any]:
        """For the manifest."""
        return {**vars(self), "last": list(self.last)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "StageProgress":
        """The inverse of `to_json`."""
        return cls(**{**values, "first": list(values["first"]), "last": deque(values["last"], maxlen=_ENDS)})


def record_of(run: PreparedStage, progress: StageProgress) -> Record:
    """The stage as reported: losses are means over its first and last steps, tokens are real ones (no padding)."""
    stage = run.stage
    return {
        "name": stage.name,
        "seq_len": stage.seq_len,
        "steps": stage.steps,
        "tokens": progress.tokens,
        "loss_first": _mean(progress.first),
        "loss_last": _mean(progress.last),
        "mesh": {axis: size for axis, size in sharding.mesh_sizes(run.mesh).items() if size > 1},
        "layout": stage.attention.layout,
        "strategy": stage.attention.strategy,
        "rope_theta": stage.rope_theta,
        "seconds": round(progress.seconds, 3),
        "compilations": progress.compilations,
    }


def _mean(losses: list[float] | deque[float]) -> float | None:
    return float(np.mean(losses)) if losses else None


def prepare(config: RunConfig, index: int) -> PreparedStage:
    """Mesh and loader of stage number `index`.

    Raises ValueError where the stage does not fit the devices or its corpora cannot be used.
    """
    stage = config.stages[index]
    resolved = resolve_stage(config, stage, jax.device_count())
    mesh = sharding.make_mesh(stage.mesh)
    rows, columns = own_part(stage, mesh)
    loader = make_loader(config, index, resolved, rows, columns)
    return PreparedStage(index, stage, resolved.model, mesh, loader, rows.start, columns.start)


def compile_step(config: RunConfig, run: PreparedStage, say: Callable[[str], None]) -> CompiledStep:
    """The train step of a stage, compiled once."""
    stage = run.stage
    shape = " ".join(f"{axis}={size}" for axis, size in sharding.mesh_sizes(run.mesh).items() if size > 1)
    say(
        f"stage {stage.name} ({run.index + 1}/{len(config.stages)}): {stage.steps} steps of {stage.batch_rows} x "
        f"{stage.seq_len} tokens, rope theta {stage.rope_theta:g}, mesh {shape or 'one device'}, "
        f"{stage.attention.strategy} attention, {stage.attention.layout} layout, {stage.compute_dtype}; compiling"
    )
    compiled = CompiledStep(run.model, stage, run.mesh)
    say(f"stage {stage.name}: compiled in {compiled.seconds:.1f}s")
    return compiled


def data_settings(config: RunConfig, run: PreparedStage) -> dict[str, Any]:
    """What decides the batches of a stage, by the names of its fields, for the manifest and for messages."""
    stage = run.stage
    directories = {corpus.name: corpus.directory for corpus in config.corpora}
    return {
        "seed": config.seed,
        "corpora": {name: Corpus.open(directories[name]).fingerprint[:12] for name in stage.shares},
        **{
            name: getattr(stage, name)
            for name in (
                "shares",
                "share_unit",
                "seq_len",
                "batch_rows",
                "packing",
                "pack_together",
                "least_fill",
                "weighting",
            )
        },
    }


def make_loader(
    config: RunConfig,
    index: int,
    resolved: ResolvedStage,
    rows: slice | None = None,
    columns: slice | None = None,
) -> Loader:
    """The loader of stage number `index`; each stage draws its own order from the run's seed."""
    stage = config.stages[index]
    directories = {corpus.name: corpus.directory for corpus in config.corpora}
    corpora = {name: Corpus.open(directories[name]) for name in stage.shares}
    for name, corpus in corpora.items():
        _check_vocabulary(config.model, name, corpus)
    attention = stage.attention
    return Loader(
        corpora,
        stage.shares,
        seq_len=stage.seq_len,
        batch_rows=stage.batch_rows,
        seed=config.seed + index,
        permutation=ring.layout.permutation(attention.layout, stage.seq_len, resolved.sequence_shards),
        packing=stage.packing,
        weighting=stage.weighting,
        share_unit=stage.share_unit,
        join=stage.pack_together,
        least_fill=stage.least_fill,
        max_damaged=stage.max_damaged,
        rows=rows,
        columns=columns,
    )


def _check_vocabulary(config: ModelConfig, name: str, corpus: Corpus) -> None:
    vocabulary = corpus.vocabulary
    if vocabulary.text_size != config.text_vocab_size or vocabulary.vision_size > config.vision_vocab_size:
        raise ValueError(
            f"corpus {name!r} has {vocabulary.text_size} text and {vocabulary.vision_size} vision ids, but the model's "
            f"text_vocab_size is {config.text_vocab_size} and its vision_vocab_size {config.vision_vocab_size}; change "
            "the model, or build the corpus with its tokenizers"
        )


def own_part(stage: StageConfig, mesh: Mesh) -> tuple[slice, slice]:
    """The rows and the slots of the global batch that this process's devices hold, or that lie between those."""
    where = batch_sharding(mesh)
    shape = (stage.batch_rows, stage.seq_len)
    parts = [part for part in where.addressable_devices_indices_map(shape).values() if part is not None]

    def run(axis: int) -> slice:
        bounds = [part[axis].indices(shape[axis])[:2] for part in parts]
        return slice(min(first for first, _ in bounds), max(stop for _, stop in bounds))

    return run(0), run(1)


def begin(config: RunConfig, run: PreparedStage, previous: TrainState | None, say: Callable[[str], None]) -> TrainState:
    """The state that a stage starts with, on its mesh.

    `previous` is the final state of the stage before, None at the first one. Its arrays are given up.
    """
    stage = run.stage
    abstract = abstract_state(run.model, stage, run.mesh)
    opt_state = None
    if stage.init_from == "previous" and previous is not None:
        params = _move(previous.params, abstract.params)
        opt_state = _move(previous.opt_state, abstract.opt_state) if stage.carry == "all" else None
        carried = "weights and optimizer" if stage.carry == "all" else "weights"
        say(f"stage {stage.name}: {carried} carried over from the stage before")
    elif stage.init_from in ("previous", "scratch"):
        params = model.init(run.model, jax.random.key(config.seed), run.mesh)
        say(f"stage {stage.name}: weights drawn from seed {config.seed}")
    else:
        params = checkpoint.load_params(stage.init_from, run.mesh, run.model)
        say(f"stage {stage.name}: weights from {stage.init_from}")
    places = jax.tree.map(lambda leaf: leaf.sharding, abstract)

    def start(params: Params, opt_state: Any) -> TrainState:
        return fresh_state(run.model, stage, params, opt_state)

    return jax.jit(start, donate_argnums=(0, 1), out_shardings=places)(params, opt_state)


def _move(tree: Any, abstract: Any) -> Any:
    return jax.tree.map(lambda leaf, like: jax.device_put(leaf, like.sharding, donate=True), tree, abstract)
