"""Finds the stage that made the first NaN. Infinities are allowed: masks, bounds, maxima."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shoal.errors import NotFiniteError
from shoal.graph.ir import Glue, Loop, Node, Stage
from shoal.planning.plan import Plan
from shoal.planning.policy import Latest
from shoal.runtime.debug.reference import Delayed
from shoal.runtime.execution.snapshot import Snapshot, is_past
from shoal.tracing.interpret import Env, run_code


def not_finite(plan: Plan, good: Snapshot, tick: int, bad: list[str]) -> NotFiniteError:
    """The error for metrics `bad` at `tick`: replays the loop from a good state before it.

    A plan is deterministic, so the replay finds the last good state and the stage that made the
    first NaN.
    """
    if not plan.is_copied:
        return NotFiniteError(
            f"`{bad[0]}` is NaN at tick {tick}",
            "Lower the learning rate or clip gradients; which stage made it is unknown, since "
            "the carried state is too large to keep copies of it.",
            "",
            tick,
        )
    if (
        any(s.host for s in plan.graph.stages)
        or plan.asynchronous
        or any_latest(plan)
        or plan.saved
    ):
        return _not_replayed(good, tick, bad)
    delayed = Delayed(plan)
    inputs = delayed.start(good.values, good.past)
    turn = jax.jit(lambda x: delayed.tick(x)[0])
    for _ in range(tick - good.tick):
        inputs = turn(inputs)
    culprit = blame(delayed, inputs)
    error = NotFiniteError(
        f"`{bad[0]}` is NaN at tick {tick}; {_called(culprit)} made the first NaN",
        "The state before this tick is kept. Lower the learning rate, clip gradients, "
        "or look at what the stage divides by.",
        getattr(culprit, "source", ""),
        tick,
    )
    error.state = state = delayed.finish(inputs)
    past = {n: x for n, x in zip(delayed.carry, inputs, strict=True) if is_past(n)}
    error.snapshot = Snapshot(tick, state, past)
    return error


def any_latest(plan: Plan) -> bool:
    """Whether any reader takes the latest value, so that runs can't be repeated exactly."""
    return any(isinstance(c.flow, Latest) for c in plan.channels)


def _not_replayed(good: Snapshot, tick: int, bad: list[str]) -> NotFiniteError:
    """The error if the run can't be replayed: its state is the last that was kept."""
    error = NotFiniteError(
        f"`{bad[0]}` is NaN at tick {tick}",
        f"The state before tick {good.tick} is kept. Lower the learning rate or clip gradients; "
        "the stage that made it can be found only if a run can be repeated.",
        "",
        good.tick,
    )
    error.state, error.snapshot = dict(good.values), good
    return error


def _called(culprit: Node | None) -> str:
    match culprit:
        case Stage():
            return f"stage `{culprit.stage}`"
        case Glue():
            return f"`{culprit.op}` between stages"
        case _:
            return "the loop"


def bad_metrics(shown: Mapping[str, np.ndarray]) -> list[str]:
    """The names of the metrics that hold a NaN; infinities are allowed."""
    return [name for name, x in shown.items() if np.any(np.isnan(x))]


def blame(delayed: Delayed, inputs: list[Any]) -> Node | None:
    """The first node of a tick that writes a NaN, also inside loops and stages."""
    env: Env = dict(zip(delayed.graph.inputs, inputs, strict=True))
    found = _first_bad(delayed.graph.nodes, env)
    if found is None:
        return None
    # The reference runs each node as a whole, under its fragment's name: look inside the node.
    fragment, _, name = found.node.name.partition(":")
    site = delayed.plan.sites.nodes[name]
    inner = _first_bad((site,), {v: found.env[delayed.read(fragment, v)] for v in site.reads})
    return inner.node if inner else site


class _Found(NamedTuple):
    """A node that writes a NaN, and the values before it."""

    node: Node
    env: Env


def _first_bad(nodes: tuple[Node, ...], env: Env) -> _Found | None:
    for node in nodes:
        found = _turns(node, env) if isinstance(node, Loop) else _one(node, env)
        if found is not None:
            return found
    return None


def _one(node: Any, env: Env) -> _Found | None:
    made = run_code(node.code, env)
    if not any(has_nan(x) for x in made.values()):
        env.update(made)
        return None
    if isinstance(node, Stage) and node.body is not None:
        inner = _first_bad(node.body.nodes, dict(env))
        if inner and isinstance(inner.node, Stage):
            return inner
    return _Found(node, env)


def _turns(loop: Loop, env: Env) -> _Found | None:
    """Run a loop turn by turn in Python; returns its first node that writes a NaN."""
    inside = dict(env) | {c.before: env[c.first] for c in loop.carries}
    ys: list[list[Any]] = []
    for i in range(loop.length - 1, -1, -1) if loop.reverse else range(loop.length):
        inside.update({s.inner: env[s.outer][i] for s in loop.slices})
        found = _first_bad(loop.body.nodes, inside)
        if found is not None:
            return found
        ys.append([inside[s.inner] for s in loop.stacks])
        inside.update(
            {
                c.before: x
                for c, x in zip(loop.carries, [inside[c.after] for c in loop.carries], strict=True)
            }
        )
    ys = ys[::-1] if loop.reverse else ys
    env.update({c.final: inside[c.before] for c in loop.carries})
    env.update({s.outer: jnp.stack([y[k] for y in ys]) for k, s in enumerate(loop.stacks)})
    return None


def has_nan(x: Any) -> bool:
    """Whether a value has a NaN; integers and keys have none."""
    return jnp.issubdtype(x.dtype, jnp.inexact) and bool(
        np.any(np.isnan(np.asarray(x, np.complex128)))
    )
