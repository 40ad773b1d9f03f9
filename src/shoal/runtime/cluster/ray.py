"""The `ray` backend: one Ray actor per host runs that host's agent. No other module imports Ray."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util import get_node_ip_address, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from shoal.errors import LostError, PlaceError, ShoalError
from shoal.planning.cluster import Cluster, Device, Host
from shoal.planning.fragment_program import write_program
from shoal.planning.plan import Plan
from shoal.planning.segments import Program
from shoal.runtime.cluster.assignment import ProcessAssignment
from shoal.runtime.cluster.control_layout import ControlLayout
from shoal.runtime.cluster.driver import ProcessRun
from shoal.runtime.cluster.host_agent import STOP_GRACE_S, HostAgent, Listeners
from shoal.runtime.cluster.hosts import Command, T, Wanted
from shoal.runtime.cluster.machine import check_memory
from shoal.runtime.cluster.restarting import starting_workers
from shoal.runtime.execution.snapshot import Snapshot
from shoal.runtime.logs import listener, listening
from shoal.runtime.restart_policy import RestartPolicy

ADD_INTERVAL_S = 2.0  # seconds between checks for free CPUs
RESPONSE_TIMEOUT_S = 30.0  # seconds for a host to respond, or for Ray to place a run
CONNECT_TIMEOUT_S = 10.0  # seconds for a cluster to accept a connection
QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": "warning"}
START_TIMEOUT_S = 120.0  # seconds for a host agent to start


def join(address: str = "") -> None:
    """Connect to the cluster at `address`, or to a local one, or start one."""
    if ray.is_initialized():
        return
    try:
        probe(address)
    except OSError as error:
        raise no_cluster(address, error) from error
    try:
        _connect(address)
    except (ConnectionError, ValueError, RuntimeError) as error:
        with suppress(ConnectionError, ValueError, RuntimeError):
            if use_token():
                _connect(address)
        if not ray.is_initialized():
            raise no_cluster(address, error) from error


def no_cluster(address: str, error: Exception) -> PlaceError:
    """The error for a cluster that can't be reached."""
    return PlaceError(
        f"there is no Ray cluster at {address or 'hand'}: {str(error).splitlines()[0]}",
        "Start one with `ray start --head`, and give its address, such as --address HOST:6379. "
        "If that one asks for a token (Ray says InvalidAuthToken), copy ~/.ray/auth_token from "
        "its head to this host.",
    )


def probe(address: str) -> None:
    """Raise unless HOST:PORT accepts connections; Ray would retry for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()


def _connect(address: str) -> None:
    with own_signals():
        try:
            ray.init(address=address or "auto", **QUIET)
        except ConnectionError:
            if address:
                raise
            start_cluster()


def start_cluster() -> None:
    """Start a cluster of this host only, which no other host can reach."""
    make_token()
    with on_loopback():
        ray.init(address="local", include_dashboard=False, **QUIET)


@contextmanager
def on_loopback() -> Iterator[None]:
    """Make a cluster that starts in this context reachable from this host only.

    Ray replaces a loopback address by one that other hosts can reach, unless it assumes that
    this system supports no clusters.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def make_token() -> None:
    """Create Ray's authentication token, readable by this user only.

    If there is none, Ray creates one that all users of this host can read.
    """
    if {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        return
    path = Path.home() / ".ray" / "auth_token"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(FileExistsError):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(file, "w", encoding="ascii") as token:
            token.write(secrets.token_hex(32))
    path.chmod(0o600)


def use_token() -> bool:
    """Enable Ray's token authentication if a token exists and no mode is set.

    `ray start` requires a token that exists, but Ray's clients send it only if enabled.
    """
    if "RAY_AUTH_MODE" in os.environ:
        return False
    with suppress(ImportError):  # this version of Ray has no tokens
        from ray._private.authentication import authentication_token_setup as tokens

        return tokens.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    return False


@contextmanager
def own_signals() -> Iterator[None]:
    """Restore the SIGTERM handler that Ray replaces."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


def ray_cluster(address: str = "") -> Cluster:
    """The alive hosts of a Ray cluster, with a CPU device for each of their CPUs."""
    join(address)
    return Cluster(tuple(_host(name, node) for name, node in _nodes().items()))


def _host(name: str, node: dict[str, Any]) -> Host:
    cpus, gpus = (int(node["Resources"].get(kind, 0)) for kind in ("CPU", "GPU"))
    devices = [Device("cpu", i) for i in range(cpus)] + [Device("gpu", i) for i in range(gpus)]
    return Host(name, cpus, tuple(devices))


def _nodes() -> dict[str, dict[str, Any]]:
    """Alive nodes by name: their address, with an index if several share one."""
    alive = sorted((n for n in ray.nodes() if n["Alive"]), key=lambda n: n["NodeID"])
    alive.sort(key=lambda n: "node:__internal_head__" not in n["Resources"])
    found: dict[str, dict[str, Any]] = {}
    for node in alive:
        name = node["NodeManagerAddress"]
        same = sum(known.partition("#")[0] == name for known in found)
        found[f"{name}#{same}" if same else name] = node
    return found


class RayHostActor:
    """Runs a host agent in a Ray actor, and buffers worker output for the driver."""

    def __init__(self, layout: ControlLayout, size: int) -> None:
        self._said: list[str] = []
        self._agent = HostAgent(layout, check_memory(size))

    def run(self, command: Command[T]) -> tuple[T, list[str]]:
        """Run a command; its result, and the worker output since the last call."""
        with listening(self._said.append):
            answer = command(self._agent)
        said = self._said[:]
        del self._said[: len(said)]
        return answer, said

    def open(self, listeners: int, workers: int) -> Listeners:
        """Open listeners on the address that Ray uses for this host."""
        return self._agent.open(listeners, workers, get_node_ip_address())


class RayHosts:
    """The host agents of a run on a Ray cluster."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._actors: list[Any] = []
        self._first = 0  # number of actors in the placement group
        self._layout: tuple[Any, ...] = ()
        self._group: Any = None
        self._gone: set[int] = set()
        self.grows, self.optional = True, set[int]()
        self._coming: tuple[Any, Any] | None = (
            None  # an actor that is starting, and its pending result
        )
        self._looked = 0.0

    def open(self, layout: ControlLayout, size: int, wanted: Sequence[Wanted]) -> list[Listeners]:
        """Reserve the resources of all hosts in a placement group, and start an agent on each."""
        self._layout = layout, size
        try:
            return self._opened(layout, size, wanted, _nodes())
        except BaseException:
            self.close()  # releases the reservation
            raise

    def _opened(
        self,
        layout: ControlLayout,
        size: int,
        wanted: Sequence[Wanted],
        nodes: dict[str, dict[str, Any]],
    ) -> list[Listeners]:
        check_room(wanted, nodes)
        bundles = [{"CPU": float(one.workers)} | _gpus(one, nodes) for one in wanted]
        where = [{"ray.io/node-id": nodes[one.host]["NodeID"]} for one in wanted]
        self._group = placement_group(bundles, strategy="PACK", bundle_label_selector=where)
        _await(self._group, wanted, nodes)
        make = ray.remote(RayHostActor)
        self._names, self._first = [one.host for one in wanted], len(wanted)
        self._actors = [
            make.options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0.0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, i),
            ).remote(layout, size)
            for i, bundle in enumerate(bundles)
        ]
        calls = [
            actor.open.remote(one.listeners, one.workers)
            for actor, one in zip(self._actors, wanted, strict=True)
        ]
        return [self._answer(i, call, START_TIMEOUT_S) for i, call in enumerate(calls)]

    def run(self, commands: Sequence[Command[T]]) -> list[T | None]:
        """Run a command on each agent concurrently."""
        calls = [
            None if i in self._gone else actor.run.remote(command)
            for i, (actor, command) in enumerate(zip(self._actors, commands, strict=True))
        ]
        return [call and self._received_if_present(i, call) for i, call in enumerate(calls)]

    def _received_if_present(self, index: int, call: Any) -> Any:
        """The result of an agent; None if it is lost and optional."""
        try:
            return self._received(index, call)
        except LostError:
            if index not in self.optional:
                raise
            return None

    def add(self, host: str) -> int | None:
        """Start an agent where Ray has a free CPU; its index once it is up, None until then."""
        if self._coming is None:
            if time.monotonic() - self._looked >= ADD_INTERVAL_S:
                self._looked = time.monotonic()
                if ray.available_resources().get("CPU", 0) >= 1:
                    make: Any = ray.remote(RayHostActor)
                    actor = make.options(num_cpus=1).remote(*self._layout)
                    self._coming = actor, actor.open.remote(0, 1)
            return None
        actor, answer = self._coming
        if not ray.wait([answer], timeout=0)[0]:
            return None
        self._coming = None
        try:
            listeners: Any = ray.get(answer)
        except RayError:
            return None
        self._actors.append(actor)
        self._names.append(listeners.group_addresses[0].rpartition(":")[0])
        return len(self._actors) - 1

    def drop(self, index: int) -> None:
        """Release the CPU of an added agent; the agents of the placement group keep theirs."""
        if index in self._gone or index < self._first:
            return
        with suppress(RayError):
            ray.get(self._actors[index].run.remote(HostAgent.close), timeout=RESPONSE_TIMEOUT_S)
        self._gone.add(index)
        ray.kill(self._actors[index])

    def one(self, index: int, command: Command[T]) -> T:
        """Run a command on one agent."""
        return self._received(index, self._actors[index].run.remote(command))

    def _received(self, index: int, call: Any) -> Any:
        answer, said = self._answer(index, call)
        for line in said:
            listener()(line)
        return answer

    def _answer(self, index: int, call: Any, timeout: float = RESPONSE_TIMEOUT_S) -> Any:
        try:
            return ray.get(call, timeout=timeout)
        except RayTaskError as error:
            cause = error.cause
            raise cause if isinstance(cause, ShoalError) else error from error
        except RayError as error:
            self._gone.add(index)
            silent = isinstance(error, GetTimeoutError)
            said = (
                str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            )
            what = f"has been silent for {timeout:g} s" if silent else f"is lost ({said})"
            raise LostError(
                f"host {self._names[index]} {what}",
                "Its machine or its raylet has stopped; `ray status` shows which nodes are left.",
            ) from error

    def end(self, grace: float) -> None:
        """End all workers of the agents that are alive."""
        commands: list[Command[None]] = [
            lambda agent: agent.control.halt(), lambda agent: agent.close(grace)
        ]  # fmt: skip
        for command in commands:
            there = [i for i in range(len(self._actors)) if i not in self._gone]
            for i, call in [(i, self._actors[i].run.remote(command)) for i in there]:
                with suppress(LostError, RayError):
                    self._answer(i, call)

    def close(self) -> None:
        """End all workers and release all resources."""
        self.end(STOP_GRACE_S)
        late = self._actors[self._first :] + ([self._coming[0]] if self._coming else [])
        for actor in late:  # the others end with the placement group
            ray.kill(actor)
        self._actors, self._coming = [], None
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None


def _await(group: Any, wanted: Sequence[Wanted], nodes: dict[str, dict[str, Any]]) -> None:
    """Wait until the placement group is ready; raise if one of its hosts is lost."""
    until = time.monotonic() + RESPONSE_TIMEOUT_S
    while not group.wait(1.0):
        alive = {node["NodeID"] for node in _nodes().values()}
        for one in wanted:
            if nodes[one.host]["NodeID"] not in alive:
                raise _left(one.host)
        if time.monotonic() > until:
            raise PlaceError(
                f"Ray found no room for {_words_of(wanted)} within {RESPONSE_TIMEOUT_S:g} s",
                "Other jobs use the cluster: wait, or use fewer replicas. `ray status` shows it.",
            )


def _left(host: str) -> LostError:
    return LostError(
        f"host {host} is not in the cluster any more",
        f"The cluster has: {', '.join(_nodes())}. Draw the plan again.",
    )


def check_room(wanted: Sequence[Wanted], nodes: dict[str, dict[str, Any]]) -> None:
    """Check that every host has a CPU for each of its workers."""
    for one in wanted:
        if one.host not in nodes:
            raise _left(one.host)
        cpus = int(nodes[one.host]["Resources"].get("CPU", 0))
        if one.workers > cpus:
            there = sum(int(node["Resources"].get("CPU", 0)) for node in nodes.values())
            total = sum(w.workers for w in wanted)
            raise PlaceError(
                f"the plan's {total} workers need a CPU each: {one.workers} on host {one.host}, "
                f"which has {cpus}; the cluster has {there}",
                "Use fewer replicas, or add hosts to the cluster.",
            )


def _gpus(one: Wanted, nodes: dict[str, dict[str, Any]]) -> dict[str, float]:
    """All of a host's GPUs, since the plan assigns them to workers."""
    count = float(nodes[one.host]["Resources"].get("GPU", 0)) if one.on_gpu else 0.0
    return {"GPU": count} if count else {}


def _words_of(wanted: Sequence[Wanted]) -> str:
    return ", ".join(f"{one.workers} CPUs on {one.host}" for one in wanted)


def check_fits(plan: Plan) -> Plan:
    """Check that the cluster has enough CPUs for a plan's workers."""
    apart = plan.over_processes
    programs = {f.name: write_program(apart, f.name) for f in plan.distribution.fragments}
    assignment = ProcessAssignment(apart, programs, Snapshot(0, {}))
    there = starting_workers(apart, assignment.worker_ids)
    hosts = Counter(assignment.worker_map.hosts[number] for number in there)
    check_room([Wanted(h, n, 0, False) for h, n in hosts.items()], _nodes())  # noqa: FBT003
    return plan


def run_on_ray(
    plan: Plan, programs: list[Program], start: Snapshot, policy: RestartPolicy
) -> ProcessRun:
    """Make a run of a plan on a Ray cluster."""
    join()
    return ProcessRun(plan, programs, start, RayHosts(), policy)
