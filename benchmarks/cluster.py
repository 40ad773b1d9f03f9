"""How fast messages go between two hosts: Shoal's channels beside ZeroMQ, asyncio and Ray.

The hosts are two network namespaces of this machine with a cable (veth) between them; where they
can't be made, loopback is used, and said. Streams of 64 KiB and 4 MiB, and round trips of 64
bytes; everybody's reader looks at each message. Rounds alternate; the table shows medians.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from shoal.planning.policy import Queue
from shoal.runtime.fire import Gate
from shoal.runtime.gates import Cell, Sheet
from shoal.runtime.joining import join_lines
from shoal.runtime.lines import Lines
from shoal.runtime.memory import LINE, FutexBell, Memory, Room, join_fences
from shoal.runtime.porter import Wakes
from shoal.runtime.shm import Rings
from shoal.runtime.tcp import TcpChannel

SMALL, MIDDLE, LARGE = 64, 64 << 10, 4 << 20
COUNTS = {SMALL: 20_000, MIDDLE: 40_000, LARGE: 1_500}
SLOTS = {SMALL: 2, MIDDLE: 32, LARGE: 2}
WARM = 16
BOARD = (lambda: None), (lambda *_: None)  # nothing to stop for, nobody to lose
HOSTS = ("10.77.5.1", "10.77.5.2")
SPACES = ("shoal-a", "shoal-b")
LOOPBACK = ("127.0.0.1", "127.0.0.1")
PORTS = itertools.count(21_000, 2)
Job = tuple[int, int, tuple[str, str], int]  # size (0: round trips), count, addresses, first port


def timed(move: Callable[[], Any], count: int) -> float:
    """Seconds for `count` moves after the first few."""
    for _ in range(WARM):
        move()
    start = time.perf_counter()
    for _ in range(count):
        move()
    return time.perf_counter() - start


class Ends:
    """Shoal channels from worker 0 to worker 1 and back, as one of them sees them."""

    def __init__(self, me: int, size: int, addresses: tuple[str, str], port: int) -> None:
        capacity, cells = SLOTS[size], (Cell("x", (size,), "uint8", None),)
        there = Gate("there", "w", "r", ((0,),), Queue(capacity), capacity)
        back = Gate("back", "r", "w", ((0,),), Queue(capacity), capacity)
        room = Room()
        sheets = {gate.name: Sheet(gate, cells, 1, 1) for gate in (there, back)}
        rings = Rings.plan(sheets, room)
        where = tuple((host, port + i) for i, host in enumerate(addresses))
        lines = Lines(rings, room.size, {"w": (0,), "r": (1,)}, ("w[0]", "r[0]"), where, b"t" * 32)
        join_fences()
        bell = FutexBell(Memory.make(LINE), 0)
        door = socket.create_server(where[me])
        bells = {"w": [bell], "r": [bell]}
        self.links, channels = join_lines(lines, me, door, BOARD, bells)
        self.bell = self.links.bell(bell, Wakes(lambda: None, alone=True), spin=50e-6)
        self.there, self.back = channels["there"], channels["back"]
        self.message, self.tick = {"x": np.ones(size, np.uint8)}, 0

    def put(self, channel: TcpChannel) -> None:
        """Put when there is room."""
        stile = channel.turnstile
        while not stile.may_put(0):
            self.bell.wait(lambda: stile.may_put(0), 1.0)
        channel.put(0, self.message, 0)

    def take(self, channel: TcpChannel) -> None:
        """Take when there is something."""
        stile = channel.turnstile
        while not stile.may_take(0, 0):
            self.bell.wait(lambda: stile.may_take(0, 0), 1.0)
        channel.take(0, 0, _look)


def _look(message: dict[str, np.ndarray], _: object) -> dict[str, np.ndarray]:
    assert message["x"].item(-1) == 1
    return message


def shoal_writes(job: Job) -> None:
    """Shoal's side that sends, or answers."""
    size, count, addresses, port = job
    ends = Ends(0, size or SMALL, addresses, port)
    for _ in range(count + WARM):
        if not size:
            ends.take(ends.back)
        ends.put(ends.there)
    ends.links.close()


def shoal_reads(job: Job) -> float:
    """Shoal's side that receives, or asks."""
    size, count, addresses, port = job
    ends = Ends(1, size or SMALL, addresses, port)

    def move() -> None:
        if not size:
            ends.put(ends.back)
        ends.take(ends.there)

    return timed(move, count)


def zmq_writes(job: Job) -> None:
    """ZeroMQ, without copying where it can."""
    import zmq

    size, count, addresses, port = job
    sock = zmq.Context().socket(zmq.PAIR)
    sock.set_hwm(8)
    sock.bind(f"tcp://{addresses[0]}:{port}")
    x = np.ones(size or SMALL, np.uint8)
    for _ in range(count + WARM):
        if not size:
            sock.recv(copy=False)
        sock.send(x, copy=False)
    sock.recv()


def zmq_reads(job: Job) -> float:
    """ZeroMQ, which gives a buffer of its own for each message."""
    import zmq

    size, count, addresses, port = job
    sock = zmq.Context().socket(zmq.PAIR)
    sock.set_hwm(8)
    sock.connect(f"tcp://{addresses[0]}:{port}")

    def move() -> None:
        if not size:
            sock.send(bytes(SMALL), copy=False)
        assert sock.recv(copy=False).buffer[-1] == 1

    seconds = timed(move, count)
    sock.send(b"done")
    return seconds


def asyncio_writes(job: Job) -> None:
    """Streams of asyncio, with a length before each message."""
    size, count, addresses, port = job
    x = np.ones(size or SMALL, np.uint8)
    head = struct.pack("<Q", len(x))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(count + WARM):
            if not size:
                await reader.readexactly(SMALL)
            writer.writelines([head, memoryview(x)])
            await writer.drain()
        await reader.read(1)
        done.set()

    async def run() -> None:
        async with await asyncio.start_server(serve, addresses[0], port, limit=1 << 23):
            await done.wait()

    done = asyncio.Event()
    asyncio.run(run())


def asyncio_reads(job: Job) -> float:
    """Streams of asyncio."""
    size, count, addresses, port = job

    async def run() -> float:
        sock = connected(addresses[0], port)
        reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 23)

        async def move() -> None:
            if not size:
                writer.write(bytes(SMALL))
            (length,) = struct.unpack("<Q", await reader.readexactly(8))
            assert (await reader.readexactly(length))[-1] == 1

        for _ in range(WARM):
            await move()
        start = time.perf_counter()
        for _ in range(count):
            await move()
        return time.perf_counter() - start

    return asyncio.run(run())


def plain_writes(job: Job) -> None:
    """One blocking socket and nothing else: what a channel can't be faster than by much."""
    size, count, addresses, port = job
    with socket.create_server((addresses[0], port)) as door:
        sock, _ = door.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    x, head = np.ones(size or SMALL, np.uint8), bytearray(SMALL)
    for _ in range(count + WARM):
        if not size:
            sock.recv_into(head, 0, socket.MSG_WAITALL)
        sock.sendall(x)
    sock.recv(1)  # until it is gone


def plain_reads(job: Job) -> float:
    """One blocking socket."""
    size, count, addresses, port = job
    sock = connected(addresses[0], port)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    x = np.zeros(size or SMALL, np.uint8)

    def move() -> None:
        if not size:
            sock.sendall(bytes(SMALL))
        sock.recv_into(x, 0, socket.MSG_WAITALL)
        assert x[-1] == 1

    return timed(move, count)


SIDES: dict[str, tuple[Callable[[Job], None], Callable[[Job], float]]] = {
    "Shoal": (shoal_writes, shoal_reads),
    "ZeroMQ tcp": (zmq_writes, zmq_reads),
    "asyncio": (asyncio_writes, asyncio_reads),
    "plain socket": (plain_writes, plain_reads),
}


def ray_seconds(size: int, count: int) -> float:
    """Ray: an actor sends arrays to another, on another host; eight are under way at once."""
    import ray

    @ray.remote(num_cpus=1, resources={"b": 1})
    class Reader:
        def look(self, x: np.ndarray) -> int:
            return int(x[-1])

    @ray.remote(num_cpus=1, resources={"a": 1})
    class Writer:
        def __init__(self, reader: Any) -> None:
            self.reader = reader

        def send(self, size: int, count: int) -> float:
            x, start = np.ones(size or SMALL, np.uint8), 0.0
            waiting: list[Any] = []
            for number in range(count + WARM):
                if number == WARM:
                    start = time.perf_counter()
                waiting.append(self.reader.look.remote(x))
                if len(waiting) >= (8 if size else 1):
                    assert ray.get(waiting.pop(0)) == 1
            ray.get(waiting)
            return time.perf_counter() - start

    writer = Writer.remote(Reader.remote())
    return ray.get(writer.send.remote(size, count))


@contextmanager
def cable() -> Iterator[tuple[str, str] | None]:
    """Two hosts joined by a cable, in network namespaces; None where that isn't allowed."""
    a, b = SPACES
    try:
        for space in SPACES:
            subprocess.run(["ip", "netns", "add", space], check=True, capture_output=True)
        _ip(f"link add {a} netns {a} type veth peer name {b} netns {b}")
        for space, address in zip(SPACES, HOSTS, strict=True):
            _ip(f"-n {space} addr add {address}/24 dev {space}")
            _ip(f"-n {space} link set {space} up")
            _ip(f"-n {space} link set lo up")
        yield SPACES
    except (OSError, subprocess.CalledProcessError):
        yield None
    finally:
        for space in SPACES:
            with suppress(OSError):
                subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True)


def inside(space: str | None, command: list[str]) -> list[str]:
    """A command, to be run on one of the hosts."""
    return ["ip", "netns", "exec", space, *command] if space else command


def seconds_of(
    side: str, size: int, count: int, spaces: tuple[str, str] | None
) -> tuple[float, float]:
    """Seconds from the first message to the last, and of CPU on both sides."""
    addresses = HOSTS if spaces else LOOPBACK
    port = next(PORTS)
    words = [side, str(size), str(count), *addresses, str(port)]
    here = [sys.executable, __file__, "--run"]
    one, other = spaces or (None, None)
    pipe = {"stdout": subprocess.PIPE, "text": True}
    writer = subprocess.Popen(inside(one, [*here, "writes", *words]), **pipe)
    reader = subprocess.Popen(inside(other, [*here, "reads", *words]), **pipe)
    try:
        seconds, mine = map(float, reader.communicate(timeout=300)[0].split())
        _, its = map(float, writer.communicate(timeout=60)[0].split())
    finally:
        reader.kill()
        writer.kill()
    return seconds, mine + its


def connected(address: str, port: int) -> socket.socket:
    """A connection to who will listen there in a moment."""
    while True:
        try:
            return socket.create_connection((address, port))
        except ConnectionRefusedError:
            time.sleep(0.02)


def run_one(words: list[str]) -> None:
    """One side's writer or reader, in its own process: prints its seconds, and those of its CPU."""
    way, side, size, count, one, other, port = words
    job = int(size), int(count), (one, other), int(port)
    began = sum(os.times()[:2])
    seconds = SIDES[side][way == "reads"](job) or 0.0
    sys.stdout.write(f"{seconds} {sum(os.times()[:2]) - began}\n")
    sys.stdout.flush()
    os._exit(0)


def ray_row(counts: dict[int, int]) -> list[float]:
    """Ray's messages/s of both sizes, and calls/s with 64 bytes; both actors on this host."""
    import ray

    ray.init("local", resources={"a": 1, "b": 1}, include_dashboard=False, log_to_driver=False)
    try:
        return [counts[size] / ray_seconds(size % SMALL and size, counts[size]) for size in counts]
    finally:
        ray.shutdown()


def measure(names: list[str], rounds: int, share: int) -> dict[str, list[list[float]]]:
    """For each side, by round: messages/s, CPU µs a message on both sides; of each size."""
    found: dict[str, list[list[float]]] = {name: [] for name in names}
    with cable() as spaces:
        if spaces is None:
            Console().print("no network namespaces here: this is loopback")
        for number in range(rounds):
            for name in names:
                Console(stderr=True).print(f"round {number + 1} of {rounds}: {name}", style="dim")
                row: list[float] = []
                for size in (MIDDLE, LARGE, 0):
                    count = max(50, COUNTS[size or SMALL] // share)
                    seconds, cpu = seconds_of(name, size, count, spaces)
                    row += [count / seconds, 1e6 * cpu / count]
                found[name].append(row)
    return found


def show(found: dict[str, list[list[float]]]) -> Table:
    """A row for each side, medians."""
    table = Table(title="Between two hosts, medians")
    for name in ("", "64 KiB/s", "CPU µs", "4 MiB/s", "GiB/s", "CPU µs", "round trips/s", "CPU µs"):
        table.add_column(name, justify="right" if name else "left")
    for name, rows in found.items():
        small, c1, large, c2, trips, c3 = (median(x) for x in zip(*rows, strict=True))
        table.add_row(
            name, f"{small:,.0f}", f"{c1:.0f}" if c1 else "", f"{large:,.0f}",
            f"{large * LARGE / 2**30:.2f}", f"{c2:,.0f}" if c2 else "",
            f"{trips:,.0f}", f"{c3:.0f}" if c3 else "",
        )  # fmt: skip
    return table


def main() -> None:
    """Measure and print."""
    if sys.argv[1:2] == ["--run"]:
        run_one(sys.argv[2:])
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--ray", action="store_true", help="Ray too, on one host")
    said = parser.parse_args()
    rounds, share = (1, 10) if said.quick else (3, 1)
    names = list(SIDES)
    if find_spec("zmq") is None:
        Console().print("ZeroMQ is left out: pip install pyzmq")
        names.remove("ZeroMQ tcp")
    found = measure(names, rounds, share)
    if said.ray:
        counts = {MIDDLE: 4000 // share, LARGE: 300 // share, SMALL: 4000 // share}
        found["Ray"] = [[x for rate in ray_row(counts) for x in (rate, 0.0)] for _ in range(rounds)]
    Console(width=110).print(show(found))


if __name__ == "__main__":
    main()
