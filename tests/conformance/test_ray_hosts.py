"""Hosts that join a Ray cluster during a run are used; a host that leaves is optional."""

import pytest

ray = pytest.importorskip("ray")
from ray.cluster_utils import Cluster  # noqa: E402

import shoal  # noqa: E402
from conformance.test_replaced import Enough  # noqa: E402
from laws.cases import graph_of, start_of  # noqa: E402
from shoal.planning.policies import impala  # noqa: E402
from shoal.runtime.cluster.ray import ray_cluster  # noqa: E402
from shoal.runtime.cluster.recovery import RecoveryPolicy  # noqa: E402
from shoal.runtime.run import RunCallbacks  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture
def nodes():
    """One host with room for a learner and an actor."""
    found = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False}
    )
    ray.init(address=found.address, log_to_driver=False)
    yield found
    ray.shutdown()
    found.shutdown()


class Hosts:
    """A host joins once all are at work, and leaves once its worker is; then it has seen enough."""

    def __init__(self, nodes):
        self.nodes, self.ticks, self.said, self.losses, self.again = nodes, [], [], [], []
        self.joined = None
        self.left = False
        self.after = 0  # ticks since the host is known to be gone

    def see(self, tick, metrics):
        self.ticks.append(tick)
        if self.joined is None:
            self.joined = self.nodes.add_node(num_cpus=1)
        if "worker actor[1] has started" in self.said and not self.left:
            self.left = True
            self.nodes.remove_node(self.joined)
        if self.losses and not self.losses[-1].is_new:
            self.after += 1
        if self.after > 50:
            raise Enough

    def run(self, plan):
        recovery = RecoveryPolicy(
            say=self.said.append,
            replaced=self.losses.append,
            on_failure=lambda *failure: self.again.append(failure),
        )
        with pytest.raises(Enough):
            recovery.run(
                plan, "ray", ticks=10**9, state=start_of("chase"), watch=RunCallbacks(self.see)
            )


def test_a_host_that_joins_is_used_and_one_that_leaves_is_optional(nodes):
    plan = shoal.plan(graph_of("chase"), impala((1, 4), 1, 7), ray_cluster())
    assert "1 to 4, first 1" in str(plan)
    hosts = Hosts(nodes)
    hosts.run(plan)
    assert hosts.ticks == list(range(len(hosts.ticks))), "the run rolled back"
    assert not hosts.again
    assert [loss.worker for loss in hosts.losses] == ["actor[1]", "actor[1]"]
    assert "lost with its host" in hosts.losses[0].why
