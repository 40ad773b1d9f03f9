"""Curves keep the least, mean and largest value of every span, whatever arrives in which pieces."""

import json
import math
from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shoal.pages.curves import BUCKETS, Curves, GrowingCurves
from shoal.pages.tails import Tail, parsed
from shoal.pages.updates import Cursor, _curves


def rows_of(values):
    return [{"tick": t, "env_steps": 8 * (t + 1), "loss": x} for t, x in enumerate(values)]


numbers = st.one_of(st.floats(-1e6, 1e6), st.none(), st.just("Infinity"), st.just(math.nan))


@given(st.lists(numbers, max_size=400), st.integers(1, 60), st.integers(0, 12))
def test_spans_hold_every_value_in_whatever_pieces_rows_arrive(values, piece, copies):
    values = values * (copies + 1)
    rows, curves = rows_of(values), Curves()
    for first in range(0, len(rows), piece):
        curves.add(rows[first : first + piece])
    assert curves.rows == len(rows)
    assert curves.spans <= BUCKETS
    known = [(t, x) for t, x in enumerate(values) if isinstance(x, float) and math.isfinite(x)]
    if not known:
        assert "loss" not in curves.columns
        return
    column = curves.columns["loss"]
    assert column.count.sum() == len(known)
    for tick, value in known:
        span = tick // curves.width
        assert column.low[span] <= value <= column.high[span]
    low, high = min(x for _, x in known), max(x for _, x in known)
    assert np.nanmin(column.low) == low
    assert np.nanmax(column.high) == high


@given(st.lists(st.integers(1, 700), min_size=1, max_size=12))
def test_what_a_page_is_sent_in_parts_is_what_it_would_be_sent_at_once(sizes):
    view = SimpleNamespace(curves=SimpleNamespace(epoch=0, shown=Curves()))
    page, cursor, tick = {}, Cursor(), 0
    for size in sizes:
        view.curves.shown.add(
            [{"tick": tick + i, "loss": float((tick + i) % 7)} for i in range(size)]
        )
        tick += size
        news = _curves(view, cursor)
        for name, parts in news["columns"].items():
            held = page.get(name, [[] for _ in parts]) if news["first"] else [[] for _ in parts]
            page[name] = [old[: news["first"]] + new for old, new in zip(held, parts, strict=True)]
    assert page == view.curves.shown.data()["columns"]
    assert _curves(view, cursor) == {}


def test_a_long_file_is_shown_by_a_sample_until_all_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("shoal.pages.curves.LONG", 100_000)
    monkeypatch.setattr("shoal.pages.tails.CHUNK", 50_000)
    path = tmp_path / "metrics.jsonl"
    values = [float(i % 100) for i in range(20_000)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows_of(values)))
    growing = GrowingCurves(path)
    assert 0 < growing.shown.rows < 1000
    assert growing.shown.last["tick"] == 19_999
    epoch = growing.epoch
    while growing.read():
        assert growing.shown.rows < 1000
    assert growing.epoch > epoch
    assert growing.shown.rows == 20_000
    assert growing.part_read == 1


@given(st.binary(max_size=300), st.lists(st.integers(0, 40), max_size=20))
def test_a_tail_gives_every_whole_line_once(tmp_path_factory, data, sizes):
    path = tmp_path_factory.mktemp("tail") / "file"
    path.touch()
    tail, found = Tail(path), []
    with open(path, "ab", buffering=0) as file:
        for size in [*sizes, len(data)]:
            file.write(data[:size])
            data = data[size:]
            assert not tail.check()
            while tail.is_behind:
                found += tail.lines()
    assert found == path.read_bytes().split(b"\n")[:-1]


def test_a_file_that_was_cut_or_replaced_is_read_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"tick": 0}\n{"tick": 1}\n')
    tail = Tail(path)
    tail.check()
    assert len(tail.lines()) == 2
    path.write_text('{"tick": 0}\n')
    assert tail.check()
    assert parsed(tail.lines()) == [{"tick": 0}]
    (tmp_path / "new").write_text('{"tick": 5}\n{"tick": 6}\n')
    (tmp_path / "new").replace(path)
    assert tail.check()
    assert parsed(tail.lines()) == [{"tick": 5}, {"tick": 6}]


def test_damaged_rows_are_left_out():
    lines = [b'{"a": 1}', b"{", b"", b"[1]", b"\xff", b'{"a": 2}']
    assert parsed(lines) == [{"a": 1}, {"a": 2}]
