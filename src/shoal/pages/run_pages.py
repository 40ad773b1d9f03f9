"""The pages of runs: the one that `shoal watch` serves, and the report, which is a file."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from shoal.pages.html import document
from shoal.pages.plans import LEGEND
from shoal.pages.run_view import RunView
from shoal.pages.updates import Cursor, updates

Json = dict[str, Any]
SCRIPTS = ("theme", "dagre.min", "uplot.min", "layout", "picture", "curves", "run")
BODY = """<header class="top">
<div>
<p class="brand">{brand}</p>
<div class="headline"><h1>{title}</h1><span id="status"></span>
<span class="pill lost link" hidden>no connection to shoal watch</span></div>
<p id="about"></p>
</div>
</header>
{progress}
<p class="problem" id="problem" role="alert" hidden></p>
<nav class="sections" aria-label="Sections">{links}</nav>
<main>
<section aria-label="Numbers"><div class="tiles" id="numbers"></div>
<div class="table" id="runs" tabindex="0" {several}></div></section>
{extra}
<section id="plan" hidden><div class="bar"><h2>Plan</h2>
<span class="switch" id="windows" role="group" aria-label="Load of" hidden>{windows}</span></div>
<p id="finding" class="card finding" role="status" hidden></p>
<div class="pictures" id="pictures"></div>
<p class="legend">{legend}</p></section>
<section id="time" hidden><div class="bar"><h2>Where the time goes</h2></div>
<div class="times" id="times"></div>
<p class="keys"><span><i></i>computes (in its fragment's colour)</span>
<span><i class="python"></i>in a stage in Python</span><span><i class="wait"></i>waits</span></p>
</section>
<section id="curves"><div class="bar"><h2>Curves</h2>
<p id="reading" role="status" hidden></p>
<button type="button" id="unzoom" hidden>Whole range</button>
<label>over <select id="axis"><option value="env_steps">environment steps</option>
<option value="seconds">time</option><option value="tick">ticks</option></select></label>
<label>smooth <input type="range" id="smooth" min="0" max="0.98" step="0.02" value="0"></label>
<input type="search" id="filter" placeholder="filter" aria-label="Filter curves"></div>
<div class="charts" id="charts"></div></section>
<section id="lag" hidden><div class="bar"><h2>Lag</h2>
<p>ticks that values were old when they were used</p></div>
<div class="lags" id="lags"></div></section>
<section id="log"><div class="bar"><h2>Log</h2>
<label {several}>of <select id="whose">{names}</select></label>
<label><input type="checkbox" id="follow" checked> follow</label>
<input type="search" id="find" placeholder="filter" aria-label="Filter the log"></div>
<div class="card log" id="lines" role="log" tabindex="0" aria-label="Log"></div></section>
<section id="settings"><div class="bar"><h2>Settings</h2></div><div id="values"></div></section>
</main>"""
LINKS = {
    "plan": "Plan", "time": "Time", "curves": "Curves", "lag": "Lag", "log": "Log",
    "settings": "Settings",
}  # fmt: skip


def watch_page(names: Sequence[str]) -> str:
    """The page that shows runs while events about them arrive."""
    data = {"page": {"names": list(names), "isLive": True}}
    title = names[0] if len(names) == 1 else f"{len(names)} runs"
    windows = _windows(("now", "last 10 s"), ("whole", "whole run"))
    body = _body(names, title, "shoal watch", windows)
    return document(title, body, SCRIPTS, data, connect="'self'")


def report_page(views: Sequence[RunView], extra: str = "") -> str:
    """A page with all that runs have left, in one file; `extra` is HTML after the first numbers."""
    names = [view.name for view in views]
    for view in views:
        view.read_all()
    runs = [{"run": number, **updates(view, Cursor())} for number, view in enumerate(views)]
    title = names[0] if len(names) == 1 else f"{len(names)} runs"
    body = _body(names, title, "shoal report", "", extra)
    data = {"page": {"names": names, "isLive": False}, "runs": runs}
    return document(title, body, SCRIPTS, data)


def _windows(*choices: tuple[str, str]) -> str:
    """The buttons that choose the time that a load is of."""
    return "".join(
        f'<button type="button" value="{value}" aria-pressed="{str(not number).lower()}">'
        f"{text}</button>"
        for number, (value, text) in enumerate(choices)
    )


def _body(names: Sequence[str], title: str, brand: str, windows: str, extra: str = "") -> str:
    is_one = len(names) == 1
    links = LINKS | ({"repeat": "Repeat it"} if extra else {})
    kinds = ("env", "batch", "host", "tick")
    return BODY.format(
        title=escape(title),
        brand=brand,
        progress='<div class="progress"><i></i></div>' if is_one else "",
        links="".join(f'<a href="#{name}">{text}</a>' for name, text in links.items()),
        several="hidden" if is_one else "",
        windows=windows,
        extra=extra,
        legend="".join(f"<span><i class='{kind}'></i>{LEGEND[kind]}</span>" for kind in kinds),
        names="".join(
            f'<option value="{number}">{escape(name)}</option>' for number, name in enumerate(names)
        ),
    )
