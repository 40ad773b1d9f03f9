"""Options of a run have known names and valid values, or raise an error."""

import inspect

import pytest

import shoal
from shoal.algorithms import PRESETS
from shoal.cli.main import parse
from shoal.errors import SettingError, UnknownNameError
from shoal.runs.files.folder import check_name
from shoal.runs.inputs.making import make_distribution, make_job
from shoal.runs.inputs.options import ResumeOptions, TrainOptions
from shoal.shapes import misfit
from unit.toy_loop import TWO_CPUS, Toy, plain


@pytest.mark.parametrize("do", [shoal.train, shoal.verify, shoal.resume])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tick", "Did you mean `ticks`"),
        ("n_envs", "Did you mean `envs`"),
        ("num_updates", "Did you mean `ticks`"),
        ("total_timesteps", "Did you mean"),
        ("learning_rate", "a setting of algorithms"),
        ("lr", "PPO(learning_rate=...)"),
        ("clip_coef", "PPO(clip_eps=...)"),
    ],
)
def test_an_unknown_keyword_suggests_the_right_one(tmp_path, do, name, words):
    if do is shoal.resume and "envs" in words:
        pytest.skip("a resumed run has its environments")
    arguments = (tmp_path,) if do is shoal.resume else (Toy(plain), None)
    with pytest.raises((SettingError, UnknownNameError)) as refused:
        do(*arguments, **{name: 3})
    assert words in str(refused.value)
    assert name in refused.value.what
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "values"),
    {
        "ticks": [0, -1, 2.5, "3", True, 2**31],
        "envs": [0, "x", 1e3],
        "seed": [-1, 2**32, 10**20, 0.5, "1"],
        "keep": [0, -1, 1.5],
        "restarts": [-1, 0.5],
        "evaluate": [-1, 0.5],
        "step_timeout": [0, -1.0, float("nan"), float("inf"), "1"],
        "checkpoint_every": ["infs", "nans", 0, -1, 1.5, "", "1e999s", None.__class__],
        "name": ["..", ".", "", " ", "a/b", "/abs", "a\nb", "\0", "x" * 300, "-x", "a ", "ü" * 150],
        "cluster": ["here", 4],
        "folder": [5, "a\0b", "/dev/null/x"],
    }.items(),
)
def test_an_invalid_value_is_rejected_and_nothing_is_written(tmp_path, name, values):
    for value in values:
        how = {"ticks": 1, "envs": 8, "cluster": TWO_CPUS, "folder": tmp_path / "runs"}
        with pytest.raises(SettingError) as refused:
            shoal.train(Toy(plain), None, **how | {name: value})
        assert refused.value.fix
        assert len(str(refused.value)) < 400
        assert list(tmp_path.iterdir()) == [], value


def test_seeds_that_jax_distinguishes_are_accepted(tmp_path):
    how = {"ticks": 1, "envs": 8, "cluster": TWO_CPUS, "folder": tmp_path}
    assert shoal.train(Toy(plain), None, seed=2**32 - 1, **how).summary["seed"] == 2**32 - 1


def test_a_valid_folder_name_is_accepted(tmp_path):
    for name in ("a", "run 1", "b.c", "ü", "x" * 200, "a=1,b=(2)"):
        assert check_name(name) == name


def test_an_existing_run_is_never_overwritten(tmp_path):
    how = {"ticks": 1, "envs": 8, "cluster": TWO_CPUS, "folder": tmp_path, "name": "mine"}
    folder = shoal.train(Toy(plain), None, **how).folder
    (folder / "summary.json").unlink()
    with pytest.raises(SettingError, match="already holds a run"):
        shoal.train(Toy(plain), None, **how)


@pytest.mark.parametrize(
    ("do", "options"), [(shoal.train, TrainOptions), (shoal.resume, ResumeOptions)]
)
def test_help_lists_every_keyword(do, options):
    listed = inspect.signature(do).parameters
    assert list(listed) == list(inspect.signature(options).parameters)
    assert not any(p.kind == p.VAR_KEYWORD for p in listed.values())


def test_a_distribution_policy_can_be_given_by_name():
    assert make_distribution("impala", {}) == shoal.impala()
    assert make_distribution("single-learner-coarse", {}) == shoal.single_learner_coarse()
    assert make_distribution("impala", {"actors": 3}) == shoal.impala(3)
    assert make_distribution(None, {}) is None
    with pytest.raises(UnknownNameError, match="Did you mean `impala`"):
        make_distribution("impalla", {})
    with pytest.raises(SettingError, match=r"called: shoal\.impala\(\)"):
        make_distribution(shoal.impala, {})
    with pytest.raises(SettingError, match="is no distribution policy"):
        make_distribution(7, {})


def test_what_is_no_environment_is_rejected():
    with pytest.raises(SettingError, match="no reset, step and action_space"):
        shoal.train("ppo", 5)


def presets():
    return [(name, "CartPole-v1") for name, known in PRESETS.items() if "CartPole-v1" in known]


@pytest.mark.parametrize(("algorithm", "env"), presets())
@pytest.mark.parametrize("ticks", [None, 7, 100_000])
@pytest.mark.parametrize("settings", [[], ["--set", "gamma=0.9"], ["--set", "anneal_lr=false"]])
def test_a_schedule_has_the_length_of_the_run(algorithm, env, ticks, settings):
    """Any preset, settings and length can be combined; tests/unit/test_schedules.py runs some."""
    pytest.importorskip("gymnax")
    preset = PRESETS[algorithm][env]
    if not hasattr(preset.algorithm, "anneal_lr") and "anneal_lr=false" in settings:
        pytest.skip("it has no schedule")
    job = make_job(parse(["train", algorithm, env, *settings]).options, ticks=ticks)
    assert job.ticks == ticks or (ticks is None and job.ticks == preset.ticks)
    anneals = getattr(preset.algorithm, "anneal_lr", False) and "anneal_lr=false" not in settings
    assert job.anneals == anneals
    if hasattr(job.trained, "total_ticks"):
        assert job.trained.total_ticks == job.ticks
    rate = preset.algorithm.learning_rate
    final = {"final": 0.0, "total_ticks": job.ticks} if anneals else {"final": rate}
    assert job.learning_rate == {"initial": rate, **final}


def test_a_misfit_names_the_place():
    assert misfit({"a": [1, "x"]}, dict[str, list[int]]) == "`a[1]` is 'x', not a whole number"
    assert misfit(None, int | None) == ""
    assert misfit((1, 2), tuple[int, ...]) == ""
    assert misfit((1, 2, 3), tuple[float, float]) == "it is (1, 2, 3), not a tuple of 2"
