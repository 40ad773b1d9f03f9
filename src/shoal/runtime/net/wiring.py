"""The channels between hosts as plain data, and the worker of each endpoint."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from shoal.errors import PlaceError
from shoal.planning.channel_specs import ChannelSpec
from shoal.planning.policy import Latest, takes_some
from shoal.planning.restart_groups import group_of
from shoal.runtime.channels.shared_memory import Allocator
from shoal.runtime.channels.shm import ChannelLayouts
from shoal.runtime.net.sockets import Address
from shoal.runtime.net.wire import TOKEN, Credentials, digest

Specs = Mapping[str, ChannelSpec]


@dataclass(frozen=True)
class WorkerMap:
    """The workers of a run: their names, their hosts, and the worker of each endpoint."""

    names: tuple[str, ...]
    hosts: tuple[str, ...]
    ends: Mapping[str, tuple[int, ...]]  # by endpoint of a fragment, its worker's index

    def hosts_of(self, spec: ChannelSpec) -> set[str]:
        """The hosts that a channel has endpoints on."""
        ends = self.ends[spec.gate.writer] + self.ends[spec.gate.reader]
        return {self.hosts[worker] for worker in ends}


def divide(
    specs: Specs, workers: WorkerMap, roaming: Collection[str] = ()
) -> tuple[dict[str, ChannelSpec], dict[str, ChannelSpec]]:
    """Divide channels into those in shared memory and those between hosts.

    Channels of asynchronous fragments share one ledger, so they stay together. The hosts of
    `roaming` fragments aren't known yet, so their channels are between hosts.
    """
    asynchronous = {n for n, s in specs.items() if takes_some(s.gate.flow) or s.gate.admits}
    far = {
        name for name, spec in specs.items()
        if len(workers.hosts_of(spec)) > 1 or {spec.gate.writer, spec.gate.reader} & set(roaming)
    }  # fmt: skip
    if far & asynchronous:
        far |= asynchronous
        _check_ledger({n: specs[n] for n in asynchronous}, workers)
    near = {name: spec for name, spec in specs.items() if name not in far}
    return near, {name: spec for name, spec in specs.items() if name in far}


def _check_ledger(asynchronous: Specs, workers: WorkerMap) -> None:
    """Check that one worker both reads the queues and sends the latest: it keeps the ledger."""
    queues = [s.gate for s in asynchronous.values() if takes_some(s.gate.flow)]
    latest = [s.gate for s in asynchronous.values() if not takes_some(s.gate.flow)]
    takers = {workers.ends[gate.reader][0] for gate in queues}
    senders = {w for gate in latest for w in workers.ends[gate.writer]}
    if not senders <= takers:
        raise PlaceError(
            f"fragment `{queues[0].reader}` takes what comes first and `{latest[0].writer}` sends "
            "the latest to the fragments it comes from, on several hosts",
            f"Let `{queues[0].reader}` run beside `{latest[0].writer}`, or place all on one host.",
        )


def make_remote_channels(
    far: Specs,
    workers: WorkerMap,
    addresses: Sequence[Address],
    groups: tuple[frozenset[int], ...],
    absent: frozenset[int],
) -> RemoteChannels | None:
    """Make the channels between hosts, with a new token; None if there are none.

    The workers of each restart group are replaced together; `absent` workers join later, if at
    all.
    """
    if not far:
        return None
    memory = Allocator()
    layouts = ChannelLayouts.plan(far, memory)
    return RemoteChannels(
        layouts, memory.size, workers.ends, workers.names, tuple(addresses), os.urandom(TOKEN),
        groups, absent,
        signed=os.environ.get("SHOAL_NET_MAC", "0") not in ("", "0"),
    )  # fmt: skip


@dataclass(frozen=True)
class RemoteChannels:
    """All channels between hosts as plain data, with the worker and address of each endpoint."""

    layouts: ChannelLayouts
    size: int
    ends: Mapping[str, tuple[int, ...]]  # by endpoint of a fragment, its worker's index
    names: tuple[str, ...]  # of workers, for errors
    addresses: tuple[Address, ...]
    token: bytes
    groups: tuple[frozenset[int], ...] = ()  # workers that are replaced together
    absent: frozenset[int] = frozenset()  # those of them that join later
    incarnation: int = 0  # the number of times this worker was replaced
    signed: bool = False  # whether frames carry a MAC

    def __repr__(self) -> str:
        # Without the token.
        return f"RemoteChannels({list(self.layouts.layouts)}, {self.names}, {self.addresses})"

    @property
    def known(self) -> Credentials:
        """The credentials that both sides of a connection must share."""
        specs = [repr((name, one.spec)) for name, one in self.layouts.layouts.items()]
        layout = digest("\n".join([*specs, repr(sorted(self.ends.items()))]))
        return Credentials(self.token, layout, self.signed)

    def views(self) -> Iterator[View]:
        """The view of every channel."""
        for number, one in enumerate(self.layouts.layouts.values()):
            gate = one.spec.gate
            yield View(number, one.spec, self.ends[gate.writer], self.ends[gate.reader])

    def others(self, me: int) -> frozenset[int]:
        """The workers that one worker is connected to."""
        return frozenset[int]().union(*(view.others(me) for view in self.views()))

    def group(self, worker: int) -> frozenset[int]:
        """The workers that restart together with one, including itself."""
        return group_of(self.groups, worker)

    def for_incarnation(self, incarnation: int, addresses: Mapping[int, Address]) -> RemoteChannels:
        """The channels of a replacement worker, with the addresses of its group."""
        at = tuple(addresses.get(worker, known) for worker, known in enumerate(self.addresses))
        return replace(self, incarnation=incarnation, addresses=at)


@dataclass(frozen=True)
class View:
    """A channel's index and spec, and the worker of each endpoint."""

    number: int
    spec: ChannelSpec
    writers: tuple[int, ...]
    readers: tuple[int, ...]

    @cached_property
    def written_by(self) -> Mapping[int, Sequence[int]]:
        """The writer's endpoints in each worker."""
        return _ends_of(self.writers)

    @cached_property
    def read_by(self) -> Mapping[int, Sequence[int]]:
        """The reader's endpoints in each worker."""
        return _ends_of(self.readers)

    @cached_property
    def _readers(self) -> Mapping[int, frozenset[int]]:
        return {w: frozenset(readers) for w, readers in self.spec.gate.readers.items()}

    def others(self, worker: int) -> set[int]:
        """The workers that one worker exchanges frames with."""
        gate, found = self.spec.gate, set[int]()
        for writer in self.written_by.get(worker, ()):
            found |= {self.readers[r] for r in gate.readers.get(writer, ())} | self.beside(writer)
        for reader in self.read_by.get(worker, ()):
            found |= {self.writers[w] for w in gate.sources[reader]}
        return found - {worker}

    def beside(self, writer: int) -> set[int]:
        """The workers of the writer's endpoints that share a reader with this one."""
        gate = self.spec.gate
        if not isinstance(gate.flow, Latest):
            return set()
        return {self.writers[w] for w in gate.beside.get(writer, ())}

    def taking(self, writer: int, worker: int) -> tuple[int, ...]:
        """The endpoints of a worker that take from a writer's endpoint."""
        readers = self._readers.get(writer, frozenset())
        return tuple(r for r in self.read_by.get(worker, ()) if r in readers)


def _ends_of(workers: Sequence[int]) -> Mapping[int, Sequence[int]]:
    found: dict[int, list[int]] = {}
    for end, worker in enumerate(workers):
        found.setdefault(worker, []).append(end)
    return found
