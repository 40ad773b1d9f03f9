"""QMIX: deep Q-learning of a team, with a monotonic mix of its agents' values.

The agents of a policy share one recurrent network. Replay stores one sequence per tick.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from shoal.envs import Environment, EnvState, HostEnvironment, HostState, episode_totals, key_rows
from shoal.envs.environment import ended, mean_of_agents
from shoal.envs.spaces import Discrete, Groups
from shoal.errors import UnknownNameError
from shoal.rl import learning, mixing, replay
from shoal.rl.learning import Learner, TrainState, init_learner, init_replays, split_updates
from shoal.rl.losses import squared_error
from shoal.rl.memory import forget, start
from shoal.rl.mixing import Networks
from shoal.rl.optimise import clipped_adam, current_rate, learning_rate
from shoal.rl.ranges import check_settings
from shoal.rl.returns import discounted_return
from shoal.rl.routing import Table, route
from shoal.rl.teams import check_team, look
from shoal.tracing.stage import mean, stage

Env = Environment | HostEnvironment
Metrics = dict[str, jax.Array]
MIXERS = ("monotonic", "sum")


class Rows(NamedTuple):
    """What a step of the environments carries to the next: a row per environment."""

    keys: jax.Array
    env_states: EnvState | HostState
    obs: Any
    memory: dict[str, Any]


class State(NamedTuple):
    """What a tick carries to the next: the learner, and a row per environment of all else."""

    learner: Learner
    keys: jax.Array
    env_states: EnvState | HostState
    obs: Any
    memory: dict[str, Any]
    replay_keys: jax.Array
    ring: replay.Ring


class Sequence(NamedTuple):
    """One environment's steps of a tick, as replay stores them: [steps, ...], actions by policy."""

    obs: Any  # by policy where it is learnt from, and so is `last_obs`
    action: dict[str, jax.Array]
    reward: jax.Array  # the mean of all agents'
    terminated: jax.Array  # for all agents
    ended: jax.Array  # terminated or truncated, for all agents
    last_obs: Any
    memory: dict[str, Any]  # before the first step


@dataclass(frozen=True, slots=True)
class QMIX:
    """A tick steps every environment `num_steps` times: a sequence. It then learns from replay.

    It learns from each sequence `samples_per_insert` times on average. An update draws
    `batch_size_per_env` sequences from each environment's replay. Learning starts when each replay
    holds `learning_starts_per_env` sequences. `policies` are pairs of (pattern of agents' names,
    policy), of which the first match counts.
    """

    paper: ClassVar[str] = "Rashid et al., 2018"
    actions: ClassVar[tuple[type, ...]] = (Discrete, Groups)
    agents: ClassVar[str] = "several"

    policies: Table = ()  # (): agents with the same spaces share one
    one_team: bool = False  # whether several groups of agents share one goal; else an error
    mixer: str = "monotonic"  # or sum: that of VDN
    num_steps: int = 26
    batch_size_per_env: int = 4  # sequences per environment in an update
    samples_per_insert: float = 8.0
    learning_starts_per_env: int = 4
    buffer_size_per_env: int = 512  # sequences per environment
    learning_rate: float = 1e-3
    anneal_lr: bool = False  # whether the learning rate falls to 0 over the run
    total_ticks: int = 0  # of the run, which sets it
    max_grad_norm: float = 10.0
    gamma: float = 0.99
    td_lambda: float = 0.0  # 0: one step, 1: to the sequence's end
    double: bool = True
    target_update_interval: int = 200  # updates between those of the target network
    tau: float = 1.0
    epsilon: tuple[float, float] = (1.0, 0.05)  # first and last
    epsilon_ticks: int = 500  # between them
    memory: str = "gru"  # or none, lstm, transformer
    memory_width: int = 64
    mixer_width: int = 32
    mixer_hidden: int = 64
    torso: str = "auto"  # or mlp, which flattens images; auto refuses them

    def __post_init__(self) -> None:
        check_settings(self)
        if self.mixer not in MIXERS:
            raise UnknownNameError("mixer", self.mixer, MIXERS)
        replay.updates_per_tick(1, self.samples_per_insert, self.batch_size_per_env)
        replay.check_capacity(self.buffer_size_per_env, self.learning_starts_per_env, 1, 1)

    def init(self, key: jax.Array, env: Env, envs: int) -> State:
        """The state before the first tick with `envs` environments."""
        net_key, act_key, env_key, replay_key = jax.random.split(key, 4)
        routes = check_team(self, route(env, self.policies))
        mixing.check_one_team(env, routes, self)
        mixer = (self.mixer_width, self.mixer_hidden) if self.mixer == "monotonic" else ()
        params: Any = mixing.init_networks(net_key, routes, (self.memory, self.memory_width), mixer)
        learner = init_learner(params, self.optimiser.init(params))
        each = {p.name: (envs, len(p.agents)) for p in routes.policies}
        memory = {name: start(params.agents[name].memory, rows) for name, rows in each.items()}
        rows = Rows(key_rows(act_key, envs), *env.reset(key_rows(env_key, envs)), memory)
        stored = jax.eval_shape(lambda: self.collect(env, learner, rows)[1])
        stored = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), stored)
        ring = init_replays(stored, self.buffer_size_per_env, envs).ring
        return State(learner, *rows, replay_keys=key_rows(replay_key, envs), ring=ring)

    def tick(self, env: Env, state: State) -> tuple[State, Metrics]:
        """Steps the environments, then learns from replay."""
        rows = Rows(state.keys, state.env_states, state.obs, state.memory)
        rows, stored, totals = self.collect(env, state.learner, rows)
        ring = self.replay_add(state.ring, stored)
        replay_keys, batch = self.replay_sample(state.replay_keys, ring)
        # Agents are the fifth axis: of environments, updates, sequences and steps.
        routes = route(env, self.policies)
        obs, last = (look(routes, x, 4, central=True) for x in (batch.obs, batch.last_obs))
        learner, metrics = self.learn(state.learner, batch._replace(obs=obs, last_obs=last))
        return State(learner, *rows, replay_keys=replay_keys, ring=ring), metrics | totals

    def collect(self, env: Env, learner: Learner, rows: Rows) -> tuple[Rows, Sequence, Metrics]:
        """The rows after a tick's steps, these as stored, and the episodes that ended."""
        routes = route(env, self.policies)
        shared = {"params": learner.params.agents, "ticks": learner.ticks}

        def collect(carry: Any, _: None) -> tuple:
            keys, env_states, obs, memory = carry
            shown = look(routes, obs, 1, central=False)
            keys, memory, action = self.act(keys, shown, memory, **shared)
            env_states, step = env.step(env_states, routes.join(action))
            terminated = ended(step.terminated, step.terminated, 1)
            over = ended(step.terminated, step.truncated, 1)
            reward = jax.vmap(mean_of_agents)(step.reward)
            stored = (obs, action, reward, terminated, over, step.last_obs)
            rows = Rows(keys, env_states, step.obs, forget(memory, over))
            return rows, (stored, episode_totals(step))

        after, stored, totals = learning.collect_steps(collect, rows, self.num_steps)
        return after, Sequence(*stored, memory=rows.memory), totals

    @stage(per="env")
    def act(self, key: jax.Array, shown: Any, memory: Any, *, params: Any, ticks: Any) -> tuple:
        """The next key, and the memory and the ε-greedy actions of each policy."""
        key, *keys = jax.random.split(key, len(params) + 1)
        epsilon = optax.linear_schedule(*self.epsilon, self.epsilon_ticks)(ticks)
        return key, *mixing.act(params, memory, shown, keys, epsilon)

    def play(self, env: Env, state: State, obs: Any, memory: Any, key: Any = None) -> tuple:
        """Actions in one environment, ε-greedy if there is a key, and the next memory."""
        routes, learner = route(env, self.policies), state.learner
        epsilon = optax.linear_schedule(*self.epsilon, self.epsilon_ticks)(learner.ticks)
        shown = look(routes, obs, 0, central=False)
        memory, action = mixing.play(learner.params.agents, memory, shown, key, epsilon)
        return routes.join(action, 0), memory

    @stage(per="env")
    def replay_add(self, ring: replay.Ring, stored: Sequence) -> replay.Ring:
        """Replay with one tick's sequence of its environment."""
        return replay.add(ring, jax.tree.map(lambda x: x[None], stored))

    @stage(per="env")
    def replay_sample(self, key: jax.Array, ring: replay.Ring) -> tuple[jax.Array, Sequence]:
        """The next key, and sequences for all updates."""
        key, draw_key = jax.random.split(key)
        batch = replay.sample(draw_key, ring, self.updates * self.batch_size_per_env, 1)
        batch = jax.tree.map(lambda x: jnp.squeeze(x, 1), batch)
        return key, split_updates(batch, self.updates, self.batch_size_per_env)

    @stage
    def learn(self, learner: Learner, batch: Sequence) -> tuple[Learner, Metrics]:
        """The learner after all updates, and the mean metrics."""
        ready = learner.ticks + 1 >= self.learning_starts_per_env

        def update(state: TrainState, batch: Sequence) -> tuple:
            grads, metrics = self.grad(state.params, state.target, batch)
            params, opt_state = self.apply(state.params, state.opt_state, mean(grads), ready)
            due = ready & ((state.updates + 1) % self.target_update_interval == 0)
            target = learning.update_target(params, state.target, due, self.tau)
            return TrainState(params, target, opt_state, state.updates + ready), (metrics, ())

        state, metrics, _ = learning.run_updates(update, learner.train_state, batch, ready)
        metrics = mean(metrics) | {"learning_rate": current_rate(self.rate, learner.opt_state)}
        return learner.after(state), metrics

    @stage
    def grad(self, params: Networks, target: Networks, batch: Sequence) -> tuple[Networks, Metrics]:
        """The gradient of the loss, and its metrics."""
        # Environments and sequences as one axis, and time before it.
        batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)
        along = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), batch._replace(memory=()))
        along = along._replace(memory=batch.memory)
        return jax.grad(self.loss, has_aux=True)(params, target, along)

    def loss(self, params: Networks, target: Networks, batch: Any) -> tuple[jax.Array, Metrics]:
        """½ (Q_tot - G)², where G bootstraps from the target network at the greedy next actions."""
        given = batch.memory, (batch.obs, batch.last_obs), batch.ended
        q_t, next_q_t = mixing.team_q_values(params, *given)
        _, target_next_q_t = mixing.team_q_values(target, *given)
        chooser_t = next_q_t if self.double else target_next_q_t
        greedy_t = jax.tree.map(lambda q: jnp.argmax(q, -1), chooser_t)
        total_t = mixing.q_total(params, q_t, batch.action, batch.obs)
        next_t = mixing.q_total(target, target_next_q_t, greedy_t, batch.last_obs)
        # G_t = r_t + γ_t ((1 - λ_t) Q_tot(s_{t+1}) + λ_t G_{t+1})
        discount_t, lambda_t = self.gamma * ~batch.terminated, self.td_lambda * ~batch.ended
        reward_t = batch.reward + discount_t * (1 - lambda_t) * next_t
        return_t = discounted_return(reward_t, discount_t * lambda_t, next_t[-1])
        metrics = {"loss": squared_error(total_t, lax.stop_gradient(return_t)), "q_values": total_t}
        metrics = jax.tree.map(jnp.mean, metrics)
        return metrics["loss"], metrics

    @stage
    def apply(self, params: Any, opt_state: Any, grads: Any, ready: jax.Array) -> tuple:
        """The parameters and the optimiser's state after one update, if learning has started."""
        return learning.apply_gradients(self.optimiser, params, opt_state, grads, ready)

    @property
    def updates(self) -> int:
        """Updates per tick."""
        return replay.updates_per_tick(1, self.samples_per_insert, self.batch_size_per_env)

    @property
    def rate(self) -> optax.ScalarOrSchedule:
        """The learning rate of each update."""
        return learning_rate(self, self.updates)

    @property
    def optimiser(self) -> optax.GradientTransformation:
        """Adam on clipped gradients."""
        return clipped_adam(self.rate, self.max_grad_norm)
