"""A wrapper that also evaluates an algorithm: its learnt policy plays whole episodes."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shoal.algorithms import evaluated_host
from shoal.algorithms.evaluated_host import Playing
from shoal.envs import Environment, HostEnvironment, key_rows
from shoal.envs.environment import ended
from shoal.errors import SettingError, TraceError
from shoal.tracing.stage import stage

STAGE = "evaluate"
PREFIX = "evaluation_"  # as runs/files/records.py knows it
OWN = 0x0E7A1  # sets the keys of evaluation apart from those of training
Env = Environment | HostEnvironment
Metrics = dict[str, jax.Array]


class State(NamedTuple):
    """The carried state of training, and the number of occasions to evaluate it so far."""

    training: Any
    key: jax.Array
    occasions: jax.Array


class Played(NamedTuple):
    """Episodes in progress, a row each, and their returns so far."""

    states: Any
    obs: Any
    memory: Any
    over: jax.Array
    score: jax.Array
    length: jax.Array


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Before a tick of `algorithm`, every so many, its best actions play some whole episodes.

    What the algorithm does stays the same to the bit. Metrics count the episodes and sum up what
    they returned; they are 0 on all other ticks.
    """

    algorithm: Any
    episodes: int = 16  # at a time, each in an environment of its own
    steps: int = 27_000  # a longer episode counts with its return so far, and is reported
    every: int = 10  # occasions: ticks, or new values where it is an observer

    def __post_init__(self) -> None:
        for name in ("episodes", "steps", "every"):
            if getattr(self, name) < 1:
                raise SettingError(
                    f"{name}={getattr(self, name)} of an evaluation", "Use 1 or more."
                )
        if not hasattr(self.algorithm, "play"):
            raise SettingError(
                f"{type(self.algorithm).__name__} can't be evaluated: it has no method `play`",
                "Give it play(env, state, obs, memory), which returns the best action in one "
                "environment, and what to remember.",
            )

    @property
    def title(self) -> str:
        """What it is called in prints."""
        return f"{type(self.algorithm).__name__}, evaluated"

    def init(self, key: jax.Array, env: Env, envs: int) -> State:
        """The state before the first tick with `envs` environments to learn in."""
        training = self.algorithm.init(key, env, envs)
        own = jax.random.fold_in(key, OWN)
        # Python needs a number, not a key.
        own = jax.random.bits(own, dtype=jnp.uint32) if isinstance(env, HostEnvironment) else own
        return State(training, own, jnp.int32(0))

    def tick(self, env: Env, state: State) -> tuple[State, Metrics]:
        """Evaluate the current state, then train."""
        played = self.play_host if isinstance(env, HostEnvironment) else self.play_compiled
        occasions, evaluation = played(env, state)  # pyright: ignore[reportArgumentType]
        training, metrics = self.algorithm.tick(env, state.training)
        if taken := sorted(set(metrics) & set(evaluation)):
            raise TraceError(
                f"tick shows a metric `{taken[0]}`, which is what an evaluation shows",
                "Give it another name.",
            )
        return State(training, state.key, occasions), metrics | evaluation

    def play_compiled(self, env: Environment, state: State) -> tuple[jax.Array, Metrics]:
        """The occasions so far, and the metrics of this one; zeros unless it is due."""

        def evaluate(key: jax.Array, occasions: jax.Array) -> tuple[jax.Array, Metrics]:
            def play() -> Metrics:
                return self.play(env, state.training, jax.random.fold_in(key, occasions))

            rest = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(play))
            evaluation = lax.cond(occasions % self.every == 0, play, lambda: rest)
            return occasions + 1, evaluation

        # It closes over the parameters that it reads, so that nothing else has to cross.
        return stage(name=STAGE)(evaluate)(state.key, state.occasions)

    def play_host(self, env: HostEnvironment, state: State) -> tuple[jax.Array, Metrics]:
        """The same in Python, by a stage of its own."""
        playing = Playing(self.algorithm, env, self.episodes, self.steps, self.every)
        now = state.training, state.key, state.occasions
        occasions, counts = evaluated_host.evaluated(playing, STAGE, *now)
        named = zip(evaluated_host.COUNTS, counts, strict=True)
        return occasions, {f"{PREFIX}{name}": count for name, count in named}

    def last(self, env: Env, state: State) -> dict[str, np.ndarray]:
        """Evaluate a state once, outside of any tick."""
        if isinstance(env, HostEnvironment):
            playing = Playing(self.algorithm, env, self.episodes, self.steps, 1)
            counts = evaluated_host.played_once(playing, *state)
            named = dict(zip(evaluated_host.COUNTS, counts, strict=True))
            return {f"{PREFIX}{name}": np.asarray(count) for name, count in named.items()}

        def play(state: State) -> Metrics:
            return self.play(env, state.training, jax.random.fold_in(state.key, state.occasions))

        return jax.tree.map(np.asarray, jax.jit(play)(state))

    def play(self, env: Environment, training: Any, key: jax.Array) -> Metrics:
        """Play one episode in each environment with the greedy action."""

        def choose(turn: jax.Array, obs: Any, memory: Any) -> tuple[Any, Any]:
            del turn
            one = partial(self.algorithm.play, env, training)
            return jax.vmap(one)(obs, memory)

        played = play_episodes(env, choose, key_rows(key, self.episodes), self.steps)
        return {
            f"{PREFIX}episodes": jnp.float32(self.episodes),
            f"{PREFIX}return": jnp.sum(played.score),
            f"{PREFIX}length": jnp.sum(played.length).astype(jnp.float32),
            f"{PREFIX}unfinished": jnp.sum(~played.over).astype(jnp.float32),
        }


def play_episodes(
    env: Environment, choose: Callable[..., tuple[Any, Any]], keys: jax.Array, steps: int
) -> Played:
    """One episode in an environment a key, each at most so many steps long.

    `choose(turn, obs, memory)` returns the actions of all environments and their memories.
    """

    def move(turn: jax.Array, played: Played) -> Played:
        action, memory = choose(turn, played.obs, played.memory)
        states, step = jax.vmap(env.advance)(played.states, action)
        over = played.over | ended(step.terminated, step.truncated, axes=1)
        score = jnp.where(played.over, played.score, step.episode_return)
        length = jnp.where(played.over, played.length, step.episode_length)
        return Played(states, step.obs, memory, over, score, length)

    def continues(turn: tuple[jax.Array, Played]) -> jax.Array:
        return (turn[0] < steps) & ~jnp.all(turn[1].over)

    states, obs = env.reset(keys)
    none = jnp.zeros(len(keys))
    first = Played(states, obs, None, none > 0, none, none.astype(jnp.int32))
    turn = (jnp.int32(1), move(jnp.int32(0), first))
    _, played = lax.while_loop(continues, lambda turn: (turn[0] + 1, move(*turn)), turn)
    return played
