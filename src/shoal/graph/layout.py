"""How a value lies over the replicas of a fragment, each of which holds some of the environments.

The program of every replica is derived from the one trace of the whole loop, so a value is always
the whole value of that trace; a layout says what of it a replica has. `Replicated`: all of it.
`Sharded`: its own rows. `Partial`: a summand (or candidate for a maximum or minimum), the whole
being the sum over replicas. `Varying`: something else, from which the whole can't be computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeGuard


@dataclass(frozen=True, slots=True)
class Cause:
    """The operation that made replicas differ: its name, its line, and its node."""

    op: str = ""
    source: str = ""
    node: str = ""


NO_CAUSE = Cause()


@dataclass(frozen=True, slots=True)
class Replicated:
    """The same on every replica. Along the axes in `uniform` all rows are equal too."""

    uniform: frozenset[int] = field(default=frozenset(), compare=False)


@dataclass(frozen=True, slots=True)
class Sharded:
    """A replica's own rows: `axis` is `before` x environments x `after` long.

    `group`: an entry is of so many neighbouring environments, rather than of one.
    `own`: what a replica computed from its share alone went into its rows, so that they are
    only an approximation of the loop's.
    """

    axis: int
    before: int = 1
    after: int = 1
    group: int = 1
    own: bool = False
    cause: Cause = field(default=NO_CAUSE, compare=False)

    def __post_init__(self) -> None:
        # Batched by vmap, operations have axes that are NumPy's integers.
        object.__setattr__(self, "axis", int(self.axis))

    @property
    def is_plain(self) -> bool:
        """Whether the axis is that of the environments alone."""
        return self.before == self.after == self.group == 1

    def at(self, axis: int) -> Sharded:
        """The same rows along another axis."""
        return replace(self, axis=axis)

    def size(self, rows: int) -> int:
        """The length of the axis for a number of environments."""
        return self.before * self.block(rows)

    def block(self, rows: int) -> int:
        """The length of one of the `before` parts of the axis."""
        return rows // self.group * self.after


@dataclass(frozen=True, slots=True)
class Partial:
    """A replica's contribution: the whole is the sum (`max`, `min`) over all replicas."""

    how: str = "sum"
    own: bool = False
    cause: Cause = field(default=NO_CAUSE, compare=False)


@dataclass(frozen=True, slots=True)
class Varying:
    """A value that differs between replicas, without a relation to the whole.

    `runs`: it is what the loop computes, had all replicas the rows that this one has; it may be
    averaged as an approximation. Otherwise it can't even be computed on a share.
    """

    runs: bool = False
    cause: Cause = field(default=NO_CAUSE, compare=False)


# What to do where an operation mixes rows, or is not known to keep them apart.
APART = (
    "If it treats every environment alike, do it for one row, under jax.vmap or in a stage with "
    'per="env" (jax.vmap(lambda row, i: row[i])(x, i) instead of x[jnp.arange(n), i]). If it needs '
    "all of them, take all rows first with shoal.gather(x)"
)
Layout = Replicated | Sharded | Partial | Varying
REPLICATED = Replicated()
ESTIMATE = Varying(runs=True)


@dataclass(frozen=True, slots=True)
class Fault:
    """Why replicas can't run a node: the problem, the fix, and the line of the loop."""

    what: str
    fix: str
    source: str = ""
    cause: Cause = NO_CAUSE  # the operation that made replicas differ before, if any


@dataclass(slots=True)
class Findings:
    """What a walk over a node finds beside layouts.

    `faults` forbid the cut; `numbered` are the lines that need to know which environments a
    replica holds; `approximate` are the lines at which replicas agree approximately; `grouped`
    are sizes of groups of neighbouring environments that a replica must hold whole, and lines.
    """

    faults: list[Fault] = field(default_factory=list)
    numbered: list[str] = field(default_factory=list)
    approximate: list[str] = field(default_factory=list)
    grouped: list[tuple[int, str]] = field(default_factory=list)

    def add(self, other: Findings) -> None:
        """Add the findings of another walk."""
        for mine, more in zip(
            (self.faults, self.numbered, self.approximate, self.grouped),
            (other.faults, other.numbered, other.approximate, other.grouped),
            strict=True,
        ):
            mine += [x for x in more if x not in mine]  # type: ignore[operator]


def is_exact(layout: Layout) -> bool:
    """Whether the replicas' parts together are exactly the loop's value."""
    return not isinstance(layout, Varying) and not getattr(layout, "own", False)


def cause_of(layout: Layout) -> Cause:
    """The operation that made a value differ between replicas."""
    return getattr(layout, "cause", NO_CAUSE)


def _differs(layout: Layout) -> TypeGuard[Sharded | Partial | Varying]:
    """Whether replicas hold something other than an exact part of the loop's value."""
    return isinstance(layout, Partial) or not is_exact(layout)


def lacks_cause(layout: Layout) -> TypeGuard[Sharded | Partial | Varying]:
    """Whether replicas differ in a value, and the cause isn't known yet."""
    return _differs(layout) and layout.cause == NO_CAUSE


def with_cause(layout: Layout, cause: Cause) -> Layout:
    """`layout` with a cause, unless it has one."""
    return replace(layout, cause=cause) if lacks_cause(layout) else layout


def in_node(layout: Layout, node: str, source: str) -> Layout:
    """`layout` with the node that contains its cause, unless it is known."""
    if not _differs(layout) or layout.cause.node:
        return layout
    cause = layout.cause
    return replace(layout, cause=Cause(cause.op, cause.source or source, node))


def join(a: Layout, b: Layout) -> Layout:
    """The least layout that both can be converted to: for a value with two possible sources."""
    match a, b:
        case Replicated(), Replicated():
            return Replicated(a.uniform & b.uniform)
        case (Replicated(), other) | (other, Replicated()):
            return other
        case (Sharded(), Sharded()) | (Partial(), Partial()) if _inexact(a) == _inexact(b):
            return _inexact(a) if a != b else a
    runs = all(isinstance(x, Partial) or (isinstance(x, Varying) and x.runs) for x in (a, b))
    return Varying(runs=runs, cause=cause_of(a) if cause_of(a) != NO_CAUSE else cause_of(b))


def _inexact(layout: Layout) -> Layout:
    return replace(layout, own=True) if isinstance(layout, Sharded | Partial) else layout


def inside(layout: Layout) -> Layout:
    """The layout of one slice along the first axis; rows can't be sliced apart."""
    match layout:
        case Sharded(axis) if axis > 0:
            return layout.at(axis - 1)
        case Sharded():
            return Varying(cause=layout.cause)
        case Replicated(uniform):
            return Replicated(frozenset(i - 1 for i in uniform if i > 0))
        case _:
            return layout


def outside(layout: Layout) -> Layout:
    """The layout of slices stacked along a new first axis."""
    match layout:
        case Sharded(axis):
            return layout.at(axis + 1)
        case Replicated(uniform):
            return Replicated(frozenset(i + 1 for i in uniform))
        case _:
            return layout
