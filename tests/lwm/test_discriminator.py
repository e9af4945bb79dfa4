"""The patch discriminator: hinge losses by hand, and that it learns while the codes stay what they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lwm import discriminator, vqgan, vqgan_training
from lwm.config import VQGANConfig
from lwm.vqgan_training import Codebook, Recipe

CONFIG = VQGANConfig(
    resolution=16,
    hidden_channels=4,
    channel_mult=(1, 1),
    num_res_blocks=1,
    z_channels=4,
    num_embeddings=12,
    quantized_embed_dim=4,
)


@pytest.mark.parametrize(("score", "critic"), [(0.0, 1.0), (0.5, 1.0), (3.0, 2.0), (-2.0, 1.5)])
def test_losses_of_a_discriminator_that_says_one_thing(score: float, critic: float) -> None:
    params = jax.tree.map(jnp.zeros_like, discriminator.init(jax.random.key(0), 3))
    params["score"]["bias"] = jnp.full(1, score)
    images = np.random.default_rng(0).uniform(-1, 1, (2, 16, 24, 3)).astype(np.float32)
    assert discriminator.scores(params, jnp.asarray(images)).shape == (2, 4, 6)
    assert float(discriminator.critic_loss(params, images, images)) == pytest.approx(critic)
    assert float(discriminator.drawing_loss(params, images)) == pytest.approx(-score)


def test_a_step_goes_downhill_for_both_and_leaves_the_codes_alone() -> None:
    recipe = Recipe(adversarial=100.0)
    rng = np.random.default_rng(4)
    before = jax.tree.map(
        lambda x: x + (0.1 * rng.normal(size=x.shape)).astype(np.float32), vqgan.init(CONFIG, jax.random.key(0))
    )
    codebook = before.pop("codebook")
    book = Codebook(jnp.ones(len(codebook)), codebook)
    first = discriminator.init(jax.random.key(1), 3)
    optimizer = vqgan_training._optimizer(recipe)
    pixels = jnp.asarray(rng.integers(0, 256, (4, 16, 16, 3), dtype=np.uint8))
    # The step consumes its arguments.
    weights, critic = jax.tree.map(jnp.copy, (before, first))
    weights, _, critic, _, (loss, _, used) = vqgan_training._adversarial_step(
        CONFIG, recipe, weights, optimizer.init(weights), critic, optimizer.init(critic), book, pixels, np.float32(1e-3)
    )
    assert np.isfinite(float(loss))
    assert 1 <= int(used) <= 12
    for name in ("encoder", "quant_conv"):
        jax.tree.map(np.testing.assert_array_equal, weights[name], before[name])
    real = vqgan.to_float(pixels)

    @jax.jit
    def drawn(weights: vqgan.Params) -> jax.Array:
        codes = vqgan.nearest(codebook, vqgan.latents(CONFIG, weights, real))
        return vqgan.reconstruct(CONFIG, weights, codebook[codes])

    earlier, later = drawn(before), drawn(weights)
    # Each answers to what the other was: the step takes both from the same start.
    assert float(discriminator.drawing_loss(first, later)) < float(discriminator.drawing_loss(first, earlier))
    assert float(discriminator.critic_loss(critic, real, earlier)) < float(
        discriminator.critic_loss(first, real, earlier)
    )
