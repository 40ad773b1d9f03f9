"""The source keeps its budgets, and the core has no words of reinforcement learning."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "shoal"
CORE = ("graph", "tracing", "planning", "runtime")

FILE_LINES = 600
ALGORITHM_LINES = 250
FUNCTION_LINES = 50  # style.md aims at 40; beyond 50 a function does two things
PARAMETERS = 8

# The named distribution policies call their fragments by what users do with them; an actor of
# Ray's is a process.
WORDS_ALLOWED_IN = {SOURCE / "planning" / "policies.py", SOURCE / "runtime" / "cluster" / "ray.py"}
WORDS = {
    *("actor", "advantage", "agent", "critic", "episode", "gae", "learner", "observation", "obs"),
    *("policy", "ppo", "dqn", "cartpole", "reward", "rollout", "trajectory"),
}
# Where such a word means something else: the value that says how to cut, its module, the promise
# of a stage to use fresh values only, processes of Ray and of hosts, how failures are handled.
OTHER_MEANINGS = re.compile(
    r"distribution[ _-]?polic(y|ies)|planning[./]polic(y|ies)|polic(y|ies)\.py"
    r"|(?<![a-z])on[_-]policy|\bray[ .]actors?|(restart|recovery)[ _]?polic(y|ies)"
    r"|host[ _]?agents?",
    re.IGNORECASE,
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


def python_files(*folders: Path) -> list[Path]:
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def place(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name}:{line}"


def words_of(line: str) -> set[str]:
    """The words of a line in the singular, taken out of snake_case and CamelCase."""
    apart = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", OTHER_MEANINGS.sub(" ", line))
    words = re.findall(r"[a-z]+", apart.lower())
    return {re.sub(r"ies$", "y", word) if word.endswith("ies") else word for word in words} | {
        word.removesuffix("s") for word in words
    }


def learning_words(path: Path) -> Iterator[str]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        for word in sorted(words_of(line) & WORDS):
            yield f"{place(path, number)}: the core says `{word}`: {line.strip()}"


def functions(path: Path) -> Iterator[Function]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, Function):
            yield node


def too_long_functions(path: Path) -> Iterator[str]:
    for function in functions(path):
        lines = (function.end_lineno or function.lineno) - function.lineno + 1
        if lines > FUNCTION_LINES:
            yield (
                f"{place(path, function.lineno)}: `{function.name}` has {lines} lines, "
                f"at most {FUNCTION_LINES} are allowed (aim at 40)"
            )


def too_many_parameters(path: Path) -> Iterator[str]:
    for function in functions(path):
        arguments = function.args
        parameters = [
            *arguments.posonlyargs,
            *arguments.args,
            *arguments.kwonlyargs,
            *filter(None, (arguments.vararg, arguments.kwarg)),
        ]
        if parameters and parameters[0].arg in ("self", "cls"):
            parameters = parameters[1:]
        if len(parameters) > PARAMETERS:
            yield (
                f"{place(path, function.lineno)}: `{function.name}` takes {len(parameters)} "
                f"parameters, at most {PARAMETERS} are allowed: group them in a frozen dataclass"
            )


def too_long_file(path: Path) -> Iterator[str]:
    limit = ALGORITHM_LINES if path.parent.name == "algorithms" else FILE_LINES
    lines = len(path.read_text(encoding="utf-8").splitlines())
    if lines > limit:
        yield f"{place(path, limit + 1)}: the file has {lines} lines, at most {limit} are allowed"


BUDGETS = [too_long_file, too_long_functions, too_many_parameters]


@pytest.mark.parametrize("rule", BUDGETS)
def test_source_keeps_its_budgets(rule):
    broken = [message for path in python_files(SOURCE) for message in rule(path)]
    assert not broken, "\n" + "\n".join(broken)


def test_the_core_has_no_word_of_reinforcement_learning():
    files = set(python_files(*(SOURCE / name for name in CORE))) - WORDS_ALLOWED_IN
    broken = [message for path in sorted(files) for message in learning_words(path)]
    assert not broken, "\n" + "\n".join(broken)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("reward = 1", {"reward"}),
        ("class RolloutLearner:", {"rollout", "learner"}),
        ("# many_policies of the agents", {"policy", "agent"}),
        ("def cut(distribution_policy: DistributionPolicy):  # distribution policies", set()),
        ("from shoal.planning.policies import fused", set()),
        ("def lag_into_on_policy(): an on-policy stage", set()),
        ("start a Ray actor for each worker", set()),
        ("a factory of refactored obstacles", set()),
    ],
)
def test_words_are_found_in_names_and_prose(line, found):
    assert words_of(line) & WORDS == found


def test_each_budget_names_the_place(tmp_path):
    long_body = "\n".join("    x = 1" for _ in range(FILE_LINES + 1))
    path = tmp_path / "greedy.py"
    path.write_text(f"def f(a, b, c, d, *, e, f, g, h, i):\n{long_body}\n")
    messages = [message for rule in BUDGETS for message in rule(path)]
    assert [message.split(": ")[0] for message in messages] == [
        f"greedy.py:{FILE_LINES + 1}",
        "greedy.py:1",
        "greedy.py:1",
    ]
