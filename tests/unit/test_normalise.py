"""Running moments equal the moments of all data, in any number of parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.rl import normalise as module
from shoal.rl.normalise import (
    Moments,
    init_moments,
    normalise,
    scale_by_std,
    standardise,
    update_moments,
)


def data(*shape, seed=0, mean=3.0, std=2.0):
    return np.random.default_rng(seed).normal(mean, std, shape).astype(np.float32)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.floats(-100, 100, width=32),
    st.floats(0.125, 10, width=32),
)
def test_moments_after_many_rollouts_are_those_of_all_their_steps(lengths, mean, std):
    rollouts = [data(n, 4, 2, seed=i, mean=mean, std=std) for i, n in enumerate(lengths)]
    moments = init_moments((2,))
    for rollout in rollouts:
        moments = update_moments(moments, jnp.array(rollout))
    everything = np.concatenate(rollouts).astype(np.float64)
    assert moments.steps == sum(lengths)
    np.testing.assert_allclose(moments.mean, everything.mean((0, 1)), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(moments.var, everything.var((0, 1)), rtol=1e-3, atol=1e-4)


def test_a_small_spread_about_a_large_mean_is_not_lost():
    rollout = data(64, 8, mean=1000.0, std=0.1)
    var = update_moments(init_moments(), jnp.array(rollout)).var
    np.testing.assert_allclose(var, rollout.astype(np.float64).var(), rtol=1e-2)


@pytest.mark.parametrize("replicas", [2, 4])
def test_replicas_compute_the_same_moments_as_one(monkeypatch, replicas):
    monkeypatch.setattr(module, "mean", lambda tree: jax.lax.pmean(tree, "replicas"))
    rollout = jnp.array(data(16, 8, 3))
    parts = jnp.stack(jnp.split(rollout, replicas, axis=1))
    start = Moments(jnp.float32(5), jnp.ones(3), jnp.ones(3))
    seen = jax.vmap(lambda x: update_moments(start, x), axis_name="replicas")(parts)
    parted = jax.vmap(standardise, axis_name="replicas")(parts)
    monkeypatch.undo()
    alone = update_moments(start, rollout)
    for one, each in zip(alone, seen, strict=True):
        np.testing.assert_allclose(each, np.broadcast_to(one, each.shape), rtol=1e-5)
    np.testing.assert_allclose(
        jnp.concatenate(list(parted), axis=1), standardise(rollout), rtol=1e-4, atol=1e-5
    )


def test_normalised_data_has_mean_0_and_spread_1():
    rollout = jnp.array(data(200, 4))
    moments = update_moments(init_moments(), rollout)
    for result in (normalise(moments, rollout), standardise(rollout)):
        np.testing.assert_allclose(jnp.mean(result), 0, atol=1e-4)
        np.testing.assert_allclose(jnp.std(result), 1, atol=1e-3)
    np.testing.assert_allclose(jnp.std(scale_by_std(moments, rollout)), 1, atol=1e-3)


def test_constants_become_zero_and_outliers_are_clipped():
    still = jnp.full((8, 2), 3.0)
    np.testing.assert_array_equal(standardise(still), np.zeros((8, 2)))
    moments = update_moments(init_moments(), still)
    np.testing.assert_array_equal(normalise(moments, still), np.zeros((8, 2)))
    assert normalise(moments, jnp.float32(4)) == 10
    assert scale_by_std(moments, jnp.float32(-4)) == -10
