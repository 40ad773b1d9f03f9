"""Socket functions: listening, connecting, sending buffers, and describing failures."""

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
MOST_VIEWS = 512  # buffers per system call
# Bytes per send call: in a longer one the kernel doesn't process the other side's acknowledgements,
# so that sender and reader alternate (benchmarks/README.md).
MOST_SENT = 512 << 10
_ALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))


def listen(host: str = LOOPBACK) -> socket.socket:
    """A listening socket at a free port, for workers on other hosts."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.create_server((host, 0), backlog=1024, family=family)
    found.set_inheritable(True)
    return found


def connecting(address: Address) -> socket.socket:
    """A non-blocking socket that is connecting to `address`."""
    family, kind, protocol, _, where = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, kind, protocol)
    sock.settimeout(0)
    if (error := sock.connect_ex(where)) not in (0, errno.EINPROGRESS):
        sock.close()
        raise OSError(error, os.strerror(error))
    return sock


def tuned(sock: socket.socket) -> socket.socket:
    """Set a socket to send at once and to detect a dead peer; returns it."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _ALIVE:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000)
    # A blocking call returns periodically, to check whether the run stops.
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", 0, 200_000))
    return sock


def send_all(sock: socket.socket, views: list[Any], left: int, check: Callable[[], None]) -> None:
    """Send all of these buffers, which have `left` bytes in total."""
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
    """The first `count` bytes of these buffers, or all."""
    found: list[Any] = []
    for view in views:
        found.append(view if len(view) <= count else memoryview(view)[:count])
        count -= len(found[-1])
        if not count:
            break
    return found


def after(views: Sequence[Any], done: int) -> list[Any]:
    """These buffers without their first `done` bytes."""
    for i, view in enumerate(views):
        if done < len(view):
            return [memoryview(view)[done:], *views[i + 1 :]]
        done -= len(view)
    return []


def is_delivered(sock: socket.socket) -> bool:
    """Whether the other host has received all sent bytes."""
    if not hasattr(termios, "TIOCOUTQ"):
        return True
    return struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0" * 4))[0] == 0


def why_of(error: BaseException) -> str:
    """The reason why a connection ended, in words."""
    match error:
        case EOFError():
            return "the other side closed it"
        case ConnectionResetError() | BrokenPipeError():
            return "it was cut off"
        case TimeoutError():
            return "no answer in time"
    return str(error)
