"""The published architectures, each as a few lines of data."""

from __future__ import annotations

from collections.abc import Callable

from shoal.planning.policy import (
    PER_BATCH,
    PER_ENV,
    THE_REST,
    DistributionPolicy,
    Fragment,
    Lockstep,
    Wire,
)


def fused(devices: int = 1) -> DistributionPolicy:
    """Everything in one XLA program, sharded over devices (Anakin, PureJaxRL, MSRL's GPUOnly)."""
    return DistributionPolicy("fused", (Fragment("all", (THE_REST,), devices, "gpu else cpu"),))


def single_learner_coarse(actors: int = 2, lag: int = 0) -> DistributionPolicy:
    """Actors step environments and choose actions; one learner (SingleLearnerCoarse, Acme)."""
    return DistributionPolicy(
        "single_learner_coarse",
        (
            Fragment("actor", (PER_ENV,), actors, "cpu"),
            Fragment("learner", (PER_BATCH,), 1, "gpu else cpu"),
        ),
        (Wire("learner", "actor", Lockstep(lag)),),
    )


def single_learner_fine(envs: int = 2) -> DistributionPolicy:
    """Environments alone on CPUs; inference and learning together (SingleLearnerFine, SEED RL)."""
    return DistributionPolicy(
        "single_learner_fine",
        (
            Fragment("env", ("env",), envs, "cpu"),
            Fragment("learner", (THE_REST,), 1, "gpu else cpu"),
        ),
    )


def multi_learner(learners: int = 2) -> DistributionPolicy:
    """Whole loops side by side that agree on their gradients (MSRL's MultiLearner, DD-PPO)."""
    return DistributionPolicy(
        "multi_learner", (Fragment("learner", (THE_REST,), learners, "gpu else cpu"),)
    )


def central(workers: int = 2) -> DistributionPolicy:
    """Workers compute gradients, a server applies them (MSRL's Central, parameter server, A3C)."""
    return DistributionPolicy(
        "central",
        (
            Fragment("worker", (PER_ENV, "*/grad", THE_REST), workers, "cpu"),
            Fragment("server", ("*/apply",), 1, "gpu else cpu"),
        ),
    )


def decoupled(
    envs: int = 2, inference: int = 1, learners: int = 1, lag: int = 0
) -> DistributionPolicy:
    """Environments, inference and learning each in a pool of their own (SRL's policy workers)."""
    return DistributionPolicy(
        "decoupled",
        (
            Fragment("env", ("env",), envs, "cpu"),
            Fragment("inference", (PER_ENV,), inference, "gpu else cpu"),
            Fragment("learner", (PER_BATCH,), learners, "gpu else cpu"),
        ),
        (Wire("learner", "inference", Lockstep(lag)), Wire("learner", "env", Lockstep(lag))),
    )


def sebulba(actor_devices: int = 1, learner_devices: int = 1, lag: int = 1) -> DistributionPolicy:
    """One host's devices divided into actors and learners, pipelined (Podracer, Cleanba)."""
    return DistributionPolicy(
        "sebulba",
        (
            Fragment("actor", (PER_ENV,), actor_devices, "gpu else cpu"),
            Fragment("learner", (PER_BATCH,), learner_devices, "gpu else cpu"),
        ),
        (Wire("learner", "actor", Lockstep(lag)),),
    )


POLICIES: dict[str, Callable[..., DistributionPolicy]] = {
    make.__name__: make
    for make in (
        fused,
        single_learner_coarse,
        single_learner_fine,
        multi_learner,
        central,
        decoupled,
        sebulba,
    )
}
