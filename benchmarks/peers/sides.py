"""One side of `cluster.py` in a separate process: the sender or the receiver.

`sides.py writes|reads SIDE SIZE COUNT SLOTS ADDRESS ADDRESS PORT` prints seconds, and seconds of
CPU, both after the first few messages. A size of 0 means round trips.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

SMALL, WARM = 64, 16
Timed = tuple[float, float]


class Job(NamedTuple):
    """What to send: a size (0: round trips), a count, and the most messages in flight."""

    size: int
    count: int
    slots: int
    addresses: tuple[str, str]
    port: int


def now() -> np.ndarray:
    """Wall-clock seconds, and CPU seconds of this process."""
    return np.array([time.perf_counter(), sum(os.times()[:2])])


def timed(move: Callable[[], Any], count: int) -> Timed:
    """The time of `count` moves after the warm-up."""
    for _ in range(WARM):
        move()
    start = now()
    for _ in range(count):
        move()
    seconds, cpu = now() - start
    return float(seconds), float(cpu)


class Ends:
    """Shoal channels from worker 0 to worker 1 and back, one worker's side."""

    def __init__(self, me: int, job: Job) -> None:
        from shoal.planning.channel_specs import ArraySpec, ChannelSpec, Gate
        from shoal.planning.policy import Queue
        from shoal.runtime.channels.shared_memory import (
            LINE,
            Allocator,
            FutexWaker,
            Memory,
            join_fences,
        )
        from shoal.runtime.channels.shm import ChannelLayouts
        from shoal.runtime.net.tcp_channel import join_channels
        from shoal.runtime.net.wiring import RemoteChannels

        size = job.size or SMALL
        cells = (ArraySpec("x", (size,), "uint8", None),)
        there = Gate("there", "w", "r", ((0,),), Queue(job.slots), job.slots)
        back = Gate("back", "r", "w", ((0,),), Queue(job.slots), job.slots)
        room = Allocator()
        specs = {gate.name: ChannelSpec(gate, cells, 1, 1) for gate in (there, back)}
        layouts = ChannelLayouts.plan(specs, room)
        where = tuple((host, job.port + i) for i, host in enumerate(job.addresses))
        lines = RemoteChannels(
            layouts, room.size, {"w": (0,), "r": (1,)}, ("w[0]", "r[0]"), where, b"t" * 32,
            signed=os.environ.get("SHOAL_NET_MAC", "0") == "1",
        )  # fmt: skip
        join_fences()
        bell, listener = FutexWaker(Memory.make(LINE), 0), socket.create_server(where[me])
        bells = {"w": [bell], "r": [bell]}
        self.links, channels = join_channels(lines, me, listener, lambda: None, bells)
        self.bell = self.links.waker(bell, alone=True, spin=50e-6)
        self.there, self.back = channels["there"], channels["back"]
        x = np.ones(size, np.uint8)
        x.flags.writeable = False  # as JAX arrays are: it is kept without a copy, as with ZeroMQ
        self.message = {"x": x}

    def put(self, channel: Any) -> None:
        """Put a message as soon as there is room."""
        stile = channel.state
        while not stile.may_put(0):
            self.bell.wait(lambda: stile.may_put(0), 1.0)
        channel.put(0, self.message, 0)

    def take(self, channel: Any) -> None:
        """Take a message as soon as there is one."""
        stile = channel.state
        while not stile.may_take(0, 0):
            self.bell.wait(lambda: stile.may_take(0, 0), 1.0)
        channel.take(0, 0, _look)


def _look(message: dict[str, np.ndarray], _: object) -> dict[str, np.ndarray]:
    assert message["x"].item(-1) == 1
    return message


def shoal_writes(job: Job) -> Timed:
    """Shoal's sending side."""
    ends = Ends(0, job)

    def move() -> None:
        if not job.size:
            ends.take(ends.back)
        ends.put(ends.there)

    found = timed(move, job.count)
    ends.links.close()
    return found


def shoal_reads(job: Job) -> Timed:
    """Shoal's receiving side."""
    ends = Ends(1, job)

    def move() -> None:
        if not job.size:
            ends.put(ends.back)
        ends.take(ends.there)

    return timed(move, job.count)


def zmq_socket(job: Job) -> Any:
    """A ZeroMQ socket, with as many slots on each side as the other transports have in total."""
    import zmq

    sock = zmq.Context().socket(zmq.PAIR)
    sock.set_hwm(max(1, job.slots // 2))
    return sock


def zmq_writes(job: Job) -> Timed:
    """ZeroMQ, without copying where it can."""
    sock = zmq_socket(job)
    sock.bind(f"tcp://{job.addresses[0]}:{job.port}")
    x = np.ones(job.size or SMALL, np.uint8)

    def move() -> None:
        if not job.size:
            sock.recv(copy=False)
        sock.send(x, copy=False)

    found = timed(move, job.count)
    sock.recv()
    return found


def zmq_reads(job: Job) -> Timed:
    """ZeroMQ, which gives a buffer of its own for each message."""
    sock = zmq_socket(job)
    sock.connect(f"tcp://{job.addresses[0]}:{job.port}")

    def move() -> None:
        if not job.size:
            sock.send(bytes(SMALL), copy=False)
        assert sock.recv(copy=False).buffer[-1] == 1

    found = timed(move, job.count)
    sock.send(b"done")
    return found


def asyncio_writes(job: Job) -> Timed:
    """Streams of asyncio, with a length before each message."""
    x = np.ones(job.size or SMALL, np.uint8)
    head, start, end = struct.pack("<Q", len(x)), now(), now()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal start, end
        for number in range(job.count + WARM):
            start = now() if number == WARM else start
            if not job.size:
                await reader.readexactly(SMALL)
            writer.writelines([head, memoryview(x)])
            await writer.drain()
        end = now()
        await reader.read(1)
        done.set()

    async def run() -> None:
        async with await asyncio.start_server(serve, job.addresses[0], job.port, limit=1 << 23):
            await done.wait()

    done = asyncio.Event()
    asyncio.run(run())
    seconds, cpu = end - start
    return float(seconds), float(cpu)


def asyncio_reads(job: Job) -> Timed:
    """Streams of asyncio."""

    async def run() -> Timed:
        sock = connected(job)
        reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 23)

        async def move() -> None:
            if not job.size:
                writer.write(bytes(SMALL))
            (length,) = struct.unpack("<Q", await reader.readexactly(8))
            assert (await reader.readexactly(length))[-1] == 1

        for _ in range(WARM):
            await move()
        start = now()
        for _ in range(job.count):
            await move()
        seconds, cpu = now() - start
        return float(seconds), float(cpu)

    return asyncio.run(run())


def plain_writes(job: Job) -> Timed:
    """One plain blocking socket: about the upper bound for a channel."""
    with socket.create_server((job.addresses[0], job.port)) as listener:
        sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    x, head = np.ones(job.size or SMALL, np.uint8), bytearray(SMALL)

    def move() -> None:
        if not job.size:
            sock.recv_into(head, 0, socket.MSG_WAITALL)
        sock.sendall(x)

    found = timed(move, job.count)
    sock.recv(1)  # until it is closed
    return found


def plain_reads(job: Job) -> Timed:
    """One blocking socket."""
    sock = connected(job)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    x = np.zeros(job.size or SMALL, np.uint8)

    def move() -> None:
        if not job.size:
            sock.sendall(bytes(SMALL))
        sock.recv_into(x, 0, socket.MSG_WAITALL)
        assert x[-1] == 1

    return timed(move, job.count)


def connected(job: Job) -> socket.socket:
    """Connect to a process that is about to listen."""
    while True:
        try:
            return socket.create_connection((job.addresses[0], job.port))
        except ConnectionRefusedError:
            time.sleep(0.02)


def ray_runs(job: Job) -> Timed:
    """Ray: an actor on one host sends arrays to one on another, with a limit in flight."""
    import ray

    ray.init(f"{job.addresses[0]}:{job.port}", log_to_driver=False, logging_level="error")
    at = [{f"node:{address}": 0.001} for address in job.addresses]

    @ray.remote(num_cpus=1, resources=at[1])
    class Reader:
        def look(self, x: np.ndarray) -> int:
            return int(x[-1])

    @ray.remote(num_cpus=1, resources=at[0])
    class Writer:
        def __init__(self, reader: Any) -> None:
            self.reader = reader

        def send(self, size: int, count: int, slots: int) -> float:
            x, start = np.ones(size or SMALL, np.uint8), 0.0
            waiting: list[Any] = []
            for number in range(count + WARM):
                start = time.perf_counter() if number == WARM else start
                waiting.append(self.reader.look.remote(x))
                if len(waiting) >= (slots if size else 1):
                    assert ray.get(waiting.pop(0)) == 1
            ray.get(waiting)
            return time.perf_counter() - start

    writer = Writer.remote(Reader.remote())
    return ray.get(writer.send.remote(job.size, job.count, job.slots)), 0.0


SIDES: dict[str, dict[str, Callable[[Job], Timed]]] = {
    "Shoal": {"writes": shoal_writes, "reads": shoal_reads},
    "ZeroMQ": {"writes": zmq_writes, "reads": zmq_reads},
    "asyncio": {"writes": asyncio_writes, "reads": asyncio_reads},
    "plain socket": {"writes": plain_writes, "reads": plain_reads},
    "Ray": {"reads": ray_runs},
}


def main() -> None:
    """Run one side, and print its times."""
    way, side, size, count, slots, one, other, port = sys.argv[1:]
    job = Job(int(size), int(count), int(slots), (one, other), int(port))
    seconds, cpu = SIDES[side][way](job)
    sys.stdout.write(f"{seconds} {cpu}\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
