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
    for title, distribution in named(graph, cluster, goal):
        try:
            plan = make_plan(graph, with_roles(graph, distribution), cluster)
        except ShoalError:
            continue  # the laws prune
        if (lag := lag_bound(plan)) is None or lag > goal.max_lag:
            continue
        if (changes(plan) and not goal.max_lag) or _may_starve(plan):
            continue
        found += [Candidate(plan, backend, title) for backend in _backends(plan, goal)]
    return found


def changes(plan: Plan) -> list[str]:
    """Why a plan's numbers differ from the loop's; empty if they are the same."""
    found = [
        f"`{c.reader}` reads what `{c.writer}` made {lag} {'tick' if lag == 1 else 'ticks'} ago"
        for c in plan.channels if (lag := lag_of(c.flow))
    ]  # fmt: skip
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
    # Replicas that agree tick by tick do so far slower in processes than inside one.
    return [b for b in goal.backends if not (_agrees(plan) and b == "processes")]


def _agrees(plan: Plan) -> bool:
    return any(plan.one_program(f.name) for f in plan.distribution.fragments)


def _may_starve(plan: Plan) -> bool:
    """Whether a program over several CPU devices runs beside other fragments.

    XLA runs all of them with one pool of threads: a collective that finds too few free waits, and
    ends the process after 40 seconds.
    """
    on_cpu = any(p.device.kind == "cpu" for places in plan.places.values() for p in places)
    return on_cpu and len(plan.distribution.fragments) > 1 and _agrees(plan)


def counts(graph: Graph, most: int) -> list[int]:
    """Numbers of replicas worth a look that divide the environments: powers of 2, nearly all."""
    tried = {1 << i for i in range(most.bit_length())} | {most, most - 1, most - 2, most * 3 // 4}
    return sorted(n for n in tried if 1 <= n <= most and graph.envs % n == 0)


def named(graph: Graph, cluster: Cluster, goal: Goal) -> Iterator[tuple[str, DistributionPolicy]]:
    """The named distribution policies with counts that may fit, as they are called in Python."""
    kind = "gpu" if cluster.places("gpu") else "cpu"
    devices = counts(graph, len(cluster.places(kind)))
    replicas = counts(graph, sum(host.cpus for host in cluster.hosts))
    whole = policies.fused if len(cluster.hosts) == 1 else policies.multi_learner
    said = "devices" if whole is policies.fused else "learners"
    yield from ((f"{whole.__name__}({said}={n})", whole(n)) for n in devices)
    for lag in range(goal.max_lag + 1):
        yield from _apart(replicas, lag)
        for n in devices[1:]:
            title = f"sebulba(actor_devices={n}, learner_devices={n}, lag={lag})"
            yield title, policies.sebulba(n, n, lag)
    for n in replicas:
        yield f"central(workers={n})", policies.central(n)
        yield f"single_learner_fine(envs={n})", policies.single_learner_fine(n)
        for ring in RINGS:
            title = f"single_learner_fine(envs={n}, ring={ring})"
            yield title, policies.single_learner_fine(n, ring)
        if goal.max_lag and n > 1:
            title = f"impala(actors={n}, max_lag={goal.max_lag})"
            yield title, policies.impala(n, max_lag=goal.max_lag)


def _apart(replicas: Iterable[int], lag: int) -> Iterator[tuple[str, DistributionPolicy]]:
    """Policies with a learner apart, whose parameters may be late."""
    late = f", lag={lag}" if lag else ""
    for n in replicas:
        coarse = policies.single_learner_coarse(n, lag)
        yield f"single_learner_coarse(actors={n}{late})", coarse
        yield f"ape_x(actors={n}{late})", policies.ape_x(n, lag)
        yield f"decoupled(envs={n}{late})", policies.decoupled(n, lag=lag)
        for ring in RINGS:
            title = f"decoupled(envs={n}{late}, ring={ring})"
            yield title, policies.decoupled(n, lag=lag, ring=ring)
