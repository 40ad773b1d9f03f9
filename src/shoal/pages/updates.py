"""What a page has yet to learn of a run: the parts that changed since it asked last."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shoal.pages.run_view import RunView

Json = dict[str, Any]


@dataclass
class Cursor:
    """What a page knows of a run."""

    versions: dict[str, int] = field(default_factory=dict)
    has_plan: bool = False
    curves: tuple[int, int, int] = (-1, 0, 0)  # epoch, rows of a span, spans
    rows: int = 0
    logged: int = 0


def updates(view: RunView, cursor: Cursor) -> Json:
    """The parts of a run that a page lacks; the cursor then has them."""
    found: Json = {}
    for name, version in view.versions.items():
        if cursor.versions.get(name, 0) != version:
            cursor.versions[name] = version
            found[name] = getattr(view, name)
    if view.plan is not None and not cursor.has_plan:
        cursor.has_plan, found["plan"] = True, view.plan
    if curves := _curves(view, cursor):
        found["curves"] = curves
    if cursor.logged < view.logged:
        new = min(view.logged - cursor.logged, len(view.log))
        cursor.logged = view.logged
        found["log"] = list(view.log)[len(view.log) - new :]
    return found


def _curves(view: RunView, cursor: Cursor) -> Json:
    """The spans that were added or changed; all of them where their width has changed."""
    curves, (epoch, width, spans) = view.curves.shown, cursor.curves
    is_same = (epoch, width) == (view.curves.epoch, curves.width)
    if is_same and cursor.rows == curves.rows:
        return {}
    cursor.curves = view.curves.epoch, curves.width, curves.spans
    cursor.rows = curves.rows
    return curves.data(max(0, spans - 1) if is_same else 0)
