"""The power of two against float64."""

import jax
import jax.numpy as jnp
import numpy as np

from ring import exponential


def test_powers_of_two_are_exact_to_float32() -> None:
    x = np.concatenate([np.linspace(-126, 127, 500_001), np.arange(-126, 128)]).astype(np.float32)
    actual = np.asarray(jax.jit(exponential.exp2)(x), np.float64)
    expected = np.exp2(x.astype(np.float64))
    assert np.abs(actual / expected - 1).max() <= 1.2e-7
    whole = x == np.round(x)
    np.testing.assert_array_equal(actual[whole], expected[whole])


def test_far_below_zero_it_is_exactly_zero_and_nan_stays() -> None:
    x = jnp.asarray([-127.0, -1e4, -1e30, -np.inf, np.nan], jnp.float32)
    actual = np.asarray(jax.jit(exponential.exp2)(x))
    assert not actual[:4].any()
    assert np.isnan(actual[4])


def test_its_derivative_is_that_of_the_power() -> None:
    x = jnp.linspace(-20.0, 5.0, 101)
    actual = np.asarray(jax.vmap(jax.grad(exponential.exp2))(x), np.float64)
    expected = np.log(2) * np.exp2(np.asarray(x, np.float64))
    assert np.abs(actual / expected - 1).max() <= 2e-7
