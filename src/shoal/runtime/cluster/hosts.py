"""The hosts of a run as its driver reaches them, and this machine as all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from shoal.runtime.cluster.control_block import ControlLayout
from shoal.runtime.cluster.host_agent import STOP_GRACE_S, Doors, HostAgent
from shoal.runtime.cluster.machine import check_memory

T = TypeVar("T")
Command = Callable[[HostAgent], T]  # runs where the host agent is


class Wanted(NamedTuple):
    """What a run needs of a host."""

    host: str
    workers: int
    doors: int  # for workers of other hosts
    on_gpu: bool  # whether some compute on a GPU


class Hosts(Protocol):
    """The host agents of a run's hosts."""

    grows: bool  # whether hosts may come and go
    optional: set[int]  # host agents that may be lost: they answer None then

    def open(self, layout: ControlLayout, size: int, wanted: Sequence[Wanted]) -> list[Doors]:
        """Start a host agent on each host that is wanted."""
        ...

    def add(self, host: str) -> int | None:
        """The host agent for one more worker, on that host or another; None if none has room."""
        ...

    def drop(self, index: int) -> None:
        """Release a host agent that was added, once its worker has ended."""
        ...

    def run(self, commands: Sequence[Command[T]]) -> list[T | None]:
        """Let each host agent run its command, all at the same time; what they answer."""
        ...

    def one(self, index: int, command: Command[T]) -> T:
        """Let one host agent run a command; what it answers."""
        ...

    def end(self, grace: float) -> None:
        """End all workers, after a grace period by force; what they kept can still be had."""
        ...

    def close(self) -> None:
        """Release everything, whatever has happened."""
        ...


class WorkerHosts:
    """Which host agent has which workers of a run, and commands to the host agents."""

    def __init__(self, hosts: Hosts, held: Sequence[Sequence[int]]) -> None:
        self._hosts, self._held = hosts, [list(numbers) for numbers in held]

    @property
    def held(self) -> tuple[tuple[int, ...], ...]:
        """The workers of each host agent."""
        return tuple(tuple(numbers) for numbers in self._held)

    def run(self, commands: Sequence[Command[T]]) -> list[T | None]:
        """Let each host agent run its command; None from those that are gone."""
        return self._hosts.run(commands)

    def each(self, command: Command[T]) -> list[T]:
        """Let each host agent run a command; what those answer that are there."""
        return [x for x in self._hosts.run([command] * len(self._held)) if x is not None]

    def of(self, number: int, command: Command[T]) -> T:
        """Let the host agent of a worker run a command; what it answers."""
        return self._hosts.one(self._index(number), command)

    def _index(self, number: int) -> int:
        return next(i for i, held in enumerate(self._held) if number in held)

    def place(self, number: int, host: str, given: Mapping[str, np.ndarray], ticks: int) -> bool:
        """Find room for a worker, on that host or another; whether there is some."""
        index = self._hosts.add(host)
        if index is None:
            return False
        if index == len(self._held):
            self._held.append([])
            self._hosts.one(index, lambda one: one.start([], given, ticks))
            self._hosts.optional.add(index)
        for held in self._held:
            held[:] = [n for n in held if n != number]
        self._held[index].append(number)
        return True

    def remove(self, number: int) -> None:
        """Release the room of a worker that has ended."""
        self._hosts.drop(self._index(number))

    def lose(self, index: int) -> tuple[int, ...]:
        """Forget a host that is gone; the workers that it had."""
        lost, self._held[index] = tuple(self._held[index]), []
        return lost

    def end(self, grace: float) -> None:
        """End all workers, after a grace period by force; what they kept can still be had."""
        self._hosts.end(grace)

    def close(self) -> None:
        """Release everything, whatever has happened."""
        self._hosts.close()


class LocalHosts:
    """All workers on this host, whatever hosts the plan speaks of."""

    def __init__(self) -> None:
        self._host_agents: list[HostAgent] = []
        self._names: list[str] = []
        self.grows, self.optional = False, set[int]()

    def open(self, layout: ControlLayout, size: int, wanted: Sequence[Wanted]) -> list[Doors]:
        """Make the host agents; they are apart, as if they were on different hosts."""
        check_memory(size * len(wanted))
        self._host_agents = [HostAgent(layout, size) for _ in wanted]
        self._names = [one.host for one in wanted]
        return [
            host.open(one.doors, one.workers)
            for host, one in zip(self._host_agents, wanted, strict=True)
        ]

    def add(self, host: str) -> int | None:
        """The host agent of that host; this machine has room for one more."""
        return self._names.index(host) if host in self._names else 0

    def drop(self, index: int) -> None:
        """Others may be there still."""

    def run(self, commands: Sequence[Command[T]]) -> list[T | None]:
        """Let one host agent after the other run its command."""
        return [command(host) for command, host in zip(commands, self._host_agents, strict=True)]

    def one(self, index: int, command: Command[T]) -> T:
        """Let one host agent run a command."""
        return command(self._host_agents[index])

    def end(self, grace: float) -> None:
        """End all workers."""
        for one in self._host_agents:
            one.halt()
        for one in self._host_agents:
            one.close(grace)

    def close(self) -> None:
        """End all workers; their memory is freed with the run."""
        self.end(STOP_GRACE_S)
