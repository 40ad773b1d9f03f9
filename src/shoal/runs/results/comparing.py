"""Compares groups of runs: interquartile means with stratified bootstrap intervals.

After Agarwal et al. 2021, Deep Reinforcement Learning at the Edge of the Statistical Precipice:
a run counts once, with its mean return, and intervals come from drawing runs again within each
environment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.errors import SettingError
from shoal.runs.results.listing import Group, ListedRun

DRAWS = 2000  # of the bootstrap
CONFIDENCE = 0.95
TRAINING = "the mean return of the last hundred training episodes"


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95 % interval; without one where there is a single run."""

    value: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        """The value and its interval."""
        if self.low is None or self.high is None:
            return f"{self.value:,.2f}"
        return f"{self.value:,.2f} [{self.low:,.2f}, {self.high:,.2f}]"


@dataclass(frozen=True)
class Scores:
    """What the runs of a group scored, by environment."""

    group: str
    by_env: dict[str, tuple[float, ...]]

    def iqm(self, env: str) -> Interval:
        """The interquartile mean in one environment."""
        return bootstrap([np.array(self.by_env[env])], lambda drawn: iqm(drawn[0]))


@dataclass(frozen=True)
class Comparison:
    """Scores of several groups in the same environments, and what they are."""

    measure: str
    scores: tuple[Scores, ...]

    @property
    def envs(self) -> list[str]:
        """The environments."""
        return [*self.scores[0].by_env]

    def improvement(self, index: int) -> Interval:
        """How probably a run of a group scores more than one of the first group.

        The mean over environments, which needs no normalised scores; a tie counts as half.
        """
        first, other = self.scores[0], self.scores[index]
        arrays = [np.array(each.by_env[env]) for env in self.envs for each in (other, first)]

        def probability(drawn: Sequence[np.ndarray]) -> float:
            pairs = zip(drawn[::2], drawn[1::2], strict=True)
            return float(np.mean([_above(x, y) for x, y in pairs]))

        return bootstrap(arrays, probability)


def compare(groups: Sequence[Group]) -> Comparison:
    """The scores of groups, by evaluations if all runs have one by the same protocol."""
    protocol = _protocol_of_all([run for each in groups for run in each.runs])
    measure = f"the mean return of {protocol}" if protocol else TRAINING
    scores = tuple(_scores(each, protocol) for each in groups)
    for each in scores[1:]:
        if sorted(each.by_env) != sorted(scores[0].by_env):
            raise SettingError(
                f"{each.group} has runs in {', '.join(each.by_env)}, and {scores[0].group} in "
                f"{', '.join(scores[0].by_env)}",
                "Compare groups of runs in the same environments.",
            )
    return Comparison(measure, scores)


def bootstrap(
    strata: Sequence[np.ndarray], statistic: Callable[[Sequence[np.ndarray]], float]
) -> Interval:
    """A statistic of samples, with the interval from drawing again within each of them."""
    value = statistic(strata)
    if min(map(len, strata)) < 2:
        return Interval(value)
    draw = np.random.default_rng(0)
    found = [statistic([draw.choice(x, len(x)) for x in strata]) for _ in range(DRAWS)]
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(found, [tail, 1 - tail]).tolist()
    return Interval(value, low, high)


def iqm(values: Sequence[float] | np.ndarray) -> float:
    """The mean of the middle half: a quarter of the values is left out at each end."""
    ordered = np.sort(np.asarray(values, np.float64))
    out = len(ordered) // 4
    return float(np.mean(ordered[out : len(ordered) - out]))


def _above(x: np.ndarray, y: np.ndarray) -> float:
    above = np.sign(x[:, None] - y[None, :])
    return float(np.mean((above + 1) / 2))


def _protocol_of_all(runs: Sequence[ListedRun]) -> str:
    """The newest protocol by which all runs were evaluated; empty if there is none."""
    each = [[_protocol(one) for one in run.evaluations()] for run in runs]
    shared = set.intersection(*map(set, each)) if each else set()
    return next((name for name in reversed(each[0]) if name in shared), "") if each else ""


def _protocol(evaluation: dict[str, object]) -> str:
    return f"{evaluation.get('episodes')} whole episodes, {evaluation.get('actions')} actions"


def _scores(group: Group, protocol: str) -> Scores:
    found: dict[str, list[float]] = {}
    for run in group.runs:
        score = _score(run, protocol)
        if score is None:
            raise SettingError(
                f"{run.folder} has no return yet",
                "Train it longer, or evaluate every run with `shoal eval`.",
            )
        found.setdefault(str(run.facts.get("env")), []).append(score)
    return Scores(group.name, {env: tuple(scores) for env, scores in sorted(found.items())})


def _score(run: ListedRun, protocol: str) -> float | None:
    if not protocol:
        return run.facts.get("return_mean")
    newest = [one for one in run.evaluations() if _protocol(one) == protocol][-1]
    return newest["return_mean"]
