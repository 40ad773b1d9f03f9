"""When to use which distribution policy, in a picture of a line and a sentence."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from shoal.planning.policies import POLICIES


@dataclass(frozen=True, slots=True)
class Guide:
    """A policy's fragments in a line, and when to use it."""

    picture: str
    when: str


GUIDES = {
    "fused": Guide(
        "[environments, inference, learning] x devices",
        "Environments that XLA compiles: the fastest by far while everything fits on the devices.",
    ),
    "single_learner_coarse": Guide(
        "[environments, inference] x actors <-> [learner]",
        "Environments in Python: actors step and act together, so only rollouts cross. With "
        "--lag 1 actors and learner work at the same time. The usual choice on one host.",
    ),
    "single_learner_fine": Guide(
        "[environments] x envs <-> [inference, learner]",
        "Large networks, or one GPU: inference is batched beside the learner, and workers need no "
        "JAX. With --ring 2 environments and inference overlap.",
    ),
    "environments": Guide(
        "[environments] x workers <-> [agent]",
        "As single-learner-fine, for loops whose environments should be alone on CPU workers.",
    ),
    "impala": Guide(
        "[environments, inference] x actors -> queue -> [learner]",
        "Steps that take uneven time, or many hosts: no actor waits for another. Needs an "
        "algorithm that corrects for lag: impala, or ppo with --decoupled.",
    ),
    "multi_learner": Guide(
        "[environments, inference, learner] x learners, gradients averaged",
        "Several devices or hosts with a loop that is bound by learning: data-parallel.",
    ),
    "central": Guide(
        "[environments, gradients] x workers <-> [server]",
        "Small networks on many CPU workers; with --max-lag asynchronous, which is A3C.",
    ),
    "decoupled": Guide(
        "[environments] x envs <-> [inference] x n <-> [learner] x n",
        "Large clusters: environments, inference and learning scale apart from each other.",
    ),
    "sebulba": Guide(
        "[environments, inference] on some devices <-> [learner] on the others",
        "One host with several GPUs or TPUs, which act and learn at the same time.",
    ),
    "ape_x": Guide(
        "[environments, inference] x actors -> [replay] <-> [learner]",
        "Off-policy algorithms (dqn, r2d2, sac, td3): the learner draws from replay while actors "
        "add to it.",
    ),
}


def parameters_of(name: str) -> str:
    """The options of a policy with their defaults."""
    from shoal.runs.inputs.options import option_of

    taken = inspect.signature(POLICIES[name]).parameters.values()
    return " ".join(f"{option_of(each.name)} [{_default(each.default)}]" for each in taken)


def _default(value: object) -> str:
    return "none" if value is None else str(value)
