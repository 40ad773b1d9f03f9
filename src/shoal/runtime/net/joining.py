"""How a worker joins the others: its connections, its channels, and who comes and goes later."""

from __future__ import annotations

import socket
import struct
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from shoal.runtime.channels.channel import Waker, take_back
from shoal.runtime.channels.shared_memory import Memory
from shoal.runtime.net.connections import Connections
from shoal.runtime.net.framing import DATA, Frame, Key, Terms
from shoal.runtime.net.remote_channels import RemoteChannels
from shoal.runtime.net.tcp_channel import TcpChannel

Lose = Callable[[int, int], None]


class _FrameHandler:
    """Hands what comes to the channel it is for, and lets others come and go."""

    def __init__(self, channels: Sequence[TcpChannel], lines: RemoteChannels, lose: Lose) -> None:
        self._channels, self._lines, self._lose = channels, lines, lose

    def room(self, frame: Frame) -> list[Any]:
        """Buffers for a frame's body."""
        return self._channels[frame.channel].room(frame)

    def arrived(self, frame: Frame) -> None:
        """A frame has come whole."""
        self._channels[frame.channel].arrived(frame)

    def gone(self, other: int) -> None:
        """A worker that can be done without is gone: take back what it had under way.

        What those had under way that begin anew with it is of no use without.
        """
        for channel in self._channels:
            channel.forget(other)
        party, ends = self._lines.party(other), defaultdict[int, set[str]](set)
        for fragment, at in self._lines.ends.items():
            for end, worker in enumerate(at):
                if worker in party:
                    ends[end].add(fragment)
        stiles = [channel.turnstile for channel in self._channels]
        self._lose(other, sum(take_back(stiles, found, end) for end, found in ends.items()))

    def again(self, other: int, let_in: Callable[[bytes], None]) -> dict[Key, int]:
        """Let another take the place of one that is gone; what is due from it."""
        with ExitStack() as still:
            for channel in self._channels:
                still.enter_context(channel.lock)
            words = [word for channel in self._channels for word in channel.told(other)]
            let_in(struct.pack(f"<{len(words)}Q", *words))
            for channel in self._channels:
                channel.send_newest(other)
            return {key: n for channel in self._channels for key, n in channel.due(other)}


def join_lines(
    lines: RemoteChannels,
    me: int,
    listener: socket.socket | None,
    board: tuple[Callable[[], None], Lose],
    bells: Mapping[str, Sequence[Waker]],
) -> tuple[Connections, dict[str, TcpChannel]]:
    """Connect worker `me` with the others, and open its channels: all that a worker has to do.

    Others reach it at `listener`, whose address `lines` has. Who takes the place of a worker that
    is gone reaches them, and only those reach it that begin anew with it. `board` has what raises
    if all is to stop, and what hears of turns that were lost with another worker. `bells` are those
    of every end, by fragment; of ends elsewhere they are silent.
    """
    check, lose = board
    links = Connections(me, lines.names, lines.known, check)
    links.told_by, links.parties, links.rejoin = lines.told(me), lines.parties, lines.rejoin
    links.life = lines.life
    if listener is not None and not lines.life:
        links.expect(lines.others(me) & lines.absent)
    links.join(listener, lines.others(me) - links.links.keys(), lines.addresses)

    def wake() -> None:
        for one in {id(bell): bell for of in bells.values() for bell in of}.values():
            one.ring()

    channels = open_lines(lines, links, wake, lose=lose)
    for channel in channels.values():
        gate = channel.turnstile.sheet.gate
        channel.turnstile.hear(bells[gate.reader], bells[gate.writer])
    return links, channels


def open_lines(
    lines: RemoteChannels,
    links: Connections,
    wake: Callable[[], None] = lambda: None,
    memory: Memory | None = None,
    lose: Lose = lambda other, turns: None,
) -> dict[str, TcpChannel]:
    """The channels between hosts, as this worker sees them; its links stand already.

    `wake` is called when a connection is gone; `memory` is where messages are to lie.
    """
    rings = lines.rings.open(memory or Memory.own(lines.size))
    every = [
        TcpChannel(ring, view, links)
        for ring, view in zip(rings.values(), lines.views(), strict=True)
    ]
    for other, told in links.told.items():
        words = iter(struct.unpack(f"<{len(told) // 8}Q", told))
        for channel in every:
            channel.adopt(other, words)
    terms = {other: _terms(every, other) for other in links.links}
    due = {o: {k: n for c in every for k, n in c.due(o)} for o in links.told}
    links.read(terms, _FrameHandler(every, lines, lose), wake, due)
    return dict(zip(rings, every, strict=True))


def _terms(every: Sequence[TcpChannel], other: int) -> Terms:
    """What another worker may send."""
    bodies = {key: bounds for channel in every for key, bounds in channel.bodies(other)}
    news = [key for key in bodies if key[0] == DATA and every[key[1]].is_news]
    return Terms.of(bodies, news)
