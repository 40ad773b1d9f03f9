"""Observations of every kind as what networks see: a vector of features, or a folded image.

Of an observation in parts, networks see what the agent sees itself; its mask goes beside that.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, assert_never

import jax
import jax.numpy as jnp

from shoal.envs.spaces import MASK, SEEN, Box, Dict, Observation, has_parts, parts
from shoal.rl.normalise import Moments, init_moments, normalise, update_moments
from shoal.rl.torso import Kind, as_image, choose_torso

ObsMoments = Any  # a tree of Moments like the observation's, or Picture


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Picture:
    """An image has no moments; this says which torso looks at it."""

    kind: Kind = field(metadata={"static": True})


class Masked(NamedTuple):
    """Features, and which actions may be taken on seeing them."""

    own: jax.Array
    mask: jax.Array


def own_part(obs: Any) -> Any:
    """What an agent sees itself of an observation."""
    return obs[SEEN] if isinstance(obs, dict) and has_parts(obs) else obs


def own_and_mask(features: Any) -> tuple[jax.Array, Any]:
    """Features without the mask beside them, and that mask; () if there is none."""
    return features if isinstance(features, Masked) else (features, ())


def init_obs_moments(space: Observation, torso: str = "auto") -> ObsMoments:
    """Nothing seen yet."""
    space = parts(space)[0]
    kind = choose_torso(space, torso)
    return _init_each(space) if kind == "mlp" else Picture(kind)


def update_obs_moments(moments: ObsMoments, obs: Any, weight: Any = ()) -> ObsMoments:
    """`moments` updated by `obs` of [steps, environments, ...], with a weight for each."""
    if isinstance(moments, Picture):
        return moments
    update = partial(update_moments, weight=weight)
    return jax.tree.map(update, moments, own_part(obs), is_leaf=_is_moments)


def normalise_obs(moments: ObsMoments, obs: Any) -> Any:
    """Every observation but images and masks normalised."""
    if isinstance(moments, Picture):
        return obs
    own = jax.tree.map(normalise, moments, own_part(obs), is_leaf=_is_moments)
    return {**obs, SEEN: own} if own_part(obs) is not obs else own


def as_features(moments: ObsMoments, obs: Any) -> Any:
    """An image as its torso wants it; anything else as one vector of real numbers.

    Where the observation has a mask, it comes beside that: `Masked`.
    """
    own = _own_features(moments, own_part(obs))
    return Masked(own, obs[MASK]) if own_part(obs) is not obs and MASK in obs else own


def _own_features(moments: ObsMoments, own: Any) -> jax.Array:
    if isinstance(moments, Picture):
        return as_image(moments.kind, own)
    each = zip(jax.tree.leaves(moments, is_leaf=_is_moments), jax.tree.leaves(own), strict=True)
    vectors = [_vector(x, m.mean.ndim) for m, x in each]
    return vectors[0] if len(vectors) == 1 else jnp.concatenate(vectors, axis=-1)


def features_of(space: Observation, obs: Any, torso: str) -> jax.Array:
    """Observations as a network with this torso sees them, not normalised and without masks."""
    features = as_features(jax.eval_shape(lambda: init_obs_moments(space, torso)), obs)
    return own_and_mask(features)[0]


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
