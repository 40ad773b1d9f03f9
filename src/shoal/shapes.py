"""Validation of files and user input against declared types.

One declaration serves both the type checker and the validation: a `TypedDict` lists the keys of
a JSON file, `Annotated[int, Between(0)]` the numbers that are allowed.
"""

from __future__ import annotations

import errno
import json
import math
import types
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Required,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

T = TypeVar("T")
MOST_BYTES = 64_000_000  # of a JSON file that is read at all
NAMES: dict[Any, str] = {int: "a whole number", float: "a number", str: "text", bool: "true/false"}


class ShapeError(ValueError):
    """Data isn't of the type that it should have."""


@dataclass(frozen=True, slots=True)
class Between:
    """The numbers from `low` to `high`."""

    low: float
    high: float = 2**31 - 1

    def beyond(self, value: Any) -> str:
        """What a number out of range must be; an empty string for one in range."""
        if isinstance(value, float) and not math.isfinite(value):
            return "a finite number"
        if value > self.high:
            return f"at most {self.high:,}"
        return f"{self.low:,} or more" if value < self.low else ""


Count = Annotated[int, Between(1)]
Index = Annotated[int, Between(0)]
Steps = Annotated[int, Between(0, 2**63 - 1)]  # accumulates over a run
Seed = Annotated[
    int, Between(0, 2**32 - 1)
]  # the seeds that JAX distinguishes without 64-bit types
Timeout = Annotated[float, Between(1e-3, 1e9)]  # in seconds
Seconds = Annotated[float, Between(0, 1e12)]


def misfit(value: Any, wanted: Any, where: str = "") -> str:
    """How `value` differs from the type `wanted`; an empty string if it doesn't.

    Types that can't be checked, such as protocols, always fit.
    """
    kind, inner = get_origin(wanted) or wanted, get_args(wanted)
    if kind in (Annotated, NotRequired, Required):
        return misfit(value, inner[0], where) or _outside(value, inner[1:], where)
    if kind in (Union, types.UnionType):
        found = [misfit(value, each, where) for each in inner]
        return "" if "" in found else found[0]
    if kind is Literal:
        return "" if value in inner else _is(value, where, f"one of {', '.join(map(repr, inner))}")
    if is_typeddict(wanted):
        return _misfit_keys(value, wanted, where)
    if kind in (list, tuple, dict):
        return _misfit_items(value, kind, inner, where)
    return _misfit_plain(value, kind, where)


def read_json(path: Path, wanted: type[T], form: int | None = None) -> T:
    """Read a JSON file of the type `wanted`; raises a ShapeError or an OSError.

    `form` is the version of the format, where the file says which it has.
    """
    if "\0" in str(path):
        raise FileNotFoundError(errno.ENOENT, "no file is called so")
    if path.exists() and not path.is_file():
        raise ShapeError("it is no plain file")
    if path.stat().st_size > MOST_BYTES:
        raise ShapeError(f"it has {path.stat().st_size:,} bytes")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ShapeError("it is nested too deeply") from error
    except ValueError as error:
        raise ShapeError(f"it is no JSON ({error})") from error
    check_form(data, form)
    if wrong := misfit(data, wanted):
        raise ShapeError(wrong)
    return data


def check_form(data: Any, form: int | None) -> None:
    """Refuse data of another version of a format."""
    other = data.get("form", form) if isinstance(data, Mapping) else form
    if other != form:
        raise ShapeError(f"it has form {ascii(other)[:20]}, and this Shoal reads form {form}")


def why_unreadable(error: OSError | ShapeError) -> str:
    """The reason why a file can't be read."""
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


def _misfit_keys(value: Any, wanted: Any, where: str) -> str:
    if not isinstance(value, Mapping):
        return _is(value, where, "an object")
    hints = _hints(wanted)
    for name, hint in hints.items():
        if name not in value:
            if wanted.__total__ and get_origin(hint) is not NotRequired:
                return f"it has no `{_join(where, name)}`"
        elif wrong := misfit(value[name], hint, _join(where, name)):
            return wrong
    return ""


def _misfit_items(value: Any, kind: Any, inner: tuple[Any, ...], where: str) -> str:
    if not isinstance(value, (list, tuple) if kind is tuple else kind):
        return _is(value, where, {dict: "an object", list: "a list", tuple: "a tuple"}[kind])
    if not inner or (kind is tuple and inner == ((),)):
        return ""
    if kind is dict:
        pairs = [(_join(where, str(name)), x, inner[1]) for name, x in value.items()]
        if not all(isinstance(name, str) for name in value):
            return _is(value, where, "an object whose names are text")
    elif kind is list or inner[-1] is Ellipsis:
        pairs = [(f"{where}[{i}]", x, inner[0]) for i, x in enumerate(value)]
    elif len(value) != len(inner):
        return _is(value, where, f"a tuple of {len(inner)}")
    else:
        pairs = [(f"{where}[{i}]", *pair) for i, pair in enumerate(zip(value, inner, strict=True))]
    return next((wrong for place, x, each in pairs if (wrong := misfit(x, each, place))), "")


def _misfit_plain(value: Any, kind: Any, where: str) -> str:
    is_bool = isinstance(value, bool)
    if kind is None or kind is type(None):
        return "" if value is None else _is(value, where, "null")
    if kind is int:
        fits = isinstance(value, Integral) and not is_bool
    elif kind is float:
        fits = isinstance(value, Real) and not is_bool
    elif isinstance(kind, type) and (kind in (str, bool, Path) or is_dataclass(kind)):
        fits = isinstance(value, kind)
    else:
        return ""
    return "" if fits else _is(value, where, NAMES.get(kind) or f"a {kind.__name__}")


def _outside(value: Any, rules: tuple[Any, ...], where: str) -> str:
    for rule in rules:
        if isinstance(rule, Between) and (wanted := rule.beyond(value)):
            return _is(value, where, wanted)
    return ""


def _is(value: Any, where: str, wanted: str) -> str:
    shown = "null" if value is None else repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return f"`{where}` is {shown}, not {wanted}" if where else f"it is {shown}, not {wanted}"


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


@cache
def _hints(wanted: Any) -> dict[str, Any]:
    return get_type_hints(wanted, include_extras=True)
