"""Observations of every kind as what networks see: a vector of features, or a folded image."""

from dataclasses import dataclass, field
from typing import Any, assert_never

import jax
import jax.numpy as jnp

from shoal.envs.spaces import Box, Dict, Observation
from shoal.rl.normalise import Moments, init_moments, normalise, see
from shoal.rl.torso import Kind, as_image, choose_torso

ObsMoments = Any  # a tree of Moments like the observation's, or Picture


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Picture:
    """An image has no moments; this says which torso looks at it."""

    kind: Kind = field(metadata={"static": True})


def init_obs_moments(space: Observation, torso: str = "auto") -> ObsMoments:
    """Nothing seen yet."""
    kind = choose_torso(space, torso)
    return _init_each(space) if kind == "mlp" else Picture(kind)


def see_all(moments: ObsMoments, obs: Any) -> ObsMoments:
    """`moments` after seeing `obs` of [steps, environments, ...] too."""
    if isinstance(moments, Picture):
        return moments
    return jax.tree.map(see, moments, obs, is_leaf=_is_moments)


def normalise_all(moments: ObsMoments, obs: Any) -> Any:
    """Every observation but images normalised."""
    if isinstance(moments, Picture):
        return obs
    return jax.tree.map(normalise, moments, obs, is_leaf=_is_moments)


def as_features(moments: ObsMoments, obs: Any) -> jax.Array:
    """An image as its torso wants it; anything else as one vector of real numbers."""
    if isinstance(moments, Picture):
        return as_image(moments.kind, obs)
    each = zip(jax.tree.leaves(moments, is_leaf=_is_moments), jax.tree.leaves(obs), strict=True)
    vectors = [_vector(x, m.mean.ndim) for m, x in each]
    return vectors[0] if len(vectors) == 1 else jnp.concatenate(vectors, axis=-1)


def features_of(space: Observation, obs: Any, torso: str) -> jax.Array:
    """Observations as a network with this torso sees them, nothing of them normalised."""
    return as_features(jax.eval_shape(lambda: init_obs_moments(space, torso)), obs)


def _init_each(space: Observation) -> ObsMoments:
    match space:
        case Dict(spaces):
            return {name: _init_each(inner) for name, inner in spaces}
        case Box(shape=shape):
            return init_moments(shape)
    assert_never(space)


def _vector(x: jax.Array, axes: int) -> jax.Array:
    return x.astype(jnp.float32).reshape(*x.shape[: x.ndim - axes], -1)


def _is_moments(x: Any) -> bool:
    return isinstance(x, Moments)
