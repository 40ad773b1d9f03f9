"""A broken connection is a lost worker: whole messages in order up to it, then an error."""

import threading
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

import pytest

import shoal
from conformance.lines import (
    Thread,
    make_channel_spec,
    read,
    until,
    wait_put,
    wait_take,
    write,
)
from conformance.proxy import Proxy, some_cuts
from conformance.test_channels import LINES
from conformance.test_hosts import FOUR, hosts
from conformance.test_processes import children, largest
from conformance.test_replaced import Enough, Seen
from conformance.wired import Wired
from laws.cases import graph_of, start_of
from shoal.errors import LostError
from shoal.planning.policies import impala
from shoal.planning.policy import Lockstep
from shoal.runtime.cluster import driver as processes
from shoal.runtime.cluster.recovery import RecoveryPolicy
from shoal.runtime.execution.scheduler import Stopped
from shoal.runtime.net import connection, wiring


@contextmanager
def through_proxies(specs, cuts=(), *, signed=False):
    """Endpoints in threads that connect through proxies and wait in different ways."""
    wired = Wired(specs, signed=signed)
    proxies = [Proxy(address, cuts) for address in wired.lines.addresses]
    wired.lines = replace(wired.lines, addresses=tuple(p.address for p in proxies))
    hall = wired.hall()
    wired._join_all()
    for links, me in zip(wired.links, wired.opened, strict=True):
        end = wired.ends[me]
        waker = hall.wakers[end]
        waker._check = partial(look_around, waker._check, links.check)
        hall.wakers[end] = links.waker(waker, alone=me % 2 == 0)
    yield wired, hall, proxies
    for proxy in proxies:
        proxy.close()
    wired.close()


def look_around(*checks):
    for check in checks:
        check()


def until_lost(hall, proxies, job, *args):
    """Do a job until a connection is lost; a worker that fails ends its other connections."""
    with pytest.raises(LostError, match=r"the connection to worker [wr]\[\d\] is lost: "):
        job(hall, *args)
    for proxy in proxies:
        proxy.cut()


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("flow", "writers", "readers", "values"), LINES, ids=str)
def test_wherever_a_connection_is_cut_messages_are_whole_and_all_ends_fail(
    monkeypatch, seed, flow, writers, readers, values
):
    monkeypatch.setattr(connection, "ERROR_GRACE_S", 0.1)
    spec = make_channel_spec(flow, writers, readers, values)
    with through_proxies({"c": spec}, some_cuts(seed, 1, 9000), signed=writers > 1) as found:
        _, hall, proxies = found
        jobs = [Thread(hall, until_lost, proxies, write, w, 0, 10**9) for w in range(writers)]
        jobs += [Thread(hall, until_lost, proxies, read, r, 10**9) for r in range(readers)]
        for job in jobs:
            job.result()  # readers check each message and their order


@pytest.mark.parametrize("waits", ["r", "w"])
def test_an_end_that_waits_on_a_broken_connection_fails(monkeypatch, waits):
    monkeypatch.setattr(connection, "ERROR_GRACE_S", 0.1)
    with through_proxies({"c": make_channel_spec(Lockstep(0), 1, 1)}) as (_, hall, proxies):
        Thread(hall, write, 0, 0, 1).result()
        Thread(hall, read, 0, 1).result()
        proxies[0].cut()
        job = (wait_take, 0, 1) if waits == "r" else (fill, 0)
        with pytest.raises(LostError, match=r"is lost: (it was cut off|the other side closed it)"):
            Thread(hall, *job).result()


def fill(hall, end):
    """Put until the channel is full, and wait for a free slot."""
    for number in range(1, 10):
        wait_put(hall, end)
        write(hall, end, number, number + 1)


def test_the_driver_learns_first_why_a_worker_is_lost(monkeypatch):
    monkeypatch.setattr(connection, "ERROR_GRACE_S", 3600.0)
    with through_proxies({"c": make_channel_spec(Lockstep(0), 1, 1)}) as (wired, _, proxies):
        proxies[0].cut()
        until(lambda: all(one.broken for links in wired.links for one in links.links.values()))
        for links in wired.links:
            links.check()


def test_a_stranger_cannot_take_a_connection_over():
    with through_proxies({"c": make_channel_spec(Lockstep(0), 1, 1)}) as (wired, hall, _):
        theirs = wired.links[0].links if 1 in wired.links[0].links else wired.links[1].links
        before = theirs[1].sock
        strange = Wired(wired.specs)
        strange.lines = replace(strange.lines, addresses=wired.lines.addresses)
        over = threading.Event()
        strange._check = lambda: stop_if(over)
        strange.links, strange.opened = [], {}
        joining = threading.Thread(target=try_to_join, args=(strange,))
        joining.start()
        Thread(hall, write, 0, 0, 20)
        assert len(Thread(hall, read, 0, 20).result().turns) == 20
        assert theirs[1].sock is before
        over.set()
        joining.join()


def stop_if(over):
    if over.is_set():
        raise Stopped


def try_to_join(strange):
    """Try to connect, until the test is over."""
    with suppress(Stopped):
        strange.join(1)


def fused_ticks(ticks):
    plan = shoal.plan(graph_of("chase"), shoal.fused(), hosts(1))
    return shoal.run(plan, "inline", ticks=ticks, state=start_of("chase")).values


def cut_connections(monkeypatch, cuts_of):
    """Lead all connections of a run through proxies, with the cuts that are given for each."""
    proxies = []

    def cut_lines(far, worker_map, addresses, *others):
        if not proxies:  # a run that has rolled back is not cut again
            proxies[:] = [Proxy(a, cuts_of(n)) for n, a in enumerate(addresses)]
            addresses = [p.address for p in proxies]
        return wiring.make_remote_channels(far, worker_map, addresses, *others)

    monkeypatch.setattr(processes, "make_remote_channels", cut_lines)
    return proxies


def close_all(proxies):
    for proxy in proxies:
        proxy.close()
    assert children() == []


def test_a_plan_over_hosts_gives_its_numbers_though_a_connection_breaks(monkeypatch):
    proxies, failures = cut_connections(monkeypatch, lambda n: some_cuts(n, 1, 6000)), []
    plan = shoal.plan(graph_of("chase"), shoal.single_learner_coarse(2), FOUR)
    recovery = RecoveryPolicy(on_failure=lambda *failure: failures.append(failure))
    result = recovery.run(plan, "processes", ticks=20, state=start_of("chase"))
    assert sum(proxy.cut_count for proxy in proxies) >= 1
    ((error, _),) = failures
    assert "the connection to worker" in str(error)
    assert largest(result.values, fused_ticks(20)) < 1e-5
    close_all(proxies)


def test_an_asynchronous_worker_whose_connection_breaks_is_replaced(monkeypatch):
    proxies = cut_connections(monkeypatch, lambda n: [20_000] if n == 0 else [])
    plan = shoal.plan(graph_of("chase"), impala(2, 1, 4), hosts(3))
    seen = Seen()
    with pytest.raises(Enough):
        seen.recovery(plan).run(
            plan, "processes", ticks=10**9, state=start_of("chase"), watch=seen.see
        )
    assert seen.ticks == list(range(len(seen.ticks))), "the run rolled back"
    (lost, loss), (back, _) = seen.losses
    assert loss.worker == "actor[0]"
    assert "the connection to worker learner[0] is lost" in loss.why
    assert back > lost, "the others did not continue meanwhile"
    close_all(proxies)
