"""PPO for teams with a critic for each agent alone (de Witt et al., 2020)."""

from dataclasses import dataclass
from typing import ClassVar

from shoal.algorithms.mappo import MAPPO


@dataclass(frozen=True, slots=True)
class IPPO(MAPPO):
    """MAPPO whose critics see no more than their agents do."""

    paper: ClassVar[str] = "de Witt et al., 2020"

    critic: str = "own"  # or central: the world, or what all agents see
