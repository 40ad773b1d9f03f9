"""Reads files that grow: the whole lines that were added since the last look."""

from __future__ import annotations

import json
import math
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
MOST_LINE = 1_000_000  # bytes; a longer line is no row of Shoal's
CHUNK = 1_000_000  # bytes that are read at once
SAMPLED = 512  # rows that stand for a long file until it is read


class Tail:
    """The lines of a file that is appended to; starts again where it was cut or replaced."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = self.offset = 0
        self._rest, self._file = b"", 0

    @property
    def is_behind(self) -> bool:
        """Whether there is more to read."""
        return self.offset < self.size

    def check(self) -> bool:
        """Look at the file's size; whether the file was cut or replaced, and is read again."""
        try:
            found = os.stat(self.path)
        except OSError:
            return False
        size = found.st_size if stat.S_ISREG(found.st_mode) else 0
        again = size < self.offset or (self._file not in (0, found.st_ino))
        if again:
            self.offset, self._rest = 0, b""
        self.size, self._file = size, found.st_ino
        return again

    def lines(self) -> list[bytes]:
        """The next whole lines, at most those of one chunk."""
        if not self.is_behind:
            return []
        try:
            with open(self.path, "rb") as file:
                file.seek(self.offset)
                data = file.read(CHUNK)
        except OSError:
            data = b""
        if not data:  # it can't be read, or was cut just now: nothing is waited for
            self.size = self.offset
        self.offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MOST_LINE:
            self._rest = b""
        return lines


def parsed(lines: list[bytes]) -> list[dict[str, Any]]:
    """The rows that lines of JSON hold; lines that hold none are left out."""
    try:
        rows = json.loads(b"[" + b",".join(line for line in lines if line.strip()) + b"]")
    except (ValueError, RecursionError):
        rows = [_parsed(line) for line in lines]
    return [row for row in rows if isinstance(row, dict)]


def number(value: Any, default: T) -> float | T:
    """A finite number of a file; `default` for what is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return default
    try:
        found = float(value)
    except OverflowError:
        return default
    return found if math.isfinite(found) else default


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def sampled(path: Path) -> list[dict[str, Any]]:
    """Some rows of a long file, evenly spaced by their place in it, and its last."""
    found = []
    with suppress(OSError), open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        for part in range(SAMPLED):
            file.seek(size * part // SAMPLED)
            if part:
                file.readline(MOST_LINE)
            found.append(file.readline(MOST_LINE))
        file.seek(max(0, size - MOST_LINE))
        found += file.read().split(b"\n")[-2:-1]
    return parsed(list(dict.fromkeys(found)))
