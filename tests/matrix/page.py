"""docs/matrix.md from verdicts, and back."""

from collections.abc import Mapping
from pathlib import Path

from matrix.cells import BACKENDS, FORMS, NOT_RUN, TRIED, Verdict

PAGE = Path(__file__).parents[2] / "docs" / "matrix.md"
Cell = tuple[str, str, str]  # an algorithm, a form of a distribution policy, a backend

HEAD = """# Every algorithm under every distribution policy

Made by `make matrix`, which runs every cell that fits and checks it; its settings are in
`tests/matrix/cells.py`.

Each cell has a sign for each backend: inline, threads, processes.

- `=` ran and gave the numbers of the fused program, up to the order of float additions
- `≙` ran and gave the numbers of the fused program with the delay that the policy's lag says
- `~` ran asynchronously: no lag beyond its bound, every number finite
- `·` fits, and was not run when this page was made
- a number: does not fit, for the reason of that number below
"""


def page_text(verdicts: Mapping[Cell, Verdict]) -> str:
    """Return the text of docs/matrix.md."""
    reasons: dict[str, int] = {}
    lines = [f"| | {' | '.join(TRIED)} |", f"|---|{'---|' * len(TRIED)}"]
    for form in FORMS:
        cells = [_cell(verdicts, algorithm, form, reasons) for algorithm in TRIED]
        lines.append(f"| {form} | {' | '.join(cells)} |")
    reasons_listed = [f"{number}. {why}" for why, number in reasons.items()]
    return "\n".join([HEAD, *lines, "", *reasons_listed]) + "\n"


def _cell(
    verdicts: Mapping[Cell, Verdict], algorithm: str, form: str, reasons: dict[str, int]
) -> str:
    found = [verdicts.get((algorithm, form, backend), NOT_RUN) for backend in BACKENDS]
    if found[0].why:
        return str(reasons.setdefault(found[0].why, len(reasons) + 1))
    return " ".join(verdict.sign for verdict in found)


def read_page(text: str) -> dict[Cell, Verdict]:
    """The verdicts on a page."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    algorithms = rows[0]
    reasons = dict(line.split(". ", 1) for line in text.splitlines() if line[:1].isdigit())
    found: dict[Cell, Verdict] = {}
    for form, *cells in rows[1:]:
        for algorithm, cell in zip(algorithms, cells, strict=True):
            signs = cell.split() if cell not in reasons else [""] * len(BACKENDS)
            for backend, sign in zip(BACKENDS, signs, strict=True):
                found[algorithm, form, backend] = Verdict(sign, reasons.get(cell, ""))
    return found
