"""The page docs/matrix.md is up to date, and every cell of it holds."""

import pytest

from matrix.cells import BACKENDS, FORMS, NOT_RUN, TRIED, Verdict, expected, verdict
from matrix.page import PAGE, page_text, read_page
from shoal.algorithms import ALGORITHMS
from shoal.planning.policies import POLICIES

pytest.importorskip("gymnax")
CELLS = [
    (algorithm, form, backend) for algorithm in TRIED for form in FORMS for backend in BACKENDS
]
# One cell of each algorithm, no two forms alike as far as they go.
LOCKSTEP = [f for f in FORMS if f.partition(",")[0] not in ("fused", "impala", "ape_x")]
SHARE = [(algorithm, LOCKSTEP[i % len(LOCKSTEP)]) for i, algorithm in enumerate(TRIED)]


def test_every_algorithm_and_every_distribution_policy_is_tried():
    assert list(TRIED) == list(ALGORITHMS), "give each an entry in tests/matrix/cells.py"
    assert list(dict.fromkeys(form.partition(",")[0] for form in FORMS)) == list(POLICIES)


def test_a_page_is_read_as_it_was_written():
    whole = dict.fromkeys(CELLS, NOT_RUN) | {CELLS[0]: Verdict("=")}
    whole |= {cell: Verdict("", "no, since 1 | 2. differ") for cell in CELLS[3:6]}
    assert read_page(page_text(whole)) == whole


@pytest.mark.parametrize(
    "algorithm",
    [pytest.param(a, marks=() if a in ("ppo", "dqn", "sac") else pytest.mark.slow) for a in TRIED],
)
def test_the_page_says_of_every_cell_whether_it_fits_and_why_not(algorithm):
    listed = read_page(PAGE.read_text(encoding="utf-8"))
    assert {form for name, form, _ in listed if name == algorithm} == set(FORMS), (
        "run `make matrix`"
    )
    for form in FORMS:
        wanted = expected(algorithm, form)
        for backend in BACKENDS:
            assert listed[algorithm, form, backend] in (wanted, wanted if wanted.why else NOT_RUN)


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "form"), SHARE)
def test_a_cell_of_each_algorithm(algorithm, form):
    assert verdict(algorithm, form, "inline") == expected(algorithm, form)


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "form", "backend"), CELLS)
def test_every_cell(algorithm, form, backend):
    assert verdict(algorithm, form, backend) == expected(algorithm, form)
