"""How noisy the gradients of PPO's minibatches are, by how its samples are dealt out to them.

The critic's gradient of each minibatch of one rollout is compared with that of the whole rollout:
noise over signal, E|g - G|² / |G|², of a network that has learnt for some ticks.
"""

import argparse
from functools import partial

import jax
import jax.numpy as jnp
from rich.console import Console

from shoal.algorithms import PPO
from shoal.algorithms.ppo import Learner
from shoal.envs import key_rows, make
from shoal.rl import actor_critic, rollouts
from shoal.rl.rollouts import Batch, deal

CASES = (("Pendulum-v1", 20, 256, 10), ("CartPole-v1", 20, 256, 10), ("CartPole-v1", 128, 16, 4))
EPOCHS = 20


def whole_steps(key: jax.Array, steps: int, envs: int, parts: int) -> jax.Array:
    """Every minibatch has some time steps of all environments."""
    order = jax.random.permutation(key, steps).reshape(parts, -1, 1)
    return (order * envs + jnp.arange(envs)).reshape(parts, -1)


def shuffled(key: jax.Array, steps: int, envs: int, parts: int) -> jax.Array:
    """Every minibatch has some of all samples."""
    return jax.random.permutation(key, steps * envs).reshape(parts, -1)


def own_steps(key: jax.Array, steps: int, envs: int, parts: int) -> jax.Array:
    """Every minibatch has as many samples of each environment, as PPO has it."""
    order = deal(key_rows(key, envs), steps).reshape(parts, -1, envs)
    return (order * envs + jnp.arange(envs)).reshape(parts, -1)


WAYS = (whole_steps, shuffled, own_steps)


def batch_of(algorithm: PPO, env: str, envs: int, ticks: int) -> tuple[Learner, Batch]:
    """A learner that has learnt for some ticks, and the samples of its next rollout, in a row."""
    made = make(env)
    state = algorithm.init(jax.random.key(0), made, envs)
    state, _ = jax.jit(
        lambda s: jax.lax.scan(lambda s, _: algorithm.tick(made, s), s, length=ticks)
    )(state)
    learner = state.learner

    def act(keys: jax.Array, obs: jax.Array, memory: tuple) -> tuple:
        shared = {"params": learner.params.acting, "obs_moments": learner.obs_moments}
        return algorithm.act(keys, obs, memory, **shared)

    _, rollout, _ = rollouts.collect(act, made, state, algorithm.num_steps)
    return learner, rollouts.as_samples(algorithm.compute_advantages(learner, rollout, ()))


def noise(learner: Learner, batch: Batch, dealt: jax.Array) -> float:
    """E|g - G|² / |G|² over minibatches with the samples in `dealt`."""

    def gradient(chosen: jax.Array) -> jax.Array:
        def loss(critic: object) -> jax.Array:
            params = learner.params._replace(critic=critic)
            value = actor_critic.value(params, batch.features[chosen])
            return 0.5 * jnp.mean(jnp.square(value - batch.target[chosen]))

        return jnp.concatenate([x.ravel() for x in jax.tree.leaves(jax.grad(loss)(
            learner.params.critic
        ))])  # fmt: skip

    whole = gradient(jnp.arange(len(batch.target)))
    parts = jax.lax.map(gradient, dealt.reshape(-1, dealt.shape[-1]))
    return float(jnp.mean(jnp.sum(jnp.square(parts - whole), -1)) / jnp.sum(jnp.square(whole)))


def main() -> None:
    """Print a table of all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ticks", type=int, default=8)
    options = parser.parse_args()
    console = Console()
    console.print("| environment | steps x envs | minibatches | whole steps | shuffled | own |")
    for env, steps, envs, parts in CASES:
        algorithm = PPO(num_steps=steps, num_minibatches=parts, learning_rate=1e-3)
        learner, batch = batch_of(algorithm, env, envs, options.ticks)
        keys = jax.random.split(jax.random.key(1), EPOCHS)
        ways = (partial(way, steps=steps, envs=envs, parts=parts) for way in WAYS)
        found = [noise(learner, batch, jax.vmap(way)(keys)) for way in ways]
        cells = " | ".join(f"{x:.4f}" for x in found)
        console.print(f"| {env} | {steps} x {envs} | {parts} | {cells} |")


if __name__ == "__main__":
    main()
