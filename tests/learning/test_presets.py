"""Every preset reaches its target; those of hours on a CPU are left to machines with a GPU."""

import jax
import numpy as np
import pytest

import shoal
from shoal.algorithms import PRESETS
from shoal.envs import make
from shoal.runs.inputs.making import with_total_ticks

CASES = [
    (kind, name)
    for kind, presets in PRESETS.items()
    for name, preset in presets.items()
    if preset.family in ("gymnax", "jaxmarl")
]
# Of images, and of a million steps with a memory; docs/results.md has five seeds of each.
LONG = [case for case in CASES if "MinAtar" in case[1] or case[0] in ("qmix", "vdn")]
# Of the others, those that learn in minutes.
HOSTED = [("ppo", "LunarLander-v3"), ("ppo", "HalfCheetah-v5")]


@pytest.mark.learning
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_preset_reaches_its_target(kind, name):
    preset = PRESETS[kind][name]
    if (kind, name) in LONG and jax.default_backend() == "cpu":
        pytest.skip("takes hours on a CPU")
    pytest.importorskip(preset.family)
    env = make(f"{preset.family}:{name}")
    algorithm = with_total_ticks(preset.algorithm, preset.ticks)
    state = algorithm.init(jax.random.PRNGKey(0), env, preset.envs)

    def tick(state, _):
        return algorithm.tick(env, state)

    _, metrics = jax.jit(lambda state: jax.lax.scan(tick, state, length=preset.ticks))(state)
    episodes, returns = (np.sum(metrics[m], 1) for m in ("episodes", "episode_return"))
    last = np.flatnonzero(np.cumsum(episodes[::-1]) >= 100)[0] + 1
    assert np.sum(returns[-last:]) / np.sum(episodes[-last:]) >= preset.target


@pytest.mark.learning
@pytest.mark.parametrize(("kind", "name"), HOSTED)
def test_a_preset_reaches_its_target_where_python_steps(kind, name, tmp_path):
    preset = PRESETS[kind][name]
    env = f"{preset.family}:{name}"
    trained = shoal.train(kind, env, shoal.single_learner_coarse(1), folder=tmp_path)
    assert trained.summary["return_mean"] >= preset.target
