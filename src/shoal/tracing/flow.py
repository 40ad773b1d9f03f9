"""How values lie over replicas, followed through jaxprs equation by equation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax import lax
from jax.extend import core as jex

from shoal.graph.layout import (
    APART,
    ESTIMATE,
    NO_CAUSE,
    REPLICATED,
    Cause,
    Fault,
    Findings,
    Layout,
    Partial,
    Replicated,
    Sharded,
    Varying,
    cause_of,
    inside,
    is_exact,
    join,
    lacks_cause,
    outside,
    with_cause,
)
from shoal.tracing.agree import agree_p, gather_p, scatter_p
from shoal.tracing.equations import (
    CALLS,
    holds,
    inner,
    is_agreement,
    is_stage,
    opened,
    place_of,
    scan_counts,
)
from shoal.tracing.partial import partial_step
from shoal.tracing.rowwise import in_blocks_p
from shoal.tracing.rules import row_step
from shoal.tracing.steps import UNCHANGED, Operation, Step, replicated

Layouts = tuple[Layout, ...]
LOST = Varying()


def step_of(op: Operation) -> Step | None:
    """How one operation runs on a share, or None where it can't."""
    if all(isinstance(x, Replicated) for x in op.ins):
        return Step(op.ins, replicated(op.equation, op.ins))
    if any(x == LOST for x in op.ins):
        return None
    own = any(not is_exact(x) for x in op.ins)
    parts = any(isinstance(x, Partial) for x in op.ins)
    if parts and (found := partial_step(replace(op, ins=tuple(map(_cleared, op.ins))))):
        return _marked(found, is_own=own)
    if not any(isinstance(x, Sharded) for x in op.ins):
        wants = tuple(x if isinstance(x, Replicated) else ESTIMATE for x in op.ins)
        return Step(wants, (ESTIMATE,) * len(op.equation.outvars))
    clean = (REPLICATED if isinstance(x, Partial | Varying) else _cleared(x) for x in op.ins)
    found = row_step(replace(op, ins=tuple(clean)))
    if found is None:
        return None
    wants = tuple(_wanted(x, w) for x, w in zip(op.ins, found.ins, strict=True))
    pairs = zip(op.ins, wants, strict=True)
    lost = any(isinstance(w, Partial) and isinstance(x, Varying) for x, w in pairs)
    return None if lost else _marked(replace(found, ins=wants), is_own=own or parts)


def _cleared(layout: Layout) -> Layout:
    """`layout` as if it were exact."""
    return replace(layout, own=False) if isinstance(layout, Sharded | Partial) else layout


def _wanted(have: Layout, want: Layout) -> Layout:
    """How an operand must lie; an estimate of what all replicas have is one still."""
    if isinstance(want, Replicated) and not isinstance(have, Replicated):
        return ESTIMATE
    return have if isinstance(want, Sharded) and isinstance(have, Sharded) else want


def _marked(step: Step, *, is_own: bool) -> Step:
    """`step`, whose results are only as exact as its operands."""
    if not is_own:
        return step
    outs = (
        replace(x, own=True) if isinstance(x, Sharded | Partial) else ESTIMATE for x in step.outs
    )
    return replace(step, outs=tuple(outs))


@dataclass(frozen=True)
class Flow:
    """Follows layouts through equations of a loop with `count` environments."""

    count: int
    findings: Findings = field(default_factory=Findings)

    def equation(self, e: Any, ins: Sequence[Layout]) -> Layouts:
        """How what an equation writes lies."""
        if all(isinstance(x, Replicated) for x in ins):
            self._note_approximate(e)
            return replicated(e, ins)
        outs = self._by_kind(e, tuple(ins))
        if not any(map(lacks_cause, outs)):
            return outs
        earlier = next((cause_of(x) for x in ins if cause_of(x) != NO_CAUSE), None)
        cause = earlier or Cause(e.params.get("name", e.primitive.name), place_of(e))
        return tuple(with_cause(x, cause) for x in outs)

    def _by_kind(self, e: Any, ins: Layouts) -> Layouts:
        kind = e.primitive
        if handler := _AGREEMENTS.get(kind):
            return handler(self, e, ins)
        if kind is in_blocks_p and blocks_step(self._op(e, ins)) is None:
            return self.jaxpr(e.params["jaxpr"], ins)
        if kind.name in _CONTROL and not maps_rows(e, ins):
            return _CONTROL[kind.name](self, e, ins)
        if kind.name in CALLS and (found := inner(e)):
            return self._call(e, found, ins)
        return self._plain(e, ins)

    def _op(self, e: Any, ins: Layouts) -> Operation:
        return Operation(e, ins, self.count)

    def _plain(self, e: Any, ins: Layouts) -> Layouts:
        step = plain_step(self._op(e, ins))
        if step is None:
            return (LOST,) * len(e.outvars)
        self._note_numbered(e, ins, step.ins)
        self._note_grouped(e, step.outs)
        return step.outs

    def _note_numbered(self, e: Any, have: Sequence[Layout], want: Sequence[Layout]) -> None:
        """Note that a replica must know its environments to bring some values into layouts."""
        where = place_of(e)
        asks = any(_asks(a, b) for a, b in zip(have, want, strict=False))
        if asks and where not in self.findings.numbered:
            self.findings.numbered.append(where)

    def _note_grouped(self, e: Any, made: Sequence[Layout]) -> None:
        """Note that a replica must hold whole groups of neighbouring environments."""
        for group in {x.group for x in made if isinstance(x, Sharded) and x.group > 1}:
            if group not in {size for size, _ in self.findings.grouped}:
                self.findings.grouped.append((group, place_of(e)))

    def _note_approximate(self, e: Any) -> None:
        if holds(e, lambda x: x.primitive is agree_p and x.params["approximate"]):
            self.findings.approximate.append(place_of(e))

    def jaxpr(self, closed: Any, ins: Sequence[Layout]) -> Layouts:
        """How what a jaxpr returns lies."""
        jaxpr, _ = opened(closed)
        known: dict[Any, Layout] = dict(zip(jaxpr.invars, ins, strict=True))

        def read(atom: Any) -> Layout:
            return REPLICATED if isinstance(atom, jex.Literal) else known.get(atom, REPLICATED)

        for e in jaxpr.eqns:
            outs = self.equation(e, [read(v) for v in e.invars])
            known.update(zip(e.outvars, outs, strict=True))
        return tuple(read(v) for v in jaxpr.outvars)

    def _call(self, e: Any, found: Any, ins: Layouts) -> Layouts:
        outs = self.jaxpr(found[0], ins)
        if is_stage(e):
            return outs
        # JAX traces its own functions once for all callers: only the call knows the user's line.
        before = {NO_CAUSE, *map(cause_of, ins)}
        if all(cause_of(x) in before for x in outs):
            return outs
        here = place_of(e)
        return tuple(
            x if isinstance(x, Replicated) or x.cause in before
            else replace(x, cause=Cause(x.cause.op, here))
            for x in outs
        )  # fmt: skip

    def settled(
        self, e: Any, body: Callable[[Flow, Layouts], Layouts], first: Sequence[Layout]
    ) -> tuple[Layouts, Layouts]:
        """What a loop carries when it has settled, and what its body then returns.

        There are finitely many layouts, and a value only goes up among them: it always settles.
        """
        carry = tuple(_plainly(x) for x in first)
        while True:
            flow = Flow(self.count)
            outs = body(flow, carry)
            pairs = zip(carry, outs, strict=False)
            after = tuple(with_cause(_plainly(join(a, b)), cause_of(b)) for a, b in pairs)
            if after == carry:
                self.findings.add(flow.findings)
                for given in (first, outs):
                    self._note_numbered(e, given, carry)
                return carry, outs
            carry = after

    def scan(self, e: Any, ins: Layouts) -> tuple[Layouts, Layouts]:
        """What a scan carries, and what its body returns."""
        n_const, n_carry = scan_counts(e)
        consts, rows = ins[:n_const], tuple(map(inside, ins[n_const + n_carry :]))
        return self.settled(
            e,
            lambda flow, carry: flow.jaxpr(e.params["jaxpr"], (*consts, *carry, *rows)),
            ins[n_const : n_const + n_carry],
        )

    def loop(self, e: Any, ins: Layouts) -> tuple[Layouts, Layout]:
        """What a while loop carries, and how its condition lies."""
        n_test, n_body = e.params["cond_nconsts"], e.params["body_nconsts"]
        test, consts = ins[:n_test], ins[n_test : n_test + n_body]
        select = row_select(e)

        def turn(flow: Flow, carry: Layouts) -> Layouts:
            after = flow.jaxpr(e.params["body_jaxpr"], (*consts, *carry))
            if select is None:
                return after
            continues = flow.jaxpr(e.params["cond_jaxpr"], (*test, *carry))
            return flow.jaxpr(select, (*continues, *carry, *after))

        carry, _ = self.settled(e, turn, ins[n_test + n_body :])
        return carry, self.jaxpr(e.params["cond_jaxpr"], (*test, *carry))[0]

    def diverges(self, e: Any, test: Layout) -> bool:
        """Whether replicas may go other ways; then they must not meet on them."""
        if isinstance(test, Replicated):
            return False
        if holds(e, is_agreement):
            self.findings.faults.append(
                Fault(
                    f"replicas agree inside `{_SPOKEN.get(e.primitive.name, e.primitive.name)}`, "
                    "whose condition differs between replicas: some would wait for others for ever",
                    "Agree on the condition first, with shoal.max(x) or shoal.mean(x), "
                    "or agree outside of it.",
                    place_of(e),
                )
            )
        # With a condition for each row, a row that is done stays as it is while others continue.
        return not (row_select(e) and isinstance(test, Sharded))


_SPOKEN = {"while": "lax.while_loop", "cond": "lax.cond"}


def row_select(e: Any) -> Any:
    """For a while loop batched over its condition: what each row takes, of the old and the new.

    A jaxpr of the condition, what was carried and what the body made of it; None if there is one
    condition for all, or `e` is no while loop.
    """
    if e.primitive.name != "while" or not (test := e.params["cond_jaxpr"].out_avals[0]).shape:
        return None
    carried = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in e.outvars]

    def select(continues: Any, old: list[Any], new: list[Any]) -> list[Any]:
        axes = range(continues.ndim)
        return [
            lax.select(lax.broadcast_in_dim(continues, x.shape, axes), y, x)
            for x, y in zip(old, new, strict=True)
        ]

    return jax.make_jaxpr(select)(jax.ShapeDtypeStruct(test.shape, test.dtype), carried, carried)


def plain_step(op: Operation) -> Step | None:
    """How an operation without control flow, or one over rows, runs on a share."""
    kind = op.equation.primitive
    if kind is in_blocks_p:
        return blocks_step(op)
    if kind.name == "scan":
        return _scan_over_rows(op)
    if kind.name in UNCHANGED and LOST not in op.ins:
        return Step(op.ins, op.ins)
    return step_of(op)


def maps_rows(e: Any, ins: Sequence[Layout]) -> bool:
    """Whether a scan does the same for every row, one after the other."""
    if e.primitive.name != "scan":
        return False
    n_const, n_carry = scan_counts(e)
    xs = ins[n_const + n_carry :]
    by_rows = any(isinstance(x, Sharded) and x.axis == 0 for x in xs)
    return n_carry == 0 and by_rows and not holds(e, is_agreement)


def _scan_over_rows(op: Operation) -> Step | None:
    n_const, _ = scan_counts(op.equation)
    found = {x for x in op.ins[n_const:] if isinstance(x, Sharded)}
    others = [x for x in (*op.ins[:n_const], *op.ins[n_const:]) if not isinstance(x, Sharded)]
    alone = all(not isinstance(x, Sharded) for x in op.ins[:n_const])
    if len(found) != 1 or not alone or not all(isinstance(x, Replicated) for x in others):
        return None
    (rows,) = found
    ins = (*op.ins[:n_const], *(rows for _ in op.ins[n_const:]))
    outs = (rows,) * len(op.equation.outvars)
    return Step(ins, outs, lambda share: {"length": rows.size(share)})


def blocks_step(op: Operation) -> Step | None:
    """What is summed up, or made, sample by sample: a share of the samples is a share of it."""
    first, samples = op.params["shared"], op.params["samples"]
    rows = {x for x in op.ins[first:] if isinstance(x, Sharded)}
    alike = all(isinstance(x, Replicated) for x in op.ins[:first])
    alike &= all(isinstance(x, Replicated | Sharded) for x in op.ins[first:])
    if len(rows) != 1 or not alike:
        return None
    (row,) = rows
    made = block_layouts(op.params["jaxpr"], first, samples)
    if row.axis != 0 or row.group > 1 or row.size(op.count) != samples or made is None:
        return None
    ins = (*op.ins[:first], *(row for _ in op.ins[first:]))
    outs = tuple(
        replace(x, own=row.own) if isinstance(x, Partial) else row if isinstance(x, Sharded) else x
        for x in made
    )
    return Step(ins, outs)


def block_layouts(closed: Any, shared: int, samples: int) -> Layouts | None:
    """How results lie if samples are divided into blocks; None if they can't be."""
    flow = Flow(samples)
    jaxpr, _ = opened(closed)
    ins = [REPLICATED if i < shared else Sharded(0) for i in range(len(jaxpr.invars))]
    outs = flow.jaxpr(closed, ins)
    fits = all(x in (REPLICATED, Partial(), Sharded(0)) for x in outs)
    found = flow.findings
    return None if not fits or found.numbered or found.faults or found.grouped else outs


def _asks(have: Layout, want: Layout) -> bool:
    """Whether a replica must know which environments it holds to bring a value into a layout."""
    match have, want:
        case Replicated(uniform), Sharded(axis):
            return axis not in uniform
        case Varying(), Sharded():
            return True
        case Replicated(), Partial(how):
            return how == "sum"
    return False


def _plainly(layout: Layout) -> Layout:
    return REPLICATED if isinstance(layout, Replicated) else layout


def _scan(flow: Flow, e: Any, ins: Layouts) -> Layouts:
    _, n_carry = scan_counts(e)
    carry, outs = flow.scan(e, ins)
    return (*carry, *map(outside, outs[n_carry:]))


def _while(flow: Flow, e: Any, ins: Layouts) -> Layouts:
    carry, test = flow.loop(e, ins)
    return (LOST,) * len(carry) if flow.diverges(e, test) else carry


def _cond(flow: Flow, e: Any, ins: Layouts) -> Layouts:
    if flow.diverges(e, ins[0]):
        return (LOST,) * len(e.outvars)
    found = [flow.jaxpr(branch, ins[1:]) for branch in e.params["branches"]]
    outs = found[0]
    for more in found[1:]:
        outs = tuple(_plainly(join(a, b)) for a, b in zip(outs, more, strict=True))
    for branch in found:
        flow._note_numbered(e, branch, outs)
    return outs


def _solve(flow: Flow, e: Any, ins: Layouts) -> Layouts:
    closed, args = solver(e, ins)
    return flow.jaxpr(closed, args)


def solver(e: Any, args: Sequence[Any]) -> tuple[Any, list[Any]]:
    """The jaxpr that solves in `custom_linear_solve`, and its arguments among the equation's."""
    lengths, jaxprs = e.params["const_lengths"], e.params["jaxprs"]
    before = lengths.matvec + lengths.vecmat
    rest = sum(lengths)
    return jaxprs.solve, [*args[before : before + lengths.solve], *args[rest:]]


_CONTROL: dict[str, Callable[[Flow, Any, Layouts], Layouts]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "custom_linear_solve": _solve,
}


def _agree(flow: Flow, e: Any, ins: Layouts) -> Layouts:
    flow._note_approximate(e)
    return tuple(_agreed(flow, e, x) for x in ins)


def _agreed(flow: Flow, e: Any, layout: Layout) -> Layout:
    how, approximate = e.params["how"], e.params["approximate"]
    wanted = "sum" if how == "mean" else how
    match layout:
        case Replicated():
            return REPLICATED
        case Partial(found, own) if found == wanted and (approximate or not own):
            return REPLICATED
        case Varying(runs=True) if approximate:
            return REPLICATED
        case Partial(found) if approximate:
            return REPLICATED
    flow.findings.faults.append(_misuse(e, how, layout))
    return LOST


def _misuse(e: Any, how: str, layout: Layout) -> Fault:
    call, where = f"shoal.{how}", place_of(e)
    match layout:
        case Sharded():
            return Fault(
                f"{call} is given rows, one for each environment",
                "Reduce them over the environments first, or take all rows with shoal.gather(x).",
                where,
            )
        case Partial(found) if not layout.own:
            word = {"sum": "sum", "max": "maximum", "min": "minimum"}[found]
            return Fault(
                f"{call} is given a {word} over environments, "
                f"which it can't make that of all replicas from",
                f"Use shoal.{found}(x).",
                where,
            )
    cause = cause_of(layout)
    by = f" (by `{cause.op}`{f' at {cause.source}' if cause.source else ''})" if cause.op else ""
    lost = isinstance(layout, Varying) and not layout.runs
    fix = (
        f"Agree on what is reduced over environments before it is used. {APART}."
        if lost
        else "Agree on what it is made of: a sum, mean, maximum or minimum over environments "
        "(shoal.sum, mean, max, min, moments, weighted_mean), or take all rows with "
        "shoal.gather(x) before they are mixed. If an approximation will do, say "
        "shoal.mean(x, approximate=True)."
    )
    return Fault(
        f"{call} is given what each replica computes from its own environments{by}, and no "
        f"{'mean' if how == 'mean' else how} of it is what all environments together give",
        fix,
        where,
        cause if lost else NO_CAUSE,
    )


def _gathered(flow: Flow, e: Any, ins: Layouts) -> Layouts:
    axis = e.params["axis"]
    if isinstance(ins[0], Sharded) and ins[0].axis == axis and not ins[0].own:
        return (REPLICATED,)
    flow.findings.faults.append(
        Fault(
            f"shoal.gather along axis {axis} is given no rows along that axis",
            "Give it what has a row for each environment, and name their axis.",
            place_of(e),
        )
    )
    return (LOST,)


def _scattered(flow: Flow, e: Any, ins: Layouts) -> Layouts:
    axis, layout = e.params["axis"], ins[0]
    size = e.invars[0].aval.shape[axis]
    rows = Sharded(axis, size // flow.count)
    if isinstance(layout, Sharded) and layout.axis == axis:
        return ins
    if isinstance(layout, Partial) and layout.how == "sum" and size % flow.count == 0:
        flow._note_numbered(e, [REPLICATED], [rows])
        return (replace(rows, own=layout.own),)
    flow.findings.faults.append(
        Fault(
            f"shoal.scatter along axis {axis} is given no whole rows along that axis",
            "Give it what all replicas have whole, with a row for each environment.",
            place_of(e),
        )
    )
    return (LOST,)


_AGREEMENTS: dict[Any, Callable[[Flow, Any, Layouts], Layouts]] = {
    agree_p: _agree,
    gather_p: _gathered,
    scatter_p: _scattered,
}
