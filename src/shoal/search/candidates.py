"""The plans that a choice is made from: named distribution policies with counts that fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shoal.errors import SettingError, ShoalError
from shoal.graph.ir import Graph
from shoal.planning import policies
from shoal.planning.cluster import Cluster
from shoal.planning.laws import make_plan
from shoal.planning.plan import Plan
from shoal.planning.policy import DistributionPolicy, Latest, lag_of, takes_some
from shoal.roles import with_roles
from shoal.simulation.estimate import lag_bound

RINGS = (2,)
LOCAL, REMOTE = ("threads", "processes"), ("ray",)


@dataclass(frozen=True)
class Goal:
    """What a plan is chosen for: most steps a second, with the loop's numbers unchanged.

    `max_lag` lets values be some ticks behind, and `envs` lets the number of environments move
    from the first to the second: both change what is learnt. `ticks` is the length of the run, if
    it is known. `at_least` is how many steps a second there must be.
    """

    max_lag: int = 0
    envs: tuple[int, int] | None = None
    ticks: int | None = None
    at_least: float = 0.0
    backends: tuple[str, ...] = LOCAL

    def __post_init__(self) -> None:
        if self.max_lag < 0:
            raise SettingError(f"max_lag={self.max_lag}", "Allow 0 ticks of lag, or more.")
        if self.envs is not None and not 1 <= self.envs[0] <= self.envs[1]:
            raise SettingError(f"envs={self.envs} is no range", "Say the fewest first: (64, 4096).")


@dataclass(frozen=True)
class Candidate:
    """A plan that keeps the laws, and the backend that would run it."""

    plan: Plan
    backend: str
    title: str  # as it is called in Python: fused(devices=2)

    @property
    def name(self) -> str:
        """The title, with the backend and the number of environments where these say something."""
        several = len(self.plan.distribution.fragments) > 1
        return f"{self.title} on {self.backend}" if several else self.title


def candidates(graph: Graph, cluster: Cluster, goal: Goal) -> list[Candidate]:
    """Every candidate for a graph that fits the cluster and the goal, the simplest first."""
    found: list[Candidate] = []
    for title, distribution in _named(graph, cluster, goal):
        try:
            plan = make_plan(graph, with_roles(graph, distribution), cluster)
        except ShoalError:
            continue  # the laws prune
        if (lag := lag_bound(plan)) is None or lag > goal.max_lag:
            continue
        if changes(plan) and not goal.max_lag:
            continue
        found += [Candidate(plan, backend, title) for backend in _backends(plan, goal)]
    return found


def changes(plan: Plan) -> list[str]:
    """Why a plan's numbers differ from the loop's; empty if they are the same."""
    found = [f"`{c.reader}` reads what `{c.writer}` made {c.flow.lag} ticks ago"
             for c in plan.channels if lag_of(c.flow) for _ in (0,)]  # type: ignore[union-attr]  # fmt: skip
    late = [c for c in plan.channels if isinstance(c.flow, Latest) and c.flow.max_lag != 0]
    found += [f"`{c.reader}` reads the newest values of `{c.writer}`" for c in late
              if c.reader not in plan.observers]  # fmt: skip
    some = [c for c in plan.channels if takes_some(c.flow)]
    found += [f"`{c.reader}` takes the first of `{c.writer}` to arrive" for c in some]
    found += [f"replicas agree only approximately at {line}" for line in plan.approximate]
    return list(dict.fromkeys(found))


def _backends(plan: Plan, goal: Goal) -> Iterable[str]:
    if len(plan.cluster.hosts) > 1:
        return REMOTE
    if len(plan.distribution.fragments) == 1:
        return goal.backends[:1]
    return goal.backends


def counts(graph: Graph, most: int) -> list[int]:
    """Numbers of replicas worth a look: powers of 2, and nearly all, that divide the environments."""
    tried = {1 << i for i in range(most.bit_length())} | {most, most - 1, most - 2, most * 3 // 4}
    return sorted(n for n in tried if 1 <= n <= most and graph.envs % n == 0)


def _named(graph: Graph, cluster: Cluster, goal: Goal) -> Iterator[tuple[str, DistributionPolicy]]:
    cores = sum(host.cpus for host in cluster.hosts)
    kind = "gpu" if cluster.places("gpu") else "cpu"
    several, devices = len(cluster.hosts) > 1, len(cluster.places(kind))
    replicas, lags = counts(graph, cores), range(goal.max_lag + 1)
    for n in counts(graph, devices):
        if not several:
            yield f"fused(devices={n})", policies.fused(n)
        elif n > 1:
            yield f"multi_learner(learners={n})", policies.multi_learner(n)
    for lag in lags:
        late = f", lag={lag}" if lag else ""
        for n in replicas:
            coarse = policies.single_learner_coarse(n, lag)
            yield f"single_learner_coarse(actors={n}{late})", coarse
            yield f"ape_x(actors={n}{late})", policies.ape_x(n, lag)
            yield f"decoupled(envs={n}{late})", policies.decoupled(n, lag=lag)
            for ring in RINGS:
                title = f"decoupled(envs={n}{late}, ring={ring})"
                yield title, policies.decoupled(n, lag=lag, ring=ring)
        for n in counts(graph, devices):
            title = f"sebulba(actor_devices={n}, learner_devices={n}, lag={lag})"
            yield title, policies.sebulba(n, n, lag)
    for n in replicas:
        yield f"single_learner_fine(envs={n})", policies.single_learner_fine(n)
        for ring in RINGS:
            title = f"single_learner_fine(envs={n}, ring={ring})"
            yield title, policies.single_learner_fine(n, ring)
        yield f"central(workers={n})", policies.central(n)
        if goal.max_lag and n > 1:
            title = f"impala(actors={n}, max_lag={goal.max_lag})"
            yield title, policies.impala(n, max_lag=goal.max_lag)
