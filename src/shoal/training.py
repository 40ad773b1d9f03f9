"""The whole way in one call: trace, plan, run, and leave a folder with what came of it."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

import jax
import numpy as np

from shoal import envs as environments
from shoal.algorithms import ALGORITHMS, PRESETS, Preset
from shoal.errors import NotFiniteError, SettingError, ShoalError, UnknownNameError
from shoal.graph.ir import Graph, Stage, loops
from shoal.planning.cluster import Cluster
from shoal.planning.homes import Sites
from shoal.planning.laws import make_plan
from shoal.planning.plan import Plan
from shoal.planning.policies import fused
from shoal.planning.policy import DistributionPolicy
from shoal.progress import Progress
from shoal.runtime.machine import this_machine
from shoal.runtime.run import Result, check_backend, run
from shoal.runtime.verify import Verification, verify_plan
from shoal.tracing.trace import trace

LAST_EPISODES = 100
RUNNING: dict[Path, dict[str, Any]] = {}  # folders of runs under way, and their summaries so far


class How(TypedDict, total=False):
    """How to train, beyond what and where: everything has a default."""

    ticks: int
    envs: int
    backend: str
    seed: int
    cluster: Cluster
    folder: str | Path
    name: str
    progress: bool
    announce: Callable[[str], None]


@dataclass(frozen=True)
class Trained:
    """What training leaves: the final state, the summary, and the folder that holds both."""

    state: Any
    summary: dict[str, Any]
    folder: Path
    plan: Plan


def plan(graph: Graph, distribution: DistributionPolicy, cluster: Cluster | None = None) -> Plan:
    """How `graph` runs on `cluster`, or on this machine, when distributed by `distribution`."""
    return make_plan(graph, distribution, cluster or this_machine())


def train(
    algorithm: Any, env: Any, distribute: DistributionPolicy | None = None, **how: Unpack[How]
) -> Trained:
    """Train `algorithm` on `env`, both by name or as objects; without `distribute`, fused.

    A preset fills in what isn't said where there is one. The folder `runs/<name>` gets
    `summary.json`, `metrics.jsonl`, `plan.txt` and `state.npz`, also when the run is interrupted
    or fails.
    """
    job = make_job(algorithm, env, how)
    check_backend(how.get("backend", "threads"))
    distribution = distribute or fused()
    ensure_devices(distribution)
    drawn = plan(trace(job.algorithm, job.env, envs=job.envs), distribution, how.get("cluster"))
    folder = new_folder(
        Path(how.get("folder", "runs")), how.get("name", ""), f"{job.title}-{job.env_name}"
    )
    return _train(job, drawn, folder, how)


def verify(
    algorithm: Any, env: Any, distribute: DistributionPolicy, **how: Unpack[How]
) -> Verification:
    """Whether `algorithm` gives the same numbers under `distribute` as fused, after some ticks."""
    job = make_job(algorithm, env, {"ticks": 3, **how})
    ensure_devices(distribute)
    graph = trace(job.algorithm, job.env, envs=job.envs)
    state = graph.origin.start(how.get("seed", 0), job.envs)
    drawn = plan(graph, distribute, how.get("cluster"))
    return verify_plan(drawn, how.get("backend", "threads"), ticks=job.ticks, state=state)


@dataclass(frozen=True)
class Job:
    """What to train, with names turned into objects and presets filled in."""

    algorithm: Any
    env: Any
    envs: int
    ticks: int

    @property
    def title(self) -> str:
        """The algorithm's name, in small letters."""
        return type(self.algorithm).__name__.lower()

    @property
    def env_name(self) -> str:
        """The environment's name."""
        own = "none" if self.env is None else type(self.env).__name__
        return str(getattr(self.env, "name", "") or own)


def find_preset(algorithm: str, env: Any) -> Preset | None:
    """Settings known to learn, if there are any for this pair of names."""
    name = env.rpartition(":")[2] if isinstance(env, str) else ""
    return PRESETS.get(algorithm, {}).get(name)


def make_job(algorithm: Any, env: Any, how: Mapping[str, Any]) -> Job:
    """Names to objects; a preset gives the settings, environments and ticks that aren't said."""
    preset = None
    if isinstance(algorithm, str):
        if algorithm not in ALGORITHMS:
            raise UnknownNameError("algorithm", algorithm, ALGORITHMS)
        preset = find_preset(algorithm, env)
        algorithm = preset.algorithm if preset else ALGORITHMS[algorithm]()
    made = environments.make(env) if isinstance(env, str) else env
    said = {name: how[name] for name in ("envs", "ticks") if how.get(name) is not None}
    for name, count in said.items():
        if count < 1:
            raise SettingError(f"{name}={count} is too few", f"Set {name} to 1 or more.")
    ticks = said.get("ticks", preset.ticks if preset else 100)
    if preset and getattr(algorithm, "total_ticks", None):
        # The preset's schedule is meant to end with the run, however long that is.
        algorithm = replace(algorithm, total_ticks=ticks)
    return Job(algorithm, made, said.get("envs", preset.envs if preset else 16), ticks)


def ensure_devices(distribution: DistributionPolicy) -> None:
    """Give JAX as many CPU devices as one program wants, if it hasn't begun and there are cores."""
    wanted = max((f.replicas for f in distribution.fragments if f.on != "cpu"), default=1)
    if wanted > 1:
        with suppress(RuntimeError):  # JAX has begun: it has the devices it has
            jax.config.update("jax_num_cpu_devices", min(wanted, os.cpu_count() or 1))


@dataclass
class Episodes:
    """Returns of the newest episodes, a tick's worth at a time."""

    newest: deque[tuple[float, float]] = field(default_factory=deque)
    total: int = 0

    def see(self, metrics: Mapping[str, Any]) -> None:
        """Add the episodes that ended in a tick, and forget those beyond the last hundred."""
        count = float(np.sum(metrics.get("episodes", 0)))
        if not count:
            return
        self.total += int(count)
        self.newest.append((count, float(np.sum(metrics["episode_return"]))))
        while sum(n for n, _ in self.newest) - self.newest[0][0] >= LAST_EPISODES:
            self.newest.popleft()

    @property
    def mean(self) -> float | None:
        """The mean return of at least the last hundred episodes (fewer if there were fewer)."""
        count = sum(n for n, _ in self.newest)
        return sum(r for _, r in self.newest) / count if count else None


def env_steps_a_tick(graph: Graph) -> int:
    """How many steps each environment makes in a tick."""
    sites = Sites(graph, frozenset(loop.name for loop in loops(graph)))
    stages = [n for n in sites.nodes.values() if isinstance(n, Stage) and n.stage == "env"]
    return sum(sites.times[n.writes[0]] for n in stages)


def new_folder(root: Path, name: str, title: str) -> Path:
    """A folder of its own for a run: named as said, or numbered after what is trained."""
    plain = title.replace(":", "-").replace("/", "-")
    if name:
        folder = root / name
        if (folder / "summary.json").exists():
            raise SettingError(
                f"{folder} already holds a run", "Choose another name, or remove it."
            )
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    for number in range(1, 1_000_000):
        folder = root / f"{plain}-{number}"
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise SettingError(f"{root} is full", "Remove old runs.")


def _train(job: Job, drawn: Plan, folder: Path, how: How) -> Trained:
    seed, backend = how.get("seed", 0), how.get("backend", "threads")
    steps = env_steps_a_tick(drawn.graph) * drawn.seen
    episodes, began = Episodes(), time.perf_counter()
    (folder / "plan.txt").write_text(f"{drawn}\n", encoding="utf-8")
    how.get("announce", lambda text: None)(str(drawn))
    summary: dict[str, Any] = {
        "algorithm": job.title, "env": job.env_name, "distribution_policy": drawn.distribution.name,
        "backend": backend, "seed": seed, "envs": job.envs,
        "status": "running", "ticks": 0, "env_steps": 0, "seconds": 0.0, "compile_seconds": 0.0,
        "env_steps_per_second": 0.0, "episodes": 0, "return_mean": None, "jax": jax.__version__,
    }  # fmt: skip
    with (
        _recorded(folder, summary),
        open(folder / "metrics.jsonl", "w", buffering=1, encoding="utf-8") as lines,
        Progress(job.ticks, steps, shown=how.get("progress", False)) as progress,
    ):

        def watch(tick: int, metrics: Mapping[str, np.ndarray]) -> None:
            episodes.see(metrics)
            row = {
                "tick": tick,
                "env_steps": (tick + 1) * steps,
                "seconds": round(time.perf_counter() - began, 4),
            }
            lines.write(json.dumps(row | scalars(metrics) | {"return_mean": episodes.mean}) + "\n")
            summary.update(ticks=tick + 1, return_mean=episodes.mean, episodes=episodes.total)
            summary.update({name: row[name] for name in ("env_steps", "seconds")})
            progress.see(tick, episodes.mean)

        state = drawn.graph.origin.start(seed, job.envs)
        result = run(drawn, backend, ticks=job.ticks, state=state, watch=watch)
        _finish(summary, result, steps, episodes)
        save_values(folder / "state.npz", result.values)
    return Trained(result.state, summary, folder, drawn)


@contextmanager
def _recorded(folder: Path, summary: dict[str, Any]) -> Iterator[None]:
    """Leave a valid folder whatever happens: why the run failed, and the last good state."""
    RUNNING[folder] = summary
    write_json(folder / "summary.json", summary)
    try:
        yield
    except KeyboardInterrupt:
        summary.update(status="interrupted")
        raise
    except BaseException as error:
        what = error.what if isinstance(error, ShoalError) else f"{type(error).__name__}: {error}"
        summary.update(status="failed", error=what)
        if isinstance(error, NotFiniteError) and isinstance(error.state, dict):
            summary["ticks"] = error.tick
            save_values(folder / "state.npz", error.state)
        raise
    finally:
        write_json(folder / "summary.json", summary)
        del RUNNING[folder]


def mark_interrupted() -> None:
    """Say in the folders of all runs under way that they end here, before leaving at once."""
    for folder, summary in list(RUNNING.items()):
        write_json(folder / "summary.json", summary | {"status": "interrupted"})


def _finish(summary: dict[str, Any], result: Result, steps: int, episodes: Episodes) -> None:
    # The first tick is compiled before it runs; steps per second are of the ticks after it.
    rate = (
        steps * (result.ticks - 1) / result.seconds
        if result.ticks > 1 and result.seconds > 0
        else 0.0
    )
    summary.update(
        status="interrupted" if result.interrupted else "done",
        ticks=result.ticks,
        env_steps=steps * result.ticks,
        seconds=round(result.compile_seconds + result.seconds, 3),
        compile_seconds=round(result.compile_seconds, 3),
        env_steps_per_second=round(rate, 1),
        episodes=episodes.total,
        return_mean=episodes.mean,
    )


def scalars(metrics: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Metrics as numbers: rows are summed."""
    return {name: round(float(np.sum(x)), 6) for name, x in metrics.items()}


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a file whole or not at all."""
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    draft.replace(path)


def save_values(path: Path, values: Mapping[str, Any]) -> None:
    """Carried values by name, as plain arrays; keys as their data."""
    plain = {}
    for name, x in values.items():
        is_key = jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)
        plain[name] = np.asarray(jax.random.key_data(x) if is_key else x)
    draft = path.with_name(f"{path.stem}.tmp.npz")
    np.savez(draft, **plain)
    draft.replace(path)
