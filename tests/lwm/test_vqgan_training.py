"""Training of the vision tokenizer: its parts against numpy, and that it learns, repeatably."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from lwm import vqgan, vqgan_training
from lwm.config import VQGANConfig
from lwm.lifecycle import NonFiniteLoss
from lwm.vqgan_training import Codebook, Recipe

CONFIG = VQGANConfig(
    resolution=16,
    hidden_channels=8,
    channel_mult=(1, 2),
    num_res_blocks=1,
    z_channels=8,
    num_embeddings=24,
    quantized_embed_dim=6,
)


def flags(num, seed=0):
    """Two-coloured frames: a small world with few things to say."""
    rng = np.random.default_rng(seed)
    palette = np.array([[220, 40, 40], [30, 160, 60], [40, 60, 200], [240, 240, 240]], np.uint8)
    frames = np.empty((num, 16, 16, 3), np.uint8)
    frames[:, :, :8] = palette[rng.integers(0, 4, num)][:, None, None]
    frames[:, :, 8:] = palette[rng.integers(0, 4, num)][:, None, None]
    return frames


def test_edges_are_compared_at_every_scale():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 3, 8, 8, 2))
    expected, a, b = 0.0, x, y
    for _ in range(3):
        for axis in (1, 2):
            expected += np.abs(np.diff(a, axis=axis) - np.diff(b, axis=axis)).mean()
        a, b = (
            (image[:, ::2, ::2] + image[:, 1::2, ::2] + image[:, ::2, 1::2] + image[:, 1::2, 1::2]) / 4
            for image in (a, b)
        )
    with jax.enable_x64(True):
        found = vqgan_training.edge_distance(jnp.asarray(x), jnp.asarray(y), 3)
        assert float(found) == pytest.approx(expected, rel=1e-12)
        check_grads(
            jax.jit(lambda x: vqgan_training.edge_distance(x, y, 2)), (x[:1],), 1, modes=["rev"], eps=1e-7, atol=1e-6
        )
    assert vqgan_training.edge_distance(jnp.asarray(x), jnp.asarray(x + 5), 3) < 1e-5


def test_straight_through_has_the_value_of_one_and_the_gradient_of_the_other():
    x, quantized = jnp.array([0.3, -0.7]), jnp.array([0.5, -1.0])
    value, gradient = jax.value_and_grad(lambda x: jnp.sum(vqgan_training.straight_through(x, quantized) ** 3))(x)
    assert value == pytest.approx(float(jnp.sum(quantized**3)))
    np.testing.assert_allclose(gradient, 3 * quantized**2, rtol=1e-6)


def test_the_codebook_moves_as_its_averages_say_and_dead_vectors_become_latents():
    rng = np.random.default_rng(1)
    counts, sums = rng.uniform(0.5, 2, 5), rng.normal(size=(5, 3))
    counts[4] = 0.1
    x, codes = rng.normal(size=(20, 3)), rng.integers(0, 4, 20)
    book = vqgan_training.update_codebook(
        Codebook(jnp.asarray(counts), jnp.asarray(sums)), jnp.asarray(x), jnp.asarray(codes), jax.random.key(0),
        decay=0.9, dead=0.2,
    )  # fmt: skip
    for code in range(4):
        expected_count = 0.9 * counts[code] + 0.1 * (codes == code).sum()
        expected_sum = 0.9 * sums[code] + 0.1 * x[codes == code].sum(0)
        np.testing.assert_allclose(book.counts_K[code], expected_count, rtol=1e-5)
        np.testing.assert_allclose(book.vectors_KD[code], expected_sum / expected_count, rtol=1e-4, atol=1e-6)
    assert np.abs(x - np.asarray(book.vectors_KD[4])).max(1).min() < 1e-6
    assert float(book.counts_K[4]) == pytest.approx(0.8)


def test_kmeans_finds_separate_clusters_and_never_gets_worse():
    rng = np.random.default_rng(2)
    corners = rng.normal(size=(4, 3)) * 10
    x = (corners[rng.integers(0, 4, 400)] + rng.normal(size=(400, 3)) * 0.1).astype(np.float32)

    def spread(centres):
        return ((x[:, None] - np.asarray(centres)) ** 2).sum(-1).min(1).mean()

    spreads = []
    for rounds in (1, 2, 4, 12):
        centres, counts = vqgan_training.kmeans(jnp.asarray(x), jax.random.key(3), num_codes=12, rounds=rounds)
        spreads.append(spread(centres))
        assert float(counts.sum()) == 400
    assert spreads == sorted(spreads, reverse=True)
    assert spreads[-1] < 0.05
    centres, counts = vqgan_training.kmeans(jnp.asarray(x[:3]), jax.random.key(0), num_codes=8)
    assert spread(centres) >= 0
    assert np.isfinite(centres).all()
    assert float(counts.sum()) == 3


def test_training_learns_a_small_world_the_same_way_every_time():
    frames, unseen = flags(200), flags(30, seed=1)
    reports = []
    params, metrics = vqgan_training.train(
        CONFIG, frames, steps=150, batch=8, seed=3, held_out=unseen, progress=reports.append, report_every=30
    )
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, vqgan.init(CONFIG, jax.random.key(0)))
    assert [(report.step, report.steps) for report in reports] == [
        (30, 150),
        (60, 150),
        (90, 150),
        (120, 150),
        (150, 150),
    ]
    assert [report.phase for report in reports] == ["free", "coded", "coded", "settled", "settled"]
    assert reports[0].codes_used == 0 < reports[-1].codes_used <= CONFIG.num_embeddings
    drawn = vqgan.decode_frames(CONFIG, params, vqgan.encode_frames(CONFIG, params, unseen))
    error = np.mean((drawn.astype(float) - unseen) ** 2)
    assert metrics["psnr_db"] == pytest.approx(10 * np.log10(255**2 / error))
    assert metrics["psnr_db"] > 20
    assert metrics["held_out"] == 30
    assert 4 <= metrics["codes_used"] <= CONFIG.num_embeddings

    again, repeated = vqgan_training.train(CONFIG, frames, steps=150, batch=8, seed=3, held_out=unseen)
    assert repeated == metrics
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_the_encoder_and_the_codebook_rest_while_the_decoder_settles():
    """The last steps change how codes are drawn, never what they are."""
    recipe = Recipe()
    rng = np.random.default_rng(4)
    # Weights that start at zero would leave most of the others without a gradient in the first step.
    weights = jax.tree.map(
        lambda x: x + (0.1 * rng.normal(size=x.shape)).astype(np.float32), vqgan.init(CONFIG, jax.random.key(0))
    )
    codebook = weights.pop("codebook")
    state, book = vqgan_training._optimizer(recipe).init(weights), Codebook(jnp.ones(len(codebook)), codebook)

    def step(weights, state, book, *, settled):
        # The step consumes its arguments; the test looks at them again.
        weights, state, book = jax.tree.map(jnp.copy, (weights, state, book))
        pixels = jnp.asarray(flags(8))
        return vqgan_training._step(
            CONFIG, recipe, weights, state, book, pixels, jax.random.key(0), np.float32(1e-2), True, settled
        )

    def changed(name, before, after):
        return any(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a != b).any()), before[name], after[name])))

    coded, state, moved, _ = step(weights, state, book, settled=False)
    for name in ("encoder", "quant_conv", "decoder", "post_quant_conv"):
        assert changed(name, weights, coded), name
    assert (moved.vectors_KD != book.vectors_KD).any()
    settled, _, rested, _ = step(coded, state, moved, settled=True)
    for name in ("encoder", "quant_conv", "decoder", "post_quant_conv"):
        assert changed(name, coded, settled) == (name in ("decoder", "post_quant_conv")), name
    np.testing.assert_array_equal(rested.vectors_KD, moved.vectors_KD)


def test_frames_are_set_aside_and_drawn_by_their_shares():
    frames = flags(40)
    _, metrics = vqgan_training.train(CONFIG, frames, steps=2, batch=8)
    assert metrics["held_out"] == 2
    # Frames of no share are never drawn: whatever they are, the outcome is the same.
    shares = np.arange(40) < 20
    other = frames.copy()
    other[20:] = 255 - other[20:]
    first, _ = vqgan_training.train(CONFIG, frames, steps=4, batch=8, shares=shares, held_out=frames[:2])
    second, _ = vqgan_training.train(CONFIG, other, steps=4, batch=8, shares=shares, held_out=frames[:2])
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_bad_input_is_named():
    frames = flags(4)
    for bad, message in (
        (frames.astype(np.float32), "float32"),
        (frames[:, :8], r"\(4, 8, 16, 3\).*16, 16, 3"),
        (frames[:0], "N > 0"),
    ):
        with pytest.raises(ValueError, match=message):
            vqgan_training.train(CONFIG, bad, steps=1)
    with pytest.raises(ValueError, match="steps=0"):
        vqgan_training.train(CONFIG, frames, steps=0)
    with pytest.raises(ValueError, match="one number for each of 4 frames"):
        vqgan_training.train(CONFIG, frames, steps=1, shares=np.ones(3))
    with pytest.raises(NonFiniteLoss, match="lower learning_rate"):
        vqgan_training.train(CONFIG, frames, steps=30, batch=8, learning_rate=1e30)
