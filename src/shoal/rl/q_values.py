"""Action values in three forms: the expected return, a categorical distribution, or quantiles.

A network outputs `atoms` numbers per action. Functions take ONE transition and one action's
atoms unless they say otherwise; leading axes are a batch.
"""

from typing import Any, NamedTuple, assert_never

import jax
import jax.numpy as jnp

from shoal.errors import UnknownNameError


class Expected(NamedTuple):
    """The expected return itself (Mnih et al., 2015)."""

    @property
    def atoms(self) -> int:
        """One number per action."""
        return 1


class Categorical(NamedTuple):
    """C51: logits over `atoms` returns from `low` to `high` (Bellemare et al., 2017)."""

    low: float
    high: float
    atoms: int = 51

    @property
    def support(self) -> jax.Array:
        """The returns, evenly spaced."""
        return jnp.linspace(self.low, self.high, self.atoms)


class Quantile(NamedTuple):
    """QR-DQN: returns at the midpoints of `atoms` equal quantiles (Dabney et al., 2018)."""

    atoms: int = 51


Form = Expected | Categorical | Quantile
FORMS = ("expected", "categorical", "quantile")


def make_form(name: str, atoms: int, bounds: tuple[float, float]) -> Form:
    """The form called `name`; `atoms` and `bounds` are used by the forms that have them."""
    if name not in FORMS:
        raise UnknownNameError("form of values", name, FORMS)
    return (Expected(), Categorical(*bounds, atoms), Quantile(atoms))[FORMS.index(name)]


def mean_return(form: Form, atoms: jax.Array) -> jax.Array:
    """Q: the mean of the return distribution: [..., atoms] to [...]."""
    match form:
        case Expected():
            return atoms[..., 0]
        case Categorical():
            return jax.nn.softmax(atoms) @ form.support
        case Quantile():
            return jnp.mean(atoms, axis=-1)
    assert_never(form)


def select_atoms(atoms: jax.Array, action: jax.Array) -> jax.Array:
    """The atoms of one action: [..., actions, atoms] to [..., atoms]."""
    return jnp.take_along_axis(atoms, action[..., None, None], axis=-2)[..., 0, :]


def epsilon_greedy(key: jax.Array | None, q_values: jax.Array, epsilon: Any) -> jax.Array:
    """The greedy action, or with probability ε a uniform one; without a key, the greedy one."""
    if key is None:
        return jnp.argmax(q_values, -1).astype(jnp.int32)
    explore_key, action_key = jax.random.split(key)
    random_action = jax.random.randint(action_key, q_values.shape[:-1], 0, q_values.shape[-1])
    explores = jax.random.uniform(explore_key, q_values.shape[:-1]) < epsilon
    return jnp.where(explores, random_action, jnp.argmax(q_values, -1).astype(jnp.int32))


def select_value(values: jax.Array, action: jax.Array) -> jax.Array:
    """The value of one action: [..., actions] to [...]."""
    return jnp.take_along_axis(values, action[..., None], axis=-1)[..., 0]


def sequence_priority(td_error_t: jax.Array, eta: float) -> jax.Array:
    """η max |δ| + (1 - η) mean |δ| of a sequence (Kapturowski et al., 2019)."""
    return eta * jnp.max(td_error_t, axis=0) + (1 - eta) * jnp.mean(td_error_t, axis=0)


def td_loss(
    form: Form, atoms: jax.Array, reward: jax.Array, discount: jax.Array, next_atoms: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The loss of `atoms` against r + γ `next_atoms`, and the error that replay prioritises by.

    That error is |δ| of the mean return for expected values and quantiles, and the KL divergence
    for a categorical distribution. No gradient flows to the target.
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
    form: Categorical, reward: jax.Array, discount: jax.Array, probabilities: jax.Array
) -> jax.Array:
    """The distribution of r + γ z, z ~ `probabilities`, projected onto the support.

    The mass of each return is split between its two neighbours (Bellemare et al., 2017).
    """
    step = (form.high - form.low) / (form.atoms - 1)
    moved = reward[..., None] + discount[..., None] * form.support
    moved = jnp.clip(moved, form.low, form.high)
    near = jnp.abs(moved[..., None, :] - form.support[:, None]) / step
    return jnp.sum(jnp.clip(1 - near, 0, 1) * probabilities[..., None, :], axis=-1)


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
