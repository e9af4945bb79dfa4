"""The whole story on one machine's CPU: clips and text to tokens, three context stages, needles, a page with pictures.

Each phase finds what an earlier run of it finished, so a demo that was killed goes on where it was.
"""

import hashlib
import json
import platform
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from data import synthetic
from data.build import Corpus
from data.examples import Span, generation_prompt, to_text, tokenize
from data.synthetic import Haystack
from data.text import VISION_START, TextTokenizer
from eval import needle_text, needle_video, pages, report, runner
from eval.haystack import VideoHaystack, answer_decoder
from eval.plots import Picture, StageCurve
from eval.protocol import Case
from lwm import checkpoint, demo_world, trainer, vqgan_training
from lwm.config import RunConfig, fingerprint, load_config
from lwm.corpora import vocabulary_of
from lwm.demo_world import Clip, World
from lwm.sample import Sampler
from lwm.sharding import make_mesh
from lwm.telemetry import METRICS_FILE, Progress, read_metrics
from lwm.vision_tokenizer import VisionTokenizer

_DISTRACTORS = 3
_VQGAN_BATCH = 8
_BATCH_TOKENS = 8192
_GENERATED_FRAMES = 4
_SHOWN_PLATES = (7, 482, 905, 316)
_PACKAGES = ("jax", "flax", "optax", "orbax-checkpoint", "tensorflow-datasets", "sentencepiece", "grain", "av", "numpy")


@dataclass(frozen=True)
class Size:
    """How much of everything; the tests tell a shorter story."""

    vqgan_steps: int = 500
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    rounds: int = 4
    control_rounds: int = 5
    corpus_share: float = 1.0


def run(out: str | Path, overrides: Sequence[str] = (), size: Size | None = None) -> Path:
    """Run or continue the demo under `out`; returns the path of its page. A finished one says so at once.

    overrides: `field=value` for the configuration `tiny`, beside those that put everything under `out`.

    Raises ValueError when `out` holds something else, or the demo of another configuration.
    """
    out, size = Path(out), size or Size()
    config = load_config("tiny", [*_overrides(out), *overrides])
    identity = hashlib.sha256(f"{fingerprint(config)} {size}".encode()).hexdigest()
    _claim(out, identity)
    page = out / report.HTML_NAME
    if page.exists():
        print(f"the demo was finished before: {page} (remove {out} to run it again)")
        return page
    return _Story(out, config, size, identity).tell()


def _overrides(out: Path) -> list[str]:
    """`tiny`, with everything under `out`."""
    corpora = [corpus.name for corpus in load_config("tiny").corpora]
    return [
        f"output_dir={out}",
        f"tokenizers.text={out}/text.model",
        f"tokenizers.vision={out}/vqgan",
        "telemetry.wandb=offline",
        *(f"corpora.{name}.directory={out}/corpora/{name}" for name in corpora),
    ]


def _claim(out: Path, identity: str) -> None:
    """Mark `out` as this demo's; ValueError when it is somebody else's."""
    mark = out / "demo.json"
    if mark.exists():
        if json.loads(mark.read_text()) != {"demo": identity}:
            raise ValueError(
                f"{out} holds the demo of another configuration or version; remove it, or give --out another directory"
            )
    elif out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty and holds no demo; give --out a new directory")
    else:
        out.mkdir(parents=True, exist_ok=True)
        runner.write_json(mark, {"demo": identity})


class _Story:
    def __init__(self, out: Path, config: RunConfig, size: Size, identity: str):
        assert config.vqgan is not None
        self.out, self.config, self.size, self.identity, self.vqgan = out, config, size, identity, config.vqgan
        self.vocabulary = vocabulary_of(config)
        self.pictures: list[Picture] = []
        self._clock_file = out / "phases.json"
        self.seconds: dict[str, float] = {}

    def tell(self) -> Path:
        """All phases in order."""
        if self._clock_file.exists():
            self.seconds = json.loads(self._clock_file.read_text())
        with self._phase("decode the clips"), Progress("decode the clips", None, unit="clips") as progress:
            clips = demo_world.read_clips(self.vqgan.resolution, progress)
        with self._phase("train the vision tokenizer"):
            vision = self._vision_tokenizer(clips)
        with self._phase("train the text tokenizer"):
            text = self._text_tokenizer()
        with self._phase("build the corpora"):
            world = self._world(clips, vision, text)
            self._build(world)
        with self._phase("train"):
            stages = trainer.train(self.config)
        with self._phase("evaluate"):
            sampler = self._sampler()
            needles = {"needle_text": self._needle_text(sampler, text)}
            needles["needle_video"] = self._needle_video(sampler, world)
        with self._phase("ask and generate"):
            answers = self._ask(sampler, world)
            self._generate(sampler, world, vision)
        summary = {
            "stages": stages,
            **needles,
            "packing_efficiency": self._fill(stages),
            "vqgan": vision.metrics,
            "answers": answers,
            "wall_seconds": self.seconds,
            "peak_rss_mb": _peak_rss_mb(),
            "versions": {"python": platform.python_version(), **{name: metadata.version(name) for name in _PACKAGES}},
        }
        title = "The demo: needles in text and video"
        page = report.write(self.out, summary, title=title, curves=self._curves(), pictures=self.pictures)
        print(_closing(summary, page))
        return page

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Announce a phase and add what it took to what earlier runs of it took."""
        print(f"== {name}", flush=True)
        begin = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = round(self.seconds.get(name, 0.0) + time.monotonic() - begin, 2)
            runner.write_json(self._clock_file, self.seconds)

    def _vision_tokenizer(self, clips: tuple[Clip, ...]) -> VisionTokenizer:
        directory = self.out / "vqgan"
        if directory.exists():
            return VisionTokenizer.load(directory)
        frames, shares = demo_world.vision_frames(clips, self.vqgan.resolution)
        with Progress("train the vision tokenizer", self.size.vqgan_steps, unit="steps") as progress:
            params, metrics = vqgan_training.train(
                self.vqgan,
                frames,
                steps=self.size.vqgan_steps,
                batch=_VQGAN_BATCH,
                seed=self.config.seed,
                shares=shares,
                progress=lambda now: progress(now.step, f"psnr {now.psnr_db:.1f} dB"),
            )
        tokenizer = VisionTokenizer(self.vqgan, params, metrics)
        tokenizer.save(directory)
        return tokenizer

    def _text_tokenizer(self) -> TextTokenizer:
        path = self.out / "text.model"
        if path.exists():
            return TextTokenizer.load(path)
        return demo_world.train_text_tokenizer(path, self.config.model.text_vocab_size, self.config.seed)

    def _world(self, clips: tuple[Clip, ...], vision: VisionTokenizer, text: TextTokenizer) -> World:
        numbers = range(synthetic.NUM_NUMBERS)
        plates = needle_video.encode_plates(vision.encode, self.vqgan.resolution, numbers)
        codes = tuple(vision.encode(clip.pixels) for clip in clips)
        self._show_reconstructions(clips, vision)
        if ambiguous := needle_video.num_ambiguous(plates):
            print(f"{ambiguous} of {len(plates)} plates have the same tokens as another one: they cannot be told apart")
        return World(clips, codes, plates, text, vision.fingerprint, self.vocabulary, self.config.seed)

    def _show_reconstructions(self, clips: tuple[Clip, ...], vision: VisionTokenizer) -> None:
        """Some frames of each clip and some plates, before and after the vision tokenizer."""
        frames = [clip.pixels[np.linspace(0, len(clip.pixels) - 1, 3).astype(int)] for clip in clips]
        plates = [synthetic.needle_frame(number, self.vqgan.resolution) for number in _SHOWN_PLATES]
        shown = np.concatenate([*frames, np.stack(plates)])
        decoded = vision.decode(vision.encode(shown))
        path, quality = self.out / "reconstructions.png", vision.metrics["psnr_db"]
        self.pictures.append(pages.reconstructions(path, shown, decoded, psnr_db=quality))

    def _build(self, world: World) -> dict[str, Corpus]:
        names = [corpus.name for corpus in self.config.corpora]
        built = {}
        with Progress("build the corpora", len(names), unit="corpora") as progress:
            for count, name in enumerate(names, 1):
                built[name] = demo_world.build(self.config, world, name, self.size.corpus_share)
                progress(count, f"{name}: {len(built[name])} examples")
        return built

    def _sampler(self) -> Sampler:
        """The last stage's model on its mesh."""
        stage = self.config.stages[-1]
        mesh = make_mesh(stage.mesh)
        model = checkpoint.load_model_config(self.out)
        params = checkpoint.load_params(self.out, mesh, model)
        return Sampler.for_stage(model, params, stage, mesh, vocabulary=self.vocabulary, max_batch=8)

    def _evaluate(self, name: str, cases: Sequence[Case], sampler: Sampler, text: TextTokenizer) -> dict[str, Any]:
        with Progress(name, len(cases), unit="cases") as bar:
            return runner.evaluate(
                cases,
                sampler,
                self.out / name,
                model_id=self.identity,
                decode=answer_decoder(text),
                stop_id=text.eos_id,
                batch_size=8,
                batch_tokens=_BATCH_TOKENS,
                progress=lambda now: bar(now.done, f"{now.correct} right"),
            )

    def _needle_text(self, sampler: Sampler, text: TextTokenizer) -> dict[str, Any]:
        haystack = Haystack(demo_world.chapters(held_out=True).values(), text)
        cases = needle_text.build_cases(
            self.size.lengths,
            self.size.depths,
            self.size.rounds,
            self.config.seed,
            text,
            haystack,
            num_distractors=_DISTRACTORS,
            distractor_rounds=1,
            control_rounds=self.size.control_rounds,
        )
        return self._evaluate("needle_text", cases, sampler, text)

    def _needle_video(self, sampler: Sampler, world: World) -> dict[str, Any]:
        haystack = VideoHaystack(world.clip_codes)
        cases = needle_video.build_cases(
            self.size.lengths,
            self.size.depths,
            self.size.rounds,
            self.config.seed,
            world.tokenizer,
            haystack,
            vocabulary=self.vocabulary,
            plates=world.plates,
            control_rounds=self.size.control_rounds,
        )
        summary = self._evaluate("needle_video", cases, sampler, world.tokenizer)
        longest = [case for case in cases if case.length == self.size.lengths[-1] and case.depth is not None]
        shown = min(longest, key=lambda case: abs((case.depth or 0.0) - 0.5))
        records = runner.read_records(self.out / "needle_video" / runner.RECORDS_NAME)
        output = records[runner.record_key(shown, self.identity)]["output"]
        pixels = [clip.pixels for clip in world.clips]
        self.pictures.append(needle_video.picture(self.out / "needle_in_place.png", shown, pixels, output=output))
        return summary

    def _ask(self, sampler: Sampler, world: World) -> list[dict[str, str]]:
        """One question about each clip."""
        prompts = []
        for codes in world.clip_codes:
            example = tokenize(
                to_text(Span("video", codes=codes[:4]), "?", system=""), world.tokenizer, self.vocabulary
            )
            prompts.append(example.tokens[: int(example.learn.argmax())])
        outputs = sampler.generate(prompts, max_new_tokens=24, stop_id=world.tokenizer.eos_id)
        decode = runner.text_decoder(world.tokenizer)
        return [
            {"source": clip.name, "question": "Describe the video.", "answer": decode(ids).strip()}
            for clip, ids in zip(world.clips, outputs, strict=True)
        ]

    def _generate(self, sampler: Sampler, world: World, vision: VisionTokenizer) -> None:
        """A few frames for a caption of each clip."""
        strips = []
        for index, clip in enumerate(world.clips):
            prompt = generation_prompt(clip.captions[0], "video", "")
            ids = [world.tokenizer.bos_id, *world.tokenizer.encode(prompt), *world.tokenizer.encode(VISION_START)]
            codes = sampler.generate_video(
                np.asarray(ids, np.int32),
                num_frames=_GENERATED_FRAMES,
                codes_per_frame=world.codes_per_frame,
                temperature=0.7,
                top_k=20,
                seed=index,
            )
            strips.append((clip.captions[0], vision.decode(codes)))
        self.pictures.append(pages.generated(self.out / "generated.png", strips))

    def _fill(self, stages: Sequence[dict[str, Any]]) -> float:
        """Share of the slots of all steps that held real tokens."""
        slots = sum(stage.steps * stage.tokens_per_step for stage in self.config.stages)
        return sum(record["tokens"] for record in stages) / slots

    def _curves(self) -> list[StageCurve]:
        records = read_metrics(self.out / METRICS_FILE)
        curves = []
        for stage in self.config.stages:
            steps = [record for record in records if record.get("stage") == stage.name and "train/loss" in record]
            parts = {
                name: [record.get(f"train/{name}", float("nan")) for record in steps]
                for name in ("loss", "loss_text", "loss_vision")
            }
            curves.append(
                StageCurve(
                    stage.name,
                    stage.seq_len,
                    stage.rope_theta,
                    [record["stage_step"] for record in steps],
                    parts["loss"],
                    parts["loss_text"],
                    parts["loss_vision"],
                )
            )
        return curves


def _peak_rss_mb() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (1 << 20 if sys.platform == "darwin" else 1 << 10), 1)


def _closing(summary: dict[str, Any], page: Path) -> str:
    seconds = sum(summary["wall_seconds"].values())
    lines = [f"the demo is done: {seconds:.0f}s in all, peak memory {summary['peak_rss_mb']:.0f} MB"]
    for name in ("needle_text", "needle_video"):
        cells = ", ".join(f"{length}: {value:.0%}" for length, value in summary[name]["accuracy_by_length"].items())
        lines.append(f"{name}: {cells}; controls {summary[name]['control_accuracy']:.1%}")
    return "\n".join([*lines, f"pictures and numbers: {page}"])
