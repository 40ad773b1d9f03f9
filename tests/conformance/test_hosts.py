"""Plans over several hosts, whose channels are connections: the numbers of one host, and no hang.

The hosts are of this machine, each worker on one of its own as far as there are enough.
"""

import numpy as np
import pytest

import shoal
from conformance.lines import make_channel_spec
from conformance.test_processes import PLAIN, POLICIES, WORLD, children, fused, largest
from conformance.wired import Wired
from laws.cases import ENVS, cpu, graph_of, no_gymnax, start_of
from shoal.planning.channel_specs import make_channel_specs
from shoal.planning.policies import impala
from shoal.planning.policy import Lockstep
from shoal.runtime.net.wiring import WorkerMap, divide

pytest.importorskip("gymnasium")
QUICK = ["coarse(2)", "fine, served", "decoupled(2,2,2)", "sebulba(1,2)"]


def hosts(count):
    """A cluster of hosts with a CPU each."""
    return shoal.Cluster(tuple(shoal.Host(f"host{i}", 2, (cpu(0),)) for i in range(count)))


FOUR = hosts(4)


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    assert children() == []


def check_numbers(loop, name, cluster=FOUR):
    plan = shoal.plan(graph_of(loop), POLICIES[name], cluster)
    result = shoal.run(plan, "processes", ticks=3, state=start_of(loop))
    assert result.ticks == 3
    assert largest(result.values, fused(loop)) < 1e-5


@pytest.mark.parametrize("name", QUICK)
def test_plans_over_hosts_give_the_fused_numbers(name):
    check_numbers("chase", name)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_over_hosts_gives_the_fused_numbers(name, count):
    check_numbers("chase", name, hosts(count))


@no_gymnax
@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_ppo_over_hosts_gives_the_fused_numbers_under_every_policy(name):
    check_numbers("ppo", name)


def test_a_lag_over_hosts_is_that_of_the_inline_run():
    plan = shoal.plan(graph_of("chase"), shoal.single_learner_coarse(2, lag=1), FOUR)
    runs = [
        shoal.run(plan, b, ticks=3, state=start_of("chase")).values for b in ("inline", "processes")
    ]
    assert largest(*runs) == 0


@pytest.mark.slow
def test_lag_over_hosts_stays_within_its_bound():
    graph = shoal.trace(PLAIN, shoal.envs.make(WORLD, seconds=1e-4), envs=ENVS)
    for policy, bound in ((impala(4, 2, 2), 2), (shoal.decoupled(2, 1, 1, lag=1, ring=2), 1)):
        lags = []
        plan = shoal.plan(graph, policy, FOUR)
        shoal.run(plan, "processes", ticks=6, watch=lambda _, m, lags=lags: lags.extend(m["lag"]))
        assert len(lags) >= 6
        assert 0 <= min(lags) <= max(lags) <= bound


def test_bytes_sent_are_counted():
    spec = make_channel_spec(Lockstep(0), 1, 1, rows=500)
    channel = Wired({"c": spec}).hall().channels["c"]
    channel.put(0, {"x": np.zeros((500, 3), np.float32), "y": np.zeros((2, 500), np.int64)}, 0)
    assert channel.writer(0).sent == 500 * 12 + 1000 * 8


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("step", "ValueError: the ball is out of the field"),
        ("kill", "worker env[0] was killed by signal 9 (SIGKILL)"),
        ("exit", "worker env[0] ended with exit code 3"),
    ],
)
def test_a_fault_on_another_host_is_reported_with_its_cause(fault, message):
    env = shoal.envs.make(WORLD, fault=fault)
    graph = shoal.trace(PLAIN, env, envs=ENVS)
    plan = shoal.plan(graph, shoal.single_learner_fine(2), FOUR)
    with pytest.raises(shoal.ShoalError) as caught:
        shoal.run(plan, "processes", ticks=10)
    assert message in str(caught.value).replace("env[1]", "env[0]")


def worker_map(writers, readers):
    """Workers of these hosts: first those that hold the writer's ends, then the reader's."""
    count = len(writers)
    ends = {"w": tuple(range(count)), "r": tuple(range(count, count + len(readers)))}
    return WorkerMap(tuple(map(str, (*writers, *readers))), (*writers, *readers), ends)


@pytest.mark.parametrize(
    ("writers", "readers", "far"), [("aa", "a", 0), ("ab", "a", 1), ("bb", "a", 1), ("a", "ab", 1)]
)
def test_a_channel_is_shared_memory_where_all_its_ends_share_a_host(writers, readers, far):
    specs = {"c": make_channel_spec(Lockstep(0), len(writers), len(readers))}
    near, apart = divide(specs, worker_map(writers, readers))
    assert (len(near), len(apart)) == (1 - far, far)


def test_a_plan_on_one_host_has_no_connections():
    plan = shoal.plan(graph_of("chase"), shoal.single_learner_coarse(2), hosts(1))
    ends = {f: (0,) * plan.ends(f) for f in ("actor", "learner")}
    assert divide(make_channel_specs(plan), WorkerMap(("all",), ("host0",), ends))[1] == {}
