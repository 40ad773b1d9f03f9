"""JaxMARL's environments match a plain loop over their own step without its resets."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("jaxmarl")
from shoal.algorithms import PPO
from shoal.envs import Groups, make
from shoal.envs.environment import key_rows
from shoal.envs.jaxmarl import names
from shoal.errors import SettingError, UnknownNameError
from shoal.runs.inputs.making import make_job
from shoal.runs.inputs.options import TrainOptions

SPREAD, TAG, SMAX = "jaxmarl:MPE_simple_spread_v3", "jaxmarl:MPE_simple_tag_v3", "jaxmarl:SMAX"
BATTLE = "jaxmarl:HeuristicEnemySMAX"


@partial(jax.jit, static_argnums=(0, 2))
def play(env, keys, steps):
    """Random actions and the resulting steps."""

    def step(states, t):
        def random(n, axes):
            return jax.random.randint(jax.random.fold_in(jax.random.PRNGKey(9), t), axes, 0, n)

        rows, space = len(keys), env.action_space
        if isinstance(space, Groups):
            counts = {g: len(of) for g, of in env.simulator.groups}
            action = {g: random(s.n, (rows, counts[g])) for g, s in space.spaces}
        else:
            action = random(space.n, (rows, len(env.agents)))
        states, seen = env.step(states, action)
        return states, (action, seen)

    states, obs = env.reset(keys)
    return obs, jax.lax.scan(step, states, jnp.arange(steps))[1]


def each(env, tree, row):
    """The part of a tree for one environment, by agent: {agent: [time, ...]}."""
    groups = env.simulator.groups
    if isinstance(env.action_space, Groups):
        return {a: tree[g][:, row, i] for g, of in groups for i, a in enumerate(of)}
    return {a: tree[:, row, i] for _, of in groups for i, a in enumerate(of)}


@pytest.mark.parametrize("name", [SPREAD, TAG])
def test_steps_are_those_of_a_plain_loop(name):
    env = make(name, max_steps=3)
    inner = env.simulator._made.env
    _, (action, steps) = play(env, key_rows(jax.random.PRNGKey(0), 2), 9)
    states, _ = env.reset(key_rows(jax.random.PRNGKey(0), 2))
    state = jax.tree.map(lambda x: x[1], states.inner)
    key = states.key[1]
    acted, shown = each(env, action, 1), each(env, steps.last_obs, 1)
    earned, late = each(env, steps.reward, 1), each(env, steps.truncated, 1)
    total = 0.0
    for t in range(9):
        key, step_key, reset_key = jax.random.split(key, 3)
        obs, state, reward, done, _ = inner.step_env(
            step_key, state, {agent: acted[agent][t] for agent in env.agents}
        )
        total += np.mean([reward[agent] for agent in env.agents])
        for agent in env.agents:
            np.testing.assert_allclose(shown[agent][t], obs[agent], atol=1e-6)
            np.testing.assert_allclose(earned[agent][t], reward[agent], atol=1e-5)
            assert late[agent][t] == done["__all__"]
        np.testing.assert_allclose(steps.episode_return[t, 1], total, atol=1e-4)
        if done["__all__"]:
            assert t % 4 == 3
            obs, state = inner.reset(reset_key)
            total = 0.0
        after = each(env, steps.obs, 1)
        np.testing.assert_allclose(after[env.agents[-1]][t], obs[env.agents[-1]], atol=1e-6)
    assert not any(np.any(x) for x in jax.tree.leaves(steps.terminated))


def test_agents_that_differ_are_groups_by_their_names():
    env = make(TAG)
    assert env.agents == ("adversary_0", "adversary_1", "adversary_2", "agent_0")
    assert [(name, space.shape) for name, space in env.observation_space.spaces] == [
        ("adversary", (16,)),
        ("agent", (14,)),
    ]


def test_smax_has_action_masks_and_a_world_state_and_ends_with_the_battle():
    env = make(BATTLE, scenario="3m", max_steps=40)
    first, (_, steps) = play(env, key_rows(jax.random.PRNGKey(0), 2), 90)
    space = dict(env.observation_space.spaces)
    for name, part in space.items():
        assert steps.obs[name].shape == (90, 2, 3, *part.shape)
        assert steps.obs[name].dtype == part.dtype
    assert first["mask"].any(axis=-1).all()
    mask = np.asarray(steps.obs["mask"])
    assert mask[..., 4].all()  # a dead agent may only stand still
    assert (mask.sum(axis=-1) == 1).any()
    world = np.asarray(steps.obs["world"])
    np.testing.assert_array_equal(world[:, :, 0], world[:, :, 2])
    over, late = np.asarray(steps.terminated), np.asarray(steps.truncated)
    assert over.any()
    assert (over.all(axis=-1) == over.any(axis=-1)).all()
    assert not (over & late).any()
    assert (np.asarray(steps.episode_length)[late[..., 0]] == 41).all()


def test_a_battle_that_takes_too_long_is_truncated():
    _, (_, steps) = play(
        make(BATTLE, scenario="3m", max_steps=2), key_rows(jax.random.PRNGKey(0), 2), 6
    )
    np.testing.assert_array_equal(np.asarray(steps.truncated)[:, 0, 0], [0, 0, 1, 0, 0, 1])
    assert not steps.terminated.any()


def test_homogeneous_teams_are_one_axis_and_others_are_groups():
    assert len(make(SMAX, scenario="3m").agents) == 6
    differ = make(SMAX, scenario="5m_vs_6m")
    assert [name for name, _ in differ.action_space.spaces] == ["ally", "enemy"]


def test_the_family_has_mpe_and_smax():
    assert {"MPE_simple_spread_v3", "MPE_simple_tag_v3", "SMAX"} <= set(names())
    assert "hanabi" not in names()


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        (SPREAD, {"max_step": 3}, "`max_steps`"),
        (BATTLE, {"scenario": "3n"}, "`3m`"),
        (SPREAD, {"local_ratio": 2.0}, "between 0.0 and 1.0"),
        (SPREAD, {"action_type": "none"}, "none is not supported"),
    ],
)
def test_settings_that_do_not_exist_are_rejected(name, settings, says):
    with pytest.raises((SettingError, UnknownNameError), match=says):
        _ = make(name, **settings).agents


def test_ppo_is_rejected_where_agents_differ():
    with pytest.raises(SettingError, match=r"PPO can't act in jaxmarl:MPE_simple_tag_v3"):
        make_job(TrainOptions(PPO(), TAG))
