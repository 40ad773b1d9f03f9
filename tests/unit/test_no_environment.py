"""Loops without environments, or with a simulator of their own under any name."""

import json
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shoal
from shoal.cli.main import main
from shoal.errors import CutError, SettingError, TraceError
from shoal.roles import env_steps_a_tick
from unit.toy_loop import TWO_CPUS, check_error

SUPERVISED = f"""{Path(__file__).resolve()}:Supervised"""


@dataclass(frozen=True)
class Supervised:
    """Fits a line to points that it draws; a row is a point of the batch."""

    rate: float = 0.1
    envs: int = 8

    def init(self, key, env, envs):
        assert env is None
        return {"w": jnp.zeros(()), "keys": jax.random.split(key, envs)}

    def tick(self, env, state):
        keys, x, y = self.draw(state["keys"])
        w, loss = self.fit(state["w"], x, y)
        return {"w": w, "keys": keys}, {"loss": loss}

    @shoal.stage(per="env")
    def draw(self, key):
        key, now = jax.random.split(key)
        x = jax.random.normal(now)
        return key, x, 3.0 * x

    @shoal.stage
    def fit(self, w, x, y):
        def loss(w):
            return jnp.mean(jnp.square(w * x - y))

        value, slope = jax.value_and_grad(loss)(w)
        return w - self.rate * shoal.mean(slope), shoal.mean(value)

    def play(self, env, state, obs, memory):
        return state["w"] * obs, memory


def test_a_loop_without_environments_trains_and_resumes(tmp_path):
    half = shoal.train(Supervised(), None, ticks=20, folder=tmp_path)
    assert half.folder == tmp_path / "supervised-1"
    assert (half.summary["envs"], half.summary["env_steps"]) == (8, 0)
    assert (half.summary["env"], half.summary["env_steps_per_second"]) == ("none", None)
    ended = shoal.resume(half.folder, ticks=40)
    whole = shoal.train(Supervised(), ticks=40, folder=tmp_path)
    assert float(ended.state["w"]) == float(whole.state["w"]) == pytest.approx(3.0, abs=0.2)
    agent = shoal.load(ended.folder)
    assert float(agent.state["w"]) == float(ended.state["w"])
    assert float(agent.act(np.float32(2.0))) == pytest.approx(6.0, abs=0.4)


@pytest.mark.parametrize("name", ["single_learner_coarse", "multi_learner", "central", "sebulba"])
def test_a_loop_without_environments_is_cut(name):
    policies = {
        "single_learner_coarse": shoal.single_learner_coarse(2),
        "multi_learner": shoal.multi_learner(2),
        "sebulba": shoal.sebulba(1, 1, lag=0),
        "central": shoal.DistributionPolicy(
            "mine", (shoal.Fragment("a", ("draw",), 2), shoal.Fragment("b", ("fit",)))
        ),
    }
    found = shoal.verify(Supervised(), None, policies[name], cluster=TWO_CPUS)
    assert found.holds, found


def test_the_command_line_needs_no_environment(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", SUPERVISED, "--ticks", "3", "--name", "mine"]) == 0
    assert "3 ticks in" in capsys.readouterr().out
    assert main(["resume", "runs/mine", "--ticks", "5"]) == 0
    assert len((tmp_path / "runs/mine/metrics.jsonl").read_text().splitlines()) == 5
    for words in (["graph", SUPERVISED], ["plan", SUPERVISED, "none"]):
        assert main([*words, "--envs", "4"]) == 0
        assert "Supervised on its own loop" in capsys.readouterr().out
    assert main(["verify", SUPERVISED, "--distribute", "single-learner-coarse"]) == 0


def test_an_environment_is_required_where_one_is_needed(tmp_path):
    check_error(SettingError, lambda: shoal.train("ppo", None), "PPO", "none is named")
    check_error(
        SettingError,
        lambda: shoal.train(Supervised(), None, evaluate=2, folder=tmp_path),
        "nothing to play",
    )
    assert not [*tmp_path.iterdir()]


@dataclass(frozen=True)
class OwnWorld:
    """A loop whose simulator is a stage with another name."""

    role: str = "env"
    shows: str = "loss"

    def init(self, key, env, envs):
        return {"w": jnp.zeros(()), "x": jnp.linspace(0.0, 1.0, envs)}

    def tick(self, env, state):
        step_world = shoal.stage(per="env", role=self.role)(_step_world)
        step_dream = shoal.stage(per="env", role=self.role)(_step_dream)

        def once(x, _):
            push = act(x, w=state["w"])
            return step_world(x, push), step_dream(x)

        x, dreams = jax.lax.scan(once, state["x"], length=3)
        w, loss = learn(state["w"], x, dreams)
        return {"w": w, "x": x}, {self.shows: loss}


def _step_world(x, push):
    return 0.5 * x + push


def _step_dream(x):
    return x + 1.0


@shoal.stage(per="env")
def act(x, *, w):
    return w - 0.1 * x


@shoal.stage
def learn(w, x, dreams):
    loss = shoal.mean(jnp.mean(x) + jnp.mean(dreams))
    return w - 0.1 * loss, loss


ROLES = {
    "single_learner_fine": shoal.single_learner_fine(2),
    "single_learner_fine, served": shoal.single_learner_fine(2, ring=2),
    "environments": shoal.environments(2),
    "decoupled": shoal.decoupled(2, 1, 1),
    "decoupled, served": shoal.decoupled(1, 1, 1, ring=2),
}


@pytest.mark.parametrize("name", ROLES)
def test_policies_find_the_stages_that_step_environments_by_their_role(name):
    plan = shoal.plan(shoal.trace(OwnWorld(), envs=8), ROLES[name], TWO_CPUS)
    assert set(plan.distribution.fragment("env").stages) == {"_step_dream", "_step_world"}
    found = shoal.verify(OwnWorld(), None, ROLES[name], envs=8, cluster=TWO_CPUS)
    assert found.holds, found


def test_impala_with_inference_finds_them_too():
    policy = shoal.impala(2, inference=1)
    plan = shoal.plan(shoal.trace(OwnWorld(), envs=8), policy, TWO_CPUS)
    assert "_step_world" in plan.distribution.fragment("env").stages


@pytest.mark.parametrize("name", ROLES)
def test_a_loop_without_env_stages_is_rejected_with_the_needs_of_the_policy(name):
    graph = shoal.trace(OwnWorld(role=""), envs=8)
    words = [ROLES[name].name, "steps environments", 'role="env"', "_step_world", "fused"]
    check_error(CutError, lambda: shoal.plan(graph, ROLES[name], TWO_CPUS), *words)


def test_a_simulator_inside_another_stage_is_named():
    @dataclass(frozen=True)
    class Inside:
        def init(self, key, env, envs):
            return jnp.zeros(envs)

        def tick(self, env, x):
            return collect(x), {}

    graph = shoal.trace(Inside(), envs=4)
    words = ["`step`", "can't leave stage `collect`", "from tick"]
    check_error(CutError, lambda: shoal.plan(graph, shoal.environments(2), TWO_CPUS), *words)


@shoal.stage(per="env", role="env")
def step(x):
    return x + 1


@shoal.stage
def collect(x):
    return step(x)


def test_steps_are_counted_by_role():
    assert env_steps_a_tick(shoal.trace(OwnWorld(), envs=8)) == 6
    assert env_steps_a_tick(shoal.trace(OwnWorld(role=""), envs=8)) == 0


def test_an_unknown_role_is_rejected():
    check_error(TraceError, lambda: shoal.stage(role="simulator")(step), 'role="env"')
    check_error(TraceError, lambda: shoal.host(lambda x: x, role="world")(step), 'role="env"')


# Names of metrics


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("name", ["lag", "steps", "status", "episodes", "evaluation_loss"])
def test_a_metric_can_have_a_name_that_the_runtime_uses(name, lag, tmp_path):
    policy = shoal.single_learner_coarse(2, lag=lag)
    how = {"ticks": 4, "envs": 8, "cluster": TWO_CPUS}
    runs = [
        shoal.train(OwnWorld(shows=shown), None, policy, folder=tmp_path / shown, **how)
        for shown in ("loss", name)
    ]
    texts = [(run.folder / "metrics.jsonl").read_text().splitlines() for run in runs]
    (losses, named) = ([json.loads(line) for line in text] for text in texts)
    assert [row[name] for row in named] == [row["loss"] for row in losses]
    assert ["lag_max" in row for row in named] == [bool(lag)] * 4
    assert ("lag" in runs[1].summary) == bool(lag)


@pytest.mark.parametrize(
    "name", ["tick", "env_steps", "seconds", "return_mean", "lag_mean", "evaluation_episodes"]
)
def test_a_metric_with_a_reserved_name_is_rejected_before_anything_is_written(name, tmp_path):
    train = lambda: shoal.train(OwnWorld(shows=name), None, envs=8, folder=tmp_path)  # noqa: E731
    error = check_error(TraceError, train, f"`{name}`", "metrics.jsonl", "another name")
    assert "test_no_environment.py" in error.where
    assert not [*tmp_path.iterdir()]
