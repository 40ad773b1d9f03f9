"""Whatever the loop and the cut, either the planner refuses or the numbers are the loop's.

    python tests/laws/check_loops.py --loops 100000 --seed 0 --workers 2

checks loops drawn from consecutive seeds and says how they fared. A failure is printed as it is
found, and `--show SEED` prints its loop, its cut and what happened.
"""

import argparse
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from queue import Empty, Queue
from threading import TIMEOUT_MAX, Event, Thread, Timer
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # Programs are small and run twice: compiling them takes the time, and is not worth keeping.
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    os.environ.setdefault(
        "XLA_FLAGS",
        "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
        "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    )

import jax
import jax.numpy as jnp
import numpy as np

import shoal
from laws.cases import cluster
from laws.differences import difference
from laws.plain_loops import case_at
from laws.random_loops import AGREEMENTS, Again, Author, Either, RandomLoop, Staged, Use, uses
from laws.vocabulary import APPROXIMATE, COARSE, HARMLESS
from shoal.runtime.debug.reference import run_reference

CHUNK, LONGEST_S = 300, 300  # loops a process checks, and how long one may take
PROGRESS_S = 10
TICKS, TOLERANCE, COARSE_TOLERANCE = 2, 1e-4, 0.05
# A loop that makes this much of a change of 1e-5 says nothing about a plan that differs.
NUDGE, UNSTEADY = 1e-5, 1e-3

RIGHT, PLANNED, REFUSED, UNJUST, WRONG, CRASHED, UNCLEAR = (
    "right", "planned", "refused", "unjust", "wrong", "crashed", "unclear",
)  # fmt: skip
FAILED = (WRONG, CRASHED)


@dataclass(frozen=True)
class Verdict:
    """How a cut of a loop fared.

    right: the loop's numbers; planned: it fits and has no numbers to compare; refused, and unjust
    where nothing in the loop gives a reason; wrong: other numbers; crashed: anything else that
    was raised; unclear: other numbers, of a loop that rounding alone takes as far.
    """

    seed: int
    outcome: str
    cut: str
    text: str = ""
    harms: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """A loop and how it is cut and run."""

    seed: int
    loop: object
    envs: int
    policy: shoal.DistributionPolicy
    devices: int
    backend: str

    @property
    def cut(self) -> str:
        """The cut in a few words."""
        replicas = ",".join(str(f.replicas) for f in self.policy.fragments)
        lag = max((getattr(w.flow, "lag", 0) for w in self.policy.wires), default=0)
        late = f" lag {lag}" if lag else ""
        return f"{self.policy.name}({replicas}){late} on {self.devices}, {self.envs} envs"

    @property
    def harms(self) -> tuple[str, ...]:
        """Operations that may be refused somewhere, with what they do to rows and where."""
        return tuple(
            f"{use.rows}: {use.op} in {per_of(around)}"
            for use, around in self.loop.uses
            if use.rows not in HARMLESS
        )


def random_case(seed: int, devices: int = 2) -> Case:
    """The loop and the cut that are drawn from a seed."""
    author = Author(seed)
    loop = author.loop()
    policy = author.cut(loop)
    places = author.random.randint(1, devices)
    backend = author.random.choice(["inline"] * 5 + ["threads"])
    return Case(seed, loop, author.envs, policy, places, backend)


def plain_case(seed: int, devices: int = 2) -> Case:
    """One of the ordinary loops with one operation more; successive ones are far apart."""
    loop, policy, envs, places = case_at(seed)
    return Case(seed, loop, envs, policy, min(places, devices), "inline")


CASES = {"random": random_case, "plain": plain_case}


def check(seed: int, loops: str = "random", devices: int = 2) -> Verdict:
    """How the cut of a seed's loop fares."""
    return check_case(CASES[loops](seed, devices))


def check_case(case: Case) -> Verdict:
    """How a cut of a loop fares."""
    outcome, text = judged(case)
    if outcome == REFUSED and not has_reason(case):
        outcome = UNJUST
    return Verdict(case.seed, outcome, case.cut, text, case.harms)


def judged(case: Case) -> tuple[str, str]:
    """What became of a case, and its error or the values that differ."""
    try:
        graph = shoal.trace(case.loop, envs=case.envs)
        plan = shoal.plan(graph, case.policy, cluster(case.devices))
    except shoal.ShoalError as error:
        return (REFUSED, str(error)) if str(error).strip() else (CRASHED, "an error without text")
    except Exception as error:
        return CRASHED, f"planning: {error_text(error)}"
    if is_asynchronous(plan):
        return PLANNED, ""
    if lag_is_lost(plan, case):
        return WRONG, "no channel has the lag that is asked for"
    return compared(plan, case)


def compared(plan, case: Case) -> tuple[str, str]:
    """Whether a plan gives the loop's numbers, and where it doesn't."""
    start = start_of(case.loop.delay, case.envs)
    try:
        got, shown = run(plan, case, start)
        if any(use.rows == APPROXIMATE for use, _ in case.loop.uses):
            return PLANNED, ""
        wanted, metrics = reference(plan, case, start)
    except Exception as error:
        return CRASHED, f"running: {error_text(error)}"
    off = differences(got | shown, wanted | metrics, case)
    if not off:
        return RIGHT, ""
    worst = ", ".join(f"{name} by {gap:.2g}" for name, gap in sorted(off.items())[:4])
    return (UNCLEAR if is_unsteady(case, start) else WRONG), worst


@cache
def start_of(delay: int, envs: int) -> dict[str, Any]:
    """What every loop with such a delay line starts from."""
    return RandomLoop((), (), (), delay).init(jax.random.key(0), None, envs)


def error_text(error: BaseException) -> str:
    """An error in one line, and where it was raised."""
    cause, seen = error, {error}
    while cause.__cause__ is not None and cause.__cause__ not in seen:
        cause = cause.__cause__
        seen.add(cause)
    trail = traceback.extract_tb(cause.__traceback__)
    own = [f for f in trail if "shoal" in f.filename] or trail[-1:]
    place = f" at {Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""
    first = str(error).strip().split("\n")[0][:300]
    return f"{type(error).__name__}: {first} ({type(cause).__name__}{place})"


def is_asynchronous(plan) -> bool:
    """Whether what a plan computes depends on what comes first."""
    late = [c.flow for c in plan.channels if isinstance(c.flow, shoal.Latest)]
    return bool(plan.asynchronous) or any(flow.max_lag != 0 for flow in late)


def run(plan, case, start):
    """The state after some ticks, and each tick's metrics."""
    seen = []
    result = shoal.run(
        plan, case.backend, ticks=TICKS, state=start, watch=lambda _, metrics: seen.append(metrics)
    )
    return dict(result.values), {
        f"metric {name} of tick {tick}": x
        for tick, metrics in enumerate(seen)
        for name, x in metrics.items()
        if name in case.loop.shown
    }


def reference(plan, case, start):
    """What is wanted: the loop in plain JAX, or delayed as the plan says."""
    if any(getattr(channel.flow, "lag", 0) for channel in plan.channels):
        return run_reference(plan, start, TICKS), {}
    return plain(case.loop)(start)


def lag_is_lost(plan, case) -> bool:
    """Whether a lag is asked for between learner and actor that no channel of the plan has."""
    asked = any(getattr(wire.flow, "lag", 0) for wire in case.policy.wires)
    has = any(getattr(channel.flow, "lag", 0) for channel in plan.channels)
    known = case.policy.name in ("single_learner_coarse", "sebulba") and not case.loop.delay
    return known and asked and not has and acts_on_what_is_learnt(case.loop)


def acts_on_what_is_learnt(loop) -> bool:
    """Whether per-environment stages read what whole-batch ones made a tick ago; if in doubt no."""
    sources, acted, learnt = {}, set(), set()
    for item in loop.body:
        pers = {stage.per for _, around in uses((item,)) for stage in around}
        read = set().union(*(sources.get(name, {name}) for name in free_names((item,))))
        if pers == {"env", "batch"}:
            return False
        if pers == {"env"}:
            acted |= read
        if pers == {"batch"}:
            read |= {LEARNER}
            learnt |= {*writes_of(item)}
        sources |= {name: read for name in writes_of(item)}
    late = {old for old, new in loop.carry if new in learnt}
    return LEARNER not in acted and bool(late & acted)


LEARNER = "the learner"


def writes_of(item) -> list[str]:
    """The names that an item gives to what follows."""
    match item:
        case Use():
            return [*item.writes]
        case Staged():
            return [outer for _, outer in item.writes]
        case Again():
            return [c[3] for c in item.carries] + [outer for _, outer in item.stacks]
    return [names[2] for names in item.writes]


def free_names(body) -> set[str]:
    """The names that items read from before them."""
    read, made = set(), set()
    for item in body:
        read |= reads_of(item) - made
        made |= {*writes_of(item)}
    return read


def reads_of(item) -> set[str]:
    """The names that an item reads from around it."""
    match item:
        case Use():
            return {*item.reads}
        case Staged():
            return {outer for outer, _ in (*item.reads, *item.shared, *item.closed)}
        case Again():
            inner = {c[1] for c in item.carries} | {n for _, n in item.slices}
            outer = {c[0] for c in item.carries} | {n for n, _ in item.slices}
            return outer | (free_names(item.body) - inner)
    return {item.number}.union(*(free_names(side) for side in item.sides))


def plain(loop):
    """The loop in plain JAX: from a start, the state after some ticks and each tick's metrics."""
    turn = jax.jit(lambda state: loop.tick(None, state))

    def ticks(state):
        shown = {}
        for tick in range(TICKS):
            state, metrics = turn(state)
            shown |= {f"metric {name} of tick {tick}": x for name, x in metrics.items()}
        return state, shown

    return ticks


def differences(got, wanted, case):
    """What is off, and by how much; a metric that isn't there is."""
    is_coarse = any(use.op in COARSE for use, _ in case.loop.uses)
    tolerance = COARSE_TOLERANCE if is_coarse else TOLERANCE
    gaps = {name: difference(got[name], x) if name in got else np.inf for name, x in wanted.items()}
    return {name: gap for name, gap in gaps.items() if gap > tolerance}


def is_unsteady(case, start):
    """Whether the loop itself goes far with a start that is hardly another."""
    ticks = plain(case.loop)
    wanted = ticks(start)
    for draw in range(3):
        random = np.random.default_rng(draw)
        near = {name: nudged(x, random) for name, x in start.items()}
        state, metrics = ticks(near)
        both = [(state | metrics)[name] for name in wanted[0] | wanted[1]]
        gaps = map(difference, both, (wanted[0] | wanted[1]).values())
        if max(gaps) > UNSTEADY:
            return True
    return False


def nudged(x, random):
    """Numbers changed a little; others as they are."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return (x + NUDGE * random.standard_normal(x.shape)).astype(x.dtype)


def has_reason(case: Case) -> bool:
    """Whether there is a reason to refuse a case; if in doubt there is.

    There is none where replicas see only what keeps rows apart or agrees on them, environments
    can be divided, and nothing is late.
    """
    policy = case.policy
    if policy.name in ("drawn", "impala") or any(w.flow != shoal.Lockstep() for w in policy.wires):
        return True
    if any(case.envs % f.most for f in policy.fragments):
        return True
    # Replicas don't meet inside a stage that sees one environment at a time.
    agrees_alone = any(
        use.rows in AGREEMENTS and any(s.per == "env" for s in around)
        for use, around in case.loop.uses
    )
    return agrees_alone or any(
        use.rows not in HARMLESS and replicas_of(policy, around) > 1
        for use, around in case.loop.uses
    )


def replicas_of(policy, around) -> int:
    """How many replicas a use may have, by the stages around it."""
    if not around:
        return max(f.most for f in policy.fragments)
    path = [s.name for s in around]
    for depth in range(len(path), 0, -1):
        found = held(policy, "/".join(path[:depth]), around[depth - 1].per, depth == 1)
        if found:
            return found
    return 1


def held(policy, path, per, is_top):
    """How many replicas the fragment of a stage has, or 0 if none names it."""
    kinds = (f"per:{per}", shoal.THE_REST) if is_top else ()
    for names in ((path,), None, *((kind,) for kind in kinds)):
        for fragment in policy.fragments:
            patterns = [s for s in fragment.stages if "*" in s and s != shoal.THE_REST]
            if names is None and any(fnmatch(path, p) for p in patterns):
                return fragment.most
            if names and names[0] in fragment.stages:
                return fragment.most
    return 0


def per_of(around) -> str:
    """Where a use stands, in a word or two."""
    return f"a per-{around[-1].per} stage" if around else "tick"


def form_of(text: str) -> str:
    """The first line of an error without names, numbers and places."""
    first = text.split("\n")[0]
    plain_text = re.sub(r"\([^()]*\.py:\d+\)", "", first)
    return re.sub(r"\d+", "N", re.sub(r"`[^`]*`", "`_`", plain_text)).strip()[:150]


def work(seeds: range, loops: str, devices: int) -> None:
    """Check seeds, one line of JSON each; caches are emptied now and then."""
    for count, seed in enumerate(seeds):
        print(json.dumps(asdict(check(seed, loops, devices))), flush=True)
        if count % 100 == 99:
            jax.clear_caches()


@dataclass
class Tally:
    """What was found so far."""

    started: float
    outcomes: Counter
    refusals: Counter
    harms: Counter

    def add(self, verdict: Verdict) -> None:
        """Count a verdict, and print it if it is a failure."""
        self.outcomes[verdict.outcome] += 1
        if verdict.outcome == UNJUST:
            self.refusals[form_of(verdict.text)] += 1
        if verdict.outcome in FAILED:
            classes = {harm.split(":")[0] for harm in verdict.harms} or {"harmless"}
            self.harms[f"{verdict.outcome}: {' and '.join(sorted(classes))}"] += 1
            harms = "; ".join(verdict.harms) or "nothing harmful"
            what = f"{verdict.outcome} {verdict.seed}: {verdict.cut}: {verdict.text} [{harms}]"
            print(what, flush=True)

    def line(self) -> str:
        """How far it is."""
        done, seconds = sum(self.outcomes.values()), time.time() - self.started
        counts = ", ".join(f"{n} {name}" for name, n in self.outcomes.most_common())
        return f"{done} loops in {seconds:.0f} s ({done / seconds:.1f}/s): {counts}"

    def summary(self) -> str:
        """All that was found."""
        done = max(1, sum(self.outcomes.values()))
        share = 100 * self.outcomes[UNJUST] / done
        lines = [self.line(), f"unjust refusals: {share:.1f} % of all loops"]
        lines += [f"  {n:5} {form}" for form, n in self.refusals.most_common(25)]
        lines += [f"  {n:5} {form}" for form, n in self.harms.most_common()]
        return "\n".join(lines)


@dataclass(frozen=True)
class Search:
    """What is checked: a kind of loops on at most so many devices, and for how long."""

    kind: str
    devices: int = 2
    seconds: float = math.inf


def verdicts(seeds: range, workers: int, search: Search) -> Iterator[Verdict]:
    """Verdicts as they come from processes of their own, each of which checks a few hundred.

    They end with the seeds or the time, and the processes with them.
    """
    todo, found = Queue(), Queue()
    for start in range(0, len(seeds), CHUNK):
        todo.put(seeds[start : start + CHUNK])
    until, running, over = time.monotonic() + search.seconds, set[subprocess.Popen](), Event()

    def check_chunks():
        with suppress(Empty):
            while not over.is_set():
                chunk = todo.get_nowait()
                while chunk and not over.is_set():
                    chunk = chunk[check_apart(chunk, search, found.put, running) :]

    for _ in range(workers):
        Thread(target=check_chunks, daemon=True).start()
    try:
        for _ in seeds:
            yield found.get(timeout=min(until - time.monotonic(), TIMEOUT_MAX))
    except (Empty, ValueError):  # the time is over
        return
    finally:
        over.set()
        for worker in [*running]:
            worker.kill()


def check_apart(
    seeds: range, search: Search, report: Callable[[Verdict], None], running: set
) -> int:
    """Check seeds in a process until it ends, and report also what kills it; how many it took."""
    command = [sys.executable, __file__, "--kind", search.kind, "--devices", str(search.devices)]
    worker = subprocess.Popen(
        [*command, "--work", str(seeds.start), str(seeds.stop)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert worker.stdout
    running.add(worker)
    count, late = 0, Timer(LONGEST_S, worker.kill)
    late.start()
    for line in worker.stdout:
        late.cancel()
        if not line.startswith("{"):
            continue
        fields = json.loads(line)
        report(Verdict(**fields | {"harms": tuple(fields["harms"])}))
        count += 1
        late = Timer(LONGEST_S, worker.kill)
        late.start()
    late.cancel()
    code = worker.wait()
    running.discard(worker)
    if count < len(seeds):
        case = CASES[search.kind](seeds[count], search.devices)
        text = f"the process ended with {code} (killed if it takes over {LONGEST_S} s)"
        report(Verdict(case.seed, CRASHED, case.cut, text, case.harms))
        count += 1
    return count


def show(case: Case) -> int:
    """Print a loop, its cut and its verdict."""
    print(*written(case.loop.body), sep="\n")
    print("carries", ", ".join(f"{old} <- {new}" for old, new in case.loop.carry if old != new))
    print("shows", ", ".join(case.loop.shown), f"; delays by {case.loop.delay}")
    print(case.policy, case.backend)
    verdict = check_case(case)
    print(verdict.outcome, verdict.cut, verdict.text, *verdict.harms, sep="\n")
    return int(verdict.outcome in FAILED)


def written(body, indent="") -> Iterator[str]:
    """A list of items as lines to read."""
    more = indent + "    "
    for item in body:
        match item:
            case Use():
                around = f"{item.wrap} of " if item.wrap else ""
                call = f"{around}{item.op}({', '.join(item.reads)})"
                yield f"{indent}{', '.join(item.writes)} = {call}  # {item.rows}, {item.kinds}"
            case Staged():
                by_name = [f"{inner}={outer}" for outer, inner in item.shared]
                around = [f"{inner} is {outer}" for outer, inner in item.closed]
                reads = [f"{outer} as {inner}" for outer, inner in item.reads]
                takes = ", ".join(reads + by_name + around)
                yield f"{indent}stage {item.name} per {item.per}({takes})"
                yield from written(item.body, more)
                yield f"{more}gives {item.writes}"
            case Again():
                yield f"{indent}scan {item.carries} along {item.slices} stacks {item.stacks}"
                yield from written(item.body, more)
            case Either():
                yield f"{indent}if {item.number} > 0 gives {item.writes}"
                yield from written(item.sides[0], more)
                yield f"{indent}else"
                yield from written(item.sides[1], more)


def watch(tally: Tally, found: Iterator[Verdict], failures: Path | None) -> None:
    """Count verdicts as they come, note failures and unjust refusals, and print progress."""
    shown = time.monotonic()
    for verdict in found:
        tally.add(verdict)
        if failures and verdict.outcome in (*FAILED, UNJUST):
            with failures.open("a") as file:
                print(json.dumps(asdict(verdict)), file=file)
        if time.monotonic() - shown > PROGRESS_S:
            shown = time.monotonic()
            print(tally.line(), flush=True)


def main() -> int:
    """Check many loops with several processes; 1 if any is wrong or crashed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loops", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first loop")
    parser.add_argument("--kind", choices=CASES, default="random", help="of loops")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--devices", type=int, default=2, help="at most so many")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so long")
    parser.add_argument("--failures", type=Path, help="append failures to this file, as JSON lines")
    parser.add_argument("--show", type=int, help="print this seed's loop and verdict, and stop")
    parser.add_argument("--work", type=int, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.show is not None:
        return show(CASES[args.kind](args.show, args.devices))
    if args.work:
        work(range(*args.work), args.kind, args.devices)
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    tally = Tally(time.time(), Counter(), Counter(), Counter())
    seeds = range(args.seed, args.seed + args.loops)
    found = verdicts(seeds, args.workers, Search(args.kind, args.devices, args.seconds))
    with suppress(KeyboardInterrupt), closing(found):  # the summary covers what was found by then
        watch(tally, found, args.failures)
    print(tally.summary(), flush=True)
    return int(any(tally.outcomes[outcome] for outcome in FAILED))


if __name__ == "__main__":
    sys.exit(main())
