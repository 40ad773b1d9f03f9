"""A trained agent is loaded in one line and acts."""

import jax
import numpy as np
import pytest

import shoal
from matrix.cells import TRIED
from shoal.algorithms import ALGORITHMS
from shoal.errors import CheckpointError, SettingError
from shoal.runs.results.agent import Agent
from unit.toy_loop import check_error

pytest.importorskip("gymnax")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    from shoal.algorithms import PPO

    small = PPO(num_steps=8, update_epochs=1, num_minibatches=1, hidden=(8,), norm_obs=True)
    env, folder = shoal.envs.make("CartPole-v1"), tmp_path_factory.mktemp("runs")
    return shoal.train(small, env, envs=4, ticks=12, folder=folder, name="run").folder


def test_one_observation_and_many_and_the_best_action_or_any(run):
    agent = shoal.load(run)
    obs = np.random.default_rng(0).normal(size=(200, 4)).astype(np.float32)
    best = agent.act(obs)
    assert agent.tick == 12
    assert best.shape == (200,)
    assert set(best.tolist()) <= {0, 1}
    assert [int(agent.act(one)) for one in obs[:5]] == best[:5].tolist()
    drawn = agent.act(obs, key=1)
    assert (drawn != best).any()
    assert (drawn == agent.act(obs, key=1)).all()
    assert (drawn != agent.act(obs, key=2)).any()


@pytest.mark.parametrize("name", TRIED)
def test_every_algorithm_acts_at_its_best_or_as_in_training(name):
    settings, world = TRIED[name]
    algorithm, env = ALGORITHMS[name](**settings), world()
    state = algorithm.init(jax.random.key(0), env, 40)
    agent = Agent(algorithm, env, state, 0)
    best, again, *drawn = (agent.act(state.obs, key=key) for key in (None, None, 1, 1, 2))
    assert alike(best, again)
    assert alike(drawn[0], drawn[1])
    assert not alike(drawn[0], drawn[2])
    assert not alike(drawn[0], best)
    one, memory = agent.play(jax.tree.map(lambda x: x[0], state.obs))
    assert alike(one, jax.tree.map(lambda x: x[0], best))
    agent.play(jax.tree.map(lambda x: x[0], state.obs), memory, key=3)


def alike(one, other):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(x, y) for x, y in pairs)


def test_a_checkpoint_is_loaded_as_well_and_so_is_the_best(run):
    obs = np.zeros(4)
    actions = [shoal.load(run).act(obs), shoal.load(run / "checkpoints" / "12").act(obs)]
    actions.append(shoal.load(run, "best").act(obs))
    assert len({int(action) for action in actions}) == 1


def test_invalid_observations_and_runs_are_rejected(run, tmp_path):
    agent = shoal.load(run)
    check_error(SettingError, lambda: agent.act(np.zeros(3)), "not [3]", "first axis")
    check_error(SettingError, lambda: agent.act(np.zeros((2, 2, 4))), "not [2, 2, 4]")
    check_error(SettingError, lambda: shoal.load(tmp_path), "no run")
    check_error(SettingError, lambda: shoal.load(run, "worst"), "newest, best")
    (tmp_path / "run.json").write_text((run / "run.json").read_text())
    check_error(CheckpointError, lambda: shoal.load(tmp_path), "no checkpoint yet")


@pytest.mark.slow
def test_a_team_that_remembers_acts_and_is_evaluated(tmp_path):
    from laws.herd import herd
    from shoal.algorithms import VDN

    small = {
        "num_steps": 4,
        "batch_size_per_env": 2,
        "samples_per_insert": 2.0,
        "learning_starts_per_env": 1,
        "buffer_size_per_env": 3,
        "one_team": True,
    }
    world = herd()
    how = {"envs": 2, "ticks": 1, "folder": tmp_path, "evaluate": 1}
    done = shoal.train(VDN(**small, memory_width=4), world, **how)
    assert done.summary["evaluation"]["length_mean"] <= 5
    agent = shoal.load(done.folder, algorithm=VDN(**small, memory_width=4), env=world)
    _, obs = jax.jit(world.reset)(jax.random.split(jax.random.key(0), 3))
    actions, memory = agent.play(obs)
    assert {name: x.shape for name, x in actions.items()} == {"dog": (3, 2), "sheep": (3, 1)}
    one = jax.tree.map(lambda x: x[0], obs)
    assert (agent.act(one)["dog"] == actions["dog"][0]).all()
    assert jax.tree.leaves(memory)[0].shape[0] == 3
    check_error(SettingError, lambda: agent.act(one["dog"]), "an observation of herd is")
