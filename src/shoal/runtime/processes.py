"""The processes backend: workers in processes of their own, joined by shared memory."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import cloudpickle
import jax

from shoal import errors
from shoal.errors import PlaceError, RunError, ShoalError
from shoal.graph.words import size_text
from shoal.planning.plan import Plan
from shoal.planning.policy import lag_of
from shoal.runtime.blame import Good, bad_metrics, not_finite
from shoal.runtime.board import BANKS, FINAL, Board, OpenBoard, Post, Spec
from shoal.runtime.collect import Collector, Shown
from shoal.runtime.crew import raw, wrapped
from shoal.runtime.fire import Replica
from shoal.runtime.gates import make_cell, make_sheets
from shoal.runtime.limit import Limit
from shoal.runtime.logs import listener
from shoal.runtime.memory import Memory, Room, join_fences
from shoal.runtime.operations import Program
from shoal.runtime.orders import Group, Orders, Seat
from shoal.runtime.pieces import make_plain_crew
from shoal.runtime.rebuilt import Loop, environment
from shoal.runtime.shm import Rings

SPIN = 5e-5  # seconds that a worker watches before it sleeps, where each has a core
PATIENCE = 2.0  # seconds that workers have to end when told to


@dataclass
class Child:
    """One worker process."""

    seats: tuple[Seat, ...]
    process: subprocess.Popen[bytes]
    report: Any
    output: threading.Thread
    ooms: int
    told: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Who it is, as its output is marked."""
        return "+".join(f"{fragment}[{worker}]" for fragment, worker in self.seats)


class Processes:
    """A run of a plan over processes."""

    def __init__(self, plan: Plan, programs: list[Program], values: Mapping[str, Any]) -> None:
        self._plan = replace(plan, apart=True)
        self._programs = {p.fragment: p for p in programs}
        self._values, self._print = dict(values), str(plan)
        self._collector = Collector(self._plan, programs)
        room = Room()
        self._rings = Rings.plan(make_sheets(self._plan), room)
        self._layout = Board.plan(
            tuple((f, w) for f in self._programs for w in range(self._plan.workers(f))),
            {name: make_cell(plan.graph.values[name]) for name in plan.graph.inputs},
            plan.graph.envs,
            tuple(self._posts()),
            room,
        )
        self._memory = Memory.make(check_memory(room.size))
        self._board = OpenBoard(self._layout, self._memory)
        self._shows = {r: self._board.show(r) for r in self._layout.posts}
        self._bell = self._board.driver_bell
        self._children: list[Child] = []
        self._limit: Limit | None = None
        self._failure: ShoalError | None = None

    def _posts(self) -> Iterator[Post]:
        values = self._plan.graph.values
        for fragment, program in self._programs.items():
            ends = self._plan.ends(fragment)
            rows = self._plan.batch(fragment) // ends
            shown = tuple(
                Spec(name, make_cell(values[v]).rows(rows), values[v].dtype)
                for name, v in program.metrics
            )
            carried = frozenset(before for before, _ in program.carry)
            for end in range(ends):
                yield Post((fragment, end), ends, carried, shown)

    def start(self, limit: Limit) -> None:
        """Start all workers."""
        join_fences()
        self._limit = limit
        for name, x in self._board.read(0).items():
            x[...] = raw(self._values[name])
        self._board.begin(limit.ticks)
        orders = Hiring(self._plan, self._programs, self._print).orders(
            self._rings, self._layout, self._memory.size
        )
        for one in orders:
            self._children.append(spawn(one, self._memory, self._environment(one)))

    def _environment(self, orders: Orders) -> dict[str, str]:
        places = [self._plan.places[f][w % len(self._plan.places[f])] for f, w in orders.seats]
        threads = str(len(orders.cores) or os.cpu_count() or 1)
        found = dict.fromkeys(
            ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), threads
        )
        if any(f not in orders.crews for f, _ in orders.seats):
            kinds = [p.device.kind for p in places]
            found |= environment({kind: kinds.count(kind) for kind in kinds})
        return found

    def alive(self, seconds: float) -> bool:
        """Wait up to `seconds`; whether there is more to come. Raises a worker's failure."""
        assert self._limit is not None
        if self._limit.is_stopping:
            self._board.stop()
        if not self._news():
            self._bell.wait(self._news, seconds)
        self._look_after()
        if self._failure is not None:
            self.close()
            raise self._failure
        return any(c.process.poll() is None for c in self._children)

    def _news(self) -> bool:
        return any(s.is_new() for s in self._shows.values()) or any(
            c.process.poll() is not None and not c.told for c in self._children
        )

    def _look_after(self) -> None:
        """Hear who has ended; when all that count ticks have, the free ones are stopped."""
        for child in self._children:
            if child.process.poll() is not None and not child.told:
                child.told = self._heard(child)
                if child.told["failed"] and self._failure is None:
                    self._failure = told_error(child)
        counted = [c for c in self._children if any(f not in self._plan.free for f, _ in c.seats)]
        if self._failure is not None or all(c.told for c in counted):
            self._board.halt()

    def _heard(self, child: Child) -> dict[str, Any]:
        child.output.join(PATIENCE)
        line = child.report.readline()
        child.report.close()
        return {"failed": child.process.returncode != 0, **(json.loads(line) if line else {})}

    def ready(self) -> Iterator[tuple[int, Shown]]:
        """Metrics of whole ticks, in order; raises at the first that isn't finite."""
        for replica, show in self._shows.items():
            for tick, metrics, lags in show.take():
                self._collector.show(tick, replica, metrics, lags)
        for tick, shown in self._collector.ready():
            if bad := bad_metrics(shown):
                raise not_finite(self._plan, self._good(tick), tick, bad)
            yield tick, shown

    def final(self) -> tuple[dict[str, Any], int]:
        """The carried state, and the ticks that made it: the last that all ends kept."""
        self.close()
        ended = self._board.ticks(FINAL)
        counted = {r: t for r, t in ended.items() if r[0] not in self._plan.free}
        if len(set(counted.values())) == 1 and min(counted.values()) >= 0:
            banks = {r: FINAL if t >= 0 else self._newest(r) for r, t in ended.items()}
            return self._named(banks), next(iter(counted.values()))
        good = self._good(min((t for t in counted.values() if t >= 0), default=2**62))
        return dict(good.values), good.tick

    def _newest(self, replica: Replica) -> int:
        return max(range(BANKS), key=lambda bank: self._board.ticks(bank)[replica])

    def _good(self, tick: int) -> Good:
        """The newest state that all ends kept at or before `tick`."""
        kept = [self._board.ticks(bank) for bank in range(BANKS)]
        counted = [r for r in self._layout.posts if r[0] not in self._plan.free]
        ticks = [{k[r] for r in counted} for k in kept]
        usable = {t.copy().pop(): b for b, t in enumerate(ticks) if len(t) == 1 and max(t) >= 0}
        usable = {t: bank for t, bank in usable.items() if t <= tick}
        if not usable:
            return Good(0, self._values)
        best = max(usable)
        banks = {r: usable[best] if r in counted else self._newest(r) for r in self._layout.posts}
        return Good(best, self._named(banks))

    def _named(self, banks: Mapping[Replica, int]) -> dict[str, Any]:
        cells = self._layout.cells
        found = self._board.gather(banks)
        return {
            name: wrapped(jax.numpy.asarray(x)) if cells[name].is_key else jax.numpy.asarray(x)
            for name, x in found.items()
        }

    def close(self) -> None:
        """End all workers, gently and then not."""
        self._board.halt()
        until = time.monotonic() + PATIENCE
        for child in self._children:
            try:
                child.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
            child.output.join(PATIENCE)


class Hiring:
    """Who gets which orders."""

    def __init__(self, plan: Plan, programs: Mapping[str, Program], drawn: str) -> None:
        self._plan, self._programs, self._print = plan, programs, drawn

    def orders(self, rings: Rings, board: Board, size: int) -> list[Orders]:
        """One for each process."""
        plan, graph = self._plan, self._plan.graph
        origin = graph.origin
        loop = cloudpickle.dumps(
            Loop(origin.algorithm, origin.env, graph.envs, plan.distribution, plan.cluster)
        )
        crews = {f: make_plain_crew(plan, p) for f, p in self._programs.items() if not p.compiles}
        served = {f: plan.distribution.clients(f) for f in self._programs}
        common = {
            "size": size, "rings": rings, "board": board,
            "ends": {f: self._teams(f, board) for f in self._programs},
            "primed": tuple(
                (c.writer, c.name, lag_of(c.flow), c.values) for c in plan.channels if lag_of(c.flow)
            ),
            "serve": {f: found[1] for f, found in served.items() if found},
            "print": self._print, "path": tuple(sys.path),
        }  # fmt: skip
        seats, groups = self._seats(), self._groups()
        cores = share_cores(seats, plan)
        roomy = len(os.sched_getaffinity(0)) >= len(seats)
        return [
            Orders(
                seats=held,
                crews={f: crews[f] for f, _ in held if f in crews},
                loop=loop if any(f not in crews for f, _ in held) else b"",
                cores=cores[held],
                spin=SPIN if roomy else 0.0,
                group=self._group(held, groups),
                **common,
            )
            for held in seats
        ]

    def _seats(self) -> list[tuple[Seat, ...]]:
        """The seats of each process: one, and those that are to be beside it."""
        every = [(f, w) for f in self._programs for w in range(self._plan.workers(f))]
        beside = {f.name: f.beside for f in self._plan.distribution.fragments if f.beside}
        found: dict[Seat, list[Seat]] = {seat: [seat] for seat in every if seat[0] not in beside}
        for fragment, worker in every:
            if fragment in beside:
                hosts = [seat for seat in found if seat[0] == beside[fragment]]
                found[hosts[worker % len(hosts)]].append((fragment, worker))
        return [tuple(held) for held in found.values()]

    def _teams(self, fragment: str, board: Board) -> tuple[int, ...]:
        seats = [
            (fragment, w) for w in range(self._plan.workers(fragment))
            for _ in self._plan.ends_of(fragment, w)
        ]  # fmt: skip
        return tuple(board.teams.index(seat) for seat in seats)

    def _groups(self) -> dict[str, str]:
        """An address for each fragment whose replicas run as one program."""
        together = [f for f in self._programs if self._plan.one_program(f)]
        return {f: f"127.0.0.1:{free_port()}" for f in together}

    def _group(self, held: tuple[Seat, ...], groups: Mapping[str, str]) -> Group | None:
        for fragment, worker in held:
            if fragment in groups:
                return Group(groups[fragment], self._plan.workers(fragment), worker)
        return None


def spawn(orders: Orders, memory: Memory, env: Mapping[str, str]) -> Child:
    """Start a process with its orders."""
    told, tell = os.pipe()
    heard, hear = os.pipe()
    fds = (memory.fd, told, hear)
    ooms = oom_kills()
    process = subprocess.Popen(
        [sys.executable, "-m", "shoal.runtime.child", *map(str, fds)],
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **env},
        start_new_session=True,
    )
    os.close(told)
    os.close(hear)
    child = Child(orders.seats, process, os.fdopen(heard, "r"), threading.Thread(), ooms)
    child.output = threading.Thread(target=_relay, args=(child, listener()), daemon=True)
    child.output.start()
    # Sent from a thread: a child that dies early must not leave us writing to nobody.
    threading.Thread(target=_send, args=(tell, orders), daemon=True).start()
    return child


def _send(fd: int, orders: Orders) -> None:
    try:
        with os.fdopen(fd, "wb") as pipe:
            pickle.dump(list(orders.path), pipe)
            pickle.dump(orders, pipe)
    except BrokenPipeError:
        pass  # how the child died is told by its end


def _relay(child: Child, say: Any) -> None:
    assert child.process.stdout is not None
    for line in child.process.stdout:
        if not line.startswith(b"[Gloo] Rank"):  # it says how many it sees, each time
            say(f"{child.name} | {line.decode(errors='replace').rstrip()}")


def told_error(child: Child) -> ShoalError:
    """A worker's failure as an error of the driver's."""
    told = child.told
    if "kind" not in told:
        return died(child)
    if told["is_shoal"]:
        kind = getattr(errors, told["kind"], RunError)
        error = ShoalError.__new__(kind)
        ShoalError.__init__(error, told["what"], told["fix"], told["where"])
    else:
        (fragment, end), tick = told["replica"], told["tick"]
        error = RunError(
            f"{fragment}[{end}] failed at tick {tick}: {told['kind']}: {told['what']}",
            'Run with --debug for the whole traceback, or with backend="inline" to step through it.',
            told["where"],
        )
    error.add_note(f"In worker {child.name}:\n{told['trace']}")
    return error


def died(child: Child) -> RunError:
    """The error for a worker that ended without a word."""
    code = child.process.returncode
    if code >= 0:
        return RunError(
            f"worker {child.name} left with exit code {code}",
            "Its own output, marked with its name, says why.",
        )
    name = signal.Signals(-code).name
    if code == -signal.SIGKILL and oom_kills() > child.ooms:
        return RunError(
            f"worker {child.name} was killed by the system ({name}): memory ran out",
            "Use fewer environments or workers, or a machine with more memory.",
        )
    return RunError(
        f"worker {child.name} was killed by signal {-code} ({name})",
        "Memory had not run out. Somebody else sent it, or a library crashed: its own output, "
        "marked with its name, may say more.",
    )


def oom_kills() -> int:
    """How often the kernel has killed a process for want of memory."""
    for file in ("/sys/fs/cgroup/memory.events", "/proc/vmstat"):
        try:
            lines = Path(file).read_text().splitlines()
        except OSError:
            continue
        found = [line.split()[1] for line in lines if line.startswith("oom_kill ")]
        if found:
            return int(found[0])
    return 0


def check_memory(size: int) -> int:
    """`size` if so much shared memory can be had."""
    left = free_memory()
    if size > left:
        raise PlaceError(
            f"the plan's channels need {size_text(size)} of shared memory, "
            f"and {size_text(left)} are free",
            "Use fewer environments, shorter rollouts or fewer workers.",
        )
    return size


def free_memory() -> int:
    """Bytes of memory that are free, also within this process's control group."""
    left = 2**62
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable"):
                left = int(line.split()[1]) * 1024
        most = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        left = min(left, int(most) - used) if most != "max" else left
    except (OSError, ValueError):
        pass
    return left


def free_port() -> int:
    """A port on this host that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def share_cores(
    seats: list[tuple[Seat, ...]], plan: Plan
) -> dict[tuple[Seat, ...], tuple[int, ...]]:
    """The cores of each process: one for each of many alike, what is left for the others.

    Where there are fewer cores than processes, those that are alone may use all.
    """
    cores = sorted(os.sched_getaffinity(0))
    alike = [held for held in seats if plan.workers(held[0][0]) > 1]
    found = {held: (cores[i % len(cores)],) for i, held in enumerate(alike)}
    rest = cores[len(alike) :] if len(cores) > len(alike) else cores
    return {held: found.get(held, tuple(rest)) for held in seats}
