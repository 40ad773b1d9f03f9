"""An agent as a folder that acts without Shoal: StableHLO by jax.export, and a model card."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax import export as jax_export

from shoal import __version__
from shoal.envs.spaces import Groups, leaves, unflatten
from shoal.errors import SettingError
from shoal.runs.results.agent import Agent

PROGRAM, TEXT, SPEC, EXAMPLE, CARD = (
    "policy.bin", "policy.mlir", "policy.json", "example.py", "README.md",
)  # fmt: skip
PLATFORMS = ("cpu", "cuda")
EXAMPLE_TEXT = '''"""Acts with the policy of this folder: needs JAX and NumPy, and not Shoal."""

import json
from pathlib import Path

import numpy as np
from jax import export

folder = Path(__file__).parent
policy = export.deserialize(bytearray((folder / "policy.bin").read_bytes()))
spec = json.loads((folder / "policy.json").read_text())


def blank(spec, count=1):
    """Observations of zeros: arrays with a first axis for many, or dictionaries of these."""
    if "shape" in spec:
        return np.zeros((count, *spec["shape"]), spec["dtype"])
    return {name: blank(inner, count) for name, inner in spec.items()}


print(policy.call(blank(spec["observation"])))
'''
CARD_TEXT = """---
library_name: shoal
tags: [reinforcement-learning, jax, stablehlo, {algorithm}, {env}]
{results}---

# {title}

The greedy policy that {plain} had learnt after {tick:,} ticks, exported by Shoal {version}.

| file | has |
|---|---|
| `policy.bin` | a function from observations to actions, with its parameters, for `jax.export.deserialize`; on {platforms} |
| `policy.mlir` | the same as StableHLO text |
| `policy.json` | the shape and dtype of one observation; the function takes any number along a first axis |
| `example.py` | how to load and call it, without Shoal |
"""  # noqa: E501
RESULT_TEXT = """model-index:
- name: {title}
  results:
  - task: {{type: reinforcement-learning}}
    dataset: {{type: {env}, name: {env}}}
    metrics:
    - {{type: mean_reward, name: {protocol}, value: "{mean:.2f} +/- {std:.2f}"}}
"""


def export(agent: Agent, folder: Path, evaluations: Sequence[dict[str, Any]] = ()) -> Path:
    """Write an agent's greedy policy into a folder; its newest evaluation goes into the card."""
    observation = _observation(agent)
    try:
        batch = jax_export.symbolic_shape("b")
        many = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((*batch, *x.shape), x.dtype), observation
        )
        program = jax_export.export(jax.jit(agent.acting()), platforms=PLATFORMS)(many)
    except SettingError:
        raise
    except Exception as error:  # of a policy that isn't the same for any number of observations
        raise SettingError(
            f"{type(agent.algorithm).__name__}'s play can't be exported: {error}",
            "It must be plain JAX, without calls of Python.",
        ) from error
    if folder.exists() and any(folder.iterdir()) and not (folder / PROGRAM).exists():
        raise SettingError(f"{folder} has other files in it", "Name a new folder with --out.")
    folder.mkdir(parents=True, exist_ok=True)
    spec = jax.tree.map(lambda x: {"shape": list(x.shape), "dtype": str(x.dtype)}, observation)
    (folder / PROGRAM).write_bytes(program.serialize())
    (folder / TEXT).write_text(program.mlir_module(), encoding="utf-8")
    (folder / SPEC).write_text(json.dumps({"observation": spec}, indent=1) + "\n", encoding="utf-8")
    (folder / EXAMPLE).write_text(EXAMPLE_TEXT, encoding="utf-8")
    (folder / CARD).write_text(_card(agent, evaluations), encoding="utf-8")
    return folder


def _observation(agent: Agent) -> Any:
    """The shape and dtype of one observation."""
    env = agent.env
    space = getattr(env, "observation_space", None)
    if space is None:
        raise SettingError(
            f"{type(agent.algorithm).__name__} was trained without an environment",
            "Export an agent whose environment says what an observation is.",
        )
    if isinstance(space, Groups):
        raise SettingError(
            f"the agents of {env.name} differ in what they see", "Act with shoal.load(run).act."
        )
    agents = (len(env.agents),) if env.agents else ()
    boxes = (jax.ShapeDtypeStruct((*agents, *box.shape), box.dtype) for box in leaves(space))
    return unflatten(space, tuple(boxes))


def _card(agent: Agent, evaluations: Sequence[dict[str, Any]]) -> str:
    env, algorithm = agent.env.name, type(agent.algorithm).__name__
    title = f"{algorithm} on {env}"
    found = [one for one in evaluations if one.get("tick") == agent.tick]
    results = ""
    for one in found[-1:]:
        protocol = f"{one['episodes']} whole episodes, {one['actions']} actions"
        results = RESULT_TEXT.format(
            title=json.dumps(title), env=json.dumps(env), protocol=json.dumps(protocol),
            mean=one["return_mean"], std=one["return_std"],
        )  # fmt: skip
    return CARD_TEXT.format(
        algorithm=json.dumps(algorithm), env=json.dumps(env), results=results, title=title,
        plain=title, tick=agent.tick, version=__version__, platforms=" and ".join(PLATFORMS),
    )  # fmt: skip
