"""Running equations of the whole loop on one replica's share of the environments.

Every value comes with its layout. An equation whose operands are whole runs as it was traced; one
on rows runs with as many rows as the share has; agreements become JAX's own collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex

from shoal.graph.layout import (
    ESTIMATE,
    REPLICATED,
    Layout,
    Partial,
    Replicated,
    Sharded,
    Varying,
    inside,
    outside,
)
from shoal.tracing.agree import agree_p, gather_p, scatter_p
from shoal.tracing.equations import CALLS, bind, inner, opened, scan_counts
from shoal.tracing.flow import LOST, Flow, blocks_step, maps_rows, plain_step, row_select, solver
from shoal.tracing.rowwise import in_blocks_p
from shoal.tracing.steps import Operation, replicated


@dataclass(frozen=True, slots=True)
class Held:
    """A value as a replica holds it; there is no array where it can't be computed on a share."""

    array: Any
    layout: Layout = REPLICATED


NOTHING = Held(None, LOST)


@dataclass(frozen=True)
class Share:
    """What one of `replicas` replicas has: `rows` of `count` environments.

    `first` gives the number of the first of them; `axes` are the mapped axes that replicas lie
    along where they run as one program, the outermost first.
    """

    count: int
    rows: int
    replicas: int
    first: Callable[[], Any]
    axes: tuple[str, ...] = ()

    def brought(self, held: Held, want: Layout) -> Held:
        """A value in another layout that it can be brought into."""
        if LOST in (held.layout, want):
            return NOTHING
        if isinstance(held.layout, Partial) and isinstance(want, Sharded):
            held = self.brought(held, ESTIMATE)
        x = held.array
        match held.layout, want:
            case Replicated(uniform), Sharded(axis):
                x = self.cut(x, want, is_uniform=axis in uniform)
            case Varying(), Sharded():
                x = self.cut(x, want)
            case Replicated(), Partial("sum"):
                x = jnp.where(jnp.equal(self.first(), 0), x, jnp.zeros_like(x))
            case Partial("sum"), Varying():
                x = x * jnp.asarray(self.replicas, jnp.asarray(x).dtype)
        return Held(x, want)

    def cut(self, x: Any, rows: Sharded, *, is_uniform: bool = False) -> Any:
        """A replica's own rows of a whole array."""
        x = x if isinstance(x, jax.Array) else jnp.asarray(x)
        shape, axis = x.shape, rows.axis
        if self.rows == self.count:
            return x
        lead = shape[:axis]
        groups, mine = self.count // rows.group, self.rows // rows.group
        split = x.reshape(*lead, rows.before, groups, rows.after, *shape[axis + 1 :])
        first = 0 if is_uniform else self.first()
        first = first if rows.group == 1 else first // rows.group
        mine = lax.dynamic_slice_in_dim(split, first, mine, axis + 1)
        return mine.reshape(*lead, rows.size(self.rows), *shape[axis + 1 :])

    def summed(self, xs: Sequence[Any], how: str) -> list[Any]:
        """Arrays over all replicas, in one exchange for each dtype."""
        found: dict[int, Any] = {}
        arrays = [jnp.asarray(x) for x in xs]
        for dtype in dict.fromkeys(x.dtype for x in arrays):
            some = [i for i, x in enumerate(arrays) if x.dtype == dtype]
            flat = self._exchange(jnp.concatenate([arrays[i].ravel() for i in some]), how)
            ends = np.cumsum([arrays[i].size for i in some])[:-1].tolist()
            for i, part in zip(some, jnp.split(flat, ends), strict=True):
                found[i] = part.reshape(arrays[i].shape)
        return [found[i] for i in range(len(arrays))]

    def _exchange(self, x: Any, how: str) -> Any:
        if not self.axes:
            raise AssertionError("replicas that run apart never meet to agree")
        if x.dtype == np.bool_:
            return self._exchange(x.astype(jnp.int32), how) > 0
        if how in ("max", "min") and jnp.issubdtype(x.dtype, jnp.inexact):
            for name in self.axes:  # devices may lose a NaN when they reduce to an extreme
                x = getattr(lax.all_gather(x, name), how)(axis=0)
            return x
        return {"sum": lax.psum, "mean": lax.pmean, "max": lax.pmax, "min": lax.pmin}[how](
            x, self.axes
        )

    def gathered(self, x: Any, rows: Sharded) -> Any:
        """The rows of all replicas, in order."""
        shape, axis = x.shape, rows.axis
        mine = self.rows // rows.group
        split = x.reshape(*shape[:axis], rows.before, mine, rows.after, *shape[axis + 1 :])
        for name in reversed(self.axes):
            split = lax.all_gather(split, name, axis=axis + 1, tiled=True)
        return split.reshape(*shape[:axis], rows.size(self.count), *shape[axis + 1 :])


@dataclass(frozen=True)
class Local:
    """Runs equations of the whole loop on a share."""

    share: Share

    def equation(self, e: Any, args: Sequence[Held]) -> list[Held]:
        """What an equation makes of what a replica holds."""
        ins = tuple(held.layout for held in args)
        if all(isinstance(x, Replicated) for x in ins):
            made = bind(e, [held.array for held in args])
            return [Held(x, y) for x, y in zip(made, replicated(e, ins), strict=True)]
        kind = e.primitive
        if kind in (agree_p, gather_p, scatter_p):
            return self._agree(e, args)
        if kind is in_blocks_p and blocks_step(Operation(e, ins, self.share.count)) is None:
            return self.jaxpr(e.params["jaxpr"], args)
        if kind.name in _CONTROL and not maps_rows(e, ins):
            return _CONTROL[kind.name](self, e, args)
        if kind.name in CALLS and (found := inner(e)):
            return self.jaxpr(found, args)
        return self._plain(e, args)

    def _plain(self, e: Any, args: Sequence[Held]) -> list[Held]:
        ins = tuple(held.layout for held in args)
        step = plain_step(Operation(e, ins, self.share.count))
        if step is None:
            return [NOTHING] * len(e.outvars)
        given = [self.share.brought(x, w).array for x, w in zip(args, step.ins, strict=True)]
        params = step.params(self.share.rows) if step.params else {}
        made = bind(e, given, params)
        return [Held(x, y) for x, y in zip(made, step.outs, strict=True)]

    def jaxpr(self, closed: Any, args: Sequence[Held]) -> list[Held]:
        """What a jaxpr returns."""
        jaxpr, consts = closed if isinstance(closed, tuple) else opened(closed)
        env: dict[Any, Held] = {v: Held(c) for v, c in zip(jaxpr.constvars, consts, strict=True)}
        env |= dict(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Held:
            return Held(atom.val) if isinstance(atom, jex.Literal) else env[atom]

        for e in jaxpr.eqns:
            outs = self.equation(e, [read(a) for a in e.invars])
            env |= dict(zip(e.outvars, outs, strict=True))
        return [read(a) for a in jaxpr.outvars]

    def _agree(self, e: Any, args: Sequence[Held]) -> list[Held]:
        made = Flow(self.share.count).equation(e, [held.layout for held in args])
        if e.primitive is agree_p:
            return self._agreed(e, args, made)
        (held,), (out,) = args, made
        if out == LOST:
            return [NOTHING]
        if e.primitive is gather_p:
            assert isinstance(held.layout, Sharded)
            return [Held(self.share.gathered(held.array, held.layout))]
        if isinstance(held.layout, Partial):
            held = Held(self.share.summed([held.array], "sum")[0])
        return [self.share.brought(held, out)]

    def _agreed(self, e: Any, args: Sequence[Held], made: Sequence[Layout]) -> list[Held]:
        outs = [held if m != LOST else NOTHING for held, m in zip(args, made, strict=True)]
        for how in ("sum", "max", "min", "mean"):
            some = [i for i, held in enumerate(outs) if self._how(e, held.layout) == how]
            arrays = self.share.summed([outs[i].array for i in some], how) if some else []
            for i, x in zip(some, arrays, strict=True):
                outs[i] = Held(x)
        return outs

    def _how(self, e: Any, layout: Layout) -> str:
        """How replicas agree on a value: those that vary, approximately."""
        if isinstance(layout, Varying) and layout.runs:
            return "mean"
        if not isinstance(layout, Partial):
            return ""
        wanted = "sum" if e.params["how"] == "mean" else e.params["how"]
        return layout.how if layout.how == wanted else "mean"


@dataclass(frozen=True)
class _Carried:
    """What a loop carries, or a branch returns: as arrays for XLA, and as held values."""

    share: Share
    layouts: Sequence[Layout]

    def arrays(self, held: Sequence[Held]) -> list[Any]:
        """What there is of held values, in the layouts that are carried."""
        brought = [
            self.share.brought(x, layout)
            for x, layout in zip(held, self.layouts, strict=True)
            if layout != LOST
        ]
        return [x.array if hasattr(x.array, "dtype") else jnp.asarray(x.array) for x in brought]

    def held(self, arrays: Sequence[Any]) -> list[Held]:
        """Arrays as held values again."""
        found = iter(arrays)
        return [NOTHING if x == LOST else Held(next(found), x) for x in self.layouts]


def _scan(local: Local, e: Any, args: Sequence[Held]) -> list[Held]:
    params, (n_const, n_carry) = e.params, scan_counts(e)
    carried, made = Flow(local.share.count).scan(e, tuple(held.layout for held in args))
    consts, firsts = args[:n_const], args[n_const : n_const + n_carry]
    rows = args[n_const + n_carry :]
    carry = _Carried(local.share, carried)
    xs = _Carried(local.share, [inside(x.layout) for x in rows])
    ys = _Carried(local.share, made[n_carry:])

    def turn(arrays: Any, slices: Any) -> tuple[Any, Any]:
        held = [*consts, *carry.held(arrays), *xs.held(slices)]
        outs = local.jaxpr(params["jaxpr"], held)
        return carry.arrays(outs[:n_carry]), ys.arrays(outs[n_carry:])

    looped = [x.array for x, layout in zip(rows, xs.layouts, strict=True) if layout != LOST]
    final, stacked = lax.scan(
        turn, carry.arrays(firsts), looped, params["length"], params["reverse"], params["unroll"]
    )
    outs = [Held(x.array, outside(x.layout)) for x in ys.held(stacked)]
    return [*carry.held(final), *outs]


def _while(local: Local, e: Any, args: Sequence[Held]) -> list[Held]:
    params, flow = e.params, Flow(local.share.count)
    n_test, n_body = params["cond_nconsts"], params["body_nconsts"]
    carried, test = flow.loop(e, tuple(held.layout for held in args))
    if flow.diverges(e, test):
        return [NOTHING] * len(e.outvars)
    tests, consts = args[:n_test], args[n_test : n_test + n_body]
    carry = _Carried(local.share, carried)
    select = row_select(e)

    def is_running(held: Sequence[Held]) -> Held:
        return local.jaxpr(params["cond_jaxpr"], [*tests, *held])[0]

    def turn(arrays: Any) -> Any:
        held = carry.held(arrays)
        after = local.jaxpr(params["body_jaxpr"], [*consts, *held])
        if select is not None:
            after = local.jaxpr(select, [is_running(held), *held, *after])
        return carry.arrays(after)

    first = carry.arrays(args[n_test + n_body :])
    final = lax.while_loop(lambda xs: jnp.any(is_running(carry.held(xs)).array), turn, first)
    return carry.held(final)


def _cond(local: Local, e: Any, args: Sequence[Held]) -> list[Held]:
    layouts = Flow(local.share.count).equation(e, [held.layout for held in args])
    outs = _Carried(local.share, layouts)
    if not isinstance(args[0].layout, Replicated):
        return [NOTHING] * len(e.outvars)
    branches = [
        lambda branch=branch: outs.arrays(local.jaxpr(branch, args[1:]))
        for branch in e.params["branches"]
    ]
    return outs.held(lax.switch(args[0].array, branches))


def _solve(local: Local, e: Any, args: Sequence[Held]) -> list[Held]:
    closed, given = solver(e, list(args))
    return local.jaxpr(closed, given)


_CONTROL: dict[str, Callable[[Local, Any, Sequence[Held]], list[Held]]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "custom_linear_solve": _solve,
}
