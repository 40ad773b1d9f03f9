"""Rewrites a program so that parts of its jaxpr become kernels where they can."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.extend import core as jex

from shoal.kernels import operations, products, randomness, reductions  # noqa: F401  their rules
from shoal.kernels.gradients import plan_sums, run_sums
from shoal.kernels.loops import plan_loop, run_loop
from shoal.kernels.setting import Launch, Part, Report
from shoal.kernels.tiles import IneligibleError
from shoal.tracing.equations import (
    CALLS,
    bind,
    holds,
    inner,
    opened,
    place_of,
    scan_counts,
)
from shoal.tracing.jaxprs import marks_in
from shoal.tracing.rowwise import in_blocks_p


def rewritten(work: Callable[..., Any], launch: Launch, report: Report) -> Callable[..., Any]:
    """`work` with kernels where it can have any; it is traced when what this gives is."""
    rewrite = _Rewrite(launch, report)

    def run(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(work, return_shape=True)(*args)
        outs = rewrite.jaxpr(closed, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), outs)

    return run


@dataclass(frozen=True)
class _Rewrite:
    """Evaluates jaxprs, with kernels in place of loops and sums that can be."""

    launch: Launch
    report: Report

    def jaxpr(self, closed: Any, args: Sequence[Any]) -> list[Any]:
        """What a jaxpr returns."""
        jaxpr, consts = closed if isinstance(closed, tuple) else opened(closed)
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        env |= dict(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, jex.Literal) else env[atom]

        for e in jaxpr.eqns:
            outs = self.equation(e, [read(a) for a in e.invars])
            env |= dict(zip(e.outvars, outs, strict=True))
        return [read(a) for a in jaxpr.outvars]

    def equation(self, e: Any, args: list[Any]) -> list[Any]:
        """What one equation makes."""
        if not holds(e, _is_candidate):
            return bind(e, args)
        if _is_candidate(e) and (made := self.as_kernel(e, args)) is not None:
            return made
        name = e.primitive.name
        if name in _CONTROL:
            return _CONTROL[name](self, e, args)
        if name in CALLS and (found := inner(e)):
            return self.jaxpr(found, args)
        return bind(e, args)

    def as_kernel(self, e: Any, args: list[Any]) -> list[Any] | None:
        """What a loop or a sum makes as a kernel; None where it can't be one."""
        name, source = _name_of(e)
        try:
            if e.primitive is in_blocks_p:
                made = run_sums(plan_sums(e), args, self.launch)
            else:
                made = run_loop(plan_loop(e), args, self.launch)
        except IneligibleError as error:
            if name:
                self.report(Part(name, source, str(error)))
            return None
        self.report(Part(name or "a recurrence", source))
        return made


def _is_candidate(e: Any) -> bool:
    return e.primitive is in_blocks_p or e.primitive.name == "scan"


def _name_of(e: Any) -> tuple[str, str]:
    """A part's name in reports, and its line; no name if it isn't expected to be a kernel."""
    if e.primitive is in_blocks_p:
        return "the sum over samples", place_of(e)
    marks = [m for m in dict.fromkeys(marks_in(e)) if m.per == "env"]
    if not marks:
        return "", place_of(e)
    return f"the loop of {', '.join(m.name for m in marks)}", marks[0].source


def _scan(rewrite: _Rewrite, e: Any, args: list[Any]) -> list[Any]:
    n_const, n_carry = scan_counts(e)
    params = e.params
    consts, carry, xs = args[:n_const], args[n_const : n_const + n_carry], args[n_const + n_carry :]

    def turn(carry: Any, xs: Any) -> tuple[list[Any], list[Any]]:
        outs = rewrite.jaxpr(params["jaxpr"], [*consts, *carry, *xs])
        return outs[:n_carry], outs[n_carry:]

    final, ys = lax.scan(turn, carry, xs, params["length"], params["reverse"], params["unroll"])
    return [*final, *ys]


def _while(rewrite: _Rewrite, e: Any, args: list[Any]) -> list[Any]:
    n_test, n_body = e.params["cond_nconsts"], e.params["body_nconsts"]
    tests, consts = args[:n_test], args[n_test : n_test + n_body]
    test, body = e.params["cond_jaxpr"], e.params["body_jaxpr"]
    return lax.while_loop(
        lambda carry: jex.jaxpr_as_fun(test)(*tests, *carry)[0],
        lambda carry: rewrite.jaxpr(body, [*consts, *carry]),
        list(args[n_test + n_body :]),
    )


def _cond(rewrite: _Rewrite, e: Any, args: list[Any]) -> list[Any]:
    branches = [
        lambda *xs, branch=branch: rewrite.jaxpr(branch, xs) for branch in e.params["branches"]
    ]
    return lax.switch(args[0], branches, *args[1:])


_CONTROL: dict[str, Callable[[_Rewrite, Any, list[Any]], list[Any]]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
