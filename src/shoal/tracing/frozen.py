"""Detects numbers that were drawn while a loop was traced, and so are the same at every tick.

`np.random`, `random` and clocks run once, when the loop is traced; their results are constants of
the program. A second trace has other constants, so comparing two traces finds them.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import core as jex

from shoal.errors import TraceError
from shoal.tracing.equations import opened, place_of
from shoal.tracing.stage import source_of
from shoal.tracing.trace import Origin, method, reraised_as

_MOST = 3  # values that an error shows
_AHEAD_S, _LOCK = 1_234_567, threading.Lock()


class Frozen(NamedTuple):
    """What differs between two traces: the user's line, where it is read, and both values."""

    where: str
    what: str
    first: Any
    second: Any


def frozen_values(first: Any, second: Any) -> list[Frozen]:
    """Every literal, constant and setting that differs between two closed jaxprs of one function.

    Each with the source line of the first equation that reads it, which is looked up only for
    what differs: reading it from a traceback is slow. Names of calls and functions
    don't count: they are new in every trace.
    """
    return [*_in_jaxprs(first, second, "")]


def check_not_frozen(origin: Origin, envs: int) -> None:
    """Refuse a loop whose `init` or `tick` reads a clock or draws numbers outside of JAX."""
    spec = origin.spec(envs)
    algorithm, env = origin.algorithm, origin.env
    key = jax.ShapeDtypeStruct((), jax.random.key(0).dtype)
    for name, call, args in (
        ("init", lambda key: algorithm.init(key, env, envs), (key,)),
        ("tick", lambda state: algorithm.tick(env, state), (spec,)),
    ):
        where = source_of(method(algorithm, name))
        with reraised_as(name, envs, where):
            found = frozen_values(jax.make_jaxpr(call)(*args), _traced_again(call, *args))
        if found:
            raise _refusal(name, found, where)


def _traced_again(call: Callable[..., Any], *args: Any) -> Any:
    """A trace that shares nothing with the one before.

    JAX keeps traces by function and context. What is new in the context changes no equation, but
    has all of them made again, those of stages and of the user's own jitted functions too.
    """
    with set_xla_metadata(traced="again"), _LOCK, _clock_ahead():
        return jax.make_jaxpr(lambda *args: call(*args))(*args)  # noqa: PLW0108  another function


@contextmanager
def _clock_ahead() -> Iterator[None]:
    """Let the time be weeks later in this thread: as float32, times a minute apart are equal."""
    thread, clocks = threading.get_ident(), {"time": 1, "time_ns": 10**9}
    before = {name: getattr(time, name) for name in clocks}
    for name, unit in clocks.items():
        ahead, clock = unit * _AHEAD_S, before[name]
        setattr(time, name, lambda c=clock, a=ahead: c() + a * (threading.get_ident() == thread))
    try:
        yield
    finally:
        for name, clock in before.items():
            setattr(time, name, clock)


def _refusal(name: str, found: list[Frozen], where: str) -> TraceError:
    shown = [f"{f.what} is {_text(f.first)}, then {_text(f.second)}" for f in found[:_MOST]]
    return TraceError(
        f"{name} isn't the same when it is traced twice: {'; '.join(shown)}",
        "Python runs once, while the loop is traced, so a random number or a time would be the "
        "same at every tick. Draw with jax.random from a key that the loop carries, and carry "
        "a count instead of reading a clock; or make it a host stage (shoal.host).",
        next((f.where for f in found if f.where), where),
    )


def _text(value: Any) -> str:
    array = np.asarray(value)
    if not array.ndim:
        return str(array)
    return f"{array.dtype}{list(array.shape)} from {array.ravel()[0]}" if array.size else "empty"


def _in_jaxprs(first: Any, second: Any, where: str) -> Iterator[Frozen]:
    (one, consts), (other, others) = opened(first), opened(second)
    for var, a, b in zip(one.constvars, consts, others, strict=False):
        if not _same(a, b):
            yield Frozen(_first_reader(one, var) or where, "a constant", a, b)
    if [e.primitive.name for e in one.eqns] != [e.primitive.name for e in other.eqns]:
        yield _parting(one, other, where)
        return
    for equation, again in zip(one.eqns, other.eqns, strict=True):
        for found in _in_equations(equation, again):
            yield found if found.where else found._replace(where=place_of(equation) or where)
    for a, b in zip(one.outvars, other.outvars, strict=False):
        yield from _in_operands(a, b, "what it returns", where)


def _first_reader(jaxpr: Any, var: Any) -> str:
    """The line of the first equation that reads a variable."""
    reads = (e for e in jaxpr.eqns if any(x is var for x in e.invars))
    return next(map(place_of, reads), "")


def _parting(one: Any, other: Any, where: str) -> Frozen:
    """The first difference between the equations of two traces."""
    names = [[e.primitive.name for e in jaxpr.eqns] for jaxpr in (one, other)]
    pairs = zip(*names, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(map(len, names)))
    done = [each[at] if at < len(each) else "nothing" for each in names]
    longer = one if at < len(one.eqns) else other
    place = place_of(longer.eqns[at]) if at < len(longer.eqns) else ""
    return Frozen(place or where, "what it does", *done)


def _in_equations(one: Any, other: Any) -> Iterator[Frozen]:
    for a, b in zip(one.invars, other.invars, strict=False):
        yield from _in_operands(a, b, f"an operand of `{one.primitive.name}`", "")
    for a, b in zip(one.outvars, other.outvars, strict=False):
        if (a.aval.shape, a.aval.dtype) != (b.aval.shape, b.aval.dtype):
            yield Frozen("", "a shape", str(a.aval), str(b.aval))
    for name in one.params.keys() & other.params.keys():
        yield from _in_params(one.params[name], other.params[name], name, "")


def _in_operands(a: Any, b: Any, what: str, where: str) -> Iterator[Frozen]:
    if isinstance(a, jex.Literal) and isinstance(b, jex.Literal) and not _same(a.val, b.val):
        yield Frozen(where, what, a.val, b.val)


def _in_params(a: Any, b: Any, name: str, where: str) -> Iterator[Frozen]:
    jaxprs = (jex.ClosedJaxpr, jex.Jaxpr)
    if isinstance(a, jaxprs) and isinstance(b, jaxprs):
        yield from _in_jaxprs(a, b, where)
    elif isinstance(a, tuple | list) and isinstance(b, tuple | list) and len(a) == len(b):
        for x, y in zip(a, b, strict=True):
            yield from _in_params(x, y, name, where)
    elif name != "name" and _is_number(a) and _is_number(b) and not _same(a, b):
        yield Frozen(where, f"`{name}`", a, b)


def _is_number(x: Any) -> bool:
    """Whether a setting of an equation is plain: not a function, a layout or the like."""
    return isinstance(x, int | float | complex | np.ndarray | np.generic | jax.Array)


def _same(a: Any, b: Any) -> bool:
    """Whether two constants are equal to the bit; what can't be compared counts as equal."""
    if a is b:
        return True
    if dataclasses.is_dataclass(a) or not (hasattr(a, "dtype") or _is_number(a)):
        return True
    x, y = (_raw(each) for each in (a, b))
    return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()


def _raw(x: Any) -> np.ndarray:
    if isinstance(x, jax.Array) and jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)
