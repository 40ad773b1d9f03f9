"""The driver's access to the hosts of a run, and `LocalHosts`, which runs them on this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from shoal.runtime.cluster.control_layout import ControlLayout
from shoal.runtime.cluster.host_agent import STOP_GRACE_S, HostAgent, Listeners
from shoal.runtime.cluster.machine import check_memory

T = TypeVar("T")
Command = Callable[[HostAgent], T]  # runs in the host agent's process


class Wanted(NamedTuple):
    """The resources that a run needs on one host."""

    host: str
    workers: int
    listeners: int  # for workers of other hosts
    on_gpu: bool  # whether some compute on a GPU


class Hosts(Protocol):
    """The host agents of a run's hosts."""

    grows: bool  # whether hosts can be added and removed
    optional: set[int]  # host agents that may be lost, which then return None

    def open(self, layout: ControlLayout, size: int, wanted: Sequence[Wanted]) -> list[Listeners]:
        """Start a host agent on each of these hosts; their listeners."""
        ...

    def add(self, host: str) -> int | None:
        """The index of a host agent with room for one more worker, or None."""
        ...

    def drop(self, index: int) -> None:
        """Release a host agent that was added, once its worker has ended."""
        ...

    def run(self, commands: Sequence[Command[T]]) -> list[T | None]:
        """Run a command on each host agent concurrently; their results."""
        ...

    def one(self, index: int, command: Command[T]) -> T:
        """Run a command on one host agent; its result."""
        ...

    def end(self, grace: float) -> None:
        """End all workers, and kill them after a grace period; what they kept can still be read."""
        ...

    def close(self) -> None:
        """Release all resources, also after a failure."""
        ...


class WorkerHosts:
    """Maps the workers of a run to host agents, and sends commands to the host agents."""

    def __init__(self, hosts: Hosts, held: Sequence[Sequence[int]]) -> None:
        self.all, self._held = hosts, [list(numbers) for numbers in held]

    @property
    def held(self) -> tuple[tuple[int, ...], ...]:
        """The workers of each host agent."""
        return tuple(tuple(numbers) for numbers in self._held)

    def each(self, command: Command[T]) -> list[T]:
        """Run one command on all host agents; the results of those that are alive."""
        return [x for x in self.all.run([command] * len(self._held)) if x is not None]

    def of(self, number: int, command: Command[T]) -> T:
        """Run a command on the host agent of a worker; its result."""
        return self.all.one(self._index(number), command)

    def _index(self, number: int) -> int:
        return next(i for i, held in enumerate(self._held) if number in held)

    def place(self, number: int, host: str, given: Mapping[str, np.ndarray], ticks: int) -> bool:
        """Place a worker on that host or another; False if no host has room."""
        index = self.all.add(host)
        if index is None:
            return False
        if index == len(self._held):
            self._held.append([])
            self.all.one(index, lambda one: one.start([], given, ticks))
            self.all.optional.add(index)
        for held in self._held:
            held[:] = [n for n in held if n != number]
        self._held[index].append(number)
        return True

    def remove(self, number: int) -> None:
        """Release the room of a worker that has ended."""
        self.all.drop(self._index(number))

    def lose(self, index: int) -> tuple[int, ...]:
        """Remove a lost host; the workers that it had."""
        lost, self._held[index] = tuple(self._held[index]), []
        return lost


class LocalHosts:
    """Runs the workers of all hosts of a plan on this machine."""

    def __init__(self) -> None:
        self._host_agents: list[HostAgent] = []
        self._names: list[str] = []
        self.grows, self.optional = False, set[int]()

    def open(self, layout: ControlLayout, size: int, wanted: Sequence[Wanted]) -> list[Listeners]:
        """Make one host agent per host, which share no memory, as on separate machines."""
        check_memory(size * len(wanted))
        self._host_agents = [HostAgent(layout, size) for _ in wanted]
        self._names = [one.host for one in wanted]
        return [
            host.open(one.listeners, one.workers)
            for host, one in zip(self._host_agents, wanted, strict=True)
        ]

    def add(self, host: str) -> int | None:
        """The index of that host; this machine always has room."""
        return self._names.index(host) if host in self._names else 0

    def drop(self, index: int) -> None:
        """Do nothing: other workers may use the host agent."""

    def run(self, commands: Sequence[Command[T]]) -> list[T | None]:
        """Run the commands on the host agents, one after the other."""
        return [command(host) for command, host in zip(commands, self._host_agents, strict=True)]

    def one(self, index: int, command: Command[T]) -> T:
        """Run a command on one host agent."""
        return command(self._host_agents[index])

    def end(self, grace: float) -> None:
        """End all workers."""
        for one in self._host_agents:
            one.control.halt()
        for one in self._host_agents:
            one.close(grace)

    def close(self) -> None:
        """End all workers; the shared memory is freed with the run."""
        self.end(STOP_GRACE_S)
