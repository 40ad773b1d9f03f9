"""Python to graph: trace a loop, find its environment axis, check what it promises."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import jax

from shoal.errors import ShoalError, TraceError, first_line, user_place
from shoal.graph.ir import Graph
from shoal.graph.rules import check_graph
from shoal.tracing.jaxprs import Reader
from shoal.tracing.rows import annotate, axis_of
from shoal.tracing.stage import path_name, source_of


class Algorithm(Protocol):
    """What an author writes: settings with a start and a tick."""

    def init(self, key: Any, env: Any, envs: int) -> Any:
        """Everything that is carried from tick to tick."""
        ...

    def tick(self, env: Any, state: Any) -> tuple[Any, Any]:
        """One turn of the loop: the next state, and metrics."""
        ...


@dataclass(frozen=True, eq=False)
class Origin:
    """Where a graph comes from, to trace it again at another environment count."""

    algorithm: Any
    env: Any

    @functools.cache  # noqa: B019  an origin lives as long as its graphs
    def spec(self, envs: int) -> Any:
        """Shapes and dtypes of the carried state."""
        with reraised_as("init", envs, source_of(method(self.algorithm, "init"))):
            state = jax.eval_shape(
                lambda key: self.algorithm.init(key, self.env, envs), jax.random.key(0)
            )
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)

    def start(self, seed: int, envs: int) -> Any:
        """The state before the first tick."""
        key = jax.random.key(seed)
        compiled = _COMPILING.get(self, {}).pop(envs, None)
        return compiled.result()(key) if compiled else self._init(envs)(key)

    def compile_init(self, envs: int) -> None:
        """Compile `init` on another thread, for `start`."""
        lowered = self._init(envs).lower(jax.random.key(0))
        pool = ThreadPoolExecutor(1)
        _COMPILING.setdefault(self, {})[envs] = pool.submit(lowered.compile)
        pool.shutdown(wait=False)

    @functools.cache  # noqa: B019  as above
    def _init(self, envs: int) -> Any:
        """`init` as one program for all seeds."""
        return jax.jit(lambda key: self.algorithm.init(key, self.env, envs))

    @functools.cache  # noqa: B019  as above
    def at(self, envs: int) -> Graph:
        """The graph with `envs` environments; no axes yet."""
        return _read(self, envs)

    @functools.cache  # noqa: B019  as above
    def annotated(self, envs: int) -> Graph:
        """The graph with the environment axis of every value, and where it comes from."""
        graph = self.at(envs)
        graph = annotate(graph, self._carried(graph, envs), self._wide(envs), envs)
        where = getattr(self.env, "name", self.env) or "its own loop"
        called = getattr(self.algorithm, "title", type(self.algorithm).__name__)
        title = f"{called} on {where}"
        return check_graph(replace(graph, envs=envs, title=title, origin=self))

    def _carried(self, graph: Graph, envs: int) -> dict[str, int]:
        """The environment axes of what is carried: where its shape follows their number."""
        wide = jax.tree.leaves(self.spec(2 * envs))
        if len(wide) != len(graph.inputs):
            return {}
        found = {
            name: axis_of(graph.values[name].shape, s.shape, envs)
            for name, s in zip(graph.inputs, wide, strict=True)
        }
        return {name: axis for name, axis in found.items() if axis is not None}

    def _wide(self, envs: int) -> Graph | None:
        """The graph with twice as many environments, if the loop can be traced so."""
        try:
            return self.at(2 * envs)
        except ShoalError:
            return None


# Programs of `init` that are compiling, by their origin and its number of environments.
_COMPILING: WeakKeyDictionary[Origin, dict[int, Future[Any]]] = WeakKeyDictionary()


def trace(algorithm: Algorithm, env: Any = None, *, envs: int, starts: bool = False) -> Graph:
    """The graph of `algorithm`'s tick with `envs` environments.

    What is carried and grows with the number of environments has a row for each of them; what
    else has rows follows from what the loop does with these. With `starts`, `init` compiles
    while the tick is traced: the loop is about to run.
    """
    if envs < 1:
        raise TraceError(
            f"envs={envs}: a loop needs at least one environment", "Set envs to 1 or more."
        )
    origin = Origin(algorithm, env)
    if starts:
        origin.spec(envs)
        origin.compile_init(envs)
    return origin.annotated(envs)


def _read(origin: Origin, envs: int) -> Graph:
    where = source_of(method(origin.algorithm, "tick"))
    spec = origin.spec(envs)
    state = jax.tree_util.tree_flatten_with_path(spec)[0]
    metric_names: list[str] = []

    def tick(*carry: Any) -> tuple[list[Any], list[Any]]:
        tree = jax.tree.unflatten(jax.tree.structure(spec), carry)
        after, metrics = _pair(origin.algorithm.tick(origin.env, tree), where)
        _check_same_spec(spec, after, where)
        found = jax.tree_util.tree_flatten_with_path(metrics)[0]
        metric_names[:] = [path_name(path) for path, _ in found]
        return [
            strong(x, s.dtype) for x, (_, s) in zip(jax.tree.leaves(after), state, strict=True)
        ], [x for _, x in found]

    with reraised_as("tick", envs, where):
        closed = jax.make_jaxpr(tick)(*(s for _, s in state))
    names = [path_name(path) or "state" for path, _ in state]
    return Reader().graph(closed, names, metric_names)


@contextmanager
def reraised_as(name: str, envs: int, where: str) -> Iterator[None]:
    """Turn errors while `name` is traced into a TraceError with the user's line."""
    try:
        yield
    except ShoalError:
        raise
    except Exception as error:
        raise TraceError(
            f"{name} can't be traced with {envs} environments: "
            f"{type(error).__name__}: {first_line(error)}",
            f"{name} must be pure JAX for any environment count "
            "(Shoal also traces it at twice yours).",
            user_place(error) or where,
        ) from error


def _pair(returned: Any, where: str) -> tuple[Any, Any]:
    if type(returned) is not tuple or len(returned) != 2:
        raise TraceError(
            "tick returns something else than a state and metrics",
            "Return two things: the next state, and a dictionary of metrics (it may be empty).",
            where,
        )
    return returned


def _check_same_spec(before: Any, after: Any, where: str) -> None:
    if jax.tree.structure(before) != jax.tree.structure(after):
        raise TraceError(
            "tick returns a state of another structure than it got",
            f"Return the same tree that init makes: {jax.tree.structure(before)}.",
            where,
        )
    flat = jax.tree_util.tree_flatten_with_path(before)[0]
    for (path, old), new in zip(flat, jax.tree.leaves(after), strict=True):
        shape, dtype = jax.numpy.shape(new), getattr(new, "dtype", old.dtype)
        if shape != old.shape or dtype != old.dtype:
            raise TraceError(
                f"tick changes `{path_name(path)}` from {old.dtype}{list(old.shape)} "
                f"to {dtype}{list(shape)}",
                "What is carried keeps its shape and dtype from tick to tick; "
                "fix it in tick or in init.",
                where,
            )


def strong(x: Any, dtype: Any) -> Any:
    """A Python number as an array of `dtype`; arrays as they are."""
    return x if hasattr(x, "dtype") else jax.numpy.asarray(x, dtype)


def method(algorithm: Any, name: str) -> Any:
    """The function behind a method that an algorithm must have."""
    found = getattr(type(algorithm), name, getattr(algorithm, name, None))
    if found is None:
        raise TraceError(
            f"{type(algorithm).__name__} has no method `{name}`",
            "An algorithm is an object with init(key, env, envs) and tick(env, state).",
        )
    return found
