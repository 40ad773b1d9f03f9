"""Environments of Brax: Ant, HalfCheetah, Humanoid and others, in Brax's own physics or MJX."""

import inspect
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from brax import envs as brax_envs  # pyright: ignore[reportMissingImports]

from shoal.caching import remembered
from shoal.envs.environment import Transition
from shoal.envs.spaces import Box
from shoal.errors import SettingError

EPISODE_LENGTH = 1000
TRAINING = "brax.envs.wrappers.training"


def names() -> list[str]:
    """The environments this family knows."""
    return [name for name in brax_envs._envs if name != "fast"]  # that one only tests Brax


class BraxState(NamedTuple):
    """Brax's own state, and the steps since the episode began."""

    inner: Any
    time: jax.Array


def known_as(env: Any, params: Any) -> tuple[str, tuple[tuple[str, Any], ...], Any]:
    """The name of an environment that is given as an object, no settings, and itself.

    Brax's wrappers for training are taken off: Shoal ends episodes and starts the next itself.
    """
    del params
    while type(env).__module__ == TRAINING:
        env = env.env
    return type(env.unwrapped).__name__, (), env


@dataclass(frozen=True, slots=True)
class BraxSimulator:
    """One Brax environment, known by its name and the settings that differ from its defaults.

    Or one that was given as an object.

    `episode_length` is when an episode is truncated; all other settings, such as `backend`, are
    Brax's.
    """

    id: str
    settings: tuple[tuple[str, Any], ...] = ()
    given: Any = None

    @property
    def costly_reset(self) -> bool:
        """A first state is one of physics: bodies are placed, contacts are found."""
        return True

    @property
    def observation_space(self) -> Box:
        """A vector without bounds."""
        return Box(-inf, inf, (self._made.observation_size,))

    @property
    def action_space(self) -> Box:
        """From -1 to 1, which each environment scales to its own actuators."""
        return Box(-1.0, 1.0, (self._made.action_size,))

    def reset(self, key: jax.Array) -> tuple[BraxState, jax.Array]:
        """A first state and its observation."""
        state = self._made.env.reset(key)
        return BraxState(state, jnp.int32(0)), state.obs

    def step(self, key: jax.Array, state: BraxState, action: jax.Array) -> Transition:
        """One step, without Brax's own auto-reset, which would hide the last observation."""
        del key  # what follows from a state and an action is certain
        before = jax.tree.map(lambda x: x, state.inner)  # Brax writes into its dictionaries
        after, time = self._made.env.step(before, action), state.time + 1
        # A reward that is always the same is a plain number.
        after = after.replace(reward=jnp.asarray(after.reward, jnp.float32))
        ends = after.done > 0, time >= self._made.episode_length
        return Transition(BraxState(after, time), after.obs, after.reward, *ends)

    @property
    def _made(self) -> "_Made":
        return _make(self.id, self.settings) if self.given is None else _of(self.given)


class _Made(NamedTuple):
    env: Any
    episode_length: int
    observation_size: int
    action_size: int


@remembered
def _make(name: str, settings: tuple[tuple[str, Any], ...]) -> _Made:
    # It may be made first while a loop is traced, and its constants must not be part of that trace.
    with jax.ensure_compile_time_eval():
        theirs = dict(settings)
        episode_length = theirs.pop("episode_length", EPISODE_LENGTH)
        if episode_length < 1:
            raise SettingError(
                f"episode_length={episode_length} is too short", "An episode has a step or more."
            )
        try:
            env = brax_envs.get_environment(name, **theirs)
        except (TypeError, ValueError) as error:
            raise SettingError(
                f"{name} can't be made with {theirs}: {error}",
                f"Its settings are {', '.join(_settings(name))}.",
            ) from error
        return _made(env, episode_length)


@remembered
def _of(env: Any) -> _Made:
    with jax.ensure_compile_time_eval():
        return _made(env, EPISODE_LENGTH)


def _made(env: Any, episode_length: int) -> _Made:
    obs = jax.eval_shape(env.reset, jax.random.PRNGKey(0)).obs
    return _Made(env, episode_length, obs.shape[-1], env.action_size)


def _settings(name: str) -> list[str]:
    own = inspect.signature(brax_envs._envs[name].__init__).parameters
    known = {*own, "backend", "n_frames", "debug", "episode_length"}
    return sorted(known - {"self", "kwargs"})
