"""One poll loop for all sockets of a worker, which the worker runs itself while it waits.

A message that comes while its reader waits for it costs no switch between threads. While the
worker does something else, a thread runs the loop, so that senders need not wait.
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

PAUSE_S = 5e-3  # after a worker ran the loop itself, in which the thread leaves it to that
LOOK_S = 0.1  # after which a thread that sleeps looks around
TICK_S = 0.05  # between two looks at what is overdue
MOST_SKIPPED = 64  # times that the only connection is read without a look at the other sockets
READ, WRITE = select.POLLIN, select.POLLOUT
Callback = Callable[[int], bool]  # of what a socket is ready for; whether anything came


class Loop:
    """Calls back for each socket that is ready, and `tick` while anything may become overdue."""

    def __init__(self, tick: Callable[[float], bool]) -> None:
        self._tick, self._tick_at, self._is_busy = tick, 0.0, True
        self.turn = threading.RLock()  # held while anything is called back
        self._poll = _Poll()
        self._callbacks: dict[int, Callback] = {}
        self._streams: dict[int, Callback] = {}  # those of connections that stand
        self._skipped = 0
        self._called, self._words = threading.Event(), threading.Lock()
        self._leads, self._waiting, self._left = False, 0, 0.0
        self._closed = False
        self._wakes, self._woken = socket.socketpair()
        self._wakes.settimeout(0)

    def start(self, wake: Callable[[], None]) -> None:
        """Start the thread; `wake` is called whenever the loop was called to look at once."""

        def woken(_: int) -> bool:
            with suppress(OSError):
                self._woken.recv(4096, socket.MSG_DONTWAIT)
            wake()
            return False

        self.watch(self._woken, woken)
        threading.Thread(target=self._run, daemon=True).start()

    def watch(self, sock: socket.socket, callback: Callback, mask: int = READ) -> None:
        """Call back when a socket is ready, instead of what was called before."""
        with self.turn:
            is_new = sock.fileno() not in self._callbacks
            self._callbacks[sock.fileno()] = callback
            change = self._poll.register if is_new else self._poll.modify
            change(sock.fileno(), mask)
        self._is_busy = True

    def watch_stream(self, sock: socket.socket, callback: Callback, mask: int) -> None:
        """The same for a connection, which is read without asking where it is the only one."""
        with self.turn:
            self.watch(sock, callback, mask)
            self._streams[sock.fileno()] = callback

    def unwatch(self, sock: socket.socket | None) -> None:
        """Call back no more: when this returns, nothing is called back."""
        with self.turn:
            if sock is not None and self._callbacks.pop(sock.fileno(), None) is not None:
                self._streams.pop(sock.fileno(), None)
                self._poll.unregister(sock.fileno())

    def expect(self) -> None:
        """Something may become overdue from now on."""
        self._is_busy = True

    def step(self, seconds: float) -> bool:
        """Do what there is to do, or comes within `seconds`; whether anything came."""
        if not seconds and len(self._streams) == 1 and self._skipped < MOST_SKIPPED:
            self._skipped += 1
            with self.turn:
                for callback in list(self._streams.values()):
                    return callback(READ)
        self._skipped = 0
        ready = self._poll.poll(min(seconds, TICK_S) if self._is_busy else seconds)
        came = False
        with self.turn:
            for fd, mask in ready:
                # One that was closed meanwhile, or whose number another has, finds nothing to read.
                if (callback := self._callbacks.get(fd)) is not None:
                    came = callback(mask) or came
            if self._is_busy and time.monotonic() >= self._tick_at:
                self._is_busy = self._tick(time.monotonic())
                self._tick_at = time.monotonic() + TICK_S
        return came

    def call(self) -> None:
        """Let the thread or worker that runs the loop look at once."""
        self._is_busy = True
        self._called.set()
        with suppress(OSError):
            self._wakes.send(b"\0")

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self.call()

    def _run(self) -> None:
        while not self._closed:
            if self._leads or time.perf_counter() - self._left < PAUSE_S:
                if not self._called.wait(PAUSE_S):
                    continue
                self._called.clear()
                if self._leads:
                    continue
            self.step(LOOK_S)

    # A worker that waits.

    def enter(self) -> None:
        """A worker waits, whichever thread runs the loop."""
        with self._words:
            self._waiting += 1

    def leave(self) -> None:
        """It waits no more."""
        with self._words:
            self._waiting -= 1

    def lead(self) -> bool:
        """Let the calling worker run the loop, unless another does."""
        with self._words:
            if self._leads:
                return False
            self._leads = True
        return True

    def rest(self) -> None:
        """Run the loop no more; the thread does if others wait."""
        self._left = time.perf_counter()
        self._leads = False
        if self._waiting > 1:
            self.call()

    def hand_over(self) -> None:
        """Let the thread run the loop at once."""
        self.rest()
        self._left = 0.0
        self.call()


class _Poll:
    """The sockets that are ready; may be asked by two threads at once."""

    def __init__(self) -> None:
        self._epoll = select.epoll() if hasattr(select, "epoll") else None
        self._masks: dict[int, int] = {}

    def register(self, fd: int, mask: int) -> None:
        """Ask for a socket from now on; the masks of `poll` and `epoll` are the same."""
        self._masks[fd] = mask
        if self._epoll is not None:
            self._epoll.register(fd, mask)

    def modify(self, fd: int, mask: int) -> None:
        """Ask for something else of a socket."""
        if self._masks[fd] != mask:
            self._masks[fd] = mask
            if self._epoll is not None:
                self._epoll.modify(fd, mask)

    def unregister(self, fd: int) -> None:
        """Ask no more for a socket."""
        del self._masks[fd]
        if self._epoll is not None:
            self._epoll.unregister(fd)

    def poll(self, seconds: float) -> list[tuple[int, int]]:
        """The sockets that are ready within `seconds`, and for what; all errors count as READ."""
        if self._epoll is not None:
            found = self._epoll.poll(seconds)
        else:
            poll = select.poll()
            for fd, mask in list(self._masks.items()):
                poll.register(fd, mask)
            found = poll.poll(1000 * seconds)
        return [(fd, mask if mask in (READ, WRITE) else mask | READ) for fd, mask in found]


class Wakes(NamedTuple):
    """What may end a worker's wait besides its connections."""

    check: Callable[[], None]  # raises if all is to stop
    alone: bool  # whether there is nothing else: no other worker of its host, no other thread


class SocketWaker:
    """The waker of a worker with connections: it runs their loop while it waits.

    One that nothing else can wake sleeps in the loop, any other by its own waker.
    """

    def __init__(self, waker: Waker, loop: Loop, wakes: Wakes, spin: float = 0.0) -> None:
        self._waker, self._loop = waker, loop
        self._check, self._alone, self._spin = wakes.check, wakes.alone, spin

    def wait(self, ready: Callable[[], bool], seconds: float) -> None:
        """Return when `ready`, or after `seconds` at most; raise if all is to stop."""
        self._loop.enter()
        try:
            if not self._has_led(ready, seconds):
                self._waker.wait(ready, seconds)
        finally:
            self._loop.leave()

    def _has_led(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Run the loop while waiting, unless another does; whether the wait is over then."""
        loop, now = self._loop, time.perf_counter()
        if not loop.lead():
            return False
        ends = loop.hand_over
        try:
            if self._read(ready, now + min(self._spin, seconds)):
                ends = loop.rest
            elif self._alone:
                ends = loop.rest
                self._sleep(ready, now + min(seconds, LOOK_S))
        finally:
            ends()
        return ends == loop.rest

    def _read(self, ready: Callable[[], bool], until: float) -> bool:
        """Run the loop for as long as something comes, and a moment more; whether it is ready."""
        step = self._loop.step
        while not ready():
            if step(0.0):
                continue
            if time.perf_counter() >= until:
                return False
            os.sched_yield()  # to the process that we wait for, should it want this core
        return True

    def _sleep(self, ready: Callable[[], bool], until: float) -> None:
        while not ready():
            self._check()
            left = until - time.perf_counter()
            if left <= 0:
                return
            self._loop.step(left)

    def notify(self) -> None:
        """Wake the owner."""
        self._waker.notify()
        self._loop.call()
