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
from shoal.rl.critics import Critics, init_critics, q_values
from shoal.rl.learning import for_updates, init_rings
from shoal.rl.nets import Layers, init_mlp
from shoal.rl.observations import features_of
from shoal.rl.ranges import check_settings
from shoal.rl.torso import check_flat
from shoal.rl.transitions import Seen, Transition, example, read_transitions
from shoal.rl.unit_actions import check_bounded, in_box, squashed
from shoal.tracing.stage import mean, stage

Env = Environment | HostEnvironment
Metrics = dict[str, jax.Array]


class Params(NamedTuple):
    """What is learnt."""

    actor: Layers
    critics: Critics
    log_alpha: jax.Array


class Learner(NamedTuple):
    """What learning carries from tick to tick; nothing of it has a row an environment."""

    params: Params
    target: Critics
    opt_state: optax.OptState
    ticks: jax.Array


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
    noise: jax.Array  # of the actions that the policy takes at both ends of a transition


@dataclass(frozen=True, slots=True)
class SAC:
    """A tick steps every environment `num_steps` times, then learns from replay.

    It learns from each step `samples_per_insert` times on average. An update draws
    `batch_size_per_env` transitions from each environment's replay. Learning starts when each
    replay holds `learning_starts_per_env` steps;
    actions are random before.
    """

    paper: ClassVar[str] = "Haarnoja et al., 2018"
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
    num_critics: int = 2
    tau: float = 0.005
    alpha: float = 1.0  # at first
    target_entropy: float | None = None  # None: minus the number of an action's entries
    reward_scale: float = 1.0
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
        actor = init_mlp(actor_key, (seen.size, *self.hidden, 2 * size), last_scale=0.01)
        critics = init_critics(critic_key, (seen.size + size, *self.hidden), self.num_critics)
        params: Any = Params(actor, critics, jnp.log(jnp.float32(self.alpha)))
        learner = Learner(params, critics, self.optimiser.init(params), jnp.int32(0))
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
    def act(
        self, key: jax.Array, shown: jax.Array, *, actor: Layers, ticks: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The next key, and an action of the policy's, or any before it has learnt."""
        key, own_key, any_key = jax.random.split(key, 3)
        own = squashed(actor, shown).sample(own_key)
        anything = jax.random.uniform(any_key, own.shape, minval=-1, maxval=1)
        return key, jnp.where(ticks * self.num_steps >= self.learning_starts_per_env, own, anything)

    def play(self, env: Env, state: State, obs: Any, memory: Any, key: Any = None) -> tuple:
        """The policy's likeliest action in one environment, or one drawn."""
        distribution = squashed(state.learner.params.actor, self.features(env, obs))
        unit = distribution.mode() if key is None else distribution.sample(key)
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
        noise = jax.random.normal(noise_key, (count, 2, batch.action.shape[-1]))
        return next_key, for_updates(Drawn(batch, noise), self.updates, self.batch_size_per_env)

    @stage
    def learn(self, learner: Learner, drawn: Drawn) -> tuple[Learner, Metrics]:
        """The learner after all updates, and the mean parts of the loss."""
        ready = (learner.ticks + 1) * self.num_steps >= self.learning_starts_per_env

        def update(carry: tuple, drawn: Drawn) -> tuple:
            grads, parts = self.grad(*carry[:2], drawn)
            return self.apply(*carry, mean(grads), ready), (parts, ())

        nets, parts, _ = learning.update_often(update, learner[:3], drawn, ready)
        return Learner(*nets, learner.ticks + 1), mean(parts)

    @stage
    def grad(self, params: Params, target: Critics, drawn: Drawn) -> tuple[Params, Metrics]:
        """The gradient of the three losses, each of what it is the loss of."""
        drawn = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), drawn)
        return jax.grad(self.loss, has_aux=True)(params, target, drawn)

    @stage
    def apply(
        self, params: Any, target: Any, opt_state: Any, grads: Any, ready: jax.Array
    ) -> tuple[Any, Any, Any]:
        """Parameters, targets and the optimiser's state after one update, if it is time to."""
        moves, after = self.optimiser.update(grads, opt_state)
        moved: Any = optax.apply_updates(params, moves)
        followed = optax.incremental_update(moved.critics, target, self.tau)
        new, old = (moved, followed, after), (params, target, opt_state)
        return learning.where(ready, new, old)

    def loss(self, params: Params, target: Critics, drawn: Drawn) -> tuple[jax.Array, Metrics]:
        """The losses of critics, actor and α; none has a slope in another's part."""
        batch, noise = drawn
        alpha = lax.stop_gradient(jnp.exp(params.log_alpha))
        next_action, next_log_prob = squashed(params.actor, batch.next_obs).at(noise[:, 0])
        next_value = losses.soft_value(
            q_values(target, batch.next_obs, next_action), next_log_prob, alpha
        )
        value = lax.stop_gradient(self.reward_scale * batch.reward + batch.discount * next_value)
        guess = q_values(params.critics, batch.obs, batch.action)

        action, log_prob = squashed(params.actor, batch.obs).at(noise[:, 1])
        fixed = lax.stop_gradient(params.critics)
        own_value = losses.soft_value(q_values(fixed, batch.obs, action), log_prob, alpha)

        wanted = -action.shape[-1] if self.target_entropy is None else self.target_entropy
        alpha_loss = losses.temperature_loss(params.log_alpha, log_prob, wanted)
        parts = {
            "critic_loss": jnp.sum(jnp.mean(losses.squared_error(guess, value), axis=1)),
            "actor_loss": -jnp.mean(own_value),
            "alpha_loss": jnp.mean(alpha_loss),
        }
        seen = {"alpha": alpha, "entropy": -jnp.mean(log_prob)}
        return sum(parts.values(), jnp.float32(0)), {**parts, **seen, "q_values": jnp.mean(guess)}

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
