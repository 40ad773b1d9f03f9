"""What PPO, A2C and IMPALA share: their carried state, and what they normalise."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from shoal.envs import Environment, EnvState, HostEnvironment, HostState, key_rows
from shoal.rl import actor_critic, normalise, rollouts
from shoal.rl.actor_critic import ActorCritic
from shoal.rl.memory import start
from shoal.rl.observations import ObsMoments, init_obs_moments
from shoal.rl.returns import running_returns
from shoal.rl.rollouts import Rollout, is_last

Metrics = dict[str, jax.Array]


class Learner(NamedTuple):
    """What learning carries from tick to tick."""

    params: ActorCritic
    opt_state: optax.OptState
    obs_moments: ObsMoments
    return_moments: normalise.Moments


class State(NamedTuple):
    """What a tick carries to the next: the learner, and a row an environment of all else."""

    learner: Learner
    keys: jax.Array
    env_states: EnvState | HostState
    obs: Any
    memory: Any
    running_return: Any  # of the episode so far, if rewards are normalised; else ()


def init_state(
    key: jax.Array, env: Environment | HostEnvironment, envs: int, settings: Any
) -> State:
    """The state before the first tick of an algorithm with these settings."""
    actor_key, critic_key, act_key, env_key = jax.random.split(key, 4)
    params = actor_critic.init((actor_key, critic_key), env, settings)
    obs_moments = init_obs_moments(env.observation_space, settings.torso)
    opt_state = settings.optimiser.init(params)
    learner = Learner(params, opt_state, obs_moments, normalise.init_moments())
    env_states, obs = env.reset(key_rows(env_key, envs))
    rows = (envs, len(env.agents)) if env.agents else (envs,)
    running_return = jnp.zeros(rows) if settings.norm_reward else ()
    memory = start(params.memory, rows)
    return State(learner, key_rows(act_key, envs), env_states, obs, memory, running_return)


def collect(act: Any, env: Any, state: State, settings: Any) -> tuple[State, Rollout, Metrics]:
    """The state after a rollout, the rollout, and episode totals.

    If rewards are to be normalised, the rollout has the running returns that say their scale.
    """
    state, rollout, totals = rollouts.collect(act, env, state, settings.num_steps)
    if settings.norm_reward:
        discount_t = settings.gamma * ~is_last(rollout)
        carried, running = running_returns(rollout.reward, discount_t, state.running_return)
        state = state._replace(running_return=carried)
        rollout = rollout._replace(running_return=running)
    return state, rollout, totals


def normalise_rewards(
    learner: Learner, rollout: Rollout, weight: Any, settings: Any
) -> tuple[Learner, Rollout]:
    """The rollout with rewards over the std of returns, if so set; and the moments of these."""
    if not settings.norm_reward:
        return learner, rollout
    moments = normalise.update_moments(learner.return_moments, rollout.running_return, weight)
    reward = normalise.scale_by_std(moments, rollout.reward)
    return learner._replace(return_moments=moments), rollout._replace(reward=reward)
