"""The set-up of all tests: JAX with four CPU devices and a compile cache, and golden files."""

import difflib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"

# Read by JAX when it is first imported, so also by the processes that tests start.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# Most of the time goes to compiling programs that run for milliseconds. `make test-slow` and the
# other long suites compile them as users do.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# What a run is distributed like must not depend on how fast this machine is today.
os.environ.setdefault("SHOAL_AUTO", "off")
# Runs that tests make with their own code are recorded as the user's here, not in the home folder.
os.environ["XDG_STATE_HOME"] = str(ROOT / ".cache" / "state")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--bless", action="store_true", help="write the golden files instead of comparing with them"
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(text, "name.txt")`: check that tests/golden/name.txt contains `text`."""

    def check_golden(text: str, name: str) -> None:
        path = GOLDEN / name
        text = text.rstrip("\n") + "\n"
        if request.config.getoption("--bless"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        expected = path.read_text(encoding="utf-8") if path.exists() else ""
        if text != expected:
            pytest.fail(golden_message(expected, text, path), pytrace=False)

    return check_golden


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The result of a tiny training run of PPO on CartPole, shared by all tests that need one."""
    pytest.importorskip("gymnax")
    import shoal
    from shoal.algorithms import PPO

    small = PPO(num_steps=8, update_epochs=1, num_minibatches=1, hidden=(8,))
    folder = tmp_path_factory.mktemp("tiny")
    return shoal.train(small, "CartPole-v1", envs=4, ticks=4, folder=folder, name="tiny")


def golden_message(expected: str, text: str, path: Path) -> str:
    """A diff of `text` against the golden file, and how to accept it."""
    name = path.relative_to(ROOT).as_posix()
    diff = difflib.unified_diff(
        expected.splitlines(), text.splitlines(), name, "this run", lineterm=""
    )
    head = f"{name} differs" if path.exists() else f"{name} does not exist yet"
    return "\n".join([f"{head}:", *diff, "", "If this run is right, accept it with: make bless"])
