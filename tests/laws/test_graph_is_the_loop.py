"""Tracing loses nothing: running a graph's nodes in order is running the loop, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import shoal
from laws.cases import CHASE, CONTINUOUS, PPO, graph_of, start_of
from laws.random_loops import Author
from shoal.graph.ir import leaves, nested_stages
from shoal.runtime.debug.verify import as_numbers
from shoal.tracing.jaxprs import Reader


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


def check(graph, state):
    """One tick of the loop itself, and one of the graph's nodes."""
    algorithm, env = graph.origin.algorithm, graph.origin.env
    wanted, metrics = jax.jit(lambda s: algorithm.tick(env, s))(state)
    carry, shown = jax.jit(lambda s: shoal.interpret(graph, jax.tree.leaves(s)))(state)
    for got, want in zip(carry, jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(as_numbers(got), as_numbers(want))
    assert shown.keys() == metrics.keys()
    for metric, want in metrics.items():
        np.testing.assert_array_equal(as_numbers(shown[metric]), as_numbers(want))


@given(st.lists(st.sampled_from(["x", "x#2", "x#3", "x#2#2"]), max_size=12))
def test_no_two_values_or_nodes_share_a_name_whatever_they_are_named_after(bases):
    reader, aval = Reader(), jax.core.ShapedArray((), jnp.float32)
    values, nodes = [reader.value(b, aval) for b in bases], [reader.name(b) for b in bases]
    assert len(set(values)) == len(set(nodes)) == len(bases)
    assert set(reader.values) == set(values)


def traced(loop, envs):
    """A loop's graph, or None where Shoal refuses to trace it."""
    try:
        return shoal.trace(loop, envs=envs)
    except shoal.ShoalError:
        return None


def test_interpreting_the_trace_of_any_loop_is_running_it():
    authors = [Author(seed) for seed in range(20)]
    graphs = [traced(author.loop(), author.envs) for author in authors]
    for graph in filter(None, graphs):
        check(graph, graph.origin.start(0, graph.envs))
    assert sum(map(bool, graphs)) > 10


@pytest.mark.parametrize("name", [CHASE, PPO, CONTINUOUS])
def test_interpreting_the_trace_is_running_the_loop(name):
    check(graph_of(name), start_of(name))


def test_odd_carries_and_scans_are_kept():
    graph = shoal.trace(Oddities(), envs=4)
    check(graph, graph.origin.start(0, 4))


def test_a_graph_names_stages_loops_and_axes():
    graph = graph_of("chase")
    names = [name for name, _ in nested_stages(graph)]
    assert names == ["look", "think", "env", "improve", "improve/grad", "improve/apply"]
    assert graph.values["keys"].axis == 0
    assert graph.values["minds"].axis == 0
    assert graph.values["params.see"].axis is None
    assert not any(graph.values[v].differs for v in graph.inputs)
    assert all(node.source for node in leaves(graph) if hasattr(node, "stage"))
