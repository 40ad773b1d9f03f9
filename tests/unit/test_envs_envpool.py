"""EnvPool's environments reset in the same step, have their own seeds, and report raw returns."""

import subprocess
import sys

import numpy as np
import pytest

envpool = pytest.importorskip("envpool")
from shoal.envs import Box, Discrete, make  # noqa: E402
from shoal.envs.envpool import EnvPoolSimulator  # noqa: E402
from shoal.envs.host import close_all, first_rows  # noqa: E402
from shoal.errors import SettingError, UnknownNameError  # noqa: E402
from unit.host_envs import SEEDS, play, random_actions  # noqa: E402

CARTPOLE = EnvPoolSimulator("CartPole-v1")
SHORT = EnvPoolSimulator("Pendulum-v1", (("max_episode_steps", 9),))


@pytest.fixture(autouse=True)
def closed():
    yield
    close_all()


def one_by_one(simulator, actions, row):
    """A pool of one environment, which EnvPool resets one step late."""
    seed = int(SEEDS[row] >> 1)
    settings = dict(simulator.settings)
    pool = envpool.make_gymnasium(simulator.id, num_envs=1, seed=[seed], **settings)
    obs, _ = pool.reset()
    yield obs[0]
    for action in actions:
        obs, reward, terminated, truncated, _ = pool.step(action[None])
        first = None
        if terminated[0] or truncated[0]:
            first, *_ = pool.step(action[None])  # the action is ignored: it restarts
        yield obs[0], reward[0], terminated[0], truncated[0], obs[0] if first is None else first[0]
    pool.close()


@pytest.mark.parametrize("simulator", [CARTPOLE, SHORT], ids=["terminates", "runs out"])
def test_rows_are_those_of_pools_of_one(simulator):
    actions = random_actions(simulator, 60)
    seen, first = play(simulator, actions), first_rows(simulator, SEEDS)[0]
    for row in range(len(SEEDS)):
        course = one_by_one(simulator, actions[:, row], row)
        np.testing.assert_array_equal(first[row], next(course))
        total, length = 0.0, 0
        for t, (last_obs, reward, terminated, truncated, obs) in enumerate(course):
            total, length = total + reward, length + 1
            np.testing.assert_array_equal(seen["last_obs"][t, row], last_obs)
            np.testing.assert_array_equal(seen["obs"][t, row], obs)
            assert seen["terminated"][t, row] == terminated
            assert seen["truncated"][t, row] == truncated
            np.testing.assert_allclose(seen["reward"][t, row], reward)
            np.testing.assert_allclose(seen["episode_return"][t, row], total, rtol=1e-4)
            assert seen["episode_length"][t, row] == length
            if terminated or truncated:
                total, length = 0.0, 0
    ended = seen["terminated"] | seen["truncated"]
    assert ended.any()
    assert not (seen["terminated"] & seen["truncated"]).any()


def test_the_same_seeds_give_the_same_steps_with_any_number_of_threads():
    actions = random_actions(CARTPOLE, 50)
    together = play(CARTPOLE, actions)
    threads = play(EnvPoolSimulator("CartPole-v1", (("num_threads", 3),)), actions)
    alone = play(CARTPOLE, actions[:, 1:2], SEEDS[1:2])
    for name, x in together.items():
        np.testing.assert_array_equal(x, threads[name])
        np.testing.assert_array_equal(x[:, 1:2], alone[name])


@pytest.mark.parametrize("simulator", [CARTPOLE, SHORT], ids=["terminates", "runs out"])
@pytest.mark.parametrize("threads", [1, 3])
def test_asynchronous_environments_give_the_same_steps(simulator, threads):
    settings = (*simulator.settings, ("asynchronous", True), ("num_threads", threads))
    apart = EnvPoolSimulator(simulator.id, settings)
    actions = random_actions(simulator, 60)
    together, one_by_one = play(simulator, actions), play(apart, actions)
    assert (together["terminated"] | together["truncated"]).any()
    for name, x in together.items():
        np.testing.assert_array_equal(x, one_by_one[name])


def test_atari_and_mujoco_are_shown_as_arrays_that_jax_takes():
    pong, cheetah = EnvPoolSimulator("Pong-v5"), EnvPoolSimulator("HalfCheetah-v5")
    assert pong.observation_space == Box(0.0, 255.0, (4, 84, 84), "uint8")
    assert pong.action_space == Discrete(6)
    assert cheetah.action_space == Box(-1.0, 1.0, (6,))
    seen = play(pong, np.zeros((70, 2), np.int32), SEEDS[:2])
    assert seen["obs"].dtype == np.uint8
    assert (seen["episode_return"][-1] <= -1).all()
    seen = play(cheetah, random_actions(cheetah, 3))
    assert seen["obs"].dtype == seen["reward"].dtype == np.float32


def test_atari_rewards_are_clipped_for_learning_only():
    clipped = EnvPoolSimulator("Assault-v5")
    plain = EnvPoolSimulator("Assault-v5", (("clip_reward", False),))
    actions = random_actions(clipped, 150, rows=2)
    seen, true = play(clipped, actions, SEEDS[:2]), play(plain, actions, SEEDS[:2])
    assert true["reward"].max() > 1
    np.testing.assert_array_equal(seen["reward"], np.sign(true["reward"]))
    np.testing.assert_array_equal(seen["episode_return"], true["episode_return"])


def test_a_discrete_observation_is_shown_one_hot():
    seen = play(EnvPoolSimulator("FrozenLake-v1"), np.ones((5, 3), np.int32))
    np.testing.assert_array_equal(seen["obs"].sum(-1), 1)


def test_unknown_names_and_settings_are_rejected():
    with pytest.raises(UnknownNameError, match="Did you mean `CartPole-v1`"):
        make("envpool:CartPol-v1")
    with pytest.raises(SettingError, match="`batch_size` can't be set"):
        make("envpool:CartPole-v1", batch_size=2)
    with pytest.raises(SettingError, match="can't be made with speed"):
        make("envpool:CartPole-v1", speed=2).action_space  # noqa: B018


WITHOUT_JAX = """
import sys, numpy as np
from shoal.envs.host import step_rows
from shoal.envs.envpool import EnvPoolSimulator
rows = EnvPoolSimulator("CartPole-v1"), np.arange(2, dtype=np.uint32)
step_rows(*rows, np.zeros(2, np.int32), np.zeros(2, np.int32))
assert not [m for m in sys.modules if m.startswith("jax")], "JAX was imported"
"""


def test_a_process_that_only_steps_environments_does_not_import_jax():
    command = [sys.executable, "-c", WITHOUT_JAX]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
