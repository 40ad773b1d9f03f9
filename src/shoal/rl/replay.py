"""Replay of ONE environment: a ring buffer of its newest steps, and sampling from it.

All functions are pure and take a single environment's ring, so that a stage `per="env"` can add,
sample and update wherever a plan places it, with the same numbers. A step's index is the number of
steps that were added before it. An item of a ring is any tree of arrays: a step, or a chunk of
several steps where sequences consist of whole chunks.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shoal.errors import SettingError

MOST = 2**31 - 1  # steps of an environment that can be counted


class Ring(NamedTuple):
    """The newest steps; the step with index i is stored at i modulo the capacity."""

    steps: Any  # a tree of [capacity, ...]
    added: jax.Array  # the number of steps ever added, int32

    @property
    def capacity(self) -> int:
        """The number of steps that fit."""
        return jax.tree.leaves(self.steps)[0].shape[0]

    @property
    def size(self) -> jax.Array:
        """The number of steps stored."""
        return jnp.minimum(self.added, self.capacity)


class Priorities(NamedTuple):
    """The unnormalised probability with which each step of a ring starts a sampled window."""

    mass: jax.Array  # [capacity]
    highest: jax.Array  # so far; new steps get it


class Replay(NamedTuple):
    """A ring, and its priorities if replay is prioritised."""

    ring: Ring
    priorities: Any  # () if sampling is uniform


def init_ring(example: Any, capacity: int) -> Ring:
    """An empty ring for steps like `example` (arrays, or their shapes and dtypes)."""
    room = jax.tree.map(lambda x: jnp.zeros((capacity, *x.shape), x.dtype), example)
    return Ring(room, jnp.int32(0))


def init_priorities(capacity: int) -> Priorities:
    """The priorities of an empty ring."""
    return Priorities(jnp.zeros(capacity), jnp.float32(1))


def add(ring: Ring, steps: Any) -> Ring:
    """`ring` after adding `steps` of [time, ...], which overwrite the oldest."""
    places, count = _places(ring, steps)
    held = jax.tree.map(
        lambda room, new: room.at[places].set(new.astype(room.dtype), unique_indices=True),
        ring.steps,
        steps,
    )
    return Ring(held, ring.added + count)


def prioritise_new(priorities: Priorities, ring: Ring, steps: Any) -> Priorities:
    """`priorities` before `steps` are added to `ring`: new steps get the highest so far."""
    places, _ = _places(ring, steps)
    return priorities._replace(mass=priorities.mass.at[places].set(priorities.highest))


def read(ring: Ring, first: jax.Array, length: int) -> Any:
    """The windows of `length` steps that start at the steps with indices `first`: [..., length]."""
    places = (first[..., None] + jnp.arange(length)) % ring.capacity
    return jax.tree.map(lambda room: room[places], ring.steps)


def draw(key: jax.Array, ring: Ring, count: int, length: int) -> jax.Array:
    """The first indices of `count` windows of `length` steps, sampled uniformly.

    They are meaningless while `ring.size < length`; check that first.
    """
    oldest = ring.added - ring.size
    windows = jnp.maximum(ring.size - length + 1, 1)
    return oldest + jax.random.randint(key, (count,), 0, windows)


def draw_prioritised(
    key: jax.Array, ring: Ring, priorities: Priorities, count: int, length: int
) -> tuple[jax.Array, jax.Array]:
    """As `draw`, in proportion to the first step's priority; and the ratios n P(i).

    (n P(i))^-β is a window's importance weight (Schaul et al., 2016).
    """
    windows = ring.size - length + 1
    age = (jnp.arange(ring.capacity) - (ring.added - ring.size)) % ring.capacity
    mass = jnp.where(age < windows, priorities.mass, 0)
    place, total = _in_proportion(jax.random.uniform(key, (count,)), mass)
    first = ring.added - ring.size + age[place]
    return first, mass[place] * windows / jnp.maximum(total, 1e-30)


def set_priorities(
    priorities: Priorities, ring: Ring, first: jax.Array, values: jax.Array
) -> Priorities:
    """`priorities` with new `values` for the steps with indices `first`, the highest if repeated.

    Steps that the ring no longer holds are ignored. Values must be greater than 0.
    """
    first, values = first.reshape(-1), values.reshape(-1)
    # An index past the end is dropped; a repeated one must not depend on the order of writes.
    place = jnp.where(first >= ring.added - ring.size, first % ring.capacity, ring.capacity)
    mass = priorities.mass.at[place].set(0, mode="drop").at[place].max(values, mode="drop")
    return Priorities(mass, jnp.maximum(priorities.highest, jnp.max(values)))


def sample(key: jax.Array, ring: Ring, count: int, length: int) -> Any:
    """`count` windows of `length` steps, sampled uniformly: [count, length, ...]."""
    return read(ring, draw(key, ring, count, length), length)


def sample_prioritised(
    key: jax.Array, ring: Ring, priorities: Priorities, count: int, length: int
) -> tuple[Any, jax.Array, jax.Array]:
    """Windows sampled by priority, the indices of their first steps, and n P(i)."""
    first, ratio = draw_prioritised(key, ring, priorities, count, length)
    return read(ring, first, length), first, ratio


def init_replay(example: Any, capacity: int, exponent: float) -> Replay:
    """An empty ring for steps like `example`, with priorities if `exponent` isn't 0."""
    priorities = init_priorities(capacity) if exponent else ()
    return Replay(init_ring(example, capacity), priorities)


def insert(replay: Replay, steps: Any) -> Replay:
    """`replay` after adding `steps` of [time, ...], with the highest priority if prioritised."""
    ring, priorities = replay
    priorities = prioritise_new(priorities, ring, steps) if priorities else ()
    return Replay(add(ring, steps), priorities)


def draw_windows(
    key: jax.Array, replay: Replay, count: int, length: int
) -> tuple[jax.Array, jax.Array]:
    """The first indices of `count` sampled windows, and n P(i) of each."""
    if replay.priorities:
        return draw_prioritised(key, replay.ring, replay.priorities, count, length)
    return draw(key, replay.ring, count, length), jnp.ones(count)


def updates_per_tick(steps: int, samples_per_insert: float, windows: int) -> int:
    """The updates of `windows` per tick so that each step is sampled `samples_per_insert` times."""
    wanted = samples_per_insert * steps / windows
    if wanted < 1 or wanted % 1:
        raise SettingError(
            f"{steps} steps a tick, each to be learnt from {samples_per_insert:g} times, make "
            f"{wanted:g} updates of {windows} windows",
            "Let num_steps x samples_per_insert be a multiple of batch_size_per_env.",
        )
    return int(wanted)


def check_capacity(capacity: int, min_size: int, steps: int, length: int) -> int:
    """`capacity`, or an error unless a tick's steps fit and `min_size` steps hold a window."""
    if not max(length, 1) <= min_size <= capacity or steps > capacity:
        raise SettingError(
            f"a replay of {capacity} steps an environment, of which {min_size} must be there, "
            f"can't take {steps} a tick and give windows of {length}",
            f"Let buffer_size_per_env be {max(steps, min_size)} or more, and "
            f"learning_starts_per_env {length} or more.",
        )
    if capacity > MOST:
        raise SettingError(
            f"a replay of {capacity:,} steps an environment is longer than can be counted",
            f"Let buffer_size_per_env be {MOST:,} at most.",
        )
    return capacity


def check_chunks(burn_in: int, sequence_length: int, num_steps: int) -> None:
    """Check that sequences consist of whole chunks of a tick's steps."""
    if burn_in % num_steps or sequence_length % num_steps or not sequence_length:
        raise SettingError(
            f"{burn_in=} and {sequence_length=} are not multiples of {num_steps=}",
            "Make burn_in and sequence_length multiples of num_steps.",
        )


def _places(ring: Ring, steps: Any) -> tuple[jax.Array, int]:
    """The places of `steps` in the ring, and their number."""
    count = jax.tree.leaves(steps)[0].shape[0]
    if count > ring.capacity:
        raise SettingError(
            f"a replay of {ring.capacity} steps an environment can't take {count} at once",
            "Make buffer_size_per_env larger, or collect fewer steps in a tick.",
        )
    return (ring.added + jnp.arange(count)) % ring.capacity, count


def _in_proportion(share: jax.Array, mass: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The places at the quantiles `share` of `mass`, and its sum; never a place without mass.

    The sum tree is rebuilt at each call, which is cheap: every level adds two halves of the last.
    """
    levels = [jnp.pad(mass, (0, (1 << (mass.size - 1).bit_length()) - mass.size))]
    while (half := levels[-1].size // 2) > 0:
        levels.append(levels[-1][:half] + levels[-1][half:])
    # Without it XLA fuses the sums into their reads and recomputes them for every draw.
    levels = jax.lax.optimization_barrier(levels)
    target, place = share * levels[-1][0], jnp.zeros(share.shape, jnp.int32)
    for level in reversed(levels[:-1]):
        half = level.size // 2
        first, second = level[place], level[place + half]
        other = (target >= first) & (second > 0) | (first == 0)
        target, place = target - other * first, place + other * half
    return place, levels[-1][0]
