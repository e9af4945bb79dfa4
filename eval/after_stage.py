"""Needles at the end of a training stage, as the stage's `needles` ask for them: accuracies and pictures in the run's
telemetry, records and heatmaps in its directory."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from data.synthetic import Haystack, frames_that_fit, sentences
from data.video import read_frames
from eval import needle_text, needle_video, pages, plots, runner
from eval.haystack import VideoHaystack, answer_decoder
from eval.protocol import Case
from lwm import cluster
from lwm.config import NeedlesConfig, RunConfig, StageConfig, fingerprint
from lwm.corpora import text_tokenizer_of, vision_tokenizer_of, vocabulary_of
from lwm.following import follow
from lwm.media import find
from lwm.prompts import read_document
from lwm.sample import Sampler
from lwm.trainer import Ended
from lwm.vision_tokenizer import VisionTokenizer

_BATCH = 8
_SHOWN_FRAMES = 8


class NeedlesAfterStage:
    """For `trainer.train`: asks the model of each stage that has `needles`.

    Raises ValueError at once, before training, where a stage asks for what the configuration or the run lacks.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        wanted = [stage.needles for stage in config.stages if stage.needles is not None]
        if not wanted:
            return
        self._text = text_tokenizer_of(config)
        self._vision = vision_tokenizer_of(config) if any(each.video for each in wanted) else None
        for stage in config.stages:
            if stage.needles is not None:
                self._check(stage, stage.needles)

    def __call__(self, ended: Ended) -> None:
        """Of several processes the first asks, and all compute."""
        if ended.stage.needles is None:
            return
        sampler = Sampler.for_stage(
            ended.model, ended.params, ended.stage, ended.mesh, vocabulary=vocabulary_of(self._config), max_batch=_BATCH
        )
        if jax.process_index() > 0:
            follow(sampler.generate)
        elif jax.process_count() > 1:
            cluster.lead()
            try:
                self._ask(sampler, ended, ended.stage.needles)
            except (ValueError, OSError) as error:
                cluster.dismiss(str(error))
                raise cluster.Disagreement(str(error)) from error
            cluster.dismiss()
        else:
            self._ask(sampler, ended, ended.stage.needles)

    def _ask(self, sampler: Sampler, ended: Ended, needles: NeedlesConfig) -> None:
        out = Path(self._config.output_dir) / "needles" / ended.stage.name
        self._play("needle_text", self._text_cases(needles), sampler, out / "text", ended)
        if needles.video:
            assert self._vision is not None
            frames = self._frames(needles, self._vision)
            shown = np.concatenate(frames)[:_SHOWN_FRAMES]
            picture = pages.reconstructions(
                out / "reconstructions.png",
                shown,
                self._vision.decode(self._vision.encode(shown)),
                psnr_db=float(self._vision.metrics.get("psnr_db", float("nan"))),
            )
            ended.telemetry.image("eval/reconstructions", picture.path, step=ended.step, caption=picture.caption)
            self._play("needle_video", self._video_cases(needles, frames), sampler, out / "video", ended)

    def _play(self, name: str, cases: Sequence[Case], sampler: Sampler, out: Path, ended: Ended) -> None:
        ended.telemetry.say(f"stage {ended.stage.name}: asking {len(cases)} questions ({name})")
        summary: dict[str, Any] = runner.evaluate(
            cases,
            sampler,
            out,
            model_id=f"{fingerprint(self._config)[:12]}-{ended.step}",
            decode=answer_decoder(self._text),
            stop_id=self._text.eos_id,
            batch_size=_BATCH,
        )
        title = f"{name.replace('_', ' ')} after stage {ended.stage.name}"
        picture = plots.heatmap(out / "heatmap", summary, title=title)
        metrics = {f"eval/{name}_accuracy": summary["accuracy"]}
        metrics |= {f"eval/{name}_accuracy_{length}": value for length, value in summary["accuracy_by_length"].items()}
        if summary["control_accuracy"] is not None:
            metrics[f"eval/{name}_control_accuracy"] = summary["control_accuracy"]
        ended.telemetry.log(metrics, step=ended.step, stage=ended.stage.name)
        ended.telemetry.image(f"eval/{name}", picture.path, step=ended.step, caption=picture.caption)
        ended.telemetry.say(f"stage {ended.stage.name}: {name} {summary['accuracy']:.1%} right, {picture.path}")

    def _check(self, stage: StageConfig, needles: NeedlesConfig) -> None:
        """What would go wrong at the end of the stage goes wrong now: hours of training lie between."""
        longest, least = max(needles.lengths), min(needles.lengths)
        if longest > stage.seq_len:
            raise ValueError(
                f"stage {stage.name}: needles.lengths has {longest}, above its seq_len {stage.seq_len}; shorten it"
            )
        try:
            self._text_cases(needles.model_copy(update={"lengths": (least,), "depths": (0.0,), "rounds": 1}))
            if needles.video:
                assert self._vision is not None
                find([Path(each) for each in needles.video])
                frames_that_fit(least, self._vision.codes_per_frame, self._text, vocabulary_of(self._config))
        except ValueError as error:
            raise ValueError(f"stage {stage.name}: needles cannot be asked: {error}") from error

    def _text_cases(self, needles: NeedlesConfig) -> list[Case]:
        texts = [read_document(Path(file)) for file in needles.haystack]
        texts = texts or list(sentences(np.random.default_rng(self._config.seed), 2000))
        return needle_text.build_cases(
            needles.lengths,
            needles.depths,
            needles.rounds,
            self._config.seed,
            self._text,
            Haystack(texts, self._text),
            control_rounds=needles.rounds,
        )

    def _frames(self, needles: NeedlesConfig, vision: VisionTokenizer) -> list[np.ndarray]:
        size = vision.config.resolution
        return [read_frames(file, fps=1.0, size=size).pixels for file in find([Path(each) for each in needles.video])]

    def _video_cases(self, needles: NeedlesConfig, frames: Sequence[np.ndarray]) -> list[Case]:
        assert self._vision is not None
        vision = self._vision
        return needle_video.build_cases(
            needles.lengths,
            needles.depths,
            needles.rounds,
            self._config.seed,
            self._text,
            VideoHaystack(tuple(vision.encode(clip) for clip in frames)),
            vocabulary=vocabulary_of(self._config),
            plates=needle_video.encode_plates(vision.encode, vision.config.resolution),
            control_rounds=needles.rounds,
        )
