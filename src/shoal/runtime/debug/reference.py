"""The delayed reference: the expected result of a plan with lags, as one graph on one device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import jax

from shoal.graph.ir import Carry, Glue, Graph, Link, Loop, Node
from shoal.planning.homes import EVERYWHERE, crossings
from shoal.planning.plan import Plan
from shoal.planning.policy import lag_of
from shoal.runtime.execution.snapshot import is_past, past_name
from shoal.tracing.interpret import interpret
from shoal.tracing.jaxprs import Code

State = dict[str, Any]


@dataclass(frozen=True)
class Delayed:
    """A plan's loop with each fragment's own view, and past versions for lagged readers."""

    plan: Plan

    @cached_property
    def _crossing(self) -> dict[tuple[str, str], str]:
        return crossings(self.plan.sites, self.plan.homes)

    @cached_property
    def lags(self) -> dict[tuple[str, str], int]:
        """The lag in ticks of each fragment and carried value that have one."""
        return {
            (c.reader, v): lag_of(c.flow)
            for c in self.plan.channels
            for v in c.values
            if lag_of(c.flow)
        }

    @cached_property
    def _same(self) -> dict[str, str]:
        """The initial values of loop carries that never change, by name."""
        fixed = [c for loop, _ in self.plan.sites.loops for c in loop.carries if c.unchanged]
        return {name: c.first for c in fixed for name in (c.before, c.final)}

    @cached_property
    def _sliced(self) -> set[str]:
        return {link.inner for loop, _ in self.plan.sites.loops for link in loop.slices}

    def read(self, fragment: str, value: str) -> str:
        """The name of `value` in the view of `fragment`."""
        while value in self._same:
            value = self._same[value]
        if value in self._sliced:
            return f"{fragment}:{value}"
        if (fragment, value) in self.lags:
            return past_name(fragment, value, self.lags[fragment, value])
        if (fragment, value) in self._crossing:
            return f"{self._crossing[fragment, value]}:{value}"
        return value if self.owners(value) is EVERYWHERE else f"{fragment}:{value}"

    def owners(self, value: str) -> frozenset[str]:
        """The fragments that compute a value."""
        return self.plan.sites.holders(value, self.plan.homes)

    @cached_property
    def carry(self) -> dict[str, tuple[str, str]]:
        """For each input of the graph: its initial value, and the output that replaces it."""
        pairs: dict[str, tuple[str, str]] = {}
        for before, after in self.plan.graph.carry:
            if before == after:
                pairs[before] = before, before
                continue
            for owner in sorted(self.owners(after)):
                pairs[f"{owner}:{before}"] = before, f"{owner}:{after}"
        for (reader, value), lag in self.lags.items():
            newest = f"{self._crossing[reader, value]}:{value}"
            names = [newest, *(past_name(reader, value, k) for k in range(1, lag + 1))]
            pairs |= {new: (value, old) for old, new in pairwise(names)}
        return pairs

    @cached_property
    def graph(self) -> Graph:
        """The loop as one graph, with every fragment's view as separate values."""
        plan = self.plan
        nodes = tuple(self._nodes(plan.graph.nodes))
        shown = tuple(Link(m.outer, self._shown(m.inner)) for m in plan.graph.metrics)
        outputs = tuple(after for _, after in self.carry.values())
        return Graph(tuple(self.carry), outputs, nodes, plan.graph.values, shown, plan.graph.envs)

    def _shown(self, value: str) -> str:
        owners = self.owners(value)
        return value if owners is EVERYWHERE else f"{min(owners)}:{value}"

    def _nodes(self, nodes: tuple[Node, ...]) -> Iterator[Node]:
        for node in nodes:
            if isinstance(node, Loop) and node.name in self.plan.sites.opened:
                yield self._loop(node)
            else:
                for fragment in sorted(self.plan.homes[node.name]):
                    yield self._copy(node, fragment)

    def _copy(self, node: Node, fragment: str) -> Glue:
        code: Code = node.code
        args = tuple(self.read(fragment, a) if isinstance(a, str) else a for a in code.args)
        outs = tuple(o and f"{fragment}:{o}" for o in code.outs)
        reads = tuple(dict.fromkeys(a for a in args if isinstance(a, str)))
        writes = tuple(o for o in outs if o)
        op = getattr(node, "stage", node.name)
        return Glue(
            f"{fragment}:{node.name}",
            op,
            reads,
            writes,
            node.source,
            replace(code, args=args, outs=outs),
        )

    def _loop(self, loop: Loop) -> Loop:
        fragments = sorted(
            {
                f
                for node in Graph((), (), (loop,)).stages
                for f in self.plan.homes.get(node.name, ())
            }
        )
        fragments = fragments or sorted(f.name for f in self.plan.distribution.fragments)
        carries = tuple(
            Carry(self.read(f, c.first), f"{f}:{c.before}", f"{f}:{c.after}", f"{f}:{c.final}")
            for c in loop.carries if not c.unchanged for f in sorted(self.owners(c.after))
        )  # fmt: skip
        used = {v for node in self._nodes(loop.body.nodes) for v in node.reads}
        slices = tuple(
            Link(self.read(f.name, s.outer), f"{f.name}:{s.inner}")
            for s in loop.slices for f in self.plan.distribution.fragments
            if f"{f.name}:{s.inner}" in used
        )  # fmt: skip
        stacks = tuple(
            Link(f"{f}:{s.outer}", f"{f}:{s.inner}")
            for s in loop.stacks
            for f in sorted(self.owners(s.inner))
        )
        body = replace(loop.body, nodes=tuple(self._nodes(loop.body.nodes)))
        return replace(loop, body=body, carries=carries, slices=slices, stacks=stacks)

    def start(self, state: Mapping[str, Any], past: Mapping[str, Any] | None = None) -> list[Any]:
        """The graph's inputs, from the loop's carried state.

        `past` holds older versions, named by `past_name`; before the first tick there are none,
        and readers see the initial state.
        """
        past = past or {}
        return [past.get(name, state[value]) for name, (value, _) in self.carry.items()]

    def finish(self, inputs: list[Any]) -> State:
        """The loop's carried state, from the graph's inputs."""
        held = dict(zip(self.carry, inputs, strict=True))
        return {
            value: held[name]
            for name, (value, _) in reversed(self.carry.items())
            if not is_past(name)
        }

    def tick(self, inputs: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Run one tick of the reference; returns the next inputs and the metrics."""
        return interpret(self.graph, inputs)


def run_reference(plan: Plan, state: Mapping[str, Any], ticks: int) -> State:
    """The loop's state after `ticks` ticks of the delayed reference."""
    return reference_course(plan, state, ticks)[0]


def reference_course(plan: Plan, state: Mapping[str, Any], ticks: int) -> tuple[State, State]:
    """The loop's state after `ticks` ticks of the delayed reference, and the metrics of each."""
    delayed = Delayed(plan)
    turns = jax.jit(lambda inputs: jax.lax.scan(lambda x, _: delayed.tick(x), inputs, length=ticks))
    inputs, metrics = turns(delayed.start(state))
    return delayed.finish(inputs), metrics
