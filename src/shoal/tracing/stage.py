"""Stages: the functions of a loop that a distribution policy may separate."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
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
    """What a stage says about itself."""

    name: str
    per: str = "batch"
    host: bool = False
    on_policy: str = ""  # what to do where a lag is wanted; "": it bears one
    source: str = ""


_NO_LAG = "Use lag=0, or an algorithm that corrects for the lag."
_MARKS: list[Mark] = []
_OUTPUTS: dict[tuple[str, int], tuple[str, ...]] = {}
_LABEL = re.compile(r"^.+@(?P<index>\d+)$")  # a stage's name and number


def mark_of(label: str) -> Mark | None:
    """The mark behind the name of a traced call, or None if the call is not a stage."""
    found = _LABEL.match(label)
    return _MARKS[int(found["index"])] if found and int(found["index"]) < len(_MARKS) else None


def output_names(label: str, count: int) -> tuple[str, ...]:
    """The names of the `count` leaves that the stage behind `label` returned when last traced."""
    return _OUTPUTS.get((label, count), ())


@overload
def stage(function: Callable[..., Any]) -> Stage: ...
@overload
def stage(
    *, per: str = "batch", name: str = "", on_policy: bool | str = False
) -> Callable[[Callable[..., Any]], Stage]: ...
def stage(
    function: Callable[..., Any] | None = None,
    *,
    per: str = "batch",
    name: str = "",
    on_policy: bool | str = False,
) -> Any:
    """Mark a function of the loop that a distribution policy may place on its own.

    With `per="env"` it is written for one environment and Shoal batches it: positional arguments
    are rows (an environment axis first), keyword arguments are shared by all rows. Without, it
    sees the whole batch. `on_policy=True` forbids that what flows into it was made with older
    values than it has itself; a text instead says what to do for who wants a lag.
    """
    if per not in ("env", "batch"):
        raise TraceError(
            f'a stage is per="env" or per="batch", not per="{per}"', "Choose one of them."
        )

    def wrap(function: Callable[..., Any]) -> Stage:
        called, source = name or function.__name__, source_of(function)
        way_out = (on_policy if isinstance(on_policy, str) else _NO_LAG) if on_policy else ""
        mark = Mark(called, per, on_policy=way_out, source=source)
        made = _batched(function, mark) if per == "env" else function
        return Stage(made, label_of(mark), partial(_again, function, mark))

    return wrap if function is None else wrap(function)


def host(
    returns: Callable[..., Any], *, per: str = "batch", name: str = ""
) -> Callable[..., Stage]:
    """Mark Python that XLA can't compile as a stage; `returns` gives the spec of its result.

    `returns` is called with the specs of the arguments and answers with a tree of
    `jax.ShapeDtypeStruct`. The function gets and returns NumPy arrays, for the whole batch; with
    `per="env"` it promises that row i of what it returns depends on row i of what it gets.
    """

    def wrap(function: Callable[..., Any]) -> Stage:
        mark = Mark(name or function.__name__, per, host=True, source=source_of(function))

        def called(*args: Any, **shared: Any) -> Any:
            check_not_inside(mark)
            fixed, rows = _split_self(function, args)
            if per == "env":
                check_rows(rows, mark)
            specs = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), (rows, shared)
            )
            wanted = returns(*specs[0], **specs[1])
            python = _python(function, fixed, (rows, shared), wanted)
            return jax.pure_callback(python, wanted, *rows, **shared)

        return Stage(called, label_of(mark), partial(_again, function, mark, returns))

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
    return python


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
    """A marked function; called directly it is an ordinary jitted function."""

    def __init__(
        self, function: Callable[..., Any], label: str, again: partial[Stage] | None = None
    ) -> None:
        self._function, self._label, self._again = function, label, again

        @functools.wraps(function)
        def named(*args: Any, **shared: Any) -> Any:
            out = function(*args, **shared)
            paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(out)[0]]
            _OUTPUTS[label, len(paths)] = tuple(path_name(path) for path in paths)
            return out

        self._jitted = jax.jit(_alias(named, label))

    def __call__(self, *args: Any, **shared: Any) -> Any:
        """What the function returns; `args` are rows where it is per environment."""
        return self._jitted(*args, **shared)

    def __reduce__(self) -> tuple[Any, ...]:
        """Sent to another process, it is marked again there."""
        assert self._again is not None, "a bound stage is sent as its object"
        return self._again.func, self._again.args

    def __get__(self, instance: object, owner: type | None = None) -> Stage:
        return self if instance is None else _bind(self, instance)


def _again(
    function: Callable[..., Any], mark: Mark, returns: Callable[..., Any] | None = None
) -> Stage:
    """The stage that `mark` was made for, under a label of this process."""
    if returns is not None:
        return host(returns, per=mark.per, name=mark.name)(function)
    return stage(per=mark.per, name=mark.name, on_policy=mark.on_policy)(function)


def _alias(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def alias(*args: Any, **shared: Any) -> Any:
        return function(*args, **shared)

    alias.__name__ = alias.__qualname__ = name
    return alias


@functools.lru_cache(maxsize=256)
def _bind(unbound: Stage, instance: object) -> Stage:
    # A label of its own: what another instance returns may have other names.
    mark = mark_of(unbound._label)
    assert mark is not None
    return Stage(functools.partial(unbound._function, instance), label_of(mark))


def _batched(function: Callable[..., Any], mark: Mark) -> Callable[..., Any]:
    @functools.wraps(function)
    def batched(*args: Any, **shared: Any) -> Any:
        # A bound settings object comes first and has no rows.
        fixed, rows = _split_self(function, args)
        check_rows(rows, mark)
        outer = per_env.set(mark.name)
        try:
            return map_rows(lambda *row: function(*fixed, *row, **shared), rows)
        finally:
            per_env.reset(outer)

    return batched


def _split_self(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[tuple, tuple]:
    names = function.__code__.co_varnames[:1] if hasattr(function, "__code__") else ()
    return (args[:1], args[1:]) if names == ("self",) else ((), args)


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
    """Register `mark` and give the name that its traced calls carry."""
    _MARKS.append(mark)
    return f"{mark.name}@{len(_MARKS) - 1}"


def source_of(function: Callable[..., Any]) -> str:
    """Where `function` is written, as `folder/file.py:line`."""
    code = getattr(function, "__code__", None)
    return short_place(code.co_filename, code.co_firstlineno) if code else ""


def path_name(path: tuple[Any, ...]) -> str:
    """A tree path as dotted text: `params.layers.0.w`."""
    parts = [getattr(p, "name", getattr(p, "key", getattr(p, "idx", p))) for p in path]
    return ".".join(str(part) for part in parts)
