"""A loop whose environments take a known time: what `serve.py` measures.

It is a file of its own, since workers import the stage that they run by its name.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import shoal

SIZE = 16  # numbers in an observation


def _step_spec(seconds: Any, obs: Any, action: Any) -> tuple[Any, Any]:
    return obs, seconds


def simulate(
    seconds: np.ndarray, obs: np.ndarray, action: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Step one environment after another, each for its time; observations, and seconds spent."""
    start = time.perf_counter()
    end = start + float(seconds.sum())
    while (left := end - time.perf_counter()) > 0:
        time.sleep(left)
    after = 0.9 * obs + 0.1 * action[:, None]
    spent = (time.perf_counter() - start) / len(obs)
    return after.astype(np.float32), np.full(len(obs), spent, np.float32)


step = shoal.host(_step_spec, per="env", name="env")(simulate)


@dataclass(frozen=True)
class Simulated:
    """A loop that does next to nothing besides waiting for its environments."""

    times: tuple[float, ...]  # seconds of a step, by environment
    steps: int = 16

    def init(self, key: Any, env: Any, envs: int) -> dict[str, Any]:
        """Zeros."""
        # A number of environments other than the true one is only traced.
        times = jnp.asarray(np.resize(self.times, envs), jnp.float32)
        return {
            "weights": jnp.zeros(SIZE), "times": times, "obs": jnp.zeros((envs, SIZE)),
        }  # fmt: skip

    def tick(self, env: Any, state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Some steps of every environment, and one of learning."""

        def turn(obs: Any, _: Any) -> tuple[Any, Any]:
            action = self.act(obs, weights=state["weights"])
            obs, spent = step(state["times"], obs, action)
            return obs, (action, spent)

        obs, (actions, spent) = jax.lax.scan(turn, state["obs"], length=self.steps)
        weights, metrics = self.learn(state["weights"], actions, spent)
        return {**state, "weights": weights, "obs": obs}, metrics

    @shoal.stage(per="env")
    def act(self, obs: Any, *, weights: Any) -> Any:
        """A number for an observation."""
        return jnp.tanh(obs @ weights)

    @shoal.stage
    def learn(self, weights: Any, actions: Any, spent: Any) -> tuple[Any, dict[str, Any]]:
        """Next to nothing; and how long simulation took."""
        return weights + 1e-3 * actions.mean(), {"seconds": spent.sum(), "steps": spent.size}
