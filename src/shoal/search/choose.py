"""Chooses the plan with the most steps a second, and says why it, and what would be faster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from shoal.errors import SettingError, ShoalError
from shoal.graph.ir import Graph
from shoal.planning.cluster import Cluster
from shoal.planning.laws import make_plan
from shoal.planning.plan import Plan
from shoal.planning.policies import fused
from shoal.runtime.cluster.machine import this_machine
from shoal.runtime.run import run
from shoal.search.calibrate import measured, quiet
from shoal.search.candidates import Candidate, Goal, candidates, changes
from shoal.search.kept import keep, machine_profile, with_messages
from shoal.search.messages import not_stopped
from shoal.simulation.estimate import Estimate, estimate
from shoal.simulation.profile import Profile
from shoal.simulation.script import Scripts, Unmeasured

MARGIN = 1.05  # what is simpler is taken, unless another is faster by as much
START_S = {"threads": 0.0, "processes": 4.0, "ray": 10.0}  # to start workers
SECONDS = 0.6  # of running each plan that is measured
HALVING = ((3, 0.7), (2, 1.5))  # the best few run for so many seconds, then fewer for longer
SHOWN = 4
BUDGET_S, SHORT_BUDGET_S = 60.0, 15.0  # after which no further plan is measured; of a given run
CLOSE, CONTENDERS = 1.3, 3  # plans this close to the best are measured again, so many of them
Say = Callable[[str], None]


@dataclass(frozen=True)
class Ranked:
    """A candidate with its estimate; `rate` is what was measured, if it was run."""

    candidate: Candidate
    estimate: Estimate
    rate: float | None = None

    @property
    def steps_per_second(self) -> float:
        """What was measured, or else estimated."""
        return self.rate or self.estimate.steps_per_second

    def seconds(self, goal: Goal) -> float:
        """What is compared: of a whole run of known length, or of a single step."""
        if goal.ticks is None:
            return 1 / self.steps_per_second
        tick = self.estimate.steps / self.steps_per_second
        return START_S[self.candidate.backend] + goal.ticks * tick

    @property
    def how(self) -> str:
        """Where that is known from."""
        return "measured" if self.rate else "estimated"

    def __str__(self) -> str:
        rate = f"{self.steps_per_second:,.0f} steps/s {self.how}"
        return f"{self.candidate.name}: {rate}; limit: {self.estimate.bottleneck}"


@dataclass(frozen=True)
class Choice:
    """A plan, and what was considered; the profile lacks what `unmeasured` candidates cost."""

    best: Ranked
    runners_up: tuple[Ranked, ...]
    reasons: tuple[str, ...]
    counterfactuals: tuple[str, ...]
    profile: Profile
    unmeasured: tuple[str, ...] = ()

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.best.candidate.plan

    @property
    def backend(self) -> str:
        """The backend that it is to run on."""
        return self.best.candidate.backend

    @property
    def estimate(self) -> Estimate:
        """What the plan would do."""
        return self.best.estimate

    def __str__(self) -> str:
        parts = [f"Chosen: {self.best}", *self.reasons]
        if self.runners_up:
            parts += ["Runners-up:", *(f"  {one}" for one in self.runners_up)]
        if self.counterfactuals:
            parts += ["What would change it:", *(f"  {line}" for line in self.counterfactuals)]
        return "\n".join(parts)


def choose(
    graph: Graph,
    cluster: Cluster | None = None,
    profile: Profile | None = None,
    goal: Goal | None = None,
) -> Choice:
    """The plan of `graph` on `cluster`, or on this machine, that best meets `goal`, and why.

    Without a profile, the parts of the loop are measured here first, for some seconds.
    """
    cluster, goal = cluster or this_machine(), goal or Goal()
    if profile is None:
        profile = calibrated(graph, cluster, goal)
    choice = chosen(graph, cluster, profile, goal)
    return replace(choice, counterfactuals=tuple(counterfactuals(graph, cluster, goal, choice)))


def chosen(graph: Graph, cluster: Cluster, profile: Profile, goal: Goal) -> Choice:
    """As `choose`, of a profile that is there, and without counterfactuals."""
    found = fitting(graph, cluster, goal)
    ranked, missing = ranking(found, profile, goal)
    if not ranked:
        raise SettingError(
            f"the profile can't estimate any of the {len(found)} plans that this cluster allows",
            "Measure on such a machine, and give that profile: shoal plan ... --auto --profile.",
        )
    best = _simplest(ranked, goal)
    rate = best.steps_per_second
    if rate < goal.at_least:
        raise SettingError(
            f"no plan makes {goal.at_least:,.0f} steps/s here: the best, {best.candidate.name}, "
            f"makes {rate:,.0f}, which is {goal.at_least / rate:.3g} times too few",
            "Ask for less, allow a lag or more environments, or use a larger cluster.",
        )
    others = tuple(r for r in ranked if r is not best)[:SHOWN]
    reasons = tuple(_reasons(best, others, goal))
    return Choice(best, others, reasons, (), profile, tuple(c.name for c in missing))


def fitting(graph: Graph, cluster: Cluster, goal: Goal) -> list[Candidate]:
    """The candidates that fit a cluster and a goal; an error if there is none."""
    found = [c for g in graphs(graph, goal) for c in candidates(g, cluster, goal)]
    if not found:
        raise _nothing_fits(graph, cluster, goal)
    return found


def _nothing_fits(graph: Graph, cluster: Cluster, goal: Goal) -> ShoalError:
    """Why there is no candidate: what the laws say of the simplest one."""
    try:
        make_plan(graph, fused(), cluster)
    except ShoalError as error:
        return error
    return SettingError(
        f"no plan keeps a lag of at most {goal.max_lag} ticks on this cluster",
        "Allow a lag, or name a distribution policy.",
    )


def graphs(graph: Graph, goal: Goal) -> Iterator[Graph]:
    """The loop with each number of environments that the goal allows: powers of 2 between."""
    if goal.envs is None:
        yield graph
        return
    least, most = goal.envs
    sizes = {least, most} | {1 << i for i in range(most.bit_length()) if least <= 1 << i <= most}
    for envs in sorted(sizes):
        yield graph.origin.annotated(envs)


def ranking(
    found: Iterable[Candidate], profile: Profile, goal: Goal
) -> tuple[list[Ranked], list[Candidate]]:
    """Candidates by what they would do, the best first; and those that the profile can't say."""
    ranked, missing = [], []
    for candidate in found:
        try:
            guess = estimate(Scripts(candidate.plan, profile, candidate.backend))
            ranked.append(Ranked(candidate, guess))
        except Unmeasured:
            missing.append(candidate)
    return sorted(ranked, key=lambda one: one.seconds(goal)), missing


def _simplest(ranked: Sequence[Ranked], goal: Goal) -> Ranked:
    """The best, or a simpler one that is as good within the margin."""
    least = ranked[0].seconds(goal)
    near = [r for r in ranked if r.seconds(goal) <= MARGIN * least]
    return min(near, key=lambda r: (_size(r.candidate.plan), r.seconds(goal)))


def _size(plan: Plan) -> tuple[int, int]:
    return len(plan.distribution.fragments), sum(f.most for f in plan.distribution.fragments)


def _reasons(best: Ranked, others: Sequence[Ranked], goal: Goal) -> Iterator[str]:
    if others:
        ahead = best.steps_per_second / others[0].steps_per_second
        yield f"Next is {others[0].candidate.name}, at {1 / ahead:.0%} of that."
    if found := changes(best.candidate.plan):
        yield f"It changes what is learnt, as you allowed: {'; '.join(found)}."
    if goal.envs is not None:
        yield f"It has {best.candidate.plan.graph.envs} environments, which changes learning too."
    elif not found:
        yield "The numbers stay those of the loop."


# Measuring


def calibrated(
    graph: Graph, cluster: Cluster, goal: Goal, profile: Profile | None = None, say: Say = quiet
) -> Profile:
    """A profile that says what the best candidates cost, kept for later; no loser is measured.

    It stops when its time is over, or where measuring one more candidate would take longer than a
    run can win by it. Those that are close are measured again in turn: the machine may be busy.
    """
    found = fitting(graph, cluster, goal)
    known = machine_profile(graph)
    known = known if profile is None else replace(profile, messages=known.messages)
    longest, tried = 0.0, list[Candidate]()
    until = time.perf_counter() + (BUDGET_S if goal.ticks is None else SHORT_BUDGET_S)
    while (one := _next(found, known, goal, longest, tried)) is not None:
        tried.append(one)
        began = time.perf_counter()
        if len(one.plan.distribution.fragments) > 1:
            known = with_messages(known, one.backend, cluster, say)
        try:
            if not Scripts(one.plan, known, one.backend).is_measured:
                say(f"measuring {one.name}")
                known = known.joined(measured(one.plan, SECONDS))
        except ShoalError as error:
            say(f"{one.name} is left out: {error.what}")
        longest = max(longest, time.perf_counter() - began)
        if time.perf_counter() > until:
            break
    ranked, _ = ranking(found, known, replace(goal, ticks=None))
    close = [r for r in ranked if r.steps_per_second * CLOSE >= ranked[0].steps_per_second]
    mine = [one.plan for one in tried]
    plans = [r.candidate.plan for r in close if any(r.candidate.plan is p for p in mine)]
    for plan in (*plans[:CONTENDERS], *plans[:CONTENDERS]) if len(plans) > 1 else ():
        known = known.joined(measured(plan, SECONDS))
    keep(known)
    return known


def _next(
    found: Sequence[Candidate],
    known: Profile,
    goal: Goal,
    longest: float,
    tried: Sequence[Candidate],
) -> Candidate | None:
    """The unmeasured candidate with the highest bound, if it could win more than it costs."""
    ranked, _ = ranking(found, known, goal)
    best = ranked[0].seconds(goal) if ranked else float("inf")
    left = [c for c in found if not any(c is one for one in tried)]
    if not ranked:
        return left[0] if left else None
    bounds = []
    for candidate in left:
        scripts = Scripts(candidate.plan, known, candidate.backend, is_bound=True)
        bound = Ranked(candidate, estimate(scripts)).seconds(goal)
        wins = bound * MARGIN < best and (goal.ticks is None or best - bound > longest)
        if wins and _is_open(replace(scripts, is_bound=False)):
            bounds.append((bound, len(bounds), candidate))
    return min(bounds)[2] if bounds else None


def _is_open(scripts: Scripts) -> bool:
    """Whether a profile lacks parts of a plan at their sizes, or what its messages cost."""
    try:
        estimate(scripts)
    except Unmeasured:
        return True
    return not scripts.is_measured


def halved(choice: Choice, goal: Goal, say: Say = quiet) -> Choice:
    """The choice after running the best few candidates, and fewer of them for longer."""
    left = [choice.best, *choice.runners_up]
    rest: list[Ranked] = []
    for count, seconds in HALVING:
        ran = [replace(r, rate=rate_of(r, seconds, say)) for r in left[:count]]
        rest = [*left[count:], *rest]
        left = sorted(ran, key=lambda r: r.seconds(goal))
    best = _simplest(left, goal)
    others = tuple(r for r in (*left, *rest) if r is not best)
    ran = [r for r in others if r.rate]
    return replace(choice, best=best, runners_up=others, reasons=tuple(_reasons(best, ran, goal)))


def rate_of(ranked: Ranked, seconds: float, say: Say = quiet) -> float:
    """Steps a second of a candidate that is run for some seconds."""
    say(f"running {ranked.candidate.name}")
    ticks = 2 + max(2, int(seconds / ranked.estimate.tick_seconds))
    done = not_stopped(run(ranked.candidate.plan, ranked.candidate.backend, ticks=ticks))
    return ranked.estimate.steps * (done.ticks - 1) / max(done.seconds, 1e-6)


# What would change it


def counterfactuals(graph: Graph, cluster: Cluster, goal: Goal, choice: Choice) -> Iterator[str]:
    """What a tick of lag, and half or twice the cores, would change, by the same profile."""
    now, wanted = choice.estimate.steps_per_second, replace(goal, ticks=None)
    lag = replace(wanted, max_lag=goal.max_lag + 1)
    tried = [
        (f"max_lag={lag.max_lag}, which changes what is learnt", lag, cluster),
        ("twice the cores", wanted, _with_cores(cluster, 2, 1)),
        ("half the cores", wanted, _with_cores(cluster, 1, 2)),
    ]
    for what, how, where in tried:
        ranked, _ = ranking(candidates(graph, where, how), choice.profile, how)
        if ranked:
            ratio = ranked[0].estimate.steps_per_second / now
            yield f"{what}: {ratio - 1:+.0%} ({ranked[0].candidate.name})"


def _with_cores(cluster: Cluster, times: int, over: int) -> Cluster:
    hosts = tuple(replace(h, cpus=max(1, h.cpus * times // over)) for h in cluster.hosts)
    return replace(cluster, hosts=hosts)
