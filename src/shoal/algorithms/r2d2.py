"""Recurrent replay distributed DQN (Kapturowski et al., 2019): memory, learnt from sequences."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from shoal.algorithms.dqn import Env, Metrics
from shoal.envs import Discrete, EnvState, HostState, episode_totals, key_rows
from shoal.errors import SettingError
from shoal.rl import learning, q_network, replay, transitions
from shoal.rl.learning import Learner, for_updates, init_learner, init_rings
from shoal.rl.memory import forget, start
from shoal.rl.optimise import clipped_adam
from shoal.rl.q_network import QNetwork, Shape, count_actions, features, init_q_network
from shoal.rl.q_values import best_or_any, mixed, pick, rescale, unscale
from shoal.rl.ranges import check_settings
from shoal.rl.returns import n_step_returns
from shoal.rl.transitions import Drawn, PriorityUpdate, Seen, example, importance
from shoal.tracing.stage import mean, stage


class Chunk(NamedTuple):
    """One tick's steps of an environment, and what was remembered before the first of them."""

    seen: Seen  # [steps, ...]
    memory: Any


class State(NamedTuple):
    """What a tick carries to the next: the learner, and a row an environment of all else."""

    learner: Learner
    keys: jax.Array
    env_states: EnvState | HostState
    obs: Any
    memory: Any
    epsilon_exponent: jax.Array  # to which power of ε an environment explores
    replay_keys: jax.Array
    chunks: replay.Replay
    priority_update: PriorityUpdate  # new priorities of the sequences learnt from last


@dataclass(frozen=True, slots=True)
class R2D2:
    """A tick adds a chunk of `num_steps` to every environment's replay, then learns from sequences.

    A sequence is of whole chunks: the first `burn_in` steps only refresh what was remembered when
    it was made, the other `sequence_length` steps are learnt from, each `samples_per_insert` times
    on average. Learning starts when each replay holds `learning_starts_per_env` steps.
    """

    paper: ClassVar[str] = "Kapturowski et al., 2019"
    actions: ClassVar[tuple[type, ...]] = (Discrete,)
    agents: ClassVar[str] = "one"

    num_steps: int = 16
    batch_size_per_env: int = 2  # sequences of each environment in an update
    samples_per_insert: float = 8.0
    burn_in: int = 16
    sequence_length: int = 32
    learning_starts_per_env: int = 256
    buffer_size_per_env: int = 8192  # steps an environment
    learning_rate: float = 5e-4
    max_grad_norm: float = 10.0
    gamma: float = 0.99
    n_step: int = 5
    rescaled: bool = True  # values are squashed returns
    target_update_interval: int = 100  # updates, after which the target network is moved by `tau`
    tau: float = 1.0
    epsilon: tuple[float, float] = (1.0, 0.01)  # first and last
    epsilon_ticks: int = 200  # between them
    epsilon_alpha: float = 0.0  # ε to powers from 1 to 1 + this over the environments (Ape-X: 7)
    priority_exponent: float = 0.9
    importance_exponent: float = 0.6
    priority_mix: float = 0.9  # η: of the largest error of a sequence, the rest of their mean
    hidden: tuple[int, ...] = (64,)
    memory: str = "lstm"  # or gru
    memory_width: int = 64
    torso: str = "auto"

    def __post_init__(self) -> None:
        check_settings(self)
        learnt, length = self.sequence_length, self.burn_in + self.sequence_length
        replay.check_chunks(self.burn_in, learnt, self.num_steps)
        if self.memory not in ("lstm", "gru"):
            what = f"R2D2 keeps memory with every chunk, and can't keep `{self.memory}`"
            raise SettingError(what, "Use memory=lstm or gru; DQN is without.")
        batch = self.batch_size_per_env * learnt
        replay.updates_a_tick(self.num_steps, self.samples_per_insert, batch)
        sizes = self.buffer_size_per_env, self.learning_starts_per_env
        replay.check_capacity(*sizes, self.num_steps, length)

    def init(self, key: jax.Array, env: Env, envs: int) -> State:
        """The state before the first tick with `envs` environments."""
        net_key, act_key, env_key, replay_key = jax.random.split(key, 4)
        shape = Shape(self.hidden, self.torso, count_actions(env), dueling=True)
        shape = shape._replace(memory=(self.memory, self.memory_width))
        params: Any = init_q_network(net_key, env.observation_space, shape)
        learner = init_learner(params, self.optimiser.init(params))
        env_states, obs = env.reset(key_rows(env_key, envs))
        shown = jax.eval_shape(lambda: features(env, obs, self.torso)[0])
        kept = example(shown, jnp.int32(0))
        n = self.num_steps
        kept = jax.tree.map(lambda x: jax.ShapeDtypeStruct((n, *x.shape), x.dtype), kept)
        kept = Chunk(kept, start(params.memory))
        capacity = self.buffer_size_per_env // self.num_steps
        chunks = init_rings(kept, capacity, envs, self.priority_exponent)
        changes = transitions.no_priorities((envs, self.updates, self.batch_size_per_env))
        exponent = 1 + self.epsilon_alpha * jnp.linspace(0, 1, envs)
        rows = key_rows(act_key, envs), env_states, obs, start(params.memory, (envs,)), exponent
        return State(learner, *rows, key_rows(replay_key, envs), chunks, changes)

    def tick(self, env: Env, state: State) -> tuple[State, Metrics]:
        """Steps, then learns."""
        learner, chunks = state.learner, state.chunks

        def collect(carry: tuple, _: None) -> tuple:
            keys, env_states, obs, memory = carry
            shown = features(env, obs, self.torso)
            shared = {"params": learner.params, "ticks": learner.ticks}
            keys, memory, action = self.act((keys, memory), state.epsilon_exponent, shown, **shared)
            env_states, step = env.step(env_states, action)
            last = features(env, step.last_obs, self.torso)
            seen = Seen(shown, action, step.reward, step.terminated, step.truncated, last)
            memory = forget(memory, step.terminated | step.truncated)
            return (keys, env_states, step.obs, memory), (seen, episode_totals(step))

        begun = (state.keys, state.env_states, state.obs, state.memory)
        rows, seen, totals = learning.collected(collect, begun, self.num_steps)
        chunk = Chunk(seen, state.memory)
        if self.priority_exponent:
            chunks = chunks._replace(priorities=self.replay_update(chunks, state.priority_update))
        chunks = self.replay_add(chunks, chunk)
        replay_keys, drawn = self.replay_sample(state.replay_keys, chunks)
        learner, changes, parts = self.learn(learner, drawn)
        after = State(learner, *rows, state.epsilon_exponent, replay_keys, chunks, changes)
        return after, parts | totals

    @stage(per="env")
    def act(self, row: tuple, exponent: jax.Array, shown: jax.Array, *, params: QNetwork,
            ticks: jax.Array) -> tuple:  # fmt: skip
        """The next key and memory, and the ε-greedy action."""
        key, action_key = jax.random.split(row[0])
        memory, q_values = q_network.look(params, row[1], shown)
        epsilon = optax.linear_schedule(*self.epsilon, self.epsilon_ticks)(ticks) ** exponent
        return key, memory, best_or_any(action_key, q_values, epsilon)

    def play(self, env: Any, state: State, obs: Any, memory: Any, key: Any = None) -> tuple:
        """The greedy action in one environment, or with a key the ε-greedy one; and memory."""
        params, ticks = state.learner.params, state.learner.ticks
        memory = start(params.memory) if memory is None else memory
        memory, q_values = q_network.look(params, memory, q_network.features_of_one(params, obs))
        epsilon = optax.linear_schedule(*self.epsilon, self.epsilon_ticks)(ticks)
        return best_or_any(key, q_values, epsilon), memory

    @stage(per="env")
    def replay_update(self, chunks: replay.Replay, changes: PriorityUpdate) -> replay.Priorities:
        """The priorities updated by the last tick's learning; the ring isn't changed."""
        return replay.set_priorities(chunks.priorities, chunks.ring, *changes)

    @stage(per="env")
    def replay_add(self, chunks: replay.Replay, chunk: Chunk) -> replay.Replay:
        """Replay with one tick's chunk of its environment."""
        return replay.keep(chunks, jax.tree.map(lambda x: x[None], chunk))

    @stage(per="env")
    def replay_sample(self, key: jax.Array, chunks: replay.Replay) -> tuple[jax.Array, Drawn]:
        """The next key, and the sequences for all updates, with the memory before each."""
        key, draw_key = jax.random.split(key)
        count = self.updates * self.batch_size_per_env
        length = (self.burn_in + self.sequence_length) // self.num_steps
        first, ratio = replay.choose(draw_key, chunks, count, length)
        found: Chunk = replay.read(chunks.ring, first, length)
        seen = jax.tree.map(lambda x: x.reshape(x.shape[0], -1, *x.shape[3:]), found.seen)
        drawn = Drawn(Chunk(seen, jax.tree.map(lambda x: x[:, 0], found.memory)), first, ratio)
        return key, for_updates(drawn, self.updates, self.batch_size_per_env)

    @stage
    def learn(self, learner: Learner, drawn: Drawn) -> tuple[Learner, PriorityUpdate, Metrics]:
        """The learner after all updates, the new priorities, and the mean loss."""
        ready = (learner.ticks + 1) * self.num_steps >= self.learning_starts_per_env
        weight = importance(drawn.ratio, self.importance_exponent)

        def update(carry: tuple, given: tuple[Chunk, jax.Array]) -> tuple:
            (params, target, opt_state), count = carry
            grads, (parts, td_error) = self.grad(params, target, *given)
            params, opt_state = self.apply(params, opt_state, mean(grads), ready)
            due = ready & ((count + 1) % self.target_update_interval == 0)
            target = learning.update_target(params, target, due, self.tau)
            return ((params, target, opt_state), count + ready), (parts, td_error)

        begun, given = (learner[:3], learner.updates), (drawn.batch, weight)
        (nets, count), parts, td_error = learning.update_often(update, begun, given, ready)
        changes = transitions.new_priorities(drawn.first, td_error, self.priority_exponent, ready)
        return Learner(*nets, learner.ticks + 1, count), changes, mean(parts)

    @stage
    def grad(
        self, params: QNetwork, target: QNetwork, batch: Chunk, weight: jax.Array
    ) -> tuple[QNetwork, tuple[Metrics, jax.Array]]:
        """The gradient of the loss, its parts, and the TD error of each sequence."""
        seen: Seen = jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), batch.seen)
        ends_t = seen.terminated | seen.truncated
        fresh_t = jnp.concatenate([jnp.zeros_like(ends_t[:1]), ends_t[:-1]])

        burnt = seen.obs[: self.burn_in], fresh_t[: self.burn_in]
        learnt, ends_t, fresh_t = jax.tree.map(lambda x: x[self.burn_in :], (seen, ends_t, fresh_t))

        def values(params: QNetwork) -> tuple[jax.Array, jax.Array]:
            """Of all actions at each step learnt from, and at what it led to."""
            memory, _ = q_network.walk(params, batch.memory, *burnt)
            memory = lax.stop_gradient(memory)
            _, (value_t, memory_t) = q_network.walk(params, memory, learnt.obs, fresh_t)
            return value_t, q_network.peek(params, memory_t, learnt.next_obs)

        _, judged_t = values(target)

        def loss(params: QNetwork) -> tuple[jax.Array, tuple]:
            value_t, chooses_t = values(params)
            next_value_t = pick(judged_t, jnp.argmax(chooses_t, -1))
            next_value_t = unscale(next_value_t) if self.rescaled else next_value_t
            discount_t = self.gamma * ~learnt.terminated
            return_t = n_step_returns(learnt.reward, discount_t, next_value_t, ends_t, self.n_step)
            return_t = rescale(return_t) if self.rescaled else return_t
            error_t = lax.stop_gradient(return_t) - pick(value_t, learnt.action)
            parts = {"loss": weight * jnp.square(error_t) / 2, "q_values": value_t}
            parts = jax.tree.map(jnp.mean, parts)
            return parts["loss"], (parts, mixed(jnp.abs(error_t), self.priority_mix))

        return jax.grad(loss, has_aux=True)(params)

    @stage
    def apply(self, params: Any, opt_state: Any, grads: Any, ready: jax.Array) -> tuple:
        """The parameters and the optimiser's state after one update, if it is time to learn."""
        return learning.moved(self.optimiser, params, opt_state, grads, ready)

    @property
    def updates(self) -> int:
        """In a tick."""
        batch = self.batch_size_per_env * self.sequence_length
        return int(self.samples_per_insert * self.num_steps / batch)

    @property
    def optimiser(self) -> optax.GradientTransformation:
        """Adam on clipped gradients."""
        return clipped_adam(self.learning_rate, self.max_grad_norm)
