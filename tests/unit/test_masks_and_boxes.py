"""No algorithm takes a masked action, observes the world state or leaves its action box."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shoal.algorithms import A2C, DQN, IMPALA, MAPPO, PPO, SAC
from shoal.envs import Box, Discrete, Environment, Transition
from shoal.envs.spaces import Dict
from shoal.errors import SettingError
from shoal.rl.torso import check_flat, choose_torso
from shoal.runs.results.agent import Agent

KEY = jax.random.key(0)


@dataclass(frozen=True)
class Masked:
    """One agent that may take two of four actions, and a world state it doesn't observe."""

    observation_space = Dict(
        (
            ("mask", Box(0.0, 1.0, (4,), "bool")),
            ("seen", Box(-1.0, 1.0, (3,))),
            ("world", Box(-1.0, 1.0, (5,))),
        )
    )
    action_space = Discrete(4)

    def show(self, state):
        mask = (jnp.arange(4) + state) % 2 == 0
        return {"mask": mask, "seen": jnp.full(3, state / 9), "world": jnp.ones(5)}

    def reset(self, key):
        state = jax.random.randint(key, (), 0, 2)
        return state, self.show(state)

    def step(self, key, state, action):
        was_allowed = self.show(state)["mask"][action]
        state = state + 1
        over = state > 8
        return Transition(state, self.show(state), 1.0 * was_allowed, over, jnp.bool(0))


SMALL = {"num_steps": 8, "hidden": (8,)}
MASKED = [PPO(**SMALL, update_epochs=1, num_minibatches=2), A2C(**SMALL), IMPALA(**SMALL)]
MASKED += [PPO(**SMALL, update_epochs=1, num_minibatches=2, norm_obs=True, memory="gru")]


@pytest.mark.parametrize("algorithm", MASKED)
def test_masked_actions_are_never_taken_and_the_world_is_never_seen(algorithm):
    env = Environment("masked", Masked())
    state = algorithm.init(KEY, env, 8)
    params = state.learner.params
    seen = [x.shape[0] for x in jax.tree.leaves(params.actor) if x.ndim == 2]
    assert 3 in seen or algorithm.memory != "none"
    agent = Agent(algorithm, env, state, 0)
    other = state.obs | {"world": -7 * state.obs["world"]}
    for key in range(20):
        action = agent.act(state.obs, key)
        assert np.take_along_axis(np.asarray(state.obs["mask"]), action[:, None], 1).all()
        np.testing.assert_array_equal(action, agent.act(other, key))
    _, metrics = jax.jit(lambda state: algorithm.tick(env, state))(state)
    # Each step of each episode is rewarded if its action was allowed.
    np.testing.assert_array_equal(metrics["episode_return"], metrics["episode_length"])
    assert all(np.isfinite(x).all() for x in metrics.values())


def test_action_values_refuse_a_mask():
    with pytest.raises(SettingError, match="mask"):
        DQN().init(KEY, Environment("masked", Masked()), 2)


@pytest.mark.parametrize("kind", [PPO, A2C, IMPALA])
def test_actions_of_a_trained_agent_stay_in_the_box(kind):
    env = _pendulum()
    algorithm = kind(hidden=(8,))
    state = algorithm.init(KEY, env, 2)
    agent = Agent(algorithm, env, state, 0)
    obs = np.random.default_rng(0).normal(size=(200, 3)).astype(np.float32)
    drawn = np.concatenate([agent.act(obs, key) for key in range(10)])
    assert np.abs(drawn).max() == 2  # of over a thousand draws some would be outside


IMAGE, GRID = Box(0.0, 255.0, (84, 84, 4), "uint8"), Box(0.0, 1.0, (10, 10, 4))


@pytest.mark.parametrize("image", [IMAGE, GRID])
def test_images_are_flattened_only_on_request(image):
    both = Dict((("image", image), ("speed", Box(-1.0, 1.0, (2,)))))
    for space in (image, both):
        with pytest.raises(SettingError, match="image"):
            check_flat("SAC", space, SAC().torso)
        assert check_flat("MAPPO", space, "mlp") is space
        assert choose_torso(space, "mlp") == "mlp"
    with pytest.raises(SettingError, match="image"):
        choose_torso(both, "auto")
    assert MAPPO().torso == "auto"


def _pendulum():
    pytest.importorskip("gymnax")
    from shoal.envs import make

    return make("Pendulum-v1")
