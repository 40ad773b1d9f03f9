"""`shoal train <any> <env>` with its defaults trains wherever the algorithm can act."""

import json
from importlib.util import find_spec

import numpy as np
import pytest

import shoal
from shoal.algorithms import ALGORITHMS
from shoal.errors import SettingError

CHOICE = {"a2c", "dqn", "impala", "ppo", "r2d2"}
BOUNDED = {"a2c", "ddpg", "impala", "ppo", "sac", "td3"}
TEAM = {"a2c", "impala", "ippo", "mappo", "ppo", "qmix", "vdn"}
FITS = {
    "gymnax:CartPole-v1": CHOICE,
    "gymnax:Pendulum-v1": BOUNDED,
    "gymnax:Breakout-MinAtar": CHOICE,
    "gymnax:MemoryChain-bsuite": CHOICE,
    "brax:ant": BOUNDED,
    "brax:halfcheetah": BOUNDED,
    "brax:humanoid": BOUNDED,
    "jaxmarl:MPE_simple_spread_v3": TEAM,
    "jaxmarl:MPE_simple_tag_v3": TEAM - {"a2c", "impala", "ppo"},  # whose agents differ
    "jaxmarl:SMAX": TEAM,
    "gymnasium:CartPole-v1": CHOICE,
    "gymnasium:Pendulum-v1": BOUNDED,
    "pettingzoo:mpe/simple_spread_v3": TEAM,
    "envpool:CartPole-v1": CHOICE,
}
TICKS = 2


@pytest.mark.slow
@pytest.mark.parametrize("env", FITS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_algorithm_trains_with_its_defaults_wherever_it_can_act(algorithm, env, tmp_path):
    family = env.partition(":")[0]
    if find_spec({"pettingzoo": "mpe2"}.get(family, family)) is None:
        pytest.skip(f"{family} isn't installed")
    if algorithm not in FITS[env]:
        with pytest.raises(
            SettingError, match=f"{ALGORITHMS[algorithm].__name__} can't act in {env}"
        ):
            shoal.train(algorithm, env, ticks=TICKS, folder=tmp_path)
        assert not list(tmp_path.iterdir())  # it was refused before anything started
        return
    summary = shoal.train(algorithm, env, ticks=TICKS, folder=tmp_path).summary
    assert (summary["status"], summary["ticks"]) == ("done", TICKS)
    (rows,) = tmp_path.glob("*/metrics.jsonl")
    for row in map(json.loads, rows.read_text(encoding="utf-8").splitlines()):
        numbers = [x for x in row.values() if isinstance(x, float)]
        assert numbers
        assert np.all(np.isfinite(numbers)), row
