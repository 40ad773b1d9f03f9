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
from shoal.planning.channel_specs import make_cell, make_channel_specs
from shoal.planning.plan import Plan
from shoal.planning.segments import Segment, walk
from shoal.runtime.execution.compiled_executor import batch_sizes
from shoal.runtime.execution.fragment import FragmentSpec
from shoal.runtime.execution.lowering import (
    DEVICES,
    PART,
    ArrayAxis,
    Lowering,
    NumberAskedError,
    compiler_options,
    donated,
    donated_ticks,
    lowering_of,
    many_ticks,
    spec,
)
from shoal.tracing.flow import LOST

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
    ins: tuple[
        ArrayAxis, ...
    ] = ()  # the layouts of arguments and results over a group of processes
    outs: tuple[ArrayAxis, ...] = ()


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
        for operation in walk(self.spec.program.operations):
            if isinstance(operation, Segment):
                args = [self.spec_of(name) for name in operation.reads]
                export = self._export_batches if self.spec.is_served else self._export
                export(operation, args)

    def ticks(self) -> ExportedSegment:
        """Export many ticks in one call, of a plan of one program."""
        program = self.spec.program
        donates = donated_ticks(program)
        held = [before for before, _ in program.carry] + list(program.constants)
        args = [Spec((), np.int32), *map(self.spec_of, held)]
        found = self._lower(many_ticks(self.lowering, program), donates, args)
        return ExportedSegment(bytes(found.serialize()), donates)

    def spec_of(self, name: str) -> Spec:
        """The shape and dtype of a value that a segment of one endpoint reads."""
        lowering = self.lowering
        if name not in lowering.graph.values:
            return Spec((), np.int32)  # the index of a loop
        if lowering.layout(name) == LOST:
            return Spec((), np.float32)
        if name in lowering.stacked:
            return self._arriving[name]
        cell = make_cell(lowering.in_one(name))
        return Spec(cell.shape, cell.dtype)

    @cached_property
    def _arriving(self) -> dict[str, Spec]:
        """The values that arrive in messages."""
        specs = make_channel_specs(self.plan).values()
        mine = [spec.received() for spec in specs if spec.gate.reader == self.spec.name]
        return {name: Spec(*array) for arrays in mine for name, array in arrays.items()}

    def _export_batches(self, segment: Segment, args: list[Spec]) -> None:
        """Export a segment of a server for each batch size."""
        axes = [self.spec.batch_axes.get(name) for name in segment.reads]
        for size in batch_sizes(self.spec.ends_per_worker):
            columns = [_times(x, axis, size) for x, axis in zip(args, axes, strict=True)]
            found = self._lower(self.lowering.batch(size).work(segment), (), columns)
            self.segments[segment, size] = ExportedSegment(bytes(found.serialize()))

    def _export(self, segment: Segment, args: list[Spec]) -> None:
        lowering, donates, rows = self.lowering, donated(segment), 0
        ins, outs = tuple(lowering.axes_of(segment.reads)), tuple(lowering.axes_of(segment.writes))
        function = lowering.function(segment)
        if lowering.is_apart:
            args = [_over(lowering.mesh, x, axis) for x, axis in zip(args, ins, strict=True)]
            donates = ()
        try:
            found = self._lower(lambda *args: function(None, *args), donates, args)
        except NumberAskedError:
            rows, donates = lowering.share_rows, tuple(i + 1 for i in donates)
            found = self._lower(function, donates, [Spec((), np.int32), *args])
        axes = (ins, outs) if lowering.is_apart else ((), ())
        self.segments[segment, 0] = ExportedSegment(bytes(found.serialize()), donates, rows, *axes)

    def _lower(
        self, function: Callable[..., Any], donates: tuple[int, ...], args: Sequence[Spec]
    ) -> export.Exported:
        kinds = dict.fromkeys(p.device.kind for p in self.plan.places[self.spec.name])
        platforms = [PLATFORMS.get(kind, kind) for kind in kinds]
        jitted = jax.jit(function, donate_argnums=donates)
        try:
            return export.export(jitted, platforms=platforms, disabled_checks=UNCHECKED)(*args)
        except NotImplementedError as error:
            raise RunError(
                f"`{self.spec.name}` can't be sent to another process: {first_line(error)}",
                "Call Python from a stage of its own, marked with shoal.host, "
                'or run with backend="threads".',
            ) from error


def _times(x: Spec, axis: int | None, by: int) -> Spec:
    """`x` with `by` times as many rows."""
    if axis is None:
        return x
    return Spec((*x.shape[:axis], x.shape[axis] * by, *x.shape[axis + 1 :]), x.dtype)


def _over(mesh: Any, x: Spec, axis: ArrayAxis) -> Spec:
    """The global spec over a group of processes, from one process's part `x`."""
    shape = (1, *x.shape) if axis == PART else x.shape
    along = 0 if axis == PART else axis
    whole = _times(Spec(shape, x.dtype), along, mesh.size)
    return Spec(whole.shape, whole.dtype, sharding=NamedSharding(mesh, spec(axis)))


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
        shardings = tuple(NamedSharding(mesh, spec(axis)) for axis in exported.ins)
        device = self._device(0)
        options = compiler_options([device.platform])
        together = jax.jit(loaded.call, in_shardings=shardings, compiler_options=options)

        def run(end: int, *args: Any) -> Sequence[Any]:
            parts = zip(args, exported.ins, shardings, strict=True)
            whole = [_whole(x, axis, sharding, device) for x, axis, sharding in parts]
            made = zip(together(*whole), exported.outs, strict=True)
            return [_mine(x, axis) for x, axis in made]

        return run


def _whole(x: Any, axis: ArrayAxis, sharding: NamedSharding, device: Any) -> Any:
    """A global array over a group of processes, from this process's part `x`."""
    if axis is None and isinstance(x, np.ndarray | np.generic):
        return x  # the same everywhere
    x = jax.device_put(x, device)
    x = x[None] if axis == PART else x
    along = 0 if axis == PART else axis
    shape = _times(Spec(x.shape, x.dtype), along, sharding.mesh.size).shape
    return jax.make_array_from_single_device_arrays(shape, sharding, [x])


def _mine(x: Any, axis: ArrayAxis) -> Any:
    """This process's part of a global array."""
    own = x.addressable_data(0)
    return own[0] if axis == PART else own


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
