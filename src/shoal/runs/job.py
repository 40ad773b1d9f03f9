"""A run in its folder: what it reports while it runs, and the checkpoints that it leaves."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shoal import __version__
from shoal.algorithms.evaluated import Evaluated
from shoal.envs.fresh import restart_hosts
from shoal.errors import LostError, NotFiniteError
from shoal.graph.ir import Graph
from shoal.planning.plan import Plan
from shoal.profiling.recorder import recording
from shoal.profiling.span_log import SpanLog
from shoal.roles import steps_a_tick
from shoal.runs.callbacks import Callbacks
from shoal.runs.files.checkpoints import Checkpoints, ticks_in
from shoal.runs.files.folder import FORM, Lines, RunFile, as_json, recorded, write_json, write_whole
from shoal.runs.files.pace import Pace, pace
from shoal.runs.files.progress import MEASURED, Progress
from shoal.runs.files.provenance import provenance
from shoal.runs.files.records import (
    Episodes,
    Evaluations,
    Lags,
    scalars,
    without_evaluation,
)
from shoal.runs.files.status import Status
from shoal.runs.inputs.options import RunOptions
from shoal.runs.inputs.recipes import NOT_PLAIN, recipe_of
from shoal.runs.inputs.sources import with_sources
from shoal.runs.inputs.trust import code_in, recipes_of, remember
from shoal.runs.measuring import measure_stages
from shoal.runs.results.agent import Agent
from shoal.runs.results.evaluating import EPISODE, Evaluation, Protocol
from shoal.runs.results.exporting import export
from shoal.runs.results.filming import Film, film
from shoal.runs.results.listing import listed
from shoal.runs.sinks.feeding import Feeds, check_log
from shoal.runs.sinks.sink import About
from shoal.runtime.cluster.recovery import RecoveryPolicy
from shoal.runtime.execution.metrics import lag_name
from shoal.runtime.execution.replica_runner import KEEP_EVERY
from shoal.runtime.execution.snapshot import Snapshot
from shoal.runtime.logs import Log, listening
from shoal.runtime.restart_policy import WorkerFailure
from shoal.runtime.run import BACKENDS, Result, RunCallbacks
from shoal.signals import owned

if TYPE_CHECKING:
    from shoal.runs.inputs.making import Job

OF_ENVIRONMENTS = ("env_states", "obs")  # observations may be NaN where environments allow it
RESTARTS = 3  # on a cluster, where failures are common; of replacements, on all backends
EVERY, KEEP = "60s", 3  # how often checkpoints are written, and how many of the newest are kept
REMEMBERED = 8  # ticks at which workers keep their state, and the counts at them
NOT_MEASURED = 2  # first ticks, in which programs are compiled
AWAITED = 1024  # ticks that a snapshot may be late, because a worker is slow


@dataclass(frozen=True, repr=False)
class Trained:
    """The result of training: the final state, the summary, and the folder that holds both."""

    state: Any
    summary: dict[str, Any]
    folder: Path
    plan: Plan
    agent: Agent

    def act(self, obs: Any, key: Any = None) -> np.ndarray:
        """The action on one observation or many: greedy, or sampled with a key (or an integer)."""
        return self.agent.act(obs, key)

    def evaluate(
        self, episodes: int = 100, *, sampled: bool = False, seed: int = 0, steps: int = EPISODE
    ) -> Evaluation:
        """Play whole episodes, as `shoal eval` does, and write the result into the run's folder."""
        found = self.agent.evaluate(episodes, sampled=sampled, seed=seed, steps=steps)
        found.write(self.folder)
        return found

    def video(self, path: str | Path = "film.gif", episodes: int = 1, *, seed: int = 0) -> Film:
        """Film episodes with the greedy action, as `shoal video` does."""
        return film(self.agent, Path(path), Protocol(episodes, seed=seed))

    def export(self, folder: str | Path) -> Path:
        """Write a folder that acts without Shoal, as `shoal export` does."""
        return export(self.agent, Path(folder), listed(self.folder).evaluations())

    def __repr__(self) -> str:
        """In a line, without the parameters."""
        one = self.summary
        steps = f", {one['env_steps']:,} steps" if one["env_steps"] else ""
        mean = one["return_mean"]
        earned = f", mean return {mean:.1f}" if mean is not None else ""
        what = f"{one['algorithm']} on {one['env']}"
        return f"Trained({what}: {one['ticks']:,} ticks{steps}{earned}; {self.folder}/)"


@dataclass(frozen=True)
class StartPoint:
    """What a run starts from: a state, and the counts of the ticks before it."""

    start: Callable[[], Any]  # makes a snapshot, or the algorithm's tree before the first tick
    progress: Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """A run that is to be made: what is trained, how, where it is written, and from which state."""

    job: Job
    plan: Plan
    folder: Path
    record: RunFile
    start: StartPoint


def describe(job: Job, drawn: Plan, before: Mapping[str, Any], options: RunOptions) -> RunFile:
    """The content of `run.json`; what no option says is as `before`, or by default.

    Of objects without a recipe, it has only the type's name.
    """
    backend = before["backend"]

    def chosen(name: str, default: Any) -> Any:
        value = getattr(options, name)
        return before.get(name, default) if value is None else value

    replaces = before.get("replaces", RESTARTS) if options.restarts is None else options.restarts
    return {
        "form": FORM, "shoal": __version__, "jax": jax.__version__,
        "algorithm": _recipe(job.algorithm, job.algorithm_from),
        "env": _recipe(job.env, job.env_from),
        "distribution": _recipe(drawn.distribution, ""),
        "backend": backend, "envs": job.envs, "ticks": job.ticks, "seed": before["seed"],
        "checkpoint_every": chosen("checkpoint_every", EVERY), "keep": chosen("keep", KEEP),
        "restarts": chosen("restarts", BACKENDS[backend].restarts), "replaces": replaces,
        "step_timeout": chosen("step_timeout", None),
        "elastic": {f.name: [f.least, f.most] for f in drawn.distribution.elastic},
        "extended": before.get("extended", []), "log": _log_names(options, before),
        "made": [*before.get("made", []), provenance()],
    }  # fmt: skip


def _outlets(run: Run, options: RunOptions, say: Log) -> Outlets:
    """Functions of the user, sinks and spans; sinks that aren't given are as they were."""
    callbacks = Callbacks(options.on_tick, options.on_evaluation, options.on_checkpoint)
    log = check_log(run.record.get("log", []) if options.log is None else options.log)
    first = run.start.progress.get("tick", 0) + NOT_MEASURED
    spans = SpanLog(run.folder, run.plan, range(first, first + (options.profile_ticks or 0)))
    return Outlets(callbacks, Feeds(log, About(run.folder, run.record, say), say), spans)


def _log_names(options: RunOptions, before: Mapping[str, Any]) -> list[str]:
    if options.log is None:
        return before.get("log", [])
    return [name for name in check_log(options.log) if isinstance(name, str)]


def _recipe(thing: Any, source: str) -> Any:
    found = recipe_of(thing)
    if found is NOT_PLAIN and source:
        file, _, name = source.rpartition(":")
        return {"from": str(Path(file).resolve()), "name": name}
    return {"unknown": type(thing).__name__} if found is NOT_PLAIN else found


def run_job(run: Run, options: RunOptions) -> Trained:
    """Run a plan in its folder until the job's ticks are done, interrupted, or it fails."""
    job, drawn, folder, record, since = run.job, run.plan, run.folder, run.record, run.start
    steps = steps_a_tick(drawn)
    (folder / "plan.txt").write_text(f"{drawn}\n", encoding="utf-8")
    write_whole(folder / "plan.json", as_json(with_sources(drawn.to_json())).encode())
    if options.announce is not None:
        options.announce(str(drawn))
    summary: dict[str, Any] = {
        "algorithm": job.title, "env": job.env_name, "distribution_policy": drawn.distribution.name,
        "backend": record["backend"], "seed": record["seed"], "envs": job.envs,
        "status": "running", "ticks": 0, "env_steps": 0, "seconds": 0.0, "compile_seconds": 0.0,
        "env_steps_per_second": None, "episodes": 0, "return_mean": None, "jax": jax.__version__,
    }  # fmt: skip
    if rate := job.learning_rate:
        extended = {"extended": record.get("extended")} if record.get("extended") else {}
        summary["learning_rate"] = rate | extended
    with owned() as owner, owner.job(), ExitStack() as stack:
        stack.enter_context(recorded(folder, summary))
        write_json(folder / "run.json", record)
        if any(code_in(named := recipes_of(record))):
            remember(folder / "run.json", named)
        log = stack.enter_context(Lines(folder / "workers.log", lambda line: None))
        progress = Progress(job.ticks, steps, shown=options.progress)
        stack.enter_context(progress)

        def say(line: str) -> None:
            log.add(line)
            progress.say(line)

        for remark in job.remarks:
            say(remark)
        lines = stack.enter_context(Lines(folder / "metrics.jsonl", say))
        checkpoints = Checkpoints(folder / "checkpoints", record["keep"], say)
        stack.callback(checkpoints.wait)
        outlets = _outlets(run, options, say)
        stack.callback(outlets.feeds.close)
        logger = RunLogger(lines, progress, drawn, summary, since.progress, outlets)
        stack.callback(logger.close)
        saving = Saving(checkpoints, logger, pace(record["checkpoint_every"]))
        recovery = _recovery(drawn.graph, record, summary, say)
        with listening(say), environments_closed(), recording(spans=options.records):
            result = _run(drawn, record, since, saving, recovery)
            if not result.stopped_by:
                _evaluate_last(job, result, logger)
                _measure_last(drawn, result, logger.spans, options.profile_ticks or 0)
        _finish(summary, result, logger)
        summary.update(_unsaved(checkpoints, result.ticks))
    agent = Agent.of(job.algorithm, job.env, result.state, result.ticks)
    return Trained(result.state, summary, folder, drawn, agent)


def _evaluate_last(job: Job, result: Result, logger: RunLogger) -> None:
    """Evaluate what a run has learnt when it ends, if it is evaluated at all."""
    if isinstance(job.algorithm, Evaluated):
        logger.look(result.ticks, job.algorithm.last(job.env, result.state))


def _measure_last(drawn: Plan, result: Result, spans: SpanLog, ticks: int) -> None:
    """Measure the stages of one program when a run ends, in more ticks of it, if that is wanted."""
    if ticks and spans.is_one_program:
        spans.measured_inside(measure_stages(drawn, result.snapshot, ticks))


def _recovery(graph: Graph, record: RunFile, summary: dict[str, Any], say: Log) -> RecoveryPolicy:
    """How the run continues after a worker is lost; losses are reported and counted."""

    def restarted(error: LostError, tick: int) -> None:
        summary["restarts"] = summary.get("restarts", 0) + 1
        say(f"{error.what}; continuing from tick {tick}")

    def replaced(loss: WorkerFailure) -> None:
        if loss.is_new:
            summary["replaced"] = summary.get("replaced", 0) + 1
        else:
            say(str(loss))

    fresh = partial(with_new_episodes, graph, record["seed"])
    times = record.get("replaces", RESTARTS)
    return RecoveryPolicy(
        record.get("restarts", 0),
        on_failure=restarted,
        fresh=fresh,
        replaced=replaced,
        replaces=times,
        say=say,
    )


def _run(
    drawn: Plan, record: RunFile, since: StartPoint, saving: Saving, recovery: RecoveryPolicy
) -> Result:
    """Run, and write a final checkpoint however the run ends."""
    logger = saving.logger
    watch = RunCallbacks(
        logger.see,
        saving.due,
        saving.keep,
        logger.look,
        logger.status.stand,
        spans=logger.spans.read,
        last_spans=logger.spans.last,
        scale=logger.status.scale,
        stops=logger.callbacks.is_stopped,
        step_timeout=record.get("step_timeout"),
    )
    backend, ticks = record["backend"], record["ticks"]
    try:
        result = recovery.run(drawn, backend, ticks=ticks, state=since.start(), watch=watch)
    except Exception as error:
        if isinstance(last := getattr(error, "snapshot", None), Snapshot):
            saving.last(last)
        raise
    check_no_nan(result)
    saving.last(result.snapshot)
    return result


def check_no_nan(result: Result) -> None:
    """Refuse to call a run done whose state has become NaN, even if no metric has shown it."""
    for name, value in result.snapshot.values.items():
        if name.split(".")[0] in OF_ENVIRONMENTS or not jnp.issubdtype(value.dtype, np.inexact):
            continue
        if np.isnan(np.asarray(value)).any():
            raise NotFiniteError(
                f"`{name}` is NaN after tick {result.ticks - 1}, and no metric has shown it",
                "Lower the learning rate, look for a division by 0, and show a metric that would "
                "be NaN too, such as the loss; the checkpoints before this one are kept.",
                "",
                result.ticks,
            )


class Outlets(NamedTuple):
    """Whom a run reports to beside its folder: functions of the user, and sinks."""

    callbacks: Callbacks
    feeds: Feeds
    spans: SpanLog


class RunLogger:
    """Logs a run: a row a tick, the summary, and the counts that a checkpoint keeps."""

    def __init__(
        self,
        lines: Lines,
        progress: Progress,
        drawn: Plan,
        summary: dict[str, Any],
        counted: Mapping[str, Any],
        outlets: Outlets,
    ) -> None:
        self._lines, self._progress, self._summary = lines, progress, summary
        self._steps, self._began = steps_a_tick(drawn), time.perf_counter()
        self._first, self.tick = counted.get("tick", 0), counted.get("tick", 0)
        self._steps_before = counted.get("env_steps", 0)
        self.before: float = counted.get("seconds", 0.0)  # seconds of running before it was resumed
        self.callbacks, self._feeds, self.spans = outlets
        self.resumed = list(counted.get("resumed", []))
        self.episodes = Episodes.of(counted.get("episodes", {}))
        self.lags = Lags.of(counted.get("lags", {}), lag_name(drawn.graph))
        self.status = Status(lines.path.parent, summary, progress.say, self.lags.summary)
        seen = lines.path.with_name("evaluation.jsonl")
        self._evaluations = Evaluations(seen, self.steps_before, progress.say)
        self._by_tick: dict[int, dict[str, Any]] = {}
        self.awaits = False  # whether a snapshot is to come, of a tick not known yet

    def close(self) -> None:
        """Close the files of the log."""
        self.status.close()
        self._evaluations.close()

    @property
    def is_behind(self) -> bool:
        """Whether there are rows that found no room."""
        return self._lines.is_behind

    @property
    def env_steps(self) -> int:
        """Steps of all environments so far."""
        return self.steps_before(self.tick)

    def steps_before(self, tick: int) -> int:
        """Steps of all environments before a tick."""
        return self._steps_before + (tick - self._first) * self._steps

    @property
    def seconds(self) -> float:
        """Seconds of running, without those between a stop and a resume."""
        return self.before + time.perf_counter() - self._began

    @property
    def rate(self) -> int:
        """Steps of all environments in a tick."""
        return self._steps

    def see(self, tick: int, metrics: Mapping[str, np.ndarray]) -> None:
        """Log a tick."""
        self.look(tick, metrics)
        metrics = without_evaluation(metrics)
        if self.awaits or tick % KEEP_EVERY == 0:  # the ticks that a failed run goes back to
            self._by_tick[tick] = self.counts()
            if len(self._by_tick) > (AWAITED if self.awaits else REMEMBERED):
                del self._by_tick[next(iter(self._by_tick))]
        self.episodes.see(metrics)
        self.lags.see(metrics)
        self.tick = tick + 1
        row = {"tick": tick, "env_steps": self.env_steps, "seconds": round(self.seconds, 4)}
        row |= scalars(metrics, self.lags.name) | {"return_mean": self.episodes.mean}
        self._lines.add(as_json(row))
        mean, count = self.episodes.mean, self.episodes.total
        self._summary.update(ticks=self.tick, return_mean=mean, episodes=count)
        self._summary.update({name: row[name] for name in ("env_steps", "seconds")})
        self._progress.see(tick, mean, self.env_steps)
        self._feeds.tick(row)
        self.callbacks.tick(row)

    def look(self, tick: int, metrics: Mapping[str, np.ndarray]) -> None:
        """Log an evaluation, if there was one."""

        def show(tick: int, mean: float) -> None:
            self._progress.look(tick, mean)
            self._feeds.evaluation(self._evaluations.newest)
            self.callbacks.evaluation(self._evaluations.newest)

        self._summary.update(self._evaluations.see(tick, metrics, show))

    def counts(self, tick: int = -1) -> dict[str, Any]:
        """What a checkpoint keeps of the run so far; `tick` may be a little ago."""
        behind = self.tick - tick if tick >= 0 else 0
        return {
            "env_steps": self.env_steps - behind * self._steps, "seconds": round(self.seconds, 4),
            "return_mean": self.episodes.mean, "resumed": self.resumed,
            "episodes": self.episodes.plain(), "lags": self.lags.plain(),
        }  # fmt: skip

    def counts_at(self, tick: int) -> dict[str, Any] | None:
        """What was counted before a tick; None if that isn't known any more, or not yet."""
        return self.counts() if tick == self.tick else self._by_tick.get(tick)


class Saving:
    """When checkpoints are due, and what goes into them."""

    def __init__(self, checkpoints: Checkpoints, logger: RunLogger, every: Pace) -> None:
        self._checkpoints, self.logger, self._pace = checkpoints, logger, every
        self._last, self._when = logger.tick, time.monotonic()

    def due(self, tick: int) -> int | None:
        """Before which tick the next is wanted, once it is time; never two at once."""
        self._report()
        if self._checkpoints.is_writing:
            return None
        late = self._pace.seconds and time.monotonic() - self._when >= self._pace.seconds
        due = max(tick, self._last + self._pace.ticks)
        if self.logger.is_behind:  # a checkpoint without the rows before it would be of no use
            if late or (self._pace.ticks and due == tick):
                self._checkpoints.refuse(tick)
                self._last, self._when = tick, time.monotonic()
            return None
        self.logger.awaits = bool(self._pace.ticks or late)
        return due if self.logger.awaits else None

    def keep(self, snapshot: Snapshot) -> None:
        """Write a snapshot, unless the one before is still being written."""
        if not self._checkpoints.is_writing:
            self.end(snapshot)

    def end(self, snapshot: Snapshot) -> None:
        """Write a snapshot with its counts, after those that are being written."""
        counts = self.logger.counts_at(snapshot.tick)
        if counts is None and snapshot.tick < self.logger.tick:
            # Asynchronous replicas gave their parts later than that.
            counts = self.logger.counts(snapshot.tick)
        if counts is not None and snapshot.tick not in ticks_in(self._checkpoints.folder):
            self._checkpoints.write(snapshot, counts)
        self.logger.awaits = False
        self._last, self._when = snapshot.tick, time.monotonic()

    def last(self, snapshot: Snapshot) -> None:
        """Write the snapshot that a run ends with, and wait until it is there."""
        self.end(snapshot)
        self._checkpoints.wait()
        self._report()

    def _report(self) -> None:
        """Report the checkpoints that have become complete."""
        for folder in self._checkpoints.written():
            self.logger.callbacks.checkpoint(folder)


def _finish(summary: dict[str, Any], result: Result, logger: RunLogger) -> None:
    summary.update(
        status="interrupted" if result.stopped_by else "done",
        ticks=result.ticks,
        env_steps=logger.env_steps - (logger.tick - result.ticks) * logger.rate,
        seconds=round(logger.seconds, 3),
        compile_seconds=round(result.compile_seconds, 3),
        env_steps_per_second=steps_per_second(
            logger.rate, result.ticks - result.first, result.seconds
        ),
        episodes=logger.episodes.total,
        return_mean=logger.episodes.mean,
    )
    summary.update(logger.lags.summary())
    summary.update(_sent(result))
    if name := logger.callbacks.stopped_by:
        summary["stopped_by"] = name
    if result.stopped_by:
        summary["signal"] = signal.Signals(result.stopped_by).name
    if logger.resumed:
        summary["resumed"] = logger.resumed


def steps_per_second(steps: int, ticks: int, seconds: float) -> float | None:
    """The rate of ticks with `steps` steps each; None if they took too short a time to measure.

    The first is compiled before it runs, and the seconds are those after it.
    """
    return round(steps * (ticks - 1) / seconds, 1) if steps and seconds >= MEASURED else None


def _unsaved(checkpoints: Checkpoints, tick: int) -> dict[str, Any]:
    """How many checkpoints could not be written, and what is lost if the last is one of them."""
    counts = {"checkpoints_not_written": len(checkpoints.failed)} if checkpoints.failed else {}
    lost = checkpoints.lost(tick)
    return counts | ({"lost": lost} if lost else {})


def _sent(result: Result) -> dict[str, int]:
    """Bytes that went between hosts in the whole run."""
    return {"bytes_sent": sum(result.sent.values())} if result.sent else {}


def with_new_episodes(graph: Graph, seed: int, snapshot: Snapshot) -> Snapshot:
    """The snapshot, with new episodes where environments could not be saved."""
    if not any(stage.host for stage in graph.stages):
        return snapshot
    values = restart_hosts(graph.origin, snapshot.values, graph.envs, seed + snapshot.tick)
    return replace(snapshot, values=values)


@contextmanager
def environments_closed() -> Iterator[None]:
    """Close what Python environments this process has opened, whatever happens."""
    try:
        yield
    finally:
        if host := sys.modules.get("shoal.envs.host"):
            host.close_all()
