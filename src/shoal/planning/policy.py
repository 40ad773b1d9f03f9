"""The parts of a distribution policy: fragments of stages, and the flows between them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from shoal.errors import SettingError

PER_ENV = "per:env"
PER_BATCH = "per:batch"
ROLE_ENV = "role:env"
THE_REST = "*"


@dataclass(frozen=True, slots=True)
class Fragment:
    """Stages that run in one place, how many replicas there are, and on what kind of device.

    `stages` holds names (`act`, `learn/grad`), patterns (`*/grad`), `PER_ENV` or `PER_BATCH` for
    every stage of that kind, `ROLE_ENV` for those that step environments, or `THE_REST`. A name
    wins over a pattern, a pattern over a kind. `on` is `cpu`, `gpu`, or `gpu else cpu`. A replica
    keeps `ring` groups of environments in flight: while one waits for its actions another is
    stepped. `beside` names a fragment whose workers also hold this one. With `replicas=(2, 16)`
    there are at least 2 and at most 16, each with a sixteenth of the environments; their number may
    change during a run.
    """

    name: str
    stages: tuple[str, ...]
    replicas: int | tuple[int, int] = 1
    on: str = "cpu"
    ring: int = 1
    beside: str = ""

    def __post_init__(self) -> None:
        counts = self.replicas if isinstance(self.replicas, tuple) else (self.replicas,)
        if len(counts) not in (1, 2) or any(type(n) is not int for n in (*counts, self.ring)):
            raise SettingError(
                f"fragment `{self.name}` has {self.replicas!r} replicas and a ring of "
                f"{self.ring!r}",
                "Say a whole number, or (2, 16) for from 2 to 16 replicas.",
            )
        if self.least > self.most:
            raise SettingError(
                f"fragment `{self.name}` has {self.least} to {self.most} replicas",
                f"Say the fewest first: ({self.most}, {self.least}).",
            )
        for what, count in (("replicas", self.least), ("groups in its ring", self.ring)):
            if count < 1:
                raise SettingError(
                    f"fragment `{self.name}` has {count} {what}", "Give it at least one."
                )
        if self.on not in ("cpu", "gpu", "gpu else cpu"):
            raise SettingError(
                f"fragment `{self.name}` is to run on `{self.on}`",
                "Say `cpu`, `gpu` or `gpu else cpu`.",
            )

    @property
    def least(self) -> int:
        """The minimum number of replicas."""
        return self.replicas if isinstance(self.replicas, int) else self.replicas[0]

    @property
    def most(self) -> int:
        """The maximum number of replicas, which is the number of shares of the environments."""
        return self.replicas if isinstance(self.replicas, int) else self.replicas[1]

    @property
    def is_elastic(self) -> bool:
        """Whether the number of replicas may change during a run."""
        return self.least < self.most


@dataclass(frozen=True, slots=True)
class Lockstep:
    """The reader at tick t sees the writer's value of tick t - lag; the same numbers every time."""

    lag: int = 0

    def __post_init__(self) -> None:
        if self.lag < 0:
            raise SettingError(
                f"lag={self.lag}: a reader can't be ahead of its writer", "Use lag=0 or more."
            )

    def __str__(self) -> str:
        return f"lag {self.lag}" if self.lag else "lockstep"


@dataclass(frozen=True, slots=True)
class Latest:
    """The reader sees the newest value; it waits rather than be more than `max_lag` ticks behind.

    It applies to values that a writer carries from tick to tick. None: no bound.
    """

    max_lag: int | None = 1

    def __post_init__(self) -> None:
        if self.max_lag is not None and self.max_lag < 0:
            raise SettingError(
                f"max_lag={self.max_lag}: a reader can't be ahead of its writer",
                "Use 0 or more, or None for no bound.",
            )

    def __str__(self) -> str:
        return "latest" if self.max_lag is None else f"latest, lag <= {self.max_lag}"


@dataclass(frozen=True, slots=True)
class Queue:
    """A queue of the values that writers make in a tick: of all replicas, or the first n to arrive.

    A full queue blocks its writer (back-pressure); nothing is dropped.
    """

    capacity: int = 2
    take: int | Literal["all"] = "all"

    def __post_init__(self) -> None:
        if self.capacity < 1 or (self.take != "all" and self.take < 1):
            raise SettingError(
                f"a queue of capacity {self.capacity} that gives {self.take}",
                'Let it hold at least one, and give "all" or at least one.',
            )

    def __str__(self) -> str:
        given = "all" if self.take == "all" else f"the first {self.take}"
        return f"queue of {self.capacity}, takes {given}"


@dataclass(frozen=True, slots=True)
class Serve:
    """Inside a loop: the reader serves its writers' rows in the order of arrival, in batches.

    `max_batch` is the largest number of groups in a batch (None: all that have arrived), `max_wait`
    the seconds that the first may wait for others.
    """

    max_batch: int | None = None
    max_wait: float = 0.0

    def __post_init__(self) -> None:
        if self.max_wait < 0 or (self.max_batch is not None and self.max_batch < 1):
            raise SettingError(
                f"serving at most {self.max_batch} groups after {self.max_wait} s",
                "Serve at least one group, and wait no less than 0 seconds.",
            )

    def __str__(self) -> str:
        most = "" if self.max_batch is None else f" up to {self.max_batch}"
        return f"serve{most}" + (f", wait {1000 * self.max_wait:g} ms" if self.max_wait else "")


Flow = Lockstep | Latest | Queue | Serve


def lag_of(flow: Flow) -> int:
    """The fixed delay of a flow."""
    return flow.lag if isinstance(flow, Lockstep) else 0


def is_late(flow: Flow) -> bool:
    """Whether a reader may see an older value than its writer's newest."""
    return lag_of(flow) > 0 or (isinstance(flow, Latest) and flow.max_lag != 0)


def takes_some(flow: Flow) -> bool:
    """Whether a reader continues with the values of the first replicas to arrive."""
    return isinstance(flow, Queue) and flow.take != "all"


@dataclass(frozen=True, slots=True)
class Wire:
    """How values flow from `writer` to `reader`.

    `Lockstep` and `Latest` apply to what the writer carries from tick to tick, `Queue` to what it
    makes in a tick, `Serve` to what it makes inside a loop. A pair may have one of each.
    """

    writer: str
    reader: str
    flow: Flow


@dataclass(frozen=True, slots=True)
class DistributionPolicy:
    """How a graph is cut, replicated and placed; `wires` not named are in lockstep, lag 0.

    `devices` is the number of devices that a machine must have for it, if it needs several.
    """

    name: str
    fragments: tuple[Fragment, ...]
    wires: tuple[Wire, ...] = ()
    devices: int = 1

    def __post_init__(self) -> None:
        names = [fragment.name for fragment in self.fragments]
        if len(set(names)) != len(names):
            raise SettingError(
                f"{self.name}: two fragments have one name", "Give each a name of its own."
            )
        for wire in self.wires:
            if missing := {wire.writer, wire.reader} - set(names):
                raise SettingError(
                    f"{self.name}: a wire names fragment `{missing.pop()}`, which isn't there",
                    f"Its fragments are: {', '.join(names)}.",
                )

        for fragment in self.fragments:
            if fragment.beside and fragment.beside not in set(names) - {fragment.name}:
                raise SettingError(
                    f"{self.name}: `{fragment.name}` is to run beside `{fragment.beside}`, "
                    "which isn't there",
                    f"Its fragments are: {', '.join(names)}.",
                )

    def flow(self, writer: str, reader: str, kinds: tuple[type[Flow], ...]) -> Flow:
        """How values reach `reader` from `writer`, among flows of these kinds."""
        found = [w.flow for w in self.wires if (w.writer, w.reader) == (writer, reader)]
        return next((f for f in reversed(found) if isinstance(f, kinds)), Lockstep())

    def clients(self, name: str) -> tuple[str, Serve] | None:
        """The fragment that fragment `name` serves, and how, if it serves one."""
        found = [w for w in self.wires if w.reader == name and isinstance(w.flow, Serve)]
        return (found[-1].writer, found[-1].flow) if found else None  # type: ignore[return-value]

    def ends(self, name: str) -> int:
        """How many shares a fragment's environments are divided into, one for each endpoint."""
        clients = self.clients(name)
        fragment = self.fragment(name)
        return self.ends(clients[0]) if clients else fragment.most * fragment.ring

    @property
    def elastic(self) -> tuple[Fragment, ...]:
        """Fragments whose number of replicas may change during a run."""
        return tuple(fragment for fragment in self.fragments if fragment.is_elastic)

    def fragment(self, name: str) -> Fragment:
        """The fragment of that name."""
        return next(f for f in self.fragments if f.name == name)

    @property
    def observers(self) -> frozenset[str]:
        """Fragments that read the newest values of others and nothing else."""
        latest = {w.reader for w in self.wires if w.flow == Latest(None)}
        return frozenset(latest - {w.reader for w in self.wires if w.flow != Latest(None)})

    @property
    def alone(self) -> DistributionPolicy:
        """The same cut and flows with one replica of each fragment."""
        return replace(
            self, fragments=tuple(replace(f, replicas=1, ring=1) for f in self.fragments)
        )
