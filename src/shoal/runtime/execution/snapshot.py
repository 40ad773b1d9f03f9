"""The state of a run before a tick: what is carried, and what is in flight to lagged readers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from shoal.errors import RunError
from shoal.planning.plan import Plan
from shoal.planning.policy import lag_of


@dataclass(frozen=True)
class Snapshot:
    """All that a run needs to continue from a tick.

    `values` is the carried state by name. `past` holds the older versions that lagged readers have
    yet to take, named by `past_name`; where one is missing, its reader starts from the newest.
    """

    tick: int
    values: Mapping[str, Any]
    past: Mapping[str, Any] = field(default_factory=dict)
    is_owned: bool = False  # no other holds these arrays: a run may donate them

    def without(self, names: Iterable[str]) -> Snapshot:
        """The snapshot without these values."""
        gone = set(names)
        return replace(self, values={n: x for n, x in self.values.items() if n not in gone})


def check_complete(snapshot: Snapshot, names: Iterable[str]) -> Snapshot:
    """`snapshot` if it has all these values."""
    if missing := [name for name in names if name not in snapshot.values]:
        raise RunError(
            f"the run was stopped in the middle of a tick, and its state (`{missing[0]}`) is too "
            "large for copies to be kept of it",
            "Let a run end with its ticks, or carry less.",
        )
    return snapshot


class Share(NamedTuple):
    """One endpoint's part of a snapshot; `tick` is its own if it is asynchronous."""

    tick: int
    carried: dict[str, Any]
    past: dict[str, Any]


class Asked(NamedTuple):
    """A snapshot that the driver requests: its number, and the tick it is taken before."""

    number: int = 0
    tick: int = -1


def past_name(reader: str, value: str, age: int) -> str:
    """The name under which a reader sees a value that was made `age` ticks ago."""
    return f"{reader}:{value}@{age}"


def is_past(name: str) -> bool:
    """Whether `past_name` made a name."""
    return "@" in name


def value_of(past: str) -> str:
    """The value that a name from `past_name` is of."""
    return past.partition(":")[2].rpartition("@")[0]


@dataclass(frozen=True, slots=True)
class Lagged:
    """A channel whose reader lags by `lag` ticks."""

    channel: str
    writer: str
    reader: str
    lag: int
    values: tuple[str, ...]

    @property
    def past_names(self) -> list[str]:
        """The names of the messages in flight between ticks."""
        ages = range(1, self.lag + 1)
        return [past_name(self.reader, value, age) for value in self.values for age in ages]


def lagged(plan: Plan) -> Iterator[Lagged]:
    """The channels whose readers lag by a fixed number of ticks."""
    for c in plan.channels:
        if lag := lag_of(c.flow):
            yield Lagged(c.name, c.writer, c.reader, lag, c.values)
