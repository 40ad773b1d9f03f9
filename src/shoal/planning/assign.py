"""Which fragment a distribution policy gives each stage; nested stages it names are opened."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase

from shoal.errors import CutError, UnknownNameError
from shoal.graph.ir import Choice, Graph, Loop, Node, Stage, nested_stages
from shoal.planning.policy import PER_BATCH, PER_ENV, THE_REST, DistributionPolicy, Fragment


def assign_stages(graph: Graph, distribution: DistributionPolicy) -> tuple[Graph, dict[str, str]]:
    """`graph` with nested stages opened where they are named, and each stage's fragment."""
    check_names(graph, distribution)
    opened = {
        full.rsplit("/", 1)[0] for full, _ in nested_stages(graph) if _chosen(full, distribution)
    }
    nodes = tuple(_open(graph.nodes, opened, ""))
    return replace(graph, nodes=nodes), dict(_fragments(nodes, distribution))


def check_names(graph: Graph, distribution: DistributionPolicy) -> DistributionPolicy:
    """Check that every plain name in `distribution` is a stage of the loop."""
    known = {full for full, _ in nested_stages(graph)}
    for fragment in distribution.fragments:
        for name in fragment.stages:
            plain = name not in (PER_ENV, PER_BATCH) and "*" not in name
            if plain and name not in known:
                raise UnknownNameError(
                    f"stage in fragment `{fragment.name}` of {distribution.name}:", name, known
                )
            # A fragment with other selectors works without a match of the pattern.
            needed = "/" in name or ("*" in name and fragment.stages == (name,) != (THE_REST,))
            if needed and not any(fnmatchcase(full, name) for full in known):
                raise CutError(
                    f"{distribution.name} looks for a stage `{name}`, and the loop has none",
                    "Mark one with @shoal.stage, or use another distribution policy. "
                    f"Stages: {', '.join(sorted(known))}.",
                )
    return distribution


def _chosen(full: str, distribution: DistributionPolicy) -> bool:
    """Whether `distribution` names the nested stage `full`."""
    wanted = [s for f in distribution.fragments for s in f.stages if "/" in s]
    return "/" in full and any(fnmatchcase(full, s) for s in wanted)


def _open(nodes: tuple[Node, ...], opened: set[str], path: str) -> Iterator[Node]:
    """`nodes` with opened stages replaced by their bodies; stage nodes get their full names."""
    for node in nodes:
        if isinstance(node, Loop):
            body = replace(node.body, nodes=tuple(_open(node.body.nodes, opened, path)))
            yield replace(node, body=body)
        elif isinstance(node, Stage):
            full = f"{path}{node.stage}"
            if full in opened and node.body is not None:
                yield from _open(node.body.nodes, opened, f"{full}/")
            else:
                yield replace(node, stage=full)
        else:
            yield node


def _fragments(
    nodes: tuple[Node, ...], distribution: DistributionPolicy
) -> Iterator[tuple[str, str]]:
    for node in nodes:
        if isinstance(node, Loop):
            yield from _fragments(node.body.nodes, distribution)
        elif isinstance(node, Stage):
            yield node.name, fragment_of(node, distribution).name
        elif isinstance(node, Choice) and node.stages:
            yield node.name, _of_all(node, distribution).name


def _of_all(choice: Choice, distribution: DistributionPolicy) -> Fragment:
    """The one fragment that holds all stages of a choice."""
    found = [fragment_of(stage, distribution) for stage in choice.stages]
    for stage, fragment in zip(choice.stages, found, strict=True):
        if fragment != found[0]:
            raise CutError(
                f"stages `{choice.stages[0].stage}` and `{stage.stage}` are called inside one "
                f"`{choice.op}`, but {distribution.name} has them in fragments "
                f"`{found[0].name}` and `{fragment.name}`",
                "Put them into one fragment, or call them outside and choose with jnp.where.",
                choice.source,
            )
    return found[0]


def fragment_of(stage: Stage, distribution: DistributionPolicy) -> Fragment:
    """The fragment that holds `stage`: by name, pattern, kind, and then by the enclosing stage."""
    for name in _enclosing(stage.stage):
        for grade in range(4):
            found = [
                f
                for f in distribution.fragments
                if any(_grade(s, name, stage) == grade for s in f.stages)
            ]
            if len(found) > 1:
                both = " and ".join(f"`{f.name}`" for f in found[:2])
                raise CutError(
                    f"stage `{stage.stage}` is held by fragments {both}",
                    "Name each stage in one fragment only.",
                    stage.source,
                )
            if found:
                return found[0]
    raise CutError(
        f"stage `{stage.stage}` is in no fragment of {distribution.name}",
        f"Add it to the stages of a fragment: {', '.join(f.name for f in distribution.fragments)}.",
        stage.source,
    )


def _enclosing(full: str) -> Iterator[str]:
    """`learn/grad`, then `learn`."""
    while full:
        yield full
        full = full.rpartition("/")[0]


def _grade(selector: str, name: str, stage: Stage) -> int | None:
    """How specifically a selector matches the stage `name`: from 0 (its name) to 3 (the rest)."""
    if selector == THE_REST:
        return 3 if "/" not in name else None
    if selector in (PER_ENV, PER_BATCH):
        kind = stage.per if name == stage.stage else "batch"
        return 2 if "/" not in name and selector == f"per:{kind}" else None
    if selector == name:
        return 0
    return 1 if "*" in selector and fnmatchcase(name, selector) else None
