"""A fragment's tick as a short program: compiled segments, and the operations between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from shoal.graph.ir import Loop
from shoal.planning.plan import Plan
from shoal.planning.program import (
    Call,
    Do,
    Instruction,
    Put,
    Repeat,
    Take,
    communicates,
    instructions,
)
from shoal.planning.segments import (
    Alias,
    Buffer,
    HostLoop,
    NumpyWork,
    Operation,
    Program,
    Segment,
    Slice,
    Stack,
    Work,
    walk,
)


def write_program(plan: Plan, fragment: str) -> Program:
    """The program of `fragment`, its instructions gathered into segments as large as can be."""
    if saved := plan.saved.get((fragment, plan.apart)):
        return saved.spec.program
    sites, graph = plan.sites, plan.graph
    mine = [
        (before, after) for before, after in graph.carry
        if before != after and fragment in sites.holders(after, plan.homes)
    ]  # fmt: skip
    shown = [(m.outer, m.inner) for m in graph.metrics if _shows(plan, m.inner) == fragment]
    wanted = {after for _, after in mine} | {inner for _, inner in shown}
    draft = list(_Draft(plan, fragment).operations(plan.programs[fragment]))
    operations = _trim(draft, wanted)
    made = {w for op in walk(operations) for w in op.writes}
    constant = {b for b, a in graph.carry if b == a}
    reads = {r for op in walk(operations) for r in op.reads} - made
    return Program(
        fragment,
        _donate(operations, plan, [b for b, _ in mine]),
        tuple(mine),
        tuple(sorted(constant & reads)),
        tuple(shown),
    )


def _shows(plan: Plan, value: str) -> str:
    holders = plan.sites.holders(value, plan.homes)
    return min(holders) if "*" not in holders else plan.distribution.fragments[0].name


@dataclass(frozen=True)
class _Draft:
    """Turns instructions into operations; slices and stacks appear where they are first due."""

    plan: Plan
    fragment: str

    @cached_property
    def loops(self) -> dict[str, Loop]:
        """The opened loops by name."""
        return {loop.name: loop for loop, _ in self.plan.sites.loops}

    def operations(
        self, program: Iterable[Instruction], loop: Loop | None = None
    ) -> Iterator[Operation]:
        """The operations of one scope."""
        pending: list[Work] = []
        sliced: set[str] = set()
        for item in program:
            pending += self._due(item, loop, sliced)
            match item:
                case Take() | Put() | Call():
                    yield from self._gathered(pending, loop)
                    yield item
                case Repeat() if communicates(item.body):
                    turned = self.loops[item.loop]
                    buffers = [Buffer(s.outer) for s in turned.stacks if self._makes(s.inner)]
                    in_numpy = [b for b in buffers if self._is_in_numpy(b, turned)]
                    pending += [b for b in buffers if b not in in_numpy]
                    yield from self._gathered(pending, loop)
                    yield from _numpy(in_numpy, self)
                    yield self._host_loop(item, turned)
                case _:
                    pending.append(item)  # type: ignore[arg-type]
            if loop is not None:
                pending += self._stacks(item, loop)
        yield from self._gathered(pending, loop)

    def _gathered(self, pending: list[Work], loop: Loop | None) -> Iterator[Operation]:
        """Pending work as segments, with what NumPy does apart: slices first, stacks last."""
        work = [self._renamed(w, pending, loop) for w in pending]
        in_numpy = [w for w in work if loop is not None and self._is_in_numpy(w, loop)]
        slices = [w for w in in_numpy if isinstance(w, Slice)]
        compiled = [w for w in work if w not in in_numpy]
        pending.clear()
        yield from _numpy(slices, self)
        yield from _segment(compiled, self)
        yield from _numpy([w for w in in_numpy if w not in slices], self)

    def _renamed(self, work: Work, pending: list[Work], loop: Loop | None) -> Work:
        """A copy that only stacks read is just another name, where NumPy does them."""
        node = self.plan.sites.nodes[work.node] if isinstance(work, Do) else None
        if loop is None or loop.name not in self.in_numpy or getattr(node, "op", "") != "copy":
            return work
        assert node is not None
        readers = [w for w in pending if node.writes[0] in self.reads(w)]
        if not node.reads or not all(isinstance(w, Stack) for w in readers):
            return work
        return Alias(node.reads[0], node.writes[0])

    def _is_in_numpy(self, work: Work, loop: Loop) -> bool:
        """Whether NumPy does a slice or stack: Python's own loops, of anything but keys."""
        match work:
            case Slice(value) | Buffer(value) | Stack(_, value):
                is_key = self.plan.graph.values[value].dtype.startswith("key<")
                return loop.name in self.in_numpy and not is_key
            case Alias():
                return True
            case _:
                return False

    @cached_property
    def in_numpy(self) -> frozenset[str]:
        """Loops that call out of XLA in every turn, or whose turns are served in any order."""
        served = self.plan.distribution.clients(self.fragment) is not None
        turned = [
            i for i in instructions(self.plan.programs[self.fragment]) if isinstance(i, Repeat)
        ]
        return frozenset(
            i.loop for i in turned
            if communicates(i.body) and (served or any(isinstance(x, Call) for x in i.body))
        )  # fmt: skip

    def _host_loop(self, item: Repeat, loop: Loop) -> HostLoop:
        owned = tuple(c for c in loop.carries if not c.unchanged and self._makes(c.after))
        same = tuple(
            (c.first, name) for c in loop.carries if c.unchanged for name in (c.before, c.final)
        )
        turns = range(loop.length)
        order = turns[::-1] if loop.reverse else turns
        body = tuple(self.operations(item.body, loop))
        return HostLoop(order, f"{loop.name}:turn", same, owned, body)

    def _due(self, item: Instruction, loop: Loop | None, sliced: set[str]) -> list[Slice]:
        if loop is None or isinstance(item, Take | Put):
            return []
        reads = set(self.reads(item))
        due = [s for s in loop.slices if s.inner in reads and s.inner not in sliced]
        sliced.update(s.inner for s in due)
        return [Slice(s.outer, s.inner, f"{loop.name}:turn") for s in due]

    def _stacks(self, item: Instruction, loop: Loop) -> list[Stack]:
        made = self.writes(item)
        return [
            Stack(s.inner, s.outer, f"{loop.name}:turn") for s in loop.stacks if s.inner in made
        ]

    def _makes(self, value: str) -> bool:
        return self.fragment in self.plan.sites.holders(value, self.plan.homes)

    def reads(self, item: Instruction | Work) -> tuple[str, ...]:
        """What a piece of work reads from outside itself."""
        match item:
            case Do(node) | Call(node):
                return self.plan.sites.nodes[node].reads
            case Repeat(name, body):
                loop = self.loops[name]
                read = {r for i in body for r in self.reads(i)}
                inside = read - {w for i in body for w in self.writes(i)} - set(loop.body.inputs)
                first = [c.first for c in loop.carries if c.unchanged or self._makes(c.after)]
                outer = [s.outer for s in loop.slices if s.inner in read]
                return tuple(dict.fromkeys([*first, *outer, *sorted(inside)]))
            case Slice(outer, _, index):
                return (outer, index)
            case Stack(inner, outer, index):
                return (inner, outer, index)
            case Alias(value):
                return (value,)
            case _:
                return ()

    def writes(self, item: Instruction | Work) -> tuple[str, ...]:
        """What a piece of work makes."""
        match item:
            case Do(node) | Call(node):
                return self.plan.sites.nodes[node].writes
            case Repeat(name, body):
                loop = self.loops[name]
                inside = {w for i in body for w in self.writes(i)}
                final = [c.final for c in loop.carries if c.unchanged or self._makes(c.after)]
                return (*final, *(s.outer for s in loop.stacks if s.inner in inside))
            case Slice(_, inner):
                return (inner,)
            case Buffer(outer) | Stack(_, outer):
                return (outer,)
            case Alias(_, name):
                return (name,)
            case _:
                return ()


def _segment(pending: list[Work], draft: _Draft) -> Iterator[Segment]:
    """A segment of the pending work, if there is any."""
    if not pending:
        return
    made: set[str] = set()
    reads: dict[str, None] = {}
    for work in pending:
        reads |= dict.fromkeys(r for r in draft.reads(work) if r not in made)
        made.update(draft.writes(work))
    yield Segment(tuple(pending), tuple(reads), tuple(sorted(made)))


def _numpy(work: list[Any], draft: _Draft) -> Iterator[NumpyWork]:
    """Work that NumPy does, if there is any."""
    reads = {r for w in work for r in draft.reads(w)}
    if work:
        yield NumpyWork(
            tuple(work), tuple(sorted(reads)), tuple(w for x in work for w in draft.writes(x))
        )


def _trim(operations: list[Operation], wanted: set[str]) -> tuple[Operation, ...]:
    """Segments without the results that nothing else reads."""
    every = list(walk(operations))

    def trimmed(segment: Segment) -> Segment:
        needed = wanted.union(*(o.reads for o in every if o is not segment))
        return replace(segment, writes=tuple(w for w in segment.writes if w in needed))

    return tuple(_map(operations, trimmed))


def _map(
    operations: Iterable[Operation], change: Callable[[Segment], Segment]
) -> Iterator[Operation]:
    for operation in operations:
        match operation:
            case Segment():
                yield change(operation)
            case HostLoop():
                yield replace(operation, body=tuple(_map(operation.body, change)))
            case _:
                yield operation


def _donate(
    operations: tuple[Operation, ...], plan: Plan, carried: list[str]
) -> tuple[Operation, ...]:
    """Segments that donate the buffers that nothing needs after them.

    What travels on a channel is shared with its readers, so it stays. Inside host loops only the
    buffers of stacks are donated: they are made for one loop and passed from turn to turn.
    """
    shared = {v for c in plan.channels for v in c.values}
    shared |= {before for before, after in plan.graph.carry if after in shared}
    every = list(walk(operations))
    buffers = {
        w.outer
        for s in every
        if isinstance(s, Segment)
        for w in s.work
        if isinstance(w, Buffer | Stack)
    }
    top = [o for o in operations if isinstance(o, Segment)]
    kept = set().union(*(o.reads for o in every if o not in top))
    last = {v: s for s in top for v in s.reads}
    passed = {after for _, after in plan.graph.carry} | {m.inner for m in plan.graph.metrics}

    # Keys are a dtype of their own, and XLA can't reuse their memory.
    keys = {v for v in carried if plan.graph.values[v].dtype.startswith("key<")}

    def change(segment: Segment) -> Segment:
        over = {
            r
            for r in segment.reads
            if r in buffers and any(isinstance(w, Stack) and w.outer == r for w in segment.work)
        }
        if segment in top:
            over |= {
                v
                for v in carried
                if last.get(v) is segment and v not in kept | shared | passed | keys
            }
        return _in_step(segment, frozenset(over), dict(plan.graph.carry))

    return tuple(_map(operations, change))


def _in_step(segment: Segment, over: frozenset[str], carry: dict[str, str]) -> Segment:
    """The segment with what it writes over first, and what takes its place in the same order.

    JAX gives a result the memory of the first argument of its shape that is left. Were that
    another's, XLA would copy both.
    """
    pairs = {r: carry.get(r, r) for r in segment.reads if r in over}
    pairs = {before: after for before, after in pairs.items() if after in segment.writes}
    reads = dict.fromkeys([*pairs, *segment.reads])
    writes = dict.fromkeys([*pairs.values(), *segment.writes])
    return Segment(segment.work, tuple(reads), tuple(writes), over)
