"""`lwm check`: every shipped configuration traces on its pod's mesh without the devices; byte counts by hand."""

import io
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from rich.console import Console

from lwm import check, model, sharding
from lwm.config import MeshConfig, ModelConfig, load_config, resolve_stage, shipped_configs


@pytest.mark.parametrize("name", sorted(shipped_configs()))
def test_every_shipped_configuration_traces_on_its_own_mesh(name: str) -> None:
    config = load_config(name)
    assert config.devices is not None
    reports = check.check(config)
    assert [report.resolved.stage.name for report in reports] == [stage.name for stage in config.stages]
    for report in reports:
        assert math.prod(report.resolved.mesh_sizes.values()) == config.devices
        assert report.total == report.parameters + report.gradients + report.optimizer + report.activations
        assert report.optimizer == 2 * report.parameters == 2 * report.gradients
    console = Console(file=io.StringIO(), width=200)
    check.print_report(config, reports, console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    for stage in config.stages:
        assert stage.name in text
    assert f"{len(config.stages)} stages divide over {config.devices} devices" in text


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # LLaMA-2 7B's published count, 6,738,415,616.
        ("lwm_text_7b", 6_738_415_616),
        # and 8448 more rows in both the embedding and the head.
        ("lwm_7b", 6_738_415_616 + 2 * 8448 * 4096),
    ],
)
def test_parameter_counts_are_llamas(name: str, expected: int) -> None:
    assert check.parameter_counts(load_config(name).model, {})[0] == expected


@pytest.mark.parametrize("mesh", [MeshConfig(fsdp=8), MeshConfig(fsdp=2, tp=2, sp=2), MeshConfig(fsdp=1, dp=2, tp=4)])
def test_bytes_per_device_are_those_of_real_arrays(mesh: MeshConfig) -> None:
    config = load_config("tiny")
    stage = config.stages[0].model_copy(update={"mesh": mesh})
    report = check.stage_memory(config, stage, 8)
    shapes = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), sharding.abstract_parameters(config.model))
    params = jax.device_put(shapes, sharding.parameter_shardings(config.model, sharding.make_mesh(mesh)))
    first = jax.devices()[0]
    on_first = sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(params)
        for shard in leaf.addressable_shards
        if shard.device == first
    )
    assert report.parameters == on_first
    assert report.num_parameters == sum(leaf.size for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("remat", ["full", "attention", "none"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_a_layer_keeps_is_what_the_backward_pass_gets(
    remat: str, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The oracle is jax's own list of residuals: those of the scan have a leading dim of layers."""
    small = ModelConfig(
        text_vocab_size=32, hidden_size=64, intermediate_size=160, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8
    )
    config = load_config("tiny").model_copy(update={"model": small})
    stage = config.stages[0].model_copy(
        update={"seq_len": 16, "batch_rows": 2, "remat": remat, "compute_dtype": dtype, "mesh": MeshConfig()}
    )
    resolved = resolve_stage(config, stage, 1)
    ids = jnp.zeros((2, 16), jnp.int32)
    compute = model.Compute(dtype=dtype, remat=remat)
    params = sharding.abstract_parameters(small)

    def loss(params: sharding.Params) -> jax.Array:
        return model.hidden(small, params, ids, ids, ids, compute).sum()

    jax.ad_checkpoint.print_saved_residuals(loss, params)
    # Weights cast for their products stay as split as they are stored, and are no activations.
    weights = [list(leaf.shape) for leaf in params["layers"].values()]
    total = 0
    for line in capsys.readouterr().out.splitlines():
        kind, _, rest = line.partition("[")
        shape = [int(size) for size in rest.partition("]")[0].split(",") if size]
        if "from the argument" not in line and len(shape) > 1 and shape[0] == small.num_layers and shape not in weights:
            total += math.prod(shape) * {"bf16": 2, "f32": 4, "i32": 4, "bool": 1}[kind]
    # Per-row statistics of the norms and the norms' weights are left out of the formula.
    assert check.kept_bytes(resolved) * small.num_layers == pytest.approx(total, rel=0.02)


def test_activations_shrink_with_chunks_and_remat() -> None:
    config = load_config("tiny")

    def estimate(**changes: object) -> int:
        stage = config.stages[2].model_copy(update={"mlp_chunk": None, "loss_chunk": None, **changes})
        return check.activation_bytes(resolve_stage(config, stage, 8))

    assert estimate(remat="full") < estimate(remat="attention") < estimate(remat="none")
    assert estimate(mlp_chunk=64) < estimate(mlp_chunk=512) < estimate()
    assert estimate(loss_chunk=64) < estimate()
    assert estimate(compute_dtype="bfloat16") < estimate(compute_dtype="float32")


def test_a_batch_in_parts_keeps_one_part_and_two_sums() -> None:
    config = load_config("tiny")
    one = check.stage_memory(config, config.stages[1], 8)
    two = check.stage_memory(config, config.stages[1].model_copy(update={"accumulate": 2}), 8)
    assert 2 * check.kept_bytes(two.resolved) == check.kept_bytes(one.resolved)
    assert two.activations < one.activations
    assert (two.gradients, two.optimizer) == (2 * one.gradients, one.optimizer)


def test_what_does_not_divide_is_refused_in_one_sentence() -> None:
    with pytest.raises(ValueError, match="stage s512: mesh .* needs 8 devices but there are 6"):
        check.check(load_config("tiny"), 6)
    odd = load_config("tiny", ["model.hidden_size=132", "model.head_dim=32"])
    with pytest.raises(ValueError, match=r"stage s512: .*model.hidden_size \(132\) does not divide") as error:
        check.check(odd)
    assert "\n" not in str(error.value)
    nowhere = load_config("tiny", ["devices=null", "simulated_devices=null"])
    with pytest.raises(ValueError, match="tiny: devices is not set; set it, or say --devices N"):
        check.check(nowhere)


def test_what_attention_refuses_is_refused_here() -> None:
    config = load_config("tiny", ["stages.s4096.attention.backend=pallas_tpu"])
    with pytest.raises(ValueError, match="stage s4096: .*pallas_tpu"):
        check.check(config)


def test_specs_are_those_of_the_sharding_table() -> None:
    config = load_config("lwm_text_7b")
    resolved = resolve_stage(config, config.stages[4], 256)
    mesh = check.abstract_mesh(resolved.mesh_sizes)
    for path, spec in sharding.parameter_specs(resolved.model, resolved.mesh_sizes).items():
        shape = sharding.parameter_table(resolved.model)[path].shape
        local = NamedSharding(mesh, spec).shard_shape(shape)
        assert all(size >= 1 for size in local), path


@pytest.mark.parametrize(
    ("size", "text"), [(999, "0.999 kB"), (512_000, "512 kB"), (54_200_000, "54.2 MB"), (87_100_000_000, "87.1 GB")]
)
def test_sizes_for_people(size: int, text: str) -> None:
    assert check.format_bytes(size) == text
