"""A loop of host stages only, whose environments fail in every way that environments can.

Its workers compile nothing and load no JAX, so that runs of it in processes start at once.
"""

import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import shoal
from shoal.envs import Box, Discrete, HostEnvironment, key_rows
from shoal.envs.host import Moves

SLEEPER = "import time; time.sleep(600)  # a simulator of Shoal's tests"


@dataclass(frozen=True)
class Faulty:
    """Environments that count steps; the first to be stepped `after` times fails."""

    fault: str = "none"
    after: int = 3
    folder: str = ""  # where it is written which environments are open
    seconds: float = 0.0
    observation_space = Box(-1e9, 1e9, (1,))
    action_space = Discrete(2)
    agents = ()

    def open(self, seeds: np.ndarray) -> "Rows":
        """One environment a seed."""
        return Rows(self, len(seeds))


class Rows:
    """Some environments, open."""

    def __init__(self, simulator: Faulty, count: int) -> None:
        self.simulator, self.count, self.steps = simulator, count, 0
        self.x, self.hoard = np.zeros((count, 1), np.float32), []
        self.simulators = []

    def reset(self) -> tuple[np.ndarray]:
        """The first observations."""
        return (self.x.copy(),)

    def step(self, action: np.ndarray) -> Moves:
        """Count a step; fail when it is due."""
        self.steps += 1
        time.sleep(self.simulator.seconds)
        if self.steps == 1:
            self.mark("opened")
        self.x = self.x + 1
        obs = self.x.copy()
        if self.steps == self.simulator.after and self.simulator.fault in ALL:
            self.mark("failing")
            found = ALL[self.simulator.fault](self, obs)
            obs = obs if found is None else found
        reward, no = np.ones(self.count, np.float32), np.zeros(self.count, bool)
        return Moves((obs,), reward, no, no, (obs,), reward)

    def close(self) -> None:
        """Ends the simulators that it has started."""
        if self.simulator.fault == "close hangs" and self.steps:
            time.sleep(600)
        for process in self.simulators:
            process.kill()
            process.wait()
        if self.steps:
            self.mark("closed")

    def mark(self, what: str) -> None:
        """Record that environments of this process have been opened or closed."""
        if self.simulator.folder:
            with open(f"{self.simulator.folder}/{what}", "a", encoding="utf-8") as file:
                file.write(f"{os.getpid()} {time.time()}\n")


def hang_once(rows: Rows, obs: np.ndarray) -> None:
    """Hangs, unless it has done so before."""
    with suppress(FileExistsError), open(f"{rows.simulator.folder}/hung", "x", encoding="utf-8"):
        time.sleep(600)


def raise_error(rows: Rows, obs: np.ndarray) -> None:
    """Raises what Python raises."""
    raise ValueError("the ball is out of the field")


def hold_the_lock(rows: Rows, obs: np.ndarray) -> None:
    """Hangs in C, so that no other thread of Python runs."""
    ctypes.PyDLL(None).sleep(600)


def fork_and_die(rows: Rows, obs: np.ndarray) -> None:
    """Leaves a process that holds all that this one held open."""
    if os.fork() == 0:
        with suppress(BaseException):
            time.sleep(600)
        os._exit(0)
    die()


def start_and_die(rows: Rows, obs: np.ndarray) -> None:
    """Leaves a simulator."""
    start_simulator()
    die()


def print_for_ever(rows: Rows, obs: np.ndarray) -> None:
    """Prints forever."""
    while True:
        print("x" * 1000)


def run_out_of_memory(rows: Rows, obs: np.ndarray) -> None:
    """Allocates more memory than this process may use."""
    resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33))
    rows.hoard = [np.empty(2**27) for _ in range(9)]  # a gigabyte each, none of it touched


def die() -> None:
    """Ends this process as `kill -9` does."""
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


FAULTS: dict[str, Callable[[Rows, np.ndarray], Any]] = {
    "raise": raise_error,
    "hang": lambda rows, obs: time.sleep(600),
    "hang and hold the GIL": hold_the_lock,
    "exit 0": lambda rows, obs: os._exit(0),
    "exit 1": lambda rows, obs: os._exit(1),
    "sys.exit": lambda rows, obs: sys.exit(0),
    "kill": lambda rows, obs: die(),
    "segfault": lambda rows, obs: ctypes.string_at(0),
    "fork": lambda rows, obs: os.fork() and None,  # both processes continue
    "fork and die": fork_and_die,
    "popen": lambda rows, obs: rows.simulators.append(start_simulator()),
    "popen and die": start_and_die,
    "popen detached": lambda rows, obs: start_simulator(start_new_session=True) and None,
    "nan": lambda rows, obs: obs * np.nan,
    "inf": lambda rows, obs: obs * np.inf,
    "wrong shape": lambda rows, obs: np.concatenate([obs, obs], axis=1),
    "wrong dtype": lambda rows, obs: obs.astype(complex),
    "print": lambda rows, obs: print("half way there", flush=True),
    "print without end": print_for_ever,
    "memory": run_out_of_memory,
    "close hangs": lambda rows, obs: None,
}
ALL = {**FAULTS, "hang once": hang_once}


def start_simulator(**how: Any) -> subprocess.Popen:
    """A long-running process, as simulators are."""
    return subprocess.Popen([sys.executable, "-S", "-c", SLEEPER], **how)


def specs_like(x: Any) -> Any:
    """The specs of one choice a row."""
    return jax.ShapeDtypeStruct(x.shape[:1], jnp.int32)


@shoal.host(specs_like, per="env", name="act")
def act(obs):
    return (np.asarray(obs)[:, 0] > 3).astype(np.int32)


@shoal.host(lambda weights, obs: (weights, weights), name="learn")
def learn(weights, obs):
    return np.float32(weights + 1), np.float32(np.mean(obs))


class State(NamedTuple):
    weights: jax.Array
    env_states: Any
    obs: jax.Array


@dataclass(frozen=True)
class HostLoop:
    """Acts once a tick and counts its ticks in what it learns; all of it is Python."""

    def init(self, key: Any, env: Any, envs: int) -> State:
        env_states, obs = env.reset(key_rows(key, envs))
        return State(jnp.float32(0), env_states, obs)

    def tick(self, env: Any, state: State) -> tuple[State, dict[str, Any]]:
        action = act(state.obs)
        env_states, step = env.step(state.env_states, action)
        weights, mean = learn(state.weights, step.obs)
        return State(weights, env_states, step.obs), {"mean": mean}


def faulty(fault: str = "none", **settings: Any) -> HostEnvironment:
    """Environments with this fault."""
    return HostEnvironment("faulty", Faulty(fault, **settings))


def processes_with(text: str = SLEEPER) -> list[int]:
    """Processes with this in their command line: without it, those of `start_simulator`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if text in (folder / "cmdline").read_text(encoding="utf-8").replace("\0", " "):
                found.append(int(folder.name))
    return found
