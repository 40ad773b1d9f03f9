"""PPO learns from what an image shows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shoal.algorithms import PPO
from shoal.envs import Box, Discrete, Environment, Transition

SIDE = 36


class Lamp:
    """A lamp shines left or right in a noisy picture; to say on which side is worth 1."""

    observation_space = Box(0.0, 255.0, (SIDE, SIDE, 1), "uint8")
    action_space = Discrete(2)

    def reset(self, key):
        return self.show(key)

    def step(self, key, state, action):
        after, obs = self.show(key)
        reward = (action == state["right"]).astype(jnp.float32)
        return Transition(after, obs, reward, jnp.array(True), jnp.array(False))

    def show(self, key):
        side_key, noise_key, place_key = jax.random.split(key, 3)
        right = jax.random.bernoulli(side_key)
        row, column = jax.random.randint(place_key, (2,), 4, SIDE // 2 - 4)
        rows, columns = jnp.mgrid[:SIDE, :SIDE]
        column += right * SIDE // 2
        lamp = 150 * ((abs(rows - row) < 4) & (abs(columns - column) < 4))
        picture = jax.random.randint(noise_key, (SIDE, SIDE), 0, 100) + lamp
        return {"right": right}, picture.astype(jnp.uint8)[..., None]


@pytest.mark.learning
def test_ppo_sees_on_which_side_the_lamp_shines():
    env = Environment("lamp", Lamp())
    algorithm = PPO(num_steps=32, update_epochs=2, num_minibatches=4, learning_rate=5e-4)
    state = algorithm.init(jax.random.PRNGKey(0), env, envs=16)
    run = jax.jit(lambda s: jax.lax.scan(lambda s, _: algorithm.tick(env, s), s, length=20))
    _, metrics = run(state)
    right = np.sum(metrics["episode_return"], 1) / np.sum(metrics["episodes"], 1)
    assert right[0] < 0.7
    assert right[-1] > 0.95, right
