"""The sites of a plan: what its fragments' operations are, by the numbers that spans have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shoal.graph.ir import Graph, Loop, Node, Stage
from shoal.planning.fragment_program import write_program
from shoal.planning.plan import Plan
from shoal.planning.program import Call, Do, Put, Repeat, Take
from shoal.planning.segments import NumpyWork, Segment, walk
from shoal.profiling.spans import site_of
from shoal.roles import environment_stages

SIMULATION, INFERENCE, LEARNING, COMPUTE = CATEGORIES = (
    "simulation", "inference", "learning", "other computation",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Site:
    """An operation of a fragment: a segment, a stage in Python, a take, a put, or work in NumPy."""

    number: int
    fragment: str
    kind: str  # "segment", "stage", "take", "put", "numpy"
    name: str  # the channel, or the stages
    stages: tuple[str, ...] = ()
    category: str = COMPUTE


def sites_of(plan: Plan) -> list[Site]:
    """The sites of a plan."""
    categories = stage_categories(plan.graph)
    found = []
    for fragment, name in enumerate(f.name for f in plan.distribution.fragments):
        program = write_program(plan, name)
        for index, operation in enumerate(walk(program.operations)):
            match operation:
                case Segment(work):
                    stages = tuple(dict.fromkeys(_stages(plan, _nodes(work))))
                    kind, label = "segment", ", ".join(stages) or "glue"
                case Call(node):
                    stages = tuple(_stages(plan, [node]))
                    kind, label = "stage", ", ".join(stages)
                case Take(channel) | Put(channel):
                    stages, label = (), channel
                    kind = "take" if isinstance(operation, Take) else "put"
                case NumpyWork():
                    stages, kind, label = (), "numpy", "slices and stacks"
                case _:
                    continue
            category = _joined(categories[stage] for stage in stages)
            found.append(Site(site_of(fragment, index), name, kind, label, stages, category))
    return found


def stage_categories(graph: Graph) -> dict[str, str]:
    """What each stage is for, from what the loop says of it.

    Stages that step environments are simulation, other stages of a loop that steps them are
    inference, and all others learning. Without environments, all is compute.
    """
    stepping = environment_stages(graph)
    if not stepping:
        return dict.fromkeys((s.stage for s in graph.stages), COMPUTE)
    beside = set(_beside(graph.nodes, stepping))
    return {
        s.stage: SIMULATION if s.stage in stepping else INFERENCE if s.stage in beside else LEARNING
        for s in graph.stages
    }


def _beside(nodes: Iterable[Node], stepping: frozenset[str]) -> Iterator[str]:
    """The stages of loops that also step environments."""
    for node in nodes:
        if isinstance(node, Loop):
            inside = {s.stage for s in Graph((), (), (node,)).stages}
            if inside & stepping:
                yield from inside
            yield from _beside(node.body.nodes, stepping)


def _nodes(work: Iterable[object]) -> Iterator[str]:
    for item in work:
        match item:
            case Do(node):
                yield node
            case Repeat(_, body):
                yield from _nodes(body)
            case _:
                pass


def _stages(plan: Plan, nodes: Iterable[str]) -> Iterator[str]:
    for name in nodes:
        node = plan.sites.nodes[name]
        if isinstance(node, Stage):
            yield node.stage
        elif isinstance(node, Loop):
            yield from (s.stage for s in Graph((), (), (node,)).stages)


def _joined(categories: Iterable[str]) -> str:
    """The one category of a site; of several that are compiled together, compute."""
    found = set(categories)
    return found.pop() if len(found) == 1 else COMPUTE
