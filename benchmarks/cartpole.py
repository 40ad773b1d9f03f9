"""CartPole in plain JAX, for benchmarks on machines that have no library of environments."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from shoal.envs.environment import Environment, Transition
from shoal.envs.spaces import Box, Discrete

GRAVITY, LENGTH, POLE, TOTAL, FORCE, TAU = 9.8, 0.5, 0.05, 1.1, 10.0, 0.02
ANGLE, PLACE, LIMIT = 0.2095, 2.4, 500


@dataclass(frozen=True)
class CartPole:
    """A pole on a cart, as in Barto, Sutton and Anderson (1983)."""

    @property
    def observation_space(self) -> Box:
        """Place and speed of the cart, angle and speed of the pole."""
        return Box(-10.0, 10.0, (4,))

    @property
    def action_space(self) -> Discrete:
        """Left or right."""
        return Discrete(2)

    def reset(self, key: jax.Array) -> tuple[Any, jax.Array]:
        """A first state."""
        obs = jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05)
        return (obs, jnp.int32(0)), obs

    def step(self, key: jax.Array, state: Any, action: jax.Array) -> Transition:
        """One step of Euler's method."""
        (x, speed, angle, turn), steps = state
        force = jnp.where(action == 1, FORCE, -FORCE)
        sin, cos = jnp.sin(angle), jnp.cos(angle)
        pull = (force + POLE * turn**2 * sin) / TOTAL
        down = LENGTH * (4 / 3 - 0.1 * cos**2 / TOTAL)
        spin = (GRAVITY * sin - cos * pull) / down
        push = pull - POLE * spin * cos / TOTAL
        moved = (x + TAU * speed, speed + TAU * push, angle + TAU * turn, turn + TAU * spin)
        obs, steps = jnp.stack(moved), steps + 1
        fell = (jnp.abs(obs[0]) > PLACE) | (jnp.abs(obs[2]) > ANGLE)
        return Transition((obs, steps), obs, jnp.float32(1), fell, steps >= LIMIT)


CARTPOLE = Environment("cartpole", CartPole())
