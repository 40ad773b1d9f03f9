"""A program with those of its parts as kernels that can be, found by their jaxprs alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.extend import core as jex

from shoal.errors import SettingError
from shoal.kernels.gradients import plan_sums, run_sums
from shoal.kernels.launch import Launch
from shoal.kernels.loops import plan_loop, run_loop
from shoal.kernels.tiles import IneligibleError
from shoal.tracing.equations import (
    CALLS,
    below,
    bind,
    equation_mark,
    holds,
    inner,
    opened,
    place_of,
    scan_counts,
)
from shoal.tracing.rowwise import in_blocks_p

VARIABLE = "SHOAL_KERNELS"
MODES = ("off", "auto", "interpret")


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a program that could be a kernel: what it is, and why it isn't one if it isn't."""

    name: str
    source: str
    why_not: str = ""

    def __str__(self) -> str:
        runs = f"XLA: {self.why_not}" if self.why_not else "a kernel"
        return f"{self.name} ({self.source}) runs as {runs}"


Report = Callable[[Part], None]


def mode() -> str:
    """Whether kernels are made, as the environment says."""
    found = os.environ.get(VARIABLE, "off")
    if found not in MODES:
        raise SettingError(
            f"{VARIABLE}={found} is none of {', '.join(MODES)}",
            "Set it to `auto` to run kernels on GPUs that can, or leave it out.",
        )
    return found


def launch_on(devices: Sequence[Any]) -> Launch | None:
    """How kernels run on these devices, or None where they don't."""
    chosen = mode()
    if chosen == "interpret":
        return Launch(interpret=True)
    gpus = [d for d in devices if d.platform == "gpu"]
    fit = gpus and len(gpus) == len(devices) and all(map(_has_triton, gpus))
    return Launch() if chosen == "auto" and fit else None


def _has_triton(device: Any) -> bool:
    """Whether a GPU is NVIDIA's and new enough for JAX's Triton (Ampere and later)."""
    capability = str(getattr(device, "compute_capability", ""))
    return capability.replace(".", "").isdigit() and float(capability) >= 8.0


def with_kernels(
    work: Callable[..., Any], devices: Sequence[Any], report: Report | None = None
) -> Callable[..., Any]:
    """`work`, which is about to be compiled, with kernels where these devices can run them."""
    launch = launch_on(devices)
    if launch is None:
        return work
    rewrite = _Rewrite(launch, report or (lambda part: None))

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
        name = _name_of(e)
        try:
            if e.primitive is in_blocks_p:
                made = run_sums(plan_sums(e), args, self.launch)
            else:
                made = run_loop(plan_loop(e), args, self.launch)
        except IneligibleError as error:
            if name:
                self.report(Part(name, place_of(e), str(error)))
            return None
        self.report(Part(name or "a recurrence", place_of(e)))
        return made


def _is_candidate(e: Any) -> bool:
    return e.primitive is in_blocks_p or e.primitive.name == "scan"


def _name_of(e: Any) -> str:
    """What a part is called in reports; nothing if nobody would expect it to be a kernel."""
    if e.primitive is in_blocks_p:
        return "the sum over samples"
    stages = list(dict.fromkeys(_stages(e)))
    return f"the loop of {', '.join(stages)}" if stages else ""


def _stages(e: Any) -> list[str]:
    found = []
    for jaxpr in below(e):
        for one in jaxpr.eqns:
            mark = equation_mark(one)
            found += [mark.name] if mark and mark.per == "env" else _stages(one)
    return found


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
