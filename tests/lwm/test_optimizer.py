"""Schedules in closed form, and AdamW against its equations in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lwm import optimizer
from lwm.config import ModelConfig, OptimizerConfig
from lwm.sharding import Params, flatten, nest, parameter_table

MODEL = ModelConfig(text_vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=2, num_heads=2)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.25, 0.5, 0.75, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]),
        (
            "cosine",
            [0.25, 0.5, 0.75, 1.0, 1.0, 0.2 + 0.4 * (1 + np.sqrt(0.5)), 0.6, 0.2 + 0.4 * (1 - np.sqrt(0.5)), 0.2],
        ),
    ],
)
def test_schedules(schedule: str, expected: list[float]) -> None:
    """Warm-up of 4 from the first step on, then from 1 at step 4 to 0.2 at the last of 9."""
    values = {"peak_lr": 1.0, "min_lr": 0.2, "warmup_steps": 4, "schedule": schedule}
    rate = optimizer.learning_rate(OptimizerConfig.model_validate(values), 9)
    np.testing.assert_allclose([float(rate(step)) for step in range(9)], expected, rtol=1e-6)
    assert float(rate(100)) == pytest.approx(expected[-1])


def test_no_warmup_and_a_single_step() -> None:
    rate = optimizer.learning_rate(OptimizerConfig(peak_lr=0.5, warmup_steps=0, schedule="cosine"), 1)
    assert float(rate(0)) == pytest.approx(0.5)


def test_normalisation_weights_do_not_decay() -> None:
    mask = flatten(optimizer.decay_mask(MODEL))
    assert {path for path, decays in mask.items() if not decays} == {
        "layers/attention_norm",
        "layers/mlp_norm",
        "final_norm",
    }


def test_adamw_equals_its_equations() -> None:
    config = OptimizerConfig(peak_lr=1.0, warmup_steps=0, b1=0.8, b2=0.9, eps=1e-6, weight_decay=0.3, clip_norm=2.0)
    descent = optimizer.make_optimizer(MODEL, config)
    table = parameter_table(MODEL)
    rng = np.random.default_rng(0)
    weights = {path: rng.normal(size=entry.shape) for path, entry in table.items()}
    params = nest({path: jnp.asarray(leaf, jnp.float32) for path, leaf in weights.items()})
    state = descent.init(params)
    first = {path: np.zeros(entry.shape) for path, entry in table.items()}
    second = {path: np.zeros(entry.shape) for path, entry in table.items()}

    @jax.jit
    def update(gradients: Params, state: Any, params: Params) -> tuple[jax.Array, Params, Any]:
        norm = optimizer.global_norm(gradients)
        direction, state = descent.update(optimizer.clip(config, gradients, norm), state, params)
        return norm, direction, state

    for step, size in enumerate((10.0, 0.001, 1.0), 1):
        gradients = {path: size * rng.normal(size=entry.shape) for path, entry in table.items()}
        length = np.sqrt(sum((leaf**2).sum() for leaf in gradients.values()))
        given = nest({path: jnp.asarray(leaf, jnp.float32) for path, leaf in gradients.items()})
        norm, direction, state = update(given, state, params)
        assert float(norm) == pytest.approx(length, rel=1e-5)
        for path, entry in table.items():
            gradient = gradients[path] * min(1, 2.0 / length)
            first[path] = 0.8 * first[path] + 0.2 * gradient
            second[path] = 0.9 * second[path] + 0.1 * gradient**2
            expected = (first[path] / (1 - 0.8**step)) / (np.sqrt(second[path] / (1 - 0.9**step)) + 1e-6)
            expected = expected + (0.3 * weights[path] if entry.init == "normal" else 0)
            np.testing.assert_allclose(flatten(direction)[path], expected, rtol=2e-4, atol=1e-5, err_msg=path)
