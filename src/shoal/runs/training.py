"""Trace, plan and run in one call, with the results in a run folder."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import jax

from shoal.algorithms.evaluated import STAGE, Evaluated
from shoal.compile_cache import use_compile_cache
from shoal.errors import PlaceError, SettingError
from shoal.graph.ir import Graph
from shoal.planning.cluster import Cluster
from shoal.planning.laws import make_plan
from shoal.planning.plan import Plan
from shoal.planning.policies import fused, with_observer
from shoal.planning.policy import DistributionPolicy
from shoal.roles import steps_a_tick, with_roles
from shoal.runs.choosing import (
    AUTO,
    ChoiceOptions,
    automatic,
    choice_for,
    is_on,
    simulated,
)
from shoal.runs.files.folder import locked, new_folder
from shoal.runs.files.records import check_metrics
from shoal.runs.inputs.making import Job, default_distribution, make_distribution, make_job
from shoal.runs.inputs.options import LoopOptions, PlaceOptions, TrainOptions, VerifyOptions, takes
from shoal.runs.job import (
    Run,
    StartPoint,
    Trained,
    describe,
    environments_closed,
    run_job,
)
from shoal.runs.sinks.feeding import check_log
from shoal.runtime.cluster.machine import this_machine
from shoal.runtime.debug.verify import Verification, verify_plan
from shoal.runtime.logs import Log
from shoal.runtime.run import BACKENDS, check_backend, check_step_timeout, fresh_start
from shoal.search.choose import Choice
from shoal.search.cluster_file import load_cluster
from shoal.tracing.frozen import check_not_frozen
from shoal.tracing.stage import source_of
from shoal.tracing.trace import method, trace

BACKEND = "threads"  # by default
MOST_TICKS = 2**31 - 1


@takes(TrainOptions)
def train(options: TrainOptions) -> Trained:
    """Train `algorithm` on `env`, both by name or as objects; without `distribute`, fused.

    With `distribute="auto"` the fastest plan here is chosen, as `shoal train` does.

    A loop that has no environments, or its own, has `env=None`; `envs` then is how many rows it
    has (by default its setting `envs` if there is one), and its `init` and `tick` get None.
    A preset, where there is one, fills in what isn't given. The folder `runs/<name>` gets
    `summary.json`, `metrics.jsonl`, `plan.txt`, and checkpoints that `resume` continues from, also
    when the run is interrupted or fails; and `evaluation.jsonl` if it is evaluated.

    `on_tick(row)` and `on_evaluation(row)` are called with the row of metrics.jsonl and of
    evaluation.jsonl, `on_checkpoint(folder)` with a complete checkpoint's folder, all on this
    thread. One that returns `shoal.STOP` ends the run after the ticks in flight.
    """
    return trained(options)


def trained(options: TrainOptions) -> Trained:
    """As `train`, of options that are an object."""
    use_compile_cache()
    is_auto = options.distribute == AUTO
    if is_auto:
        options = replace(options, distribute=None)
    if is_auto := is_auto and is_on():
        ensure_devices(fused(os.cpu_count() or 1))
    chosen = chosen_distribution(options)
    job = make_job(options, ticks=options.ticks, evaluate=options.evaluate)
    backend = check_backend(BACKEND if options.backend is None else options.backend)
    distribution = beside_evaluation(job, chosen or default_distribution(job.env))
    cluster = cluster_of(options, backend)
    drawn = draw(job, distribution, cluster, starts=not options.steps)
    if options.steps:
        job, drawn = lasting_steps(job, drawn, options.steps, cluster)
    if is_auto and cluster is None:
        drawn, backend = fastest(job, drawn, options)
    check_step_timeout(drawn, backend, options.step_timeout)
    check_log(options.log or ())
    folder = new_folder(Path(options.folder), options.name, job.name)
    with locked(folder):
        record = describe(job, drawn, {"backend": backend, "seed": options.seed}, options)
        start = StartPoint(lambda: fresh_start(drawn.graph, options.seed), {})
        return run_job(Run(job, drawn, folder, record, start), options)


def fastest(job: Job, drawn: Plan, options: TrainOptions) -> tuple[Plan, str]:
    """The plan and backend that are fastest here, for a job that is `drawn` in the usual way."""
    say = options.announce or (lambda line: None)
    bare = replace(job, algorithm=job.trained)
    plain = drawn if bare.algorithm is job.algorithm else draw(bare, default_distribution(job.env))
    with environments_closed():
        found = automatic(plain, job.ticks, options.backend, say)
    if found.why:
        say(found.why)
    if plain is drawn and found.plan is not None:
        return found.plan, found.backend
    if found.distribution == plain.distribution:
        return drawn, found.backend
    return draw(job, beside_evaluation(job, found.distribution)), found.backend


def chosen_plan(options: LoopOptions, how: ChoiceOptions, say: Log) -> Choice:
    """The choice of a plan for the loop of the options, which name no distribution policy."""
    use_compile_cache()
    if options.distribute is not None:
        raise SettingError(
            f"--auto chooses a distribution policy, and {options.distribute} is given",
            "Leave one of them out.",
        )
    ensure_devices(fused(os.cpu_count() or 1))
    chosen_distribution(options)
    job = make_job(options)
    drawn = draw(job, default_distribution(job.env))
    with environments_closed():
        return choice_for(drawn.graph, drawn.cluster, how, say)


def simulated_plan(
    options: LoopOptions, ticks: int, how: ChoiceOptions, say: Log
) -> tuple[Plan, str]:
    """The plan of the options, and what it does in a simulation of so many ticks."""
    use_compile_cache()
    chosen = chosen_distribution(options)
    job = make_job(options, ticks=ticks)
    distribution = chosen or default_distribution(job.env)
    graph, machine = traced(job), this_machine()
    cluster = load_cluster(how.cluster).cluster if how.cluster else None
    drawn = plan(graph, distribution, cluster)
    with environments_closed():
        return drawn, simulated(drawn, machine, ticks, how, say)


@takes(VerifyOptions)
def verify(options: VerifyOptions) -> Verification:
    """Whether `algorithm` gives the same numbers under `distribute` as fused, after some ticks."""
    return verified(options)


def verified(options: VerifyOptions) -> Verification:
    """As `verify`, of options that are an object."""
    use_compile_cache()
    chosen = chosen_distribution(options)
    job = make_job(options, ticks=options.ticks)
    backend = check_backend(BACKEND if options.backend is None else options.backend)
    distribution = chosen or default_distribution(job.env)
    drawn = draw(job, distribution, cluster_of(options, backend))
    state = drawn.graph.origin.start(options.seed, job.envs)
    return verify_plan(drawn, backend, ticks=job.ticks, state=state)


def chosen_distribution(options: LoopOptions) -> DistributionPolicy | None:
    """The distribution policy of the options, if any; JAX gets its devices before it starts."""
    found = make_distribution(options.distribute, options.distribute_settings)
    if found is not None:
        ensure_devices(found)
    return found


def draw(
    job: Job,
    distribution: DistributionPolicy,
    cluster: Cluster | None = None,
    *,
    starts: bool = False,
) -> Plan:
    """The plan of a job's loop, which is traced and checked, and with `starts` is about to run."""
    ensure_devices(distribution)
    return plan(traced(job, starts=starts), distribution, cluster)


def traced(job: Job, *, starts: bool = False) -> Graph:
    """The graph of a job's loop, which depends on nothing but its state."""
    graph = trace(job.algorithm, job.env, envs=job.envs, starts=starts)
    check_not_frozen(graph.origin, job.envs)
    return graph


def plan(graph: Graph, distribution: DistributionPolicy, cluster: Cluster | None = None) -> Plan:
    """The plan of `graph` on `cluster`, or on this machine, under `distribution`."""
    if graph.origin is not None:
        judged = isinstance(graph.origin.algorithm, Evaluated)
        where = source_of(method(graph.origin.algorithm, "tick"))
        check_metrics([m.outer for m in graph.metrics], where, judged=judged)
    if cluster is None:
        cluster = check_devices(distribution, this_machine())
    return make_plan(graph, with_roles(graph, distribution), cluster)


def lasting_steps(job: Job, drawn: Plan, steps: float, cluster: Cluster | None) -> tuple[Job, Plan]:
    """The job and its plan for so many steps of all environments, or a few more."""
    rate = steps_a_tick(drawn)
    if not rate:
        raise SettingError(
            f"steps={steps:,.0f}, and {type(job.trained).__name__} steps no environment",
            "Say how long it is in ticks.",
        )
    if (ticks := math.ceil(steps / rate)) > MOST_TICKS:
        raise SettingError(
            f"steps={steps:,.0f} are {ticks:,} ticks of {rate:,} steps",
            f"Use at most {MOST_TICKS * rate:,}.",
        )
    longer = job.lasting(ticks)
    if longer.algorithm == job.algorithm:
        return longer, drawn
    return longer, draw(longer, drawn.distribution, cluster)


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


def cluster_of(options: PlaceOptions, backend: str) -> Cluster | None:
    """The cluster that a run is to use, where one is given or the backend has its own."""
    find_cluster = BACKENDS[backend].find_cluster
    if options.address and not find_cluster:
        raise SettingError(
            f"--address {options.address} is of a Ray cluster, and the backend isn't `ray`",
            "Add --backend ray.",
        )
    if find_cluster is not None and options.cluster is None:
        return find_cluster(options.address or "")
    return options.cluster


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
