"""Runs one endpoint of a fragment: holds its values, and executes its program tick by tick.

Needs no JAX itself.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from shoal.errors import RowError, RunError, ShoalError, user_place
from shoal.planning.plan import Replica
from shoal.planning.program import Call, Put, Take
from shoal.planning.segments import (
    Alias,
    Buffer,
    HostLoop,
    NumpyOp,
    NumpyWork,
    Operation,
    Program,
    Segment,
    Slice,
    Stack,
)
from shoal.profiling.recorder import UNRECORDED, now
from shoal.profiling.spans import Kind
from shoal.runtime.channels.channel import Channel, Message
from shoal.runtime.channels.flow_control import NEVER, Turn
from shoal.runtime.execution.fragment import FragmentSpec
from shoal.runtime.execution.limit import Limit
from shoal.runtime.execution.snapshot import Lagged, Share, Snapshot, past_name
from shoal.tracing.hosting import Task

KEEP_EVERY, KEPT = 16, 4
Metrics = dict[str, Any]
Lags = tuple[int, ...]


class Failure(Exception):
    """A replica's error, with the replica and the tick at which it was raised."""

    def __init__(self, replica: Replica, tick: int, error: BaseException) -> None:
        super().__init__(f"{replica[0]}[{replica[1]}] at tick {tick}: {error}")
        self.replica, self.tick, self.error = replica, tick, error

    @property
    def explained(self) -> ShoalError:
        """The error as a `ShoalError` that names the replica, the tick and the line."""
        error, (fragment, end) = self.error, self.replica
        if isinstance(error, ShoalError):
            return error
        first = str(error).strip().split("\n")[0]
        return RunError(
            f"{fragment}[{end}] failed at tick {self.tick}: {type(error).__name__}: {first}",
            'Run with --debug for the whole traceback, or with backend="inline" to step through '
            "it.",
            user_place(error),
        )


class FragmentExecutor(Protocol):
    """Runs the segments of one fragment for all of its endpoints in this process."""

    @property
    def spec(self) -> FragmentSpec:
        """The fragment's program, host stages and values."""
        ...

    def run(self, segment: Segment, end: int, args: list[Any]) -> Sequence[Any]:
        """Run a segment on the arguments of one endpoint; returns its results."""
        ...

    def share(self, name: str, x: Any, end: int, *, is_owned: bool) -> Any:
        """A copy of an endpoint's rows of a value that holds the rows of all endpoints.

        An owned value may be donated instead of copied.
        """
        ...

    def receive(self, channel: str, message: Message, turns: list[Turn]) -> Message:
        """A copy of a message, placed where the executor's segments read it."""
        ...

    def copy(self, x: Any) -> Any:
        """A copy that shares no memory with `x`."""
        ...


@dataclass(frozen=True, slots=True)
class Wants:
    """An endpoint has reached a move and waits until flow control allows it."""

    channel: str
    takes: bool
    tick: int


@dataclass(frozen=True, slots=True)
class Runs:
    """An endpoint of a server has reached a segment and requests its results."""

    segment: Segment
    args: list[Any]


class Reporter(Protocol):
    """Receives metrics, states and status from endpoints."""

    def show(self, tick: int, replica: Replica, metrics: Metrics, lags: Lags) -> None:
        """Report a tick's metrics, and the lags of the messages that it used."""
        ...

    def keep(self, worker: ReplicaRunner) -> None:
        """Keep a copy of an endpoint's state, to return to if a later tick fails."""
        ...

    def snap(self, worker: ReplicaRunner) -> None:
        """Store an endpoint's part of the requested snapshot."""
        ...

    def enter_stage(self, replica: Replica, stage: str, tick: int) -> None:
        """Record that a replica starts to run a stage in Python."""
        ...

    def leave_stage(self, replica: Replica) -> None:
        """Record that the stage has returned or failed."""
        ...


class ReplicaRunner:
    """One endpoint of a fragment: a replica, one group of it, or all replicas of one program."""

    def __init__(
        self,
        executor: FragmentExecutor,
        end: int,
        start: Snapshot,
        channels: Mapping[str, Channel],
        reporter: Reporter,
    ) -> None:
        self.replica: Replica = (executor.spec.name, end)
        self.tick = start.tick
        self.broken, self._pid = False, os.getpid()
        self.kept: deque[Share] = deque(maxlen=KEPT)
        self.recorder = UNRECORDED
        self._start, self._snapped = start, 0
        self._lags: dict[int, int] = {}  # by source, the largest of a tick
        self._sent: dict[str, tuple[Lagged, deque[Message]]] = {}
        self._version = NEVER
        self._executor, self._channels, self._reporter = executor, channels, reporter
        program, is_owned = executor.spec.program, start.is_owned and not executor.spec.is_copied
        held = [before for before, _ in program.carry] + list(program.constants)
        self._env = {
            name: executor.share(name, start.values[name], end, is_owned=is_owned) for name in held
        }
        if not executor.spec.is_copied:
            self._start = start.without(start.values)

    def start_at(self, tick: int, snapped: int) -> None:
        """Start as a replacement, at `tick`, after `snapped` snapshots."""
        self.tick, self._snapped = tick, snapped

    @property
    def program(self) -> Program:
        """The program that it executes."""
        return self._executor.spec.program

    @property
    def is_asynchronous(self) -> bool:
        """Whether this endpoint is asynchronous."""
        return self._executor.spec.is_free

    @property
    def carried(self) -> dict[str, Any]:
        """The values that this endpoint carries between ticks."""
        return {before: self._env[before] for before, _ in self._executor.spec.program.carry}

    def prime(self, line: Lagged) -> None:
        """Send the messages that a lagged reader takes in its first ticks.

        They are those in flight when the snapshot was taken, or else this endpoint's start values.
        """
        self._sent[line.channel] = line, deque(maxlen=line.lag)
        for age in range(line.lag, 0, -1):
            names = {v: past_name(line.reader, v, age) for v in line.values}
            known = names.items() if set(names.values()) <= self._start.past.keys() else ()
            past = {v: self._past_share(v, n) for v, n in known}
            # Nothing is older than the first tick of all.
            self._version = -min(age, self._start.tick) if known else 0
            self._send(line.channel, past or {v: self._env[v] for v in line.values})

    def _past_share(self, value: str, name: str) -> Any:
        return self._executor.share(value, self._start.past[name], self.replica[1], is_owned=False)

    @property
    def past(self) -> dict[str, Any]:
        """The messages to lagged readers that are still in flight, by value and age."""
        return {
            past_name(line.reader, v, age): message[v]
            for line, messages in self._sent.values()
            for age, message in enumerate(messages, 1)
            for v in line.values
        }

    @property
    def _turn_number(self) -> int:
        """The number of ticks in this run: channels count from where the run began."""
        return self.tick - self._start.tick

    @property
    def _shown_tick(self) -> int:
        """The tick that metrics belong to; if asynchronous, the tick whose values were read."""
        looked = self.is_asynchronous and self._version < NEVER
        return self._start.tick + self._version if looked else self.tick

    def ticks(self, limit: Limit) -> Generator[Wants | Runs, Any, None]:
        """Run ticks up to the limit; yields every move before it is made."""
        program = self._executor.spec.program
        first = self._first_puts(program)
        while limit.may_turn() if self.is_asynchronous else limit.may_start(self.tick):
            self._version = NEVER if self.is_asynchronous else self._turn_number
            self._lags.clear()
            self.recorder.tick = self.tick
            yield from self._run(program.operations[:first])
            began = now()
            self._deliver(limit)
            due = self.tick % KEEP_EVERY == 0 or self.tick == self._start.tick
            if due and self._executor.spec.is_copied:
                self._reporter.keep(self)
            self.recorder.done(Kind.KEEP, began)
            yield from self._run(program.operations[first:])
            shown = {m: self._env[v] for m, v in program.metrics}
            began = self.recorder.report(program.metrics)
            self._reporter.show(self._shown_tick, self.replica, shown, tuple(self._lags.values()))
            self.recorder.done(Kind.REPORT, began)
            kept = {before: self._env[after] for before, after in program.carry}
            self._env = kept | {name: self._env[name] for name in program.constants}
            self.tick += 1
            self.broken = False

    def _first_puts(self, program: Program) -> int:
        """The number of puts at the start of a tick: they are sent before the state is copied.

        Messages to lagged readers are part of the copy, so they are sent after it.
        """
        for count, op in enumerate(program.operations):
            if not isinstance(op, Put) or op.channel in self._sent:
                return count
        return len(program.operations)

    def _run(self, operations: tuple[Operation, ...]) -> Generator[Wants | Runs, Any, None]:
        env, executor, recorder = self._env, self._executor, self.recorder
        for operation in operations:
            if isinstance(operation, Take | Put):
                takes = isinstance(operation, Take)
                yield Wants(operation.channel, takes, self._turn_number)
            self.broken = (
                True  # set here: one that waits for its first message has not begun its tick
            )
            began = recorder.begin(operation)
            match operation:
                case Segment(_, reads, writes):
                    args = [env[r] for r in reads]
                    if executor.spec.is_served:
                        results = yield Runs(operation, args)
                    else:
                        results = executor.run(operation, self.replica[1], args)
                    env.update(zip(writes, results, strict=True))
                case Take(channel):
                    self._take(channel)
                case Put(channel, values):
                    self._send(channel, {v: env[v] for v in values})
                case NumpyWork(work):
                    self._in_numpy(work)
                case HostLoop():
                    yield from self._loop(operation)
                case Call(node):
                    self._call(self._executor.spec.tasks[node])
            recorder.end(operation, began, env)

    def _receive(self, channel: str, message: Message, turns: list[Turn]) -> Message:
        self.recorder.took(turns)
        return self._executor.receive(channel, message, turns)

    def _take(self, channel: str) -> None:
        receive = partial(self._receive, channel)
        turn = self._turn_number
        taken = self._channels[channel].take(self.replica[1], turn, receive)
        self._env.update(taken.message)
        if taken.versions:
            self._version = min(self._version, *taken.versions)
            for source, version in enumerate(taken.versions):
                if version < NEVER:
                    lag = turn - version
                    self._lags[source] = max(lag, self._lags.get(source, lag))

    def _send(self, channel: str, message: Message) -> None:
        self.recorder.number = self._channels[channel].state.puts(self.replica[1])
        self._channels[channel].put(self.replica[1], message, self._version)
        if channel in self._sent:
            self._sent[channel][1].appendleft(message)

    def _deliver(self, limit: Limit) -> None:
        """Deliver a part of the snapshot, if one is requested of this tick."""
        asked = limit.asked
        if asked.number > self._snapped and (self.is_asynchronous or asked.tick == self.tick):
            self._snapped = asked.number
            self._reporter.snap(self)

    def share(self) -> Share:
        """A copy of this endpoint's state, with the messages in flight to lagged readers."""
        carried = {name: self._executor.copy(x) for name, x in self.carried.items()}
        return Share(self.tick, carried, self.past)

    def handed_over(self) -> Share:
        """The state without a copy, for an endpoint that runs no further tick."""
        return Share(self.tick, dict(self.carried), self.past)

    def _loop(self, loop: HostLoop) -> Generator[Wants | Runs, Any, None]:
        env = self._env
        env.update({name: env[first] for first, name in loop.renames if first in env})
        env.update({c.before: env[c.first] for c in loop.carries})
        for turn in loop.order:
            env[loop.index] = np.int32(turn)
            yield from self._run(loop.body)
            env.update({c.before: env[c.after] for c in loop.carries})
        env.update({c.final: env[c.before] for c in loop.carries})

    def _in_numpy(self, work: tuple[NumpyOp, ...]) -> None:
        env = self._env
        for item in work:
            match item:
                case Slice(outer, inner, index):
                    env[inner] = np.asarray(env[outer])[env[index]]
                case Buffer(outer):
                    env[outer] = self._executor.spec.empty(outer)
                case Stack(inner, outer, index):
                    env[outer][env[index]] = env[inner]
                case Alias(value, name):
                    env[name] = env[value]

    def _call(self, task: Task) -> None:
        self._reporter.enter_stage(self.replica, task.stage, self.tick)
        try:
            task.run(self._env)
        except RowError as error:
            row = self.replica[1] * self._executor.spec.rows + error.row
            what = f"{type(error.cause).__name__}: {error.cause}" if error.cause else error.what
            place = user_place(error.cause) if error.cause else ""
            raise self._failed(task, f", environment {row},", what, place) from error
        except ShoalError:
            raise
        except (Exception, SystemExit) as error:
            what = f"{type(error).__name__}: {error}"
            raise self._failed(task, "", what, user_place(error)) from error
        finally:
            self._check_not_forked(task)
            self._reporter.leave_stage(self.replica)

    def _check_not_forked(self, task: Task) -> None:
        """Exit if this process is a fork made by the stage: two would run the same replica."""
        if os.getpid() != self._pid:
            sys.stderr.write(
                f"stage `{task.stage}` called os.fork() and returned in both processes; "
                f"the copy (pid {os.getpid()}) ends here\n"
            )
            sys.stderr.flush()
            os._exit(0)

    def _failed(self, task: Task, which: str, what: str, place: str) -> RunError:
        fragment, end = self.replica
        return RunError(
            f"host stage `{task.stage}` failed in {fragment}[{end}]{which} at tick {self.tick}: "
            f"{what}",
            "The error is in Python code outside Shoal: fix it there, "
            'or step through it with backend="inline".',
            place or task.source,
        )
