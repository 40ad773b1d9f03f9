"""One event loop for all sockets of a worker, which the worker runs itself while it waits.

A message that arrives while its reader waits needs no thread switch. While the worker does
something else, a background thread runs the loop, so that senders don't block.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from shoal.runtime.channels.channel import Waker

PAUSE_S = 5e-3  # after a worker ran the loop, the thread waits this long before it does
LOOK_S = 0.1  # between checks of a sleeping thread
TICK_S = 0.05  # between checks of deadlines
Callback = Callable[[], bool]  # returns whether data arrived


class Loop:
    """Calls a callback for each ready socket, and `tick` while any deadline is pending."""

    def __init__(self, tick: Callable[[float], bool]) -> None:
        self._tick, self._tick_at, self._is_busy = tick, 0.0, True
        self.lock = threading.RLock()  # held while callbacks run
        self._selector = selectors.DefaultSelector()
        self._called, self._words = threading.Event(), threading.Lock()
        self._leads, self._waiting, self._left = False, 0, 0.0
        self._closed = False
        self._wakes, self._woken = socket.socketpair()
        self._wakes.settimeout(0)

    def start(self) -> None:
        """Start the thread."""

        def woken() -> bool:
            with suppress(OSError):
                self._woken.recv(4096, socket.MSG_DONTWAIT)
            return False

        self.watch(self._woken, woken)
        threading.Thread(target=self._run, daemon=True).start()

    def watch(self, sock: socket.socket, callback: Callback) -> None:
        """Set the callback for when a socket has data."""
        with self.lock:
            self._selector.register(sock.fileno(), selectors.EVENT_READ, callback)
        self._is_busy = True

    def unwatch(self, sock: socket.socket | None) -> None:
        """Remove a socket's callback; it is not running when this returns."""
        with self.lock:
            fd = -1 if sock is None else sock.fileno()
            if fd >= 0 and fd in self._selector.get_map():
                self._selector.unregister(fd)

    def step(self, seconds: float) -> bool:
        """Handle ready sockets, waiting up to `seconds`; returns whether data arrived."""
        ready = self._selector.select(min(seconds, TICK_S) if self._is_busy else seconds)
        came = False
        with self.lock:
            watched = self._selector.get_map()
            for key, _ in ready:
                # One that was closed meanwhile, or whose fd was reused, has nothing to read.
                if key.fd in watched:
                    came = watched[key.fd].data() or came
            if self._is_busy and time.monotonic() >= self._tick_at:
                self._is_busy = self._tick(time.monotonic())
                self._tick_at = time.monotonic() + TICK_S
        return came

    def call(self) -> None:
        """Wake the thread or worker that runs the loop."""
        self._is_busy = True
        self._called.set()
        with suppress(OSError):
            self._wakes.send(b"\0")

    def close(self) -> None:
        """Stop the thread."""
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
        """Count a worker that waits."""
        with self._words:
            self._waiting += 1

    def leave(self) -> None:
        """Uncount a worker that waited."""
        with self._words:
            self._waiting -= 1

    def lead(self) -> bool:
        """Let the calling worker run the loop; returns whether no other does."""
        with self._words:
            if self._leads:
                return False
            self._leads = True
        return True

    def rest(self) -> None:
        """Stop running the loop; the thread does if other workers wait."""
        self._left = time.perf_counter()
        self._leads = False
        if self._waiting > 1:
            self.call()

    def hand_over(self) -> None:
        """Stop running the loop; the thread runs it at once."""
        self.rest()
        self._left = 0.0
        self.call()


class SocketWaker:
    """The waker of a worker with connections, which runs their event loop while it waits.

    A worker that nothing else can wake sleeps in the loop, any other in its own waker.
    """

    def __init__(
        self, waker: Waker, loop: Loop, check: Callable[[], None], spin: float, *, alone: bool
    ) -> None:
        self._waker, self._loop, self._check = waker, loop, check
        self._spin, self._alone = spin, alone

    def wait(self, ready: Callable[[], bool], seconds: float) -> None:
        """Return when `ready`, or after `seconds` at most; raise if the run stops."""
        self._loop.enter()
        try:
            if not self._has_led(ready, seconds):
                self._waker.wait(ready, seconds)
        finally:
            self._loop.leave()

    def _has_led(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Run the loop while waiting, unless another does; returns whether the wait is over."""
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
        """Run the loop while data arrives, and until `until`; returns whether it is ready."""
        step = self._loop.step
        while not ready():
            if step(0.0):
                continue
            if time.perf_counter() >= until:
                return False
            os.sched_yield()  # to the awaited process, if it needs this core
        return True

    def _sleep(self, ready: Callable[[], bool], until: float) -> None:
        while not ready():
            self._check()
            left = until - time.perf_counter()
            if left <= 0:
                return
            self._loop.step(left)

    def notify(self) -> None:
        """Wake the worker that owns this waker."""
        self._waker.notify()
        self._loop.call()
