"""Sockets: how whole buffers are sent, and how a failure is described."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
import termios
from collections.abc import Callable, Sequence
from typing import Any

Address = tuple[str, int]
LOOPBACK = "127.0.0.1"
MOST_VIEWS = 512  # arrays that go in one call
# Bytes that are sent in one call: during a longer one the kernel doesn't process what the other
# side has read, so that sender and reader take turns (benchmarks/README.md).
MOST_SENT = 512 << 10
_ALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))


def listen(host: str = LOOPBACK) -> socket.socket:
    """A socket that workers of other hosts can connect to, at a free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.create_server((host, 0), backlog=1024, family=family)
    found.set_inheritable(True)
    return found


def connecting(address: Address) -> socket.socket:
    """A socket that connects in the background."""
    family, kind, protocol, _, where = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, kind, protocol)
    sock.settimeout(0)
    if (error := sock.connect_ex(where)) not in (0, errno.EINPROGRESS):
        sock.close()
        raise OSError(error, os.strerror(error))
    return sock


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
    # A blocking call returns now and then, to see whether the run is to stop.
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", 0, 200_000))
    return sock


def send_all(sock: socket.socket, views: list[Any], left: int, check: Callable[[], None]) -> None:
    """Send all of these buffers of bytes, which have `left` bytes together."""
    while left:
        try:
            sent = send_some(sock, views, left)
        except BlockingIOError:
            check()
            continue
        left -= sent
        if left:
            views = after(views, sent)


def send_some(sock: socket.socket, views: list[Any], left: int, flags: int = 0) -> int:
    """Send what one call may send of these buffers; how many bytes that was."""
    some = views if left <= MOST_SENT else first(views, MOST_SENT)
    return sock.sendmsg(some if len(some) <= MOST_VIEWS else some[:MOST_VIEWS], (), flags)


def first(views: Sequence[Any], count: int) -> list[Any]:
    """The first `count` bytes of buffers of bytes, or all."""
    found: list[Any] = []
    for view in views:
        found.append(view if len(view) <= count else memoryview(view)[:count])
        count -= len(found[-1])
        if not count:
            break
    return found


def after(views: Sequence[Any], done: int) -> list[Any]:
    """Buffers of bytes without their first `done` bytes."""
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
    """Why a connection ended, in words."""
    match error:
        case EOFError():
            return "the other side closed it"
        case ConnectionResetError() | BrokenPipeError():
            return "it was cut off"
        case TimeoutError():
            return "no answer in time"
    return str(error)
