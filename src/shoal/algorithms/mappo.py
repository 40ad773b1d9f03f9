"""PPO for teams with a critic of the whole (Yu et al., 2022), by one policy or many.

A table routes agents to policies, each with networks of its own. With memory it is recurrent, in
sequences as in PPO.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from shoal.envs import Environment, EnvState, HostEnvironment, HostState, episode_totals, key_rows
from shoal.envs.spaces import ACTIONS, Groups
from shoal.errors import UnknownNameError
from shoal.rl import losses, normalise, rollouts, teams
from shoal.rl.blocks import grad_in_blocks
from shoal.rl.memory import forget, start
from shoal.rl.nets import style_of
from shoal.rl.optimise import clipped_adam, current, learning_rate
from shoal.rl.ranges import check_settings
from shoal.rl.returns import gae
from shoal.rl.rollouts import Batch, Rollout, is_first, is_last
from shoal.rl.routing import Table, route
from shoal.rl.teams import Member, look
from shoal.tracing.stage import mean, stage

Env = Environment | HostEnvironment
Metrics = dict[str, jax.Array]
CRITICS = ("central", "own")


class Learner(NamedTuple):
    """What learning carries from tick to tick: of every policy by name."""

    params: dict[str, Member]
    opt_state: dict[str, optax.OptState]


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
    anneal_lr: bool = False  # whether the learning rate falls to 0 over the run
    total_ticks: int = 0  # of the run, which fills it in
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip_eps: float = 0.2
    clip_eps_vf: float | None = None
    ent_coef: float = 0.01
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5
    hidden: tuple[int, ...] = (64, 64)
    torso: str = "auto"  # or mlp: images are flattened, which are refused otherwise
    activation: str = "tanh"  # or another function of jax.nn
    layer_norm: bool = False
    memory: str = "none"  # or gru, lstm, transformer
    memory_width: int = 64
    sequence_length: int = 0  # steps that memory is learnt through at a time; 0: all of a rollout

    def __post_init__(self) -> None:
        check_settings(self)
        if self.critic not in CRITICS:
            raise UnknownNameError("critic", self.critic, CRITICS)
        rollouts.check_chunks(self)

    def init(self, key: jax.Array, env: Env, envs: int) -> State:
        """The state before the first tick with `envs` environments."""
        net_key, act_key, env_key = jax.random.split(key, 3)
        routes = route(env, self.policies)
        own, world = teams.widths(teams.check_team(self, routes))
        params, memory = {}, {}
        for i, p in enumerate(routes.policies):
            keys = jax.random.split(jax.random.fold_in(net_key, i))
            spaces = own[p.name], world if self.central else 0, p.action_space
            remembers = self.memory, self.memory_width
            params[p.name] = teams.init_member(
                (keys[0], keys[1]), spaces, self.hidden, remembers, style_of(self)
            )
            memory[p.name] = start(params[p.name].memory, (envs, len(p.agents)))
        opt_state = {name: self.optimiser.init(of) for name, of in params.items()}
        learner = Learner(params, opt_state)
        return State(learner, key_rows(act_key, envs), *env.reset(key_rows(env_key, envs)), memory)

    def tick(self, env: Env, state: State) -> tuple[State, Metrics]:
        """Collects a rollout and learns from it."""
        learner, routes = state.learner, route(env, self.policies)
        acting = {name: params.acting for name, params in learner.params.items()}

        def collect(carry: tuple, _: None) -> tuple:
            keys, env_states, obs, memory = carry
            shown = look(routes, obs, 1, central=False)
            keys, memory, action, log_prob = self.act(keys, shown, memory, params=acting)
            env_states, step = env.step(env_states, routes.join(action))
            over = routes.split(jax.tree.map(jnp.logical_or, step.terminated, step.truncated))
            memory = {name: forget(of, over[name]) for name, of in memory.items()}
            rows = keys, env_states, step.obs, memory
            return rows, (obs, action, log_prob, step._replace(obs=()))

        rows = (state.keys, state.env_states, state.obs, state.memory)
        rows, (obs, action, log_prob, steps) = lax.scan(collect, rows, length=self.num_steps)
        fields = ("reward", "terminated", "truncated", "active")
        outcome = {field: routes.split(getattr(steps, field), 2) for field in fields}
        shown, last = (look(routes, x, 2, central=self.central) for x in (obs, steps.last_obs))
        by_policy = {
            name: Rollout(
                obs=shown[name],
                action=action[name],
                log_prob=log_prob[name],
                last_obs=last[name],
                after=(),
                memory=state.memory[name],
                **{field: each[name] for field, each in outcome.items()},
            )
            for name in learner.params
        }
        rate = {"learning_rate": current(self.rate, learner.opt_state)}
        learner, parts = self.learn(learner, by_policy, rows[0])
        totals = jax.tree.map(lambda x: jnp.sum(x, axis=0), episode_totals(steps))
        return State(learner, *rows), teams.by_name(parts) | totals | rate

    @stage(per="env")
    def act(self, key: jax.Array, shown: Any, memory: Any, *, params: Any) -> tuple:
        """The next key, and of every policy: its memory, and its agents' actions and their logs."""
        key, *keys = jax.random.split(key, len(params) + 1)
        action, log_prob = {}, {}
        for own_key, (name, of) in zip(keys, params.items(), strict=True):
            remembered, pi = teams.decide(of, memory[name], shown[name])
            memory = memory | {name: remembered}
            action[name] = pi.sample(own_key)
            log_prob[name] = pi.log_prob(action[name])
        return key, memory, action, log_prob

    def play(self, env: Env, state: State, obs: Any, memory: Any, key: Any = None) -> tuple:
        """Every agent's likeliest action, or one drawn, and what is remembered then."""
        routes = route(env, self.policies)
        shown = look(routes, obs, 0, central=False)
        return teams.play(state.learner.params, routes, shown, memory, key)

    @stage
    def learn(
        self, learner: Learner, by_policy: dict[str, Rollout], keys: jax.Array
    ) -> tuple[Learner, Any]:
        """The learner after all epochs, and the mean parts of each policy's loss."""
        batch = {
            name: self.compute_advantages(learner.params[name], rollout)
            for name, rollout in by_policy.items()
        }

        def update(nets: tuple, minibatch: dict[str, Batch]) -> tuple:
            params, opt_state = nets
            grads, metrics = self.grad(params, minibatch)
            return self.apply(params, opt_state, mean(grads)), metrics

        nets = learner.params, learner.opt_state
        nets, metrics = rollouts.run_epochs(update, nets, batch, keys, self)
        for name, of in by_policy.items():
            weight = normalise.weight_of_active(of.active)
            metrics[name]["reward"] = jnp.mean(normalise.weighted(of.reward, weight))
        params, opt_state = nets
        return Learner(params, opt_state), mean(metrics)

    def compute_advantages(self, params: Member, rollout: Rollout) -> Batch:
        """The rollout with advantages and targets of values, in chunks where there is memory."""
        over = is_last(rollout)
        seen = rollout.obs, rollout.last_obs
        memory_t, value_t, next_value_t = teams.expect(params, seen, rollout.memory, over)
        discount_t, lambda_t = self.gamma * ~rollout.terminated, self.gae_lambda * ~over
        advantage_t = gae(rollout.reward, discount_t, value_t, next_value_t, lambda_t)
        weight = normalise.weight_of_active(rollout.active)
        batch = Batch(
            features=rollout.obs,
            action=rollout.action,
            log_prob=rollout.log_prob,
            value=value_t,
            target=value_t + advantage_t,
            advantage=normalise.standardise(advantage_t, weight),
            weight=weight,
            is_first=is_first(rollout) if params.memory else (),
            memory=memory_t,
        )
        return rollouts.chunk(batch, self.length)

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
        parts = losses.ppo(pi, value, batch, self.clip_eps, self.clip_eps_vf)
        return losses.actor_critic(parts, batch.weight, self.vf_coef, self.ent_coef)

    @property
    def central(self) -> bool:
        """Whether the critic sees more than its agent does."""
        return self.critic == "central"

    @property
    def length(self) -> int:
        """How many steps memory is learnt through at a time; 0 without memory."""
        return rollouts.chunk_length(self)

    @property
    def rate(self) -> optax.ScalarOrSchedule:
        """The learning rate of each update."""
        return learning_rate(self, self.update_epochs * self.num_minibatches)

    @property
    def optimiser(self) -> optax.GradientTransformation:
        """Adam on clipped gradients."""
        return clipped_adam(self.rate, self.max_grad_norm)
