"""A small environment for tests of algorithms; its episodes terminate or are truncated."""

import jax
import jax.numpy as jnp

from shoal.envs import Box, Environment, Transition


class Drift:
    """Drifts by the action; terminates beyond 2, is truncated after 3 steps."""

    observation_space = Box(-9.0, 9.0, (2,))

    def __init__(self, action_space):
        self.action_space = action_space

    def reset(self, key):
        place = jax.random.normal(key)
        return {"place": place, "time": 0}, jnp.array([place, 0.0])

    def step(self, key, state, action):
        time = state["time"] + 1
        place = state["place"] + 0.1 * jax.random.normal(key) + 0.3 * jnp.sum(action)
        obs = jnp.array([place, 1.0 * time])
        return Transition({"place": place, "time": time}, obs, place, place > 2, time >= 3)


def drift(action_space):
    return Environment("drift", Drift(action_space))
