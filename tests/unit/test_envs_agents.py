"""Several agents in one environment: it ends when all have ended, and values have an agent axis."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.envs import Box, Discrete, Environment, Groups, Transition, episode_totals, key_rows
from shoal.envs.spaces import Dict, parts
from shoal.errors import SettingError

SEEN = Box(0.0, 99.0, (1,))


@dataclass(frozen=True)
class Relay:
    """Each agent ends after its number of steps; action 1 counts as two steps."""

    agents = ("short", "long", "longest")
    observation_space = SEEN
    action_space = Discrete(2)
    lives = (2, 3, 5)
    limit: int = 99

    def reset(self, key):
        age = jnp.zeros(3, jnp.int32)
        return (age, jnp.int32(0)), age[:, None] * 1.0

    def step(self, key, state, action):
        age, time = state[0] + 1 + action, state[1] + 1
        over = age >= jnp.array(self.lives)
        late = jnp.full(3, time >= self.limit)
        return Transition((age, time), age[:, None] * 1.0, age * 1.0, over, late)


@dataclass(frozen=True)
class Grouped:
    """The same with its agents in two groups, one with larger observations."""

    agents = ("long_0", "long_1", "short_0")
    groups = (("long", ("long_0", "long_1")), ("short", ("short_0",)))
    observation_space = Groups((("long", Box(0.0, 99.0, (2,))), ("short", SEEN)))
    action_space = Groups((("long", Discrete(2)), ("short", Discrete(2))))
    relay = Relay()

    def reset(self, key):
        state, obs = self.relay.reset(key)
        return state, self.by_group(obs)

    def step(self, key, state, action):
        moved = self.relay.step(key, state, jnp.concatenate([action["short"], action["long"]]))
        halves = ({"long": x[1:], "short": x[:1]} for x in moved[2:])
        return Transition(moved.state, self.by_group(moved.obs), *halves)

    def by_group(self, obs):
        return {"long": jnp.tile(obs[1:], 2), "short": obs[:1]}


def play(simulator, actions):
    env = Environment("relay", simulator)
    states, _ = env.reset(key_rows(jax.random.PRNGKey(0), 1))
    return jax.lax.scan(env.step, states, actions)[1]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 1)] * 3), min_size=9, max_size=9), st.integers(1, 9))
def test_an_episode_is_over_when_it_is_for_all(actions, limit):
    steps = play(Relay(limit), jnp.array(actions)[:, None])
    age, time, total, gone = np.zeros(3), 0, 0.0, np.zeros(3, bool)
    for t, action in enumerate(actions):
        age, time = age + 1 + action, time + 1
        shown = np.where(gone, 0, age)  # also what each agent earns
        total += shown.mean()
        over = (age >= Relay.lives) | gone
        late = (time >= limit) & ~over
        assert steps.active[t, 0].tolist() == (~gone).tolist()
        assert steps.terminated[t, 0].tolist() == over.tolist()
        assert steps.truncated[t, 0].tolist() == late.tolist()
        assert steps.last_obs[t, 0, :, 0].tolist() == shown.tolist()
        np.testing.assert_allclose(steps.episode_return[t, 0], total, rtol=1e-5)
        assert steps.episode_length[t, 0] == time
        gone = over | late
        assert episode_totals(steps)["episodes"][t, 0] == gone.all()
        if gone.all():
            age, time, total, gone = np.zeros(3), 0, 0.0, np.zeros(3, bool)
        assert steps.obs[t, 0, :, 0].tolist() == np.where(gone, 0, age).tolist()


def test_agents_that_differ_are_groups_and_count_as_if_they_did_not():
    actions = np.random.default_rng(0).integers(0, 2, (9, 1, 3))
    grouped = play(Grouped(), {"long": jnp.array(actions[..., 1:]), "short": actions[..., :1]})
    plain = play(Relay(), jnp.array(actions))
    for name in ("reward", "terminated", "truncated"):
        of = getattr(grouped, name)
        together = np.concatenate([of["short"], of["long"]], axis=-1)
        np.testing.assert_array_equal(together, getattr(plain, name))
    for name in ("episode_return", "episode_length"):
        np.testing.assert_allclose(getattr(grouped, name), getattr(plain, name), rtol=1e-6)
    assert grouped.obs["long"].shape == (9, 1, 2, 2)
    assert grouped.obs["short"].shape == (9, 1, 1, 1)
    totals = episode_totals(grouped)
    np.testing.assert_array_equal(totals["episodes"], episode_totals(plain)["episodes"])


def test_groups_that_the_simulator_does_not_name_are_asked_for():
    class Nameless(Grouped):
        groups = ()

    with pytest.raises(SettingError, match="the groups of relay are not those of its spaces"):
        Environment("relay", Nameless()).reset(key_rows(jax.random.PRNGKey(0), 1))


@pytest.mark.parametrize(
    ("space", "found"),
    [
        (SEEN, (SEEN, False, None)),
        (
            Dict((("left", SEEN), ("right", SEEN))),
            (Dict((("left", SEEN), ("right", SEEN))), 0, None),
        ),
        (Dict((("mask", SEEN), ("seen", SEEN), ("world", SEEN))), (SEEN, True, SEEN)),
    ],
)
def test_observations_of_an_agent_have_named_parts(space, found):
    assert parts(space) == found
