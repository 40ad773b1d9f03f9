"""Settings of algorithms for teams that are known to learn, by environment.

Returns are the mean of the agents', of 26 steps; chance gives -28. JaxMARL's logs of MPE show three
times as much, as each agent's reward is multiplied by their number there.
"""

from typing import Any

from shoal.algorithms.ippo import IPPO
from shoal.algorithms.mappo import MAPPO
from shoal.algorithms.presets.preset import Preset
from shoal.algorithms.qmix import QMIX
from shoal.algorithms.vdn import VDN

SPREAD = "MPE_simple_spread_v3"


def _on_policy(kind: Any) -> Preset:
    """A million steps and some, without the additions of Yu et al. (2022): tuned before them."""
    ticks = 300
    plain = {"norm_value": False, "huber_delta": None, "agent_ids": False}
    algorithm = kind(learning_rate=1e-3, anneal_lr=True, gamma=0.95, **plain)
    return Preset(algorithm, envs=32, ticks=ticks, target=-19, family="jaxmarl")


def _by_value(kind: Any, learning_rate: float) -> Preset:
    """Sequences of one episode each, for a million steps: a third leaves VDN at -21 to -24."""
    ticks = 2400
    algorithm = kind(
        batch_size_per_env=2,
        samples_per_insert=4.0,
        learning_starts_per_env=8,
        learning_rate=learning_rate,
        anneal_lr=True,
        gamma=0.9,
        td_lambda=0.6,
        target_update_interval=100,
        epsilon_ticks=250,
    )
    return Preset(algorithm, envs=16, ticks=ticks, target=-20, family="jaxmarl")


MAPPO_PRESETS = {SPREAD: _on_policy(MAPPO)}
IPPO_PRESETS = {SPREAD: _on_policy(IPPO)}
QMIX_PRESETS = {SPREAD: _by_value(QMIX, 1e-3)}
VDN_PRESETS = {SPREAD: _by_value(VDN, 2e-3)}
