"""Who reads a worker's connections: the worker itself where it waits, else a thread.

A message that comes while its reader waits for it costs no hand-over between threads; one that
comes while the reader works is read beside it, so that who sends need not wait.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from shoal.runtime.channels.channel import Waker
from shoal.runtime.net.connection import Connection

PAUSE = 5e-3  # seconds after a worker read itself in which the thread leaves it to that
LOOK = 0.1  # seconds after which whoever sleeps looks around
Failed = Callable[[Connection, BaseException], None]


class ConnectionReader:
    """Reads all connections of a worker; `failed` hears of those that break."""

    def __init__(self, failed: Failed) -> None:
        self._failed = failed
        self._links: dict[int, tuple[Connection, socket.socket]] = {}
        self._turn = threading.RLock()  # held by who reads
        self._words = threading.Lock()
        self._leads = False  # whether a worker reads
        self._waiting = 0  # workers that wait, whoever reads
        self._left = 0.0  # when a worker last read
        self._called = threading.Event()
        self._wakes, self._woken = socket.socketpair()
        self._worker, self._thread = select.poll(), select.poll()
        for end in (self._wakes, self._woken):
            end.settimeout(0)
        for poll in (self._worker, self._thread):
            poll.register(self._woken, select.POLLIN)
        self._closed = False
        threading.Thread(target=self._run, daemon=True).start()

    def add(self, link: Connection) -> None:
        """Read a connection from now on."""
        sock = link.sock
        assert sock is not None
        self._links[sock.fileno()] = link, sock
        for poll in (self._worker, self._thread):
            poll.register(sock, select.POLLIN)
        self.call()

    def drop(self, link: Connection) -> None:
        """Read it no more: when this returns, nobody does."""
        with self._turn:
            for fd, (one, _) in list(self._links.items()):
                if one is link:
                    del self._links[fd]
                    for poll in (self._worker, self._thread):
                        poll.unregister(fd)

    def close(self) -> None:
        """Read nothing any more."""
        self._closed = True
        self.call()

    def call(self) -> None:
        """Let whoever reads look at once, and the thread if nobody does."""
        self._called.set()
        with suppress(BlockingIOError):
            self._wakes.send(b"\0")

    # The worker.

    def enter(self) -> None:
        """A worker waits, whoever reads."""
        with self._words:
            self._waiting += 1

    def leave(self) -> None:
        """It waits no more."""
        with self._words:
            self._waiting -= 1

    def lead(self) -> bool:
        """Let the calling worker read, unless another does."""
        with self._words:
            if self._leads:
                return False
            self._leads = True
        return True

    def rest(self) -> None:
        """Read no more oneself; the thread does if others wait."""
        self._left = time.perf_counter()
        self._leads = False
        if self._waiting > 1:
            self.call()

    def hand_over(self) -> None:
        """Let the thread read at once."""
        self.rest()
        self._left = 0.0
        self.call()

    def read(self, seconds: float) -> bool:
        """Read what is there, or comes within so many seconds; whether anything came."""
        links = self._links
        if not seconds and len(links) == 1:
            return self._take(*next(iter(links.values())))
        return self._take_from([fd for fd, _ in self._worker.poll(1000 * seconds)])

    def _take_from(self, ready: list[int]) -> bool:
        if self._woken.fileno() in ready:
            with suppress(BlockingIOError):
                self._woken.recv(4096)
        return any([self._take(*self._links[fd]) for fd in ready if fd in self._links])

    def _take(self, link: Connection, sock: socket.socket) -> bool:
        """Read a connection once; one that has ended or broken is read no more."""
        inbox = link.inbox
        assert inbox is not None
        try:
            with self._turn:
                if link.sock is not sock:
                    return True
                inbox.read(sock)
        except BlockingIOError:
            return False
        except BaseException as error:
            self.drop(link)
            self._failed(link, error)
            return True
        if inbox.ended:
            link.ended = True
            self.drop(link)
            self._failed(link, EOFError())
        return True

    # The thread.

    def _run(self) -> None:
        while not self._closed:
            if self._leads or time.perf_counter() - self._left < PAUSE:
                if not self._called.wait(PAUSE):
                    continue
                self._called.clear()
                if self._leads:
                    continue
            ready = [fd for fd, _ in self._thread.poll(1000 * LOOK)]
            if not self._leads:
                self._take_from(ready)


class Wakes(NamedTuple):
    """What may end a worker's wait besides its connections."""

    check: Callable[[], None]  # raises if all is to stop
    alone: bool  # whether there is nothing else: no other worker of its host, no other thread


class SocketWaker:
    """The bell of a worker with connections: it reads them while it waits.

    One that is woken by nobody else sleeps by its connections, any other by its own bell.
    """

    def __init__(
        self, bell: Waker, porter: ConnectionReader, wakes: Wakes, spin: float = 0.0
    ) -> None:
        self._bell, self._porter = bell, porter
        self._check, self._alone, self._spin = wakes.check, wakes.alone, spin

    def wait(self, ready: Callable[[], bool], seconds: float) -> None:
        """Return when `ready`, or after so many seconds at most; raise if all is to stop."""
        self._porter.enter()
        try:
            if not self._has_led(ready, seconds):
                self._bell.wait(ready, seconds)
        finally:
            self._porter.leave()

    def _has_led(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Read while waiting, if nobody else does; whether the wait is over then."""
        porter, now = self._porter, time.perf_counter()
        if not porter.lead():
            return False
        ends = porter.hand_over
        try:
            if self._read(ready, now + min(self._spin, seconds)):
                ends = porter.rest
            elif self._alone:
                ends = porter.rest
                self._sleep(ready, now + min(seconds, LOOK))
        finally:
            ends()
        return ends == porter.rest

    def _read(self, ready: Callable[[], bool], until: float) -> bool:
        """Read for as long as something comes, and a moment more; whether it is ready then."""
        read = self._porter.read
        while not ready():
            if read(0.0):
                continue
            if time.perf_counter() >= until:
                return False
            os.sched_yield()  # to whom we wait for, should it want this core
        return True

    def _sleep(self, ready: Callable[[], bool], until: float) -> None:
        while not ready():
            self._check()
            left = until - time.perf_counter()
            if left <= 0:
                return
            self._porter.read(left)

    def ring(self) -> None:
        """Wake who waits."""
        self._bell.ring()
        self._porter.call()
