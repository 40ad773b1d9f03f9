"""Sums over samples, such as a gradient, as one kernel by blocks of samples.

It is the seam that a CPU uses to stay within its cache (`tracing.blocks`): what is summed up or
made sample by sample may be computed some samples at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.extend import core as jex

from shoal.graph.layout import REPLICATED, Layout, Partial, Sharded
from shoal.kernels.launch import Launch, launched
from shoal.kernels.loops import HELD, MOST_SHARED, ROWS, block_share
from shoal.kernels.memory import Port
from shoal.kernels.rules import Block
from shoal.kernels.tiles import ROW, IneligibleError, padded
from shoal.tracing.flow import block_layouts
from shoal.tracing.local import Held, Local

BLOCK = 32  # samples
WARPS = 4
PROGRAMS = 128  # about as many as a large GPU has processors


@dataclass(frozen=True)
class Sums:
    """How a function of many samples lies over blocks."""

    equation: Any
    outs: tuple[Layout, ...]
    body: Any

    @property
    def shared(self) -> int:
        """How many operands all samples share; they come first."""
        return self.equation.params["shared"]

    @property
    def ins(self) -> list[Port]:
        """What the kernel reads."""
        return [
            Port(v.aval, int(i >= self.shared), i >= self.shared)
            for i, v in enumerate(self.equation.invars)
        ]

    @property
    def made(self) -> list[Port]:
        """What it makes, all results in order; those that are the same for all are not its own."""
        return [
            Port(v.aval, int(x == ROWS), x == ROWS)
            for v, x in zip(self.equation.outvars, self.outs, strict=True)
        ]


@dataclass(frozen=True)
class Row:
    """Many sums in one row of memory, so that one addition makes totals of those of all programs.

    Tiles lie there one after the other, each as long as it is on chip.
    """

    ports: tuple[Port, ...]

    def __post_init__(self) -> None:
        if any(np.dtype(p.aval.dtype) != np.float32 for p in self.ports):
            raise IneligibleError("a sum over samples isn't of float32 numbers")

    @property
    def length(self) -> int:
        """How many numbers there are."""
        return sum(p.on_chip // 4 for p in self.ports)

    def store(self, ref: Any, program: Any, totals: Sequence[Sequence[Any]]) -> None:
        """Write the sums of one program."""
        start = 0
        for x in itertools.chain.from_iterable(totals):
            ref[program, pl.ds(start, x.size)] = x.reshape(x.size)
            start += x.size

    def restored(self, row: Any) -> list[Any]:
        """The sums as arrays of their own."""
        found, start = [], 0
        for port in self.ports:
            frame, size = port.frame, port.on_chip // 4
            sides = [padded(frame.shape[i]) for i in frame.wide]
            x = row[start : start + size].reshape(*frame.tiles.shape, *sides)
            x = jnp.squeeze(x, frame.wide)
            x = jnp.moveaxis(x, range(x.ndim - len(sides), x.ndim), frame.wide)
            found.append(port.restored(x, []))
            start += size
        return found


def plan_sums(equation: Any) -> Sums:
    """How `in_blocks` becomes a kernel; raises where it can't."""
    params = equation.params
    shared, samples = params["shared"], params["samples"]
    outs = block_layouts(params["jaxpr"], shared, samples)
    if outs is None:
        raise IneligibleError("its results are neither sums over samples nor made one by one")
    share = block_share(samples, BLOCK)

    def some(*args: Any) -> list[Any]:
        held = [Held(x, ROWS if i >= shared else REPLICATED) for i, x in enumerate(args)]
        return [jnp.asarray(x.array) for x in Local(share).jaxpr(params["jaxpr"], held)]

    specs = [
        jax.ShapeDtypeStruct(
            (BLOCK, *v.aval.shape[1:]) if i >= shared else v.aval.shape, v.aval.dtype
        )
        for i, v in enumerate(equation.invars)
    ]
    return Sums(equation, outs, jax.make_jaxpr(some)(*specs))


def run_sums(plan: Sums, args: Sequence[Any], launch: Launch) -> list[Any]:
    """What `in_blocks` gives, computed by a kernel."""
    ins, made, first = plan.ins, plan.made, plan.shared
    count = args[first].shape[0]
    blocks = -(-count // BLOCK)
    programs = min(PROGRAMS, blocks)
    shared = sum(p.on_chip for p in ins[:first])
    if shared > MOST_SHARED:
        raise IneligibleError(f"{shared >> 10} kB that all samples share don't fit on chip")
    summed = [i for i, x in enumerate(plan.outs) if x == Partial()]
    by_row = [i for i, x in enumerate(plan.outs) if x == Sharded(0)]
    if sum(made[i].on_chip for i in summed) > MOST_SHARED:
        raise IneligibleError("its sums don't fit on chip")
    given = [
        p.prepared(x, [blocks * BLOCK] if p.by_rows else [])
        for p, x in zip(ins, args, strict=True)
    ]
    sums = Row(tuple(made[i] for i in summed))
    outs = [jax.ShapeDtypeStruct((programs, sums.length), np.float32)] if summed else []
    outs += [made[i].spec([blocks * BLOCK]) for i in by_row]

    def kernel(*refs: Any) -> None:
        in_refs, out_refs = refs[: len(given)], refs[len(given) :]
        program = pl.program_id(0)

        def load(i: int) -> Any:
            return ins[i].load(in_refs[i], (), ())

        kept = [load(i) for i in range(first)] if shared <= HELD else None

        def turn(k: Any, totals: Any) -> Any:
            start = (program + k * programs) * BLOCK
            here = pl.ds(start, BLOCK)
            valid = None
            if count % BLOCK:
                valid = start + lax.iota(jnp.int32, BLOCK) < count
            now = kept or [load(i) for i in range(first)]
            rows = [p.load(r, (here,), (ROW,)) for p, r in zip(ins[first:], in_refs[first:], strict=True)]
            found = Block(BLOCK, valid).jaxpr(plan.body, [*now, *rows])
            for i, ref in zip(by_row, out_refs[bool(summed) :], strict=True):
                made[i].store(ref, (here,), made[i].arrays(found[i], BLOCK))
            parts = [made[i].arrays(found[i], 0) for i in summed]
            return jax.tree.map(jnp.add, totals, parts)

        zeros = [_zeros(made[i]) for i in summed]
        turns = (blocks - program + programs - 1) // programs
        totals = lax.fori_loop(0, turns, turn, zeros)
        if summed:
            sums.store(out_refs[0], program, totals)

    results = launched(replace(launch, warps=WARPS, name="shoal_sums"), kernel, programs, given, outs)
    found: dict[int, Any] = {}
    if summed:
        found |= zip(summed, sums.restored(jnp.sum(results[0], axis=0)), strict=True)
    for i, x in zip(by_row, results[bool(summed) :], strict=True):
        found[i] = made[i].restored(x, [count])
    if len(found) < len(made):
        block = [x if i < first else x[:1].repeat(BLOCK, 0) for i, x in enumerate(args)]
        same = jex.jaxpr_as_fun(plan.body)(*block)
        found |= {i: x for i, x in enumerate(same) if i not in found}
    return [found[i] for i in range(len(made))]


def _zeros(port: Port) -> list[Any]:
    frame, sizes = port.frame, port.sizes([])
    shape = tuple(sizes[i] for i in frame.wide)
    return [jnp.zeros(shape, frame.dtype) for _ in range(frame.tiles.size)]
