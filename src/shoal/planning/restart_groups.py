"""Restart groups: endpoints in lockstep with each other, and the workers that run them.

The state of an asynchronous endpoint is usable only together with that of the endpoints in
lockstep with it, all before the same tick.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from shoal.planning.plan import Plan, Replica, WorkerId

Kept = dict[int, dict[Replica, int]]  # by slot, before which tick each state was kept
Group = tuple[Replica, ...]


def groups(plan: Plan) -> tuple[Group, ...]:
    """The endpoints of asynchronous fragments, each with those in lockstep with it."""
    found = []
    for fragments in dict.fromkeys(
        tuple(sorted(plan.in_step(f))) for f in sorted(plan.asynchronous)
    ):
        counts = {plan.ends(fragment) for fragment in fragments}
        ends = [[(f, end) for end in range(plan.ends(f))] for f in fragments]
        # As many of each: the first goes with the first, and so on.
        found += zip(*ends, strict=True) if len(counts) == 1 else [chain(*ends)]
    return tuple(tuple(group) for group in found)


def worker_groups(plan: Plan, workers: Sequence[Iterable[WorkerId]]) -> tuple[tuple[int, ...], ...]:
    """For each worker, those that run endpoints of the same groups, itself included."""
    ends = {
        (f, end): number
        for number, held in enumerate(workers)
        for f, w in held
        for end in plan.ends_of(f, w)
    }
    found = {number: {number} for number in range(len(workers))}
    for group in groups(plan):
        joined = set[int]().union(*(found[ends[end]] for end in group))
        found |= dict.fromkeys(joined, joined)
    return tuple(tuple(sorted(found[number])) for number in range(len(workers)))


def group_of(every: Iterable[frozenset[int]], worker: int) -> frozenset[int]:
    """The workers that restart with one, itself included."""
    return next((group for group in every if worker in group), frozenset({worker}))


def newest_together(kept: Kept, together: Iterable[Group]) -> dict[Replica, int]:
    """For each endpoint, the slot with the newest state that its whole group has of one tick.

    Endpoints whose group has none in common are left out.
    """
    found: dict[Replica, int] = {}
    for group in together:
        slots = [{kept[slot][end]: slot for slot in kept if kept[slot][end] >= 0} for end in group]
        if common := set(slots[0]).intersection(*slots[1:]):
            found |= {end: own[max(common)] for end, own in zip(group, slots, strict=True)}
    return found
