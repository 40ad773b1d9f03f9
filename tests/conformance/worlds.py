"""Environments that fail in every way an environment can, or report about their process."""

import os
import signal
import sys
import time
from contextlib import suppress

import gymnasium
import numpy as np

FAULTS = ("none", "step", "reset", "shape", "nan", "kill", "kill once", "exit", "hang", "print")


class World(gymnasium.Env):
    """Two numbers that drift; does `fault` after so many steps."""

    observation_space = gymnasium.spaces.Box(-10.0, 10.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, fault="none", after=20, seconds=0.0, flag=""):
        assert fault in FAULTS
        self.flag = flag  # a file that says that it has happened
        self.fault, self.after, self.seconds, self.count = fault, after, seconds, 0
        self.at = np.zeros(2, np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        if self.fault == "reset" and self.count >= self.after:
            raise OSError("the level file is gone")
        return self.at, {}

    def step(self, action):
        self.count += 1
        time.sleep(self.seconds)
        if self.count == self.after:
            self.fail()
        self.at = np.clip(self.at + (0.1 if action else -0.1), -10, 10).astype(np.float32)
        obs = self.at
        if self.count >= self.after:
            obs = {"shape": self.at[:1], "nan": self.at * np.nan}.get(self.fault, obs)
        done = bool(abs(self.at[0]) > 1.5)
        return obs, float(self.at[1]), done, self.count % 10 == 0, {}

    def fail(self):
        match self.fault:
            case "step":
                raise ValueError("the ball is out of the field")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "kill once":
                with suppress(FileExistsError), open(self.flag, "x", encoding="utf-8"):
                    os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                os._exit(3)
            case "hang":
                time.sleep(1000)
            case "print":
                print("half way there")
                print("jax" in sys.modules, file=sys.stderr)


gymnasium.register("World-v0", World)
