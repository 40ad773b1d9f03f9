"""Proximal policy optimisation (Schulman et al., 2017), for discrete and continuous actions.

With memory it is recurrent: rollouts are cut into sequences, each from what was remembered there.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from shoal.envs import Environment, EnvState, HostEnvironment, HostState, key_rows
from shoal.envs.spaces import ACTIONS
from shoal.rl import actor_critic, losses
from shoal.rl.actor_critic import ActorCritic, chances_and_value, init_actor_critic
from shoal.rl.blocks import grad_in_blocks
from shoal.rl.memory import start
from shoal.rl.nets import computed_in
from shoal.rl.normalise import Moments, init_moments, rescale, see, spread, standardise
from shoal.rl.observations import ObsMoments, as_features, init_obs_moments, normalise_all, see_all
from shoal.rl.optimise import clipped_adam, current, learning_rate
from shoal.rl.ranges import check_settings
from shoal.rl.returns import gae, past_return
from shoal.rl.rollout import (
    Rollout,
    as_samples,
    begins,
    check_pieces,
    cut,
    ends,
    in_epochs,
    roll_out,
    steps_of_piece,
)
from shoal.tracing.stage import mean, stage

Env = Environment | HostEnvironment
Metrics = dict[str, jax.Array]


class Learner(NamedTuple):
    """What learning carries from tick to tick."""

    params: ActorCritic
    opt_state: optax.OptState
    key: jax.Array  # draws only what does not depend on the number of environments
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


class Batch(NamedTuple):
    """What the loss sees: [pieces, sequence, envs, ...], or [steps, envs, ...] with no memory."""

    features: Any
    action: jax.Array
    log_prob: jax.Array  # of the policy that ratios are taken to
    value: jax.Array
    target: jax.Array
    advantage: jax.Array
    weight: Any  # how much likelier that policy was to act so than the one that did
    fresh: Any  # which steps are the first of an episode
    memory: Any = ()  # [pieces, envs, ...]: at each piece's start


@dataclass(frozen=True, slots=True)
class PPO:
    """A tick collects `num_steps` of every environment, then learns for `update_epochs` epochs."""

    paper: ClassVar[str] = "Schulman et al., 2017"
    actions: ClassVar[tuple[type, ...]] = ACTIONS

    num_steps: int = 128
    update_epochs: int = 4
    num_minibatches: int = 4  # an epoch; each has some of the steps of all environments
    learning_rate: float = 2.5e-4
    anneal_lr: bool = False  # whether the learning rate falls to 0 over the run
    total_ticks: int = 0  # of the run, which fills it in
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip_eps: float = 0.2
    clip_eps_vf: float | None = None
    ent_coef: float = 0.01
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5
    norm_obs: bool = False
    norm_reward: bool = False
    norm_adv: bool = True
    hidden: tuple[int, ...] = (64, 64)
    torso: str = "auto"  # what sees observations: mlp, nature, resnet, minatar
    compute_dtype: str = "float32"  # or bfloat16: what products are computed in
    memory: str = "none"  # or gru, lstm, transformer
    memory_width: int = 64
    sequence_length: int = 0  # steps that memory is learnt through at a time; 0: a minibatch's
    decoupled: bool = False  # clip about the newest policy, whichever acted: for lagged plans

    def __post_init__(self) -> None:
        check_settings(self)
        check_pieces("PPO", self.num_steps, self.num_minibatches, self.length)

    @property
    def length(self) -> int:
        """Steps of a piece; 0 without memory: they are steps, then."""
        return steps_of_piece(self)

    def init(self, key: jax.Array, env: Env, envs: int) -> State:
        """The state before the first tick with `envs` environments."""
        actor_key, critic_key, learner_key, act_key, env_key = jax.random.split(key, 5)
        spaces = env.observation_space, env.action_space
        shape = (self.hidden, self.torso, (self.memory, self.memory_width))
        params: Any = init_actor_critic((actor_key, critic_key), spaces, *shape)
        params = computed_in(params, self.compute_dtype)
        opt_state, moments = self.optimiser.init(params), init_obs_moments(spaces[0], self.torso)
        learner = Learner(params, opt_state, learner_key, moments, init_moments())
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
        """The learner after all epochs, and the mean parts of the loss."""
        obs_moments, return_moments = learner.obs_moments, learner.return_moments
        if self.norm_reward:
            return_moments = see(return_moments, rollout.past)
            rollout = rollout._replace(reward=rescale(return_moments, rollout.reward))
        batch = self.judge(learner, rollout)
        if self.norm_obs:
            obs_moments = see_all(obs_moments, rollout.obs)
        spreads = spread(batch.advantage)

        def update(carry: tuple, times: jax.Array) -> tuple:
            params, opt_state = carry
            some = jax.tree.map(lambda x: x[times], batch)
            grads, parts = self.grad(params, some, spreads[times])
            return self.apply(params, opt_state, mean(grads)), parts

        pieces = self.num_minibatches, self.num_steps // (self.length or 1) // self.num_minibatches
        nets, key, parts = in_epochs(update, learner[:2], learner.key, self.update_epochs, pieces)
        metrics = mean(parts) | {"learning_rate": current(self.rate, learner.opt_state)}
        return Learner(*nets, key, obs_moments, return_moments), metrics

    def judge(self, learner: Learner, rollout: Rollout) -> Batch:
        """How much better each action was than expected."""
        params, moments = learner.params, learner.obs_moments
        seen = actor_critic.expect(params, lambda obs: self.features(obs, moments), rollout)
        discount_t = self.gamma * ~rollout.terminated
        lambda_t = self.gae_lambda * ~ends(rollout)
        advantage_t = gae(rollout.reward, discount_t, seen.value, seen.next_value, lambda_t)
        log_prob_t, weight_t = rollout.log_prob, ()
        if self.decoupled:
            log_prob_t = actor_critic.chances_of(params, seen).log_prob(rollout.action)
            weight_t = jnp.exp(log_prob_t - rollout.log_prob)
        fresh_t = begins(rollout) if params.memory else ()
        made = (log_prob_t, seen.value, seen.value + advantage_t, advantage_t, weight_t, fresh_t)
        batch = cut(Batch(seen.features, rollout.action, *made), self.length)
        return batch._replace(memory=jax.tree.map(lambda x: x[:: self.length or 1], seen.memory))

    @stage
    def grad(self, params: Any, batch: Batch, spreads: jax.Array) -> tuple[Any, Metrics]:
        """The gradient of the loss, and the parts of the loss."""
        if self.norm_adv:
            batch = batch._replace(advantage=standardise(batch.advantage, spreads))
        memory = as_samples(batch.memory)
        batch = as_samples(batch._replace(memory=()), self.length)._replace(memory=memory)
        return grad_in_blocks(self.loss, params, batch)

    @stage
    def apply(self, params: Any, opt_state: optax.OptState, grads: Any) -> tuple:
        """The parameters and the optimiser's state after one update."""
        updates, opt_state = self.optimiser.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state

    def loss(self, params: ActorCritic, batch: Batch) -> tuple[jax.Array, Metrics]:
        """Policy loss + weighted value loss - weighted entropy, and these parts."""
        now, value = chances_and_value(params, batch.features, batch.memory, batch.fresh)
        parts = losses.ppo(now, value, batch, self.clip_eps, self.clip_eps_vf)
        if self.decoupled:
            parts["policy_loss"] *= batch.weight
        return losses.weighed(parts, self.vf_coef, self.ent_coef)

    def features(self, obs: Any, moments: ObsMoments) -> Any:
        """Observations as the networks see them: flat and normalised if so set, or an image."""
        obs = normalise_all(moments, obs) if self.norm_obs else obs
        return as_features(moments, obs)

    @property
    def rate(self) -> optax.ScalarOrSchedule:
        """The learning rate of each update."""
        return learning_rate(self, self.update_epochs * self.num_minibatches)

    @property
    def optimiser(self) -> optax.GradientTransformation:
        """Adam on clipped gradients."""
        return clipped_adam(self.rate, self.max_grad_norm)
