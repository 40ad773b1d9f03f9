"""What the pages show of one run, read from its folder, also while it grows."""

from __future__ import annotations

import json
import re
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypedDict

from shoal.errors import SettingError
from shoal.pages.curves import GrowingCurves
from shoal.pages.drawing import draw_plan
from shoal.pages.load import first_working, load_between, load_data, timeline
from shoal.pages.tails import Tail, number, parsed
from shoal.runs.files.folder import FORM, StatusFile, is_locked
from shoal.shapes import ShapeError, Steps, misfit, read_json, why_unreadable

Json = dict[str, Any]
IN_GROUP = re.compile(r"seed-\d+")  # folders in the folder of a group
LATE_S = 10.0  # since a run in progress has written its status last
WINDOW_S = 10.0  # the time that the load of a run in progress is over
READ_S = 0.05  # of reading rows at a time
MOST_LOG = 2000  # lines of the log that are shown
MOST_LOADS = 20_000  # rows of load.jsonl that are kept
FACTS = ("algorithm", "env", "distribution_policy", "backend", "envs", "seed", "status", "error")
COUNTS = ("ticks", "env_steps", "seconds", "return_mean", "episodes", "env_steps_per_second")


class LagFacts(TypedDict):
    """How old the values were that a run has used, in ticks."""

    mean: float
    max: float
    histogram: dict[str, Steps]


class EvaluationRow(TypedDict):
    """An evaluation, as a row of `evaluation.jsonl` and the summary have it."""

    tick: Steps
    env_steps: Steps
    return_mean: float
    episodes: Steps


class RunView:
    """One run: facts, plan, load, curves, evaluations and log, each with a version."""

    def __init__(self, folder: Path) -> None:
        if not (folder / "run.json").exists() and not (folder / "summary.json").exists():
            raise SettingError(
                f"there is no run in {folder}", "Name the folder of a run, or its name in runs/."
            )
        self.folder = folder
        self.curves = GrowingCurves(folder / "metrics.jsonl")
        self.facts: Json = {}
        self.plan: Json | None = None
        self.load: Json | None = None
        self.evaluations: list[Json] = []
        self.log: deque[str] = deque(maxlen=MOST_LOG)
        self.logged = 0  # lines of the log so far
        self.versions = {"facts": 0, "load": 0, "evaluations": 0}
        self._log, self._load = Tail(folder / "workers.log"), Tail(folder / "load.jsonl")
        self._judged = Tail(folder / "evaluation.jsonl")
        self._rows: list[Json] = []
        self._recent: deque[Json] = deque(maxlen=64)
        self._read: dict[str, tuple[int, int]] = {}
        self._files: dict[str, Json] = {}
        self._source: Json = {}
        self._problems: dict[str, str] = {}

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        folder = self.folder.resolve()
        return f"{folder.parent.name}/{folder.name}" if IN_GROUP.match(folder.name) else folder.name

    def refresh(self) -> None:
        """Read what was added to the folder; of long files, the next part."""
        changed = [self._changed(f"{name}.json") for name in ("plan", "run", "summary", "status")]
        if changed[0]:
            self.plan = drawn(self._files.get("plan.json", {}))
            self._source = self._files["plan.json"] if self.plan else {}
        self._read_curves()
        self._read_log()
        self._read_evaluations()
        self._read_load()
        facts = self._make_facts()
        if facts != self.facts:
            self.facts = facts
            self.versions["facts"] += 1

    def read_all(self) -> None:
        """Read all that the folder has now."""
        self.refresh()
        while self.curves.read() or self._load.is_behind or self._log.is_behind:
            self.refresh()

    def _changed(self, name: str) -> bool:
        """Read a JSON file again if it has changed; whether it has."""
        path = self.folder / name
        try:
            found = path.stat()
            key = (found.st_mtime_ns, found.st_size)
            if self._read.get(name) == key:
                return False
            self._read[name] = key
            kind: Any = StatusFile if name == "status.json" else Json
            self._files[name] = read_json(path, kind, FORM if name == "run.json" else None)
            self._problems.pop(name, None)
        except FileNotFoundError:
            return bool(self._read.pop(name, None) or self._files.pop(name, None))
        except (OSError, ShapeError) as error:
            self._problems[name] = f"{name} can't be read: {why_unreadable(error)}"
            return False
        return True

    def _read_curves(self) -> None:
        """Read more rows for a little while; of a long file, show the sample first."""
        until = time.monotonic() + (READ_S if self.facts else 0.0)
        while self.curves.read() and time.monotonic() < until:
            pass

    def _read_log(self) -> None:
        if self._log.check():
            self.log.clear()
        for line in self._log.lines():
            self.log.append(line.decode(errors="replace"))
            self.logged += 1

    def _read_evaluations(self) -> None:
        if self._judged.check():
            self.evaluations = []
        if rows := parsed(self._judged.lines()):
            self.evaluations += [row for row in rows if not misfit(row, EvaluationRow)]
            self.versions["evaluations"] += 1

    def _read_load(self) -> None:
        """Read the counts of the workers: of the whole run, and of the last seconds."""
        if self._load.check():
            self._rows = []
        rows = parsed(self._load.lines())
        self._rows = (self._rows + rows)[-MOST_LOADS:]
        status = self._files.get("status.json", {})
        is_new = bool(status) and (not self._recent or self._recent[-1]["at"] != status.get("at"))
        if is_new:
            self._recent.append(status)
        if (rows or is_new) and self._source:
            self.load = self._make_load() or self.load
            self.versions["load"] += 1

    def _make_load(self) -> Json | None:
        rows = self._rows[first_working(self._rows) :]
        rows = rows if len(rows) > 1 else self._rows
        whole = load_between(rows[0], rows[-1]) if len(rows) > 1 else None
        now = None
        if self.is_running and len(self._recent) > 1:
            last = self._recent[-1]
            before = next(r for r in self._recent if last["at"] - r["at"] <= WINDOW_S)
            now = load_between(before, last)
        if not (now or whole):
            return None
        return {
            "now": load_data(now, self._source) if now else None,
            "whole": load_data(whole, self._source) if whole else None,
            "timeline": timeline(rows),
        }

    @property
    def is_running(self) -> bool:
        """Whether a process writes to the folder."""
        is_said = self._files.get("summary.json", {}).get("status") == "running"
        return is_said and is_locked(self.folder)

    def _make_facts(self) -> Json:
        """What a run is and how far it is."""
        summary, status = (self._files.get(f"{n}.json", {}) for n in ("summary", "status"))
        run, last = self._files.get("run.json", {}), self.curves.shown.last
        found = {name: summary.get(name) for name in FACTS}
        found |= {name: number(summary.get(name), None) for name in COUNTS}
        notes = list(self._problems.values())
        if self.is_running:
            newer = {name: x for name in COUNTS if (x := number(last.get(name), None)) is not None}
            found |= newer | {"ticks": number(last.get("tick"), -1) + 1}
            if status and time.time() - status["at"] > LATE_S:
                notes.append(
                    "The run hasn't reported for a while: its driver is stopped, or waits."
                )
        elif found["status"] == "running":
            found["status"] = "killed"
        lags = (part.get("lag") for part in (status, summary))
        lag = next((lag for lag in lags if not misfit(lag, LagFacts)), None)
        judged = summary.get("evaluation")
        return {
            **found, "note": "\n".join(notes), "name": self.name, "folder": str(self.folder),
            "lag": lag, "total": number(run.get("ticks"), None),
            "evaluation": None if misfit(judged, EvaluationRow) else judged,
            "compile_seconds": number(summary.get("compile_seconds"), None),
            "running": self.is_running,
            "read": round(self.curves.part_read, 2), "settings": settings(run, summary),
        }  # fmt: skip


def drawn(plan: Json) -> Json | None:
    """The drawing of a plan as JSON data; None if the file holds none."""
    try:
        return {
            **asdict(draw_plan(plan)),
            "sources": plan.get("sources", {}),
            "title": plan["distribution"],
        }
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError):
        return None  # a damaged file: the page shows the rest


def settings(run: Json, summary: Json) -> list[list[Any]]:
    """All that was set, in sections: each a title, and rows of names and values."""
    algorithm, env = _unwrapped(run.get("algorithm")), run.get("env")
    sections = [
        (f"Algorithm: {_title(algorithm, summary.get('algorithm'))}", _rows_of(algorithm)),
        (f"Environment: {summary.get('env') or _title(env, '')}", _rows_of(env)),
    ]
    plain = {k: v for k, v in run.items() if not isinstance(v, dict | list) and v is not None}
    sections.append(("Run", [[name, text_of(value)] for name, value in plain.items()]))
    known = {"algorithm", "env", "distribution", "elastic", "extended"}
    for name, value in run.items():
        if isinstance(value, dict) and value and name not in known:
            sections.append((name.replace("_", " ").capitalize(), _flat(value)))
    for place, one in enumerate(run.get("made") or []):
        if isinstance(one, dict):
            sections.append(("Resumed" if place else "Where it comes from", _flat(one)))
    return [[title, rows] for title, rows in sections if rows]


def _unwrapped(recipe: Any) -> Any:
    """The recipe of the algorithm itself, without what evaluates it."""
    inner = _settings_of(recipe).get("algorithm")
    return inner if isinstance(inner, dict) and "settings" in inner else recipe


def _settings_of(recipe: Any) -> Json:
    found = recipe.get("settings") if isinstance(recipe, dict) else None
    return found if isinstance(found, dict) else {}


def _title(recipe: Any, default: Any) -> str:
    name = recipe.get("name") if isinstance(recipe, dict) else None
    return str(name or default or "")


def _rows_of(recipe: Any) -> list[list[str]]:
    """The settings of a recipe, those of objects inside with dotted names."""
    return _flat(_settings_of(recipe))


def _flat(data: Mapping[str, Any], prefix: str = "") -> list[list[str]]:
    found = []
    for name, value in data.items():
        inner = _settings_of(value)
        if inner:
            found += _flat(inner, f"{prefix}{name}.")
        elif isinstance(value, dict) and value and "tuple" not in value:
            found += _flat(value, f"{prefix}{name}.")
        else:
            found.append([f"{prefix}{name}", text_of(value)])
    return found


def text_of(value: Any) -> str:
    """A value of a JSON file as a reader writes it."""
    if isinstance(value, dict) and set(value) == {"tuple"}:
        value = value["tuple"]
    if isinstance(value, list):
        return f"({', '.join(map(text_of, value))})"
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)
