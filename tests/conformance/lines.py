"""A channel under test: its messages, and its endpoints in threads or processes.

Imports no JAX, so that ends in processes of their own start at once.
"""

import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import reduction

import numpy as np

from shoal.planning.channel_specs import MOST_IN_FLIGHT, ArraySpec, ChannelSpec, Gate, pieces
from shoal.planning.policy import Flow, Queue, lag_of, takes_some
from shoal.runtime.channels.shared_memory import LINE, Allocator, FutexWaker, Memory, join_fences
from shoal.runtime.channels.shm import ChannelLayouts
from shoal.runtime.execution.local_run import ThreadWaker
from shoal.runtime.execution.scheduler import Stopped

HANG = 60.0  # seconds after which something that has to happen counts as never happening
VALUES = ("rows", "shared", "stacked")


def make_channel_spec(
    flow: Flow, writers: int, readers: int, values: str = "rows", rows: int = 0
) -> ChannelSpec:
    """A channel spec from `w` to `r` with values of one kind: rows, shared or stacked."""
    rows = rows or 2 * writers * readers
    cells = {
        "rows": (ArraySpec("x", (rows, 3), "float32", 0), ArraySpec("y", (2, rows), "int64", 1)),
        "shared": (ArraySpec("p", (4,), "float32", None), ArraySpec("q", (), "int32", None)),
        "stacked": (
            ArraySpec("x", (rows, 3), "float32", 0),
            ArraySpec("s", (), "float32", None, stacked=True),
            ArraySpec("v", (2,), "int64", None, stacked=True),
        ),
    }[values]
    everyone = values == "stacked" or takes_some(flow)
    cut = pieces(rows, writers, readers)
    sources = []
    for reader in range(readers):
        wanted = {p.writer for p in cut[reader]} if values == "rows" else {reader % writers}
        sources.append(tuple(range(writers)) if everyone else tuple(sorted(wanted)))
    capacity = flow.capacity if isinstance(flow, Queue) else lag_of(flow) + 2
    admits = MOST_IN_FLIGHT if takes_some(flow) else 0
    gate = Gate("c", "w", "r", tuple(sources), flow, capacity, admits)
    return ChannelSpec(gate, cells, writers, rows)


def made(spec: ChannelSpec, writer: int, number: int) -> dict[str, np.ndarray]:
    """The message with this number from this writer; no two messages have equal values."""
    wide = spec.rows // spec.writers
    rows = 1000 * number + np.arange(writer * wide, (writer + 1) * wide)
    return {c.name: _fill(c, rows, 1000 * number + writer) for c in spec.cells}


def seen(spec: ChannelSpec, reader: int, turns: list[tuple[int, int]]) -> dict[str, np.ndarray]:
    """The message that a reader must receive from these messages."""
    if takes_some(spec.gate.flow):
        wide = spec.rows // spec.writers
        rows = np.concatenate([1000 * n + np.arange(w * wide, (w + 1) * wide) for w, n in turns])
    else:
        narrow = spec.rows // spec.readers
        rows = 1000 * turns[0][1] + np.arange(reader * narrow, (reader + 1) * narrow)
    first = 1000 * turns[0][1] + turns[0][0]
    each = np.array([1000 * n + w for w, n in turns])
    return {
        c.name: np.stack([_fill(c, rows, x) for x in each]) if c.stacked else _fill(c, rows, first)
        for c in spec.cells
    }


def _fill(cell: ArraySpec, rows: np.ndarray, shared: int) -> np.ndarray:
    if cell.axis is None:
        return np.full(cell.shape, shared, cell.dtype)
    shape = [1] * len(cell.shape)
    shape[cell.axis] = len(rows)
    return np.broadcast_to(rows.reshape(shape), cell.rows(len(rows))).astype(cell.dtype)


def check_seen(spec: ChannelSpec, reader: int, turns: list, message: dict) -> None:
    """Check that a message is what was sent, gathered and scattered."""
    wanted = seen(spec, reader, turns)
    assert set(message) == set(wanted)
    for name, x in wanted.items():
        got = np.asarray(message[name])
        assert (got.shape, got.dtype) == (x.shape, x.dtype), name
        np.testing.assert_array_equal(got, x, err_msg=f"{name} of {turns} at reader {reader}")


@dataclass
class Hall:
    """The channels of one process, a waker for each endpoint, and a way to stop all endpoints."""

    channels: dict
    wakers: dict
    stop: object

    def __post_init__(self) -> None:
        for channel in self.channels.values():
            gate = channel.state.spec.gate
            of = {f: [self.wakers[e] for e in self.wakers if e[0] == f] for f in "wr"}
            channel.state.subscribe(of[gate.reader], of[gate.writer])

    def halt(self) -> None:
        """End every wait."""
        self.stop()
        for waker in self.wakers.values():
            waker.notify()


def ends_of(specs: dict[str, ChannelSpec]) -> list[tuple[str, int]]:
    """All endpoints, writers first."""
    spec = next(s for s in specs.values() if s.gate.writer == "w")
    return [("w", i) for i in range(spec.writers)] + [("r", i) for i in range(spec.readers)]


def local_hall(specs: dict[str, ChannelSpec]) -> Hall:
    """Channels inside this process."""
    from shoal.runtime.channels.in_process import make_channels

    stop = threading.Event()
    wakers = {end: ThreadWaker(stop) for end in ends_of(specs)}
    return Hall(make_channels(specs, {"w": None, "r": None}), wakers, stop.set)


class Shared:
    """Channels in shared memory, to be opened in any process that gets this object."""

    def __init__(self, specs: dict[str, ChannelSpec], memory: Memory | None = None) -> None:
        self.specs = specs
        room = Allocator()
        self.halted, self.wakers = room.take(LINE), room.take(len(ends_of(specs)) * LINE)
        self.layouts = ChannelLayouts.plan(specs, room)
        self.memory = memory or Memory.make(room.size)

    def __reduce__(self) -> tuple:
        return _opened, (self.specs, reduction.DupFd(self.memory.fd), self.memory.size)

    def hall(self) -> Hall:
        """The channels, in this process."""
        join_fences()
        word = self.memory.words(self.halted, 1)

        def check() -> None:
            if word[0]:
                raise Stopped

        wakers = {
            end: FutexWaker(self.memory, self.wakers + i * LINE, check=check)
            for i, end in enumerate(ends_of(self.specs))
        }
        return Hall(self.layouts.open(self.memory), wakers, lambda: word.__setitem__(0, 1))

    @contextmanager
    def at(self, job, args):
        """The channels in a process that does some job."""
        yield self.hall()

    def is_asleep(self, end: tuple[str, int]) -> bool:
        """Whether an endpoint may not continue, and waits."""
        return self.memory.words(self.wakers, len(ends_of(self.specs)))[
            ends_of(self.specs).index(end)
        ] == 1  # fmt: skip


def _opened(specs: dict[str, ChannelSpec], fd, size: int) -> Shared:
    return Shared(specs, Memory(fd.detach(), size))


class Thread:
    """A job in a thread of this process."""

    def __init__(self, hall: Hall, job, *args) -> None:
        self._result: Future = Future()
        threading.Thread(target=self._run, args=(hall, job, args), daemon=True).start()

    def _run(self, hall: Hall, job, args) -> None:
        try:
            self._result.set_result(job(hall, *args))
        except BaseException as error:
            self._result.set_exception(error)

    def result(self) -> object:
        """The result of the job; raises its exception."""
        return self._result.result(HANG)


_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(
    ["shoal.runtime.channels.shm", "shoal.runtime.execution.scheduler"]
)


class Process:
    """A job in a process of its own."""

    def __init__(self, line: Shared, job, *args) -> None:
        self._got, give = _PROCESSES.Pipe(duplex=False)
        self.process = _PROCESSES.Process(
            target=_run_alone, args=(line, job, args, give), daemon=True
        )
        self.process.start()
        give.close()

    def result(self) -> object:
        """The result of the job; raises its exception, or EOFError if the process was killed."""
        assert self._got.poll(HANG), "it hangs"
        kind, found = self._got.recv()
        self.process.join(HANG)
        if kind == "raised":
            raise found
        return found

    def gone(self) -> int:
        """Wait for the process to end; its exit code."""
        self.process.join(HANG)
        assert self.process.exitcode is not None, "it hangs"
        return self.process.exitcode


def _run_alone(line: Shared, job, args, give) -> None:
    try:
        with line.at(job, args) as hall:
            give.send(("done", job(hall, *args)))
    except BaseException as error:
        give.send(("raised", error))


THREADS, PROCESSES = "threads", "processes"
LINES = {"shared": Shared}


class Meeting:
    """Channels whose endpoints run in threads or processes."""

    def __init__(self, kind: str, carry: str, specs: dict[str, ChannelSpec]) -> None:
        self.line = None if carry == "in process" else LINES[carry](specs)
        if carry == "tcp":
            self.line.together = kind == THREADS
        self.hall = self.line.hall() if self.line else local_hall(specs)
        self.stile = self.hall.channels["c"].state
        self.start = partial(*((Process, self.line) if kind == PROCESSES else (Thread, self.hall)))


def one_line(*args, **kwargs) -> dict[str, ChannelSpec]:
    """One channel, as `make_channel_spec` makes it."""
    return {"c": make_channel_spec(*args, **kwargs)}


def holders(inode):
    """Processes that have a file open or in their memory."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/maps") as maps:
                if any(line.split()[4] == str(inode) and "memfd" in line for line in maps):
                    found.add(int(pid))
            for fd in os.listdir(f"/proc/{pid}/fd"):
                if os.stat(f"/proc/{pid}/fd/{fd}").st_ino == inode:
                    found.add(int(pid))
        except OSError:
            continue
    return found


def until(fact) -> None:
    """Wait until a condition holds; fail after `HANG` seconds."""
    end = time.monotonic() + HANG
    while not fact():
        assert time.monotonic() < end, "it never happens"
        time.sleep(0)


def die(*_) -> None:
    """End this process as `kill -9` does."""
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def wait_put(hall: Hall, end: int, name: str = "c") -> None:
    """Wait until a writer may put."""
    stile = hall.channels[name].state
    waker = hall.wakers[stile.spec.gate.writer, end]
    while not stile.may_put(end):
        waker.wait(lambda: stile.may_put(end), 1.0)


def wait_take(hall: Hall, end: int, tick: int, name: str = "c") -> None:
    """Wait until a reader may take."""
    stile = hall.channels[name].state
    waker = hall.wakers[stile.spec.gate.reader, end]
    while not stile.may_take(end, tick):
        waker.wait(lambda: stile.may_take(end, tick), 1.0)


def write(hall: Hall, end: int, first: int, last: int) -> int:
    """Put messages `first` to `last`, or until halted; the number of messages put."""
    channel = hall.channels["c"]
    spec = channel.state.spec
    number = first
    try:
        while number < last:
            wait_put(hall, end)
            channel.put(end, made(spec, end, number), number)
            number += 1
            gate, counts = spec.gate, channel.state.counts
            readers = [counts.takes[r] for r, s in enumerate(gate.sources) if end in s]
            if isinstance(gate.flow, Queue) and not takes_some(gate.flow) and readers:
                assert counts.puts[end] - min(readers) <= gate.capacity
    except Stopped:
        pass
    return number - first


@dataclass
class Got:
    """The checked messages that one reader has taken: their sources and versions."""

    turns: list = field(default_factory=list)
    versions: list = field(default_factory=list)


def read(hall: Hall, end: int, ticks: int) -> Got:
    """Take a number of messages, or until halted."""
    got, channel = Got(), hall.channels["c"]
    spec = channel.state.spec

    def receive(message: dict, turns: list) -> dict:
        got.turns.append(list(turns))
        return {name: np.array(x) for name, x in message.items()}

    try:
        for tick in range(ticks):
            wait_take(hall, end, tick)
            got.turns = got.turns[:tick]
            taken = channel.take(end, tick, receive)
            check_seen(spec, end, got.turns[-1], taken.message)
            got.turns = [*got.turns[:tick], got.turns[-1]]
            got.versions.append(taken.versions)
    except Stopped:
        pass
    return got
