"""Where worker processes' output goes: to whoever listens, line by line, with who said it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Say = Callable[[str], None]


def to_stderr(line: str) -> None:
    """Write a line to this process's own terminal."""
    sys.stderr.write(line + "\n")


_say: ContextVar[Say] = ContextVar("say", default=to_stderr)


def listener() -> Say:
    """Who listens now."""
    return _say.get()


@contextmanager
def listening(say: Say) -> Iterator[None]:
    """Let `say` hear the lines of workers that start meanwhile."""
    before = _say.set(say)
    try:
        yield
    finally:
        _say.reset(before)
