"""Progress fits 80 columns in a terminal, and is plain lines where output is redirected."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from shoal.runs.files import progress
from shoal.runs.files.progress import Drawn, Nothing, Plain, Progress, Standing, clock, face, short

BIG = Standing(99_999, 1_000_000, 204_797_952, 22_345_678.0, -12345.6, 86_399.0, 863_990.0)
SMALL = Standing(1, 10, 0, 0.0, None, 1.2, None)


def terminal(width):
    return Console(file=io.StringIO(), force_terminal=True, width=width, legacy_windows=False)


def test_a_line_says_ticks_steps_rate_return_and_times():
    half = Standing(147, 300, 301_056, 275_269.0, 499.96, 19.0, 12.0)
    assert str(half) == "147/300  301k steps  275k/s  return 500.0  0:19 <0:12"
    assert str(SMALL) == "1/10  0:01"
    assert len(str(BIG)) <= 72


@pytest.mark.parametrize("standing", [BIG, SMALL])
def test_the_bar_fits_80_columns_whatever_the_numbers(standing):
    console = terminal(80)
    bar = Drawn(console, standing.ticks)
    bar.see(standing)
    (line,) = [x for x in rendered(bar, console).splitlines() if x.strip()]
    assert len(line) <= 80
    assert str(standing) in line


def rendered(bar, console):
    with console.capture() as found:
        console.print(bar._bar.get_renderable())
    return "".join(x for x in _plain(found.get()))


def _plain(text):
    import re

    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


@given(st.floats(0, 1e12))
def test_counts_have_at_most_five_characters(count):
    assert len(short(count)) <= 5
    scale = {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3}.get(short(count)[-1], 1)
    assert float(short(count).rstrip("TGMk")) * scale == pytest.approx(count, rel=0.006, abs=0.51)


def test_times_are_as_on_a_clock():
    assert [clock(x) for x in (0.4, 59, 61, 3661)] == ["0:00", "0:59", "1:01", "1:01:01"]


def test_redirected_progress_is_a_line_every_few_seconds_and_one_at_the_end(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    plain = Plain(every=10.0)
    plain.start()
    for second in range(25):
        now[0] = float(second)
        plain.see(Standing(second, 25, 0, 1.0, None, float(second), None))
    plain.say("a worker was lost")
    plain.stop()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "10/25",
        "20/25",
        "a worker was lost",
        "24/25",
    ]


def test_a_notebook_has_one_line_that_is_written_again(capsys):
    plain = Plain(every=0.0, end="")
    plain.see(SMALL)
    plain.see(BIG)
    plain.stop()
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.count("\r") == 2


def test_where_it_is_shown_decides_how():
    assert isinstance(face(terminal(80), 3, shown=True), Drawn)
    assert isinstance(face(Console(file=io.StringIO()), 3, shown=True), Plain)
    assert isinstance(face(terminal(80), 3, shown=False), Nothing)
    notebook = Console(file=io.StringIO(), force_jupyter=True)
    assert isinstance(face(notebook, 3, shown=True), Plain)


def test_the_time_left_is_estimated_from_the_ticks_so_far(monkeypatch):
    seen, now = [], [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    shown = Progress(100, 8, shown=False)
    monkeypatch.setattr(shown._face, "see", seen.append)
    for tick, at in ((0, 5.0), (10, 15.0)):
        now[0] = at
        shown.see(tick, 1.0, 8 * (tick + 1))
    assert (seen[0].rate, seen[0].left) == (0.0, None)
    assert (seen[1].rate, seen[1].left) == (8.0, 89.0)
    assert seen[1].elapsed == 15.0
