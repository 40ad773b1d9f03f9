"""The tutorials run: every Python block of a page, in order, as one program."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("your_own*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_runs(page, tmp_path, monkeypatch):
    pytest.importorskip("gymnax")
    monkeypatch.chdir(tmp_path)
    # Blank lines for prose keep line numbers, so that errors name the page's own lines.
    lines, keep = [], False
    for line in page.read_text(encoding="utf-8").splitlines():
        fence = line.startswith("```")
        lines.append(line if keep and not fence else "")
        keep = line == "```python" if fence else keep
    program = compile("\n".join(lines), str(page), "exec")
    names = {"__name__": page.stem}
    exec(program, names)
    assert (tmp_path / "runs").is_dir()
    assert list((tmp_path / "runs").glob("*/summary.json"))
