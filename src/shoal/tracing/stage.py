"""Stages: the functions of a loop that a distribution policy may separate."""

from __future__ import annotations

import copy
import functools
import hashlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np

from shoal.errors import TraceError, short_place
from shoal.tracing.agree import gather, mean, per_env
from shoal.tracing.hosting import PlainCall, as_spec
from shoal.tracing.rowwise import map_rows

__all__ = ["Mark", "Stage", "gather", "host", "mark_of", "mean", "stage"]


@dataclass(frozen=True, slots=True)
class Mark:
    """A stage's name and options."""

    name: str
    per: str = "batch"
    host: bool = False
    on_policy: str = ""  # what to do where a lag is wanted; "": a lag is allowed
    source: str = ""
    role: str = ""  # "env": it steps environments, which some distribution policies set apart


ROLES = ("", "env")
_MOST_BOUND = 256  # objects that each stage remembers its binding to, the newest
_NO_LAG = "Use lag=0, or an algorithm that corrects for the lag."
_MARKS: dict[str, Mark] = {}  # by label


def mark_of(label: str) -> Mark | None:
    """The mark behind the name of a traced call, or None if the call is not a stage."""
    return _MARKS.get(label)


@overload
def stage(function: Callable[..., Any]) -> Stage: ...
@overload
def stage(
    *, per: str = "batch", name: str = "", on_policy: bool | str = False, role: str = ""
) -> Callable[[Callable[..., Any]], Stage]: ...
def stage(
    function: Callable[..., Any] | None = None,
    *,
    per: str = "batch",
    name: str = "",
    on_policy: bool | str = False,
    role: str = "",
) -> Any:
    """Mark a function of the loop that a distribution policy may place on its own.

    With `per="env"` it is written for one environment and Shoal batches it: positional arguments
    are rows (an environment axis first), keyword arguments are shared by all rows. Without, it
    sees the whole batch. `on_policy=True` forbids that what flows into it was made with older
    values than it has itself; a text instead says what to do where a lag is wanted. `role="env"`
    says that it steps environments: distribution policies that give these workers of their own
    find it by that, whatever its name.
    """
    check_role(role)
    if per not in ("env", "batch"):
        raise TraceError(
            f'a stage is per="env" or per="batch", not per="{per}"', "Choose one of them."
        )

    def wrap(function: Callable[..., Any]) -> Stage:
        called, source = name or _name_of(function), source_of(function)
        way_out = (on_policy if isinstance(on_policy, str) else _NO_LAG) if on_policy else ""
        mark = Mark(called, per, on_policy=way_out, source=source, role=role)
        made = _batched(function, mark) if per == "env" else _whole(function)
        return Stage(function, made, label_of(mark), partial(_again, function, mark))

    return wrap if function is None else wrap(function)


def host(
    returns: Callable[..., Any], *, per: str = "batch", name: str = "", role: str = ""
) -> Callable[..., Stage]:
    """Mark Python that XLA can't compile as a stage; `returns` gives the spec of its result.

    `returns` is called with the specs of the arguments and answers with a tree of
    `jax.ShapeDtypeStruct`. The function gets and returns NumPy arrays, for the whole batch; with
    `per="env"` it promises that row i of what it returns depends on row i of what it gets. `role`
    is as in `stage`.
    """
    check_role(role)

    def wrap(function: Callable[..., Any]) -> Stage:
        called_as, source = name or _name_of(function), source_of(function)
        mark = Mark(called_as, per, host=True, source=source, role=role)

        def called(fixed: tuple[Any, ...], *args: Any, **shared: Any) -> Any:
            check_not_inside(mark)
            fixed, rows = (fixed, args) if fixed else _split_self(function, args)
            if per == "env":
                check_rows(rows, mark)
            specs = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), (rows, shared)
            )
            wanted = returns(*specs[0], **specs[1])
            python = _python(function, fixed, specs, wanted)
            return jax.pure_callback(python, wanted, *rows, **shared)

        return Stage(function, called, label_of(mark), partial(_again, function, mark, returns))

    return wrap


def _python(
    function: Callable[..., Any], fixed: tuple[Any, ...], args: tuple[Any, Any], wanted: Any
) -> Callable[..., Any]:
    """A host stage's function as XLA calls it; `with_rows` gives it for as many environments."""

    def python(*rows: Any, **shared: Any) -> Any:
        rows, shared = jax.tree.map(np.asarray, (rows, shared))
        return as_wanted(function(*fixed, *rows, **shared), wanted)

    def with_rows(rows: int) -> Callable[..., Any]:
        some = jax.tree.map(lambda s: jax.ShapeDtypeStruct((rows, *s.shape[1:]), s.dtype), wanted)
        return _python(function, fixed, args, some)

    python.plain = _plain(function, fixed, args, wanted)  # type: ignore[attr-defined]
    python.with_rows = with_rows  # type: ignore[attr-defined]
    python.rows = len(jax.tree.leaves(args[0]))  # type: ignore[attr-defined]
    return python


def check_role(role: str) -> str:
    """`role` if stages can have it."""
    if role not in ROLES:
        raise TraceError(
            f'a stage has no role or role="env", not role="{role}"',
            'Leave it out, or say role="env" of the stage that steps environments.',
        )
    return role


def check_not_inside(mark: Mark) -> Mark:
    """Check that a host stage isn't called by a stage that Shoal batches, and so compiles."""
    if outer := per_env.get():
        raise TraceError(
            f"host stage `{mark.name}` is called inside stage `{outer}`, "
            "which is compiled for all environments at once",
            f"Call `{mark.name}` from tick, before or after `{outer}`.",
        )
    return mark


def as_wanted(result: Any, wanted: Any) -> Any:
    """What a host stage returned as arrays of the dtypes that it promised."""
    specs, tree = jax.tree.flatten(wanted)
    arrays = tree.flatten_up_to(result)
    return tree.unflatten(
        [as_spec(x, s.shape, str(s.dtype)) for x, s in zip(arrays, specs, strict=True)]
    )


def _plain(
    function: Callable[..., Any], fixed: tuple[Any, ...], args: tuple[Any, Any], wanted: Any
) -> PlainCall | None:
    """A host stage's function as a call that needs no JAX, if it takes and gives flat arrays."""
    flat = wanted if isinstance(wanted, tuple | list) else (wanted,)
    leaves = all(jax.tree_util.all_leaves([x]) for x in (*args[0], *flat))
    if not leaves or args[1]:
        return None
    return PlainCall(function, fixed, tuple((s.shape, str(s.dtype)) for s in flat))


class Stage:
    """A marked function; called directly it is an ordinary jitted function.

    `call` takes what comes before all arguments (the object that a method is bound to, if it is)
    and then the function's own arguments.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        call: Callable[..., Any],
        label: str,
        again: partial[Stage],
        owner: Callable[[], Any] | None = None,
    ) -> None:
        self._original, self._call, self._label, self._again = function, call, label, again
        self._owner, self._instance = owner, None
        self._bound: dict[int, Stage] = {}  # by the object, the one used last at the end
        self._view: Callable[[], Stage | None] = lambda: None

        @functools.wraps(function)
        def named(*args: Any, **shared: Any) -> Any:
            return call((owner(),) if owner else (), *args, **shared)

        named.__name__ = named.__qualname__ = label
        self._jitted = jax.jit(named)

    def __call__(self, *args: Any, **shared: Any) -> Any:
        """What the function returns; `args` are rows where it is per environment."""
        return self._jitted(*args, **shared)

    def __reduce__(self) -> tuple[Any, ...]:
        """Sent to another process, it is marked again there."""
        if self._owner is not None:
            return _bound_again, (self._again, self._owner())
        return self._again.func, self._again.args

    def __get__(self, instance: object, owner: type | None = None) -> Stage:
        if instance is None or not _is_method(self._original):
            return self
        return self._bind(instance)._held_by(instance)

    def _bind(self, instance: object) -> Stage:
        """The stage of one object, the same each time; an equal object has one of its own.

        What is remembered holds the object only where it must, so that it goes when the object
        does.
        """
        key = id(instance)
        found = self._bound.pop(key, None)
        if found is None or found._owner is None or found._owner() is not instance:
            owner = _reference(instance, lambda _: self._bound.pop(key, None))
            found = Stage(self._original, self._call, self._label, self._again, owner)
        self._bound[key] = found
        while len(self._bound) > _MOST_BOUND:
            self._bound.pop(next(iter(self._bound)), None)
        return found

    def _held_by(self, instance: object) -> Stage:
        """The same stage, as something that keeps its object alive."""
        view = self._view()
        if view is None:
            view = copy.copy(self)
            view._instance = instance
            self._view = weakref.ref(view)
        return view

    def __copy__(self) -> Stage:
        made = object.__new__(Stage)
        made.__dict__.update(self.__dict__)
        return made


def _reference(instance: object, gone: Callable[[Any], Any]) -> Callable[[], Any]:
    """A weak reference, or a strong one to what allows no other."""
    try:
        return weakref.ref(instance, gone)
    except TypeError:
        return lambda: instance


def _bound_again(again: partial[Stage], instance: object) -> Stage:
    """The stage of an object, in another process."""
    return again.func(*again.args).__get__(instance)


def _again(
    function: Callable[..., Any], mark: Mark, returns: Callable[..., Any] | None = None
) -> Stage:
    """The stage that `mark` was made for, under a label of this process."""
    if returns is not None:
        return host(returns, per=mark.per, name=mark.name, role=mark.role)(function)
    made = stage(per=mark.per, name=mark.name, on_policy=mark.on_policy, role=mark.role)
    return made(function)


def _whole(function: Callable[..., Any]) -> Callable[..., Any]:
    def whole(fixed: tuple[Any, ...], *args: Any, **shared: Any) -> Any:
        return function(*fixed, *args, **shared)

    return whole


def _batched(function: Callable[..., Any], mark: Mark) -> Callable[..., Any]:
    def batched(fixed: tuple[Any, ...], *args: Any, **shared: Any) -> Any:
        # A settings object comes first and has no rows.
        fixed, rows = (fixed, args) if fixed else _split_self(function, args)
        check_rows(rows, mark)
        outer = per_env.set(mark.name)
        try:
            return map_rows(lambda *row: function(*fixed, *row, **shared), rows)
        finally:
            per_env.reset(outer)

    return batched


def _split_self(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[tuple, tuple]:
    is_plain = isinstance(function, FunctionType)
    names = function.__code__.co_varnames[: function.__code__.co_argcount] if is_plain else ()
    return (args[:1], args[1:]) if names[:1] == ("self",) else ((), args)


def _is_method(function: Callable[..., Any]) -> bool:
    """Whether Python would bind `function`, as an attribute of a class, to an object."""
    bound_already = isinstance(function, partial | staticmethod | MethodType | type)
    return hasattr(type(function), "__get__") and not bound_already


def check_rows(rows: tuple[Any, ...], mark: Mark) -> tuple[Any, ...]:
    """Check that every row argument has the same leading environment axis."""
    sizes = {leaf.shape[0] if getattr(leaf, "shape", ()) else 0 for leaf in jax.tree.leaves(rows)}
    if len(sizes) != 1 or 0 in sizes:
        shapes = [getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(rows)]
        raise TraceError(
            f"stage `{mark.name}` ({mark.source}) is per environment, "
            f"but its rows don't share a first axis: {shapes}",
            "Pass what all environments share (parameters, statistics) by keyword, "
            "rows by position.",
        )
    return rows


def label_of(mark: Mark) -> str:
    """Register `mark` and give the name that its traced calls carry.

    It depends on the mark alone: a loop that is traced again is the same program to XLA's cache.
    """
    label = f"{mark.name}@{hashlib.sha256(repr(mark).encode()).hexdigest()[:12]}"
    _MARKS[label] = mark
    return label


def source_of(function: Callable[..., Any]) -> str:
    """Where `function` is written, as `folder/file.py:line`."""
    inner = _innermost(function)
    call = getattr(type(inner), "__call__")  # noqa: B004, B009  of an object, its code is there
    code = getattr(inner, "__code__", None) or getattr(call, "__code__", None)
    return short_place(code.co_filename, code.co_firstlineno) if code else ""


def _name_of(function: Callable[..., Any]) -> str:
    """What `function` is called; a callable object is called as its class."""
    return getattr(_innermost(function), "__name__", "") or type(function).__name__


def _innermost(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function that a partial, or a partial of one, completes."""
    while isinstance(function, partial | functools.partialmethod):
        function = function.func
    return function


def path_name(path: tuple[Any, ...]) -> str:
    """A tree path as dotted text: `params.layers.0.w`."""
    parts = [getattr(p, "name", getattr(p, "key", getattr(p, "idx", p))) for p in path]
    return ".".join(str(part) for part in parts)
