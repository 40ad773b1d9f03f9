"""PPO for teams with a critic of the whole (Yu et al., 2022), by one policy or many.

A table routes agents to policies, each with networks of its own. With memory it is recurrent, in
sequences as in PPO.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from shoal.envs import Environment, EnvState, HostEnvironment, HostState, episode_totals, key_rows
from shoal.envs.spaces import ACTIONS, Groups
from shoal.rl import losses, normalise, optimise, rollouts, teams
from shoal.rl.blocks import grad_in_blocks
from shoal.rl.memory import forget
from shoal.rl.optimise import clipped_adam, current_rate, learning_rate, scale_critic
from shoal.rl.ranges import check_settings
from shoal.rl.returns import gae
from shoal.rl.rollouts import Batch, Rollout, is_first, is_last
from shoal.rl.routing import Table, route
from shoal.rl.teams import Member, look
from shoal.tracing.stage import mean, stage

Env = Environment | HostEnvironment
Metrics = dict[str, jax.Array]


class Learner(NamedTuple):
    """What learning carries from tick to tick: of every policy by name."""

    params: dict[str, Member]
    opt_state: dict[str, optax.OptState]
    obs_moments: dict[str, Any]  # of what its agents are shown
    value_moments: dict[str, normalise.Moments]  # of its critic's targets


class State(NamedTuple):
    """What a tick carries to the next: the learner, and a row an environment of all else."""

    learner: Learner
    keys: jax.Array
    env_states: EnvState | HostState
    obs: Any
    memory: dict[str, Any]


@dataclass(frozen=True, slots=True)
class MAPPO:
    """A tick collects `num_steps` of every environment; each policy learns from its own agents.

    `policies` are lines of (pattern of agents' names, policy), of which the first that matches
    counts; the policy "*" is the agent's own. Without any, agents that are alike share one.
    """

    paper: ClassVar[str] = "Yu et al., 2022"
    actions: ClassVar[tuple[type, ...]] = (*ACTIONS, Groups)
    agents: ClassVar[str] = "several"

    policies: Table = ()  # such as (("adversary*", "predator"), ("*", "prey"))
    critic: str = "central"  # sees the world, or what all agents see; or own: what its agent sees
    num_steps: int = 128
    update_epochs: int = 4
    num_minibatches: int = 4  # an epoch
    learning_rate: float = 5e-4
    critic_learning_rate: float | None = None  # None: learning_rate
    anneal_lr: bool = False  # whether the learning rate falls to 0 over the run
    total_ticks: int = 0  # of the run, which fills it in
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip_eps: float = 0.2
    clip_eps_vf: float | None = None
    ent_coef: float = 0.01
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5
    norm_value: bool = True  # critics give values standardised by the moments of their targets
    huber_delta: float | None = 10.0  # None: squared error
    agent_ids: bool = True  # agents that share a policy see their index
    norm_obs: bool = False
    hidden: tuple[int, ...] = (64, 64)
    torso: str = "auto"  # or mlp: images are flattened, which are refused otherwise
    activation: str = "tanh"  # or another function of jax.nn
    layer_norm: bool = False
    memory: str = "none"  # or gru, lstm, transformer
    shared_memory: bool = False  # whether the critic shares the actor's memory
    memory_width: int = 64
    sequence_length: int = 0  # steps that memory is learnt through at a time; 0: all of a rollout

    def __post_init__(self) -> None:
        check_settings(self)
        rollouts.check_chunks(self)

    def init(self, key: jax.Array, env: Env, envs: int) -> State:
        """The state before the first tick with `envs` environments."""
        net_key, act_key, env_key = jax.random.split(key, 3)
        routes = route(env, self.policies)
        params: Any = teams.init_members(net_key, teams.check_team(self, routes), self)
        opt_state = {name: self.optimiser.init(of) for name, of in params.items()}
        value_moments = {name: normalise.init_moments() for name in params}
        learner = Learner(params, opt_state, teams.init_moments(routes, self), value_moments)
        rows = {p.name: (envs, len(p.agents)) for p in routes.policies}
        memory = {name: teams.start_memory(params[name], of) for name, of in rows.items()}
        return State(learner, key_rows(act_key, envs), *env.reset(key_rows(env_key, envs)), memory)

    def tick(self, env: Env, state: State) -> tuple[State, Metrics]:
        """Collects a rollout and learns from it."""
        learner, routes = state.learner, route(env, self.policies)
        acting = {name: params.acting for name, params in learner.params.items()}
        act = partial(self.act, params=acting, moments=learner.obs_moments)

        def collect(carry: tuple, _: None) -> tuple:
            keys, env_states, obs, memory = carry
            shown = look(routes, obs, 1, central=self.recalls)
            keys, memory, action, log_prob = act(keys, shown, memory)
            env_states, step = env.step(env_states, routes.join(action))
            over = routes.split(jax.tree.map(jnp.logical_or, step.terminated, step.truncated))
            memory = {name: forget(of, over[name]) for name, of in memory.items()}
            rows = keys, env_states, step.obs, memory
            return rows, (obs, action, log_prob, step._replace(obs=()))

        rows = (state.keys, state.env_states, state.obs, state.memory)
        rows, (obs, action, log_prob, steps) = lax.scan(collect, rows, length=self.num_steps)
        shown, last = (look(routes, x, 2, central=self.central) for x in (obs, steps.last_obs))
        done = action, log_prob, shown, last, state.memory
        by_policy = teams.rollouts_by_policy(routes, steps, done)
        rate = {"learning_rate": current_rate(self.rate, learner.opt_state)}
        learner, parts = self.learn(learner, by_policy, rows[0])
        totals = jax.tree.map(lambda x: jnp.sum(x, axis=0), episode_totals(steps))
        return State(learner, *rows), teams.by_name(parts) | totals | rate

    @stage(per="env")
    def act(self, key: jax.Array, shown: Any, memory: Any, *, params: Any, moments: Any) -> tuple:
        """The next key, and of every policy: its memory, and its agents' actions and their logs."""
        key, *keys = jax.random.split(key, len(params) + 1)
        seen = {name: teams.see(of, moments[name], self) for name, of in shown.items()}
        return key, *teams.act(params, memory, seen, keys)

    def play(self, env: Env, state: State, obs: Any, memory: Any, key: Any = None) -> tuple:
        """Every agent's likeliest action, or one drawn, and what is remembered then."""
        routes, moments = route(env, self.policies), state.learner.obs_moments
        shown = look(routes, obs, 0, central=self.recalls)
        shown = {name: teams.see(of, moments[name], self) for name, of in shown.items()}
        return teams.play(state.learner.params, routes, shown, memory, key)

    @stage
    def learn(
        self, learner: Learner, by_policy: dict[str, Rollout], keys: jax.Array
    ) -> tuple[Learner, Any]:
        """The learner after all epochs, and each policy's metrics."""
        obs_moments, value_moments = dict(learner.obs_moments), dict(learner.value_moments)
        batch, metrics = {}, {}
        for name, rollout in by_policy.items():
            weight = normalise.weight_of_active(rollout.active)
            made = self.compute_advantages(learner, name, rollout._replace(active=weight))
            batch[name], value_moments[name], metrics[name] = made
            if self.norm_obs:
                obs_moments[name] = teams.update_moments(obs_moments[name], rollout.obs, weight)

        def update(nets: tuple, minibatch: dict[str, Batch]) -> tuple:
            grads, parts = self.grad(nets[0], minibatch)
            grads = mean(grads)
            norms = {name: {"grad_norm": optimise.global_norm(of)} for name, of in grads.items()}
            return self.apply(*nets, grads), (parts, norms)

        nets = learner.params, learner.opt_state
        nets, (parts, norms) = rollouts.run_epochs(update, nets, batch, keys, self)
        parts = mean(parts)
        metrics = {name: parts[name] | norms[name] | of for name, of in metrics.items()}
        return Learner(*nets, obs_moments, value_moments), metrics

    def compute_advantages(self, learner: Learner, name: str, rollout: Rollout) -> tuple:
        """A policy's batch, the moments of its targets, and metrics; `active` is a weight here."""
        params, moments = learner.params[name], learner.value_moments[name]
        over, weight = is_last(rollout), rollout.active
        both = rollout.obs, rollout.last_obs
        shown, last = (teams.see(x, learner.obs_moments[name], self) for x in both)
        memory_t, *values = teams.forward(params, (shown, last), rollout.memory, over)
        scale = normalise.restore if self.norm_value else lambda _, x: x
        value_t, next_value_t = (scale(moments, x) for x in values)
        discount_t, lambda_t = self.gamma * ~rollout.terminated, self.gae_lambda * ~over
        advantage_t = gae(rollout.reward, discount_t, value_t, next_value_t, lambda_t)
        target_t = value_t + advantage_t
        metrics = {
            "explained_variance": normalise.explained_variance(value_t, target_t, weight),
            "reward": mean(jnp.mean(normalise.weighted(rollout.reward, weight))),
        }
        if self.norm_value:
            moments = normalise.update_moments(moments, target_t, weight)
            target_t = normalise.normalise(moments, target_t, jnp.inf)
        batch = Batch(
            features=shown,
            action=rollout.action,
            log_prob=rollout.log_prob,
            value=values[0],
            target=target_t,
            advantage=normalise.standardise(advantage_t, weight),
            weight=weight,
            is_first=is_first(rollout) if params.memory else (),
            memory=memory_t,
        )
        return rollouts.chunk(batch, rollouts.chunk_length(self)), moments, metrics

    @stage
    def grad(self, params: Any, batch: dict[str, Batch]) -> tuple[Any, Any]:
        """The gradient of each policy's loss, and the parts of the loss."""
        grads, parts = {}, {}
        for name, of in batch.items():
            samples = rollouts.as_samples(of)
            grads[name], parts[name] = grad_in_blocks(self.loss, params[name], samples)
        return grads, parts

    @stage
    def apply(self, params: Any, opt_state: Any, grads: Any) -> tuple[Any, Any]:
        """Each policy's parameters and its optimiser's state after one update."""
        params, opt_state = dict(params), dict(opt_state)
        for name, slopes in grads.items():
            updates, opt_state[name] = self.optimiser.update(slopes, opt_state[name])
            params[name] = optax.apply_updates(params[name], updates)
        return params, opt_state

    def loss(self, params: Member, batch: Batch) -> tuple[jax.Array, Metrics]:
        """Policy loss + weighted value loss - weighted entropy, and these parts."""
        pi, value = teams.policy_and_value(params, batch.features, batch.memory, batch.is_first)
        parts = losses.ppo(pi, value, batch, self)
        return losses.actor_critic(parts, batch.weight, self.vf_coef, self.ent_coef)

    @property
    def central(self) -> bool:
        """Whether the critic sees more than its agent does."""
        return self.critic == "central"

    @property
    def recalls(self) -> bool:
        """Whether the critic remembers what it has seen of the world."""
        return self.central and self.memory != "none" and not self.shared_memory

    @property
    def rate(self) -> optax.ScalarOrSchedule:
        """The learning rate of each update."""
        return learning_rate(self, self.update_epochs * self.num_minibatches)

    @property
    def optimiser(self) -> optax.GradientTransformation:
        """Adam on clipped gradients."""
        return scale_critic(clipped_adam(self.rate, self.max_grad_norm), self)
