"""Benchmarks host environments: with and without Shoal, and images on a CPU.

The first table steps eight environments with random actions, by hand and through `step_rows`. The
second takes the gradient of the network for images in blocks, as PPO does, and with XLA's own
convolutions, at once and in blocks. Both show the best of some rounds, which other work on the
machine disturbs least.
"""

import time
from collections.abc import Callable
from typing import Any

import envpool
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rich.console import Console
from rich.table import Table

from shoal.envs.host import step_rows
from shoal.envs.registry import make
from shoal.envs.spaces import Box, Discrete
from shoal.rl.blocks import grad_in_blocks
from shoal.rl.conv import LAYERS, Nature, fold_image, init_nature, nature

ENVS, ROUNDS = 8, 5
NAMES = {
    "gymnasium:CartPole-v1": 300,
    "gymnasium:HalfCheetah-v5": 100,
    "gymnasium:ALE/Pong-v5": 30,
    "envpool:CartPole-v1": 3000,
    "envpool:HalfCheetah-v5": 1000,
    "envpool:Pong-v5": 100,
}


def best(function: Callable[[], Any], times: int) -> float:
    """Seconds per call, in the fastest round."""
    rounds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(times):
            function()
        rounds.append((time.perf_counter() - began) / times)
    return min(rounds)


def actions_of(space: Box | Discrete) -> np.ndarray:
    """Random actions for all environments."""
    rng = np.random.default_rng(0)
    if isinstance(space, Discrete):
        return rng.integers(space.n, size=ENVS, dtype=np.int32)
    return rng.uniform(-1, 1, (ENVS, *space.shape)).astype(np.float32)


def through_rows(name: str) -> Callable[[], Any]:
    """A function that steps all environments as a run does."""
    simulator: Any = make(name).simulator
    seeds, action = np.arange(ENVS, dtype=np.uint32), actions_of(simulator.action_space)
    steps = np.zeros(ENVS, np.int32)

    def step() -> None:
        nonlocal steps
        steps, *_ = step_rows(simulator, seeds, steps, action)

    return step


def by_hand(name: str) -> Callable[[], Any]:
    """A function that steps all environments without Shoal."""
    family, _, short = name.partition(":")
    action = actions_of(make(name).action_space)  # pyright: ignore[reportArgumentType]
    if family == "envpool":
        pool: Any = envpool.make_gymnasium(short, num_envs=ENVS, num_threads=2)
        pool.reset()
        return lambda: pool.step(action)
    envs = [wrapped(short) for _ in range(ENVS)]
    for env in envs:
        env.reset()

    def step() -> None:
        for env, each in zip(envs, action.tolist() if action.ndim == 1 else action, strict=True):
            *_, terminated, truncated, _ = env.step(each)
            if terminated or truncated:
                env.reset()

    return step


def wrapped(name: str) -> gymnasium.Env:
    """Make an environment in the usual way."""
    if not name.startswith("ALE/"):
        return gymnasium.make(name)
    env = gymnasium.make(name, frameskip=1)
    env = gymnasium.wrappers.AtariPreprocessing(env)
    return gymnasium.wrappers.FrameStackObservation(env, 4)


def by_convolutions(net: Nature, x: jax.Array) -> jax.Array:
    """The network for images with XLA's own convolutions."""
    x = x.astype(jnp.float32) / 255
    for layer, (filters, window, stride) in zip(net.convolutions, LAYERS, strict=True):
        kernel = layer.weight.reshape(window, window, x.shape[-1], filters)
        numbers = ("NHWC", "HWIO", "NHWC")
        x = lax.conv_general_dilated(x, kernel, (stride,) * 2, "VALID", dimension_numbers=numbers)
        x = jax.nn.relu(x + layer.bias)
    return jax.nn.relu(x.reshape(len(x), -1) @ net.dense.weight + net.dense.bias)


def gradients() -> dict[str, Callable[[], Any]]:
    """The ways to compute the gradient for 256 images."""
    space = Box(0.0, 255.0, (84, 84, 4), "uint8")
    net = init_nature(jax.random.PRNGKey(0), space)
    images = jnp.asarray(np.random.default_rng(0).integers(0, 256, (256, *space.shape)), jnp.uint8)

    def loss(see: Callable[..., jax.Array]) -> Callable[..., Any]:
        return lambda net, x: (jnp.mean(jnp.square(see(net, x))), ())

    def timed(take: Callable[..., Any], x: jax.Array) -> Callable[[], Any]:
        compiled = jax.jit(take).lower(net, x).compile()
        return lambda: jax.block_until_ready(compiled(net, x))

    at_once = jax.grad(loss(by_convolutions), has_aux=True)
    return {
        "patches, in blocks": timed(
            lambda net, x: grad_in_blocks(loss(nature), net, x), fold_image(images)
        ),
        "convolutions, at once": timed(at_once, images),
        "convolutions, in blocks": timed(
            lambda net, x: grad_in_blocks(loss(by_convolutions), net, x), images
        ),
    }


def main() -> None:
    """Measure, and print the tables."""
    console = Console()
    table = Table("environment", "by hand, µs", "rows, µs", "rows, steps/s")
    for name, times in NAMES.items():
        hand, rows = (best(step(name), times) for step in (by_hand, through_rows))
        table.add_row(name, f"{1e6 * hand:,.0f}", f"{1e6 * rows:,.0f}", f"{ENVS / rows:,.0f}")
    console.print(table)
    table = Table("gradient of 256 images", "ms")
    for name, take in gradients().items():
        table.add_row(name, f"{1e3 * best(take, 2):,.0f}")
    console.print(table)


if __name__ == "__main__":
    main()
