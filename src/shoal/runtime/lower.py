"""Segments to XLA: one jitted function each, over one replica or over all that run as one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import shoal.runtime.threefry  # noqa: F401  registers a faster lowering
from shoal.graph.ir import Agree, Graph, Loop, Node, Value
from shoal.planning.assign import assign_stages
from shoal.planning.homes import Sites
from shoal.planning.plan import Plan
from shoal.planning.program import Call, Do, Instruction, Repeat
from shoal.runtime.operations import Room, Segment, Slice, Stack, Work
from shoal.tracing.agreeing import agreeing
from shoal.tracing.interpret import run_code
from shoal.tracing.jaxprs import Fixed, bind

# Threads inside one small matrix product cost more than they give; independent operations still
# run side by side (benchmarks/README.md).
CPU_OPTIONS = {"xla_cpu_multi_thread_eigen": False}
LANES, DEVICES = "lanes", "devices"
PART: Literal["part"] = "part"
Env = dict[str, Any]
# How an array lies over replicas: the same on all, rows along an axis, or one for each replica.
Lay = int | None | Literal["part"]


@dataclass(frozen=True)
class Lowering:
    """How one fragment's work becomes XLA programs."""

    plan: Plan
    fragment: str
    rows: int = 0  # environments of one end, if others than the plan says

    def __post_init__(self) -> None:
        # Traced here and now: inside a program over several devices a trace would keep its mesh.
        assert self.nodes.keys() == self.plan.sites.nodes.keys()

    @cached_property
    def replicas(self) -> int:
        """In how many shares the fragment's environments are dealt with."""
        return self.plan.distribution.ends(self.fragment)

    @cached_property
    def one_program(self) -> bool:
        """Whether all replicas run as one program."""
        return self.plan.one_program(self.fragment)

    @cached_property
    def graph(self) -> Graph:
        """The graph as one replica sees it: with its own share of the environments."""
        whole = self.plan.graph
        rows = self.rows or self.plan.batch(self.fragment) // self.replicas
        traced = whole.origin.at(rows, self.replicas)
        return assign_stages(traced, self.plan.distribution)[0]

    @cached_property
    def nodes(self) -> dict[str, Node]:
        """The replica's sites."""
        return Sites(self.graph, self.plan.sites.opened).nodes

    @cached_property
    def loops(self) -> dict[str, Loop]:
        """The replica's opened loops."""
        return {loop.name: loop for loop, _ in Sites(self.graph, self.plan.sites.opened).loops}

    @cached_property
    def received(self) -> frozenset[str]:
        """Values that come from other fragments."""
        mine = [c for c in self.plan.channels if c.reader == self.fragment]
        return frozenset(v for c in mine for v in c.values)

    @cached_property
    def stacked(self) -> frozenset[str]:
        """Values that arrive as one from each replica of their writer, to be agreed on here."""
        return frozenset(
            v for c in self.plan.channels if c.reader == self.fragment
            for v in c.values if self.plan.is_stacked(c.writer, v)
        )  # fmt: skip

    @cached_property
    def devices(self) -> list[Any]:
        """The JAX devices of the fragment's replicas, each once."""
        if self.is_apart:
            return jax.devices()
        places = dict.fromkeys(p.device for p in self.plan.places[self.fragment])
        return [jax.devices(d.kind)[d.index] for d in places]

    @cached_property
    def mesh(self) -> Mesh | None:
        """The devices that one program spans, if it spans several."""
        count = math.gcd(len(self.devices), self.replicas)
        return (
            Mesh(np.array(self.devices[:count]), (DEVICES,))
            if self.one_program and count > 1
            else None
        )

    @cached_property
    def lanes(self) -> int:
        """Replicas that share a device, batched into one."""
        return self.replicas // (self.mesh.size if self.mesh else 1) if self.one_program else 1

    @cached_property
    def is_apart(self) -> bool:
        """Whether replicas that run as one program do so in a process each."""
        return self.plan.apart and self.one_program

    @cached_property
    def local(self) -> Any:
        """The device that an end of this process runs on."""
        return jax.local_devices()[0] if self.is_apart else self.devices[0]

    def whole(self, x: Any, lay: Lay) -> Any:
        """What one process holds as its part of an array over all of them."""
        if lay is None and isinstance(x, np.ndarray | np.generic):
            return x  # the same everywhere
        x = jax.device_put(x, self.local)
        x = x[None] if lay == PART else x
        axis = 0 if lay == PART else lay
        shape = list(x.shape)
        if axis is not None:
            shape[axis] *= self.replicas
        sharding = NamedSharding(self.devices_mesh, spec(lay))
        return jax.make_array_from_single_device_arrays(tuple(shape), sharding, [x])

    def part(self, x: Any, lay: Lay) -> Any:
        """What this process holds of an array over all of them."""
        mine = x.addressable_data(0)
        return mine[0] if lay == PART else mine

    @property
    def devices_mesh(self) -> Mesh:
        """The mesh of a program that spans several devices."""
        assert self.mesh is not None
        return self.mesh

    def sharding(self, value: str, endpoint: int) -> Any:
        """Where a value lives when this fragment holds it."""
        if self.is_apart:
            return SingleDeviceSharding(self.local)
        if self.mesh is None:
            device = self.plan.place_of(self.fragment, endpoint).device
            return SingleDeviceSharding(jax.devices(device.kind)[device.index])
        return NamedSharding(self.mesh, spec(self.lay(value)))

    def compile(self, segment: Segment) -> Callable[..., tuple[Any, ...]]:
        """A segment as a jitted function of what it reads."""
        work = self.work(segment)
        donated = tuple(i for i, name in enumerate(segment.reads) if name in segment.donates)
        spread = self.spread(work, self.lays(segment.reads), self.lays(segment.writes))
        return self.jit(spread, donated)

    def work(self, segment: Segment) -> Callable[..., tuple[Any, ...]]:
        """A segment as a function of what it reads, for one replica."""

        def work(*args: Any) -> tuple[Any, ...]:
            env = dict(zip(segment.reads, args, strict=True))
            self.run(segment.work, env)
            return tuple(env[name] for name in segment.writes)

        return work

    def jit(self, work: Callable[..., Any], donated: Iterable[int]) -> Callable[..., Any]:
        """Compile for the fragment's devices."""
        on_cpu = all(d.platform == "cpu" for d in self.devices)
        options = CPU_OPTIONS if on_cpu else None
        return jax.jit(work, donate_argnums=tuple(donated), compiler_options=options)

    def spread(
        self, work: Callable[..., Any], ins: Sequence[Lay], outs: Sequence[Lay]
    ) -> Callable[..., Any]:
        """`work` of one replica as work of all replicas that run as one program."""
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

    def lay(self, name: str) -> Lay:
        """How a value lies over the replicas of this fragment."""
        value = self.plan.graph.values.get(name)  # None for the turn of a loop
        if value is None:
            return None
        made_here = self.plan.sites.resolve(name) not in self.received
        differs = value.part and made_here and self.one_program
        return PART if value.axis is None and differs else value.axis

    def lays(self, names: Iterable[str]) -> list[Lay]:
        """How values lie, in order; see `lay`."""
        return [self.lay(name) for name in names]

    def run(self, work: Iterable[Work | Instruction], env: Env) -> None:
        """Do work in order, entering what it makes into `env`."""
        axes = tuple(
            name for name, on in ((DEVICES, self.mesh is not None), (LANES, self.lanes > 1)) if on
        )
        run = agreeing(axes) if axes else bind
        for item in work:
            match item:
                case Do(name) | Call(name):
                    node = self.nodes[name]
                    if isinstance(node, Agree) and set(node.reads) & self.stacked:
                        # Numbers of the loop itself are the same on all replicas already.
                        for ref, out in zip(node.code.args, node.code.outs, strict=True):
                            env[out] = self._agreed(ref, env)
                    else:
                        env.update(run_code(node.code, env, run))
                case Repeat(name, body):
                    self._scan(self.loops[name], body, env)
                case Slice(outer, inner, index):
                    env[inner] = jax.lax.dynamic_index_in_dim(
                        env[outer], env[index], keepdims=False
                    )
                case Room(outer):
                    env[outer] = room(self.graph.values[outer])
                case Stack(inner, outer, index):
                    env[outer] = jax.lax.dynamic_update_index_in_dim(
                        env[outer], env[inner], env[index], 0
                    )

    def _agreed(self, ref: Any, env: Env) -> Any:
        if isinstance(ref, Fixed):
            return ref.value
        return jnp.mean(env[ref], axis=0) if ref in self.stacked else env[ref]

    def _scan(self, loop: Loop, body: tuple[Instruction, ...], env: Env) -> None:
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
            self.run(body, inside)
            return [inside[c.after] for c in carries], [inside[s.inner] for s in stacks]

        first, xs = [env[c.first] for c in carries], [env[s.outer] for s in slices]
        final, ys = jax.lax.scan(turn, first, xs, loop.length, loop.reverse)
        env.update({c.final: x for c, x in zip(carries, final, strict=True)})
        env.update({c.final: env[c.first] for c in loop.carries if c.unchanged and c.first in env})
        env.update({s.outer: y for s, y in zip(stacks, ys, strict=True)})

    def _makes(self, body: tuple[Instruction, ...], value: str) -> bool:
        return self.fragment in self.plan.sites.holders(value, self.plan.homes)


def spec(lay: Lay) -> PartitionSpec:
    """Along which axis of an array replicas lie."""
    if lay is None:
        return PartitionSpec()
    return PartitionSpec(DEVICES) if lay == PART else PartitionSpec(*[None] * lay, DEVICES)


def _alone(work: Callable[..., Any], ins: Sequence[Lay], outs: Sequence[Lay]) -> Callable[..., Any]:
    """With one replica a device, what replicas differ on has a first axis of one."""

    def alone(*args: Any) -> tuple[Any, ...]:
        results = work(*(x[0] if lay == PART else x for x, lay in zip(args, ins, strict=True)))
        return tuple(x[None] if lay == PART else x for x, lay in zip(results, outs, strict=True))

    return alone


def _over_lanes(
    work: Callable[..., Any], ins: Sequence[Lay], outs: Sequence[Lay], lanes: int
) -> Callable[..., Any]:
    """Replicas that share a device, batched into one program along `LANES`."""

    def apart(x: Any, lay: Lay) -> Any:
        return (
            x.reshape(*x.shape[:lay], lanes, -1, *x.shape[lay + 1 :]) if isinstance(lay, int) else x
        )

    def together(x: Any, lay: Lay) -> Any:
        if isinstance(lay, int):
            return x.reshape(*x.shape[:lay], -1, *x.shape[lay + 2 :])
        return x if lay == PART else x[0]  # all lanes agree

    def batched(*args: Any) -> tuple[Any, ...]:
        split = [apart(x, lay) for x, lay in zip(args, ins, strict=True)]
        in_axes = tuple(0 if lay == PART else lay for lay in ins)
        out_axes = tuple(lay if isinstance(lay, int) else 0 for lay in outs)
        results = jax.vmap(work, in_axes, out_axes, axis_name=LANES, axis_size=lanes)(*split)
        return tuple(together(x, lay) for x, lay in zip(results, outs, strict=True))

    return batched


def room(value: Value) -> Any:
    """An array to be filled, turn by turn."""
    if value.dtype.startswith("key<"):
        return jax.lax.broadcast(jax.random.key(0), value.shape)
    return jnp.zeros(value.shape, value.dtype)
