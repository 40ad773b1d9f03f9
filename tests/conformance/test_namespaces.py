"""A Ray cluster whose hosts have addresses of their own: the same numbers over a real network."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")
from conformance.spaces import address, inside, is_allowed, raylets
from conformance.test_processes import POLICIES

DRIVER = """
import json, sys, time
import ray, shoal
from conformance.test_processes import POLICIES, largest
from laws.cases import graph_of, start_of
from shoal.planning.policies import impala
from shoal.runtime.cluster.ray import ray_cluster

ray.init(address=sys.argv[1], log_to_driver=False)
while len([n for n in ray.nodes() if n["Alive"]]) < 3:
    time.sleep(0.2)
graph, cluster = graph_of("ppo"), ray_cluster()
fused = shoal.run(shoal.plan(graph, shoal.fused()), "inline", ticks=3, state=start_of("ppo"))
found = {"hosts": [host.name for host in cluster.hosts]}
for name, policy in POLICIES.items():
    plan = shoal.plan(graph, policy, cluster)
    result = shoal.run(plan, "ray", ticks=3, state=start_of("ppo"))
    found[name] = float(largest(result.values, fused.values))
for name, policy in (("impala", impala(4, 2, 2)),
                     ("late", shoal.decoupled(2, 1, 1, lag=1, ring=2))):
    lags = []
    plan = shoal.plan(graph, policy, cluster)
    shoal.run(plan, "ray", ticks=6, watch=lambda _, m, lags=lags: lags.extend(m["lag"]))
    found[name] = int(max(lags))
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not is_allowed(), reason="network namespaces can't be made here")
def test_every_policy_over_hosts_with_addresses_of_their_own_gives_the_fused_numbers():
    with raylets(3, cpus=2):
        driver = inside(
            0, sys.executable, "-c", DRIVER, f"{address(0)}:6379",
            cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        output, _ = driver.communicate()
    found = json.loads(output.strip().splitlines()[-1])
    assert found["hosts"] == [address(n) for n in range(3)]
    assert {name: found[name] < 1e-5 for name in POLICIES} == dict.fromkeys(POLICIES, True)
    assert found["impala"] <= 2
    assert found["late"] <= 1
