"""Routes the output of worker processes to a listener, line by line, with the worker's name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Log = Callable[[str], None]


def to_stderr(line: str) -> None:
    """Write a line to the standard error of this process."""
    sys.stderr.write(line + "\n")


_say: ContextVar[Log] = ContextVar("say", default=to_stderr)


def listener() -> Log:
    """The current listener."""
    return _say.get()


@contextmanager
def listening(say: Log) -> Iterator[None]:
    """Call `say` with each line of workers that start inside this context."""
    before = _say.set(say)
    try:
        yield
    finally:
        _say.reset(before)
