"""Torsos: what an observation goes through before the layers that decide, chosen by name.

| name | sees | is |
|---|---|---|
| mlp | anything, as a vector | nothing: the vector goes straight to the layers behind |
| nature | images of 36 × 36 or more | Mnih et al. (2015): three convolutions, 512 wide |
| resnet | images of 36 × 36 or more | Espeholt et al. (2018): fifteen convolutions, 256 wide |
| minatar | images of 3 × 3 or more | Young and Tian (2019): one convolution, 128 wide |

`auto` is nature for large images of bytes, minatar for small ones of other numbers, else mlp. A
network of the user's stands in place of a name (own_network.py).
"""

from itertools import product
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from shoal.envs.spaces import Box, Dict, Observation, leaves
from shoal.errors import SettingError, UnknownNameError
from shoal.rl.conv import (
    SMALLEST,
    WIDTH,
    Nature,
    fold_image,
    init_nature,
    is_image,
    nature,
    orthogonal,
    patches,
    sides,
)
from shoal.rl.nets import Dense, dense
from shoal.rl.own_network import OwnNetwork, apply_own, check_own, init_own, is_own

Kind = Literal["mlp", "nature", "resnet", "minatar", "own"]
LEAST: dict[str, int] = {"mlp": 0, "nature": SMALLEST, "resnet": SMALLEST, "minatar": 3}
SECTIONS, RESNET_WIDTH = (16, 32, 32), 256
FILTERS, MINATAR_WIDTH = 16, 128


class Section(NamedTuple):
    """A convolution, a pool that halves the image, and two residual blocks of two convolutions."""

    first: Dense
    blocks: tuple[tuple[Dense, Dense], ...]


class ResNet(NamedTuple):
    """Sections, and a dense layer."""

    sections: tuple[Section, ...]
    dense: Dense


class MinAtar(NamedTuple):
    """A convolution and a dense layer."""

    convolution: Dense
    dense: Dense


Torso = Nature | ResNet | MinAtar | OwnNetwork | tuple[()]


def choose_torso(space: Observation, name: Any) -> Kind:
    """The torso called `name` for what `space` shows; `auto` chooses.

    Images are flattened only where the name says so: `mlp`. A network of the user's is `own`.
    """
    if is_own(name):
        check_own(name)
        return "own"
    if name == "auto":
        kinds: set[Kind] = {_usual(box) for box in leaves(space)}
        if isinstance(space, Dict) and kinds != {"mlp"}:
            raise SettingError(
                f"an image is one of several things seen in {space}, and a torso sees images alone",
                "Show only the image, by a wrapper, or say torso=mlp, which flattens it.",
            )
        return kinds.pop()
    if name not in LEAST:
        raise UnknownNameError("torso", name, ["auto", *LEAST])
    least = LEAST[name]
    if least > _side(space):
        raise SettingError(
            f"the torso `{name}` sees images of {least} × {least} or more, not {space}",
            f"Use torso={choose_torso(space, 'auto')}, which can see it, or a network of your own.",
        )
    return cast(Kind, name)


def check_flat(title: str, space: Observation, name: Any) -> Observation:
    """`space`, if an algorithm without convolutions can see it with the torso called `name`."""
    if name not in ("auto", "mlp"):
        raise UnknownNameError(f"torso of {title}", name, ["auto", "mlp"])
    if name == "auto" and (image := next((b for b in leaves(space) if _usual(b) != "mlp"), None)):
        raise SettingError(
            f"{title} has no convolutional network, and {image} is an image",
            "Use an algorithm that sees images (a2c, dqn, impala, ppo, r2d2), or say torso=mlp, "
            "which flattens it.",
        )
    return space


def init_torso(
    key: jax.Array, space: Observation, name: Any, hidden: tuple[int, ...]
) -> tuple[Torso, tuple[int, ...]]:
    """The torso's parameters, and the sizes of the layers behind it, to which an output is added.

    Images, and the features of a network of the user's, go straight to the output; vectors have
    `hidden` layers between.
    """
    match choose_torso(space, name):
        case "mlp":
            return (), (space.size, *hidden)
        case "nature":
            return init_nature(key, cast(Box, space)), (WIDTH,)
        case "resnet":
            return _init_resnet(key, cast(Box, space)), (RESNET_WIDTH,)
        case "minatar":
            return _init_minatar(key, cast(Box, space)), (MINATAR_WIDTH,)
        case "own":
            net, width = init_own(key, space, name)
            return net, (width,)


def as_image(kind: Kind, x: jax.Array) -> jax.Array:
    """Images as the torso wants them: channels last; bytes stay bytes, since they are smallest."""
    if kind == "nature":
        return fold_image(x)
    channels_first = sides(x.shape[-3:]) != x.shape[-3:]
    return jnp.moveaxis(x, -3, -1) if channels_first else x


def embed(torso: Torso, x: Any) -> jax.Array:
    """What the torso makes of a vector or of an image that `as_image` gave."""
    match torso:
        case OwnNetwork():
            return apply_own(torso, x)
        case Nature():
            return nature(torso, x)
        case ResNet(sections, last):
            x = _unit(x)
            for section in sections:
                x = _section(section, x)
            x = jax.nn.relu(x)
        case MinAtar(convolution, last):
            x = jax.nn.relu(convolve(convolution, _unit(x)))
        case _:
            return x
    return jax.nn.relu(dense(last, x.reshape(*x.shape[:-3], -1)))


def convolve(layer: Dense, x: jax.Array, window: int = 3) -> jax.Array:
    """A convolution of stride 1 where the window fits: by a matrix product on CPUs."""

    def by_product(layer: Dense, x: jax.Array) -> jax.Array:
        return dense(layer, patches(x, window))

    def by_convolution(layer: Dense, x: jax.Array) -> jax.Array:
        *batch, height, width, channels = x.shape
        low = jnp.dtype(layer.compute)
        kernel = layer.weight.astype(low).reshape(window, window, channels, -1)
        image = x.astype(low).reshape(-1, height, width, channels)
        numbers = ("NHWC", "HWIO", "NHWC")
        y = lax.conv_general_dilated(image, kernel, (1, 1), "VALID", dimension_numbers=numbers)
        return y.reshape(*batch, *y.shape[1:]).astype(x.dtype) + layer.bias

    return lax.platform_dependent(layer, x, cpu=by_product, default=by_convolution)


def pool(x: jax.Array) -> jax.Array:
    """The largest of each 3 × 3 window, two apart, over an image filled up to be halved evenly."""
    height, width = x.shape[-3:-1]
    x = _fill(x, [_same(height), _same(width)], float("-inf"))
    rows, columns = -(-height // 2), -(-width // 2)
    shifts = product(range(3), repeat=2)
    parts = [x[..., i : i + 2 * rows - 1 : 2, j : j + 2 * columns - 1 : 2, :] for i, j in shifts]
    # The slope of pairwise maxima is elementwise; that of a window's maximum is a slow scatter.
    most = parts[0]
    for part in parts[1:]:
        most = jnp.maximum(most, part)
    return most


def _section(section: Section, x: jax.Array) -> jax.Array:
    x = pool(_convolve_same(section.first, x))
    for first, second in section.blocks:
        x += _convolve_same(second, jax.nn.relu(_convolve_same(first, jax.nn.relu(x))))
    return x


def _convolve_same(layer: Dense, x: jax.Array) -> jax.Array:
    return convolve(layer, _fill(x, [(1, 1), (1, 1)], 0.0))


def _init_resnet(key: jax.Array, space: Box) -> ResNet:
    height, width, channels = sides(space.shape)
    keys = iter(jax.random.split(key, 5 * len(SECTIONS) + 1))
    sections = []
    for filters in SECTIONS:
        first = orthogonal(next(keys), (9 * channels, filters))
        both = [orthogonal(next(keys), (9 * filters, filters)) for _ in range(4)]
        sections.append(Section(first, ((both[0], both[1]), (both[2], both[3]))))
        height, width, channels = -(-height // 2), -(-width // 2), filters
    seen = height * width * channels
    return ResNet(tuple(sections), orthogonal(next(keys), (seen, RESNET_WIDTH)))


def _init_minatar(key: jax.Array, space: Box) -> MinAtar:
    height, width, channels = sides(space.shape)
    first, second = jax.random.split(key)
    seen = (height - 2) * (width - 2) * FILTERS
    convolution = orthogonal(first, (9 * channels, FILTERS))
    return MinAtar(convolution, orthogonal(second, (seen, MINATAR_WIDTH)))


def _unit(x: jax.Array) -> jax.Array:
    """Bytes as numbers from 0 to 1; other numbers as they are."""
    return x.astype(jnp.float32) / 255 if x.dtype == jnp.uint8 else x.astype(jnp.float32)


def _usual(box: Box) -> Kind:
    """The torso for a box by itself."""
    if is_image(box):
        return "nature"
    small = len(box.shape) == 3 and box.dtype != "uint8"
    return "minatar" if small and _side(box) >= LEAST["minatar"] else "mlp"


def _side(space: Any) -> int:
    """The shorter side of an image; 0 of anything else."""
    is_box = isinstance(space, Box) and len(space.shape) == 3
    return min(sides(space.shape)[:2]) if is_box else 0


def _same(side: int) -> tuple[int, int]:
    """What is filled in before and after a side, so that its half, rounded up, comes out."""
    total = 2 * (-(-side // 2)) + 1 - side
    return total // 2, total - total // 2


def _fill(x: jax.Array, sides: list[tuple[int, int]], value: float) -> jax.Array:
    none = [(0, 0)] * (x.ndim - 3)
    return jnp.pad(x, [*none, *sides, (0, 0)], constant_values=value)
