"""Generated kernels as Triton compiles them: the numbers of XLA on the same GPU."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

import test_kernels as unit

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    """Kernels as a GPU runs them, with products as exact as the law of kernels wants them."""
    monkeypatch.setenv(unit.VARIABLE, "auto")
    with jax.default_matmul_precision("highest"):
        yield


@pytest.mark.parametrize(
    ("name", "env", "envs"),
    [
        *((name, "CartPole-v1", 17) for name in ("ppo", "a2c", "impala", "dqn")),
        *(("ppo", env, 40) for env in ("Acrobot-v1", "Pendulum-v1", "MountainCar-v0")),
        ("sac", "Pendulum-v1", 6),
    ],
)
def test_collecting(name, env, envs):
    pytest.importorskip("gymnax")
    unit.test_collecting_is_one_kernel(name, env, envs)


@pytest.mark.parametrize("name", ["uniform", "normal", "categorical", "randint", "fold in"])
def test_random_numbers(name):
    unit.test_random_numbers_are_those_of_xla(name)


@pytest.mark.parametrize("shape", [(6, 16), (5, 19), (4, 3, 2)])
def test_recurrences(shape):
    unit.test_recurrences_along_time(shape)


@pytest.mark.parametrize("sizes", [(4, 32, 1), (17, 24, 24, 1)])
@pytest.mark.parametrize("samples", [64, 71])
def test_gradients(sizes, samples):
    unit.test_gradients_of_samples(samples=samples, sizes=sizes)


@pytest.mark.parametrize("sizes", [(17, 24, 3), (3, 64, 64, 1)])
def test_networks(sizes):
    unit.test_networks_of_any_width(sizes)


def test_what_does_not_fit_runs_on_xla():
    unit.test_a_network_too_wide_for_the_chip_runs_on_xla()


def test_large_blocks(monkeypatch):
    monkeypatch.setattr("shoal.kernels.loops.MANY", 1)
    function = unit.looped(lambda x: jnp.sin(x) * 2, unit.rows(3, envs=70))
    unit.check_kernel(*function)
