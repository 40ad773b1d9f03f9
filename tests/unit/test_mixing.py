"""Mixing is monotonic in each agent's value, targets equal their formula, and masks are kept."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laws.herd import herd
from shoal.algorithms import QMIX, VDN
from shoal.algorithms.qmix import Rows, Sequence
from shoal.errors import SettingError, UnknownNameError
from shoal.rl import mixing
from shoal.rl.routing import route
from shoal.rl.teams import Shown

AGENTS, WORLD = 3, 4
LAW = settings(max_examples=25, deadline=None)
MIXER = mixing.init_mixer(jax.random.PRNGKey(0), WORLD, AGENTS, 5, 6)
number = st.floats(-10, 10, width=32)
mix = jax.jit(partial(mixing.mix, MIXER))
slope_of = jax.jit(jax.grad(partial(mixing.mix, MIXER)))


def numbers(count):
    return st.lists(number, min_size=count, max_size=count).map(np.float32)


@LAW
@given(numbers(AGENTS), numbers(WORLD), st.integers(0, AGENTS - 1), st.floats(0, 5, width=32))
def test_the_team_value_rises_with_each_agents_value(q_values, world, agent, more):
    better = q_values + more * np.eye(AGENTS, dtype=np.float32)[agent]
    assert mix(better, world) >= mix(q_values, world) - 1e-4
    assert (slope_of(q_values, world) >= 0).all()


@LAW
@given(numbers(AGENTS), numbers(WORLD))
def test_the_mixing_network_is_its_formula(q_values, world):
    def mlp(layers):
        (first, last), x = layers, world
        x = np.maximum(x @ np.asarray(first.weight) + first.bias, 0)
        return x @ np.asarray(last.weight) + last.bias

    weights = np.abs(mlp(MIXER.first)).reshape(AGENTS, -1)
    unit = q_values @ weights + world @ np.asarray(MIXER.first_bias.weight) + MIXER.first_bias.bias
    unit = np.where(unit > 0, unit, np.expm1(np.minimum(unit, 0)))
    wanted = unit @ np.abs(mlp(MIXER.second)) + mlp(MIXER.second_bias)[0]
    np.testing.assert_allclose(mix(q_values, world), wanted, rtol=1e-3, atol=1e-3)


def test_without_a_mixer_q_total_is_the_sum():
    q_values = jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(mixing.mix((), q_values, ()), [3.0, 12.0])


masks = st.lists(
    st.lists(st.booleans(), min_size=4, max_size=4).filter(any), min_size=2, max_size=2
)
AGENT_NETWORK = mixing.init_agent_network(jax.random.PRNGKey(0), 3, 2, 4, ("gru", 5))


@jax.jit
def draws(mask, epsilon, seed):
    key = jax.random.PRNGKey(seed)
    shown = Shown(jax.random.normal(key, (2, 3)), mask, ())
    _, q_values = mixing.agent_q_values(AGENT_NETWORK, jnp.zeros((2, 5)), shown)
    drawn = jax.vmap(lambda key: mixing.epsilon_greedy(key, q_values, mask, epsilon))
    return q_values, drawn(jax.random.split(key, 64))


@LAW
@given(masks, st.sampled_from([0.0, 0.3, 1.0]), st.integers(0, 99))
def test_masked_actions_are_never_chosen(mask, epsilon, seed):
    q_values, drawn = draws(np.array(mask), epsilon, seed)
    assert np.array(mask)[np.arange(2), np.asarray(drawn)].all()
    if epsilon == 0.0:
        assert (drawn == np.argmax(q_values, axis=-1)).all()


def test_agents_that_share_a_network_receive_their_index():
    own = jnp.ones((2, 3))
    _, q_values = mixing.agent_q_values(AGENT_NETWORK, jnp.zeros((2, 5)), Shown(own, (), ()))
    assert np.abs(q_values[0] - q_values[1]).max() > 1e-3


class TestTargets:
    """A loss whose networks are replaced by numbers, which leaves the formula."""

    steps = 5
    env = herd()
    routes = route(env, (("*", "*"),))

    def batch(self, seed):
        draw = np.random.default_rng(seed)

        def shown(policy):
            seen = dict(policy.observation_space.spaces)
            own, world = draw.normal(size=(2, self.steps, 1, 6)).astype(np.float32)
            mask = np.ones((self.steps, 1, 1, policy.action_space.n), bool)
            return Shown(jnp.array(own[..., None, : seen["seen"].size]), jnp.array(mask), world)

        now, last = ({p.name: shown(p) for p in self.routes.policies} for _ in range(2))
        action = {
            p.name: jnp.array(draw.integers(0, p.action_space.n, (self.steps, 1, 1)))
            for p in self.routes.policies
        }
        over = draw.random((self.steps, 1)) < 0.4
        terminated = over & (draw.random((self.steps, 1)) < 0.5)
        reward = draw.normal(size=(self.steps, 1)).astype(np.float32)
        memory = {p.name: jnp.zeros((1, 1, 4)) for p in self.routes.policies}
        return Sequence(now, action, reward, jnp.array(terminated), jnp.array(over), last, memory)

    @pytest.mark.parametrize("double", [True, False])
    @pytest.mark.parametrize("td_lambda", [0.0, 0.7])
    def test_the_loss_is_that_of_a_loop_back_in_time(self, double, td_lambda):
        kind = {"mixer_width": 3, "mixer_hidden": 3, "memory_width": 4}
        algorithm = QMIX(**kind, gamma=0.9, td_lambda=td_lambda, double=double)
        params, target = (
            mixing.init_networks(jax.random.PRNGKey(i), self.routes, ("gru", 4), (3, 3))
            for i in (1, 2)
        )
        batch = self.batch(0)
        given_ = batch.memory, (batch.obs, batch.last_obs), batch.ended
        q_values_of = jax.jit(mixing.team_q_values)
        (q_values, then), (_, target_then) = (
            q_values_of(params, *given_),
            q_values_of(target, *given_),
        )
        names = sorted(q_values)
        total, follow = np.zeros(self.steps), np.zeros(self.steps)
        for t in range(self.steps):
            chosen = [q_values[n][t, 0, 0, batch.action[n][t, 0, 0]] for n in names]
            total[t] = mixing.mix(params.mixer, jnp.stack(chosen), batch.obs[names[0]].world[t, 0])
            best = [np.argmax((then if double else target_then)[n][t, 0, 0]) for n in names]
            chosen = [target_then[n][t, 0, 0, b] for n, b in zip(names, best, strict=True)]
            world = batch.last_obs[names[0]].world[t, 0]
            follow[t] = mixing.mix(target.mixer, jnp.stack(chosen), world)
        wanted, after = np.zeros(self.steps), follow[-1]
        for t in reversed(range(self.steps)):
            weight = td_lambda * (not batch.ended[t, 0])
            ahead = (1 - weight) * follow[t] + weight * after
            after = batch.reward[t, 0] + 0.9 * (not batch.terminated[t, 0]) * ahead
            wanted[t] = 0.5 * (total[t] - after) ** 2
        loss, parts = jax.jit(algorithm.loss)(params, target, batch)
        np.testing.assert_allclose(loss, wanted.mean(), rtol=1e-4)
        np.testing.assert_allclose(parts["q_values"], total.mean(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("table", [(), (("dog*", "shepherd"), ("*", "prey"))])
def test_playing_is_acting_greedily(table):
    small = {"num_steps": 4, "memory_width": 4, "mixer_width": 2, "mixer_hidden": 2}
    algorithm, env = QMIX(**small, policies=table, one_team=True, epsilon=(0.0, 0.0)), herd()
    state = jax.jit(lambda: algorithm.init(jax.random.PRNGKey(3), env, 2))()
    rows = Rows(state.keys, state.env_states, state.obs, state.memory)
    _, kept, _ = jax.jit(partial(algorithm.collect, env))(state.learner, rows)
    play, routes = jax.jit(partial(algorithm.play, env, state)), route(env, table)
    for row in range(2):
        memory = None
        for at in range(4):
            obs, taken, over = jax.tree.map(
                lambda x, at=(row, at): x[at], (kept.obs, kept.action, kept.ended)
            )
            action, memory = play(obs, memory)
            wanted = routes.join(taken, 0)
            assert {name: x.tolist() for name, x in action.items()} == {
                name: x.tolist() for name, x in wanted.items()
            }
            for name, of in action.items():
                assert np.take_along_axis(obs[name]["mask"], of[:, None], 1).all()
            memory = None if over else memory


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"mixer": "product"}, UnknownNameError, "product"),
        (
            {"batch_size_per_env": 3, "samples_per_insert": 4.0},
            SettingError,
            "multiple of batch_size_per_env",
        ),
        (
            {"learning_starts_per_env": 9, "buffer_size_per_env": 8},
            SettingError,
            "buffer_size_per_env",
        ),
    ],
)
def test_settings_that_cannot_work_are_rejected(settings, error, says):
    with pytest.raises(error, match=says):
        QMIX(**settings)


@pytest.mark.parametrize("kind", [QMIX, VDN])
def test_groups_that_may_be_opponents_are_not_mixed_by_default(kind):
    with pytest.raises(SettingError, match="dog, sheep may be opponents") as refused:
        kind().init(jax.random.key(0), herd(), 2)
    assert "one_team=True" in refused.value.fix


def test_vdn_is_qmix_with_a_sum():
    assert VDN(num_steps=4) != QMIX(num_steps=4)
    assert VDN().mixer == "sum"
