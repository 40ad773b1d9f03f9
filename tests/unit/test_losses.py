"""Losses equal their formulas, and gradients stop at their targets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.rl import losses, normalise

LAW = settings(max_examples=40, deadline=None)
CLIP = 0.2
number = st.floats(-2, 2, width=32)


@LAW
@given(number, number)
def test_clipped_surrogate_is_the_worse_of_two_products(log_ratio, advantage):
    ratio = np.exp(log_ratio)
    held = min(max(ratio, 1 - CLIP), 1 + CLIP)
    expected = -min(ratio * advantage, held * advantage)
    actual = losses.clipped_surrogate(jnp.float32(log_ratio), jnp.float32(advantage), CLIP)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@LAW
@given(st.floats(0.25, 2, width=32), st.floats(0.125, 2, width=32))
def test_a_ratio_beyond_the_clip_is_not_moved_further(far, size):
    slope = jax.grad(losses.clipped_surrogate)
    assert slope(jnp.float32(far), jnp.float32(size), CLIP) == 0
    assert slope(jnp.float32(-far), jnp.float32(-size), CLIP) == 0
    assert slope(jnp.float32(-far), jnp.float32(size), CLIP) < 0
    assert slope(jnp.float32(far), jnp.float32(-size), CLIP) > 0


def test_at_ratio_1_the_surrogate_is_the_policy_gradient():
    slope = jax.grad(losses.clipped_surrogate)
    assert slope(jnp.float32(0), jnp.float32(1.5), CLIP) == -1.5


@LAW
@given(number, number, number)
def test_clipped_squared_error_is_the_worse_of_two_errors(value, old, target):
    held = old + min(max(value - old, -CLIP), CLIP)
    expected = 0.5 * max((value - target) ** 2, (held - target) ** 2)
    actual = losses.value_loss(jnp.float32(value), jnp.float32(old), jnp.float32(target), CLIP)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    assert actual >= losses.squared_error(jnp.float32(value), jnp.float32(target))


@LAW
@given(number)
def test_approximate_kl_is_never_negative(log_ratio):
    assert losses.approximate_kl(jnp.float32(log_ratio)) >= 0
    assert losses.approximate_kl(jnp.float32(0)) == 0


def test_approximate_kl_has_the_right_mean():
    old, new = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.4, 0.2])
    exact = np.sum(old * np.log(old / new))
    log_ratio = jnp.array(np.log(new / old), jnp.float32)
    np.testing.assert_allclose(np.sum(old * losses.approximate_kl(log_ratio)), exact, rtol=1e-5)


def test_clipped_says_which_ratios_left_the_range():
    log_ratio = jnp.log(jnp.array([0.7, 0.9, 1.0, 1.1, 1.3]))
    np.testing.assert_array_equal(losses.clipped(log_ratio, CLIP), [1, 0, 0, 0, 1])


def test_a_value_loss_is_clipped_only_if_a_clip_is_given():
    value, old, target = jnp.float32(1.0), jnp.float32(0.0), jnp.float32(2.0)
    assert losses.value_loss(value, old, target, None) == losses.squared_error(value, target)
    assert losses.value_loss(value, old, target, CLIP) == pytest.approx(0.5 * 1.8**2)


@LAW
@given(number, number)
def test_the_slope_of_the_policy_gradient_is_the_advantage(log_prob, advantage):
    slopes = jax.grad(losses.policy_gradient, (0, 1))(jnp.float32(log_prob), jnp.float32(advantage))
    assert slopes == (pytest.approx(-advantage), 0)


def test_explained_variance_is_its_formula_with_and_without_weights():
    rng = np.random.default_rng(0)
    value, target = rng.normal(size=(2, 5, 3)).astype(np.float32) + 50
    active = rng.random((5, 3)) < 0.7
    for weight, kept in (((), slice(None)), (active / active.mean(), active)):
        wanted = 1 - np.var((target - value)[kept]) / np.var(target[kept])
        found = normalise.explained_variance(value, target, weight)
        np.testing.assert_allclose(found, wanted, rtol=1e-4)
        by_means = losses.explained_variance(losses.fit(jnp.array(value), target, weight))
        np.testing.assert_allclose(by_means, wanted, rtol=0.02)


@LAW
@given(number, number)
def test_huber_s_value_loss_is_squared_near_and_linear_far(value, target):
    error = abs(value - target)
    wanted = error**2 / 2 if error <= 1.5 else 1.5 * (error - 0.75)
    found = losses.value_loss(jnp.float32(value), jnp.float32(0), jnp.float32(target), delta=1.5)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)
