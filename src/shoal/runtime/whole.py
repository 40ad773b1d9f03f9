"""A plan of one program: many ticks in one XLA call, metrics leaving without stopping it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from shoal.runtime.lower import PART, Lay, Lowering
from shoal.runtime.program import Program, Segment

Many = Callable[..., tuple[list[Any], list[Any]]]


def compile_many(lowering: Lowering, program: Program, most: int) -> Many:
    """A jitted function of (number of ticks, carry, constants): the carry after them, and metrics.

    Metrics come stacked, `most` long; only the first ones, as many as there were ticks, count. The
    carry is given away.
    """
    (segment,) = program.operations
    assert isinstance(segment, Segment)
    before, after = [b for b, _ in program.carry], [a for _, a in program.carry]
    shown = [v for _, v in program.metrics]

    def ticks(count: Any, *args: Any) -> tuple[Any, ...]:
        constants = dict(zip(program.constants, args[len(before) :], strict=True))

        def tick(carry: Any) -> tuple[list[Any], list[Any]]:
            env = constants | dict(zip(before, carry, strict=True))
            lowering.run(segment.work, env)
            return [env[a] for a in after], [env[v] for v in shown]

        def turn(i: Any, loop: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
            carry, kept = loop
            carry, new = tick(carry)
            return carry, [jax.lax.dynamic_update_index_in_dim(k, x, i, 0) for k, x in zip(kept, new, strict=True)]

        specs = jax.eval_shape(tick, list(args[: len(before)]))[1]
        rooms = [jnp.zeros((most, *s.shape), s.dtype) for s in specs]
        carry, kept = jax.lax.fori_loop(0, count, turn, (list(args[: len(before)]), rooms))
        return (*carry, *kept)

    ins = [None, *(lowering.lay(b) for b in before), *(lowering.lay(c) for c in program.constants)]
    outs = [*(lowering.lay(a) for a in after), *(_stacked(lowering.lay(v)) for v in shown)]
    spread = jax.jit(lowering.spread(ticks, ins, outs), donate_argnums=tuple(range(1, 1 + len(before))))

    def many(count: int, carry: list[Any], constants: list[Any]) -> tuple[list[Any], list[Any]]:
        results = list(spread(jnp.int32(count), *carry, *constants))
        return results[: len(before)], results[len(before) :]

    return many


def _stacked(lay: Lay) -> Lay:
    assert lay != PART, "replicas agree on what they show"
    return lay + 1 if isinstance(lay, int) else lay
