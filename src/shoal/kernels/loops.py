"""Loops over time in which rows stay apart, as one kernel by blocks of rows.

That rows stay apart is what `tracing.flow` proves, and what one block does is what a replica with
so few rows would do: `tracing.local` derives it from the one trace of the loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.extend import core as jex

from shoal.graph.layout import REPLICATED, Layout, Replicated, Sharded
from shoal.kernels.block import Block
from shoal.kernels.launch import launched
from shoal.kernels.memory import Port
from shoal.kernels.setting import Launch
from shoal.kernels.tiles import ROW, IneligibleError, filled
from shoal.tracing.equations import below, holds, opened, scan_counts
from shoal.tracing.flow import Flow
from shoal.tracing.local import Held, Local, Share
from shoal.tracing.rowwise import map_rows_p

ROWS = Sharded(0)
BLOCK, LARGE_BLOCK = 16, 64  # rows; 16 are the fewest that tensor cores take
MANY = 16_384  # rows from which large blocks are the faster ones, measured on an H200
HELD = 64 << 10  # bytes of shared arrays that are held on chip for the whole loop
NETWORK_WARPS = 4
MOST_SHARED = 1 << 20  # bytes of shared arrays that are worth reading again every turn


class BlockShare(Share):
    """The rows of one block; what is uniform along rows is given as many."""

    def cut(self, x: Any, rows: Sharded, *, is_uniform: bool = False) -> Any:
        """A block's own rows of what is equal along them; of nothing else."""
        if not is_uniform or not rows.is_plain:
            raise IneligibleError("rows are computed with by their number")
        x = jnp.asarray(x)
        shape = (*x.shape[: rows.axis], self.rows, *x.shape[rows.axis + 1 :])
        return jnp.broadcast_to(lax.slice_in_dim(x, 0, 1, axis=rows.axis), shape)


def block_share(count: int, rows: int) -> BlockShare:
    """A block of `rows` of `count` rows, which can't know its number."""

    def numbered() -> Any:
        raise IneligibleError("rows are computed with by their number")

    return BlockShare(count, rows, max(1, count // rows), numbered)


@dataclass(frozen=True)
class Plan:
    """How a scan lies over blocks: which of its operands have rows, and what a block does."""

    equation: Any
    count: int
    rows: int
    layouts: tuple[Layout, ...]
    body: Any

    @property
    def ports(self) -> tuple[list[Port], list[Port], list[Port], list[Port]]:
        """Of constants, what is carried, what is looped over, what is stacked."""
        e, (n_const, n_carry) = self.equation, scan_counts(self.equation)
        by_rows = [x == ROWS for x in self.layouts]
        avals = [v.aval for v in e.invars]
        ins = [Port(a, int(r), r) for a, r in zip(avals, by_rows, strict=True)]
        looped = [
            Port(a, 1 + int(r), r)
            for a, r in zip(avals[n_const + n_carry :], by_rows[n_const + n_carry :], strict=True)
        ]
        stacked = [Port(v.aval, 2, True) for v in e.outvars[n_carry:]]  # noqa: FBT003
        return ins[:n_const], ins[n_const : n_const + n_carry], looped, stacked


# A loop with one of these, but without a stage per row, is no recurrence.
HEAVY = frozenset({"dot_general", "conv_general_dilated", "scan", "while", "sort", "gather"})


def rows_of(equation: Any) -> int:
    """How many rows a scan may be divided by: those of its stages, or of all that it carries."""
    jaxpr, _ = opened(equation.params["jaxpr"])
    if found := _mapped_rows(jaxpr):
        return found
    if holds(equation, lambda e: e is not equation and e.primitive.name in HEAVY):
        raise IneligibleError("it is no recurrence of rows")
    n_const, n_carry = scan_counts(equation)
    sizes = {v.aval.shape[:1] for v in equation.invars[n_const : n_const + n_carry]}
    if len(sizes) != 1 or sizes == {()}:
        raise IneligibleError("what it carries has no rows in common")
    return sizes.pop()[0]


def _mapped_rows(jaxpr: Any) -> int:
    for e in jaxpr.eqns:
        if e.primitive is map_rows_p and e.params["shared"] < len(e.invars):
            return e.invars[e.params["shared"]].aval.shape[0]
        for inner in below(e):
            if found := _mapped_rows(inner):
                return found
    return 0


def plan_loop(equation: Any) -> Plan:
    """How a scan becomes a kernel; raises where it can't."""
    count = rows_of(equation)
    n_const, n_carry = scan_counts(equation)
    marked = _row_constants(equation, count)
    layouts = tuple(
        _guess(v.aval, i, (n_const, n_carry), count, marked) for i, v in enumerate(equation.invars)
    )
    first_looped = n_const + n_carry
    outer = [*layouts[:first_looped], *map(_outer, layouts[first_looped:])]
    carried, made = Flow(count).scan(equation, tuple(outer))
    if carried != layouts[n_const : n_const + n_carry]:
        raise IneligibleError("what it carries mixes rows")
    for layout, var in zip(made[n_carry:], equation.outvars[n_carry:], strict=True):
        fits = layout == ROWS or (
            isinstance(layout, Replicated) and 0 in layout.uniform and var.aval.shape[1] == count
        )
        if not fits:
            raise IneligibleError("what it stacks mixes rows, or has none")
    rows = LARGE_BLOCK if count >= MANY else BLOCK
    body = _body(equation, layouts, count, rows)
    return Plan(equation, count, rows, layouts, body)


def _guess(aval: Any, index: int, counts: tuple[int, int], count: int, marked: set[int]) -> Layout:
    """Whether an operand is taken to have rows; the flow of layouts then proves or refutes it."""
    n_const, n_carry = counts
    if index < n_const:
        return ROWS if index in marked else REPLICATED
    shape = aval.shape if index < n_const + n_carry else aval.shape[1:]
    has_rows = shape[:1] == (count,)
    if index < n_const + n_carry:
        return ROWS if has_rows else REPLICATED
    return ROWS if has_rows else REPLICATED


def _row_constants(equation: Any, count: int) -> set[int]:
    """Which constants of a scan its stages take as rows."""
    jaxpr, _ = opened(equation.params["jaxpr"])
    n_const, _ = scan_counts(equation)
    found: set[Any] = set()
    _collect(jaxpr, {v: v for v in jaxpr.invars}, found)
    return {
        i
        for i, v in enumerate(jaxpr.invars[:n_const])
        if v in found and v.aval.shape[:1] == (count,)
    }


def _collect(jaxpr: Any, origin: dict[Any, Any], found: set[Any]) -> None:
    for e in jaxpr.eqns:
        given = [None if isinstance(v, jex.Literal) else origin.get(v) for v in e.invars]
        if e.primitive is map_rows_p:
            found |= {v for v in given[e.params["shared"] :] if v is not None}
        elif e.primitive.name in ("jit", "pjit", "closed_call"):
            inner, _ = opened(e.params["jaxpr"])
            here = {v: g for v, g in zip(inner.invars, given, strict=True) if g is not None}
            _collect(inner, here, found)


def _body(equation: Any, layouts: Sequence[Layout], count: int, rows: int) -> Any:
    """The jaxpr of one turn for a block of rows."""
    n_const, n_carry = scan_counts(equation)
    share = block_share(count, rows)

    def turn(*args: Any) -> list[Any]:
        held = [Held(x, layout) for x, layout in zip(args, layouts, strict=True)]
        outs = Local(share).jaxpr(equation.params["jaxpr"], held)
        wanted = [*layouts[n_const : n_const + n_carry], *[ROWS] * (len(outs) - n_carry)]
        brought = [share.brought(x, w) for x, w in zip(outs, wanted, strict=True)]
        return [jnp.asarray(x.array) for x in brought]

    jaxpr, _ = opened(equation.params["jaxpr"])
    specs = [
        jax.ShapeDtypeStruct(
            (rows, *v.aval.shape[1:]) if layout == ROWS else v.aval.shape, v.aval.dtype
        )
        for v, layout in zip(jaxpr.invars, layouts, strict=True)
    ]
    return jax.make_jaxpr(turn)(*specs)


def _outer(layout: Layout) -> Layout:
    """How what is looped over lies: its rows are behind the axis of turns."""
    return Sharded(1) if layout == ROWS else layout


def run_loop(plan: Plan, args: Sequence[Any], launch: Launch) -> list[Any]:
    """What the scan gives, computed by a kernel."""
    e = plan.equation
    n_const, n_carry = scan_counts(e)
    ports = plan.ports
    consts, carries, looped, stacked = ports
    rows, length = plan.rows, e.params["length"]
    blocks = -(-plan.count // rows)
    whole = blocks * rows
    shared = sum(p.on_chip for p in consts if not p.by_rows)
    if shared > MOST_SHARED:
        raise IneligibleError(f"{shared >> 10} kB that all rows share don't fit on chip")
    leads = [
        *([[whole] if p.by_rows else [] for p in (*consts, *carries)]),
        *([[length, whole] if p.by_rows else [length] for p in looped]),
    ]
    ins = [*consts, *carries, *looped]
    given = [p.prepared(x, lead) for p, x, lead in zip(ins, args, leads, strict=True)]
    outs = [p.spec([whole] if p.by_rows else []) for p in carries]
    outs += [p.spec([length, whole]) for p in stacked]

    def kernel(*refs: Any) -> None:
        in_refs, out_refs = refs[: len(given)], refs[len(given) :]
        here = pl.ds(pl.program_id(0) * rows, rows)

        def load(i: int, *lead: Any) -> Any:
            port = ins[i]
            return port.load(in_refs[i], (*lead, here) if port.by_rows else lead,
                             (ROW,) if port.by_rows else ())  # fmt: skip

        kept = [load(i) for i in range(n_const)] if shared <= HELD else None

        def turn(i: Any, arrays: Any) -> Any:
            t = length - 1 - i if e.params["reverse"] else i
            now = kept or [load(j) for j in range(n_const)]
            carry = [_filled(p, a, rows) for p, a in zip(carries, arrays, strict=True)]
            xs = [load(n_const + n_carry + j, t) for j in range(len(looped))]
            made = Block(rows).jaxpr(plan.body, [*now, *carry, *xs])
            for port, ref, value in zip(stacked, out_refs[n_carry:], made[n_carry:], strict=True):
                port.store(ref, (t, here), port.arrays(value, rows))
            return [
                p.arrays(x, rows if p.by_rows else 0)
                for p, x in zip(carries, made[:n_carry], strict=True)
            ]

        first = [
            p.arrays(load(n_const + j), rows if p.by_rows else 0) for j, p in enumerate(carries)
        ]
        final = lax.fori_loop(0, length, turn, first)
        for port, ref, arrays in zip(carries, out_refs[:n_carry], final, strict=True):
            port.store(ref, (here,) if port.by_rows else (), arrays)

    warps = NETWORK_WARPS if shared else 1
    made = launched(replace(launch, warps=warps, name="shoal_loop"), kernel, (blocks,), given, outs)
    ends = [[plan.count] if p.by_rows else [] for p in carries]
    ends += [[length, plan.count]] * len(stacked)
    return [
        p.restored(x, lead) for p, x, lead in zip([*carries, *stacked], made, ends, strict=True)
    ]


def _filled(port: Port, arrays: Sequence[Any], rows: int) -> Any:
    value = filled(port.frame, arrays, rows if port.by_rows else 0)
    return port.held(replace(value, axis=0 if port.by_rows else None))
