"""Small loops and cuts of them, drawn by hypothesis.

A loop is a list of uses of operations and of loops over such lists, written as data. Values have a
kind: a row [envs, WIDE] and a whole [WIDE], their stacks over time (roll, trail), keys a row, and a
key that all rows share.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from hypothesis import strategies as st
from jax import lax

import shoal
from shoal import gather, mean

ENVS, WIDE, LENGTH = 4, 2, 3


@dataclass(frozen=True)
class Op:
    """What a use does: of which kinds it reads and writes, and whether it is a stage or glue."""

    per: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    function: Callable[..., Any]
    rows: str = "apart"  # or "mixed", or "agreed" on by replicas


def roam(key, x):
    key, now = jax.random.split(key)
    return key, jnp.tanh(x + jax.random.normal(now, x.shape))


def shake(key, x):
    key, now = jax.random.split(key)
    return key, jnp.tanh(x + jax.random.normal(now, x.shape))


def learn(r, w):
    return 0.5 * w + mean(jnp.cos(r).mean((0, 1)))


def numbered(x):
    return x + 0.1 * jnp.arange(len(x))[:, None]


def rows_first(r):
    return r.swapaxes(0, 1).reshape(r.shape[1], -1)[:, :WIDE]


def fit(x, w):
    """A stage of stages: slopes that replicas agree on, applied twice."""

    def again(w, rate):
        return apply(w, mean(rate * grad(w, x))), None

    return lax.scan(again, w, jnp.array([0.5, 0.25]))[0]


@shoal.stage
def grad(w, x):
    return jax.grad(lambda w: jnp.mean(jnp.square(w - jnp.tanh(x))))(w)


@shoal.stage
def apply(w, slope):
    return w - slope


OPS = {
    "push": Op("env", ("row", "row"), ("row",), lambda x, y: jnp.tanh(x + 0.7 * y)),
    "steer": Op("env", ("row", "whole"), ("row",), lambda x, w: jnp.tanh(x - 0.5 * w)),
    "roam": Op("env", ("keys", "row"), ("keys", "row"), roam),
    "fork": Op("env", ("row",), ("row", "row"), lambda x: (jnp.sin(x), x * x)),
    "weigh": Op("batch", ("row",), ("whole",), lambda x: jnp.tanh(mean(x.mean(0))), "agreed"),
    "learn": Op("batch", ("roll", "whole"), ("whole",), learn, "agreed"),
    "fit": Op("batch", ("row", "whole"), ("whole",), fit, "agreed"),
    "centre": Op("batch", ("row",), ("row",), lambda x: x - mean(x.mean(0)), "agreed"),
    "best": Op("batch", ("row",), ("whole",), lambda x: gather(x).max(0), "agreed"),
    "plain": Op("batch", ("row", "whole"), ("whole",), lambda x, w: w * x.max(0), "mixed"),
    "shake": Op("batch", ("key", "row"), ("key", "row"), shake, "mixed"),
    "mix": Op("glue", ("row", "row"), ("row",), lambda x, y: 0.5 * (x + y)),
    "scale": Op("glue", ("row", "whole"), ("row",), lambda x, w: x * jnp.cos(w)),
    "spread": Op("glue", ("whole", "row"), ("row",), lambda w, x: jnp.broadcast_to(w, x.shape)),
    "blend": Op("glue", ("whole", "whole"), ("whole",), lambda v, w: 0.5 * (v - w)),
    "fixed": Op("glue", (), ("whole",), lambda: jnp.arange(WIDE) / WIDE),
    "less_mean": Op("glue", ("row",), ("row",), lambda x: x - x.mean(0), "mixed"),
    "turned": Op("glue", ("row",), ("row",), lambda x: x[::-1], "mixed"),
    "numbered": Op("glue", ("row",), ("row",), numbered, "mixed"),
    "average": Op("glue", ("row",), ("whole",), lambda x: x.mean(0), "mixed"),
    "agreed": Op("glue", ("row",), ("whole",), lambda x: mean(x.mean(0)), "agreed"),
    "last": Op("glue", ("roll",), ("row",), lambda r: r[-1]),
    "over_time": Op("glue", ("roll",), ("row",), lambda r: r.mean(0)),
    "summed": Op("glue", ("roll",), ("roll",), lambda r: jnp.sin(jnp.cumsum(r, axis=0))),
    "backwards": Op("glue", ("roll",), ("roll",), lambda r: r[::-1]),
    "rows_first": Op("glue", ("roll",), ("row",), rows_first),
    "latest": Op("glue", ("trail",), ("whole",), lambda t: t[-1]),
}


@dataclass(frozen=True)
class Use:
    """One use of an operation; `name` is a stage's own name, and empty for glue."""

    op: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    name: str = ""


@dataclass(frozen=True)
class Again:
    """A scan: carried values as (outer, inner, next inner, final), the others as pairs."""

    carries: tuple[tuple[str, str, str, str], ...]
    slices: tuple[tuple[str, str], ...]
    stacks: tuple[tuple[str, str], ...]
    body: tuple[Any, ...]
    reverse: bool


@dataclass(frozen=True)
class RandomLoop:
    """A loop in Shoal's sense: a list of uses, and which value replaces which carried one."""

    body: tuple[Any, ...]
    carry: tuple[tuple[str, str], ...]
    shown: tuple[str, ...]

    def init(self, key, env, envs):
        rows = jnp.arange(envs)
        return {
            "a": jnp.sin(jnp.arange(envs * WIDE).reshape(envs, WIDE) + 1.0),
            "b": jnp.cos(jnp.arange(envs * WIDE).reshape(envs, WIDE) + 1.0),
            "keys": jax.vmap(lambda row: jax.random.fold_in(key, row))(rows),
            "v": jnp.linspace(-1, 1, WIDE),
            "w": jnp.linspace(0, 1, WIDE),
            "key": key,
        }

    def tick(self, env, state):
        known = dict(state)
        self.run(self.body, known)
        return {old: known[new] for old, new in self.carry}, {n: known[n] for n in self.shown}

    def run(self, body, known):
        for item in body:
            if isinstance(item, Again):
                self.again(item, known)
                continue
            made = self.stages[item.op, item.name](*(known[r] for r in item.reads))
            name(known, item.writes, made if isinstance(made, tuple) else (made,))

    def again(self, item, known):
        outer, inner, after, final = zip(*item.carries, strict=True)

        def turn(carry, xs):
            inside = dict(known)
            name(inside, [*inner, *(n for _, n in item.slices)], [*carry, *xs])
            self.run(item.body, inside)
            return [inside[n] for n in after], [inside[n] for n, _ in item.stacks]

        first, xs = [known[n] for n in outer], [known[n] for n, _ in item.slices]
        last, ys = lax.scan(turn, first, xs, LENGTH, item.reverse)
        name(known, [*final, *(n for _, n in item.stacks)], [*last, *ys])

    @cached_property
    def stages(self):
        return {(u.op, u.name): marked(u) for u in uses(self.body)}


def name(known, names, values):
    known.update(zip(names, values, strict=True))


def marked(use):
    """The function of a use: glue as it is, a stage as a stage of its own name."""
    op = OPS[use.op]
    if op.per == "glue":
        return op.function
    if op.per == "batch":
        return shoal.stage(name=use.name)(op.function)
    if "whole" not in op.reads:
        return shoal.stage(per="env", name=use.name)(op.function)

    shared = shoal.stage(per="env", name=use.name)(lambda x, *, w: op.function(x, w))
    return lambda x, w: shared(x, w=w)


def uses(body):
    for item in body:
        yield from uses(item.body) if isinstance(item, Again) else [item]


STAGES = [name for name, op in OPS.items() if op.per != "glue"]
GLUE = [name for name, op in OPS.items() if op.per == "glue"]
CARRIED = {"a": "row", "b": "row", "keys": "keys", "v": "whole", "w": "whole", "key": "key"}
STACKED = {"row": "roll", "whole": "trail"}
SLICED = {"roll": "row", "trail": "whole"}


class Author:
    """Writes one loop, asking `draw` for every choice.

    Shoal takes an author's word for it that what replicas average is an average over their rows.
    This author keeps it: what comes of mixed rows is not agreed on within the tick.
    """

    def __init__(self, draw):
        self.draw, self.named, self.staged = draw, 0, 0
        self.kinds, self.mixed = dict(CARRIED), set()

    def name(self, kind, mixed=False):
        self.named += 1
        name = f"x{self.named}"
        self.kinds[name] = kind
        if mixed:
            self.mixed.add(name)
        return name

    def loop(self):
        known, body = list(CARRIED), []
        for _ in range(self.draw(st.integers(2, 8))):
            body += self.item(known, depth=0)
        while self.staged < 3:
            body += self.use(known, STAGES)
        carry = tuple((n, self.one_of(known, kind)) for n, kind in CARRIED.items())
        shown = tuple(self.one_of(known, kind) for kind in ("row", "whole"))
        return RandomLoop(tuple(body), carry, tuple(dict.fromkeys(shown)))

    def item(self, known, depth):
        if depth < 2 and self.staged < 5 and self.draw(st.integers(0, 3)) == 0:
            return self.again(known, depth)
        stage = self.staged < 6 and self.draw(st.booleans())
        return self.use(known, STAGES if stage else GLUE)

    def use(self, known, among):
        name = self.draw(st.sampled_from([n for n in among if self.fits(known, OPS[n])]))
        op = OPS[name]
        reads = tuple(self.one_of(known, kind, op.rows == "agreed") for kind in op.reads)
        mixed = op.rows == "mixed" or bool(self.mixed & set(reads))
        writes = tuple(self.name(kind, mixed) for kind in op.writes)
        known += writes
        if op.per == "glue":
            return [Use(name, reads, writes)]
        self.staged += 1
        return [Use(name, reads, writes, f"s{self.staged}")]

    def fits(self, known, op):
        return all(self.choices(known, kind, op.rows == "agreed") for kind in op.reads)

    def choices(self, known, kind, apart):
        return [n for n in known if self.kinds[n] == kind and not (apart and n in self.mixed)]

    def one_of(self, known, kind, apart=False):
        """A value of that kind, a late one more likely than an early one."""
        fits = self.choices(known, kind, apart)
        return fits[-1 - self.draw(st.integers(0, min(3, len(fits) - 1)))]

    def again(self, known, depth):
        kinds = [n for n in known if self.kinds[n] in ("row", "whole", "keys", "key")]
        chosen = self.draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=4, unique=True))
        looped = [n for n in known if self.kinds[n] in SLICED]
        sliced = [self.draw(st.sampled_from(looped))] if looped and self.draw(st.booleans()) else []
        inner = {n: self.name(self.kinds[n], n in self.mixed) for n in chosen}
        inner |= {n: self.name(SLICED[self.kinds[n]], n in self.mixed) for n in sliced}
        inside = [*known, *inner.values()]
        body = [
            i for _ in range(self.draw(st.integers(1, 4))) for i in self.item(inside, depth + 1)
        ]
        after = {n: self.one_of(inside, self.kinds[n], n not in self.mixed) for n in chosen}
        made = [n for n in inside if self.kinds[n] in STACKED and n not in known]
        stacked = (
            self.draw(st.lists(st.sampled_from(made), max_size=2, unique=True)) if made else []
        )
        carries = tuple(
            (n, inner[n], after[n], self.name(self.kinds[n], n in self.mixed)) for n in chosen
        )
        stacks = tuple((n, self.name(STACKED[self.kinds[n]], n in self.mixed)) for n in stacked)
        known += [c[3] for c in carries] + [outer for _, outer in stacks]
        slices = tuple((n, inner[n]) for n in sliced)
        return [Again(carries, slices, stacks, tuple(body), self.draw(st.booleans()))]


@st.composite
def loops(draw):
    """A loop of up to six stages."""
    return Author(draw).loop()


@st.composite
def cuts(draw, loop):
    """A way to divide a loop's stages over one to three fragments."""
    stages = {u.name: OPS[u.op] for u in uses(loop.body) if u.name}
    stages |= {f"{n}/apply": op for n, op in stages.items() if op.function is fit}
    named = [n for n in stages if "/" not in n or draw(st.booleans())]
    count = draw(st.sampled_from([3, 2, 1]))
    homes = {n: draw(st.sampled_from([*range(count)])) for n in named}
    fragments = []
    for i in range(count):
        held = tuple(n for n, home in homes.items() if home == i)
        mixed = any(stages[n].rows == "mixed" for n in held)
        replicas = draw(st.sampled_from([1, 1, 1, 2] if mixed else [2, 1]))
        fragments += [shoal.Fragment(f"f{i}", held, replicas)] if held else []
    lag = shoal.Lockstep(draw(st.sampled_from([0, 0, 1, 2])))
    names = [f.name for f in fragments]
    wires = tuple(shoal.Wire(x, y, lag) for x in names for y in names if x != y)
    return shoal.DistributionPolicy("drawn", tuple(fragments), wires)
