"""The supervisor's decisions for lists of events: properties of all lists, and examples."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.runtime.cluster.launching import WorkerExit, lost
from shoal.runtime.cluster.supervisor import (
    EMPTY_PLACE_TIMEOUT_S,
    EndGroup,
    GiveUp,
    GroupReady,
    HostLost,
    LogLine,
    PlaceMissing,
    PlaceWorker,
    RemoveWorker,
    ReportFailure,
    RunClosed,
    ScaleRequested,
    StartGroup,
    State,
    StopWorker,
    TimePassed,
    WorkerExited,
    WorkerPlaced,
    Workers,
    WorkersResumed,
    on_event,
)
from shoal.runtime.restart_policy import WINDOW_S

# An elastic fragment of up to four replicas; two that serve one other each; one that counts ticks.
NAMES = ("actor[0]", "actor[1]", "actor[2]", "actor[3]", "env[0]", "server[0]", "learner[0]")
ACTORS, PAIR, LEARNER = range(4), (4, 5), 6
WORKERS = Workers(
    NAMES,
    tuple(name[:-3] for name in NAMES),
    (*((n,) for n in ACTORS), PAIR, PAIR, (LEARNER,)),
    restartable=frozenset({*ACTORS, *PAIR}),
    counted=frozenset({LEARNER}),
    bounds={"actor": (1, 4)},
    restarts=2,
)
START = State(WORKERS, frozenset({0, 1, *PAIR, LEARNER}), {"actor": 2})
GOOD, FAULT = WorkerExit("any"), WorkerExit("any", "RunError", "wrong")


def gone(number):
    return lost(NAMES[number], f"{NAMES[number]} was killed", "")


def play(*events, state=START):
    """The state after these events, and all actions."""
    done = []
    for event in events:
        state, actions = on_event(state, event)
        done += actions
    return state, done


def test_a_lost_worker_restarts_in_place_and_is_reported_twice():
    exit = gone(1)
    state, done = play(
        WorkerExited(1, exit, 10.0), TimePassed(10.1), GroupReady((1,)), GroupReady((1,)),
        WorkersResumed(frozenset({1}), 12.5),
    )  # fmt: skip
    assert done == [
        EndGroup((1,), 1),
        ReportFailure((1,), exit, is_new=True),
        StartGroup((1,), 1),
        ReportFailure((1,), exit, seconds=2.5),
    ]
    assert not state.pending
    assert state.present == START.present


def test_a_second_failure_during_a_restart_closes_the_first_report():
    exit = gone(1)
    once = WorkerExited(1, exit, 1.0), GroupReady((1,)), WorkerExited(1, exit, 2.0)
    reports = [a for a in play(*once)[1] if isinstance(a, ReportFailure)]
    new, not_back = ReportFailure((1,), exit, is_new=True), ReportFailure((1,), exit)
    assert reports == [new, not_back, new]


def test_a_worker_that_was_scaled_down_and_lost_with_its_host_can_be_placed_again():
    state, done = play(ScaleRequested({"actor": 1}), TimePassed(1.0), HostLost((1,), 2.0))
    assert StopWorker(1) in done
    again = ScaleRequested({"actor": 2}), TimePassed(3.0), WorkerPlaced(1, 3.0)
    assert play(*again, state=state)[0].staying("actor") == [0, 1]


def test_a_group_restarts_as_a_whole():
    state, done = play(WorkerExited(5, gone(5), 1.0), WorkerExited(4, gone(4), 1.0))
    assert [a for a in done if isinstance(a, EndGroup)] == [EndGroup(PAIR, 1)]
    assert state.restarting == {*PAIR}
    back = GroupReady(PAIR), WorkersResumed(frozenset({4}), 2.0)
    assert play(*back, state=state)[0].restarting == {*PAIR}, "the other isn't back yet"
    assert not play(*back, WorkersResumed(frozenset({5}), 3.0), state=state)[0].pending


@pytest.mark.parametrize(
    ("number", "exit"), [(LEARNER, gone(LEARNER)), (0, FAULT)], ids=["others wait for it", "a bug"]
)
def test_any_other_failure_ends_the_run(number, exit):
    state, done = play(WorkerExited(number, exit, 1.0), TimePassed(1.1), TimePassed(1.2))
    assert done == [GiveUp(exit)]
    assert state.failed == exit
    assert state.is_over


def test_failures_count_for_five_minutes():
    def fail_at(*times):
        events = [
            event for now in times for event in
            (WorkerExited(0, gone(0), now), GroupReady((0,)), WorkersResumed(frozenset({0}), now))
        ]  # fmt: skip
        return [a for a in play(*events)[1] if isinstance(a, GiveUp)]

    assert fail_at(0, 1, WINDOW_S, WINDOW_S + 1) == []
    (given_up,) = fail_at(0, 1, 2)
    assert given_up.exit.kind == "RunError", "rolling back wouldn't help"
    assert "after it was replaced 2 times" in given_up.exit.what


def test_without_restarts_a_loss_ends_the_run():
    state = replace(START, workers=replace(WORKERS, restarts=0))
    assert play(WorkerExited(0, gone(0), 1.0), state=state)[1] == [GiveUp(gone(0))]


def test_replicas_are_scaled_within_their_bounds():
    state, done = play(ScaleRequested({"actor": 9, "learner": 2}), TimePassed(1.0))
    assert done == [
        LogLine("actor: scaling to 4 replicas"),
        LogLine("`learner` has a fixed number of replicas: ignored"),
        PlaceWorker(2), PlaceWorker(3),
    ]  # fmt: skip
    state, done = play(WorkerPlaced(2, 2.0), PlaceMissing(3), state=state)
    assert done == [EndGroup((2,), 1)]
    assert state.staying("actor") == [0, 1, 2]
    assert play(TimePassed(3.0), state=state)[1] == [PlaceWorker(3)], "it is tried again"
    fewer = ScaleRequested({"actor": 0}), TimePassed(4.0), TimePassed(5.0)
    assert StopWorker(2) not in play(*fewer, state=state)[1], "it can't be stopped before it runs"
    state, _ = play(GroupReady((2,)), state=state)
    state, done = play(*fewer, state=state)
    assert done == [LogLine("actor: scaling to 1 replicas"), StopWorker(1), StopWorker(2)]
    state, done = play(WorkerExited(1, GOOD, 6.0), state=state)
    assert done == [RemoveWorker(1)]
    assert state.staying("actor") == [0]


def test_workers_of_a_lost_host_are_placed_elsewhere_if_they_are_needed():
    state, done = play(HostLost((1,), 1.0))
    assert done == [ReportFailure((1,), state.pending[1,].exit, is_new=True)], "one is enough"
    later = 1.0 + EMPTY_PLACE_TIMEOUT_S
    state, done = play(TimePassed(later), state=state)
    assert done == [ReportFailure((1,), done[0].exit), PlaceWorker(1)]
    one = replace(START, wanted={"actor": 1}, present=frozenset({0, *PAIR, LEARNER}))
    state, done = play(HostLost((0,), 1.0), state=one)
    assert done[-1] == PlaceWorker(0)
    assert play(WorkerPlaced(0, 1.1), state=state)[1] == [EndGroup((0,), 1)]
    assert play(PlaceMissing(0), state=state)[1] == [GiveUp(done[0].exit)]


def test_a_lost_host_with_a_part_of_a_group_ends_the_run():
    (given_up,) = play(HostLost((4,), 1.0))[1]
    assert isinstance(given_up, GiveUp)
    assert "lost with its host" in given_up.exit.what


class Model:
    """A simulation of workers that obey the supervisor's commands."""

    def __init__(self):
        self.state, self.now = START, 0.0
        self.running = set(START.present)
        self.prepared, self.started, self.open_reports = {}, {}, {}
        self.given_up = False
        self.starts = dict.fromkeys(range(len(NAMES)), ())
        self.has_room = True

    def send(self, event):
        self.state, actions = on_event(self.state, event)
        for action in actions:
            self.do(action)
        assert len(self.state.staying("actor")) <= 4

    def do(self, action):
        over = self.given_up
        match action:
            case EndGroup(group, incarnation):
                self.running -= set(group)
                self.started.pop(group, None)
                assert not over
                assert incarnation > max(self.prepared.values(), default=0)
                self.prepared[group] = incarnation
            case StartGroup(group, incarnation):
                assert not over
                assert self.prepared[group] == incarnation
                assert not self.running & set(group), "nothing runs twice"
                self.running |= set(group)
                self.started[group] = incarnation
            case PlaceWorker(number):
                assert not over
                assert number not in self.running
                here = WorkerPlaced(number, self.now) if self.has_room else PlaceMissing(number)
                self.send(here)
            case StopWorker(number):
                self.running.discard(number)
                self.send(WorkerExited(number, GOOD, self.now))
            case ReportFailure(group, _, _, is_new):
                self.open_reports[group] = self.open_reports.get(group, 0) + (1 if is_new else -1)
                assert self.open_reports[group] in (0, 1)
                times = (*self.starts[group[0]], self.now) if is_new else self.starts[group[0]]
                self.starts[group[0]] = times
            case GiveUp():
                assert not self.given_up
                self.given_up = True

    def fail(self, number):
        if number in self.running:
            self.running.discard(number)
            self.send(WorkerExited(number, gone(number), self.now))

    def lose_host(self, number):
        if number in self.running:
            self.running.discard(number)
            self.send(HostLost((number,), self.now))

    def get_ready(self, number):
        group = WORKERS.groups[number]
        if group in self.state.pending and group in self.prepared:
            self.send(GroupReady(group))

    def resume(self, number):
        if WORKERS.groups[number] in self.started and number in self.running:
            self.send(WorkersResumed(frozenset({number}), self.now))

    def wait(self, number):
        self.now += 10.0 * number
        self.send(TimePassed(self.now))

    def scale(self, number):
        self.send(ScaleRequested({"actor": number}))

    def room(self, number):
        self.has_room = bool(number % 2)


WAYS = ("fail", "lose_host", "get_ready", "resume", "wait", "scale", "room")


@given(st.lists(st.tuples(st.sampled_from(WAYS), st.integers(0, len(NAMES) - 1)), max_size=60))
def test_no_worker_runs_twice_and_every_failure_report_is_closed(events):
    model = Model()
    for way, number in events:
        getattr(model, way)(number)
    for number, times in model.starts.items():
        for i, first in enumerate(times):
            within = [then for then in times[i:] if then - first < WINDOW_S]
            assert len(within) <= 2, f"{NAMES[number]} has restarted too often"
    model.send(RunClosed())
    assert not any(model.open_reports.values())
    assert not model.state.pending


@given(st.lists(st.tuples(st.sampled_from(WAYS), st.integers(0, 3)), max_size=40))
def test_the_wanted_number_of_replicas_runs_after_recovery(events):
    model = Model()
    for way, number in events:
        getattr(model, way)(number)
    model.has_room = True
    for _ in range(3):
        model.wait(1)
        for number in range(len(NAMES)):
            model.get_ready(number)
            model.resume(number)
    if not model.given_up:
        assert len(model.state.staying("actor")) == model.state.wanted["actor"]
        assert model.running == model.state.present
        assert not model.state.pending
