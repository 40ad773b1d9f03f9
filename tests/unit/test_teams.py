"""What a team's policies and critics observe, and that masked actions are never taken."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
from laws.herd import herd
from shoal.algorithms import IPPO, MAPPO
from shoal.envs.environment import key_rows
from shoal.errors import SettingError
from shoal.rl import teams
from shoal.rl.distributions import Categorical, masked
from shoal.rl.normalise import Moments
from shoal.rl.routing import route

ENV = herd()
ROUTES = route(ENV, ())
masks = st.lists(st.booleans(), min_size=5, max_size=5).filter(any)


@jax.jit
def mask_out(logits, mask, seed):
    """Results of masking: samples, the mode, log-probabilities, the entropy and its gradient."""
    dist = masked(Categorical(logits), mask)
    keys = jax.random.split(jax.random.PRNGKey(seed), 64)
    log_prob = jax.vmap(dist.log_prob)(jnp.arange(5))
    slope = jax.grad(lambda x: masked(Categorical(x), mask).entropy())(logits)
    return jax.vmap(dist.sample)(keys), dist.mode(), log_prob, dist.entropy(), slope


@settings(max_examples=40, deadline=None)
@given(masks, st.lists(st.floats(-50, 50, width=32), min_size=5, max_size=5), st.integers(0, 99))
def test_masked_actions_are_never_chosen_and_the_others_keep_their_odds(mask, logits, seed):
    drawn, mode, log_prob, entropy, slope = mask_out(np.float32(logits), np.array(mask), seed)
    assert all(mask[action] for action in drawn.tolist())
    assert mask[int(mode)]
    allowed = np.where(mask, np.exp(np.array(logits, np.float64) - max(logits)), 0)
    if allowed.sum() > 1e-30:
        np.testing.assert_allclose(np.exp(log_prob), allowed / allowed.sum(), atol=1e-4)
    assert np.isfinite(entropy)
    assert np.isfinite(slope).all()


def shown(central):
    _, obs = ENV.reset(key_rows(jax.random.PRNGKey(0), 2))
    return obs, teams.look(ROUTES, obs, 1, central)


def test_features_masks_and_the_world_state_are_separated():
    obs, found = shown(central=True)
    np.testing.assert_array_equal(found["dog"].own, obs["dog"]["seen"])
    np.testing.assert_array_equal(found["dog"].mask, obs["dog"]["mask"])
    np.testing.assert_array_equal(found["sheep"].world, obs["dog"]["world"][:, 0])
    assert shown(central=False)[1]["dog"].world == ()
    assert teams.widths(ROUTES) == ({"dog": 3, "sheep": 2}, 6)


def test_without_a_world_state_it_is_all_observations():
    plain = replace(ENV, simulator=Plain())
    routes = route(plain, ())
    _, obs = plain.reset(key_rows(jax.random.PRNGKey(0), 2))
    found = teams.look(routes, obs, 1, central=True)
    all_seen = np.concatenate([obs["dog"].reshape(2, -1), obs["sheep"].reshape(2, -1)], axis=1)
    for name in ("dog", "sheep"):
        np.testing.assert_array_equal(found[name].world, all_seen)
        assert found[name].mask == ()
    assert teams.widths(routes) == ({"dog": 3, "sheep": 2}, 8)


class Plain:
    """The herd with each agent's own observation only."""

    herd = ENV.simulator
    agents, groups, action_space = herd.agents, herd.groups, herd.action_space
    observation_space = shoal.envs.Groups(
        tuple((name, dict(space.spaces)["seen"]) for name, space in herd.observation_space.spaces)
    )

    def reset(self, key):
        state, obs = self.herd.reset(key)
        return state, {name: of["seen"] for name, of in obs.items()}


def critic_sees(algorithm):
    """The inputs that change a dog's value."""
    params = algorithm.init(jax.random.PRNGKey(0), ENV, 2).learner.params["dog"]
    _, found = shown(algorithm.central)
    now = found["dog"]

    def value(own, world):
        return jnp.sum(
            teams.policy_and_value(params, now._replace(own=own, world=world), (), ())[1][0, 0]
        )

    slopes = jax.grad(value, argnums=(0, 1))(now.own, now.world)
    return [bool(jnp.any(x != 0)) for x in jax.tree.leaves(slopes)], slopes[0]


def test_a_central_critic_sees_the_world_and_another_does_not():
    small = {"hidden": (4,), "agent_ids": False}
    central, _ = critic_sees(MAPPO(**small))
    own, slopes = critic_sees(IPPO(**small))
    assert central == [True, True]
    assert own == [True]
    assert not jnp.any(slopes[0, 1])  # nor the other dog's observation


def test_a_policy_is_changed_by_its_own_gradient_alone():
    algorithm = MAPPO(hidden=(4,))
    params, opt_state, *_ = algorithm.init(jax.random.PRNGKey(0), ENV, 2).learner
    grads = {
        "dog": jax.tree.map(jnp.ones_like, params["dog"]),
        "sheep": jax.tree.map(jnp.zeros_like, params["sheep"]),
    }
    after, _ = algorithm.apply(params, opt_state, grads)
    jax.tree.map(np.testing.assert_array_equal, after["sheep"], params["sheep"])
    for x, y in zip(*map(jax.tree.leaves, (after["dog"], params["dog"])), strict=True):
        assert np.all(x < y)


def test_the_metrics_of_several_policies_carry_their_names():
    parts = {"a": {"loss": 1}, "b": {"loss": 2}}
    assert teams.by_name(parts) == {"a.loss": 1, "b.loss": 2}
    assert teams.by_name({"a": {"loss": 1}}) == {"loss": 1}


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"critic": "centre"}, SettingError),
        (
            {"memory": "gru", "num_steps": 8, "num_minibatches": 2, "sequence_length": 3},
            SettingError,
        ),
    ],
)
def test_settings_that_cannot_work_are_rejected(settings, error):
    with pytest.raises(error):
        MAPPO(**settings)


def test_an_agent_without_a_policy_is_named_before_anything_starts():
    with pytest.raises(SettingError, match="`sheep_0`"):
        shoal.trace(MAPPO(policies=(("dog*", "dogs"),)), ENV, envs=2)


SMALL = {"hidden": (4,), "num_steps": 5, "num_minibatches": 1, "update_epochs": 1}


def rollout_of(algorithm, state, name="dog"):
    """A rollout of random actions, as `learn` gets it."""
    rng = np.random.default_rng(0)
    states, obs = state.env_states, state.obs
    shown, last, steps, actions = [], [], [], []
    for _ in range(algorithm.num_steps):
        action = {p.name: rng.integers(0, 2, (2, len(p.agents))) for p in ROUTES.policies}
        states, step = ENV.step(states, ROUTES.join(jax.tree.map(jnp.asarray, action)))
        shown.append(teams.look(ROUTES, obs, 1, algorithm.central))
        last.append(teams.look(ROUTES, step.last_obs, 1, algorithm.central))
        steps.append(step._replace(obs=()))
        actions.append(action)
        obs = step.obs
    stacked = [
        jax.tree.map(lambda *x: jnp.stack(x), *each) for each in (steps, actions, shown, last)
    ]
    steps, actions, shown, last = stacked
    log_prob = jax.tree.map(lambda x: -jnp.ones(x.shape), actions)
    done = actions, log_prob, shown, last, state.memory
    found = teams.rollouts_by_policy(ROUTES, steps, done)[name]
    return found._replace(active=())


def test_values_are_standardised_by_the_moments_of_their_targets():
    algorithm = MAPPO(**SMALL, agent_ids=False)
    state = algorithm.init(jax.random.PRNGKey(0), ENV, 2)
    moments = Moments(jnp.float32(10), jnp.float32(3), jnp.float32(4))
    learner = state.learner._replace(value_moments={"dog": moments, "sheep": moments})
    rollout = rollout_of(algorithm, state)
    batch, after, _ = algorithm.compute_advantages(learner, "dog", rollout)
    params = learner.params["dog"]
    _, *outputs = teams.forward(
        params, (rollout.obs, rollout.last_obs), rollout.memory, rollout.terminated
    )
    value, next_value = (3 + 2 * np.asarray(x) for x in outputs)
    reward = np.asarray(rollout.reward)
    over = np.asarray(rollout.terminated | rollout.truncated)
    advantage, later = np.zeros_like(value), np.zeros_like(value[0])
    for t in reversed(range(5)):
        delta = reward[t] + 0.99 * np.where(rollout.terminated[t], 0, next_value[t]) - value[t]
        later = advantage[t] = delta + 0.99 * 0.95 * np.where(over[t], 0, later)
    target = value + advantage
    mean = 3 + 5 / 15 * (target.mean() - 3)
    between = (5 / 15) * (10 / 15) * (target.mean() - 3) ** 2
    var = (10 * 4 + 5 * target.var()) / 15 + between
    np.testing.assert_allclose([after.mean, after.var], [mean, var], rtol=1e-4)
    np.testing.assert_allclose(batch.target, (target - mean) / np.sqrt(var), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(batch.value, outputs[0])


@pytest.mark.parametrize("shared", [True, False])
def test_a_critic_remembers_by_itself_unless_it_shares_the_actor_s_memory(shared):
    algorithm = MAPPO(**SMALL, memory="gru", memory_width=4, shared_memory=shared)
    state = algorithm.init(jax.random.PRNGKey(0), ENV, 2)
    batch = algorithm.compute_advantages(state.learner, "dog", rollout_of(algorithm, state))[0]
    batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)

    def value(params):
        return teams.policy_and_value(params, batch.features, batch.memory, batch.is_first)[1]

    params = state.learner.params["dog"]
    np.testing.assert_allclose(value(params), batch.value, rtol=1e-3, atol=1e-4)  # as step by step
    slopes = jax.grad(lambda params: jnp.sum(value(params)))(params)
    assert shared == any(np.any(x != 0) for x in jax.tree.leaves(slopes.memory))
    assert shared != any(np.any(x != 0) for x in jax.tree.leaves(slopes.critic_memory))


def test_agents_that_share_a_policy_and_see_the_same_differ_by_their_index():
    for ids in (True, False):
        algorithm = MAPPO(**SMALL, agent_ids=ids)
        state = algorithm.init(jax.random.PRNGKey(0), ENV, 2)
        shown = teams.look(ROUTES, state.obs, 1, algorithm.central)["dog"]
        same = shown._replace(own=jnp.ones_like(shown.own), mask=jnp.ones_like(shown.mask))
        seen = teams.see(same, state.learner.obs_moments["dog"], algorithm)
        logits = teams.decide(state.learner.params["dog"], ((), ()), seen)[1].logits
        assert ids == bool(np.any(logits[:, 0] != logits[:, 1]))


def test_observations_are_standardised_by_what_was_seen():
    algorithm = MAPPO(**SMALL, norm_obs=True)
    state = algorithm.init(jax.random.PRNGKey(0), ENV, 2)
    rollout = rollout_of(algorithm, state)
    moments = teams.update_moments(state.learner.obs_moments["dog"], rollout.obs, ())
    own = np.asarray(rollout.obs.own)
    np.testing.assert_allclose(moments.own.mean, own.mean((0, 1, 2)), rtol=1e-4, atol=1e-5)
    seen = np.asarray(teams.see(rollout.obs, moments, algorithm).own)[..., : own.shape[-1]]
    wanted = (own - own.mean((0, 1, 2))) / np.sqrt(own.var((0, 1, 2)) + 1e-8)
    np.testing.assert_allclose(seen, np.clip(wanted, -10, 10), rtol=1e-2, atol=1e-3)
