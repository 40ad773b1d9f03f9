"""Films have a frame a step and end with the episodes, of compiled and Python's environments."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest

import shoal
from shoal.cli.main import main
from shoal.envs import Box, Discrete, Environment, Transition
from shoal.errors import MissingExtraError, SettingError
from shoal.runs.results.agent import Agent
from shoal.runs.results.evaluating import Protocol
from shoal.runs.results.filming import check_package, film
from unit.test_evaluation import WORLD, Greedy
from unit.toy_loop import check_error

Image = pytest.importorskip("PIL.Image")
gymnasium = pytest.importorskip("gymnasium")


class Ones:
    def play(self, env, state, obs, memory):
        return jnp.int32(1), memory


class Drawn(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-9.0, 9.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, render_mode=None):
        self.time, self.render_mode = 0, render_mode

    def reset(self, *, seed=None, options=None):
        self.time = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.time += 1
        return np.zeros(2, np.float32), float(action), self.time == 5, False, {}

    def render(self):
        assert self.render_mode == "rgb_array"
        return np.full((31, 40, 3), 40 * self.time, np.uint8)


class Blind(Drawn):
    def __init__(self):
        super().__init__()


@dataclass(frozen=True)
class Pixels:
    """A dot that moves; an episode has four steps."""

    observation_space = Box(0.0, 1.0, (4, 6, 2))
    action_space = Discrete(3)

    def reset(self, key):
        return jnp.int32(0), jnp.zeros((4, 6, 2)).at[0, 0, 0].set(1.0)

    def step(self, key, state, action):
        obs = jnp.zeros((4, 6, 2)).at[0, state, 0].set(1.0)
        return Transition(state + 1, obs, jnp.float32(2), state + 1 == 4, jnp.array(False))


def frames_of(path):
    with Image.open(path) as image:
        found = []
        for number in range(image.n_frames):
            image.seek(number)
            found.append(np.asarray(image.convert("RGB")))
    return found


def test_an_environment_in_python_is_filmed_frame_by_frame(tmp_path):
    agent = Agent(Ones(), shoal.envs.make(Drawn), (), 0)
    done = film(agent, tmp_path / "a.gif", Protocol(2))
    assert (done.frames, done.returns) == (10, (5.0, 5.0))
    shown = [int(frame.mean()) for frame in frames_of(done.path)]
    assert shown == [0, 40, 80, 120, 160] * 2
    assert frames_of(done.path)[0].shape == (30, 40, 3)
    assert film(agent, tmp_path / "b.gif", Protocol(1, steps=3)).returns == (3.0,)


def test_observations_that_are_pictures_are_drawn(tmp_path):
    agent = Agent(Ones(), Environment("pixels", Pixels()), (), 0)
    done = film(agent, tmp_path / "a.gif", Protocol(1))
    assert (done.frames, done.returns) == (4, (8.0,))
    first, *_ = frames_of(done.path)
    assert first.shape == (4 * 24, 6 * 24, 3)
    assert first[5, 5].max() > 0
    assert first[50, 50].max() == 0


def test_a_run_in_gymnax_is_filmed_by_its_twin_in_gymnasium(tiny_run, capsys):
    pytest.importorskip("pygame")
    assert main(["video", str(tiny_run.folder), "--steps", "3"]) == 0
    assert "tick 4: 3 frames" in capsys.readouterr().out
    shapes = {frame.shape for frame in frames_of(tiny_run.folder / "film.gif")}
    assert shapes == {(400, 600, 3)}


def test_mp4_is_written_where_ffmpeg_is(tmp_path):
    ffmpeg = pytest.importorskip("imageio_ffmpeg")
    agent = Agent(Ones(), shoal.envs.make(Drawn), (), 0)
    path = film(agent, tmp_path / "a.mp4", Protocol(2)).path
    frames, _ = ffmpeg.count_frames_and_secs(str(path))
    assert frames == 10


def test_what_cannot_be_filmed_is_refused(tmp_path):
    world = Agent(Greedy(), WORLD, (), 0)
    check_error(SettingError, lambda: film(world, tmp_path / "a.gif", Protocol(1)), "pay can't be")
    check_error(SettingError, lambda: film(world, tmp_path / "a.avi", Protocol(1)), ".gif or .mp4")
    nothing = Agent(Greedy(), None, (), 0)
    check_error(SettingError, lambda: film(nothing, tmp_path / "a.gif", Protocol(1)), "nothing")
    blind = Agent(Ones(), shoal.envs.make(Blind), (), 0)
    check_error(SettingError, lambda: film(blind, tmp_path / "a.gif", Protocol(1)), "no frames")
    check_error(MissingExtraError, lambda: check_package("no_such"), 'pip install "shoal[video]"')
