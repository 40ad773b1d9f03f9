"""How fast fused PPO trains on a GPU with generated kernels, against the same plan on XLA alone.

CartPole, 128 steps, 4 epochs x 4 minibatches, two 64x64 tanh networks: the setting of PureJaxRL's
figures. Compilation isn't counted; the sides take turns, and the table shows medians.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

import shoal
from shoal import envs as environments
from shoal.algorithms import PPO
from shoal.planning.fragment_program import write_program
from shoal.runtime.execution.fused_run import compile_many
from shoal.runtime.execution.lowering import lowering_of

STEPS, TICKS = 128, 50
ALGORITHM = PPO(steps=STEPS, epochs=4, minibatches=4, learning_rate=2.5e-4)
Ticks = Callable[[int], float]


def side(mode: str, envs: int, env: str, algorithm: Any = ALGORITHM) -> Ticks:
    """A function of a number of ticks: how long the compiled loop takes for them."""
    os.environ["SHOAL_KERNELS"] = mode
    graph = shoal.trace(algorithm, environments.make(env), envs=envs)
    plan = shoal.plan(graph, shoal.fused())
    program = write_program(plan, "all")
    many = compile_many(lowering_of(plan, "all"), program, TICKS)
    values = dict(zip(graph.inputs, jax.tree.leaves(graph.origin.start(0, envs)), strict=True))
    carry = [jnp.copy(values[b]) for b, _ in program.carry]
    constants = [values[c] for c in program.constants]

    def ticks(count: int) -> float:
        nonlocal carry
        start = time.perf_counter()
        carry, shown = many(count, carry, constants)
        jax.block_until_ready((carry, shown))
        return time.perf_counter() - start

    return ticks


def main() -> None:
    """Print one line of JSON for each number of environments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--envs", default="64,512,2048,8192,32768")
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    for envs in map(int, asked.envs.split(",")):
        rates: dict[str, list[float]] = {}
        first = {}
        sides = {mode: side(mode, envs, asked.env) for mode in ("off", "auto")}
        for mode, ticks in sides.items():
            os.environ["SHOAL_KERNELS"] = mode
            first[mode] = ticks(TICKS)
        for _ in range(asked.rounds):
            for mode, ticks in sides.items():
                rates.setdefault(mode, []).append(envs * STEPS * TICKS / ticks(TICKS) / 1e6)
        row = {f"{mode} M steps/s": round(median(x), 2) for mode, x in rates.items()}
        row |= {f"{mode} first call s": round(x, 1) for mode, x in first.items()}
        ratio = median(rates["auto"]) / median(rates["off"])
        print(json.dumps({"envs": envs, **row, "ratio": round(ratio, 2)}), flush=True)


if __name__ == "__main__":
    main()
