"""Sockets: how whole buffers are sent, and what is said when that fails."""

from __future__ import annotations

import fcntl
import socket
import struct
import termios
import time
from collections.abc import Callable, Sequence
from typing import Any

LOOPBACK = "127.0.0.1"
MOST_VIEWS = 512  # arrays that go in one call
# Bytes that are sent in one call: in a longer one the kernel hears of nothing that was read until
# its end, so that who sends and who reads take turns (benchmarks/README.md).
MOST_SENT = 512 << 10
_ALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))


def listen(host: str = LOOPBACK) -> socket.socket:
    """A socket that workers of other hosts can connect to, at a free port."""
    found = socket.create_server((host, 0), backlog=128, family=_family(host))
    found.set_inheritable(True)
    return found


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def within(sock: socket.socket, count: int, seconds: float) -> bytes:
    """Exactly so many bytes, all of them within so many seconds."""
    found, until = b"", time.monotonic() + seconds
    while len(found) < count:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        sock.settimeout(left)
        some = sock.recv(count - len(found))  # no more than that: what follows is for others
        if not some:
            raise EOFError
        found += some
    return found


def tuned(sock: socket.socket) -> socket.socket:
    """A socket that sends at once, and notices when the other host is gone."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _ALIVE:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000)
    # Whoever sends or reads looks around now and then, should all have to stop.
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", 0, 200_000))
    return sock


def send_all(sock: socket.socket, views: list[Any], left: int, check: Callable[[], None]) -> None:
    """Send all of these buffers of bytes, which have `left` bytes together."""
    while left:
        some = views if left <= MOST_SENT else first(views, MOST_SENT)
        try:
            sent = sock.sendmsg(some if len(some) <= MOST_VIEWS else some[:MOST_VIEWS])
        except BlockingIOError:
            check()
            continue
        left -= sent
        if left:
            views = after(views, sent)


def first(views: Sequence[Any], count: int) -> list[Any]:
    """As much of buffers of bytes as makes so many, or all."""
    found: list[Any] = []
    for view in views:
        found.append(view if len(view) <= count else memoryview(view)[:count])
        count -= len(found[-1])
        if not count:
            break
    return found


def after(views: Sequence[Any], done: int) -> list[Any]:
    """What is left of buffers of bytes when so many of them are done with."""
    for i, view in enumerate(views):
        if done < len(view):
            return [memoryview(view)[done:], *views[i + 1 :]]
        done -= len(view)
    return []


def is_delivered(sock: socket.socket) -> bool:
    """Whether the other host has all that was sent."""
    if not hasattr(termios, "TIOCOUTQ"):
        return True
    return struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0" * 4))[0] == 0


def why_of(error: BaseException) -> str:
    """What became of a connection, in words."""
    match error:
        case EOFError():
            return "it ended without a word"
        case ConnectionResetError() | BrokenPipeError():
            return "it was cut off"
        case TimeoutError():
            return "no answer in time"
    return str(error)
