"""Training: all stages of a run in order, resuming where it stopped."""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from lwm import cluster, flops, model, objective, provenance, resume, sharding, stages
from lwm.checkpoint import Checkpoints, Manifest, NonFiniteParameters, load_params
from lwm.config import ModelConfig, RunConfig, StageConfig, fingerprint
from lwm.goodput import Goodput
from lwm.lifecycle import NonFiniteLoss, Preempted, RunLock, StopSignal, Watchdog
from lwm.profiler import Profiler
from lwm.resume import Start
from lwm.run_directory import save_run
from lwm.sharding import Params, make_mesh
from lwm.stages import PreparedStage, Record, StageProgress
from lwm.step import BATCH_KEYS, VOTE_NO_BATCH, VOTE_NONE, VOTE_STOP, CompiledStep, Metrics, TrainState, place_batch
from lwm.telemetry import METRICS_FILE, Clock, StepReport, Telemetry, memory_metrics, read_metrics
from lwm.tracking import ID_FILE, open_telemetry

SKIPPED_FILE, DAMAGED_FILE = "skipped_batches.jsonl", "damaged_examples.jsonl"


@dataclass(frozen=True)
class Ended:
    """A stage that ended, after its last checkpoint: `step` counts the run. `params` are placed on `mesh`."""

    stage: StageConfig
    model: ModelConfig
    params: Params
    mesh: Mesh
    telemetry: Telemetry
    step: int


# Called with a stage that ended, for evaluation.
StageEnd = Callable[[Ended], None]


def train(
    config: RunConfig,
    *,
    only: str | None = None,
    on_stage_end: StageEnd | None = None,
    telemetry: Telemetry | None = None,
    stop: StopSignal | None = None,
    clock: Clock = time.monotonic,
) -> list[Record]:
    """Run all stages (or `only` one) from where the run directory's last checkpoint stands; one record per stage.

    A finished run returns at once. `telemetry` (default: as configured) stays open when it was passed in. Of several
    processes (`lwm.cluster`) all call it; the first one speaks and writes records.

    Raises:
        ValueError: the configuration, the corpora or the checkpoint do not fit, or the hosts do not agree.
        OSError: checkpoints could not be written, `checkpoint.max_failed_saves` times in a row.
        Preempted: `stop` was requested, by a signal or by a caller, in any process; everything is saved.
        NonFiniteLoss: too many updates in a row were skipped; the last good weights are saved.
    """
    if only is not None:
        config.stage(only)
    first_process = jax.process_index() == 0
    lock, problem, facts = RunLock(config.output_dir), None, {}
    try:
        try:
            if first_process:
                lock.acquire()
            facts = resume.facts(config, provenance.code_digest(), provenance.versions())
        except (ValueError, OSError) as error:
            if jax.process_count() == 1:
                raise
            problem = str(error)
        cluster.preflight(facts, problem)
        voice = telemetry or open_telemetry(config, active=first_process)
        try:
            return _Run(config, voice, stop or StopSignal(), clock).all_stages(on_stage_end, only)
        finally:
            if telemetry is None:
                voice.close()
    finally:
        lock.release()


@dataclass(frozen=True)
class _Late:
    """A dispatched step whose metrics are not fetched yet."""

    step: int
    metrics: Metrics
    data_seconds: float
    host_seconds: float


class _Run:
    def __init__(self, config: RunConfig, telemetry: Telemetry, stop: StopSignal, clock: Clock):
        self.config, self.telemetry, self.stop, self.clock = config, telemetry, stop, clock
        self.directory, keep = Path(config.output_dir), config.checkpoint
        self.first_process = jax.process_index() == 0
        self.checkpoints = Checkpoints(self.directory / "checkpoints", keep.keep_last, keep.keep_every)
        self.ended = self.directory / "stage_ends"
        self.profiler = Profiler(self.directory, config.telemetry, telemetry.say, self.first_process)
        stacks = self.directory / f"hang-process{jax.process_index()}.txt"
        self.watchdog = Watchdog(config.cluster.hang_seconds, stacks)
        self.goodput = Goodput(clock=clock)
        self.records: list[Record] = []
        self.data: dict[str, Any] = {}
        self.tokens, self.failed_saves, self.failed_in_a_row, self.saved_step = 0, 0, 0, -1
        self.damaged: set[tuple[str, int]] = set()
        self.vote, self.no_batch = VOTE_NONE, ""
        # On CPUs, collectives between processes hold threads of one small pool while they wait for their peers: those
        # of two steps at once can leave none for what the peers wait for.
        self.in_turn = jax.process_count() > 1 and jax.default_backend() == "cpu"

    def all_stages(self, on_stage_end: StageEnd | None, only: str | None) -> list[Record]:
        start = resume.find_start(self.config, self.checkpoints, self.goodput, self.telemetry.say)
        if start.saved is not None:
            self._continue_from(start.saved)
            self._end_again(start, on_stage_end)
        else:
            self.telemetry.rewind(0)  # what a process recorded that was killed before its first save
        first, end = self._range(start, only)
        if self.first_process:
            save_run(self.config)
        state = start.state
        for index in range(first, end):
            here = start if index == start.index else Start(index)
            run = here.run or stages.prepare(self.config, index)
            with self.goodput.timed("compile"):
                compiled = stages.compile_step(self.config, run, self.telemetry.say)
                # Collectives give their peers less time to come than compiling may take one of them longer.
                cluster.barrier("compiled")
            if here.begins:
                state, progress = stages.begin(self.config, run, state, self.telemetry.say), StageProgress()
            else:
                assert here.saved is not None
                progress = StageProgress.from_json(here.saved.progress)
                if self._gave_up(run.stage, progress) and state is not None:
                    # Started again after giving up: it gets as many tries as the first time.
                    progress.skipped_in_a_row = 0
                    state = replace(state, skipped_in_a_row=state.skipped_in_a_row * 0)
            progress.compilations += compiled.compilations
            assert state is not None
            state = self._fit(run, compiled, state, progress)
            self._end(run.stage, run.model, state.params, run.mesh, on_stage_end)
        self.checkpoints.close()
        done = f"all {len(self.config.stages)} stages are done"
        if len(self.records) < len(self.config.stages):
            done = f"stage {only} is done"
        self.telemetry.say(done if first < end else f"run {self.config.name} was finished before: {done}")
        return self.records

    def _range(self, start: Start, only: str | None) -> tuple[int, int]:
        """The stages to run: all that are left, or the one that was asked for."""
        names = [stage.name for stage in self.config.stages]
        if only is None:
            return start.index, len(names)
        wanted = names.index(only)
        if start.index < wanted:
            raise ValueError(
                f"stage {only} begins where stage {names[wanted - 1]} ends, but this run stands before the end of "
                f"stage {names[start.index]}; run that first: lwm train CONFIG --stage {names[start.index]}"
            )
        return (wanted, wanted + 1) if start.index == wanted else (start.index, start.index)

    def _fit(
        self, run: PreparedStage, compiled: CompiledStep, state: TrainState, progress: StageProgress
    ) -> TrainState:
        """The loop. Metrics of a step are fetched when the next one is under way, so that the device never waits."""
        stage, every, late = run.stage, self.config.checkpoint.every_steps, None
        self.data = stages.data_settings(self.config, run)
        step = first = int(state.step)
        with self.stop, self.watchdog, run.loader.iterate(first, stop_step=stage.steps) as batches:
            begin = self.clock()
            while step < stage.steps:
                self.profiler.before_step(self._steps_before(run.index) + step + 1)
                batch, vote, waited = self._next(batches, run)
                ready = self.clock()
                placed = place_batch(batch, stage, run.mesh, run.first_row, vote, run.first_column)
                state, metrics = compiled(state, placed)
                if self.in_turn:
                    jax.block_until_ready(metrics)
                ahead = _Late(step + 1, metrics, waited, self.clock() - ready)
                if late is not None:
                    begin = self._report(run, progress, late, begin)
                late, step = ahead, step + 1
                # One process acts on its own signal at once; several act on what all have heard.
                alone = jax.process_count() == 1 and vote != VOTE_NONE
                stopping = self.vote != VOTE_NONE or alone or self._gave_up(stage, progress)
                if stopping or step % every == 0 or step == stage.steps:
                    self._report(run, progress, late, begin)
                    self._save(run, state, int(state.step), progress, stopping)
                    late, begin = None, self.clock()
                if stopping:
                    self._stop(run, int(state.step), progress)
        self.profiler.close()
        return state

    def _next(self, batches: Iterator[Mapping[str, np.ndarray]], run: PreparedStage) -> tuple[Any, int, float]:
        """(batch, vote, seconds waited for it). A process that cannot read its data says so with an empty batch."""
        stop = VOTE_STOP if self.stop.requested else VOTE_NONE
        if not self.no_batch:
            try:
                batch = next(batches)
                return batch, stop, run.loader.last_wait_seconds
            except Exception as error:  # whatever it is, the others must hear of it
                self.no_batch = " ".join(str(error).split()) or type(error).__name__
        rows, columns = stages.own_part(run.stage, run.mesh)
        shape = (rows.stop - rows.start, columns.stop - columns.start)
        empty = {key: np.zeros(shape, np.float32 if key == "loss_weights" else np.int32) for key in BATCH_KEYS}
        return empty, VOTE_NO_BATCH, 0.0

    def _gave_up(self, stage: StageConfig, progress: StageProgress) -> bool:
        return progress.skipped_in_a_row >= stage.guard.max_in_a_row

    def _stop(self, run: PreparedStage, step: int, progress: StageProgress) -> None:
        """Everything is saved: end the run as it was asked to end."""
        self.checkpoints.close()
        self.profiler.close()
        where = f"step {step} of stage {run.stage.name}"
        if self._gave_up(run.stage, progress):
            raise NonFiniteLoss(
                f"the updates of {progress.skipped_in_a_row} steps in a row were skipped, the last one {where}; the "
                f"weights before them are saved, the batches are listed in {self.directory / SKIPPED_FILE}"
            )
        reasons = [each for each in cluster.exchange("stop", self.no_batch or self.stop.reason) if each]
        if self.vote == VOTE_NO_BATCH or self.no_batch:
            raise cluster.Disagreement(f"no batch after {where}, which is saved: {'; '.join(reasons)}")
        raise Preempted(f"{reasons[0] if reasons else 'asked to stop'}: saved after {where}")

    def _report(self, run: PreparedStage, progress: StageProgress, late: _Late, begin: float) -> float:
        """Fetch and record the metrics of a step; returns the time it was done."""
        metrics: Metrics = jax.device_get(late.metrics)
        now = self.clock()
        self.watchdog.beat(f"step {late.step} of stage {run.stage.name}")
        self.vote = max(self.vote, int(metrics.vote))
        if self.vote == VOTE_NO_BATCH:
            return now
        seconds, stage, global_step = now - begin, run.stage, self._steps_before(run.index) + late.step
        targets = dict(zip(model.modalities(run.model), metrics.tally.targets.sum(axis=1).tolist(), strict=True))
        peak = flops.peak_flops(jax.devices()[0].device_kind, stage.compute_dtype, self.config.telemetry.peak_flops)
        needed = flops.step_flops(run.model, int(metrics.tokens), float(metrics.pairs), targets)
        means = objective.summarize(run.model, metrics.tally, run.loader.names)
        self.tokens += int(metrics.tokens)
        progress.add(float(metrics.loss), int(metrics.tokens), seconds)
        self.goodput.add("data", late.data_seconds)
        self.goodput.add("skipped" if metrics.skipped_in_a_row else "train", seconds - late.data_seconds)
        report = StepReport(
            step=late.step,
            num_steps=stage.steps,
            global_step=global_step,
            stage=stage.name,
            loss=float(metrics.loss),
            grad_norm=float(metrics.grad_norm),
            learning_rate=float(metrics.learning_rate),
            seconds=seconds,
            tokens=stage.tokens_per_step,
            data_seconds=late.data_seconds,
            mfu=None if peak is None else needed / max(seconds, 1e-9) / (peak * jax.device_count()),
            metrics={
                **{f"train/{name}": value for name, value in means.items()},
                "optim/skipped_steps": int(metrics.skipped),
                "perf/host_seconds": late.host_seconds,
                "perf/tokens_per_second_per_device": stage.tokens_per_step / max(seconds, 1e-9) / jax.device_count(),
                "data/seq_len": stage.seq_len,
                "data/tokens_seen": self.tokens,
                "data/damaged_examples": len(run.loader.damaged),
                "data/fill_fraction": int(metrics.tokens) / stage.tokens_per_step,
                **memory_metrics(),
                **self.goodput.metrics(),
            },
        )
        self.telemetry.step(report)
        self._note_damaged(run)
        progress.skipped_in_a_row = int(metrics.skipped_in_a_row)
        if metrics.skipped_in_a_row:
            self._note_skipped(run, late.step, metrics)
        return now

    def _note_skipped(self, run: PreparedStage, step: int, metrics: Metrics) -> None:
        """Say that an update was skipped, and write down which examples its batch had."""
        finite = math.isfinite(float(metrics.loss)) and math.isfinite(float(metrics.grad_norm))
        reason = "a spike" if finite else "not finite"
        self.telemetry.say(
            f"step {step}: loss {float(metrics.loss):g}, gradient norm {float(metrics.grad_norm):g}: {reason}; the "
            "update was skipped"
        )
        if not self.first_process:
            return
        plan = run.loader.plan(step - 1)
        examples = {
            name: sorted(set(plan.example[plan.corpus == number].tolist()))
            for number, name in enumerate(run.loader.names)
        }
        line = {"step": self._steps_before(run.index) + step, "stage": run.stage.name, "stage_step": step}
        self._append(SKIPPED_FILE, {**line, "reason": reason, "examples": examples})

    def _note_damaged(self, run: PreparedStage) -> None:
        """Say which examples this process could not read and left out, once each."""
        for (corpus, number), reason in run.loader.damaged.items():
            if (corpus, number) not in self.damaged:
                self.damaged.add((corpus, number))
                self.telemetry.say(f"warning: example {number} of corpus {corpus} is left out: {reason}")
                self._append(DAMAGED_FILE, {"corpus": corpus, "example": number, "reason": reason})

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        try:
            with open(self.directory / name, "a") as file:
                print(json.dumps(record), file=file)
        except OSError as error:
            self.telemetry.say(f"warning: cannot write {self.directory / name} ({error.strerror})")

    def _save(self, run: PreparedStage, state: TrainState, step: int, progress: StageProgress, stopping: bool) -> None:
        """Begin a save, after the one before is done; at the end of a stage or run wait for it, trying twice."""
        begin, global_step = self.clock(), self._steps_before(run.index) + step
        if self._finish_save() and global_step == self.saved_step:
            return
        over = step == run.stage.steps
        if over:
            self.records.append(stages.record_of(run, progress))
        must = stopping or (over and run.index + 1 == len(self.config.stages))
        wait = stopping or over
        try:
            for attempt in (1, 2):
                self.checkpoints.begin_save(state, self._manifest(run, state, step, progress))
                if not wait or self._finish_save():
                    break
                if attempt == 2 and must:
                    raise OSError(f"step {step} of stage {run.stage.name} could not be saved, and the run ends there")
        except NonFiniteParameters as error:
            raise NonFiniteLoss(str(error)) from error
        self.saved_step = global_step
        self.goodput.add("save", self.clock() - begin)
        self.watchdog.beat(f"the save after step {step} of stage {run.stage.name}")

    def _finish_save(self) -> bool:
        """Whether the save under way, if any, succeeded. Raises its OSError when too many in a row did not."""
        begin = self.clock()
        try:
            saved = self.checkpoints.finish()
        except OSError as error:
            self.failed_saves += 1
            self.failed_in_a_row += 1
            name = f"{error.filename}: {error.strerror}" if error.filename else str(error)
            most = self.config.checkpoint.max_failed_saves
            self.telemetry.say(
                f"warning: save {self.failed_in_a_row} of {most} in a row failed ({name}); training goes on"
            )
            if self.failed_in_a_row >= most:
                raise
            return False
        if saved is not None:
            self.failed_in_a_row = 0
            self.telemetry.say(f"saved step {saved.step} (waited {self.clock() - begin:.2f}s for it)")
        return True

    def _manifest(self, run: PreparedStage, state: TrainState, step: int, progress: StageProgress) -> Manifest:
        wandb_id = self.directory / ID_FILE
        return Manifest(
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
            seed=self.config.seed,
            data=self.data,
            counters={"failed_saves": self.failed_saves, "goodput": self.goodput.seconds},
            mesh={axis: size for axis, size in sharding.mesh_sizes(run.mesh).items() if size > 1},
            wandb_id=wandb_id.read_text().strip() if wandb_id.exists() else "",
        )

    def _continue_from(self, saved: Manifest) -> None:
        """What the checkpoint counted goes on from there."""
        self.records, self.tokens, self.saved_step = list(map(dict, saved.stages)), saved.tokens, saved.step
        self.failed_saves = int(saved.counters.get("failed_saves", 0))
        restored = self.goodput.seconds["restore"]
        self.goodput = Goodput(saved.counters.get("goodput"), self.clock)
        self.goodput.add("restore", restored)
        if self.first_process:
            records = read_metrics(self.directory / METRICS_FILE)
            self.goodput.resumed(records, saved.step, saved.unix_time, time.time())
            for changed in resume.changed_fields(self.config, self.directory):
                self.telemetry.say(f"the configuration changed since this run was last started: {changed}")
        self.telemetry.rewind(saved.step)
        self.telemetry.say(f"resuming after step {saved.stage_step} of stage {saved.stage}")

    def _steps_before(self, index: int) -> int:
        return sum(stage.steps for stage in self.config.stages[:index])

    def _end(
        self, stage: StageConfig, config: ModelConfig, params: Params, mesh: Mesh, on_stage_end: StageEnd | None
    ) -> None:
        """Call `on_stage_end` once; a mark in the run directory says that it came to its end."""
        mark = self.ended / stage.name
        if on_stage_end is None or self._ended(stage.name):
            return
        with self.goodput.timed("evaluate"):
            step = self._steps_before(self.config.stages.index(stage) + 1)
            on_stage_end(Ended(stage, config, params, mesh, self.telemetry, step))
        if self.first_process:
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()

    def _ended(self, stage: str) -> bool:
        """Whether `stage` was called ended before, as the first process sees it: others may have another disk."""
        return bool(cluster.exchange("ended", "yes" if (self.ended / stage).exists() else "")[0])

    def _end_again(self, start: Start, on_stage_end: StageEnd | None) -> None:
        """`_end` of a stage that an earlier process trained to its last step."""
        saved = start.saved
        assert saved is not None
        if on_stage_end is None or not start.begins or self._ended(saved.stage):
            return
        stage = self.config.stage(saved.stage)
        mesh = make_mesh(stage.mesh)
        config = self.config.model.model_copy(update={"rope_theta": stage.rope_theta})
        params = load_params(self.checkpoints.path(saved.step), mesh, config)
        self._end(stage, config, params, mesh, on_stage_end)
