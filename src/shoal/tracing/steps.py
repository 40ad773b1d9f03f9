"""One operation on a share: how its operands must lie, how its results do, what it runs with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.graph.layout import REPLICATED, Layout, Replicated, Sharded


@dataclass(frozen=True, slots=True)
class Step:
    """How an operation runs on a share; `params` gives its parameters for a number of rows."""

    ins: tuple[Layout, ...]
    outs: tuple[Layout, ...]
    params: Callable[[int], dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class Operation:
    """An equation with the layouts of its operands, in a loop with `count` environments."""

    equation: Any
    ins: tuple[Layout, ...]
    count: int

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of the whole operation."""
        return self.equation.params

    def shape(self, index: int = 0) -> tuple[int, ...]:
        """The whole shape of an operand."""
        return self.equation.invars[index].aval.shape

    @property
    def out(self) -> tuple[int, ...]:
        """The whole shape of the first result."""
        return self.equation.outvars[0].aval.shape

    def rows(self, index: int = 0) -> Sharded | None:
        """How an operand's rows lie, if it has any."""
        layout = self.ins[index]
        return layout if isinstance(layout, Sharded) else None

    @property
    def common(self) -> Sharded | None:
        """How the rows of all operands that have any lie, if they lie alike."""
        found = {layout for layout in self.ins if isinstance(layout, Sharded)}
        return found.pop() if len(found) == 1 else None

    def alike(self, rows: Sharded, outs: Sequence[Sharded] | None = None) -> Step:
        """A step in which every operand that has the axis of `rows` lies like them."""
        fits = [
            len(v.aval.shape) > rows.axis and v.aval.shape[rows.axis] == rows.size(self.count)
            for v in self.equation.invars
        ]
        ins = tuple(rows if fit else layout for fit, layout in zip(fits, self.ins, strict=True))
        return Step(ins, tuple(outs) if outs else (rows,) * len(self.equation.outvars))

    def resized(self, key: str, rows: Sharded, axis: int) -> Callable[[int], dict[str, Any]]:
        """The parameter `key`, a shape, with one axis as long as the share's rows make it."""
        shape = tuple(self.params[key])

        def local(share: int) -> dict[str, Any]:
            return {key: (*shape[:axis], rows.size(share), *shape[axis + 1 :])}

        return local


Rule = Callable[[Operation], Step | None]


def uniform_axes(equation: Any, ins: Sequence[Layout]) -> frozenset[int]:
    """The axes along which a result made of replicated operands has equal rows."""
    kind, shape = equation.primitive.name, equation.outvars[0].aval.shape
    seen = [x.uniform if isinstance(x, Replicated) else frozenset() for x in ins]
    if kind == "broadcast_in_dim":
        dims = equation.params["broadcast_dimensions"]
        old = equation.invars[0].aval.shape
        grown = {d for i, d in enumerate(dims) if i in seen[0] or old[i] == 1 != shape[d]}
        return frozenset(grown | (set(range(len(shape))) - set(dims)))
    if kind == "empty":
        return frozenset(range(len(shape)))
    ranks = [len(v.aval.shape) for v in equation.invars]
    if kind in ELEMENTWISE and ranks and all(r in (0, len(shape)) for r in ranks):
        found = frozenset(range(len(shape)))
        for axes, v in zip(seen, equation.invars, strict=True):
            old = v.aval.shape
            spread = {i for i, n in enumerate(old) if n == 1 != shape[i]}
            found &= axes | spread if old else found
        return found
    return frozenset()


def replicated(equation: Any, ins: Sequence[Layout]) -> tuple[Layout, ...]:
    """The layouts of results that are made of nothing but what all replicas have."""
    outs = equation.outvars
    if len(outs) != 1:
        return (REPLICATED,) * len(outs)
    return (Replicated(uniform_axes(equation, ins)),)


UNCHANGED = frozenset({"optimization_barrier", "pvary", "device_put"})  # each operand as it is
ELEMENTWISE = frozenset(
    {
        *("abs", "neg", "sign", "conj", "real", "imag", "complex", "log2", "one_minus_square"),
        *("add", "add_any", "sub", "mul", "div", "rem"),
        *("pow", "integer_pow", "square", "sqrt", "rsqrt", "cbrt"),
        *("exp", "exp2", "expm1", "log", "log1p", "logistic"),
        *("digamma", "lgamma", "erf", "erf_inv", "erfc", "polygamma", "zeta"),
        *("igamma", "igammac", "igamma_grad_a", "random_gamma_grad", "regularized_incomplete_beta"),
        *("bessel_i0e", "bessel_i1e"),
        *("sin", "cos", "tan", "asin", "acos", "atan", "atan2"),
        *("sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
        *("min", "max", "clamp", "floor", "ceil", "round", "nextafter", "is_finite"),
        *("eq", "ne", "ge", "gt", "le", "lt", "select_n", "and", "or", "xor", "not"),
        *("eq_to", "le_to", "lt_to", "mulhi"),
        *("shift_left", "shift_right_arithmetic", "shift_right_logical"),
        *("clz", "population_count", "reduce_precision"),
        *("copy", "copy_p", "convert_element_type"),
        *("name", "stop_gradient", "random_clone", "random_fold_in", "threefry2x32"),
        *("random_seed", "zeros_like"),
    }
)
