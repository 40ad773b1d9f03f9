"""Feeds sinks from the rows of a run, each on its own thread, without ever slowing the run."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any

from shoal.errors import MissingExtraError, SettingError, UnknownNameError, first_line
from shoal.runs.sinks.sink import About, Point, Row, Sink, evaluation_point, point_of
from shoal.runtime.logs import Log

EVERY_S = 0.5  # between points of a sink
MOST_ROWS = 64  # of which a point is the mean; of more, as many are taken evenly
KEPT = 20_000  # rows that wait for a sink that is slow, the newest
CLOSING_S = 30.0  # for a sink to write what is left when the run ends
# The module, class, package and extra of each sink that has a name.
SINKS = {
    "csv": ("shoal.runs.sinks.table", "Table", "csv", ""),
    "mlflow": ("shoal.runs.sinks.mlflow", "MLflow", "mlflow", "mlflow"),
    "prometheus": (
        *("shoal.runs.sinks.prometheus", "Prometheus"),
        *("prometheus_client", "prometheus"),
    ),
    "tensorboard": ("shoal.runs.sinks.tensorboard", "TensorBoard", "tensorboardX", "tensorboard"),
    "wandb": ("shoal.runs.sinks.wandb", "WeightsAndBiases", "wandb", "wandb"),
}


def check_log(log: Any) -> tuple[Any, ...]:
    """The sinks that are named or given, if their packages are installed."""
    asked = log.split(",") if isinstance(log, str) else log
    asked = asked if isinstance(asked, list | tuple) else (asked,)
    named = [part.strip() for each in asked if isinstance(each, str) for part in each.split(",")]
    given = [each for each in asked if not isinstance(each, str)]
    for name in named:
        if name not in SINKS:
            raise UnknownNameError("sink", name, SINKS)
        *_, package, extra = SINKS[name]
        try:
            import_module(package)
        except ImportError as error:
            raise MissingExtraError(f"{package}, which log={name!r} needs,", extra) from error
    for sink in given:
        if not (callable(getattr(sink, "see", None)) and callable(getattr(sink, "close", None))):
            raise SettingError(
                f"log={sink!r} is no sink: it has no see(point) and close()",
                f"Name one of {', '.join(SINKS)}, or give an object with these methods.",
            )
    return (*dict.fromkeys(named), *given)


class Feeds:
    """The sinks of a run."""

    def __init__(self, log: Iterable[Any], about: About, say: Log) -> None:
        self._feeds = [Feed(each, about, say) for each in log]
        self._seconds = 0.0

    def tick(self, row: Row) -> None:
        """Pass on a row of metrics.jsonl; it isn't changed afterwards."""
        self._seconds = row["seconds"]
        for feed in self._feeds:
            feed.rows.append(row)

    def evaluation(self, row: Row) -> None:
        """Pass on a row of evaluation.jsonl."""
        for feed in self._feeds:
            feed.points.append(evaluation_point(row, self._seconds, time.time()))

    def close(self) -> None:
        """Let all sinks write what is left, at the same time."""
        for feed in self._feeds:
            feed.ending.set()
        until = time.monotonic() + CLOSING_S
        for feed in self._feeds:
            feed.wait(until - time.monotonic())


class Feed:
    """One sink and its thread."""

    def __init__(self, sink: str | Sink, about: About, say: Log) -> None:
        self.title = sink if isinstance(sink, str) else type(sink).__name__
        self.rows: deque[Row] = deque(maxlen=KEPT)
        self.points: deque[Point] = deque(maxlen=KEPT)
        self.ending = threading.Event()
        self._sink, self._about, self._say = sink, about, say
        self._last: Point | None = None
        self._thread = threading.Thread(target=self._run, name=f"sink {self.title}", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> None:
        """Wait for its end, at most so long."""
        self._thread.join(max(0.0, seconds))
        if self._thread.is_alive():
            self._say(f"{self.title} has not taken everything in {CLOSING_S:g} s; left behind")

    def _run(self) -> None:
        try:
            sink = _made(self._sink, self._about) if isinstance(self._sink, str) else self._sink
            try:
                while not self.ending.wait(EVERY_S):
                    self._pass_on(sink)
                self._pass_on(sink)
            finally:
                sink.close()
        except Exception as error:
            why = f"{type(error).__name__}: {first_line(error)}"
            if isinstance(error, OSError) and error.strerror:
                why = f"{error.filename or 'its file'}: {error.strerror.lower()}"
            self._say(
                f"{self.title} gets no more values ({why}); training and metrics.jsonl continue"
            )

    def _pass_on(self, sink: Sink) -> None:
        rows = [self.rows.popleft() for _ in range(len(self.rows))]
        if rows:
            self._last = point_of(_evenly(rows), self._last, time.time())
            sink.see(self._last)
        while self.points:
            sink.see(self.points.popleft())


def _made(name: str, about: About) -> Sink:
    module, kind, *_ = SINKS[name]
    return getattr(import_module(module), kind)(about)


def _evenly(rows: Sequence[Row]) -> Sequence[Row]:
    """At most `MOST_ROWS` of some rows, the last among them."""
    stride = -(-len(rows) // MOST_ROWS)
    return rows[::-1][::stride][::-1]
