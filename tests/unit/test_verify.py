"""`verify` finds a plan with wrong updates of any size, and tolerates rounding."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shoal
from shoal.runtime.debug.verify import (
    TOLERANCE,
    carried_difference,
    shown_difference,
    tolerance_of,
)

SGD = 3e-4  # a usual learning rate
CALLS: list[int] = []  # calls of the gradient in Python


@shoal.stage(per="env")
def see(x):
    return 0.9 * x + 0.1


@dataclass(frozen=True)
class Fickle:
    """A loop whose gradient comes from Python and changes after the plan has run."""

    honest: int  # calls that return the right gradient
    share: float = 1.0  # of the gradient, afterwards
    shift: float = 0.0  # of the metric, afterwards

    def init(self, key: Any, env: Any, envs: int) -> Any:
        return {"w": jnp.linspace(0.5, 2.0, 8), "x": jnp.ones((envs, 8)), "key": key}

    def tick(self, env: Any, state: Any) -> Any:
        x = see(state["x"])
        slope, loss = self.ask(x.mean(0))
        w = state["w"] - SGD * slope
        return {"w": w, "x": x, "key": jax.random.fold_in(state["key"], 1)}, {"loss": loss}

    @property
    def ask(self):
        def specs(x):
            return x, jax.ShapeDtypeStruct((), jnp.float32)

        @shoal.host(specs, name="ask")
        def ask(x):
            CALLS.append(1)
            is_honest = len(CALLS) <= self.honest
            return x * (1 if is_honest else self.share), 1.0 + (0 if is_honest else self.shift)

        return ask


def found(**wrong):
    CALLS.clear()
    policy = shoal.single_learner_coarse(1)
    return shoal.verify(Fickle(honest=3, **wrong), None, policy, envs=4, ticks=3)


def test_the_same_numbers_are_the_same():
    verified = found()
    assert verified.holds, verified
    assert set(verified.differences) == {"key", "w", "x", "metrics.loss"}


def test_a_small_update_that_is_off_is_found():
    verified = found(share=0.25)
    assert not verified.holds
    assert verified.differences["w"] == pytest.approx(3.0, rel=0.01)  # of what it should be
    assert verified.differences["x"] == 0
    assert "DIFFERENT NUMBERS" in str(verified)


def test_a_metric_that_is_off_is_found():
    verified = found(shift=0.01)
    assert not verified.holds
    assert [name for name, size in verified.differences.items() if size] == ["metrics.loss"]
    assert "metrics.loss" in str(verified)


FLOATS = st.floats(-1e6, 1e6, width=32)
ARRAYS = st.lists(FLOATS, min_size=1, max_size=8).map(lambda xs: np.array(xs, np.float32))


@given(ARRAYS, st.floats(1e-8, 1e3))
def test_rounding_passes_and_a_wrong_change_does_not(start, rate):
    wanted = start - np.float32(rate) * np.linspace(1, 2, len(start), dtype=np.float32)
    up = np.nextafter(np.nextafter(wanted, np.float32(np.inf)), np.float32(np.inf))
    assert carried_difference(start, up, wanted) == 0
    half = start + (wanted - start) / 2
    gap, step = np.abs(half - wanted), np.spacing(np.maximum(np.abs(start), np.abs(wanted)))
    if (gap > 16 * step).all():
        assert carried_difference(start, half, wanted) > 0.2


@pytest.mark.parametrize("share", [0.25, 0.9, 0.99, 1.001, 1.75, 0.0])
def test_a_share_of_an_update_of_sgd_is_found_by_its_share(share):
    start = np.linspace(-2, 2, 100, dtype=np.float32)
    step = np.float32(SGD) * np.cos(np.arange(100, dtype=np.float32))
    off = carried_difference(start, start - np.float32(share) * step, start - step)
    assert off == pytest.approx(abs(1 - share), rel=0.05)
    assert off > TOLERANCE


def test_a_change_to_a_constant_value_is_found():
    w = jnp.ones(3)
    assert carried_difference(w, w, w) == 0
    assert carried_difference(w, w + 1e-4, w) == float("inf")


def test_whole_numbers_truth_values_and_keys_are_the_same_or_not():
    big = np.array([2**60, 1])
    assert carried_difference(big, big + 1, big) >= 1
    assert carried_difference(big, big, big) == 0
    flag = np.array([True, False])
    assert carried_difference(flag, ~flag, flag) == 1
    keys = jax.random.split(jax.random.key(0), 2)
    assert carried_difference(keys, keys, keys) == 0
    assert carried_difference(keys, keys[::-1], keys) >= 1


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_equal_themselves_alone(odd):
    wanted = np.array([odd, 1.0], np.float32)
    for compare in (shown_difference, lambda a, b: carried_difference(np.zeros(2), a, b)):
        assert compare(wanted, wanted) == 0
        assert compare(np.array([0.0, 1.0], np.float32), wanted) == float("inf")
        assert compare(-wanted, wanted) > 0
        assert compare(np.array([odd, 1.1], np.float32), wanted) == pytest.approx(0.1, rel=1e-3)


def test_a_metric_of_rounding_alone_is_no_difference():
    assert shown_difference(np.array([3e-9], np.float32), np.array([-2e-8], np.float32)) == 0
    assert shown_difference(np.array([1.01], np.float32), np.array([1.0], np.float32)) > TOLERANCE


def test_a_loop_that_computes_in_few_digits_may_differ_in_the_last_of_them():
    @dataclass(frozen=True)
    class Low:
        kind: str

        def init(self, key, env, envs):
            return jnp.ones((envs, 4))

        def tick(self, env, x):
            return self.double(x), {}

        @shoal.stage(per="env")
        def double(self, x):
            return (x.astype(self.kind) @ jnp.eye(4, dtype=self.kind)).astype(jnp.float32)

    assert tolerance_of(shoal.trace(Low("float32"), envs=2)) == TOLERANCE
    assert tolerance_of(shoal.trace(Low("float8_e4m3fn"), envs=2)) == 0.25
    assert TOLERANCE < tolerance_of(shoal.trace(Low("bfloat16"), envs=2)) < 0.2


@dataclass(frozen=True)
class Slow:
    """A loop that moves its weights by a rate."""

    rate: float

    def init(self, key: Any, env: Any, envs: int) -> Any:
        return {"w": jnp.linspace(0.5, 2.0, 8), "x": jnp.ones((envs, 8))}

    def tick(self, env: Any, state: Any) -> Any:
        learn = shoal.stage(self.learn, name="learn")
        return state | {"w": learn(state["w"], see(state["x"]))}, {}

    def learn(self, w: Any, x: Any) -> Any:
        return w - self.rate * shoal.mean(x.mean(0))


@pytest.mark.parametrize(("rate", "is_unknown"), [(1e-7, True), (2e-7, True), (1e-3, False)])
def test_a_change_that_passes_for_rounding_is_not_called_verified(rate, is_unknown):
    found = shoal.verify(Slow(rate), None, shoal.multi_learner(2), envs=4, ticks=2)
    row = next(line for line in str(found).splitlines() if line.startswith("w "))
    assert ("unknown" in row) == is_unknown
