"""The main program of a worker process. It loads JAX only if a fragment is compiled."""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

from shoal.planning.plan import Replica, WorkerId
from shoal.runtime.channels.channel import Channel, Silent, Waker
from shoal.runtime.channels.shared_memory import Memory, join_fences
from shoal.runtime.cluster.control_block import (
    MANY,
    ControlBlock,
    MetricsBuffer,
    SharedLimit,
    watch_parent,
)
from shoal.runtime.cluster.control_layout import FINAL, KEPT_SLOTS, SNAP, START, ControlLayout
from shoal.runtime.cluster.user_modules import Modules
from shoal.runtime.cluster.worker_config import Restart, WorkerConfig
from shoal.runtime.execution.fragment import FragmentSpec, HostExecutor
from shoal.runtime.execution.replica_runner import KEEP_EVERY, Failure, Lags, Metrics, ReplicaRunner
from shoal.runtime.execution.scheduler import Scheduler, Stopped
from shoal.runtime.execution.snapshot import Snapshot
from shoal.runtime.net.connections import Connections
from shoal.runtime.net.tcp_channel import TcpChannel, join_channels
from shoal.runtime.net.wiring import RemoteChannels

_DIE_WITH_PARENT = 1
SPIN_S = 5e-5  # seconds that a worker spins before it sleeps


def main() -> None:
    """Read the configuration, run the schedulers, and report the exit on the pipe."""
    driver, memory_fd, config_fd, report_fd, *listener = map(int, sys.argv[1:])
    check_parent = _live_with(driver)
    with os.fdopen(config_fd, "rb") as pipe:
        first = json.loads(pipe.readline())
        sys.path[:] = first["path"]
        sys.meta_path.insert(0, Modules(first["modules"]))
        # Only the process that started this one can write to the pipe.
        config, restart = pickle.load(pipe), pickle.load(pipe)
    report = os.fdopen(report_fd, "w", buffering=1)
    os.register_at_fork(after_in_child=partial(_after_fork, report_fd))
    if first["cores"]:
        os.sched_setaffinity(0, first["cores"])
    join_fences()
    memory = Memory(memory_fd, first["size"])
    control = ControlBlock(config.layout, memory, check_parent)
    failures: list[Failure] = []
    setup = WorkerSetup(config, memory, control, restart)
    try:
        if config.lines is not None:
            listener_socket = socket.socket(fileno=listener[0]) if listener else None
            setup.join(config.lines, listener_socket)
        schedulers = setup.schedulers()
        threads = [
            threading.Thread(target=_turn, args=(control, t, failures)) for t in schedulers[1:]
        ]
        for thread in threads:
            thread.start()
        _turn(control, schedulers[0], failures)
        for thread in threads:
            thread.join()
    except Stopped:
        pass
    except BaseException as error:
        failures.append(Failure(config.worker_ids[0], 0, error))
    report.write(json.dumps(_report_of(failures[0]) if failures else {"sent": setup.sent}) + "\n")
    report.flush()
    if not failures:
        setup.close()
    _exit(1 if failures else 0)


def _exit(code: int) -> NoReturn:
    """Close the environments of this process, and exit."""
    if host := sys.modules.get("shoal.envs.host"):
        host.close_all()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads that a library left running can't delay the exit


def _live_with(driver: int) -> Callable[[], None]:
    """Ignore SIGINT and SIGTERM, and die with the driver; a check that the driver is alive."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)  # schedulers send it to all processes of a job
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    check_parent = watch_parent(driver)
    check_parent()  # the driver may have died while this process was loading
    return check_parent


def _after_fork(report_fd: int) -> None:
    """Make a process that user code forks die with this one and handle signals by default."""
    os.close(report_fd)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)


def _turn(
    control: ControlBlock,
    own: tuple[int, Scheduler, list[ReplicaRunner]],
    failures: list[Failure],
) -> None:
    """Run one scheduler; at the end write its endpoints' carried state, if it is complete."""
    number, scheduler, workers = own
    try:
        scheduler.run(SharedLimit(control, number))  # type: ignore[arg-type]
    except Stopped:
        pass
    except Failure as failure:
        failures.append(failure)
    except BaseException as error:  # a thread must not end without a report
        failures.append(Failure(workers[0].replica, workers[0].tick, error))
    for worker in workers:
        if not worker.broken:
            leave(control, FINAL, worker)
    control.driver_waker.notify()


def _report_of(failure: Failure) -> dict[str, str]:
    error = failure.explained
    return {
        "kind": type(error).__name__,
        "what": error.what,
        "fix": error.fix,
        "where": error.where,
        "trace": "".join(traceback.format_exception(failure.error)),
    }


class _ProcessReporter:
    """Writes metrics and kept values to the control block."""

    def __init__(self, control: ControlBlock, layout: ControlLayout) -> None:
        self._control, self._waker = control, control.driver_waker
        self._schedulers = {r: endpoint.scheduler for r, endpoint in layout.endpoints.items()}
        self._shows: dict[Replica, MetricsBuffer] = {}

    def show(self, tick: int, replica: Replica, metrics: Metrics, lags: Lags) -> None:
        """Write a tick's metrics; waits if the driver is far behind."""
        if replica not in self._shows:
            self._shows[replica] = self._control.show(replica)
        show = self._shows[replica]
        while show.is_full():
            self._waker.notify()
            threading.Event().wait(1e-3)
            self._control.check()
        show.put(tick, metrics, lags)
        self._control.count_tick(self._schedulers[replica])
        # The sleeper pays for a fence: either it sees the put, or this process sees its take.
        if show.waiting == 1 or show.waiting >= MANY:
            self._waker.notify()

    def enter_stage(self, replica: Replica, stage: str, tick: int) -> None:
        """Record that a replica starts a stage in Python."""
        self._control.enter_stage(self._schedulers[replica], stage, tick)

    def leave_stage(self, replica: Replica) -> None:
        """Record that the stage has returned or failed."""
        self._control.leave_stage(self._schedulers[replica])

    def keep(self, worker: ReplicaRunner) -> None:
        """Write an endpoint's carried state before a tick."""
        leave(self._control, worker.tick // KEEP_EVERY % KEPT_SLOTS, worker)

    def snap(self, worker: ReplicaRunner) -> None:
        """Write an endpoint's part of the requested snapshot."""
        leave(self._control, SNAP, worker)
        self._waker.notify()


def leave(control: ControlBlock, slot: int, worker: ReplicaRunner) -> None:
    """Write an endpoint's carried state to a slot."""
    values = {name: _raw(x) for name, x in (worker.carried | worker.past).items()}
    control.write(slot, worker.replica, worker.tick, values)


def _raw(x: Any) -> Any:
    """An array as it is stored in the control block: PRNG keys as their data."""
    if "jax" in sys.modules:
        from shoal.runtime.execution.compiled_executor import raw

        return raw(x)
    return x


class WorkerSetup:
    """Sets up the schedulers of this process."""

    def __init__(
        self,
        config: WorkerConfig,
        memory: Memory,
        control: ControlBlock,
        restart: Restart | None,
    ) -> None:
        self._config, self._control, self._restart = config, control, restart
        self._channels: dict[str, Any] = dict(config.channels.open(memory))
        self._reporter = _ProcessReporter(control, config.layout)
        held = control.read(START)
        past = {name: held[name] for name in config.past}
        self._start = Snapshot(config.first, held, past)
        self._links: Connections | None = None
        self.close: Callable[[], None] = lambda: None  # closes the connections, once there are any
        self._subscribe()

    def _subscribe(self) -> None:
        """Subscribe the schedulers to the channels that they read and write."""
        wakers = [self._control.waker(n) for n in range(len(self._config.layout.schedulers))]
        of = self._config.layout.by_end(wakers)
        for channel in self._channels.values():
            gate = channel.state.spec.gate
            channel.state.subscribe(of[gate.reader], of[gate.writer])

    def join(self, lines: RemoteChannels, listener: socket.socket | None) -> None:
        """Connect to workers of other hosts, and open the channels to them."""
        config, layout = self._config, self._config.layout
        if (restart := self._restart) is not None:
            lines = lines.for_incarnation(restart.incarnation, restart.addresses)
        wakers = [
            self._control.waker(number) if worker_id in config.worker_ids else Silent()
            for number, worker_id in enumerate(layout.schedulers)
        ]
        check = self._control.check
        links, channels = join_channels(
            lines, config.number, listener, check, layout.by_end(wakers)
        )
        self._channels |= channels
        self._control.add_check(links.check)
        self._links, self.close = links, links.close

    @property
    def sent(self) -> dict[str, int]:
        """The bytes that this worker has sent to other hosts, by channel."""
        far = {n: c for n, c in self._channels.items() if isinstance(c, TcpChannel)}
        return {name: channel.sent for name, channel in far.items() if channel.sent}

    def schedulers(self) -> list[tuple[int, Scheduler, list[ReplicaRunner]]]:
        """The number, scheduler and endpoints of each worker."""
        fragments = self._config.fragments
        if not all(isinstance(fragment, FragmentSpec) for fragment in fragments.values()):
            self._start_jax()
        return [
            self._scheduler(worker_id, self._executor(worker_id), self._channels)
            for worker_id in self._config.worker_ids
        ]

    def _executor(self, worker_id: WorkerId) -> Any:
        """The executor of a worker's fragment."""
        fragment = self._config.fragments[worker_id[0]]
        if isinstance(fragment, FragmentSpec):
            return HostExecutor(fragment)
        from shoal.runtime.execution.compiled_executor import CompiledExecutor
        from shoal.runtime.execution.exporting import ExportedSegments

        return CompiledExecutor(fragment.spec, ExportedSegments(fragment, worker_id[1]))

    def _start_jax(self) -> None:
        """Configure JAX for one CPU device, and join the data-parallel group, if there is one."""
        import jax

        from shoal.runtime.cluster.machine import check_port

        jax.config.update("jax_num_cpu_devices", 1)
        # Cache every compilation: other workers wait for it and load it.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        group = self._config.group
        if group is None:
            return
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        if group.index == 0:
            check_port(group.address)
        jax.distributed.initialize(
            group.address, group.processes, group.index, coordinator_bind_address=group.address
        )

    def _scheduler(
        self, worker_id: WorkerId, executor: Any, channels: Mapping[str, Channel]
    ) -> tuple[int, Scheduler, list[ReplicaRunner]]:
        fragment, _ = worker_id
        number = self._config.layout.schedulers.index(worker_id)
        workers = [
            ReplicaRunner(executor, end, self._start, channels, self._reporter)
            for _, end in self._config.layout.replicas([number])
        ]
        for line in self._config.lagged:
            if line.writer == fragment:
                for worker in workers:
                    worker.prime(line)
        for worker in workers:
            if self._restart is not None and worker.replica in self._restart.ticks:
                worker.start_at(self._restart.ticks[worker.replica], self._restart.snapped)
        waker = self._waker(number)
        serve = executor.spec.serve
        many = executor.run_many if serve else None
        scheduler = Scheduler(workers, channels, waker, serve, many)
        report, spend = partial(self._control.note, number), partial(self._control.spend, number)
        fragments = list(dict.fromkeys(f for f, _ in self._config.layout.schedulers))
        if self._config.layout.spans >= 0:
            scheduler.records_in(self._control.spans(number).begin(), fragments, copies=True)
        return number, scheduler.reports_to(report, spend), workers

    def _waker(self, number: int) -> Waker:
        """The waker of a scheduler; with connections to read, it reads them while it waits."""
        config, control = self._config, self._control
        if self._links is None:
            return control.waker(number, SPIN_S)
        alone = not config.channels.layouts and len(config.worker_ids) == 1
        return self._links.waker(control.waker(number), alone=alone, spin=SPIN_S)


if __name__ == "__main__":
    main()
