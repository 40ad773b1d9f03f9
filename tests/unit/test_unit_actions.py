"""Actions between -1 and 1 map onto the bounds of a box."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shoal.envs.spaces import Box, Discrete
from shoal.errors import SettingError
from shoal.rl import losses
from shoal.rl.critics import Sizes, init_actor, init_critics, q_values
from shoal.rl.distributions import TanhNormal
from shoal.rl.unit_actions import (
    LOG_STD,
    check_bounded,
    deterministic_action,
    scale_to_box,
    squashed_normal,
)

LAW = settings(max_examples=30, deadline=None)
SIZES = Sizes(Box(-1, 1, (3,)), 2, (8,))
BOX = Box((-2.0, 0.0, 5.0, -1.0), (2.0, 1.0, 6.0, 3.0), (2, 2))
units = hnp.arrays(np.float32, 4, elements=st.floats(-1, 1, width=32))
numbers = st.floats(-3, 3, width=32)


@LAW
@given(units)
def test_each_entry_lies_between_its_own_bounds_in_proportion(unit):
    low, high = (np.array(bound).reshape(2, 2) for bound in (BOX.low, BOX.high))
    wanted = low + (unit.reshape(2, 2) + 1) / 2 * (high - low)
    action = scale_to_box(BOX, jnp.array(unit))
    np.testing.assert_allclose(action, wanted, atol=1e-5)
    assert np.all((action >= low - 1e-6) & (action <= high + 1e-6))


def test_the_bounds_are_reached_and_batches_keep_their_axes():
    ends = scale_to_box(BOX, jnp.stack([-jnp.ones(4), jnp.ones(4)]))
    np.testing.assert_allclose(ends.reshape(2, 4), [BOX.low, BOX.high])
    assert scale_to_box(Box(-2.0, 2.0, (3,)), jnp.zeros((5, 7, 3))).shape == (5, 7, 3)


@pytest.mark.parametrize(
    "space", [Discrete(3), Box(-np.inf, 1.0, (2,)), Box((0.0, 0.0), (1.0, np.inf), (2,))]
)
def test_a_space_without_bounds_is_rejected(space):
    with pytest.raises(SettingError, match=r"(?s)SAC.*not a box that has them.*PPO"):
        check_bounded("SAC", space)


def test_actors_return_an_action_or_a_distribution_of_bounded_std():
    features = 100 * jax.random.normal(jax.random.key(0), (6, 3))
    actor = init_actor(jax.random.key(1), SIZES, 4)
    said = squashed_normal(actor, features)
    assert said.mean.shape == said.log_std.shape == (6, 2)
    assert np.all((said.log_std >= LOG_STD[0]) & (said.log_std <= LOG_STD[1]))
    assert np.all(np.abs(deterministic_action(actor, features)) <= 1)


def test_noise_makes_the_action_that_a_key_would_have():
    dist, key = TanhNormal(jnp.array([0.3, -1.0]), jnp.array([-0.5, 0.2])), jax.random.key(3)
    noise = jax.random.normal(key, (2,))
    for one, other in zip(dist.at(noise), dist.sample_and_log_prob(key), strict=True):
        np.testing.assert_array_equal(one, other)
    before = np.array([0.3, -1.0]) + np.exp([-0.5, 0.2]) * np.asarray(noise)
    action, log_prob = dist.at(noise)
    density = np.exp(-(np.asarray(noise) ** 2) / 2) / np.sqrt(2 * np.pi) / np.exp([-0.5, 0.2])
    np.testing.assert_allclose(action, np.tanh(before), rtol=1e-5)
    np.testing.assert_allclose(
        log_prob, np.sum(np.log(density) - np.log(1 - np.tanh(before) ** 2)), rtol=1e-4
    )


def test_critics_are_separate_networks_that_take_the_action():
    critics = init_critics(jax.random.key(0), SIZES, 3)
    seen, done = jnp.ones((4, 3)), jnp.zeros((4, 2))
    said = q_values(critics, seen, done)
    assert said.shape == (3, 4)
    assert len(np.unique(said[:, 0])) == 3
    assert np.all(said != q_values(critics, seen, done + 0.5))


@LAW
@given(st.lists(numbers, min_size=1, max_size=3), numbers, st.floats(0, 2, width=32))
def test_the_soft_value_is_the_lowest_less_the_entropy_term(q_values, log_prob, temperature):
    got = losses.soft_value(jnp.array(q_values)[:, None], jnp.float32(log_prob), temperature)
    np.testing.assert_allclose(got, [min(q_values) - temperature * log_prob], atol=1e-5)
    np.testing.assert_allclose(losses.soft_value(jnp.array(q_values)), min(q_values), atol=1e-30)


@LAW
@given(numbers, numbers, st.floats(-2, 2, width=32))
def test_the_temperature_rises_where_there_is_less_entropy_than_wanted(heat, log_prob, wanted):
    loss = lambda heat, log_prob: losses.temperature_loss(heat, log_prob, wanted)  # noqa: E731
    got = loss(jnp.float32(heat), jnp.float32(log_prob))
    np.testing.assert_allclose(got, -heat * (log_prob + wanted), atol=1e-5)
    slopes = jax.grad(loss, (0, 1))(jnp.float32(heat), jnp.float32(log_prob))
    # Down this slope the temperature goes up: entropy is -log_prob.
    np.testing.assert_allclose(slopes[0], -(log_prob - -wanted), atol=1e-6)
    assert slopes[1] == 0
