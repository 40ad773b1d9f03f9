"""A plan as text tables, and as plain JSON data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.graph.ir import Graph
from shoal.graph.show import graph_json, summary, table
from shoal.graph.words import count_text, place_text, size_text
from shoal.planning.policy import Fragment
from shoal.planning.program import Channel

if TYPE_CHECKING:
    from shoal.planning.plan import Plan

Json = dict[str, Any]


def plan_text(plan: Plan) -> str:
    """Fragments with replicas, places and stages; then channels with what crosses, and how."""
    graph = plan.graph
    moved = sum(plan.bytes_of(c) for c in plan.channels)
    title = f"{plan.distribution.name}: {graph.title}, {count_text(graph.envs, 'environment')}"
    lines = [f"{title}, {size_text(moved)} between fragments a tick", ""]
    head = ("fragment", "replicas", "place", "stages", "carries")
    lines += table(head, [_fragment_row(plan, f) for f in plan.distribution.fragments])
    if plan.channels:
        head = ("channel", "what", "how", "flow", "times", "a tick")
        lines += ["", *table(head, [_channel_row(plan, c) for c in plan.channels])]
    if plan.approximate:
        lines += ["", approximate_text(plan)]
    return "\n".join(lines)


def approximate_text(plan: Plan) -> str:
    """Where a plan's replicas agree only approximately, as the loop says they may."""
    where = ", ".join(plan.approximate)
    return f"approximate: replicas take the mean of what each of them computed at {where}"


def _fragment_row(plan: Plan, fragment: Fragment) -> tuple[str, ...]:
    replicas = str(fragment.most)
    if plan.one_program(fragment.name):
        replicas = f"{fragment.most} as one"
    if fragment.is_elastic:
        replicas = f"{fragment.least} to {fragment.most}, first {plan.starting(fragment.name)}"
    carried = [plan.graph.values[v] for v, owner in owners(plan).items() if owner == fragment.name]
    stages = ", ".join(stages_of(plan, fragment.name))
    return (
        fragment.name,
        replicas,
        place_text(places(plan, fragment.name)),
        stages,
        summary(carried),
    )


def _channel_row(plan: Plan, channel: Channel) -> tuple[str, ...]:
    values = [plan.graph.values[v] for v in channel.values]
    way = f"{channel.writer} > {channel.reader}"
    size = size_text(plan.bytes_of(channel))
    how = manner(plan, channel) + (", between hosts" if plan.leaves_host(channel) else "")
    return way, summary(values), how, str(channel.flow), str(channel.times), size


def stages_of(plan: Plan, fragment: str) -> list[str]:
    """Names of the stages that a fragment runs, in order of use."""
    return list(
        dict.fromkeys(s.stage for n in plan.nodes(fragment) for s in Graph((), (), (n,)).stages)
    )


def places(plan: Plan, fragment: str) -> list[str]:
    """Where a fragment's replicas run; of those that may come later, it isn't known yet."""
    return [str(place) for place in plan.places[fragment][: plan.starting(fragment)]]


def owners(plan: Plan) -> dict[str, str]:
    """The fragment that carries each value from tick to tick; unchanging values have none."""
    held = {b: plan.sites.holders(a, plan.homes) for b, a in plan.graph.carry if a != b}
    return {value: min(homes) for value, homes in held.items() if "*" not in homes}


def manner(plan: Plan, channel: Channel) -> str:
    """How a channel's values meet their readers: gathered, scattered, broadcast, or passed on."""
    writers = plan.distribution.ends(channel.writer)
    readers = plan.distribution.ends(channel.reader)
    values = [plan.graph.values[v] for v in channel.values]
    if any(plan.is_stacked(channel.writer, v.name) for v in values) and writers > 1:
        return f"mean of {writers}"
    if all(v.axis is None for v in values):
        return f"broadcast to {readers}" if readers > 1 else "direct"
    if writers == readers:
        return "direct" if writers == 1 else f"rows, {writers} to {readers}"
    if readers == 1:
        return f"gather of {writers}"
    return f"scatter to {readers}" if writers == 1 else f"rows, {writers} to {readers}"


def plan_json(plan: Plan) -> Json:
    """The plan as plain JSON data."""
    fragments = [
        {
            "name": f.name,
            "replicas": f.most,
            "one_program": plan.one_program(f.name),
            "places": places(plan, f.name),
            "stages": stages_of(plan, f.name),
            **({"least": f.least, "first": plan.starting(f.name)} if f.is_elastic else {}),
        }
        for f in plan.distribution.fragments
    ]
    return {
        "distribution": plan.distribution.name,
        "graph": graph_json(plan.graph),
        "fragments": fragments,
        "channels": [_channel_json(plan, c) for c in plan.channels],
        "homes": {site: sorted(homes) for site, homes in plan.homes.items()},
        "owners": owners(plan),
        **({"approximate": list(plan.approximate)} if plan.approximate else {}),
    }


def _channel_json(plan: Plan, channel: Channel) -> Json:
    return {
        "name": channel.name,
        "writer": channel.writer,
        "reader": channel.reader,
        "values": list(channel.values),
        "kind": manner(plan, channel),
        "scope": channel.scope,
        "times": channel.times,
        "flow": str(channel.flow),
        "bytes": plan.bytes_of(channel),
    }
