"""Settings with which nothing can be learnt are refused with the reason; what learns is not."""

from dataclasses import replace

import pytest

import shoal
from shoal.algorithms import ALGORITHMS, PRESETS
from shoal.envs.spaces import Box, Discrete
from shoal.errors import SettingError
from shoal.rl.futile import Loop, check_can_learn, remarks
from shoal.runs.inputs.making import make_job
from shoal.runs.inputs.options import TrainOptions

ON_POLICY, BY_VALUE = ("ppo", "a2c", "impala", "mappo", "ippo"), ("dqn", "r2d2", "qmix", "vdn")
BY_CRITIC = ("sac", "td3", "ddpg")
FINE = Box(-1.0, 1.0, (3,))


class World:
    observation_space, action_space, agents = FINE, FINE, ()


def loop(name, settings, ticks=2000, envs=16):
    return Loop(ALGORITHMS[name](**settings), World(), envs, ticks)


FUTILE = [
    *((name, {"learning_rate": 1.0}) for name in ALGORITHMS),
    *((name, {"learning_rate": 1e-9}) for name in ALGORITHMS),
    *((name, {"critic_learning_rate": 5.0}) for name in (*ON_POLICY, *BY_CRITIC)),
    *((name, {"critic_learning_rate": 1e-9}) for name in BY_CRITIC),
    *((name, {"max_grad_norm": 1e-9}) for name in (*ON_POLICY, *BY_VALUE)),
    *((name, {"vf_coef": 1e8}) for name in ON_POLICY),
    *((name, {"ent_coef": 10.0}) for name in ("ppo", "impala", "mappo", "ippo")),
    ("a2c", {"ent_coef": 10.0, "norm_reward": True}),
    ("impala", {"clip_rho_threshold": 1e-3}),
    ("impala", {"clip_rho_threshold": 1e-8, "ent_coef": 0.0}),
    *((name, {"clip_eps": 1e-8}) for name in ("ppo", "mappo", "ippo")),
    *((name, {"tau": 1e-9}) for name in (*BY_VALUE, *BY_CRITIC)),
    *(("sac", {"reward_scale": scale}) for scale in (1e-9, 1e9)),
    *(("sac", {"target_entropy": entropy}) for entropy in (2.08, 5.0)),
    ("dqn", {"values": "categorical", "num_atoms": 1}),
    ("dqn", {"values": "categorical", "value_range": (1e9, 1e9 + 1)}),
    ("dqn", {"buffer_dtype": "bool"}),
]
# Each of these did learn, or may in some environment.
LEARNS = [
    *((name, {}) for name in ALGORITHMS),
    *((name, {"learning_rate": 1e-5}) for name in ALGORITHMS),
    *((name, {"vf_coef": 1e3}) for name in ON_POLICY),
    *((name, {"vf_coef": 0.0}) for name in ON_POLICY),
    *((name, {"gamma": 0.0}) for name in ALGORITHMS),
    *((name, {"max_grad_norm": 1e-3}) for name in (*ON_POLICY, *BY_VALUE)),
    ("a2c", {"ent_coef": 100.0}),
    ("impala", {"clip_rho_threshold": 0.01}),
    ("impala", {"clip_c_threshold": 1e-9}),
    ("impala", {"vtrace_lambda": 0.0}),
    ("impala", {"ent_coef": 3.0}),
    ("impala", {"num_steps": 1}),
    ("ppo", {"target_kl": 1e-12}),
    ("ppo", {"clip_eps_vf": 1e-9}),
    ("sac", {"target_entropy": 2.07}),
    ("dqn", {"values": "quantile", "num_atoms": 1}),
    ("dqn", {"buffer_dtype": "float16"}),
]


@pytest.mark.parametrize(("name", "settings"), FUTILE, ids=str)
def test_settings_that_cannot_learn_are_refused_with_the_reason(name, settings):
    with pytest.raises(SettingError, match="can't learn with") as refused:
        check_can_learn(loop(name, settings))
    what, _, why = refused.value.what.partition(": ")
    assert any(setting in what for setting in settings)
    assert why


@pytest.mark.parametrize(("name", "settings"), LEARNS, ids=str)
def test_settings_that_may_learn_are_accepted(name, settings):
    check_can_learn(loop(name, settings))
    check_can_learn(loop(name, settings, ticks=100))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_defaults_pass_in_runs_of_one_tick(name):
    check_can_learn(loop(name, {}, ticks=1, envs=2))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_presets_pass_and_remark_nothing(name):
    for preset in PRESETS[name].values():
        check_can_learn(Loop(preset.algorithm, None, preset.envs, preset.ticks))
    for env in PRESETS[name]:
        if ":" not in env and env in ("CartPole-v1", "Acrobot-v1", "Pendulum-v1"):
            assert make_job(TrainOptions(name, env)).remarks == []


def test_a_low_rate_is_accepted_where_the_run_is_long_enough():
    with pytest.raises(SettingError, match="2,000 updates move no weight by more than"):
        check_can_learn(loop("impala", {"learning_rate": 1e-7}))
    check_can_learn(loop("impala", {"learning_rate": 1e-7}, ticks=20_000))


def test_one_step_of_one_environment_has_no_standardised_advantage():
    one = {"num_steps": 1, "num_minibatches": 1}
    with pytest.raises(SettingError, match="always 0"):
        check_can_learn(loop("ppo", one, envs=1))
    check_can_learn(loop("ppo", one, envs=2))
    check_can_learn(loop("ppo", one | {"norm_adv": False}, envs=1))


def test_replay_of_bits_fits_observations_of_zeros_and_ones():
    class Bits(World):
        observation_space, action_space = Box(0.0, 1.0, (4, 4, 2)), Discrete(2)

    check_can_learn(Loop(ALGORITHMS["dqn"](buffer_dtype="bool"), Bits(), 4, 100))


@pytest.mark.parametrize(
    ("name", "settings", "ticks", "word"),
    [
        ("sac", {}, 10, "before tick 16, and the run has 10"),
        ("qmix", {"learning_starts_per_env": 8}, 7, "before tick 8, and the run has 7"),
        ("dqn", {"target_update_interval": 81}, 10, "every 81 updates, and the run has 80"),
        ("td3", {"policy_frequency": 9999}, 100, "actor moves every 9,999"),
        (
            "impala",
            {"norm_reward": False},
            1500,
            "set norm_reward, or critic_learning_rate to 2e-3",
        ),
    ],
)
def test_a_run_says_at_its_start_what_it_is_too_short_for(name, settings, ticks, word):
    assert any(word in line for line in remarks(loop(name, settings, ticks)))


def test_training_refuses_them_before_anything_is_written_and_says_the_rest(tmp_path, capsys):
    still = ALGORITHMS["impala"](learning_rate=1e-9)
    by_name = {"settings": {"learning_rate": 1e-9}}
    for given, more in ((still, {}), ("impala", by_name)):
        with pytest.raises(SettingError, match="IMPALA can't learn with learning_rate=1e-09"):
            shoal.train(given, "CartPole-v1", folder=tmp_path, **more)
    with pytest.raises(SettingError, match="can't learn"):
        shoal.train(replace(still, learning_rate=1e-7), "CartPole-v1", steps=1e4, folder=tmp_path)
    assert not [*tmp_path.iterdir()]
    small = ALGORITHMS["dqn"](hidden=(4,), num_steps=8, learning_starts_per_env=64)
    done = shoal.train(small, "CartPole-v1", folder=tmp_path, ticks=2, envs=2)
    line = "Nothing is learnt before tick 8, and the run has 2 ticks."
    assert line in (done.folder / "workers.log").read_text()
    assert line in "".join(capsys.readouterr())
