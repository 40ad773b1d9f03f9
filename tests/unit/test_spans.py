"""Spans: buffers that are read while they are written, their sums, and the file that keeps them."""

import signal
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.planning.program import Put
from shoal.planning.segments import Program, Segment
from shoal.profiling.breakdown import breakdown
from shoal.profiling.clocks import HostClocks, HostSpans, this_clock
from shoal.profiling.recorder import EndpointRecorder
from shoal.profiling.span_file import FILE, MAGIC, SpanFile, read_spans, write_spans
from shoal.profiling.spans import (
    BUFFER_WORDS,
    HEAD,
    SLOTS,
    SPAN,
    Kind,
    NewSpans,
    SpanBuffer,
    SpanBuffers,
    code_of,
)
from shoal.profiling.totals import BINS, WATCHED, Recent, Totals, bin_of, quantile
from shoal.runtime.channels.shared_memory import Memory
from shoal.shapes import ShapeError


def memory():
    return memoryview(bytearray(BUFFER_WORDS * 8)).cast("q")


def write(buffer, first, count):
    for number in range(first, first + count):
        buffer.write(code_of(Kind.STAGE, 7, 3), number, 2 * number, number << 32 | 5)


def check_whole(spans):
    """Every span is as it was written, in order and without a gap."""
    numbers = spans["begin"]
    assert (np.diff(numbers) == 1).all()
    assert (spans["end"] == 2 * numbers).all()
    assert (spans["tick"] == numbers).all()
    assert set(zip(spans["kind"], spans["site"], spans["endpoint"], spans["number"],
                   strict=True)) <= {(Kind.STAGE, 7, 3, 5)}  # fmt: skip


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 3 * SLOTS // 2), max_size=4))
def test_a_buffer_gives_each_span_once_or_counts_it_as_lost(parts):
    words, written, read = memory(), 0, 0
    buffer, reader = SpanBuffer(words).begin(), SpanBuffer(words)
    for count in parts:
        write(buffer, written, count)
        written += count
        spans, lost = reader.read()
        check_whole(spans)
        assert len(spans) + lost == count
        assert lost == max(0, count - SLOTS + (count > SLOTS - 1))
        read += len(spans) + lost
        assert not len(spans) or spans["begin"][-1] == written - 1
    assert read == written


@pytest.mark.parametrize("more", [1, 5, SLOTS // 2, SLOTS - 3, SLOTS, 2 * SLOTS])
def test_spans_that_are_overwritten_while_they_are_read_are_left_out(more):
    words = memory()
    buffer, written = SpanBuffer(words).begin(), SLOTS - 2
    write(buffer, 0, written)
    calls = []

    def meanwhile():  # the writer continues between the reader's copy and its check
        calls.append(1)
        if len(calls) == 2:
            write(buffer, written, more)

    spans, lost = SpanBuffer(words, meanwhile).read()
    check_whole(spans)
    assert len(spans) == max(0, written - max(0, written + more - SLOTS + 1))
    assert len(spans) + lost == written


def test_a_slot_that_is_half_written_is_left_out():
    words = memory()
    buffer = SpanBuffer(words).begin()
    write(buffer, 0, SLOTS)
    words[8:12] = memoryview(np.full(4, -1).tobytes()).cast("q")  # the oldest, being overwritten
    assert words[HEAD] == SLOTS
    spans, lost = SpanBuffer(words).read()
    check_whole(spans)
    assert (len(spans), lost) == (SLOTS - 1, 1)


def test_a_buffer_is_read_while_another_thread_writes_it():
    words, count = memory(), 3 * SLOTS
    buffer, reader = SpanBuffer(words).begin(), SpanBuffer(words)
    thread = threading.Thread(target=write, args=(buffer, 0, count))
    thread.start()
    found = 0
    while thread.is_alive() or words[HEAD] > reader._tail:
        spans, lost = reader.read()
        check_whole(spans)
        found += len(spans) + lost
    thread.join()
    assert found == count


def test_a_worker_that_takes_the_place_of_another_continues_its_buffer():
    words = memory()
    write(SpanBuffer(words).begin(), 0, 10)
    write(SpanBuffer(words).begin(), 10, 5)
    spans, lost = SpanBuffer(words).read()
    check_whole(spans)
    assert (len(spans), lost) == (15, 0)


def test_buffers_are_read_by_name_with_the_memory_of_their_process():
    buffers = SpanBuffers()
    write(buffers.add("a[0]", SpanBuffer.own()).begin(), 0, 3)
    idle = buffers.add("b[0]", SpanBuffer.own())
    found = buffers.read(range(2, 5))
    assert list(found) == ["a[0]"]
    assert found["a[0]"].memory > 1e6
    assert [idle.is_measured(tick) for tick in (1, 2, 4, 5)] == [False, True, True, False]
    assert not buffers.read(range(0))


@st.composite
def timelines(draw):
    """Spans of one worker, one after the other."""
    lengths = draw(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**6)), min_size=1))
    spans, at = np.zeros(len(lengths), SPAN), 0
    for span, (length, gap) in zip(spans, lengths, strict=True):
        span["begin"], span["end"] = at + gap, at + gap + length
        at = int(span["end"])
    spans["kind"] = draw(st.lists(st.integers(0, Kind.TURN), min_size=len(spans),
                                  max_size=len(spans)))  # fmt: skip
    spans["tick"] = np.sort(draw(st.lists(st.integers(0, 9), min_size=len(spans),
                                          max_size=len(spans))))  # fmt: skip
    cuts = draw(st.lists(st.integers(0, len(spans)), max_size=3))
    return spans, np.split(spans, sorted(cuts))


@settings(deadline=None)
@given(timelines(), st.integers(0, 10**9))
def test_spans_and_gaps_are_all_of_the_time(timeline, since):
    spans, parts = timeline
    totals = Totals()
    for part in parts:
        totals.add(0, part, 0, since, range(4, 6))
    rows = totals.array()
    assert rows["ns"].sum() == spans["end"][-1] - spans["begin"][0]
    assert rows["count"][rows["kind"] != Kind.GAP].sum() == len(spans)
    assert (rows["durations"].sum(1) == rows["count"]).all()
    for kind in set(spans["kind"].tolist()):
        own = spans[spans["kind"] == kind]
        assert rows["ns"][rows["kind"] == kind].sum() == (own["end"] - own["begin"]).sum()
    late = spans[spans["begin"] >= since]
    assert rows["count"][(rows["phase"] > 0) & (rows["kind"] != Kind.GAP)].sum() == len(late)


def test_time_in_which_spans_were_lost_is_not_a_gap():
    totals, spans = Totals(), np.zeros(4, SPAN)
    spans["begin"], spans["end"] = [0, 10, 100, 110], [10, 20, 110, 120]
    totals.add(0, spans[:2], 0, 0, range(0))
    totals.add(0, spans[2:], 8, 0, range(0))
    rows = {int(row["kind"]): row for row in totals.array()}
    assert (rows[Kind.LOST]["ns"], rows[Kind.LOST]["number"]) == (80, 8)
    assert rows[Kind.GAP]["ns"] == 0


@given(st.lists(st.integers(40, 10**11), min_size=1))
def test_quantiles_are_within_a_bin(durations):
    spread = np.bincount(bin_of(np.array(durations)), minlength=BINS)
    for share in (0.1, 0.5, 1.0):
        exact = np.quantile(durations, share, method="inverted_cdf")
        assert exact / 1.3 <= quantile(spread, share) <= exact * 1.3


def test_the_newest_spans_of_each_worker_are_kept():
    recent, spans = Recent(10), np.zeros(4, SPAN)
    for number in range(6):
        spans = spans.copy()
        spans["tick"] = number
        recent.add(number % 2, spans)
    kept = dict(recent.arrays())
    assert [one["tick"].tolist() for one in kept.values()] == [[2, 4, 4, 4, 4], [3, 5, 5, 5, 5]]


def example_file():
    spans = np.zeros(3, SPAN)
    spans["begin"], spans["end"] = [0, 1000, 5000], [1000, 2000, 6000]
    spans["kind"] = [Kind.STAGE, Kind.WAIT, Kind.STAGE]
    spans["site"] = [0, 1, 0]
    totals = Totals()
    totals.add(0, spans, 0, 0, range(0))
    site = {"fragment": "a", "stages": [], "category": "simulation"}
    about = {
        "wall": 0.0, "cost": {"inside": 10.0, "outside": 20.0}, "measured": [0, 0], "kept": [3],
        "workers": [{"name": "a[0]", "pid": 1, "memory": 5, "ticks": [0, 0]}], "channels": [],
        "sites": [site | {"number": 0, "kind": "stage", "name": "env"},
                  site | {"number": 1, "kind": "take", "name": "b>a:0"}],
    }  # fmt: skip
    return SpanFile(about, totals.array(), [spans])


def test_a_file_of_spans_is_read_as_it_was_written(tmp_path):
    file = example_file()
    write_spans(tmp_path / FILE, file)
    found = read_spans(tmp_path / FILE)
    assert found.about == file.about
    assert (found.totals == file.totals).all()
    assert (found.spans[0] == file.spans[0]).all()
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_the_cost_of_recording_is_taken_out_of_what_it_is_in(tmp_path):
    found = breakdown(example_file(), (WATCHED,))
    seconds = {name: round(s * 1e9) for name, s in found.categories("a[0]").items()}
    assert seconds == {"simulation": 1980, "waiting": 990, "framework": 2940, "recording": 90}
    assert round(found.seconds("a[0]") * 1e9) == 6000
    assert found.waits("a[0]") == {("take", "b>a:0"): pytest.approx(0.165)}


def damaged(data):
    yield "empty", b""
    yield "cut off", data[:-1]
    yield "cut in its lengths", data[: len(MAGIC) + 3]
    yield "of another version", data.replace(b"spans 1", b"spans 9")
    yield "another file", b"PK\3\4" + data
    for at in range(len(MAGIC), len(data), 97):
        yield f"changed at {at}", data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :]


def test_a_damaged_file_is_refused(tmp_path):
    path = tmp_path / FILE
    write_spans(path, example_file())
    for _, data in damaged(path.read_bytes()):
        path.write_bytes(data)
        with pytest.raises(ShapeError):
            read_spans(path)


@pytest.mark.parametrize(
    "change",
    [{"kept": [4]}, {"kept": [-3]}, {"workers": []}, {"sites": 3}, {"cost": {"inside": 1.0}},
     {"kept": [1, 2]}, {"workers": [{"name": "a"}]}],
)  # fmt: skip
def test_a_file_that_contradicts_itself_is_refused(tmp_path, change):
    file = example_file()
    write_spans(tmp_path / FILE, replace(file, about=file.about | change))
    with pytest.raises(ShapeError):
        read_spans(tmp_path / FILE)


def test_spans_of_other_hosts_are_moved_to_the_time_of_this_one(monkeypatch):
    spans = np.zeros(1, SPAN)
    new = {"a[0]": NewSpans(spans, 0, 1, 0)}
    times = iter([1200, 5010])  # replies after 200 and 10 ns: the second is the more exact
    monkeypatch.setattr("time.monotonic_ns", lambda: next(times))
    clocks = HostClocks()
    clocks.in_local_time(HostSpans(new, "another", 600), 1000)
    assert spans["begin"] == 500
    clocks.in_local_time(HostSpans(new, "another", 4405), 5000)
    assert spans["begin"] == 500 + 600
    clocks.in_local_time(HostSpans(new, this_clock(), 0), 0)
    assert spans["begin"] == 1100


WRITER = """
import os, signal, sys
from shoal.profiling.spans import BUFFER_WORDS, Kind, SpanBuffer, code_of
from shoal.runtime.channels.shared_memory import Memory

memory = Memory(int(sys.argv[1]), BUFFER_WORDS * 8)
buffer = SpanBuffer(memory.packed(0, BUFFER_WORDS)).begin()
for number in range(100):
    buffer.write(code_of(Kind.STAGE, 7, 3), number, 2 * number, number << 32 | 5)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_spans_of_a_worker_that_was_killed_can_be_read():
    shared = Memory.make(BUFFER_WORDS * 8)
    command = [sys.executable, "-c", WRITER, str(shared.fd)]
    ended = subprocess.run(command, pass_fds=[shared.fd], check=False)
    assert ended.returncode == -signal.SIGKILL
    buffer = SpanBuffer(shared.packed(0, BUFFER_WORDS))
    spans, lost = buffer.read()
    check_whole(spans)
    assert (len(spans), lost) == (100, 0)
    assert buffer.pid > 0


class Pending:
    """An array that a device still computes."""

    def __init__(self, clock):
        self.clock = clock

    def block_until_ready(self):
        self.clock[0] += 5_000_000


@pytest.mark.parametrize(("measured", "copies"), [(False, False), (False, True), (True, False)])
def test_a_wait_for_a_device_is_a_span_of_its_segment(measured, copies, monkeypatch):
    clock = [0]
    monkeypatch.setattr("shoal.profiling.recorder.now", lambda: clock[0])
    segment, put = Segment((), (), ("x",)), Put("a>b", ("x",))
    program, buffer = Program("a", (segment, put), (), (), ()), SpanBuffer.own()
    buffer.measure(range(2, 3))
    recorder = EndpointRecorder(buffer, 0, copies=copies).of(program, 0)
    recorder.tick = 2 if measured else 1
    env = {"x": Pending(clock)}
    recorder.end(segment, recorder.begin(segment), env)
    recorder.end(put, recorder.begin(put), env)
    spans, _ = buffer.read()
    waited = spans[spans["kind"] == Kind.DEVICE]
    assert waited["site"].tolist() == [0] * (measured or copies)
    assert ((waited["end"] - waited["begin"]) == 5_000_000).all()
    assert (spans["end"] - spans["begin"])[spans["kind"] != Kind.DEVICE].tolist() == [0, 0]
