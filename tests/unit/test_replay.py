"""Replay draws stored windows in proportion to their priorities."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import SettingError
from shoal.rl import replay

LAW = settings(max_examples=20, deadline=None)
MANY = 4096
add = jax.jit(replay.add)
sample = jax.jit(replay.sample, static_argnums=(2, 3))
sample_prioritised = jax.jit(replay.sample_prioritised, static_argnums=(3, 4))
set_priorities = jax.jit(replay.set_priorities)
prioritise_new = jax.jit(replay.prioritise_new)
in_proportion = jax.jit(replay._in_proportion)
# Few shapes, so that few programs are compiled.
capacities = st.sampled_from([5, 33])
adds = st.lists(st.sampled_from([1, 5]), min_size=1, max_size=20)
lengths = st.sampled_from([1, 2, 5])
seeds = st.integers(0, 1000)


def numbered(first, count):
    """Steps that contain their own numbers, in two leaves of different shapes and dtypes."""
    number = np.arange(first, first + count, dtype=np.int32)
    return {"number": number, "seen": np.stack([number, -number], 1).astype(np.float32)}


def filled(capacity, counts):
    """A ring and its priorities after adding steps in parts of these sizes."""
    ring = replay.init_ring(jax.tree.map(lambda x: x[0], numbered(0, 1)), capacity)
    priorities, added = replay.init_priorities(capacity), 0
    for count in counts:
        steps = numbered(added, count)
        priorities = prioritise_new(priorities, ring, steps)
        ring, added = add(ring, steps), added + count
    return ring, priorities, added


@LAW
@given(capacities, adds, lengths, seeds)
def test_a_window_is_of_steps_in_their_order_all_added_and_none_overwritten(
    capacity, counts, length, seed
):
    ring, priorities, added = filled(capacity, counts)
    oldest = max(0, added - capacity)
    assert (int(ring.added), int(ring.size)) == (added, added - oldest)
    if added - oldest < length:
        return
    key = jax.random.key(seed)
    plain = sample(key, ring, MANY, length)
    weighed, first, ratio = sample_prioritised(key, ring, priorities, MANY, length)
    for windows in (plain, weighed):
        number = np.asarray(windows["number"])
        assert number.shape == (MANY, length)
        assert np.all(np.diff(number, axis=1) == 1)
        assert oldest <= number.min()
        assert number.max() < added
        np.testing.assert_array_equal(windows["seen"], np.stack([number, -number], 2))
        # With this many draws each window is found.
        assert len(np.unique(number[:, 0])) == added - oldest - length + 1
    np.testing.assert_array_equal(first, weighed["number"][:, 0])
    np.testing.assert_allclose(ratio, 1, rtol=1e-5)  # all are new


@LAW
@given(capacities, adds, lengths, seeds)
def test_windows_are_drawn_in_proportion_to_their_first_step_s_priority(
    capacity, counts, length, seed
):
    ring, priorities, added = filled(capacity, counts)
    oldest = max(0, added - capacity)
    if added - oldest < length:
        return
    rng = np.random.default_rng(seed)
    given_ = np.arange(oldest, added)
    values = rng.choice([0.01, 0.5, 1.0, 7.0], len(given_)).astype(np.float32)
    padded = np.full((capacity, 2), [-1, 1.0])  # overwritten steps are skipped
    padded[: len(given_)] = np.stack([given_, values], 1)
    priorities = set_priorities(
        priorities, ring, jnp.int32(padded[:, 0]), jnp.float32(padded[:, 1])
    )
    allowed = values[: added - oldest - length + 1]
    chance = allowed / allowed.sum()
    _, first, ratio = sample_prioritised(jax.random.key(seed), ring, priorities, MANY, length)
    found = np.bincount(np.asarray(first) - oldest, minlength=len(chance)) / MANY
    # Five standard deviations of a frequency.
    assert np.all(np.abs(found - chance) < 5 * np.sqrt(chance / MANY) + 1e-3)
    np.testing.assert_allclose(ratio, (len(chance) * chance)[first - oldest], rtol=1e-4)


def test_of_repeated_priorities_the_highest_holds_and_new_steps_get_the_highest_ever():
    ring, priorities, _ = filled(5, [5])
    priorities = set_priorities(priorities, ring, jnp.array([2, 2, 3]), jnp.array([4.0, 9.0, 0.5]))
    np.testing.assert_allclose(priorities.mass, [1, 1, 9, 0.5, 1])
    priorities = set_priorities(priorities, ring, jnp.array([2]), jnp.array([3.0]))
    np.testing.assert_allclose(priorities.mass, [1, 1, 3, 0.5, 1])
    priorities = replay.prioritise_new(priorities, ring, numbered(5, 2))
    np.testing.assert_allclose(priorities.mass, [9, 9, 3, 0.5, 1])


@LAW
@given(st.sampled_from([1, 2, 63, 300]), seeds)
def test_a_step_without_priority_is_never_drawn(size, seed):
    rng = np.random.default_rng(seed)
    mass = rng.uniform(1e-6, 1, size).astype(np.float32) * (rng.random(size) < 0.3)
    mass[rng.integers(size)] = 1.0
    ends = jnp.array([0.0, np.nextafter(np.float32(1), np.float32(0)), 1.0])
    share = jnp.concatenate([ends, jax.random.uniform(jax.random.key(seed), (64,))])
    place, total = in_proportion(share, jnp.asarray(mass))
    assert np.all(mass[np.asarray(place)] > 0)
    np.testing.assert_allclose(total, mass.sum(dtype=np.float64), rtol=1e-5)


def test_a_ring_is_written_in_place():
    ring, _, _ = filled(1000, [5])
    many = jax.jit(
        lambda ring, steps: jax.lax.fori_loop(0, 7, lambda _, r: replay.add(r, steps), ring),
        donate_argnums=0,
    )
    used = many.lower(ring, numbered(0, 5)).compile().memory_analysis()
    assert used.temp_size_in_bytes < sum(x.nbytes for x in jax.tree.leaves(ring)) / 4


def test_a_batch_of_environments_has_rows_that_are_each_its_own():
    rings = [filled(8, [5] * n)[0] for n in (1, 2, 3)]
    keys = jax.random.split(jax.random.key(0), 3)
    drawn = partial(replay.sample, count=6, length=2)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *rings)
    together = jax.vmap(drawn)(keys, stacked)
    for i, ring in enumerate(rings):
        alone = drawn(keys[i], ring)
        jax.tree.map(lambda x, y, i=i: np.testing.assert_array_equal(x[i], y), together, alone)


def test_more_steps_than_a_ring_holds_are_rejected():
    ring, _, _ = filled(5, [1])
    with pytest.raises(SettingError, match="can't take 6 at once"):
        replay.add(ring, numbered(0, 6))
