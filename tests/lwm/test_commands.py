"""The commands that use a model, end to end on an untrained one: vision tokenizer, corpora, ask, generate, eval."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import av
import jax
import numpy as np
import pytest
import yaml
from PIL import Image

from data import synthetic
from data.build import Corpus
from data.text import TextTokenizer, train_tokenizer
from data.video import read_frames
from lwm import cli, media, model, prompts, run_directory, serving, vqgan
from lwm.checkpoint import save_params
from lwm.config import load_config
from lwm.corpora import vocabulary_of
from lwm.vision_tokenizer import VisionTokenizer


def refusal(*arguments: str) -> str:
    stderr = io.StringIO()
    assert cli.run(arguments, stderr) == 2
    text = stderr.getvalue()
    assert text.startswith("lwm: ")
    assert text.count("\n") == 1
    return text[len("lwm: ") : -1]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two clips, a text, a configuration, a text tokenizer, an untrained vision tokenizer and an untrained model."""
    root = tmp_path_factory.mktemp("world")
    rng = np.random.default_rng(0)
    (root / "clips").mkdir()
    for name in ("one", "two"):
        media.write(root / "clips" / f"{name}.mp4", synthetic.shape_clip(rng, 8, 32)[0], fps=4.0)
    (root / "text.txt").write_text(" ".join(synthetic.sentences(rng, 300)))
    text = train_tokenizer([(root / "text.txt").read_text()], root / "text.model", size=160)
    stage = {
        "name": "only",
        "seq_len": 256,
        "batch_rows": 8,
        "steps": 1,
        "rope_theta": 1e4,
        "mesh": {"fsdp": 2, "sp": 4},
        "optimizer": {"peak_lr": 1e-3, "warmup_steps": 0},
        "mixture": [{"corpus": "clips", "share": 1.0}],
        "compute_dtype": "float32",
    }
    config = {
        "name": "small",
        "output_dir": str(root / "run"),
        "model": {
            "text_vocab_size": text.size,
            "vision_vocab_size": 40,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_layers": 1,
            "num_heads": 2,
        },
        "vqgan": {
            "resolution": 32,
            "hidden_channels": 4,
            "channel_mult": [1, 1, 1, 1],
            "num_res_blocks": 1,
            "z_channels": 4,
            "num_embeddings": 32,
            "quantized_embed_dim": 4,
        },
        "tokenizers": {"text": str(root / "text.model"), "vision": str(root / "vqgan")},
        "corpora": [{"name": "clips", "directory": str(root / "corpus")}],
        "stages": [stage],
    }
    path = root / "small.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    run = load_config(path)
    assert run.vqgan is not None
    VisionTokenizer(run.vqgan, vqgan.init(run.vqgan, jax.random.key(0))).save(root / "vqgan")
    save_params(root / "run" / "checkpoints", run.model, model.init(run.model, jax.random.key(0)))
    run_directory.save_run(run)
    return root


def test_train_vision(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = world / "trained"
    train = ["tokenizer", "train-vision", str(world / "small.yaml"), "vqgan.resolution=8", "vqgan.channel_mult=[1]"]
    train += ["--videos", str(world / "clips"), "--steps", "4", "--batch", "2", "--fps", "4", "--out", str(directory)]
    assert cli.run(train) == 0
    vision = VisionTokenizer.load(directory)
    assert f"{directory}: 16 frames of 2 files" in capsys.readouterr().out
    assert set(vision.metrics) == {"loss", "psnr_db", "codes_used", "held_out"}
    assert f"{directory} is there already; give --overwrite" in refusal(*train)


def test_a_corpus_of_clips(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vision = VisionTokenizer.load(world / "vqgan")
    manifest = world / "clips.jsonl"
    lines = [
        {"template": "video->text", "path": "clips/one.mp4", "caption": "a square moves", "num_frames": 3},
        {"template": "text->image", "path": "clips/two.mp4", "caption": "a square"},
    ]
    manifest.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = str(world / "small.yaml")
    assert cli.run(["data", "build", config, str(manifest)]) == 0
    corpus = Corpus.open(world / "corpus")
    tokens = corpus[0].tokens
    run = load_config(config)
    vocabulary = vocabulary_of(run)
    shown = read_frames(world / "clips" / "one.mp4", num_frames=3, size=32).pixels
    expected = vocabulary.vision_tokens(vision.encode(shown))
    assert tokens[vocabulary.is_vision(tokens)].tolist() == expected.tolist()
    missing = [f"tokenizers.vision={world / 'nothing'}", f"corpora.clips.directory={world / 'other'}"]
    assert "there is no vision tokenizer in" in refusal("data", "build", config, str(manifest), *missing)
    assert "tokenizers.vision is not set" in refusal(
        "data", "build", config, str(manifest), "tokenizers.vision=null", missing[1]
    )
    changed = refusal("data", "build", config, str(manifest), "vqgan.num_res_blocks=2", missing[1])
    assert "is not of the configuration's vqgan" in changed
    assert not (world / "other").exists()
    capsys.readouterr()


def test_ask_puts_the_training_prompt(
    world: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clip = str(world / "clips" / "one.mp4")
    ask = ["ask", "--checkpoint", str(world / "run"), "--question", "What is it?", "--max-new-tokens", "6"]
    assert cli.run([*ask, "--video", clip, "--frames", "4", "--system", ""]) == 0
    said = capsys.readouterr()
    assert "6 written" in said.err
    run = serving.open_run(world / "run")
    seen = prompts.look(clip, run.need_vision(), num_frames=4)
    prompt = prompts.ask_about_media(seen, "What is it?", run.text, run.vocabulary, system="")
    logits = jax.jit(lambda tokens: model.logits(run.sampler.config, run.sampler.params, tokens))
    ids: list[int] = []
    for _ in range(6):
        row = np.zeros((1, 128), np.int32)
        row[0, : len(prompt) + len(ids)] = [*prompt, *ids]
        scores = np.asarray(logits(row))[0, len(prompt) + len(ids) - 1, : run.vocabulary.text_size]
        ids.append(int(scores.argmax()))
    assert said.out == prompts.answer_text(ids, run.text) + "\n"
    assert run.text.decode(prompt[prompt < run.text.size]) == "USER: What is it?\n <vision> </vision> ASSISTANT:"
    assert run.vocabulary.is_vision(prompt).sum() == 4 * 17
    media = ["--video", clip, "--frames", "3", "--order", "media-first"]
    single = []
    for asked in ("Who?", "What number is it?"):
        assert cli.run([*ask[:3], "--question", asked, "--max-new-tokens", "6", *media]) == 0
        single.append(capsys.readouterr().out)
    monkeypatch.setattr("sys.stdin", io.StringIO("Who?\n\nWhat number is it?\n"))
    assert cli.run([*ask[:3], "--max-new-tokens", "6", *media, "--prefill-chunk", "16"]) == 0
    said = capsys.readouterr()
    assert said.out == "".join(single)
    assert "and 0 not read again" not in said.err
    assert "not read again" in said.err
    assert "text.txt is empty" in refusal(*ask, "--text", str(_empty(world / "empty_text.txt")))
    assert "give one of --video, --image and --text" in refusal(*ask)
    assert "but the model's context is 256" in refusal(*ask, "--video", clip, "--frames", "20")
    assert str(world / "no.mp4") in refusal(*ask, "--video", str(world / "no.mp4"))
    assert "order is 'backwards'" in refusal(*ask, "--video", clip, "--order", "backwards")


def test_a_conversation_goes_on_after_its_media(world: Path) -> None:
    text = TextTokenizer.load(world / "text.model")
    vocabulary = vocabulary_of(load_config(world / "small.yaml"))
    talk = prompts.MediaTalk(prompts.Span("video", codes=np.zeros((2, 16), np.int32)), text, vocabulary, system="")
    first = talk.prompt("Who?")
    talk.answered([5, 6])
    second = talk.prompt("Why?")
    turn = text.encode("USER: Why? ASSISTANT:")
    assert second.tolist() == [*first.tolist(), 5, 6, text.eos_id, *turn]
    written: list[str] = []
    writer = prompts.Writer(text, written.append)
    ids = text.encode("the old man sees a boat.")
    for start in range(0, len(ids), 2):
        writer.add(ids[start : start + 2])
    writer.end()
    assert "".join(written) == "the old man sees a boat.\n"
    assert len(written) > 3


def _empty(path: Path) -> Path:
    path.touch()
    return path


def test_needle_questions_come_after_the_media(world: Path) -> None:
    text = TextTokenizer.load(world / "text.model")
    vocabulary = vocabulary_of(load_config(world / "small.yaml"))
    codes = np.zeros((3, 16), np.int32)
    needle = synthetic.video_needle(codes, codes[0], 7, 0.5, text, vocabulary)
    span = prompts.Span("video", codes=codes)
    made = prompts.ask_about_media(span, synthetic.PLATE_QUESTION, text, vocabulary, system="", order="media-first")
    np.testing.assert_array_equal(made, needle.tokens)
    hay = synthetic.Haystack([(world / "text.txt").read_text()], text)
    placed = synthetic.place_text_needle(np.random.default_rng(0), hay, text, 200, depth=0.0)
    document = text.decode(placed.tokens[1:]).split("\nUSER:")[0]
    asked = prompts.ask_about_text(synthetic.needle_question(), text, document=document, system="")
    question = text.encode(f"\nUSER: {synthetic.needle_question()} ASSISTANT:")
    assert placed.tokens[-len(question) :].tolist() == asked[-len(question) :].tolist() == question
    assert text.decode(asked).split() == text.decode(placed.tokens).split()


def test_generate_writes_a_video(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = world / "out" / "clip.mp4"
    generate = ["generate", "--checkpoint", str(world / "run"), "--prompt", "a red square", "--system", ""]
    assert cli.run([*generate, "--frames", "3", "--guidance", "2", "--top-k", "9", "--out", str(out)]) == 0
    assert "3 frames of 32 x 32 pixels" in capsys.readouterr().out
    assert read_frames(out).pixels.shape == (3, 32, 32, 3)
    assert "ends in .jpg" in refusal(*generate, "--out", str(world / "a.jpg"))
    assert "20 frames of 16 codes take 340" in refusal(*generate, "--out", str(out), "--frames", "20")


def test_needles(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--checkpoint", str(world / "run"), "--lengths", "250", "--depths", "0,1", "--rounds", "2"]
    common += ["--control-rounds", "0"]
    text = ["eval", "needle-text", *common, "--out", str(world / "text"), "--haystack", str(world / "text.txt")]
    video = ["eval", "needle-video", *common, "--out", str(world / "video"), "--videos", str(world / "clips")]
    for command, out in ((text, world / "text"), (video, world / "video")):
        assert cli.run(command) == 0
        summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
        assert summary["num_cases"] == 4
        assert 0 <= summary["accuracy"] <= 1
        assert {(cell["length"], cell["depth"]) for cell in summary["cells"]} == {(250, 0.0), (250, 1.0)}
        assert (out / "heatmap.png").is_file()
        before = (out / "cases.jsonl").read_bytes()
        assert cli.run(command) == 0
        assert (out / "cases.jsonl").read_bytes() == before
        capsys.readouterr()
    assert (world / "video" / "needle_in_place.png").is_file()
    assert "--lengths has 512, but the context is 256" in refusal(*text, "--lengths", "512")
    assert "give numbers separated by commas" in refusal(*text, "--depths", "deep")
    assert "give either --checkpoint DIR or --model" in refusal(*text, "--model", "oracle")
    assert "there is no checkpoint in" in refusal(*text, "--checkpoint", str(world / "clips"))


def test_questions_about_videos(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"video": name, "question": "Where to?", "candidates": ["left", "right"], "answer": "left"}
        for name in ("one.mp4", "two.mp4", "three.mp4")
    ]
    (world / "qa.json").write_text(json.dumps(rows))
    command = ["eval", "video-qa", "--dataset", str(world / "qa.json"), "--videos", str(world / "clips")]
    command += ["--checkpoint", str(world / "run"), "--system", "", "--max-new-tokens", "4", "--out", str(world / "qa")]
    assert cli.run(command) == 0
    summary = json.loads((world / "qa" / "summary.json").read_text())
    assert (summary["num_cases"], summary["num_errors"]) == (3, 1)
    assert "failed three.mp4/Where to?: there is no video three.mp4 in" in capsys.readouterr().out
    before = (world / "qa" / "cases.jsonl").read_bytes()
    assert cli.run(command) == 0
    assert (world / "qa" / "cases.jsonl").read_bytes() == before
    capsys.readouterr()


@pytest.mark.parametrize("task", ["needle-text", "needle-video"])
def test_models_that_need_no_checkpoint(tmp_path: Path, task: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name, low, high in (("oracle", 1.0, 1.0), ("random", 0.0, 0.3), ("first-k", 0.1, 0.9)):
        out = tmp_path / name
        options = ["--model", name, "--out", str(out), "--lengths", "512,1024", "--rounds", "1"]
        assert cli.run(["eval", task, *options, "--families", "all", "--family-rounds", "2"]) == 0
        summary = json.loads((out / "summary.json").read_text())
        assert low <= summary["accuracy"] <= high
        assert len(summary["families"]) == (3 if task == "needle-text" else 5)
        scores = [family["score"] for family in summary["families"].values()]
        assert name != "oracle" or scores == [1.0] * len(scores)
        assert name != "random" or max(scores) < 0.5
        with (out / "cases.csv").open(newline="") as file:
            assert len(list(csv.DictReader(file))) == sum(1 for _ in (out / "cases.jsonl").open())
    # The steps apart: the same manifest, asked of another model, has the same cases.
    manifest = (tmp_path / "oracle" / "manifest.jsonl").read_bytes()
    (tmp_path / "steps").mkdir()
    for given in ("manifest.jsonl", "text.model"):
        (tmp_path / "steps" / given).write_bytes((tmp_path / "oracle" / given).read_bytes())
    steps = ["eval", task, "--out", str(tmp_path / "steps")]
    assert "has no answers yet" in refusal(*steps, "--step", "score")
    assert cli.run([*steps, "--step", "run", "--model", "oracle"]) == 0
    assert cli.run([*steps, "--step", "score,plot"]) == 0
    assert (tmp_path / "steps" / "manifest.jsonl").read_bytes() == manifest
    expected, summary = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("oracle", "steps"))
    assert summary == expected
    changed = manifest.replace(b'"round": 0', b'"round": 7', 1)
    (tmp_path / "steps" / "manifest.jsonl").write_bytes(changed)
    assert "was changed after it was written" in refusal(*steps, "--step", "run", "--model", "oracle")
    assert "there is no 'guess'" in refusal(*steps, "--step", "guess")
    assert "unknown model 'prophet'" in refusal("eval", task, "--model", "prophet", "--out", str(tmp_path / "x"))
    capsys.readouterr()


def test_a_checkpoint_without_its_configuration(world: Path, tmp_path: Path) -> None:
    run = load_config(world / "small.yaml")
    save_params(tmp_path / "bare", run.model, model.init(run.model, jax.random.key(0)))
    with pytest.raises(ValueError, match=r"has no run\.json .* give the configuration"):
        run_directory.find_run(tmp_path / "bare")
    assert run_directory.find_run(tmp_path / "bare", str(world / "small.yaml")) == run
    assert run_directory.find_run(world / "run" / "checkpoints") == run
    assert run_directory.find_run(world / "run", None, ["seed=7"]).seed == 7


def test_media_files(tmp_path: Path) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (4, 15, 18, 3), dtype=np.uint8)
    with Image.open(media.write(tmp_path / "a" / "strip.PNG", frames)) as picture:
        np.testing.assert_array_equal(np.asarray(picture), np.concatenate(list(frames), axis=1))
    with av.open(str(media.write(tmp_path / "clip.mp4", frames, fps=2.5))) as container:
        stream = container.streams.video[0]
        assert (stream.width, stream.height, float(stream.average_rate or 0)) == (18, 16, 2.5)
        assert sum(1 for _ in container.decode(stream)) == 4
    with Image.open(media.write(tmp_path / "clip.gif", frames, fps=4)) as picture:
        assert (picture.info["duration"], getattr(picture, "n_frames", 1)) == (250, 4)
    for bad, message in ((frames[0], "frames are"), (frames[:0], "frames are")):
        with pytest.raises(ValueError, match=message):
            media.write(tmp_path / "bad.png", bad)
    with pytest.raises(ValueError, match="fps is 0"):
        media.write(tmp_path / "bad.gif", frames, fps=0)
    with pytest.raises(OSError, match=r"clip\.mp4"):
        media.write(tmp_path / "clip.mp4" / "below.png", frames)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "clip.gif", "clip.mp4"]
    assert [path.name for path in media.find([tmp_path, tmp_path / "x.mp4"])] == ["clip.gif", "clip.mp4", "x.mp4"]
