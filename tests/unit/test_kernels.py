"""Generated kernels give XLA's numbers; other parts run on XLA with a reason."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core as jex

from shoal import kernels
from shoal.cli.main import main
from shoal.errors import SettingError
from shoal.kernels import VARIABLE, with_kernels
from shoal.rl.blocks import grad_in_blocks
from shoal.rl.nets import init_mlp, mlp
from shoal.rl.returns import discounted_return, gae, running_returns, traces, vtrace
from shoal.runtime.execution.executors import kernel_parts
from shoal.tracing.blocks import in_blocks
from shoal.tracing.equations import below, bind
from shoal.tracing.stage import stage

TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setenv(VARIABLE, "interpret")


def data(x):
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


def check_same(got, want):
    """The same integers, keys and truths; floats within the tolerance."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = data(a), data(b)
        if np.issubdtype(a.dtype, np.floating):
            np.testing.assert_allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE)
        else:
            np.testing.assert_array_equal(a, b)


def as_kernel(function, *args):
    """The results of a function with kernels, and its parts that can be kernels."""
    parts = []
    made = jax.jit(with_kernels(function, jax.devices(), parts.append))(*args)
    return made, parts


def check_kernel(function, *args):
    """Check that a function has a part that runs as a kernel, with the numbers of XLA."""
    got, parts = as_kernel(function, *args)
    assert [part.why_not for part in parts] == [""]
    check_same(got, jax.jit(function)(*args))


def looped(row, *state, steps=3, shared=()):
    """A loop of a stage that maps one row's state to its next; returns the function and state."""
    turn = stage(per="env")(lambda *xs, shared: row(*xs, *shared))

    def function(state, shared):
        def body(carry, _):
            carry = turn(*carry, shared=shared)
            carry = carry if isinstance(carry, tuple) else (carry,)
            return carry, carry

        return lax.scan(body, state, length=steps)

    return function, tuple(state), tuple(shared)


def rows(*shape, envs=20, seed=0):
    return jax.random.normal(jax.random.key(seed), (envs, *shape))


ROWWISE = {
    "join and slice": (lambda x: jnp.concatenate([x[2:], x[:2] * 2]), (5,)),
    "reshape and transpose": (lambda x: (x.reshape(2, 3).T * 1.5).reshape(6), (6,)),
    "stack": (lambda x: jnp.stack([x[1] - x[0], x[0] * x[1]]), (2,)),
    "reduce": (lambda x: jnp.full(3, x.sum()) + x.max() - x.min() + jnp.prod(x), (3,)),
    "reduce a long axis": (lambda x: x / (1 + x.sum()) + x.max() - x.min(), (33,)),
    "argmax": (lambda x: x * 0.5 + jnp.argmax(x) - jnp.argmin(x), (4,)),
    "argmax of a long axis": (lambda x: x * 0.9 + jnp.argmax(x), (19,)),
    "one-hot": (lambda x: x + jax.nn.one_hot(jnp.argmax(x), 5), (5,)),
    "index": (lambda x: x[jnp.argmax(x)] + 0.5 * x, (4,)),
    "dynamic slice": (lambda x: x + lax.dynamic_slice(x, (jnp.argmin(x),), (1,)), (4,)),
    "choose": (lambda x: lax.cond(x[0] > 0, jnp.sin, lambda y: y * 0.3, x), (3,)),
    "an inner loop": (lambda x: lax.fori_loop(0, 4, lambda i, y: 0.5 * y + i, x), (3,)),
    "softmax": (jax.nn.log_softmax, (6,)),
    "transcendental": (
        lambda x: jnp.arctan2(jnp.tanh(x), 1 + jnp.exp(-x)) + jnp.log1p(x * x),
        (2,),
    ),
    "remainder": (lambda x: (x * 7 + jnp.pi) % (2 * jnp.pi) - jnp.pi, (2,)),
}


@pytest.mark.parametrize("name", ROWWISE)
def test_operations_on_rows(name):
    row, shape = ROWWISE[name]
    check_kernel(*looped(row, rows(*shape)))


@pytest.mark.parametrize("sizes", [(4, 8, 2), (17, 24, 3), (3, 64, 64, 1), (33, 2, 33)])
def test_networks_of_any_width(sizes):
    layers = init_mlp(jax.random.key(1), sizes)

    def row(x, layers):
        return x * 0.5 + mlp(layers, x).sum()

    check_kernel(*looped(row, rows(sizes[0]), shared=[layers]))


@pytest.mark.parametrize("envs", [1, 7, 16, 40])
def test_any_number_of_rows(envs):
    check_kernel(*looped(lambda x: x * x - 0.5, rows(2, envs=envs)))


DRAWS = {
    "bits": lambda key: jax.random.bits(key, (3,)),
    "one of bits": jax.random.bits,
    "uniform": lambda key: jax.random.uniform(key, (5,), minval=-2, maxval=3),
    "normal": lambda key: jax.random.normal(key, (2,)),
    "categorical": lambda key: jax.random.categorical(key, jnp.arange(4.0)),
    "bernoulli": lambda key: jax.random.bernoulli(key, 0.3, (2,)),
    "randint": lambda key: jax.random.randint(key, (3,), 0, 10),
    "fold in": lambda key: jax.random.bits(jax.random.fold_in(key, 7)),
    "split": lambda key: jax.random.key_data(jax.random.split(key, 3)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_are_those_of_xla(name):
    def row(key, _):
        key, now = jax.random.split(key)
        return key, DRAWS[name](now)

    keys = jax.random.split(jax.random.key(3), 9)
    first = jax.vmap(DRAWS[name])(keys)
    check_kernel(*looped(row, keys, first))


def trajectory(*shape):
    return [jax.random.normal(jax.random.key(i), shape) for i in range(4)]


@pytest.mark.parametrize("shape", [(6, 16), (5, 19), (4, 3, 2)])
def test_recurrences_along_time(shape):
    reward, discount, value, after = trajectory(*shape)
    ends = reward > 1
    check_kernel(gae, reward, discount, value, after, 0.9 * discount)
    check_kernel(discounted_return, reward, discount, value[0])
    check_kernel(running_returns, reward, discount, value[0])
    check_kernel(
        lambda *x: vtrace(*x, traces(value - after, ends, (1.0, 1.0))),
        reward, discount, value, after,
    )  # fmt: skip


def squared(params, batch):
    x, y, weight = batch
    error = jnp.square(mlp(params, x)[:, 0] - y) * weight
    return jnp.mean(error), {"error": jnp.mean(error), "largest": jnp.mean(jnp.abs(y))}


@pytest.mark.parametrize("samples", [32, 64, 71])
@pytest.mark.parametrize("sizes", [(4, 32, 1), (17, 24, 24, 1)])
def test_gradients_of_samples(samples, sizes):
    params = init_mlp(jax.random.key(0), sizes)
    x = jax.random.normal(jax.random.key(1), (samples, sizes[0]))
    batch = x, jnp.sin(x[:, 0]), jnp.abs(x[:, 1])
    check_kernel(lambda p, b: grad_in_blocks(squared, p, b), params, batch)


def test_sums_rows_and_shared_values():
    def function(scale, x):
        return jnp.sum(x * scale, axis=0), x[:, 0] * scale, scale * 2

    x = jax.random.normal(jax.random.key(1), (45, 3))
    check_kernel(lambda s, x: in_blocks(function, s, x, (1, 512)), jnp.float32(2.0), x)


def scan_of_stages(jaxpr):
    for e in jaxpr.eqns:
        if e.primitive.name == "scan":
            yield e
        for inner in below(e):
            yield from scan_of_stages(inner)


def collecting(algorithm, env, envs):
    """An algorithm's loop over act and env, and what it is given on the first tick."""
    state = jax.jit(lambda key: algorithm.init(key, env, envs))(jax.random.key(1))
    closed = jax.make_jaxpr(lambda state: algorithm.tick(env, state))(state)
    loop = next(scan_of_stages(closed.jaxpr))
    known = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    known |= dict(zip(closed.jaxpr.invars, jax.tree.leaves(state), strict=True))
    for e in closed.jaxpr.eqns:
        args = [v.val if isinstance(v, jex.Literal) else known[v] for v in e.invars]
        if e is loop:
            return loop, args
        known |= dict(zip(e.outvars, bind(e, args), strict=True))
    raise AssertionError("the tick has no loop")


def small(name):
    from shoal import algorithms as a

    few = {"hidden": (16,)}
    return {
        "ppo": a.PPO(num_steps=4, **few),
        "a2c": a.A2C(num_steps=4, **few),
        "impala": a.IMPALA(num_steps=4, **few),
        "dqn": a.DQN(num_steps=4, **few),
        "sac": a.SAC(num_steps=4, **few),
    }[name]


@pytest.mark.parametrize(
    ("name", "env", "envs"),
    [
        ("ppo", "CartPole-v1", 17),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("ppo", "Pendulum-v1", 8),
                ("a2c", "Acrobot-v1", 16),
                ("impala", "CartPole-v1", 20),
                ("dqn", "MountainCar-v0", 12),
                ("dqn", "Acrobot-v1", 5),
                ("sac", "Pendulum-v1", 6),
            )
        ),
    ],
)
def test_collecting_is_one_kernel(name, env, envs):
    pytest.importorskip("gymnax")
    from shoal.envs import make

    loop, args = collecting(small(name), make(env), envs)
    check_kernel(lambda *xs: bind(loop, xs), *args)


def why_not(function, *args):
    """Check that it runs on XLA with the same numbers; return the reported reason."""
    got, parts = as_kernel(function, *args)
    check_same(got, jax.jit(function)(*args))
    (part,) = parts
    assert "XLA" in str(part)
    return part.why_not


def test_operations_without_a_rule_run_on_xla():
    assert "sort" in why_not(*looped(lambda x: jnp.sort(x) * 0.5, rows(4)))


def test_rows_that_mix_run_on_xla():
    turn = stage(per="env")(lambda x: x * 0.5)

    def function(x):
        return lax.scan(lambda c, _: (turn(c) + jnp.sum(c), None), x, length=3)[0]

    assert "mixes rows" in why_not(function, rows())


def test_rows_that_are_numbered_run_on_xla():
    turn = stage(per="env")(lambda x, i: x * 0.5 + i)

    def function(x):
        return lax.scan(lambda c, _: (turn(c, jnp.arange(20.0)), None), x, length=3)[0]

    assert why_not(function, rows())


def test_a_network_too_wide_for_the_chip_runs_on_xla():
    layers = init_mlp(jax.random.key(1), (4, 600, 600, 4))
    loop = looped(lambda x, layers: x + mlp(layers, x), rows(4, envs=2), shared=[layers])
    assert "on chip" in why_not(*loop)


def test_unsupported_sums_run_on_xla():
    x = rows(3)
    assert why_not(lambda x: in_blocks(lambda _, x: jnp.sort(x, axis=0), (), x, (1, 512)), x)


def test_many_samples_run_on_xla(monkeypatch):
    monkeypatch.setattr("shoal.kernels.gradients.MOST_SAMPLES", 40)
    x = rows(3, envs=64)
    reason = why_not(lambda x: in_blocks(lambda _, x: jnp.sum(x, axis=0), (), x, (1, 512)), x)
    assert reason == "XLA is faster at 64 samples"


@pytest.mark.parametrize("mode", ["off", "auto"])
def test_nothing_changes_where_kernels_are_off_or_there_is_no_gpu(monkeypatch, mode):
    monkeypatch.setenv(VARIABLE, mode)
    cpus = jax.devices("cpu")
    assert with_kernels(squared, cpus) is squared
    assert kernels.launch_on(cpus) is None


def test_a_wrong_setting_is_rejected(monkeypatch):
    monkeypatch.setenv(VARIABLE, "fast")
    with pytest.raises(SettingError, match="none of off, auto, interpret"):
        kernels.mode()


def fused_ppo():
    pytest.importorskip("gymnax")
    import shoal
    from shoal.algorithms import PPO
    from shoal.envs import make

    algorithm = PPO(num_steps=4, update_epochs=1, num_minibatches=2, hidden=(8,))
    return shoal.plan(shoal.trace(algorithm, make("CartPole-v1"), envs=16), shoal.fused())


@pytest.mark.slow
def test_a_run_with_kernels_gives_the_same_state(monkeypatch):
    import shoal

    got = shoal.run(fused_ppo(), ticks=2).values
    monkeypatch.setenv(VARIABLE, "off")
    check_same(got, shoal.run(fused_ppo(), ticks=2).values)


def test_a_plan_reports_what_runs_as_a_kernel(monkeypatch, capsys):
    plan = fused_ppo()
    first, *others = map(str, kernel_parts(plan))
    assert re.fullmatch(r"the loop of act, env \(.*ppo.py:\d+\) runs as a kernel", first)
    assert [re.sub(r" \(.*\)", "", text) for text in others] == [
        "a recurrence runs as a kernel",
        "the sum over samples runs as a kernel",
    ]
    monkeypatch.setenv(VARIABLE, "auto")
    assert main(["plan", "ppo", "CartPole-v1", "--envs", "16"]) == 0
    assert "runs as XLA: kernels need NVIDIA GPUs" in capsys.readouterr().out
    monkeypatch.setenv(VARIABLE, "off")
    assert kernel_parts(plan) == []


class Gpu:
    platform = "gpu"

    def __init__(self, capability):
        self.compute_capability = capability


@pytest.mark.parametrize(
    ("capability", "runs"), [("9.0", True), ("8.0", True), ("7.5", False), ("gfx90a", False)]
)
def test_only_gpus_that_triton_knows_run_kernels(monkeypatch, capability, runs):
    monkeypatch.setenv(VARIABLE, "auto")
    assert (kernels.launch_on([Gpu(capability)]) is not None) is runs
