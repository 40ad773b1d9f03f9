"""Which stages of a loop step its environments: by the role they are marked with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shoal.errors import CutError
from shoal.graph.ir import Graph, Stage, loops, nested_stages
from shoal.planning.homes import Sites
from shoal.planning.plan import Plan
from shoal.planning.policy import ROLE_ENV, DistributionPolicy

NAMED = "env"  # the default name of such a stage


def environment_stages(graph: Graph) -> frozenset[str]:
    """The names of the stages that step environments: those marked so, else those named `env`."""
    marked = frozenset(s.stage for s in graph.stages if s.role == "env")
    return marked or frozenset(s.stage for s in graph.stages if s.stage == NAMED)


def with_roles(graph: Graph, distribution: DistributionPolicy) -> DistributionPolicy:
    """`distribution` with the names of this loop's stages where it says `ROLE_ENV`."""
    wanting = [f for f in distribution.fragments if ROLE_ENV in f.stages]
    if not wanting:
        return distribution
    found = sorted(environment_stages(graph))
    if not found:
        raise _none_there(graph, distribution, wanting[0].name)
    return replace(
        distribution,
        fragments=tuple(
            replace(f, stages=tuple(_named(f.stages, found))) for f in distribution.fragments
        ),
    )


def _named(selectors: tuple[str, ...], found: list[str]) -> Iterator[str]:
    for selector in selectors:
        yield from found if selector == ROLE_ENV else [selector]


def _none_there(graph: Graph, distribution: DistributionPolicy, fragment: str) -> CutError:
    """The refusal of a loop in which nothing is marked, or only inside another stage."""
    for full, stage in nested_stages(graph):
        if stage.role == "env":
            outer, _, inner = full.rpartition("/")
            return CutError(
                f"{distribution.name} gives the stage that steps environments to fragment "
                f"`{fragment}`, and `{inner}` can't leave stage `{outer}`, which calls it",
                f"Call `{inner}` from tick, or use another distribution policy.",
                stage.source,
            )
    known = ", ".join(sorted({s.stage for s in graph.stages})) or "none"
    return CutError(
        f"{distribution.name} gives the stage that steps environments to fragment `{fragment}`, "
        "and the loop has none",
        'Mark yours with @shoal.stage(per="env", role="env"), or use a distribution policy that '
        f"needs none, such as fused or multi_learner. Stages: {known}.",
    )


def steps_a_tick(plan: Plan) -> int:
    """How many steps all environments that a tick learns from make in it."""
    return env_steps_a_tick(plan.graph) * plan.seen


def env_steps_a_tick(graph: Graph) -> int:
    """How many steps each environment makes in a tick."""
    sites = Sites(graph, frozenset(loop.name for loop in loops(graph)))
    stepping = environment_stages(graph)
    stages = [n for n in sites.nodes.values() if isinstance(n, Stage) and n.stage in stepping]
    return sum(sites.times[n.writes[0]] for n in stages)
