"""Trace, plan and run in one call, with the results in a run folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import jax

from shoal import envs as environments
from shoal.algorithms import ALGORITHMS, PRESETS, Preset
from shoal.algorithms.evaluated import STAGE, Evaluated
from shoal.compile_cache import use_compile_cache
from shoal.errors import PlaceError, SettingError, UnknownNameError
from shoal.graph.ir import Graph
from shoal.planning.cluster import Cluster
from shoal.planning.laws import make_plan
from shoal.planning.plan import Plan
from shoal.planning.policies import POLICIES, fused, single_learner_coarse, with_observer
from shoal.planning.policy import DistributionPolicy
from shoal.roles import with_roles
from shoal.runs.folder import locked, new_folder
from shoal.runs.job import StartPoint, Trained, run_job
from shoal.runs.options import TrainOptions, check_options, shown, with_options
from shoal.runs.records import check_metrics
from shoal.runtime.cluster.machine import this_machine
from shoal.runtime.debug.verify import Verification, verify_plan
from shoal.runtime.run import BACKENDS, check_backend, check_step_timeout, fresh_start
from shoal.tracing.frozen import check_not_frozen
from shoal.tracing.stage import source_of
from shoal.tracing.trace import method, trace


def plan(graph: Graph, distribution: DistributionPolicy, cluster: Cluster | None = None) -> Plan:
    """The plan of `graph` on `cluster`, or on this machine, under `distribution`."""
    if graph.origin is not None:
        judged = isinstance(graph.origin.algorithm, Evaluated)
        where = source_of(method(graph.origin.algorithm, "tick"))
        check_metrics([m.outer for m in graph.metrics], where, judged=judged)
    if cluster is None:
        cluster = check_devices(distribution, this_machine())
    return make_plan(graph, with_roles(graph, distribution), cluster)


def check_devices(distribution: DistributionPolicy, machine: Cluster) -> Cluster:
    """`machine`, if it has the devices that a distribution policy is meant for."""
    kind = "gpu" if machine.places("gpu") else "cpu"
    count = len(machine.places(kind))
    if distribution.devices > count:
        raise PlaceError(
            f"{distribution.name} is to use {distribution.devices} devices, "
            f"and this machine has {count} ({kind})",
            f"Use at most {count}; JAX_NUM_CPU_DEVICES lets JAX divide cores into more.",
        )
    return machine


def cluster_of(how: Mapping[str, Any]) -> Cluster | None:
    """The cluster that a run is to use, where one is given or the backend has its own."""
    find_cluster = BACKENDS[check_backend(how.get("backend", "threads"))].find_cluster
    if find_cluster is not None and how.get("cluster") is None:
        return find_cluster(how.get("address", ""))
    return how.get("cluster")


@with_options(TrainOptions)
def train(
    algorithm: Any,
    env: Any = None,
    distribute: DistributionPolicy | str | None = None,
    **how: Unpack[TrainOptions],
) -> Trained:
    """Train `algorithm` on `env`, both by name or as objects; without `distribute`, fused.

    A loop that has no environments, or its own, has `env=None`; `envs` then is how many rows it
    has (by default its setting `envs` if there is one), and its `init` and `tick` get None.
    A preset, where there is one, fills in what isn't given. The folder `runs/<name>` gets
    `summary.json`, `metrics.jsonl`, `plan.txt`, and checkpoints that `resume` continues from, also
    when the run is interrupted or fails; and `evaluation.jsonl` if it is evaluated.
    """
    use_compile_cache()
    job = make_job(algorithm, env, how)
    check_backend(how.get("backend", "threads"))
    distribution = check_distribution(distribute) or default_distribution(job.env)
    distribution = beside_evaluation(job, distribution)
    ensure_devices(distribution)
    graph = trace(job.algorithm, job.env, envs=job.envs)
    check_not_frozen(graph.origin, job.envs)
    drawn = plan(graph, distribution, cluster_of(how))
    check_step_timeout(drawn, how.get("backend", "threads"), how.get("step_timeout"))
    folder = new_folder(Path(how.get("folder", "runs")), how.get("name"), job.name)
    with locked(folder):
        since = StartPoint(lambda: fresh_start(drawn.graph, how.get("seed", 0)), {})
        return run_job(job, drawn, folder, how, since)


@with_options(TrainOptions)
def verify(
    algorithm: Any,
    env: Any = None,
    distribute: DistributionPolicy | str | None = None,
    **how: Unpack[TrainOptions],
) -> Verification:
    """Whether `algorithm` gives the same numbers under `distribute` as fused, after some ticks."""
    use_compile_cache()
    job = make_job(algorithm, env, {"ticks": 3, **how})
    distribution = check_distribution(distribute) or default_distribution(job.env)
    ensure_devices(distribution)
    graph = trace(job.algorithm, job.env, envs=job.envs)
    check_not_frozen(graph.origin, job.envs)
    drawn = plan(graph, distribution, cluster_of(how))
    state = graph.origin.start(how.get("seed", 0), job.envs)
    return verify_plan(drawn, how.get("backend", "threads"), ticks=job.ticks, state=state)


@dataclass(frozen=True)
class Job:
    """What to train, with names turned into objects and presets filled in."""

    algorithm: Any
    env: Any
    envs: int
    ticks: int

    @property
    def trained(self) -> Any:
        """The algorithm itself, without the wrapper that evaluates it."""
        is_wrapped = isinstance(self.algorithm, Evaluated)
        return self.algorithm.algorithm if is_wrapped else self.algorithm

    @property
    def title(self) -> str:
        """The algorithm's name in lower case."""
        return type(self.trained).__name__.lower()

    @property
    def anneals(self) -> bool:
        """Whether the learning rate falls to 0 with the run's last tick."""
        return bool(getattr(self.trained, "anneal_lr", False))

    @property
    def learning_rate(self) -> dict[str, Any]:
        """The learning rate at the first tick, and after the last; empty where it isn't known."""
        rate = getattr(self.trained, "learning_rate", None)
        if not isinstance(rate, float | int):
            return {}
        if self.anneals:
            return {"initial": rate, "final": 0.0, "total_ticks": self.ticks}
        return {"initial": rate, "final": rate}

    @property
    def name(self) -> str:
        """The title of its runs."""
        return self.title if self.env is None else f"{self.title}-{self.env_name}"

    @property
    def env_name(self) -> str:
        """The environment's name."""
        own = "none" if self.env is None else type(self.env).__name__
        return str(getattr(self.env, "name", "") or own)


def check_distribution(given: Any) -> DistributionPolicy | None:
    """The distribution policy that is given, as an object or by the name of a published one."""
    if given is None or isinstance(given, DistributionPolicy):
        return given
    if isinstance(given, str):
        name = given.replace("-", "_")
        if name not in POLICIES:
            known = [known.replace("_", "-") for known in POLICIES]
            raise UnknownNameError("distribution policy", given, known)
        return POLICIES[name]()
    called = f", called: shoal.{given.__name__}()" if given in POLICIES.values() else ""
    raise SettingError(
        f"{shown(given)} is no distribution policy",
        f"Give one{called or ' such as shoal.impala(actors=2)'}, or its name.",
    )


def check_env(algorithm: Any, env: Any) -> Any:
    """`env`, unless it is an object of Gymnasium's or what an algorithm of Shoal's can't step."""
    kinds = [kind.__module__.partition(".")[0] for kind in type(env).__mro__]
    title = type(env).__name__
    if found := {"gymnasium", "gym"} & set(kinds):
        spec = getattr(getattr(env, "spec", None), "id", "") or "CartPole-v1"
        raise SettingError(
            f"the environment is a {title}, an object of {found.pop()}, and Shoal makes one for "
            "each row of each worker itself",
            f'Name it: "gymnasium:{spec}". Your own: register it in a module of yours, and name it '
            '"gymnasium:my_module:MyEnv-v0".',
        )
    acts = getattr(algorithm, "actions", None) is not None
    if acts and not all(hasattr(env, name) for name in ("reset", "step", "action_space")):
        raise SettingError(
            f"the environment is a {title}, which has no reset, step and action_space",
            'Name one, such as "CartPole-v1", or give a shoal.envs.Environment.',
        )
    return env


def find_preset(algorithm: str, env: Any) -> Preset | None:
    """Settings known to learn, if there are any for this pair of names."""
    full = env if isinstance(env, str) else str(getattr(env, "name", ""))
    name = full.rpartition(":")[2]
    return PRESETS.get(algorithm, {}).get(name)


def make_job(algorithm: Any, env: Any, how: Mapping[str, Any]) -> Job:
    """Turn names into objects; a preset gives the settings, environments and ticks not given."""
    how, preset = check_options(how, TrainOptions, "shoal.train"), None
    if isinstance(algorithm, str):
        if algorithm not in ALGORITHMS:
            raise UnknownNameError("algorithm", algorithm, ALGORITHMS)
        preset = find_preset(algorithm, env)
        algorithm = preset.algorithm if preset else ALGORITHMS[algorithm]()
    made = environments.make(env) if isinstance(env, str) else env
    check_needed(algorithm, made, how)
    if made is not None:
        check_env(algorithm, made)
    check_actions(algorithm, made)
    ticks = how.get("ticks", preset.ticks if preset else 100)
    algorithm = with_total_ticks(check_total_ticks(algorithm, ticks), ticks)
    if how.get("evaluate"):
        algorithm = Evaluated(algorithm, every=how["evaluate"])
    own = getattr(algorithm, "envs", None) if made is None else None
    usual = preset.envs if preset else own if isinstance(own, int) else 16
    return Job(algorithm, made, how.get("envs", usual), ticks)


def check_total_ticks(algorithm: Any, ticks: int) -> Any:
    """`algorithm`, unless it anneals over another length than that of the run."""
    said = getattr(algorithm, "total_ticks", None)
    if said and said != ticks and getattr(algorithm, "anneal_lr", True):
        raise SettingError(
            f"total_ticks={said} of {type(algorithm).__name__}, and the run has {ticks} ticks",
            "Leave total_ticks out: it is the length of the run, which fills it in.",
        )
    return algorithm


def with_total_ticks(algorithm: Any, ticks: int) -> Any:
    """`algorithm` with the length of the run, if its schedules need it."""
    if isinstance(algorithm, Evaluated):
        return replace(algorithm, algorithm=with_total_ticks(algorithm.algorithm, ticks))
    settings: list[str] = [f.name for f in fields(algorithm)] if is_dataclass(algorithm) else []
    if "total_ticks" not in settings:
        return algorithm
    known: Any = algorithm
    return replace(known, total_ticks=ticks)


def check_needed(algorithm: Any, env: Any, how: Mapping[str, Any]) -> None:
    """Refuse a missing environment where one is needed, to act in or for an evaluation."""
    if env is not None:
        return
    title = type(algorithm).__name__
    if getattr(algorithm, "actions", None) is not None:
        raise SettingError(f"{title} acts in an environment, and none is named", "Name one.")
    if how.get("evaluate"):
        raise SettingError(
            f"{title} has no environment, so there is nothing to play for an evaluation",
            "Leave the evaluation out, and show what matters as a metric.",
        )


def check_actions(algorithm: Any, env: Any) -> None:
    """Refuse an algorithm that can't act in this environment, and name those that can.

    An algorithm that doesn't say where it can act is checked only when it is traced.
    """
    space = getattr(env, "action_space", None)
    inner = [each for _, each in space.spaces] if isinstance(space, environments.Groups) else []
    spaces, team = [space, *inner], bool(getattr(env, "agents", ()) or inner)
    known: tuple[type, ...] | None = getattr(algorithm, "actions", None)
    title, name = type(algorithm).__name__, getattr(env, "name", type(env).__name__)
    if known is None or space is None:
        return
    able = {n: all(isinstance(s, kind.actions) for s in spaces) for n, kind in ALGORITHMS.items()}
    others = [n for n, kind in ALGORITHMS.items() if able[n] and _trains(kind, team=team)]
    fix = f"Algorithms that can: {', '.join(others)}." if others else "No algorithm here can."
    if not all(isinstance(s, known) for s in spaces):
        acts = " or ".join(s.__name__ for s in known)
        what = f"its actions are {space}, and {title} acts in {acts} only"
        raise SettingError(f"{title} can't act in {name}: {what}", fix)
    if not _trains(algorithm, team=team):
        has, trains = ("several agents", "one") if team else ("one agent", "several")
        what = f"it has {has}, and {title} trains {trains}"
        raise SettingError(f"{title} can't act in {name}: {what}", fix)


def _trains(algorithm: Any, *, team: bool) -> bool:
    """Whether an algorithm trains several agents, or one alone."""
    return getattr(algorithm, "agents", "any") in ("any", "several" if team else "one")


def default_distribution(env: Any) -> DistributionPolicy:
    """Everything in one program, unless the environments are Python's: then they are apart."""
    is_python = isinstance(env, environments.HostEnvironment)
    return single_learner_coarse(actors=1) if is_python else fused()


def beside_evaluation(job: Job, distribution: DistributionPolicy) -> DistributionPolicy:
    """With an asynchronous fragment that evaluates, unless all is to be one program."""
    names = {name for fragment in distribution.fragments for name in fragment.stages}
    is_apart = len(distribution.fragments) > 1 and STAGE not in names
    evaluates = isinstance(job.algorithm, Evaluated)
    return (
        with_observer(distribution, "evaluator", STAGE) if evaluates and is_apart else distribution
    )


def ensure_devices(distribution: DistributionPolicy) -> None:
    """Give JAX the CPU devices that one program needs, unless JAX is initialised already."""
    wanted = max((f.most for f in distribution.fragments if f.on != "cpu"), default=1)
    if wanted > 1:
        with suppress(RuntimeError):  # JAX is initialised: its devices are fixed
            jax.config.update("jax_num_cpu_devices", min(wanted, os.cpu_count() or 1))
