"""A stage is bound to one object by identity, not by equality."""

import gc
import pickle
import weakref
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import cloudpickle
import jax.numpy as jnp
import numpy as np
import pytest

import shoal
from shoal.caching import remembered


@dataclass(frozen=True)
class OnData:
    """Learns from data that isn't compared."""

    rate: Any = 1.0
    data: Any = field(default=None, compare=False)

    def init(self, key, env, envs):
        return {"w": jnp.zeros(()), "x": jnp.zeros(envs)}

    def tick(self, env, state):
        w = self.learn(state["w"])
        return {"w": w, "x": self.move(state["x"])}, {"w": w}

    @shoal.stage
    def learn(self, w):
        return w + self.rate * jnp.asarray(self.data).mean()

    @shoal.stage(per="env")
    def move(self, x):
        return x + self.rate


@dataclass(slots=True, eq=True)
class Slotted:
    """Neither hashable nor weakly referenceable."""

    rate: float = 1.0

    @shoal.stage
    def learn(self, w):
        return w + self.rate


def trained(algorithm, **how):
    plan = shoal.plan(shoal.trace(algorithm, envs=4), shoal.fused())
    return shoal.run(plan, "inline", ticks=1, **how).state


def test_equal_algorithms_train_on_their_own_data():
    one, other = OnData(data=np.array([1.0, 3.0])), OnData(data=np.array([10.0]))
    assert one == other
    assert float(trained(one)["w"]) == 2.0
    assert float(trained(other)["w"]) == 10.0


def test_settings_that_differ_in_type_alone_have_stages_of_their_own():
    whole, real = OnData(1, np.ones(1)), OnData(1.0, np.ones(1))
    assert whole.move(jnp.arange(3)).dtype == jnp.int32
    assert real.move(jnp.arange(3)).dtype == jnp.float32


def test_a_stage_of_one_object_is_the_same_each_time_and_compiles_once():
    traces = []

    class Counted:
        @shoal.stage
        def learn(self, w):
            traces.append(1)
            return w + 1

    algorithm = Counted()
    assert algorithm.learn is algorithm.learn
    for w in range(3):
        assert int(algorithm.learn(jnp.int32(w))) == w + 1
        gc.collect()
    assert len(traces) == 1


def test_bound_stages_are_freed_with_their_object_and_the_cache_is_bounded():
    algorithm = OnData(data=np.ones(3))
    algorithm.learn(jnp.zeros(()))
    gone = weakref.ref(algorithm)
    del algorithm
    gc.collect()
    assert gone() is None
    kept = [Slotted(i) for i in range(600)]
    assert [float(each.learn(jnp.zeros(()))) for each in kept[:3]] == [0.0, 1.0, 2.0]
    assert [each.learn for each in kept]
    assert len(Slotted.learn._bound) <= 256


def test_a_bound_stage_keeps_its_object_alive():
    learn = OnData(data=np.array([5.0])).learn
    gc.collect()
    assert float(learn(jnp.zeros(()))) == 5.0


def test_an_object_at_a_reused_address_has_a_stage_of_its_own():
    for value in range(50):  # CPython soon gives an object the address of one before
        assert float(OnData(data=np.array([value])).learn(jnp.zeros(()))) == value


def test_an_unhashable_object_can_have_stages():
    assert float(Slotted(2.0).learn(jnp.ones(()))) == 3.0


def scaled(x, scale=1.0):
    return x * scale


class Scaled:
    """A callable object without a name or code of its own."""

    def __init__(self, scale):
        self.scale = scale

    def __call__(self, x):
        return x * self.scale

    def method(self, x):
        return x * self.scale


CALLABLES = {
    "partial": (partial(scaled, scale=3.0), "scaled"),
    "partial of a partial": (partial(partial(scaled), scale=3.0), "scaled"),
    "object": (Scaled(3.0), "Scaled"),
    "bound method": (Scaled(3.0).method, "method"),
    "partial of a method": (partial(Scaled(3.0).method), "method"),
}


@dataclass(frozen=True)
class Calls:
    """A loop with stages passed as arguments."""

    whole: Any
    rows: Any

    def init(self, key, env, envs):
        return {"w": jnp.ones(()), "x": jnp.ones(envs)}

    def tick(self, env, state):
        return {"w": self.whole(state["w"]), "x": self.rows(state["x"])}, {}


@pytest.mark.parametrize("kind", CALLABLES)
def test_any_callable_can_be_a_stage(kind):
    function, name = CALLABLES[kind]
    loop = Calls(shoal.stage(function), shoal.stage(per="env", name="each")(function))
    graph = shoal.trace(loop, envs=4)
    assert {stage.stage for stage in graph.stages} == {name, "each"}
    assert all("test_stage_binding" in stage.source for stage in graph.stages)
    state = trained(loop)
    assert float(state["w"]) == 3.0
    assert state["x"].tolist() == [3.0] * 4


def as_given(x):
    return x


@pytest.mark.parametrize("kind", CALLABLES)
def test_any_callable_can_be_a_host_stage(kind):
    function, name = CALLABLES[kind]
    call = shoal.host(as_given, per="env")(function)
    assert call(jnp.ones(4)).tolist() == [3.0] * 4
    loop = Calls(lambda w: w, call)
    assert {stage.stage for stage in shoal.trace(loop, envs=4).stages} == {name}


@pytest.mark.parametrize("kind", CALLABLES)
def test_any_callable_is_sent_to_processes(kind):
    function, _ = CALLABLES[kind]
    loop = Calls(shoal.stage(name="learn")(function), shoal.stage(per="env")(function))
    plan = shoal.plan(shoal.trace(loop, envs=4), shoal.single_learner_coarse(2))
    state = shoal.run(plan, "processes", ticks=2).state
    assert (float(state["w"]), state["x"].tolist()) == (9.0, [9.0] * 4)


def test_a_bound_stage_can_be_sent():
    for kind in (pickle, cloudpickle):
        learn = kind.loads(cloudpickle.dumps(OnData(2.0, np.array([5.0])).learn))
        assert float(learn(jnp.zeros(()))) == 10.0


def test_a_partial_in_a_class_is_no_method_as_python_has_it():
    class Loop:
        learn = shoal.stage(partial(scaled, scale=2.0))

    assert float(Loop().learn(jnp.float32(4.0))) == 8.0


def test_cached_values_are_keyed_by_type_and_by_fields_excluded_from_comparison():
    made = remembered(lambda *args: object())
    data = np.ones(2)
    assert made(1) is made(1)
    assert len({id(made(x)) for x in (1, 1.0, True, (1,), (1.0,), (True,), 0.0, -0.0)}) == 8
    assert made(OnData(1, data)) is made(OnData(1, data))
    assert made(OnData(1, data)) is not made(OnData(1, np.ones(2)))
    assert made(OnData(1, data)) is not made(OnData(1.0, data))
