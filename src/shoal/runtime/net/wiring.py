"""Which channels stay on a host and which go between hosts, from where workers are."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from shoal.errors import PlaceError
from shoal.planning.channel_specs import ChannelSpec
from shoal.planning.policy import takes_some
from shoal.runtime.channels.shared_memory import Room
from shoal.runtime.channels.shm import Rings
from shoal.runtime.net.codec import check_packing
from shoal.runtime.net.connections import REJOIN, Address
from shoal.runtime.net.handshake import TOKEN
from shoal.runtime.net.remote_channels import RemoteChannels

Sheets = Mapping[str, ChannelSpec]


@dataclass(frozen=True)
class WorkerMap:
    """The workers of a run: their names and hosts, and which of them holds each end."""

    names: tuple[str, ...]
    hosts: tuple[str, ...]
    ends: Mapping[str, tuple[int, ...]]  # for each end of a fragment, its worker's number

    def hosts_of(self, sheet: ChannelSpec) -> set[str]:
        """The hosts that a channel has ends on."""
        ends = self.ends[sheet.gate.writer] + self.ends[sheet.gate.reader]
        return {self.hosts[worker] for worker in ends}


def divide(
    sheets: Sheets, crowd: WorkerMap, roaming: Collection[str] = ()
) -> tuple[dict[str, ChannelSpec], dict[str, ChannelSpec]]:
    """The channels in shared memory, and those between hosts.

    Those that free fragments turn by are counted in one ledger, so they stay together. Of roaming
    fragments it isn't known yet on which hosts they will be.
    """
    free = {n for n, s in sheets.items() if takes_some(s.gate.flow) or s.gate.admits}
    far = {
        name for name, sheet in sheets.items()
        if len(crowd.hosts_of(sheet)) > 1 or {sheet.gate.writer, sheet.gate.reader} & set(roaming)
    }  # fmt: skip
    if far & free:
        far |= free
        _check_ledger({n: sheets[n] for n in free}, crowd)
    near = {name: sheet for name, sheet in sheets.items() if name not in far}
    return near, {name: sheet for name, sheet in sheets.items() if name in far}


def _check_ledger(free: Sheets, crowd: WorkerMap) -> None:
    """Who takes the first to come and who sends news must be one worker: it keeps the ledger."""
    queues = [s.gate for s in free.values() if takes_some(s.gate.flow)]
    news = [s.gate for s in free.values() if not takes_some(s.gate.flow)]
    takers = {crowd.ends[gate.reader][0] for gate in queues}
    senders = {w for gate in news for w in crowd.ends[gate.writer]}
    if not senders <= takers:
        raise PlaceError(
            f"fragment `{queues[0].reader}` takes what comes first and `{news[0].writer}` sends "
            "news to those it comes from, on several hosts",
            f"Let `{queues[0].reader}` run beside `{news[0].writer}`, or place all on one host.",
        )


def make_lines(
    far: Sheets,
    crowd: WorkerMap,
    addresses: Sequence[Address],
    parties: tuple[frozenset[int], ...],
    absent: frozenset[int],
) -> RemoteChannels | None:
    """The channels between hosts, with a token of their own; None if there are none.

    Others may take the place of workers, of each of these parties together; absent ones come
    later, if at all.
    """
    if not far:
        return None
    for sheet in far.values():
        check_packing(sheet.packing)
    room = Room()
    rings = Rings.plan(far, room)
    token, at = os.urandom(TOKEN), tuple(addresses)
    rejoin = float(os.environ.get("SHOAL_REJOIN", REJOIN))
    return RemoteChannels(
        rings, room.size, crowd.ends, crowd.names, at, token, parties, absent, rejoin
    )
