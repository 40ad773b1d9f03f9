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
    flow = Flow(count)
    carried, made = flow.scan(equation, tuple(outer))
    if flow.findings.grouped:
        raise IneligibleError("rows meet their neighbours")
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


@dataclass(frozen=True)
class _Kernel:
    """What a program does: all turns of the loop for its block of rows."""

    plan: Plan
    consts: list[Port]
    carries: list[Port]
    looped: list[Port]
    stacked: list[Port]

    @property
    def ins(self) -> list[Port]:
        """What it reads, in the order of the loop's operands."""
        return [*self.consts, *self.carries, *self.looped]

    @property
    def shared(self) -> int:
        """How many bytes of constants all rows share."""
        return sum(p.on_chip for p in self.consts if not p.by_rows)

    def leads(self, count: int) -> tuple[list[list[int]], list[list[int]]]:
        """The first axes of what is read, and of what is written, with so many rows."""
        length = self.plan.equation.params["length"]
        rows = [[count] if p.by_rows else [] for p in (*self.consts, *self.carries)]
        turns = [[length, count] if p.by_rows else [length] for p in self.looped]
        made = [[length, count]] * len(self.stacked)
        return [*rows, *turns], [*rows[len(self.consts) :], *made]

    def run(self, in_refs: Sequence[Any], out_refs: Sequence[Any]) -> None:
        """Take all turns."""
        plan, params, rows = self.plan, self.plan.equation.params, self.plan.rows
        here = pl.ds(pl.program_id(0) * rows, rows)
        ports, consts, carries = self.ins, len(self.consts), self.carries

        def load(i: int, *lead: Any) -> Any:
            if not ports[i].by_rows:
                return ports[i].load(in_refs[i], lead, ())
            return ports[i].load(in_refs[i], (*lead, here), (ROW,))

        kept = [load(i) for i in range(consts)] if self.shared <= HELD else None

        def turn(i: Any, arrays: Any) -> Any:
            t = params["length"] - 1 - i if params["reverse"] else i
            now = kept or [load(j) for j in range(consts)]
            carry = [_filled(p, a, rows) for p, a in zip(carries, arrays, strict=True)]
            xs = [load(j, t) for j in range(consts + len(carries), len(ports))]
            made = Block(rows).jaxpr(plan.body, [*now, *carry, *xs])
            stacked = zip(self.stacked, out_refs[len(carries) :], made[len(carries) :], strict=True)
            for port, ref, value in stacked:
                port.store(ref, (t, here), port.arrays(value, rows))
            return [
                p.arrays(x, rows if p.by_rows else 0)
                for p, x in zip(carries, made[: len(carries)], strict=True)
            ]

        first = [
            p.arrays(load(consts + j), rows if p.by_rows else 0) for j, p in enumerate(carries)
        ]
        final = lax.fori_loop(0, params["length"], turn, first)
        for port, ref, arrays in zip(carries, out_refs[: len(carries)], final, strict=True):
            port.store(ref, (here,) if port.by_rows else (), arrays)


def run_loop(plan: Plan, args: Sequence[Any], launch: Launch) -> list[Any]:
    """What the scan gives, computed by a kernel."""
    work = _Kernel(plan, *plan.ports)
    if work.shared > MOST_SHARED:
        raise IneligibleError(f"{work.shared >> 10} kB that all rows share don't fit on chip")
    blocks = -(-plan.count // plan.rows)
    reads, writes = work.leads(blocks * plan.rows)
    given = [p.prepared(x, lead) for p, x, lead in zip(work.ins, args, reads, strict=True)]
    made = [*work.carries, *work.stacked]
    outs = [p.spec(lead) for p, lead in zip(made, writes, strict=True)]
    launch = replace(launch, warps=NETWORK_WARPS if work.shared else 1, name="shoal_loop")

    def kernel(*refs: Any) -> None:
        work.run(refs[: len(given)], refs[len(given) :])

    results = launched(launch, kernel, (blocks,), given, outs)
    _, ends = work.leads(plan.count)
    return [p.restored(x, lead) for p, x, lead in zip(made, results, ends, strict=True)]


def _filled(port: Port, arrays: Sequence[Any], rows: int) -> Any:
    value = filled(port.frame, arrays, rows if port.by_rows else 0)
    return port.held(replace(value, axis=0 if port.by_rows else None))
