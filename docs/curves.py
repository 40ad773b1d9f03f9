"""The curves of runs side by side: the mean return of the last 100 episodes, by steps.

Give names and run folders (or their metrics.jsonl): python docs/curves.py one=runs/a two=runs/b
"""

import argparse
import json
from bisect import bisect_right
from pathlib import Path
from typing import Any

MARKS = 10

Rows = list[dict[str, Any]]


def read(path: Path) -> Rows:
    """A run's metrics, tick by tick."""
    file = path / "metrics.jsonl" if path.is_dir() else path
    return [json.loads(line) for line in file.read_text().splitlines()]


def at(rows: Rows, steps: int) -> str:
    """The mean return after so many steps; nothing if the run didn't get there."""
    if steps > rows[-1]["env_steps"]:
        return ""
    place = bisect_right([row["env_steps"] for row in rows], steps) - 1
    mean = rows[max(place, 0)]["return_mean"]
    return "" if mean is None else f"{mean:,.1f}"


def table(runs: dict[str, Rows]) -> str:
    """Curves as a Markdown table: a line for each mark, and one for the time it took."""
    last = max(rows[-1]["env_steps"] for rows in runs.values())
    marks = [last * i // MARKS for i in range(1, MARKS + 1)]
    lines = ["| steps | " + " | ".join(runs) + " |", "|---:|" + "---:|" * len(runs)]
    for mark in marks:
        shown = " | ".join(at(rows, mark) for rows in runs.values())
        lines.append(f"| {mark:,} | {shown} |")
    times = " | ".join(f"{rows[-1]['seconds']:,.0f} s" for rows in runs.values())
    return "\n".join([*lines, f"| wall time | {times} |"])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="NAME=FOLDER")
    named = [word.partition("=") for word in parser.parse_args().runs]
    if len({name for name, _, _ in named}) < len(named):
        parser.error("give each run a name of its own")
    print(table({name: read(Path(folder)) for name, _, folder in named}))


if __name__ == "__main__":
    main()
