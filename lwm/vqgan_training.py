"""Training of the vision tokenizer: frames -> parameters, and how well they draw frames they have not seen.

VQ-VAE (arXiv 1711.00937) with the codebook as a moving average of the latents it stands for (appendix A there), unused
vectors revived from the batch (Jukebox, arXiv 2005.00341), and, in place of a pretrained perceptual network, the
differences between neighbouring pixels at several scales. Three phases:

- free: the encoder and decoder learn without a codebook, which k-means then draws up from their latents;
- coded: the codebook joins, straight-through gradients, commitment;
- settled: encoder and codebook rest, so codes mean the same from here on, and the decoder learns to draw them, with a
  patch discriminator beside it where `adversarial` is above 0.

Shape suffixes: B batch, N latents, H height, W width, C channels; h, w the code grid, K codebook size, D code dim.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from lwm import discriminator, vqgan
from lwm.config import VQGANConfig
from lwm.lifecycle import NonFiniteLoss
from lwm.optimizer import adam
from lwm.vqgan import Params


@dataclass(frozen=True)
class Recipe:
    """What is weighed and when; loss terms are means over pixels in [-1, 1].

    free_share, settled_share: shares of all steps without a codebook and with the encoder at rest.
    squared: weight of the squared error beside the absolute one; edges: of the differences between neighbouring pixels,
    absolute, summed over `edge_scales` halvings; commitment: of the latents' distance to their vectors, relative to the
    latents' variance; decay: of the moving averages that are the codebook; dead: average uses per step under which a
    vector is replaced; adversarial: of the patch discriminator's opinion (`lwm.discriminator`) of what the settled
    decoder draws: it costs PSNR and gains sharpness.
    """

    free_share: float = 0.2
    settled_share: float = 0.25
    squared: float = 2.0
    edges: float = 0.3
    edge_scales: int = 3
    commitment: float = 0.25
    decay: float = 0.97
    dead: float = 0.05
    warmup_steps: int = 20
    final_rate: float = 0.02
    clip_norm: float = 1.0
    adversarial: float = 0.0


class Progress(NamedTuple):
    """One report of the training: `psnr_db` and `loss` of the latest batch, `codes_used` in it (0 while free)."""

    step: int
    steps: int
    phase: str
    loss: float
    psnr_db: float
    codes_used: int


class Codebook(NamedTuple):
    """Moving averages over steps: how often each vector was nearest, and the sum of the latents it was nearest to."""

    counts_K: jax.Array
    sums_KD: jax.Array

    @property
    def vectors_KD(self) -> jax.Array:
        return self.sums_KD / self.counts_K[:, None]


def train(
    config: VQGANConfig,
    frames: np.ndarray,
    *,
    steps: int,
    batch: int = 8,
    seed: int = 0,
    learning_rate: float = 3e-3,
    shares: np.ndarray | None = None,
    held_out: np.ndarray | None = None,
    recipe: Recipe | None = None,
    progress: Callable[[Progress], None] | None = None,
    report_every: int = 20,
) -> tuple[Params, dict[str, Any]]:
    """Train on frames uint8 [N,H,W,3] -> (params, metrics).

    `shares` [N] are relative frequencies at which frames are drawn (default: all alike). `held_out` [M,H,W,3] measures
    the result; by default every 20th of `frames` is set aside for it. Metrics: `psnr_db` over all held-out pixels,
    `codes_used` on training and held-out frames together, `loss` of the last batch, `held_out` frames counted.

    Deterministic for a seed on one kind of machine. Raises ValueError for frames of the wrong kind or size,
    NonFiniteLoss (with the step) where training diverges.
    """
    recipe = recipe or Recipe()
    _check(config, frames, steps, batch, shares)
    if held_out is None:
        apart = np.arange(len(frames)) % 20 == 10
        if apart.any():
            shares = None if shares is None else shares[~apart]
            frames, held_out = frames[~apart], frames[apart]
        else:
            held_out = frames
    probabilities = None if shares is None else shares / shares.sum()
    rates = _rates(recipe, learning_rate, steps)
    first_coded, first_settled = round(recipe.free_share * steps), round((1 - recipe.settled_share) * steps)

    key_init, key_book, key_revive = jax.random.split(jax.random.key(seed), 3)
    rng = np.random.default_rng(seed)
    weights = vqgan.init(config, key_init)
    book = Codebook(jnp.ones(config.num_embeddings), weights.pop("codebook"))
    state = _optimizer(recipe).init(weights)
    critic = discriminator.init(jax.random.fold_in(key_init, 1), config.num_channels)
    critic_state = _optimizer(recipe).init(critic)
    for step in range(steps):
        if step == first_coded:
            sample = frames[rng.choice(len(frames), 1024, p=probabilities)]
            book = _first_codebook(config, weights, sample, key_book, batch)
        pixels = frames[rng.choice(len(frames), batch, p=probabilities)]
        phase = "free" if step < first_coded else "coded" if step < first_settled else "settled"
        if phase == "settled" and recipe.adversarial > 0:
            weights, state, critic, critic_state, measured = _adversarial_step(
                config, recipe, weights, state, critic, critic_state, book, pixels, rates[step]
            )
        else:
            weights, state, book, measured = _step(
                config,
                recipe,
                weights,
                state,
                book,
                pixels,
                jax.random.fold_in(key_revive, step),
                rates[step],
                phase != "free",
                phase == "settled",
            )
        if (step + 1) % report_every == 0 or step == steps - 1:
            loss, squared_error, codes_used = (float(value) for value in measured)
            if not np.isfinite(loss):
                raise NonFiniteLoss(
                    f"vision tokenizer: the loss is {loss} at step {step + 1}; "
                    f"lower learning_rate (now {learning_rate})"
                )
            if progress is not None:
                progress(Progress(step + 1, steps, phase, loss, _psnr(squared_error / 4), int(codes_used)))

    params = {**weights, "codebook": book.vectors_KD}
    return params, {"loss": loss, **evaluate(config, params, frames, held_out)}


def _check(config: VQGANConfig, frames: np.ndarray, steps: int, batch: int, shares: np.ndarray | None) -> None:
    wanted = (config.resolution, config.resolution, config.num_channels)
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[1:] != wanted or not len(frames):
        raise ValueError(
            f"vision tokenizer: frames are {frames.dtype} of shape {frames.shape}; expected uint8 "
            f"[N, {', '.join(map(str, wanted))}] with N > 0, as vqgan.resolution and vqgan.num_channels say"
        )
    if steps < 1 or batch < 1:
        raise ValueError(f"vision tokenizer: steps={steps} and batch={batch} must both be at least 1")
    if shares is not None and (shares.shape != (len(frames),) or not (shares >= 0).all() or not shares.sum() > 0):
        raise ValueError(
            f"vision tokenizer: shares of shape {shares.shape} must be one number for each of {len(frames)} frames, "
            "none negative and not all zero"
        )


def evaluate(config: VQGANConfig, params: Params, frames: np.ndarray, held_out: np.ndarray) -> dict[str, Any]:
    """PSNR (dB, peak 255) over all pixels of `held_out`, and how many codes it and `frames` use together."""
    codes = vqgan.encode_frames(config, params, held_out)
    drawn = vqgan.decode_frames(config, params, codes)
    squared_error = np.mean(np.square(drawn.astype(np.float64) - held_out)) / 255**2
    used = np.union1d(codes, vqgan.encode_frames(config, params, frames))
    return {"psnr_db": _psnr(squared_error), "codes_used": len(used), "held_out": len(held_out)}


def _psnr(squared_error: float) -> float:
    """Of a squared error relative to the square of the pixels' range; a perfect copy counts as 100 dB."""
    return float(-10 * np.log10(max(squared_error, 1e-10)))


def _rates(recipe: Recipe, learning_rate: float, steps: int) -> np.ndarray:
    """Learning rate of every step: linear warm-up, then a cosine down to `final_rate` of the peak."""
    warmup = min(recipe.warmup_steps, steps // 2)
    step = np.arange(steps)
    done = np.clip((step - warmup) / max(steps - warmup, 1), 0, 1)
    cosine = recipe.final_rate + (1 - recipe.final_rate) * (1 + np.cos(np.pi * done)) / 2
    return (learning_rate * np.minimum((step + 1) / (warmup + 1), cosine)).astype(np.float32)


def _optimizer(recipe: Recipe) -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(recipe.clip_norm), adam(b1=0.9, b2=0.99))


def edge_distance(x_BHWC: jax.Array, y_BHWC: jax.Array, scales: int) -> jax.Array:
    """Mean absolute difference of the two images' pixel-to-pixel differences, summed over both directions and `scales`.

    Each further scale is the images averaged over 2 x 2 pixels again; their sides must allow it.
    """
    difference = x_BHWC - y_BHWC
    total = jnp.zeros(())
    for scale in range(scales):
        if scale:
            B, H, W, C = difference.shape
            difference = difference.reshape(B, H // 2, 2, W // 2, 2, C).mean((2, 4))
        total += jnp.mean(jnp.abs(jnp.diff(difference, axis=1))) + jnp.mean(jnp.abs(jnp.diff(difference, axis=2)))
    return total


def straight_through(x: jax.Array, quantized: jax.Array) -> jax.Array:
    """The value of `quantized` with the gradient of `x`."""
    return quantized + (x - lax.stop_gradient(x))


def _loss(
    config: VQGANConfig,
    recipe: Recipe,
    weights: Params,
    vectors_KD: jax.Array,
    x_BHWC: jax.Array,
    coded: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array, jax.Array]]:
    """Loss, and (squared error, latents [B,h,w,D], codes [B,h,w], drawn [B,H,W,C])."""
    z = vqgan.latents(config, weights, x_BHWC)
    codes = vqgan.nearest(vectors_KD, lax.stop_gradient(z))
    quantized = vectors_KD[codes]
    y = vqgan.reconstruct(config, weights, jnp.where(coded, straight_through(z, quantized), z))
    spread = lax.stop_gradient(jnp.var(z)) + 1e-6
    commitment = recipe.commitment * jnp.mean(jnp.square(z - quantized)) / spread
    # Before there is a codebook, nothing but this keeps the latents from growing.
    decay = 1e-3 * jnp.mean(jnp.square(z))
    error = y - x_BHWC
    squared_error = jnp.mean(jnp.square(error))
    loss = jnp.mean(jnp.abs(error)) + recipe.squared * squared_error
    loss += recipe.edges * edge_distance(y, x_BHWC, recipe.edge_scales) + jnp.where(coded, commitment, decay)
    return loss, (squared_error, z, codes, y)


# The phases are arguments and not three programs: compiling takes as long as a hundred steps of a small tokenizer.
@partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 3, 4))
def _step(
    config: VQGANConfig,
    recipe: Recipe,
    weights: Params,
    state: optax.OptState,
    book: Codebook,
    pixels: jax.Array,
    key: jax.Array,
    rate: jax.Array,
    coded: jax.Array,
    settled: jax.Array,
) -> tuple[Params, optax.OptState, Codebook, tuple[jax.Array, jax.Array, jax.Array]]:
    """One update -> (weights, state, book, (loss, squared error, codes used))."""
    x_BHWC = vqgan.to_float(pixels)
    (loss, (squared_error, z, codes, _)), gradients = jax.value_and_grad(
        lambda weights: _loss(config, recipe, weights, book.vectors_KD, x_BHWC, coded), has_aux=True
    )(weights)
    updates, state = _optimizer(recipe).update(gradients, state, weights)
    for name in ("encoder", "quant_conv"):
        updates[name] = jax.tree.map(lambda update: jnp.where(settled, 0.0, update), updates[name])
    weights = jax.tree.map(lambda weight, update: weight - rate * update, weights, updates)
    moved = update_codebook(book, z.reshape(-1, z.shape[-1]), codes.ravel(), key, decay=recipe.decay, dead=recipe.dead)
    book = jax.tree.map(lambda old, new: jnp.where(coded & ~settled, new, old), book, moved)
    used = jnp.where(coded, jnp.sum(jnp.zeros(book.counts_K.shape).at[codes].max(1.0)), 0.0)
    return weights, state, book, (loss, squared_error, used)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 3, 4, 5))
def _adversarial_step(
    config: VQGANConfig,
    recipe: Recipe,
    weights: Params,
    state: optax.OptState,
    critic: Params,
    critic_state: optax.OptState,
    book: Codebook,
    pixels: jax.Array,
    rate: jax.Array,
) -> tuple[Params, optax.OptState, Params, optax.OptState, tuple[jax.Array, jax.Array, jax.Array]]:
    """One update of the settled decoder and one of the discriminator, and what `_step` measures."""
    x_BHWC = vqgan.to_float(pixels)

    def loss_of(weights: Params) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array, jax.Array]]:
        loss, measured = _loss(config, recipe, weights, book.vectors_KD, x_BHWC, jnp.asarray(True))
        return loss + recipe.adversarial * discriminator.drawing_loss(critic, measured[3]), measured

    (loss, (squared_error, _, codes, drawn)), gradients = jax.value_and_grad(loss_of, has_aux=True)(weights)
    updates, state = _optimizer(recipe).update(gradients, state, weights)
    for name in ("encoder", "quant_conv"):
        updates[name] = jax.tree.map(jnp.zeros_like, updates[name])
    weights = jax.tree.map(lambda weight, update: weight - rate * update, weights, updates)
    gradients = jax.grad(discriminator.critic_loss)(critic, x_BHWC, lax.stop_gradient(drawn))
    updates, critic_state = _optimizer(recipe).update(gradients, critic_state, critic)
    critic = jax.tree.map(lambda weight, update: weight - rate * update, critic, updates)
    used = jnp.sum(jnp.zeros(book.counts_K.shape).at[codes].max(1.0))
    return weights, state, critic, critic_state, (loss, squared_error, used)


def _tally(num_codes: int, x_ND: jax.Array, codes_N: jax.Array) -> tuple[jax.Array, jax.Array]:
    """How many of `x` each code has, and their sum."""
    counts = jnp.zeros(num_codes).at[codes_N].add(1.0)
    return counts, jnp.zeros((num_codes, x_ND.shape[1])).at[codes_N].add(x_ND)


def update_codebook(
    book: Codebook, x_ND: jax.Array, codes_N: jax.Array, key: jax.Array, *, decay: float, dead: float
) -> Codebook:
    """Move the averages by one batch of latents and their codes; a vector used less than `dead` becomes a latent of it.

    A revived vector starts with four times `dead` uses, so that it has time to find its own.
    """
    K = book.counts_K.shape[0]
    counts, sums = _tally(K, x_ND, codes_N)
    counts = decay * book.counts_K + (1 - decay) * counts
    sums = decay * book.sums_KD + (1 - decay) * sums
    is_dead = counts < dead
    fresh = x_ND[jax.random.randint(key, (K,), 0, x_ND.shape[0])]
    return Codebook(jnp.where(is_dead, 4 * dead, counts), jnp.where(is_dead[:, None], 4 * dead * fresh, sums))


@partial(jax.jit, static_argnames=("num_codes", "rounds"))
def kmeans(x_ND: jax.Array, key: jax.Array, *, num_codes: int, rounds: int = 12) -> tuple[jax.Array, jax.Array]:
    """k-means++ (Arthur and Vassilvitskii 2007), then Lloyd's rounds -> (centres [K,D], how many of `x` each has [K]).

    Starting from random samples instead would draw what is common several times over and what is rare never. A centre
    that has none stays where it is.
    """
    first = x_ND[jax.random.randint(key, (), 0, x_ND.shape[0])]

    def add(code: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        centres, distances = carry
        # Samples that are centres already have no weight; where all are, any will do.
        weights = jnp.where(distances > 0, jnp.log(distances), jnp.where(distances.max() > 0, -jnp.inf, 0.0))
        centre = x_ND[jax.random.categorical(jax.random.fold_in(key, code), weights)]
        return centres.at[code].set(centre), jnp.minimum(distances, jnp.sum(jnp.square(x_ND - centre), -1))

    def move(_: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        centres = carry[0]
        counts, sums = _tally(num_codes, x_ND, vqgan.nearest(centres, x_ND))
        return jnp.where(counts[:, None] > 0, sums / jnp.maximum(counts, 1.0)[:, None], centres), counts

    centres = jnp.tile(first, (num_codes, 1))
    centres, _ = lax.fori_loop(1, num_codes, add, (centres, jnp.sum(jnp.square(x_ND - first), -1)))
    return lax.fori_loop(0, rounds, move, (centres, jnp.zeros(num_codes)))


def _first_codebook(config: VQGANConfig, weights: Params, sample: np.ndarray, key: jax.Array, batch: int) -> Codebook:
    latents = jax.jit(lambda weights, pixels: vqgan.latents(config, weights, vqgan.to_float(pixels)))
    parts = [latents(weights, rows).reshape(-1, config.quantized_embed_dim) for rows in vqgan.batches(sample, 32)]
    x_ND = jnp.concatenate(parts)[: len(sample) * config.codes_per_frame]
    centres, counts = kmeans(x_ND, key, num_codes=config.num_embeddings)
    # Counts are per step from here on; a centre with next to none is left to the revival.
    counts = jnp.maximum(counts * (batch / len(sample)), 1e-3)
    return Codebook(counts, counts[:, None] * centres)
