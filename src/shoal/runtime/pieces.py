"""A run of several workers that meet at channels, on threads or in turn."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from shoal.planning.plan import Plan
from shoal.planning.policy import lag_of
from shoal.runtime.blame import Good, bad_metrics, not_finite
from shoal.runtime.channels import Bell, Channel
from shoal.runtime.collect import Collector, Shown
from shoal.runtime.crew import CompiledCrew, make_tasks
from shoal.runtime.gates import make_cell, make_sheets
from shoal.runtime.inprocess import InProcessChannel, make_channels
from shoal.runtime.limit import Limit
from shoal.runtime.lower import Lowering
from shoal.runtime.operations import Program
from shoal.runtime.plain import PlainCrew
from shoal.runtime.team import Team
from shoal.runtime.threads import ThreadBell, Threads
from shoal.runtime.worker import Kept, Runs, Worker


def make_crew(plan: Plan, program: Program) -> CompiledCrew | PlainCrew:
    """What the ends of a fragment share."""
    return CompiledCrew(plan, program) if program.compiles else make_plain_crew(plan, program)


def make_plain_crew(plan: Plan, program: Program) -> PlainCrew:
    """What the ends of a fragment share that has no compiled segments."""
    fragment = program.fragment
    tasks = make_tasks(Lowering(plan, fragment), program)
    cells = {name: make_cell(value) for name, value in plan.graph.values.items()}
    ends = plan.ends(fragment)
    return PlainCrew(program, tasks, cells, ends, plan.graph.envs // ends, fragment in plan.free)


class Pieces:
    """All workers of a plan, their channels, and what they have shown."""

    def __init__(
        self,
        plan: Plan,
        programs: list[Program],
        values: Mapping[str, Any],
        wrap: Callable[[str, InProcessChannel], Channel] = lambda name, channel: channel,
    ) -> None:
        self._plan, self._values = plan, dict(values)
        self._crews = {p.fragment: make_crew(plan, p) for p in programs}
        self._lines = make_channels(
            make_sheets(plan), {name: _arrays(crew) for name, crew in self._crews.items()}
        )
        self.channels = {name: wrap(name, channel) for name, channel in self._lines.items()}
        self._collector = Collector(plan, programs)
        self.workers: list[Worker] = []
        for program in programs:
            crew = self._crews[program.fragment]
            for end in range(plan.ends(program.fragment)):
                self.workers.append(Worker(crew, end, values, self.channels, self._collector))
        for channel in plan.channels:
            for worker in self._of(channel.writer):
                if lag := lag_of(channel.flow):
                    worker.prime(channel.name, lag, channel.values)

    @property
    def teams_named(self) -> list[tuple[str, int]]:
        """A fragment and the number of a worker that holds some of its ends, for each team."""
        return [(f, worker) for f in self._crews for worker in range(self._plan.workers(f))]

    def teams(self, bells: Mapping[tuple[str, int], Bell]) -> list[Team]:
        """A team for each worker of each fragment, by the bell that wakes it."""
        heard = {
            fragment: [bells[fragment, worker] for worker in range(self._plan.workers(fragment))
                       for _ in self._plan.ends_of(fragment, worker)]
            for fragment in self._crews
        }  # fmt: skip
        for channel in self._plan.channels:
            stile = self._lines[channel.name].turnstile
            stile.hear(heard[channel.reader], heard[channel.writer])
        return [self._team(fragment, worker, bell) for (fragment, worker), bell in bells.items()]

    def _team(self, fragment: str, worker: int, bell: Bell) -> Team:
        ends = self._plan.ends_of(fragment, worker)
        workers = [w for w in self._of(fragment) if w.replica[1] in ends]
        return make_team(self._plan, self._crews[fragment], workers, self.channels, bell)

    def ready(self) -> Iterator[tuple[int, Shown]]:
        """Metrics of whole ticks that have arrived; raises at the first that isn't finite."""
        for tick, shown in self._collector.ready():
            if bad := bad_metrics(shown):
                raise not_finite(self._plan, self._good(tick), tick, bad)
            yield tick, shown

    def final(self) -> tuple[dict[str, Any], int]:
        """The carried state, joined from all workers, and the ticks they have done.

        If workers were stopped in the middle of a tick, it is the last state they all kept.
        """
        counted = [w for w in self.workers if not w.is_free]
        ticks = {w.tick for w in counted}
        if len(ticks) == 1 and not any(w.broken for w in counted):
            ends = {w.replica: _newest(w) for w in self.workers}
            return self._values | self._join(ends), ticks.pop()
        good = self._good(min(ticks))
        return dict(good.values), good.tick

    def run_many(self, asked: list[Runs]) -> list[list[Any]]:
        """Run segments that ends of a server ask for; whose they are shows by themselves."""
        for crew in self._crews.values():
            if isinstance(crew, CompiledCrew) and crew.has(asked[0].segment):
                return crew.run_many(asked)
        raise AssertionError("nobody has this segment")

    def _of(self, fragment: str) -> list[Worker]:
        return [w for w in self.workers if w.replica[0] == fragment]

    def _good(self, tick: int) -> Good:
        """The newest state that all workers kept at or before `tick`."""
        kept = {w.replica: {k.tick: k for k in list(w.kept)} for w in self.workers}
        counted = [set(kept[w.replica]) for w in self.workers if not w.is_free]
        usable = [t for t in set.intersection(*counted) if t <= tick] if counted else []
        if not usable:
            return Good(0, self._values)
        # Free ends have ticks of their own; the newest they kept will do.
        chosen = {r: k.get(max(usable), k[max(k)]) for r, k in kept.items() if k}
        values = self._join({replica: k.carried for replica, k in chosen.items()})
        return Good(max(usable), self._values | values, self._past(chosen))

    def _past(self, kept: dict[tuple[str, int], Kept]) -> dict[str, Any]:
        """Older versions of lagged values, as the delayed reference names them."""
        past: dict[str, Any] = {}
        for channel in self._plan.channels:
            ends = [
                k.sent[channel.name]
                for r, k in sorted(kept.items())
                if r[0] == channel.writer and lag_of(channel.flow)
            ]
            for age in range(lag_of(channel.flow)):
                for value in channel.values:
                    rows = [messages[age][value] for messages in ends]
                    past[f"{channel.reader}:{value}@{age + 1}"] = self._whole(value, rows)
        return past

    def _join(self, ends: Mapping[tuple[str, int], Mapping[str, Any]]) -> dict[str, Any]:
        """Carried values by name, whole again."""
        joined = {}
        for name, after in self._plan.graph.carry:
            if name != after:
                owner = min(self._plan.sites.holders(after, self._plan.homes))
                rows = [held[name] for replica, held in sorted(ends.items()) if replica[0] == owner]
                joined[name] = self._whole(name, rows)
        return joined

    def _whole(self, name: str, rows: list[Any]) -> Any:
        """A value from its owner's ends, on one device, where it meets all the others."""
        axis = self._plan.graph.values[name].axis
        parts = [jax.device_put(x, jax.devices()[0]) for x in rows]
        return parts[0] if axis is None or len(parts) == 1 else jnp.concatenate(parts, axis)


def _arrays(crew: CompiledCrew | PlainCrew) -> Lowering | None:
    """Where a crew wants its messages: on its devices, or in NumPy."""
    return crew.lowering if isinstance(crew, CompiledCrew) and not crew.is_served else None


def _newest(worker: Worker) -> Mapping[str, Any]:
    """What an end carries, or carried last before it was stopped in the middle of a tick."""
    return worker.kept[-1].carried if worker.broken else worker.carried


def make_team(
    plan: Plan,
    crew: CompiledCrew | PlainCrew,
    workers: list[Worker],
    channels: Mapping[str, Channel],
    bell: Bell | None,
) -> Team:
    """The team of one of a fragment's workers."""
    clients = plan.distribution.clients(crew.program.fragment)
    if clients is None:
        return Team(workers, channels, bell)
    assert isinstance(crew, CompiledCrew)
    return Team(workers, channels, bell, clients[1], crew.run_many)


class Inline:
    """The inline backend's way with pieces: all happens on the caller's thread, when waited for."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces, self._limit = pieces, Limit(0)
        self.ready, self.final = pieces.ready, pieces.final

    def start(self, limit: Limit) -> None:
        """Remember how far to go."""
        self._limit = limit

    def alive(self, seconds: float) -> bool:
        """Do all the work."""
        pieces = self._pieces
        Team(pieces.workers, pieces.channels, None, None, pieces.run_many).turn(self._limit)
        return False

    def close(self) -> None:
        """Nothing runs but the caller's thread."""


class Threaded:
    """The threads backend's way with pieces."""

    def __init__(self, pieces: Pieces) -> None:
        halt = threading.Event()
        bells = {name: ThreadBell(halt) for name in pieces.teams_named}
        self._threads = Threads(pieces.teams(bells), list(bells.values()), halt)
        self.ready, self.final = pieces.ready, pieces.final

    def start(self, limit: Limit) -> None:
        """Begin; returns at once."""
        self._threads.start(limit)

    def alive(self, seconds: float) -> bool:
        """Wait up to `seconds` for the end; raises a worker's failure once all have stopped."""
        until = time.monotonic() + seconds
        for thread in self._threads.threads:
            thread.join(max(0.0, until - time.monotonic()))
        if self._threads.alive():
            return True
        if self._threads.failure:
            raise self._threads.failure
        return False

    def close(self) -> None:
        """Let nobody wait any more."""
        self._threads.stop()
