"""A plan drawn again in a worker process, from the algorithm itself, to compile its part of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from shoal.errors import RunError
from shoal.planning.cluster import Cluster, Device, Place
from shoal.planning.fragment_program import write_program
from shoal.planning.laws import make_plan
from shoal.planning.policy import DistributionPolicy
from shoal.runtime.cluster.machine import check_port
from shoal.runtime.cluster.worker_config import WorkerConfig
from shoal.runtime.execution.compiled_executor import CompiledExecutor
from shoal.tracing.trace import trace


@dataclass(frozen=True)
class Loop:
    """What a plan is drawn from."""

    algorithm: Any
    env: Any
    envs: int
    distribution: DistributionPolicy
    cluster: Cluster


def rebuilt_crews(orders: WorkerConfig, fragments: list[str]) -> dict[str, CompiledExecutor]:
    """The crews of compiled fragments, on this process's own devices."""
    import cloudpickle

    jax.config.update("jax_num_cpu_devices", 1)
    if orders.group is not None:
        join_group(orders)
    loop: Loop = cloudpickle.loads(orders.loop)
    graph = trace(loop.algorithm, loop.env, envs=loop.envs)
    plan = make_plan(graph, loop.distribution, loop.cluster)
    if str(plan) != orders.print:
        raise RunError(
            "a worker process draws another plan from the loop than the driver did",
            "A loop must trace alike in every process: let it read no clock, file or environment "
            "variable that changes.",
        )
    here = replace(plan, apart=True, places={f: local(p) for f, p in plan.places.items()})
    return {f: CompiledExecutor(here, write_program(here, f)) for f in fragments}


def local(places: tuple[Place, ...]) -> tuple[Place, ...]:
    """Places as a process of its own sees them: it has one CPU device."""
    return tuple(
        Place(p.host, Device("cpu", 0, p.device.memory)) if p.device.kind == "cpu" else p
        for p in places
    )


def join_group(orders: WorkerConfig) -> None:
    """Join the processes that run one program together."""
    group = orders.group
    assert group is not None
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if group.index == 0:
        check_port(group.address)
    jax.distributed.initialize(
        group.address, group.processes, group.index, coordinator_bind_address=group.address
    )


def environment(kinds: Mapping[str, int]) -> dict[str, str]:
    """Environment variables of a compiled worker: devices of these kinds and no others."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    own = [f for f in flags if "host_platform_device_count" not in f]
    found = {"XLA_FLAGS": " ".join(own), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if not kinds.get("gpu"):
        found["JAX_PLATFORMS"] = "cpu"
    for name in ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"):
        if (value := getattr(jax.config, name)) is not None:
            found[name.upper()] = str(value)
    return found
