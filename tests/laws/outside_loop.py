"""A loop as a user writes it outside Shoal: own world, own stages, own arithmetic.

Creatures chase a goal on a line. Between two looks at the world a creature thinks and moves
several times (a loop in a loop); what it learns with is policy gradient with momentum, against a
baseline of a tick ago.
"""

from collections import namedtuple
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

import shoal

SEEN, MIND, NOISE = 3, 4, 0.3


Params = namedtuple("Params", ["see", "recall", "move", "judge"])
World = namedtuple("World", ["place", "speed", "age"])
# `before` holds the parameters of a tick ago, and nothing changes `goals`.
State = namedtuple("State", ["params", "before", "momentum", "keys", "minds", "worlds", "goals"])


@shoal.stage(per="env")
def look(world, goal):
    return jnp.stack([world.place - goal, world.speed, jnp.cos(goal)])


@shoal.stage(per="env")
def think(key, mind, seen, *, params):
    key, now = jax.random.split(key)
    mind = jnp.tanh(params.see @ seen + params.recall @ mind)
    push = params.move @ mind + NOISE * jax.random.normal(now)
    return key, mind, push


@shoal.stage(per="env", name="env")
def move(world, push, goal):
    speed = 0.9 * world.speed + 0.2 * jnp.clip(push, -1.0, 1.0)
    place, age = world.place + 0.3 * speed, world.age + 1
    home = (age % 7 == 0) | (jnp.abs(place) > 3)
    after = World(jnp.where(home, 0.0, place), jnp.where(home, 0.0, speed), age)
    return after, -jnp.square(place - goal)


@shoal.stage
def grad(params, before, rollout):
    return jax.grad(loss)(params, before, rollout)


@shoal.stage
def apply(params, momentum, slope):
    momentum = jax.tree.map(lambda m, g: 0.8 * m + jnp.clip(g, -1.0, 1.0), momentum, slope)
    return jax.tree.map(lambda p, m: p - 0.03 * m, params, momentum), momentum


@shoal.stage
def improve(params, before, momentum, rollout):
    def again(learner, weight):
        slope = shoal.mean(jax.tree.map(lambda g: weight * g, grad(learner[0], before, rollout)))
        return apply(*learner, slope), sum(jnp.sum(jnp.square(g)) for g in slope)

    return lax.scan(again, (params, momentum), jnp.array([1.0, 0.5]))


def loss(params, before, rollout):
    mind, push, worth = rollout
    surprise = worth - shoal.mean(jnp.mean(worth)) - mind @ before.judge
    chance = -jnp.square((push - mind @ params.move) / NOISE)
    return jnp.mean(jnp.square(worth - mind @ params.judge) - chance * surprise)


@dataclass(frozen=True)
class Chase:
    looks: int = 3
    moves: int = 2

    def init(self, key, env, envs):
        shapes = Params((MIND, SEEN), (MIND, MIND), (MIND,), (MIND,))
        drawn = jax.random.split(key, 5)
        params = Params(
            *(0.3 * jax.random.normal(k, s) for k, s in zip(drawn, shapes, strict=False))
        )
        nothing = jax.tree.map(jnp.zeros_like, params)
        rows = jnp.arange(envs)
        keys = jax.vmap(lambda row: jax.random.fold_in(drawn[4], row))(rows)
        worlds = World(jnp.zeros(envs), jnp.zeros(envs), rows % 5)
        goals = jnp.sin(1.0 * rows)
        return State(params, nothing, nothing, keys, jnp.zeros((envs, MIND)), worlds, goals)

    def tick(self, env, state):
        return self.learn(state, *self.live(state, state.params))

    def live(self, state, params):
        def once(creature, seen):
            (keys, minds), worlds = creature
            keys, minds, push = think(keys, minds, seen, params=params)
            worlds, reward = move(worlds, push, state.goals)
            return ((keys, minds), worlds), (minds, push, reward)

        def between_looks(creature, _):
            seen = look(creature[1], state.goals)
            return lax.scan(lambda c, _: once(c, seen), creature, length=self.moves)

        start = (state.keys, state.minds), state.worlds
        (creature, worlds), rollout = lax.scan(between_looks, start, length=self.looks)
        mind, push, reward = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rollout)
        return (mind, push, jnp.cumsum(reward[::-1], axis=0)[::-1]), worlds, creature

    def learn(self, state, rollout, worlds, creature):
        (params, momentum), slopes = improve(state.params, state.before, state.momentum, rollout)
        after = State(params, state.params, momentum, *creature, worlds, state.goals)
        return after, {"slopes": slopes, "worth": jnp.mean(rollout[2], axis=0)}
