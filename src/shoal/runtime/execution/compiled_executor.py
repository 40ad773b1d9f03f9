"""Runs the endpoints of a compiled fragment: on their devices, or in batches if served."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from shoal.planning.segments import Segment, walk
from shoal.runtime.channels.channel import Message
from shoal.runtime.channels.flow_control import Turn
from shoal.runtime.execution.fragment import FragmentSpec
from shoal.runtime.execution.replica_runner import Runs

ALIGNED = 64  # bytes
SHARED = 8  # messages to a server's endpoints that are cached on the device


class Segments(Protocol):
    """A fragment's segments as functions of arrays; PRNG keys are passed as their key data."""

    def compile(self, segment: Segment) -> Callable[..., Sequence[Any]]:
        """A segment as a function of an endpoint's index and the segment's arguments."""
        ...

    def compile_batch(self, segment: Segment, size: int) -> Callable[..., Sequence[Any]]:
        """A segment as a function of its arguments, for a batch of `size` endpoints."""
        ...

    def sharding(self, name: str, end: int, /) -> Any:
        """The sharding of a value that an endpoint holds."""
        ...


class CompiledExecutor:
    """Runs a fragment's segments as XLA programs on its endpoints' devices."""

    def __init__(self, spec: FragmentSpec, segments: Segments) -> None:
        self.spec, self.segments = spec, segments
        every = [op for op in walk(spec.program.operations) if isinstance(op, Segment)]
        self._compiled = {} if spec.is_served else {id(s): segments.compile(s) for s in every}
        self._axes = {
            id(s): ([*map(spec.batch_axes.get, s.reads)], [*map(spec.batch_axes.get, s.writes)])
            for s in every
        }
        self._batches: dict[tuple[int, int], Callable[..., Any]] = {}
        self._shared: dict[Any, Message] = {}
        self._warm: set[tuple[int, int]] = set()
        self._warming: set[tuple[int, int]] = set()

    def run(self, segment: Segment, end: int, args: list[Any]) -> Sequence[Any]:
        """Run a segment on the arguments of one endpoint; returns its results."""
        return self._compiled[id(segment)](end, *args)

    def has(self, segment: Segment) -> bool:
        """Whether a segment belongs to this fragment."""
        return id(segment) in self._axes

    def share(self, name: str, x: Any, end: int, *, is_owned: bool) -> Any:
        """An endpoint's rows of a carried value, on the endpoint's device.

        They are a copy, unless the value is owned and no other endpoint needs a part of it.
        """
        x = key_data(x)
        if is_owned and name in self.spec.alone and not self.spec.is_served:
            return x
        x = self.spec.rows_of(name, x, end)
        if self.spec.is_served:
            return np.array(x)
        return jax.device_put(jnp.copy(x), self.segments.sharding(name, end))

    def receive(self, channel: str, message: Message, turns: list[Turn]) -> Message:
        """A message, placed where segments read it: on the device, or in host memory if served.

        Values that a server's endpoints share reach each of them, but are moved to the device once.
        """
        if not self.spec.is_served:
            return {name: self._moved(name, x) for name, x in message.items()}
        axes = self.spec.batch_axes
        rows = {name: np.array(x) for name, x in message.items() if name in axes}
        key = (channel, tuple(turns))
        if len(rows) == len(message):
            return rows
        if key not in self._shared:
            shared = {name: x for name, x in message.items() if name not in rows}
            self._shared[key] = {name: self._moved(name, x) for name, x in shared.items()}
            while len(self._shared) > SHARED:
                del self._shared[next(iter(self._shared))]
        return rows | self._shared[key]

    def _moved(self, name: str, x: Any) -> Any:
        if not isinstance(x, np.ndarray):
            return x
        return jax.device_put(aligned_copy(x), self.segments.sharding(name, 0))

    def copy(self, x: Any) -> Any:
        """A copy that shares no memory with `x`."""
        return jnp.copy(x) if isinstance(x, jax.Array) else np.array(x)

    def run_many(self, asked: list[Runs]) -> list[list[Any]]:
        """Run the segments of several endpoints as one program, their rows padded to a power of 2.

        Endpoints of a server keep their rows in host memory. Endpoints with other versions of the
        shared parameters run in a batch of their own.
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
            columns = [_column(xs, axis, size) for xs, axis in zip(args, ins, strict=True)]
            results = self._batch(segment, size)(*columns)
            for x, axis in zip(map(np.asarray, results), outs, strict=True):
                for place, n in enumerate(numbers):
                    found[n].append(self._row(x, axis, place))
        return found

    def _ready_size(self, segment: Segment, args: list[list[Any]]) -> int:
        """The smallest compiled batch size for these arguments, a power of 2, or else the largest.

        The largest is compiled at once; others in the background when they are first needed, while
        the largest is used.
        """
        wanted = _power_of_2(len(args[0]))
        largest = _power_of_2(self.spec.ends_per_worker)
        if wanted >= largest or (id(segment), wanted) in self._warm:
            return wanted
        if (id(segment), wanted) not in self._warming:
            self._warming.add((id(segment), wanted))
            ins, _ = self._axes[id(segment)]
            columns = [_column(x, axis, wanted) for x, axis in zip(args, ins, strict=True)]
            work = (segment, wanted, columns)
            # Not a daemon: Python must not exit while XLA compiles.
            threading.Thread(target=self._warm_up, args=work, daemon=False).start()
        return largest

    def _warm_up(self, segment: Segment, size: int, columns: list[Any]) -> None:
        jax.block_until_ready(self._batch(segment, size)(*columns))
        self._warm.add((id(segment), size))

    def _row(self, x: np.ndarray, axis: int | None, place: int) -> np.ndarray:
        """The part of a batched result that belongs to one endpoint."""
        if axis is None:
            return x
        span = slice(place * self.spec.rows, (place + 1) * self.spec.rows)
        return x[(slice(None),) * axis + (span,)]

    def _batch(self, segment: Segment, size: int) -> Callable[..., Any]:
        """A segment compiled for a batch of `size` endpoints."""
        key = (id(segment), size)
        if key not in self._batches:
            self._batches[key] = self.segments.compile_batch(segment, size)
        return self._batches[key]


def batch_sizes(most: int) -> list[int]:
    """The batch sizes that a server has programs for: powers of 2."""
    return [1 << i for i in range(_power_of_2(most).bit_length())]


def _power_of_2(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _column(xs: list[Any], axis: int | None, size: int) -> Any:
    """One argument of several endpoints as a batch, padded to `size` of them."""
    if axis is None or size == 1:
        return xs[0]
    return np.concatenate(xs + [xs[0]] * (size - len(xs)), axis)


def aligned_copy(x: np.ndarray) -> np.ndarray:
    """An aligned copy, which XLA can use without copying it again."""
    block = np.empty(x.nbytes + ALIGNED, np.uint8)
    first = -block.ctypes.data % ALIGNED
    copy = block[first : first + x.nbytes].view(x.dtype).reshape(x.shape)
    np.copyto(copy, x)
    return copy


def wrapped(x: Any) -> Any:
    """PRNG keys from their key data."""
    return jax.random.wrap_key_data(x)


def key_data(x: Any) -> Any:
    """The key data of PRNG keys; other arrays unchanged."""
    is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(x) if is_key else x


def raw(x: Any) -> np.ndarray:
    """An array in host memory; PRNG keys as their key data."""
    return np.array(key_data(x))
