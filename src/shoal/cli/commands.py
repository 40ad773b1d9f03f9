"""The commands of `shoal`: what each is for, where it is, and an example; loads nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, get_type_hints

GROUPS = (TRAIN, AFTER, CHOOSE, PLANS) = ("Train", "After it ran", "What there is", "Plans")


@dataclass(frozen=True, slots=True)
class Command:
    """A command: its name may have two words, such as "runs compare"."""

    name: str
    group: str
    about: str
    where: str  # "module:function" in shoal.cli
    example: str
    usage: str = ""

    @property
    def function(self) -> Any:
        """The function that does it, of one options object; returns the exit code."""
        module, _, name = self.where.partition(":")
        return getattr(import_module(f"shoal.cli.{module}"), name)

    @property
    def options(self) -> type:
        """The type of its options."""
        return get_type_hints(self.function)["options"]


COMMANDS = (
    Command(
        "train", TRAIN, "train an algorithm on an environment", "train:train",
        "shoal train ppo CartPole-v1 --steps 3e5 --learning-rate 1e-3",
        "shoal train ALGORITHM [ENV] [OPTIONS]",
    ),
    Command(
        "resume", TRAIN, "continue a run from its newest checkpoint", "train:resume",
        "shoal resume runs/mine --ticks 2000",
        "shoal resume RUN [OPTIONS]",
    ),
    Command(
        "status", TRAIN, "show how far a run is, and what workers wait for", "watching:status",
        "shoal status",
        "shoal status [RUN]",
    ),
    Command(
        "watch", TRAIN, "show runs on a live page, on this machine alone", "pages:watch",
        "shoal watch runs/mine",
        "shoal watch [RUN ...] [OPTIONS]",
    ),
    Command(
        "scale", TRAIN, "change the number of replicas of a run in progress", "watching:scale",
        "shoal scale runs/mine actor=4",
        "shoal scale RUN FRAGMENT=N ...",
    ),
    Command(
        "eval", AFTER, "play whole episodes with what a run has learnt", "after:evaluate",
        "shoal eval runs/mine --episodes 100",
        "shoal eval [RUN] [OPTIONS]",
    ),
    Command(
        "video", AFTER, "film whole episodes of what a run has learnt", "after:video",
        "shoal video runs/mine --out film.mp4",
        "shoal video [RUN] [OPTIONS]",
    ),
    Command(
        "export", AFTER, "write what a run has learnt as a folder that acts without Shoal",
        "after:export_agent",
        "shoal export runs/mine --out my-policy",
        "shoal export [RUN] [OPTIONS]",
    ),
    Command(
        "runs", AFTER, "list the runs, the newest first", "runs:list_runs",
        "shoal runs",
        "shoal runs [FOLDER]; shoal runs compare | plot | rm RUN ...",
    ),
    Command(
        "runs compare", AFTER, "compare groups of runs, with intervals", "runs:compare_runs",
        "shoal runs compare ppo-cartpole a2c-cartpole",
        "shoal runs compare RUN ...",
    ),
    Command(
        "runs plot", AFTER, "draw learning curves of groups of runs", "runs:plot_runs",
        "shoal runs plot ppo-cartpole a2c-cartpole --out curves.svg",
        "shoal runs plot RUN ... [OPTIONS]",
    ),
    Command(
        "runs rm", AFTER, "remove runs", "runs:remove_runs",
        "shoal runs rm mine --yes",
        "shoal runs rm RUN ... [--yes]",
    ),
    Command(
        "profile", AFTER, "show where the workers' time went, and what limits a run",
        "profile:profile",
        "shoal profile runs/mine",
        "shoal profile [RUN]",
    ),
    Command(
        "report", AFTER, "write a page with all about runs, in one file", "pages:report",
        "shoal report runs/mine",
        "shoal report [RUN ...] [OPTIONS]",
    ),
    Command(
        "algorithms", CHOOSE, "list the algorithms, or the settings of one", "choices:algorithms",
        "shoal algorithms ppo",
        "shoal algorithms [NAME]",
    ),
    Command(
        "envs", CHOOSE, "list the environments, or those with a word in their name",
        "discovery:envs",
        "shoal envs cheetah",
        "shoal envs [WORD]",
    ),
    Command(
        "policies", CHOOSE, "list the distribution policies, and when to use them",
        "discovery:policies",
        "shoal policies",
        "shoal policies",
    ),
    Command(
        "presets", CHOOSE, "list the settings that are known to learn", "discovery:presets",
        "shoal presets ppo",
        "shoal presets [WORD]",
    ),
    Command(
        "settings", CHOOSE, "show the settings that a run would have", "discovery:settings",
        "shoal settings ppo gymnasium:HalfCheetah-v5",
        "shoal settings ALGORITHM [ENV]",
    ),
    Command(
        "doctor", CHOOSE, "check devices, memory, extras and versions here", "discovery:doctor",
        "shoal doctor",
        "shoal doctor",
    ),
    Command(
        "graph", PLANS, "show the graph that a loop is traced to", "plans:graph",
        "shoal graph ppo CartPole-v1 --out loop.html",
        "shoal graph ALGORITHM [ENV] [OPTIONS]",
    ),
    Command(
        "plan", PLANS, "show how a loop would run, before it does", "plans:plan",
        "shoal plan ppo CartPole-v1 --distribute central --workers 4 --out plan.html",
        "shoal plan ALGORITHM [ENV] [OPTIONS]",
    ),
    Command(
        "verify", PLANS, "check that a plan gives the fused program's numbers", "plans:verify",
        "shoal verify ppo CartPole-v1 --distribute decoupled --env-replicas 2",
        "shoal verify ALGORITHM [ENV] [OPTIONS]",
    ),
    Command(
        "record", PLANS, "write what one fragment takes from another to a file", "plans:record",
        'shoal record ppo CartPole-v1 --distribute impala --edge "actor>learner"',
        "shoal record ALGORITHM [ENV] --edge EDGE [OPTIONS]",
    ),
    Command(
        "replay", PLANS, "run the fragment that reads a recorded edge alone", "plans:replay",
        "shoal replay edge.tape",
        "shoal replay FILE [OPTIONS]",
    ),
    Command(
        "run", PLANS, "run a plan that shoal plan --save has written", "plans:run",
        "shoal run plan.shoal --ticks 100",
        "shoal run FILE --ticks N [OPTIONS]",
    ),
)  # fmt: skip

NAMED = {command.name: command for command in COMMANDS}


def command_in(words: list[str]) -> tuple[Command | None, list[str]]:
    """The command that words begin with, and the words after it."""
    for count in (2, 1):
        if (found := NAMED.get(" ".join(words[:count]))) and len(words) >= count:
            return found, words[count:]
    return None, words
