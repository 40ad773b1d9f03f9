"""Random keys and bits: the words that XLA draws, from the same Threefry."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shoal.kernels.block import (
    Block,
    Keyed,
    aligned,
    materialised,
    narrow,
    pointwise,
    rest_of,
    rule,
)
from shoal.kernels.tiles import (
    MOST_TILES,
    IneligibleError,
    Tiled,
    at,
    constant,
    places,
    tiles_of,
)

_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
_PARITY = np.uint32(0x1BD11BDA)


@rule("threefry2x32")
def _threefry(block: Block, e: Any, args: list[Tiled]) -> list[Tiled]:
    """The words that XLA's own Threefry-2x32 gives (Salmon et al., 2011)."""
    rank = len(e.outvars[0].aval.shape)
    values, axis = aligned(args, rank)

    def both(a: Callable[..., Any], *xs: Tiled) -> Tiled:
        return pointwise(a, xs, np.uint32)

    def turned(x: Any, left: int) -> Any:
        return lax.shift_left(x, jnp.full_like(x, left)) | lax.shift_right_logical(
            x, jnp.full_like(x, 32 - left)
        )

    k1, k2, x1, x2 = values
    keys = k1, k2, both(lambda a, b: a ^ b ^ _PARITY, k1, k2)
    x1, x2 = both(jnp.add, x1, k1), both(jnp.add, x2, k2)
    for group in range(5):
        for r in _ROTATIONS[group % 2]:
            x1 = both(jnp.add, x1, x2)
            x2 = both(lambda a, b, r=r: turned(b, r) ^ a, x1, x2)
        x1 = both(jnp.add, x1, keys[(group + 1) % 3])
        more = np.uint32(group + 1)
        x2 = both(lambda a, b, m=more: a + b + m, x2, keys[(group + 2) % 3])
    shape = rest_of(e.outvars[0].aval.shape, axis)
    return [replace(x, axis=axis, shape=shape) for x in (x1, x2)]


@rule("iota_2x32_shape")
def _numbers(block: Block, e: Any, args: list[Tiled]) -> list[Tiled]:
    shape = e.params["shape"]
    if math.prod(shape) > MOST_TILES:
        raise IneligibleError(f"{math.prod(shape)} random numbers a row are too many")
    low = constant(np.arange(math.prod(shape), dtype=np.uint32).reshape(shape))
    return [constant(np.zeros(shape, np.uint32)), low]


def _of_impl(block: Block, e: Any, keys: Keyed, made: Callable[..., Any], *more: Tiled) -> Any:
    """What a key's own implementation makes of each key, word arrays last."""
    shape = np.broadcast_shapes(keys.words[0].tiles.shape, *(m.tiles.shape for m in more))
    found = {}
    specs = [jax.ShapeDtypeStruct((len(keys.words),), np.uint32)]
    specs += [jax.ShapeDtypeStruct((), m.dtype) for m in more]
    closed = jax.make_jaxpr(made)(*specs)
    for place in places(shape):
        word = tiles_of([at(w, place) for w in keys.words], (len(keys.words),))
        args = [Tiled(word, (len(keys.words),), np.dtype(np.uint32))]
        args += [Tiled(tiles_of([at(m, place)], ()), (), m.dtype) for m in more]
        (found[place],) = block.jaxpr(closed, args)
    one = next(iter(found.values()))
    for a in one.wide:
        found = {place: narrow(x, a) for place, x in found.items()}
    one = next(iter(found.values()))
    tiles = np.empty((*shape, *one.shape), object)
    for place, x in found.items():
        tiles[(*place, ...)] = np.broadcast_to(x.tiles, x.shape)
    return tiles, one.dtype


@rule("random_split")
def _random_split(block: Block, e: Any, args: list[Keyed]) -> list[Keyed]:
    keys, shape = args[0], e.params["shape"]
    impl = e.invars[0].aval.dtype._impl
    tiles, _ = _of_impl(block, e, keys, lambda data: impl.split(data, shape))
    return [_as_keys(tiles, (*keys.words[0].shape, *shape), keys.words[0].axis)]


@rule("random_fold_in")
def _random_fold_in(block: Block, e: Any, args: list[Any]) -> list[Keyed]:
    keys, number = args
    impl = e.invars[0].aval.dtype._impl
    (*words, number), axis = aligned([*keys.words, number], len(e.outvars[0].aval.shape))
    tiles, _ = _of_impl(block, e, Keyed(tuple(words)), impl.fold_in, number)
    return [_as_keys(tiles, words[0].shape, axis)]


@rule("random_bits")
def _random_bits(block: Block, e: Any, args: list[Keyed]) -> Tiled:
    keys, shape, width = args[0], e.params["shape"], e.params["bit_width"]
    impl = e.invars[0].aval.dtype._impl
    tiles, dtype = _of_impl(block, e, keys, lambda data: impl.random_bits(data, width, shape))
    return Tiled(tiles, (*keys.words[0].shape, *shape), dtype, (), keys.words[0].axis)


def _as_keys(tiles: np.ndarray, shape: tuple[int, ...], axis: int | None) -> Keyed:
    words = [tiles[..., i] for i in range(tiles.shape[-1])]
    return Keyed(tuple(Tiled(w, shape, np.dtype(np.uint32), (), axis) for w in words))


@rule("random_wrap")
def _random_wrap(block: Block, e: Any, args: list[Tiled]) -> list[Keyed]:
    value = materialised(args[0], len(args[0].shape) - 1)
    return [_as_keys(value.tiles, value.shape[:-1], value.axis)]


@rule("random_unwrap")
def _random_unwrap(block: Block, e: Any, args: list[Keyed]) -> Tiled:
    keys = args[0]
    tiles = np.stack([w.tiles for w in keys.words], -1)
    first = keys.words[0]
    return Tiled(tiles, (*first.shape, len(keys.words)), first.dtype, (), first.axis)


@rule("random_clone")
def _random_clone(block: Block, e: Any, args: list[Keyed]) -> list[Keyed]:
    return [args[0]]
