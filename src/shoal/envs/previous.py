"""Environments that also show the action and the reward of the step before.

Policies with memory use them (Espeholt et al., 2018; Kapturowski et al., 2019): any algorithm sees
them as a part of the observation, while it learns and while it plays.
"""

from dataclasses import dataclass, replace
from typing import Any, assert_never

import jax
import jax.numpy as jnp
import numpy as np

from shoal.envs.environment import Environment, Simulator, Transition
from shoal.envs.spaces import SEEN, Action, Box, Dict, Discrete, Groups, MultiDiscrete, parts
from shoal.errors import SettingError


@dataclass(frozen=True, slots=True)
class Previous:
    """A simulator whose observations have the parts `action`, `obs` and `reward`.

    The action is one-hot where it is a choice. Both are 0 at the start of an episode.
    """

    simulator: Simulator

    @property
    def action_space(self) -> Any:
        """That of the simulator."""
        return self.simulator.action_space

    @property
    def observation_space(self) -> Any:
        """That of the simulator, its own part with the action and the reward beside it."""
        inner, acts = self.simulator.observation_space, self.action_space
        if isinstance(inner, Groups) or isinstance(acts, Groups):
            raise SettingError(
                "previous=True shows actions of agents that are alike, and these differ",
                "Leave it out, or show them in a wrapper of your own.",
            )
        own, reward = parts(inner)[0], Box(-np.inf, np.inf, (1,))
        low, high = (-np.inf, np.inf) if isinstance(acts, Box) else (0.0, 1.0)
        action = Box(low, high, (_width(acts),))
        shown = Dict((("action", action), ("obs", own), ("reward", reward)))
        if own is inner or not isinstance(inner, Dict):
            return shown
        return Dict(tuple((name, shown if name == SEEN else x) for name, x in inner.spaces))

    @property
    def agents(self) -> tuple[str, ...]:
        """Those of the simulator."""
        return getattr(self.simulator, "agents", ())

    @property
    def costly_reset(self) -> bool:
        """Whether the simulator's resets are costly."""
        return getattr(self.simulator, "costly_reset", False)

    def reset(self, key: jax.Array) -> tuple[Any, Any]:
        """A first state and its observation."""
        state, obs = self.simulator.reset(key)
        lead = (len(self.agents),) if self.agents else ()
        action = jnp.zeros((*lead, _width(self.action_space)))
        return state, self._shown(obs, action, jnp.zeros(lead))

    def step(self, key: jax.Array, state: Any, action: Any) -> Transition:
        """Step from `state` by `action`."""
        after = self.simulator.step(key, state, action)
        coded = _coded(self.action_space, action)
        return after._replace(obs=self._shown(after.obs, coded, after.reward))

    def _shown(self, obs: Any, action: jax.Array, reward: jax.Array) -> Any:
        space: Any = self.simulator.observation_space
        has_parts = parts(space)[0] is not space
        own = obs[SEEN] if has_parts else obs
        reward = jnp.asarray(reward, jnp.float32)[..., None]
        shown = {"action": action, "obs": own, "reward": reward}
        return {**obs, SEEN: shown} if has_parts else shown


def with_previous(env: Any) -> Environment:
    """`env`, whose observations also have the action and the reward of the step before."""
    return replace(env, simulator=Previous(env.simulator))


def _width(space: Action) -> int:
    match space:
        case Discrete(n):
            return n
        case MultiDiscrete(choices):
            return sum(choices)
        case Box():
            return space.size
    assert_never(space)


def _coded(space: Action, action: jax.Array) -> jax.Array:
    """An action as a vector; choices one-hot."""
    match space:
        case Discrete(n):
            return jax.nn.one_hot(action, n)
        case MultiDiscrete(choices):
            each = (jax.nn.one_hot(action[..., i], n) for i, n in enumerate(choices))
            return jnp.concatenate(list(each), axis=-1)
        case Box():
            lead = action.shape[: action.ndim - len(space.shape)]
            return action.reshape(*lead, -1).astype(jnp.float32)
    assert_never(space)
