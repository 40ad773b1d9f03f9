"""Running a jaxpr on a block of rows inside a kernel: the registry of rules, and what all need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex

from shoal.kernels.tiles import (
    ROW,
    IneligibleError,
    Tile,
    Tiled,
    at,
    constant,
    places,
    sizes_of,
    split_up,
    spread,
    tiles_of,
    widened,
)
from shoal.tracing.equations import CALLS, inner, opened
from shoal.tracing.rowwise import map_rows_p
from shoal.tracing.steps import ELEMENTWISE

MOST_SPLIT = 64  # the longest side of a tile that is taken apart where an operation needs it
IDENTITY = frozenset({"copy", "copy_p", "stop_gradient", "name", "optimization_barrier"})


@dataclass(frozen=True, slots=True)
class Keyed:
    """Typed random keys: a value for each of their words."""

    words: tuple[Tiled, ...]


Held = Any  # Tiled | Keyed
Operation = Callable[["Block", Any, list[Any]], Any]
RULES: dict[str, Operation] = {}


def rule(*names: str) -> Callable[[Operation], Operation]:
    """Register what operations called so do."""

    def register(function: Operation) -> Operation:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


@dataclass(frozen=True)
class Block:
    """Runs jaxprs on a block of `rows` rows; `valid` says which are real, None that all are."""

    rows: int
    valid: Any = None

    def jaxpr(
        self, closed: Any, args: Sequence[Held], wanted: frozenset[int] | None = None
    ) -> list[Held]:
        """What a jaxpr returns; with `wanted`, only those of its equations are run."""
        jaxpr, consts = closed if isinstance(closed, tuple) else opened(closed)
        env: dict[Any, Held] = {
            v: constant(np.asarray(c, v.aval.dtype))
            for v, c in zip(jaxpr.constvars, consts, strict=True)
        }
        env |= dict(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Held:
            if isinstance(atom, jex.Literal):
                return constant(np.asarray(atom.val, atom.aval.dtype))  # pyright: ignore[reportAttributeAccessIssue]
            return env[atom]

        for i, e in enumerate(jaxpr.eqns):
            if wanted is None or i in wanted:
                outs = self.equation(e, [read(a) for a in e.invars])
                env |= dict(zip(e.outvars, outs, strict=True))
        if wanted is not None:
            return [
                env.get(a) if not isinstance(a, jex.Literal) else read(a) for a in jaxpr.outvars
            ]
        return [read(a) for a in jaxpr.outvars]

    def equation(self, e: Any, args: list[Held]) -> list[Held]:
        """What one equation makes."""
        name = e.primitive.name
        if e.primitive is map_rows_p:
            return self._mapped(e, args)
        if name in CALLS and (found := inner(e)):
            return self.jaxpr(found, args)
        if name not in RULES and name in ELEMENTWISE:
            return [elementwise(self, e, args)]
        if name not in RULES:
            raise IneligibleError(f"operation `{name}` has no rule")
        if not name.startswith("random_") and any(isinstance(x, Keyed) for x in args):
            return self._by_words(e, args)
        made = RULES[name](self, e, args)
        return made if isinstance(made, list) else [made]

    def _by_words(self, e: Any, args: list[Held]) -> list[Held]:
        """An operation that only moves keys about does the same to each of their words."""
        count = next(len(x.words) for x in args if isinstance(x, Keyed))
        outs = []
        for i in range(count):
            made = RULES[e.primitive.name](
                self, e, [x.words[i] if isinstance(x, Keyed) else x for x in args]
            )
            outs.append(made if isinstance(made, list) else [made])
        return [Keyed(words) for words in zip(*outs, strict=True)]

    def _mapped(self, e: Any, args: list[Held]) -> list[Held]:
        shared = e.params["shared"]
        rows = [each_word(_one_row, x) for x in args[shared:]]
        made = self.jaxpr(e.params["jaxpr"], [*args[:shared], *rows])
        return [each_word(lambda x: replace(x, axis=0), x) for x in made]


def needed(jaxpr: Any, outs: Sequence[Any]) -> frozenset[int]:
    """Which equations some results are made by."""
    found, wanted = set(), {v for v in outs if not isinstance(v, jex.Literal)}
    for i, e in reversed(list(enumerate(jaxpr.eqns))):
        if wanted & set(e.outvars):
            found.add(i)
            wanted |= {v for v in e.invars if not isinstance(v, jex.Literal)}
    return frozenset(found)


def each_word(function: Callable[[Tiled], Tiled], value: Held) -> Held:
    """`function` of a value, or of each word of keys."""
    if isinstance(value, Keyed):
        return Keyed(tuple(map(function, value.words)))
    return function(value)


def _one_row(value: Tiled) -> Tiled:
    """One row of a value whose rows lie along its first axis."""
    if value.axis is None:
        value = dropped(value, 0)
    elif value.axis != 0:
        raise IneligibleError("rows don't lie along the first axis")
    return replace(value, axis=None)


def dropped(value: Tiled, axis: int) -> Tiled:
    """A shared value that is the same for all rows, without the axis that they lie along."""
    if value.tiles.shape[axis] != 1 or any(axis in t.sides for t in value.tiles.flat):
        raise IneligibleError("rows are computed with by their number")
    return relabelled(
        value,
        [i for i in range(len(value.shape)) if i != axis],
        (*value.shape[:axis], *value.shape[axis + 1 :]),
    )


def relabelled(value: Tiled, origin: Sequence[int | None], shape: Sequence[int]) -> Tiled:
    """Each axis of the result is axis `origin[i]` of `value`, or a new one that is uniform.

    Axes of `value` that are not named must be uniform.
    """
    where = {old: new for new, old in enumerate(origin) if old is not None}
    order = [old for old in origin if old is not None]
    gone = [a for a in range(value.tiles.ndim) if a not in where]
    tiles = np.transpose(value.tiles, [*order, *gone])
    tiles = tiles.reshape(tiles.shape[: len(order)])
    tiles = tiles.reshape([1 if o is None else value.tiles.shape[o] for o in origin])
    made = [
        Tile(t.array, tuple(ROW if s == ROW else where[s] for s in t.sides)) for t in tiles.flat
    ]
    wide = tuple(sorted(where[a] for a in value.wide if a in where))
    return Tiled(tiles_of(made, tiles.shape), tuple(shape), value.dtype, wide)


def materialised(value: Tiled, axis: int) -> Tiled:
    """A value with a tile for each place along an axis."""
    value = narrow(value, axis)
    shape = list(value.tiles.shape)
    shape[axis] = value.shape[axis]
    return replace(value, tiles=np.broadcast_to(value.tiles, shape))


def narrow(value: Tiled, axis: int) -> Tiled:
    """A value of which an axis is no side of its tiles."""
    if axis in value.wide and value.shape[axis] > MOST_SPLIT:
        raise IneligibleError(f"an axis of {value.shape[axis]} would have to be taken apart")
    return split_up(value, axis)


def aligned(values: Sequence[Tiled], rank: int) -> tuple[list[Tiled], int | None]:
    """Operands of one shape (or scalars) as rows of one rank, and where the rows lie."""
    axes = {v.axis for v in values if v.axis is not None}
    if len(axes) > 1:
        raise IneligibleError("rows of two operands lie along different axes")
    axis = axes.pop() if axes else None
    found = []
    for v in values:
        if v.axis is None and axis is not None and len(v.shape) == rank > 0:
            v = dropped(v, axis)
        elif not v.shape and v.axis is None:
            v = relabelled(
                v, [None] * (rank - (axis is not None)), (1,) * (rank - (axis is not None))
            )
        found.append(v)
    return found, axis


def pointwise(function: Callable[..., Any], values: Sequence[Tiled], dtype: Any) -> Tiled:
    """`function` of tiles at the same places; all values are of one rank."""
    wide = tuple(sorted({a for v in values for a in v.wide}))
    for axis in wide:
        values = [widened(v, axis) for v in values]
    shape = np.broadcast_shapes(*(v.shape for v in values))
    outer = np.broadcast_shapes(*(v.tiles.shape for v in values))
    made = [joined(function, [at(v, place) for v in values]) for place in places(outer)]
    return Tiled(tiles_of(made, outer), shape, np.dtype(dtype), wide)


def joined(function: Callable[..., Any], tiles: Sequence[Tile]) -> Tile:
    """`function` of some tiles, which are brought to one shape; at once where all are known."""
    if all(t.is_known for t in tiles):
        with jax.ensure_compile_time_eval():
            made = function(*(np.asarray(t.array).reshape(()) for t in tiles))
            return Tile(np.asarray(made).reshape(())[()])
    sizes = sizes_of(*tiles)
    sides = tuple(sorted(sizes))
    return Tile(function(*(spread(t, sides, sizes) for t in tiles)), sides)


def elementwise(block: Block, e: Any, args: Sequence[Tiled]) -> Tiled:
    """Any operation that does the same everywhere."""
    params = e.params
    return pointwise_as(e, args, lambda *xs: e.primitive.bind(*xs, **params))


def pointwise_as(e: Any, args: Sequence[Tiled], function: Callable[..., Any]) -> Tiled:
    """What an equation makes that does the same everywhere, by another function."""
    aval = e.outvars[0].aval
    values, axis = aligned(args, len(aval.shape))
    is_key = jnp.issubdtype(aval.dtype, jax.dtypes.prng_key)
    made = pointwise(function, values, np.uint32 if is_key else aval.dtype)
    return replace(made, axis=axis, shape=rest_of(aval.shape, axis))


def rest_of(shape: Sequence[int], axis: int | None) -> tuple[int, ...]:
    """A shape without the axis that rows lie along."""
    return tuple(n for i, n in enumerate(shape) if i != axis)


def only_real(block: Block, array: Any, sides: Sequence[int]) -> Any:
    """An array that is 0 where there is no real row."""
    if block.valid is None or ROW not in sides:
        return array
    where = sides.index(ROW)
    valid = lax.broadcast_in_dim(block.valid, array.shape, (where,))
    return jnp.where(valid, array, jnp.zeros_like(array))
