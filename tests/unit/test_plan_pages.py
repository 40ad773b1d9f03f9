"""A page is self-contained, shows every fragment and channel, and escapes names."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.graph.words import place_text, size_text, value_rows, what_text
from shoal.pages import graph_page, plan_page

VALUES = {
    "params": {"shape": [4, 2], "dtype": "float32", "bytes": 32, "axis": None},
    "rows": {"shape": [8, 3], "dtype": "float32", "bytes": 96, "axis": 0},
    "loop/in.rows": {"shape": [8, 3], "dtype": "float32", "bytes": 96, "axis": 0},
    "loop/out.rows": {"shape": [8, 3], "dtype": "float32", "bytes": 96, "axis": 0},
    "rows'": {"shape": [8, 3], "dtype": "float32", "bytes": 96, "axis": 0},
    "sum": {"shape": [3], "dtype": "float32", "bytes": 12, "axis": None},
    "params'": {"shape": [4, 2], "dtype": "float32", "bytes": 32, "axis": None},
}


def stage(name, per, reads, writes):
    kind = {"kind": "stage", "name": name, "stage": name.split("/")[-1], "per": per, "host": False}
    return {**kind, "reads": reads, "writes": writes, "source": f"mine.py:{len(name)}"}


def example_graph(move="move", fit="fit"):
    inner = stage(f"loop/{move}", "env", ["loop/in.rows", "params"], ["loop/out.rows"])
    body = {"inputs": ["loop/in.rows"], "outputs": ["loop/out.rows"], "nodes": [inner]}
    loop = {"kind": "loop", "name": "loop", "length": 5, "body": body, "source": "mine.py:7"}
    loop |= {"reads": ["rows", "params"], "writes": ["rows'"]}
    glue = {"kind": "glue", "name": "sum", "op": "sum", "reads": ["rows'"], "writes": ["sum"]}
    fits = stage(fit, "batch", ["params", "sum"], ["params'"])
    graph = {"inputs": ["params", "rows"], "outputs": ["params'", "rows'"]}
    return graph | {"title": "Mine", "envs": 8, "values": VALUES, "nodes": [loop, glue, fits]}


def example_plan(mover="mover", fitter="fitter"):
    graph = example_graph()
    fragments = [
        {"name": mover, "replicas": 4, "places": [f"host0/cpu:{i}" for i in range(4)]},
        {"name": fitter, "replicas": 1, "places": ["host0/gpu:0"]},
    ]
    fragments = [{**fragment, "one_program": False} for fragment in fragments]
    flow = {"times": 1, "flow": "lockstep", "bytes": 12}
    channels = [
        {
            "name": "a",
            "writer": mover,
            "reader": fitter,
            "values": ["sum"],
            "kind": "gather of 4",
            **flow,
        },
        {
            "name": "b",
            "writer": fitter,
            "reader": mover,
            "values": ["params"],
            "kind": "broadcast to 4",
            **flow,
        },
    ]
    homes = {"loop": [mover], "sum": [fitter], "fit": [fitter]}
    plan = {"distribution": "mine", "graph": graph, "fragments": fragments, "channels": channels}
    return plan | {"homes": homes, "owners": {"params": fitter, "rows": mover}}


class Page(HTMLParser):
    """A parsed page: its elements, scripts and visible text."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.text, self.scripts, self.open = [], [], "", [], ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self.open = tag
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.open == "script":
            self.scripts[-1] += data
        elif self.open != "style":
            self.text += data

    def handle_endtag(self, tag):
        self.open = ""

    @property
    def drawing(self):
        return json.loads(self.scripts[0])


PAGES = [graph_page(example_graph()), plan_page(example_plan())]


@pytest.mark.parametrize("html", PAGES, ids=["graph", "plan"])
def test_a_page_loads_nothing(html):
    page = Page(html)
    assert {"src", "srcset", "data"}.isdisjoint(name for name, _ in page.attributes)
    assert all(to.startswith(("#", "data:")) for name, to in page.attributes if name == "href")
    html = html.replace("http://www.w3.org/2000/svg", "")  # a name, not an address
    assert not re.search(r"https?://|@import|url\((?!#)|sourceMappingURL|\bimport\(|fetch\(", html)
    assert "connect-src 'none'" in html


@pytest.mark.parametrize("html", PAGES, ids=["graph", "plan"])
def test_a_page_allows_its_own_scripts_only(html):
    page = Page(html)
    allowed = re.search(r"script-src ([^;]*);", html).group(1).split()
    digests = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in page.scripts]
    assert allowed == [f"'sha256-{digest}'" for digest in digests[1:]]


def test_a_plan_shows_every_fragment_and_channel_in_the_picture_and_in_the_tables():
    page = Page(plan_page(example_plan()))
    assert [(box["label"], box["badge"]) for box in page.drawing["boxes"]] == [
        ("mover", "× 4"),
        ("fitter", "× 1"),
    ]
    arrows = page.drawing["arrows"]
    assert [(arrow["writer"], arrow["reader"]) for arrow in arrows] == [
        ("mover", "fitter"),
        ("fitter", "mover"),
    ]
    assert arrows[0]["lines"] == ["sum", "12 B", "gather of 4"]
    for text in ("mover", "fitter", "host0/cpu:0-3", "gather of 4", "broadcast to 4", "params"):
        assert text in page.text


def test_a_fragment_shows_its_own_stages_in_their_loops():
    mover, fitter = Page(plan_page(example_plan())).drawing["boxes"]
    (loop,) = mover["inside"]["boxes"]
    assert (loop["kind"], loop["badge"]) == ("loop", "× 5")
    assert [box["label"] for box in loop["inside"]["boxes"]] == ["move"]
    assert [box["label"] for box in fitter["inside"]["boxes"]] == ["fit"]


def test_a_graph_skips_glue_and_marks_carried_values():
    arrows = Page(graph_page(example_graph())).drawing["arrows"]
    seen = [(a["writer"], a["reader"], a["kind"], [v[0] for v in a["values"]]) for a in arrows]
    assert seen == [("loop", "fit", "made", ["sum"]), ("fit", "loop", "carried", ["params"])]


def test_a_source_line_is_shown_on_hover_and_its_code_on_a_click():
    code = {"mine.py:3": {"file": "/mine.py", "first": 3, "text": "def fit(): ..."}}
    drawing = Page(graph_page(example_graph() | {"sources": code})).drawing
    assert drawing["sources"] == code
    fit = drawing["boxes"][1]
    assert fit["source"] == "mine.py:3"
    assert ["source", "mine.py:3"] in fit["facts"]


@given(name=st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1))
def test_any_name_is_shown_as_it_is(name):
    page = Page(plan_page(example_plan(mover=name)))
    assert page.drawing["boxes"][0]["label"] == name
    assert name in page.text
    assert page.tags == Page(PAGES[1]).tags


def test_a_name_cannot_add_elements():
    nasty = "</script><script>alert(1)</script><img src=x onerror='alert(2)'>&amp;"
    page = Page(graph_page(example_graph(fit=nasty)))
    assert page.tags == Page(PAGES[0]).tags


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (38_400, "38 kB"), (2_100_000, "2.1 MB")],
)
def test_sizes_are_printed_with_two_digits_and_a_unit(count, text):
    assert size_text(count) == text


def test_many_values_are_summarised_by_the_prefix_of_their_names():
    spec = {"shape": [2], "dtype": "float32", "bytes": 8, "axis": None}
    values = [{**spec, "name": f"state.{part}.{i}"} for part in ("a", "b") for i in range(9)]
    assert value_rows(values) == (("state.a", "9 values", "72 B"), ("state.b", "9 values", "72 B"))
    assert what_text(values) == "a, b"


def test_places_of_one_kind_stand_together():
    places = ["host0/cpu:0", "host0/cpu:1", "host1/gpu:0", "host1/gpu:2", "host0/cpu:0"]
    assert place_text(places) == "host0/cpu:0-1, host1/gpu:0,2"
