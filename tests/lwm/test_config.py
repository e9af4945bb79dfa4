"""Configuration: strict types, errors that name their line, derived values, fingerprints, the shipped files."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from lwm import config_io
from lwm.config import (
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    StageConfig,
    find_config,
    fingerprint,
    load_config,
    resolve_mesh,
    resolve_stage,
    shipped_configs,
)

BASE = """\
name: run
output_dir: runs/run
model:
  text_vocab_size: 512
  hidden_size: 128
  intermediate_size: 256
  num_layers: 2
  num_heads: 4
corpora:
  - {name: books, directory: corpora/books}
stages:
  - &first
    name: short
    seq_len: 512
    batch_rows: 16
    steps: 10
    rope_theta: 1e4
    optimizer: {peak_lr: 1e-3, warmup_steps: 5}
    mixture: [{corpus: books, share: 1}]
  - <<: *first
    name: long
    seq_len: 1024
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def refusal(tmp_path: Path, text: str, *overrides: str) -> str:
    """The one sentence with which `text` is refused, without the directory it happened to be in."""
    path = write(tmp_path, text)
    with pytest.raises(config_io.ConfigError) as error:
        load_config(path, overrides)
    message = str(error.value)
    assert "\n" not in message
    return message.replace(str(path), "run.yaml")


def test_scalars_follow_yaml_1_2() -> None:
    tree = config_io.parse_yaml(
        "a: 1e-3\nb: no\nc: on\nd: true\ne: 0o7\nf: 1_000\ng: -.5\nh: ~\ni:\nj: '1'\nk: 12:30\nl: 2026-01-01\nm: 1.\n",
        "x",
    )
    assert tree.values == {
        "a": 1e-3,
        "b": "no",
        "c": "on",
        "d": True,
        "e": "0o7",
        "f": "1_000",
        "g": -0.5,
        "h": None,
        "i": None,
        "j": "1",
        "k": "12:30",
        "l": "2026-01-01",
        "m": 1.0,
    }
    assert [type(tree.values[key]) for key in "adm"] == [float, bool, float]


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers() | st.booleans() | st.none())
@settings(max_examples=200, deadline=None)
def test_every_number_comes_back_with_its_type(value: float | int | bool | None) -> None:
    text = (
        {True: "true", False: "false", None: "null"}[value]
        if value is None or value is True or value is False
        else str(value)
    )
    read = config_io.parse_value(text, "x")
    assert read == value
    assert type(read) is type(value)


def test_merged_mapping_and_its_overrides(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, BASE))
    short, long = config.stages
    assert (short.name, short.seq_len, long.name, long.seq_len) == ("short", 512, "long", 1024)
    assert long.optimizer == short.optimizer
    assert long.tokens_per_step == 16 * 1024
    assert long.shares == {"books": 1.0}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "batch_rows: 16",
            "batch_row: 16",
            "run.yaml:15: unknown key 'batch_row' in stages.0; did you mean 'batch_rows'?",
        ),
        ("seq_len: 1024", 'seq_len: "1024"', "run.yaml:22: stages.1.seq_len is '1024'; it must be a valid integer"),
        ("seq_len: 1024", "seq_len: true", "run.yaml:22: stages.1.seq_len is True; it must be a valid integer"),
        (
            "peak_lr: 1e-3",
            "peak_lr: true",
            "run.yaml:18: stages.0.optimizer.peak_lr is True; it must be a valid number",
        ),
        ("peak_lr: 1e-3", "peak_lr: -1", "run.yaml:18: stages.0.optimizer.peak_lr is -1; it must be greater than 0"),
        ("steps: 10", "steps: 10.0", "run.yaml:16: stages.0.steps is 10.0; it must be a valid integer"),
        ("name: long", "name: short", "run.yaml:21: stages has two entries named 'short'; names must be unique"),
        ("name: long", "name: a/b", "run.yaml:21: stages.1.name is 'a/b'; String should match"),
        ("{corpus: books", "{corpus: bocks", "run.yaml:19: stage short: corpus 'bocks' is not in corpora (books)"),
        (
            "    seq_len: 512",
            "    seq_len: 512\n    seq_len: 513",
            "run.yaml:15: 'seq_len' is written twice; it was already",
        ),
        (
            "warmup_steps: 5",
            "warmup_steps: 50",
            "run.yaml:18: stage short: warmup_steps 50 is above steps 10; lower it",
        ),
        ("warmup_steps: 5", "warmup_steps: 5, min_lr: 1", "run.yaml:18: min_lr 1 is above peak_lr 0.001; lower it"),
        ("num_heads: 4", "num_heads: 4\n  num_kv_heads: 3", "run.yaml:9: num_kv_heads 3 does not divide num_heads 4"),
        ("hidden_size: 128", "hidden_size: 130", "run.yaml:5: hidden_size 130 is not a multiple of num_heads 4"),
        ("hidden_size: 128", "hidden_size: 12", "head_dim 3 is odd"),
        ("corpora:", "corpora: [", "run.yaml:10: not valid YAML:"),
        ("name: run", "seed: 1", "run.yaml: name is missing (name of the run)"),
        (
            "name: run",
            "name: run\nlearning_rate: 1",
            "run.yaml:2: unknown key 'learning_rate'; the keys there are name, seed",
        ),
        (
            "name: run",
            "name: run\npeak_lr: 1",
            "run.yaml:2: unknown key 'peak_lr'; did you mean 'stages.*.optimizer.peak_lr'?",
        ),
    ],
)
def test_a_wrong_file_is_refused_with_line_field_value_and_remedy(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert BASE.count(old) == 1 or old == "steps: 10"
    assert message in refusal(tmp_path, BASE.replace(old, new, 1))


def test_files_that_are_no_configuration(tmp_path: Path) -> None:
    assert "must be a mapping" in refusal(tmp_path, "- 1\n")
    assert "is missing" in refusal(tmp_path, "")
    binary = tmp_path / "run.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"run\.yaml: the file is not UTF-8 text"):
        load_config(binary)
    with pytest.raises(ValueError, match=r"no configuration file 'tinny'; did you mean 'tiny'\?"):
        load_config("tinny")
    with pytest.raises(ValueError, match="shipped configurations are .*tiny"):
        load_config("zzz.yaml")


def test_overrides_by_index_and_by_name(tmp_path: Path) -> None:
    overrides = [
        "seed=7",
        "stages.long.steps=20",
        "stages.0.optimizer.peak_lr=2e-4",
        "stages.0.mixture.books.share=0.5",
        "stages.long.mesh={fsdp: 2, sp: 4}",
        "model.rope_scaling.factor=8",
        "model.rope_scaling.original_seq_len=8192",
        "stages.short.optimizer.clip_norm=null",
    ]
    config = load_config(write(tmp_path, BASE), overrides)
    assert config.seed == 7
    assert config.stages[1].steps == 20
    assert config.stages[0].optimizer.peak_lr == 2e-4
    # The second stage took its optimizer from the first one's mapping: an override of one leaves the other alone.
    assert config.stages[1].optimizer.peak_lr == 1e-3
    assert config.stages[0].mixture[0].share == 0.5
    assert config.stages[1].mesh == MeshConfig(fsdp=2, sp=4)
    assert config.model.rope_scaling is not None
    assert config.model.rope_scaling.factor == 8
    assert config.stages[0].optimizer.clip_norm is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "stages.long.stepz=3",
            "override 'stages.long.stepz=3': unknown key 'stepz' in stages.1; did you mean 'steps'?",
        ),
        ("stages.mid.steps=3", "override 'stages.mid.steps=3': stages has entries 0 to 1 (short, long), not 'mid'"),
        ("stages.7.steps=3", "override 'stages.7.steps=3': stages has entries 0 to 1 (short, long), not '7'"),
        ("stages.0.steps=x", "override 'stages.0.steps=x': stages.0.steps is 'x'; it must be a valid integer"),
        ("seed", "override 'seed': write it as field=value"),
        ("=3", "override '=3': write it as field=value"),
        ("name.x=3", "override 'name.x=3': name is 'run', a single value; it has no field 'x'"),
        ("seed.x=3", "override 'seed.x=3': seed is {'x': 3}; it must be a valid integer"),
        ("seed=[1", "override 'seed=[1': '[1' is not a valid value"),
        ("stages.long.mesh={sp: 3}", "cannot be split by the striped layout over 3 sequence shards"),
        (
            "stages.long.mesh={tp: 3}",
            "override 'stages.long.mesh={tp: 3}': stage long: model.num_heads 4 is not a multiple",
        ),
        ("stages.long.mesh={dp: -1}", "mesh axes dp and fsdp are both -1; only one can take what is left"),
        ("stages.long.mesh={dp: 0}", "mesh axis dp is 0; it must be at least 1, or -1"),
        ("stages.0.attention.layout=zigzg", "is 'zigzg'; it must be 'contiguous', 'striped' or 'zigzag'"),
        ("vqgan.resolution=64", "override 'vqgan.resolution=64': vqgan.hidden_channels is missing"),
    ],
)
def test_a_wrong_override_is_refused_by_name(tmp_path: Path, override: str, message: str) -> None:
    assert message in refusal(tmp_path, BASE, override)


def test_heads_are_exchanged_among_at_most_as_many_devices(tmp_path: Path) -> None:
    """A plain ring exchanges none: there the axis is one more part of the ring."""
    path = write(tmp_path, BASE)
    load_config(path, ["stages.long.mesh={ulysses: 8}"])
    with pytest.raises(ValueError, match=r"stage long: model.num_heads 4 is not a multiple of tp \* ulysses = 8"):
        load_config(path, ["stages.long.mesh={ulysses: 8}", "stages.long.attention.strategy=usp"])


def test_zigzag_needs_two_pieces_per_shard(tmp_path: Path) -> None:
    path = write(tmp_path, BASE)
    mesh = "stages.0.mesh={fsdp: 2, sp: 4}"
    load_config(path, [mesh, "stages.0.seq_len=516", "stages.0.attention.layout=striped"])
    with pytest.raises(ValueError, match="use a multiple of 8, such as 512"):
        load_config(path, [mesh, "stages.0.seq_len=516", "stages.0.attention.layout=zigzag"])


def test_vision_vocabulary_holds_codes_and_markers() -> None:
    with pytest.raises(ValueError, match=r"vision_vocab_size 1025 is too small .* use at least 1026"):
        load_config("tiny", ["model.vision_vocab_size=1025"])
    load_config("tiny", ["model.vision_vocab_size=1026", "stages.s1024.mesh={fsdp: 2, tp: 2, sp: 2}"])


def test_python_objects_are_as_strict_as_files() -> None:
    good = {"peak_lr": 1e-3, "warmup_steps": 5}
    OptimizerConfig.model_validate(good)
    for wrong in ({"warmup_steps": "5"}, {"warmup_steps": True}, {"warmup_steps": 5.0}, {"peak_lr": "1"}, {"lr": 1.0}):
        with pytest.raises(ValidationError):
            OptimizerConfig.model_validate({**good, **wrong})
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValidationError):
            OptimizerConfig(peak_lr=value, warmup_steps=5)
    optimizer = OptimizerConfig(peak_lr=1, warmup_steps=5)
    assert type(optimizer.peak_lr) is float
    with pytest.raises(ValidationError, match="frozen"):
        optimizer.__setattr__("peak_lr", 2.0)


def test_heads_are_derived_once_and_on_the_final_object(tmp_path: Path) -> None:
    model = ModelConfig(text_vocab_size=8, hidden_size=64, intermediate_size=8, num_layers=1, num_heads=4)
    assert (model.num_kv_heads, model.head_dim, model.vocab_size) == (4, 16, 8)
    config = load_config(write(tmp_path, BASE), ["model.num_heads=8"])
    assert (config.model.num_kv_heads, config.model.head_dim) == (8, 16)


@pytest.mark.parametrize("name", sorted(shipped_configs()))
def test_shipped_files_hash_round_trip_and_fit_their_devices(name: str) -> None:
    config = load_config(name)
    again = RunConfig.model_validate_json(config.model_dump_json())
    assert again == config
    assert hash(again) == hash(config)
    assert fingerprint(again) == fingerprint(config)
    assert config.name == name
    assert config.devices is not None
    for stage in config.stages:
        resolved = resolve_stage(config, stage, config.devices)
        assert resolved.model.rope_theta == stage.rope_theta
        assert resolved.data_shards * resolved.sequence_shards * resolved.mesh_sizes["tp"] == config.devices
    header = find_config(name).read_text().split("\nname:")[0]
    assert all(line.startswith("#") for line in header.splitlines())
    for word in ("# What:", "# Hardware:", "# Expected result", "# Command: lwm "):
        assert word in header


def test_the_papers_tables() -> None:
    """Stage tables of arXiv 2402.08268: sequence, theta, steps, warm-up, and total tokens to 5%; every stage puts 2^14
    tokens on a device."""
    rows = [(s.seq_len, s.rope_theta, s.steps, s.optimizer.warmup_steps) for s in load_config("lwm_text_7b").stages]
    assert rows == [
        (2**15, 1e6, 1200, 100),
        (2**17, 1e7, 3000, 200),
        (2**18, 1e7, 3000, 200),
        (2**19, 2.5e7, 720, 50),
        (2**20, 5e7, 450, 25),
    ]
    for name, devices in (("lwm_text_7b", 256), ("lwm_7b", 512)):
        run = load_config(name)
        assert {resolve_stage(run, stage, devices).tokens_per_device for stage in run.stages} == {2**14}
    for stage, billions in zip(load_config("lwm_text_7b").stages, (4.8, 12, 12, 3, 1.8), strict=True):
        assert stage.steps * stage.tokens_per_step == pytest.approx(billions * 1e9, rel=0.05)
        assert (stage.optimizer.peak_lr, stage.optimizer.schedule, stage.optimizer.b2) == (4e-5, "constant", 0.95)
        assert (stage.optimizer.weight_decay, stage.compute_dtype, stage.mesh.dp, stage.mesh.fsdp) == (
            0.1,
            "float32",
            1,
            -1,
        )

    vision = load_config("lwm_7b").stages
    assert [
        (s.seq_len, s.steps, s.optimizer.peak_lr, s.optimizer.min_lr, s.optimizer.warmup_steps) for s in vision
    ] == [
        (2**10, 45000, 6e-4, 6e-5, 1000),
        (2**13, 14000, 6e-4, 6e-5, 500),
        (2**15, 1200, 8e-5, 8e-5, 100),
        (2**17, 450, 8e-5, 8e-5, 50),
        (2**20, 50, 8e-5, 8e-5, 5),
    ]
    for stage, billions in zip(vision, (363, 107, 10, 3.5, 0.4), strict=True):
        assert stage.steps * stage.tokens_per_step == pytest.approx(billions * 1e9, rel=0.1)
        assert (stage.rope_theta, stage.optimizer.schedule) == (5e7, "cosine")
    assert [stage.shares.get("text") for stage in vision] == [0.16, 0.16, None, None, None]
    assert set(vision[2].shares.values()) == {0.25}


def test_tiny_uses_every_kind_of_mesh_axis() -> None:
    config = load_config("tiny")
    assert config.simulated_devices == 8
    sizes = [resolve_stage(config, stage, 8).mesh_sizes for stage in config.stages]
    assert max(s["fsdp"] for s in sizes) > 1
    assert max(s["tp"] for s in sizes) > 1
    assert max(s["sp"] for s in sizes) >= 4
    assert [stage.seq_len for stage in config.stages][-1] >= 4096


@pytest.mark.parametrize(
    ("mesh", "devices", "expected"),
    [
        (MeshConfig(), 8, (1, 8, 1, 1, 1)),
        (MeshConfig(fsdp=2, sp=4), 8, (1, 2, 1, 4, 1)),
        (MeshConfig(dp=-1, fsdp=2, tp=2), 32, (8, 2, 2, 1, 1)),
        (MeshConfig(tp=4, sp=-1, fsdp=1, ulysses=2), 64, (1, 1, 4, 8, 2)),
    ],
)
def test_resolve_mesh(mesh: MeshConfig, devices: int, expected: tuple[int, ...]) -> None:
    assert tuple(resolve_mesh(mesh, devices).values()) == expected


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (MeshConfig(fsdp=4), r"needs 4 devices but there are 6; change the sizes or set one to -1"),
        (MeshConfig(tp=4), r"does not divide 6 devices: the fixed sizes multiply to 4"),
        (MeshConfig(fsdp=8), r"needs 8 devices but there are 6"),
    ],
)
def test_a_mesh_that_does_not_fit(mesh: MeshConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_mesh(mesh, 6)


def test_resolve_stage_refuses_what_the_devices_cannot_split(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, BASE), ["stages.0.mesh={fsdp: 1, sp: -1}", "stages.1.mesh={fsdp: 1, tp: -1}"])
    resolve_stage(config, config.stages[0], 8)
    with pytest.raises(ValueError, match="stage short: seq_len 512 cannot be split .* 6 sequence shards"):
        resolve_stage(config, config.stages[0], 6)
    with pytest.raises(ValueError, match="stage long: model.num_heads 4 is not a multiple of mesh axis tp 8"):
        resolve_stage(config, config.stages[1], 8)
    wide = load_config(write(tmp_path, BASE), ["stages.0.batch_rows=12"])
    with pytest.raises(
        ValueError, match=r"stage short: batch_rows 12 is not a multiple of dp \* fsdp = 8 on 8 devices"
    ):
        resolve_stage(wide, wide.stages[0], 8)
    with pytest.raises(ValueError, match="stage short: mesh .* needs 4 devices but there are 8"):
        resolve_stage(config, config.stages[0].model_copy(update={"mesh": MeshConfig(fsdp=4)}), 8)


def test_stages_by_name() -> None:
    config = load_config("tiny")
    assert config.stage("s1024").seq_len == 1024
    with pytest.raises(ValueError, match="no stage 's9'; the stages are s512, s1024, s4096"):
        config.stage("s9")


def test_fingerprint_is_the_same_in_another_process_and_sees_every_field() -> None:
    program = "from lwm.config import *; print(fingerprint(load_config('tiny')))"
    root = Path(__file__).parents[2]
    other = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True)
    config = load_config("tiny")
    assert other.stdout.strip() == fingerprint(config)
    assert fingerprint(load_config("tiny", ["stages.2.optimizer.eps=2e-8"])) != fingerprint(config)


def test_every_field_is_described_and_hashable() -> None:
    for name, info, _ in config_io.walk_fields(RunConfig):
        assert info.description, name
        assert "dict" not in str(info.annotation), name
        assert "list" not in str(info.annotation), name


def test_reading_configurations_does_not_import_jax() -> None:
    program = "import sys, lwm.config as c; c.load_config('tiny'); print('jax' in sys.modules)"
    root = Path(__file__).parents[2]
    other = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True)
    assert other.stdout.strip() == "False"


def test_describe_without_a_file() -> None:
    with pytest.raises(ValidationError) as error:
        StageConfig.model_validate({"name": "x"})
    text = config_io.describe(error.value, StageConfig)
    assert text.startswith("seq_len is missing (tokens in one row)")
    assert isinstance(error.value, ValueError)
    assert issubclass(StageConfig, BaseModel)
