"""A network of the user's: a pair of functions that turns one observation into features.

`init(key, obs)` returns the parameters, a tree of real numbers, and `apply(params, obs)` the
features, one vector. Both are written for ONE observation, which has the shape that the
environment's space says; the rest is batched here. Bytes stay bytes, and other numbers are float32.
The pair is a tuple, or any object with these two methods, such as a Flax module.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from shoal.envs.spaces import Observation, leaves, unflatten
from shoal.errors import SettingError

Init = Callable[[jax.Array, Any], Any]
Apply = Callable[[Any, Any], jax.Array]


@runtime_checkable
class Network(Protocol):
    """What has both functions as methods."""

    def init(self, key: jax.Array, obs: Any, /) -> Any:
        """The parameters for observations like `obs`."""
        ...

    def apply(self, params: Any, obs: Any, /) -> Any:
        """The features of one observation."""
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class OwnNetwork:
    """The parameters, the functions that they belong to, and how many axes an observation has."""

    params: Any
    network: Any = field(metadata={"static": True})
    rank: int = field(metadata={"static": True})


def is_own(torso: Any) -> bool:
    """Whether a torso is a network of the user's, and not the name of one of Shoal's."""
    return not isinstance(torso, str)


def functions_of(network: Any) -> tuple[Init, Apply]:
    """`init` and `apply` of a network of the user's."""
    if isinstance(network, tuple | list) and len(network) == 2 and all(map(callable, network)):
        return network[0], network[1]
    if isinstance(network, Network) and not isinstance(network, type):
        return network.init, network.apply
    raise SettingError(
        f"the torso {network!r} is neither a name nor a network",
        "Give a pair of functions (init, apply), or an object with these methods: "
        "init(key, obs) -> params, apply(params, obs) -> features.",
    )


def check_own(network: Any) -> Any:
    """`network`, if it can be part of an algorithm's settings."""
    functions_of(network)
    try:
        hash(network)
    except TypeError as error:
        raise SettingError(
            f"the torso {network!r} can change, and settings are fixed: {error}",
            "Let it be a pair of functions, or a frozen dataclass.",
        ) from error
    return network


def init_own(key: jax.Array, space: Observation, network: Any) -> tuple[OwnNetwork, int]:
    """The network with its parameters for observations in `space`, and its number of features."""
    init, apply = functions_of(check_own(network))
    example = as_numbers(
        unflatten(space, tuple(jnp.zeros(b.shape, b.dtype) for b in leaves(space)))
    )
    params = init(key, example)
    out = jax.eval_shape(apply, params, example)
    if not hasattr(out, "shape") or len(out.shape) != 1 or out.dtype != jnp.float32:
        raise SettingError(
            f"a network returns {out} for an observation in {space}",
            "Let apply(params, obs) return one vector of float32 for one observation, without a "
            "batch axis.",
        )
    rank = jax.tree.leaves(example)[0].ndim
    return OwnNetwork(params, network, rank), out.shape[0]


def apply_own(net: OwnNetwork, obs: Any) -> jax.Array:
    """The features of observations with any axes before their own."""
    apply = functions_of(net.network)[1]
    first = jax.tree.leaves(obs)[0]
    batch = first.shape[: first.ndim - net.rank]
    if not batch:
        return apply(net.params, obs)
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[len(batch) :]), obs)
    seen = jax.vmap(lambda one: apply(net.params, one))(flat)
    return seen.reshape(*batch, -1)


def as_numbers(obs: Any) -> Any:
    """Observations as such a network gets them: bytes as they are, all else as float32."""
    return jax.tree.map(lambda x: x if x.dtype == jnp.uint8 else x.astype(jnp.float32), obs)
