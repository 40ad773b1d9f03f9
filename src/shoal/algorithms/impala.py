"""IMPALA: an actor-critic that learns from the data of older policies (Espeholt et al., 2018).

V-trace weights each step by the newest policy's probability of its action, so actors need not
wait for the learner. Without lag it is A2C.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import optax
from jax import lax

from shoal.envs import Environment, HostEnvironment
from shoal.envs.spaces import ACTIONS
from shoal.rl import actor_critic, losses, normalise, observations, on_policy
from shoal.rl.actor_critic import ActorCritic
from shoal.rl.observations import ObsMoments
from shoal.rl.on_policy import Learner, State
from shoal.rl.optimise import clipped_adam, current_rate, global_norm, learning_rate, scale_critic
from shoal.rl.ranges import check_settings
from shoal.rl.returns import traces, vtrace
from shoal.rl.rollouts import Rollout, is_last
from shoal.tracing.stage import mean, stage

Env = Environment | HostEnvironment
Metrics = dict[str, jax.Array]


@dataclass(frozen=True, slots=True)
class IMPALA:
    """A tick collects `num_steps` of every environment and makes one update from them."""

    paper: ClassVar[str] = "Espeholt et al., 2018"
    actions: ClassVar[tuple[type, ...]] = ACTIONS

    num_steps: int = 20
    learning_rate: float = 6e-4
    critic_learning_rate: float | None = None  # None: learning_rate
    anneal_lr: bool = False  # whether the learning rate falls to 0 over the run
    total_ticks: int = 0  # of the run, which fills it in
    gamma: float = 0.99
    clip_rho_threshold: float = 1.0  # ρ̄: clips the weight of a step's own TD error
    clip_c_threshold: float = 1.0  # c̄: clips the weights of the steps after it
    vtrace_lambda: float = 1.0  # λ
    ent_coef: float = 0.01
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5
    norm_obs: bool = False
    norm_reward: bool = True  # else values take as many updates as returns are large
    hidden: tuple[int, ...] = (64, 64)
    torso: Any = "auto"  # what sees observations: mlp, nature, resnet, minatar, or your network
    activation: str = "tanh"  # or another function of jax.nn
    layer_norm: bool = False
    compute_dtype: str = "float32"  # or bfloat16: what products are computed in
    memory: str = "none"  # or gru, lstm, transformer; learnt through all steps of a rollout
    memory_width: int = 64

    def __post_init__(self) -> None:
        check_settings(self)

    def init(self, key: jax.Array, env: Env, envs: int) -> State:
        """The state before the first tick with `envs` environments."""
        return on_policy.init_state(key, env, envs, self)

    def tick(self, env: Env, state: State) -> tuple[State, Metrics]:
        """Collects a rollout and learns from it."""
        learner = state.learner
        act = partial(self.act, params=learner.params.acting, obs_moments=learner.obs_moments)
        state, rollout, totals = on_policy.collect(act, env, state, self)
        learner, metrics = self.learn(learner, rollout)
        return state._replace(learner=learner), metrics | totals

    @stage(per="env")
    def act(self, key: jax.Array, obs: Any, memory: Any, *, params: Any, obs_moments: Any) -> tuple:
        """The next key and memory, an action and its log-probability; of each agent if several."""
        key, action_key = jax.random.split(key)
        memory, pi = actor_critic.act(params, memory, self.features(obs, obs_moments))
        action = pi.sample(action_key)
        return key, memory, action, pi.log_prob(action)

    def play(self, env: Env, state: State, obs: Any, memory: Any, key: Any = None) -> tuple:
        """The likeliest action in one environment, or one drawn, and what is remembered then."""
        params, moments = state.learner.params, state.learner.obs_moments
        return actor_critic.play(params, memory, self.features(obs, moments), key)

    @stage
    def learn(self, learner: Learner, rollout: Rollout) -> tuple[Learner, Metrics]:
        """The learner after one update, and metrics."""
        weight = normalise.weight_of_active(rollout.active)
        learner, rollout = on_policy.normalise_rewards(learner, rollout, weight, self)
        params, opt_state, obs_moments, return_moments = learner
        rollout = rollout._replace(active=weight)
        grads, (parts, fit) = self.grad(params, obs_moments, rollout)
        grads, metrics, fit = mean((grads, parts, fit))
        metrics["explained_variance"] = losses.explained_variance(fit)
        metrics["grad_norm"] = global_norm(grads)
        metrics["learning_rate"] = current_rate(self.rate, opt_state)
        params, opt_state = self.apply(params, opt_state, grads)
        if self.norm_obs:
            obs_moments = observations.update_obs_moments(obs_moments, rollout.obs, weight)
        return Learner(params, opt_state, obs_moments, return_moments), metrics

    @stage
    def grad(
        self, params: ActorCritic, moments: ObsMoments, rollout: Rollout
    ) -> tuple[ActorCritic, tuple[Metrics, losses.Fit]]:
        """The gradient of the loss, and what else the loss returns."""
        return jax.grad(self.loss, has_aux=True)(params, moments, rollout)

    @stage
    def apply(self, params: Any, opt_state: optax.OptState, grads: Any) -> tuple:
        """The parameters and the optimiser's state after one update."""
        updates, opt_state = self.optimiser.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state

    def loss(
        self, params: ActorCritic, moments: ObsMoments, rollout: Rollout
    ) -> tuple[jax.Array, tuple[Metrics, losses.Fit]]:
        """Policy loss + weighted value loss - weighted entropy; its parts, and how values fit."""
        outputs = actor_critic.forward(params, lambda x: self.features(x, moments), rollout)
        pi = actor_critic.policy_of(params, outputs)
        log_prob_t = pi.log_prob(rollout.action)
        log_ratio_t = lax.stop_gradient(log_prob_t) - rollout.log_prob
        clips = (self.clip_rho_threshold, self.clip_c_threshold)
        trust = traces(log_ratio_t, is_last(rollout), clips, self.vtrace_lambda)
        values = lax.stop_gradient((outputs.value, outputs.next_value))
        discount_t = self.gamma * ~rollout.terminated
        target_t, advantage_t = vtrace(rollout.reward, discount_t, *values, trust)
        parts = {
            "policy_loss": losses.policy_gradient(log_prob_t, advantage_t),
            "value_loss": losses.squared_error(outputs.value, target_t),
            "entropy": pi.entropy(),
            "approx_kl": losses.approximate_kl(log_ratio_t),
        }
        loss, parts = losses.actor_critic(parts, rollout.active, self.vf_coef, self.ent_coef)
        return loss, (parts, losses.fit(outputs.value, target_t, rollout.active))

    def features(self, obs: Any, moments: ObsMoments) -> Any:
        """Observations as the networks see them: flat and normalised if so set, or an image."""
        obs = observations.normalise_obs(moments, obs) if self.norm_obs else obs
        return observations.as_features(moments, obs)

    @property
    def rate(self) -> optax.ScalarOrSchedule:
        """The learning rate of each update."""
        return learning_rate(self)

    @property
    def optimiser(self) -> optax.GradientTransformation:
        """Adam on clipped gradients."""
        return scale_critic(clipped_adam(self.rate, self.max_grad_norm), self)
