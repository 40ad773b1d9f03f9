"""Every environment deals its samples out to minibatches by itself, and all of them once."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shoal
from shoal.algorithms import PPO
from shoal.envs import Discrete, key_rows
from shoal.errors import SettingError
from shoal.rl.rollouts import deal, run_epochs
from unit.drift import drift

KEYS = key_rows(jax.random.PRNGKey(0), 256)


def dealt(samples, envs, minibatches, epochs=1):
    """Which (sample, environment) each minibatch has: [epochs, minibatches, n, 2]."""
    index = jnp.moveaxis(jnp.stack(jnp.mgrid[:samples, :envs]), 0, -1)
    settings = SimpleNamespace(update_epochs=epochs, num_minibatches=minibatches)
    count = samples * envs // minibatches

    def update(carry, minibatch):
        i, seen = carry
        return (i + 1, seen.at[i].set(minibatch.reshape(-1, 2))), ()

    seen = jnp.zeros((epochs * minibatches, count, 2), jnp.int32)
    (_, seen), _ = run_epochs(update, (0, seen), index, KEYS[:envs], settings)
    return np.asarray(seen).reshape(epochs, minibatches, count, 2)


@pytest.mark.parametrize(
    ("samples", "envs", "minibatches"), [(8, 6, 4), (20, 3, 10), (5, 64, 32), (6, 8, 4), (1, 4, 4)]
)
def test_an_epoch_has_every_sample_once(samples, envs, minibatches):
    for epoch in dealt(samples, envs, minibatches, epochs=3):
        assert len(np.unique(epoch.reshape(-1, 2), axis=0)) == samples * envs


@pytest.mark.parametrize(("samples", "envs", "minibatches"), [(8, 6, 4), (5, 64, 32), (6, 8, 4)])
def test_a_minibatch_has_equally_many_samples_of_each_group_of_environments(
    samples, envs, minibatches
):
    together = minibatches // np.gcd(samples, minibatches)
    for minibatch in dealt(samples, envs, minibatches)[0]:
        groups = np.bincount(minibatch[:, 1] // together)
        assert set(groups) == {samples * together // minibatches}


def test_epochs_and_environments_deal_differently():
    first, second = dealt(20, 2, 10, epochs=2)[..., 0]
    assert (first != second).any()
    assert (first[:, :2] != first[:, 2:]).any()


def test_an_order_is_a_permutation_that_depends_on_the_key_alone():
    orders = np.asarray(deal(KEYS, 37))
    assert orders.shape == (37, 256)
    np.testing.assert_array_equal(np.sort(orders, axis=0), np.mgrid[:37, :256][0])
    np.testing.assert_array_equal(deal(KEYS[:3], 37), orders[:, :3])
    # Each number is equally often at each place: the spread of a mean of 256 is that of chance.
    assert abs(orders.mean(1) - 18).max() < 4 * np.sqrt((37**2 - 1) / 12 / 256)


def test_minibatches_are_no_noisier_than_by_full_shuffling():
    """Of values that follow the phase of an episode, or differ between environments."""
    time, env = np.mgrid[:20, :256]
    rng, epochs = np.random.default_rng(0), 40
    own = dealt(20, 256, 10, epochs)
    shuffled = np.stack([rng.permutation(20 * 256).reshape(10, -1) for _ in range(epochs)])
    whole_steps = np.stack([rng.permutation(20).reshape(10, 2) for _ in range(epochs)])
    phase, of_env = np.sin(time / 3), np.sin(env)

    def noise(values, *index):
        return np.var(values[index].mean(-1))

    by_phase, by_env = (noise(x, own[..., 0], own[..., 1]) for x in (phase, of_env))
    assert by_phase < 1.2 * noise(phase.ravel(), shuffled)
    assert by_phase < noise(phase[:, 0], whole_steps) / 50
    assert by_env < 1e-12 < noise(of_env.ravel(), shuffled)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_steps": 5, "num_minibatches": 32},  # Brax's
        pytest.param(
            {"num_steps": 4, "num_minibatches": 2, "memory": "gru", "sequence_length": 2},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"num_steps": 4, "num_minibatches": 4, "memory": "gru"}, marks=pytest.mark.slow
        ),
    ],
)
def test_replicas_keep_their_numbers_however_minibatches_are_divided(settings):
    algorithm = PPO(**settings, update_epochs=2, hidden=(8,), memory_width=4, learning_rate=0.01)
    found = shoal.verify(
        algorithm, drift(Discrete(3)), shoal.multi_learner(2), envs=64, ticks=2, backend="inline"
    )
    assert found.holds, found


def test_what_can_t_be_divided_is_refused():
    algorithm = PPO(num_steps=5, num_minibatches=32)
    with pytest.raises(SettingError, match="multiple of 32"):
        shoal.trace(algorithm, drift(Discrete(3)), envs=48)
    with pytest.raises(SettingError, match="8 steps into sequences of 3"):
        PPO(num_steps=8, memory="gru", sequence_length=3)
