"""Replay: ONE environment's last steps in the order they were made, and how to draw from them.

Everything here is pure and of a single environment, so a stage `per="env"` can add, draw and
update wherever a plan puts it, and with the same numbers. A step is known by its number: the
count of steps added before it. An item of a ring is any tree of arrays: a step, or a chunk of steps
where sequences are to begin only at every so many.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shoal.errors import SettingError

MOST = 2**31 - 1  # steps of an environment that can be counted


class Ring(NamedTuple):
    """The newest steps; the one of number i lies at i modulo the capacity."""

    steps: Any  # a tree of [capacity, ...]
    added: jax.Array  # how many steps were ever added: int32, so at most 2³¹ an environment

    @property
    def capacity(self) -> int:
        """How many steps are kept."""
        return jax.tree.leaves(self.steps)[0].shape[0]

    @property
    def size(self) -> jax.Array:
        """How many steps are held."""
        return jnp.minimum(self.added, self.capacity)


class Priorities(NamedTuple):
    """How often each step of a ring is drawn as the first of a window, in proportion."""

    mass: jax.Array  # [capacity]
    highest: jax.Array  # ever given; what is new gets it


class Replay(NamedTuple):
    """A ring, and its priorities if it has some."""

    ring: Ring
    priorities: Any  # () where all steps are drawn alike


def init_ring(example: Any, capacity: int) -> Ring:
    """An empty ring for steps like `example` (arrays, or their shapes and dtypes)."""
    room = jax.tree.map(lambda x: jnp.zeros((capacity, *x.shape), x.dtype), example)
    return Ring(room, jnp.int32(0))


def init_priorities(capacity: int) -> Priorities:
    """The priorities of an empty ring."""
    return Priorities(jnp.zeros(capacity), jnp.float32(1))


def add(ring: Ring, steps: Any) -> Ring:
    """`ring` with `steps` of [time, ...] as its newest, in the place of its oldest."""
    places, count = _places(ring, steps)
    held = jax.tree.map(
        lambda room, new: room.at[places].set(new.astype(room.dtype), unique_indices=True),
        ring.steps,
        steps,
    )
    return Ring(held, ring.added + count)


def prioritise_new(priorities: Priorities, ring: Ring, steps: Any) -> Priorities:
    """`priorities` when `steps` are about to be added to `ring`: as high as any so far."""
    places, _ = _places(ring, steps)
    return priorities._replace(mass=priorities.mass.at[places].set(priorities.highest))


def read(ring: Ring, first: jax.Array, length: int) -> Any:
    """The windows of `length` steps that begin at the steps of numbers `first`: [..., length]."""
    places = (first[..., None] + jnp.arange(length)) % ring.capacity
    return jax.tree.map(lambda room: room[places], ring.steps)


def draw(key: jax.Array, ring: Ring, count: int, length: int) -> jax.Array:
    """The numbers of `count` steps at which windows of `length` begin, each as likely.

    Where fewer steps are held than a window has, there is nothing to draw and the numbers say
    nothing: see that `ring.size >= length` first.
    """
    oldest = ring.added - ring.size
    windows = jnp.maximum(ring.size - length + 1, 1)
    return oldest + jax.random.randint(key, (count,), 0, windows)


def draw_prioritised(
    key: jax.Array, ring: Ring, priorities: Priorities, count: int, length: int
) -> tuple[jax.Array, jax.Array]:
    """As `draw`, in proportion to the first step's priority; and how often, against uniformly.

    That ratio is n P(i), whose power -β is a step's importance weight (Schaul et al., 2016).
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
    """`priorities` with new `values` for the steps of numbers `first`, the highest if repeated.

    Steps that the ring no longer holds are passed over. Values must be greater than 0.
    """
    first, values = first.reshape(-1), values.reshape(-1)
    # An index past the end is dropped; a repeated one must not depend on who writes last.
    place = jnp.where(first >= ring.added - ring.size, first % ring.capacity, ring.capacity)
    mass = priorities.mass.at[place].set(0, mode="drop").at[place].max(values, mode="drop")
    return Priorities(mass, jnp.maximum(priorities.highest, jnp.max(values)))


def sample(key: jax.Array, ring: Ring, count: int, length: int) -> Any:
    """Windows of `length` steps, `count` of them: [count, length, ...]."""
    return read(ring, draw(key, ring, count, length), length)


def sample_prioritised(
    key: jax.Array, ring: Ring, priorities: Priorities, count: int, length: int
) -> tuple[Any, jax.Array, jax.Array]:
    """Windows in proportion to priorities, the numbers of their first steps, and n P(i)."""
    first, ratio = draw_prioritised(key, ring, priorities, count, length)
    return read(ring, first, length), first, ratio


def init_replay(example: Any, capacity: int, exponent: float) -> Replay:
    """An empty ring for steps like `example`, with priorities if their `exponent` isn't 0."""
    priorities = init_priorities(capacity) if exponent else ()
    return Replay(init_ring(example, capacity), priorities)


def keep(replay: Replay, steps: Any) -> Replay:
    """`replay` with `steps` of [time, ...], of the highest priority if it has some."""
    ring, priorities = replay
    priorities = prioritise_new(priorities, ring, steps) if priorities else ()
    return Replay(add(ring, steps), priorities)


def choose(key: jax.Array, replay: Replay, count: int, length: int) -> tuple[jax.Array, jax.Array]:
    """The numbers of `count` windows' first steps, and how often each is drawn, n P(i)."""
    if replay.priorities:
        return draw_prioritised(key, replay.ring, replay.priorities, count, length)
    return draw(key, replay.ring, count, length), jnp.ones(count)


def updates_a_tick(steps: int, samples_per_insert: float, windows: int) -> int:
    """How many updates of `windows` make that each step is learnt from so often on average."""
    wanted = samples_per_insert * steps / windows
    if wanted < 1 or wanted % 1:
        raise SettingError(
            f"{steps} steps a tick, each to be learnt from {samples_per_insert:g} times, make "
            f"{wanted:g} updates of {windows} windows",
            "Let num_steps x samples_per_insert be a multiple of batch_size_per_env.",
        )
    return int(wanted)


def check_capacity(capacity: int, min_size: int, steps: int, length: int) -> int:
    """`capacity` if a tick's steps fit and `min_size` steps are enough for a window."""
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
    """Where `steps` go, and how many they are."""
    count = jax.tree.leaves(steps)[0].shape[0]
    if count > ring.capacity:
        raise SettingError(
            f"a replay of {ring.capacity} steps an environment can't take {count} at once",
            "Make buffer_size_per_env larger, or collect fewer steps in a tick.",
        )
    return (ring.added + jnp.arange(count)) % ring.capacity, count


def _in_proportion(share: jax.Array, mass: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The places at which these shares of `mass` lie, and all of it; never one without mass.

    A tree of sums is built each time, which is cheap as every half is added to the other whole.
    """
    levels = [jnp.pad(mass, (0, (1 << (mass.size - 1).bit_length()) - mass.size))]
    while (half := levels[-1].size // 2) > 0:
        levels.append(levels[-1][:half] + levels[-1][half:])
    # Otherwise XLA would recompute the sums for every draw, fused with reading them.
    levels = jax.lax.optimization_barrier(levels)
    target, place = share * levels[-1][0], jnp.zeros(share.shape, jnp.int32)
    for level in reversed(levels[:-1]):
        half = level.size // 2
        first, second = level[place], level[place + half]
        other = (target >= first) & (second > 0) | (first == 0)
        target, place = target - other * first, place + other * half
    return place, levels[-1][0]
