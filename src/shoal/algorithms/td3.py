"""Deterministic policy gradients: TD3, with twin critics and delayed actor updates, and DDPG."""

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
from shoal.rl.learning import Buffer, Learner, TrainState, init_learner, init_replays, split_updates
from shoal.rl.nets import style_of
from shoal.rl.observations import example_features, features_of
from shoal.rl.ranges import check_settings
from shoal.rl.transitions import StoredStep, Transition, example, read_transitions
from shoal.rl.unit_actions import (
    add_noise,
    check_bounded,
    deterministic_action,
    scale_to_box,
    uniform_until,
)
from shoal.tracing.stage import mean, stage

Env = Environment | HostEnvironment
Metrics = dict[str, jax.Array]


class Params(NamedTuple):
    """What is trained; also the optimiser's states of both, and whether they are due."""

    actor: Any
    critics: Any


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
    noise: jax.Array  # of target policy smoothing, before scaling and clipping


@dataclass(frozen=True, slots=True)
class TD3:
    """A tick steps every environment `num_steps` times, then learns from replay.

    It learns from each step `samples_per_insert` times on average. An update draws
    `batch_size_per_env` transitions from each environment's replay. Learning starts when each
    replay holds `learning_starts_per_env` steps; actions are uniform before.
    """

    paper: ClassVar[str] = "Fujimoto et al., 2018"
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
    num_critics: int = 2  # targets use the lowest
    policy_frequency: int = 2  # updates of the critics per update of actor and targets
    policy_noise: float = 0.2  # std of the target actions' noise, for actions in [-1, 1]
    noise_clip: float = 0.5
    exploration_noise: float = 0.1  # std of the noise of the actions taken
    tau: float = 0.005
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
        actor = init_actor(actor_key, sizes, size)
        critics = init_critics(critic_key, sizes, self.num_critics)
        params = Params(actor, critics)
        opt_state = Params(
            *(rule.init(of) for rule, of in zip(self.optimisers, params, strict=True))
        )
        learner = init_learner(params, opt_state)
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
    def act(self, key: jax.Array, features: Any, *, actor: Net, ticks: jax.Array) -> tuple:
        """The next key, and μ(s) plus noise, or a uniform action until learning starts."""
        key, noise_key, uniform_key = jax.random.split(key, 3)
        unit = add_noise(noise_key, deterministic_action(actor, features), self.exploration_noise)
        ready = ticks * self.num_steps >= self.learning_starts_per_env
        return key, uniform_until(ready, uniform_key, unit)

    def play(self, env: Env, state: State, obs: Any, memory: Any, key: Any = None) -> tuple:
        """The actor's action in one environment, with noise if there is a key."""
        unit = deterministic_action(state.learner.params.actor, self.features(env, obs))
        unit = add_noise(key, unit, self.exploration_noise)
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
        sample = Sample(batch, jax.random.normal(noise_key, batch.action.shape))
        return next_key, split_updates(sample, self.updates, self.batch_size_per_env)

    @stage
    def learn(self, learner: Learner, sample: Sample) -> tuple[Learner, Metrics]:
        """The learner after all updates, and the mean metrics."""
        ready = (learner.ticks + 1) * self.num_steps >= self.learning_starts_per_env

        def update(state: TrainState, sample: Sample) -> tuple:
            params, target, opt_state, updates = state
            actor_due = ready & ((updates + 1) % self.policy_frequency == 0)
            grads, metrics = self.grad(params, target, sample, actor_due)
            due = Params(actor_due, ready)
            nets = self.apply((params, target, opt_state), mean(grads), due)
            params, target, opt_state = nets
            return TrainState(params, target, opt_state, updates + ready), (metrics, ())

        state, metrics, _ = learning.run_updates(update, learner.train_state, sample, ready)
        return learner.after(state), mean(metrics)

    @stage
    def grad(self, params: Params, target: Params, sample: Sample, actor_due: jax.Array) -> tuple:
        """The gradient of both losses; of the actor's only when its update is due."""
        sample = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), sample)
        return jax.grad(self.loss, has_aux=True)(params, target, sample, actor_due)

    @stage
    def apply(self, nets: tuple, grads: Params, due: Params) -> tuple[Any, Any, Any]:
        """Parameters, targets and the optimiser's states after one update of those that are due."""
        params, target, opt_state = nets
        moved = map(learning.apply_gradients, self.optimisers, params, opt_state, grads, due)
        params, opt_state = (Params(*each) for each in zip(*moved, strict=True))
        rate = jnp.where(due.actor, self.tau, 0.0)
        return params, optax.incremental_update(params, target, rate), opt_state

    def loss(self, params: Params, target: Params, sample: Sample, actor_due: jax.Array) -> tuple:
        """The losses of critics and actor; each has a gradient in its own parameters only."""
        batch, noise = sample
        noise = jnp.clip(self.policy_noise * noise, -self.noise_clip, self.noise_clip)
        next_action = jnp.clip(deterministic_action(target.actor, batch.next_obs) + noise, -1, 1)
        next_value = losses.soft_value(q_values(target.critics, batch.next_obs, next_action))
        q_target = lax.stop_gradient(batch.reward + batch.discount * next_value)
        q = q_values(params.critics, batch.obs, batch.action)
        critic_loss = jnp.sum(jnp.mean(losses.squared_error(q, q_target), axis=1))

        def actor_loss(actor: Net, critics: Critics) -> jax.Array:
            # As published, of the first critic alone and not of the minimum.
            action = deterministic_action(actor, batch.obs)
            return -jnp.mean(q_values(critics[:1], batch.obs, action))

        critics = lax.stop_gradient(params.critics)
        loss = lax.cond(actor_due, actor_loss, lambda *_: jnp.float32(0), params.actor, critics)
        metrics = {"critic_loss": critic_loss, "actor_loss": loss, "q_values": jnp.mean(q)}
        return critic_loss + loss, metrics

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
    def optimisers(self) -> Params:
        """Adam for the actor, and Adam for the critics."""
        rates = self.learning_rate, self.critic_learning_rate or self.learning_rate
        return Params(*(optax.flatten(optax.adam(rate)) for rate in rates))


@dataclass(frozen=True, slots=True)
class DDPG(TD3):
    """TD3 with one critic, no delay of the actor, and no noise in target actions."""

    paper: ClassVar[str] = "Lillicrap et al., 2016"

    num_critics: int = 1
    policy_frequency: int = 1
    policy_noise: float = 0.0
