"""What of a plan lies on its board: everything that is kept, and what each end shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shoal.planning.plan import Plan
from shoal.runtime.board import Board, Post, Spec
from shoal.runtime.gates import Cell, make_cell
from shoal.runtime.memory import Room
from shoal.runtime.operations import Program
from shoal.runtime.pieces import lagged, past_names
from shoal.runtime.snapshot import value_of

Programs = Mapping[str, Program]


def make_board(plan: Plan, programs: Programs, room: Room) -> Board:
    """The board of a plan, for all workers that there may be."""
    teams = tuple((f, w) for f in programs for w in range(plan.workers(f)))
    return Board.plan(teams, _cells(plan), plan.graph.envs, tuple(_posts(plan, programs)), room)


def _cells(plan: Plan) -> dict[str, Cell]:
    """Everything that is kept: what is carried, and what is on its way to who lags."""
    values = plan.graph.values
    found = {name: make_cell(values[name]) for name in plan.graph.inputs}
    for line in lagged(plan):
        found |= {name: make_cell(values[value_of(name)]) for name in past_names(line)}
    return found


def _posts(plan: Plan, programs: Programs) -> Iterator[Post]:
    values = plan.graph.values
    for fragment, program in programs.items():
        ends = plan.ends(fragment)
        rows = plan.batch(fragment) // ends
        shown = tuple(
            Spec(name, make_cell(values[v]).rows(rows), values[v].dtype)
            for name, v in program.metrics
        )
        lines = [line for line in lagged(plan) if line.writer == fragment]
        carried = frozenset(before for before, _ in program.carry)
        carried |= {name for line in lines for name in past_names(line)}
        for end in range(ends):
            yield Post((fragment, end), ends, carried, shown)
