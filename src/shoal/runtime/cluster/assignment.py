"""Assigns endpoints to worker processes and makes the configuration of each process."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property

import cloudpickle
import jax

from shoal.planning.plan import Plan, WorkerId
from shoal.planning.program import Call
from shoal.planning.segments import Program, walk
from shoal.runtime.channels.shm import ChannelLayouts
from shoal.runtime.cluster.control_layout import ControlLayout
from shoal.runtime.cluster.user_modules import Source, own_modules
from shoal.runtime.cluster.worker_config import Group, ProcessSpec, WorkerConfig
from shoal.runtime.execution.executors import make_spec
from shoal.runtime.execution.exporting import ExportedFragment, export_fragment
from shoal.runtime.execution.fragment import FragmentSpec
from shoal.runtime.execution.snapshot import Snapshot, lagged
from shoal.runtime.net.wiring import RemoteChannels, WorkerMap


class ProcessAssignment:
    """Assigns endpoints to processes."""

    def __init__(self, plan: Plan, programs: Mapping[str, Program], start: Snapshot) -> None:
        self._plan, self._programs, self._start = plan, programs, start

    @cached_property
    def worker_map(self) -> WorkerMap:
        """All worker processes and the hosts that they run on."""
        plan = self._plan
        names = tuple("+".join(f"{f}[{w}]" for f, w in held) for held in self.worker_ids)
        first = [held[0] for held in self.worker_ids]
        hosts = tuple(plan.places[f][w % len(plan.places[f])].host for f, w in first)
        at = {
            worker_id: number for number, held in enumerate(self.worker_ids) for worker_id in held
        }
        ends = {
            f: tuple(at[f, w] for w in range(plan.workers(f)) for _ in plan.ends_of(f, w))
            for f in self._programs
        }
        return WorkerMap(names, hosts, ends)

    def specs(
        self,
        channels: ChannelLayouts,
        layout: ControlLayout,
        lines: RemoteChannels | None,
        group_addresses: Sequence[str],
    ) -> list[ProcessSpec]:
        """The spec of each process; a data-parallel group meets at its first replica's address."""
        plan = self._plan
        fragments = {f: self._fragment(program) for f, program in self._programs.items()}
        common = {
            "channels": channels, "layout": layout,
            "lagged": tuple(lagged(plan)), "first": self._start.tick,
            "past": tuple(name for name in self._start.past if name in layout.cells),
            "lines": lines,
        }  # fmt: skip
        configs = [
            WorkerConfig(
                worker_ids=held,
                fragments={f: fragments[f] for f, _ in held},
                number=number,
                group=self._group(held, group_addresses),
                **common,
            )
            for number, held in enumerate(self.worker_ids)
        ]
        return [self._spec(config) for config in configs]

    def _fragment(self, program: Program) -> ExportedFragment | FragmentSpec:
        spec = make_spec(self._plan, program)
        return export_fragment(self._plan, spec) if program.compiles else spec

    def _spec(self, config: WorkerConfig) -> ProcessSpec:
        """The spec of a process: its configuration, and modules that its host stages need."""
        held, plan = config.worker_ids, self._plan
        schedulers = tuple(map(config.layout.schedulers.index, held))
        return ProcessSpec(
            config.number,
            held,
            schedulers,
            tuple(config.layout.replicas(schedulers)),
            alike=plan.workers(held[0][0]) > 1,
            on_cpu={plan.places[f][0].device.kind for f, _ in held} == {"cpu"},
            variables=self._variables(held),
            path=tuple(sys.path),
            modules=self._modules if self._runs_python(held) else {},
            config=cloudpickle.dumps(config),
        )

    def _runs_python(self, held: tuple[WorkerId, ...]) -> bool:
        """Whether a process runs host stages, whose Python is the user's."""
        every = [op for f, _ in held for op in walk(self._programs[f].operations)]
        return any(isinstance(op, Call) for op in every)

    @cached_property
    def _modules(self) -> dict[str, Source]:
        return own_modules()

    def _variables(self, held: tuple[WorkerId, ...]) -> dict[str, str]:
        """The environment variables of a process that runs compiled fragments."""
        if not any(self._programs[f].compiles for f, _ in held):
            return {}
        places = [self._plan.places[f][w % len(self._plan.places[f])] for f, w in held]
        kinds = [p.device.kind for p in places]
        return environment({kind: kinds.count(kind) for kind in kinds})

    @cached_property
    def worker_ids(self) -> list[tuple[WorkerId, ...]]:
        """The worker ids of each process: one worker, and those that are placed beside it."""
        every = [(f, w) for f in self._programs for w in range(self._plan.workers(f))]
        beside = {f.name: f.beside for f in self._plan.distribution.fragments if f.beside}
        found: dict[WorkerId, list[WorkerId]] = {
            worker_id: [worker_id] for worker_id in every if worker_id[0] not in beside
        }
        for fragment, worker in every:
            if fragment in beside:
                hosts = [worker_id for worker_id in found if worker_id[0] == beside[fragment]]
                found[hosts[worker % len(hosts)]].append((fragment, worker))
        return [tuple(held) for held in found.values()]

    def _group(self, held: tuple[WorkerId, ...], group_addresses: Sequence[str]) -> Group | None:
        for fragment, worker in held:
            if self._plan.one_program(fragment):
                first = self.worker_map.ends[fragment][0]
                return Group(group_addresses[first], self._plan.workers(fragment), worker)
        return None


def environment(kinds: Mapping[str, int]) -> dict[str, str]:
    """The environment variables of a compiled worker that uses only devices of these kinds."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    own = [f for f in flags if "host_platform_device_count" not in f]
    found = {"XLA_FLAGS": " ".join(own), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if not kinds.get("gpu"):
        found["JAX_PLATFORMS"] = "cpu"
    for name in ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"):
        if (value := getattr(jax.config, name)) is not None:
            found[name.upper()] = str(value)
    return found
