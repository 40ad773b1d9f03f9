"""What all ends of a compiled fragment share: segments, devices, and batches to serve."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shoal.graph.ir import Stage
from shoal.graph.layout import Sharded
from shoal.planning.channel_specs import make_cell
from shoal.planning.plan import Plan
from shoal.planning.segments import HostCall, Program, Segment, walk
from shoal.runtime.channels.channel import Message
from shoal.runtime.channels.flow_control import Turn
from shoal.runtime.execution.lowering import Lowering, lowering_of
from shoal.runtime.execution.replica_runner import Runs
from shoal.tracing.hosting import Task
from shoal.tracing.interpret import host_task

ALIGNED = 64  # bytes
SHARED = 8  # messages to a server's ends that are remembered


class CompiledExecutor:
    """A fragment whose segments run as XLA programs on its ends' devices."""

    def __init__(self, plan: Plan, program: Program) -> None:
        self.plan, self.program = plan, program
        self.lowering = lowering_of(plan, program.fragment)
        self.is_served = plan.distribution.clients(program.fragment) is not None
        self.is_free = program.fragment in plan.free
        self.is_copied = plan.is_copied
        self.rows = plan.graph.envs // plan.ends(program.fragment)
        self.tasks = make_tasks(self.lowering, program)
        segments = [op for op in walk(program.operations) if isinstance(op, Segment)]
        self._compiled = {id(s): self._compile(s) for s in segments}
        self._axes = {
            id(s): ([self._axis(n) for n in s.reads], [self._axis(n) for n in s.writes])
            for s in segments
        }
        self._batches: dict[tuple[int, int], Callable[..., Any]] = {}
        self._shared: dict[Any, Message] = {}
        self._most = len(plan.ends_of(program.fragment, 0))
        self._warm: set[tuple[int, int]] = set()
        self._warming: set[tuple[int, int]] = set()

    @property
    def is_raw(self) -> bool:
        """Whether ends hold keys as their data: where rows are put together by hand."""
        return self.is_served or self.lowering.is_apart

    def _compile(self, segment: Segment) -> Callable[..., Any]:
        if self.lowering.is_apart:
            return self._over_processes(segment)
        return self.lowering.compile(segment)

    def _over_processes(self, segment: Segment) -> Callable[..., Any]:
        """A segment that all replicas run together, each on its own rows in its own process."""
        lowering = self.lowering
        ins, outs = lowering.lays(segment.reads), lowering.lays(segment.writes)
        work = self._with_raw_keys(segment, lowering.work(segment))
        together = lowering.jit(lowering.spread(work, ins, outs), ())

        def run(end: int, *args: Any) -> list[Any]:
            whole = [lowering.whole(x, lay) for x, lay in zip(args, ins, strict=True)]
            return [lowering.part(x, lay) for x, lay in zip(together(*whole), outs, strict=True)]

        return run

    def _with_raw_keys(self, segment: Segment, work: Callable[..., Any]) -> Callable[..., Any]:
        """`work` of arguments and results with keys as their data."""
        reads, writes = map(self._are_keys, (segment.reads, segment.writes))

        def raw_work(*args: Any) -> tuple[Any, ...]:
            given = [wrapped(x) if k else x for x, k in zip(args, reads, strict=True)]
            made = zip(work(*given), writes, strict=True)
            return tuple(jax.random.key_data(x) if k else x for x, k in made)

        return raw_work

    def run(self, segment: Segment, end: int, args: list[Any]) -> Sequence[Any]:
        """What a segment makes of what one end has read."""
        return self._compiled[id(segment)](end, *args)

    def has(self, segment: Segment) -> bool:
        """Whether a segment is of this fragment."""
        return id(segment) in self._compiled

    def share(self, name: str, x: Any, end: int) -> Any:
        """An end's own rows of a carried value, copied to where the end runs."""
        axis = self.plan.graph.values[name].axis
        ends = self.plan.ends(self.program.fragment)
        if axis is not None and ends > 1:
            rows = x.shape[axis] // ends
            x = x[(slice(None),) * axis + (slice(end * rows, (end + 1) * rows),)]
        if self.is_raw:
            return raw(x)
        x = wrapped(x) if isinstance(x, np.ndarray) and self._are_keys([name])[0] else x
        return jax.device_put(jnp.copy(x), self.lowering.sharding(name, end))

    def is_alone(self, name: str) -> bool:
        """Whether a carried value is one end's alone, as it lies: on this end's own device."""
        plan = self.plan
        after = dict(plan.graph.carry).get(name, name)
        holders = plan.sites.holders(after, plan.homes)
        alone = holders == {self.program.fragment} and plan.ends(self.program.fragment) == 1
        on_device = self.lowering.mesh is None and self.lowering.local == jax.devices()[0]
        return alone and after != name and on_device and not self.is_raw

    def receive(self, channel: str, message: Message, turns: list[Turn]) -> Message:
        """A message where segments want it: on the device, or for a server's rows in memory.

        What a server's ends share comes to each of them, but is brought to the device once.
        """
        if not self.is_served:
            return {name: self._brought(name, x) for name, x in message.items()}
        rows = {n: np.array(x) for n, x in message.items() if self._axis(n) is not None}
        key = (channel, tuple(turns))
        if len(rows) == len(message):
            return rows
        if key not in self._shared:
            shared = {n: x for n, x in message.items() if n not in rows}
            self._shared[key] = {n: self._brought(n, x) for n, x in shared.items()}
            while len(self._shared) > SHARED:
                del self._shared[next(iter(self._shared))]
        return rows | self._shared[key]

    def _brought(self, name: str, x: Any) -> Any:
        if not isinstance(x, np.ndarray):
            return x
        copy = jax.device_put(aligned_copy(x), self.lowering.local)
        return wrapped(copy) if self._are_keys([name])[0] and not self.is_raw else copy

    def copy(self, x: Any) -> Any:
        """A copy that nothing else changes."""
        return jnp.copy(x) if isinstance(x, jax.Array) else np.array(x)

    def room(self, name: str) -> np.ndarray:
        """An array to be filled, turn by turn."""
        cell = make_cell(self.lowering.in_one(name))
        return np.empty(cell.shape, cell.dtype)

    def run_many(self, asked: list[Runs]) -> list[list[Any]]:
        """Segments of several ends as one program: rows one after another, padded to a power of 2.

        Ends of a server keep their rows in host memory, keys as data. Those that share other
        parameters than the first run apart.
        """
        segment = asked[0].segment
        ins, outs = self._axes[id(segment)]
        shared = [i for i, axis in enumerate(ins) if axis is None]
        kinds: dict[tuple[int, ...], list[int]] = {}
        for number, a in enumerate(asked):
            kinds.setdefault(tuple(id(a.args[i]) for i in shared), []).append(number)
        found: list[list[Any]] = [[] for _ in asked]
        for numbers in kinds.values():
            args = [[asked[n].args[i] for n in numbers] for i in range(len(ins))]
            size = self._ready_size(segment, args)
            columns = [self._column(xs, axis, size) for xs, axis in zip(args, ins, strict=True)]
            results = self._batch(segment, size)(*columns)
            for x, axis in zip(map(np.asarray, results), outs, strict=True):
                for place, n in enumerate(numbers):
                    found[n].append(self._row(x, axis, place))
        return found

    def _ready_size(self, segment: Segment, args: list[list[Any]]) -> int:
        """The smallest power of 2 that holds so many ends and is compiled, or else the largest.

        The largest is compiled at once, others when first wanted, while the largest serves.
        """
        wanted = 1 << (len(args[0]) - 1).bit_length()
        largest = 1 << (self._most - 1).bit_length()
        if wanted >= largest or (id(segment), wanted) in self._warm:
            return wanted
        if (id(segment), wanted) not in self._warming:
            self._warming.add((id(segment), wanted))
            ins, _ = self._axes[id(segment)]
            columns = [self._column(x, axis, wanted) for x, axis in zip(args, ins, strict=True)]
            work = (segment, wanted, columns)
            # Python must not leave while XLA compiles.
            threading.Thread(target=self._warm_up, args=work, daemon=False).start()
        return largest

    def _warm_up(self, segment: Segment, size: int, columns: list[Any]) -> None:
        jax.block_until_ready(self._batch(segment, size)(*columns))
        self._warm.add((id(segment), size))

    def _column(self, xs: list[Any], axis: int | None, size: int) -> Any:
        """What several ends give for one argument, padded to `size` of them."""
        if axis is None or size == 1:
            return xs[0]
        return np.concatenate(xs + [xs[0]] * (size - len(xs)), axis)

    def _row(self, x: np.ndarray, axis: int | None, place: int) -> np.ndarray:
        """What one of several ends gets of a result."""
        if axis is None:
            return x
        span = slice(place * self.rows, (place + 1) * self.rows)
        return x[(slice(None),) * axis + (span,)]

    def _axis(self, name: str) -> int | None:
        if name not in self.plan.graph.values:  # the turn of a loop
            return None
        layout = self.lowering.layout(name)
        return layout.axis if isinstance(layout, Sharded) else None

    def _batch(self, segment: Segment, size: int) -> Callable[..., Any]:
        """A segment for `size` ends at once, of arguments with keys as data."""
        key = (id(segment), size)
        if key not in self._batches:
            lowering = Lowering(self.plan, self.program.fragment, size * self.rows)
            work = self._with_raw_keys(segment, lowering.work(segment))
            self._batches[key] = lowering.jit(work, ())
        return self._batches[key]

    def _are_keys(self, names: Sequence[str]) -> list[bool]:
        values = self.plan.graph.values
        return [n in values and values[n].dtype.startswith("key<") for n in names]


def aligned_copy(x: np.ndarray) -> np.ndarray:
    """A copy that XLA can use as it is, without one of its own."""
    room = np.empty(x.nbytes + ALIGNED, np.uint8)
    first = -room.ctypes.data % ALIGNED
    copy = room[first : first + x.nbytes].view(x.dtype).reshape(x.shape)
    np.copyto(copy, x)
    return copy


def wrapped(x: Any) -> Any:
    """Keys from their data."""
    return jax.random.wrap_key_data(x)


def raw(x: Any) -> np.ndarray:
    """An array in host memory; keys as their data."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.array(x)


def make_tasks(lowering: Lowering, program: Program) -> dict[str, Task]:
    """The host stages of a program, as calls with as many environments as an end holds."""
    alone = lowering.one_program and not lowering.is_apart
    rows = lowering.graph.envs if alone else lowering.share_rows
    found = {}
    for name in (op.node for op in walk(program.operations) if isinstance(op, HostCall)):
        node = lowering.nodes[name]
        assert isinstance(node, Stage)
        found[name] = host_task(node, rows)
    return found
