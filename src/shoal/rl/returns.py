"""Returns and advantages of ONE trajectory; batch them with `vmap`.

Suffixes say the time: `reward_t[i]` is the reward for step i, `value_t[i]` the value of the observation that step i acted
on, `next_value_t[i]` the value of the observation that it led to. At an episode's end that is its true last
observation, never the first of the next episode. `discount_t` is 0 where the task terminated; where it was merely
truncated it is not, since the state then reached still has a value.
"""

import jax
import jax.numpy as jnp
from jax import lax


def gae(
    reward_t: jax.Array,
    discount_t: jax.Array,
    value_t: jax.Array,
    next_value_t: jax.Array,
    lambda_t: jax.Array,
) -> jax.Array:
    """A_t = d_t + γ_t λ_t A_{t+1}, where d_t = r_t + γ_t V(s_{t+1}) - V(s_t).

    Generalised advantage estimation (Schulman et al., 2016). `lambda_t` must be 0 wherever an episode ends, terminated
    or truncated: what follows belongs to another one.
    """
    delta_t = reward_t + discount_t * next_value_t - value_t

    def back(advantage: jax.Array, at: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        delta, decay = at
        advantage = delta + decay * advantage
        return advantage, advantage

    return lax.scan(
        back, jnp.zeros_like(delta_t[0]), (delta_t, discount_t * lambda_t), reverse=True
    )[1]


def discounted_return(
    reward_t: jax.Array, discount_t: jax.Array, last_value: jax.Array
) -> jax.Array:
    """G_t = r_t + γ_t G_{t+1}, and G_T is `last_value`."""

    def back(total: jax.Array, at: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        reward, discount = at
        total = reward + discount * total
        return total, total

    return lax.scan(back, last_value, (reward_t, discount_t), reverse=True)[1]


def discounted_sum(
    reward_t: jax.Array, discount_t: jax.Array, first: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """R_t = r_t + R_{t-1}, then R_t γ_t is carried on; returns what is carried after the last step, and all R_t.

    The rewards looked back on, discounted as they age: what reward normalisation takes the scale of.
    """

    def forth(total: jax.Array, at: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        reward, discount = at
        total = reward + total
        return discount * total, total

    return lax.scan(forth, first, (reward_t, discount_t))
