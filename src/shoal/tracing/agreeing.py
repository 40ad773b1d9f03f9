"""Run equations as one of several replicas: `mean` and `gather` become JAX's own collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from shoal.errors import TraceError
from shoal.tracing.agree import gather_p, mean_p
from shoal.tracing.jaxprs import bind, holds, inner, is_agreement, opened, place_of, scan_counts

Run = Callable[[Any, Sequence[Any]], list[Any]]


def agreeing(axes: tuple[str, ...]) -> Run:
    """How to run an equation where replicas lie along the mapped `axes`."""

    def run(equation: Any, args: Sequence[Any]) -> list[Any]:
        if equation.primitive is mean_p:
            return means(args, axes)
        if equation.primitive is gather_p:
            return [jax.lax.all_gather(args[0], axes, axis=equation.params["axis"], tiled=True)]
        if not holds(equation, is_agreement):
            return bind(equation, args)
        return _inside(equation, args, run)

    return run


def means(xs: Sequence[Any], axes: tuple[str, ...]) -> list[Any]:
    """The means of arrays over replicas, in one exchange for each dtype."""
    found: dict[int, Any] = {}
    for dtype in dict.fromkeys(x.dtype for x in xs):
        some = [i for i, x in enumerate(xs) if x.dtype == dtype]
        flat = jax.lax.pmean(jnp.concatenate([xs[i].ravel() for i in some]), axes)
        ends = np.cumsum([xs[i].size for i in some])[:-1].tolist()
        for i, part in zip(some, jnp.split(flat, ends), strict=True):
            found[i] = part.reshape(xs[i].shape)
    return [found[i] for i in range(len(xs))]


def _inside(equation: Any, args: Sequence[Any], run: Run) -> list[Any]:
    """Run an equation that holds agreements by taking it apart and putting it together again."""
    params, kind = equation.params, equation.primitive.name
    if kind == "scan":
        n_const, n_carry = scan_counts(equation)
        consts, first, xs = (
            args[:n_const],
            args[n_const : n_const + n_carry],
            args[n_const + n_carry :],
        )

        def turn(carry: Any, x: Any) -> tuple[Any, Any]:
            outs = run_jaxpr(params["jaxpr"], [*consts, *carry, *x], run)
            return outs[:n_carry], outs[n_carry:]

        final, ys = jax.lax.scan(
            turn, list(first), list(xs), params["length"], params["reverse"], params["unroll"]
        )
        return [*final, *ys]
    if kind == "while":
        n_test, n_body = params["cond_nconsts"], params["body_nconsts"]
        test, consts, first = args[:n_test], args[n_test : n_test + n_body], args[n_test + n_body :]
        return jax.lax.while_loop(
            lambda carry: run_jaxpr(params["cond_jaxpr"], [*test, *carry], run)[0],
            lambda carry: run_jaxpr(params["body_jaxpr"], [*consts, *carry], run),
            list(first),
        )
    if kind == "cond":
        branches = [lambda *a, b=branch: run_jaxpr(b, a, run) for branch in params["branches"]]
        return jax.lax.switch(args[0], branches, *args[1:])
    if inner(equation):
        key = next(k for k in ("jaxpr", "call_jaxpr", "fun_jaxpr") if k in params)
        return run_jaxpr(params[key], args, run)
    raise TraceError(
        f"replicas can't agree inside `{kind}`", "Move shoal.mean out of it.", place_of(equation)
    )


def run_jaxpr(closed: Any, args: Sequence[Any], run: Run) -> list[Any]:
    """Run a jaxpr's equations one by one."""
    jaxpr, consts = opened(closed)
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env |= dict(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jex.Literal) else env[atom]

    for equation in jaxpr.eqns:
        outs = run(equation, [read(a) for a in equation.invars])
        env |= dict(zip(equation.outvars, outs, strict=True))
    return [read(a) for a in jaxpr.outvars]
