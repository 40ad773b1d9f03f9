"""Gymnasium's environments step as in a plain loop, and reset in the same step."""

import pickle
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest

gymnasium = pytest.importorskip("gymnasium")
from shoal.envs import Box, Dict, Discrete, MultiDiscrete, make  # noqa: E402
from shoal.envs.gymnasium import GymnasiumSimulator  # noqa: E402
from shoal.envs.host import close_all, first_rows, step_rows  # noqa: E402
from shoal.envs.spaces import leaves  # noqa: E402
from shoal.errors import (  # noqa: E402
    RowError,
    RunError,
    SettingError,
    UnknownNameError,
)
from unit.host_envs import SEEDS, play, random_actions  # noqa: E402


def needs(package):
    return pytest.mark.skipif(not find_spec(package), reason=f"needs {package}")


CASES = [
    pytest.param("CartPole-v1", {}, 120, id="terminates"),
    pytest.param("Pendulum-v1", {"max_episode_steps": 13}, 40, id="runs out"),
    pytest.param("LunarLander-v3", {}, 150, marks=needs("Box2D"), id="box2d"),
    pytest.param(
        "HalfCheetah-v5", {"max_episode_steps": 10}, 25, marks=needs("mujoco"), id="mujoco"
    ),
]


@pytest.fixture(autouse=True)
def closed():
    yield
    close_all()


def simulator(name, **settings):
    return GymnasiumSimulator(name, tuple(sorted(settings.items())))


@pytest.mark.parametrize(("name", "settings", "steps"), CASES)
def test_rows_are_those_of_a_plain_loop(name, settings, steps):
    rules = simulator(name, **settings)
    actions = random_actions(rules, steps)
    seen = play(rules, actions)
    first = first_rows(rules, SEEDS)[0]
    for row, seed in enumerate(SEEDS.tolist()):
        env = gymnasium.make(name, **settings)
        obs, _ = env.reset(seed=seed)
        np.testing.assert_array_equal(first[row], obs.astype(np.float32))
        total, length = 0.0, 0
        for t in range(steps):
            action = actions[t, row]
            action = int(action) if action.ndim == 0 else action.astype(env.action_space.dtype)
            obs, reward, terminated, truncated, _ = env.step(action)
            total, length = total + reward, length + 1
            np.testing.assert_array_equal(seen["last_obs"][t, row], obs.astype(np.float32))
            assert seen["terminated"][t, row] == terminated
            assert seen["truncated"][t, row] == (truncated and not terminated)
            np.testing.assert_allclose(seen["reward"][t, row], reward, rtol=1e-6)
            np.testing.assert_allclose(seen["episode_return"][t, row], total, rtol=1e-4, atol=1e-4)
            assert seen["episode_length"][t, row] == length
            if terminated or truncated:
                obs, total, length = env.reset()[0], 0.0, 0
            np.testing.assert_array_equal(seen["obs"][t, row], obs.astype(np.float32))
        env.close()
    assert (seen["terminated"] | seen["truncated"]).any()


def test_the_same_seeds_and_actions_give_the_same_steps_in_any_grouping():
    rules = simulator("CartPole-v1")
    actions = random_actions(rules, 60)
    together, again = play(rules, actions), play(rules, actions)
    alone = play(rules, actions[:, 1:2], SEEDS[1:2])
    for name, x in together.items():
        np.testing.assert_array_equal(x, again[name])
        np.testing.assert_array_equal(x[:, 1:2], alone[name])


def test_spaces_of_every_kind():
    cases = {
        "FrozenLake-v1": (Box(0.0, 1.0, (16,)), Discrete(4)),
        "Blackjack-v1": (3, Discrete(2)),
        "CartPole-v1": ((4,), Discrete(2)),
    }
    for name, (shown, taken) in cases.items():
        rules = simulator(name)
        space = rules.observation_space
        assert rules.action_space == taken
        match shown:
            case int():
                assert isinstance(space, Dict)
                assert len(leaves(space)) == shown
            case tuple():
                assert space.shape == shown
            case _:
                assert space == shown
        assert all(np.isfinite(x).all() for x in first_rows(rules, SEEDS))
    seen = play(simulator("FrozenLake-v1"), np.ones((5, 3), np.int32))
    np.testing.assert_array_equal(seen["obs"].sum(-1), 1)


def test_dict_observations_and_multi_discrete_actions_are_supported():
    rules = simulator("Many-v0")
    assert rules.action_space == MultiDiscrete((3, 4))
    actions = random_actions(rules, 4)
    seen = play(rules, actions)
    np.testing.assert_array_equal(seen["obs"]["a"]["z"], actions)
    np.testing.assert_array_equal(seen["reward"], actions.sum(-1) + 1)
    assert seen["obs"]["b"].dtype == np.uint8
    assert list(seen["obs"]) == ["a", "b"]


def test_wrappers_are_applied_and_boxes_clipped():
    rules = simulator("Pendulum-v1", wrappers=("unit.host_envs:doubled",))
    wild, tame = (np.full((3, 3, 1), x, np.float32) for x in (50.0, 2.0))
    seen = play(rules, wild)
    np.testing.assert_array_equal(seen["reward"], play(rules, tame)["reward"])
    plain = play(simulator("Pendulum-v1"), tame)
    np.testing.assert_allclose(seen["reward"], 2 * plain["reward"], rtol=1e-6)
    with pytest.raises(SettingError, match="no wrapper `nowhere:at_all`"):
        simulator("Pendulum-v1", wrappers=("nowhere:at_all",)).action_space  # noqa: B018


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("step", "environment 1 failed in step: OSError: the cable came off"),
        ("reset", "environment 1 failed in reset: OSError: out of levels"),
        ("shape", r"environment 1 failed in step: ValueError: .* shape \(1,\), not \(2,\)"),
        ("dtype", "environment 1 failed in step: ValueError: .* dtype complex128, not float32"),
        ("nan", r"environment 1 showed nan at \[1\] after a step"),
        ("reward", "environment 1 gave the reward inf"),
    ],
)
def test_a_bad_environment_is_named(fault, words):
    rules = simulator("Broken-v0", fault=fault)
    with pytest.raises(RowError, match=words) as caught:
        play(rules, np.zeros((5, 3), np.int32))
    assert caught.value.row == 1
    assert len(play(simulator("Broken-v0"), np.zeros((5, 3), np.int32))["obs"]) == 5


@pytest.mark.parametrize(
    ("name", "action"),
    [
        ("Broken-v0", np.array([0, 3, 1])),
        ("Broken-v0", np.array([0, -1, 1])),
        ("Pendulum-v1", np.array([[0.0], [np.nan], [0.0]])),
        ("Many-v0", np.array([[0, 0], [0, 4], [0, 0]])),
    ],
)
def test_a_bad_action_is_named(name, action):
    with pytest.raises(RowError, match="environment 1 was given the action"):
        step_rows(simulator(name), SEEDS, np.zeros(3, np.int32), action)


def test_an_environment_that_fails_to_construct_is_named(monkeypatch):
    from shoal.envs import gymnasium as family

    rules = simulator("CartPole-v1")
    assert rules.observation_space
    made = []

    def make(simulator):
        made.append(simulator)
        if len(made) == 3:
            raise MemoryError("no room")
        return gymnasium.make("CartPole-v1")

    monkeypatch.setattr(family, "_make", make)
    with pytest.raises(RowError, match="environment 2 can't be made: MemoryError: no room"):
        rules.open(SEEDS)


def test_steps_that_don_t_fit_are_rejected():
    rules = simulator("CartPole-v1")
    action = np.zeros(3, np.int32)
    with pytest.raises(RunError, match="have made 0 steps, but the loop counts 4"):
        step_rows(rules, SEEDS, np.full(3, 4, np.int32), action)
    at = step_rows(rules, SEEDS, np.zeros(3, np.int32), action)[0]
    step_rows(rules, SEEDS, at, action)
    with pytest.raises(RunError, match="have made 2 steps, but the loop counts 1"):
        step_rows(rules, SEEDS, at, action)
    again = step_rows(rules, SEEDS, np.zeros(3, np.int32), action)
    np.testing.assert_array_equal(again[0], 1)


def test_a_simulator_is_data():
    env = make("gymnasium:CartPole-v1", max_episode_steps=7)
    assert env == make("gymnasium:CartPole-v1", max_episode_steps=7)
    assert hash(env) == hash(pickle.loads(pickle.dumps(env)))
    assert env != make("gymnasium:CartPole-v1")
    with pytest.raises(SettingError, match="plain data"):
        make("gymnasium:CartPole-v1", what={"is": "this"})


def test_unknown_names_and_settings_are_rejected():
    with pytest.raises(UnknownNameError, match="Did you mean `CartPole-v1`"):
        make("gymnasium:CartPol-v1")
    with pytest.raises(UnknownNameError, match="Did you mean `gymnasium:Blackjack-v1`"):
        make("Blackjack-v1")
    with pytest.raises(SettingError, match="can't be made with speed"):
        make("gymnasium:CartPole-v1", speed=3).action_space  # noqa: B018


@needs("ale_py")
def test_atari_is_preprocessed_and_returns_are_unclipped():
    rules = simulator("ALE/Pong-v5")
    assert rules.observation_space == Box(0.0, 255.0, (4, 84, 84), "uint8")
    seen = play(rules, np.zeros((70, 1), np.int32), SEEDS[:1])
    assert seen["obs"].dtype == np.uint8
    # A frame is the newest of a stack, then the one before it.
    np.testing.assert_array_equal(seen["obs"][1, 0, :3], seen["obs"][0, 0, 1:])
    assert set(np.unique(seen["reward"])) <= {-1.0, 0.0}
    assert seen["reward"].sum() == seen["episode_return"][-1, 0] <= -1


STEP_WITHOUT_JAX = """
import sys
import shoal, numpy as np
from shoal.envs.host import step_rows
assert not [m for m in sys.modules if m.startswith(("jax", "optax", "gymnasium", "rich"))]
from shoal.envs.gymnasium import GymnasiumSimulator
rows = GymnasiumSimulator("CartPole-v1"), np.arange(2, dtype=np.uint32)
steps = np.zeros(2, np.int32)
for _ in range(3):
    steps, *_ = step_rows(*rows, steps, np.zeros(2, np.int32))
assert not [m for m in sys.modules if m.startswith("jax")], "JAX was imported"
"""


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_a_process_that_only_steps_environments_does_not_import_jax():
    done = run(STEP_WITHOUT_JAX)
    assert done.returncode == 0, done.stderr


MISSING = """
import sys
sys.modules["{package}"] = None
import shoal
try:
    shoal.envs.make("{name}").action_space
except shoal.ShoalError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("package", "name", "extra"),
    [
        ("gymnasium", "gymnasium:CartPole-v1", "gymnasium"),
        ("Box2D", "gymnasium:LunarLander-v3", "box2d"),
        ("mujoco", "gymnasium:HalfCheetah-v5", "mujoco"),
        ("cv2", "gymnasium:ALE/Pong-v5", "atari"),
        ("envpool", "envpool:CartPole-v1", "envpool"),
        ("pettingzoo", "pettingzoo:mpe/simple_spread_v3", "pettingzoo"),
        ("mpe2", "pettingzoo:mpe/simple_spread_v3", "pettingzoo"),
    ],
)
def test_a_missing_package_is_reported_with_its_extra(package, name, extra):
    done = run(MISSING.format(package=package, name=name))
    assert f'pip install "shoal[{extra}]"' in done.stdout, done.stdout + done.stderr
