"""Small loops over the whole vocabulary, and cuts of them, each drawn from a seed.

A loop is a list of items written as data: uses of operations, stages, scans and branches with
lists of their own. It traces for any number of environments.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import shoal
from laws.vectors import WIDE, wide
from laws.vocabulary import AGREED, APART, APPROXIMATE, HARMLESS, MISAGREED, OPS, TIMES

ENVS = (4, 8, 12)  # what is drawn from; 4 is as wide as a row
CARRIED = {
    "x": "rows", "y": "rows", "h": "half", "i": "ints", "f": "flags", "keys": "keys",
    "v": "whole", "w": "whole", "s": "number", "key": "key",
}  # fmt: skip
AGREEMENTS = (AGREED, MISAGREED, APPROXIMATE)
STACKED = {"rows": "roll", "whole": "trail"}
SLICED = {"roll": "rows", "trail": "whole"}
ROWS = {"rows": "vector", "keys": "any key", "ints": "int", "flags": "flag", "half": "short"}
SHARED = {"whole": "vector", "number": "figure"}


@dataclass(frozen=True)
class Use:
    """One use of an operation. `wrap` says what stands around it; a branch reads a number last."""

    op: str
    reads: tuple[str, ...]
    kinds: tuple[str, ...]
    writes: tuple[str, ...]
    wrap: str = ""

    @property
    def rows(self) -> str:
        """What it does to rows; on one row's features it mixes nothing, and agrees on nothing."""
        rows = OPS[self.op].rows
        if self.wrap != "features":
            return rows
        return MISAGREED if rows in AGREEMENTS else APART


@dataclass(frozen=True)
class Staged:
    """A stage: pairs of outer and inner names that it reads, also from around it, and writes."""

    name: str
    per: str
    reads: tuple[tuple[str, str], ...]
    shared: tuple[tuple[str, str], ...]
    closed: tuple[tuple[str, str], ...]
    body: tuple[Any, ...]
    writes: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Again:
    """A scan: carried values as (outer, inner, next inner, final), the others as pairs."""

    carries: tuple[tuple[str, str, str, str], ...]
    slices: tuple[tuple[str, str], ...]
    stacks: tuple[tuple[str, str], ...]
    body: tuple[Any, ...]
    reverse: bool


@dataclass(frozen=True)
class Either:
    """A branch on a number: each side's own name of what it gives, and its name outside."""

    number: str
    sides: tuple[tuple[Any, ...], tuple[Any, ...]]
    writes: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class RandomLoop:
    """A loop in Shoal's sense: a list of items, and which value replaces which carried one."""

    body: tuple[Any, ...]
    carry: tuple[tuple[str, str], ...]
    shown: tuple[str, ...]
    delay: int = 0  # so many carried values hand on `w`, and `v` takes the last

    def init(self, key, env, envs):
        cells = jnp.arange(envs * WIDE).reshape(envs, WIDE) + 1.0
        late = {f"d{k:02}": jnp.cos(jnp.arange(WIDE) + k) for k in range(self.delay)}
        return late | {
            "x": jnp.sin(cells),
            "y": jnp.cos(1.7 * cells),
            "h": jnp.sin(0.6 * cells).astype(jnp.bfloat16),
            "i": jnp.arange(envs) * 5 % 7,
            "f": jnp.arange(envs) * 5 % 7 < 3,
            "keys": jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(envs)),
            "v": jnp.linspace(-0.9, 0.8, WIDE),
            "w": jnp.linspace(0.3, 1, WIDE),
            "s": jnp.float32(0.4),
            "key": key,
        }

    def tick(self, env, state):
        known = dict(state) | {"n": len(state["x"])}
        self.run(self.body, known)
        after = {old: known[new] for old, new in self.carry}
        if self.delay:
            names = [f"d{k:02}" for k in range(self.delay)]
            after |= zip(names, [known["w"], *(state[name] for name in names)], strict=False)
            after["v"] = jnp.sin(after["v"] + state[names[-1]])
        return after, {name: known[name] for name in self.shown}

    def run(self, body, known):
        for item in body:
            match item:
                case Use():
                    made = use(item, known)
                    name(known, item.writes, made if isinstance(made, tuple) else (made,))
                case Staged():
                    self.stage(item, known)
                case Again():
                    self.again(item, known)
                case Either():
                    self.either(item, known)

    def stage(self, item, known):
        def body(*rows, **shared):
            inside = {"n": known["n"]} | {inner: known[outer] for outer, inner in item.closed}
            inside |= zip((inner for _, inner in item.reads), rows, strict=True)
            inside.update(shared)
            self.run(item.body, inside)
            return tuple(inside[inner] for inner, _ in item.writes)

        call = shoal.stage(per=item.per, name=item.name)(body)
        made = call(
            *(known[outer] for outer, _ in item.reads),
            **{inner: known[outer] for outer, inner in item.shared},
        )
        name(known, [outer for _, outer in item.writes], made)

    def again(self, item, known):
        outer, inner, after, final = zip(*item.carries, strict=True)

        def turn(carry, xs):
            inside = dict(known)
            name(inside, [*inner, *(n for _, n in item.slices)], [*carry, *xs])
            self.run(item.body, inside)
            return [inside[n] for n in after], [inside[n] for n, _ in item.stacks]

        first, xs = [known[n] for n in outer], [known[n] for n, _ in item.slices]
        last, ys = lax.scan(turn, first, xs, TIMES, item.reverse)
        name(known, [*final, *(n for _, n in item.stacks)], [*last, *ys])

    def either(self, item, known):
        def side(which):
            inside = dict(known)
            self.run(item.sides[which], inside)
            return [inside[names[which]] for names in item.writes]

        made = lax.cond(known[item.number] > 0, partial(side, 0), partial(side, 1))
        name(known, [names[2] for names in item.writes], made)

    @cached_property
    def uses(self):
        """Every use, with the stages around it, the outermost first."""
        return tuple(uses(self.body))

    @property
    def stages(self):
        """Every stage's path, and what it is per."""
        found = {}
        for _, around in self.uses:
            for depth in range(len(around)):
                path = "/".join(s.name for s in around[: depth + 1])
                found[path] = around[depth].per
        return found


def name(known, names, values):
    known.update(zip(names, values, strict=True))


def uses(body, around=()) -> Iterator[tuple[Use, tuple[Staged, ...]]]:
    """Every use in a list of items, with the stages around it."""
    for item in body:
        match item:
            case Use():
                yield item, around
            case Staged():
                yield from uses(item.body, (*around, item))
            case Again():
                yield from uses(item.body, around)
            case Either():
                for side in item.sides:
                    yield from uses(side, around)


def use(item, known):
    """What a use makes of what is known."""
    op, args = OPS[item.op], [known[r] for r in item.reads]
    function = partial(op.function, known["n"])
    if item.wrap == "features":
        return on_features(function, op, args)
    if op.is_vector and ("rows" in item.kinds or "keys" in item.kinds):
        axes = [0 if kind in ("rows", "keys") else None for kind in item.kinds]
        function = jax.vmap(function, axes)
    if item.wrap in BRANCHES:
        *args, number = args
        return BRANCHES[item.wrap](function, args, number)
    return WRAPPED[item.wrap](function, args)


def on_features(function, op, args):
    """A batch's operation on a table of one row's features, and what it gives as a row."""
    table = [
        x[:, None] + 0.3 * x[None] if k == "rows" else x
        for x, k in zip(args, op.reads, strict=True)
    ]
    made = function(*table)
    return wide(made.mean(1) if op.writes == ("rows",) else made)


def blend(old, new):
    """Both, where they are numbers; else the new one."""
    floating = jnp.issubdtype(new.dtype, jnp.floating)
    return jnp.sin(old + 0.5 * new).astype(new.dtype) if floating else new


def halve(x):
    return (0.5 * x).astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x


def blended(function, args):
    return lambda old: jax.tree.map(blend, old, function(*args))


def branched(function, args, number):
    less = lambda *a: jax.tree.map(halve, function(*a))  # noqa: E731
    return lax.cond(number > 0, function, less, *args)


def switched(function, args, number):
    less = lambda *a: jax.tree.map(halve, function(*a))  # noqa: E731
    which = (number > 0).astype(int) + (number > 0.5)
    return lax.switch(which, [function, less, function], *args)


def scanned(function, args):
    turn = blended(function, args)
    return lax.scan(lambda c, _: (turn(c), None), function(*args), length=2)[0]


def looped(function, args):
    turn = blended(function, args)
    first = 0, function(*args)
    return lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, turn(c[1])), first)[1]


def twice(args):
    return [jnp.stack([x, halve(x)]) for x in args]


def mapped(function, args):
    made = lax.map(lambda a: function(*a), twice(args))
    return jax.tree.map(lambda y: blend(y[0], y[1]), made)


def batched(function, args):
    made = jax.vmap(function)(*twice(args))
    return jax.tree.map(lambda y: blend(y[0], y[1]), made)


WRAPPED = {
    "": lambda function, args: function(*args),
    "jit": lambda function, args: jax.jit(function)(*args),
    "checkpoint": lambda function, args: jax.checkpoint(function)(*args),
    "scan": scanned,
    "while": looped,
    "map": mapped,
    "vmap": batched,
}
BRANCHES = {"cond": branched, "switch": switched}
WRAPS = (*WRAPPED, *BRANCHES)


@dataclass(frozen=True)
class Form:
    """A way to use an operation: on which kinds, and whether on one row's features."""

    op: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    features: bool = False

    @property
    def is_harmless(self) -> bool:
        """Whether it may not be refused, wherever it is placed."""
        rows = OPS[self.op].rows
        if self.features:
            return rows not in AGREEMENTS
        return rows in HARMLESS

    @property
    def family(self) -> str:
        """What kind of operation it is, by the first letter of its name."""
        return self.op[0]


def forms(name: str) -> Iterator[Form]:
    """Every way to use an operation."""
    op = OPS[name]
    if not op.is_vector or name[0] == "e":
        yield Form(name, op.reads, op.writes)
        if {*op.reads} <= {"rows", "whole"}:
            yield Form(name, ("vector",) * len(op.reads), ("vector",), features=True)
        return
    yield Form(name, op.reads, op.writes)
    for kinds in product(*(STANDS_FOR[kind] for kind in op.reads)):
        if {"keys", "whole"} <= {*kinds} or {"key", "rows"} <= {*kinds}:
            continue
        by_row = "rows" in kinds
        given = {"vector": "rows" if by_row else "whole", "any key": "keys" if by_row else "key"}
        yield Form(name, kinds, tuple(given[kind] for kind in op.writes))


STANDS_FOR = {"vector": ("rows", "whole"), "any key": ("keys", "key")}
FORMS = [form for name in OPS if name[0] != "g" for form in forms(name)]
FAMILIES = {"v": 8, "b": 5, "a": 4, "c": 2, "t": 2, "k": 1, "e": 2}
BY_ROW = {"vector": "rows", "any key": "keys"}


class Author:
    """Writes one loop and a cut of it; the same seed writes the same ones."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.envs = self.random.choice(ENVS)
        self.kinds, self.named, self.staged = dict(CARRIED), 0, 0
        mood = self.random.random()
        # How many operations may be refused somewhere; one alone shows best what becomes of it.
        self.harms = 0 if mood < 0.35 else 1 if mood < 0.8 else 9

    def chance(self, p: float) -> bool:
        return self.random.random() < p

    def name(self, kind: str) -> str:
        self.named += 1
        name = f"x{self.named}"
        self.kinds[name] = kind
        return name

    def one_of(self, known, kind):
        """A value of that kind, a late one more likely than an early one."""
        fits = [n for n in known if self.kinds[n] == kind]
        return fits[-1 - self.random.randint(0, min(3, len(fits) - 1))]

    def loop(self) -> RandomLoop:
        """A loop with an actor and a learner, or of any form."""
        known = list(CARRIED)
        body = self.actor_learner(known) if self.chance(0.6) else self.free(known)
        changing = [n for n in CARRIED if n in "vwxy" or self.chance(0.4)]
        carry = {n: self.one_of(known, CARRIED[n]) if n in changing else n for n in CARRIED}
        kinds = self.random.sample(["rows", "whole", "number", "ints", "rows"], 2)
        shown = dict.fromkeys(self.one_of(known, kind) for kind in kinds)
        delay = self.random.randint(2, 20) if self.chance(0.05) else 0
        return RandomLoop(tuple(body), tuple(carry.items()), tuple(shown), delay)

    def free(self, known):
        body = self.several(known, 0)
        while self.staged < 2:
            body += self.stage(known, self.random.choice(["env", "batch"]))
        return body + self.glue(known, 1)

    def actor_learner(self, known):
        body = self.glue(known, 1)
        body += self.again(known, 0, self.act) if self.chance(0.7) else self.act(known, 1)
        body += self.glue(known, 2)
        body += self.learn(known) if self.chance(0.35) else self.stage(known, "batch", "learn")
        return body + self.glue(known, 1)

    def act(self, known, depth):
        first, between = self.stage(known, "env", "act"), self.glue(known, 1)
        return [*first, *between, *self.stage(known, "env", "env")]

    def learn(self, known):
        """A learner whose slopes and updates are stages of their own, agreed on in between."""
        x, w = self.one_of(known, "rows"), self.one_of(known, "whole")
        outer = {x: self.name("rows"), w: self.name("whole")}
        inner = {name: self.name(self.kinds[name]) for name in outer.values()}
        seen, slope, agreed, made = [*inner.values()], *(self.name("whole") for _ in range(3))
        thought = self.glue(seen, 1)
        reads = self.one_of(seen, "rows"), inner[outer[w]]
        found = Use("g slope", reads, ("rows", "whole"), (self.name("whole"),))
        pairs = tuple(inner.items())
        grad = Staged("grad", "batch", pairs, (), (), (*thought, found), ((*found.writes, slope),))
        agree = Use("g agreed", (slope,), ("whole",), (agreed,))
        inside = [outer[w], agreed]
        apply = self.stage(inside, "batch", "apply")
        last = self.one_of(inside, "whole")
        known.append(made)
        body = grad, agree, *apply
        return [Staged("learn", "batch", tuple(outer.items()), (), (), body, ((last, made),))]

    def several(self, known, depth):
        items = range(self.random.randint(1, 3 - depth))
        return [i for _ in items for i in self.item(known, depth)]

    def item(self, known, depth):
        form = self.random.random()
        if depth < 2 and self.staged < 5 and form < 0.2:
            return self.again(known, depth, self.several)
        if depth < 2 and form < 0.28:
            return self.either(known, depth)
        if self.staged < 5 and form < 0.7:
            return self.stage(known, self.random.choice(["env", "env", "batch"]))
        return [self.use(known)]

    def glue(self, known, most):
        return [self.use(known) for _ in range(self.random.randint(0, most))]

    def use(self, known):
        """A use of an operation that fits what is known here."""
        form = self.form({self.kinds[n] for n in known})
        reads = tuple(self.one_of(known, kind) for kind in form.reads)
        numbers = [n for n in known if self.kinds[n] in ("number", "figure")]
        writes = tuple(self.name(kind) for kind in form.writes)
        known += writes
        wrap = self.random.choice(WRAPS) if self.chance(0.35) else ""
        if form.features or (wrap in BRANCHES and not numbers):
            wrap = "features" if form.features else ""
        more = (self.random.choice(numbers),) if wrap in BRANCHES else ()
        return Use(form.op, reads + more, form.reads, writes, wrap)

    def form(self, kinds):
        """A way to use an operation on these kinds; one that may be refused if that is due."""
        fits = [form for form in FORMS if kinds.issuperset(form.reads)]
        due = self.harms > 0 and self.chance(0.35)
        fits = [form for form in fits if form.is_harmless != due] or fits
        families = sorted({form.family for form in fits})
        weights = [FAMILIES[family] for family in families]
        (family,) = self.random.choices(families, weights)
        form = self.random.choice([form for form in fits if form.family == family])
        self.harms -= not form.is_harmless
        return form

    def stage(self, known, per, name=""):
        """A stage of a few uses, with what it reads by position, by keyword and from around it."""
        self.staged += 1
        rows = self.some(known, ROWS if per == "env" else None, self.random.randint(1, 3))
        first = [n for n in known if self.kinds[n] == "rows"]
        if first and not any(self.kinds[n] == "rows" for n in rows):
            rows.append(self.one_of(first, "rows"))
        shared = self.some(known, SHARED, self.random.randint(0, 2))
        closed = self.some(known, SHARED, self.chance(0.15))
        if per == "env" and not rows:
            return [self.use(known)]
        inside = []

        def inner(names, kinds):
            pairs = tuple((n, self.name(kinds.get(self.kinds[n], self.kinds[n]))) for n in names)
            inside.extend(n for _, n in pairs)
            return pairs

        by_row, alike = (ROWS, SHARED) if per == "env" else ({}, {})
        reads, named, around = inner(rows, by_row), inner(shared, alike), inner(closed, alike)
        before = len(inside)
        body = self.within(inside, per)
        made = [n for n in inside[before:] if self.kinds[n] in (*BY_ROW, *CARRIED.values())]
        given = made[-self.random.randint(1, 2) :]
        outs = {n: BY_ROW.get(self.kinds[n], self.kinds[n]) for n in given}
        writes = tuple((n, self.name(kind)) for n, kind in outs.items())
        known += [outer for _, outer in writes]
        name = name or f"s{self.staged}"
        return [Staged(name, per, reads, named, around, tuple(body), writes)]

    def within(self, inside, per):
        """What a stage does: uses, and seldom a stage of its own."""
        body = [self.use(inside) for _ in range(self.random.choice([1, 1, 1, 2]))]
        if per == "batch" and self.staged < 5 and self.chance(0.15):
            body += self.stage(inside, self.random.choice(["env", "batch"]))
        return body

    def some(self, known, kinds, count):
        """Up to so many different values of some kinds."""
        fits = [n for n in known[-8:] + known[:8] if kinds is None or self.kinds[n] in kinds]
        return [*dict.fromkeys(self.random.sample(fits, min(count, len(fits))))]

    def either(self, known, depth):
        """A branch on a number that all share, with a few items on each side."""
        numbers = [n for n in known if self.kinds[n] == "number"]
        if not numbers:
            return [self.use(known)]
        sides, kind = [], self.random.choice(["rows", "whole"])
        if kind not in {self.kinds[n] for n in known}:
            return [self.use(known)]
        for _ in range(2):
            inside = list(known)
            body = self.several(inside, depth + 1) if self.chance(0.3) else [self.use(inside)]
            sides.append((tuple(body), self.one_of(inside, kind)))
        made = self.name(kind)
        known.append(made)
        bodies, names = zip(*sides, strict=True)
        return [Either(self.random.choice(numbers), bodies, ((*names, made),))]

    def again(self, known, depth, inner):
        """A scan that carries some values, goes along one, and stacks up to two."""
        chosen = self.some(known, [k for k in CARRIED.values() if k != "half"], 3)
        along = self.some(known, SLICED, self.chance(0.5))
        names = {n: self.name(self.kinds[n]) for n in chosen}
        names |= {n: self.name(SLICED[self.kinds[n]]) for n in along}
        inside = [*known, *names.values()]
        body = tuple(inner(inside, depth + 1))
        made = [n for n in inside[len(known) :] if self.kinds[n] in STACKED]
        stacked = [*dict.fromkeys(self.random.choices(made, k=2))] if made else []
        carries = tuple(
            (n, names[n], self.one_of(inside, self.kinds[n]), self.name(self.kinds[n]))
            for n in chosen
        )
        stacks = tuple((n, self.name(STACKED[self.kinds[n]])) for n in stacked)
        known += [c[3] for c in carries] + [outer for _, outer in stacks]
        slices = tuple((n, names[n]) for n in along)
        return [Again(carries, slices, stacks, body, self.chance(0.3))]

    def cut(self, loop: RandomLoop) -> shoal.DistributionPolicy:
        """A way to divide the loop: a published one mostly, or any."""
        replicas = lambda: self.random.choice(  # noqa: E731
            [r for r in (2, 2, 2, 3, 4, 4, 1) if self.envs % r == 0 or self.chance(0.05)] or [1]
        )
        stages, lag = loop.stages, self.random.choice([0, 0, 0, 1, 2])
        kinds = set(stages.values())
        fits = [lambda: shoal.fused(replicas()), lambda: shoal.multi_learner(replicas())]
        fits += [partial(self.drawn, loop)]
        if kinds == {"env", "batch"}:
            fits += [
                lambda: shoal.single_learner_coarse(replicas(), lag),
                lambda: shoal.single_learner_coarse(replicas()),
                lambda: shoal.sebulba(replicas(), replicas(), lag),
                lambda: shoal.impala(replicas()),
            ]
        if "env" in stages:
            fits += [lambda: shoal.single_learner_fine(replicas())]
            fits += [lambda: shoal.environments(replicas())]
        if "env" in stages and "act" in stages:
            fits += [lambda: shoal.decoupled(replicas(), replicas(), replicas(), lag)]
        if any(path.endswith("/apply") for path in stages):
            fits += [lambda: shoal.central(replicas()), lambda: shoal.central(replicas())]
            fits += [lambda: shoal.central(replicas(), max_lag=1)]
        return self.random.choice(fits)()

    def drawn(self, loop):
        """Any division of the stages over one to three fragments."""
        count = self.random.choice([1, 2, 2, 3])
        named = [n for n in loop.stages if "/" not in n or self.chance(0.3)]
        homes = {n: self.random.randrange(count) for n in named}
        fragments = []
        for i in range(count):
            held = tuple(n for n, home in homes.items() if home == i)
            per_batch = any(loop.stages[n] == "batch" for n in held)
            replicas = self.random.choice([1, 1, 2] if per_batch else [1, 2, 2, 4])
            fragments += [shoal.Fragment(f"f{i}", held, replicas)] if held else []
        lag = shoal.Lockstep(self.random.choice([0, 0, 0, 1, 2]))
        names = [f.name for f in fragments]
        wires = tuple(shoal.Wire(x, y, lag) for x in names for y in names if x != y)
        return shoal.DistributionPolicy("drawn", tuple(fragments), wires)
