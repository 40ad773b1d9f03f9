"""Every error a user can cause: what happened, where, and what to do about it."""

from __future__ import annotations

import difflib
import os
import sys
import sysconfig
from collections.abc import Iterable
from functools import cache
from types import FrameType

_OWN = os.path.dirname(os.path.abspath(__file__))
_COMMAND = os.path.join(_OWN, "cli")
_LIBRARIES = tuple({p for n, p in sysconfig.get_paths().items() if n.endswith(("lib", "stdlib"))})


def short_place(file: str, line: int) -> str:
    """A source line in the form that messages use: `folder/file.py:line`."""
    return f"{'/'.join(file.replace(chr(92), '/').split('/')[-2:])}:{line}"


def calling_place() -> str:
    """The innermost line of the user's code on the stack; empty under the command line."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_COMMAND):
            return ""
        if not file.startswith(("<", _OWN, *_LIBRARIES)):
            return short_place(file, frame.f_lineno)
        frame = frame.f_back
    return ""


@cache
def is_core(file: str) -> bool:
    """Whether a source file is a library's, or of the part of Shoal that runs user code."""
    parts = os.path.relpath(file, _OWN).split(os.sep)
    return parts[0] in ("tracing", "planning", "runtime", "graph") or "site-packages" in file


def user_place(error: BaseException) -> str:
    """The innermost line of the user's own code that `error` passed through."""
    found = ""
    trail = error.__traceback__
    while trail is not None:
        file = trail.tb_frame.f_code.co_filename
        if not file.startswith("<") and not is_core(file):
            found = short_place(file, trail.tb_lineno)
        trail = trail.tb_next
    return found


class ShoalError(Exception):
    """A mistake in what the user gave Shoal; the second line says how to fix it.

    `where` is the user's source line; by default the one that called Shoal.
    """

    def __init__(self, what: str, fix: str = "", where: str = "") -> None:
        where = where or calling_place()
        self.what, self.fix, self.where = what, fix, where
        place = f" ({where})" if where else ""
        super().__init__(f"{what}{place}\n{fix}" if fix else f"{what}{place}")


class TraceError(ShoalError):
    """The loop can't be turned into a graph."""


class CutError(ShoalError):
    """The distribution policy would change what the loop means."""


class PlaceError(ShoalError):
    """The cluster has no room for the plan."""


class SettingError(ShoalError):
    """A setting has a value that can't work."""


class RunError(ShoalError):
    """The run stopped; the message names the fragment, replica, tick and source line."""


class LostError(RunError):
    """A worker or host was lost, through no fault of the loop: its work can be repeated."""


class NotFiniteError(RunError):
    """A metric became NaN; `tick` says when, `state` is the last good state."""

    def __init__(self, what: str, fix: str, where: str, tick: int) -> None:
        super().__init__(what, fix, where)
        self.tick = tick
        self.state: object = None
        self.snapshot: object = None  # the same, with what a run needs to resume from it


class CheckpointError(ShoalError):
    """A checkpoint is damaged, or belongs to another loop."""


class TrustError(ShoalError):
    """A file names code that isn't Shoal's own, and nothing says that its author is trusted."""


class UnknownNameError(ShoalError):
    """A name that isn't in the list it must come from; the nearest known one is suggested."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        known = sorted(known)
        near = difflib.get_close_matches(name.lower(), [k.lower() for k in known], n=1, cutoff=0.5)
        right = next((k for k in known if near and k.lower() == near[0]), None)
        hint = f"Did you mean `{right}`? " if right else ""
        super().__init__(f"unknown {kind} `{name}`", f"{hint}Known: {', '.join(known)}.")


class MissingExtraError(ShoalError):
    """A package that an optional part needs isn't installed."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(
            f"{what} is not installed", f'Install it with: pip install "shoal[{extra}]"'
        )


def of_user_code(what: str, error: Exception) -> ShoalError:
    """An error in the user's code before anything was started: what failed, why, and where."""
    if isinstance(error, ShoalError):
        return error
    where = user_place(error)
    if isinstance(error, SyntaxError):
        where = short_place(error.filename or "", error.lineno or 0)
    why = f"{type(error).__name__}: {first_line(error)}".rstrip(": ")
    return SettingError(
        f"{what}: {why}", "Correct it there; --debug shows the whole traceback.", where
    )


class RowError(Exception):
    """An error in one environment of many: `row` is its index, `cause` the exception."""

    def __init__(self, row: int, what: str, cause: Exception | None = None) -> None:
        self.row, self.what, self.cause = row, what, cause
        super().__init__(row, what, cause)

    def __str__(self) -> str:
        why = f": {type(self.cause).__name__}: {self.cause}" if self.cause else ""
        return f"environment {self.row} {self.what}{why}"


def printable(text: str) -> str:
    """`text` without control characters and line breaks."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, truncated."""
    return str(error).strip().split("\n")[0][:300]
