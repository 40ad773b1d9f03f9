"""When a replica may go on: a pure state machine that all backends share.

A replica runs until it reaches a move (a take or a put) and asks for it; the machine answers when
the move may happen, and hears when it has. Backends carry this out; they decide nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

Replica = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Gate:
    """One channel: for each of its reader's ends, the writer's ends it takes from."""

    name: str
    writer: str
    reader: str
    sources: tuple[tuple[int, ...], ...]
    lag: int
    capacity: int


@dataclass(frozen=True, slots=True)
class Wants:
    """A replica has reached a move and waits for leave."""

    replica: Replica
    channel: str
    takes: bool


@dataclass(frozen=True, slots=True)
class Did:
    """A replica has made its move."""

    replica: Replica
    channel: str
    takes: bool


@dataclass(frozen=True, slots=True)
class Ended:
    """A replica has done its last tick."""

    replica: Replica


Event = Wants | Did | Ended


@dataclass(frozen=True, slots=True)
class Fire:
    """The replica may make its move."""

    replica: Replica


@dataclass(frozen=True, slots=True)
class Stuck:
    """Nobody can go on; `waits` says who waits for what."""

    waits: tuple[str, ...]


Action = Fire | Stuck


@dataclass(frozen=True, slots=True)
class State:
    """What has moved so far, and who waits."""

    gates: Mapping[str, Gate]
    running: frozenset[Replica]
    puts: Mapping[tuple[str, int], int] = field(default_factory=dict)
    takes: Mapping[tuple[str, int], int] = field(default_factory=dict)
    waiting: Mapping[Replica, Wants] = field(default_factory=dict)


def on_event(state: State, event: Event) -> tuple[State, tuple[Action, ...]]:
    """The next state, and who may go on now."""
    match event:
        case Wants(replica, channel, _):
            if allowed(state, event):
                return state, (Fire(replica),)
            waiting = {**state.waiting, replica: event}
            state = replace(state, waiting=waiting, running=state.running - {replica})
        case Did(replica, channel, takes):
            key = (channel, replica[1])
            if takes:
                state = replace(state, takes={**state.takes, key: state.takes.get(key, 0) + 1})
            else:
                state = replace(state, puts={**state.puts, key: state.puts.get(key, 0) + 1})
            return _release(state, channel)
        case Ended(replica):
            state = replace(state, running=state.running - {replica})
    if not state.running and state.waiting:
        return state, (Stuck(tuple(waits(state))),)
    return state, ()


def allowed(state: State, event: Wants) -> bool:
    """Whether a move may happen now."""
    gate, end = state.gates[event.channel], event.replica[1]
    if event.takes:
        taken = state.takes.get((gate.name, end), 0)
        return all(state.puts.get((gate.name, w), 0) + gate.lag > taken for w in gate.sources[end])
    put = state.puts.get((gate.name, end), 0)
    slowest = min(
        (
            state.takes.get((gate.name, r), 0)
            for r, from_ in enumerate(gate.sources)
            if end in from_
        ),
        default=put,
    )
    return put + gate.lag - slowest < gate.capacity


def _release(state: State, channel: str) -> tuple[State, tuple[Action, ...]]:
    """Let those go on who waited at `channel` and now may."""
    free = [w for w in state.waiting.values() if w.channel == channel and allowed(state, w)]
    if not free:
        return state, ()
    gone = {w.replica for w in free}
    waiting = {r: w for r, w in state.waiting.items() if r not in gone}
    state = replace(state, waiting=waiting, running=state.running | gone)
    return state, tuple(Fire(w.replica) for w in free)


def waits(state: State) -> Iterator[str]:
    """Who waits for whom, a line each."""
    for (fragment, end), want in state.waiting.items():
        gate = state.gates[want.channel]
        other = gate.writer if want.takes else gate.reader
        yield f"{fragment}[{end}] waits for {other} on {gate.name}"
