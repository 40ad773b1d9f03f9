"""Detects numbers that were drawn while a loop was traced, and so are the same at every tick.

`np.random`, `random` and clocks run once, when the loop is traced; their results are constants of
the program. A second trace has other constants, so comparing two traces finds them. A loop that
draws or reads a clock, and still has two equal traces, is traced some more times: an `if` may
have gone the same way twice.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import random
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from types import CellType, CodeType, FunctionType, ModuleType
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
_TRACES = 12  # of a loop that draws or reads a clock: of two ways, one is taken twelve times
_MOST_HELD = 200_000  # objects that are searched
_AHEAD_S, _LOCK = 1_234_567, threading.Lock()
_GENERATORS = (np.random.BitGenerator, random.Random)
_PLAIN = (ModuleType, str, bytes, int, float, np.ndarray, jax.Array)
_READS: dict[Callable[..., Any], int] = {  # clocks with their units a second, and entropy
    **dict.fromkeys((time.time, time.monotonic, time.perf_counter), 1),
    **dict.fromkeys((time.time_ns, time.monotonic_ns, time.perf_counter_ns), 10**9),
    **dict.fromkeys((os.urandom, secrets.randbits), 0),  # the latter seeds NumPy's generators
}

Place = tuple[Callable[[Any], None], Any]  # has something keep another clock; the one it keeps


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
    key, held = jax.ShapeDtypeStruct((), jax.random.key(0).dtype), _held_by(algorithm, env)
    generators, places = _generators(held), [*_places(held)]
    for name, call, args in (
        ("init", lambda key: algorithm.init(key, env, envs), (key,)),
        ("tick", lambda state: algorithm.tick(env, state), (spec,)),
    ):
        where = source_of(method(algorithm, name))
        with reraised_as(name, envs, where):
            first = jax.make_jaxpr(call)(*args)
            others = _other_traces(generators, places, call, *args)
            found = next(filter(None, (frozen_values(first, other) for other in others)), [])
        if found:
            raise _refusal(name, found, where)


def _other_traces(
    generators: list[Any], places: list[Place], call: Callable[..., Any], *args: Any
) -> Iterator[Any]:
    """A trace at another time, and more where the function may draw or read a clock.

    JAX keeps traces by function and context. What is new in the context changes no equation, but
    has all of them made again, those of stages and of the user's own jitted functions too.
    """
    before, reads = [*map(_state, generators)], list[Any]()
    for turn in range(1, _TRACES):
        with set_xla_metadata(traced=str(turn)), _LOCK, _later(places, turn * _AHEAD_S, reads):
            again = jax.make_jaxpr(lambda *args: call(*args))(*args)  # noqa: PLW0108  another function
        yield again
        if not reads and before == [*map(_state, generators)]:
            return


def _held_by(*roots: Any) -> list[Any]:
    """What modules hold by name, and these objects hold directly and indirectly, nearest first.

    A search of all objects would take seconds in a process that has run for long. Types alone are
    asked: what an object says of itself may be code, such as an import that was put off.
    """
    spaces = [vars(m) for m in [*sys.modules.values()] if isinstance(m, ModuleType)]
    seen, found = {id(space) for space in spaces}, spaces.copy()
    wanted = (np.random.Generator, np.random.RandomState, *_GENERATORS)
    named = (x for space in spaces for x in [*space.values()])
    left = deque([*roots, *(x for x in named if issubclass(type(x), wanted))])
    while left and len(found) < _MOST_HELD:
        x = left.popleft()
        if id(x) not in seen and not issubclass(type(x), _PLAIN):
            seen.add(id(x))
            found.append(x)
            left += [*gc.get_referents(x), *_globals_of(x)]
    return found


def _globals_of(x: Any) -> Iterator[Any]:
    """The global values that a user's function names."""
    if type(x) is not FunctionType or not _is_users(x.__globals__):
        return
    codes: list[Any] = [x.__code__]
    while codes:
        code = codes.pop()
        codes += [c for c in code.co_consts if isinstance(c, CodeType)]
        yield from (x.__globals__[name] for name in code.co_names if name in x.__globals__)


def _generators(held: list[Any]) -> list[Any]:
    """The generators of random numbers, of NumPy and of Python, among these objects."""
    return [x for x in held if issubclass(type(x), _GENERATORS)]


def _state(generator: Any) -> str:
    with suppress(NotImplementedError), np.printoptions(threshold=sys.maxsize):  # the system's
        return str(getattr(generator, "state", None) or generator.getstate())
    return ""


@contextmanager
def _later(places: list[Place], ahead_s: int, reads: list[Any]) -> Iterator[None]:
    """Let clocks be ahead in this thread; `reads` gets those that are read, and entropy.

    As float32, times a minute apart are equal. Modules, objects and closures have clocks under
    names of their own, so they are replaced wherever they are kept.
    """
    thread, active = threading.get_ident(), [True]

    def replaced(read: Any, unit: int) -> Any:
        def later() -> Any:
            if not active or threading.get_ident() != thread:
                return read()
            if _is_users(sys._getframe(1).f_globals):
                reads.append(read)
            return read() + unit * ahead_s

        def drawn(*args: Any) -> Any:
            reads.append(read)
            return read(*args)

        return later if unit else drawn

    others = {read: replaced(read, unit) for read, unit in _READS.items()}
    for keep, read in places:
        keep(others[read])
    try:
        yield
    finally:
        active.clear()
        for keep, read in places:
            keep(read)


def _places(held: list[Any]) -> Iterator[Place]:
    """Whatever keeps one of the clocks, as a call that has it keep another; and which."""
    clocks = {id(read) for read in _READS}
    for where in held:
        if clocks.isdisjoint(map(id, gc.get_referents(where))):
            continue
        if type(where) is CellType:
            yield partial(setattr, where, "cell_contents"), where.cell_contents
        space = where if issubclass(type(where), dict) else getattr(where, "__dict__", None)
        if not isinstance(space, dict):  # that of a class is fixed
            continue
        for name, value in [*space.items()]:
            if id(value) in clocks:
                yield partial(space.__setitem__, name), value


def _is_users(space: Mapping[str, Any]) -> bool:
    """Whether globals are of neither JAX nor Python's own library, which read clocks for logs."""
    package = str(space.get("__name__", "")).partition(".")[0]
    return package not in {"jax", "jaxlib", "shoal", *sys.stdlib_module_names}


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
