"""The laws that a plan must keep so that it computes the same as the loop, as a named list."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from shoal.errors import CutError, ShoalError
from shoal.graph.ir import Agree, Graph, Node, Stage, nested_stages
from shoal.graph.layout import APART, Fault, Layout, Partial, Varying, cause_of
from shoal.graph.words import name_text, size_text
from shoal.planning.cluster import Cluster, Place
from shoal.planning.homes import EVERYWHERE
from shoal.planning.paces import coming_and_going, serving, some_first
from shoal.planning.plan import Plan, draw_plan
from shoal.planning.policy import DistributionPolicy, Fragment, is_late, lag_of
from shoal.planning.spread import canonical


@dataclass(frozen=True, slots=True)
class Law:
    """A law and the function that finds violations of it."""

    name: str
    breaches: Callable[[Plan], Iterator[ShoalError]]


def make_plan(graph: Graph, distribution: DistributionPolicy, cluster: Cluster) -> Plan:
    """The plan of `graph` on `cluster` under `distribution`."""
    return check_plan(draw_plan(graph, distribution, cluster))


def check_plan(plan: Plan) -> Plan:
    """Return `plan` if it keeps every law, else raise the first violation."""
    for law in LAWS:
        for breach in law.breaches(plan):
            raise breach
    return plan


def uneven_replicas(plan: Plan) -> Iterator[ShoalError]:
    """Fragments whose replicas can't each hold as many environments."""
    envs = plan.graph.envs
    for fragment in plan.distribution.fragments:
        ends = plan.distribution.ends(fragment.name)
        if envs % ends:
            fits = [n for n in range(1, envs + 1) if envs % n == 0]
            near = sorted(sorted(fits, key=lambda n: abs(n - ends))[:2])
            what = "replicas" if ends == fragment.most else "groups"
            yield CutError(
                f"{envs} environments can't be divided over {ends} {what} of `{fragment.name}`",
                f"Use {' or '.join(str(n) for n in near)} {what}, "
                f"or a multiple of {ends} environments.",
            )


def split_groups(plan: Plan) -> Iterator[ShoalError]:
    """Fragments whose replicas would hold parts of groups of neighbouring environments."""
    envs = plan.graph.envs
    for fragment in plan.distribution.fragments:
        ends = plan.distribution.ends(fragment.name)
        found = plan.spread.findings.get(fragment.name)
        for group, source in found.grouped if found else ():
            if envs // ends % group:
                fits = [n for n in range(1, ends) if envs % n == 0 and envs // n % group == 0]
                yield CutError(
                    f"replicas of `{fragment.name}` hold {envs // ends} environments each, "
                    f"but the loop takes groups of {group} together",
                    f"Use {fits[-1]} of them, or {ends * group} environments or a multiple.",
                    source,
                )


def can_not_agree(plan: Plan) -> Iterator[ShoalError]:
    """Agreements whose result would differ from that of one replica with all environments."""
    for fragment in plan.distribution.fragments:
        found = plan.spread.findings.get(fragment.name)
        for fault in found.faults if found else ():
            yield _fault_error(plan, fragment.name, fault)


def _fault_error(plan: Plan, fragment: str, fault: Fault) -> ShoalError:
    """The error for a fault; it names a stage that can't be divided, not what reads from it."""
    for site in plan.sites.nodes.values():
        if site.name == fault.cause.node and isinstance(site, Stage):
            lost = Varying(cause=fault.cause)
            return _disagreement(plan, _every_share(plan, fragment), site, site.writes[0], lost)
    return CutError(fault.what, fault.fix, fault.source)


def replicas_disagree(plan: Plan) -> Iterator[ShoalError]:
    """Values on which replicas would differ, and that leave them all the same."""
    graph, sites = plan.world.graph, plan.world
    read = {
        (reader, value): node for reader, value, node in sites.needs(plan.homes)
        if not _has(plan, reader, value) and not isinstance(node, Agree)
    }  # fmt: skip
    pairs = [(after, before) for before, after in graph.carry if before != after]
    pairs += [(m.inner, m.inner) for m in graph.metrics]
    pairs += [(v, v) for _, v in read]
    turned = [c for loop, _ in sites.loops for c in loop.carries if not c.unchanged]
    pairs += [(v, c.before) for c in turned for v in (c.first, c.after)]
    wanted: dict[str, str] = {}
    for value, like in reversed(pairs):
        wanted[value] = like
    for node in sites.nodes.values():
        for name in sorted(plan.homes[node.name]):
            shares = max(1, plan.shares(name))
            for value in node.writes:
                layout = plan.layout(name, value)
                right = canonical(graph, wanted.get(value, value), shares)
                if value in wanted and layout != right:
                    yield _disagreement(plan, _every_share(plan, name), node, value, layout)


def _every_share(plan: Plan, name: str) -> Fragment:
    """A fragment with as many replicas as it has shares."""
    fragment = plan.distribution.fragment(name)
    return replace(fragment, replicas=plan.distribution.ends(name), ring=1)


def numbered(plan: Plan) -> Iterator[ShoalError]:
    """Replicas that depend on the indices of their environments, and hold no fixed ones."""
    for fragment in plan.distribution.fragments:
        found = plan.spread.findings.get(fragment.name)
        served = plan.distribution.clients(fragment.name) is not None
        some = fragment.name in plan.asynchronous and plan.shares(
            fragment.name
        ) < plan.distribution.ends(fragment.name)
        if found and found.numbered and (served or some):
            why = "serves groups as they arrive" if served else "is asynchronous"
            yield CutError(
                f"`{fragment.name}` {why}, but what it does depends on the indices of the "
                "environments that it holds",
                "Carry what differs from environment to environment (a key, an epsilon) as a row "
                "of the state, made in init.",
                found.numbered[0],
            )


def _has(plan: Plan, fragment: str, value: str) -> bool:
    """Whether `fragment` has a value without receiving it."""
    holders = plan.sites.holders(value, plan.homes)
    return holders is EVERYWHERE or fragment in holders


def _disagreement(
    plan: Plan, fragment: Fragment, node: Node, value: str, layout: Layout
) -> ShoalError:
    """The error for `value`, on which replicas of `fragment` would differ."""
    culprit, site = _culprit(plan, node, cause_of(layout).node)
    replicas, name = fragment.most, name_text(value).rstrip("'")
    homes = [plan.distribution.fragment(home) for home in plan.homes[site.name]]
    if not isinstance(site, Stage):
        return CutError(
            f"{_called(culprit)} mixes environments to make `{name}`, and {replicas} replicas of "
            f"`{fragment.name}` hold only some of them each",
            _way_out(layout, name),
            culprit.source,
        )
    if isinstance(culprit, Stage) and culprit.per == "env":
        return CutError(
            f"{_called(culprit)} is per environment, but sees rows of all environments at once, "
            f"and {replicas} replicas of `{fragment.name}` hold only some of them each",
            "Pass rows by position, with the environments as their first axis; by keyword only "
            "what all environments share.",
            culprit.source,
        )
    if site.host or all(plan.distribution.ends(home.name) == 1 for home in homes):
        return CutError(
            f"{_called(site)} sees the whole batch, so what it makes can't be divided over "
            f"{replicas} replicas of `{fragment.name}`",
            "If row i of what it makes depends on row i of what it reads only, mark it "
            f'per="env"; otherwise give `{fragment.name}` one replica.',
            culprit.source,
        )
    return CutError(
        f"{_called(site)} sees the whole batch and can't run as {replicas} replicas",
        f"{_way_out(layout, name)} Or keep `{site.stage}` in a fragment with one replica.",
        culprit.source,
    )


def _way_out(layout: Layout, name: str) -> str:
    """What to do about the value `name`, which replicas contribute to or mix rows for."""
    if isinstance(layout, Partial):
        said = "mean(x) (a mean, a gradient) or shoal.sum" if layout.how == "sum" else layout.how
        return f"Let replicas agree on `{name}` with shoal.{said}(x)."
    if layout != Varying():
        return (
            "Let replicas agree first, on what is reduced over environments, with shoal.mean(x), "
            "shoal.sum(x), shoal.max(x) or shoal.min(x)."
        )
    return f"{APART}, or do it in a stage that isn't replicated."


def _culprit(plan: Plan, node: Node, cause: str) -> tuple[Node, Node]:
    """The node called `cause`, and the site that holds it; `node` itself if there is none."""
    for site in plan.sites.nodes.values():
        for inner in _every(site):
            if inner.name == cause:
                return inner, site
    return node, node


def _every(node: Node) -> Iterator[Node]:
    """A node and all nodes inside it."""
    yield node
    body = getattr(node, "body", None)
    for inner in body.nodes if body is not None else ():
        yield from _every(inner)


def lag_into_on_policy(plan: Plan) -> Iterator[ShoalError]:
    """On-policy stages that would read what was made with older values than they have themselves.

    A fragment that takes something late has one version of it: all it makes with that is of one
    age, and its on-policy stages are welcome to it. What it sends to others is older than theirs.
    """
    stale = {(c.reader, v) for c in plan.channels if is_late(c.flow) for v in c.values}
    late: dict[str, dict[str, str]] = {}  # by value and fragment, what it was made with late
    for node in plan.sites.nodes.values():
        older: dict[str, str] = {}
        for value in _sources(plan, node):
            older |= late.get(value, {})
        for fragment in plan.homes[node.name]:
            reads = [v for v in node.reads if (fragment, plan.sites.resolve(v)) in stale]
            others = [cause for taker, cause in older.items() if taker != fragment]
            for name, stage in nested_stages(Graph((), (), (node,))):
                if stage.on_policy and others:
                    yield CutError(
                        f"stage `{name}` is on-policy, "
                        f"but what it reads comes from a lagged `{name_text(others[0])}`",
                        stage.on_policy,
                        stage.source,
                    )
            older |= {fragment: max(reads, key=_size(plan))} if reads else {}
        late |= dict.fromkeys(node.writes, older)


def lag_of_nothing(plan: Plan) -> Iterator[ShoalError]:
    """Lags that are asked for where nothing crosses that could be late."""
    asked = [w for w in plan.distribution.wires if lag_of(w.flow)]
    if asked and not any(lag_of(c.flow) for c in plan.channels):
        wire = asked[0]
        yield CutError(
            f"{plan.distribution.name} asks for lag {lag_of(wire.flow)} from `{wire.writer}` to "
            f"`{wire.reader}`, but `{wire.reader}` reads nothing that `{wire.writer}` carries from "
            "tick to tick",
            f"Use lag=0, or update what `{wire.reader}` reads in a stage of `{wire.writer}`.",
        )


def lag_that_does_not_hold(plan: Plan) -> Iterator[ShoalError]:
    """Values made of what is carried that would be read at once, though a lag is asked for."""
    late = {(w.writer, w.reader): w.flow for w in plan.distribution.wires if is_late(w.flow)}
    for channel in plan.channels:
        flow = late.get((channel.writer, channel.reader))
        if flow is None or is_late(channel.flow) or channel.scope:
            continue
        for value in channel.values:
            if plan.sites.is_ahead(value, channel.writer, plan.homes):
                maker = plan.sites.nodes[plan.sites.maker[value]]
                yield CutError(
                    f"`{channel.reader}` is to read what `{channel.writer}` carries late ({flow}), "
                    f"but `{name_text(value)}` is made of that in the same tick and read at once",
                    f"Make it in a stage of `{channel.reader}`, or carry it from tick to tick.",
                    maker.source,
                )


def _size(plan: Plan) -> Callable[[str], int]:
    return lambda value: plan.graph.values[plan.sites.resolve(value)].nbytes


def _sources(plan: Plan, node: Node) -> Iterator[str]:
    """Values behind what `node` reads, through opened loops."""
    for value in node.reads:
        yield value
        while value in plan.sites.alias:
            value = plan.sites.alias[value]
            yield value


def host_in_compiled_stage(plan: Plan) -> Iterator[ShoalError]:
    """Host stages inside stages, which are compiled as they are."""
    for node in plan.sites.nodes.values():
        for stage in Graph((), (), (node,)).stages:
            for name, inner in nested_stages(stage.body) if stage.body else ():
                if inner.host:
                    yield CutError(
                        f"host stage `{inner.stage}` is inside stage `{stage.stage}`, "
                        "which is compiled into one program",
                        f"Call it from tick, or name `{stage.stage}/{name}` in a fragment of the "
                        f"distribution policy, which lays `{stage.stage}` open.",
                        inner.source,
                    )


def out_of_memory(plan: Plan) -> Iterator[ShoalError]:
    """Places that can't hold what their fragments carry and receive."""
    held: dict[str, list[tuple[int, str]]] = {}
    for fragment in plan.distribution.fragments:
        carried = [
            v
            for v, after in plan.graph.carry
            if fragment.name in plan.sites.holders(after, plan.homes)
        ]
        taken = [v for c in plan.channels if c.reader == fragment.name for v in c.values]
        for place in plan.places[fragment.name]:
            for name in {*carried, *taken}:
                value = plan.graph.values[name]
                share = value.nbytes // (fragment.most if value.axis is not None else 1)
                held.setdefault(_room_of(place), []).append((share, name))
    room = {_room_of(p): _memory(plan, p) for places in plan.places.values() for p in places}
    for where, shares in held.items():
        size, (most, name) = sum(share for share, _ in shares), max(shares)
        if room[where] and size > room[where]:
            yield CutError(
                f"{where} would hold {size_text(size)} and has {size_text(room[where])}; the most "
                f"is `{name_text(name)}`, {size_text(most)}",
                "Use fewer environments, smaller carried state, or more places.",
            )


def _room_of(place: Place) -> str:
    """What memory a place uses: CPUs share their host's."""
    return place.host if place.device.kind == "cpu" else str(place)


def _memory(plan: Plan, place: Place) -> int:
    """Bytes that there are for a place, 0 when unknown."""
    hosts = {host.name: host.memory for host in plan.cluster.hosts}
    return hosts[place.host] if place.device.kind == "cpu" else place.device.memory


def _called(node: Node) -> str:
    if isinstance(node, Stage):
        return f"stage `{node.stage}`"
    return f"`{getattr(node, 'op', node.name).removeprefix('reduce').lstrip('_')}`"


LAWS = (
    Law("Replicas hold equally many environments", uneven_replicas),
    Law("Replicas hold whole groups of environments", split_groups),
    Law("What replicas agree on is what the loop has", can_not_agree),
    Law("Replicas agree on what they share", replicas_disagree),
    Law("What holds no fixed environments needs no indices of them", numbered),
    Law("No lag into an on-policy stage", lag_into_on_policy),
    Law("A lag that is asked for holds", lag_that_does_not_hold),
    Law("A lag that is asked for delays something", lag_of_nothing),
    Law("No host stage inside what is compiled whole", host_in_compiled_stage),
    Law("What takes the first to arrive needs no others", some_first),
    Law("Nothing waits for elastic replicas", coming_and_going),
    Law("A server can serve any group alone", serving),
    Law("Every place has the memory", out_of_memory),
)
