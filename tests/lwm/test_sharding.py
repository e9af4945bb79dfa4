"""The parameter table, and what derives from it."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from lwm import model, sharding
from lwm.config import MeshConfig, ModelConfig

CONFIG = ModelConfig(
    text_vocab_size=50,
    vision_vocab_size=20,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
)


def test_parameter_count_of_the_7b_model() -> None:
    """LLaMA-2 7B has 6 738 415 616 parameters; the vision block adds a table and a head of 8448 x 4096."""
    for vision, expected in ((0, 6_738_415_616), (8448, 6_738_415_616 + 2 * 8448 * 4096)):
        config = ModelConfig(
            text_vocab_size=32000,
            vision_vocab_size=vision,
            hidden_size=4096,
            intermediate_size=11008,
            num_layers=32,
            num_heads=32,
        )
        table = sharding.parameter_table(config)
        assert sum(int(np.prod(entry.shape)) for entry in table.values()) == expected


def test_nest_and_flatten_are_inverse() -> None:
    flat = {"a/b/c": 1, "a/d": 2, "e": 3}
    assert sharding.flatten(sharding.nest(flat)) == flat


def test_init_follows_the_table() -> None:
    params = model.init(CONFIG, jax.random.key(3))
    table = sharding.parameter_table(CONFIG)
    flat = sharding.flatten(params)
    assert flat.keys() == table.keys()
    for path, entry in table.items():
        assert (flat[path].shape, flat[path].dtype) == (entry.shape, np.float32)
        if entry.init == "ones":
            assert (flat[path] == 1).all()
        else:
            deviation = float(np.std(flat[path]))
            assert deviation == pytest.approx(entry.std, rel=0.1), path
            assert abs(float(np.mean(flat[path]))) < 5 * entry.std / np.sqrt(flat[path].size), path
    assert table["layers/down"].std == pytest.approx(CONFIG.init_std / np.sqrt(6))


def test_init_does_not_depend_on_the_mesh() -> None:
    mesh = sharding.make_mesh(MeshConfig(fsdp=2, tp=2, sp=2))
    alone = sharding.flatten(model.init(CONFIG, jax.random.key(0)))
    spread = sharding.flatten(model.init(CONFIG, jax.random.key(0), mesh))
    shardings = sharding.flatten(sharding.parameter_shardings(CONFIG, mesh))
    for path, leaf in alone.items():
        assert spread[path].sharding.is_equivalent_to(shardings[path], leaf.ndim)
        np.testing.assert_allclose(spread[path], leaf, rtol=1e-6, err_msg=path)


def test_every_matrix_is_stored_once_over_the_whole_mesh() -> None:
    """Weights split over fsdp, the sequence group and tp together: no device holds what another one holds."""
    mesh = sharding.make_mesh(MeshConfig(fsdp=2, tp=2, sp=1, ulysses=2))
    for path, sharded in sharding.flatten(sharding.parameter_shardings(CONFIG, mesh)).items():
        entry = sharding.parameter_table(CONFIG)[path]
        if entry.init == "normal":
            assert np.prod(sharded.shard_shape(entry.shape)) * 8 == np.prod(entry.shape), path


def test_specs() -> None:
    sizes = {"dp": 2, "fsdp": 4, "sp": 2, "ulysses": 1, "tp": 8}
    spec_for = sharding.spec_for
    assert spec_for((None, "embed", "heads", None), sizes) == PartitionSpec(None, ("fsdp", "sp"), "tp", None)
    assert spec_for((None, "lookup_embed"), sizes) == PartitionSpec(None, ("tp", "fsdp", "sp"))
    assert spec_for(("batch", "sequence"), sizes) == PartitionSpec(("dp", "fsdp"), "sp")
    assert spec_for(("batch", "sequence"), {}) == PartitionSpec(None, None)
    # No width divides by three: weights are whole along such a part of a ring, and their gradients are summed over it.
    odd = {"dp": 2, "fsdp": 1, "sp": 4, "ulysses": 3, "tp": 1}
    assert spec_for((None, "embed"), odd) == PartitionSpec(None, "sp")
    assert spec_for(("batch", "sequence"), odd) == PartitionSpec("dp", ("sp", "ulysses"))
    assert (sharding.storage_axes(odd), sharding.copy_axes(odd)) == (("sp",), ("dp", "ulysses"))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp": 4}, r"layers/key: model.num_kv_heads \(2\) does not divide over the mesh's tp=4 \(4 parts\)"),
        ({"fsdp": 8, "sp": 8}, r"model.hidden_size \(32\) does not divide over the mesh's fsdp=8 \* sp=8 \(64 parts\)"),
    ],
)
def test_what_does_not_divide_is_named(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sharding.parameter_specs(CONFIG, sizes)


def test_mesh_that_does_not_fit_the_devices() -> None:
    with pytest.raises(ValueError, match="needs 6 devices but there are 8"):
        sharding.make_mesh(MeshConfig(fsdp=3, tp=2))
    assert sharding.mesh_sizes(sharding.make_mesh(MeshConfig(tp=2)))["fsdp"] == 4
    assert sharding.make_mesh(MeshConfig(), jax.devices()[:1]).size == 1
