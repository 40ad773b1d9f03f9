"""IMPALA: an actor-critic that learns from what older policies did (Espeholt et al., 2018).

V-trace weighs each step by how likely the newest policy is to do what was done, so actors need not
wait for the learner. Where nothing lags, it is A2C.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from shoal.envs import Environment, EnvState, HostEnvironment, HostState, key_rows
from shoal.envs.spaces import ACTIONS
from shoal.rl import actor_critic, losses
from shoal.rl.actor_critic import ActorCritic, init_actor_critic
from shoal.rl.memory import start
from shoal.rl.nets import computed_in
from shoal.rl.normalise import Moments, init_moments, rescale, see
from shoal.rl.observations import ObsMoments, as_features, init_obs_moments, normalise_all, see_all
from shoal.rl.optimise import clipped_adam, current, learning_rate
from shoal.rl.ranges import check_settings
from shoal.rl.returns import past_return, traces, vtrace
from shoal.rl.rollout import Rollout, ends, roll_out
from shoal.tracing.stage import mean, stage

Env = Environment | HostEnvironment
Metrics = dict[str, jax.Array]


class Learner(NamedTuple):
    """What learning carries from tick to tick."""

    params: ActorCritic
    opt_state: optax.OptState
    obs_moments: ObsMoments
    return_moments: Moments


class State(NamedTuple):
    """What a tick carries to the next: the learner, and a row an environment of all else."""

    learner: Learner
    keys: jax.Array
    env_states: EnvState | HostState
    obs: Any
    memory: Any
    kept: Any  # what is left of the episode's rewards so far, if rewards are to be normalised


@dataclass(frozen=True, slots=True)
class IMPALA:
    """A tick collects `num_steps` of every environment and makes one update from them."""

    paper: ClassVar[str] = "Espeholt et al., 2018"
    actions: ClassVar[tuple[type, ...]] = ACTIONS

    num_steps: int = 20
    learning_rate: float = 6e-4
    anneal_lr: bool = False  # whether the learning rate falls to 0 over the run
    total_ticks: int = 0  # of the run, which fills it in
    gamma: float = 0.99
    clip_rho_threshold: float = 1.0  # ρ̄: how far a step's own surprise is believed
    clip_c_threshold: float = 1.0  # c̄: how far all that follows it is
    vtrace_lambda: float = 1.0  # λ
    ent_coef: float = 0.01
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5
    norm_obs: bool = False
    norm_reward: bool = False
    hidden: tuple[int, ...] = (64, 64)
    torso: str = "auto"  # what sees observations: mlp, nature, resnet, minatar
    compute_dtype: str = "float32"  # or bfloat16: what products are computed in
    memory: str = "none"  # or gru, lstm, transformer; learnt through all steps of a rollout
    memory_width: int = 64

    def __post_init__(self) -> None:
        check_settings(self)

    def init(self, key: jax.Array, env: Env, envs: int) -> State:
        """The state before the first tick with `envs` environments."""
        actor_key, critic_key, act_key, env_key = jax.random.split(key, 4)
        spaces = env.observation_space, env.action_space
        shape = (self.hidden, self.torso, (self.memory, self.memory_width))
        params: Any = init_actor_critic((actor_key, critic_key), spaces, *shape)
        params = computed_in(params, self.compute_dtype)
        moments = init_obs_moments(spaces[0], self.torso)
        learner = Learner(params, self.optimiser.init(params), moments, init_moments())
        env_states, obs = env.reset(key_rows(env_key, envs))
        rows = (envs, len(env.agents)) if env.agents else (envs,)
        memory, kept = start(params.memory, rows), jnp.zeros(rows) if self.norm_reward else ()
        return State(learner, key_rows(act_key, envs), env_states, obs, memory, kept)

    def tick(self, env: Env, state: State) -> tuple[State, Metrics]:
        """Collects a rollout and learns from it."""
        learner = state.learner
        shared = {"params": learner.params.acting, "obs_moments": learner.obs_moments}
        act = partial(self.act, **shared)
        rows, rollout, totals = roll_out(act, env, state[1:5], self.num_steps)
        kept = state.kept
        if self.norm_reward:
            kept, past = past_return(rollout.reward, self.gamma * ~ends(rollout), kept)
            rollout = rollout._replace(past=past)
        learner, loss_parts = self.learn(learner, rollout)
        return State(learner, *rows, kept), loss_parts | totals

    @stage(per="env")
    def act(self, key: jax.Array, obs: Any, memory: Any, *, params: Any, obs_moments: Any) -> tuple:
        """The next key and memory, an action and its log-probability; of each agent if several."""
        key, action_key = jax.random.split(key)
        memory, now = actor_critic.act(params, memory, self.features(obs, obs_moments))
        action = now.sample(action_key)
        return key, memory, action, now.log_prob(action)

    def play(self, env: Env, state: State, obs: Any, memory: Any, key: Any = None) -> tuple:
        """The likeliest action in one environment, or one drawn, and what is remembered then."""
        params, moments = state.learner.params, state.learner.obs_moments
        return actor_critic.play(params, memory, self.features(obs, moments), key)

    @stage
    def learn(self, learner: Learner, rollout: Rollout) -> tuple[Learner, Metrics]:
        """The learner after one update, and the parts of the loss."""
        params, opt_state, moments, return_moments = learner
        if self.norm_reward:
            return_moments = see(return_moments, rollout.past)
            rollout = rollout._replace(reward=rescale(return_moments, rollout.reward))
        grads, parts = self.grad(params, moments, rollout)
        rate = current(self.rate, opt_state)
        params, opt_state = self.apply(params, opt_state, mean(grads))
        if self.norm_obs:
            moments = see_all(moments, rollout.obs)
        parts = mean(parts) | {"learning_rate": rate}
        return Learner(params, opt_state, moments, return_moments), parts

    @stage
    def grad(
        self, params: ActorCritic, moments: ObsMoments, rollout: Rollout
    ) -> tuple[ActorCritic, Metrics]:
        """The gradient of the loss, and the parts of the loss."""
        return jax.grad(self.loss, has_aux=True)(params, moments, rollout)

    @stage
    def apply(self, params: Any, opt_state: optax.OptState, grads: Any) -> tuple:
        """The parameters and the optimiser's state after one update."""
        updates, opt_state = self.optimiser.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state

    def loss(
        self, params: ActorCritic, moments: ObsMoments, rollout: Rollout
    ) -> tuple[jax.Array, Metrics]:
        """Policy loss + weighted value loss - weighted entropy, and these parts."""
        seen = actor_critic.expect(params, lambda x: self.features(x, moments), rollout)
        now = actor_critic.chances_of(params, seen)
        log_prob_t = now.log_prob(rollout.action)
        log_ratio_t = lax.stop_gradient(log_prob_t) - rollout.log_prob
        clips = (self.clip_rho_threshold, self.clip_c_threshold)
        trust = traces(log_ratio_t, ends(rollout), clips, self.vtrace_lambda)
        values = lax.stop_gradient((seen.value, seen.next_value))
        discount_t = self.gamma * ~rollout.terminated
        target_t, advantage_t = vtrace(rollout.reward, discount_t, *values, trust)
        parts = {
            "policy_loss": losses.policy_gradient(log_prob_t, advantage_t),
            "value_loss": losses.squared_error(seen.value, target_t),
            "entropy": now.entropy(),
            "approx_kl": losses.approximate_kl(log_ratio_t),
        }
        return losses.weighed(parts, self.vf_coef, self.ent_coef)

    def features(self, obs: Any, moments: ObsMoments) -> Any:
        """Observations as the networks see them: flat and normalised if so set, or an image."""
        obs = normalise_all(moments, obs) if self.norm_obs else obs
        return as_features(moments, obs)

    @property
    def rate(self) -> optax.ScalarOrSchedule:
        """The learning rate of each update."""
        return learning_rate(self)

    @property
    def optimiser(self) -> optax.GradientTransformation:
        """Adam on clipped gradients."""
        return clipped_adam(self.rate, self.max_grad_norm)
