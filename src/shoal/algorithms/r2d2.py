"""Recurrent replay distributed DQN (Kapturowski et al., 2019), trained on sequences."""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from shoal.algorithms.dqn import Env, Metrics
from shoal.envs import Discrete, EnvState, HostState, episode_totals, key_rows
from shoal.errors import SettingError
from shoal.rl import learning, q_network, replay, transitions
from shoal.rl.learning import Learner, TrainState, init_learner, init_replays
from shoal.rl.memory import forget, start
from shoal.rl.nets import style_of
from shoal.rl.observations import example_features
from shoal.rl.optimise import clipped_adam
from shoal.rl.q_network import QNetwork, Shape, count_actions, obs_features, single_obs_features
from shoal.rl.q_values import epsilon_greedy, rescale, select_value, sequence_priority, unscale
from shoal.rl.ranges import check_settings
from shoal.rl.returns import n_step_returns
from shoal.rl.transitions import PriorityUpdate, Sample, StoredStep, example, importance
from shoal.tracing.stage import mean, stage


class Chunk(NamedTuple):
    """One tick's steps of an environment, and the recurrent state before the first of them."""

    steps: StoredStep  # [steps, ...]
    memory: Any


class State(NamedTuple):
    """What a tick carries to the next: the learner, and a row per environment of all else."""

    learner: Learner
    keys: jax.Array
    env_states: EnvState | HostState
    obs: Any
    memory: Any
    epsilon_exponent: jax.Array  # an environment explores with ε to this power
    replay_keys: jax.Array
    chunks: replay.Replay
    priority_update: PriorityUpdate  # of the sequences that the last tick learnt from


@dataclass(frozen=True, slots=True)
class R2D2:
    """A tick adds a chunk of `num_steps` to every environment's replay, then learns from sequences.

    A sequence consists of whole chunks. Its first `burn_in` steps only refresh the stored recurrent
    state; the other `sequence_length` steps are learnt from, each `samples_per_insert` times on
    average. Learning starts when each replay holds `learning_starts_per_env` steps.
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
    buffer_size_per_env: int = 8192  # steps per environment
    learning_rate: float = 5e-4
    max_grad_norm: float = 10.0
    gamma: float = 0.99
    n_step: int = 5
    rescaled: bool = True  # values are of rescaled returns, h(x)
    target_update_interval: int = 100  # updates between those of the target network
    tau: float = 1.0
    epsilon: tuple[float, float] = (1.0, 0.01)  # first and last
    epsilon_ticks: int = 200  # between them
    epsilon_alpha: float = 0.0  # exponents of ε are 1 to 1 + this over environments (Ape-X: 7)
    priority_exponent: float = 0.9
    importance_exponent: float = 0.6
    priority_mix: float = 0.9  # η: the weight of a sequence's largest |δ|; the rest is its mean's
    hidden: tuple[int, ...] = (64,)
    memory: str = "lstm"  # or gru
    memory_width: int = 64
    torso: Any = "auto"  # or mlp, nature, resnet, minatar, or a network of yours
    activation: str = "relu"  # or another function of jax.nn
    layer_norm: bool = False

    def __post_init__(self) -> None:
        check_settings(self)
        learnt, length = self.sequence_length, self.burn_in + self.sequence_length
        replay.check_chunks(self.burn_in, learnt, self.num_steps)
        if self.memory not in ("lstm", "gru"):
            raise SettingError(f"R2D2 can't keep `{self.memory}`", "Use memory=lstm or gru.")
        batch, n = self.batch_size_per_env * learnt, self.num_steps
        replay.updates_per_tick(n, self.samples_per_insert, batch)
        replay.check_capacity(self.buffer_size_per_env, self.learning_starts_per_env, n, length)

    def init(self, key: jax.Array, env: Env, envs: int) -> State:
        """The state before the first tick with `envs` environments."""
        net_key, act_key, env_key, replay_key = jax.random.split(key, 4)
        shape = Shape(self.hidden, self.torso, count_actions(env), dueling=True)
        shape = shape._replace(memory=(self.memory, self.memory_width), style=style_of(self))
        params: Any = q_network.init_q_network(net_key, env.observation_space, shape)
        learner = init_learner(params, self.optimiser.init(params))
        env_states, obs = env.reset(key_rows(env_key, envs))
        steps, n = example(example_features(env, obs, self.torso), jnp.int32(0)), self.num_steps
        steps = jax.tree.map(lambda x: jax.ShapeDtypeStruct((n, *x.shape), x.dtype), steps)
        chunk = Chunk(steps, start(params.memory))
        chunks = init_replays(chunk, self.buffer_size_per_env // n, envs, self.priority_exponent)
        changes = transitions.no_priorities((envs, self.updates, self.batch_size_per_env))
        exponents = 1 + self.epsilon_alpha * jnp.linspace(0, 1, envs)
        rows = key_rows(act_key, envs), env_states, obs, start(params.memory, (envs,)), exponents
        return State(learner, *rows, key_rows(replay_key, envs), chunks, changes)

    def tick(self, env: Env, state: State) -> tuple[State, Metrics]:
        """Steps the environments, then learns from replay."""
        learner, chunks = state.learner, state.chunks
        act = partial(self.act, params=learner.params, ticks=learner.ticks)

        def collect(carry: tuple, _: None) -> tuple:
            keys, env_states, obs, memory = carry
            row, features = (keys, memory), obs_features(env, obs, self.torso)
            keys, memory, action = act(row, state.epsilon_exponent, features)
            env_states, step = env.step(env_states, action)
            next_features = obs_features(env, step.last_obs, self.torso)
            ends = step.terminated, step.truncated
            stored = StoredStep(features, action, step.reward, *ends, next_features)
            memory = forget(memory, step.terminated | step.truncated)
            return (keys, env_states, step.obs, memory), (stored, episode_totals(step))

        carry = (state.keys, state.env_states, state.obs, state.memory)
        rows, steps, totals = learning.collect_steps(collect, carry, self.num_steps)
        if self.priority_exponent:
            chunks = chunks._replace(priorities=self.replay_update(chunks, state.priority_update))
        chunks = self.replay_add(chunks, Chunk(steps, state.memory))
        replay_keys, sample = self.replay_sample(state.replay_keys, chunks)
        learner, changes, metrics = self.learn(learner, sample)
        state = State(learner, *rows, state.epsilon_exponent, replay_keys, chunks, changes)
        return state, metrics | totals

    @stage(per="env")
    def act(self, row: tuple, epsilon_exponent: jax.Array, features: Any, *, params: QNetwork,
            ticks: jax.Array) -> tuple:  # fmt: skip
        """The next key and memory, and an ε-greedy action."""
        key, memory = row
        key, action_key = jax.random.split(key)
        memory, q_values = q_network.apply(params, memory, features)
        schedule = optax.linear_schedule(*self.epsilon, self.epsilon_ticks)
        epsilon = schedule(ticks) ** epsilon_exponent
        return key, memory, epsilon_greedy(action_key, q_values, epsilon)

    def play(self, env: Any, state: State, obs: Any, memory: Any, key: Any = None) -> tuple:
        """An action in one environment, ε-greedy if there is a key, and the next memory."""
        params, ticks = state.learner.params, state.learner.ticks
        memory = start(params.memory) if memory is None else memory
        memory, q_values = q_network.apply(params, memory, single_obs_features(params, obs))
        epsilon = optax.linear_schedule(*self.epsilon, self.epsilon_ticks)(ticks)
        return epsilon_greedy(key, q_values, epsilon), memory

    @stage(per="env")
    def replay_update(self, chunks: replay.Replay, changes: PriorityUpdate) -> replay.Priorities:
        """The priorities after the update by the last tick's learning; the ring is not copied."""
        return replay.set_priorities(chunks.priorities, chunks.ring, *changes)

    @stage(per="env")
    def replay_add(self, chunks: replay.Replay, chunk: Chunk) -> replay.Replay:
        """Replay with one tick's chunk of its environment."""
        return replay.insert(chunks, jax.tree.map(lambda x: x[None], chunk))

    @stage(per="env")
    def replay_sample(self, key: jax.Array, chunks: replay.Replay) -> tuple[jax.Array, Sample]:
        """The next key, and the sequences of all updates, with the recurrent state before each."""
        key, draw_key = jax.random.split(key)
        count = self.updates * self.batch_size_per_env
        length = (self.burn_in + self.sequence_length) // self.num_steps
        first, ratio = replay.draw_windows(draw_key, chunks, count, length)
        found: Chunk = replay.read(chunks.ring, first, length)
        steps = jax.tree.map(lambda x: x.reshape(x.shape[0], -1, *x.shape[3:]), found.steps)
        sample = Sample(Chunk(steps, jax.tree.map(lambda x: x[:, 0], found.memory)), first, ratio)
        return key, learning.split_updates(sample, self.updates, self.batch_size_per_env)

    @stage
    def learn(self, learner: Learner, sample: Sample) -> tuple[Learner, PriorityUpdate, Metrics]:
        """The learner after all updates, the new priorities, and the mean metrics."""
        ready = (learner.ticks + 1) * self.num_steps >= self.learning_starts_per_env

        def update(state: TrainState, given: tuple[Chunk, jax.Array]) -> tuple:
            grads, (metrics, td_error) = self.grad(state.params, state.target, *given)
            params, opt_state = self.apply(state.params, state.opt_state, mean(grads), ready)
            due = ready & ((state.updates + 1) % self.target_update_interval == 0)
            target = learning.update_target(params, state.target, due, self.tau)
            return TrainState(params, target, opt_state, state.updates + ready), (metrics, td_error)

        given = sample.batch, importance(sample.ratio, self.importance_exponent)
        state, metrics, td_error = learning.run_updates(update, learner.train_state, given, ready)
        changes = transitions.new_priorities(sample.first, td_error, self.priority_exponent, ready)
        return learner.after(state), changes, mean(metrics)

    @stage
    def grad(
        self, params: QNetwork, target: QNetwork, batch: Chunk, weight: jax.Array
    ) -> tuple[QNetwork, tuple[Metrics, jax.Array]]:
        """The gradient of the loss, its metrics, and the priority of each sequence."""
        steps: StoredStep = jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), batch.steps)
        ends_t = steps.terminated | steps.truncated
        is_first_t = jnp.concatenate([jnp.zeros_like(ends_t[:1]), ends_t[:-1]])
        burn_in = jax.tree.map(lambda x: x[: self.burn_in], (steps.obs, is_first_t))
        learnt = jax.tree.map(lambda x: x[self.burn_in :], (steps, ends_t, is_first_t))
        steps, ends_t, is_first_t = learnt

        def q_values(params: QNetwork) -> tuple[jax.Array, jax.Array]:
            """Of all actions, at each step's observation and at its next."""
            memory, _ = q_network.unroll(params, batch.memory, *burn_in)
            memory = lax.stop_gradient(memory)
            _, (q_t, memory_t) = q_network.unroll(params, memory, steps.obs, is_first_t)
            return q_t, q_network.peek(params, memory_t, steps.next_obs)

        _, target_next_q_t = q_values(target)

        def loss(params: QNetwork) -> tuple[jax.Array, tuple]:
            q_t, next_q_t = q_values(params)
            next_value_t = select_value(target_next_q_t, jnp.argmax(next_q_t, -1))
            next_value_t = unscale(next_value_t) if self.rescaled else next_value_t
            discount_t = self.gamma * ~steps.terminated
            return_t = n_step_returns(steps.reward, discount_t, next_value_t, ends_t, self.n_step)
            return_t = rescale(return_t) if self.rescaled else return_t
            error_t = lax.stop_gradient(return_t) - select_value(q_t, steps.action)
            metrics = {"loss": weight * jnp.square(error_t) / 2, "q_values": q_t}
            metrics = jax.tree.map(jnp.mean, metrics)
            return metrics["loss"], (metrics, sequence_priority(abs(error_t), self.priority_mix))

        return jax.grad(loss, has_aux=True)(params)

    @stage
    def apply(self, params: Any, opt_state: Any, grads: Any, ready: jax.Array) -> tuple:
        """The parameters and the optimiser's state after one update, if learning has started."""
        return learning.apply_gradients(self.optimiser, params, opt_state, grads, ready)

    @property
    def updates(self) -> int:
        """Updates per tick."""
        batch = self.batch_size_per_env * self.sequence_length
        return int(self.samples_per_insert * self.num_steps / batch)

    @property
    def optimiser(self) -> optax.GradientTransformation:
        """Adam on clipped gradients."""
        return clipped_adam(self.learning_rate, self.max_grad_norm)
