"""Distributions over actions. The last axis is the event; any axes before it are a batch."""

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from shoal.envs.spaces import MASK, Action, Box, Dict, Discrete, Observation, parts
from shoal.errors import SettingError

HALF_LOG_2PI = 0.9189385332046727


class Distribution(Protocol):
    """A policy's distribution over its next action."""

    def sample(self, key: jax.Array) -> jax.Array:
        """A random action."""
        ...

    def log_prob(self, action: jax.Array) -> jax.Array:
        """The log of the probability, or density, of `action`."""
        ...

    def entropy(self) -> jax.Array:
        """The entropy, in nats."""
        ...

    def mode(self) -> jax.Array:
        """A most probable action."""
        ...


class Categorical(NamedTuple):
    """One of n actions, with probabilities softmax(logits)."""

    logits: jax.Array

    def sample(self, key: jax.Array) -> jax.Array:
        """A random action."""
        return jax.random.categorical(key, self.logits).astype(jnp.int32)

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Log of softmax(logits)[action]."""
        # The gradient of this sum is elementwise; that of indexing is a scatter, slow on CPUs.
        chosen = jax.nn.one_hot(action, self.logits.shape[-1], dtype=self.logits.dtype)
        return jnp.sum(jax.nn.log_softmax(self.logits) * chosen, axis=-1)

    def entropy(self) -> jax.Array:
        """-Σ p log p."""
        log_probs = jax.nn.log_softmax(self.logits)
        return -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)

    def mode(self) -> jax.Array:
        """The action with the largest logit."""
        return jnp.argmax(self.logits, axis=-1).astype(jnp.int32)


def masked(distribution: Distribution, mask: jax.Array) -> Categorical:
    """The distribution restricted to the actions that `mask` allows."""
    assert isinstance(distribution, Categorical), "only single choices are ever masked"
    # Not -inf: its product with a probability of 0 is no number.
    return Categorical(jnp.where(mask.astype(bool), distribution.logits, -1e9))


def check_mask(seen: Observation, done: Action) -> None:
    """Refuse an observation whose mask isn't one number for each of the actions."""
    if not parts(seen)[1]:
        return
    mask = dict(seen.spaces)[MASK] if isinstance(seen, Dict) else seen
    if not isinstance(done, Discrete) or not isinstance(mask, Box) or mask.shape != (done.n,):
        raise SettingError(
            f"the part `{MASK}` of an observation is {mask}, and the actions are {done}",
            "Let it be one number for each action of a Discrete space: whether it may be taken.",
        )


@dataclass(frozen=True, slots=True)
class MultiCategorical:
    """Several choices, independent of each other: `sizes` cut the logits into one part each."""

    logits: jax.Array
    sizes: tuple[int, ...]

    @property
    def choices(self) -> list[Categorical]:
        """Each choice by itself."""
        ends = list(accumulate(self.sizes))
        return [Categorical(part) for part in jnp.split(self.logits, ends[:-1], axis=-1)]

    def sample(self, key: jax.Array) -> jax.Array:
        """A random action."""
        keys = jax.random.split(key, len(self.sizes))
        drawn = [choice.sample(key) for choice, key in zip(self.choices, keys, strict=True)]
        return jnp.stack(drawn, axis=-1)

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Σ log p_i(a_i)."""
        each = enumerate(self.choices)
        return jnp.sum(jnp.stack([c.log_prob(action[..., i]) for i, c in each]), axis=0)

    def entropy(self) -> jax.Array:
        """Σ H(p_i)."""
        return jnp.sum(jnp.stack([choice.entropy() for choice in self.choices]), axis=0)

    def mode(self) -> jax.Array:
        """The most probable of each choice."""
        return jnp.stack([choice.mode() for choice in self.choices], axis=-1)


class Normal(NamedTuple):
    """Independent normals, one a coordinate. `log_std` may lack the batch axes of `mean`."""

    mean: jax.Array
    log_std: jax.Array

    def sample(self, key: jax.Array) -> jax.Array:
        """A random action."""
        noise = jax.random.normal(key, self.mean.shape, self.mean.dtype)
        return self.mean + jnp.exp(self.log_std) * noise

    def log_prob(self, action: jax.Array) -> jax.Array:
        """-Σ ½ z² + log σ + ½ log 2π, where z = (a - μ) / σ."""
        z = (action - self.mean) * jnp.exp(-self.log_std)
        return -jnp.sum(0.5 * jnp.square(z) + self.log_std + HALF_LOG_2PI, axis=-1)

    def entropy(self) -> jax.Array:
        """Σ log σ + ½ log 2πe."""
        each = jnp.broadcast_to(self.log_std + HALF_LOG_2PI + 0.5, self.mean.shape)
        return jnp.sum(each, axis=-1)

    def mode(self) -> jax.Array:
        """The mean."""
        return self.mean


class TanhNormal(NamedTuple):
    """tanh of independent normals: actions strictly between -1 and 1."""

    mean: jax.Array
    log_std: jax.Array

    def sample(self, key: jax.Array) -> jax.Array:
        """A random action."""
        return jnp.tanh(Normal(*self).sample(key))

    def sample_and_log_prob(self, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """A random action and its log-density, exact also where tanh rounds to ±1."""
        return self.at(jax.random.normal(key, self.mean.shape, self.mean.dtype))

    def at(self, noise: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The action that standard normal `noise` makes, and its log-density."""
        before = self.mean + jnp.exp(self.log_std) * noise
        return jnp.tanh(before), self._log_prob_before(before)

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Log N(artanh a) - Σ log(1 - a²); an action rounded to ±1 is taken for one just inside."""
        edge = 1 - jnp.finfo(action.dtype).eps
        return self._log_prob_before(jnp.arctanh(jnp.clip(action, -edge, edge)))

    def entropy(self) -> jax.Array:
        """H(normal) + E[Σ log(1 - tanh²(x))], an estimate: the expectation has no closed form.

        It is taken by Gauss-Hermite quadrature with three points a coordinate.
        """
        offset = jnp.sqrt(3.0) * jnp.exp(self.log_std)
        at_mean, above, below = (
            _log_slope(x) for x in (self.mean, self.mean + offset, self.mean - offset)
        )
        return Normal(*self).entropy() + jnp.sum(2 / 3 * at_mean + (above + below) / 6, axis=-1)

    def mode(self) -> jax.Array:
        """The tanh of the mean: the median, which is what a greedy policy wants."""
        return jnp.tanh(self.mean)

    def _log_prob_before(self, before: jax.Array) -> jax.Array:
        return Normal(*self).log_prob(before) - jnp.sum(_log_slope(before), axis=-1)


def _log_slope(x: jax.Array) -> jax.Array:
    """log(1 - tanh²(x)), without cancellation."""
    return 2 * (jnp.log(2.0) - x - jax.nn.softplus(-2 * x))
