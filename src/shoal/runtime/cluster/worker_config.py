"""The configuration that a worker process gets when it starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from shoal.planning.plan import Replica, WorkerId
from shoal.runtime.channels.shm import ChannelLayouts
from shoal.runtime.cluster.control_layout import ControlLayout
from shoal.runtime.cluster.user_modules import Source
from shoal.runtime.execution.fragment import FragmentSpec
from shoal.runtime.execution.snapshot import Lagged
from shoal.runtime.net.sockets import Address
from shoal.runtime.net.wiring import RemoteChannels

if TYPE_CHECKING:  # it loads JAX, which only compiled workers need
    from shoal.runtime.execution.exporting import ExportedFragment


@dataclass(frozen=True)
class Group:
    """The data-parallel group of a process: its address, its size and the index in it."""

    address: str
    processes: int
    index: int


@dataclass(frozen=True)
class WorkerConfig:
    """The endpoints of a worker process, their channels and its settings."""

    worker_ids: tuple[WorkerId, ...]
    fragments: Mapping[str, ExportedFragment | FragmentSpec]  # exported if any part is compiled
    channels: ChannelLayouts
    layout: ControlLayout
    lagged: tuple[Lagged, ...]
    first: int  # the tick that the run resumes from
    past: tuple[str, ...]  # older versions that exist, for readers that lag
    number: int  # index among all workers
    lines: RemoteChannels | None = None  # channels between hosts
    group: Group | None = None


class Restart(NamedTuple):
    """How a worker process takes the place of a lost one, or an empty place."""

    incarnation: int
    ticks: Mapping[Replica, int]  # that its endpoints resume from
    snapped: int  # the number of the last snapshot that it is already part of
    addresses: Mapping[int, Address]  # of the listeners of its restart group


@dataclass(frozen=True)
class ProcessSpec:
    """What a host needs to start a worker process, and its pickled configuration.

    Only the process itself unpickles its configuration, since no other may have the modules for it.
    """

    number: int
    worker_ids: tuple[WorkerId, ...]
    schedulers: tuple[int, ...]
    replicas: tuple[Replica, ...]
    alike: bool  # whether its fragment has other replicas
    on_cpu: bool  # whether it computes on CPUs
    variables: Mapping[str, str]  # environment variables
    path: tuple[str, ...]  # where Python finds modules
    modules: Mapping[str, Source]  # the user's own
    config: bytes
