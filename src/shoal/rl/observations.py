"""Observations of every kind as what networks see: a vector of features, or a folded image.

Of an observation in parts, networks see what the agent sees itself; its mask goes beside that.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shoal.envs.spaces import (
    MASK,
    SEEN,
    Observation,
    has_parts,
    leaves,
    parts,
    unflatten,
)
from shoal.rl.normalise import Moments, init_moments, normalise, update_moments
from shoal.rl.own_network import as_numbers
from shoal.rl.torso import Kind, as_image, choose_torso

ObsMoments = Any  # a tree of Moments like the observation's, or Picture, or Unchanged


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Picture:
    """An image has no moments; this says which torso looks at it."""

    kind: Kind = field(metadata={"static": True})


class Unchanged(NamedTuple):
    """Observations that a network of the user's sees in their own shapes."""

    moments: Any  # a tree of Moments like the observation's; () for bytes


class Masked(NamedTuple):
    """Features, and which actions may be taken on seeing them."""

    own: Any
    mask: jax.Array


def own_part(obs: Any) -> Any:
    """What an agent sees itself of an observation."""
    return obs[SEEN] if isinstance(obs, dict) and has_parts(obs) else obs


def own_and_mask(features: Any) -> tuple[Any, Any]:
    """Features without the mask beside them, and that mask; () if there is none."""
    return features if isinstance(features, Masked) else (features, ())


def init_obs_moments(space: Observation, torso: Any = "auto") -> ObsMoments:
    """Nothing seen yet."""
    space = parts(space)[0]
    match choose_torso(space, torso):
        case "mlp":
            return unflatten(space, tuple(init_moments(box.shape) for box in leaves(space)))
        case "own":
            each = tuple(init_moments(b.shape) if b.dtype != "uint8" else () for b in leaves(space))
            return Unchanged(unflatten(space, each))
        case kind:
            return Picture(kind)


def update_obs_moments(moments: ObsMoments, obs: Any, weight: Any = ()) -> ObsMoments:
    """`moments` updated by `obs` of [steps, environments, ...], with a weight for each."""
    if isinstance(moments, Picture):
        return moments
    if isinstance(moments, Unchanged):
        return Unchanged(update_obs_moments(moments.moments, obs, weight))

    def update(of: Any, x: jax.Array) -> Any:
        return update_moments(of, x, weight) if of else of

    return jax.tree.map(update, moments, own_part(obs), is_leaf=_is_moments)


def normalise_obs(moments: ObsMoments, obs: Any) -> Any:
    """Every observation but images and masks normalised."""
    if isinstance(moments, Picture):
        return obs
    if isinstance(moments, Unchanged):
        return normalise_obs(moments.moments, obs)

    def one(of: Any, x: jax.Array) -> jax.Array:
        return normalise(of, x) if of else x

    own = jax.tree.map(one, moments, own_part(obs), is_leaf=_is_moments)
    return {**obs, SEEN: own} if own_part(obs) is not obs else own


def as_features(moments: ObsMoments, obs: Any) -> Any:
    """An image as its torso wants it, anything else as one vector of real numbers.

    A network of the user's gets what the environment shows, in its own shapes.
    Where the observation has a mask, it comes beside that: `Masked`.
    """
    own = _own_features(moments, own_part(obs))
    return Masked(own, obs[MASK]) if own_part(obs) is not obs and MASK in obs else own


def _own_features(moments: ObsMoments, own: Any) -> Any:
    if isinstance(moments, Picture):
        return as_image(moments.kind, own)
    if isinstance(moments, Unchanged):
        return as_numbers(own)
    each = zip(jax.tree.leaves(moments, is_leaf=_is_moments), jax.tree.leaves(own), strict=True)
    vectors = [_vector(x, m.mean.ndim) for m, x in each]
    return vectors[0] if len(vectors) == 1 else jnp.concatenate(vectors, axis=-1)


def example_features(env: Any, obs: Any, torso: Any, dtype: str = "") -> Any:
    """The shapes and dtypes of one environment's features, where `obs` has a row for each.

    With a `dtype`, that instead of their own.
    """
    one = jax.tree.map(lambda x: x[0], obs)
    found = jax.eval_shape(lambda: features_of(env.observation_space, one, torso))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype), found)


def features_of(space: Observation, obs: Any, torso: Any) -> Any:
    """Observations as a network with this torso sees them, not normalised and without masks."""
    features = as_features(jax.eval_shape(lambda: init_obs_moments(space, torso)), obs)
    return own_and_mask(features)[0]


def _vector(x: jax.Array, axes: int) -> jax.Array:
    return x.astype(jnp.float32).reshape(*x.shape[: x.ndim - axes], -1)


def _is_moments(x: Any) -> bool:
    return isinstance(x, Moments) or x == ()
