"""A broken connection reconnects: the same messages in the same order, none twice."""

import socket
import threading
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import shoal
from conformance.lines import (
    HANG,
    Thread,
    make_channel_spec,
    read,
    until,
    wait_put,
    wait_take,
    write,
)
from conformance.proxy import Proxy, some_cuts
from conformance.test_channels import LINES, actor, beats, bounded_specs, watch
from conformance.test_hosts import FOUR, hosts
from conformance.test_processes import children, largest
from conformance.wired import Wired
from laws.cases import graph_of, start_of
from shoal.errors import LostError
from shoal.planning.policy import Latest, Lockstep, Queue, takes_some
from shoal.runtime.cluster import driver as processes
from shoal.runtime.execution.scheduler import Stopped
from shoal.runtime.net import connections as making
from shoal.runtime.net import wiring
from shoal.runtime.net.loop import Wakes


@contextmanager
def through_proxies(specs, cuts=(), rejoin=HANG, *, signed=False):
    """Endpoints in threads that connect through proxies and wait in different ways."""
    wired = Wired(specs, signed=signed)
    proxies = [Proxy(address, cuts) for address in wired.lines.addresses]
    wired.lines = replace(wired.lines, addresses=tuple(p.address for p in proxies), rejoin=rejoin)
    hall = wired.hall()
    wired._join_all()
    for links, me in zip(wired.links, wired.opened, strict=True):
        end = wired.ends[me]
        waker = hall.wakers[end]
        waker._check = partial(look_around, waker._check, links.check)
        hall.wakers[end] = links.waker(waker, Wakes(waker._check, alone=me % 2 == 0))
    yield wired, hall, proxies
    for links in wired.links:  # closing would wait for a connection that has yet to reconnect
        links.membership = links.membership._replace(rejoin=0.0)
        for one in links.links.values():
            one.grace_s = 0.0
    for proxy in proxies:
        proxy.close()
    wired.close()


def look_around(*checks):
    for check in checks:
        check()


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("flow", "writers", "readers", "values"), LINES, ids=str)
def test_whatever_is_cut_messages_come_once_and_in_order(seed, flow, writers, readers, values):
    spec = make_channel_spec(flow, writers, readers, values)
    ticks = 60 * (writers if takes_some(flow) else 1)
    puts = ticks * flow.take // writers if takes_some(flow) else ticks
    cuts = some_cuts(seed, 6, 2500)
    with through_proxies({"c": spec}, cuts, signed=writers > 1) as (_, hall, proxies):
        jobs = [Thread(hall, write, end, 0, puts) for end in range(writers)]
        reading = [Thread(hall, read, end, ticks) for end in range(readers)]
        assert [job.result() for job in jobs] == [puts] * writers
        for end, job in enumerate(reading):
            turns = job.result().turns
            if takes_some(flow):
                every = sorted(turn for found in turns for turn in found)
                assert every == [(w, n) for w in range(writers) for n in range(puts)]
            else:
                assert turns == [[(w, t) for w in spec.gate.sources[end]] for t in range(ticks)]
        assert sum(proxy.cut_count for proxy in proxies) >= 2


def test_all_connections_may_be_made_again_at_the_same_time(monkeypatch):
    # If one waited for another that waits in turn, only this would end it: too late.
    monkeypatch.setattr(making, "HANDSHAKE_TIMEOUT_S", 10 * HANG)
    spec, ticks = make_channel_spec(Queue(3), 3, 3, "shared"), 400
    with through_proxies({"c": spec}) as (wired, hall, proxies):
        jobs = [Thread(hall, write, end, 0, ticks) for end in range(3)]
        jobs += [Thread(hall, read, end, ticks) for end in range(3)]
        for _ in range(8):
            for proxy in proxies:
                proxy.cut()
            until(lambda: not any(one.broken for one in wired.links))
        for job in jobs:
            job.result()


def news(hall, size, first, last):
    """Put versions `first` to `last`."""
    for number in range(first, last):
        x = np.full((size, 3), number, np.float32)
        hall.channels["c"].put(0, {"x": x, "y": np.full((2, size), number)}, number)


def test_latest_resumes_with_the_newest_and_never_with_an_older_one():
    specs = {"c": make_channel_spec(Latest(None), 1, 1, rows=256)}
    with through_proxies(specs, some_cuts(0, 5, 100_000)) as (wired, hall, proxies):
        reader = Thread(hall, watch, 300)
        for first in range(0, 300, 10):
            until(lambda: not any(links.broken for links in wired.links))
            Thread(hall, news, 256, first, first + 10).result()
        found = reader.result()
        assert proxies[0].cut_count >= 3
    assert all(least == most == version for least, most, version in found), "torn"
    versions = [version for _, _, version in found]
    assert versions == sorted(versions), "older news after newer"


def test_a_bound_on_lag_holds_over_broken_connections():
    specs = bounded_specs(3, 1, 2)
    with through_proxies(specs, some_cuts(1, 6, 4000)) as (_, hall, proxies):
        free = [Thread(hall, actor, end) for end in range(3)]
        lags = Thread(hall, beats, 0, 60, 1).result()
        assert 0 <= min(lags) <= max(lags) <= 2
        assert sum(job.result() for job in free) >= 60
        assert sum(proxy.cut_count for proxy in proxies) >= 6


@pytest.mark.parametrize("waits", ["r", "w"])
def test_a_connection_that_does_not_reconnect_in_time_is_lost(waits):
    specs = {"c": make_channel_spec(Lockstep(0), 1, 1)}
    with through_proxies(specs, rejoin=0.4) as (wired, hall, proxies):
        Thread(hall, write, 0, 0, 1).result()
        Thread(hall, read, 0, 1).result()
        proxies[0].is_open = False
        proxies[0].cut()
        job = (wait_take, 0, 1) if waits == "r" else (fill, 0)
        waiting = Thread(hall, *job)
        until(lambda: any(links.broken for links in wired.links))
        with pytest.raises(LostError, match=r"it was not made again within 0.4 s"):
            waiting.result()


def fill(hall, end):
    """Put until the channel is full, and wait for a free slot."""
    for number in range(1, 10):
        wait_put(hall, end)
        write(hall, end, number, number + 1)


def test_connections_that_prove_nothing_do_not_delay_one_that_is_made_again(monkeypatch):
    monkeypatch.setattr(making, "HANDSHAKE_TIMEOUT_S", 10 * HANG)  # their time is never over
    with through_proxies({"c": make_channel_spec(Lockstep(0), 1, 1)}) as (wired, hall, proxies):
        Thread(hall, write, 0, 0, 1).result()
        Thread(hall, read, 0, 1).result()
        every = [s.getsockname() for s in wired.listeners if s.fileno() >= 0]
        silent = [socket.create_connection(every[0]) for _ in range(2 * making.PENDING)]
        for proxy in proxies:
            proxy.cut()
        Thread(hall, write, 0, 1, 2)
        waiting = hall.channels["c"].reader(0)
        until(lambda: waiting.state.counts.puts[0] == 2)
        for one in silent:
            one.close()


def test_an_answer_that_never_came_is_given_again():
    with through_proxies({"c": make_channel_spec(Lockstep(0), 1, 1)}) as (wired, _, _):
        listening, calling = (one for one in sorted(wired.links, key=lambda one: one.me))
        link = calling.links[0]
        assert not link.received, "nothing has come, so this looks like a first connection"
        with calling._loop.lock:
            calling._loop.unwatch(link.sock)
            link.fall("its answer was lost", HANG)
            calling._calls[0] = making._Call(making.FIRST)
            link.away = True  # as if it had never stood
        calling._loop.call()
        until(lambda: not link.broken and not link.away)
        until(lambda: not listening.links[1].broken)


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


def test_a_plan_over_hosts_gives_its_numbers_though_connections_break(monkeypatch):
    proxies = []

    def cut_lines(far, worker_map, addresses, *others):
        proxies[:] = [Proxy(a, some_cuts(n, 3, 6000)) for n, a in enumerate(addresses)]
        return wiring.make_remote_channels(far, worker_map, [p.address for p in proxies], *others)

    monkeypatch.setattr(processes, "make_remote_channels", cut_lines)
    plan = shoal.plan(graph_of("chase"), shoal.single_learner_coarse(2), FOUR)
    result = shoal.run(plan, "processes", ticks=20, state=start_of("chase"))
    assert sum(proxy.cut_count for proxy in proxies) >= 3
    assert largest(result.values, fused_ticks(20)) < 1e-5
    for proxy in proxies:
        proxy.close()
    assert children() == []
