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
from unit.example_plans import example_graph, example_plan


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
