"""Lowers segments to XLA: one jitted function each, for one replica or for all as one program."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.random import key_data, wrap_key_data
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import shoal.runtime.execution.threefry  # noqa: F401  registers a faster lowering
from shoal.errors import CutError, ShoalError, first_line
from shoal.graph.ir import Graph, Loop, Node, Value
from shoal.graph.layout import Layout, Partial, Replicated, Sharded, inside
from shoal.graph.words import name_text
from shoal.kernels import Part, with_kernels
from shoal.planning.plan import Plan
from shoal.planning.program import Do, Instruction, Repeat
from shoal.planning.segments import Buffer, Program, Segment, Slice, Stack, Work
from shoal.planning.spread import canonical
from shoal.tracing.flow import LOST
from shoal.tracing.interpret import run_code
from shoal.tracing.jaxprs import Fixed
from shoal.tracing.local import NOTHING, Held, Local, Share

# Threads inside one small matrix product cost more than they gain; independent operations still
# run in parallel (benchmarks/README.md).
CPU_OPTIONS = {"xla_cpu_multi_thread_eigen": False}
LANES, DEVICES = "lanes", "devices"
MOST_TICKS = 64  # in one call of a plan of one program
PART: Literal["part"] = "part"
Env = dict[str, Any]
# The layout of an array over replicas: replicated, sharded along an axis, or one per replica.
ArrayAxis = int | None | Literal["part"]
First = Any  # the index of a replica's first environment; None where no segment may use it


@dataclass(frozen=True)
class Lowering:
    """Lowers one fragment's segments to XLA programs."""

    plan: Plan
    fragment: str
    rows: int = 0  # environments per endpoint, if not the plan's number

    @cached_property
    def replicas(self) -> int:
        """The number of shares that the fragment's environments are divided into."""
        return max(1, self.plan.shares(self.fragment))

    @cached_property
    def one_program(self) -> bool:
        """Whether all replicas run as one program."""
        return self.plan.one_program(self.fragment)

    @cached_property
    def graph(self) -> Graph:
        """The whole loop, from which the program of every replica is derived."""
        return self.plan.world.graph

    @cached_property
    def nodes(self) -> dict[str, Node]:
        """The nodes of the graph by name."""
        return self.plan.world.nodes

    @cached_property
    def loops(self) -> dict[str, Loop]:
        """The inner loops of the graph by name."""
        return {loop.name: loop for loop, _ in self.plan.world.loops}

    @cached_property
    def share_rows(self) -> int:
        """The number of environments per replica."""
        return self.rows or self.graph.envs // self.replicas

    @cached_property
    def arriving(self) -> dict[str, Layout]:
        """Values that arrive stacked, one per replica of their writer, and are reduced here."""
        return {
            v: self.plan.layout(c.writer, v)
            for c in self.plan.channels if c.reader == self.fragment
            for v in c.values if self.plan.is_stacked(c.writer, v)
        }  # fmt: skip

    @cached_property
    def stacked(self) -> frozenset[str]:
        """The names of the values that arrive stacked, one per replica of their writer."""
        return frozenset(self.arriving)

    @cached_property
    def devices(self) -> list[Any]:
        """The distinct JAX devices of the fragment's replicas."""
        places = dict.fromkeys(p.device for p in self.plan.places[self.fragment])
        return [jax.devices(d.kind)[d.index] for d in places]

    @cached_property
    def mesh(self) -> Any:
        """The mesh that one program spans, or None; abstract if replicas are separate processes."""
        if self.is_apart:
            return AbstractMesh((self.replicas,), (DEVICES,))
        if not self.one_program:  # its devices may be other hosts'
            return None
        count = math.gcd(len(self.devices), self.replicas)
        return Mesh(np.array(self.devices[:count]), (DEVICES,)) if count > 1 else None

    @cached_property
    def lanes(self) -> int:
        """The number of replicas that share a device, batched by `vmap`."""
        return self.replicas // (self.mesh.size if self.mesh else 1) if self.one_program else 1

    @cached_property
    def is_apart(self) -> bool:
        """Whether replicas that run as one program are separate processes."""
        return self.plan.apart and self.one_program

    def sharding(self, value: str, endpoint: int) -> Any:
        """The sharding of a value in this fragment."""
        if self.mesh is None:
            device = self.plan.place_of(self.fragment, endpoint).device
            return SingleDeviceSharding(jax.devices(device.kind)[device.index])
        return NamedSharding(self.mesh, spec(self.axis_of(value)))

    @cached_property
    def compiled(self) -> dict[Any, Any]:
        """The cache of compiled functions, shared by all runs of the same plan."""
        return {}

    def compile(self, segment: Segment) -> Compiled:
        """A segment as a jitted function of its arguments."""
        if segment not in self.compiled:
            self.compiled[segment] = Compiled(self, self.function(segment), donated(segment))
        return self.compiled[segment]

    def compile_batch(self, segment: Segment, size: int) -> Callable[..., Any]:
        """A segment as a jitted function of its arguments, for a batch of `size` endpoints."""
        if (segment, size) not in self.compiled:
            batch = self.batch(size)
            self.compiled[segment, size] = batch.jit(batch.work(segment), ())
        return self.compiled[segment, size]

    def batch(self, size: int) -> Lowering:
        """A lowering of this fragment for the rows of `size` endpoints of a server."""
        rows = self.plan.graph.envs // self.plan.ends(self.fragment)
        return Lowering(self.plan, self.fragment, size * rows)

    def function(self, segment: Segment) -> Callable[..., tuple[Any, ...]]:
        """A segment as a function of its first environment's index and its arguments."""
        ins, outs = self.axes_of(segment.reads), self.axes_of(segment.writes)

        def function(first: First, *args: Any) -> tuple[Any, ...]:
            return self.spread(self.work(segment, first), ins, outs)(*args)

        return function

    def work(self, segment: Segment, first: First = None) -> Callable[..., tuple[Any, ...]]:
        """A segment as a function of its arguments, for one replica; keys are key data."""
        keys = [self.is_key(name) for name in segment.reads]

        def work(*args: Any) -> tuple[Any, ...]:
            arrays = (wrap_key_data(x) if k else x for x, k in zip(args, keys, strict=True))
            env = dict(zip(segment.reads, arrays, strict=True))
            self.run(segment.work, env, first)
            return tuple(
                jnp.zeros(()) if env[n] is None else key_data(env[n]) if self.is_key(n) else env[n]
                for n in segment.writes
            )

        return work

    def is_key(self, name: str) -> bool:
        """Whether a value holds PRNG keys."""
        return name in self.graph.values and self.graph.values[name].dtype.startswith("key<")

    def jit(self, work: Callable[..., Any], donated: Iterable[int]) -> Callable[..., Any]:
        """Jit a function for the fragment's devices."""
        options = compiler_options(d.platform for d in self.devices)
        work = with_kernels(work, self.devices)
        return jax.jit(work, donate_argnums=tuple(donated), compiler_options=options)

    def spread(
        self, work: Callable[..., Any], ins: Sequence[ArrayAxis], outs: Sequence[ArrayAxis]
    ) -> Callable[..., Any]:
        """Turn the function of one replica into that of all replicas of one program."""
        if self.lanes > 1:
            work = _over_lanes(work, ins, outs, self.lanes)
        elif self.one_program:
            work = _alone(work, ins, outs)
        if self.mesh is not None:
            specs = tuple(map(spec, ins)), tuple(map(spec, outs))
            work = jax.shard_map(
                work, mesh=self.mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False
            )
        return work

    def layout(self, name: str) -> Layout:
        """The layout of a value over the replicas of this fragment."""
        found = self.plan.spread.layouts.get((self.fragment, name))
        if found is not None:
            return found
        outer = self.plan.sites.parts.get(name)
        if outer is not None and outer in self.graph.values:
            return self._of_slice(name, outer)
        return canonical(self.graph, name, self.replicas)

    def _of_slice(self, name: str, outer: str) -> Layout:
        sliced = any(link.inner == name for loop in self.loops.values() for link in loop.slices)
        return inside(self.layout(outer)) if sliced else self.layout(outer)

    def axis_of(self, name: str) -> ArrayAxis:
        """The layout of a value over replicas that run as one program."""
        if name not in self.graph.values:  # the index of a loop
            return None
        match self.layout(name):
            case Replicated():
                return None
            case Sharded(axis, 1, 1):
                return axis
            case _ if self.one_program and self.plan.sites.resolve(name) not in self.stacked:
                return PART
        return None

    def axes_of(self, names: Iterable[str]) -> list[ArrayAxis]:
        """The layouts of values, in order; see `axis_of`."""
        return [self.axis_of(name) for name in names]

    def share(self, first: First) -> Share:
        """One replica's share of the environments."""
        axes = tuple(
            name for name, on in ((DEVICES, self.mesh is not None), (LANES, self.lanes > 1)) if on
        )
        rows = self.share_rows
        if axes:
            return Share(self.graph.envs, rows, self.replicas, lambda: _number(axes) * rows, axes)
        return Share(self.graph.envs, rows, self.replicas, _known(first))

    def run(self, work: Iterable[Work | Instruction], env: Env, first: First = None) -> None:
        """Run work in order, and add its results to `env`."""
        local = Local(self.share(first))
        for item in work:
            match item:
                case Do(name):
                    self._do(self.nodes[name], env, local)
                case Repeat(name, body):
                    self._scan(self.loops[name], body, env, first)
                case Slice(outer, inner, index):
                    env[inner] = _slice(env[outer], env[index])
                case Buffer(outer):
                    lost = self.layout(outer) == LOST
                    env[outer] = None if lost else empty(self.on_share(outer))
                case Stack(inner, outer, index):
                    env[outer] = _stack(env[outer], env[inner], env[index])

    def _do(self, node: Node, env: Env, local: Local) -> None:
        """Run one node: as it was traced with one replica, else on this replica's share."""
        if stacked := set(node.reads) & self.stacked:
            # Values that aren't stacked are the same on all replicas already.
            for ref, out in zip(node.code.args, node.code.outs, strict=True):
                env[out] = self._agreed(ref, env, stacked)
            return
        if self.replicas == 1 and not self.rows:
            env.update(run_code(node.code, env))
            return
        held = {v: self._held(v, env) for v in node.reads}
        with refused_as_cut(node, self.fragment):
            for name, made in node.code.on_share(held, local).items():
                env[name] = local.share.brought(made, self.layout(name)).array

    def _held(self, name: str, env: Env) -> Held:
        layout = self.layout(name)
        return NOTHING if layout == LOST else Held(env[name], layout)

    def _agreed(self, ref: Any, env: Env, stacked: set[str]) -> Any:
        if isinstance(ref, Fixed):
            return ref.value
        if ref not in stacked:
            return env[ref]
        layout = self.arriving[ref]
        how = layout.how if isinstance(layout, Partial) else "mean"
        x = env[ref]
        if x.dtype == np.bool_:
            return jnp.any(x, axis=0) if how == "max" else jnp.all(x, axis=0)
        reduce = {"sum": jnp.sum, "max": jnp.max, "min": jnp.min, "mean": jnp.mean}[how]
        return reduce(x, axis=0).astype(x.dtype)

    def in_one(self, name: str) -> Value:
        """The spec of a value in one endpoint: over all replicas if they run as one program."""
        value, mine = self.graph.values[name], self.on_share(name)
        if not self.one_program or self.is_apart:
            return mine
        return (
            replace(mine, shape=(self.replicas, *mine.shape))
            if self.axis_of(name) == PART
            else value
        )

    def on_share(self, name: str) -> Value:
        """The spec of a value in one replica."""
        value, layout = self.graph.values[name], self.layout(name)
        if not isinstance(layout, Sharded):
            return value
        shape = list(value.shape)
        shape[layout.axis] = layout.size(self.share_rows)
        return replace(value, shape=tuple(shape))

    def _scan(self, loop: Loop, body: tuple[Instruction, ...], env: Env, first: First) -> None:
        """This fragment's part of a loop, as one XLA loop."""
        holds = partial(self._makes, body)
        carries = [c for c in loop.carries if not c.unchanged and holds(c.after)]
        same = {c.before: env[c.first] for c in loop.carries if c.unchanged and c.first in env}
        slices = [s for s in loop.slices if s.outer in env]
        stacks = [s for s in loop.stacks if holds(s.inner)]

        def turn(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            inside = env | same
            inside |= {c.before: x for c, x in zip(carries, carry, strict=True)}
            inside |= {s.inner: x for s, x in zip(slices, xs, strict=True)}
            self.run(body, inside, first)
            return [inside[c.after] for c in carries], [inside[s.inner] for s in stacks]

        start, xs = [env[c.first] for c in carries], [env[s.outer] for s in slices]
        final, ys = jax.lax.scan(turn, start, xs, loop.length, loop.reverse)
        env.update({c.final: x for c, x in zip(carries, final, strict=True)})
        env.update({c.final: env[c.first] for c in loop.carries if c.unchanged and c.first in env})
        env.update({s.outer: y for s, y in zip(stacks, ys, strict=True)})

    def _makes(self, body: tuple[Instruction, ...], value: str) -> bool:
        return self.fragment in self.plan.sites.holders(value, self.plan.homes)


def compiler_options(platforms: Iterable[str]) -> dict[str, Any] | None:
    """XLA compiler options for programs on these platforms."""
    return CPU_OPTIONS if set(platforms) == {"cpu"} else None


def donated(segment: Segment) -> tuple[int, ...]:
    """The indices of a segment's donated arguments."""
    return tuple(i for i, name in enumerate(segment.reads) if name in segment.donates)


def lowering_of(plan: Plan, fragment: str) -> Lowering:
    """The lowering of a fragment, shared by all runs of a plan in this process."""
    return plan.lowered.setdefault(fragment, Lowering(plan, fragment))


@contextmanager
def refused_as_cut(node: Node, fragment: str) -> Iterator[None]:
    """Raise errors in deriving a replica's program as `CutError`s."""
    try:
        yield
    except (ShoalError, NumberAskedError):
        raise
    except Exception as error:
        raise CutError(
            f"a replica of `{fragment}` can't run its share of `{name_text(node.name)}` "
            f"({type(error).__name__}: {first_line(error)})",
            "Do it in a stage that isn't replicated, or report it as a bug in Shoal.",
            node.source,
        ) from error


class NumberAskedError(Exception):
    """Raised when a segment needs the index of its first environment."""


class Compiled:
    """A jitted segment for all endpoints of a fragment.

    Most segments don't depend on which environments an endpoint holds. Those that do take the
    index of the endpoint's first environment as their first argument.
    """

    def __init__(
        self, lowering: Lowering, work: Callable[..., Any], donated: Iterable[int]
    ) -> None:
        self._lowering = lowering
        self._numbered = False
        self.jitted = lowering.jit(lambda *args: work(None, *args), donated)
        self._with_number = lowering.jit(work, [i + 1 for i in donated])

    def __call__(self, end: int, *args: Any) -> tuple[Any, ...]:
        """Run the segment on the arguments of endpoint `end`; returns its results."""
        if not self._numbered:
            try:
                return self.jitted(*args)
            except NumberAskedError:
                self._numbered = True
        return self._with_number(np.int32(end * self._lowering.share_rows), *args)


def _known(first: First) -> Callable[[], Any]:
    def number() -> Any:
        if first is None:
            raise NumberAskedError
        return first

    return number


def _number(axes: tuple[str, ...]) -> Any:
    """The index of this replica among all that run as one program."""
    found: Any = 0
    for name in axes:
        found = found * jax.lax.axis_size(name) + jax.lax.axis_index(name)
    return found


def spec(axis: ArrayAxis) -> PartitionSpec:
    """The partition spec of a layout."""
    if axis is None:
        return PartitionSpec()
    return PartitionSpec(DEVICES) if axis == PART else PartitionSpec(*[None] * axis, DEVICES)


def _alone(
    work: Callable[..., Any], ins: Sequence[ArrayAxis], outs: Sequence[ArrayAxis]
) -> Callable[..., Any]:
    """With one replica per device, per-replica values have a leading axis of size 1."""

    def alone(*args: Any) -> tuple[Any, ...]:
        results = work(*(x[0] if axis == PART else x for x, axis in zip(args, ins, strict=True)))
        return tuple(x[None] if axis == PART else x for x, axis in zip(results, outs, strict=True))

    return alone


def _over_lanes(
    work: Callable[..., Any], ins: Sequence[ArrayAxis], outs: Sequence[ArrayAxis], lanes: int
) -> Callable[..., Any]:
    """Batch replicas that share a device along `LANES`."""

    def apart(x: Any, axis: ArrayAxis) -> Any:
        return (
            x.reshape(*x.shape[:axis], lanes, -1, *x.shape[axis + 1 :])
            if isinstance(axis, int)
            else x
        )

    def together(x: Any, axis: ArrayAxis) -> Any:
        if isinstance(axis, int):
            return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
        return x if axis == PART else x[0]  # all lanes agree

    def batched(*args: Any) -> tuple[Any, ...]:
        split = [apart(x, axis) for x, axis in zip(args, ins, strict=True)]
        in_axes = tuple(0 if axis == PART else axis for axis in ins)
        out_axes = tuple(axis if isinstance(axis, int) else 0 for axis in outs)
        results = jax.vmap(work, in_axes, out_axes, axis_name=LANES, axis_size=lanes)(*split)
        return tuple(together(x, axis) for x, axis in zip(results, outs, strict=True))

    return batched


def _slice(x: Any, index: Any) -> Any:
    """One turn's slice of a loop's input; None for values that a share can't compute."""
    return None if x is None else jax.lax.dynamic_index_in_dim(x, index, keepdims=False)


def _stack(outer: Any, x: Any, index: Any) -> Any:
    """A loop's stacked output with one turn's value written to it."""
    if outer is None or x is None:
        return outer
    return jax.lax.dynamic_update_index_in_dim(outer, x, index, 0)


def empty(value: Value) -> Any:
    """An array for a stacked value, filled turn by turn."""
    if value.dtype.startswith("key<"):
        return jax.lax.broadcast(jax.random.key(0), value.shape)
    return jnp.zeros(value.shape, value.dtype)


def many_ticks(lowering: Lowering, program: Program) -> Callable[..., tuple[Any, ...]]:
    """A function of (number of ticks, carry, constants): the carry after them, and metrics.

    Metrics are stacked to a length of `MOST_TICKS`; only the first entries, one for each tick, are
    valid. PRNG keys are passed as their key data.
    """
    (segment,) = program.operations
    assert isinstance(segment, Segment)
    before, after = [b for b, _ in program.carry], [a for _, a in program.carry]
    shown = [v for _, v in program.metrics]
    keys = [lowering.is_key(name) for name in (*before, *program.constants)]

    def tick(carry: Any, constants: dict[str, Any]) -> tuple[list[Any], list[Any]]:
        env = constants | dict(zip(before, carry, strict=True))
        lowering.run(segment.work, env)
        return [env[a] for a in after], [env[v] for v in shown]

    def ticks(count: Any, *raw: Any) -> tuple[Any, ...]:
        args = [wrap_key_data(x) if k else x for x, k in zip(raw, keys, strict=True)]
        constants = dict(zip(program.constants, args[len(before) :], strict=True))

        def turn(i: Any, loop: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
            carry, kept = loop
            carry, new = tick(carry, constants)
            return carry, [
                jax.lax.dynamic_update_index_in_dim(k, x, i, 0)
                for k, x in zip(kept, new, strict=True)
            ]

        carry = args[: len(before)]
        specs = jax.eval_shape(lambda carry: tick(carry, constants), carry)[1]
        stacks = [jnp.zeros((MOST_TICKS, *s.shape), s.dtype) for s in specs]
        carry, kept = jax.lax.fori_loop(0, count, turn, (carry, stacks))
        return (*(key_data(x) if k else x for x, k in zip(carry, keys, strict=False)), *kept)

    ins = [None, *lowering.axes_of(before), *lowering.axes_of(program.constants)]
    outs: list[ArrayAxis] = [*lowering.axes_of(after), *map(_stacked, lowering.axes_of(shown))]
    return lowering.spread(ticks, ins, outs)


def parts_of(lowering: Lowering, program: Program) -> list[Part]:
    """The parts of many ticks that can run as kernels, and why the others can't."""
    names = [*(before for before, _ in program.carry), *program.constants]
    values = [lowering.in_one(name) for name in names]
    specs = [
        jax.ShapeDtypeStruct((*v.shape, 2), jnp.uint32)
        if lowering.is_key(v.name)
        else jax.ShapeDtypeStruct(v.shape, v.dtype)
        for v in values
    ]
    parts: list[Part] = []
    ticks = with_kernels(many_ticks(lowering, program), lowering.devices, parts.append)
    jax.eval_shape(ticks, jax.ShapeDtypeStruct((), jnp.int32), *specs)
    return list(dict.fromkeys(parts))


def donated_ticks(program: Program) -> tuple[int, ...]:
    """The arguments of `many_ticks` that are donated: the carry."""
    return tuple(range(1, 1 + len(program.carry)))


def _stacked(axis: ArrayAxis) -> ArrayAxis:
    assert axis != PART, "replicas agree on what they show"
    return axis + 1 if isinstance(axis, int) else axis
