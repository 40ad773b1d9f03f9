"""Counts the traffic on channels between hosts, in messages and bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Sent(NamedTuple):
    """The traffic of a channel: messages, their size in bytes, and their size when packed."""

    messages: int = 0
    plain: int = 0
    packed: int = 0

    @property
    def saved(self) -> int:
        """The bytes that packing saved."""
        return self.plain - self.packed


def total(sent: Iterable[Sequence[int]]) -> Sent:
    """The sum of several traffic counts."""
    return Sent(*map(sum, zip(Sent(), *sent, strict=True)))
