"""The Python blocks of the documentation run in order, and its commands are valid."""

import re
import shlex
from dataclasses import fields
from inspect import signature
from pathlib import Path

import pytest

import shoal
from shoal.algorithms import ALGORITHMS
from shoal.cli.main import parse
from shoal.cli.train import TrainSeedsOptions
from shoal.planning.policies import POLICIES
from shoal.runs.inputs.making import make_distribution

ROOT = Path(__file__).parents[2]
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [page for page in DOCS if "```python" in page.read_text("utf-8")]
NEEDS = {
    "README": ["gymnax", "gymnasium"],
    "asynchrony": ["gymnasium"],
    "channels": ["gymnasium"],
    "choosing": ["gymnax"],
    "environments": ["gymnasium", "pettingzoo", "mpe2"],
    "evaluation": ["gymnax"],
    "experiments": ["gymnax"],
    "how_it_works": [],
    "metrics": ["gymnax"],
    "multi_agent": ["jaxmarl"],
    "networks": ["gymnax", "flax"],
    "processes": ["gymnasium"],
    "profiling": ["gymnasium"],
    "resume": ["gymnax"],
    "saved_plans": ["gymnax"],
    "start": ["gymnax", "gymnasium"],
    "your_own_loop": ["gymnax"],
}
LEAVES = {
    "saved_plans": "plan.shoal",
    "choosing": "profile.json",
    "how_it_works": "plan.txt",
}  # files written by pages that don't train
COMMAND = re.compile(r"^(?: {4,}|\$ )(shoal [a-z]+ .+)$|`(shoal [a-z]+\s[^`]+)`", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    for package in NEEDS[page.stem]:
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))  # of profiles
    # Blank lines for prose keep line numbers, so that errors name the page's own lines.
    lines, keep = [], False
    for line in page.read_text(encoding="utf-8").splitlines():
        fence = line.startswith("```")
        lines.append(line if keep and not fence else "")
        keep = line.startswith("```python") if fence else keep
    program = compile("\n".join(lines), str(page), "exec")
    names = {"__name__": page.stem}
    exec(program, names)
    assert list(tmp_path.glob(LEAVES.get(page.stem, "runs/*/summary.json")))


def commands():
    """Every complete `shoal` command of the pages."""
    for page in DOCS:
        found = COMMAND.findall(page.read_text(encoding="utf-8"))
        for text in dict.fromkeys(" ".join("".join(pair).split()) for pair in found):
            if "..." not in text:
                yield pytest.param(text, id=f"{page.stem}: {text}")


@pytest.mark.parametrize("command", list(commands()))
def test_a_command_of_the_pages_is_valid(command):
    words = shlex.split(command, comments=True)[1:]
    words = ["ppo" if n == 1 and ".py:" in word else word for n, word in enumerate(words)]
    parsed = parse(words)  # "ppo" for files that the pages have the reader write
    assert parsed.command is not None
    named = getattr(parsed.options, "distribute", None)
    if named and ".py:" not in named:
        assert make_distribution(named, parsed.options.distribute_settings) is not None


def test_the_files_that_the_architecture_names_exist():
    folders = (ROOT / "src", ROOT / "tests")
    there = [str(path) for folder in folders for path in folder.rglob("*.py")]
    named = re.findall(r"`([\w/]+\.py)`", (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"))
    assert named
    assert [name for name in named if not any(t.endswith(f"/{name}") for t in there)] == []


def words_of_tables(page):
    """What is in code quotes in the last column of each table of a page."""
    rows = re.findall(r"^\|.*\|([^|]+)\|$", page.read_text(encoding="utf-8"), re.MULTILINE)
    for cell in rows:
        yield from re.findall(r"`([^`]+)`", cell)


def test_the_words_of_other_libraries_have_true_counterparts():
    settings = {f.name for kind in ALGORITHMS.values() for f in fields(kind)}
    options = {f.name for f in fields(TrainSeedsOptions)}
    parameters = {p for make in POLICIES.values() for p in signature(make).parameters}
    known = settings | options | parameters | {*POLICIES, "env_replicas", "init", "tick"}
    known |= {*shoal.__all__, "act", "env", "learn"}
    words = list(words_of_tables(ROOT / "docs" / "coming_from.md"))
    named = [w.partition("=")[0] for w in words if re.fullmatch(r"[a-z_]+(=.*)?", w)]
    flags = [f.replace("-", "_") for w in words for f in re.findall(r"--([a-z-]+)", w)]
    assert len(named) > 30
    assert [word for word in (*named, *flags) if word not in known] == []
    for name in (w for w in words if w.startswith("shoal.")):
        assert hasattr(shoal, re.split(r"\W", name.removeprefix("shoal."))[0])


def test_the_site_is_built_without_warnings(tmp_path):
    build = pytest.importorskip("mkdocs.commands.build")
    config = pytest.importorskip("mkdocs.config")
    found = config.load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(tmp_path))
    build.build(found)
    api = (tmp_path / "api.html").read_text(encoding="utf-8")
    assert all(f">shoal.{name}<" in api for name in ("train", "impala", "mean", "envs.Step"))
    assert "examples/ppo.py" not in (tmp_path / "networks.html").read_text(encoding="utf-8")


def test_every_comparison_with_other_libraries_names_a_test_that_exists():
    page = ROOT / "docs" / "compared.md"
    files = (path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    there = {name for text in files for name in re.findall(r"^def (test_\w+)", text, re.MULTILINE)}
    rows = [line for line in page.read_text("utf-8").splitlines() if line.startswith("| ")]
    named = [re.findall(r"`(test_\w+)` \|$", row) for row in rows if "shown by" not in row]
    assert len(named) > 30
    assert all(named)
    assert {name for names in named for name in names} - there == set()
