"""AdamW (Loshchilov & Hutter, arXiv 1711.05101) with warm-up schedules, clipping and a decay mask, from optax."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lwm.config import ModelConfig, OptimizerConfig
from lwm.sharding import Params, nest, parameter_table


def learning_rate(config: OptimizerConfig, num_steps: int) -> Callable[[jax.Array | int], jax.Array]:
    """step in the stage (0 is the first) -> learning rate, float32.

    Linear warm-up whose first step already moves ((step + 1) / warmup_steps of the peak), then the peak held, or a
    cosine or a line from the peak to `min_lr`, which the last of `num_steps` steps reaches.
    """
    warmup, decay_steps = config.warmup_steps, max(num_steps - 1 - config.warmup_steps, 1)

    def rate(step: jax.Array | int) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        done = jnp.clip((step - warmup) / decay_steps, 0.0, 1.0)
        remaining = {
            "constant": jnp.ones_like(done),
            "cosine": 0.5 * (1 + jnp.cos(jnp.pi * done)),
            "linear": 1 - done,
        }[config.schedule]
        lowest = config.peak_lr if config.schedule == "constant" else config.min_lr
        after = lowest + (config.peak_lr - lowest) * remaining
        return jnp.where(step < warmup, config.peak_lr * (step + 1) / max(warmup, 1), after)

    return rate


def global_norm(gradients: Params) -> jax.Array:
    """The Euclidean norm of all gradients together, float32."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(gradients)))


def clip(config: OptimizerConfig, gradients: Params, norm: jax.Array) -> Params:
    """`gradients` of global norm `norm`, scaled down to `clip_norm` where they are longer."""
    if config.clip_norm is None:
        return gradients
    scale = config.clip_norm / jnp.maximum(norm, config.clip_norm)
    return jax.tree.map(lambda leaf: leaf * scale, gradients)


def decay_mask(config: ModelConfig) -> Params:
    """True where weight decay applies: every matrix, embeddings and heads included (as LLaMA's and LWM's training),
    and no normalisation weight, whose natural value is 1 rather than 0."""
    return nest({path: entry.init != "ones" for path, entry in parameter_table(config).items()})


def make_optimizer(model: ModelConfig, config: OptimizerConfig) -> optax.GradientTransformation:
    """Clipped gradients -> the direction to step against, before the learning rate: Adam, decoupled weight decay.

    The learning rate multiplies afterwards (`lwm.step`), because it restarts with each stage where the moments may not.
    """
    return optax.chain(
        adam(config.b1, config.b2, config.eps),
        optax.add_decayed_weights(config.weight_decay, mask=decay_mask(model)),
    )


def adam(b1: float, b2: float, eps: float = 1e-8) -> optax.GradientTransformation:
    """`optax.scale_by_adam`, which raises a float to an integer, also where dtypes are promoted strictly."""
    plain = optax.scale_by_adam(b1=b1, b2=b2, eps=eps)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        with jax.numpy_dtype_promotion("standard"):
            return plain.update(updates, state, params)

    return optax.GradientTransformation(plain.init, update)
