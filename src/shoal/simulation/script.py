"""A plan's programs as scripts of timed steps: what an estimate and a simulation walk through."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256

from shoal.graph.ir import Choice, Graph, Loop, Node, Stage
from shoal.planning.channel_specs import ChannelSpec, make_channel_specs
from shoal.planning.fragment_program import write_program
from shoal.planning.plan import Plan
from shoal.planning.program import Call, Channel, Do, Put, Repeat, Take
from shoal.planning.segments import HostLoop, Operation, Segment, walk
from shoal.profiling.spans import site_of
from shoal.simulation.profile import PLAIN, Message, Profile

LOCAL, NETWORK = "local", "network"
EACH_S = {LOCAL: 4e-6, NETWORK: 4e-5}  # of one more source or reader (benchmarks/fan_in.py)
NUMPY, NUMPY_S = "numpy", 4e-6  # slices and stacks of a turn
CALL_S = 1.5e-6  # of an operation, in the interpreter
SURE = 0.7  # of what a curve says of a size that wasn't measured, a bound takes as much


@dataclass(frozen=True, slots=True)
class Step:
    """Something that takes time: `seconds` alone on its device, with `cores` of the host busy.

    A step in Python holds the interpreter, of which all threads of a process have one.
    """

    name: str
    seconds: float
    cores: float = 1.0
    is_python: bool = False
    quantiles: tuple[float, ...] = PLAIN
    site: int = 0  # the number of its operation, as spans have it


@dataclass(frozen=True, slots=True)
class Move:
    """A message: `takes` or puts; it takes time on its own side, and `latency` on the way."""

    channel: str
    takes: bool
    seconds: float
    latency: float = 0.0
    site: int = 0


@dataclass(frozen=True, slots=True)
class Turns:
    """A loop run by Python."""

    count: int
    body: tuple[Item, ...]


Item = Step | Move | Turns


class Unmeasured(LookupError):
    """A part whose cost the profile doesn't have."""


@dataclass(frozen=True)
class Scripts:
    """A plan with what each of its fragments does in a tick, and how long that takes.

    Parts that the profile lacks raise Unmeasured, or take no more than a dispatch if `is_bound`:
    the estimate then is a bound that the plan can't beat.
    """

    plan: Plan
    profile: Profile
    backend: str = "threads"
    is_bound: bool = False

    @cached_property
    def fragments(self) -> dict[str, tuple[Item, ...]]:
        """Each fragment's script."""
        names = [f.name for f in self.plan.distribution.fragments]
        return {name: self.of(name) for name in names}

    @cached_property
    def specs(self) -> dict[str, ChannelSpec]:
        """The channels, as the runtime has them."""
        return make_channel_specs(self.plan)

    @cached_property
    def channels(self) -> dict[str, Channel]:
        """The plan's channels by name."""
        return {channel.name: channel for channel in self.plan.channels}

    @property
    def is_measured(self) -> bool:
        """Whether every part was measured at the very size that the plan has."""
        curves = self.profile.costs
        return all(
            key in curves and curves[key].has(size)
            for f in self.plan.distribution.fragments for key, size in self.parts(f.name)
        )  # fmt: skip

    def parts(self, fragment: str) -> Iterator[tuple[str, int]]:
        """The names and sizes of a fragment's parts."""
        size = rows_of(self.plan, fragment)
        for operation in walk(write_program(self.plan, fragment).operations):
            if isinstance(operation, Segment):
                yield key_of(self.plan, segment_name(self.plan, operation), fragment), size
            elif isinstance(operation, Call):
                yield (
                    key_of(
                        self.plan, call_name(self.plan, operation.node), fragment, is_python=True
                    ),
                    size,
                )

    def of(self, fragment: str) -> tuple[Item, ...]:
        """The script of one endpoint of a fragment."""
        program = write_program(self.plan, fragment)
        number = [f.name for f in self.plan.distribution.fragments].index(fragment)
        sites = {id(op): site_of(number, i) for i, op in enumerate(walk(program.operations))}
        return tuple(self._items(program.operations, fragment, sites))

    def _items(
        self, operations: Iterable[Operation], fragment: str, sites: Mapping[int, int]
    ) -> Iterator[Item]:
        for operation in operations:
            site = sites[id(operation)]
            match operation:
                case Segment():
                    step = self._step(segment_name(self.plan, operation), fragment)
                    yield replace(step, site=site)
                case Call(node):
                    step = self._step(call_name(self.plan, node), fragment, is_python=True)
                    yield replace(step, site=site)
                case Take(channel):
                    yield replace(self._move(channel, takes=True), site=site)
                case Put(channel):
                    yield replace(self._move(channel, takes=False), site=site)
                case HostLoop():
                    body = tuple(self._items(operation.body, fragment, sites))
                    yield Turns(len(operation.order), body)
                case _:
                    yield Step(NUMPY, NUMPY_S, is_python=True, site=site)

    def _step(self, name: str, fragment: str, *, is_python: bool = False) -> Step:
        key = key_of(self.plan, name, fragment, is_python=is_python)
        size = rows_of(self.plan, fragment)
        curve = self.profile.costs.get(key)
        if curve is None or (self.is_bound and not curve.has(size)):
            if not self.is_bound:
                raise Unmeasured(key)
            least = 0.0 if is_python else self.profile.dispatch
            least = max(least, curve.at(size) * SURE if curve else 0.0)
            return Step(key, least, 1.0, is_python)
        near = curve.nearest(size)
        return Step(key, curve.at(size) + CALL_S, near.cores, is_python, near.quantiles)

    def _move(self, name: str, *, takes: bool) -> Move:
        channel, spec = self.channels[name], self.specs[name]
        cost = self.message(channel)
        bytes_each = self.plan.bytes_of(channel) / channel.times
        share = bytes_each / (spec.readers if takes else spec.writers)
        more = self._received(channel) if takes else 0.0
        sources = len(spec.gate.sources[0]) if takes else len(spec.gate.readers.get(0, (0,)))
        kind = NETWORK if self.plan.leaves_host(channel) else LOCAL
        more += (sources - 1) * EACH_S[kind]
        return Move(name, takes, cost.seconds / 4 + share / cost.rate + more, cost.seconds / 2)

    def _received(self, channel: Channel) -> float:
        """Seconds in which a reader joins a message's rows, and moves them to its device."""
        parts = ("receive", "join") if self.backend == "threads" else ("receive",)
        found = (self.profile.costs.get(f"{p} {message_name(channel)}") for p in parts)
        return sum(curve.at(rows_of(self.plan, channel.reader)) for curve in found if curve)

    def message(self, channel: Channel) -> Message:
        """The cost of a channel's messages."""
        kind = NETWORK if self.plan.leaves_host(channel) else self.backend
        found = self.profile.messages.get(kind)
        if found is None and not self.is_bound:
            raise Unmeasured(kind)
        return found or Message(0.0)


def rows_of(plan: Plan, fragment: str) -> int:
    """The environments that one endpoint of a fragment sees in a tick."""
    asynchronous = fragment in plan.asynchronous
    batch = plan.graph.envs if asynchronous else plan.batch(fragment)
    return max(1, batch // plan.ends(fragment))


# The names of parts


def key_of(plan: Plan, name: str, fragment: str, *, is_python: bool = False) -> str:
    """The name of a part's curve: with the kind, and the number, of devices it runs on."""
    if is_python:
        return f"python {name}"
    places = dict.fromkeys(p.device for p in plan.places[fragment])
    kind = next(iter(places)).kind
    if not plan.one_program(fragment):
        return f"{kind} {name}"
    return f"{kind} x{len(places)} of {plan.distribution.ends(fragment)} {name}"


def segment_name(plan: Plan, segment: Segment) -> str:
    """The stages of a segment with its loops, such as `128(act env) learn`; else its operations."""
    return part_name(plan, segment.work)


def part_name(plan: Plan, work: Iterable[object]) -> str:
    """The stages of some work, in order; glue counts only where there is nothing else."""
    work = tuple(work)
    found = " ".join(_stages_in(plan, work))
    if found:
        return found
    nodes = plan.sites.nodes
    glue = [getattr(nodes[w.node], "op", nodes[w.node].name) for w in work if isinstance(w, Do)]
    return f"glue({' '.join(sorted(set(glue)))})"


def _stages_in(plan: Plan, work: Iterable[object]) -> Iterator[str]:
    lengths: Mapping[str, int] = {loop.name: loop.length for loop, _ in plan.sites.loops}
    for item in work:
        match item:
            case Do(node):
                yield from _stages(plan.sites.nodes[node])
            case Repeat(loop, body):
                yield from _looped(lengths[loop], _stages_in(plan, body))
            case _:
                pass


def _stages(node: Node) -> Iterator[str]:
    match node:
        case Stage():
            yield node.stage
        case Choice():
            yield from (stage.stage for stage in node.stages)
        case Loop():
            yield from _looped(node.length, (s for n in node.body.nodes for s in _stages(n)))
        case _:
            pass


def _looped(count: int, names: Iterable[str]) -> Iterator[str]:
    if inside := " ".join(names):
        yield f"{count}({inside})"


def call_name(plan: Plan, node: str) -> str:
    """The name of a host stage."""
    found = plan.sites.nodes[node]
    assert isinstance(found, Stage)
    return found.stage


def message_name(channel: Channel) -> str:
    """A name of a channel's messages, whatever the number of its endpoints."""
    first, *more = channel.values
    rest = f" +{len(more)}" if more else ""
    return f"{channel.writer}>{channel.reader} {first}{rest}"


def loop_print(graph: Graph) -> str:
    """A fingerprint of a loop and its settings, for any number of environments."""
    origin = graph.origin
    said = f"{getattr(origin, 'algorithm', '')} {getattr(origin, 'env', '')}"
    said = re.sub(r"total_ticks=\d+|0x[0-9a-f]+", "", said)
    carried = [graph.values[name] for name in graph.inputs]
    shapes = [(v.name, v.dtype, [n for i, n in enumerate(v.shape) if i != v.axis]) for v in carried]
    nodes = [(n.name, n.reads, n.writes) for n in graph.nodes]
    return sha256(repr((said, shapes, nodes)).encode()).hexdigest()[:16]
