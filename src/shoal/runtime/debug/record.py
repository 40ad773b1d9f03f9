"""Records the messages that one fragment takes, and replays the fragment alone from them."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import jax
import numpy as np

from shoal.errors import SettingError, UnknownNameError, first_line
from shoal.planning.channel_specs import ChannelSpec, make_channel_specs
from shoal.planning.fragment_program import write_program
from shoal.planning.plan import Plan
from shoal.runtime.channels.channel import Channel, Message, Receive, Taken
from shoal.runtime.channels.in_process import InProcessChannel
from shoal.runtime.execution.compiled_executor import CompiledExecutor, raw
from shoal.runtime.execution.executors import make_executor
from shoal.runtime.execution.limit import Limit
from shoal.runtime.execution.local_run import Inline, LocalRun
from shoal.runtime.execution.metrics import Collector, Shown
from shoal.runtime.execution.replica_runner import ReplicaRunner
from shoal.runtime.execution.scheduler import Scheduler
from shoal.runtime.execution.snapshot import Snapshot
from shoal.shapes import Count, Index, check_form, misfit

FORM = 2
MOST_BYTES = 64_000_000  # of a recording's description


class TapeRow(TypedDict):
    """The metadata of a recorded message: its channel, endpoint, tick, and array names."""

    channel: str
    end: Index
    tick: Index
    versions: list[int]
    values: list[str]


class TapeFile(TypedDict):
    """The description of a recording."""

    form: int
    edge: str
    ticks: Count
    loop: dict[str, Any]
    reader: str
    plan: str
    rows: list[TapeRow]


def edges(plan: Plan) -> list[str]:
    """The edges of a plan that can be recorded, as `writer>reader`."""
    return list(dict.fromkeys(f"{c.writer}>{c.reader}" for c in plan.channels))


def check_reader(plan: Plan, edge: str) -> str:
    """The reader of an edge, given as `writer>reader`; raises if it can't be replayed alone."""
    plain = edge.replace(" ", "")
    if not edges(plan):
        raise SettingError(
            f"nothing crosses between fragments in {plan.distribution.name}",
            "Name a distribution policy that cuts the loop.",
        )
    if plain not in edges(plan):
        raise UnknownNameError("edge", plain, edges(plan))
    reader = plain.partition(">")[2]
    if reader in plan.asynchronous:
        raise SettingError(
            f"`{reader}` is asynchronous, so its ticks are not those of the run",
            f"Record what others read: {', '.join(e for e in edges(plan) if e != plain)}.",
        )
    return reader


class _Tape:
    """A file of messages: arrays by number, in the order in which they were taken.

    It is written under a temporary name until it is complete, so a failed recording leaves no file.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._draft = path, path.with_name(f"{path.name}.tmp")
        try:
            if path.exists() and not path.is_file():
                raise IsADirectoryError(0, "it is no plain file")
            self._file = zipfile.ZipFile(self._draft, "w", zipfile.ZIP_STORED)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise SettingError(
                f"can't write {path}: {why}", "Name a file in an existing folder."
            ) from error
        self._rows: list[dict[str, Any]] = []

    def write(self, where: Mapping[str, Any], message: Mapping[str, Any]) -> None:
        """Add a message."""
        names = []
        for name, x in message.items():
            inside = f"{len(self._rows)}/{len(names)}.npy"
            with self._file.open(inside, "w", force_zip64=True) as out:
                np.lib.format.write_array(out, raw(x), allow_pickle=False)
            names.append(name)
        self._rows.append({**where, "values": names})

    def close(self, about: Mapping[str, Any]) -> int:
        """Write the description and close the file; returns the number of messages."""
        self._file.writestr("tape.json", json.dumps({**about, "form": FORM, "rows": self._rows}))
        self._file.close()
        self._draft.replace(self._path)
        return len(self._rows) - 1

    def discard(self) -> None:
        """Delete the file of a failed recording."""
        self._file.close()
        with suppress(OSError):
            self._draft.unlink(missing_ok=True)


class _Recording:
    """A channel that records the messages taken from it."""

    def __init__(self, inner: InProcessChannel, name: str, tape: _Tape) -> None:
        self._inner, self._name, self._tape = inner, name, tape
        self.state = inner.state
        self.put = inner.put

    def take(self, end: int, tick: int, receive: Receive) -> Taken:
        """Take the next message, and write it to the file."""
        taken = self._inner.take(end, tick, lambda message, turns: message)
        where = {"channel": self._name, "end": end, "tick": tick, "versions": taken.versions}
        self._tape.write(where, taken.message)
        return Taken(receive(taken.message, []), taken.versions)


class _Replaying:
    """A channel that replays recorded messages, and drops what is put."""

    def __init__(self, spec: ChannelSpec, messages: Mapping[int, list[Taken]]) -> None:
        self.state, self._messages = _Open(spec), messages

    def put(self, end: int, message: Message, version: int) -> None:
        """Drop the message: it has no reader."""

    def take(self, end: int, tick: int, receive: Receive) -> Taken:
        """Take the next message of the recording."""
        if not self._messages.get(end):
            raise SettingError(
                f"the recording has no message for tick {tick}", "Make it again with shoal record."
            )
        message, versions = self._messages[end].pop(0)
        return Taken(receive(message, []), versions)


class _Open:
    """A flow control that allows every put and take."""

    def __init__(self, spec: ChannelSpec) -> None:
        self.spec = spec

    def puts(self, end: int) -> int:
        """Always 0: what is put is dropped."""
        return 0

    def may_put(self, end: int) -> bool:
        """Always true: there is always room."""
        return True

    def may_take(self, end: int, tick: int) -> bool:
        """Always true: all messages have been recorded."""
        return True


@dataclass(frozen=True)
class Recording:
    """A request to record an edge's reader for some ticks; `loop` says what is run, as JSON."""

    edge: str
    ticks: int
    loop: Mapping[str, Any] = field(default_factory=dict)


def record(plan: Plan, recording: Recording, path: Path, state: Any) -> int:
    """Run `plan` and record its start and a fragment's messages; returns their number."""
    reader, graph = check_reader(plan, recording.edge), plan.graph
    values = dict(zip(graph.inputs, jax.tree.leaves(state), strict=True))
    programs = [write_program(plan, f.name) for f in plan.distribution.fragments]
    tape = _Tape(path)

    def wrap(name: str, channel: InProcessChannel) -> Channel:
        into = next(c.reader for c in plan.channels if c.name == name)
        return _Recording(channel, name, tape) if into == reader else channel

    try:
        tape.write({"channel": "", "end": 0, "tick": 0, "versions": ()}, values)
        local = LocalRun(plan, programs, Snapshot(0, values), Inline, wrap)
        Scheduler(local.workers, local.channels, None, None, local.run_many).run(
            Limit(recording.ticks)
        )
        return tape.close({**asdict(recording), "reader": reader, "plan": str(plan)})
    except BaseException:
        tape.discard()
        raise


def read_tape(path: Path) -> TapeFile:
    """The description of a recording."""
    try:
        with zipfile.ZipFile(path) as file:
            if file.getinfo("tape.json").file_size > MOST_BYTES:
                raise ValueError("its description is too large")
            if any(one.compress_type != zipfile.ZIP_STORED for one in file.infolist()):
                raise ValueError("it is compressed, so it could be of any size")
            about = json.loads(file.read("tape.json"))
        check_form(about, FORM)
    except DAMAGE as error:
        raise _unreadable(path, first_line(error)) from error
    if wrong := misfit(about, TapeFile):
        raise _unreadable(path, wrong)
    return about


# The errors raised by damaged files: missing, truncated, altered or nested too deeply.
DAMAGE = (OSError, KeyError, ValueError, EOFError, RecursionError, NotImplementedError)
DAMAGE = (*DAMAGE, RuntimeError, MemoryError, zipfile.BadZipFile, zlib.error)


def _unreadable(path: Path, why: str) -> SettingError:
    return SettingError(
        f"{path} can't be read as a recording: {why}", "Make one with shoal record."
    )


def replay(plan: Plan, path: Path) -> Iterator[tuple[int, Shown]]:
    """Run the reader alone on a recording; yields its metrics tick by tick."""
    about = read_tape(path)
    if about["plan"] != str(plan):
        raise SettingError(
            f"{path} was recorded under another plan", "Name the same loop and distribution."
        )
    try:
        rows = list(_messages(path, about))
    except DAMAGE as error:
        raise _unreadable(path, first_line(error)) from error
    values = rows.pop(0)[1].message if rows else {}
    if about["reader"] not in {f.name for f in plan.distribution.fragments}:
        raise _unreadable(path, "the plan has no such fragment")
    if set(values) != set(plan.graph.inputs):
        raise _unreadable(path, "it doesn't hold the state that the run started from")
    program = write_program(plan, about["reader"])
    executor = make_executor(plan, program)
    collector = Collector(plan, [program])
    channels = _channels(plan, rows)
    ends = range(plan.ends(program.fragment))
    workers = [
        ReplicaRunner(executor, end, Snapshot(0, values), channels, collector) for end in ends
    ]
    many = executor.run_many if isinstance(executor, CompiledExecutor) else None
    for tick in range(about["ticks"]):
        Scheduler(workers, channels, None, None, many).run(Limit(tick + 1))
        yield from collector.ready()


def _messages(path: Path, about: TapeFile) -> Iterator[tuple[TapeRow, Taken]]:
    with zipfile.ZipFile(path) as file:
        for number, row in enumerate(about["rows"]):
            message = {}
            for i, name in enumerate(row["values"]):
                with file.open(f"{number}/{i}.npy") as data:
                    message[name] = np.lib.format.read_array(data, allow_pickle=False)
            yield row, Taken(message, tuple(row["versions"]))


def _channels(plan: Plan, rows: list[tuple[TapeRow, Taken]]) -> dict[str, Channel]:
    """Make channels that replay the recorded messages."""
    found: dict[str, Channel] = {}
    for name, spec in make_channel_specs(plan).items():
        taken: dict[int, list[Taken]] = {}
        for row, message in rows:
            if row["channel"] == name:
                taken.setdefault(row["end"], []).append(message)
        found[name] = _Replaying(spec, taken)
    return found
