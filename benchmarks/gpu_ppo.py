"""Benchmarks fused PPO on a GPU: generated kernels against the same plan on XLA alone.

CartPole, 128 steps, 4 epochs x 4 minibatches, two 64x64 tanh networks: the setting of PureJaxRL's
figures. Compilation isn't counted; the sides take turns, and the table shows medians.
"""

import argparse
import json
import os
import time
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np

import shoal
from shoal import envs as environments
from shoal.algorithms import PPO
from shoal.planning.fragment_program import write_program
from shoal.runtime.execution.executors import compiled_ticks
from shoal.runtime.execution.lowering import lowering_of

STEPS, TICKS = 128, 50
ALGORITHM = PPO(num_steps=STEPS, update_epochs=4, num_minibatches=4, learning_rate=2.5e-4)


class Side:
    """The compiled loop with kernels, or without."""

    def __init__(self, mode: str, envs: int, env: str) -> None:
        os.environ["SHOAL_KERNELS"] = mode
        self.graph = shoal.trace(ALGORITHM, environments.make(env), envs=envs)
        plan = shoal.plan(self.graph, shoal.fused())
        self.program = write_program(plan, "all")
        self.many = compiled_ticks(lowering_of(plan, "all"), self.program)
        self.begin(0)
        start = time.perf_counter()
        self.ticks(1)
        self.compile_seconds = time.perf_counter() - start

    def begin(self, seed: int) -> None:
        """Start the loop from a seed."""
        leaves = jax.tree.leaves(self.graph.origin.start(seed, self.graph.envs))
        values = dict(zip(self.graph.inputs, map(_raw, leaves), strict=True))
        self.carry = [jnp.copy(values[name]) for name, _ in self.program.carry]
        self.constants = [values[name] for name in self.program.constants]

    def ticks(self, count: int) -> float:
        """Seconds for a number of ticks."""
        start = time.perf_counter()
        made = list(self.many(np.int32(count), *self.carry, *self.constants))
        self.carry, self.shown = made[: len(self.carry)], made[len(self.carry) :]
        jax.block_until_ready(made)
        return time.perf_counter() - start

    def learnt(self, seed: int) -> float:
        """The mean return of the episodes of the last 20 of 100 ticks."""
        self.begin(seed)
        for _ in range(2):
            self.ticks(TICKS)
        names = [name for name, _ in self.program.metrics]
        shown = dict(zip(names, self.shown, strict=True))
        totals = [
            jnp.sum(shown[name][TICKS - 20 : TICKS]) for name in ("episode_return", "episodes")
        ]
        return float(totals[0] / totals[1])


def _raw(x: jax.Array) -> jax.Array:
    """An array as programs carry it: PRNG keys as their key data."""
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def main() -> None:
    """Print one line of JSON for each number of environments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--envs", default="64,512,2048,8192,32768")
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=0, help="also learn from so many seeds")
    asked = parser.parse_args()
    for envs in map(int, asked.envs.split(",")):
        sides = {mode: Side(mode, envs, asked.env) for mode in ("off", "auto")}
        rates: dict[str, list[float]] = {mode: [] for mode in sides}
        for _ in range(asked.rounds):
            for mode, side in sides.items():
                rates[mode].append(envs * STEPS * TICKS / side.ticks(TICKS) / 1e6)
        row = {f"{mode} M steps/s": round(median(x), 2) for mode, x in rates.items()}
        row |= {f"{m} compile s": round(side.compile_seconds, 1) for m, side in sides.items()}
        if asked.seeds:
            row |= {
                f"{mode} returns": [round(side.learnt(seed), 1) for seed in range(asked.seeds)]
                for mode, side in sides.items()
            }
        ratio = median(rates["auto"]) / median(rates["off"])
        print(json.dumps({"envs": envs, **row, "ratio": round(ratio, 2)}), flush=True)


if __name__ == "__main__":
    main()
