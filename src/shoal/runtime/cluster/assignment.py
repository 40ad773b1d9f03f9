"""Which process holds which endpoints, and the configuration of each."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property

import cloudpickle
import jax

from shoal.planning.plan import Plan, WorkerId
from shoal.planning.segments import HostCall, Program, walk
from shoal.runtime.channels.shm import Rings
from shoal.runtime.cluster.control_block import ControlLayout
from shoal.runtime.cluster.user_modules import Source, own_modules
from shoal.runtime.cluster.worker_config import Group, ProcessSpec, WorkerConfig
from shoal.runtime.execution.executors import make_spec
from shoal.runtime.execution.exporting import ExportedFragment, export_fragment
from shoal.runtime.execution.fragment import FragmentSpec
from shoal.runtime.execution.local_run import lagged
from shoal.runtime.execution.snapshot import Snapshot
from shoal.runtime.net.wiring import RemoteChannels, WorkerMap

SPIN = 5e-5  # seconds that a worker spins before it sleeps


class ProcessAssignment:
    """Assigns endpoints to processes."""

    def __init__(self, plan: Plan, programs: Mapping[str, Program], start: Snapshot) -> None:
        self._plan, self._programs, self._start = plan, programs, start

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
        plan = self._plan
        fragments = {f: self._fragment(program) for f, program in self._programs.items()}
        served = {f: plan.distribution.clients(f) for f in self._programs}
        common = {
            "rings": rings, "board": board,
            "ends": {f: self._teams(f, board) for f in self._programs},
            "lagged": tuple(lagged(plan)), "first": self._start.tick,
            "past": tuple(name for name in self._start.past if name in board.cells),
            "serve": {f: found[1] for f, found in served.items() if found},
            "lines": lines,
        }  # fmt: skip
        orders = [
            WorkerConfig(
                seats=held,
                fragments={f: fragments[f] for f, _ in held},
                spin=SPIN,
                number=number,
                group=self._group(held, meetings),
                **common,
            )
            for number, held in enumerate(self.seats)
        ]
        return [self._spec(one) for one in orders]

    def _fragment(self, program: Program) -> ExportedFragment | FragmentSpec:
        spec = make_spec(self._plan, program)
        return export_fragment(self._plan, spec) if program.compiles else spec

    def _spec(self, config: WorkerConfig) -> ProcessSpec:
        """A process with its configuration, and the modules that its host stages may need."""
        held, plan = config.seats, self._plan
        return ProcessSpec(
            config.number,
            held,
            config.ends,
            alike=plan.workers(held[0][0]) > 1,
            on_cpu={plan.places[f][0].device.kind for f, _ in held} == {"cpu"},
            variables=self._variables(held),
            path=tuple(sys.path),
            modules=self._modules if self._runs_python(held) else {},
            orders=cloudpickle.dumps(config),
        )

    def _runs_python(self, held: tuple[WorkerId, ...]) -> bool:
        """Whether a process runs host stages, whose Python is the user's."""
        every = [op for f, _ in held for op in walk(self._programs[f].operations)]
        return any(isinstance(op, HostCall) for op in every)

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


def environment(kinds: Mapping[str, int]) -> dict[str, str]:
    """Environment variables of a compiled worker: devices of these kinds and no others."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    own = [f for f in flags if "host_platform_device_count" not in f]
    found = {"XLA_FLAGS": " ".join(own), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if not kinds.get("gpu"):
        found["JAX_PLATFORMS"] = "cpu"
    for name in ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"):
        if (value := getattr(jax.config, name)) is not None:
            found[name.upper()] = str(value)
    return found
