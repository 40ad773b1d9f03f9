"""Channels between hosts under test: every endpoint is a worker with sockets on this host."""

import inspect
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import reduction

from conformance.lines import LINES, Hall, Shared, ends_of, until
from shoal.planning.channel_specs import ChannelSpec
from shoal.planning.policy import Latest, takes_some
from shoal.runtime.channels.shared_memory import Allocator, Memory
from shoal.runtime.channels.shm import ChannelLayouts
from shoal.runtime.net.connections import Connections
from shoal.runtime.net.sockets import listen
from shoal.runtime.net.tcp_channel import open_channels
from shoal.runtime.net.wiring import RemoteChannels


class Wired(Shared):
    """Channels over TCP; wakers and the halt word are shared, so that tests can read them."""

    def __init__(
        self, specs: dict[str, ChannelSpec], parts: tuple | None = None, *, signed: bool = False
    ) -> None:
        self.ends = ends_of(specs)
        room = Allocator()
        far = ChannelLayouts.plan(specs, room)
        if parts is None:
            self.listeners = [listen() for _ in self.ends]
            self.memories = [Memory.make(room.size) for _ in self.ends]
            super().__init__(specs)
            token = os.urandom(32)
        else:
            self.listeners, self.memories, memory, token = parts
            super().__init__(specs, memory)
        numbers = {f: tuple(i for i, (g, _) in enumerate(self.ends) if g == f) for f in "wr"}
        names = tuple(f"{f}[{i}]" for f, i in self.ends)
        addresses = tuple(s.getsockname() for s in self.listeners)
        self.lines = RemoteChannels(far, room.size, numbers, names, addresses, token, signed=signed)

    def __reduce__(self) -> tuple:
        fds = [reduction.DupFd(m.fd) for m in (*self.memories, self.memory)]
        sizes = [m.size for m in (*self.memories, self.memory)]
        return _opened, (
            self.specs,
            self.listeners,
            fds,
            sizes,
            self.lines.token,
            self.lines.signed,
        )

    def hall(self, settles: bool = False) -> Hall:
        """All channels, whose endpoints connect at their first use."""
        hall = super().hall()
        self._check = next(iter(hall.wakers.values()))._check
        hall.channels = {n: ProcessRun(self, n, spec, settles) for n, spec in self.specs.items()}
        self.opened, self.links, self._lock = {}, [], threading.RLock()
        return hall

    @contextmanager
    def at(self, job, args):
        """The channels of one endpoint, in a separate process."""
        side = SIDES[job.__name__]
        number = args[0] if "end" in inspect.signature(job).parameters else 0
        hall = self.hall()
        self.join(self.ends.index((side, number)))
        for name, waker in hall.wakers.items():
            waker._check = self._look_around
            hall.wakers[name] = self.links[0].waker(waker, alone=number > 0)
        try:
            yield hall
        finally:
            self.close()

    def join(self, me: int) -> None:
        """Connect one endpoint to its peers."""
        links = Connections(me, self.lines.names, self.lines.known, self._check)
        links.join(self.listeners[me], self.lines.others(me), self.lines.addresses)
        wakers = super().hall().wakers
        of = {f: [wakers[e] for e in self.ends if e[0] == f] for f in "wr"}

        def wake() -> None:
            for waker in wakers.values():
                waker.notify()

        channels = open_channels(self.lines, links, wake, self.memories[me])
        for channel in channels.values():
            gate = channel.state.spec.gate
            channel.state.subscribe(of[gate.reader], of[gate.writer])
        self.links.append(links)
        self.opened[me] = channels

    def _look_around(self) -> None:
        self._check()
        for links in self.links:
            links.check()

    def close(self) -> None:
        """Close all connections."""
        for links in self.links:
            links.close()

    def __del__(self) -> None:
        self.close()

    def channel(self, name: str, fragment: str, end: int):
        """The channel of one endpoint."""
        me = self.ends.index((fragment, end))
        with self._lock:
            if me not in self.opened:
                if self.together:
                    self._join_all()
                else:
                    self.join(me)
        return self.opened[me][name]

    together = True  # whether all ends are in this process
    links = ()

    def _join_all(self) -> None:
        with ThreadPoolExecutor(len(self.ends)) as pool:
            list(pool.map(self.join, range(len(self.ends))))


def _opened(specs, listeners, fds, sizes, token, signed) -> Wired:
    *memories, memory = [Memory(fd.detach(), n) for fd, n in zip(fds, sizes, strict=True)]
    found = Wired(specs, (listeners, memories, memory, token), signed=signed)
    found.together = False
    return found


LINES["tcp"] = Wired
SIDES = {
    "write": "w", "put_and_die": "w", "news": "w", "actor": "w",
    "read": "r", "take_and_die": "r", "watch": "r", "beats": "r",
}  # fmt: skip


class ProcessRun:
    """A channel that forwards each call to the endpoint's own channel."""

    def __init__(self, line: Wired, name: str, spec: ChannelSpec, settles: bool) -> None:
        self.line, self.name, self.spec = line, name, spec
        self.state = Stile(self, settles)

    def writer(self, end: int):
        """The channel of a writer."""
        return self.line.channel(self.name, self.spec.gate.writer, end)

    def reader(self, end: int):
        """The channel of a reader."""
        return self.line.channel(self.name, self.spec.gate.reader, end)

    def put(self, end, message, version) -> None:
        self.writer(end).put(end, message, version)

    def take(self, end, tick, receive):
        return self.reader(end).take(end, tick, receive)


class Live:
    """Counters that are read from their endpoint at each access."""

    def __init__(self, look, count: int) -> None:
        self._look, self._count = look, count

    def __getitem__(self, index: int) -> int:
        if index >= self._count:
            raise IndexError
        return self._look(index)


class Stile:
    """Reads each endpoint's own state; `counts` are the endpoint's own counters.

    If it settles, it answers only when all endpoints have received every count.
    """

    def __init__(self, channel: ProcessRun, settles: bool) -> None:
        self._channel, self.spec, self._settles = channel, channel.spec, settles
        line, gate = channel.line, channel.spec.gate
        seen = [line.lines.layouts.open(m)[channel.name].state.counts for m in line.memories]
        of = {f: [s for s, e in zip(seen, line.ends, strict=True) if e[0] == f] for f in "wr"}
        self._readers, self._writers = of[gate.reader], of[gate.writer]
        self._is_some = takes_some(gate.flow)

    @property
    def counts(self):
        return self

    def subscribe(self, readers, writers) -> None:
        """Do nothing: every endpoint's own state has subscribers."""

    def may_put(self, end: int) -> bool:
        stile = self._channel.writer(end).state
        self._settle()
        return stile.may_put(end)

    def may_take(self, end: int, tick: int) -> bool:
        stile = self._channel.reader(end).state
        self._settle()
        return stile.may_take(end, tick)

    @property
    def puts(self):
        return Live(lambda w: self._writers[w].puts[w], len(self._writers))

    @property
    def takes(self):
        if self._is_some:
            return self._readers[0].takes
        return Live(lambda r: self._readers[r].takes[r], len(self._readers))

    def _settle(self) -> None:
        if self._settles:
            until(lambda: all(self._is_known(r, w) for r, w in self._pairs()))

    def _pairs(self):
        return [(r, w) for r, sources in enumerate(self.spec.gate.sources) for w in sources]

    def _is_known(self, r: int, w: int) -> bool:
        """Whether a writer has received a reader's takes, and the reader its puts."""
        puts, takes, reader, writer = self.puts, self.takes, self._readers[r], self._writers[w]
        if isinstance(self.spec.gate.flow, Latest):
            beside = self.spec.gate.sources[r]
            known = all(self._writers[b].puts[w] == puts[w] for b in beside)
        else:
            known = writer.takes[w if self._is_some else r] == takes[w if self._is_some else r]
        return known and reader.puts[w] == puts[w]
