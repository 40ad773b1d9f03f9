"""Runs every cell of the matrix that fits, checks it, and writes docs/matrix.md.

What has been run is kept in .cache/matrix.json, so that it can be done in parts:

    python docs/make_matrix.py --backends inline threads --algorithms ppo dqn
    python docs/make_matrix.py --fresh
"""

import argparse
import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
KEPT = ROOT / ".cache" / "matrix.json"
sys.path.insert(0, str(ROOT / "tests"))

from matrix.cells import BACKENDS, FORMS, TRIED, Verdict, expected, verdict  # noqa: E402
from matrix.page import PAGE, page_text  # noqa: E402


def main() -> None:
    """Run the cells that are asked for, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--algorithms", nargs="*", default=list(TRIED))
    parser.add_argument("--backends", nargs="*", default=list(BACKENDS))
    parser.add_argument("--fresh", action="store_true", help="forget what was run before")
    options = parser.parse_args()
    known = {} if options.fresh or not KEPT.exists() else json.loads(KEPT.read_text())
    for backend in options.backends:
        for algorithm in options.algorithms:
            for form in FORMS:
                name = f"{algorithm}|{form}|{backend}"
                if name not in known:
                    known[name] = _run(algorithm, form, backend)
            KEPT.parent.mkdir(exist_ok=True)
            KEPT.write_text(json.dumps(known, indent=1))
    PAGE.write_text(page_text(_verdicts(known)), encoding="utf-8")


def _run(algorithm: str, form: str, backend: str) -> list[str]:
    began = time.perf_counter()
    found = verdict(algorithm, form, backend)
    took = time.perf_counter() - began
    print(
        f"{algorithm:8} {form:30} {backend:10} {found.sign or found.why}  {took:.1f} s", flush=True
    )
    return [found.sign, found.why]


def _verdicts(known: dict[str, list[str]]) -> dict[tuple[str, str, str], Verdict]:
    """What was run; of cells that were not, whether they fit is known all the same."""
    found = {}
    for algorithm in TRIED:
        for form in FORMS:
            why = expected(algorithm, form).why
            for backend in BACKENDS:
                if why:
                    found[algorithm, form, backend] = Verdict("", why)
                elif cached := known.get(f"{algorithm}|{form}|{backend}"):
                    found[algorithm, form, backend] = Verdict(*cached)
    return found


if __name__ == "__main__":
    main()
