"""Environments registered with Gymnasium, stepped one after the other in a process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec

from shoal.caching import remembered
from shoal.envs.gym_spaces import (
    Leaf,
    action_rows,
    action_space,
    empty_rows,
    leaves_of,
    observation_space,
)
from shoal.envs.host import Copies, Leaves, Moves
from shoal.envs.later import import_named
from shoal.envs.spaces import Action, Observation
from shoal.errors import MissingExtraError, RowError, SettingError, UnknownNameError

# What Atari games are usually played with; each may be set otherwise.
ATARI = {
    "noop_max": 30,
    "frame_skip": 4,
    "screen_size": 84,
    "terminal_on_life_loss": False,
    "stack": 4,
    "clip_reward": True,  # to its sign, to learn from; episodes are counted with the true one
}
REGISTERING = ("gymnasium", "ale_py", "shimmy")  # packages whose environments any process knows
PACKAGES = {"ale_py": "atari", "mujoco": "mujoco", "Box2D": "box2d", "cv2": "atari"}


def names() -> list[str]:
    """The environments that are registered."""
    with suppress(ImportError):
        import_module("ale_py")  # registers its games
    return list(gymnasium.registry)


def known_as(env: gymnasium.Env, params: Any) -> tuple[str, tuple[tuple[str, Any], ...], Any]:
    """The id, settings and factory of an environment's copies: from its spec, or by pickling."""
    del params
    spec = env.spec
    if spec is None or any(wrapper.kwargs is None for wrapper in spec.additional_wrappers):
        return type(env.unwrapped).__name__, (), Copies.of(env)
    kwargs = {name: value for name, value in spec.kwargs.items() if name != "render_mode"}
    plain, is_ours = gymnasium.registry.get(spec.id), factory_of(spec.id) is not None
    is_plain = plain is not None and spec == _with(plain, spec.kwargs)
    if is_plain and not is_ours and not _is_atari(spec.id):
        return spec.id, tuple(sorted(kwargs.items())), None
    return spec.id, (), _from_spec(_with(spec, kwargs))


def _with(spec: EnvSpec, kwargs: dict[str, Any]) -> EnvSpec:
    return replace(spec, kwargs=kwargs)


def factory_of(name: str) -> Callable[..., gymnasium.Env] | None:
    """What makes an environment that only this process may have registered; None for others."""
    spec = gymnasium.registry.get(name)
    if spec is None or spec.entry_point is None:
        return None
    entry = spec.entry_point
    module = entry if isinstance(entry, str) else getattr(entry, "__module__", "")
    return None if module.partition(".")[0] in REGISTERING else _from_spec(spec)


def _from_spec(spec: EnvSpec) -> Callable[..., gymnasium.Env]:
    """What makes the environment of a spec, as plain data where it can be that."""
    if isinstance(spec.entry_point, str):
        with suppress(Exception):  # arguments that are no JSON
            return FromSpec(spec.to_json())
    return partial(gymnasium.make, spec)


@dataclass(frozen=True)
class FromSpec:
    """Makes the environment of a spec, which needs not be registered."""

    spec: str

    def __call__(self, **settings: Any) -> gymnasium.Env:
        """Another one, with these settings beside those of the spec."""
        return gymnasium.make(EnvSpec.from_json(self.spec), **settings)


@dataclass(frozen=True, slots=True)
class GymnasiumSimulator:
    """A registered environment, known by its id and what `gymnasium.make` is to be given.

    With `make`, a class or function, that makes it, called with the settings. `wrappers`
    among the settings names functions as "module:function", applied in that order.
    An Atari game ("ALE/Pong-v5") is preprocessed as usual: see `ATARI` for its further settings.
    """

    id: str
    settings: tuple[tuple[str, Any], ...] = ()
    make: Callable[..., gymnasium.Env] | None = None

    @property
    def is_atari(self) -> bool:
        """Whether it is a game that is preprocessed as usual."""
        return self.make is None and _is_atari(self.id)

    @property
    def observation_space(self) -> Observation:
        """The environment's own; a discrete observation is shown one-hot."""
        return _form(self).observation_space

    @property
    def action_space(self) -> Action:
        """The environment's own, counted from 0."""
        return _form(self).action_space

    @property
    def agents(self) -> tuple[str, ...]:
        """Empty: a single agent acts."""
        return ()

    def open(self, seeds: np.ndarray) -> GymnasiumVector:
        """One environment a seed."""
        return GymnasiumVector(self, seeds)


class GymnasiumVector:
    """Environments stepped in a loop."""

    def __init__(self, simulator: GymnasiumSimulator, seeds: np.ndarray) -> None:
        self._seeds, self._form, self._envs = seeds, _form(simulator), []
        try:
            for row in range(len(seeds)):
                self._envs.append(_make_row(simulator, row))
        except BaseException:
            self.close()
            raise

    def reset(self) -> Leaves:
        """The first observations."""
        obs = empty_rows(self._form.leaves, len(self._seeds))
        for row, seed in enumerate(self._seeds.tolist()):
            self._reset(obs, row, seed)
        return obs

    def step(self, action: np.ndarray) -> Moves:
        """Steps every environment, and starts its next episode where this one ends."""
        n, leaves = len(self._envs), self._form.leaves
        last_obs, score = empty_rows(leaves, n), np.empty(n, np.float32)
        terminated, truncated = np.zeros(n, bool), np.zeros(n, bool)
        row, ended, actions = 0, [], self._form.action_rows(action)
        try:
            for row, (env, each) in enumerate(zip(self._envs, actions, strict=True)):
                obs, score[row], over, late, _ = env.step(each)
                for leaf, array in zip(leaves, last_obs, strict=True):
                    leaf.write(array, row, obs)
                if over or late:
                    terminated[row], truncated[row] = over, not over
                    ended.append(row)
        except Exception as error:
            raise RowError(row, "failed in step", error) from error
        obs = tuple(x.copy() for x in last_obs) if ended else last_obs
        for row in ended:
            self._reset(obs, row, None)
        reward = np.sign(score) if self._form.clip_reward else score
        return Moves(obs, reward, terminated, truncated, last_obs, score)

    def frame(self) -> Any:
        """The picture of the first environment, if it was made to draw them."""
        return self._envs[0].render()

    def close(self) -> None:
        """Closes every environment; one that can't be closed doesn't keep the others open."""
        for env in self._envs:
            with suppress(Exception):
                env.close()

    def _reset(self, arrays: Leaves, row: int, seed: int | None) -> None:
        try:
            obs, _ = self._envs[row].reset(seed=seed)
            for leaf, array in zip(self._form.leaves, arrays, strict=True):
                leaf.write(array, row, obs)
        except Exception as error:
            raise RowError(row, "failed in reset", error) from error


class _Form(NamedTuple):
    """What is known of an environment without keeping one open."""

    observation_space: Observation
    action_space: Action
    leaves: tuple[Leaf, ...]
    action_rows: Callable[[np.ndarray], Any]
    clip_reward: bool


@remembered
def _form(simulator: GymnasiumSimulator) -> _Form:
    env = _make(simulator)
    try:
        shown, taken = env.observation_space, env.action_space
        return _Form(
            observation_space(shown),
            action_space(taken),
            leaves_of(shown),
            action_rows(taken),
            simulator.is_atari and _atari(simulator)["clip_reward"],
        )
    finally:
        env.close()


def _make_row(simulator: GymnasiumSimulator, row: int) -> gymnasium.Env:
    try:
        return _make(simulator)
    except Exception as error:
        raise RowError(row, "can't be made", error) from error


def _make(simulator: GymnasiumSimulator) -> gymnasium.Env:
    """The environment with its wrappers; a missing package is answered with the extra it is in."""
    # Gymnasium's own checks take longer than many an environment, and Shoal has checks too.
    name, settings = simulator.id, dict(simulator.settings)
    wrappers = settings.pop("wrappers", ())
    try:
        if simulator.make is not None:
            env = simulator.make(**settings)
        elif simulator.is_atari:
            env = _make_atari(simulator)
        else:
            if ":" in name:
                import_named(name.partition(":")[0])
            env = gymnasium.make(name, **{"disable_env_checker": True, **settings})
    except (gymnasium.error.DependencyNotInstalled, ModuleNotFoundError) as error:
        raise _missing(name, error) from error
    except gymnasium.error.UnregisteredEnv as error:
        raise UnknownNameError("environment", name, gymnasium.registry) from error
    except (TypeError, ValueError, AssertionError) as error:
        given = ", ".join(key for key, _ in simulator.settings) or "its defaults"
        raise SettingError(
            f"{name} can't be made with {given}: {error}",
            f"Give it what {simulator.make or f'gymnasium.make({name!r})'} takes.",
        ) from error
    for wrapper in _check_wrappers(wrappers):
        env = _function(wrapper)(env)
    return env


def _check_wrappers(wrappers: Any) -> Sequence[str]:
    is_known = isinstance(wrappers, list | tuple) and all(isinstance(w, str) for w in wrappers)
    if not is_known:
        raise SettingError(
            f"wrappers={wrappers!r} are no wrappers", 'Name them: wrappers=("module:function",).'
        )
    return wrappers


def _is_atari(name: str) -> bool:
    return name.startswith("ALE/")


def _atari(simulator: GymnasiumSimulator) -> dict[str, Any]:
    given = dict(simulator.settings)
    return {name: given.get(name, default) for name, default in ATARI.items()}


def _make_atari(simulator: GymnasiumSimulator) -> gymnasium.Env:
    from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

    ale = import_module("ale_py")  # registers the games
    import_module("cv2")
    ale.ALEInterface.setLoggerMode(ale.LoggerMode.Error)  # no banner from every process
    chosen = _atari(simulator)
    given = {k: v for k, v in simulator.settings if k not in ATARI and k != "wrappers"}
    env = gymnasium.make(simulator.id, **{"frameskip": 1, "disable_env_checker": True, **given})
    stack, _ = chosen.pop("stack"), chosen.pop("clip_reward")
    return FrameStackObservation(AtariPreprocessing(env, **chosen), stack)


def _function(name: str) -> Callable[[gymnasium.Env], gymnasium.Env]:
    module, _, function = name.partition(":")
    try:
        return getattr(import_named(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingError(
            f"there is no wrapper `{name}`: {error}", 'Name it as "module:function".'
        ) from error


def _missing(name: str, error: Exception) -> Exception:
    text = f"{getattr(error, 'name', '')} {error} {error.__cause__}"
    extra = next((extra for package, extra in PACKAGES.items() if package in text), "")
    return MissingExtraError(f"a package that {name} needs", extra) if extra else error
