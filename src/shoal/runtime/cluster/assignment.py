"""Which process holds which ends, and what each is told."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cached_property

import cloudpickle

from shoal.planning.plan import Plan, WorkerId
from shoal.planning.segments import Program
from shoal.runtime.channels.shm import Rings
from shoal.runtime.cluster.control_block import ControlLayout
from shoal.runtime.cluster.retrace import Loop, environment
from shoal.runtime.cluster.user_modules import Source, own_modules
from shoal.runtime.cluster.worker_config import Group, ProcessSpec, WorkerConfig
from shoal.runtime.execution.local_run import lagged, make_plain_crew
from shoal.runtime.execution.snapshot import Snapshot
from shoal.runtime.net.remote_channels import RemoteChannels
from shoal.runtime.net.wiring import WorkerMap

SPIN = 5e-5  # seconds that a worker watches before it sleeps, giving way to who has work


class ProcessAssignment:
    """Who gets which orders."""

    def __init__(
        self, plan: Plan, programs: Mapping[str, Program], drawn: str, start: Snapshot
    ) -> None:
        self._plan, self._programs, self._print, self._start = plan, programs, drawn, start

    @cached_property
    def crowd(self) -> WorkerMap:
        """All workers, and where they are."""
        plan = self._plan
        names = tuple("+".join(f"{f}[{w}]" for f, w in held) for held in self.seats)
        first = [held[0] for held in self.seats]
        hosts = tuple(plan.places[f][w % len(plan.places[f])].host for f, w in first)
        at = {seat: number for number, held in enumerate(self.seats) for seat in held}
        ends = {
            f: tuple(at[f, w] for w in range(plan.workers(f)) for _ in plan.ends_of(f, w))
            for f in self._programs
        }
        return WorkerMap(names, hosts, ends)

    def orders(
        self,
        rings: Rings,
        board: ControlLayout,
        lines: RemoteChannels | None,
        meetings: Sequence[str],
    ) -> list[ProcessSpec]:
        """One for each process; replicas that run as one program meet at their first's address."""
        plan, graph = self._plan, self._plan.graph
        origin = graph.origin
        loop = cloudpickle.dumps(
            Loop(origin.algorithm, origin.env, graph.envs, plan.distribution, plan.cluster)
        )
        crews = {f: make_plain_crew(plan, p) for f, p in self._programs.items() if not p.compiles}
        served = {f: plan.distribution.clients(f) for f in self._programs}
        common = {
            "rings": rings, "board": board,
            "ends": {f: self._teams(f, board) for f in self._programs},
            "lagged": tuple(lagged(plan)), "first": self._start.tick,
            "past": tuple(name for name in self._start.past if name in board.cells),
            "serve": {f: found[1] for f, found in served.items() if found},
            "print": self._print, "lines": lines,
        }  # fmt: skip
        orders = [
            WorkerConfig(
                seats=held,
                crews={f: crews[f] for f, _ in held if f in crews},
                loop=loop if any(f not in crews for f, _ in held) else b"",
                spin=SPIN,
                number=number,
                group=self._group(held, meetings),
                **common,
            )
            for number, held in enumerate(self.seats)
        ]
        return [self._hire(one) for one in orders]

    def _hire(self, orders: WorkerConfig) -> ProcessSpec:
        """A process with its orders, and the modules of the user's that these may speak of."""
        held, plan = orders.seats, self._plan
        return ProcessSpec(
            orders.number,
            held,
            orders.ends,
            alike=plan.workers(held[0][0]) > 1,
            on_cpu={plan.places[f][0].device.kind for f, _ in held} == {"cpu"},
            variables=self._variables(held),
            path=tuple(sys.path),
            modules=self._modules,
            orders=cloudpickle.dumps(orders),
        )

    @cached_property
    def _modules(self) -> dict[str, Source]:
        return own_modules()

    def _variables(self, held: tuple[WorkerId, ...]) -> dict[str, str]:
        """What a process that computes is to find in its environment."""
        if not any(self._programs[f].compiles for f, _ in held):
            return {}
        places = [self._plan.places[f][w % len(self._plan.places[f])] for f, w in held]
        kinds = [p.device.kind for p in places]
        return environment({kind: kinds.count(kind) for kind in kinds})

    @cached_property
    def seats(self) -> list[tuple[WorkerId, ...]]:
        """The seats of each process: one, and those that are to be beside it."""
        every = [(f, w) for f in self._programs for w in range(self._plan.workers(f))]
        beside = {f.name: f.beside for f in self._plan.distribution.fragments if f.beside}
        found: dict[WorkerId, list[WorkerId]] = {
            seat: [seat] for seat in every if seat[0] not in beside
        }
        for fragment, worker in every:
            if fragment in beside:
                hosts = [seat for seat in found if seat[0] == beside[fragment]]
                found[hosts[worker % len(hosts)]].append((fragment, worker))
        return [tuple(held) for held in found.values()]

    def _teams(self, fragment: str, board: ControlLayout) -> tuple[int, ...]:
        seats = [
            (fragment, w) for w in range(self._plan.workers(fragment))
            for _ in self._plan.ends_of(fragment, w)
        ]  # fmt: skip
        return tuple(board.teams.index(seat) for seat in seats)

    def _group(self, held: tuple[WorkerId, ...], meetings: Sequence[str]) -> Group | None:
        for fragment, worker in held:
            if self._plan.one_program(fragment):
                first = self.crowd.ends[fragment][0]
                return Group(meetings[first], self._plan.workers(fragment), worker)
        return None
