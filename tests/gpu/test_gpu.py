"""The same loop on a GPU and across CPU and GPU: the numbers of the CPU, within float tolerance."""

import sys
from functools import cache
from pathlib import Path

import jax
import pytest

import shoal
from laws.differences import difference
from shoal.runtime.cluster.machine import this_machine

sys.path.insert(0, str(Path(__file__).parents[1] / "laws"))

pytestmark = pytest.mark.gpu

TICKS, TOLERANCE = 5, 1e-3


def cpu_only(cluster):
    (host,) = cluster.hosts
    cpus = tuple(d for d in host.devices if d.kind == "cpu")
    return shoal.Cluster((shoal.Host(host.name, host.cpus, cpus),))


@pytest.fixture(autouse=True)
def exact_products():
    """TF32 products would differ from the CPU's by more than the order of additions does."""
    with jax.default_matmul_precision("highest"):
        yield


@cache
def chase():
    from outside_loop import Chase

    return shoal.trace(Chase(), envs=8)


@cache
def ppo():
    pytest.importorskip("gymnax")
    from shoal.algorithms import PPO
    from shoal.envs import make

    return shoal.trace(PPO(num_steps=16), make("CartPole-v1"), envs=8)


@cache
def on_cpu(loop):
    graph = loop()
    return shoal.run(shoal.plan(graph, shoal.fused(), cpu_only(this_machine())), ticks=TICKS).values


def largest(loop, plan, backend="threads"):
    got = shoal.run(plan, backend, ticks=TICKS).values
    return max(difference(got[name], x) for name, x in on_cpu(loop).items())


LOOPS = pytest.mark.parametrize("loop", [chase, ppo])


@LOOPS
def test_fused_on_the_gpu_equals_fused_on_the_cpu(loop):
    plan = shoal.plan(loop(), shoal.fused())
    assert {str(p.device.kind) for p in plan.places["all"]} == {"gpu"}
    assert largest(loop, plan) < TOLERANCE


@LOOPS
@pytest.mark.parametrize("backend", ["inline", "threads"])
@pytest.mark.parametrize("actors", [1, 2])
def test_actors_on_cpus_and_the_learner_on_the_gpu(loop, backend, actors):
    plan = shoal.plan(loop(), shoal.single_learner_coarse(actors))
    assert {p.device.kind for p in plan.places["actor"]} == {"cpu"}
    assert {p.device.kind for p in plan.places["learner"]} == {"gpu"}
    assert largest(loop, plan, backend) < TOLERANCE


@LOOPS
@pytest.mark.parametrize("distribution", [shoal.single_learner_fine(2), shoal.decoupled(2, 1, 1)])
def test_cuts_inside_the_loop_cross_between_cpu_and_gpu(loop, distribution):
    assert largest(loop, shoal.plan(loop(), distribution)) < TOLERANCE
