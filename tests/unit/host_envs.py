"""Host environments for tests: a rollout of rows, and environments that fail."""

from dataclasses import dataclass

import gymnasium
import numpy as np

from shoal.envs.host import Moves, close_all, step_rows
from shoal.envs.spaces import Box, Discrete, MultiDiscrete, leaves, unflatten

SEEDS = np.array([7, 2**32 - 5, 123456], np.uint32)


def random_actions(simulator, steps, rows=3, seed=0):
    rng = np.random.default_rng(seed)
    axes = (steps, rows, len(simulator.agents)) if simulator.agents else (steps, rows)
    match simulator.action_space:
        case Discrete(n):
            return rng.integers(n, size=axes, dtype=np.int32)
        case MultiDiscrete(sizes):
            return rng.integers(sizes, size=(*axes, len(sizes)), dtype=np.int32)
        case Box(_, _, shape):
            return rng.uniform(-1, 1, (*axes, *shape)).astype(np.float32)


def play(simulator, actions, seeds=SEEDS):
    """The results of `step_rows` for each of `actions`, by name and stacked: [steps, rows, ...]."""
    close_all()
    at, seen = np.zeros(len(seeds), np.int32), []
    for action in actions:
        at, *rest = step_rows(simulator, seeds, at, action)
        seen.append(named(simulator, rest))
    assert (at == len(actions)).all()
    first = seen[0]
    return {name: stack([step[name] for step in seen]) for name in first}


def named(simulator, flat):
    space = simulator.observation_space
    count = len(leaves(space))
    obs, flat = tuple(flat[:count]), flat[count:]
    reward, terminated, truncated, *flat = flat
    last_obs, (episode_return, episode_length, *_) = tuple(flat[:count]), flat[count:]
    return {
        "obs": unflatten(space, obs),
        "reward": reward,
        "terminated": terminated,
        "truncated": truncated,
        "last_obs": unflatten(space, last_obs),
        "episode_return": episode_return,
        "episode_length": episode_length,
    }


def stack(trees):
    if isinstance(trees[0], dict):
        return {name: stack([tree[name] for tree in trees]) for name in trees[0]}
    return np.stack(trees)


class Broken(gymnasium.Env):
    """Counts its steps, and fails by `fault` after the third."""

    observation_space = gymnasium.spaces.Box(-9, 9, (2,))
    action_space = gymnasium.spaces.Discrete(3, start=5)

    def __init__(self, fault="none", row=1):
        self.fault, self.row, self.time, self.mine = fault, row, 0, False

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.mine = seed == int(SEEDS[self.row])
        if self.fault == "reset" and self.mine and self.time:
            raise OSError("out of levels")
        self.time = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.time += 1
        obs, reward = np.full(2, self.time, np.float32), 1.0
        match self.fault if self.fault == "always" or (self.mine and self.time == 3) else "none":
            case "step" | "always":
                raise OSError("the cable came off")
            case "shape":
                obs = np.zeros(1, np.float32)
            case "dtype":
                obs = np.zeros(2, complex)
            case "nan":
                obs[1] = np.nan
            case "reward":
                reward = float("inf")
        return obs, reward, self.time == 4, False, {}


class Many(gymnasium.Env):
    """Dict observations and multi-discrete actions; the observation contains the action."""

    observation_space = gymnasium.spaces.Dict(
        {
            "b": gymnasium.spaces.Box(0, 255, (2, 2), np.uint8),
            "a": gymnasium.spaces.Dict({"z": gymnasium.spaces.MultiDiscrete([3, 4])}),
        }
    )
    action_space = gymnasium.spaces.MultiDiscrete([3, 4], start=[1, 0])

    def reset(self, *, seed=None, options=None):
        return self.show(np.array([1, 0])), {}

    def step(self, action):
        assert self.action_space.contains(action)
        return self.show(action), float(action.sum()), False, False, {}

    def show(self, action):
        return {"b": np.full((2, 2), 9, np.uint8), "a": {"z": action - [1, 0]}}


class Picture(gymnasium.Env):
    """Observations are images of random bytes; an episode has six steps."""

    observation_space = gymnasium.spaces.Box(0, 255, (36, 36, 1), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.show(), {}

    def step(self, action):
        self.time += 1
        return self.show(), float(action), self.time == 6, False, {}

    def show(self):
        return self.np_random.integers(0, 256, (36, 36, 1), np.uint8)


for kind in (Broken, Many, Picture):
    gymnasium.register(f"{kind.__name__}-v0", kind)


@dataclass(frozen=True)
class Several:
    """Two agents that drift by their actions; an episode has five steps."""

    observation_space = Box(-9.0, 9.0, (2,))
    action_space = Box(-1.0, 1.0, (1,))
    agents = ("left", "right")

    def open(self, seeds):
        return SeveralVector(seeds)


class SeveralVector:
    def __init__(self, seeds):
        self.rngs = [np.random.default_rng(int(seed)) for seed in seeds]

    def reset(self):
        self.time = 0
        self.place = np.stack([rng.normal(size=(2, 1)) for rng in self.rngs]).astype(np.float32)
        return self.show()

    def show(self):
        return (np.concatenate([self.place, np.full_like(self.place, self.time)], -1),)

    def step(self, action):
        assert action.shape == self.place.shape
        self.time += 1
        self.place = self.place + action
        last_obs, reward = self.show(), self.place[..., 0]
        late = np.full(reward.shape, self.time == 5)
        obs = self.reset() if self.time == 5 else last_obs
        return Moves(obs, reward, np.zeros_like(late), late, last_obs, reward.mean(1))

    def close(self):
        pass


def doubled(env):
    return gymnasium.wrappers.TransformReward(env, lambda reward: 2 * reward)
