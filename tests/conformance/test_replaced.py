"""Lost asynchronous workers are replaced while the others continue."""

import json
import os
import random
import signal
from functools import cache, partial

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import shoal
from conformance.test_hosts import hosts
from conformance.test_processes import PLAIN, children, nothing_left, world
from laws.cases import ENVS, ONE, graph_of, start_of
from shoal.algorithms import A2C
from shoal.errors import RunError
from shoal.planning.policies import central, impala
from shoal.runs.job import with_new_episodes
from shoal.runtime.cluster.recovery import RecoveryPolicy
from shoal.runtime.run import RunCallbacks

pytest.importorskip("gymnasium")
__all__ = ["nothing_left"]


class Enough(Exception):
    """Ends a run once it has been observed."""


class Seen:
    """The ticks of a run and the reported failures of its workers, in order."""

    def __init__(self, kill_at=None, who=0):
        self.ticks, self.losses, self.again = [], [], []
        self._kill_at, self._who = kill_at, who

    def see(self, tick, metrics):
        self.ticks.append(tick)
        if tick == self._kill_at:
            os.kill(int(children()[self._who]), signal.SIGKILL)  # they started in order
        if self.losses and not self.losses[-1][1].is_new:
            raise Enough

    def recovery(self, plan, restarts=3):
        def replaced(loss):
            self.losses.append((len(self.ticks), loss))

        on_failure = lambda *failure: self.again.append(failure)  # noqa: E731
        fresh = partial(with_new_episodes, plan.graph, 0)
        return RecoveryPolicy(restarts, on_failure=on_failure, fresh=fresh, replaced=replaced)


def on_world(**settings):
    return shoal.trace(PLAIN, world(**settings), envs=ENVS)


def lost_once(flag):
    """Environments of which one kills its worker, in the middle of a turn."""
    return {"fault": "kill once", "after": 100, "flag": str(flag), "seconds": 2e-3}


def check_replaced(plan, seen, state=None, backend="processes"):
    """A worker is lost and replaced; ticks are seen in order throughout."""
    with pytest.raises(Enough):
        seen.recovery(plan).run(plan, backend, ticks=10**9, state=state, watch=seen.see)
    assert seen.ticks == list(range(len(seen.ticks))), "the run rolled back"
    assert not seen.again
    (lost, loss), (back, same) = seen.losses
    assert loss.is_new
    assert loss.why == same.why
    assert "was killed by signal 9" in loss.why
    assert back > lost, "the others did not continue meanwhile"
    return same


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [ONE, hosts(3)], ids=["one host", "three"])
def test_a_worker_lost_during_a_tick_is_replaced(tmp_path, cluster):
    plan = shoal.plan(on_world(**lost_once(tmp_path / "died")), impala(2, 1, 3), cluster)
    loss = check_replaced(plan, Seen())
    assert loss.worker.startswith("actor[")


def test_a_worker_lost_at_any_moment_is_replaced():
    plan = shoal.plan(graph_of("chase"), impala(4, 2, 4), ONE)
    check_replaced(plan, Seen(kill_at=20), start_of("chase"))


@pytest.mark.parametrize(
    ("cluster", "who"), [(ONE, 2), (hosts(2), 0)], ids=["inference", "env, on two hosts"]
)
def test_inference_is_replaced_with_the_environments_that_it_serves(cluster, who):
    plan = shoal.plan(graph_of("chase"), impala(2, 1, inference=2), cluster)
    loss = check_replaced(plan, Seen(kill_at=20, who=who), start_of("chase"))
    assert loss.worker == ("env[0]", "inference[0]")[who // 2]


@pytest.mark.slow
def test_a_learner_keeps_what_it_learnt_while_the_only_inference_is_replaced(tmp_path):
    policy = impala(2, 1, inference=1, ring=2)
    plan = shoal.plan(on_world(**lost_once(tmp_path / "died")), policy, ONE)
    loss = check_replaced(plan, Seen())
    assert loss.worker.startswith("env[")


class Paces:
    """A loop whose worlds and minds count their ticks: in lockstep the counts are equal."""

    def init(self, key, env, envs):
        return jnp.int32(0), jnp.zeros(envs, jnp.int32), jnp.zeros(envs, jnp.int32)

    def tick(self, env, state):
        params, worlds, minds = state

        def once(creature, _):
            world, mind = creature
            mind, seen = think(mind, world, params=params)
            world = move(world, seen)
            return (world, mind), (world, mind)

        (worlds, minds), creatures = lax.scan(once, (worlds, minds), length=3)
        params, apart = learn(params, *creatures)
        return (params, worlds, minds), {"apart": apart}


@shoal.stage(per="env")
def think(mind, world, *, params):
    return mind + 1, world + 0 * params


@shoal.stage(per="env", name="env")
def move(world, seen):
    return seen + 1


@shoal.stage
def learn(params, worlds, minds):
    return params + 1, jnp.max(jnp.abs(worlds - minds))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("cluster", [ONE, hosts(3)], ids=["one host", "three"])
def test_endpoints_in_lockstep_stay_so_when_any_worker_is_lost_repeatedly(cluster, seed):
    graph = shoal.trace(Paces(), None, envs=ENVS)
    plan = shoal.plan(graph, impala(4, 1, 5, inference=2), cluster)
    draw, losses, apart, kept, ticks, late, learner = random.Random(seed), *([] for _ in range(6))

    def see(tick, metrics):
        ticks.append(tick)
        learner.extend(children()[-1:] if not learner else ())  # it is started last
        apart.append(int(metrics["apart"]))
        late.extend(metrics["lag"])
        if len(losses) >= 12:
            raise Enough
        if draw.random() < 0.01:
            os.kill(int(draw.choice([p for p in children() if p != learner[0]])), signal.SIGKILL)

    def keep(snapshot):
        _, worlds, minds = jax.tree.leaves(snapshot.values)
        kept.append((worlds == minds).all())

    recovery = RecoveryPolicy(100, every=0.1, replaced=losses.append)
    with pytest.raises(Enough):
        recovery.run(plan, "processes", ticks=10**9, watch=RunCallbacks(see, keep=keep))
    assert ticks == list(range(len(ticks)))
    assert max(apart) == 0
    assert max(late) <= 5
    assert len(kept) > 10
    assert all(kept)


@pytest.mark.slow
def test_a_worker_that_sends_gradients_asynchronously_is_replaced(tmp_path):
    a3c = A2C(num_steps=4, hidden=(8,))
    graph = shoal.trace(a3c, world(**lost_once(tmp_path / "died")), envs=ENVS)
    check_replaced(shoal.plan(graph, central(2, max_lag=3), ONE), Seen())


@pytest.mark.slow
def test_a_worker_that_is_lost_repeatedly_stops_the_run_with_its_own_error():
    plan = shoal.plan(on_world(fault="kill"), impala(2, 1, 3), ONE)
    seen = Seen()
    with pytest.raises(RunError, match=r"actor\[.\] was killed by signal 9.*replaced once"):
        seen.recovery(plan, restarts=1).run(plan, "processes", ticks=10**9, watch=lambda *_: None)


@pytest.mark.slow
def test_a_loss_is_logged_in_the_run_s_folder(tmp_path):
    env = world(**lost_once(tmp_path / "died"))
    trained = shoal.train(
        PLAIN, env, impala(2, 1, 3), envs=ENVS, ticks=60, backend="processes",
        restarts=1, folder=tmp_path, name="run",
    )  # fmt: skip
    summary = json.loads((trained.folder / "summary.json").read_text())
    assert summary["status"] == "done"
    assert summary["replaced"] == 1
    assert "restarts" not in summary


@cache
def drawn(policy):
    return shoal.plan(graph_of("chase"), policy, ONE)


@pytest.mark.parametrize(
    ("policy", "which"),
    [
        (impala(2), ["actor"]),
        (central(2), []),
        (shoal.single_learner_coarse(2, lag=1), []),
        (shoal.decoupled(2, 1, 1, ring=2), []),
        (impala(2, inference=1), ["env", "inference"]),
    ],
    ids=["impala", "central", "coarse", "decoupled", "impala, served"],
)
def test_only_asynchronous_workers_can_be_replaced(policy, which):
    assert sorted(drawn(policy).replaceable) == which
