"""Returns and advantages of ONE trajectory, its time along the first axis.

Suffixes say the time: `reward_t[i]` is the reward for step i, `value_t[i]` the value of the
observation that step i acted on, `next_value_t[i]` the value of the observation it led to. At an
episode's end that is its true last observation, never the first of the next episode. `discount_t`
is 0 where the task terminated, but not where it was merely truncated: the state reached then still
has a value. Further axes, the same for all arguments, are a batch.
"""

from typing import NamedTuple

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
    """A_t = δ_t + γ_t λ_t A_{t+1}, where δ_t = r_t + γ_t V(s_{t+1}) - V(s_t).

    Generalised advantage estimation (Schulman et al., 2016). `lambda_t` must be 0 wherever an
    episode ends, terminated or truncated: what follows belongs to another one.
    """
    delta_t = reward_t + discount_t * next_value_t - value_t
    return discounted_return(delta_t, discount_t * lambda_t, jnp.zeros_like(delta_t[0]))


class Traces(NamedTuple):
    """The clipped importance weights of V-trace, ρ and c, of another policy's trajectory."""

    rho_t: jax.Array  # min(ρ̄, π/μ): of a step's own TD error
    trace_t: jax.Array  # λ min(c̄, π/μ): of all that follows it; 0 where an episode ends
    continues_t: jax.Array  # whether the next step is of the same episode


def traces(
    log_ratio_t: jax.Array, ends_t: jax.Array, clips: tuple[float, float], decay: float = 1.0
) -> Traces:
    """From log π/μ of what was done; `clips` are ρ̄ and c̄, `decay` is λ."""
    ratio_t = jnp.exp(log_ratio_t)
    rho_t, c_t = (jnp.minimum(clip, ratio_t) for clip in clips)
    return Traces(rho_t, decay * c_t * ~ends_t, ~ends_t)


def vtrace(
    reward_t: jax.Array,
    discount_t: jax.Array,
    value_t: jax.Array,
    next_value_t: jax.Array,
    traces: Traces,
) -> tuple[jax.Array, jax.Array]:
    """Targets v_t and advantages ρ_t (r_t + γ_t v_{t+1} - V(s_t)) (Espeholt et al., 2018).

    v_t - V(s_t) = δ_t + γ_t c_t (v_{t+1} - V(s_{t+1})), where δ_t = ρ_t (r_t + γ_t V(s_{t+1}) -
    V(s_t)). After the last step, and where an episode ends, v_{t+1} is V(s_{t+1}).
    """
    delta_t = traces.rho_t * (reward_t + discount_t * next_value_t - value_t)
    error_t = discounted_return(delta_t, discount_t * traces.trace_t, jnp.zeros_like(delta_t[0]))
    next_error_t = jnp.concatenate([error_t[1:], jnp.zeros_like(error_t[:1])]) * traces.continues_t
    target_t = reward_t + discount_t * (next_value_t + next_error_t)
    return value_t + error_t, traces.rho_t * (target_t - value_t)


def discounted_return(
    reward_t: jax.Array, discount_t: jax.Array, last_value: jax.Array
) -> jax.Array:
    """G_t = r_t + γ_t G_{t+1}, and `last_value` is the G after the last step."""

    def back(total: jax.Array, at: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        reward, discount = at
        total = reward + discount * total
        return total, total

    return lax.scan(back, last_value, (reward_t, discount_t), reverse=True)[1]


def running_returns(
    reward_t: jax.Array, discount_t: jax.Array, carried: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """R_t = r_t + γ_{t-1} R_{t-1} for all t, after γ_t R_t of the last t, which is to be carried.

    The discounted sum of an episode's past rewards, whose std gives rewards their scale.
    """

    def step(carried: jax.Array, at: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        reward, discount = at
        running = reward + carried
        return discount * running, running

    return lax.scan(step, carried, (reward_t, discount_t))


def n_step(
    reward_t: jax.Array, terminated_t: jax.Array, truncated_t: jax.Array, discount: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """R = Σ_{i<k} γⁱ r_i with the discount of what follows, and which step was the last.

    A window has k steps: all, or those up to the first at which its episode ends. The discount is
    γᵏ, or 0 where that step terminated; what follows is what the last step led to.
    """
    ends_t = terminated_t | truncated_t
    going_t = jnp.cumprod(jnp.concatenate([jnp.ones_like(ends_t[:1]), ~ends_t[:-1]]), axis=0)
    last = jnp.sum(going_t.astype(jnp.int32), axis=0) - 1
    powers = discount ** jnp.arange(len(reward_t), dtype=reward_t.dtype)
    total = jnp.tensordot(powers, reward_t * going_t, axes=1)
    terminated = jnp.any(terminated_t & going_t.astype(bool), axis=0)
    return total, discount * powers[last] * ~terminated, last


def n_step_returns(
    reward_t: jax.Array, discount_t: jax.Array, next_value_t: jax.Array, ends_t: jax.Array, n: int
) -> jax.Array:
    """G_t = Σ_{i<k} γⁱ r_{t+i} + γᵏ V(s_{t+k}) within a sequence, where `discount_t` is γ or 0.

    There are k = n steps, or as many as there are up to the episode's or the sequence's end.
    """
    cut_t = jnp.concatenate([ends_t[:-1], jnp.ones_like(ends_t[-1:])])
    return_t = reward_t + discount_t * next_value_t
    for _ in range(n - 1):
        later_t = jnp.concatenate([return_t[1:], return_t[-1:]])
        return_t = reward_t + discount_t * jnp.where(cut_t, next_value_t, later_t)
    return return_t
