"""Films of a trained agent: frames of whole episodes as an animated GIF or an MP4."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import numpy as np

from shoal.envs import Environment, HostEnvironment
from shoal.errors import MissingExtraError, SettingError
from shoal.runs.results.agent import Agent
from shoal.runs.results.evaluating import Protocol

FORMS = (".gif", ".mp4")
FPS = 30
DRAWS = 'Let it take render_mode="rgb_array", and return an image from render().'
CELL = 24  # pixels of a cell of an observation that is drawn itself
BY_GYMNASIUM = {  # gymnax environments, and the parts of their state that Gymnasium draws
    "Acrobot-v1": ("joint_angle1", "joint_angle2", "velocity_1", "velocity_2"),
    "CartPole-v1": ("x", "x_dot", "theta", "theta_dot"),
    "MountainCar-v0": ("position", "velocity"),
    "MountainCarContinuous-v0": ("position", "velocity"),
    "Pendulum-v1": ("theta", "theta_dot"),
}
Draw = Callable[[Any, Any], np.ndarray]


@dataclass(frozen=True)
class Film:
    """What was written: the file, its frames, and what each episode returned."""

    path: Path
    frames: int
    returns: tuple[float, ...]


def film(agent: Agent, path: Path, protocol: Protocol) -> Film:
    """Play episodes one after the other, and write them to a file."""
    if path.suffix not in FORMS:
        raise SettingError(f"can't write {path}", f"Let its name end in {' or '.join(FORMS)}.")
    check_package("PIL" if path.suffix == ".gif" else "imageio_ffmpeg")
    for driver in ("SDL_VIDEODRIVER", "SDL_AUDIODRIVER"):  # pygame draws without a screen or sound
        os.environ.setdefault(driver, "dummy")
    match agent.env:
        case HostEnvironment() as env:
            episodes = _in_python(agent, env, protocol)
        case Environment() as env:
            episodes = _compiled(agent, env, protocol)
        case other:
            raise SettingError(
                f"there is nothing to film in {type(other).__name__}", "Train in an environment."
            )
    frames: list[np.ndarray] = []
    returns: list[float] = []
    for frame, earned in episodes:
        frames.append(frame)
        if earned is not None:
            returns.append(earned)
    write(frames, path)
    return Film(path, len(frames), tuple(returns))


def write(frames: list[np.ndarray], path: Path) -> None:
    """Write frames of the same size, 30 a second."""
    frames = [np.ascontiguousarray(_even(frame)) for frame in frames]
    if path.suffix == ".gif":
        from PIL import Image

        first, *rest = (Image.fromarray(frame).quantize(64) for frame in frames)
        first.save(path, save_all=True, append_images=rest, duration=1000 // FPS, loop=0)
        return
    import imageio_ffmpeg  # pyright: ignore[reportMissingImports]

    height, width, _ = frames[0].shape
    with warnings.catch_warnings():  # of JAX, that it forks: what it forks is ffmpeg at once
        warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
        size = (width, height)
        writer = imageio_ffmpeg.write_frames(str(path), size, fps=FPS, macro_block_size=2)
        writer.send(None)
        for frame in frames:
            writer.send(frame)
        writer.close()


def check_package(name: str) -> None:
    """Refuse to film without a package that is needed for it."""
    try:
        import_module(name)
    except ImportError as error:
        raise MissingExtraError(f"{name}, which films are written with,", "video") from error


def _even(frame: np.ndarray) -> np.ndarray:
    """A frame with an even number of rows and columns, as video formats want."""
    return frame[: frame.shape[0] // 2 * 2, : frame.shape[1] // 2 * 2, :3].astype(np.uint8)


def _keys(protocol: Protocol) -> Iterator[jax.Array | None]:
    step, key = 0, jax.random.key(protocol.seed)
    while True:
        yield jax.random.fold_in(key, step) if protocol.sampled else None
        step += 1


def _in_python(
    agent: Agent, env: HostEnvironment, protocol: Protocol
) -> Iterator[tuple[np.ndarray, float | None]]:
    """Frames, and with the last of each episode its return, of an environment in Python."""
    from shoal.envs.spaces import unflatten

    simulator: Any = env.simulator
    if not hasattr(simulator, "settings"):
        raise SettingError(f"{env.name} can't be filmed", "Train in one of Gymnasium's.")
    drawn = {**dict(simulator.settings), "render_mode": "rgb_array"}
    simulator = replace(simulator, settings=tuple(sorted(drawn.items())))
    draw, keys = np.random.default_rng(protocol.seed), _keys(protocol)
    for seed in draw.integers(0, 2**32, protocol.episodes, np.uint32):
        vector = _opened(simulator, seed, env.name)
        try:
            obs, memory, total = vector.reset(), None, 0.0
            for step in range(protocol.steps):
                frame = _frame(vector, env.name)
                shown = unflatten(env.observation_space, obs)
                action, memory = agent.play(shown, memory, next(keys))
                moves = vector.step(action)
                total, obs = total + float(moves.score[0]), moves.obs
                is_over = bool(np.all(moves.terminated | moves.truncated))
                is_last = is_over or step + 1 == protocol.steps
                yield frame, total if is_last else None
                if is_over:
                    break
        finally:
            vector.close()


def _opened(simulator: Any, seed: int, name: str) -> Any:
    try:
        return simulator.open(np.array([seed]))
    except SettingError as error:
        if "'render_mode'" in error.what:  # it doesn't take this one
            raise SettingError(f"{name} draws no frames", DRAWS) from error
        raise


def _frame(vector: Any, name: str) -> np.ndarray:
    frame = vector.frame() if hasattr(vector, "frame") else None
    if not isinstance(frame, np.ndarray) or frame.ndim != 3:
        raise SettingError(f"{name} draws no frames", DRAWS)
    return frame


def _compiled(
    agent: Agent, env: Environment, protocol: Protocol
) -> Iterator[tuple[np.ndarray, float | None]]:
    """The same of an environment that XLA compiles."""
    draw, advance = _drawing(env), jax.jit(jax.vmap(env.advance))
    keys = _keys(protocol)
    for key in jax.random.split(jax.random.key(protocol.seed), protocol.episodes):
        state, obs = jax.jit(env.reset)(key[None])
        memory = None
        for step in range(protocol.steps):
            one, shown = jax.tree.map(lambda x: np.asarray(x[0]), (state.inner, obs))
            frame = draw(one, shown)
            action, memory = agent.play(obs, memory, next(keys))
            state, moved = advance(state, action)
            obs = moved.obs
            is_over = bool(np.all(moved.terminated[0] | moved.truncated[0]))
            is_last = is_over or step + 1 == protocol.steps
            yield frame, float(moved.episode_return[0]) if is_last else None
            if is_over:
                break


def _drawing(env: Environment) -> Draw:
    """What draws a state of an environment, or its observation if that is a picture."""
    family, _, name = env.name.partition(":")
    if family == "gymnax" and name in BY_GYMNASIUM:
        return _by_gymnasium(name)
    shape = getattr(env.observation_space, "shape", ())
    if len(shape) == 3 and not env.agents:
        return _by_colours
    raise SettingError(
        f"{env.name} can't be filmed: it has neither a picture for an observation, nor a drawing "
        "by Gymnasium",
        f"Film an environment of Gymnasium, or of gymnax: {', '.join(BY_GYMNASIUM)}, MinAtar.",
    )


def _by_gymnasium(name: str) -> Draw:
    """The drawing of an environment's twin in Gymnasium, which is put into the same state."""
    check_package("pygame")
    gymnasium = import_module("gymnasium")
    twin = gymnasium.make(name, render_mode="rgb_array")
    twin.reset(seed=0)

    def draw(state: Any, obs: Any) -> np.ndarray:
        del obs
        values = [float(np.asarray(getattr(state, part))) for part in BY_GYMNASIUM[name]]
        twin.unwrapped.state = np.array(values)
        return twin.render()

    return draw


def _by_colours(state: Any, obs: Any) -> np.ndarray:
    """An observation of rows, columns and channels, a colour a channel."""
    del state
    channels = obs.shape[-1]
    hues = np.arange(channels) / channels
    colours = np.stack([np.cos(2 * np.pi * (hues - shift)) for shift in (0, 1 / 3, 2 / 3)], -1)
    image = np.asarray(obs, np.float32) @ (0.5 + 0.5 * colours)
    image = 255 * image / max(1.0, float(image.max()))
    return np.kron(image, np.ones((CELL, CELL, 1))).astype(np.uint8)
