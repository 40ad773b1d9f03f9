"""Measures what the stages of a plan of one program take, by running some more ticks of it."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.profiler import ProfileData

from shoal.planning.fragment_program import write_program
from shoal.planning.plan import Plan
from shoal.profiling.device import BETWEEN, busy_nanoseconds, stages_of_operations
from shoal.profiling.sites import COMPUTE, stage_categories
from shoal.profiling.span_file import DeviceAbout
from shoal.runtime.execution.compiled_executor import key_data
from shoal.runtime.execution.executors import compiled_ticks, segments_of
from shoal.runtime.execution.lowering import MOST_TICKS
from shoal.runtime.execution.snapshot import Snapshot


def measure_stages(plan: Plan, snapshot: Snapshot, ticks: int) -> DeviceAbout:
    """How long devices are busy with each stage in ticks after `snapshot`, whose results are lost.

    They run once with JAX's profiler and once without, since it makes short operations longer:
    shares are taken from the first, and seconds from the second.
    """
    count = min(ticks, MOST_TICKS)
    program = write_program(plan, plan.distribution.fragments[0].name)
    segments = segments_of(plan, program.fragment)
    names = [*(before for before, _ in program.carry), *program.constants]

    def arguments() -> list[Any]:
        """Copies, since the program uses up what it is given."""
        values = [jnp.copy(key_data(snapshot.values[name])) for name in names]
        placed = [
            jax.device_put(x, segments.sharding(n, 0)) for x, n in zip(values, names, strict=True)
        ]
        return jax.block_until_ready([np.int32(count), *placed])

    ticks_of: Any = compiled_ticks(segments, program)
    many = ticks_of.lower(*arguments()).compile()
    jax.block_until_ready(many(*arguments()))
    given = arguments()
    began = time.perf_counter()
    jax.block_until_ready(many(*given))
    seconds = time.perf_counter() - began
    stages = {stage.stage for stage in plan.graph.stages}
    with tempfile.TemporaryDirectory() as folder:
        given = arguments()
        with jax.profiler.trace(folder):
            jax.block_until_ready(many(*given))
        (path,) = Path(folder).rglob("*.xplane.pb")
        busy = busy_nanoseconds(
            ProfileData.from_file(str(path)), stages_of_operations(many.as_text(), stages)
        )
    return _shares(plan, busy, seconds, count)


def _shares(plan: Plan, busy: dict[str, float], seconds: float, ticks: int) -> DeviceAbout:
    total = sum(busy.values())
    categories = stage_categories(plan.graph)
    device = plan.places[plan.distribution.fragments[0].name][0].device
    return {
        "kind": device.kind, "ticks": ticks, "tick_seconds": seconds / ticks,
        "attributed": 1 - busy.get(BETWEEN, 0.0) / total if total else 0.0,
        "stages": {
            stage: {
                "category": categories.get(stage, COMPUTE), "share": busy[stage] / total,
                "tick_seconds": seconds / ticks * busy[stage] / total,
            }
            for stage in sorted(busy, key=lambda stage: -busy[stage])
        },
    }  # fmt: skip
