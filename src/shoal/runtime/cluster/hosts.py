"""The hosts of a run as its driver reaches them, and this machine as all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from shoal.runtime.cluster.control_block import ControlLayout
from shoal.runtime.cluster.host_agent import STOP_GRACE_S, Doors, HostAgent
from shoal.runtime.cluster.machine import check_memory


class Wanted(NamedTuple):
    """What a run needs of a host."""

    host: str
    workers: int
    doors: int  # for workers of other hosts
    on_gpu: bool  # whether some compute on a GPU


class Hosts(Protocol):
    """The hosts of a run, as their driver reaches them."""

    grows: bool  # whether hosts may come and go
    loose: set[int]  # sites that can be done without: if one is lost, it answers None

    def open(self, board: ControlLayout, size: int, wanted: Sequence[Wanted]) -> list[Doors]:
        """Make a site on each host that is wanted."""
        ...

    def add(self, host: str) -> int | None:
        """A site for one more worker, on that host or another; None if none has room."""
        ...

    def drop(self, site: int) -> None:
        """Give back a site that was added, once its worker has ended."""
        ...

    def each(self, does: str, *args: Sequence[Any]) -> list[Any]:
        """Let each site do something, each with its own arguments; what they answer."""
        ...

    def one(self, site: int, does: str, *args: Any) -> Any:
        """Let one site do something; what it answers."""
        ...

    def end(self, grace: float) -> None:
        """End all workers, after a grace period by force; what they kept can still be had."""
        ...

    def close(self) -> None:
        """Give everything back, whatever has happened."""
        ...


class LocalHosts:
    """All workers on this host, whatever hosts the plan speaks of."""

    def __init__(self) -> None:
        self._sites: list[HostAgent] = []
        self._hosts: list[str] = []
        self.grows, self.loose = False, set[int]()

    def open(self, board: ControlLayout, size: int, wanted: Sequence[Wanted]) -> list[Doors]:
        """Make the sites; they are apart, as if they were on different hosts."""
        check_memory(size * len(wanted))
        self._sites = [HostAgent(board, size) for _ in wanted]
        self._hosts = [one.host for one in wanted]
        return [
            site.open(one.doors, one.workers) for site, one in zip(self._sites, wanted, strict=True)
        ]

    def add(self, host: str) -> int | None:
        """The site of that host; this machine has room for one more."""
        return self._hosts.index(host) if host in self._hosts else 0

    def drop(self, site: int) -> None:
        """Others may be there still."""

    def each(self, does: str, *args: Sequence[Any]) -> list[Any]:
        """Let one site after the other do it."""
        own = zip(*args, strict=True) if args else ((),) * len(self._sites)
        return [getattr(site, does)(*given) for site, given in zip(self._sites, own, strict=True)]

    def one(self, site: int, does: str, *args: Any) -> Any:
        """Let one site do something."""
        return getattr(self._sites[site], does)(*args)

    def end(self, grace: float) -> None:
        """End all workers."""
        for site in self._sites:
            site.halt()
        for site in self._sites:
            site.close(grace)

    def close(self) -> None:
        """End all workers; their memory is freed with the run."""
        self.end(STOP_GRACE_S)
