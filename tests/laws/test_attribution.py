"""Time is attributed to the site that took it: a delay appears there and nowhere else.

Loops of host stages run on threads that hand on a baton, with a clock that advances when it is
read and by injected delays alone. So what each site takes is known to the nanosecond.
"""

import random
import threading
from collections import Counter

import jax
import numpy as np
import pytest

import shoal
from shoal.planning.fragment_program import write_program
from shoal.profiling.breakdown import breakdown
from shoal.profiling.span_file import read_spans
from shoal.profiling.span_log import SpanLog
from shoal.profiling.spans import Kind
from shoal.runtime.execution import replica_runner, scheduler
from shoal.runtime.execution.limit import Limit
from shoal.runtime.execution.local_run import LocalRun
from shoal.runtime.execution.scheduler import Stopped
from shoal.runtime.run import fresh_start
from unit.toy_loop import TWO_CPUS

TICKS, ROWS, DELAY = 6, 4, 10_000_000  # nanoseconds
STEP = 100  # nanoseconds between two readings of the clock
WAITS = (Kind.WAIT, Kind.LINGER)


class Clock:
    """A clock that advances by each reading, and by delays."""

    def __init__(self):
        self.time, self.delays = 0, Counter()

    def __call__(self):
        self.time += STEP
        return self.time

    def delay(self, site):
        self.time += DELAY
        self.delays[site] += 1


class Chain:
    """A loop of host stages, each of which reads what some earlier one has made."""

    def __init__(self, reads, slow, clock):
        self.reads, self.stages = reads, [self._stage(i, slow, clock) for i in range(len(reads))]

    def _stage(self, number, slow, clock):
        name = f"s{number}"

        @shoal.host(lambda *xs: jax.ShapeDtypeStruct(xs[0].shape, np.float32), per="env", name=name)
        def stage(*xs):
            if slow == name:
                clock.delay(name)
            return np.float32(0.5) * sum(xs) + np.float32(1)

        return stage

    def init(self, key, env, envs):
        return np.zeros(envs, np.float32), np.ones(envs, np.float32)

    def tick(self, env, state):
        made = list(state)
        for stage, reads in zip(self.stages, self.reads, strict=True):
            made.append(stage(*(made[i] for i in reads)))
        return (made[-1], made[-2]), {}


class Baton:
    """Drives a run on threads of which one runs at a time: the next runs when one has to wait."""

    def __init__(self, run):
        names = run.scheduler_names
        self._turns = [threading.Semaphore(0) for _ in names]
        self._over, self._halt = [False] * len(names), False
        self._schedulers = run.schedulers(
            dict(zip(names, map(self._waker, range(99)), strict=False))
        )
        self._threads = []

    def _waker(self, number):
        baton = self

        class Waker:
            def wait(self, ready, seconds):
                while not ready():
                    baton._pass_on(number)
                    if baton._halt:
                        raise Stopped

            def notify(self):
                pass

        return Waker()

    def _pass_on(self, number):
        count = len(self._turns)
        others = [(number + i) % count for i in range(1, count)]
        following = next((n for n in others if not self._over[n]), None)
        if following is not None:
            self._turns[following].release()
            if not self._over[number]:
                assert self._turns[number].acquire(timeout=60)

    def _work(self, number, limit):
        assert self._turns[number].acquire(timeout=60)
        try:
            self._schedulers[number].run(limit)
        finally:
            self._over[number] = True
            self._pass_on(number)

    def start(self, limit):
        self._threads = [
            threading.Thread(target=self._work, args=(n, limit)) for n in range(len(self._turns))
        ]
        for thread in self._threads:
            thread.start()
        self._turns[0].release()

    def alive(self, seconds):
        for thread in self._threads:
            thread.join(60)
        return False

    def stop(self):
        pass


class Delayed:
    """A channel that takes longer to put or to take."""

    def __init__(self, inner, name, how, clock):
        self._inner, self._site, self._how, self._clock = inner, f"{how} {name}", how, clock
        self.state = inner.state

    def put(self, end, message, version):
        if self._how == "put":
            self._clock.delay(self._site)
        self._inner.put(end, message, version)

    def take(self, end, tick, receive):
        if self._how == "take":
            self._clock.delay(self._site)
        return self._inner.take(end, tick, receive)


class Case:
    """A random loop with a random cut, and a random stage or channel that may be slow."""

    def __init__(self, seed):
        rng = random.Random(seed)
        count = rng.randint(2, 5)
        self.reads = [sorted(rng.sample(range(2 + i), rng.randint(1, 2))) for i in range(count)]
        fragments = rng.randint(1, min(3, count))
        owners = [*range(fragments), *rng.choices(range(fragments), k=count - fragments)]
        rng.shuffle(owners)
        names = [[f"s{i}" for i in range(count) if owners[i] == f] for f in range(fragments)]
        replicas = [rng.choice([1, 2]) for _ in names]
        self.policy = shoal.DistributionPolicy(
            "random",
            tuple(shoal.Fragment(f"f{i}", tuple(s), r)
                  for i, (s, r) in enumerate(zip(names, replicas, strict=True))),
        )  # fmt: skip
        channels = [c.name for c in self.plan(None, Clock()).channels]
        sites = [f"s{i}" for i in range(count)]
        sites += [f"{how} {name}" for name in channels for how in ("take", "put")]
        self.slow = rng.choice(sites)

    def plan(self, slow, clock):
        graph = shoal.trace(Chain(self.reads, slow, clock), None, envs=ROWS)
        return shoal.plan(graph, self.policy, TWO_CPUS)

    def times(self, slow, folder, monkeypatch):
        """By worker, kind and name of site, the nanoseconds; and how often it was delayed."""
        clock = Clock()
        plan = self.plan(slow, clock)
        log = SpanLog(folder, plan)
        for module in (replica_runner, scheduler):
            monkeypatch.setattr(module, "now", clock)
        monkeypatch.setattr("shoal.profiling.recorder.now", clock)

        def wrap(name, channel):
            how, _, of = (slow or "").partition(" ")
            return Delayed(channel, name, how, clock) if of == name else channel

        monkeypatch.setenv("SHOAL_SPANS", "on")
        programs = [write_program(plan, f.name) for f in plan.distribution.fragments]
        run = LocalRun(plan, programs, fresh_start(plan.graph, 0), Baton, wrap)
        run.start(Limit(TICKS))
        run.alive(60)
        log.last(run.spans)
        found = breakdown(read_spans(folder / "spans.bin"), (0, 1, 2))
        times = Counter()
        for item in found.items:
            name = item.site["name"] if item.site and item.kind != Kind.GAP else ""
            ns = round((item.seconds + item.recording) * 1e9)
            times[item.worker, item.kind, name] += ns
        return times, clock.delays


def check(seed, tmp_path, monkeypatch):
    case = Case(seed)
    before, none = case.times(None, tmp_path, monkeypatch)
    after, delays = case.times(case.slow, tmp_path, monkeypatch)
    how, _, channel = case.slow.partition(" ")
    kind = {"take": Kind.TAKE, "put": Kind.PUT}.get(how, Kind.STAGE)
    assert not none
    assert delays[case.slow]
    gained = {key: after[key] - before[key] for key in after | before}
    there = sum(ns for key, ns in gained.items() if key[1:] == (kind, channel or how))
    assert there == delays[case.slow] * DELAY
    elsewhere = {k: ns for k, ns in gained.items()
                 if k[1:] != (kind, channel or how) and k[1] not in WAITS and ns}  # fmt: skip
    assert not elsewhere


@pytest.mark.parametrize("seed", range(5))
def test_a_delay_appears_at_its_site_and_nowhere_else(seed, tmp_path, monkeypatch):
    check(seed, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5, 100))
def test_a_delay_of_many_loops_appears_at_its_site_and_nowhere_else(seed, tmp_path, monkeypatch):
    check(seed, tmp_path, monkeypatch)
