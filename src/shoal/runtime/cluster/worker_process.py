"""A worker process: runs its endpoints. It loads JAX only if some of them are compiled."""

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

from shoal.errors import ShoalError, user_place
from shoal.planning.plan import Replica, WorkerId
from shoal.runtime.channels.channel import Channel, Silent, Waker
from shoal.runtime.channels.shared_memory import Memory, join_fences
from shoal.runtime.channels.traffic import Sent
from shoal.runtime.cluster.control_block import (
    BANKS,
    FINAL,
    MANY,
    SNAP,
    START,
    ControlBlock,
    SharedLimit,
    watch_parent,
)
from shoal.runtime.cluster.user_modules import Modules
from shoal.runtime.cluster.worker_config import WorkerConfig
from shoal.runtime.execution.fragment import FragmentSpec, HostExecutor
from shoal.runtime.execution.replica_runner import KEEP_EVERY, Failure, Lags, Metrics, ReplicaRunner
from shoal.runtime.execution.scheduler import Scheduler, Stopped
from shoal.runtime.execution.snapshot import Snapshot
from shoal.runtime.net.connections import Connections
from shoal.runtime.net.loop import Wakes
from shoal.runtime.net.tcp_channel import TcpChannel, join_channels
from shoal.runtime.net.wiring import RemoteChannels

_DIE_WITH_PARENT = 1


def main() -> None:
    """Read the configuration, run, and report on the pipe how it ended."""
    driver, memory_fd, orders_fd, report_fd, *listener = map(int, sys.argv[1:])
    check_parent = _live_with(driver)
    with os.fdopen(orders_fd, "rb") as pipe:
        first = json.loads(pipe.readline())
        sys.path[:] = first["path"]
        sys.meta_path.insert(0, Modules(first["modules"]))
        config = pickle.load(pipe)  # from the process that started this one, and no other
    report = os.fdopen(report_fd, "w", buffering=1)
    os.register_at_fork(after_in_child=partial(_after_fork, report_fd))
    if first["cores"]:
        os.sched_setaffinity(0, first["cores"])
    join_fences()
    memory = Memory(memory_fd, first["size"])
    board = ControlBlock(config.board, memory, check_parent)
    failures: list[Failure] = []
    setup = WorkerSetup(config, memory, board, first["again"])
    try:
        if config.lines is not None:
            door = socket.socket(fileno=listener[0]) if listener else None
            setup.join(_anew(config.lines, first["again"]), door)
        teams = setup.teams()
        threads = [threading.Thread(target=_turn, args=(board, t, failures)) for t in teams[1:]]
        for thread in threads:
            thread.start()
        _turn(board, teams[0], failures)
        for thread in threads:
            thread.join()
    except Stopped:
        pass
    except BaseException as error:
        failures.append(Failure(config.seats[0], 0, error))
    report.write(json.dumps(_report_of(failures[0]) if failures else {"sent": setup.sent}) + "\n")
    report.flush()
    if not failures:
        setup.close()
    _exit(1 if failures else 0)


def _exit(code: int) -> NoReturn:
    """Close the environments that this process has opened, and end it."""
    if host := sys.modules.get("shoal.envs.host"):
        host.close_all()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # nothing that a library left running can hold us up


def _anew(lines: RemoteChannels, again: dict[str, Any] | None) -> RemoteChannels:
    """The channels between hosts, for one that may take the place of another."""
    if again is None:
        return lines
    return lines.for_incarnation(
        again["life"], {number: (at[0], at[1]) for number, at in again["party"]}
    )


def _live_with(driver: int) -> Callable[[], None]:
    """Let the driver alone decide when to stop; a check that it is alive."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)  # schedulers send it to all processes of a job
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    check_parent = watch_parent(driver)
    check_parent()  # it may have died while this process was loading
    return check_parent


def _after_fork(report_fd: int) -> None:
    """Make a process that user code forks end with this one, and take signals as others do."""
    os.close(report_fd)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)


def _turn(
    board: ControlBlock, seated: tuple[int, Scheduler, list[ReplicaRunner]], failures: list[Failure]
) -> None:
    """Run one scheduler; at the end write what its endpoints carry, if they ended with a tick."""
    number, team, workers = seated
    try:
        team.turn(SharedLimit(board, number))  # type: ignore[arg-type]
    except Stopped:
        pass
    except Failure as failure:
        failures.append(failure)
    except BaseException as error:  # a thread must not end without a report
        failures.append(Failure(workers[0].replica, workers[0].tick, error))
    for worker in workers:
        if not worker.broken:
            leave(board, FINAL, worker)
    board.driver_bell.notify()


def _report_of(failure: Failure) -> dict[str, Any]:
    error = failure.error
    mine = isinstance(error, ShoalError)
    return {
        "replica": failure.replica,
        "tick": failure.tick,
        "kind": type(error).__name__,
        "is_shoal": mine,
        "what": error.what if mine else str(error).strip().split("\n")[0],
        "fix": error.fix if mine else "",
        "where": error.where if mine else user_place(error),
        "trace": "".join(traceback.format_exception(error)),
    }


class _ProcessReporter:
    """Leaves metrics and kept values where the driver finds them."""

    def __init__(self, board: ControlBlock, ends: Mapping[str, tuple[int, ...]]) -> None:
        self._board, self._bell, self._ends = board, board.driver_bell, ends
        self._shows: dict[Replica, Any] = {}

    def show(self, tick: int, replica: Replica, metrics: Metrics, lags: Lags) -> None:
        """Hand over a tick's metrics; waits if the driver is far behind."""
        show = self._shows.setdefault(replica, None) or self._board.show(replica)
        self._shows[replica] = show
        while show.is_full():
            self._bell.notify()
            threading.Event().wait(1e-3)
            self._board.check()
        show.put(tick, metrics, lags)
        self._board.did_turn(self._ends[replica[0]][replica[1]])
        # Who sleeps pays for a fence: either it sees what was put, or here is seen what it took.
        if show.waiting == 1 or show.waiting >= MANY:
            self._bell.notify()

    def enter_stage(self, replica: Replica, stage: str, tick: int) -> None:
        """Note that a replica begins to run a stage in Python."""
        self._board.enter_stage(self._ends[replica[0]][replica[1]], stage, tick)

    def leave_stage(self, replica: Replica) -> None:
        """Note that the stage has returned or failed."""
        self._board.leave_stage(self._ends[replica[0]][replica[1]])

    def keep(self, worker: ReplicaRunner) -> None:
        """Write what an end carries before a tick."""
        leave(self._board, worker.tick // KEEP_EVERY % BANKS, worker)

    def snap(self, worker: ReplicaRunner) -> None:
        """Write an end's part of the snapshot that was asked for."""
        leave(self._board, SNAP, worker)
        self._bell.notify()


def leave(board: ControlBlock, bank: int, worker: ReplicaRunner) -> None:
    """Write what an end carries to a bank."""
    values = {name: _raw(x) for name, x in (worker.carried | worker.past).items()}
    if worker.in_flight is not None:
        board.write_flight(bank, worker.in_flight)
    board.write(bank, worker.replica, worker.tick, values)


def _raw(x: Any) -> Any:
    """An array as it lies on the board: keys as their data."""
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
        board: ControlBlock,
        again: dict[str, Any] | None,
    ) -> None:
        self._config, self._board = config, board
        self._snapped = again["snapped"] if again else 0
        self._at = {(f, end): tick for f, end, tick in again["ticks"]} if again else {}
        self._channels: dict[str, Any] = dict(config.rings.open(memory))
        self._reporter = _ProcessReporter(board, config.ends)
        held = board.read(START)
        past = {name: held[name] for name in config.past}
        self._start = Snapshot(config.first, held, past)
        self._links: Connections | None = None
        self.close: Callable[[], None] = lambda: None  # once there are connections, ends them
        self._hear()

    def _hear(self) -> None:
        """Let every channel wake the schedulers at its other side."""
        bells = [self._board.bell(n) for n in range(len(self._config.board.teams))]
        of = {f: [bells[n] for n in teams] for f, teams in self._config.ends.items()}
        for channel in self._channels.values():
            gate = channel.state.sheet.gate
            channel.state.subscribe(of[gate.reader], of[gate.writer])

    def join(self, lines: RemoteChannels, listener: socket.socket | None) -> None:
        """Connect with workers of other hosts, and open the channels to them."""
        config = self._config
        own = {config.board.teams.index(seat) for seat in config.seats}
        bells = [
            self._board.bell(n) if n in own else Silent() for n in range(len(config.board.teams))
        ]
        of = {f: [bells[n] for n in teams] for f, teams in config.ends.items()}
        teams = {at: config.ends[f][e] for f, ats in lines.ends.items() for e, at in enumerate(ats)}

        def lose(worker: int, turns: int) -> None:
            self._board.did_lose(teams[worker], turns)

        check = self._board.check
        links, channels = join_channels(lines, config.number, listener, check, lose, of)
        self._channels |= channels
        self._board.look_out(links.check)
        self._links, self.close = links, links.close

    @property
    def sent(self) -> dict[str, Sent]:
        """What this worker has sent to others' hosts, by channel."""
        far = {n: c for n, c in self._channels.items() if isinstance(c, TcpChannel)}
        return {name: channel.sent for name, channel in far.items() if channel.sent.messages}

    def teams(self) -> list[tuple[int, Scheduler, list[ReplicaRunner]]]:
        """The number, scheduler and endpoints of each worker."""
        fragments = self._config.fragments
        if not all(isinstance(fragment, FragmentSpec) for fragment in fragments.values()):
            self._start_jax()
        return [
            self._team(seat, self._executor(seat), self._channels) for seat in self._config.seats
        ]

    def _executor(self, seat: WorkerId) -> Any:
        """What runs the endpoints of a worker."""
        fragment = self._config.fragments[seat[0]]
        if isinstance(fragment, FragmentSpec):
            return HostExecutor(fragment)
        from shoal.runtime.execution.compiled_executor import CompiledExecutor
        from shoal.runtime.execution.exporting import ExportedSegments

        return CompiledExecutor(fragment.spec, ExportedSegments(fragment, seat[1]))

    def _start_jax(self) -> None:
        """Set JAX up for one CPU device, and join those that run one program together."""
        import jax

        from shoal.runtime.cluster.machine import check_port

        jax.config.update("jax_num_cpu_devices", 1)
        # What one worker compiles, however quickly, others load that wait for it.
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

    def _team(
        self, seat: WorkerId, executor: Any, channels: Mapping[str, Channel]
    ) -> tuple[int, Scheduler, list[ReplicaRunner]]:
        fragment, _ = seat
        number = self._config.board.teams.index(seat)
        ends = [e for e, team in enumerate(self._config.ends[fragment]) if team == number]
        workers = [
            ReplicaRunner(executor, end, self._start, channels, self._reporter) for end in ends
        ]
        for line in self._config.lagged:
            if line.writer == fragment:
                for worker in workers:
                    worker.prime(line)
        for worker in workers:
            if worker.replica in self._at:
                worker.start_at(self._at[worker.replica], self._snapped)
        bell = self._bell(number)
        serve = self._config.serve.get(fragment)
        many = executor.run_many if serve else None
        team = Scheduler(workers, channels, bell, serve, many)
        return number, team.reports_to(partial(self._report, number)), workers

    def _bell(self, number: int) -> Waker:
        """The waker of a scheduler; with connections to read, it reads them while it waits."""
        config, board = self._config, self._board
        if self._links is None:
            return board.bell(number, config.spin)
        alone = not config.rings.rings and len(config.seats) == 1
        return self._links.waker(board.bell(number), Wakes(board.check, alone), config.spin)

    def _report(self, number: int, text: str) -> None:
        """Report to the driver what a scheduler waits for, and if a connection is the cause."""
        broken = self._links.broken if self._links is not None and text else ""
        self._board.note(number, f"{broken}; {text}" if broken else text)


if __name__ == "__main__":
    main()
