"""What was sent on channels between hosts, in messages and bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Sent(NamedTuple):
    """What was sent on a channel: messages, their bytes, and their bytes as packed."""

    messages: int = 0
    plain: int = 0
    packed: int = 0

    @property
    def saved(self) -> int:
        """The bytes that packing saved."""
        return self.plain - self.packed


def total(sent: Iterable[Sequence[int]]) -> Sent:
    """The sum of these."""
    return Sent(*map(sum, zip(Sent(), *sent, strict=True)))
