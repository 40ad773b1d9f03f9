"""Every preset reaches its target."""

import jax
import numpy as np
import pytest

from shoal.algorithms import PRESETS
from shoal.envs import make

CASES = [(kind, name) for kind, presets in PRESETS.items() for name in presets]


@pytest.mark.learning
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_preset_reaches_its_target(kind, name):
    preset = PRESETS[kind][name]
    env = make(name)
    state = preset.algorithm.init(jax.random.PRNGKey(0), env, preset.envs)

    def tick(state, _):
        return preset.algorithm.tick(env, state)

    _, metrics = jax.jit(lambda state: jax.lax.scan(tick, state, length=preset.ticks))(state)
    episodes, returns = (np.sum(metrics[m], 1) for m in ("episodes", "episode_return"))
    last = np.flatnonzero(np.cumsum(episodes[::-1]) >= 100)[0] + 1
    assert np.sum(returns[-last:]) / np.sum(episodes[-last:]) >= preset.target
