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
from shoal.rl import losses, teams
from shoal.rl.blocks import grad_in_blocks
from shoal.rl.memory import forget, start
from shoal.rl.normalise import spread, standardise
from shoal.rl.optimise import clipped_adam, current, learning_rate
from shoal.rl.ranges import check_settings
from shoal.rl.returns import gae
from shoal.rl.rollout import (
    Rollout,
    as_samples,
    begins,
    check_pieces,
    cut,
    ends,
    in_epochs,
    steps_of_piece,
)
from shoal.rl.routing import Table, route
from shoal.rl.teams import Member, Shown, look
from shoal.tracing.stage import mean, stage

Env = Environment | HostEnvironment
Metrics = dict[str, jax.Array]
CRITICS = ("central", "own")


class Learner(NamedTuple):
    """What learning carries from tick to tick: of every policy by name, and one key."""

    params: dict[str, Member]
    opt_state: dict[str, optax.OptState]
    key: jax.Array  # draws only what does not depend on the number of environments


class State(NamedTuple):
    """What a tick carries to the next: the learner, and a row an environment of all else."""

    learner: Learner
    keys: jax.Array
    env_states: EnvState | HostState
    obs: Any
    memory: dict[str, Any]


class Batch(NamedTuple):
    """What the loss sees: [pieces, sequence, envs, agents, ...], or steps with no memory."""

    shown: Shown
    action: jax.Array
    log_prob: jax.Array
    value: jax.Array
    target: jax.Array
    advantage: jax.Array
    fresh: Any  # which steps are the first of an episode
    memory: Any = ()  # [pieces, envs, agents, ...]: at each piece's start


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
    num_minibatches: int = 4  # an epoch; each has some of the steps of all environments
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
    memory: str = "none"  # or gru, lstm, transformer
    memory_width: int = 64
    sequence_length: int = 0  # steps that memory is learnt through at a time; 0: a minibatch's

    def __post_init__(self) -> None:
        check_settings(self)
        if self.critic not in CRITICS:
            raise UnknownNameError("critic", self.critic, CRITICS)
        check_pieces(type(self).__name__, self.num_steps, self.num_minibatches, self.length)

    def init(self, key: jax.Array, env: Env, envs: int) -> State:
        """The state before the first tick with `envs` environments."""
        net_key, learner_key, act_key, env_key = jax.random.split(key, 4)
        routes = route(env, self.policies)
        own, world = teams.widths(teams.check_team(self, routes))
        params, memory = {}, {}
        for i, p in enumerate(routes.policies):
            keys = jax.random.split(jax.random.fold_in(net_key, i))
            spaces = own[p.name], world if self.central else 0, p.action_space
            remembers = self.memory, self.memory_width
            params[p.name] = teams.init_member((keys[0], keys[1]), spaces, self.hidden, remembers)
            memory[p.name] = start(params[p.name].memory, (envs, len(p.agents)))
        opt_state = {name: self.optimiser.init(of) for name, of in params.items()}
        learner = Learner(params, opt_state, learner_key)
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
        shown, last = (look(routes, x, 2, central=self.central) for x in (obs, steps.last_obs))
        led_to = (steps.reward, steps.terminated, steps.truncated)
        made: Any = (shown, action, log_prob, *(routes.split(x, 2) for x in led_to), last)
        rollouts = {
            name: Rollout(*(x[name] for x in made), after=(), memory=state.memory[name])
            for name in learner.params
        }
        rate = {"learning_rate": current(self.rate, learner.opt_state)}
        learner, parts = self.learn(learner, rollouts)
        totals = jax.tree.map(lambda x: jnp.sum(x, axis=0), episode_totals(steps))
        return State(learner, *rows), teams.by_name(parts) | totals | rate

    @stage(per="env")
    def act(self, key: jax.Array, shown: Any, memory: Any, *, params: Any) -> tuple:
        """The next key, and of every policy: its memory, and its agents' actions and their logs."""
        key, *keys = jax.random.split(key, len(params) + 1)
        action, log_prob = {}, {}
        for own_key, (name, of) in zip(keys, params.items(), strict=True):
            remembered, now = teams.decide(of, memory[name], shown[name])
            memory = memory | {name: remembered}
            action[name] = now.sample(own_key)
            log_prob[name] = now.log_prob(action[name])
        return key, memory, action, log_prob

    def play(self, env: Env, state: State, obs: Any, memory: Any, key: Any = None) -> tuple:
        """Every agent's likeliest action, or one drawn, and what is remembered then."""
        routes = route(env, self.policies)
        shown = look(routes, obs, 0, central=False)
        return teams.play(state.learner.params, routes, shown, memory, key)

    @stage
    def learn(self, learner: Learner, rollouts: dict[str, Rollout]) -> tuple[Learner, Any]:
        """The learner after all epochs, and the mean parts of each policy's loss."""
        batch = {name: self.judge(learner.params[name], of) for name, of in rollouts.items()}
        spreads = {name: spread(of.advantage) for name, of in batch.items()}

        def update(carry: tuple, times: jax.Array) -> tuple:
            some, scale = jax.tree.map(lambda x: x[times], (batch, spreads))
            grads, parts = self.grad(carry[0], some, scale)
            return self.apply(*carry, mean(grads)), parts

        pieces = self.num_minibatches, self.num_steps // (self.length or 1) // self.num_minibatches
        nets, key, parts = in_epochs(update, learner[:2], learner.key, self.update_epochs, pieces)
        for name, of in rollouts.items():
            parts[name]["reward"] = jnp.mean(of.reward)
        return Learner(*nets, key), mean(parts)

    def judge(self, params: Member, rollout: Rollout) -> Batch:
        """How much better each action was than expected."""
        over = ends(rollout)
        seen = rollout.obs, rollout.last_obs
        memory_t, value_t, next_value_t = teams.expect(params, seen, rollout.memory, over)
        discount_t, lambda_t = self.gamma * ~rollout.terminated, self.gae_lambda * ~over
        advantage_t = gae(rollout.reward, discount_t, value_t, next_value_t, lambda_t)
        fresh_t = begins(rollout) if params.memory else ()
        made = (value_t, value_t + advantage_t, advantage_t, fresh_t)
        batch = cut(Batch(rollout.obs, rollout.action, rollout.log_prob, *made), self.length)
        return batch._replace(memory=jax.tree.map(lambda x: x[:: self.length or 1], memory_t))

    @stage
    def grad(self, params: Any, batch: dict[str, Batch], spreads: Any) -> tuple[Any, Any]:
        """The gradient of each policy's loss, and the parts of the loss."""
        grads, parts = {}, {}
        for name, of in batch.items():
            memory = as_samples(of.memory)
            some = of._replace(advantage=standardise(of.advantage, spreads[name]), memory=())
            some = as_samples(some, self.length)._replace(memory=memory)
            grads[name], parts[name] = grad_in_blocks(self.loss, params[name], some)
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
        now, value = teams.reconsider(params, batch.shown, batch.memory, batch.fresh)
        parts = losses.ppo(now, value, batch, self.clip_eps, self.clip_eps_vf)
        return losses.weighed(parts, self.vf_coef, self.ent_coef)

    @property
    def central(self) -> bool:
        """Whether the critic sees more than its agent does."""
        return self.critic == "central"

    @property
    def length(self) -> int:
        """Steps of a piece; 0 without memory: they are steps, then."""
        return steps_of_piece(self)

    @property
    def rate(self) -> optax.ScalarOrSchedule:
        """The learning rate of each update."""
        return learning_rate(self, self.update_epochs * self.num_minibatches)

    @property
    def optimiser(self) -> optax.GradientTransformation:
        """Adam on clipped gradients."""
        return clipped_adam(self.rate, self.max_grad_norm)
