"""Routes agents to policies: a table from patterns of names to policies, the first match wins.

An environment's values are arrays with an axis of agents after that of the environments, or, where
agents differ, a dictionary of groups of such arrays. Routed, they are a dictionary of policies.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shoal.envs.spaces import Action, Groups, Observation
from shoal.errors import SettingError

Table = tuple[tuple[str, str], ...]
Tree = Any
OWN = "*"  # as the name of a policy: the agent's own name, so that each agent learns for itself


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy's name, its agents, and what each of them sees and does."""

    name: str
    agents: tuple[str, ...]
    observation_space: Observation
    action_space: Action


@dataclass(frozen=True, slots=True)
class Routes:
    """Where each agent stands among its group, or among all, and among those of its policy."""

    groups: tuple[tuple[str, tuple[str, ...]], ...]  # one, without a name, if agents don't differ
    policies: tuple[Policy, ...]

    def split(self, tree: Tree, axis: int = 1) -> dict[str, Tree]:
        """What an environment gives, by policy; agents are along `axis`."""
        if len(self.groups) == 1 and len(self.policies) == 1:
            return {self.policies[0].name: tree}
        by_group = tree if self.groups[0][0] else {"": tree}
        return {p.name: self._of(p.agents, self.groups, by_group, axis) for p in self.policies}

    def join(self, by_policy: dict[str, Tree], axis: int = 1) -> Tree:
        """What policies give, as the environment takes it: the reverse of `split`."""
        if len(self.groups) == 1 and len(self.policies) == 1:
            return by_policy[self.policies[0].name]
        sources = tuple((p.name, p.agents) for p in self.policies)
        groups = {name: self._of(agents, sources, by_policy, axis) for name, agents in self.groups}
        return groups if self.groups[0][0] else groups[""]

    def _of(
        self,
        agents: tuple[str, ...],
        sources: tuple[tuple[str, tuple[str, ...]], ...],
        trees: dict[str, Tree],
        axis: int,
    ) -> Tree:
        """What `sources` have of these agents, in their order."""
        used = [(name, theirs) for name, theirs in sources if set(theirs) & set(agents)]
        there = [agent for _, theirs in used for agent in theirs]
        index = np.array([there.index(agent) for agent in agents])

        def take(*x: jax.Array) -> jax.Array:
            whole = x[0] if len(x) == 1 else jnp.concatenate(x, axis=axis)
            in_order = np.array_equal(index, np.arange(whole.shape[axis]))
            return whole if in_order else jnp.take(whole, index, axis=axis)

        return jax.tree.map(take, *(trees[name] for name, _ in used))


def route(env: Any, table: Table) -> Routes:
    """How `table` routes the agents of `env`; without a table, a policy a group."""
    agents: tuple[str, ...] = env.agents
    if not agents:
        raise SettingError(
            f"{getattr(env, 'name', env)} has one agent, and this algorithm trains several",
            "Take ppo or dqn, or an environment of several agents.",
        )
    shown, taken = env.observation_space, env.action_space
    spaces = dict.fromkeys(agents, (shown, taken))
    groups: tuple[tuple[str, tuple[str, ...]], ...] = (("", agents),)
    if isinstance(shown, Groups):
        groups = env.groups
        by_name = dict(shown.spaces), dict(taken.spaces)
        spaces = {agent: tuple(s[name] for s in by_name) for name, of in groups for agent in of}
    default = tuple((agent, name or "policy") for name, of in groups for agent in of)
    policies: dict[str, list[str]] = {}
    for agent in agents:
        policies.setdefault(_match(agent, table or default), []).append(agent)
    return Routes(groups, tuple(_policy(name, of, spaces) for name, of in policies.items()))


def _match(agent: str, table: Table) -> str:
    """The policy of the first pattern that fits."""
    for pattern, policy in table:
        if fnmatchcase(agent, pattern):
            return agent if policy == OWN else policy
    patterns = ", ".join(f"`{pattern}`" for pattern, _ in table)
    raise SettingError(
        f"no policy acts for the agent `{agent}`: it matches none of {patterns}",
        f'Add a line to `policies` that does, such as ("{agent}", "its_policy") or ("*", "rest").',
    )


def _policy(name: str, agents: list[str], spaces: dict[str, Any]) -> Policy:
    first = agents[0]
    other = next((agent for agent in agents if spaces[agent] != spaces[first]), None)
    if other is not None:
        raise SettingError(
            f"the policy `{name}` would act for `{first}` and `{other}`, which see or do "
            "different things",
            f"Give `{other}` a policy of its own, by a line before that of `{name}`.",
        )
    return Policy(name, tuple(agents), *spaces[first])
