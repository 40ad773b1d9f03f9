"""The source code of a plan's stages, by the places that the plan names."""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from shoal.errors import short_place

Json = Mapping[str, Any]


def with_sources(data: Json) -> dict[str, Any]:
    """A plan or a graph as JSON data, with the source code of its stages, loops and agreements."""
    return {**data, "sources": sources(set(_places(data.get("graph", data))))}


def sources(places: Iterable[str]) -> dict[str, dict[str, Any]]:
    """File, first line and text of the function at each place such as `folder/file.py:88`.

    Only files of modules that are loaded are searched; other places are left out.
    """
    files = {short_place(file, 0).rpartition(":")[0]: file for file in _files()}
    found = {}
    for place in sorted(places):
        short, _, line = place.rpartition(":")
        if short in files and line.isdecimal() and (part := _function(files[short], int(line))):
            first, text = part
            found[place] = {"file": files[short], "first": first, "text": text}
    return found


def _files() -> Iterator[str]:
    """The files of loaded modules, and the cells of a notebook."""
    for module in list(sys.modules.values()):
        if isinstance(file := getattr(module, "__file__", None), str) and file.endswith(".py"):
            yield file
    yield from list(linecache.cache)


def _function(file: str, line: int) -> tuple[int, str] | None:
    """The first line and the text of the innermost function that has a line of a file."""
    lines = linecache.getlines(file)
    try:
        nodes = [n for n in ast.walk(ast.parse("".join(lines))) if _has(n, line)]
    except SyntaxError:
        return None
    if not nodes:
        return None
    inner: Any = max(nodes, key=_first)
    first = _first(inner)
    return first, "".join(lines[first - 1 : inner.end_lineno])


def _has(node: Any, line: int) -> bool:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    return isinstance(node, kinds) and _first(node) <= line <= (node.end_lineno or 0)


def _first(node: Any) -> int:
    """The first line of a function, its decorators included."""
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])


def _places(body: Json) -> Iterator[str]:
    for node in body["nodes"]:
        if node["kind"] != "glue" and node.get("source"):
            yield node["source"]
        if node.get("body"):
            yield from _places(node["body"])
