"""Flows: invalid settings, how they print, and that every policy can cut every preset."""

import jax.numpy as jnp
import pytest
from jax import lax

import shoal
from laws.cases import FOUR, ONE, graph_of
from laws.differences import difference
from shoal.algorithms import PRESETS
from shoal.planning.policies import POLICIES
from shoal.runs.inputs.making import with_total_ticks
from shoal.runtime.debug.verify import verify_plan

pytest.importorskip("gymnax")


def asynchronous(take=1, max_lag=3, ends=4, learners=1, back=None):
    return shoal.DistributionPolicy(
        "mine",
        (
            shoal.Fragment("actor", (shoal.PER_ENV,), ends),
            shoal.Fragment("learner", (shoal.PER_BATCH,), learners),
        ),
        (
            shoal.Wire("learner", "actor", back or shoal.Latest(max_lag)),
            shoal.Wire("actor", "learner", shoal.Queue(2, take)),
        ),
    )


def planned(policy, loop="ppo"):
    return shoal.plan(graph_of(loop), policy, ONE)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (asynchronous(take=5), "is to take 5 of 4 replicas"),
        (asynchronous(max_lag=2), "only 3 of 4 replicas of `actor` could work"),
        (asynchronous(learners=2), "its own replicas would each take others"),
        (asynchronous(back=shoal.Lockstep()), "is also in lockstep with them"),
    ],
    ids=["too many", "too little lag", "two learners", "lockstep"],
)
def test_an_invalid_queue_is_rejected(policy, message):
    with pytest.raises(shoal.ShoalError, match=message) as caught:
        planned(policy)
    assert caught.value.fix


class Tally:
    """A learner that keeps a count for every environment."""

    def init(self, key, env, envs):
        return jnp.zeros(envs), jnp.zeros(envs)

    def tick(self, env, state):
        seen = self.live(state[0])
        return (seen, self.count(state[1], seen)), {}

    @shoal.stage(per="env")
    def live(self, x):
        return x + 1

    @shoal.stage
    def count(self, kept, seen):
        return kept + seen


def test_a_queue_with_take_rejects_carried_rows():
    graph = shoal.trace(Tally(), envs=8)
    with pytest.raises(shoal.ShoalError, match="has a row for every environment"):
        shoal.plan(graph, asynchronous(), ONE)


class TwoReaders:
    """A loop whose environment stage and policy stage both read the learnt parameters."""

    def init(self, key, env, envs):
        return jnp.float32(0), jnp.zeros(envs)

    def tick(self, env, state):
        learnt, seen = state
        seen, _ = lax.scan(lambda x, _: (self.live(self.act(x, of=learnt), of=learnt), None), seen,
                           length=2)  # fmt: skip
        return (self.learn(learnt, seen), seen), {}

    @shoal.stage(per="env")
    def act(self, x, *, of):
        return x + of

    @shoal.stage(per="env", name="env")
    def live(self, x, *, of):
        return x - of

    @shoal.stage
    def learn(self, learnt, seen):
        return learnt + shoal.mean(jnp.mean(seen))


def test_the_latest_values_are_read_by_one_fragment():
    with pytest.raises(shoal.ShoalError, match="latest values of `learner` twice"):
        shoal.plan(shoal.trace(TwoReaders(), envs=8), shoal.impala(2, inference=1), ONE)


def test_a_server_serves_stages_of_one_environment_only():
    with pytest.raises(shoal.ShoalError):
        planned(
            shoal.DistributionPolicy(
                "mine",
                (
                    shoal.Fragment("env", ("env",), 2, ring=2),
                    shoal.Fragment("rest", (shoal.THE_REST,)),
                ),
                (shoal.Wire("env", "rest", shoal.Serve()),),
            )
        )


NONSENSE = {
    "ahead": lambda: shoal.Latest(-1),
    "no room": lambda: shoal.Queue(0),
    "takes none": lambda: shoal.Queue(2, 0),
    "serves none": lambda: shoal.Serve(0),
    "waits back": lambda: shoal.Serve(max_wait=-1.0),
    "no server": lambda: shoal.impala(4, ring=2),
    "no ring": lambda: shoal.Fragment("a", ("env",), ring=0),
    "beside none": lambda: shoal.DistributionPolicy(
        "p", (shoal.Fragment("a", ("*",), beside="b"),)
    ),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_settings_that_mean_nothing_are_rejected(what):
    with pytest.raises(shoal.ShoalError):
        NONSENSE[what]()


def test_flows_print_their_settings():
    assert str(shoal.Latest(2)) == "latest, lag <= 2"
    assert str(shoal.Latest(None)) == "latest"
    assert str(shoal.Queue(4, 2)) == "queue of 4, takes the first 2"
    assert str(shoal.Serve(8, 0.001)) == "serve up to 8, wait 1 ms"


def traced_preset(name, envs):
    preset = PRESETS["ppo"][name]
    algorithm = with_total_ticks(preset.algorithm, preset.ticks)
    return shoal.trace(algorithm, shoal.envs.make(name), envs=envs)


@pytest.mark.parametrize("name", [n for n, p in PRESETS["ppo"].items() if p.family == "gymnax"])
def test_every_preset_can_be_cut_by_every_policy(name):
    graph = traced_preset(name, PRESETS["ppo"][name].envs)
    for make in set(POLICIES.values()) - {shoal.ape_x}:  # it needs replay
        assert shoal.plan(graph, make(), FOUR).channels or make in (
            shoal.fused,
            shoal.multi_learner,
        )


def test_plans_that_depend_on_timing_are_not_verified():
    with pytest.raises(shoal.ShoalError, match="depends on the order of arrival"):
        verify_plan(planned(asynchronous()), "inline", ticks=1)


def test_latest_without_lag_gives_the_fused_numbers():
    wires = (shoal.Wire("learner", "actor", shoal.Latest(0)),)
    plan = planned(
        shoal.DistributionPolicy("mine", shoal.single_learner_coarse(2).fragments, wires), "chase"
    )
    assert verify_plan(plan, "threads", ticks=3).largest < 1e-5


def test_a_program_over_devices_leaves_no_trace_on_later_ones():
    """Replicas are traced before their program, whatever devices another program spans."""
    algorithm, env = graph_of("chase").origin.algorithm, None
    graph = shoal.trace(algorithm, env, envs=8)
    state = graph.origin.start(0, 8)
    over = shoal.run(shoal.plan(graph, shoal.fused(4), FOUR), ticks=2, state=state).values
    alone = shoal.run(shoal.plan(graph, shoal.multi_learner(4), ONE), ticks=2, state=state).values
    cut = shoal.plan(graph, shoal.single_learner_coarse(4), ONE)
    apart = shoal.run(cut, "inline", ticks=2, state=state).values
    for name in over:
        assert difference(over[name], alone[name]) < 1e-5
        assert difference(over[name], apart[name]) < 1e-5


def test_a_loop_keeps_its_names_after_other_traces():
    few = traced_preset("CartPole-v1", 8)
    traced_preset("Pendulum-v1", 8)  # the same stages, which return one array more
    more = traced_preset("CartPole-v1", 16)  # JAX remembers it at 16, and traces it at 32
    assert list(more.values) == list(few.values)
