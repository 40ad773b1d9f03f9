"""The newcomer's path: docs/start.md, command by command, with Shoal installed from its wheel.

Builds the wheel and the sdist, checks what they hold, resolves the extras, installs the wheel into
an empty environment, and runs the page in an empty folder: files are written, commands must succeed
and print what the page shows. Numbers may differ, and `...` stands for anything.

    python .ci/newcomer.py [--no-extras] [--folder DIR]
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import tomllib
import urllib.request
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "start.md"
OWN = {"test", "dev", "docs"}  # extras for those who change Shoal
IN_WHEEL = ("shoal/py.typed", "shoal/pages/assets/plan.js", "shoal/pages/assets/run.css")
IN_SDIST = ("src/shoal/py.typed", "tests/conftest.py", "docs/start.md", "CHANGELOG.md", "LICENSE")
LONGEST_S = 300  # of a command
INTERRUPT = "^C"


def main() -> None:
    """Walk the path; the first failure ends it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--no-extras", action="store_true", help="leave out resolving the extras")
    parser.add_argument("--folder", type=Path, help="where to work [a temporary folder]")
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="shoal-newcomer-"))
    folder.mkdir(parents=True, exist_ok=True)
    wheel = build(folder)
    if not given.no_extras:
        resolve(folder, wheel)
    python = install(folder, f"{wheel}[gymnax,video]")
    walk(python, folder / "empty")
    if given.folder is None:
        shutil.rmtree(folder)
    print("The newcomer's path holds.")


def build(folder: Path) -> Path:
    """The wheel, built with the sdist, both of which hold what they must."""
    builder = make_python(folder / "builder")
    run(builder, "-m", "pip", "install", "-q", "build")
    shutil.rmtree(folder / "dist", ignore_errors=True)
    run(builder, "-m", "build", "-o", folder / "dist", ROOT)
    (wheel,), (sdist,) = (list((folder / "dist").glob(kind)) for kind in ("*.whl", "*.tar.gz"))
    inside = set(zipfile.ZipFile(wheel).namelist())
    source = {f"shoal/{path.relative_to(ROOT / 'src/shoal')}" for path in sources()}
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    missing = (source | set(IN_WHEEL)) - inside | set(IN_SDIST) - packed
    assert not missing, f"missing from the wheel or the sdist: {sorted(missing)}"
    version = re.search(r'__version__ = "(.+)"', (ROOT / "src/shoal/__init__.py").read_text())
    assert version
    assert f"-{version[1]}-" in wheel.name
    assert f"-{version[1]}.tar" in sdist.name
    print(f"built {wheel.name} ({len(inside)} files) and {sdist.name} ({len(packed)} files)")
    return wheel


def sources() -> Iterator[Path]:
    """The files of the package that git knows."""
    listed = subprocess.run(
        ["git", "ls-files", "src/shoal"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    yield from (ROOT / line for line in listed.stdout.split())


def resolve(folder: Path, wheel: Path) -> None:
    """Each extra can be installed by itself, and all of them together."""
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [extra for extra in asked["optional-dependencies"] if extra not in OWN]
    python = make_python(folder / "resolver")
    for chosen in (*extras, ",".join(extras)):
        run(python, "-m", "pip", "install", "-q", "--dry-run", "--ignore-installed",
            f"{wheel}[{chosen}]")  # fmt: skip
        print(f"resolves: shoal[{chosen}]")


def install(folder: Path, what: str) -> Path:
    """The Python of an environment with `what`, and nothing else."""
    shutil.rmtree(folder / "installed", ignore_errors=True)
    python = make_python(folder / "installed")
    run(python, "-m", "pip", "install", "-q", what)
    print(f"installed {what}")
    return python


def make_python(folder: Path) -> Path:
    """The Python of a new environment."""
    if not (folder / "bin/python").exists():
        venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def run(*words: object) -> None:
    """Run a command that must succeed."""
    own = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, words)), env=own, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{words}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def walk(python: Path, folder: Path) -> None:
    """Follow the page in an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    own = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "SHOAL", "JAX"))}
    own |= {"PATH": f"{python.parent}:{own['PATH']}", "XDG_CACHE_HOME": str(folder / "cache")}
    own |= {"PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
    for kind, text in fences(PAGE.read_text(encoding="utf-8")):
        if named := re.fullmatch(r'python title="(.+)"', kind):
            (folder / named[1]).write_text(text, encoding="utf-8")
        elif kind == "python":
            print("$ python (a block of the page)", flush=True)
            subprocess.run([python, "-"], input=text, text=True, cwd=folder, env=own, check=True)
        elif kind == "console":
            for command, shown in commands(text):
                print(f"$ {command}", flush=True)
                Typed(command, folder, own).follow(shown)


def fences(text: str) -> Iterator[tuple[str, str]]:
    """The kind and the content of each fenced block of a page."""
    for found in re.finditer(r"^```(\S[^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield found[1], found[2]


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Each command of a console, and the lines that it is to print."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, *shown = part.rstrip().splitlines()
        yield command, [line for line in shown if line.strip()]


class Typed:
    """A command that was typed, and what it has printed so far."""

    def __init__(self, command: str, folder: Path, env: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            command.split(), cwd=folder, env=env, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self._late = threading.Timer(LONGEST_S, self._process.kill)
        self._late.start()
        self._printed: list[str] = []

    def follow(self, shown: list[str]) -> None:
        """Read its output, which must be as shown; interrupt it where the page says so."""
        stops = INTERRUPT in shown
        before, after = shown, []
        if stops:
            at = shown.index(INTERRUPT)
            before, after = shown[:at], shown[at + 1 :]
        self._read(before)
        if stops:
            self._visit()
            self._process.send_signal(signal.SIGINT)
        self._read(after)
        rest, _ = self._process.communicate()
        self._late.cancel()
        self._printed += rest.splitlines()
        code = self._process.returncode
        wanted = (0, 130) if stops else (0,)
        assert code in wanted, f"it exited with {code}:\n{self.text}"
        assert not re.search(r"Traceback|Warning", self.text), self.text

    def _read(self, wanted: list[str]) -> None:
        """Read lines until all that are wanted have come, in order."""
        assert self._process.stdout
        for line in wanted:
            if line.strip() == "...":
                continue
            for printed in self._process.stdout:
                self._printed.append(printed.rstrip())
                if fits(printed, line):
                    break
            else:
                raise AssertionError(f"the page shows {line!r}; printed:\n{self.text}")

    def _visit(self) -> None:
        """Open the page that the command has named, if it has."""
        if found := re.search(r"http://\S+", self.text):
            with urllib.request.urlopen(found[0], timeout=30) as answer:
                assert "</html>" in answer.read().decode()

    @property
    def text(self) -> str:
        """What was printed so far."""
        return "\n".join(self._printed)


def fits(printed: str, shown: str) -> bool:
    """Whether a line is as shown, but for numbers, and what `...` stands for."""
    parts = [re.escape(plain(part)) for part in shown.split("...")]
    return re.fullmatch(".*".join(parts), plain(printed)) is not None


def plain(text: str) -> str:
    """A line without its numbers and how many spaces it has."""
    return re.sub(r"\s+", " ", re.sub(r"\d[\d.,:]*[kM]?", "0", text.rstrip("\n"))).strip(" ")


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)
    main()
