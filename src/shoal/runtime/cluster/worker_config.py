"""What a worker process gets when it starts, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.planning.plan import WorkerId
from shoal.planning.policy import Serve
from shoal.runtime.channels.shm import Rings
from shoal.runtime.cluster.control_block import ControlLayout
from shoal.runtime.cluster.user_modules import Source
from shoal.runtime.execution.fragment import FragmentSpec
from shoal.runtime.execution.replica_runner import Lagged
from shoal.runtime.net.wiring import RemoteChannels

if TYPE_CHECKING:  # it loads JAX, which only compiled workers need
    from shoal.runtime.execution.exporting import ExportedFragment


@dataclass(frozen=True)
class Group:
    """The processes whose replicas run as one program, and which of them this is."""

    address: str
    processes: int
    index: int


@dataclass(frozen=True)
class WorkerConfig:
    """Which endpoints a process runs, where their channels lie, and how it is to behave."""

    seats: tuple[WorkerId, ...]
    fragments: Mapping[str, ExportedFragment | FragmentSpec]  # exported if any of it is compiled
    rings: Rings
    board: ControlLayout
    ends: Mapping[str, tuple[int, ...]]  # the team of each end of each fragment
    lagged: tuple[Lagged, ...]
    first: int  # the tick that the run goes on from
    past: tuple[str, ...]  # older versions that are there, for readers that lag
    serve: Mapping[str, Serve]
    spin: float
    number: int  # which of all workers it is
    lines: RemoteChannels | None = None  # channels between hosts
    group: Group | None = None


@dataclass(frozen=True)
class ProcessSpec:
    """A process to be started: what its host has to know, and its orders, sealed.

    Only the process itself unpickles its configuration, since no other may have the modules for it.
    """

    number: int
    seats: tuple[WorkerId, ...]
    ends: Mapping[str, tuple[int, ...]]  # the team of each end of each fragment
    alike: bool  # whether there are others like it
    on_cpu: bool  # whether it computes where it runs
    variables: Mapping[str, str]  # of its environment
    path: tuple[str, ...]  # where Python finds modules
    modules: Mapping[str, Source]  # the user's own
    orders: bytes
