"""Deep Q-learning (Mnih et al., 2015), with the extensions of Rainbow as settings."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from shoal.envs import Environment, EnvState, HostEnvironment, HostState, episode_totals, key_rows
from shoal.envs.spaces import Discrete
from shoal.rl import learning, q_network, replay, transitions
from shoal.rl.learning import Learner, TrainState, init_learner, init_replays
from shoal.rl.nets import style_of
from shoal.rl.observations import example_features
from shoal.rl.optimise import clipped_adam, importance_exponent
from shoal.rl.q_network import QNetwork, Shape, count_actions, noise_keys, obs_features, with_noise
from shoal.rl.q_values import Form, epsilon_greedy, make_form, mean_return, select_atoms, td_loss
from shoal.rl.ranges import check_settings
from shoal.rl.transitions import PriorityUpdate, Sample, StoredStep, Transition, example, importance
from shoal.tracing.stage import mean, stage

Env = Environment | HostEnvironment
Metrics = dict[str, jax.Array]
OWN = 0x4015E  # sets the keys of noise apart from those that a key is split into


class State(NamedTuple):
    """What a tick carries to the next: the learner, and a row per environment of all else."""

    learner: Learner
    keys: jax.Array
    env_states: EnvState | HostState
    obs: Any
    epsilon_exponent: jax.Array  # an environment explores with ε to this power
    replay_keys: jax.Array
    buffer: replay.Replay
    priority_update: PriorityUpdate  # of the windows that the last tick learnt from
    noise_key: Any  # of the noise of networks while learning; () without


@dataclass(frozen=True, slots=True)
class DQN:
    """A tick steps every environment `num_steps` times, then learns from replay.

    It learns from each step `samples_per_insert` times on average. An update draws
    `batch_size_per_env` transitions from each environment's replay. Learning starts when each
    replay holds `learning_starts_per_env` steps.
    """

    paper: ClassVar[str] = "Mnih et al., 2015; Hessel et al., 2018"
    actions: ClassVar[tuple[type, ...]] = (Discrete,)
    agents: ClassVar[str] = "one"

    num_steps: int = 8
    batch_size_per_env: int = 8
    samples_per_insert: float = 8.0
    learning_starts_per_env: int = 64
    buffer_size_per_env: int = 4096  # steps per environment
    learning_rate: float = 5e-4
    max_grad_norm: float = 10.0
    gamma: float = 0.99
    n_step: int = 3
    double: bool = True
    dueling: bool = True
    values: str = "expected"  # or categorical (C51), quantile (QR)
    num_atoms: int = 51  # of categorical and quantile
    value_range: tuple[float, float] = (-10.0, 10.0)  # of categorical
    target_update_interval: int = 100  # updates between those of the target network
    tau: float = 1.0
    epsilon: tuple[float, float] = (1.0, 0.01)  # first and last
    epsilon_ticks: int = 500  # between them
    epsilon_alpha: float = 0.0  # exponents of ε are 1 to 1 + this over environments (Ape-X: 7)
    priority_exponent: float = 0.0  # 0: replay is sampled uniformly
    importance_exponent: float = 0.4
    anneal_importance: bool = False  # whether that rises to 1 over the run
    total_ticks: int = 0  # of the run, which fills it in
    noise: float = 0.0  # σ₀ of noisy networks (Rainbow: 0.5, with epsilon=0,0); 0: none
    hidden: tuple[int, ...] = (128, 128)
    torso: Any = "auto"  # or mlp, nature, resnet, minatar, or a network of yours
    activation: str = "relu"  # or another function of jax.nn
    layer_norm: bool = False
    buffer_dtype: str = ""  # the dtype of observations in replay; "": their own

    def __post_init__(self) -> None:
        check_settings(self)
        make_form(self.values, self.num_atoms, self.value_range)
        replay.updates_per_tick(self.num_steps, self.samples_per_insert, self.batch_size_per_env)
        replay.check_capacity(
            self.buffer_size_per_env, self.learning_starts_per_env, self.num_steps, self.n_step
        )

    def init(self, key: jax.Array, env: Env, envs: int) -> State:
        """The state before the first tick with `envs` environments."""
        net_key, act_key, env_key, replay_key = jax.random.split(key, 4)
        shape = Shape(self.hidden, self.torso, count_actions(env), self.form.atoms, self.dueling)
        shape = shape._replace(style=style_of(self), noise=self.noise)
        params: Any = q_network.init_q_network(net_key, env.observation_space, shape)
        learner = init_learner(params, self.optimiser.init(params))
        env_states, obs = env.reset(key_rows(env_key, envs))
        stored = example(example_features(env, obs, self.torso, self.buffer_dtype), jnp.int32(0))
        buffer = init_replays(stored, self.buffer_size_per_env, envs, self.priority_exponent)
        changes = transitions.no_priorities((envs, self.updates, self.batch_size_per_env))
        epsilon_exponent = 1 + self.epsilon_alpha * jnp.linspace(0, 1, envs)
        rows = key_rows(act_key, envs), env_states, obs, epsilon_exponent
        rows = *rows, key_rows(replay_key, envs)
        noise_key = jax.random.fold_in(net_key, OWN) if self.noise else ()
        return State(learner, *rows, buffer, changes, noise_key)

    def tick(self, env: Env, state: State) -> tuple[State, Metrics]:
        """Steps the environments, then learns from replay."""
        learner, buffer = state.learner, state.buffer

        def collect(carry: tuple, _: None) -> tuple:
            keys, env_states, obs = carry
            features = obs_features(env, obs, self.torso)
            shared = {"params": learner.params, "ticks": learner.ticks}
            keys, action = self.act(keys, state.epsilon_exponent, features, **shared)
            env_states, step = env.step(env_states, action)
            next_features = obs_features(env, step.last_obs, self.torso)
            ends = step.terminated, step.truncated
            stored = StoredStep(features, action, step.reward, *ends, next_features)
            return (keys, env_states, step.obs), (stored, episode_totals(step))

        start = (state.keys, state.env_states, state.obs)
        rows, stored, totals = learning.collect_steps(collect, start, self.num_steps)
        if self.priority_exponent:
            buffer = buffer._replace(priorities=self.replay_update(buffer, state.priority_update))
        buffer = self.replay_add(buffer, stored)
        replay_keys, sample = self.replay_sample(state.replay_keys, buffer)
        learner, changes, metrics = self.learn(learner, sample, state.noise_key)
        rows = *rows, state.epsilon_exponent, replay_keys
        state = State(learner, *rows, buffer, changes, state.noise_key)
        return state, metrics | totals

    @stage(per="env")
    def act(self, key: jax.Array, epsilon_exponent: jax.Array, features: Any, *,
            params: QNetwork, ticks: jax.Array) -> tuple[jax.Array, jax.Array]:  # fmt: skip
        """The next key, and an ε-greedy action."""
        key, action_key = jax.random.split(key)
        params = with_noise(params, jax.random.fold_in(key, OWN) if self.noise else None)
        q_values = mean_return(self.form, self.atoms_of(params, features))
        schedule = optax.linear_schedule(*self.epsilon, self.epsilon_ticks)
        epsilon = schedule(ticks) ** epsilon_exponent
        return key, epsilon_greedy(action_key, q_values, epsilon)

    def play(self, env: Env, state: State, obs: Any, memory: Any, key: Any = None) -> tuple:
        """The greedy action in one environment, or with a key an ε-greedy one; no memory."""
        params, ticks = with_noise(state.learner.params, key), state.learner.ticks
        atoms = self.atoms_of(params, q_network.single_obs_features(params, obs))
        epsilon = optax.linear_schedule(*self.epsilon, self.epsilon_ticks)(ticks)
        return epsilon_greedy(key, mean_return(self.form, atoms), epsilon), memory

    @stage(per="env")
    def replay_update(self, buffer: replay.Replay, changes: PriorityUpdate) -> replay.Priorities:
        """The priorities after the update by the last tick's learning; the ring is not copied."""
        return replay.set_priorities(buffer.priorities, buffer.ring, *changes)

    @stage(per="env")
    def replay_add(self, buffer: replay.Replay, stored: StoredStep) -> replay.Replay:
        """Replay with one tick's steps of its environment."""
        return replay.insert(buffer, stored)

    @stage(per="env")
    def replay_sample(self, key: jax.Array, buffer: replay.Replay) -> tuple[jax.Array, Sample]:
        """The next key, and windows for all updates, each as one transition over `n_step` steps."""
        key, draw_key = jax.random.split(key)
        count = self.updates * self.batch_size_per_env
        first, ratio = replay.draw_windows(draw_key, buffer, count, self.n_step)
        batch = transitions.read_transitions(buffer.ring, first, self.n_step, self.gamma)
        return key, learning.split_updates(
            Sample(batch, first, ratio), self.updates, self.batch_size_per_env
        )

    @stage
    def learn(
        self, learner: Learner, sample: Sample, noise_key: Any
    ) -> tuple[Learner, Any, Metrics]:
        """The learner after all updates, the new priorities, and the mean metrics."""
        ready = (learner.ticks + 1) * self.num_steps >= self.learning_starts_per_env
        weight = importance(sample.ratio, importance_exponent(self, learner.ticks))

        def update(state: TrainState, given: tuple[Transition, jax.Array]) -> tuple:
            key = jax.random.fold_in(noise_key, state.updates) if self.noise else None
            grads, (metrics, td_error) = self.grad(state.params, state.target, *given, key)
            params, opt_state = self.apply(state.params, state.opt_state, mean(grads), ready)
            due = ready & ((state.updates + 1) % self.target_update_interval == 0)
            target = learning.update_target(params, state.target, due, self.tau)
            return TrainState(params, target, opt_state, state.updates + ready), (metrics, td_error)

        given = sample.batch, weight
        state, metrics, td_error = learning.run_updates(update, learner.train_state, given, ready)
        changes = transitions.new_priorities(sample.first, td_error, self.priority_exponent, ready)
        return learner.after(state), changes, mean(metrics)

    @stage
    def grad(
        self, params: QNetwork, target: QNetwork, batch: Transition, weight: jax.Array, key: Any
    ) -> tuple[QNetwork, tuple[Metrics, jax.Array]]:
        """The gradient of the loss, its metrics, and |δ| of each transition."""
        keys = noise_keys(key, 3)
        next_atoms = self.atoms_of(with_noise(target, keys[0]), batch.next_obs)
        chooser = with_noise(params, keys[1])
        chooser = self.atoms_of(chooser, batch.next_obs) if self.double else next_atoms
        next_action = jnp.argmax(mean_return(self.form, chooser), -1)
        next_atoms = select_atoms(next_atoms, next_action)

        def loss(params: QNetwork) -> tuple[jax.Array, tuple]:
            atoms = self.atoms_of(with_noise(params, keys[2]), batch.obs)
            taken, target = select_atoms(atoms, batch.action), (batch.reward, batch.discount)
            losses, td_error = td_loss(self.form, taken, *target, next_atoms)
            metrics = {"loss": weight * losses, "q_values": mean_return(self.form, atoms)}
            metrics = jax.tree.map(jnp.mean, metrics)
            return metrics["loss"], (metrics, td_error)

        return jax.grad(loss, has_aux=True)(params)

    @stage
    def apply(self, params: Any, opt_state: Any, grads: Any, ready: jax.Array) -> tuple:
        """The parameters and the optimiser's state after one update, if learning has started."""
        return learning.apply_gradients(self.optimiser, params, opt_state, grads, ready)

    def atoms_of(self, params: QNetwork, features: Any) -> jax.Array:
        """The atoms of every action: [..., actions, atoms]."""
        if self.buffer_dtype:
            features = jax.tree.map(lambda x: x.astype(jnp.float32), features)
        return q_network.action_atoms(params, features, self.form.atoms)

    @property
    def updates(self) -> int:
        """Updates per tick."""
        return replay.updates_per_tick(
            self.num_steps, self.samples_per_insert, self.batch_size_per_env
        )

    @property
    def form(self) -> Form:
        """The form of action values."""
        return make_form(self.values, self.num_atoms, self.value_range)

    @property
    def optimiser(self) -> optax.GradientTransformation:
        """Adam on clipped gradients."""
        return clipped_adam(self.learning_rate, self.max_grad_norm)
