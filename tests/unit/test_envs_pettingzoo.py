"""PettingZoo's agents have an axis; one that ends early observes zeros until the others end."""

import numpy as np
import pytest

pytest.importorskip("pettingzoo")
pytest.importorskip("mpe2")
from gymnasium.spaces import Box, Discrete
from mpe2 import simple_spread_v3
from pettingzoo import ParallelEnv

from shoal.envs import make
from shoal.envs.host import close_all, first_rows
from shoal.envs.pettingzoo import PettingZooSimulator
from shoal.errors import SettingError, UnknownNameError
from unit.host_envs import SEEDS, play, random_actions

SPREAD = PettingZooSimulator("mpe/simple_spread_v3", (("max_cycles", 7),))


@pytest.fixture(autouse=True)
def closed():
    yield
    close_all()


def test_rows_are_those_of_a_plain_loop():
    actions = random_actions(SPREAD, 20)
    seen, first = play(SPREAD, actions), first_rows(SPREAD, SEEDS)[0]
    agents = SPREAD.agents
    assert agents == ("agent_0", "agent_1", "agent_2")
    for row, seed in enumerate(SEEDS.tolist()):
        env = simple_spread_v3.parallel_env(max_cycles=7)
        obs, _ = env.reset(seed=seed)
        np.testing.assert_array_equal(first[row], [obs[agent] for agent in agents])
        total = 0.0
        for t in range(20):
            action = dict(zip(agents, actions[t, row].tolist(), strict=True))
            obs, reward, terminated, truncated, _ = env.step(action)
            np.testing.assert_array_equal(seen["last_obs"][t, row], [obs[a] for a in agents])
            np.testing.assert_allclose(seen["reward"][t, row], [reward[a] for a in agents], 1e-6)
            assert seen["terminated"][t, row].tolist() == [terminated[a] for a in agents]
            assert seen["truncated"][t, row].tolist() == [truncated[a] for a in agents]
            total += sum(reward.values()) / len(agents)
            np.testing.assert_allclose(seen["episode_return"][t, row], total, rtol=1e-4)
            assert seen["episode_length"][t, row] == t % 7 + 1
            if not env.agents:
                obs, total = env.reset()[0], 0.0
            np.testing.assert_array_equal(seen["obs"][t, row], [obs[a] for a in agents])


class Relay(ParallelEnv):
    """The first agent ends after two steps, the second after four; both see the time."""

    metadata = {}  # noqa: RUF012
    possible_agents = ["short", "long"]  # noqa: RUF012

    def __init__(self, differ=False):
        self.differ = differ

    def observation_space(self, agent):
        return Box(0, 9, (1 + (self.differ and agent == "long"),))

    def action_space(self, agent):
        return Discrete(2)

    def reset(self, seed=None, options=None):
        self.agents, self.time = [*self.possible_agents], 0
        return self.show(), {}

    def show(self):
        return {agent: np.full(1, self.time + 1, np.float32) for agent in self.agents}

    def step(self, actions):
        assert list(actions) == self.agents
        self.time += 1
        obs, ones = self.show(), dict.fromkeys(self.agents, 1.0)
        over = {agent: self.time == 2 and agent == "short" for agent in self.agents}
        late = dict.fromkeys(self.agents, self.time == 4)
        self.agents = [a for a in self.agents if not over[a] and not late[a]]
        return obs, ones, over, late, {}


def test_an_agent_that_ends_early_waits_for_the_others():
    rules = PettingZooSimulator("unit.test_envs_pettingzoo:Relay")
    seen = play(rules, np.zeros((5, 1, 2), np.int32), SEEDS[:1])
    assert seen["last_obs"][:, 0, :, 0].tolist() == [[2, 2], [3, 3], [0, 4], [0, 5], [2, 2]]
    assert seen["obs"][:, 0, :, 0].tolist() == [[2, 2], [0, 3], [0, 4], [1, 1], [2, 2]]
    assert seen["reward"][:, 0].tolist() == [[1, 1], [1, 1], [0, 1], [0, 1], [1, 1]]
    assert seen["terminated"][:, 0, 0].tolist() == [False, True, True, True, False]
    assert seen["truncated"][:, 0, 1].tolist() == [False, False, False, True, False]
    assert seen["episode_return"][:, 0].tolist() == [1, 2, 2.5, 3, 1]
    assert seen["episode_length"][:, 0].tolist() == [1, 2, 3, 4, 1]


def test_agents_of_different_kinds_are_rejected():
    rules = PettingZooSimulator("unit.test_envs_pettingzoo:Relay", (("differ", True),))
    with pytest.raises(SettingError, match="see different things"):
        rules.agents  # noqa: B018


def test_unknown_names_and_settings_are_rejected():
    with pytest.raises(UnknownNameError, match="Did you mean `mpe/simple_spread_v3`"):
        make("pettingzoo:mpe/simple_spred_v3")
    with pytest.raises(SettingError, match="act in turns"):
        make("pettingzoo:classic/tictactoe_v3").agents  # noqa: B018
    with pytest.raises(SettingError, match="can't be made with speed"):
        make("pettingzoo:mpe/simple_spread_v3", speed=3).agents  # noqa: B018
