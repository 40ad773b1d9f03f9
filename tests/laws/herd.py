"""A small environment with agents that differ, action masks, and a partially observed state.

Dogs observe more than sheep and have more actions. A tired agent may only rest.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from shoal.envs import Box, Discrete, Environment, Groups, Transition
from shoal.envs.spaces import Dict

MOVES = jnp.array([0.0, 1.0, -1.0, 2.0])


def shown(seen, actions):
    """A space with all parts."""
    boxes = (("mask", Box(0.0, 1.0, (actions,), "bool")), ("seen", Box(-9.0, 9.0, (seen,))))
    return Dict((*boxes, ("world", Box(-9.0, 9.0, (6,)))))


@dataclass(frozen=True)
class Herd:
    """Two dogs and a sheep on a line; dogs want to be near the sheep, the sheep far from dogs."""

    limit: int = 5
    agents = ("dog_0", "dog_1", "sheep_0")
    groups = (("dog", ("dog_0", "dog_1")), ("sheep", ("sheep_0",)))
    observation_space = Groups((("dog", shown(3, 4)), ("sheep", shown(2, 3))))
    action_space = Groups((("dog", Discrete(4)), ("sheep", Discrete(3))))

    def reset(self, key):
        place = jax.random.uniform(key, (3,), minval=-2, maxval=2)
        state = (place, jnp.zeros(3), jnp.int32(0))
        return state, self.show(state)

    def step(self, key, state, action):
        place, tired, time = state
        chosen = jnp.concatenate([action["dog"], action["sheep"]])
        place = jnp.clip(place + 0.3 * MOVES[chosen] + 0.1 * jax.random.normal(key, (3,)), -3, 3)
        tired = jnp.where(chosen == 3, 2.0, jnp.maximum(tired - 1, 0))
        state = (place, tired, time + 1)
        far = jnp.abs(place[:2] - place[2])
        caught = jnp.min(far) < 0.1
        late = time + 1 >= self.limit
        over, out = ({"dog": jnp.full(2, x), "sheep": jnp.full(1, x)} for x in (caught, late))
        reward = {"dog": -far, "sheep": jnp.min(far)[None]}
        return Transition(state, self.show(state), reward, over, out)

    def show(self, state):
        place, tired, _ = state
        world = jnp.concatenate([place, tired])

        def part(seen, mask):
            return {"mask": mask, "seen": seen, "world": jnp.tile(world, (len(seen), 1))}

        dogs = jnp.stack([place[:2], place[:2] - place[2], tired[:2]], axis=1)
        rested = tired[:2, None] <= 0
        may = jnp.concatenate([jnp.ones((2, 1), bool), jnp.repeat(rested, 3, axis=1)], axis=1)
        sheep = jnp.stack([place[2], jnp.mean(place[:2])])[None]
        return {"dog": part(dogs, may), "sheep": part(sheep, jnp.ones((1, 3), bool))}


def herd(limit=5):
    return Environment("herd", Herd(limit))
