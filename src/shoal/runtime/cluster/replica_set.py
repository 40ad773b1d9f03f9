"""Which workers of a run are there, which are to come and which to go: pure decisions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shoal.planning.plan import Plan, WorkerId
from shoal.planning.policy import Fragment


class ScaleAction(NamedTuple):
    """A worker that is to come, or to leave after the turn that it is in."""

    number: int
    comes: bool


@dataclass
class ReplicaSet:
    """The workers of a run: all that there may be, and those that are there."""

    plan: Plan
    seats: Sequence[tuple[WorkerId, ...]]
    present: set[int] = field(default_factory=set)
    leaving: set[int] = field(default_factory=set)
    wanted: dict[str, int] = field(default_factory=dict)  # of elastic fragments

    def __post_init__(self) -> None:
        first = {f: self.plan.starting(f) for f in self.plan.places}
        self.wanted = {f.name: first[f.name] for f in self.plan.distribution.elastic}
        self.present = {n for n, held in enumerate(self.seats) if held[0][1] < first[held[0][0]]}

    @property
    def absent(self) -> frozenset[int]:
        """Workers that aren't there."""
        return frozenset(range(len(self.seats))) - self.present

    def fragment(self, number: int) -> Fragment:
        """The fragment that a worker is hired for."""
        return self.plan.distribution.fragment(self.seats[number][0][0])

    def staying(self, fragment: str) -> list[int]:
        """Workers of a fragment that are there and are to stay."""
        here = sorted(self.present - self.leaving)
        return [n for n in here if self.seats[n][0][0] == fragment]

    def want(self, wanted: Mapping[str, int]) -> Iterator[str]:
        """Want so many of elastic fragments, within their bounds; what to tell of it."""
        for name, count in wanted.items():
            elastic = {f.name: f for f in self.plan.distribution.elastic}
            if name not in elastic:
                yield f"`{name}` has a fixed number of replicas, and stays as it is"
                continue
            within = min(max(count, elastic[name].least), elastic[name].most)
            if self.wanted[name] != within:
                self.wanted[name] = within
                yield f"{name}: {within} replicas, as was asked"

    def changes(self) -> Iterator[ScaleAction]:
        """Who is to come or go, so that as many are there as are wanted."""
        for fragment, count in self.wanted.items():
            here = self.staying(fragment)
            away = [n for n in sorted(self.absent) if self.seats[n][0][0] == fragment]
            yield from (ScaleAction(n, comes=True) for n in away[: max(0, count - len(here))])
            yield from (ScaleAction(n, comes=False) for n in here[count:])

    def can_spare(self, number: int) -> bool:
        """Whether there are enough without a worker."""
        fragment = self.fragment(number)
        others = [n for n in self.staying(fragment.name) if n != number]
        return fragment.is_elastic and len(others) >= fragment.least

    def leave(self, numbers: Iterable[int]) -> None:
        """These workers aren't there any more."""
        self.present -= set(numbers)
        self.leaving -= set(numbers)
