"""Shoal: a training loop written once in plain JAX, cut and placed by a distribution policy.

Names are loaded when first used, so that a part without JAX doesn't pay for it.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # importing typing takes longer than all else here
if TYPE_CHECKING:
    from typing import Any

    from shoal import algorithms, envs
    from shoal.errors import ShoalError
    from shoal.planning.cluster import Cluster, Device, Host
    from shoal.planning.policies import (
        ape_x,
        central,
        decoupled,
        environments,
        fused,
        impala,
        multi_learner,
        sebulba,
        single_learner_coarse,
        single_learner_fine,
        with_observer,
    )
    from shoal.planning.policy import (
        PER_BATCH,
        PER_ENV,
        ROLE_ENV,
        THE_REST,
        DistributionPolicy,
        Fragment,
        Latest,
        Lockstep,
        Queue,
        Serve,
        Wire,
    )
    from shoal.runs.callbacks import STOP
    from shoal.runs.files.saved_plans import load_plan, save_plan
    from shoal.runs.playing import load
    from shoal.runs.resuming import resume
    from shoal.runs.training import plan, train, verify
    from shoal.runtime.run import run
    from shoal.search.candidates import Goal
    from shoal.search.choose import choose
    from shoal.simulation.profile import Profile
    from shoal.tracing.agree import (
        gather,
        max,
        mean,
        min,
        moments,
        scatter,
        sum,
        weighted_mean,
    )
    from shoal.tracing.interpret import interpret
    from shoal.tracing.stage import host, stage
    from shoal.tracing.trace import trace

__version__ = "0.1.0"

_HOMES = {
    "Cluster": "shoal.planning.cluster",
    "Device": "shoal.planning.cluster",
    "DistributionPolicy": "shoal.planning.policy",
    "Fragment": "shoal.planning.policy",
    "Goal": "shoal.search.candidates",
    "Host": "shoal.planning.cluster",
    "Latest": "shoal.planning.policy",
    "Lockstep": "shoal.planning.policy",
    "PER_BATCH": "shoal.planning.policy",
    "Profile": "shoal.simulation.profile",
    "PER_ENV": "shoal.planning.policy",
    "ROLE_ENV": "shoal.planning.policy",
    "STOP": "shoal.runs.callbacks",
    "Queue": "shoal.planning.policy",
    "Serve": "shoal.planning.policy",
    "ShoalError": "shoal.errors",
    "THE_REST": "shoal.planning.policy",
    "Wire": "shoal.planning.policy",
    "ape_x": "shoal.planning.policies",
    "central": "shoal.planning.policies",
    "decoupled": "shoal.planning.policies",
    "environments": "shoal.planning.policies",
    "choose": "shoal.search.choose",
    "fused": "shoal.planning.policies",
    "gather": "shoal.tracing.agree",
    "host": "shoal.tracing.stage",
    "impala": "shoal.planning.policies",
    "interpret": "shoal.tracing.interpret",
    "load": "shoal.runs.playing",
    "load_plan": "shoal.runs.files.saved_plans",
    "save_plan": "shoal.runs.files.saved_plans",
    "with_observer": "shoal.planning.policies",
    "max": "shoal.tracing.agree",
    "mean": "shoal.tracing.agree",
    "min": "shoal.tracing.agree",
    "moments": "shoal.tracing.agree",
    "multi_learner": "shoal.planning.policies",
    "plan": "shoal.runs.training",
    "resume": "shoal.runs.resuming",
    "run": "shoal.runtime.run",
    "sebulba": "shoal.planning.policies",
    "single_learner_coarse": "shoal.planning.policies",
    "single_learner_fine": "shoal.planning.policies",
    "scatter": "shoal.tracing.agree",
    "stage": "shoal.tracing.stage",
    "sum": "shoal.tracing.agree",
    "weighted_mean": "shoal.tracing.agree",
    "trace": "shoal.tracing.trace",
    "train": "shoal.runs.training",
    "verify": "shoal.runs.training",
}

__all__ = [
    "PER_BATCH",
    "PER_ENV",
    "ROLE_ENV",
    "STOP",
    "THE_REST",
    "Cluster",
    "Device",
    "DistributionPolicy",
    "Fragment",
    "Goal",
    "Host",
    "Latest",
    "Lockstep",
    "Profile",
    "Queue",
    "Serve",
    "ShoalError",
    "Wire",
    "algorithms",
    "ape_x",
    "central",
    "choose",
    "decoupled",
    "environments",
    "envs",
    "fused",
    "gather",
    "host",
    "impala",
    "interpret",
    "load",
    "load_plan",
    "max",
    "mean",
    "min",
    "moments",
    "multi_learner",
    "plan",
    "resume",
    "run",
    "save_plan",
    "scatter",
    "sebulba",
    "single_learner_coarse",
    "single_learner_fine",
    "stage",
    "sum",
    "trace",
    "train",
    "verify",
    "weighted_mean",
    "with_observer",
]


def __getattr__(name: str) -> Any:
    if name in ("algorithms", "envs"):
        return import_module(f"shoal.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'shoal' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
