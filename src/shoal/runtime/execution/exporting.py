"""A fragment's segments as StableHLO: lowered once in the driver, compiled where they run."""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import export
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from shoal.errors import RunError, first_line
from shoal.planning.channel_specs import make_channel_specs
from shoal.planning.plan import Plan
from shoal.planning.segments import Hand, HostCall, Move, Operation, Room, Segment, Slice, Turns
from shoal.runtime.execution.compiled_executor import batch_sizes
from shoal.runtime.execution.fragment import FragmentSpec
from shoal.runtime.execution.lowering import (
    DEVICES,
    PART,
    Lay,
    Lowering,
    NumberAskedError,
    compiler_options,
    donated,
    lowering_of,
    spec,
)
from shoal.runtime.execution.ticks import given_away, many_ticks

Spec = jax.ShapeDtypeStruct
# Both sides use the same version of JAX, so exported code needn't be stable across versions.
UNCHECKED = (export.DisabledSafetyCheck.custom_call("ALL"),)
PLATFORMS = {"gpu": "cuda"}  # the names that JAX uses in lowering


@dataclass(frozen=True)
class ExportedSegment:
    """A segment serialized by `jax.export`, and the layout of its arguments."""

    stablehlo: bytes
    donated: tuple[int, ...] = ()
    rows: int = 0  # environments per endpoint, if it takes the index of the first one
    ins: tuple[Lay, ...] = ()  # the layouts of arguments and results over a group of processes
    outs: tuple[Lay, ...] = ()


@dataclass(frozen=True)
class ExportedFragment:
    """A compiled fragment that another process can run: plain data, without user code."""

    spec: FragmentSpec
    segments: Mapping[tuple[Segment, int], ExportedSegment]  # by batch size; 0: no batch
    devices: tuple[tuple[str, int], ...]  # of each worker
    replicas: int  # those that run as one program, one per process; else 1
    ticks: ExportedSegment | None = None  # many ticks in one call, of a plan of one program


def export_fragment(plan: Plan, spec: FragmentSpec) -> ExportedFragment:
    """Lower the segments of a fragment whose workers are separate processes."""
    if saved := plan.saved.get((spec.name, plan.apart)):
        return saved
    lowering = lowering_of(plan, spec.name)
    if (found := lowering.compiled.get("exported")) is None:
        exporter = Exporter(plan, spec, lowering)
        exporter.export()
        devices = tuple((p.device.kind, p.device.index) for p in plan.places[spec.name])
        replicas = lowering.replicas if lowering.is_apart else 1
        found = ExportedFragment(spec, exporter.segments, devices, replicas)
        lowering.compiled["exported"] = found
    return found


@dataclass(frozen=True)
class Exporter:
    """Exports a fragment's segments, from the shapes of the values that an endpoint holds."""

    plan: Plan
    spec: FragmentSpec
    lowering: Lowering
    segments: dict[tuple[Segment, int], ExportedSegment] = field(default_factory=dict)

    def export(self) -> None:
        """Export every segment."""
        self._follow(self.spec.program.operations, self._held())

    def ticks(self) -> ExportedSegment:
        """Export many ticks in one call, of a plan of one program."""
        given = given_away(self.spec.program)
        args = [Spec((), np.int32), *self._held().values()]
        found = self._lower(many_ticks(self.lowering, self.spec.program), given, args)
        return ExportedSegment(bytes(found.serialize()), given)

    def _held(self) -> dict[str, Spec]:
        """The specs of an endpoint's carried values and constants."""
        program = self.spec.program
        held = [before for before, _ in program.carry] + list(program.constants)
        return {name: self._share(name) for name in held}

    def _share(self, name: str) -> Spec:
        cell = self.spec.cells[name]
        whole = self.plan.graph.values[name]
        axis, shape = cell.axis, list(cell.shape)
        if axis is not None:
            shape[axis] = whole.shape[axis] // self.spec.ends
        return Spec(tuple(shape), cell.dtype)

    def _follow(self, operations: tuple[Operation, ...], env: dict[str, Spec]) -> None:
        for operation in operations:
            match operation:
                case Segment(_, reads, writes):
                    made = self._segment(operation, [env[name] for name in reads])
                    env.update(zip(writes, made, strict=True))
                case Move(channel, True):
                    arrays = make_channel_specs(self.plan)[channel].received()
                    env.update({name: Spec(*array) for name, array in arrays.items()})
                case Hand(work):
                    for item in work:
                        match item:
                            case Slice(outer, inner):
                                env[inner] = Spec(env[outer].shape[1:], env[outer].dtype)
                            case Room(outer):
                                env[outer] = self._value(outer)
                            case _:
                                pass
                case Turns(_, index, renames, carries, body):
                    env.update({name: env[first] for first, name in renames if first in env})
                    env.update({c.before: env[c.first] for c in carries})
                    env[index] = Spec((), np.int32)
                    self._follow(body, env)
                    env.update({c.final: env[c.before] for c in carries})
                case HostCall():
                    env.update({name: self._value(name) for name in operation.writes})
                case _:
                    pass

    def _value(self, name: str) -> Spec:
        cell = self.spec.cells[name]
        return Spec(cell.shape, cell.dtype)

    def _segment(self, segment: Segment, args: list[Spec]) -> list[Spec]:
        """Export a segment for these arguments; returns the specs of its results."""
        lowering = self.lowering
        if not self.spec.is_served:
            return self._export(segment, args)
        axes, sizes = self.spec.batch_axes, batch_sizes(self.spec.ends_per_worker)
        made: list[Spec] = []
        for size in reversed(sizes):
            columns = [
                _times(x, axes.get(n), size) for n, x in zip(segment.reads, args, strict=True)
            ]
            found = self._lower(lowering.batch(size).work(segment), (), columns)
            self.segments[segment, size] = ExportedSegment(bytes(found.serialize()))
            made = [
                _times(Spec(x.shape, x.dtype), axes.get(name), 1, size)
                for name, x in zip(segment.writes, found.out_avals, strict=True)
            ]
        return made

    def _export(self, segment: Segment, args: list[Spec]) -> list[Spec]:
        lowering, given, rows = self.lowering, donated(segment), 0
        ins, outs = tuple(lowering.lays(segment.reads)), tuple(lowering.lays(segment.writes))
        function = lowering.function(segment)
        if lowering.is_apart:
            args = [_over(lowering.mesh, x, lay) for x, lay in zip(args, ins, strict=True)]
            given = ()
        try:
            found = self._lower(lambda *args: function(None, *args), given, args)
        except NumberAskedError:
            rows, given = lowering.share_rows, tuple(i + 1 for i in given)
            found = self._lower(function, given, [Spec((), np.int32), *args])
        lays = (ins, outs) if lowering.is_apart else ((), ())
        self.segments[segment, 0] = ExportedSegment(bytes(found.serialize()), given, rows, *lays)
        made = [Spec(x.shape, x.dtype) for x in found.out_avals]
        if lowering.is_apart:
            made = [_part(x, lay, lowering.replicas) for x, lay in zip(made, outs, strict=True)]
        return made

    def _lower(
        self, function: Callable[..., Any], given: tuple[int, ...], args: Sequence[Spec]
    ) -> export.Exported:
        kinds = dict.fromkeys(p.device.kind for p in self.plan.places[self.spec.name])
        platforms = [PLATFORMS.get(kind, kind) for kind in kinds]
        jitted = jax.jit(function, donate_argnums=given)
        try:
            return export.export(jitted, platforms=platforms, disabled_checks=UNCHECKED)(*args)
        except NotImplementedError as error:
            raise RunError(
                f"`{self.spec.name}` can't be sent to another process: {first_line(error)}",
                "Call Python from a stage of its own, marked with shoal.host, "
                'or run with backend="threads".',
            ) from error


def _times(x: Spec, axis: int | None, by: int, over: int = 1) -> Spec:
    """`x` with `by / over` times as many rows."""
    if axis is None:
        return x
    shape = list(x.shape)
    shape[axis] = shape[axis] * by // over
    return Spec(tuple(shape), x.dtype)


def _over(mesh: Any, x: Spec, lay: Lay) -> Spec:
    """The global spec over a group of processes, from one process's part `x`."""
    shape = (1, *x.shape) if lay == PART else x.shape
    axis = 0 if lay == PART else lay
    whole = _times(Spec(shape, x.dtype), axis, mesh.size)
    return Spec(whole.shape, whole.dtype, sharding=NamedSharding(mesh, spec(lay)))


def _part(x: Spec, lay: Lay, count: int) -> Spec:
    """One process's part of a global spec."""
    return Spec(x.shape[1:], x.dtype) if lay == PART else _times(x, lay, 1, count)


class ExportedSegments:
    """Compiles exported segments for the devices of endpoints in this process.

    With a `worker` they are compiled eagerly, so that workers compile in parallel.
    """

    def __init__(self, fragment: ExportedFragment, worker: int | None = None) -> None:
        self._fragment, self._worker = fragment, worker
        self._programs: dict[Any, Callable[..., Any]] = {}

    @property
    def mesh(self) -> None:
        """None: each endpoint has one device."""

    def sharding(self, name: str, end: int, /) -> Any:
        """The device of an endpoint, whatever the value."""
        return SingleDeviceSharding(self._device(end))

    def _device(self, end: int) -> Any:
        if self._fragment.replicas > 1:
            return jax.local_devices()[0]
        each = self._fragment.spec.ends_per_worker
        worker = end // each if self._worker is None else self._worker
        kind, index = self._fragment.devices[worker % len(self._fragment.devices)]
        devices = jax.devices(kind)
        return devices[index % len(devices)]  # a worker that computes on its host has one

    def compile(self, segment: Segment) -> Callable[..., Sequence[Any]]:
        """A segment as a function of an endpoint's index and the segment's arguments."""
        exported = self._fragment.segments[segment, 0]
        if self._fragment.replicas > 1:
            return self._over_processes(exported)
        rows, by_end = exported.rows, dict[int, Callable[..., Any]]()
        if self._worker is not None:
            self._compiled(exported, 0)

        def run(end: int, *args: Any) -> Sequence[Any]:
            if end not in by_end:
                by_end[end] = self._compiled(exported, end)
            return by_end[end](np.int32(end * rows), *args) if rows else by_end[end](*args)

        return run

    def _compiled(self, exported: ExportedSegment, end: int) -> Callable[..., Any]:
        """A segment for an endpoint's device, compiled once."""
        key = id(exported), self._device(end)
        if key not in self._programs:
            self._programs[key] = compile_for(exported, self._device(end))
        return self._programs[key]

    def compile_batch(self, segment: Segment, size: int) -> Callable[..., Sequence[Any]]:
        """A segment as a function of its arguments, for a batch of `size` endpoints."""
        return self._compiled(self._fragment.segments[segment, size], 0)

    def compile_ticks(self) -> Callable[..., Sequence[Any]]:
        """Many ticks in one call, of a plan of one program."""
        assert self._fragment.ticks is not None
        return self._compiled(self._fragment.ticks, 0)

    @cached_property
    def _mesh(self) -> Mesh:
        return Mesh(np.array(jax.devices()), (DEVICES,))

    def _over_processes(self, exported: ExportedSegment) -> Callable[..., Sequence[Any]]:
        """A segment that all replicas run together, each on its own rows in its own process."""
        loaded, mesh = export.deserialize(bytearray(exported.stablehlo)), self._mesh
        shardings = tuple(NamedSharding(mesh, spec(lay)) for lay in exported.ins)
        device = self._device(0)
        options = compiler_options([device.platform])
        together = jax.jit(loaded.call, in_shardings=shardings, compiler_options=options)

        def run(end: int, *args: Any) -> Sequence[Any]:
            given = zip(args, exported.ins, shardings, strict=True)
            whole = [_whole(x, lay, sharding, device) for x, lay, sharding in given]
            made = zip(together(*whole), exported.outs, strict=True)
            return [_mine(x, lay) for x, lay in made]

        return run


def _whole(x: Any, lay: Lay, sharding: NamedSharding, device: Any) -> Any:
    """A global array over a group of processes, from this process's part `x`."""
    if lay is None and isinstance(x, np.ndarray | np.generic):
        return x  # the same everywhere
    x = jax.device_put(x, device)
    x = x[None] if lay == PART else x
    axis = 0 if lay == PART else lay
    shape = _times(Spec(x.shape, x.dtype), axis, sharding.mesh.size).shape
    return jax.make_array_from_single_device_arrays(shape, sharding, [x])


def _mine(x: Any, lay: Lay) -> Any:
    """This process's part of a global array."""
    own = x.addressable_data(0)
    return own[0] if lay == PART else own


def compile_for(exported: ExportedSegment, device: Any) -> Callable[..., Sequence[Any]]:
    """Compile a segment for one device, once for all processes that share a cache."""
    loaded = export.deserialize(bytearray(exported.stablehlo))
    where = SingleDeviceSharding(device)
    args = [Spec(a.shape, a.dtype, sharding=where) for a in loaded.in_avals]
    options = compiler_options([device.platform])
    jitted = jax.jit(loaded.call, donate_argnums=exported.donated, compiler_options=options)
    with _one_at_a_time(exported.stablehlo):
        return jitted.lower(*args).compile()


@contextmanager
def _one_at_a_time(code: bytes) -> Iterator[None]:
    """Let one process compile a program; others wait, and find it in the cache."""
    cache = getattr(jax.config, "jax_compilation_cache_dir", None)
    if not cache or "://" in cache or not Path(cache).is_dir():
        yield
        return
    name = hashlib.sha256(code).hexdigest()[:2]  # at most 256 locks
    with (Path(cache) / f"shoal-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
