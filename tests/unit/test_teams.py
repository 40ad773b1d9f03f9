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
from shoal.errors import SettingError, UnknownNameError
from shoal.rl import teams
from shoal.rl.distributions import Categorical, masked
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
    small = {"hidden": (4,)}
    central, _ = critic_sees(MAPPO(**small))
    own, slopes = critic_sees(IPPO(**small))
    assert central == [True, True]
    assert own == [True]
    assert not jnp.any(slopes[0, 1])  # nor the other dog's observation


def test_a_policy_is_changed_by_its_own_gradient_alone():
    algorithm = MAPPO(hidden=(4,))
    params, opt_state = algorithm.init(jax.random.PRNGKey(0), ENV, 2).learner
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
        ({"critic": "centre"}, UnknownNameError),
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
