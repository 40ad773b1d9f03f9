"""Laws of asynchronous fragments: queues that take the first replicas to arrive, and servers."""

from __future__ import annotations

import math
from collections.abc import Iterator

from shoal.errors import CutError, ShoalError
from shoal.graph.words import name_text
from shoal.planning.plan import Plan
from shoal.planning.policy import Latest, Queue
from shoal.planning.program import Channel


def some_first(plan: Plan) -> Iterator[ShoalError]:
    """Readers that take the first n replicas but need all of them, or could starve some."""
    for channel in plan.channels:
        if isinstance(channel.flow, Queue) and channel.flow.take != "all":
            yield from _one_reader(plan, channel, channel.flow.take)
            yield from _same_for_all(plan, channel)
            yield from _nothing_by_rows(plan, channel)
            yield from _room_for_all(plan, channel, channel.flow.take)
            yield from _one_start(plan, channel)


def _one_reader(plan: Plan, channel: Channel, take: int) -> Iterator[ShoalError]:
    writer, reader, ends = channel.writer, channel.reader, plan.ends(channel.writer)
    fragment = plan.distribution.fragment(writer)
    least = ends * fragment.least // fragment.most
    if take > least:
        at_least = "at least " if least < ends else ""
        yield CutError(
            f"`{reader}` is to take {take} of {at_least}{least} replicas of `{writer}`",
            f'Take at most {least}, or "all".',
        )
    if plan.distribution.ends(reader) > 1:
        yield CutError(
            f"`{reader}` takes the first {take} replicas of `{writer}` to arrive, "
            "and its own replicas would each take others",
            f'Give `{reader}` one replica, or let it take "all".',
        )
    if reader in plan.asynchronous:
        yield CutError(
            f"`{reader}` takes the first {take} of {ends} replicas of `{writer}` to arrive, "
            "and is also in lockstep with them",
            "Let what it sends them flow as shoal.Latest(max_lag).",
        )


def _same_for_all(plan: Plan, channel: Channel) -> Iterator[ShoalError]:
    ends = plan.ends(channel.writer)
    for other in plan.channels:
        joined = other.reader == channel.reader and other.writer in plan.asynchronous
        if joined and (other.flow != channel.flow or plan.ends(other.writer) != ends):
            yield CutError(
                f"`{channel.reader}` joins what `{channel.writer}` and `{other.writer}` make, "
                "but not in the same shares",
                "Give both wires the same queue, and both fragments as many replicas.",
            )


def _nothing_by_rows(plan: Plan, channel: Channel) -> Iterator[ShoalError]:
    for before, after in plan.graph.carry:
        holders = plan.sites.holders(after, plan.homes)
        rows = plan.graph.values[before].axis is not None and before != after
        if rows and channel.reader in holders:
            yield CutError(
                f"`{channel.reader}` takes the first replicas of `{channel.writer}` to arrive, "
                f"but carries `{name_text(before)}`, which has a row for every environment",
                "Make it in a stage that runs with the environments, or use a distribution policy "
                "that takes all replicas, such as ape_x.",
            )


def _room_for_all(plan: Plan, channel: Channel, take: int) -> Iterator[ShoalError]:
    ends = plan.ends(channel.writer)
    for other in plan.channels:
        if other.writer != channel.reader or not isinstance(other.flow, Latest):
            continue
        most = other.flow.max_lag
        if most is not None and take * (most + 1) < ends:
            yield CutError(
                f"with at most {most} ticks of lag and {take} replicas taken a tick, "
                f"only {take * (most + 1)} of {ends} replicas of `{channel.writer}` could work",
                f"Allow max_lag={math.ceil(ends / take) - 1} or more, or take more replicas.",
            )


def _one_start(plan: Plan, channel: Channel) -> Iterator[ShoalError]:
    """Turns that would start from several newest values, each with a lag of its own."""
    group = plan.in_step(channel.writer)
    latest = [c for c in plan.channels if c.reader in group and isinstance(c.flow, Latest)]
    if len(latest) > 1:
        (one, value), (other, _) = [(c.reader, c.values[0]) for c in latest[:2]]
        readers = f"`{one}`" if one == other else f"`{one}` and `{other}`"
        writers = " and ".join(dict.fromkeys(f"`{c.writer}`" for c in latest[:2]))
        yield CutError(
            f"a turn of {readers} would start from the latest values of {writers} twice "
            f"(`{name_text(value)}`, for example), and with different lags",
            "Send them to one fragment only, or put those in lockstep into one fragment, "
            "as impala does.",
        )


def coming_and_going(plan: Plan) -> Iterator[ShoalError]:
    """Elastic fragments whose replicas others wait for."""
    for fragment in plan.distribution.elastic:
        others = sorted(plan.in_step(fragment.name) - {fragment.name})
        if fragment.name in plan.replaceable and others:
            yield CutError(
                f"`{fragment.name}` is to have {fragment.least} to {fragment.most} replicas, but "
                f"`{others[0]}` is in lockstep with each of them",
                f"Give it a fixed number, such as {fragment.most}, or put both into one fragment.",
            )
        elif fragment.name not in plan.replaceable:
            yield CutError(
                f"`{fragment.name}` is to have {fragment.least} to {fragment.most} replicas, but "
                "others wait for each of them: it isn't asynchronous",
                f"Give it a fixed number, such as {fragment.most}, or let its reader take the "
                "first to arrive, as impala does, and central with a max_lag.",
            )


def serving(plan: Plan) -> Iterator[ShoalError]:
    """Servers whose groups can't be dealt out, or that can't serve one group without another."""
    for fragment in plan.distribution.fragments:
        if plan.distribution.clients(fragment.name) is None:
            continue
        ends = plan.distribution.ends(fragment.name)
        if ends % fragment.most:
            yield CutError(
                f"{ends} groups can't be dealt out to {fragment.most} replicas "
                f"of `{fragment.name}`",
                "Use a number of replicas that divides the groups.",
            )
        if plan.one_program(fragment.name):
            yield CutError(
                f"`{fragment.name}` serves groups as they come, and agrees with all of them",
                "Serve only stages of one environment each.",
            )
