"""Reading a jaxpr into a graph."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core as jex

from shoal.errors import TraceError
from shoal.graph.ir import Agree, Carry, Choice, Glue, Graph, Link, Loop, Node, Stage, Value
from shoal.graph.layout import REPLICATED, Findings, Layout, Replicated, Sharded
from shoal.tracing.agree import agree_p
from shoal.tracing.equations import (
    CALLS,
    below,
    equation_mark,
    holds,
    inner,
    is_agreement,
    is_stage,
    opened,
    place_of,
    scan_counts,
)
from shoal.tracing.flow import LOST, Flow
from shoal.tracing.local import Held, Local
from shoal.tracing.stage import Mark

_SPOKEN = {"while": "lax.while_loop", "cond": "lax.cond"}


@dataclass(frozen=True, slots=True)
class Fixed:
    """A number written in the loop itself."""

    value: Any


Ref = str | Fixed


@dataclass(frozen=True, slots=True)
class Code:
    """How to run a node: its equation, where each argument comes from, where results go."""

    equation: Any
    args: tuple[Ref, ...]
    outs: tuple[str | None, ...]

    def layouts(
        self, known: Mapping[str, Layout], count: int, findings: Findings
    ) -> dict[str, Layout]:
        """How what it writes lies over replicas, by how what it reads does."""
        ins = [known[a] if isinstance(a, str) else REPLICATED for a in self.args]
        return self._named(self._flow(ins, Flow(count, findings)))

    def _flow(self, ins: Sequence[Layout], flow: Flow) -> Sequence[Layout]:
        if self.equation is None:
            return ins
        mark = equation_mark(self.equation)
        if mark is None or not mark.host:
            return flow.equation(self.equation, ins)
        if mark.per == "batch":
            whole = all(isinstance(x, Replicated) for x in ins)
            return [REPLICATED if whole else LOST] * len(self.outs)
        # A host stage per environment promises independent rows; other arguments are shared.
        fits = all(
            isinstance(x, Replicated) or (is_row and x == Sharded(0))
            for x, is_row in zip(ins, host_rows(self.equation), strict=True)
        )
        return [Sharded(0) if fits else LOST] * len(self.outs)

    @property
    def rows_for_host(self) -> tuple[str, ...]:
        """What a host stage per environment reads by rows, however it was made."""
        mark = equation_mark(self.equation) if self.equation is not None else None
        if mark is None or not mark.host or mark.per != "env":
            return ()
        pairs = zip(self.args, host_rows(self.equation), strict=True)
        return tuple(a for a, is_row in pairs if is_row and isinstance(a, str))

    def on_share(self, held: Mapping[str, Held], local: Local) -> dict[str, Held]:
        """What it writes on a replica's share, given what it reads."""
        args = [held[a] if isinstance(a, str) else Held(a.value) for a in self.args]
        return self._named(args if self.equation is None else local.equation(self.equation, args))

    def _named(self, made: Sequence[Any]) -> dict[str, Any]:
        return {name: x for name, x in zip(self.outs, made, strict=True) if name is not None}


def host_rows(equation: Any) -> list[bool]:
    """Which arguments of a host stage are rows: those passed by position."""
    jaxpr, _ = opened(equation.params["jaxpr"])
    (call,) = (e for e in jaxpr.eqns if e.primitive.name == "pure_callback")
    count = call.params["callback"].callback_func.rows
    rows = {id(v) for v in call.invars[:count]}
    return [id(v) in rows for v in jaxpr.invars]


def value_of(name: str, aval: Any) -> Value:
    """The spec of a traced variable."""
    dtype = aval.dtype
    size = dtype.itemsize if not jax.numpy.issubdtype(dtype, jax.dtypes.prng_key) else 8
    return Value(name, tuple(aval.shape), str(dtype), size)


class Reader:
    """Reads jaxprs into graphs; keeps the names unique and the values in one table."""

    def __init__(self) -> None:
        self.values: dict[str, Value] = {}
        self._nodes: Counter[str] = Counter()
        self._values: Counter[str] = Counter()

    def name(self, base: str) -> str:
        """A name that no other node has."""
        return _unlike(base, self._nodes)

    def value(self, base: str, aval: Any) -> str:
        """A new value's name."""
        name = _unlike(base, self._values)
        self.values[name] = value_of(name, aval)
        return name

    def graph(self, closed: Any, inputs: Sequence[str], metrics: Sequence[str]) -> Graph:
        """The graph of a whole tick; the jaxpr returns the carry and then the metrics."""
        jaxpr, consts = opened(closed)
        refs: list[Ref] = [self.value(n, v.aval) for n, v in zip(inputs, jaxpr.invars, strict=True)]
        outs = [f"{name}'" for name in inputs] + [f"metrics.{m}" for m in metrics]
        names = self.outputs(jaxpr, jaxpr.invars, [str(r) for r in refs], outs)
        nodes = self.body(jaxpr, consts, refs, names, "")
        carry = tuple(names[: len(inputs)])
        shown = tuple(Link(m, n) for m, n in zip(metrics, names[len(inputs) :], strict=True))
        return Graph(tuple(str(r) for r in refs), carry, tuple(nodes), self.values, shown)

    def outputs(
        self, jaxpr: Any, carried: Sequence[Any], ins: Sequence[str], bases: Sequence[str]
    ) -> list[str]:
        """Names for a jaxpr's results; a carried value returned unchanged keeps its name."""
        same = {
            i: name
            for i, (var, name) in enumerate(zip(carried, ins, strict=False))
            if jaxpr.outvars[i] is var
        }
        return [same.get(i) or self.value(bases[i], v.aval) for i, v in enumerate(jaxpr.outvars)]

    def body(
        self,
        jaxpr: Any,
        consts: Sequence[Any],
        refs: Sequence[Ref],
        outs: Sequence[str],
        scope: str,
    ) -> list[Node]:
        """The nodes of a jaxpr whose inputs are `refs`, made so that its results are `outs`."""
        env: dict[Any, Ref] = dict(zip(jaxpr.invars, refs, strict=True))
        env |= {v: Fixed(c) for v, c in zip(jaxpr.constvars, consts, strict=True)}
        wanted: dict[Any, str] = {}
        for var, name in zip(jaxpr.outvars, outs, strict=True):
            if not isinstance(var, jex.Literal) and var not in env:
                wanted.setdefault(var, name)
        nodes: list[Node] = []
        for equation in jaxpr.eqns:
            args = tuple(
                env[v] if not isinstance(v, jex.Literal) else Fixed(v.val) for v in equation.invars
            )
            nodes += self.equation(equation, args, wanted, env, scope)
        for var, name in zip(jaxpr.outvars, outs, strict=True):
            if isinstance(var, jex.Literal) or (wanted.get(var) != name and env[var] != name):
                ref = Fixed(var.val) if isinstance(var, jex.Literal) else env[var]
                nodes.append(self.copy(ref, name, scope))
        return nodes

    def copy(self, ref: Ref, name: str, scope: str) -> Glue:
        """A node that gives a value (or a number) another name."""
        reads = (ref,) if isinstance(ref, str) else ()
        return Glue(
            self.name(f"{scope}copy"), "copy", reads, (name,), code=Code(None, (ref,), (name,))
        )

    def equation(
        self, equation: Any, args: tuple[Ref, ...], wanted: dict, env: dict, scope: str
    ) -> list[Node]:
        """The nodes of one equation; its results are entered into `env`."""
        mark, kind = equation_mark(equation), equation.primitive.name
        how = _how(equation)
        base = mark.name if mark else "loop" if kind == "scan" else how or kind
        outs: list[str | None] = []
        labels = output_labels(equation)
        for i, var in enumerate(equation.outvars):
            if isinstance(var, jex.DropVar):
                outs.append(None)
                continue
            out = wanted.get(var) or self.value(f"{scope}{base}{labels[i]}", var.aval)
            env[var] = out
            outs.append(out)
        code = Code(equation, args, tuple(outs))
        if mark and mark.host:
            return self.host_stage(mark, code, scope)
        if mark:
            return [self.stage(mark, code, scope)]
        if how:
            return [
                Agree(
                    self.name(f"{scope}{how}"),
                    how,
                    _names(args),
                    _made(outs),
                    place_of(equation),
                    code,
                )
            ]
        if holds(equation, lambda e: is_stage(e) or is_agreement(e)):
            return self.container(code, scope)
        name, op = self.name(f"{scope}{kind}"), equation.params.get("name", kind)
        return [Glue(name, op, _names(args), _made(outs), place_of(equation), code=code)]

    def stage(self, mark: Mark, code: Code, scope: str) -> Stage:
        """One use of a stage; its body is read only where stages nest in it."""
        equation = code.equation
        name = self.name(f"{scope}{mark.name}")
        nested = any(holds(e, is_stage) for j in below(equation) for e in j.eqns)
        agrees = holds(equation, is_agreement)
        body = None
        if nested and mark.per == "batch":
            jaxpr, consts = opened(equation.params["jaxpr"])
            outs = [
                o or self.value(f"{name}/unused", v.aval)
                for o, v in zip(code.outs, jaxpr.outvars, strict=True)
            ]
            nodes = self.body(jaxpr, consts, code.args, outs, f"{name}/")
            body = Graph((), (), tuple(nodes))
        return Stage(
            name, mark.name, mark.per, _names(code.args), _made(code.outs), mark.source,
            mark.host, mark.on_policy, agrees, body, mark.role, code,
        )  # fmt: skip

    def host_stage(self, mark: Mark, code: Code, scope: str) -> list[Node]:
        """A host stage, and before it numbers of the loop as values that can be dealt out."""
        before, args = [], list(code.args)
        for i, arg in enumerate(args):
            if isinstance(arg, Fixed) and mark.per == "env":
                args[i] = self.value(f"{scope}{mark.name}.given", code.equation.invars[i].aval)
                before.append(self.copy(arg, str(args[i]), scope))
        return [*before, self.stage(mark, Code(code.equation, tuple(args), code.outs), scope)]

    def container(self, code: Code, scope: str) -> list[Node]:
        """An equation that holds stages: calls are inlined, scans become loops."""
        equation, kind = code.equation, code.equation.primitive.name
        if kind == "scan":
            return self.loop(code, scope)
        if kind in CALLS and (found := inner(equation)):
            outs = [
                o or self.value(f"{scope}unused", v.aval)
                for o, v in zip(code.outs, equation.outvars, strict=True)
            ]
            return self.body(*found, code.args, outs, scope)
        return [self.choice(code, scope)]

    def choice(self, code: Code, scope: str) -> Node:
        """An equation that holds stages and can't be cut: they all run where it does."""
        equation, kind = code.equation, code.equation.primitive.name
        marks = list(dict.fromkeys(marks_in(equation)))
        if host := next((m for m in marks if m.host), None):
            raise TraceError(
                f"host stage `{host.name}` ({host.source}) is called inside "
                f"`{_SPOKEN.get(kind, kind)}`, which is compiled whole",
                "Call it from tick or inside lax.scan, and choose with jnp.where among what it "
                "returns.",
                place_of(equation),
            )
        stages = tuple(
            Stage(m.name, m.name, m.per, (), (), m.source, on_policy=m.on_policy, role=m.role)
            for m in marks
        )
        name, agrees = self.name(f"{scope}{kind}"), holds(equation, is_agreement)
        reads, writes = _names(code.args), _made(code.outs)
        return Choice(name, kind, stages, reads, writes, place_of(equation), agrees, code)

    def loop(self, code: Code, scope: str) -> list[Node]:
        """A scan as a loop node, with its constants read by their outer names."""
        equation = code.equation
        jaxpr, consts = opened(equation.params["jaxpr"])
        n_const, n_carry = scan_counts(equation)
        name, before = self.name(f"{scope}loop"), []
        args = list(code.args)
        for i in range(n_const, len(args)):
            if isinstance(args[i], Fixed):
                made = self.value(f"{name}.first", equation.invars[i].aval)
                before.append(self.copy(args[i], made, scope))
                args[i] = made
        inside = f"{name}/"
        ins = [
            self.value(f"{inside}in.{_tail(a)}", v.aval)
            for a, v in zip(args[n_const:], jaxpr.invars[n_const:], strict=True)
        ]
        outer = [
            o or self.value(f"{name}.unused", v.aval)
            for o, v in zip(code.outs, equation.outvars, strict=True)
        ]
        carried = jaxpr.invars[n_const : n_const + n_carry]
        outs = self.outputs(jaxpr, carried, ins, [f"{inside}out.{_tail(o)}" for o in outer])
        nodes = self.body(jaxpr, consts, [*args[:n_const], *ins], outs, inside)
        carries = tuple(
            Carry(str(args[n_const + i]), ins[i], outs[i], outer[i]) for i in range(n_carry)
        )
        slices = tuple(
            Link(str(a), v) for a, v in zip(args[n_const + n_carry :], ins[n_carry:], strict=True)
        )
        stacks = tuple(Link(o, v) for o, v in zip(outer[n_carry:], outs[n_carry:], strict=True))
        body = Graph(tuple(ins), tuple(outs), tuple(nodes))
        length, reverse = equation.params["length"], equation.params["reverse"]
        code = Code(equation, tuple(args), tuple(outer))
        return [
            *before,
            Loop(name, length, reverse, body, carries, slices, stacks, place_of(equation), code),
        ]


def _unlike(base: str, given: Counter[str]) -> str:
    """A name like `base` that isn't taken."""
    given[base] += 1
    return base if given[base] == 1 else _unlike(f"{base}#{given[base]}", given)


def output_labels(equation: Any) -> list[str]:
    """What to call each result: a stage's by its tree, a loop's by the stage that made it."""
    count = len(equation.outvars)
    numbered = [f".{i}" for i in range(count)]
    if equation_mark(equation):
        jaxpr, _ = opened(equation.params["jaxpr"])
        paths = jaxpr.debug_info.result_paths or ()
        return [_dotted(p) for p in paths] if len(paths) == count else numbered
    if equation.primitive.name == "scan":
        jaxpr, _ = opened(equation.params["jaxpr"])
        makers = {v: (e, i) for e in jaxpr.eqns if is_stage(e) for i, v in enumerate(e.outvars)}
        found = [None if isinstance(v, jex.Literal) else makers.get(v) for v in jaxpr.outvars]
        return [_made_by(maker, f".{i}") for i, maker in enumerate(found)]
    return [""] if count == 1 else numbered


def _dotted(path: str) -> str:
    """JAX's path of a result, such as `result[0]['params'].w`, as `.0.params.w`."""
    return re.sub(r"\['?(.*?)'?\]", r".\1", path.removeprefix("result"))


def _made_by(maker: tuple[Any, int] | None, otherwise: str) -> str:
    if maker is None:
        return otherwise
    mark = equation_mark(maker[0])
    return f".{mark.name if mark else ''}{output_labels(maker[0])[maker[1]]}"


def _names(args: Sequence[Ref]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(a for a in args if isinstance(a, str)))


def _made(outs: Sequence[str | None]) -> tuple[str, ...]:
    return tuple(o for o in outs if o is not None)


def _how(equation: Any) -> str:
    """How replicas agree in an equation, if they do."""
    if equation.primitive is agree_p:
        return equation.params["how"]
    return equation.primitive.name.removeprefix("shoal_") if is_agreement(equation) else ""


def _tail(ref: Ref) -> str:
    if not isinstance(ref, str):
        return "number"
    return re.sub(r"^(in|out)\.", "", ref.rsplit("/", 1)[-1].rstrip("'"))


def marks_in(equation: Any) -> Iterator[Mark]:
    """The marks of all stages that are called inside an equation, those inside stages not."""
    for jaxpr in below(equation):
        for e in jaxpr.eqns:
            if mark := equation_mark(e):
                yield mark
            else:
                yield from marks_in(e)
