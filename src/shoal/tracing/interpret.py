"""The reference: run a graph's nodes in order, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from shoal.graph.ir import Graph, Loop, Node, Stage
from shoal.tracing.equations import bind, opened
from shoal.tracing.hosting import Given, Task
from shoal.tracing.jaxprs import Code, Fixed

Env = dict[str, Any]
Look = Callable[[str, str], str]
Run = Callable[[Any, list[Any]], list[Any]]


def as_written(node: str, value: str) -> str:
    """The default `look`: every node reads the value that the loop names."""
    return value


def interpret(
    graph: Graph, inputs: Iterable[Any], look: Look = as_written
) -> tuple[list[Any], dict[str, Any]]:
    """One turn of `graph` from its carried `inputs`: the next carry, and the metrics by name.

    `look(node, value)` may redirect a node's read to another value; the delayed reference does so.
    """
    env: Env = dict(zip(graph.inputs, inputs, strict=False))
    run_nodes(graph.nodes, env, look)
    return [env[name] for name in graph.outputs], {m.outer: env[m.inner] for m in graph.metrics}


def run_nodes(nodes: Iterable[Node], env: Env, look: Look = as_written, run: Run = bind) -> None:
    """Run `nodes` in order and store what they write in `env`."""
    for node in nodes:
        match node:
            case Loop():
                run_loop(node, env, look, run)
            case _:
                env.update(
                    run_code(node.code, {v: env[look(node.name, v)] for v in node.reads}, run)
                )


def run_code(code: Code, seen: Mapping[str, Any], run: Run = bind) -> Env:
    """What one node writes, given the values it reads."""
    args = [a.value if isinstance(a, Fixed) else seen[a] for a in code.args]
    results = run(code.equation, args) if code.equation is not None else [as_array(args[0])]
    return {name: x for name, x in zip(code.outs, results, strict=True) if name is not None}


def host_task(node: Stage, rows: int) -> Task:
    """What calls the Python behind a host stage, outside XLA, with `rows` environments."""
    jaxpr, _ = opened(node.code.equation.params["jaxpr"])
    (call,) = (e for e in jaxpr.eqns if e.primitive.name == "pure_callback")
    callback = call.params["callback"]
    python = getattr(callback, "callback_func", None)
    if python is not None and node.per == "env":
        python = python.with_rows(rows)
        callback = replace(callback, callback_func=python)
    plain = getattr(python, "plain", None)
    # The stage's own arguments and results may come in another order than its Python's.
    place = {v: i for i, v in enumerate(jaxpr.invars)}
    refs = [Given(a.value) if isinstance(a, Fixed) else a for a in node.code.args]
    args = tuple(
        Given(v.val) if isinstance(v, jex.Literal) else refs[place[v]] for v in call.invars
    )
    made = {v: i for i, v in enumerate(call.outvars)}
    outs: list[str | None] = [None] * len(call.outvars)
    for v, name in zip(jaxpr.outvars, node.code.outs, strict=True):
        outs[made[v]] = name
    return Task(node.stage, node.source, args, tuple(outs), plain or callback)


def as_array(x: Any) -> Any:
    """A number of the loop as an array; arrays as they are."""
    return x if isinstance(x, jax.Array) else jnp.asarray(x)


def run_loop(loop: Loop, env: Env, look: Look, run: Run) -> None:
    """Run a loop by scanning over its body's nodes."""
    outer = dict(env)

    def turn(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        inside = dict(outer)
        inside.update({c.before: x for c, x in zip(loop.carries, carry, strict=True)})
        inside.update({link.inner: x for link, x in zip(loop.slices, xs, strict=True)})
        run_nodes(loop.body.nodes, inside, look, run)
        return [inside[c.after] for c in loop.carries], [inside[s.inner] for s in loop.stacks]

    first = [env[look(loop.name, c.first)] for c in loop.carries]
    xs = [env[look(loop.name, link.outer)] for link in loop.slices]
    final, ys = jax.lax.scan(turn, first, xs, length=loop.length, reverse=loop.reverse)
    env.update({c.final: x for c, x in zip(loop.carries, final, strict=True)})
    env.update({s.outer: y for s, y in zip(loop.stacks, ys, strict=True)})
