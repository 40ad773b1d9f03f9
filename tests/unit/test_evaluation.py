"""Evaluation plays whole episodes with what was learnt, and training does not notice."""

import json
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

import shoal
from shoal.algorithms.evaluated import Evaluated
from shoal.envs import Box, Environment, Transition, key_rows
from shoal.errors import SettingError

LONG, TICKS = 7, 5  # steps of an episode, ticks of a run
ONE = shoal.Cluster((shoal.Host("host0", 2, (shoal.Device("cpu", 0),)),))


@dataclass(frozen=True)
class Pay:
    """Pays what is asked for, `LONG` times an episode."""

    observation_space = Box(0.0, 1.0, (1,))
    action_space = Box(0.0, 100.0, ())

    def reset(self, key):
        return jnp.int32(0), jnp.zeros(1)

    def step(self, key, state, action):
        done = state + 1 == LONG
        return Transition(state + 1, jnp.zeros(1), action, done, jnp.array(False))


class State(NamedTuple):
    ask: jax.Array
    states: jax.Array


@shoal.stage
def learn(ask):
    return ask + 1.0


@dataclass(frozen=True)
class Greedy:
    """Asks for more after every tick; if it counts, for as much as it has made steps."""

    counts: bool = False

    def init(self, key, env, envs):
        return State(jnp.float32(1), env.reset(key_rows(key, envs))[0])

    def tick(self, env, state):
        states, step = env.step(state.states, jnp.broadcast_to(state.ask, state.states.inner.shape))
        return State(learn(state.ask), states), {"paid": jnp.mean(step.reward)}

    def play(self, env, state, obs, memory):
        steps = jnp.float32(0) if memory is None else memory
        return (steps if self.counts else state.ask), steps + 1


WORLD = Environment("pay", Pay())


@cache
def told(**settings):
    """Evaluations by tick, where it is one program."""
    algorithm = Evaluated(Greedy(settings.pop("counts", False)), episodes=4, **settings)
    plan, seen = shoal.plan(shoal.trace(algorithm, WORLD, envs=2), shoal.fused(), ONE), []
    shoal.run(plan, "inline", ticks=TICKS, watch=lambda tick, metrics: seen.append(metrics))
    names = ("return", "length", "episodes", "unfinished")
    return [tuple(float(metrics[f"evaluation_{name}"]) for name in names) for metrics in seen]


def test_whole_episodes_are_played_with_what_there_is_before_a_tick():
    each = [(4.0 * LONG * (tick + 1), 4.0 * LONG, 4.0, 0.0) for tick in range(TICKS)]
    assert told(every=1) == each
    nothing = (0.0, 0.0, 0.0, 0.0)
    assert told(every=3) == [each[0], nothing, nothing, each[3], nothing]


def test_an_episode_that_lasts_too_long_counts_with_its_return_so_far():
    assert told(every=5, steps=3)[0] == (4.0 * 3, 4.0 * 3, 4.0, 4.0)


def test_what_is_remembered_is_handed_on_from_step_to_step():
    assert told(every=5, counts=True)[0][0] == 4.0 * sum(range(LONG))


@pytest.mark.parametrize("backend", ["inline", "threads"])
def test_on_the_side_each_evaluation_is_of_the_tick_it_names(backend, tmp_path):
    how = {"backend": backend, "ticks": TICKS, "envs": 4, "folder": tmp_path, "evaluate": 1}
    done = shoal.train(Greedy(), WORLD, shoal.single_learner_coarse(2), **how)
    assert [f.name for f in done.plan.distribution.fragments][-1] == "evaluator"
    lines = (done.folder / "evaluation.jsonl").read_text().splitlines()
    for row in map(json.loads, lines):
        assert row["return_mean"] == LONG * (row["tick"] + 1)
        assert row["env_steps"] == 4 * row["tick"]
    assert done.summary["evaluation"] == json.loads(lines[-1])
    assert float(done.state.training.ask) == TICKS + 1
    rows = (done.folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["tick"] for row in rows] == list(range(TICKS))
    assert all("paid" in row and "evaluation" not in row for row in rows)


def test_in_one_program_it_is_recorded_alike(tmp_path):
    how = {"ticks": TICKS, "envs": 4, "folder": tmp_path, "evaluate": 2}
    done = shoal.train(Greedy(), WORLD, **how)
    assert len(done.plan.distribution.fragments) == 1
    lines = (done.folder / "evaluation.jsonl").read_text().splitlines()
    assert [json.loads(row)["tick"] for row in lines] == [0, 2, 4]
    assert done.summary["algorithm"] == "greedy"
    assert str(done.plan).startswith("fused: Greedy, evaluated on pay")


def test_training_is_the_same_to_the_bit_with_and_without():
    pytest.importorskip("gymnax")
    small = shoal.algorithms.PPO(steps=4, epochs=1, minibatches=1, hidden=(4,))
    env, values = shoal.envs.make("CartPole-v1"), []
    for algorithm in (small, Evaluated(small, episodes=2, steps=9, every=2)):
        plan = shoal.plan(shoal.trace(algorithm, env, envs=4), shoal.fused(), ONE)
        values.append(shoal.run(plan, "inline", ticks=3).values)
    plain, evaluated = ({n: as_data(x) for n, x in each.items()} for each in values)
    for name, wanted in plain.items():
        assert (evaluated[f"training.{name}"] == wanted).all(), name


def as_data(x):
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(x) if is_key else x


def test_what_cannot_be_evaluated_is_refused():
    with pytest.raises(SettingError, match="object can't be evaluated: it has no method `play`"):
        Evaluated(object())
    with pytest.raises(SettingError, match="every=0"):
        Evaluated(Greedy(), every=0)


def test_environments_of_python_are_refused():
    pytest.importorskip("gymnasium")
    small = shoal.algorithms.PPO(steps=4, minibatches=1)
    with pytest.raises(SettingError, match="stepped in Python"):
        shoal.trace(Evaluated(small), shoal.envs.make("gymnasium:CartPole-v1"), envs=2)
