"""The published architectures, each as a few lines of data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shoal.errors import SettingError
from shoal.planning.policy import (
    PER_BATCH,
    PER_ENV,
    ROLE_ENV,
    THE_REST,
    DistributionPolicy,
    Flow,
    Fragment,
    Latest,
    Lockstep,
    Queue,
    Serve,
    Wire,
)

Replicas = int | tuple[int, int]  # a count, or from how many to how many
REPLAY = "replay*"  # stages of replay, if there are any, are placed with the learner


def fused(devices: int = 1) -> DistributionPolicy:
    """Everything in one XLA program, sharded over devices (Anakin, PureJaxRL, MSRL's GPUOnly)."""
    whole = Fragment("all", (THE_REST,), devices, "gpu else cpu")
    return DistributionPolicy("fused", (whole,), devices=devices)


def single_learner_coarse(actors: Replicas = 2, lag: int = 0) -> DistributionPolicy:
    """Actors step environments and choose actions; one learner (SingleLearnerCoarse, Acme)."""
    return DistributionPolicy(
        "single_learner_coarse",
        (
            Fragment("actor", (PER_ENV,), actors, "cpu"),
            Fragment("learner", (PER_BATCH, REPLAY), 1, "gpu else cpu"),
        ),
        (Wire("learner", "actor", Lockstep(lag)),),
    )


def single_learner_fine(envs: int = 2, ring: int | None = None) -> DistributionPolicy:
    """Environments alone on CPUs; inference and learning together (SingleLearnerFine, SEED RL).

    With a ring, inference serves groups of environments as they come, beside the learner; each
    replica keeps `ring` groups in flight.
    """
    if ring is not None:
        return _served("single_learner_fine", _pools(envs, 1, 1, ring, "learner"), Lockstep())
    return DistributionPolicy(
        "single_learner_fine",
        (
            Fragment("env", (ROLE_ENV,), envs, "cpu"),
            Fragment("learner", (THE_REST,), 1, "gpu else cpu"),
        ),
    )


def environments(workers: int = 2) -> DistributionPolicy:
    """Environments on separate CPU workers, all else in one fragment (MSRL's Environments)."""
    return DistributionPolicy(
        "environments",
        (
            Fragment("env", (ROLE_ENV,), workers, "cpu"),
            Fragment("agent", (THE_REST,), 1, "gpu else cpu"),
        ),
    )


def impala(
    actors: Replicas = 2,
    take: int | None = None,
    max_lag: int | None = None,
    inference: int = 0,
    ring: int = 1,
) -> DistributionPolicy:
    """Asynchronous actors; a learner that takes the first rollouts to arrive (IMPALA).

    It takes `take` rollouts a tick (default: half the number of actors), made with parameters at
    most `max_lag` ticks old (default: the least that lets each actor make two rollouts ahead).
    With `actors=(2, 16)` the number of actors may change during a run. With `inference` replicas
    actors only step environments, and are served their actions (SRL, SEED RL): each keeps `ring`
    groups in flight.
    """
    check_counts(actors=actors, take=take, ring=ring)
    if ring > 1 and not inference:
        raise SettingError(
            f"a ring of {ring} groups, and no inference that serves one while another is stepped",
            "Say inference=1 or more, or leave the ring out.",
        )
    least, most = (actors, actors) if isinstance(actors, int) else actors
    take = max(1, least * ring // 2) if take is None else take
    max_lag = 2 * -(-most * ring // take) - 1 if max_lag is None else max_lag
    if inference:
        served = _served("impala", _pools(actors, inference, 1, ring), Latest(max_lag))
        queues = tuple(Wire(f, "learner", Queue(2, take)) for f in ("env", "inference"))
        return replace(served, wires=(*served.wires, *queues))
    return DistributionPolicy(
        "impala",
        (
            Fragment("actor", (PER_ENV,), actors, "cpu"),
            Fragment("learner", (PER_BATCH, REPLAY), 1, "gpu else cpu"),
        ),
        (
            Wire("learner", "actor", Latest(max_lag)),
            Wire("actor", "learner", Queue(2, take)),
        ),
    )


def multi_learner(learners: int = 2) -> DistributionPolicy:
    """Whole loops side by side that agree on their gradients (MSRL's MultiLearner, DD-PPO)."""
    return DistributionPolicy(
        "multi_learner", (Fragment("learner", (THE_REST,), learners, "gpu else cpu"),)
    )


def central(workers: Replicas = 2, max_lag: int | None = None) -> DistributionPolicy:
    """Workers compute gradients, a server applies them (MSRL's Central, parameter server, A3C).

    With a `max_lag` no worker waits for another: the server applies gradients in the order of
    arrival, made with parameters at most `max_lag` updates old (A3C); with `workers=(2, 16)` their
    number may change during a run.
    """
    newest = (Wire("server", "worker", Latest(max_lag)), Wire("worker", "server", Queue(2, 1)))
    return DistributionPolicy(
        "central",
        (
            Fragment("worker", (PER_ENV, "*/grad", THE_REST), workers, "cpu"),
            Fragment("server", ("*/apply",), 1, "gpu else cpu"),
        ),
        () if max_lag is None else newest,
    )


def decoupled(
    envs: int = 2, inference: int = 1, learners: int = 1, lag: int = 0, ring: int | None = None
) -> DistributionPolicy:
    """Environments, inference and learning each in a pool of their own (SRL's policy workers).

    With a ring, inference serves groups of environments as they come; each environment replica
    keeps `ring` groups in flight. Parameters are then at most `lag` ticks old.
    """
    if ring is not None:
        return _served("decoupled", _pools(envs, inference, learners, ring), Latest(lag))
    return DistributionPolicy(
        "decoupled",
        _pools(envs, inference, learners, 1),
        (Wire("learner", "inference", Lockstep(lag)), Wire("learner", "env", Lockstep(lag))),
    )


def _served(name: str, pools: tuple[Fragment, ...], late: Flow) -> DistributionPolicy:
    """Environments in rings, served by inference, which may sit beside another fragment."""
    wires = (
        Wire("env", "inference", Serve()),
        Wire("learner", "inference", late),
        Wire("learner", "env", late),
    )
    return DistributionPolicy(name, pools, wires)


def _pools(
    envs: Replicas, inference: int, learners: int, ring: int, beside: str = ""
) -> tuple[Fragment, ...]:
    """Fragments of environments in rings, of inference, and of learning."""
    return (
        Fragment("env", (ROLE_ENV,), envs, "cpu", ring),
        Fragment("inference", (PER_ENV,), inference, "gpu else cpu", beside=beside),
        Fragment("learner", (PER_BATCH, REPLAY), learners, "gpu else cpu"),
    )


def sebulba(actor_devices: int = 1, learner_devices: int = 1, lag: int = 1) -> DistributionPolicy:
    """One host's devices divided into actors and learners, pipelined (Podracer, Cleanba)."""
    return DistributionPolicy(
        "sebulba",
        (
            Fragment("actor", (PER_ENV,), actor_devices, "gpu else cpu"),
            Fragment("learner", (PER_BATCH, REPLAY), learner_devices, "gpu else cpu"),
        ),
        (Wire("learner", "actor", Lockstep(lag)),),
        max(actor_devices, learner_devices),  # actors and learners may share theirs
    )


def ape_x(actors: int = 2, lag: int = 0, max_lag: int | None = None) -> DistributionPolicy:
    """Actors, a replay between them and the learner, and a learner (Ape-X, R2D2).

    With a lag, actors and replay use what the learner sent `lag` ticks ago: replay samples
    ahead while it learns. With `max_lag`, actors take the newest parameters, at most that old, and
    their rollouts wait in a queue.
    """
    if lag and max_lag is not None:
        raise SettingError(
            f"lag={lag} and max_lag={max_lag} of ape_x", "Say one: a fixed lag, or the largest."
        )
    flows = (Lockstep(lag), Lockstep()) if max_lag is None else (Latest(max_lag), Queue(2))
    return DistributionPolicy(
        "ape_x",
        (
            Fragment("actor", (PER_ENV,), actors, "cpu"),
            Fragment("replay", (REPLAY,), 1, "cpu"),
            Fragment("learner", (PER_BATCH,), 1, "gpu else cpu"),
        ),
        (
            Wire("learner", "actor", flows[0]),
            Wire("actor", "replay", flows[1]),
            Wire("learner", "replay", Lockstep(lag)),
        ),
    )


def check_counts(**counts: Replicas | None) -> None:
    """Refuse counts below one; None stands for the default."""
    for name, count in counts.items():
        least = count if isinstance(count, int) else min(count or (1,))
        if least < 1:
            raise SettingError(f"{name}={count}", f"Set {name} to 1 or more.")


def with_observer(distribution: DistributionPolicy, name: str, *stages: str) -> DistributionPolicy:
    """Return `distribution` with some stages in an observer, for which no fragment waits."""
    wires = tuple(Wire(f.name, name, Latest(None)) for f in distribution.fragments)
    return replace(
        distribution,
        fragments=(*distribution.fragments, Fragment(name, stages)),
        wires=(*distribution.wires, *wires),
    )


POLICIES: dict[str, Callable[..., DistributionPolicy]] = {
    make.__name__: make
    for make in (
        fused,
        single_learner_coarse,
        single_learner_fine,
        environments,
        impala,
        multi_learner,
        central,
        decoupled,
        sebulba,
        ape_x,
    )
}
