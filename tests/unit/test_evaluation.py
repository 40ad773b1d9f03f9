"""Evaluation plays whole episodes with the learnt parameters and doesn't change training."""

import json
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import trim_mean

import shoal
from shoal.algorithms.evaluated import Evaluated
from shoal.cli.main import main
from shoal.envs import Box, Environment, HostEnvironment, Moves, Transition, key_rows
from shoal.errors import SettingError
from shoal.runs.results.agent import Agent
from shoal.runs.results.comparing import iqm
from shoal.runs.results.listing import listed
from unit.toy_loop import check_error

LONG, TICKS = 7, 5  # steps of an episode, ticks of a run
ONE = shoal.Cluster((shoal.Host("host0", 2, (shoal.Device("cpu", 0),)),))


@dataclass(frozen=True)
class Pay:
    """Rewards each step with its action; an episode has `LONG` steps."""

    observation_space = Box(0.0, 1.0, (1,))
    action_space = Box(0.0, 100.0, ())

    def reset(self, key):
        return jnp.int32(0), jnp.zeros(1)

    def step(self, key, state, action):
        done = state + 1 == LONG
        return Transition(state + 1, jnp.zeros(1), action, done, jnp.array(False))


@dataclass(frozen=True)
class PayInPython:
    """The same rules, stepped in Python."""

    observation_space = Pay.observation_space
    action_space = Pay.action_space
    agents = ()

    def open(self, seeds):
        return Open(len(seeds))


@dataclass
class Open:
    rows: int
    time: int = 0

    def reset(self):
        return (np.zeros((self.rows, 1), np.float32),)

    def step(self, action):
        self.time += 1
        never, obs = np.zeros(self.rows, bool), self.reset()
        done = np.full(self.rows, self.time % LONG == 0)
        return Moves(obs, action, done, never, obs, action)

    def close(self):
        pass


class State(NamedTuple):
    ask: jax.Array
    states: jax.Array


@shoal.stage
def learn(ask):
    return ask + 1.0


@dataclass(frozen=True)
class Greedy:
    """Acts with a number that grows each tick, or with the step number if it counts."""

    counts: bool = False

    def init(self, key, env, envs):
        return State(jnp.float32(1), env.reset(key_rows(key, envs))[0])

    def tick(self, env, state):
        rows = jax.tree.leaves(state.states)[0].shape[:1]
        states, step = env.step(state.states, jnp.broadcast_to(state.ask, rows))
        return State(learn(state.ask), states), {"paid": jnp.mean(step.reward)}

    def play(self, env, state, obs, memory):
        steps = jnp.float32(0) if memory is None else memory
        return (steps if self.counts else state.ask), steps + 1


WORLD = Environment("pay", Pay())
PYTHON = HostEnvironment("pay", PayInPython())
both = pytest.mark.parametrize("world", [WORLD, PYTHON], ids=["compiled", "python"])


@cache
def evaluations(world, **settings):
    """The evaluations by tick of a synchronous run."""
    algorithm = Evaluated(Greedy(settings.pop("counts", False)), episodes=4, **settings)
    policy = shoal.fused() if world is WORLD else shoal.single_learner_fine(1)
    plan, seen = shoal.plan(shoal.trace(algorithm, world, envs=2), policy, ONE), []
    shoal.run(plan, "inline", ticks=TICKS, watch=lambda tick, metrics: seen.append(metrics))
    names = ("return", "length", "episodes", "unfinished")
    return [tuple(float(metrics[f"evaluation_{name}"]) for name in names) for metrics in seen]


@both
def test_whole_episodes_are_played_with_the_parameters_before_a_tick(world):
    each = [(4.0 * LONG * (tick + 1), 4.0 * LONG, 4.0, 0.0) for tick in range(TICKS)]
    assert evaluations(world, every=1) == each
    nothing = (0.0, 0.0, 0.0, 0.0)
    assert evaluations(world, every=3) == [each[0], nothing, nothing, each[3], nothing]


@both
def test_an_episode_that_lasts_too_long_counts_with_its_return_so_far(world):
    assert evaluations(world, every=5, steps=3)[0] == (4.0 * 3, 4.0 * 3, 4.0, 4.0)


@both
def test_memory_is_carried_from_step_to_step(world):
    assert evaluations(world, every=5, counts=True)[0][0] == 4.0 * sum(range(LONG))


@both
@pytest.mark.parametrize("backend", ["inline", "threads"])
def test_an_asynchronous_evaluation_is_of_the_tick_it_names(backend, world, tmp_path):
    how = {"backend": backend, "ticks": TICKS, "envs": 4, "folder": tmp_path, "evaluate": 1}
    done = shoal.train(Greedy(), world, shoal.single_learner_coarse(2), **how)
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


def test_a_fused_evaluation_is_recorded_the_same_way(tmp_path):
    how = {"ticks": TICKS, "envs": 4, "folder": tmp_path, "evaluate": 2}
    done = shoal.train(Greedy(), WORLD, **how)
    assert len(done.plan.distribution.fragments) == 1
    lines = (done.folder / "evaluation.jsonl").read_text().splitlines()
    assert [json.loads(row)["tick"] for row in lines] == [0, 2, 4, TICKS]
    assert done.summary["algorithm"] == "greedy"
    assert str(done.plan).startswith("fused: Greedy, evaluated on pay")


def test_training_is_the_same_to_the_bit_with_and_without():
    pytest.importorskip("gymnax")
    small = shoal.algorithms.PPO(num_steps=4, update_epochs=1, num_minibatches=1, hidden=(4,))
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


def test_invalid_evaluations_are_rejected():
    with pytest.raises(SettingError, match="object can't be evaluated: it has no method `play`"):
        Evaluated(object())
    with pytest.raises(SettingError, match="every=0"):
        Evaluated(Greedy(), every=0)


def test_only_the_acting_parameters_are_sent_to_an_evaluation_in_python():
    judged = Evaluated(Greedy(), every=1)
    policy = shoal.with_observer(shoal.single_learner_coarse(1), "evaluator", "evaluate")
    plan = shoal.plan(shoal.trace(judged, PYTHON, envs=2), policy, ONE)
    assert plan.observers == {"evaluator"}
    crossing = [v for c in plan.channels if c.reader == "evaluator" for v in c.values]
    assert crossing == ["training.ask"]


@pytest.mark.slow
def test_environments_of_gymnasium_are_evaluated_in_a_process_of_their_own(tmp_path):
    pytest.importorskip("gymnasium")
    small = shoal.algorithms.PPO(num_steps=4, update_epochs=1, num_minibatches=1, hidden=(4,))
    how = {"envs": 2, "ticks": 3, "folder": tmp_path, "evaluate": 1, "backend": "processes"}
    done = shoal.train(small, "gymnasium:CartPole-v1", **how)
    assert done.summary["evaluation"]["return_mean"] == done.summary["evaluation"]["length_mean"]


# A trained agent


@dataclass(frozen=True)
class Drawn(Greedy):
    """Acts with a number that a key determines."""

    def play(self, env, state, obs, memory, key=None):
        return (state.ask if key is None else jax.random.uniform(key)), memory


def agent(world, kind=Greedy):
    algorithm = kind()
    return Agent(algorithm, world, algorithm.init(jax.random.key(0), world, 2), 3)


@both
@pytest.mark.parametrize("episodes", [1, 19, 257])
def test_an_agent_plays_so_many_whole_episodes(world, episodes):
    found = agent(world).evaluate(episodes)
    assert found.returns == (float(LONG),) * episodes
    assert found.lengths == (LONG,) * episodes
    assert (found.tick, found.mean, found.std, found.iqm) == (3, LONG, 0.0, LONG)
    assert found.unfinished == 0
    assert "greedy actions, seed 0" in repr(found)


@both
def test_an_episode_that_is_cut_off_counts_with_its_return_so_far(world):
    found = agent(world).evaluate(4, steps=3)
    assert (found.returns, found.lengths, found.unfinished) == ((3.0,) * 4, (3,) * 4, 4)
    assert "4 of them were cut off after 3 steps" in repr(found)


@both
def test_sampled_actions_are_those_of_the_seed_and_differ_from_step_to_step(world):
    drawn = agent(world, Drawn)
    first, again, other = (drawn.evaluate(5, sampled=True, seed=s) for s in (1, 1, 2))
    assert first == again
    assert first.returns != other.returns
    assert len(set(first.returns)) == 5
    assert drawn.evaluate(5).returns == (float(LONG),) * 5
    check_error(SettingError, lambda: agent(world).evaluate(2, sampled=True), "takes no key")


def test_evaluations_are_written_with_their_protocol_and_read_back(tmp_path):
    found = agent(WORLD).evaluate(1, seed=4)
    path = found.write(tmp_path)
    (read,) = listed(tmp_path).evaluations()
    assert json.loads(path.read_text()) == read
    said = {"tick": 3, "episodes": 1, "seed": 4, "actions": "greedy", "return_iqm": float(LONG)}
    assert {name: read[name] for name in said} == said
    assert read["returns"] == [float(LONG)]
    path.unlink()
    path.mkdir()
    check_error(SettingError, lambda: found.write(tmp_path), "can't write the evaluation")
    check_error(SettingError, lambda: agent(WORLD).evaluate(0), "episodes=0")
    check_error(SettingError, lambda: Agent(Greedy(), None, (), 0).evaluate(), "nothing to play")


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40))
def test_the_interquartile_mean_leaves_out_a_quarter_at_each_end(values):
    assert iqm(values) == pytest.approx(trim_mean(values, 0.25), abs=1e-6)


def test_what_training_returns_acts_and_is_evaluated_and_has_a_short_repr(tiny_run):
    done = tiny_run
    found = done.evaluate(episodes=3, steps=20)
    assert listed(done.folder).evaluations()[-1]["returns"] == list(found.returns)
    assert int(done.act(np.zeros(4))) == int(shoal.load(done.folder).act(np.zeros(4)))
    assert shoal.load(done.folder).evaluate(3, steps=20) == found
    assert len(repr(done)) < 200
    assert "ppo on gymnax:CartPole-v1: 4 ticks, 128 steps" in repr(done)


def test_the_command_evaluates_a_run(tiny_run, capsys):
    words = [str(tiny_run.folder), "--episodes", "2", "--sampled", "--steps", "9"]
    assert main(["eval", *words]) == 0
    out = capsys.readouterr().out
    assert "tick 4: 2 whole episodes, sampled actions, seed 0" in out
    assert "return  mean 9.0, std 0.0, IQM 9.0, min 9.0, max 9.0" in out
    assert (tiny_run.folder / "evaluations" / "tick-4-sampled-2-seed-0.json").exists()
