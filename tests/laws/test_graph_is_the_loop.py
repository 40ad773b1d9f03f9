"""Tracing loses nothing: running a graph's nodes in order is running the loop, bit for bit."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shoal
from shoal.graph.ir import leaves, nested_stages
from shoal.runtime.verify import as_numbers

sys.path.insert(0, str(Path(__file__).parent))


def chase():
    from outside_loop import Chase

    return Chase(), None


def ppo(name):
    pytest.importorskip("gymnax")
    from shoal.algorithms import PPO
    from shoal.envs import make

    options = {"normalise_observations": True, "normalise_rewards": True, "value_clip": 0.2}
    return PPO(steps=8, minibatches=2, hidden=(8,), **options), make(name)


class Oddities:
    """What loops can hold: swapped, unchanged and constant state, reversed and nested scans."""

    def init(self, key, env, envs):
        rows = jnp.arange(envs, dtype=jnp.float32)
        return {
            "a": rows,
            "b": 2 * rows,
            "still": jnp.ones(3),
            "count": jnp.int32(0),
            "pair": (rows, rows),
        }

    def tick(self, env, state):
        @shoal.stage(per="env")
        def grow(x, *, by):
            return x + by

        def inner(c, x):
            return grow(c, by=x), (c, x)

        def outer(c, xs):
            c, ys = lax.scan(inner, c, xs, reverse=True)
            return c, ys

        xs = jnp.arange(6.0).reshape(2, 3)
        last, (ys, same) = lax.scan(outer, state["a"], xs)
        after = {
            "a": state["b"],
            "b": last,
            "still": state["still"],
            "count": state["count"] + 1,
            "pair": (state["pair"][1], jnp.zeros_like(last)),
        }
        return after, {"ys": ys, "same": same.sum(), "seven": jnp.float32(7)}


LOOPS = {
    "chase": chase,
    "ppo, discrete": lambda: ppo("CartPole-v1"),
    "ppo, continuous": lambda: ppo("Pendulum-v1"),
    "oddities": lambda: (Oddities(), None),
}


@pytest.mark.parametrize("name", LOOPS)
def test_interpreting_the_trace_is_running_the_loop(name):
    algorithm, env = LOOPS[name]()
    graph = shoal.trace(algorithm, env, envs=4)
    state = graph.origin.start(0, 4)
    wanted, metrics = jax.jit(lambda s: algorithm.tick(env, s))(state)
    carry, shown = jax.jit(lambda s: shoal.interpret(graph, jax.tree.leaves(s)))(state)
    for got, want in zip(carry, jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(as_numbers(got), as_numbers(want))
    assert shown.keys() == metrics.keys()
    for metric, want in metrics.items():
        np.testing.assert_array_equal(as_numbers(shown[metric]), as_numbers(want))


def test_a_graph_names_stages_loops_and_axes():
    algorithm, env = chase()
    graph = shoal.trace(algorithm, env, envs=4)
    names = [name for name, _ in nested_stages(graph)]
    assert names == ["look", "think", "env", "improve", "improve/grad", "improve/apply"]
    assert graph.values["keys"].axis == 0
    assert graph.values["minds"].axis == 0
    assert graph.values["params.see"].axis is None
    assert not any(graph.values[v].part for v in graph.inputs)
    assert all(node.source for node in leaves(graph) if hasattr(node, "stage"))
