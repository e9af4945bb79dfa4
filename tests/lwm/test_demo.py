"""The demo's world keeps its promises, and a short story survives a kill and ends with its page."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data import synthetic
from data.vocabulary import Vocabulary
from eval import needle_text
from lwm import demo, demo_world
from lwm.telemetry import read_metrics

SHORT = demo.Size(vqgan_steps=6, lengths=(128, 256), depths=(0.0, 1.0), rounds=1, control_rounds=1, corpus_share=0.01)
STEPS = [
    *(f"stages.{name}.steps={steps}" for name, steps in (("s512", 4), ("s1024", 4), ("s4096", 2))),
    *(f"stages.{name}.optimizer.warmup_steps=1" for name in ("s512", "s1024", "s4096")),
    "checkpoint.every_steps=2",
]
STORY = f"from lwm import demo; demo.run({{out!r}}, {STEPS!r}, demo.{SHORT!r})"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> demo_world.World:
    """Real text and clips, with random codes in the place of a trained vision tokenizer's."""
    rng = np.random.default_rng(0)
    tokenizer = demo_world.train_text_tokenizer(tmp_path_factory.mktemp("text") / "text.model", 512, 0)
    clips = demo_world.read_clips(32)
    codes = tuple(rng.integers(0, 500, (len(clip.pixels), 16)) for clip in clips)
    plates = {number: rng.integers(500, 512, 16) for number in range(synthetic.NUM_NUMBERS)}
    return demo_world.World(clips, codes, plates, tokenizer, "random", Vocabulary(512, 512, 544), seed=0)


def test_text_needles_of_training_are_never_those_of_the_evaluation(world: demo_world.World) -> None:
    find = needle_text.finder(world.tokenizer)
    recipe = replace(demo_world.RECIPES["text_needles_1024"], tokens=100_000)
    numbers = set()
    for example in recipe.examples(world, "text_needles_1024"):
        assert len(example) <= 1024
        needles = find(example.tokens)
        assert needles
        numbers |= {int(needle.number) for needle in needles}
        answer = synthetic.hear(world.tokenizer.decode(example.tokens[example.learn]))
        assert answer.strip() in {needle.number for needle in needles}
    assert len(numbers) > 200
    assert not numbers & synthetic.held_out_numbers()


def test_video_needles_show_the_plate_they_ask_for(world: demo_world.World) -> None:
    plates = {codes.tobytes(): number for number, codes in world.plates.items()}
    recipe = replace(demo_world.RECIPES["video_needles_1024"], tokens=50_000)
    for example in recipe.examples(world, "video_needles_1024"):
        ids = example.tokens[world.vocabulary.is_vision(example.tokens)]
        shown = [plates[frame.tobytes()] for frame in world.vocabulary.split_frames(ids).astype(np.int64)
                 if frame.tobytes() in plates]  # fmt: skip
        assert [synthetic.spell(number) for number in shown] == [
            synthetic.hear(world.tokenizer.decode(example.tokens[example.learn])).strip()
        ]
        assert not synthetic.is_held_out(shown[0])


def test_haystacks_of_training_and_evaluation_share_no_chapter() -> None:
    train, held_out = (demo_world.chapters(held_out=which) for which in (False, True))
    assert not train.keys() & held_out.keys()
    assert len(held_out) == (len(train) + len(held_out)) // demo_world.HELD_OUT_EVERY


def test_recipes_are_reproducible_and_reach_their_lengths(world: demo_world.World) -> None:
    recipe = replace(demo_world.RECIPES["text_needles_4096"], tokens=60_000)
    once, again = (list(recipe.examples(world, "text_needles_4096")) for _ in range(2))
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(once, again, strict=True))
    assert max(map(len, once)) > 4090


def test_vision_tokenizer_trains_on_no_held_out_plate() -> None:
    clips = demo_world.read_clips(32)
    frames, shares = demo_world.vision_frames(clips, 32)
    seen = {frame.tobytes() for frame in frames}
    assert not any(synthetic.needle_frame(n, 32).tobytes() in seen for n in synthetic.held_out_numbers())
    num_plates = synthetic.NUM_NUMBERS - len(synthetic.held_out_numbers())
    np.testing.assert_allclose([shares.sum(), shares[-num_plates:].sum()], [1, demo_world.PLATE_SHARE])


def _start(out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", STORY.format(out=str(out))]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "WANDB_SILENT": "true"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def test_killed_story_goes_on_and_a_finished_one_says_so(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    first = _start(out)
    deadline = time.monotonic() + 300
    while not any(record.get("stage") == "s1024" for record in read_metrics(out / "metrics.jsonl")):
        assert first.poll() is None, first.stdout and first.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.2)
    first.send_signal(signal.SIGKILL)
    first.communicate()

    second = _start(out)
    output, _ = second.communicate(timeout=400)
    assert second.returncode == 0, output
    report = json.loads((out / "report.json").read_text())
    assert [stage["seq_len"] for stage in report["stages"]] == [512, 1024, 4096]
    assert "drawn from seed" not in output, "the first stage was trained again"
    trained = [(r["stage"], r["stage_step"]) for r in read_metrics(out / "metrics.jsonl") if "train/loss" in r]
    assert trained == [(name, step) for name, steps in (("s512", 4), ("s1024", 4), ("s4096", 2))
                       for step in range(1, steps + 1)]  # fmt: skip
    for key in ("needle_text", "needle_video"):
        assert set(report[key]["accuracy_by_length"]) == {"128", "256"}
        assert report[key]["cells"]
        assert 0 <= report[key]["control_accuracy"] <= 1
    assert set(report["vqgan"]) >= {"psnr_db", "codes_used"}
    assert 0.9 < report["packing_efficiency"] <= 1
    for picture in ("needle_text.png", "needle_video.png", "loss.png", "reconstructions.png", "generated.png",
                    "needle_in_place.png", "report.html"):  # fmt: skip
        assert (out / picture).stat().st_size > 1000, picture

    third = _start(out)
    output, _ = third.communicate(timeout=200)
    assert third.returncode == 0, output
    assert "finished before" in output
    assert "== " not in output, "a phase was run again"


def test_somebody_elses_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match="is not empty and holds no demo"):
        demo.run(tmp_path)
    (tmp_path / "demo.json").write_text('{"demo": "another"}')
    with pytest.raises(ValueError, match="of another configuration or version"):
        demo.run(tmp_path)
