"""Loops as others write them: each fits the cuts that it is written for, with its own numbers."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shoal
from laws.cases import cluster
from laws.differences import difference
from shoal.graph.layout import Sharded

ENVS, WIDE, TICKS = 8, 4, 3


@shoal.stage(per="env")
def act(key, x, *, w):
    key, now = jax.random.split(key)
    return key, jnp.tanh(x * w + 0.3 * jax.random.normal(now, x.shape))


@shoal.stage(per="env", role="env", name="env")
def score(w, x):
    return -jnp.sum((w - x) ** 2)


@shoal.stage(per="env")
def perturb(key):
    key, now = jax.random.split(key)
    return key, jax.random.normal(now, (WIDE,))


class Loop:
    """A loop with a row for each environment, weights, and a tick of its own."""

    def init(self, key, env, envs):
        rows = jnp.arange(envs)
        keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(rows)
        x = jnp.sin(jnp.arange(envs * WIDE).reshape(envs, WIDE) + 1.0)
        return {"x": x, "keys": keys, "w": jnp.linspace(0.3, 1, WIDE)}


class Ranks(Loop):
    """An evolution strategy with antithetic pairs: two rows for each environment."""

    def tick(self, env, state):
        keys, noise = perturb(state["keys"])
        both = jnp.concatenate([state["w"] + 0.1 * noise, state["w"] - 0.1 * noise])
        fitness = score(both, jnp.concatenate([state["x"], state["x"]]))
        w = shoal.stage(self.learn, name="learn")(state["w"], fitness, noise)
        return state | {"keys": keys, "w": w}, {"best": shoal.max(fitness.max())}

    @staticmethod
    def learn(w, fitness, noise):
        order = jnp.argsort(jnp.argsort(shoal.gather(fitness)))
        there, back = jnp.split(shoal.scatter(order) / order.size - 0.5, 2)
        return w + 0.1 * shoal.mean(jnp.mean((there - back)[:, None] * noise, axis=0))


class Scaled(Loop):
    """Actors scale what they do by a spread that tick computes from what a learner made.

    Its metric is a plain mean of what they did.
    """

    def tick(self, env, state):
        w, error = shoal.stage(self.learn, name="learn")(state["w"], state["x"])
        count, total = error.shape[0], error.sum()
        spread = jnp.sqrt(jnp.square(error).sum() / count - (total / count) ** 2 + 1e-3)
        keys, x = act(state["keys"], state["x"], w=state["w"] / spread)
        return {"x": x, "keys": keys, "w": w}, {"acted": x.mean()}

    @staticmethod
    def learn(w, x):
        return w - 0.1 * shoal.mean(jnp.mean(x, axis=0)), x @ w


class Odd(Loop):
    """Sums of bytes, which wrap round, and the largest of numbers of which some are NaN."""

    def init(self, key, env, envs):
        return super().init(key, env, envs) | {"most": self.w0, "total": self.w0.astype(jnp.uint8)}

    w0 = jnp.zeros(WIDE)

    def tick(self, env, state):
        keys, x = act(state["keys"], state["x"], w=state["w"])
        most, total = shoal.stage(self.learn, name="learn")(x)
        return state | {"keys": keys, "x": x, "most": most, "total": total}, {}

    @staticmethod
    def learn(x):
        most, total = shoal.stage(Odd.of_rows, name="grad")(x)
        most, total = shoal.max(most), shoal.sum(total)
        return shoal.stage(lambda *both: both, name="apply")(most, total)

    @staticmethod
    def of_rows(x):
        return jnp.log(x + 0.8).max(0), (90 * x + 128).astype(jnp.uint8).sum(0, dtype=jnp.uint8)


class Chances(Loop):
    """Thompson sampling: draws for all rows, of one key and of a key for each row."""

    def init(self, key, env, envs):
        return super().init(key, env, envs) | {"key": key}

    def tick(self, env, state):
        key, now = jax.random.split(state["key"])
        keys, x = act(state["keys"], state["x"], w=state["w"])
        each = jax.vmap(jax.random.gamma)(keys, 1 + jnp.abs(x))
        chances = shoal.stage(lambda x: jax.random.beta(now, 1 + jnp.abs(x), 2), name="learn")(x)
        return state | {"key": key, "keys": keys, "x": x * chances + 0.1 * each}, {}


class Chosen(Loop):
    """Q-learning that looks up, and marks, each environment's action by its number."""

    def tick(self, env, state):
        keys, x = act(state["keys"], state["x"], w=state["w"])
        action = jnp.argmax(x, axis=1)
        x = x.at[jnp.arange(len(x)), action].multiply(0.9)

        def learn(w, x, action):
            def loss(w):
                chosen = (x * w)[jnp.arange(len(x)), action]
                return jnp.mean((chosen - 0.5) ** 2)

            return w - 0.1 * shoal.mean(jax.grad(loss)(w))

        w = shoal.stage(learn, name="learn")(state["w"], x, action)
        return {"x": x, "keys": keys, "w": w}, {}


class Alike(Loop):
    """Rows that all environments have alike are carried and shown, as a schedule's may be."""

    def tick(self, env, state):
        keys, x = act(state["keys"], state["x"], w=state["w"])
        rows = jnp.broadcast_to(state["w"].cumsum(), x.shape)
        return {"x": rows, "keys": keys, "w": state["w"] * 0.9}, {"rows": rows.sum(1)}


class Groups(Loop):
    """GRPO's advantages: neighbouring environments answer one question, and are compared."""

    def tick(self, env, state):
        keys, x = act(state["keys"], state["x"], w=state["w"])
        scores = score(state["w"] * jnp.ones_like(x), x).reshape(-1, 2)
        centred = scores - scores.mean(1, keepdims=True)
        advantages = (centred / (scores.std(1, keepdims=True) + 1)).reshape(-1)
        w = shoal.stage(self.learn, name="learn")(state["w"], x, advantages)
        return state | {"keys": keys, "x": x, "w": w}, {}

    @staticmethod
    def learn(w, x, advantages):
        loss = lambda w: jnp.mean(advantages[:, None] * jnp.tanh(x * w))  # noqa: E731
        return w - 0.1 * shoal.mean(jax.grad(loss)(w))


class LearntInTick(Loop):
    """A gradient step in tick, in no stage."""

    def tick(self, env, state):
        keys, x = act(state["keys"], state["x"], w=state["w"])
        slope = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])
        return {"x": x, "keys": keys, "w": state["w"] - 0.1 * shoal.mean(slope)}, {}


class FromShared(Loop):
    """A scan that carries rows, which begin as what all share."""

    def tick(self, env, state):
        def turn(carry, _):
            keys, x = act(carry[0], carry[1], w=state["w"])
            return (keys, x - score(x, state["x"])[:, None] * 0.1), x

        first = state["keys"], jnp.broadcast_to(jnp.sin(state["w"]), state["x"].shape)
        (keys, x), seen = lax.scan(turn, first, None, length=3)
        w = shoal.stage(self.learn, name="learn")(state["w"], seen)
        return {"x": x, "keys": keys, "w": w}, {}

    @staticmethod
    def learn(w, seen):
        return w - 0.1 * shoal.mean(jnp.mean(seen, axis=(0, 1)))


def plan_of(loop, policy):
    return shoal.plan(shoal.trace(loop, envs=ENVS), policy, cluster(2))


@pytest.mark.parametrize(
    ("loop", "policy"),
    [
        (Ranks(), shoal.single_learner_coarse(2)),
        (Ranks(), shoal.multi_learner(4)),
        (Ranks(), shoal.decoupled(2, 2, 2)),
        (Scaled(), shoal.single_learner_coarse(2)),
        (Odd(), shoal.central(2)),
        (Odd(), shoal.fused(2)),
        (Chances(), shoal.single_learner_coarse(2)),
        (Chosen(), shoal.multi_learner(4)),
        (Chosen(), shoal.single_learner_coarse(2)),
        (Alike(), shoal.fused(2)),
        (Alike(), shoal.single_learner_coarse(2)),
        (Groups(), shoal.multi_learner(4)),
        (Groups(), shoal.single_learner_coarse(4)),
        (LearntInTick(), shoal.multi_learner(2)),
        (FromShared(), shoal.single_learner_fine(4)),
        (FromShared(), shoal.decoupled(2, 2, 2)),
    ],
    ids=lambda x: getattr(x, "name", type(x).__name__),
)
def test_a_cut_gives_the_numbers_of_plain_jax(loop, policy):
    plan = plan_of(loop, policy)
    start = loop.init(jax.random.key(0), None, ENVS)
    got = shoal.run(plan, "inline", ticks=TICKS, state=start).values
    tick = jax.jit(lambda state: loop.tick(None, state)[0])
    wanted = lax.fori_loop(0, TICKS, lambda _, state: tick(state), start)
    assert {name for name, x in wanted.items() if not difference(got[name], x) < 1e-4} == set()


def test_groups_are_not_divided():
    with pytest.raises(shoal.ShoalError, match=r"hold 1 environments each, but .* groups of 2"):
        plan_of(Groups(), shoal.multi_learner(8))


@pytest.mark.parametrize("policy", [shoal.single_learner_coarse(2), shoal.decoupled(2, 2, 2)])
def test_two_rows_of_an_environment_are_divided_over_replicas(policy):
    plan = plan_of(Ranks(), policy)
    site = next(n for n in plan.sites.nodes.values() if getattr(n, "stage", "") == "env")
    (home,) = plan.homes[site.name]
    layouts = [plan.layout(home, value) for value in site.writes]
    assert layouts == [Sharded(0, before=2)]
    assert sum(map(plan.bytes_of, plan.channels)) < np.prod((2, ENVS, WIDE, 4)) * 2


def test_draws_for_all_rows_of_one_key_are_not_divided():
    with pytest.raises(shoal.ShoalError, match="stage `learn` sees the whole batch"):
        plan_of(Chances(), shoal.multi_learner(2))


def test_a_lag_of_nothing_is_refused():
    with pytest.raises(shoal.ShoalError, match="reads nothing that `learner` carries") as refused:
        plan_of(LearntInTick(), shoal.single_learner_coarse(2, lag=1))
    assert "lag=0" in str(refused.value)


def test_every_replica_prints_its_own_rows():
    seen, changed = [], threading.Condition()

    def show(x):
        with changed:
            seen.extend(np.asarray(x)[:, 0].tolist())
            changed.notify()

    class Printed(LearntInTick):
        def tick(self, env, state):
            jax.debug.callback(show, state["x"])
            return super().tick(env, state)

    plan = plan_of(Printed(), shoal.multi_learner(4))
    start = Printed().init(jax.random.key(0), None, ENVS)
    shoal.run(plan, "inline", ticks=1, state=start)
    with changed:  # callbacks may run after the program that calls them
        changed.wait_for(lambda: len(seen) >= ENVS, timeout=60)
    assert sorted(seen) == sorted(np.asarray(start["x"])[:, 0].tolist())
