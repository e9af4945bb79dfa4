"""Training: all stages of a run in order, resuming where it stopped."""

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from lwm import flops, model, objective, stages
from lwm.checkpoint import Checkpoints, Manifest, load_params
from lwm.config import RunConfig, StageConfig, fingerprint
from lwm.lifecycle import NonFiniteLoss, Preempted, RunLock, StopSignal
from lwm.run_directory import save_run
from lwm.sharding import Params, make_mesh
from lwm.stages import PreparedStage, Record, StageProgress
from lwm.step import Metrics, TrainState, abstract_state, place_batch
from lwm.telemetry import Clock, StepReport, Telemetry
from lwm.tracking import open_telemetry

# on_stage_end(stage, params, mesh) runs after the stage's last checkpoint, for evaluation.
StageEnd = Callable[[StageConfig, Params, Mesh], None]


def train(
    config: RunConfig,
    *,
    on_stage_end: StageEnd | None = None,
    telemetry: Telemetry | None = None,
    stop: StopSignal | None = None,
    clock: Clock = time.monotonic,
) -> list[Record]:
    """Run all stages from where the run directory's last checkpoint stands; returns one record per stage.

    A finished run returns at once. `telemetry` (default: as configured) stays open when it was passed in.

    Raises:
        ValueError: the configuration, the corpora or the checkpoint do not fit.
        OSError: a checkpoint could not be written.
        Preempted: `stop` was requested, by a signal or by a caller; everything is saved.
        NonFiniteLoss: too many steps in a row had no finite gradient; the last good weights are saved.
    """
    first_process = jax.process_index() == 0
    with RunLock(config.output_dir) if first_process else nullcontext():
        voice = telemetry or open_telemetry(config, active=first_process)
        try:
            return _Run(config, voice, stop or StopSignal(), clock).all_stages(on_stage_end)
        finally:
            if telemetry is None:
                voice.close()


@dataclass(frozen=True)
class _Late:
    """A dispatched step whose metrics are not fetched yet."""

    step: int
    metrics: Metrics
    tokens: int
    pairs: int
    data_seconds: float


class _Run:
    def __init__(self, config: RunConfig, telemetry: Telemetry, stop: StopSignal, clock: Clock):
        self.config, self.telemetry, self.stop, self.clock = config, telemetry, stop, clock
        directory = Path(config.output_dir)
        self.checkpoints = Checkpoints(directory / "checkpoints", config.checkpoint.keep_last)
        self.ended = directory / "stage_ends"
        self.records: list[Record] = []
        self.tokens = 0

    def all_stages(self, on_stage_end: StageEnd | None) -> list[Record]:
        saved = self._resume_point()
        if jax.process_index() == 0:
            save_run(self.config)
        trained = False
        state: TrainState | None = None
        for index in range(self._first(saved), len(self.config.stages)):
            stage = self.config.stages[index]
            here = saved if saved is not None and saved.stage == stage.name else None
            if here is not None and here.stage_step >= stage.steps:
                self._end_again(here, stage, on_stage_end)
                continue
            run, trained = stages.prepare(self.config, index, self.telemetry.say), True
            if here is not None:
                state, progress = self._resume(run, here), StageProgress.from_json(here.progress)
            else:
                previous = state if state is not None or saved is None else self._carried(run, saved)
                state, progress = stages.begin(self.config, run, previous, self.telemetry.say), StageProgress()
            progress.compilations += run.compiled.compilations
            state = self._fit(run, state, progress)
            self._end(stage, state.params, run.mesh, on_stage_end)
        done = f"all {len(self.records)} stages are done"
        self.telemetry.say(done if trained else f"run {self.config.name} was finished before: {done}")
        return self.records

    def _fit(self, run: PreparedStage, state: TrainState, progress: StageProgress) -> TrainState:
        """The loop. Metrics of a step are fetched when the next one is under way, so that the device never waits."""
        stage, every, late, begin = run.stage, self.config.checkpoint.every_steps, None, self.clock()
        first = int(state.step)
        with self.stop, run.loader.iterate(first, stop_step=stage.steps) as batches:
            for step, batch in enumerate(batches, first + 1):
                placed = place_batch(batch, stage, run.mesh, run.first_row)
                state, metrics = run.compiled(state, placed)
                if late is not None:
                    begin = self._report(run, progress, late, begin)
                late = _Late(step, metrics, *_count(batch, stage), run.loader.last_wait_seconds)
                if step % every == 0 or step == stage.steps or self.stop.requested or progress.gave_up:
                    self._report(run, progress, late, begin)
                    self._save(run, state, step, progress)
                    late, begin = None, self.clock()
                if self.stop.requested:
                    raise Preempted(f"{self.stop.reason}: saved after step {step} of stage {stage.name}")
        return state

    def _report(self, run: PreparedStage, progress: StageProgress, late: _Late, begin: float) -> float:
        """Fetch and record the metrics of a step; returns the time it was done."""
        metrics: Metrics = jax.device_get(late.metrics)
        now = self.clock()
        seconds, stage = now - begin, run.stage
        targets = dict(zip(model.modalities(run.model), metrics.tally.targets.tolist(), strict=True))
        peak = flops.peak_flops(jax.devices()[0].device_kind, stage.compute_dtype, self.config.telemetry.peak_flops)
        needed = flops.step_flops(run.model, late.tokens, late.pairs, targets)
        self.tokens += late.tokens
        progress.add(float(metrics.loss), late.tokens, seconds)
        report = StepReport(
            step=late.step,
            num_steps=stage.steps,
            global_step=self._steps_before(run.index) + late.step,
            stage=stage.name,
            loss=float(metrics.loss),
            grad_norm=float(metrics.grad_norm),
            learning_rate=float(metrics.learning_rate),
            seconds=seconds,
            tokens=stage.tokens_per_step,
            data_seconds=late.data_seconds,
            mfu=None if peak is None else needed / max(seconds, 1e-9) / (peak * jax.device_count()),
            metrics={
                **{f"train/{name}": value for name, value in objective.summarize(run.model, metrics.tally).items()},
                "optim/skipped_steps": int(metrics.skipped),
                "data/tokens_seen": self.tokens,
                "data/fill_fraction": late.tokens / stage.tokens_per_step,
            },
        )
        self.telemetry.step(report)
        if metrics.skipped_in_a_row:
            self.telemetry.say(f"step {late.step}: the gradient is not finite; the update was skipped")
        progress.skipped_in_a_row = int(metrics.skipped_in_a_row)
        return now

    def _save(self, run: PreparedStage, state: TrainState, step: int, progress: StageProgress) -> None:
        begin = self.clock()
        over = step == run.stage.steps
        if over:
            self.records.append(stages.record_of(run, progress))
        manifest = Manifest(
            step=self._steps_before(run.index) + step,
            stage=run.stage.name,
            stage_step=step,
            skipped=int(state.skipped),
            skipped_in_a_row=int(state.skipped_in_a_row),
            tokens=self.tokens,
            data_fingerprint=run.loader.fingerprint,
            config_fingerprint=fingerprint(self.config),
            model=run.model.model_dump(mode="json"),
            stages=self.records,
            progress=progress.to_json(),
            typical=np.asarray(state.typical).tolist(),
        )
        self.checkpoints.save(state, manifest)
        self.telemetry.say(f"saved step {manifest.step} in {self.clock() - begin:.2f}s")
        if progress.gave_up:
            raise NonFiniteLoss(
                f"{progress.skipped_in_a_row} steps in a row had no finite gradient, the last one step {step} of stage "
                f"{run.stage.name}; the weights before them are saved"
            )

    def _resume_point(self) -> Manifest | None:
        """The last checkpoint's manifest, checked against the configuration; what it counted goes on from there."""
        saved, resume = self.checkpoints.latest(), self.config.checkpoint.resume
        if saved is None:
            if resume == "must":
                raise ValueError(
                    f"checkpoint.resume is must, but {self.checkpoints.directory} has no checkpoint; set it to auto to "
                    "start a new run, or output_dir to the run to continue"
                )
            return None
        if resume == "never":
            raise ValueError(
                f"checkpoint.resume is never, but {self.checkpoints.directory} has a checkpoint of step {saved.step}; "
                "set it to auto to continue, or set another output_dir"
            )
        self.checkpoints.check(saved, self.config.model)
        self.records, self.tokens = list(map(dict, saved.stages)), saved.tokens
        self.telemetry.rewind(saved.step)
        self.telemetry.say(f"resuming after step {saved.stage_step} of stage {saved.stage}")
        return saved

    def _first(self, saved: Manifest | None) -> int:
        names = [stage.name for stage in self.config.stages]
        if saved is None:
            return 0
        if saved.stage not in names:
            raise ValueError(
                f"checkpoint {self.checkpoints.path(saved.step)} stands in stage {saved.stage!r}, which is not in the "
                f"configuration ({', '.join(names)}); set another output_dir, or keep the stage's name"
            )
        return names.index(saved.stage)

    def _resume(self, run: PreparedStage, saved: Manifest) -> TrainState:
        if saved.data_fingerprint != run.loader.fingerprint:
            raise ValueError(
                f"checkpoint {self.checkpoints.path(saved.step)} was trained on data {saved.data_fingerprint[:12]}, "
                f"but stage {run.stage.name} now has {run.loader.fingerprint[:12]} (corpora, shares, seed, seq_len, "
                "batch_rows, packing and weighting decide it); restore them, or set another output_dir"
            )
        return self.checkpoints.restore(saved, abstract_state(run.model, run.stage, run.mesh))

    def _carried(self, run: PreparedStage, saved: Manifest) -> TrainState:
        """The final state of the stage before, read onto the mesh of the stage that follows it."""
        abstract = abstract_state(run.model, run.stage, run.mesh)
        return self.checkpoints.restore(saved, abstract, optimizer=run.stage.carry == "all")

    def _steps_before(self, index: int) -> int:
        return sum(stage.steps for stage in self.config.stages[:index])

    def _end(self, stage: StageConfig, params: Params, mesh: Mesh, on_stage_end: StageEnd | None) -> None:
        """Call `on_stage_end` once; a mark in the run directory says that it came to its end."""
        mark = self.ended / stage.name
        if on_stage_end is None or mark.exists():
            return
        on_stage_end(stage, params, mesh)
        if jax.process_index() == 0:
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()

    def _end_again(self, saved: Manifest, stage: StageConfig, on_stage_end: StageEnd | None) -> None:
        """`_end` of a stage that an earlier process trained."""
        if on_stage_end is None or (self.ended / stage.name).exists():
            return
        mesh = make_mesh(stage.mesh)
        config = self.config.model.model_copy(update={"rope_theta": stage.rope_theta})
        params = load_params(self.checkpoints.path(saved.step), mesh, config)
        self._end(stage, params, mesh, on_stage_end)


def _count(batch: Mapping[str, np.ndarray], stage: StageConfig) -> tuple[int, int]:
    """(real tokens, visible pairs) of the global batch, judged by this process's rows of it."""
    scale = stage.batch_rows / len(batch["tokens"])
    return round(scale * int((batch["segment_ids"] > 0).sum())), round(scale * flops.visible_pairs(batch))
