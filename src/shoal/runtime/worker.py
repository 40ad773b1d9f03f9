"""A worker: one end of a fragment, its values, and its program turned tick by tick."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shoal.errors import RunError
from shoal.graph.ir import Stage
from shoal.planning.plan import Plan
from shoal.runtime.channels import Channel, Message
from shoal.runtime.fire import Did, Replica, Wants
from shoal.runtime.limit import Limit
from shoal.runtime.lower import Lowering
from shoal.runtime.program import HostCall, Move, Operation, Program, Segment, Turns, walk
from shoal.tracing.interpret import call_host
from shoal.tracing.jaxprs import Fixed, user_place

KEEP_EVERY, KEPT = 16, 4
Metrics = dict[str, Any]
Report = Callable[[int, Replica, Metrics], None]


class Failure(Exception):
    """A worker's error, with the replica and tick it happened at."""

    def __init__(self, replica: Replica, tick: int, error: BaseException) -> None:
        super().__init__(f"{replica[0]}[{replica[1]}] at tick {tick}: {error}")
        self.replica, self.tick, self.error = replica, tick, error


@dataclass(frozen=True, slots=True)
class Kept:
    """What one end carried before a tick, and the last messages it sent on lagged channels."""

    tick: int
    carried: dict[str, Any]
    sent: dict[str, tuple[Message, ...]]


@dataclass(frozen=True)
class Crew:
    """What all ends of one fragment share: its program and the compiled segments."""

    plan: Plan
    lowering: Lowering
    program: Program
    compiled: Mapping[int, Callable[..., Any]]


def make_crew(plan: Plan, lowering: Lowering, program: Program) -> Crew:
    """Compile lazily, once for all ends."""
    segments = [op for op in walk(program.operations) if isinstance(op, Segment)]
    return Crew(plan, lowering, program, {id(s): lowering.compile(s) for s in segments})


class Worker:
    """One end of a fragment: a replica, or all of them where they run as one program."""

    def __init__(
        self,
        crew: Crew,
        end: int,
        state: Mapping[str, Any],
        channels: Mapping[str, Channel],
        report: Report,
    ) -> None:
        self.replica: Replica = (crew.program.fragment, end)
        self.tick = 0
        self.broken = False
        self.kept: deque[Kept] = deque(maxlen=KEPT)
        self._sent: dict[str, deque[Message]] = {}
        self._crew, self._channels, self._report = crew, channels, report
        held = [before for before, _ in crew.program.carry] + list(crew.program.constants)
        self._env = {name: self._share(name, state[name]) for name in held}

    @property
    def carried(self) -> dict[str, Any]:
        """What this end carries between ticks."""
        return {before: self._env[before] for before, _ in self._crew.program.carry}

    def prime(self, channel: str, lag: int) -> None:
        """Send what a lagged reader sees before the first tick: what this end starts from."""
        values = next(c.values for c in self._crew.plan.channels if c.name == channel)
        self._sent[channel] = deque(maxlen=lag)
        for _ in range(lag):
            self._put(channel, values)

    def ticks(self, limit: Limit) -> Iterator[Wants | Did]:
        """Turn ticks up to the limit; every move is announced before and after it is made."""
        program = self._crew.program
        while limit.may_start(self.tick):
            if self.tick % KEEP_EVERY == 0:
                self._keep()
            self.broken = True
            yield from self._run(program.operations)
            self._report(self.tick, self.replica, {m: self._env[v] for m, v in program.metrics})
            kept = {before: self._env[after] for before, after in program.carry}
            self._env = kept | {name: self._env[name] for name in program.constants}
            self.tick += 1
            self.broken = False

    def _run(self, operations: tuple[Operation, ...]) -> Iterator[Wants | Did]:
        env = self._env
        for operation in operations:
            match operation:
                case Segment(_, reads, writes):
                    results = self._crew.compiled[id(operation)](*[env[r] for r in reads])
                    env.update(zip(writes, results, strict=True))
                case Move(channel, takes, values):
                    yield Wants(self.replica, channel, takes)
                    if takes:
                        env.update(self._channels[channel].take(self.replica[1]))
                    else:
                        self._put(channel, values)
                    yield Did(self.replica, channel, takes)
                case Turns():
                    yield from self._turn(operation)
                case HostCall(node):
                    self._call(node)

    def _put(self, channel: str, values: tuple[str, ...]) -> None:
        message = {v: self._env[v] for v in values}
        self._channels[channel].put(self.replica[1], message)
        if channel in self._sent:
            self._sent[channel].appendleft(message)

    def _keep(self) -> None:
        """Keep a copy of what this end carries, to go back to if a later tick goes wrong."""
        carried = {name: jnp.copy(x) for name, x in self.carried.items()}
        self.kept.append(Kept(self.tick, carried, {c: tuple(m) for c, m in self._sent.items()}))

    def _turn(self, turns: Turns) -> Iterator[Wants | Did]:
        env, loop = self._env, turns.loop
        env.update({name: env[first] for first, name in turns.renames if first in env})
        env.update({c.before: env[c.first] for c in turns.carries})
        order = range(loop.length - 1, -1, -1) if loop.reverse else range(loop.length)
        for turn in order:
            env[turns.index] = np.int32(turn)
            yield from self._run(turns.body)
            env.update({c.before: env[c.after] for c in turns.carries})
        env.update({c.final: env[c.before] for c in turns.carries})

    def _call(self, name: str) -> None:
        node = self._crew.lowering.nodes[name]
        assert isinstance(node, Stage)
        args = [a.value if isinstance(a, Fixed) else self._env[a] for a in node.code.args]
        try:
            results = call_host(node.code.equation, args)
        except Exception as error:
            fragment, end = self.replica
            raise RunError(
                f"host stage `{node.stage}` failed in {fragment}[{end}] at tick {self.tick}: "
                f"{type(error).__name__}: {error}",
                "It is your Python that stopped: mend it there, "
                'or step through it with backend="inline".',
                user_place(error) or node.source,
            ) from error
        outs = zip(node.code.outs, results, strict=True)
        self._env.update({o: x for o, x in outs if o is not None})

    def _share(self, name: str, x: Any) -> Any:
        """This end's rows of a carried value, copied to where the end runs."""
        lowering, end = self._crew.lowering, self.replica[1]
        axis = self._crew.plan.graph.values[name].axis
        ends = self._crew.plan.endpoints(self.replica[0])
        if axis is not None and ends > 1:
            rows = x.shape[axis] // ends
            x = jax.lax.slice_in_dim(x, end * rows, (end + 1) * rows, axis=axis)
        return jax.device_put(jnp.copy(x), lowering.sharding(name, end))
