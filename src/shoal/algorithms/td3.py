"""Deterministic policy gradients: TD3, of twin critics and a late actor, and DDPG, of neither."""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from shoal.envs import Environment, EnvState, HostEnvironment, HostState, episode_totals, key_rows
from shoal.envs.spaces import Box, parts
from shoal.rl import learning, losses, replay
from shoal.rl.critics import Critics, init_critics, q_values
from shoal.rl.learning import Learner, for_updates, init_learner, init_rings
from shoal.rl.nets import Layers, init_mlp
from shoal.rl.observations import features_of
from shoal.rl.ranges import check_settings
from shoal.rl.torso import check_flat
from shoal.rl.transitions import Seen, Transition, example, read_transitions
from shoal.rl.unit_actions import certain, check_bounded, in_box, noisy
from shoal.tracing.stage import mean, stage

Env = Environment | HostEnvironment
Metrics = dict[str, jax.Array]


class Params(NamedTuple):
    """What is learnt; also the optimiser's states of both, and whether it is their turn."""

    actor: Any
    critics: Any


class Memory(NamedTuple):
    """One environment's replay."""

    key: jax.Array
    ring: replay.Ring


class State(NamedTuple):
    """What a tick carries to the next: the learner, and a row an environment of all else."""

    learner: Learner
    keys: jax.Array
    env_states: EnvState | HostState
    obs: Any
    memory: Memory


class Drawn(NamedTuple):
    """What is learnt from: [environments, updates, windows] of each."""

    batch: Transition
    noise: jax.Array  # by which the target's actions are moved


@dataclass(frozen=True, slots=True)
class TD3:
    """A tick steps every environment `num_steps` times, then learns from replay.

    It learns from each step `samples_per_insert` times on average. An update draws
    `batch_size_per_env` transitions from each environment's replay. Learning starts when each
    replay holds `learning_starts_per_env` steps;
    actions are random before.
    """

    paper: ClassVar[str] = "Fujimoto et al., 2018"
    actions: ClassVar[tuple[type, ...]] = (Box,)
    agents: ClassVar[str] = "one"

    num_steps: int = 4
    batch_size_per_env: int = 16
    samples_per_insert: float = 64.0
    learning_starts_per_env: int = 64
    buffer_size_per_env: int = 16384  # steps an environment
    learning_rate: float = 3e-4
    gamma: float = 0.99
    n_step: int = 1
    num_critics: int = 2  # of which the minimum is used
    policy_frequency: int = 2  # updates of the critics, after which actor and targets are moved
    policy_noise: float = 0.2  # the noise of the target's actions; all noise is of actions in ±1
    noise_clip: float = 0.5
    exploration_noise: float = 0.1  # the noise of the actions taken
    tau: float = 0.005
    hidden: tuple[int, ...] = (256, 256)
    torso: str = "auto"  # or mlp: images are flattened, which are refused otherwise

    def __post_init__(self) -> None:
        check_settings(self)
        replay.updates_a_tick(self.num_steps, self.samples_per_insert, self.batch_size_per_env)
        replay.check_capacity(
            self.buffer_size_per_env, self.learning_starts_per_env, self.num_steps, self.n_step
        )

    def init(self, key: jax.Array, env: Env, envs: int) -> State:
        """The state before the first tick with `envs` environments."""
        actor_key, critic_key, act_key, env_key, replay_key = jax.random.split(key, 5)
        size = check_bounded(type(self).__name__, env.action_space).size
        env_states, obs = env.reset(key_rows(env_key, envs))
        seen = jax.eval_shape(lambda: self.features(env, obs)[0])
        actor = init_mlp(actor_key, (seen.size, *self.hidden, size), last_scale=0.01)
        critics = init_critics(critic_key, (seen.size + size, *self.hidden), self.num_critics)
        params = Params(actor, critics)
        learner = init_learner(params, Params(*map(self.optimiser.init, params)))
        rings = init_rings(example(seen, jnp.zeros(size)), self.buffer_size_per_env, envs).ring
        memory = Memory(key_rows(replay_key, envs), rings)
        return State(learner, key_rows(act_key, envs), env_states, obs, memory)

    def tick(self, env: Env, state: State) -> tuple[State, Metrics]:
        """Steps, then learns."""
        learner, space = state.learner, check_bounded(type(self).__name__, env.action_space)

        def collect(carry: tuple, _: None) -> tuple:
            keys, env_states, obs = carry
            shown = self.features(env, obs)
            keys, unit = self.act(keys, shown, actor=learner.params.actor, ticks=learner.ticks)
            env_states, step = env.step(env_states, in_box(space, unit))
            last = self.features(env, step.last_obs)
            seen = Seen(shown, unit, step.reward, step.terminated, step.truncated, last)
            return (keys, env_states, step.obs), (seen, episode_totals(step))

        start = (state.keys, state.env_states, state.obs)
        rows, seen, totals = learning.collected(collect, start, self.num_steps)
        memory = state.memory._replace(ring=self.replay_add(state.memory.ring, seen))
        key, drawn = self.replay_sample(memory)
        learner, parts = self.learn(learner, drawn)
        return State(learner, *rows, memory._replace(key=key)), parts | totals

    @stage(per="env")
    def act(self, key: jax.Array, shown: jax.Array, *, actor: Layers, ticks: jax.Array) -> tuple:
        """The next key, and the actor's action with noise, or any before it has learnt."""
        key, noise_key, any_key = jax.random.split(key, 3)
        own = noisy(noise_key, certain(actor, shown), self.exploration_noise)
        anything = jax.random.uniform(any_key, own.shape, minval=-1, maxval=1)
        return key, jnp.where(ticks * self.num_steps >= self.learning_starts_per_env, own, anything)

    def play(self, env: Env, state: State, obs: Any, memory: Any, key: Any = None) -> tuple:
        """The actor's action in one environment, with noise if there is a key."""
        unit = certain(state.learner.params.actor, self.features(env, obs))
        unit = noisy(key, unit, self.exploration_noise)
        return in_box(check_bounded(type(self).__name__, env.action_space), unit), ()

    @stage(per="env")
    def replay_add(self, ring: replay.Ring, seen: Seen) -> replay.Ring:
        """The ring with one tick's steps of its environment."""
        return replay.add(ring, seen)

    @stage(per="env")
    def replay_sample(self, memory: Memory) -> tuple[jax.Array, Drawn]:
        """The next key, and windows for all updates, each as one transition, with noise."""
        next_key, draw_key, noise_key = jax.random.split(memory.key, 3)
        count = self.updates * self.batch_size_per_env
        first = replay.draw(draw_key, memory.ring, count, self.n_step)
        batch = read_transitions(memory.ring, first, self.n_step, self.gamma)
        drawn = Drawn(batch, jax.random.normal(noise_key, batch.action.shape))
        return next_key, for_updates(drawn, self.updates, self.batch_size_per_env)

    @stage
    def learn(self, learner: Learner, drawn: Drawn) -> tuple[Learner, Metrics]:
        """The learner after all updates, and the mean parts of the loss."""
        ready = (learner.ticks + 1) * self.num_steps >= self.learning_starts_per_env

        def update(carry: tuple, drawn: Drawn) -> tuple:
            nets, count = carry
            turn = ready & ((count + 1) % self.policy_frequency == 0)
            grads, parts = self.grad(*nets[:2], drawn, turn)
            nets = self.apply(nets, mean(grads), Params(turn, ready))
            return (nets, count + ready), (parts, ())

        begun = learner[:3], learner.updates
        (nets, count), parts, _ = learning.update_often(update, begun, drawn, ready)
        return Learner(*nets, learner.ticks + 1, count), mean(parts)

    @stage
    def grad(self, params: Params, target: Params, drawn: Drawn, turn: jax.Array) -> tuple:
        """The gradient of both losses; of the actor's only where it is its turn."""
        drawn = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), drawn)
        return jax.grad(self.loss, has_aux=True)(params, target, drawn, turn)

    @stage
    def apply(self, nets: tuple, grads: Params, due: Params) -> tuple:
        """Parameters, targets and the optimiser's states after one update of what is due."""
        params, target, opt_state = nets
        moved = map(partial(learning.moved, self.optimiser), params, opt_state, grads, due)
        params, opt_state = (Params(*each) for each in zip(*moved, strict=True))
        rate = jnp.where(due.actor, self.tau, 0.0)
        return params, optax.incremental_update(params, target, rate), opt_state

    def loss(self, params: Params, target: Params, drawn: Drawn, turn: jax.Array) -> tuple:
        """The losses of critics and actor; neither has a slope in the other's part."""
        batch, noise = drawn
        noise = jnp.clip(self.policy_noise * noise, -self.noise_clip, self.noise_clip)
        next_action = jnp.clip(certain(target.actor, batch.next_obs) + noise, -1, 1)
        next_value = losses.soft_value(q_values(target.critics, batch.next_obs, next_action))
        value = lax.stop_gradient(batch.reward + batch.discount * next_value)
        guess = q_values(params.critics, batch.obs, batch.action)
        critic_loss = jnp.sum(jnp.mean(losses.squared_error(guess, value), axis=1))

        def actor_loss(actor: Layers, critics: Critics) -> jax.Array:
            # The first critic's alone, as published.
            return -jnp.mean(q_values(critics[:1], batch.obs, certain(actor, batch.obs)))

        fixed = lax.stop_gradient(params.critics)
        own = lax.cond(turn, actor_loss, lambda *_: jnp.float32(0), params.actor, fixed)
        parts = {"critic_loss": critic_loss, "actor_loss": own, "q_values": jnp.mean(guess)}
        return critic_loss + own, parts

    def features(self, env: Env, obs: Any) -> jax.Array:
        """Observations as one vector."""
        own = parts(env.observation_space)[0]
        check_flat(type(self).__name__, own, self.torso)
        return features_of(env.observation_space, obs, "mlp")

    @property
    def updates(self) -> int:
        """In a tick."""
        return replay.updates_a_tick(
            self.num_steps, self.samples_per_insert, self.batch_size_per_env
        )

    @property
    def optimiser(self) -> optax.GradientTransformation:
        """Adam."""
        return optax.flatten(optax.adam(self.learning_rate))


@dataclass(frozen=True, slots=True)
class DDPG(TD3):
    """The same with one critic, an actor that is never late, and targets without noise."""

    paper: ClassVar[str] = "Lillicrap et al., 2016"

    num_critics: int = 1
    policy_frequency: int = 1
    policy_noise: float = 0.0
