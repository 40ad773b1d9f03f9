"""Environments that show the action and the reward of the step before."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shoal.algorithms import IMPALA, R2D2
from shoal.envs import Box, Discrete, Environment, MultiDiscrete, with_previous
from shoal.envs.spaces import leaves, parts
from shoal.runs.inputs.recipes import recipe_of
from shoal.runs.inputs.trust import code_in
from unit.drift import drift
from unit.test_masks_and_boxes import Masked

KEY = jax.random.key(0)


@pytest.mark.parametrize("acts", [Discrete(3), MultiDiscrete((2, 3)), Box(-1.0, 1.0, (2,))])
def test_each_step_shows_what_was_done_and_earned_and_a_start_shows_neither(acts):
    plain = drift(acts)
    env = with_previous(plain)
    states, obs = env.reset(jax.random.split(KEY, 2))
    wanted_states, wanted = plain.reset(jax.random.split(KEY, 2))
    choices = {Discrete: [2, 1], MultiDiscrete: [[1, 2], [0, 0]], Box: [[0.5, -1.0], [0.0, 1.0]]}
    action = jnp.array(choices[type(acts)])
    one_hot = {Discrete: [[0, 0, 1], [0, 1, 0]], MultiDiscrete: [[0, 1, 0, 0, 1], [1, 0, 1, 0, 0]]}
    coded = np.array(one_hot.get(type(acts), action), np.float32)
    ended = np.zeros(2, bool)
    for _ in range(12):
        np.testing.assert_array_equal(obs["obs"], wanted)
        assert [x.shape[1:] for x in jax.tree.leaves(obs)] == [
            box.shape for box in leaves(env.observation_space)
        ]
        states, step = env.step(states, action)
        wanted_states, plain_step = plain.step(wanted_states, action)
        np.testing.assert_array_equal(step.last_obs["action"], coded)
        np.testing.assert_array_equal(step.last_obs["reward"][:, 0], plain_step.reward)
        over = np.asarray(step.terminated | step.truncated)
        np.testing.assert_array_equal(step.obs["action"], np.where(over[:, None], 0, coded))
        obs, wanted, ended = step.obs, plain_step.obs, ended | over
    assert ended.all()


def test_masks_and_the_world_stay_beside_what_the_agent_sees():
    env = with_previous(Environment("masked", Masked()))
    own, has_mask, world = parts(env.observation_space)
    assert [name for name, _ in own.spaces] == ["action", "obs", "reward"]
    assert has_mask
    assert world is not None
    _, obs = env.reset(jax.random.split(KEY, 2))
    assert obs["mask"].shape == (2, 4)
    assert obs["seen"]["action"].shape == (2, 4)


@pytest.mark.parametrize(
    "algorithm",
    [
        IMPALA(num_steps=4, hidden=(4,), memory="gru", memory_width=4),
        R2D2(num_steps=4, burn_in=4, sequence_length=4, samples_per_insert=2.0, memory_width=4,
             learning_starts_per_env=8),
    ],
    ids=["impala", "r2d2"],
)  # fmt: skip
def test_algorithms_with_memory_see_them_while_they_learn_and_play(algorithm):
    env = with_previous(drift(Discrete(3)))
    state = algorithm.init(KEY, env, 2)
    after, metrics = jax.jit(lambda state: algorithm.tick(env, state))(state)
    assert all(np.isfinite(x).all() for x in metrics.values())
    one = jax.tree.map(lambda x: x[0], after.obs)
    _, memory = algorithm.play(env, after, one, None)
    other = algorithm.play(env, after, one | {"reward": one["reward"] + 1}, None)[1]
    assert any(np.any(x != y) for x, y in zip(*map(jax.tree.leaves, (memory, other)), strict=True))


def test_a_run_folder_describes_them_without_code():
    pytest.importorskip("gymnax")
    from shoal.envs import make

    env = make("CartPole-v1", previous=True)
    assert env == with_previous(make("CartPole-v1"))
    assert not list(code_in(recipe_of(env)))
