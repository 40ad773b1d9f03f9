"""Distributions are normalised, sample by their density, and have the right entropy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shoal.rl.distributions import Categorical, MultiCategorical, Normal, TanhNormal

LAW = settings(max_examples=40, deadline=None)
KEY = jax.random.PRNGKey(0)
logit_vectors = hnp.arrays(
    np.float32, 4, elements=st.floats(-8, 8, width=32, allow_subnormal=False)
)
pairs = hnp.arrays(np.float32, 2, elements=st.floats(-1.5, 1.5, width=32))


def many(distribution, count=20_000):
    return jax.vmap(distribution.sample)(jax.random.split(KEY, count))


@LAW
@given(logit_vectors)
def test_categorical_is_the_softmax(logits):
    probs = np.exp(logits.astype(np.float64) - logits.max())
    probs /= probs.sum()
    distribution = Categorical(jnp.array(logits))
    for action in range(4):
        log_prob = distribution.log_prob(jnp.array(action))
        np.testing.assert_allclose(log_prob, np.log(probs[action]), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        distribution.entropy(), -np.sum(probs * np.log(probs)), rtol=1e-4, atol=1e-5
    )
    assert logits[distribution.mode()] == logits.max()


def test_categorical_samples_by_its_probabilities():
    probs = np.array([0.1, 0.2, 0.7])
    samples = many(Categorical(jnp.log(jnp.array(probs))))
    assert samples.dtype == jnp.int32
    np.testing.assert_allclose(np.bincount(samples) / len(samples), probs, atol=0.015)


@LAW
@given(hnp.arrays(np.float32, 6, elements=st.floats(-8, 8, width=32, allow_subnormal=False)))
def test_several_choices_are_the_product_of_their_softmaxes(logits):
    first, second = (np.exp(x - x.max()) for x in np.split(logits.astype(np.float64), [2]))
    joint = np.outer(first / first.sum(), second / second.sum())
    distribution = MultiCategorical(jnp.array(logits), (2, 4))
    for action in np.ndindex(2, 4):
        log_prob = distribution.log_prob(jnp.array(action))
        np.testing.assert_allclose(log_prob, np.log(joint[action]), rtol=1e-4, atol=1e-5)
    entropy = -np.sum(joint * np.log(joint))
    np.testing.assert_allclose(distribution.entropy(), entropy, rtol=1e-4, atol=1e-5)
    assert joint[tuple(distribution.mode())] >= joint.max() * (1 - 1e-6)


def test_several_choices_are_sampled_independently():
    first, second = np.array([0.3, 0.7]), np.array([0.1, 0.2, 0.7])
    distribution = MultiCategorical(jnp.log(jnp.concatenate([first, second])), (2, 3))
    samples = np.asarray(many(distribution))
    assert samples.dtype == np.int32
    counts = np.histogram2d(*samples.T, bins=[[0, 1, 2], [0, 1, 2, 3]])[0]
    np.testing.assert_allclose(counts / len(samples), np.outer(first, second), atol=0.015)
    batch = MultiCategorical(jnp.zeros((4, 3, 5)), (2, 3)).sample(KEY)
    assert batch.shape == (4, 3, 2)


@LAW
@given(logit_vectors, st.integers(0, 3))
def test_the_gradient_of_a_categorical_log_prob_is_one_hot_minus_softmax(logits, action):
    slope = jax.grad(lambda x: Categorical(x).log_prob(jnp.array(action)))(jnp.array(logits))
    np.testing.assert_allclose(slope, np.eye(4)[action] - jax.nn.softmax(logits), atol=1e-6)


@LAW
@given(pairs, pairs, pairs)
def test_normal_is_the_product_of_densities(mean, log_std, action):
    mean, log_std, action = (x.astype(np.float64) for x in (mean, log_std, action))
    std = np.exp(log_std)
    density = np.exp(-0.5 * ((action - mean) / std) ** 2) / (std * np.sqrt(2 * np.pi))
    distribution = Normal(jnp.float32(mean), jnp.float32(log_std))
    np.testing.assert_allclose(
        distribution.log_prob(jnp.float32(action)), np.sum(np.log(density)), rtol=1e-4, atol=1e-4
    )
    np.testing.assert_allclose(
        distribution.entropy(), np.sum(0.5 * np.log(2 * np.pi * np.e * std**2)), rtol=1e-4
    )
    np.testing.assert_array_equal(distribution.mode(), jnp.float32(mean))


def test_normal_samples_by_its_mean_and_spread():
    samples = many(Normal(jnp.array([1.0, -2.0]), jnp.log(jnp.array([0.5, 2.0]))))
    np.testing.assert_allclose(np.mean(samples, 0), [1, -2], atol=0.05)
    np.testing.assert_allclose(np.std(samples, 0), [0.5, 2], atol=0.05)


@LAW
@given(pairs, pairs)
def test_tanh_normal_is_normal_before_the_tanh(mean, log_std):
    distribution = TanhNormal(jnp.array(mean), jnp.array(log_std))
    action, log_prob = distribution.sample_and_log_prob(KEY)
    np.testing.assert_array_equal(action, distribution.sample(KEY))
    assert np.all(np.abs(action) <= 1)
    if np.all(np.abs(action) < 0.99):  # beyond, float32 can't invert the tanh
        np.testing.assert_allclose(log_prob, distribution.log_prob(action), rtol=1e-2, atol=1e-2)


def test_tanh_normal_density_integrates_to_one():
    distribution = TanhNormal(jnp.array([0.3]), jnp.array([-0.5]))
    grid = jnp.linspace(-0.9999, 0.9999, 40_001)
    density = jnp.exp(jax.vmap(lambda a: distribution.log_prob(a[None]))(grid))
    np.testing.assert_allclose(jnp.trapezoid(density, grid), 1, atol=1e-3)


@pytest.mark.parametrize("log_std", [-2.0, -1.0, 0.0])
@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_tanh_normal_entropy_is_a_fair_estimate(mean, log_std):
    distribution = TanhNormal(jnp.array([mean]), jnp.array([log_std]))
    keys = jax.random.split(KEY, 20_000)
    sampled = -np.mean(jax.vmap(lambda key: distribution.sample_and_log_prob(key)[1])(keys))
    np.testing.assert_allclose(distribution.entropy(), sampled, atol=0.05)


def test_a_saturated_tanh_normal_stays_finite():
    distribution = TanhNormal(jnp.array([20.0]), jnp.array([0.0]))
    action, log_prob = distribution.sample_and_log_prob(KEY)
    assert action == 1
    assert np.isfinite(log_prob)
    assert np.isfinite(distribution.log_prob(action))
    assert np.isfinite(
        jax.grad(lambda m: TanhNormal(m, jnp.zeros(1)).log_prob(action)[()])(jnp.ones(1))
    )


@pytest.mark.parametrize("kind", [Normal, TanhNormal])
def test_axes_before_the_last_are_a_batch_and_the_spread_may_lack_them(kind):
    means, log_std = jnp.linspace(-1, 1, 6).reshape(3, 2), jnp.array([-0.3, 0.1])
    actions = jnp.full((3, 2), 0.4)
    batched = kind(means, log_std)
    each = [kind(mean, log_std) for mean in means]
    np.testing.assert_allclose(
        batched.log_prob(actions), [d.log_prob(actions[0]) for d in each], rtol=1e-5
    )
    np.testing.assert_allclose(batched.entropy(), [d.entropy() for d in each], rtol=1e-5)
