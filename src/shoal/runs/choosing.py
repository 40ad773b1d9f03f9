"""The plan of a run that names no distribution policy: the fastest here, if that pays to know."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from shoal.errors import SettingError
from shoal.graph.ir import Graph
from shoal.planning.cluster import Cluster
from shoal.planning.laws import make_plan
from shoal.planning.plan import Plan
from shoal.planning.policy import DistributionPolicy
from shoal.profiling.sites import sites_of
from shoal.profiling.span_file import SpanFile
from shoal.profiling.trace import trace_json
from shoal.roles import steps_a_tick, with_roles
from shoal.search.calibrate import measured
from shoal.search.candidates import LOCAL, Goal, named
from shoal.search.choose import (
    SECONDS,
    Choice,
    calibrated,
    chosen,
    counterfactuals,
    fitting,
    halved,
)
from shoal.search.cluster_file import load_cluster
from shoal.search.kept import (
    keep,
    kept_profile,
    machine_name,
    machine_profile,
    profile_path,
    with_messages,
)
from shoal.simulation.estimate import estimate
from shoal.simulation.events import Simulated, simulate
from shoal.simulation.profile import Profile
from shoal.simulation.script import NETWORK, Scripts, Unmeasured, loop_print, rows_of

AUTO = "auto"  # as the name of a distribution policy
VARIABLE = "SHOAL_AUTO"  # `off`: nothing is measured or chosen
OFF = ("off", "0", "no", "false")
# Steps a second that a run is expected to make before anything is known of it. A run that would
# take less than PAYS_S then isn't worth the seconds of measuring.
COMPILED_RATE, PYTHON_RATE, PAYS_S = 250_000, 20_000, 60.0
Say = Callable[[str], None]


@dataclass(frozen=True)
class Automatic:
    """A distribution policy and a backend, and two lines that say what was chosen and why."""

    distribution: DistributionPolicy
    backend: str
    why: str
    plan: Plan | None = field(default=None, compare=False)  # with what was compiled of it


def is_on() -> bool:
    """Whether plans may be chosen: not where `SHOAL_AUTO` turns it off."""
    return os.environ.get(VARIABLE, "").lower() not in OFF


def automatic(default: Plan, ticks: int, backend: str | None, say: Say) -> Automatic:
    """What a run of so many ticks is to be distributed like; the default's graph is the loop.

    What was chosen before for this loop costs nothing. Otherwise it is measured first, unless the
    run is too short to win that back.
    """
    graph, cluster = default.graph, default.cluster
    backends = LOCAL if backend is None else (backend,)
    fallback = default.distribution, backend or LOCAL[0]
    if backends[0] not in LOCAL:
        return Automatic(*fallback, "")
    goal = Goal(ticks=ticks, backends=backends)
    if (found := _kept_choice(default, goal)) is not None:
        return found
    profile = kept_profile(graph, say)
    if profile is None:
        has_host = any(stage.host for stage in graph.stages)
        rate = PYTHON_RATE if has_host else COMPILED_RATE
        if ticks * steps_a_tick(default) < PAYS_S * rate:
            return Automatic(*fallback, _unmeasured(default))
        say("Measuring what is fastest here, once for this loop (--distribute fused skips it)")
        profile = calibrated(graph, cluster, goal, None, say)
        choice = tried(chosen(graph, cluster, profile, goal), default, goal, say)
    else:
        choice = chosen(graph, cluster, profile, goal)
    _keep_choice(choice, default, goal)
    return Automatic(choice.plan.distribution, choice.backend, two_lines(choice), choice.plan)


def tried(choice: Choice, default: Plan, goal: Goal, say: Say) -> Choice:
    """The choice; if it isn't the default, after running both, and one more, for a second each."""
    if choice.plan.distribution == default.distribution:
        return choice
    ranked = (choice.best, *choice.runners_up)
    usual = [r for r in ranked[1:] if r.candidate.plan.distribution == default.distribution]
    first = usual[:1]  # plans aren't hashable
    others = (*first, *(r for r in choice.runners_up if not any(r is one for one in first)))
    return halved(replace(choice, runners_up=others), goal, say)


def two_lines(choice: Choice) -> str:
    """What was chosen, and why."""
    best = choice.best
    first = (
        f"Chosen: {best.candidate.name}, {best.steps_per_second:,.0f} steps/s {best.how}, limited "
        f"by {best.estimate.bottleneck}."
    )
    second = choice.reasons[0] if choice.runners_up else "Nothing else comes near."
    return f"{first}\n{second} `shoal plan ... --auto` shows more; --distribute fused skips this."


def _unmeasured(default: Plan) -> str:
    name = default.distribution.name.replace("_", "-")
    return f"{name}, unmeasured: the run is short. `shoal plan ... --auto` says what is fastest."


# Choices kept from earlier runs


def _choices_path(default: Plan) -> Path | None:
    path = profile_path(loop_print(default.graph))
    return path.with_suffix(".choices.json") if path else None


def _key(default: Plan, goal: Goal) -> str:
    cores = sum(host.cpus for host in default.cluster.hosts)
    length = (goal.ticks or 0).bit_length()  # its order of magnitude
    return f"{default.graph.envs} envs, {cores} cores, 2^{length} ticks, {'/'.join(goal.backends)}"


def _kept_choice(default: Plan, goal: Goal) -> Automatic | None:
    """The choice of an earlier run alike, if the profile that it was made from is still there."""
    path, profile = _choices_path(default), profile_path(loop_print(default.graph))
    if path is None or profile is None or not (path.exists() and profile.exists()):
        return None
    with suppress(OSError, ValueError, TypeError, KeyError):
        title, backend, why = json.loads(path.read_text(encoding="utf-8"))[_key(default, goal)]
        policies = dict(named(default.graph, default.cluster, goal))
        if backend in goal.backends:
            return Automatic(policies[title], backend, str(why))
    return None


def _keep_choice(choice: Choice, default: Plan, goal: Goal) -> None:
    path = _choices_path(default)
    if path is None:
        return
    known: dict[str, list[str]] = {}
    with suppress(OSError, ValueError):
        known = dict(json.loads(path.read_text(encoding="utf-8")))
    known[_key(default, goal)] = [choice.best.candidate.title, choice.backend, two_lines(choice)]
    with suppress(OSError):
        path.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


# shoal plan --auto


@dataclass(frozen=True)
class ChoiceOptions:
    """Where, for what and how carefully a plan is chosen."""

    cluster: Path | None = None
    profile: Path | None = None
    goal: Goal = field(default_factory=Goal)
    measure: bool = False
    trace: Path | None = None  # of a simulation


def choice_for(graph: Graph, machine: Cluster, options: ChoiceOptions, say: Say) -> Choice:
    """The choice for a loop: with the profile of a file, else the kept one, else measured now."""
    file = load_cluster(options.cluster) if options.cluster else None
    cluster = file.cluster if file else machine
    fitting(graph, cluster, options.goal)  # or else refused, before anything is measured
    profile = profile_from(options.profile, graph, say) if options.profile else None
    if profile is None:
        # What the kept profile lacks is measured here, also for a cluster of other hosts.
        profile = calibrated(graph, machine, options.goal, kept_profile(graph, say), say)
    if file is not None:
        between = {NETWORK: file.link, "ray": file.link}
        profile = replace(profile, messages={**profile.messages, **between})
    choice = chosen(graph, cluster, profile, options.goal)
    if options.measure and file is None:
        choice = halved(choice, options.goal, say)
    lines = tuple(counterfactuals(graph, cluster, options.goal, choice))
    return replace(choice, counterfactuals=lines)


def profile_from(path: Path, graph: Graph, say: Say) -> Profile | None:
    """The profile of a file, if it is of this loop; it may be of another machine."""
    found = Profile.load(path)
    if wrong := found.misfit(loop_print(graph), found.machine):
        say(f"{path} is not used: {wrong}; measuring again")
        return None
    if found.machine != (here := machine_name()):
        say(f"{path} is of another machine ({found.machine}); this is {here}")
    return found


# shoal plan --simulate


def simulated(plan: Plan, machine: Cluster, ticks: int, options: ChoiceOptions, say: Say) -> str:
    """What a plan does in a simulation, beside its estimate; what its parts cost is measured here.

    On a cluster of a file, messages between hosts cost what the file says of its link.
    """
    graph = plan.graph
    profile = profile_from(options.profile, graph, say) if options.profile else None
    if profile is None:
        known = kept_profile(graph, say) or machine_profile(graph)
        known = with_messages(known, "processes", machine, say)
        profile = with_parts_of(plan, known, machine, say)
    if options.cluster:
        link = load_cluster(options.cluster).link
        profile = replace(profile, messages={**profile.messages, NETWORK: link})
    try:
        scripts = Scripts(plan, profile, "processes")
        said, found = estimate(scripts), simulate(scripts, ticks, seed=0)
    except Unmeasured as missing:
        raise SettingError(
            f"the profile doesn't say what `{missing}` costs",
            "Leave --profile out, so that it is measured here.",
        ) from missing
    if options.trace is not None:
        write_trace(options.trace, plan, found)
    return f"Simulated: {found}\nEstimate: {said}"


def write_trace(path: Path, plan: Plan, found: Simulated) -> None:
    """Write the newest spans of a simulation for ui.perfetto.dev, as `shoal profile` does."""
    workers = [{"name": name, "pid": 0, "memory": 0, "ticks": []} for name in found.spans]
    sites = [asdict(site) | {"stages": list(site.stages)} for site in sites_of(plan)]
    about: Any = {"workers": workers, "sites": sites}
    file = SpanFile(about, np.zeros(0), list(found.spans.values()))
    path.write_text(json.dumps(trace_json(file)), encoding="utf-8")


def with_parts_of(plan: Plan, profile: Profile, machine: Cluster, say: Say) -> Profile:
    """The profile with what the parts of a plan cost, at the sizes that its fragments run with.

    They are measured with one replica of each fragment, so that a plan of thousands can be.
    """
    if Scripts(plan, profile, "processes").is_measured:
        return profile
    names = [f.name for f in plan.distribution.fragments]
    alone = with_roles(plan.graph, plan.distribution.alone)
    for size in sorted({rows_of(plan, name) for name in names}):
        say(f"measuring {plan.distribution.name} with {size} environments")
        one = make_plan(plan.graph.origin.annotated(size), alone, machine)
        profile = profile.joined(measured(one, SECONDS))
    keep(profile)
    return profile
