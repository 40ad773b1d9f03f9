"""The hosts and devices of a run, and the placement of replicas on them."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.errors import PlaceError
from shoal.planning.policy import DistributionPolicy, Fragment


@dataclass(frozen=True, slots=True)
class Device:
    """Something that runs XLA programs; `memory` in bytes, 0 when unknown."""

    kind: str
    index: int
    memory: int = 0

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}"


@dataclass(frozen=True, slots=True)
class Host:
    """A machine: its CPU slots and its devices; `memory` in bytes, 0 when unknown."""

    name: str
    cpus: int
    devices: tuple[Device, ...]
    memory: int = 0


@dataclass(frozen=True, slots=True)
class Cluster:
    """All hosts of a run."""

    hosts: tuple[Host, ...]

    def places(self, kind: str) -> tuple[Place, ...]:
        """Every device of one kind."""
        return tuple(Place(h.name, d) for h in self.hosts for d in h.devices if d.kind == kind)


@dataclass(frozen=True, slots=True)
class Place:
    """A device of a host."""

    host: str
    device: Device

    def __str__(self) -> str:
        return f"{self.host}/{self.device}"


def place(distribution: DistributionPolicy, cluster: Cluster) -> dict[str, tuple[Place, ...]]:
    """A place for each replica: devices of the kind round-robin, shared if there are too few."""
    used = {"cpu": 0, "gpu": 0}
    placed: dict[str, tuple[Place, ...]] = {}
    for fragment in distribution.fragments:
        kind = _kind(fragment, cluster)
        devices, count = cluster.places(kind), starting(fragment, distribution, cluster)
        first = used[kind] if len(devices) >= used[kind] + count else 0
        placed[fragment.name] = tuple(
            devices[(first + i) % len(devices)] for i in range(fragment.most)
        )
        used[kind] = first + count
    for fragment in distribution.fragments:
        if fragment.beside:  # in the same workers, so on the same hosts
            hosts = placed[fragment.beside]
            own = enumerate(placed[fragment.name])
            placed[fragment.name] = tuple(
                p if p.host == hosts[i % len(hosts)].host else hosts[i % len(hosts)] for i, p in own
            )
    return placed


def starting(fragment: Fragment, distribution: DistributionPolicy, cluster: Cluster) -> int:
    """How many replicas a fragment starts with: as many as have a CPU each, within its bounds.

    Where several are elastic, all have their least before the first gets more.
    """
    if not fragment.is_elastic:
        return fragment.most
    free = sum(host.cpus for host in cluster.hosts)
    free -= sum(f.least for f in distribution.fragments if not f.beside)
    for other in distribution.elastic:
        more = max(0, min(free, other.most - other.least))
        if other == fragment:
            return fragment.least + more
        free -= more
    raise AssertionError(fragment.name)


def _kind(fragment: Fragment, cluster: Cluster) -> str:
    for kind in fragment.on.split(" else "):
        if cluster.places(kind):
            return kind
    raise PlaceError(
        f"fragment `{fragment.name}` wants {fragment.on}, and the cluster has none",
        'Run it on a host that has one, or let the fragment fall back: on="gpu else cpu".',
    )
