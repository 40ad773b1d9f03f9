"""Soft actor-critic with automatic temperature (Haarnoja et al., 2018), for continuous actions."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from shoal.envs import Environment, EnvState, HostEnvironment, HostState, episode_totals, key_rows
from shoal.envs.spaces import Box, parts
from shoal.rl import learning, losses, replay
from shoal.rl.critics import Critics, Net, Sizes, init_actor, init_critics, q_values
from shoal.rl.learning import Buffer, init_replays, split_updates
from shoal.rl.nets import style_of
from shoal.rl.observations import example_features, features_of
from shoal.rl.optimise import scale_critic
from shoal.rl.ranges import check_settings
from shoal.rl.transitions import StoredStep, Transition, example, read_transitions
from shoal.rl.unit_actions import (
    check_bounded,
    scale_to_box,
    squashed_normal,
    uniform_until,
)
from shoal.tracing.stage import mean, stage

Env = Environment | HostEnvironment
Metrics = dict[str, jax.Array]


class Params(NamedTuple):
    """What is trained."""

    actor: Net
    critics: Critics
    log_alpha: jax.Array


class Learner(NamedTuple):
    """The learner's state between ticks; no part of it has a row per environment."""

    params: Params
    target: Critics
    opt_state: optax.OptState
    ticks: jax.Array


class State(NamedTuple):
    """What a tick carries to the next: the learner, and a row per environment of all else."""

    learner: Learner
    keys: jax.Array
    env_states: EnvState | HostState
    obs: Any
    buffer: Buffer


class Sample(NamedTuple):
    """What a tick's updates draw from replay: [environments, updates, windows] of each."""

    batch: Transition
    noise: jax.Array  # of the policy's actions at both ends of a transition


@dataclass(frozen=True, slots=True)
class SAC:
    """A tick steps every environment `num_steps` times, then learns from replay.

    It learns from each step `samples_per_insert` times on average. An update draws
    `batch_size_per_env` transitions from each environment's replay. Learning starts when each
    replay holds `learning_starts_per_env` steps; actions are uniform before.
    """

    paper: ClassVar[str] = "Haarnoja et al., 2018"
    actions: ClassVar[tuple[type, ...]] = (Box,)
    agents: ClassVar[str] = "one"

    num_steps: int = 4
    batch_size_per_env: int = 16
    samples_per_insert: float = 64.0
    learning_starts_per_env: int = 64
    buffer_size_per_env: int = 16384  # steps per environment
    learning_rate: float = 3e-4
    critic_learning_rate: float | None = None  # None: learning_rate
    gamma: float = 0.99
    n_step: int = 1
    num_critics: int = 2
    tau: float = 0.005
    alpha: float = 1.0  # the initial temperature
    target_entropy: float | None = None  # None: -dim(A)
    reward_scale: float = 1.0
    hidden: tuple[int, ...] = (256, 256)
    torso: Any = "auto"  # or mlp, nature, resnet, minatar, or a network of yours
    activation: str = "relu"  # or another function of jax.nn
    layer_norm: bool = False

    def __post_init__(self) -> None:
        check_settings(self)
        replay.updates_per_tick(self.num_steps, self.samples_per_insert, self.batch_size_per_env)
        replay.check_capacity(
            self.buffer_size_per_env, self.learning_starts_per_env, self.num_steps, self.n_step
        )

    def init(self, key: jax.Array, env: Env, envs: int) -> State:
        """The state before the first tick with `envs` environments."""
        actor_key, critic_key, act_key, env_key, replay_key = jax.random.split(key, 5)
        size = check_bounded(type(self).__name__, env.action_space).size
        env_states, obs = env.reset(key_rows(env_key, envs))
        sizes = Sizes(
            parts(env.observation_space)[0], size, self.hidden, self.torso, style_of(self)
        )
        actor = init_actor(actor_key, sizes, 2 * size)
        critics = init_critics(critic_key, sizes, self.num_critics)
        params: Any = Params(actor, critics, jnp.log(jnp.float32(self.alpha)))
        learner = Learner(params, critics, self.optimiser.init(params), jnp.int32(0))
        features = example_features(env, obs, self.torso)
        stored = example(features, jnp.zeros(size))
        rings = init_replays(stored, self.buffer_size_per_env, envs).ring
        buffer = Buffer(key_rows(replay_key, envs), rings)
        return State(learner, key_rows(act_key, envs), env_states, obs, buffer)

    def tick(self, env: Env, state: State) -> tuple[State, Metrics]:
        """Steps the environments, then learns from replay."""
        learner, space = state.learner, check_bounded(type(self).__name__, env.action_space)

        def collect(carry: tuple, _: None) -> tuple:
            keys, env_states, obs = carry
            features = self.features(env, obs)
            keys, unit = self.act(keys, features, actor=learner.params.actor, ticks=learner.ticks)
            env_states, step = env.step(env_states, scale_to_box(space, unit))
            next_features = self.features(env, step.last_obs)
            ends = step.terminated, step.truncated
            stored = StoredStep(features, unit, step.reward, *ends, next_features)
            return (keys, env_states, step.obs), (stored, episode_totals(step))

        start = (state.keys, state.env_states, state.obs)
        rows, stored, totals = learning.collect_steps(collect, start, self.num_steps)
        buffer = state.buffer._replace(ring=self.replay_add(state.buffer.ring, stored))
        key, sample = self.replay_sample(buffer)
        learner, metrics = self.learn(learner, sample)
        return State(learner, *rows, buffer._replace(key=key)), metrics | totals

    @stage(per="env")
    def act(
        self, key: jax.Array, features: Any, *, actor: Net, ticks: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The next key, and an action of the policy, or a uniform one until learning starts."""
        key, sample_key, uniform_key = jax.random.split(key, 3)
        unit = squashed_normal(actor, features).sample(sample_key)
        ready = ticks * self.num_steps >= self.learning_starts_per_env
        return key, uniform_until(ready, uniform_key, unit)

    def play(self, env: Env, state: State, obs: Any, memory: Any, key: Any = None) -> tuple:
        """The mode of the policy in one environment, or with a key a sample of it."""
        pi = squashed_normal(state.learner.params.actor, self.features(env, obs))
        unit = pi.mode() if key is None else pi.sample(key)
        return scale_to_box(check_bounded(type(self).__name__, env.action_space), unit), ()

    @stage(per="env")
    def replay_add(self, ring: replay.Ring, stored: StoredStep) -> replay.Ring:
        """The ring after adding one tick's steps of its environment."""
        return replay.add(ring, stored)

    @stage(per="env")
    def replay_sample(self, buffer: Buffer) -> tuple[jax.Array, Sample]:
        """The next key, and the transitions and the noise of all updates."""
        next_key, draw_key, noise_key = jax.random.split(buffer.key, 3)
        count = self.updates * self.batch_size_per_env
        first = replay.draw(draw_key, buffer.ring, count, self.n_step)
        batch = read_transitions(buffer.ring, first, self.n_step, self.gamma)
        noise = jax.random.normal(noise_key, (count, 2, batch.action.shape[-1]))
        return next_key, split_updates(Sample(batch, noise), self.updates, self.batch_size_per_env)

    @stage
    def learn(self, learner: Learner, sample: Sample) -> tuple[Learner, Metrics]:
        """The learner after all updates, and the mean metrics."""
        ready = (learner.ticks + 1) * self.num_steps >= self.learning_starts_per_env

        def update(carry: tuple, sample: Sample) -> tuple:
            params, target, opt_state = carry
            grads, metrics = self.grad(params, target, sample)
            return self.apply(params, target, opt_state, mean(grads), ready), (metrics, ())

        carry = learner.params, learner.target, learner.opt_state
        carry, metrics, _ = learning.run_updates(update, carry, sample, ready)
        params, target, opt_state = carry
        return Learner(params, target, opt_state, learner.ticks + 1), mean(metrics)

    @stage
    def grad(self, params: Params, target: Critics, sample: Sample) -> tuple[Params, Metrics]:
        """The gradient of the three losses, each with respect to its own parameters."""
        sample = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), sample)
        return jax.grad(self.loss, has_aux=True)(params, target, sample)

    @stage
    def apply(
        self, params: Any, target: Any, opt_state: Any, grads: Any, ready: jax.Array
    ) -> tuple[Any, Any, Any]:
        """Parameters, targets and optimiser state after one update, if learning has started."""
        updates, new_opt_state = self.optimiser.update(grads, opt_state)
        new_params: Any = optax.apply_updates(params, updates)
        new_target = optax.incremental_update(new_params.critics, target, self.tau)
        new, old = (new_params, new_target, new_opt_state), (params, target, opt_state)
        return learning.where(ready, new, old)

    def loss(self, params: Params, target: Critics, sample: Sample) -> tuple[jax.Array, Metrics]:
        """The losses of critics, actor and α; each has a gradient in its own parameters only."""
        batch, noise = sample
        alpha = lax.stop_gradient(jnp.exp(params.log_alpha))
        next_action, next_log_prob = squashed_normal(params.actor, batch.next_obs).at(noise[:, 0])
        next_q = q_values(target, batch.next_obs, next_action)
        next_value = losses.soft_value(next_q, next_log_prob, alpha)
        q_target = lax.stop_gradient(self.reward_scale * batch.reward + batch.discount * next_value)
        q = q_values(params.critics, batch.obs, batch.action)

        action, log_prob = squashed_normal(params.actor, batch.obs).at(noise[:, 1])
        critics = lax.stop_gradient(params.critics)
        value = losses.soft_value(q_values(critics, batch.obs, action), log_prob, alpha)

        entropy = -action.shape[-1] if self.target_entropy is None else self.target_entropy
        alpha_loss = losses.temperature_loss(params.log_alpha, log_prob, entropy)
        parts = {
            "critic_loss": jnp.sum(jnp.mean(losses.squared_error(q, q_target), axis=1)),
            "actor_loss": -jnp.mean(value),
            "alpha_loss": jnp.mean(alpha_loss),
        }
        metrics = {**parts, "alpha": alpha, "entropy": -jnp.mean(log_prob)}
        return sum(parts.values(), jnp.float32(0)), metrics | {"q_values": jnp.mean(q)}

    def features(self, env: Env, obs: Any) -> Any:
        """Observations as the networks see them: a vector, an image, or as they are."""
        return features_of(env.observation_space, obs, self.torso)

    @property
    def updates(self) -> int:
        """Updates per tick."""
        return replay.updates_per_tick(
            self.num_steps, self.samples_per_insert, self.batch_size_per_env
        )

    @property
    def optimiser(self) -> optax.GradientTransformation:
        """Adam."""
        return scale_critic(optax.flatten(optax.adam(self.learning_rate)), self, "critics")
