"""A browser that keeps what a page writes to its console and asks the network for."""

import os
import shutil
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

import shoal
from shoal.algorithms import PPO

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SHOTS = os.environ.get("BROWSER_SHOTS", "")  # a folder that screenshots are written to


def find_chromium():
    named = os.environ.get("CHROMIUM", "")
    return named or next(filter(None, map(shutil.which, NAMES)), "")


@dataclass
class Opened:
    """A page in the browser, with all that went wrong on it and all that it asked for."""

    page: object
    problems: list = field(default_factory=list)
    requests: list = field(default_factory=list)

    def strangers(self, own):
        """Requests that aren't to one of these beginnings of addresses."""
        return [url for url in self.requests if not url.startswith((*own, "data:"))]

    def shoot(self, name):
        if SHOTS:
            os.makedirs(SHOTS, exist_ok=True)
            self.page.screenshot(path=f"{SHOTS}/{name}.png")


@pytest.fixture(scope="session")
def chromium():
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="Playwright is missing: pip install playwright"
    )
    path = find_chromium()
    if not path:
        pytest.skip("there is no Chromium: apt install chromium, or say CHROMIUM=/path/to/it")
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def opened(chromium):
    """Opens an address at a width in a scheme, as a context."""

    @contextmanager
    def open_page(url, width=1280, scheme="light", **how):
        context = chromium.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, **how
        )
        found = Opened(context.new_page())
        found.page.on("console", lambda said: found.problems.append(f"{said.type}: {said.text}"))
        found.page.on("pageerror", lambda error: found.problems.append(str(error)))
        found.page.on("request", lambda request: found.requests.append(request.url))
        found.page.goto(url)
        try:
            yield found
        finally:
            context.close()

    return open_page


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory):
    """A run with two actors, evaluations and lag."""
    pytest.importorskip("gymnax")
    trained = shoal.train(
        PPO(num_steps=32, num_minibatches=2), "CartPole-v1", shoal.impala(actors=2),
        ticks=60, envs=8, evaluate=10, folder=str(tmp_path_factory.mktemp("runs")), name="mine",
    )  # fmt: skip
    return trained.folder
