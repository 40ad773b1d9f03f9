"""Recording what one fragment takes from the others, and running it alone on what was recorded."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from shoal.errors import SettingError, UnknownNameError
from shoal.planning.channel_specs import ChannelSpec, make_channel_specs
from shoal.planning.fragment_program import write_program
from shoal.planning.plan import Plan
from shoal.runtime.channels.channel import Channel, Message, Receive, Taken
from shoal.runtime.channels.in_process import InProcessChannel
from shoal.runtime.execution.compiled_executor import CompiledExecutor, raw
from shoal.runtime.execution.executors import make_executor
from shoal.runtime.execution.limit import Limit
from shoal.runtime.execution.local_run import LocalRun
from shoal.runtime.execution.metrics import Collector, Shown
from shoal.runtime.execution.replica_runner import ReplicaRunner
from shoal.runtime.execution.scheduler import Scheduler
from shoal.runtime.execution.snapshot import Snapshot

FORM = 1


def edges(plan: Plan) -> list[str]:
    """The edges that can be recorded: what goes from one fragment to another."""
    return list(dict.fromkeys(f"{c.writer}>{c.reader}" for c in plan.channels))


def check_reader(plan: Plan, edge: str) -> str:
    """The fragment that reads an edge, given as `writer>reader`, if it can be run alone."""
    plain = edge.replace(" ", "")
    if not edges(plan):
        raise SettingError(
            f"nothing crosses between fragments in {plan.distribution.name}",
            "Name a distribution policy that cuts the loop.",
        )
    if plain not in edges(plan):
        raise UnknownNameError("edge", plain, edges(plan))
    reader = plain.partition(">")[2]
    if reader in plan.free:
        raise SettingError(
            f"`{reader}` turns at its own pace, so its ticks are not those of the run",
            f"Record what others read: {', '.join(e for e in edges(plan) if e != plain)}.",
        )
    return reader


class _Tape:
    """A file of messages: arrays by number, in the order in which they were taken."""

    def __init__(self, path: Path) -> None:
        self._file = zipfile.ZipFile(path, "w", zipfile.ZIP_STORED)
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

    def close(self, told: Mapping[str, Any]) -> int:
        """Write what the messages are, and end the file; how many there were after the start."""
        self._file.writestr("tape.json", json.dumps({**told, "form": FORM, "rows": self._rows}))
        self._file.close()
        return len(self._rows) - 1


class _Recording:
    """A channel that writes down what is taken from it."""

    def __init__(self, inner: InProcessChannel, name: str, tape: _Tape) -> None:
        self._inner, self._name, self._tape = inner, name, tape
        self.turnstile = inner.turnstile
        self.put = inner.put

    def take(self, end: int, tick: int, receive: Receive) -> Taken:
        """As the channel does it, and into the file."""
        taken = self._inner.take(end, tick, lambda message, turns: message)
        where = {"channel": self._name, "end": end, "tick": tick, "versions": taken.versions}
        self._tape.write(where, taken.message)
        return Taken(receive(taken.message, []), taken.versions)


class _Replaying:
    """A channel that gives what was once taken from it, and forgets what is put."""

    def __init__(self, sheet: ChannelSpec, messages: Mapping[int, list[Taken]]) -> None:
        self.turnstile, self._messages = _Open(sheet), messages

    def put(self, end: int, message: Message, version: int) -> None:
        """Nobody reads it."""

    def take(self, end: int, tick: int, receive: Receive) -> Taken:
        """The next message of the recording."""
        message, versions = self._messages[end].pop(0)
        return Taken(receive(message, []), versions)


class _Open:
    """Lets everybody pass."""

    def __init__(self, sheet: ChannelSpec) -> None:
        self.sheet = sheet

    @property
    def under_way(self) -> int:
        """Nobody turns at its own pace here."""
        return 0

    def may_put(self, end: int) -> bool:
        """There is always room."""
        return True

    def may_take(self, end: int, tick: int) -> bool:
        """It has all been recorded."""
        return True


@dataclass(frozen=True)
class Recording:
    """What to record: the reader of an edge, for some ticks; `words` say how to plan it again."""

    edge: str
    ticks: int
    words: tuple[str, ...] = ()


def record(plan: Plan, recording: Recording, path: Path, state: Any) -> int:
    """Run `plan` and write what a fragment takes, and all start from; how many messages."""
    reader, graph = check_reader(plan, recording.edge), plan.graph
    values = dict(zip(graph.inputs, jax.tree.leaves(state), strict=True))
    programs = [write_program(plan, f.name) for f in plan.distribution.fragments]
    tape = _Tape(path)
    tape.write({"channel": "", "end": 0, "tick": 0, "versions": ()}, values)

    def wrap(name: str, channel: InProcessChannel) -> Channel:
        into = next(c.reader for c in plan.channels if c.name == name)
        return _Recording(channel, name, tape) if into == reader else channel

    pieces = LocalRun(plan, programs, Snapshot(0, values), wrap)
    Scheduler(pieces.workers, pieces.channels, None, None, pieces.run_many).turn(
        Limit(recording.ticks)
    )
    return tape.close({**asdict(recording), "reader": reader, "plan": str(plan)})


def read_tape(path: Path) -> dict[str, Any]:
    """What a file of messages says of itself."""
    try:
        with zipfile.ZipFile(path) as file:
            told = json.loads(file.read("tape.json"))
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise SettingError(
            f"{path} can't be read as a recording: {error}", "Make one with shoal record."
        ) from error
    if told.get("form") != FORM:
        raise SettingError(
            f"{path} has form {told.get('form')}, and this Shoal reads form {FORM}",
            "Record it again.",
        )
    return told


def replay(plan: Plan, path: Path) -> Iterator[tuple[int, Shown]]:
    """Run the reading fragment alone on what was recorded; its metrics, tick by tick."""
    told = read_tape(path)
    if told["plan"] != str(plan):
        raise SettingError(
            f"{path} was recorded under another plan", "Name the same loop and distribution."
        )
    rows = list(_messages(path, told))
    values = rows.pop(0)[1].message
    program = write_program(plan, told["reader"])
    crew = make_executor(plan, program)
    collector = Collector(plan, [program])
    channels = _channels(plan, rows)
    ends = range(plan.ends(program.fragment))
    workers = [ReplicaRunner(crew, end, Snapshot(0, values), channels, collector) for end in ends]
    many = crew.run_many if isinstance(crew, CompiledExecutor) else None
    for tick in range(told["ticks"]):
        Scheduler(workers, channels, None, None, many).turn(Limit(tick + 1))
        yield from collector.ready()


def _messages(path: Path, told: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], Taken]]:
    with zipfile.ZipFile(path) as file:
        for number, row in enumerate(told["rows"]):
            message = {}
            for i, name in enumerate(row["values"]):
                with file.open(f"{number}/{i}.npy") as data:
                    message[name] = np.lib.format.read_array(data, allow_pickle=False)
            yield row, Taken(message, tuple(row["versions"]))


def _channels(plan: Plan, rows: list[tuple[dict[str, Any], Taken]]) -> dict[str, Channel]:
    """Channels that give what was recorded."""
    found: dict[str, Channel] = {}
    for name, sheet in make_channel_specs(plan).items():
        taken: dict[int, list[Taken]] = {}
        for row, message in rows:
            if row["channel"] == name:
                taken.setdefault(row["end"], []).append(message)
        found[name] = _Replaying(sheet, taken)
    return found
