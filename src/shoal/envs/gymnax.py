"""Environments of gymnax 0.x and 1.x: classic control, MinAtar, bsuite and more."""

from dataclasses import dataclass, fields
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shoal.caching import remembered
from shoal.envs.environment import Transition
from shoal.envs.later import loaded_later
from shoal.envs.spaces import Box, Discrete
from shoal.errors import SettingError
from shoal.shapes import Between, misfit

with loaded_later("seaborn", "matplotlib.pyplot"):  # they draw, and take a second to load
    import gymnax
    from gymnax.environments import spaces as gymnax_spaces

TIME_LIMIT = "max_steps_in_episode"
NEVER = np.iinfo(np.int32).max // 2


def names() -> list[str]:
    """The environments this family knows."""
    return list(gymnax.registered_envs)


class Given(NamedTuple):
    """An environment that was given as an object, with its parameters."""

    env: Any
    params: Any


def known_as(env: Any, params: Any) -> tuple[str, tuple[tuple[str, Any], ...], Given]:
    """The name of an environment that is given as an object, no settings, and itself."""
    return env.name, (), Given(env, env.default_params if params is None else params)


@dataclass(frozen=True, slots=True)
class GymnaxSimulator:
    """One gymnax environment, known by its id and the settings that differ from its defaults.

    Or one that was given as an object.
    """

    id: str
    settings: tuple[tuple[str, Any], ...] = ()
    given: Given | None = None

    @property
    def observation_space(self) -> Box:
        """The environment's own; a discrete observation is shown one-hot."""
        space = self._made.observation_space
        return Box(0.0, 1.0, (space.n,)) if isinstance(space, Discrete) else space

    @property
    def action_space(self) -> Box | Discrete:
        """The environment's own."""
        return self._made.action_space

    def reset(self, key: jax.Array) -> tuple[Any, jax.Array]:
        """A first state and its observation."""
        env, params, *_ = self._made
        obs, state = env.reset_env(key, params)
        return state, self._show(obs)

    def step(self, key: jax.Array, state: Any, action: jax.Array) -> Transition:
        """One step, without gymnax's own auto-reset, which would hide the last observation."""
        env, params, *_ = self._made
        obs, after, reward, done, _ = env.step_env(key, state, action, params)
        if hasattr(env, "is_truncated"):
            terminated, truncated = done, env.is_truncated(after, params)
        else:
            # 0.x merges the two: what would end without a time limit too has terminated. XLA
            # computes once what both calls share.
            unlimited = params.replace(**{TIME_LIMIT: NEVER})
            terminated = env.step_env(key, state, action, unlimited)[3]
            truncated = done
        reward = jnp.asarray(reward, jnp.float32)
        return Transition(after, self._show(obs), reward, terminated == 1, truncated == 1)

    @property
    def _made(self) -> "_Made":
        return _make(self.id, self.settings) if self.given is None else _of(self.given)

    def _show(self, obs: jax.Array) -> jax.Array:
        space = self._made.observation_space
        return jax.nn.one_hot(obs, space.n) if isinstance(space, Discrete) else obs


class _Made(NamedTuple):
    env: Any
    params: Any
    observation_space: Box | Discrete
    action_space: Box | Discrete


@remembered
def _make(name: str, settings: tuple[tuple[str, Any], ...]) -> _Made:
    """The environment; a setting is a field of its parameters or else an argument of its class."""
    # It may be made first while a loop is traced, and its constants must not be part of that trace.
    with jax.ensure_compile_time_eval():
        _, defaults = gymnax.make(name)
        known = {field.name for field in fields(defaults)}
        arguments = {key: value for key, value in settings if key not in known}
        try:
            env, params = gymnax.make(name, **arguments)
        except TypeError as error:
            raise SettingError(
                f"{name} can't be made with {', '.join(arguments)}: {error}",
                f"Its settings are {', '.join(sorted(known))}.",
            ) from error
        changed = {key: value for key, value in settings if key in known}
        for key, value in changed.items():
            _check_setting(name, key, value, getattr(defaults, key))
        params = params.replace(**changed)
        return _made(env, params)


@remembered
def _of(given: Given) -> _Made:
    with jax.ensure_compile_time_eval():
        return _made(*given)


def _made(env: Any, params: Any) -> _Made:
    spaces = env.observation_space(params), env.action_space(params)
    return _Made(env, params, *(_space(space) for space in spaces))


def _check_setting(name: str, key: str, value: Any, default: Any) -> None:
    """Refuse what can't stand for a parameter that is a number or a switch."""
    if not isinstance(default, int | float):
        return
    low = 1 if key == TIME_LIMIT else -NEVER
    kind: Any = type(default)  # of a float, a whole number will do
    wanted = kind if kind is bool else Annotated[kind, Between(low, NEVER)]
    if wrong := misfit(value, wanted):
        raise SettingError(
            f"{name} can't be made with {key}: {wrong}", f"By default it is {default}."
        )


def _space(space: Any) -> Box | Discrete:
    match space:
        case gymnax_spaces.Discrete():
            return Discrete(int(space.n))
        case gymnax_spaces.Box():
            return Box(_bound(space.low), _bound(space.high), tuple(space.shape))
    raise SettingError(
        f"The space {space!r} is neither discrete nor a box.", "Wrap the environment to flatten it."
    )


def _bound(bound: Any) -> float | tuple[float, ...]:
    values = np.asarray(bound, np.float32).ravel().tolist()
    return values[0] if len(set(values)) == 1 else tuple(values)
