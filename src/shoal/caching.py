"""A cache keyed by exact values: 1, 1.0 and True differ, and so do fields that `==` ignores."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

T = TypeVar("T")
_PLAIN = (str, bytes, int, float, complex, bool, type(None))
_MOST = 128  # results that a function remembers, the newest


def remembered(function: Callable[..., T]) -> Callable[..., T]:
    """Cache the results of `function` by its exact arguments.

    Numbers and strings are compared by type and value, tuples and dataclasses by their contents,
    any other object by identity. Arguments are kept alive while they are cached.
    """
    kept: dict[Any, tuple[tuple[Any, ...], T]] = {}

    @wraps(function)
    def found(*args: Any) -> T:
        key = exact_key(args)
        entry = kept.pop(key, None) or (args, function(*args))
        kept[key] = entry
        while len(kept) > _MOST:
            kept.pop(next(iter(kept)), None)
        return entry[1]

    return found


def exact_key(thing: Any) -> Any:
    """A hashable key of `thing` by exact value; valid as long as `thing` is alive."""
    kind = type(thing)
    if kind in _PLAIN:
        return kind, repr(thing) if kind in (float, complex) else thing
    if kind is tuple:
        return kind, *map(exact_key, thing)
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        held = {f.name: getattr(thing, f.name, None) for f in dataclasses.fields(thing)}
        held |= getattr(thing, "__dict__", {})
        return kind, *((name, exact_key(value)) for name, value in held.items())
    return kind, id(thing)
