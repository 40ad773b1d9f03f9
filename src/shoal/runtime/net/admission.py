"""Who may begin a turn where its ledger is kept by another worker: asking, and granting."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from shoal.runtime.net.framing import ASK, GRANT, Frame

if TYPE_CHECKING:
    from shoal.runtime.net.tcp_channel import TcpChannel


class Asking:
    """A free reader, which begins a turn only when the writer has noted it."""

    def __init__(self, channel: TcpChannel) -> None:
        self._channel = channel
        count = len(channel.view.readers)
        self._asked, self._granted, self._least = ([0] * count for _ in range(3))

    def may_begin(self, end: int) -> bool:
        """Whether a turn was granted, and what it is to be begun from has come; asks if not."""
        channel, stile = self._channel, self._channel.turnstile
        ledger = stile.counts.ledger
        assert ledger is not None
        begun = ledger.begun[end]
        if self._granted[end] > begun:
            return stile.newest(end) >= self._least[end]
        if self._asked[end] == begun:
            self._asked[end] += 1
            source = stile.sheet.gate.sources[end][0]
            asks = Frame(ASK, channel.view.number, end, begun)
            channel.tell(channel.view.writers[source], asks)
        return False

    def go_on(self, end: int, begun: int) -> None:
        """So many turns were asked for and granted before."""
        self._asked[end] = self._granted[end] = begun

    def hear(self, frame: Frame) -> None:
        """A turn was granted, from a version."""
        self._least[frame.end] = frame.stamp
        self._granted[frame.end] = frame.number + 1
        stile = self._channel.turnstile
        for source in stile.sheet.gate.sources[frame.end]:
            for bell in stile.readers[source] if stile.readers else ():
                bell.ring()


class Granting:
    """The writer that free readers elsewhere take news from: it keeps the ledger for them."""

    def __init__(self, channel: TcpChannel) -> None:
        self._channel = channel
        self._asks: dict[int, int] = {}
        self._lock = threading.Lock()

    def forget(self, ends: set[int]) -> None:
        """Nobody waits at these ends any more; what they asked for isn't granted later."""
        with self._lock:
            for end in ends & self._asks.keys():
                del self._asks[end]

    def hear(self, frame: Frame) -> None:
        """A reader wants to begin its next turn."""
        with self._lock:
            self._asks[frame.end] = frame.number
        self.grant()

    def grant(self) -> None:
        """Let those begin that may."""
        channel, stile = self._channel, self._channel.turnstile
        with self._lock:
            for end, number in list(self._asks.items()):
                if stile.may_take(end, 0):
                    del self._asks[end]
                    version = stile.begin(end)
                    frame = Frame(GRANT, channel.view.number, end, number, version)
                    channel.tell(channel.view.readers[end], frame)
