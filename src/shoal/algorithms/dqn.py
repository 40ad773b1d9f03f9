"""Deep Q-learning (Mnih et al., 2015), with the extensions of Rainbow as settings."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from shoal.envs import Environment, EnvState, HostEnvironment, HostState, episode_totals, key_rows
from shoal.envs.spaces import Discrete
from shoal.rl import learning, q_network, replay
from shoal.rl.learning import Learner, for_updates, init_learner, init_rings
from shoal.rl.optimise import clipped_adam
from shoal.rl.q_network import QNetwork, Shape, count_actions, features, init_q_network
from shoal.rl.q_values import Form, best_or_any, chosen, make_form, mean_return, td_loss
from shoal.rl.ranges import check_settings
from shoal.rl.transitions import (
    Drawn,
    PriorityUpdate,
    Seen,
    Transition,
    example,
    importance,
    new_priorities,
    no_priorities,
    read_transitions,
)
from shoal.tracing.stage import mean, stage

Env = Environment | HostEnvironment
Metrics = dict[str, jax.Array]


class State(NamedTuple):
    """What a tick carries to the next: the learner, and a row an environment of all else."""

    learner: Learner
    keys: jax.Array
    env_states: EnvState | HostState
    obs: Any
    epsilon_exponent: jax.Array  # to which power of ε an environment explores
    replay_keys: jax.Array
    memory: replay.Replay
    priority_update: PriorityUpdate  # new priorities of the windows learnt from last


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
    buffer_size_per_env: int = 4096  # steps an environment
    learning_rate: float = 5e-4
    max_grad_norm: float = 10.0
    gamma: float = 0.99
    n_step: int = 3
    double: bool = True
    dueling: bool = True
    values: str = "expected"  # or categorical (C51), quantile (QR)
    num_atoms: int = 51  # of categorical and quantile
    value_range: tuple[float, float] = (-10.0, 10.0)  # of categorical
    target_update_interval: int = 100  # updates, after which the target network is moved by `tau`
    tau: float = 1.0
    epsilon: tuple[float, float] = (1.0, 0.01)  # first and last
    epsilon_ticks: int = 500  # between them
    epsilon_alpha: float = 0.0  # ε to powers from 1 to 1 + this over the environments (Ape-X: 7)
    priority_exponent: float = 0.0  # 0: replay samples uniformly
    importance_exponent: float = 0.4
    hidden: tuple[int, ...] = (128, 128)
    torso: str = "auto"  # what sees observations: mlp, nature, resnet, minatar
    buffer_dtype: str = ""  # the dtype in which replay keeps observations, if not their own

    def __post_init__(self) -> None:
        check_settings(self)
        make_form(self.values, self.num_atoms, self.value_range)
        replay.updates_a_tick(self.num_steps, self.samples_per_insert, self.batch_size_per_env)
        replay.check_capacity(
            self.buffer_size_per_env, self.learning_starts_per_env, self.num_steps, self.n_step
        )

    def init(self, key: jax.Array, env: Env, envs: int) -> State:
        """The state before the first tick with `envs` environments."""
        net_key, act_key, env_key, replay_key = jax.random.split(key, 4)
        shape = Shape(self.hidden, self.torso, count_actions(env), self.form.atoms, self.dueling)
        params: Any = init_q_network(net_key, env.observation_space, shape)
        learner = init_learner(params, self.optimiser.init(params))
        env_states, obs = env.reset(key_rows(env_key, envs))
        seen = jax.eval_shape(lambda: features(env, obs, self.torso)[0])
        seen = jax.ShapeDtypeStruct(seen.shape, self.buffer_dtype or seen.dtype)
        kept = example(seen, jnp.int32(0))
        memory = init_rings(kept, self.buffer_size_per_env, envs, self.priority_exponent)
        changes = no_priorities((envs, self.updates, self.batch_size_per_env))
        exponent = 1 + self.epsilon_alpha * jnp.linspace(0, 1, envs)
        rows = key_rows(act_key, envs), env_states, obs, exponent, key_rows(replay_key, envs)
        return State(learner, *rows, memory, changes)

    def tick(self, env: Env, state: State) -> tuple[State, Metrics]:
        """Steps, then learns."""
        learner, memory = state.learner, state.memory

        def collect(carry: tuple, _: None) -> tuple:
            keys, env_states, obs = carry
            shown = features(env, obs, self.torso)
            shared = {"params": learner.params, "ticks": learner.ticks}
            keys, action = self.act(keys, state.epsilon_exponent, shown, **shared)
            env_states, step = env.step(env_states, action)
            last = features(env, step.last_obs, self.torso)
            seen = Seen(shown, action, step.reward, step.terminated, step.truncated, last)
            return (keys, env_states, step.obs), (seen, episode_totals(step))

        start = (state.keys, state.env_states, state.obs)
        rows, seen, totals = learning.collected(collect, start, self.num_steps)
        if self.priority_exponent:
            memory = memory._replace(priorities=self.replay_update(memory, state.priority_update))
        memory = self.replay_add(memory, seen)
        replay_keys, drawn = self.replay_sample(state.replay_keys, memory)
        learner, changes, parts = self.learn(learner, drawn)
        after = State(learner, *rows, state.epsilon_exponent, replay_keys, memory, changes)
        return after, parts | totals

    @stage(per="env")
    def act(self, key: jax.Array, exponent: jax.Array, shown: jax.Array, *, params: QNetwork,
            ticks: jax.Array) -> tuple[jax.Array, jax.Array]:  # fmt: skip
        """The next key, and the ε-greedy action."""
        key, action_key = jax.random.split(key)
        q_values = mean_return(self.form, self.atoms_of(params, shown))
        epsilon = optax.linear_schedule(*self.epsilon, self.epsilon_ticks)(ticks) ** exponent
        return key, best_or_any(action_key, q_values, epsilon)

    def play(self, env: Env, state: State, obs: Any, memory: Any, key: Any = None) -> tuple:
        """The greedy action in one environment, or with a key the ε-greedy one; no memory."""
        params, ticks = state.learner.params, state.learner.ticks
        atoms = self.atoms_of(params, q_network.features_of_one(params, obs))
        epsilon = optax.linear_schedule(*self.epsilon, self.epsilon_ticks)(ticks)
        return best_or_any(key, mean_return(self.form, atoms), epsilon), memory

    @stage(per="env")
    def replay_update(self, memory: replay.Replay, changes: PriorityUpdate) -> replay.Priorities:
        """The priorities updated by the last tick's learning; the ring isn't changed."""
        return replay.set_priorities(memory.priorities, memory.ring, *changes)

    @stage(per="env")
    def replay_add(self, memory: replay.Replay, seen: Seen) -> replay.Replay:
        """Replay with one tick's steps of its environment."""
        return replay.keep(memory, seen)

    @stage(per="env")
    def replay_sample(self, key: jax.Array, memory: replay.Replay) -> tuple[jax.Array, Drawn]:
        """The next key, and windows for all updates, each as one transition over `n_step` steps."""
        key, draw_key = jax.random.split(key)
        count = self.updates * self.batch_size_per_env
        first, ratio = replay.choose(draw_key, memory, count, self.n_step)
        batch = read_transitions(memory.ring, first, self.n_step, self.gamma)
        return key, for_updates(Drawn(batch, first, ratio), self.updates, self.batch_size_per_env)

    @stage
    def learn(self, learner: Learner, drawn: Drawn) -> tuple[Learner, Any, Metrics]:
        """The learner after all updates, the new priorities, and the mean loss."""
        ready = (learner.ticks + 1) * self.num_steps >= self.learning_starts_per_env
        weight = importance(drawn.ratio, self.importance_exponent)

        def update(carry: tuple, given: tuple[Transition, jax.Array]) -> tuple:
            (params, target, opt_state), count = carry
            grads, (parts, td_error) = self.grad(params, target, *given)
            params, opt_state = self.apply(params, opt_state, mean(grads), ready)
            due = ready & ((count + 1) % self.target_update_interval == 0)
            target = learning.update_target(params, target, due, self.tau)
            return ((params, target, opt_state), count + ready), (parts, td_error)

        begun, given = (learner[:3], learner.updates), (drawn.batch, weight)
        (nets, count), parts, td_error = learning.update_often(update, begun, given, ready)
        changes = new_priorities(drawn.first, td_error, self.priority_exponent, ready)
        return Learner(*nets, learner.ticks + 1, count), changes, mean(parts)

    @stage
    def grad(
        self, params: QNetwork, target: QNetwork, batch: Transition, weight: jax.Array
    ) -> tuple[QNetwork, tuple[Metrics, jax.Array]]:
        """The gradient of the loss, its parts, and the TD error of each transition."""
        next_atoms = self.atoms_of(target, batch.next_obs)
        chooses = self.atoms_of(params, batch.next_obs) if self.double else next_atoms
        follow = chosen(next_atoms, jnp.argmax(mean_return(self.form, chooses), -1))

        def loss(params: QNetwork) -> tuple[jax.Array, tuple]:
            atoms = self.atoms_of(params, batch.obs)
            said = chosen(atoms, batch.action)
            lost, td_error = td_loss(self.form, said, batch.reward, batch.discount, follow)
            parts = {"loss": weight * lost, "q_values": mean_return(self.form, atoms)}
            parts = jax.tree.map(jnp.mean, parts)
            return parts["loss"], (parts, td_error)

        return jax.grad(loss, has_aux=True)(params)

    @stage
    def apply(self, params: Any, opt_state: Any, grads: Any, ready: jax.Array) -> tuple:
        """The parameters and the optimiser's state after one update, if it is time to learn."""
        return learning.moved(self.optimiser, params, opt_state, grads, ready)

    def atoms_of(self, params: QNetwork, shown: jax.Array) -> jax.Array:
        """The network's outputs for every action: [..., actions, atoms]."""
        shown = shown.astype(jnp.float32) if self.buffer_dtype else shown
        return q_network.action_atoms(params, shown, self.form.atoms)

    @property
    def updates(self) -> int:
        """In a tick."""
        return replay.updates_a_tick(
            self.num_steps, self.samples_per_insert, self.batch_size_per_env
        )

    @property
    def form(self) -> Form:
        """The form of the action values."""
        return make_form(self.values, self.num_atoms, self.value_range)

    @property
    def optimiser(self) -> optax.GradientTransformation:
        """Adam on clipped gradients."""
        return clipped_adam(self.learning_rate, self.max_grad_norm)
