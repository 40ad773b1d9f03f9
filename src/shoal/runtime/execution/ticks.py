"""Compiles many ticks of a plan of one program as one function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.random import key_data, wrap_key_data

from shoal.kernels import Part, with_kernels
from shoal.planning.segments import Program, Segment
from shoal.runtime.execution.lowering import PART, Lay, Lowering

MOST_TICKS = 64


def many_ticks(lowering: Lowering, program: Program) -> Callable[..., tuple[Any, ...]]:
    """A function of (number of ticks, carry, constants): the carry after them, and metrics.

    Metrics are stacked to a length of `MOST_TICKS`; only the first entries, one for each tick, are
    valid. PRNG keys are passed as their key data.
    """
    (segment,) = program.operations
    assert isinstance(segment, Segment)
    before, after = [b for b, _ in program.carry], [a for _, a in program.carry]
    shown = [v for _, v in program.metrics]
    keys = [lowering.is_key(name) for name in (*before, *program.constants)]

    def tick(carry: Any, constants: dict[str, Any]) -> tuple[list[Any], list[Any]]:
        env = constants | dict(zip(before, carry, strict=True))
        lowering.run(segment.work, env)
        return [env[a] for a in after], [env[v] for v in shown]

    def ticks(count: Any, *raw: Any) -> tuple[Any, ...]:
        args = [wrap_key_data(x) if k else x for x, k in zip(raw, keys, strict=True)]
        constants = dict(zip(program.constants, args[len(before) :], strict=True))

        def turn(i: Any, loop: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
            carry, kept = loop
            carry, new = tick(carry, constants)
            return carry, [
                jax.lax.dynamic_update_index_in_dim(k, x, i, 0)
                for k, x in zip(kept, new, strict=True)
            ]

        carry = args[: len(before)]
        specs = jax.eval_shape(lambda carry: tick(carry, constants), carry)[1]
        rooms = [jnp.zeros((MOST_TICKS, *s.shape), s.dtype) for s in specs]
        carry, kept = jax.lax.fori_loop(0, count, turn, (carry, rooms))
        return (*(key_data(x) if k else x for x, k in zip(carry, keys, strict=False)), *kept)

    ins = [None, *lowering.lays(before), *lowering.lays(program.constants)]
    outs: list[Lay] = [*lowering.lays(after), *map(_stacked, lowering.lays(shown))]
    return lowering.spread(ticks, ins, outs)


def parts_of(lowering: Lowering, program: Program) -> list[Part]:
    """The parts of many ticks that can run as kernels, and why the others can't."""
    names = [*(before for before, _ in program.carry), *program.constants]
    values = [lowering.in_one(name) for name in names]
    specs = [
        jax.ShapeDtypeStruct((*v.shape, 2), jnp.uint32)
        if lowering.is_key(v.name)
        else jax.ShapeDtypeStruct(v.shape, v.dtype)
        for v in values
    ]
    parts: list[Part] = []
    ticks = with_kernels(many_ticks(lowering, program), lowering.devices, parts.append)
    jax.eval_shape(ticks, jax.ShapeDtypeStruct((), jnp.int32), *specs)
    return list(dict.fromkeys(parts))


def given_away(program: Program) -> tuple[int, ...]:
    """The arguments of `many_ticks` that are donated: the carry."""
    return tuple(range(1, 1 + len(program.carry)))


def _stacked(lay: Lay) -> Lay:
    assert lay != PART, "replicas agree on what they show"
    return lay + 1 if isinstance(lay, int) else lay
