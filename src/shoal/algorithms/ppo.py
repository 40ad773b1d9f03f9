"""Proximal policy optimisation (Schulman et al., 2017), for discrete and continuous actions.

With memory it is recurrent: rollouts are cut into chunks, each with the memory at its start.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from shoal.envs import Environment, HostEnvironment
from shoal.envs.spaces import ACTIONS
from shoal.rl import actor_critic, losses, normalise, observations, on_policy, rollouts
from shoal.rl.actor_critic import ActorCritic
from shoal.rl.blocks import grad_in_blocks
from shoal.rl.learning import where
from shoal.rl.observations import ObsMoments
from shoal.rl.on_policy import Learner, State
from shoal.rl.optimise import clipped_adam, current_rate, global_norm, learning_rate, scale_critic
from shoal.rl.ranges import check_settings
from shoal.rl.returns import gae
from shoal.rl.rollouts import Batch, Rollout, is_first, is_last
from shoal.tracing.stage import mean, stage

Env = Environment | HostEnvironment
Metrics = dict[str, jax.Array]


@dataclass(frozen=True, slots=True)
class PPO:
    """A tick collects `num_steps` of every environment, then learns for `update_epochs` epochs."""

    paper: ClassVar[str] = "Schulman et al., 2017"
    actions: ClassVar[tuple[type, ...]] = ACTIONS

    num_steps: int = 128
    update_epochs: int = 4
    num_minibatches: int = 4  # an epoch
    learning_rate: float = 2.5e-4
    critic_learning_rate: float | None = None  # None: learning_rate
    anneal_lr: bool = False  # whether the learning rate falls to 0 over the run
    total_ticks: int = 0  # of the run, which fills it in
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip_eps: float = 0.2
    clip_eps_vf: float | None = None
    target_kl: float | None = None  # a tick's updates end where the policy is 1.5 times as far
    ent_coef: float = 0.01
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5
    norm_obs: bool = False
    norm_reward: bool = False
    norm_adv: bool = True
    hidden: tuple[int, ...] = (64, 64)
    torso: Any = "auto"  # what sees observations: mlp, nature, resnet, minatar, or your network
    activation: str = "tanh"  # or another function of jax.nn
    layer_norm: bool = False
    compute_dtype: str = "float32"  # or bfloat16: what products are computed in
    memory: str = "none"  # or gru, lstm, transformer
    memory_width: int = 64
    sequence_length: int = 0  # steps that memory is learnt through at a time; 0: all of a rollout
    decoupled: bool = False  # for lagged plans: clip around the newest policy, not the acting one

    def __post_init__(self) -> None:
        check_settings(self)
        rollouts.check_chunks(self)

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
        """The learner after all epochs, and the means of their metrics."""
        weight = normalise.weight_of_active(rollout.active)
        learner, rollout = on_policy.normalise_rewards(learner, rollout, weight, self)
        batch = self.compute_advantages(learner, rollout, weight)

        def update(carry: tuple, minibatch: Batch) -> tuple:
            params, opt_state, stopped = carry
            grads, parts = self.grad(params, minibatch)
            grads = mean(grads)  # over all replicas, where there are several
            updated = self.apply(params, opt_state, grads)
            others = {"grad_norm": global_norm(grads)}
            if self.target_kl is not None:
                stopped |= mean(parts["approx_kl"]) > 1.5 * self.target_kl
                updated = where(stopped, (params, opt_state), updated)
                others["updates_skipped"] = stopped.astype(jnp.float32)
            return (*updated, stopped), (parts, others)

        start = learner.params, learner.opt_state, jnp.bool(False)
        carry, (parts, others) = rollouts.run_epochs(update, start, batch, rollout.keys, self)
        params, opt_state, _ = carry
        metrics = mean(parts) | others
        fit = batch.value, batch.target, batch.weight
        metrics["explained_variance"] = normalise.explained_variance(*fit)
        metrics["learning_rate"] = current_rate(self.rate, learner.opt_state)
        learner = learner._replace(params=params, opt_state=opt_state)
        if self.norm_obs:
            obs_moments = observations.update_obs_moments(learner.obs_moments, rollout.obs, weight)
            learner = learner._replace(obs_moments=obs_moments)
        return learner, metrics

    def compute_advantages(self, learner: Learner, rollout: Rollout, weight: Any) -> Batch:
        """The rollout with advantages and targets of values, in chunks where there is memory."""
        params, moments = learner.params, learner.obs_moments
        outputs = actor_critic.forward(params, lambda obs: self.features(obs, moments), rollout)
        discount_t = self.gamma * ~rollout.terminated
        lambda_t = self.gae_lambda * ~is_last(rollout)
        value_t, next_value_t = outputs.value, outputs.next_value
        advantage_t = gae(rollout.reward, discount_t, value_t, next_value_t, lambda_t)
        log_prob_t, importance_t = rollout.log_prob, ()
        if self.decoupled:
            log_prob_t = actor_critic.policy_of(params, outputs).log_prob(rollout.action)
            importance_t = jnp.exp(log_prob_t - rollout.log_prob)
        target_t = value_t + advantage_t
        if self.norm_adv:
            advantage_t = normalise.standardise(advantage_t, weight)
        batch = Batch(
            features=outputs.features,
            action=rollout.action,
            log_prob=log_prob_t,
            value=value_t,
            target=target_t,
            advantage=advantage_t,
            importance=importance_t,
            weight=weight,
            is_first=is_first(rollout) if params.memory else (),
            memory=outputs.memory,
        )
        return rollouts.chunk(batch, rollouts.chunk_length(self))

    @stage
    def grad(self, params: Any, batch: Batch) -> tuple[Any, Metrics]:
        """The gradient of the loss, and the parts of the loss; on CPUs in blocks of samples."""
        return grad_in_blocks(self.loss, params, rollouts.as_samples(batch))

    @stage
    def apply(self, params: Any, opt_state: optax.OptState, grads: Any) -> tuple:
        """The parameters and the optimiser's state after one update."""
        updates, opt_state = self.optimiser.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state

    def loss(self, params: ActorCritic, batch: Batch) -> tuple[jax.Array, Metrics]:
        """Policy loss + weighted value loss - weighted entropy, and these parts."""
        pi, value = actor_critic.policy_and_value(
            params, batch.features, batch.memory, batch.is_first
        )
        parts = losses.ppo(pi, value, batch, self)
        if self.decoupled:
            parts["policy_loss"] *= batch.importance
        return losses.actor_critic(parts, batch.weight, self.vf_coef, self.ent_coef)

    def features(self, obs: Any, moments: ObsMoments) -> Any:
        """Observations as the networks see them: flat and normalised if so set, or an image."""
        obs = observations.normalise_obs(moments, obs) if self.norm_obs else obs
        return observations.as_features(moments, obs)

    @property
    def rate(self) -> optax.ScalarOrSchedule:
        """The learning rate of each update."""
        return learning_rate(self, self.update_epochs * self.num_minibatches)

    @property
    def optimiser(self) -> optax.GradientTransformation:
        """Adam on clipped gradients."""
        return scale_critic(clipped_adam(self.rate, self.max_grad_norm), self)
