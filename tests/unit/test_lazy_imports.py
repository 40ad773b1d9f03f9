"""Modules that are rarely used are imported on first use."""

import subprocess
import sys

import pytest

from shoal.envs.later import loaded_later


@pytest.fixture
def package(tmp_path, monkeypatch):
    (tmp_path / "slow_to_load.py").write_text("WIDTH = 3\n")
    (tmp_path / "seldom_draws.py").write_text(
        "import slow_to_load as slow\n\ndef draw():\n    return slow.WIDTH\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in ("slow_to_load", "seldom_draws"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("package")
def test_a_module_is_imported_when_it_is_first_used():
    with loaded_later("slow_to_load"):
        import seldom_draws
    assert "slow_to_load" not in sys.modules
    assert seldom_draws.draw() == 3
    assert sys.modules["slow_to_load"].WIDTH == 3


@pytest.mark.usefixtures("package")
def test_an_imported_module_is_used_as_it_is():
    import slow_to_load

    with loaded_later("slow_to_load"):
        assert sys.modules["slow_to_load"] is slow_to_load


def test_a_gymnax_environment_imports_no_plotting_packages():
    pytest.importorskip("gymnax")
    code = (
        "import sys, shoal; shoal.envs.make('CartPole-v1').observation_space;"
        "print([n for n in ('seaborn', 'pandas', 'matplotlib.pyplot') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
