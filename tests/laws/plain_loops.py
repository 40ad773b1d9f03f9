"""An ordinary loop with one operation more: each one, in each place, with each thing around it."""

from collections.abc import Iterator
from functools import cache

import shoal
from laws.random_loops import BRANCHES, FORMS, WRAPPED, WRAPS, Again, Form, RandomLoop, Staged, Use

PLACES = ("tick", "scan", "env", "batch")
# What is at hand of each kind: in tick or a whole-batch stage, and in a per-environment stage.
OUTSIDE = {
    "rows": ("x", "y"), "half": ("h",), "ints": ("i",), "flags": ("f", "f"), "keys": ("keys",),
    "whole": ("w", "v"), "number": ("s",), "key": ("key",), "roll": ("r",), "trail": ("t",),
}  # fmt: skip
INSIDE = {
    "vector": ("e_x", "e_w"), "any key": ("e_keys",), "int": ("e_i",), "flag": ("e_f",),
    "short": ("e_h",), "figure": ("e_s",),
}  # fmt: skip
TARGETS = {
    "rows": "y", "half": "h", "ints": "i", "flags": "f", "keys": "keys", "whole": "v",
    "number": "s", "key": "key", "vector": "y", "any key": "keys",
}  # fmt: skip
# Distribution policies with the number of environments and of devices.
POLICIES = (
    (shoal.fused(2), 8, 1),
    (shoal.multi_learner(4), 12, 2),
    (shoal.single_learner_coarse(2), 8, 1),
    (shoal.environments(2), 4, 2),
    (shoal.decoupled(2, 2, 2), 8, 2),
)
STRIDE = 7919  # a prime, so that those in a row are far apart


def case_at(number: int) -> tuple[RandomLoop, shoal.DistributionPolicy, int, int]:
    """A loop, a distribution policy, and how many environments and devices there are.

    As many cases in a row as there are operations have each of them once.
    """
    groups = all_ways()
    turn, which = divmod(number, len(groups))
    ways = groups[which * STRIDE % len(groups)]
    at = (turn * STRIDE + which * 31) % (len(ways) * len(POLICIES))
    return plain_loop(*ways[at // len(POLICIES)]), *POLICIES[at % len(POLICIES)]


@cache
def all_ways() -> list[list[tuple[Form, str, str]]]:
    """For each operation: every form of it, in every place that it fits, with all around it."""
    groups: dict[str, list[tuple[Form, str, str]]] = {}
    for form in FORMS:
        groups.setdefault(form.op, []).extend(ways_of(form))
    return list(groups.values())


def ways_of(form: Form) -> Iterator[tuple[Form, str, str]]:
    kinds = {*form.reads, *form.writes}
    if form.features:
        yield form, "env", "features"
    elif kinds <= {*INSIDE}:
        yield from ((form, "env", wrap) for wrap in WRAPS)
    else:
        for place in PLACES:
            if place == "env" or (place == "scan" and kinds & {"roll", "trail"}):
                continue
            yield from ((form, place, wrap) for wrap in WRAPS)


def use_of(form: Form, wrap: str, names: dict[str, tuple[str, ...]]) -> Use:
    """A use of a form on values of these names, by kind."""
    taken: dict[str, int] = {}
    reads = []
    for kind in form.reads:
        at = taken.get(kind, 0)
        reads.append(names[kind][at % len(names[kind])])
        taken[kind] = at + 1
    if wrap in BRANCHES:
        reads.append(names["number" if "number" in names else "figure"][0])
    writes = tuple(f"made{i}" for i, _ in enumerate(form.writes))
    return Use(form.op, tuple(reads), form.reads, writes, wrap)


def plain_loop(form: Form, place: str, wrap: str) -> RandomLoop:
    """A loop that acts some times and learns, and makes one use in `place`."""
    assert wrap in (*WRAPPED, *BRANCHES, "features")
    added = use_of(form, wrap, INSIDE if place == "env" else OUTSIDE)
    made = {TARGETS.get(k, k): w for k, w in zip(form.writes, added.writes, strict=True)}
    acting = act(added if place == "env" else None, made)
    if place == "scan" or {*form.reads, *form.writes} & {"roll", "trail"}:
        body, after = several(acting, added if place == "scan" else None, made)
    else:
        body, after = [acting, STEP], {"x": "stepped"}
    if place in ("tick", "env"):
        body += [added] if place == "tick" else []
        after |= made
    learner, given = learn(added if place == "batch" else None, made, after["x"])
    after |= given
    return RandomLoop(*closed([*body, learner], after))


def several(acting, added, made):
    """Acting some times, with a use among it if there is one, and what replaces what."""
    carried = [("x", "x", "stepped", "x_after")]
    if added:
        carried += [(name, name, inner, f"{name}_after") for name, inner in made.items()]
    stacks = ("stepped", "r"), ("w", "t")
    turn = (acting, *([added] if added else []), STEP)
    after = {outer: final for outer, _, _, final in carried}
    return [Again(tuple(carried), (), stacks, turn, reverse=False)], after


def closed(body, after):
    """The body, what is carried and what is shown; what is stacked is carried as its mean."""
    if "roll" in after:
        body = [*body, Use("t over time", (after.pop("roll"),), ("roll",), ("y_new",))]
        after["y"] = "y_new"
    carry = tuple((name, after.get(name, name)) for name in CARRIED_NAMES)
    return tuple(body), carry, ("learnt",)


CARRIED_NAMES = ("x", "y", "h", "i", "f", "keys", "v", "w", "s", "key")
STEP = Staged(
    "env", "env", (("acted", "e_x"),), (), (),
    (Use("v tanh", ("e_x",), ("vector",), ("e_y",)),), (("e_y", "stepped"),),
)  # fmt: skip


def act(added, made):
    """The stage that acts, with a use of its own if it has one."""
    names = {"x": "e_x", "keys": "e_keys", "i": "e_i", "f": "e_f", "h": "e_h"}
    used = set(added.reads) if added else set()
    rows = tuple((n, e) for n, e in names.items() if e in used or n == "x")
    shared = tuple((n, e) for n, e in {"w": "e_w", "s": "e_s"}.items() if e in used or n == "w")
    body = (Use("v plus", ("e_x", "e_w"), ("vector", "vector"), ("e_new",)),)
    writes = (("e_new", "acted"),)
    if added:
        body = (*body, added)
        writes += tuple((w, w) for w in made.values())
    return Staged("act", "env", rows, shared, (), body, writes)


def learn(added, made, x):
    """The stage that learns, with a use of its own if it has one, and what replaces what."""
    reads = {x: "x", "w": "w"}
    for name in added.reads if added else ():
        reads |= {} if name == "x" else {name: name}
    body = (
        Use("g slope", ("x", "w"), ("rows", "whole"), ("slope",)),
        Use("g agreed", ("slope",), ("whole",), ("agreed",)),
        Use("v less", ("w", "agreed"), ("whole", "whole"), ("learnt",)),
    )
    writes, given = (("learnt", "learnt"),), {"w": "learnt"}
    if added:
        body = (*body, added)
        writes += tuple((w, w) for w in added.writes)
        given |= made
    return Staged("learn", "batch", tuple(reads.items()), (), (), body, writes), given
