"""Benchmarks messages between two processes: Shoal's channels against alternatives.

Streams of 64 KiB and 4 MiB, and round trips of 64 bytes. Each reader looks at each message
without copying it further; the writer's own copy into the channel counts. A copy of the same
size inside one process is the bound. Rounds alternate between the sides; the table shows medians.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np
from rich.console import Console
from rich.table import Table

from peers.made import python_of
from shoal.planning.channel_specs import ArraySpec, ChannelSpec, Gate
from shoal.planning.policy import Queue
from shoal.runtime.channels.shared_memory import LINE, Allocator, FutexWaker, Memory, join_fences
from shoal.runtime.channels.shm import ChannelLayouts, ShmChannel

HERE = Path(__file__).parent
SMALL, MIDDLE, LARGE = 64, 64 << 10, 4 << 20
COUNTS = {SMALL: 40_000, MIDDLE: 100_000, LARGE: 3_000}
SLOTS = {SMALL: 1, MIDDLE: 8, LARGE: 2}  # few enough to stay in the cache
WARM = 16  # warm-up moves: fresh memory is slow
SPIN = 50e-6  # as workers do if there are enough cores


class Side(Protocol):
    """One way to send messages; both give seconds from the first message to the last."""

    def stream(self, size: int, count: int) -> float:
        """Stream messages: one process sends, the other reads each."""
        ...

    def rally(self, count: int) -> float:
        """Send a small message back and forth."""
        ...


class Line:
    """Shoal channels from `w` to `r` and back, both endpoints' wakers, opened before the fork."""

    def __init__(self, size: int) -> None:
        capacity = SLOTS[size]
        cells = (ArraySpec("x", (size,), "uint8", None),)
        there = Gate("there", "w", "r", ((0,),), Queue(capacity), capacity)
        back = Gate("back", "r", "w", ((0,),), Queue(capacity), capacity)
        specs = {gate.name: ChannelSpec(gate, cells, 1, 1) for gate in (there, back)}
        room = Allocator()
        bells, layouts = room.take(2 * LINE), ChannelLayouts.plan(specs, room)
        memory = Memory.make(room.size)
        self.bells = {
            f: FutexWaker(memory, bells + i * LINE, SPIN) for i, f in enumerate(("w", "r"))
        }
        self.channels = layouts.open(memory)
        for channel in self.channels.values():
            gate = channel.state.spec.gate
            channel.state.subscribe([self.bells[gate.reader]], [self.bells[gate.writer]])

    def put(self, channel: ShmChannel, message: dict[str, Any]) -> None:
        """Put a message as soon as there is room."""
        stile = channel.state
        if not stile.may_put(0):
            bell = self.bells[stile.spec.gate.writer]
            while not stile.may_put(0):
                bell.wait(lambda: stile.may_put(0), 1.0)
        channel.put(0, message, 0)

    def take(self, channel: ShmChannel, receive: Callable[[Any, Any], Any]) -> None:
        """Take a message as soon as there is one."""
        stile = channel.state
        if not stile.may_take(0, 0):
            bell = self.bells[stile.spec.gate.reader]
            while not stile.may_take(0, 0):
                bell.wait(lambda: stile.may_take(0, 0), 1.0)
        channel.take(0, 0, receive)


def _look(message: dict[str, np.ndarray], _: object) -> dict[str, np.ndarray]:
    assert message["x"].item(-1) == 1
    return message


def beside(work: Callable[[], None]) -> None:
    """Run a function in a separate process."""
    if os.fork() == 0:
        join_fences()
        work()
        os._exit(0)


def timed(move: Callable[[], Any], count: int) -> float:
    """Seconds for `count` moves after the warm-up; then waits for the other process."""
    for _ in range(WARM):
        move()
    start = time.perf_counter()
    for _ in range(count):
        move()
    seconds = time.perf_counter() - start
    os.wait()
    return seconds


class Shoal:
    """Channels in shared memory, as workers use them."""

    def stream(self, size: int, count: int) -> float:
        """Stream through slots: one fills them, the other reads in place."""
        join_fences()
        line, message = Line(size), {"x": np.ones(size, np.uint8)}
        there = line.channels["there"]

        def write() -> None:
            for _ in range(count + WARM):
                line.put(there, message)

        def move() -> None:
            line.take(there, _look)

        beside(write)
        return timed(move, count)

    def rally(self, count: int) -> float:
        """Two channels."""
        join_fences()
        line, message = Line(SMALL), {"x": np.ones(SMALL, np.uint8)}
        there, back = line.channels["there"], line.channels["back"]

        def answer() -> None:
            for _ in range(count + WARM):
                line.take(there, _look)
                line.put(back, message)

        def move() -> None:
            line.put(there, message)
            line.take(back, _look)

        beside(answer)
        return timed(move, count)


class Pipe:
    """`multiprocessing.Pipe`, raw bytes."""

    def stream(self, size: int, count: int) -> float:
        """Bytes through a socket."""
        mine, its = multiprocessing.Pipe()
        x = bytes(size)

        def write() -> None:
            for _ in range(count + WARM):
                its.send_bytes(x)

        beside(write)
        return timed(mine.recv_bytes, count)

    def rally(self, count: int) -> float:
        """Round trips through one socket."""
        mine, its = multiprocessing.Pipe()

        def answer() -> None:
            for _ in range(count + WARM):
                its.send_bytes(its.recv_bytes())

        def move() -> None:
            mine.send_bytes(bytes(SMALL))
            mine.recv_bytes()

        beside(answer)
        return timed(move, count)


class PythonQueue:
    """`multiprocessing.Queue`, which pickles."""

    def stream(self, size: int, count: int) -> float:
        """Arrays put and got."""
        queue, x = multiprocessing.Queue(8), np.ones(size, np.uint8)

        def write() -> None:
            for _ in range(count + WARM):
                queue.put(x)
            queue.close()
            queue.join_thread()

        beside(write)
        return timed(queue.get, count)

    def rally(self, count: int) -> float:
        """Two queues."""
        there, back = multiprocessing.Queue(8), multiprocessing.Queue(8)

        def answer() -> None:
            for _ in range(count + WARM):
                back.put(there.get())
            back.close()
            back.join_thread()

        def move() -> None:
            there.put(bytes(SMALL))
            back.get()

        beside(answer)
        return timed(move, count)


class ZeroMQ:
    """ZeroMQ over ipc, in a separate virtual environment."""

    def __init__(self) -> None:
        self._python = python_of("zmq")

    def stream(self, size: int, count: int) -> float:
        """A push and a pull socket."""
        return self._run(size, count)

    def rally(self, count: int) -> float:
        """A pair of sockets."""
        return self._run(count)

    def _run(self, *numbers: int) -> float:
        command = [self._python, HERE / "peers" / "zmq_pair.py", *map(str, numbers)]
        return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def copy_seconds(size: int, count: int) -> float:
    """Seconds to copy the same bytes inside one process, to the same number of buffers."""
    x, rooms = np.ones(size, np.uint8), list(np.ones((SLOTS[size], size), np.uint8))
    start = time.perf_counter()
    for number in range(count):
        np.copyto(rooms[number % len(rooms)], x)
    return time.perf_counter() - start


def measure(sides: dict[str, Side], rounds: int, share: int) -> dict[str, list[list[float]]]:
    """For each side, by round: messages/s of both sizes and round trips/s."""
    found: dict[str, list[list[float]]] = {name: [] for name in [*sides, "copy"]}
    for number in range(rounds):
        for name, side in sides.items():
            Console(stderr=True).print(f"round {number + 1} of {rounds}: {name}", style="dim")
            slow = share if name == "Shoal" else 4 * share
            counts = {size: count // slow for size, count in COUNTS.items()}
            found[name].append(
                [counts[size] / side.stream(size, counts[size]) for size in (MIDDLE, LARGE)]
                + [counts[SMALL] / side.rally(counts[SMALL])]
            )
        copies = [COUNTS[size] // share for size in (MIDDLE, LARGE)]
        pairs = zip((MIDDLE, LARGE), copies, strict=True)
        found["copy"].append([count / copy_seconds(size, count) for size, count in pairs])
    return found


def show(found: dict[str, list[list[float]]]) -> Table:
    """A row for each side; ratios are Shoal's speed over the side's."""
    table = Table(title="Between two processes, medians")
    for name in ("", "64 KiB/s", "GiB/s", "Shoal is", "4 MiB/s", "GiB/s", "Shoal is",
                 "round trips/s", "Shoal is"):  # fmt: skip
        table.add_column(name, justify="right" if name else "left")
    middles = {name: [median(x) for x in zip(*rows, strict=True)] for name, rows in found.items()}
    mine = middles["Shoal"]
    for name, rates in middles.items():
        cells = []
        for size, rate, own in zip((MIDDLE, LARGE, 0), rates, mine, strict=False):
            cells += [f"{rate:,.0f}"] + ([f"{rate * size / 2**30:.1f}"] if size else [])
            cells.append("" if name == "Shoal" else f"{own / rate:.2f} x")
        table.add_row(name, *cells)
    return table


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one short round")
    said = parser.parse_args()
    sides: dict[str, Side] = {"Shoal": Shoal(), "Pipe": Pipe(), "Queue": PythonQueue()}
    try:
        sides["ZeroMQ ipc"] = ZeroMQ()
    except subprocess.CalledProcessError:
        Console().print("ZeroMQ: not installed, and can't be")
    rounds, share = (1, 10) if said.quick else (3, 1)
    Console(width=120).print(show(measure(sides, rounds, share)))


if __name__ == "__main__":
    main()
