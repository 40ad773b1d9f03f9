"""What a distribution policy is made of: fragments of stages, and how values flow between them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shoal.errors import SettingError

PER_ENV = "per:env"
PER_BATCH = "per:batch"
THE_REST = "*"


@dataclass(frozen=True, slots=True)
class Fragment:
    """Stages that run in one place, how many replicas there are, and on what kind of device.

    `stages` holds names (`act`, `learn/grad`), patterns (`*/grad`), `PER_ENV` or `PER_BATCH` for
    every stage of that kind, or `THE_REST`. A name wins over a pattern, a pattern over a kind.
    `on` is `cpu`, `gpu`, or `gpu else cpu`.
    """

    name: str
    stages: tuple[str, ...]
    replicas: int = 1
    on: str = "cpu"

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise SettingError(
                f"fragment `{self.name}` has {self.replicas} replicas",
                "Give it at least one replica.",
            )
        if self.on not in ("cpu", "gpu", "gpu else cpu"):
            raise SettingError(
                f"fragment `{self.name}` is to run on `{self.on}`",
                "Say `cpu`, `gpu` or `gpu else cpu`.",
            )


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


Flow = Lockstep


@dataclass(frozen=True, slots=True)
class Wire:
    """The flow of what `writer` carries over from tick to tick and `reader` reads."""

    writer: str
    reader: str
    flow: Flow


@dataclass(frozen=True, slots=True)
class DistributionPolicy:
    """How a graph is cut, replicated and placed; `wires` not named are in lockstep, lag 0."""

    name: str
    fragments: tuple[Fragment, ...]
    wires: tuple[Wire, ...] = ()

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

    def flow(self, writer: str, reader: str) -> Flow:
        """How values that `writer` carries reach `reader`."""
        found = [w.flow for w in self.wires if (w.writer, w.reader) == (writer, reader)]
        return found[-1] if found else Lockstep()

    def fragment(self, name: str) -> Fragment:
        """The fragment of that name."""
        return next(f for f in self.fragments if f.name == name)

    @property
    def alone(self) -> DistributionPolicy:
        """The same cut and flows with one replica of everything."""
        return replace(self, fragments=tuple(replace(f, replicas=1) for f in self.fragments))
