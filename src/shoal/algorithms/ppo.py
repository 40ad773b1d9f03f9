"""Proximal policy optimisation (Schulman et al., 2017), for discrete and continuous actions.

A tick collects `steps` of every environment, then makes `epochs` passes over them in minibatches.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from shoal.envs import Discrete, Environment, EnvState
from shoal.errors import SettingError
from shoal.rl import losses
from shoal.rl.distributions import Categorical, Distribution, Normal
from shoal.rl.nets import Layers, init_mlp, mlp
from shoal.rl.normalise import Moments, init_moments, normalise, rescale, update_moments
from shoal.rl.returns import discounted_sum, gae
from shoal.tracing.stage import mean, stage

Metrics = dict[str, jax.Array]


class Params(NamedTuple):
    """Two separate networks, and the spread of a continuous policy; a discrete one has none."""

    actor: Layers
    critic: Layers
    log_std: jax.Array | None


class Learner(NamedTuple):
    """What learning carries from tick to tick."""

    params: Params
    opt_state: optax.OptState
    key: jax.Array  # draws only what does not depend on the number of environments
    obs_moments: Moments
    return_moments: Moments


class State(NamedTuple):
    """What a tick carries to the next; all but the learner has a row an environment."""

    learner: Learner
    keys: jax.Array
    env_states: EnvState
    obs: jax.Array
    past_return: jax.Array  # discounted, of the episode so far: gives rewards their scale


class Rollout(NamedTuple):
    """What the learner sees of a tick: [steps, envs, ...]."""

    obs: jax.Array
    action: jax.Array
    log_prob: jax.Array
    value: jax.Array
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    last_obs: jax.Array


class Batch(NamedTuple):
    """What the losses need."""

    obs: jax.Array
    action: jax.Array
    log_prob: jax.Array
    value: jax.Array
    advantage: jax.Array
    target: jax.Array


@dataclass(frozen=True, slots=True)
class PPO:
    """The settings of PPO."""

    steps: int = 128
    epochs: int = 4
    minibatches: int = 4  # each holds steps / minibatches moments of all environments
    learning_rate: float = 2.5e-4
    total_ticks: int | None = (
        None  # over which the learning rate falls to 0; None keeps it constant
    )
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

    def __post_init__(self) -> None:
        if self.steps % self.minibatches:
            raise SettingError(
                f"PPO can't divide {self.steps} steps into {self.minibatches} minibatches.",
                "Make `steps` a multiple of `minibatches`: a minibatch holds some of the steps of all environments.",
            )

    def init(self, key: jax.Array, env: Environment, envs: int) -> State:
        """The state before the first tick with `envs` environments."""
        actor_key, critic_key, learner_key, act_key, env_key = jax.random.split(key, 5)
        discrete = isinstance(env.action_space, Discrete)
        obs_size, actions = (
            env.observation_space.size,
            env.action_space.n if discrete else env.action_space.size,
        )
        params = Params(
            actor=init_mlp(actor_key, (obs_size, *self.hidden, actions), last_scale=0.01),
            critic=init_mlp(critic_key, (obs_size, *self.hidden, 1)),
            log_std=None if discrete else jnp.zeros(actions),
        )
        learner = Learner(
            params,
            self.optimiser.init(params),
            learner_key,
            init_moments(env.observation_space.shape),
            init_moments(),
        )
        env_states, obs = env.reset(_key_rows(env_key, envs))
        return State(learner, _key_rows(act_key, envs), env_states, obs, jnp.zeros(envs))

    def tick(self, env: Environment, state: State) -> tuple[State, Metrics]:
        """Collects a rollout and learns from it."""
        learner = state.learner

        def step(carry: tuple, _: None) -> tuple:
            keys, env_states, obs = carry
            keys, action, log_prob, value = self.act(
                keys, obs, params=learner.params, obs_moments=learner.obs_moments
            )
            env_states, seen = env.step(env_states, action)
            rollout = Rollout(
                obs,
                action,
                log_prob,
                value,
                seen.reward,
                seen.terminated,
                seen.truncated,
                seen.last_obs,
            )
            done = (seen.terminated | seen.truncated).astype(jnp.float32)
            episodes = {
                "episodes": done,
                "episode_return": done * seen.episode_return,
                "episode_length": done * seen.episode_length,
            }
            return (keys, env_states, seen.obs), (rollout, episodes)

        start = (state.keys, state.env_states, state.obs)
        (keys, env_states, obs), (rollout, episodes) = lax.scan(step, start, length=self.steps)
        learner, past_return, loss_parts = self.learn(learner, rollout, obs, state.past_return)
        metrics = loss_parts | {name: jnp.sum(of, axis=0) for name, of in episodes.items()}
        return State(learner, keys, env_states, obs, past_return), metrics

    @stage(per="env")
    def act(self, key: jax.Array, obs: jax.Array, *, params: Params, obs_moments: Moments) -> tuple:
        """The next key, an action, its log-probability, and the value of `obs`."""
        key, action_key = jax.random.split(key)
        features = self.features(obs_moments, obs)
        policy = _policy(params, features)
        action = policy.sample(action_key)
        return key, action, policy.log_prob(action), _value(params, features)

    @stage
    def learn(
        self, learner: Learner, rollout: Rollout, obs: jax.Array, past_return: jax.Array
    ) -> tuple:
        """The learner after all epochs, the past returns after the rollout, and the mean loss of the minibatches."""
        batch, obs_moments, return_moments, past_return = self.prepare(
            learner, rollout, obs, past_return
        )

        def update(carry: tuple, times: jax.Array) -> tuple:
            params, opt_state = carry
            grads, loss_parts = self.grad(params, jax.tree.map(lambda x: x[times], batch))
            grads = mean(grads)
            return self.apply(params, opt_state, grads), loss_parts

        def epoch(carry: tuple, key: jax.Array) -> tuple:
            times = jax.random.permutation(key, self.steps).reshape(self.minibatches, -1)
            return lax.scan(update, carry, times)

        key, *epoch_keys = jax.random.split(learner.key, self.epochs + 1)
        start = (learner.params, learner.opt_state)
        (params, opt_state), loss_parts = lax.scan(epoch, start, jnp.stack(epoch_keys))
        learner = Learner(params, opt_state, key, obs_moments, return_moments)
        return learner, past_return, mean(jax.tree.map(jnp.mean, loss_parts))

    def prepare(
        self, learner: Learner, rollout: Rollout, obs: jax.Array, past_return: jax.Array
    ) -> tuple:
        """The rollout as a batch to learn from, and what is known of observations and returns after it."""
        obs_moments, return_moments = learner.obs_moments, learner.return_moments
        done = rollout.terminated | rollout.truncated
        past_return, returns = discounted_sum(rollout.reward, self.discount * ~done, past_return)
        reward = rollout.reward
        if self.normalise_rewards:
            return_moments = update_moments(return_moments, returns)
            reward = rescale(return_moments, reward)

        def value(obs: jax.Array) -> jax.Array:
            return _value(learner.params, self.features(learner.obs_moments, obs))

        # What a step led to is what the next one acts on, but where the time was up: there it is the last observation.
        next_value = jnp.concatenate([rollout.value[1:], value(obs)[None]])
        next_value = lax.cond(
            jnp.any(rollout.truncated),
            lambda: jnp.where(rollout.truncated, value(rollout.last_obs), next_value),
            lambda: next_value,
        )
        advantage = gae(
            reward,
            self.discount * ~rollout.terminated,
            rollout.value,
            next_value,
            self.gae_lambda * ~done,
        )
        features = self.features(learner.obs_moments, rollout.obs)
        target = advantage + rollout.value
        batch = Batch(features, rollout.action, rollout.log_prob, rollout.value, advantage, target)
        if self.normalise_observations:
            obs_moments = update_moments(obs_moments, rollout.obs)
        return batch, obs_moments, return_moments, past_return

    @stage
    def grad(self, params: Params, batch: Batch) -> tuple[Params, Metrics]:
        """The gradient of the loss, and the parts of the loss."""
        return jax.grad(self.loss, has_aux=True)(params, batch)

    @stage
    def apply(
        self, params: Params, opt_state: optax.OptState, grads: Params
    ) -> tuple[Params, optax.OptState]:
        """One step of the optimiser."""
        updates, opt_state = self.optimiser.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def loss(self, params: Params, batch: Batch) -> tuple[jax.Array, Metrics]:
        """The mean over the batch of policy loss + weighted value loss - weighted entropy, and these parts."""
        policy, value = _policy(params, batch.obs), _value(params, batch.obs)
        log_ratio = policy.log_prob(batch.action) - batch.log_prob
        advantage = batch.advantage
        if self.normalise_advantages:
            # Of the whole minibatch, wherever its environments are.
            first, second = mean((jnp.mean(advantage), jnp.mean(jnp.square(advantage))))
            advantage = (advantage - first) / (jnp.sqrt(jnp.maximum(second - first**2, 0)) + 1e-8)
        if self.value_clip is None:
            value_loss = losses.squared_error(value, batch.target)
        else:
            value_loss = losses.clipped_squared_error(
                value, batch.value, batch.target, self.value_clip
            )
        parts = {
            "policy_loss": jnp.mean(losses.clipped_surrogate(log_ratio, advantage, self.clip)),
            "value_loss": jnp.mean(value_loss),
            "entropy": jnp.mean(policy.entropy()),
            "approx_kl": jnp.mean(losses.approximate_kl(log_ratio)),
            "clip_fraction": jnp.mean(losses.clipped(log_ratio, self.clip)),
        }
        loss = (
            parts["policy_loss"]
            + self.value_weight * parts["value_loss"]
            - self.entropy_weight * parts["entropy"]
        )
        return loss, {"loss": loss, **parts}

    def features(self, moments: Moments, obs: jax.Array) -> jax.Array:
        """Observations as the networks see them: real, normalised if so set, and flat."""
        batch = obs.shape[: obs.ndim - moments.mean.ndim]
        obs = obs.astype(jnp.float32)
        return (normalise(moments, obs) if self.normalise_observations else obs).reshape(*batch, -1)

    @property
    def optimiser(self) -> optax.GradientTransformation:
        """Adam on clipped gradients, its learning rate falling linearly where the end is known."""
        rate: optax.ScalarOrSchedule = self.learning_rate
        if self.total_ticks is not None:
            updates = self.total_ticks * self.epochs * self.minibatches
            rate = optax.linear_schedule(self.learning_rate, 0.0, updates)
        return optax.chain(
            optax.clip_by_global_norm(self.max_grad_norm), optax.adam(rate, eps=1e-5)
        )


def _policy(params: Params, features: jax.Array) -> Distribution:
    outputs = mlp(params.actor, features)
    return Categorical(outputs) if params.log_std is None else Normal(outputs, params.log_std)


def _value(params: Params, features: jax.Array) -> jax.Array:
    return mlp(params.critic, features)[..., 0]


def _key_rows(key: jax.Array, rows: int) -> jax.Array:
    """A key a row, which depends on the row's index and not on how many there are."""
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(rows))
