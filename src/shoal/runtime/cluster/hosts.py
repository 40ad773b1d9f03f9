"""The hosts of a run as its driver reaches them, and this machine as all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from shoal.runtime.cluster.control_block import ControlLayout
from shoal.runtime.cluster.host_agent import STOP_GRACE_S, Doors, HostAgent
from shoal.runtime.cluster.machine import check_memory

T = TypeVar("T")
Command = Callable[[HostAgent], T]  # runs where the agent is


class Wanted(NamedTuple):
    """What a run needs of a host."""

    host: str
    workers: int
    doors: int  # for workers of other hosts
    on_gpu: bool  # whether some compute on a GPU


class Hosts(Protocol):
    """The agents of a run's hosts."""

    grows: bool  # whether hosts may come and go
    optional: set[int]  # agents that may be lost: they answer None then

    def open(self, layout: ControlLayout, size: int, wanted: Sequence[Wanted]) -> list[Doors]:
        """Start an agent on each host that is wanted."""
        ...

    def add(self, host: str) -> int | None:
        """The agent for one more worker, on that host or another; None if none has room."""
        ...

    def drop(self, agent: int) -> None:
        """Release an agent that was added, once its worker has ended."""
        ...

    def run(self, commands: Sequence[Command[T]]) -> list[T | None]:
        """Let each agent run its command, all at the same time; what they answer."""
        ...

    def one(self, agent: int, command: Command[T]) -> T:
        """Let one agent run a command; what it answers."""
        ...

    def end(self, grace: float) -> None:
        """End all workers, after a grace period by force; what they kept can still be had."""
        ...

    def close(self) -> None:
        """Release everything, whatever has happened."""
        ...


class WorkerHosts:
    """Which agent has which workers of a run, and commands to the agents."""

    def __init__(self, hosts: Hosts, held: Sequence[Sequence[int]]) -> None:
        self._hosts, self._held = hosts, [list(numbers) for numbers in held]

    @property
    def held(self) -> tuple[tuple[int, ...], ...]:
        """The workers of each agent."""
        return tuple(tuple(numbers) for numbers in self._held)

    def run(self, commands: Sequence[Command[T]]) -> list[T | None]:
        """Let each agent run its command; None from those that are gone."""
        return self._hosts.run(commands)

    def each(self, command: Command[T]) -> list[T]:
        """Let each agent run a command; what those answer that are there."""
        return [x for x in self._hosts.run([command] * len(self._held)) if x is not None]

    def of(self, number: int, command: Command[T]) -> T:
        """Let the agent of a worker run a command; what it answers."""
        return self._hosts.one(self._agent(number), command)

    def _agent(self, number: int) -> int:
        return next(i for i, held in enumerate(self._held) if number in held)

    def place(self, number: int, host: str, given: Mapping[str, np.ndarray], ticks: int) -> bool:
        """Find room for a worker, on that host or another; whether there is some."""
        agent = self._hosts.add(host)
        if agent is None:
            return False
        if agent == len(self._held):
            self._held.append([])
            self._hosts.one(agent, lambda one: one.start([], given, ticks))
            self._hosts.optional.add(agent)
        for held in self._held:
            held[:] = [n for n in held if n != number]
        self._held[agent].append(number)
        return True

    def remove(self, number: int) -> None:
        """Release the room of a worker that has ended."""
        self._hosts.drop(self._agent(number))

    def lose(self, agent: int) -> tuple[int, ...]:
        """Forget a host that is gone; the workers that it had."""
        lost, self._held[agent] = tuple(self._held[agent]), []
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
        self._agents: list[HostAgent] = []
        self._names: list[str] = []
        self.grows, self.optional = False, set[int]()

    def open(self, layout: ControlLayout, size: int, wanted: Sequence[Wanted]) -> list[Doors]:
        """Make the agents; they are apart, as if they were on different hosts."""
        check_memory(size * len(wanted))
        self._agents = [HostAgent(layout, size) for _ in wanted]
        self._names = [one.host for one in wanted]
        return [
            agent.open(one.doors, one.workers)
            for agent, one in zip(self._agents, wanted, strict=True)
        ]

    def add(self, host: str) -> int | None:
        """The agent of that host; this machine has room for one more."""
        return self._names.index(host) if host in self._names else 0

    def drop(self, agent: int) -> None:
        """Others may be there still."""

    def run(self, commands: Sequence[Command[T]]) -> list[T | None]:
        """Let one agent after the other run its command."""
        return [command(agent) for command, agent in zip(commands, self._agents, strict=True)]

    def one(self, agent: int, command: Command[T]) -> T:
        """Let one agent run a command."""
        return command(self._agents[agent])

    def end(self, grace: float) -> None:
        """End all workers."""
        for agent in self._agents:
            agent.halt()
        for agent in self._agents:
            agent.close(grace)

    def close(self) -> None:
        """End all workers; their memory is freed with the run."""
        self.end(STOP_GRACE_S)
