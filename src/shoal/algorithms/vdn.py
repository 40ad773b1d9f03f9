"""VDN: deep Q-learning of a team, whose value is the sum of its agents' (Sunehag et al., 2018)."""

from dataclasses import dataclass
from typing import ClassVar

from shoal.algorithms.qmix import QMIX


@dataclass(frozen=True, slots=True)
class VDN(QMIX):
    """QMIX whose mixer is a plain sum."""

    paper: ClassVar[str] = "Sunehag et al., 2018"

    mixer: str = "sum"  # or monotonic: that of QMIX
