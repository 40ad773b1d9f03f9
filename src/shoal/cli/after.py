"""Commands about what a run has learnt: eval, video."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console

from shoal.cli.files import run_folder
from shoal.runs.inputs.options import Doc
from shoal.runs.playing import load
from shoal.runs.results.evaluating import EPISODE, Protocol
from shoal.runs.results.exporting import EXAMPLE, export
from shoal.runs.results.filming import film
from shoal.runs.results.listing import listed
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

    def protocol(self, episodes: int) -> Protocol:
        """How so many episodes are played."""
        return Protocol(episodes, sampled=self.sampled, seed=self.seed, steps=self.steps)


@dataclass(frozen=True)
class EvalOptions(AgentOptions):
    """The options of `shoal eval`."""

    _: KW_ONLY
    episodes: Annotated[Count, Doc("whole ones, each counted once", EPISODES, "N", "100")] = 100


@dataclass(frozen=True)
class VideoOptions(AgentOptions):
    """The options of `shoal video`."""

    _: KW_ONLY
    episodes: Annotated[Count, Doc("one after the other", EPISODES, "N", "1")] = 1
    out: Annotated[
        Path | None, Doc(".gif or .mp4", "Output", "FILE", "film.gif in the run's folder")
    ] = None


@dataclass(frozen=True)
class ExportOptions:
    """The options of `shoal export`."""

    run: Annotated[str | None, RUN] = None
    _: KW_ONLY
    which: Annotated[
        str, Doc("checkpoint: newest, or best in training", AGENT, "WHICH", "newest")
    ] = "newest"
    trust: Annotated[
        bool, Doc("run code that the folder names and that isn't Shoal's own", AGENT)
    ] = False
    out: Annotated[
        Path | None, Doc("what is written", "Output", "FOLDER", "export in the run's folder")
    ] = None


def export_agent(options: ExportOptions) -> int:
    """Export an agent."""
    folder = run_folder(options.run)
    agent = load(folder, options.which, trust=options.trust)
    made = export(agent, options.out or folder / "export", listed(folder).evaluations())
    print(f"{folder}, tick {agent.tick:,}: python {made / EXAMPLE} acts without Shoal")
    print(f"Written to {made}/")
    return 0


def video(options: VideoOptions) -> int:
    """Film an agent."""
    folder = run_folder(options.run)
    agent = load(folder, options.which, trust=options.trust)
    with Console(stderr=True).status("filming"):
        found = film(agent, options.out or folder / "film.gif", options.protocol(options.episodes))
    returns = ", ".join(f"{earned:.1f}" for earned in found.returns)
    print(f"{folder}, tick {agent.tick:,}: {found.frames:,} frames; returned {returns}")
    print(f"Written to {found.path}")
    return 0


def evaluate(options: EvalOptions) -> int:
    """Evaluate an agent, print the result, and write it into the run."""
    folder = run_folder(options.run)
    agent = load(folder, options.which, trust=options.trust)
    with Console(stderr=True).status("playing"):
        found = agent.played(options.protocol(options.episodes))
    print(f"{folder}, {found}")
    print(f"Written to {found.write(folder)}")
    return 0
