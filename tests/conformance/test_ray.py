"""Plans over a real Ray cluster of several raylets give the same numbers and don't hang."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

ray = pytest.importorskip("ray")
from ray.cluster_utils import Cluster  # noqa: E402

import shoal  # noqa: E402
from conformance import test_replaced as replaced  # noqa: E402
from conformance.test_processes import POLICIES, largest  # noqa: E402
from conformance.test_small_floats import Small  # noqa: E402
from laws.cases import graph_of, no_gymnax, start_of  # noqa: E402
from shoal.errors import PlaceError, RunError  # noqa: E402
from shoal.planning.policies import impala  # noqa: E402
from shoal.runtime.cluster import assignment  # noqa: E402
from shoal.runtime.cluster import user_modules as modules  # noqa: E402
from shoal.runtime.cluster.ray import no_cluster, probe, ray_cluster  # noqa: E402
from shoal.runtime.cluster.recovery import RecoveryPolicy  # noqa: E402
from unit.toy_loop import Toy  # noqa: E402

QUICK = ["coarse(2)", "decoupled, served"]
CPUS = 2  # of each host
MARK = "SHOAL_TEST_RAY"  # set for all processes of this cluster


@pytest.fixture(scope="module")
def nodes():
    """A Ray cluster of three nodes."""
    os.environ[MARK] = str(os.getpid())
    found = Cluster(
        initialize_head=True, head_node_args={"num_cpus": CPUS, "include_dashboard": False}
    )
    for _ in range(2):
        found.add_node(num_cpus=CPUS)
    ray.init(address=found.address, log_to_driver=False)
    found.wait_for_nodes()
    yield found
    ray.shutdown()
    found.shutdown()


@pytest.fixture(autouse=True)
def nothing_left(nodes):
    yield
    assert workers() == []


def workers():
    """The alive workers of this cluster, on all hosts."""
    found = subprocess.run(
        ["ps", "-ww", "-eo", "pid,args"], capture_output=True, text=True, check=True
    )
    rows = [line.split(None, 1) for line in found.stdout.splitlines()[1:]]
    return [
        int(pid)
        for pid, args in rows
        if "shoal.runtime.cluster.worker_process" in args and _is_own(pid)
    ]


def _is_own(pid):
    with suppress(OSError):
        return f"{MARK}={os.getpid()}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    return False


@cache
def fused(loop, ticks=3):
    plan = shoal.plan(graph_of(loop), shoal.fused())
    return shoal.run(plan, "inline", ticks=ticks, state=start_of(loop)).values


@pytest.mark.parametrize("in_python", [False, True])
def test_small_types_go_over_hosts(in_python):
    graph = shoal.trace(Small("bfloat16", in_python), envs=4)
    plan = shoal.plan(graph, shoal.single_learner_coarse(2), ray_cluster())
    got = shoal.run(plan, "ray", ticks=3).values
    alone = shoal.run(plan, "inline", ticks=3).values
    assert largest(got, alone) == 0


def check_numbers(loop, name):
    plan = shoal.plan(graph_of(loop), POLICIES[name], ray_cluster())
    result = shoal.run(plan, "ray", ticks=3, state=start_of(loop))
    assert result.ticks == 3
    assert largest(result.values, fused(loop)) < 1e-5


@pytest.mark.parametrize("name", QUICK)
def test_plans_over_ray_give_the_fused_numbers(name):
    check_numbers("chase", name)


@no_gymnax
@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_ppo_over_ray_gives_the_fused_numbers_under_every_policy(name):
    check_numbers("ppo", name)


@no_gymnax
@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "bound"),
    [(impala(4, 2, 2), 2), (shoal.decoupled(2, 1, 1, lag=1, ring=2), 1)],
    ids=["impala", "decoupled"],
)
def test_lag_over_ray_stays_within_its_bound(policy, bound):
    lags = []
    plan = shoal.plan(graph_of("ppo"), policy, ray_cluster())
    shoal.run(plan, "ray", ticks=8, watch=lambda _, m: lags.extend(m["lag"]))
    assert len(lags) >= 8
    assert 0 <= min(lags) <= max(lags) <= bound


def test_a_missing_cluster_is_reported_at_once():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # it does not listen
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(ConnectionRefusedError) as caught:
            probe(address)
    error = no_cluster(address, caught.value)
    assert error.what.startswith(f"there is no Ray cluster at {address}: ")
    for other in ("", "auto", "ray://nohost:10001", "local"):
        probe(other)  # is left to Ray


def test_a_plan_that_is_too_large_says_what_is_missing():
    plan = shoal.plan(graph_of("chase"), shoal.single_learner_coarse(8), ray_cluster())
    with pytest.raises(PlaceError, match=r"9 workers need a CPU each: .* the cluster has 6"):
        shoal.run(plan, "ray", ticks=1)


def test_a_killed_worker_is_named_and_the_run_resumes_from_what_was_kept():
    plan = shoal.plan(graph_of("chase"), shoal.single_learner_coarse(2), ray_cluster())
    killed, seen, errors = [], [], []

    def kill(tick, metrics):
        seen.append(tick)
        if not killed:
            killed.append(workers()[0])
            os.kill(killed[0], signal.SIGKILL)

    recovery = RecoveryPolicy(on_failure=lambda error, tick: errors.append(str(error)))
    result = recovery.run(plan, "ray", ticks=2000, state=start_of("chase"), watch=kill)
    assert seen == list(range(2000))
    assert "was killed by signal 9" in errors[0]
    assert largest(result.values, fused("chase", 2000)) < 1e-5


@pytest.mark.slow
def test_a_worker_that_fails_repeatedly_stops_the_run_with_its_own_error():
    plan = shoal.plan(graph_of("chase"), shoal.single_learner_coarse(2), ray_cluster())

    def see(tick, metrics):
        for pid in workers():
            os.kill(pid, signal.SIGKILL)

    errors = []
    recovery = RecoveryPolicy(restarts=1, on_failure=lambda error, tick: errors.append(tick))
    with pytest.raises(RunError, match="was killed by signal 9"):
        recovery.run(plan, "ray", ticks=1_000_000, watch=see)
    assert len(errors) == 1


@pytest.mark.slow
def test_an_asynchronous_worker_is_replaced_while_the_others_continue(tmp_path):
    graph = replaced.on_world(**replaced.lost_once(tmp_path / "died"))
    plan = shoal.plan(graph, impala(2, 1, 3), ray_cluster())
    assert len({place.host for places in plan.places.values() for place in places}) > 1
    replaced.check_replaced(plan, replaced.Seen(), backend="ray")


@pytest.mark.slow
def test_the_replicas_of_a_dead_host_move(nodes):
    plan = shoal.plan(graph_of("chase"), shoal.single_learner_coarse(4), ray_cluster())
    hosts = [place.host for places in plan.places.values() for place in places]
    assert len(set(hosts)) == 3
    dead, errors = [], []

    def see(tick, metrics):
        if not dead:
            dead.append(next(iter(nodes.worker_nodes)))
            nodes.remove_node(dead[0])
            nodes.add_node(num_cpus=CPUS)

    recovery = RecoveryPolicy(on_failure=lambda error, tick: errors.append(str(error)))
    result = recovery.run(plan, "ray", ticks=3000, state=start_of("chase"), watch=see)
    assert "host" in errors[0] or "worker" in errors[0]
    assert largest(result.values, fused("chase", 3000)) < 1e-5


OWN = """
import my_parts
from unit.toy_loop import State, fit, moved

def turn(state):
    (keys, x), xs = moved(state)
    w, loss = fit(state.w, my_parts.doubled(xs))
    return State(w, keys, x, state.age + 1), {"loss": loss}
"""
PARTS = """
def doubled(x):
    return 2 * x
"""


def test_no_host_needs_to_have_the_users_own_modules(tmp_path, monkeypatch):
    for name, text in {"my_loop": OWN, "my_parts": PARTS}.items():
        (tmp_path / f"{name}.py").write_text(text)
    with monkeypatch.context() as here:
        here.syspath_prepend(tmp_path)
        graph = shoal.trace(Toy(import_module("my_loop").turn), envs=8)
    # As on another host: they are neither on the path nor where they were.
    every = modules.own_modules()
    mine = {name: every[name] for name in ("my_loop", "my_parts")}
    gone = {name: x._replace(origin=f"/nowhere/{name}.py") for name, x in mine.items()}
    monkeypatch.setattr(assignment, "own_modules", lambda: {**every, **gone})
    plan = shoal.plan(graph, shoal.single_learner_coarse(2), ray_cluster())
    result = shoal.run(plan, "ray", ticks=3)
    alone = shoal.run(shoal.plan(graph, shoal.fused()), "inline", ticks=3)
    assert largest(result.values, alone.values) < 1e-5


STARTED = """
import subprocess
from pathlib import Path
from shoal.runtime.cluster.ray import start_cluster

def listening():
    rows = subprocess.run(["ss", "-ltnH"], capture_output=True, text=True).stdout.splitlines()
    return {row.split()[3] for row in rows}

before = listening()
start_cluster()
print(*(address.rpartition(":")[0] for address in listening() - before))
print(oct((Path.home() / ".ray" / "auth_token").stat().st_mode & 0o777))
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("ss") is None, reason="`ss` shows who listens")
def test_a_cluster_that_starts_here_listens_on_loopback_and_keeps_its_token_private():
    hidden = {"RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}
    env = {name: x for name, x in os.environ.items() if name not in hidden}
    words = [sys.executable, "-c", STARTED]
    with tempfile.TemporaryDirectory() as home:  # its path is short, as Ray wants it
        env |= {"HOME": home, "RAY_TMPDIR": home}  # no cluster is known there
        done = subprocess.run(words, env=env, stdout=subprocess.PIPE, text=True, check=True)
    *listening, mode = done.stdout.split()
    assert len(listening) > 3
    assert set(listening) <= {"127.0.0.1", "[::ffff:127.0.0.1]"}
    assert mode == "0o600"
