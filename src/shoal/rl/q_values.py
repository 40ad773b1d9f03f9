"""Action values in three forms: the mean return, a histogram of returns, or their quantiles.

A network gives `atoms` numbers an action. Functions are of ONE transition and of one action's
atoms unless they say otherwise; leading axes are a batch.
"""

from typing import Any, NamedTuple, assert_never

import jax
import jax.numpy as jnp

from shoal.errors import UnknownNameError


class Expected(NamedTuple):
    """The mean return itself (Mnih et al., 2015)."""

    @property
    def atoms(self) -> int:
        """One number an action."""
        return 1


class Categorical(NamedTuple):
    """Logits of a histogram over `atoms` returns from `low` to `high` (Bellemare et al., 2017)."""

    low: float
    high: float
    atoms: int = 51

    @property
    def support(self) -> jax.Array:
        """The returns, evenly spaced."""
        return jnp.linspace(self.low, self.high, self.atoms)


class Quantile(NamedTuple):
    """The returns at the middles of `atoms` equal shares of chance (Dabney et al., 2018)."""

    atoms: int = 51


Form = Expected | Categorical | Quantile
FORMS = ("expected", "categorical", "quantile")


def make_form(name: str, atoms: int, bounds: tuple[float, float]) -> Form:
    """The form called `name`; `atoms` and `bounds` for those that have them."""
    if name not in FORMS:
        raise UnknownNameError("form of values", name, FORMS)
    return (Expected(), Categorical(*bounds, atoms), Quantile(atoms))[FORMS.index(name)]


def mean_return(form: Form, atoms: jax.Array) -> jax.Array:
    """The mean return that `atoms` stand for: [..., atoms] to [...]."""
    match form:
        case Expected():
            return atoms[..., 0]
        case Categorical():
            return jax.nn.softmax(atoms) @ form.support
        case Quantile():
            return jnp.mean(atoms, axis=-1)
    assert_never(form)


def chosen(atoms: jax.Array, action: jax.Array) -> jax.Array:
    """The atoms of one action among all: [..., actions, atoms] to [..., atoms]."""
    return jnp.take_along_axis(atoms, action[..., None, None], axis=-2)[..., 0, :]


def best_or_any(key: jax.Array | None, q_values: jax.Array, epsilon: Any) -> jax.Array:
    """The best of all actions, or with chance ε any of them; without a key, the best."""
    if key is None:
        return jnp.argmax(q_values, -1).astype(jnp.int32)
    chance_key, action_key = jax.random.split(key)
    any_action = jax.random.randint(action_key, q_values.shape[:-1], 0, q_values.shape[-1])
    explores = jax.random.uniform(chance_key, q_values.shape[:-1]) < epsilon
    return jnp.where(explores, any_action, jnp.argmax(q_values, -1).astype(jnp.int32))


def pick(values: jax.Array, action: jax.Array) -> jax.Array:
    """The value of one action among all: [..., actions] to [...]."""
    return jnp.take_along_axis(values, action[..., None], axis=-1)[..., 0]


def mixed(size_t: jax.Array, share: float) -> jax.Array:
    """η max |δ| + (1 - η) mean |δ| of a sequence's errors (Kapturowski et al., 2019)."""
    return share * jnp.max(size_t, axis=0) + (1 - share) * jnp.mean(size_t, axis=0)


def td_loss(
    form: Form, atoms: jax.Array, reward: jax.Array, discount: jax.Array, next_atoms: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """How far `atoms` are from r + γ times what `next_atoms` stand for; and how surprising it is.

    The error that prioritises replay: |δ| of means and quantiles, of histograms the
    loss itself less what nothing could learn (their divergence). No gradient flows to the target.
    """
    next_atoms = jax.lax.stop_gradient(next_atoms)
    match form:
        case Expected():
            error = reward + discount * next_atoms[..., 0] - atoms[..., 0]
            return huber(error), jnp.abs(error)
        case Categorical():
            target = project(form, reward, discount, jax.nn.softmax(next_atoms))
            loss = -jnp.sum(target * jax.nn.log_softmax(atoms), axis=-1)
            entropy = -jnp.sum(jax.scipy.special.xlogy(target, target), axis=-1)
            return loss, jnp.maximum(loss - entropy, 0)
        case Quantile():
            target = reward[..., None] + discount[..., None] * next_atoms
            error = jnp.mean(target, axis=-1) - jnp.mean(atoms, axis=-1)
            return quantile_huber(atoms, target), jnp.abs(error)
    assert_never(form)


def huber(error: jax.Array, bound: float = 1.0) -> jax.Array:
    """½ δ² within ±κ, and κ (|δ| - ½ κ) beyond."""
    size = jnp.abs(error)
    near = jnp.minimum(size, bound)
    return 0.5 * jnp.square(near) + bound * (size - near)


def project(
    form: Categorical, reward: jax.Array, discount: jax.Array, chance: jax.Array
) -> jax.Array:
    """The histogram of r + γ z where z has histogram `chance`, put back onto the support.

    Each return goes to its two neighbours, the nearer the more (Bellemare et al., 2017).
    """
    step = (form.high - form.low) / (form.atoms - 1)
    moved = reward[..., None] + discount[..., None] * form.support
    moved = jnp.clip(moved, form.low, form.high)
    near = jnp.abs(moved[..., None, :] - form.support[:, None]) / step
    return jnp.sum(jnp.clip(1 - near, 0, 1) * chance[..., None, :], axis=-1)


def quantile_huber(quantiles: jax.Array, targets: jax.Array, bound: float = 1.0) -> jax.Array:
    """Σ_i mean_j |τ_i - 1{u < 0}| huber(u) / κ, where u = target_j - quantile_i."""
    count = quantiles.shape[-1]
    middle = (jnp.arange(count) + 0.5) / count
    error = targets[..., None, :] - quantiles[..., :, None]
    weight = jnp.abs(middle[:, None] - (error < 0))
    return jnp.sum(jnp.mean(weight * huber(error, bound), axis=-1), axis=-1) / bound


def rescale(x: jax.Array, slope: float = 1e-3) -> jax.Array:
    """The squashed return h(x) = sign(x) (√(|x| + 1) - 1) + ε x (Pohlen et al., 2018)."""
    return jnp.sign(x) * (jnp.sqrt(jnp.abs(x) + 1) - 1) + slope * x


def unscale(x: jax.Array, slope: float = 1e-3) -> jax.Array:
    """The inverse of `rescale`."""
    root = jnp.sqrt(1 + 4 * slope * (jnp.abs(x) + 1 + slope))
    # (root - 1) / 2ε with the difference multiplied out, which loses no digits.
    inner = 2 * (jnp.abs(x) + 1 + slope) / (root + 1)
    return jnp.sign(x) * (jnp.square(inner) - 1)
