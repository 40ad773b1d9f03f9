"""A minimal learning loop, quick to trace and compile, for tests of other parts."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import shoal
from shoal.envs import key_rows


class State(NamedTuple):
    weights: jax.Array
    keys: jax.Array
    env_states: Any
    obs: jax.Array


@shoal.stage(per="env")
def act(key, obs, *, weights):
    key, now = jax.random.split(key)
    return key, jax.random.categorical(now, obs @ weights).astype(jnp.int32)


@shoal.stage
def learn(weights, seen):
    def loss(weights):
        obs, action, reward = seen
        chances = jax.nn.log_softmax(obs @ weights)
        taken = jnp.take_along_axis(chances, action[..., None], axis=-1)[..., 0]
        return -jnp.mean(taken * reward)

    value, slope = jax.value_and_grad(loss)(weights)
    value, slope = shoal.mean((value, slope))
    return weights - 0.1 * slope, value


@dataclass(frozen=True)
class Plain:
    """A linear policy that takes one gradient step a tick."""

    steps: int = 8

    def init(self, key, env, envs):
        act_key, env_key = jax.random.split(key)
        env_states, obs = env.reset(key_rows(env_key, envs))
        weights = jnp.zeros((obs.shape[1], env.action_space.n))
        return State(weights, key_rows(act_key, envs), env_states, obs)

    def tick(self, env, state):
        def once(carry, _):
            keys, env_states, obs = carry
            keys, action = act(keys, obs, weights=state.weights)
            env_states, step = env.step(env_states, action)
            return (keys, env_states, step.obs), (obs, action, step.reward)

        carry, seen = lax.scan(once, tuple(state[1:]), length=self.steps)
        weights, loss = learn(state.weights, seen)
        return State(weights, *carry), {"loss": loss}
