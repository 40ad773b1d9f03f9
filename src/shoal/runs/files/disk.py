"""Full disks: free space, and the errors by which libraries report that there is none."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
WORDS = tuple(os.strerror(number) for number in FULL)


class FullError(OSError):
    """The disk has no room for a write."""


def check_room(folder: Path, needed: int) -> None:
    """Raise a FullError if the disk of `folder` has less free space than `needed` bytes."""
    if needed > free(folder):
        raise FullError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def free(folder: Path) -> int:
    """Bytes that may still be written to the disk of `folder`."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def size_of(folder: Path) -> int:
    """Bytes of all files in `folder`."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def why_full(error: BaseException, needed: int, folder: Path) -> str:
    """Why a write found the disk full; empty if the error is of another kind."""
    said = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
    words = next((words.lower() for words in WORDS if words in said), "")
    if words and no_more_files(folder):
        return f"{words} (it has room, but for no more files: its inodes are used up)"
    return words and f"{words} ({megabytes(needed)} needed, {megabytes(free(folder))} free)"


def no_more_files(folder: Path) -> bool:
    """Whether the disk of `folder` can hold no more files, whatever room it has for bytes."""
    found = os.statvfs(folder)
    return found.f_files > 0 and found.f_favail == 0


def megabytes(nbytes: float) -> str:
    """A size in megabytes as text."""
    return f"{nbytes / 1e6:.2g} MB" if nbytes < 1e7 else f"{nbytes / 1e6:,.0f} MB"


@contextmanager
def muted() -> Iterator[None]:
    """Suppress the pages that Orbax logs of errors that it also raises."""
    log, drop = logging.getLogger("absl"), lambda record: record.levelno < logging.ERROR
    log.addFilter(drop)
    _ignore_late_writes()
    try:
        yield
    finally:
        log.removeFilter(drop)


def _ignore_late_writes() -> None:
    """Ignore writes that were in progress when one failed: they fail later, in no caller."""
    before: Callable[[Any], Any] = sys.unraisablehook
    if getattr(before, "ignores_late_writes", False):
        return

    def hook(raised: Any) -> None:
        is_late = isinstance(raised.exc_value, RuntimeError)
        if not (is_late and str(raised.exc_value) == "Event loop is closed"):
            before(raised)

    hook.ignores_late_writes = True  # type: ignore[attr-defined]
    sys.unraisablehook = hook
