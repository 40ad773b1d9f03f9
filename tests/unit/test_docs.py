"""The Python blocks of the documentation run in order, and its commands are valid."""

import re
import shlex
from pathlib import Path

import pytest

from shoal.cli.main import parse
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
    "metrics": ["gymnax"],
    "multi_agent": ["jaxmarl"],
    "networks": ["gymnax", "flax"],
    "processes": ["gymnasium"],
    "resume": ["gymnax"],
    "saved_plans": ["gymnax"],
    "start": ["gymnax", "gymnasium"],
    "your_own_loop": ["gymnax"],
}
LEAVES = {
    "saved_plans": "plan.shoal",
    "choosing": "profile.json",
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
