"""Anonymous shared memory: the kernel frees it when the last process that maps it exits.

That holds even if all processes are killed at once, so nothing has to be cleaned up. No other
process can open it, since its file descriptor is only inherited.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16, float8 and int4 with NumPy
import numpy as np

HUGE = 8 << 20  # bytes of private memory from which huge pages are used
LINE = 64  # bytes of a cache line; counts written by different processes never share one
_FUTEX, _MEMBARRIER = {
    "x86_64": (202, 324),
    "aarch64": (98, 283),
}.get(platform.machine() if sys.platform == "linux" else "", (0, 0))
# Whether stores become visible in order; elsewhere a count needs a fence before it.
ORDERED = platform.machine() in ("x86_64", "AMD64")
_WAIT, _WAKE = 0, 1
_REGISTER, _BARRIER = 1 << 2, 1 << 1  # flags of sys_membarrier, global expedited
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class Allocator:
    """Allocates offsets in memory that is made later: each gets the next free bytes."""

    def __init__(self) -> None:
        self.size = 0

    def take(self, nbytes: int) -> int:
        """Allocate `nbytes` at the start of a cache line; returns their offset."""
        first = self.size
        self.size = -(-(first + nbytes) // LINE) * LINE
        return first


class Memory:
    """A block of memory, mapped in this process: shared, or private."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd, self.size = fd, size
        self.is_shared = fd >= 0
        self._map = mmap.mmap(fd, size, mmap.MAP_SHARED if self.is_shared else mmap.MAP_PRIVATE)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        if self.is_shared:
            weakref.finalize(self, os.close, fd)  # an open file descriptor would keep the memory
        elif size >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages
                self._map.madvise(mmap.MADV_HUGEPAGE)

    @staticmethod
    def make(size: int) -> Memory:
        """New shared memory, filled with zeros; child processes inherit its file descriptor."""
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("shoal", 0)
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        os.ftruncate(fd, max(size, LINE))
        return Memory(fd, max(size, LINE))

    @staticmethod
    def own(size: int) -> Memory:
        """New private memory, filled with zeros; in huge pages if it is large."""
        return Memory(-1, max(size, LINE))

    def words(self, first: int, count: int) -> memoryview:
        """64-bit counts, each in its own cache line."""
        whole = memoryview(self._map)[first : first + count * LINE].cast("q")
        return whole[:: LINE // 8]

    def packed(self, first: int, count: int) -> memoryview:
        """64-bit counts without padding."""
        return memoryview(self._map)[first : first + count * 8].cast("q")

    def array(self, first: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """An array in this memory, at offset `first`."""
        return np.ndarray(shape, dtype, buffer=self._map, offset=first)

    def address(self, first: int) -> int:
        """The address of an offset in this process."""
        return self._base + first


def fence() -> None:
    """Order this process's writes before its later reads, and those of all registered processes.

    The expensive side of an asymmetric fence: a thread pays before it sleeps, its waker doesn't.
    """
    if _MEMBARRIER:
        _libc.syscall(ctypes.c_long(_MEMBARRIER), ctypes.c_long(_BARRIER), 0, 0)


def join_fences() -> None:
    """Register for the fences of other processes; each process calls it once."""
    if _MEMBARRIER:
        _libc.syscall(ctypes.c_long(_MEMBARRIER), ctypes.c_long(_REGISTER), 0, 0)


class FutexWaker:
    """Wakes a waiting process, which spins for a while and then sleeps on a futex."""

    def __init__(
        self,
        memory: Memory,
        first: int,
        spin: float = 0.0,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._word = memory.words(first, 1)
        self._address = ctypes.c_void_p(memory.address(first))
        self._spin, self._check = spin, check

    def wait(self, ready: Callable[[], bool], seconds: float) -> None:
        """Return when notified, when `ready`, or after `seconds`; raise if the run stops."""
        until = time.perf_counter() + min(self._spin, seconds)
        while True:
            if ready():
                return
            if time.perf_counter() >= until:
                break
            os.sched_yield()  # to the awaited process, if it needs this core
        self._check()
        if seconds > 0:
            self._word[0] = 1
            fence()
            self._check()
            if not ready():
                self._sleep(seconds)
            self._word[0] = 0
            self._check()

    def _sleep(self, seconds: float) -> None:
        if not _FUTEX:
            time.sleep(min(seconds, 1e-4))
            return
        # A wake-up can't be lost, but a process can die: check periodically.
        seconds = min(seconds, 0.1)
        limit = (ctypes.c_long * 2)(int(seconds), int(seconds % 1 * 1e9))
        _libc.syscall(ctypes.c_long(_FUTEX), self._address, _WAIT, 1, limit, None, 0)

    def notify(self) -> None:
        """Wake the waiting process."""
        if self._word[0]:
            self._word[0] = 0
            if _FUTEX:
                _libc.syscall(ctypes.c_long(_FUTEX), self._address, _WAKE, 1 << 30, None, None, 0)
