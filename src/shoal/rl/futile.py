"""Settings with which an algorithm can't learn in any environment, each with the reason.

All are in range. What counts is how far an update moves a weight, and how many updates a run has:
those of Adam and RMSProp are as long as the learning rate, whatever the gradient.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from shoal.envs.spaces import Box, leaves, parts
from shoal.errors import SettingError

STILL = 1e-3  # weights of about 0.1 that move by less than this compute what they did before
EPS = 1e-5  # of optimisers: gradients far below it move nothing
LARGEST = 10.0  # of normalised rewards and of gradients of the policy, about
LOST = 2.0**-24  # 1 + this is 1 in float32
LONG = 500  # ticks of a run that is more than a trial
BY_CRITICS = "num_critics"  # the setting of algorithms whose actor learns from critics alone


class Loop(NamedTuple):
    """An algorithm's settings, its environment, and how wide and long its run is."""

    settings: Any
    env: Any
    envs: int
    ticks: int

    def get(self, name: str, default: Any = None) -> Any:
        """A setting; `default` if it is None, or the algorithm has none."""
        value = getattr(self.settings, name, None)
        return default if value is None else value

    @property
    def updates(self) -> int:
        """Updates in the whole loop."""
        epochs = self.get("update_epochs", 1) * self.get("num_minibatches", 1)
        return self.ticks * self.get("updates", epochs)

    @property
    def standardises(self) -> bool:
        """Whether advantages are standardised; those of teams always are."""
        return self.get("norm_adv", hasattr(self.settings, "critic"))

    @property
    def share(self) -> float:
        """The mean learning rate, as a share of the first."""
        return 0.5 if self.get("anneal_lr", False) else 1.0


def check_can_learn(loop: Loop) -> None:
    """Refuse settings of Shoal's algorithms with which nothing can be learnt."""
    for rule in RULES:
        for what, fix in rule(loop):
            title = type(loop.settings).__name__
            raise SettingError(f"{title} can't learn with {what}", fix)


def remarks(loop: Loop) -> list[str]:
    """What a run is too short to learn, in a line each."""
    return [line for remark in REMARKS for line in remark(loop)]


Finding = tuple[str, str]


def _rates_too_high(loop: Loop) -> Iterator[Finding]:
    for name in ("learning_rate", "critic_learning_rate"):
        if loop.get(name, 0.0) >= 1:
            why = "each update moves every weight by about as much, and they begin at about 0.1"
            yield f"{name}={loop.get(name):g}: {why}", f"Set {name} to 0.1 or less; 1e-3 is usual."


def _rates_too_low(loop: Loop) -> Iterator[Finding]:
    names = ("learning_rate", *(("critic_learning_rate",) if loop.get(BY_CRITICS) else ()))
    for name in names:
        rate = loop.get(name, loop.settings.learning_rate)
        moved = rate * loop.share * loop.updates
        if rate < LOST or (rate < 1e-5 and moved < STILL):
            why = f"{loop.updates:,} updates move no weight by more than {moved:.1g}"
            yield f"{name}={rate:g}: {why}", f"Set {name} to 1e-5 or more, or train for longer."


def _gradients_too_short(loop: Loop) -> Iterator[Finding]:
    """All weights together move by rate x norm / EPS, where the norm is far below EPS."""
    norm = loop.get("max_grad_norm", math.inf)
    whose = f"max_grad_norm={norm:g}"
    if (weight := loop.get("vf_coef", 0.0)) > 1:
        norm, whose = norm / weight, f"vf_coef={weight:g} and {whose}"
    reach = loop.settings.learning_rate * loop.share * loop.updates * norm / EPS
    if norm < EPS / 10 and reach < 50 * STILL:
        why = "what is left of the policy's gradient is lost beside the optimiser's eps of 1e-5"
        yield f"{whose}: {why}", "Set vf_coef to 1 or less, and max_grad_norm to 0.01 or more."


def _entropy_outweighs(loop: Loop) -> Iterator[Finding]:
    """The policy that is best then has log π in proportion to advantages / weight."""
    trust = min(1.0, loop.get("clip_rho_threshold", 1.0))
    is_scaled = loop.get("norm_reward", False) or loop.get(
        "norm_adv", hasattr(loop.settings, "critic")
    )
    weight = loop.get("ent_coef", 0.0) / trust
    if is_scaled and weight >= LARGEST:
        clipped = f" and clip_rho_threshold={trust:g}" if trust < 1 else ""
        why = "the entropy outweighs every advantage, so all actions stay as likely as at first"
        yield f"ent_coef={loop.get('ent_coef'):g}{clipped}: {why}", "Set ent_coef to 1 or less."


def _steps_without_weight(loop: Loop) -> Iterator[Finding]:
    clip = loop.get("clip_rho_threshold", 1.0)
    if clip < EPS / LARGEST:
        why = "steps have that weight in the gradient, which is lost beside the optimiser's 1e-5"
        yield f"clip_rho_threshold={clip:g}: {why}", "Set it to 1, as in the paper."


def _nothing_beside_one(loop: Loop) -> Iterator[Finding]:
    """Settings that are added to 1, or rewards to values, and lost in float32."""
    for name in ("clip_eps", "tau"):
        if loop.get(name, 1.0) < LOST:
            what = f"{name}={loop.get(name):g}: 1 + {name} is 1 in float32, so nothing moves"
            yield what, f"Set {name} to 1e-4 or more."
    scale = loop.get("reward_scale", 1.0)
    if not LOST < scale < 1 / LOST:
        why = "rewards and entropies differ by more than float32 has digits"
        yield f"reward_scale={scale:g}: {why}", "Set it to between 1e-3 and 1e3."


def _standardised_alone(loop: Loop) -> Iterator[Finding]:
    count = loop.get("num_steps", 1) * loop.envs * max(1, len(getattr(loop.env, "agents", ())))
    if count == 1 and loop.standardises:
        why = "the standardised advantage of a single step is always 0"
        yield f"num_steps=1 and one environment: {why}", "Use more steps or environments."


def _entropy_out_of_reach(loop: Loop) -> Iterator[Finding]:
    space, wanted = getattr(loop.env, "action_space", None), loop.get("target_entropy")
    if wanted is None or not isinstance(space, Box):
        return
    most = space.size * math.log(2)
    if wanted >= most:
        why = f"a policy in {space.size} dimensions has {most:.3g} at most, and would stay uniform"
        yield f"target_entropy={wanted:g}: {why}", "Leave it out: it is then -dim(A)."


def _returns_all_equal(loop: Loop) -> Iterator[Finding]:
    if loop.get("values") != "categorical":
        return
    (low, high), atoms = loop.settings.value_range, loop.settings.num_atoms
    if atoms < 2:
        yield f"num_atoms={atoms}: every return is the same", "Set num_atoms to 2 or more."
    elif len({*np.linspace(low, high, atoms, dtype=np.float32)}) < atoms:
        what = f"value_range={low:g},{high:g}: its {atoms} atoms are equal in float32"
        yield what, "Set it to the lowest and the highest return."


def _observations_cut_off(loop: Loop) -> Iterator[Finding]:
    """Replay that keeps only whether a number is 0."""
    if loop.env is None or loop.get("buffer_dtype", "") != "bool":
        return
    boxes = leaves(parts(loop.env.observation_space)[0])
    if any("float" in box.dtype and (box.low, box.high) != (0, 1) for box in boxes):
        why = "replay would keep of each number of an observation whether it is 0"
        yield f"buffer_dtype=bool: {why}", "Set it to float16, or leave it out."


def _never_starts(loop: Loop) -> Iterator[str]:
    starts, steps = loop.get("learning_starts_per_env", 0), loop.get("num_steps", 1)
    first = starts if hasattr(loop.settings, "mixer") else -(-starts // steps)
    if first > loop.ticks:
        yield f"Nothing is learnt before tick {first:,}, and the run has {loop.ticks:,} ticks."


def _targets_never_move(loop: Loop) -> Iterator[str]:
    every = loop.get("target_update_interval", loop.get("policy_frequency", 1))
    what = "target network" if loop.get("target_update_interval") else "actor"
    if every > loop.updates:
        yield f"The {what} moves every {every:,} updates, and the run has {loop.updates:,}."


def _values_out_of_reach(loop: Loop) -> Iterator[str]:
    """A unit of tanh is at most 1, so a value is at most the sum of the last layer's weights."""
    is_plain = hasattr(loop.settings, "norm_reward") and not loop.get("norm_reward")
    if not is_plain or loop.get("activation") != "tanh" or loop.ticks < LONG:
        return
    rate = loop.get("critic_learning_rate", loop.settings.learning_rate)
    reach = rate * loop.share * loop.updates * ((1, *loop.settings.hidden)[-1] + 1)
    if (most := 1 / max(1 - loop.settings.gamma, 1e-3)) > reach:
        enough = f"{2 * most / reach * rate:.0e}".replace("e-0", "e-")
        yield (
            f"Values come to about {reach:.3g} in this run, and returns to {most:.3g} if rewards "
            f"are about 1: set norm_reward, or critic_learning_rate to {enough}."
        )


RULES: list[Callable[[Loop], Iterator[Finding]]] = [
    _rates_too_high,
    _rates_too_low,
    _gradients_too_short,
    _entropy_outweighs,
    _steps_without_weight,
    _nothing_beside_one,
    _standardised_alone,
    _entropy_out_of_reach,
    _returns_all_equal,
    _observations_cut_off,
]
REMARKS: list[Callable[[Loop], Iterator[str]]] = [
    _never_starts,
    _targets_never_move,
    _values_out_of_reach,
]
