"""The command line: exit codes, one sentence for bad input, quick help, simulated devices."""

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from pydantic import ValidationError

from lwm import cli, config_help
from lwm.config import ModelConfig, RunConfig
from lwm.config_io import walk_fields
from lwm.lifecycle import Hang, NonFiniteLoss, Preempted

ROOT = Path(__file__).parents[2]
PROGRAM = [sys.executable, "-c", "from lwm.cli import main; main()"]


def refusal(*arguments: str, code: int = 2) -> str:
    """What the program says on stderr, which must be one line."""
    stderr = io.StringIO()
    assert cli.run(arguments, stderr) == code
    text = stderr.getvalue()
    assert text.startswith("lwm: ")
    assert text.count("\n") == 1
    assert "Traceback" not in text
    return text[len("lwm: ") : -1]


def raising(error: BaseException) -> typer.Typer:
    """A program whose only command raises."""
    program = typer.Typer(pretty_exceptions_enable=False)

    @program.command()
    def fail() -> None:
        raise error

    return program


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ValueError("seed is\n  wrong"), 2, "seed is wrong"),
        (ValueError(), 2, "ValueError"),
        (FileNotFoundError(2, "No such file or directory", "clip.mp4"), 2, "clip.mp4: No such file or directory"),
        (
            OSError(28, "No space left on device"),
            2,
            "No space left on device; free some space and run the same command",
        ),
        (Preempted("stopped by SIGTERM at step 5, saved"), 42, "stopped by SIGTERM at step 5, saved"),
        (Hang("no step for 600 s"), 43, "no step for 600 s"),
        (NonFiniteLoss("5 steps in a row"), 44, "5 steps in a row"),
    ],
)
def test_exit_codes(error: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cli.DEBUG, raising=False)
    stderr = io.StringIO()
    assert cli.run([], stderr, raising(error)) == code
    assert stderr.getvalue().startswith(f"lwm: {said}")
    assert stderr.getvalue().count("\n") == 1


def test_interrupted() -> None:
    assert cli.run([], io.StringIO(), raising(KeyboardInterrupt())) == 130


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(TypeError):
        cli.run([], io.StringIO(), raising(TypeError("a bug")))


def test_a_full_disk_for_real() -> None:
    program = typer.Typer(pretty_exceptions_enable=False)

    @program.command()
    def write() -> None:
        Path("/dev/full").write_text("x")

    stderr = io.StringIO()
    assert cli.run([], stderr, program) == 2
    assert stderr.getvalue() == "lwm: No space left on device; free some space and run the same command again\n"


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cli.DEBUG, "1")
    stderr = io.StringIO()
    assert cli.run([], stderr, raising(ValueError("seed is wrong"))) == 2
    assert "Traceback" in stderr.getvalue()
    assert stderr.getvalue().endswith("lwm: seed is wrong\n")


def test_an_object_built_in_python_is_described_like_a_file() -> None:
    with pytest.raises(ValidationError) as error:
        ModelConfig.model_validate({"text_vocab_size": 8, "hiden_size": 8})
    assert cli.sentence(error.value).startswith("unknown key 'hiden_size'; did you mean 'hidden_size'?")


def test_bad_input_is_one_sentence(tmp_path: Path) -> None:
    assert "did you mean 'tiny'?" in refusal("check", "tinny")
    assert "did you mean 'steps'?" in refusal("train", "tiny", "stages.0.stepz=1")
    assert "needs 8 devices but there are 6" in refusal("check", "tiny", "--devices", "6")
    assert "cannot be split by the striped layout" in refusal("train", "tiny", "stages.s4096.seq_len=4098")
    assert "no field is called 'zz'" in refusal("config-help", "zz")
    missing = tmp_path / "missing"
    assert str(missing) in refusal("data", "inspect", str(missing))
    assert str(missing) in refusal("data", "verify", str(missing))
    out = str(tmp_path / "text.model")
    assert f"{missing}: No such file" in refusal("tokenizer", "train-text", str(missing), "--out", out)


def test_usage_errors_exit_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["nope"], ["check"], ["check", "tiny", "--bogus"], ["check", "tiny", "--devices", "x"]):
        assert cli.run(arguments) == 2, arguments
    assert "No such command 'nope'" in capsys.readouterr().err


def test_check_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["check", "tiny"]) == 0
    text = capsys.readouterr().out
    assert "s4096" in text
    assert "3 stages divide over 8 devices" in text


def test_help_explains_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["train", "--help"]) == 0
    text = capsys.readouterr().out
    for name, info, _ in walk_fields(RunConfig):
        line = next(line for line in text.splitlines() if line.startswith(f"{name} "))
        assert line.endswith(str(info.description))


def test_config_help_narrows_and_says_types_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["config-help", "stages.0.optimizer"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 9
    rows = {row.name: row for row in config_help.field_rows()}
    assert rows["stages.*.mesh.fsdp"][1:3] == ("integer", "-1")
    assert rows["stages.*.optimizer.b2"][1:3] == ("number >= 0 < 1", "0.95")
    assert rows["stages.*.optimizer.clip_norm"][1:3] == ("number > 0 or null", "1")
    assert rows["model.head_dim"][1:3] == ("integer > 0", "derived")
    assert rows["model.tie_embeddings"][1:3] == ("true | false", "false")
    assert rows["vqgan.channel_mult"][1:3] == ("list of integer > 0", "required")
    assert rows["stages.*.packing"][1:3] == ("masked | concat | pad", "masked")
    assert rows["tokenizers.text"][1:3] == ("text or null", "null")


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    program = (
        "import sys; from lwm import cli; code = cli.run(['--help'])\n"
        "print(code, *sorted({'jax', 'numpy', 'wandb', 'rich', 'pydantic'} & set(sys.modules)))"
    )
    seconds = []
    for _ in range(3):
        begin = time.monotonic()
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
        seconds.append(time.monotonic() - begin)
        assert done.stdout.splitlines()[-1] == "0"
        if seconds[-1] < 1:
            break
    assert min(seconds) < 1


def test_a_closed_pipe_is_no_error() -> None:
    process = subprocess.Popen([*PROGRAM, "config-help"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert b"Traceback" not in process.stderr.read()
    process.stderr.close()
    process.wait(timeout=30)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("lwm")


def test_simulated_devices_are_asked_for_before_jax_starts() -> None:
    environ: dict[str, str] = {}
    cli.simulate_devices(None, environ)
    assert environ == {}
    cli.simulate_devices(4, environ)
    assert environ["XLA_FLAGS"].startswith("--xla_force_host_platform_device_count=4 ")
    kept = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    cli.simulate_devices(4, kept)
    assert kept == {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    program = "from lwm import cli; cli.simulate_devices(5)\nimport jax; print(len(jax.devices()))"
    clean = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=clean, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "5"


def test_tokenizer_and_corpus_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from data.text import TextTokenizer

    lines = [f"the quick brown fox jumps over {number} lazy dogs" for number in range(50)]
    (tmp_path / "text.txt").write_text("\n".join(lines))
    model = tmp_path / "text.model"
    assert cli.run(["tokenizer", "train-text", str(tmp_path / "text.txt"), "--out", str(model), "--size", "128"]) == 0
    tokenizer = TextTokenizer.load(model)
    assert f"{tokenizer.size} pieces, fingerprint {tokenizer.fingerprint}" in capsys.readouterr().out

    manifest = tmp_path / "text.jsonl"
    manifest.write_text("".join(json.dumps({"template": "document", "text": line}) + "\n" for line in lines))
    corpus = tmp_path / "corpus"
    settings = [f"tokenizers.text={model}", f"corpora.text.directory={corpus}"]
    build = ["data", "build", "tiny", str(manifest), *settings]
    assert cli.run(build) == 0
    assert f"{corpus}: 50 examples" in capsys.readouterr().out
    assert cli.run(build) == 0
    assert cli.run(["data", "verify", str(corpus)]) == 0
    assert cli.run(["data", "inspect", str(corpus), "--examples", "1"]) == 0
    out = capsys.readouterr().out
    assert "text: 50 examples are as they were written" in out
    assert f"example 0: {len(tokenizer.encode(lines[0])) + 2} tokens" in out
    capsys.readouterr()

    assert "tiny has no corpus 'prose'; its corpora are text," in refusal(*build, "--corpus", "prose")
    assert f"{tmp_path / 'no.jsonl'}: there is no such file" in refusal(
        "data", "build", "tiny", str(tmp_path / "no.jsonl"), *settings, "--corpus", "text"
    )
    manifest.write_text('{"template": "documnt", "text": "x"}\n')
    settings[1] = f"corpora.text.directory={tmp_path / 'other'}"
    assert "'documnt' is not one of" in refusal("data", "build", "tiny", str(manifest), *settings)
    assert not (tmp_path / "other").exists()
