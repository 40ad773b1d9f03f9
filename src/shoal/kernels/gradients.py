"""Sums over samples, such as a gradient, as one kernel by blocks of samples.

It is the seam that a CPU uses to stay within its cache (`tracing.blocks`): what is summed up or
made sample by sample may be computed some samples at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.extend import core as jex

from shoal.graph.layout import REPLICATED, Layout, Partial
from shoal.kernels.block import Block, needed
from shoal.kernels.launch import launched
from shoal.kernels.loops import MOST_SHARED, ROWS, block_share
from shoal.kernels.memory import Port
from shoal.kernels.setting import Launch
from shoal.kernels.tiles import ROW, IneligibleError, padded
from shoal.tracing.equations import holds
from shoal.tracing.flow import block_layouts
from shoal.tracing.local import Held, Local

BLOCK = 32  # samples
WARPS = 4
SUM_HELD = 64 << 10
MOST_SAMPLES = 4096  # with more, XLA's large products are faster, measured on an H200
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
            Port(v.aval, int(x == ROWS), x == ROWS, is_sum=x == Partial())
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


@dataclass(frozen=True)
class Group:
    """Results that one program computes; those that share no product are left to another.

    So a critic's gradient isn't held on chip beside an actor's.
    """

    summed: tuple[int, ...]
    by_row: tuple[int, ...]


def groups_of(plan: Sums) -> list[Group]:
    """Results in groups that have no matrix product in common; single numbers go with the most."""
    jaxpr = plan.body.jaxpr
    heavy = {i for i, e in enumerate(jaxpr.eqns) if holds(e, _is_product)}
    uses = [needed(jaxpr, [v]) & heavy for v in jaxpr.outvars]
    own = [i for i, x in enumerate(plan.outs) if x in (Partial(), ROWS)]
    large = [i for i in own if plan.made[i].aval.size > 1]
    found: list[tuple[set[int], set[int]]] = []
    for i in large:
        joined, products = {i}, set(uses[i])
        for group in [g for g in found if g[1] & products or not products]:
            found.remove(group)
            joined, products = joined | group[0], products | group[1]
        found.append((joined, products))
    found = found or [(set(), set())]
    for i in set(own) - set(large):
        max(found, key=lambda g: len(g[1] & uses[i]))[0].add(i)
    return [
        Group(
            tuple(i for i in sorted(outs) if plan.outs[i] == Partial()),
            tuple(i for i in sorted(outs) if plan.outs[i] == ROWS),
        )
        for outs, _ in found
    ]


def _is_product(e: Any) -> bool:
    return e.primitive.name == "dot_general"


@dataclass(frozen=True)
class _Kernel:
    """The programs of one group: each sums up every n-th block of samples."""

    plan: Sums
    count: int
    programs: int

    @property
    def blocks(self) -> int:
        """How many blocks the samples fill."""
        return -(-self.count // BLOCK)

    def run(
        self, program: Any, group: Group, in_refs: Sequence[Any], out_refs: Sequence[Any]
    ) -> None:
        """Sum up this program's blocks; `out_refs` are those of this group."""
        plan = self.plan
        ins, made, first = plan.ins, plan.made, plan.shared
        wanted = [*group.summed, *group.by_row]
        eqns = needed(plan.body.jaxpr, [plan.body.jaxpr.outvars[i] for i in wanted])

        def load(i: int) -> Any:
            return ins[i].load(in_refs[i], (), ())

        shared = sum(p.on_chip for p in ins[:first])
        kept = [load(i) for i in range(first)] if shared <= SUM_HELD else None

        def turn(k: Any, totals: Any) -> Any:
            start = (program + k * self.programs) * BLOCK
            here, valid = pl.ds(start, BLOCK), None
            if self.count % BLOCK:
                valid = start + lax.iota(jnp.int32, BLOCK) < self.count
            args = kept or [load(i) for i in range(first)]
            args = args + [
                p.load(r, (here,), (ROW,))
                for p, r in zip(ins[first:], in_refs[first:], strict=True)
            ]
            found = Block(BLOCK, valid).jaxpr(plan.body, args, eqns)
            for i, ref in zip(group.by_row, out_refs[bool(group.summed) :], strict=True):
                made[i].store(ref, (here,), made[i].arrays(found[i], BLOCK))
            parts = [made[i].arrays(found[i], 0) for i in group.summed]
            return jax.tree.map(jnp.add, totals, parts)

        zeros = [_zeros(made[i]) for i in group.summed]
        turns = (self.blocks - program + self.programs - 1) // self.programs
        totals = lax.fori_loop(0, turns, turn, zeros)
        if group.summed:
            Row(tuple(made[i] for i in group.summed)).store(out_refs[0], program, totals)

    def specs(self, group: Group) -> list[jax.ShapeDtypeStruct]:
        """What the programs of a group write: a row of sums each, and rows of samples."""
        made, size = self.plan.made, self.blocks * BLOCK
        length = Row(tuple(made[i] for i in group.summed)).length
        sums = [jax.ShapeDtypeStruct((self.programs, length), np.float32)] if group.summed else []
        return [*sums, *(made[i].spec([size]) for i in group.by_row)]

    def restored(self, group: Group, written: Sequence[Any]) -> dict[int, Any]:
        """The results of a group, by their numbers, from what its programs wrote."""
        made, found = self.plan.made, {}
        if group.summed:
            row = Row(tuple(made[i] for i in group.summed))
            found |= zip(group.summed, row.restored(jnp.sum(written[0], axis=0)), strict=True)
        for i, x in zip(group.by_row, written[bool(group.summed) :], strict=True):
            found[i] = made[i].restored(x, [self.count])
        return found


def run_sums(plan: Sums, args: Sequence[Any], launch: Launch) -> list[Any]:
    """What `in_blocks` gives, computed by a kernel."""
    ins, made, first = plan.ins, plan.made, plan.shared
    count = args[first].shape[0]
    if count > MOST_SAMPLES:
        raise IneligibleError(f"XLA is faster at {count:,} samples")
    if max(sum(p.on_chip for p in ports) for ports in (ins[:first], made)) > MOST_SHARED:
        raise IneligibleError("what all samples share, or its sums, don't fit on chip")
    size = -(-count // BLOCK) * BLOCK
    given = [p.prepared(x, [size] if p.by_rows else []) for p, x in zip(ins, args, strict=True)]
    work, groups = _Kernel(plan, count, min(PROGRAMS, size // BLOCK)), groups_of(plan)
    outs = [work.specs(group) for group in groups]
    ends = list(itertools.accumulate(map(len, outs), initial=0))

    def kernel(*refs: Any) -> None:
        in_refs, out_refs = refs[: len(given)], refs[len(given) :]
        program, which = pl.program_id(0), pl.program_id(1)
        for number, (group, start, end) in enumerate(zip(groups, ends, ends[1:], strict=False)):
            run = partial(work.run, program, group, in_refs, out_refs[start:end])
            pl.when(which == number)(run)

    launch = replace(launch, warps=WARPS, name="shoal_sums")
    grid = work.programs, len(groups)
    results = launched(launch, kernel, grid, given, list(itertools.chain(*outs)))
    found: dict[int, Any] = {}
    for group, start, end in zip(groups, ends, ends[1:], strict=False):
        found |= work.restored(group, results[start:end])
    if len(found) < len(made):
        block = [x if i < first else x[:1].repeat(BLOCK, 0) for i, x in enumerate(args)]
        same = jex.jaxpr_as_fun(plan.body)(*block)
        found |= {i: x for i, x in enumerate(same) if i not in found}
    return [found[i] for i in range(len(made))]


def _zeros(port: Port) -> list[Any]:
    frame = port.frame
    shape = tuple(padded(frame.shape[i]) for i in frame.wide)
    return [jnp.zeros(shape, frame.dtype) for _ in range(frame.tiles.size)]
