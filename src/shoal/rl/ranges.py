"""The valid ranges of algorithms' settings: one for each name, the same in all algorithms."""

import math
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

from shoal.errors import SettingError


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number from `low` to `high`; `above` it must be greater than `low`."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False

    def __contains__(self, x: Any) -> bool:
        if not isinstance(x, Real) or isinstance(x, bool):
            return False
        try:
            number = float(x)
        except OverflowError:  # a whole number of hundreds of digits
            return False
        fits = math.isfinite(number) and self.low <= number <= self.high
        return fits and not (self.above and number == self.low)

    def __str__(self) -> str:
        if self.high < math.inf:
            least = f"above {self.low:g} and up" if self.above else f"from {self.low:g}"
            return f"a number {least} to {self.high:g}"
        if self.low == -math.inf:
            return "a finite number"
        return f"a finite number {'above' if self.above else 'of at least'} {self.low:g}"


@dataclass(frozen=True, slots=True)
class Count:
    """A whole number from `low`, and no more than JAX can count."""

    low: int

    def __contains__(self, x: Any) -> bool:
        return isinstance(x, Integral) and not isinstance(x, bool) and self.low <= int(x) < 2**31

    def __str__(self) -> str:
        return f"a whole number from {self.low} to {2**31 - 1:,}"


@dataclass(frozen=True, slots=True)
class Optional:
    """What `inner` allows, or None."""

    inner: Number

    def __contains__(self, x: Any) -> bool:
        return x is None or x in self.inner

    def __str__(self) -> str:
        return f"None, or {self.inner}"


@dataclass(frozen=True, slots=True)
class Pair:
    """Two of what `inner` allows; `rising` if the second must be the greater."""

    inner: Number
    rising: bool = False

    def __contains__(self, x: Any) -> bool:
        if not isinstance(x, tuple | list) or len(x) != 2 or any(y not in self.inner for y in x):
            return False
        return not self.rising or x[0] < x[1]

    def __str__(self) -> str:
        return f"a pair, each {self.inner}" + (", the second the greater" if self.rising else "")


@dataclass(frozen=True, slots=True)
class Several:
    """Any number of what `inner` allows."""

    inner: Count

    def __contains__(self, x: Any) -> bool:
        return isinstance(x, tuple | list) and all(y in self.inner for y in x)

    def __str__(self) -> str:
        return f"a tuple, each {self.inner}"


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of these names."""

    names: tuple[str, ...]

    def __contains__(self, x: Any) -> bool:
        return isinstance(x, str) and x in self.names

    def __str__(self) -> str:
        return f"one of {', '.join(self.names)}"


Range = Number | Count | Optional | Pair | Several | OneOf
ANY, POSITIVE, WEIGHT, SHARE = Number(), Number(0, above=True), Number(0), Number(0, 1)
SOME, MANY = Count(0), Count(1)

# Functions of jax.nn; named here, since this file is read where JAX is not.
ACTIVATIONS = ("tanh", "relu", "silu", "gelu", "elu", "selu", "leaky_relu", "softplus", "sigmoid")

RANGES: dict[str, Range] = {
    "activation": OneOf(ACTIVATIONS),
    "alpha": POSITIVE,
    "batch_size_per_env": MANY,
    "buffer_size_per_env": MANY,
    "burn_in": SOME,
    "clip_c_threshold": POSITIVE,
    "clip_eps": POSITIVE,
    "clip_eps_vf": Optional(POSITIVE),
    "clip_rho_threshold": POSITIVE,
    "ent_coef": WEIGHT,
    "critic": OneOf(("central", "own")),
    "critic_learning_rate": Optional(POSITIVE),
    "epsilon": Pair(SHARE),
    "epsilon_alpha": WEIGHT,
    "epsilon_ticks": MANY,
    "exploration_noise": WEIGHT,
    "gae_lambda": SHARE,
    "gamma": SHARE,
    "hidden": Several(MANY),
    "huber_delta": Optional(POSITIVE),
    "importance_exponent": WEIGHT,
    "learning_rate": POSITIVE,
    "learning_starts_per_env": MANY,
    "max_grad_norm": POSITIVE,
    "memory_width": MANY,
    "mixer_hidden": MANY,
    "mixer_width": MANY,
    "n_step": MANY,
    "noise": WEIGHT,
    "noise_clip": WEIGHT,
    "num_atoms": MANY,
    "num_critics": MANY,
    "num_minibatches": MANY,
    "num_steps": MANY,
    "policy_frequency": MANY,
    "policy_noise": WEIGHT,
    "priority_exponent": WEIGHT,
    "priority_mix": SHARE,
    "reward_scale": POSITIVE,
    "samples_per_insert": POSITIVE,
    "sequence_length": SOME,
    "target_entropy": Optional(ANY),
    "target_kl": Optional(POSITIVE),
    "target_update_interval": MANY,
    "tau": Number(0, 1, above=True),
    "td_lambda": SHARE,
    "total_ticks": SOME,
    "update_epochs": MANY,
    "value_range": Pair(ANY, rising=True),
    "vf_coef": WEIGHT,
    "vtrace_lambda": SHARE,
}


# What a setting means wherever it occurs; a comment beside it says more.
MEANINGS: dict[str, str] = {
    "agent_ids": "agents that share a policy see their index",
    "activation": "of hidden layers: a function of jax.nn",
    "alpha": "the temperature: the weight of the entropy",
    "anneal_importance": "let the importance exponent rise to 1 over the run",
    "anneal_lr": "let the learning rate fall to 0 over the run",
    "batch_size_per_env": "samples of each environment in an update",
    "buffer_dtype": "the dtype of observations in replay",
    "buffer_size_per_env": "steps of each environment that replay keeps",
    "burn_in": "steps that only warm up the memory",
    "clip_c_threshold": "V-trace's c: clips the weights of later steps",
    "clip_eps": "how far the policy may move in an update",
    "clip_eps_vf": "the same of values; None: not clipped",
    "clip_rho_threshold": "V-trace's rho: clips the weight of a TD error",
    "compute_dtype": "what products are computed in",
    "critic_learning_rate": "of the critic; None: learning_rate",
    "double": "the online network chooses the target's action",
    "dueling": "values and advantages have heads of their own",
    "ent_coef": "the weight of the entropy in the loss",
    "epsilon": "of exploration: first and last",
    "epsilon_alpha": "how exploration differs over environments",
    "epsilon_ticks": "ticks from the first to the last epsilon",
    "exploration_noise": "std of the noise on actions taken",
    "gae_lambda": "lambda of generalised advantage estimation",
    "gamma": "the discount",
    "hidden": "widths of the hidden layers",
    "huber_delta": "where the value loss becomes linear; None: nowhere",
    "importance_exponent": "beta of prioritised replay",
    "layer_norm": "normalise hidden layers before their activation",
    "learning_rate": "of the optimiser",
    "learning_starts_per_env": "steps of each environment before learning",
    "max_grad_norm": "gradients are clipped to this norm",
    "memory": "none, gru, lstm or transformer",
    "memory_width": "the width of the memory",
    "mixer_hidden": "the width of the mixer's hypernetworks",
    "mixer_width": "the width of the mixer",
    "n_step": "steps that a return looks ahead",
    "noise": "of noisy networks; 0: none",
    "noise_clip": "target actions' noise is clipped to this",
    "norm_adv": "standardise advantages",
    "norm_obs": "standardise observations",
    "norm_value": "standardise what critics learn",
    "norm_reward": "scale rewards by the std of returns",
    "num_atoms": "atoms of the distribution of returns",
    "num_critics": "critics; targets use the lowest",
    "num_minibatches": "minibatches an epoch",
    "num_steps": "steps of each environment a tick",
    "policy_frequency": "updates of the critics per update of the actor",
    "policy_noise": "std of the noise on target actions",
    "priority_exponent": "alpha of prioritised replay; 0: uniform",
    "priority_mix": "the weight of a sequence's largest TD error",
    "reward_scale": "what rewards are multiplied by",
    "samples_per_insert": "samples drawn for each step that is kept",
    "sequence_length": "steps that memory is learnt through at a time",
    "shared_memory": "the critic shares the actor's memory",
    "target_entropy": "of the policy; None: -dim(A)",
    "target_kl": "how far a tick moves the policy, as a KL divergence",
    "target_update_interval": "updates between those of the target network",
    "tau": "how far targets move in an update",
    "td_lambda": "0: one step; 1: to the end of the sequence",
    "torso": "what sees observations: mlp, nature, resnet, minatar, or file.py:yours",
    "total_ticks": "of the run, which fills it in",
    "update_epochs": "epochs of learning from a rollout",
    "value_range": "the lowest and the highest return",
    "vf_coef": "the weight of the value loss",
    "vtrace_lambda": "V-trace's lambda",
}


# What other libraries, or earlier versions of Shoal, call a setting.
SYNONYMS: dict[str, str] = {
    "activation_fn": "activation",
    "actor_every": "policy_frequency",
    "atoms": "num_atoms",
    "batch_size": "batch_size_per_env",
    "buffer_size": "buffer_size_per_env",
    "capacity": "buffer_size_per_env",
    "clip": "clip_eps",
    "clip_coef": "clip_eps",
    "clip_range": "clip_eps",
    "clip_range_vf": "clip_eps_vf",
    "compute": "compute_dtype",
    "critic_lr": "critic_learning_rate",
    "critics": "num_critics",
    "discount": "gamma",
    "discounting": "gamma",
    "entropy_coef": "ent_coef",
    "entropy_cost": "ent_coef",
    "entropy_weight": "ent_coef",
    "epochs": "update_epochs",
    "epsilon_spread": "epsilon_alpha",
    "exploration": "exploration_noise",
    "keep_as": "buffer_dtype",
    "learning_starts": "learning_starts_per_env",
    "lr": "learning_rate",
    "min_size": "learning_starts_per_env",
    "minibatches": "num_minibatches",
    "n_critics": "num_critics",
    "n_epochs": "update_epochs",
    "n_steps": "num_steps",
    "net_arch": "hidden",
    "network": "torso",
    "normalise_advantages": "norm_adv",
    "normalise_observations": "norm_obs",
    "normalise_rewards": "norm_reward",
    "normalize_advantage": "norm_adv",
    "normalize_observations": "norm_obs",
    "policy_delay": "policy_frequency",
    "rho_clip": "clip_rho_threshold",
    "rollout_length": "num_steps",
    "sequence": "sequence_length",
    "smoothing": "policy_noise",
    "smoothing_clip": "noise_clip",
    "steps": "num_steps",
    "target_every": "target_update_interval",
    "target_network_frequency": "target_update_interval",
    "target_noise_clip": "noise_clip",
    "target_policy_noise": "policy_noise",
    "target_rate": "tau",
    "temperature": "alpha",
    "trace_clip": "clip_c_threshold",
    "trace_decay": "vtrace_lambda",
    "unroll_length": "num_steps",
    "use_valuenorm": "norm_value",
    "value_clip": "clip_eps_vf",
    "value_coef": "vf_coef",
    "value_weight": "vf_coef",
    "windows": "batch_size_per_env",
}


def check_settings(algorithm: Any) -> Any:
    """`algorithm`, if each of its settings has a value in its range, and each switch is a bool."""
    for setting in fields(algorithm):
        value, wanted = getattr(algorithm, setting.name), RANGES.get(setting.name)
        title = f"{setting.name}={value!r} of {type(algorithm).__name__}"
        if wanted is not None and value not in wanted:
            raise SettingError(f"{title} is out of range", f"Set {setting.name} to {wanted}.")
        if setting.type in (bool, "bool") and not isinstance(value, bool):
            raise SettingError(f"{title} is neither true nor false", "Set it to True or False.")
    return algorithm
