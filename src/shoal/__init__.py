"""Shoal: a training loop written once in plain JAX, cut and placed by a distribution policy."""

from shoal.errors import ShoalError
from shoal.planning.cluster import Cluster, Device, Host
from shoal.planning.policies import (
    central,
    decoupled,
    fused,
    multi_learner,
    sebulba,
    single_learner_coarse,
    single_learner_fine,
)
from shoal.planning.policy import (
    PER_BATCH,
    PER_ENV,
    THE_REST,
    DistributionPolicy,
    Fragment,
    Lockstep,
    Wire,
)
from shoal.runtime.run import run
from shoal.tracing.interpret import interpret
from shoal.tracing.stage import gather, host, mean, stage
from shoal.tracing.trace import trace
from shoal.training import plan, train, verify

__version__ = "0.1.0"

__all__ = [
    "PER_BATCH",
    "PER_ENV",
    "THE_REST",
    "Cluster",
    "Device",
    "DistributionPolicy",
    "Fragment",
    "Host",
    "Lockstep",
    "ShoalError",
    "Wire",
    "central",
    "decoupled",
    "fused",
    "gather",
    "host",
    "interpret",
    "mean",
    "multi_learner",
    "plan",
    "run",
    "sebulba",
    "single_learner_coarse",
    "single_learner_fine",
    "stage",
    "trace",
    "train",
    "verify",
]
