"""Optimisers: what gradients do to parameters, and how the learning rate changes over a run."""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from shoal.errors import SettingError


class Annealing(Protocol):
    """The settings of an algorithm whose learning rate may fall over a run."""

    @property
    def learning_rate(self) -> float:
        """The rate at the start."""
        ...

    @property
    def anneal_lr(self) -> bool:
        """Whether it falls to 0 over the run."""
        ...

    @property
    def total_ticks(self) -> int:
        """The length of the run."""
        ...


def learning_rate(settings: Annealing, updates: int = 1) -> optax.ScalarOrSchedule:
    """The learning rate of each update: constant, or falling linearly to 0 with the run's last one.

    `updates` is how many there are in a tick.
    """
    if not settings.anneal_lr:
        return settings.learning_rate
    return optax.linear_schedule(
        settings.learning_rate, 0.0, _length(settings, "learning rate") * updates
    )


def importance_exponent(settings: Any, ticks: jax.Array) -> Any:
    """β of prioritised replay in a tick: constant, or rising linearly to 1 with the run's last."""
    beta = settings.importance_exponent
    if not settings.anneal_importance:
        return beta
    return optax.linear_schedule(beta, 1.0, _length(settings, "importance exponent"))(ticks)


def _length(settings: Any, of: str) -> int:
    """The ticks of the run, over which a setting is annealed."""
    if settings.total_ticks < 1:
        raise SettingError(
            f"{type(settings).__name__} anneals its {of} over a run of unknown length",
            "shoal.train fills in total_ticks; anywhere else, set it to the number of ticks.",
        )
    return settings.total_ticks


def current_rate(rate: optax.ScalarOrSchedule, opt_state: optax.OptState) -> jax.Array:
    """The learning rate of the next update of an optimiser in this state."""
    if not callable(rate):
        return jnp.float32(rate)
    _, count = optax.tree_utils.tree_get_all_with_path(opt_state, "count")[0]
    return jnp.float32(rate(count))


def global_norm(grads: Any) -> jax.Array:
    """The length of a gradient, all of its parts together."""
    squares = [jnp.sum(jnp.square(x)) for x in jax.tree.leaves(grads)]
    return jnp.sqrt(jnp.sum(jnp.stack(squares)))


def clipped_adam(
    rate: optax.ScalarOrSchedule, max_grad_norm: float
) -> optax.GradientTransformation:
    """Adam on clipped gradients."""
    return _clipped(optax.adam(rate, eps=1e-5), max_grad_norm)


def clipped_rmsprop(
    rate: optax.ScalarOrSchedule, max_grad_norm: float
) -> optax.GradientTransformation:
    """RMSProp on clipped gradients (Mnih et al., 2016)."""
    # Squares start at 0, corrected as in Adam: uncorrected, the first steps are up
    # to ten times the rate; from 1, as in TensorFlow, a short run is over before it has learnt.
    rmsprop = optax.rmsprop(rate, decay=0.99, eps=1e-5, bias_correction=True)
    return _clipped(rmsprop, max_grad_norm)


def scale_critic(rule: optax.GradientTransformation, settings: Any, part: str = "critic") -> Any:
    """`rule`, whose updates of the critic are as large as the critic's own learning rate says.

    `part` is what parameters call the critic.
    """
    own = settings.critic_learning_rate
    if own is None or own == settings.learning_rate:
        return rule
    return optax.chain(rule, _scaled(part, own / settings.learning_rate))


def _scaled(part: str, factor: float) -> optax.GradientTransformation:
    def scale(updates: Any, params: Any = None) -> Any:
        of = jax.tree.map(lambda x: factor * x, getattr(updates, part))
        return updates._replace(**{part: of})

    return optax.stateless(scale)


def _clipped(rule: Any, norm: float) -> optax.GradientTransformation:
    return optax.flatten(optax.chain(optax.clip_by_global_norm(norm), rule))
