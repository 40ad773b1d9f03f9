"""Proximal policy optimisation (Schulman et al., 2017), for discrete and continuous actions."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from shoal.envs import Environment, EnvState, HostEnvironment, HostState, episode_totals, key_rows
from shoal.envs.spaces import ACTIONS
from shoal.errors import SettingError
from shoal.rl import losses
from shoal.rl.actor_critic import ActorCritic, chances, chances_and_value, init_actor_critic, value
from shoal.rl.blocks import grad_in_blocks
from shoal.rl.nets import computed_in
from shoal.rl.normalise import Moments, init_moments, rescale, see, spread, standardise
from shoal.rl.observations import ObsMoments, as_features, init_obs_moments, normalise_all, see_all
from shoal.rl.returns import gae, past_return
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
    kept: Any  # what is left of the episode's rewards so far, if rewards are to be normalised


class Rollout(NamedTuple):
    """What is learnt from: [steps, envs, ...], or [steps, envs, agents, ...]."""

    obs: Any
    action: jax.Array
    log_prob: jax.Array
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    last_obs: Any
    past: Any = ()  # discounted return of the episode so far, which gives rewards their scale


class Batch(NamedTuple):
    """What the loss sees of a rollout."""

    features: jax.Array
    action: jax.Array
    log_prob: jax.Array
    value: jax.Array
    target: jax.Array
    advantage: jax.Array


@dataclass(frozen=True, slots=True)
class PPO:
    """A tick collects `steps` of every environment, then passes over them `epochs` times."""

    paper: ClassVar[str] = "Schulman et al., 2017"
    actions: ClassVar[tuple[type, ...]] = ACTIONS

    steps: int = 128
    epochs: int = 4
    minibatches: int = 4  # an epoch; each has some of the steps of all environments
    learning_rate: float = 2.5e-4
    total_ticks: int | None = None  # over which the learning rate falls to 0; None: it does not
    discount: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    value_clip: float | None = None
    entropy_weight: float = 0.01
    value_weight: float = 0.5
    max_grad_norm: float = 0.5
    normalise_observations: bool = False
    normalise_rewards: bool = False
    normalise_advantages: bool = True
    hidden: tuple[int, ...] = (64, 64)
    torso: str = "auto"  # what sees observations: mlp, nature, resnet, minatar
    compute: str = "float32"  # or bfloat16: what products are computed in

    def __post_init__(self) -> None:
        if self.steps % self.minibatches:
            raise SettingError(
                f"PPO can't divide {self.steps} steps into {self.minibatches} minibatches",
                "Make `steps` a multiple of `minibatches`.",
            )

    def init(self, key: jax.Array, env: Env, envs: int) -> State:
        """The state before the first tick with `envs` environments."""
        actor_key, critic_key, learner_key, act_key, env_key = jax.random.split(key, 5)
        spaces = env.observation_space, env.action_space
        params: Any = init_actor_critic(actor_key, critic_key, spaces, self.hidden, self.torso)
        params = computed_in(params, self.compute)
        opt_state, moments = self.optimiser.init(params), init_obs_moments(spaces[0], self.torso)
        learner = Learner(params, opt_state, learner_key, moments, init_moments())
        env_states, obs = env.reset(key_rows(env_key, envs))
        rows = (envs, len(env.agents)) if env.agents else (envs,)
        kept = jnp.zeros(rows) if self.normalise_rewards else ()
        return State(learner, key_rows(act_key, envs), env_states, obs, kept)

    def tick(self, env: Env, state: State) -> tuple[State, Metrics]:
        """Collects a rollout and learns from it."""
        learner = state.learner

        def collect(carry: tuple, _: None) -> tuple:
            keys, env_states, obs = carry
            keys, action, log_prob = self.act(
                keys, obs, params=learner.params.acting, obs_moments=learner.obs_moments
            )
            env_states, step = env.step(env_states, action)
            return (keys, env_states, step.obs), (obs, action, log_prob, step._replace(obs=()))

        start = (state.keys, state.env_states, state.obs)
        rows, (seen, action, log_prob, steps) = lax.scan(collect, start, length=self.steps)
        kept, past = state.kept, ()
        if self.normalise_rewards:
            kept, past = past_return(steps.reward, self.discount * ~_ends(steps), state.kept)
        ends = (steps.reward, steps.terminated, steps.truncated, steps.last_obs)
        rollout = Rollout(seen, action, log_prob, *ends, past)
        learner, loss_parts = self.learn(learner, rollout, rows[2])
        totals = jax.tree.map(lambda x: jnp.sum(x, axis=0), episode_totals(steps))
        return State(learner, *rows, kept), loss_parts | totals

    @stage(per="env")
    def act(self, key: jax.Array, obs: Any, *, params: ActorCritic, obs_moments: Any) -> tuple:
        """The next key, an action and its log-probability; of each agent if there are several."""
        key, action_key = jax.random.split(key)
        now = chances(params, self.features(obs, obs_moments))
        action = now.sample(action_key)
        return key, action, now.log_prob(action)

    @stage
    def learn(self, learner: Learner, rollout: Rollout, obs: Any) -> tuple[Learner, Metrics]:
        """The learner after all epochs, and the mean parts of the loss."""
        obs_moments, return_moments = learner.obs_moments, learner.return_moments
        if self.normalise_rewards:
            return_moments = see(return_moments, rollout.past)
            rollout = rollout._replace(reward=rescale(return_moments, rollout.reward))
        batch = self.judge(learner, rollout, obs)
        if self.normalise_observations:
            obs_moments = see_all(obs_moments, rollout.obs)
        spreads = spread(batch.advantage)

        def update(carry: tuple, times: jax.Array) -> tuple:
            params, opt_state = carry
            grads, parts = self.grad(
                params, jax.tree.map(lambda x: x[times], batch), spreads[times]
            )
            grads = mean(grads)
            return self.apply(params, opt_state, grads), parts

        def epoch(carry: tuple, key: jax.Array) -> tuple:
            times = jax.random.permutation(key, self.steps).reshape(self.minibatches, -1)
            return lax.scan(update, carry, times)

        keys = jax.random.split(learner.key, self.epochs + 1)
        start = (learner.params, learner.opt_state)
        (params, opt_state), parts = lax.scan(epoch, start, keys[1:])
        learner = Learner(params, opt_state, keys[0], obs_moments, return_moments)
        return learner, mean(jax.tree.map(jnp.mean, parts))

    def judge(self, learner: Learner, rollout: Rollout, obs: Any) -> Batch:
        """How much better each action was than expected; `obs` is what follows the rollout."""

        def value_of(obs: Any) -> jax.Array:
            return value(learner.params, self.features(obs, learner.obs_moments))

        value_t = value_of(rollout.obs)
        # A step leads to what the next one acts on, save where the time was up: a fresh start.
        next_value_t = jnp.concatenate([value_t[1:], value_of(obs)[None]])
        ran_out = rollout.truncated
        some = mean(jnp.any(ran_out).astype(jnp.float32)) > 0
        last_value_t = lax.cond(some, value_of, lambda _: value_t, rollout.last_obs)
        next_value_t = jnp.where(ran_out, last_value_t, next_value_t)
        discount_t = self.discount * ~rollout.terminated
        lambda_t = self.gae_lambda * ~_ends(rollout)
        advantage_t = gae(rollout.reward, discount_t, value_t, next_value_t, lambda_t)
        features = self.features(rollout.obs, learner.obs_moments)
        target_t = value_t + advantage_t
        return Batch(features, rollout.action, rollout.log_prob, value_t, target_t, advantage_t)

    @stage
    def grad(
        self, params: ActorCritic, batch: Batch, spreads: jax.Array
    ) -> tuple[ActorCritic, Metrics]:
        """The gradient of the loss, and the parts of the loss."""
        if self.normalise_advantages:
            batch = batch._replace(advantage=standardise(batch.advantage, spreads))
        # Time and environments as one axis: XLA's matrix products are twice as fast on it.
        batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)
        return grad_in_blocks(self.loss, params, batch)

    @stage
    def apply(self, params: Any, opt_state: optax.OptState, grads: Any) -> tuple:
        """The parameters and the optimiser's state after one update."""
        updates, opt_state = self.optimiser.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state

    def loss(self, params: ActorCritic, batch: Batch) -> tuple[jax.Array, Metrics]:
        """Policy loss + weighted value loss - weighted entropy, and these parts."""
        now, value = chances_and_value(params, batch.features)
        log_ratio = now.log_prob(batch.action) - batch.log_prob
        value_loss = losses.value_loss(value, batch.value, batch.target, self.value_clip)
        parts = {
            "policy_loss": losses.clipped_surrogate(log_ratio, batch.advantage, self.clip),
            "value_loss": value_loss,
            "entropy": now.entropy(),
            "approx_kl": losses.approximate_kl(log_ratio),
            "clip_fraction": losses.clipped(log_ratio, self.clip),
        }
        parts = {name: jnp.mean(part) for name, part in parts.items()}
        loss = parts["policy_loss"] + self.value_weight * parts["value_loss"]
        loss -= self.entropy_weight * parts["entropy"]
        return loss, {"loss": loss, **parts}

    def features(self, obs: Any, moments: ObsMoments) -> jax.Array:
        """Observations as the networks see them: flat and normalised if so set, or an image."""
        obs = normalise_all(moments, obs) if self.normalise_observations else obs
        return as_features(moments, obs)

    @property
    def optimiser(self) -> optax.GradientTransformation:
        """Adam on clipped gradients; where the end is known, ever slower towards it."""
        rate: Any = self.learning_rate
        if self.total_ticks is not None:
            updates = self.total_ticks * self.epochs * self.minibatches
            rate = optax.linear_schedule(self.learning_rate, 0.0, updates)
        clip = optax.clip_by_global_norm(self.max_grad_norm)
        return optax.flatten(optax.chain(clip, optax.adam(rate, eps=1e-5)))


def _ends(seen: Any) -> jax.Array:
    return seen.terminated | seen.truncated
