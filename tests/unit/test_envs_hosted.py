"""Host environments in a loop: rows don't depend on the process, and PPO learns on each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

gymnasium = pytest.importorskip("gymnasium")
import shoal  # noqa: E402
from shoal.algorithms import PPO  # noqa: E402
from shoal.envs import HostEnvironment, episode_totals, key_rows, make  # noqa: E402
from shoal.envs.gymnasium import GymnasiumSimulator  # noqa: E402
from shoal.envs.host import close_all  # noqa: E402
from shoal.errors import RunError  # noqa: E402
from unit.host_envs import Several, play  # noqa: E402
from unit.toy_loop import TWO_CPUS  # noqa: E402

KEY = jax.random.PRNGKey(0)
SMALL = PPO(num_steps=8, update_epochs=2, num_minibatches=2, hidden=(8,), learning_rate=0.01)
NORMAL = PPO(
    num_steps=8,
    update_epochs=2,
    num_minibatches=2,
    hidden=(8,),
    norm_obs=True,
    norm_reward=True,
)


@pytest.fixture(autouse=True)
def closed():
    yield
    close_all()


def wide(name, **settings):
    return HostEnvironment(name, GymnasiumSimulator(name, tuple(settings.items())))


def test_a_step_in_a_loop_matches_step_rows():
    env = make("gymnasium:CartPole-v1")
    state, first = env.reset(key_rows(KEY, 3))
    actions = np.random.default_rng(0).integers(2, size=(40, 3), dtype=np.int32)

    def once(carry, action):
        state, obs = carry
        state, step = env.step(state, action)
        return (state, step.obs), (obs, step)

    (after, _), (acted_on, steps) = jax.jit(lambda *a: jax.lax.scan(once, *a))(
        (state, first), actions
    )
    seen = play(env.simulator, actions, np.asarray(state.seed))
    fields = steps._asdict()
    assert fields.pop("active") == ()  # which only several agents have
    for name, x in fields.items():
        np.testing.assert_array_equal(x, seen[name])
    np.testing.assert_array_equal(acted_on[1:], steps.obs[:-1])
    np.testing.assert_array_equal(after.steps, 40)
    np.testing.assert_array_equal(after.seed, state.seed)
    assert jnp.sum(episode_totals(steps)["episodes"]) == np.sum(steps.terminated) > 0


def test_an_environment_starts_the_same_in_any_batch_size():
    env = make("gymnasium:CartPole-v1")
    few, many = (env.reset(key_rows(KEY, envs)) for envs in (2, 18))
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y[:2]), few, many)


LOOPS = {
    "discrete": lambda: (SMALL, make("gymnasium:CartPole-v1")),
    "continuous": lambda: (NORMAL, make("gymnasium:Pendulum-v1", max_episode_steps=5)),
    "several kinds": lambda: (NORMAL, wide("Many-v0")),
    "image": lambda: (SMALL, wide("Picture-v0")),
    "agents": lambda: (NORMAL, HostEnvironment("several", Several())),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_ppo_gives_the_numbers_of_the_plain_tick_under_every_policy(loop):
    algorithm, env = LOOPS[loop]()
    found = shoal.verify(
        algorithm, env, shoal.single_learner_coarse(2), envs=4, ticks=2, cluster=TWO_CPUS
    )
    assert found.holds, found


def test_several_agents_have_one_episode_and_each_its_own_rewards():
    algorithm, env = LOOPS["agents"]()
    after, metrics = jax.jit(lambda s: algorithm.tick(env, s))(algorithm.init(KEY, env, envs=3))
    assert after.running_return.shape == (3, 2)
    np.testing.assert_array_equal(metrics["episodes"], [1, 1, 1])
    np.testing.assert_array_equal(metrics["episode_length"], [5, 5, 5])
    assert all(np.all(np.isfinite(metric)) for metric in metrics.values())


def test_a_failing_environment_stops_the_run_and_is_named():
    env = wide("Broken-v0", fault="always")
    plan = shoal.plan(shoal.trace(SMALL, env, envs=4), shoal.single_learner_coarse(2), TWO_CPUS)
    with pytest.raises(RunError, match=r"environment 0.*: the cable came off"):
        shoal.run(plan, "inline", ticks=2)
