"""Commands about what a run has learnt: eval."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Annotated

from rich.console import Console

from shoal.cli.files import run_folder
from shoal.runs.evaluating import EPISODE
from shoal.runs.options import Doc
from shoal.runs.playing import load
from shoal.shapes import Count, Seed

AGENT, EPISODES = "The agent", "The episodes"
RUN = Doc("a folder, or the name of a run in runs/; by default the newest there", AGENT)


@dataclass(frozen=True)
class AgentOptions:
    """Which agent of which run plays: abstract, the options of several commands."""

    run: Annotated[str | None, RUN] = None
    _: KW_ONLY
    which: Annotated[
        str, Doc("checkpoint: newest, or best in training", AGENT, "WHICH", "newest")
    ] = "newest"
    trust: Annotated[
        bool, Doc("run code that the folder names and that isn't Shoal's own", AGENT)
    ] = False
    sampled: Annotated[bool, Doc("draw actions as in training [the greedy ones]", EPISODES)] = False
    seed: Annotated[Seed, Doc("of the episodes", EPISODES, "N", "0")] = 0
    steps: Annotated[
        Count, Doc("after which an episode is cut off", EPISODES, "N", f"{EPISODE:,}")
    ] = EPISODE


@dataclass(frozen=True)
class EvalOptions(AgentOptions):
    """The options of `shoal eval`."""

    _: KW_ONLY
    episodes: Annotated[Count, Doc("whole ones, each counted once", EPISODES, "N", "100")] = 100


def evaluate(options: EvalOptions) -> int:
    """Evaluate an agent, print the result, and write it into the run."""
    folder = run_folder(options.run)
    agent = load(folder, options.which, trust=options.trust)
    how = {"sampled": options.sampled, "seed": options.seed, "steps": options.steps}
    with Console(stderr=True).status("playing"):
        found = agent.evaluate(options.episodes, **how)
    print(f"{folder}, {found}")
    print(f"Written to {found.write(folder)}")
    return 0
