"""Commands that list what there is to choose from: algorithms."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from typing import Annotated, Any

from shoal.algorithms import ALGORITHMS, PRESETS
from shoal.errors import UnknownNameError
from shoal.runs.inputs.catalogue import settings_of
from shoal.runs.inputs.options import Doc


@dataclass(frozen=True)
class AlgorithmsOptions:
    """The options of `shoal algorithms`."""

    name: Annotated[str | None, Doc("one of them; without it, all are listed")] = None


def algorithms(options: AlgorithmsOptions) -> int:
    """Print every algorithm in a few lines, or one with its settings."""
    if options.name is not None:
        print(described(options.name))
    else:
        end = "shoal algorithms NAME shows the settings of one, with their defaults."
        print("\n\n".join([*map(entry, ALGORITHMS), end]))
    return 0


def described(name: str) -> str:
    """One algorithm with all its settings."""
    if name not in ALGORITHMS:
        raise UnknownNameError("algorithm", name, ALGORITHMS)
    rows = [(f"{s.name}: {s.kind} = {s.value!r}", s.help) for s in settings_of(ALGORITHMS[name])]
    wide = max((len(line) for line, _ in rows), default=0)
    shown = [f"  {line:{wide}}  {text}".rstrip() for line, text in rows]
    end = f"Change one with: shoal train {name} ENV --NAME VALUE"
    return "\n".join([entry(name), "", *shown, "", end])


def entry(name: str) -> str:
    """An algorithm's summary, paper, action spaces, agents and presets."""
    kind, pad = ALGORITHMS[name], " " * 2
    lines = [f"{name}: {_summary(kind)}"]
    lines.append(f"{pad}paper    {kind.paper}")
    lines.append(f"{pad}actions  {', '.join(space.__name__ for space in kind.actions)}")
    if presets := PRESETS.get(name):
        lines.append(f"{pad}presets  {', '.join(presets)}")
    lines.append(f"{pad}agents   {getattr(kind, 'agents', 'one, or several that are alike')}")
    return "\n".join(lines)


def _summary(kind: Any) -> str:
    """The first line of its file, without the paper, which is listed separately."""
    first = (inspect.getdoc(sys.modules[kind.__module__]) or "").split("\n")[0]
    return first.replace(f" ({kind.paper})", "")
