"""A cache that tells apart what `==` does not: 1, 1.0 and True, and fields left out of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

T = TypeVar("T")
_PLAIN = (str, bytes, int, float, complex, bool, type(None))
_MOST = 128  # results that a function remembers, the newest


def remembered(function: Callable[..., T]) -> Callable[..., T]:
    """`function`, whose result is remembered for exactly these arguments.

    Numbers and texts are told apart by type and value, tuples and dataclasses by all that is in
    them, any other object by which object it is. Arguments are kept alive while remembered.
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
    """What `thing` is, exactly; valid as long as `thing` lives."""
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
