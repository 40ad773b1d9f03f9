"""Checkpoints are written atomically; the newest and the best are kept."""

import importlib.util
import json
import resource
from contextlib import contextmanager, suppress

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shoal
from shoal.algorithms import ALGORITHMS, PRESETS
from shoal.errors import CheckpointError, SettingError
from shoal.planning.policies import POLICIES
from shoal.runs.files.checkpoints import (
    Checkpoints,
    read,
    read_best,
    read_newest,
    restored,
    ticks_in,
    write,
)
from shoal.runs.files.folder import Lines, cut_rows
from shoal.runs.files.pace import Pace, pace
from shoal.runs.inputs.making import check_actions
from shoal.runs.inputs.recipes import NOT_PLAIN, recipe_of
from shoal.runs.inputs.trust import make as make_again
from shoal.runtime.execution.compiled_executor import raw
from shoal.runtime.execution.snapshot import Snapshot
from shoal.tracing.stage import path_name
from shoal.tracing.trace import Origin
from unit.toy_loop import Toy, check_error, plain

VALUES = {
    "key": jax.random.key(3),
    "scalar": jnp.float32(2.5),
    "half": jnp.arange(5, dtype=jnp.bfloat16),
    "flags": jnp.array([True, False]),
    "none": jnp.zeros((0, 3)),
    "a.b/c": jnp.arange(6, dtype=jnp.int8).reshape(2, 3),
}


def same(got, wanted):
    assert list(got) == list(wanted)
    for name in wanted:
        x, y = raw(got[name]), raw(wanted[name])
        assert (x.dtype, x.shape) == (y.dtype, y.shape), name
        assert x.tobytes() == y.tobytes(), name


def test_a_checkpoint_round_trips(tmp_path):
    write(tmp_path / "7", Snapshot(7, VALUES, {"reader:half@1": VALUES["half"]}), {"seconds": 1.5})
    saved = read(tmp_path / "7")
    assert (saved.snapshot.tick, saved.record["seconds"]) == (7, 1.5)
    same(saved.snapshot.values, VALUES)
    same(saved.snapshot.past, {"reader:half@1": VALUES["half"]})


WORLDS = ("gymnax:CartPole-v1", "gymnax:Pendulum-v1", "jaxmarl:MPE_simple_spread_v3")


def spec_of(algorithm):
    """The state of an algorithm in the first of these environments that it supports, if any."""
    for name in WORLDS:
        with suppress(shoal.ShoalError):
            env = shoal.envs.make(name)
            check_actions(algorithm, env)
            return Origin(algorithm, env).spec(4)
    return None


def test_every_algorithm_round_trips(tmp_path):
    pytest.importorskip("gymnax")
    for name, make in ALGORITHMS.items():
        spec = spec_of(make())
        if spec is None:
            assert not importlib.util.find_spec("jaxmarl"), f"no world for {name}"
            continue
        state = jax.tree.map(lambda s: made_up(s.shape, s.dtype), spec)
        paths = jax.tree_util.tree_flatten_with_path(state)[0]
        write(tmp_path / name, Snapshot(3, named(paths)), {})
        found = restored(read(tmp_path / name), spec, name)
        same(found.values, named(paths))
        for x, (_, y) in zip(found.values.values(), paths, strict=True):
            assert x.dtype == y.dtype


def named(paths):
    return {path_name(path): x for path, x in paths}


def made_up(shape, dtype):
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(1), shape)
    return jnp.asarray(np.arange(np.prod(shape, dtype=int)).reshape(shape) % 100).astype(dtype)


def test_the_newest_and_the_best_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, 2, pytest.fail)
    for tick, mean in enumerate([None, 5.0, 9.0, 9.0, 3.0, 4.0, 1.0]):
        checkpoints.write(Snapshot(tick, {"w": jnp.float32(tick)}), {"return_mean": mean})
    checkpoints.wait()
    assert ticks_in(tmp_path) == [3, 5, 6]
    assert float(read_best(tmp_path).snapshot.values["w"]) == 3
    assert read_newest(tmp_path, pytest.fail).snapshot.tick == 6


def test_a_partial_checkpoint_of_a_killed_run_is_ignored(tmp_path):
    write(tmp_path / "2", Snapshot(2, VALUES), {})
    write(tmp_path / "3.writing", Snapshot(3, VALUES), {})
    assert ticks_in(tmp_path) == [2]
    Checkpoints(tmp_path, 2, pytest.fail).wait()
    assert [p.name for p in tmp_path.iterdir()] == ["2"]


@pytest.mark.parametrize("file", ["metadata.json", "state/manifest.ocdbt", "state/_METADATA"])
def test_a_truncated_file_falls_back_to_the_previous_checkpoint(tmp_path, file):
    for tick in (2, 3):
        write(tmp_path / str(tick), Snapshot(tick, VALUES), {})
    path = tmp_path / "3" / file
    path.write_bytes(path.read_bytes()[:-9])
    said = []
    assert read_newest(tmp_path, said.append).snapshot.tick == 2
    assert "3 can't be read" in said[0]
    (tmp_path / "2" / "metadata.json").unlink()
    check_error(CheckpointError, lambda: read_newest(tmp_path, said.append), "none of the 2")


@contextmanager
def no_file_larger_than(nbytes):
    """Make writes fail as they do on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_reported_and_earlier_checkpoints_remain(tmp_path):
    said = []
    checkpoints = Checkpoints(tmp_path, 2, said.append)
    large = {"w": jax.random.normal(jax.random.key(0), (300_000,))}
    checkpoints.write(Snapshot(1, large), {})
    checkpoints.wait()
    with no_file_larger_than(100_000):
        checkpoints.write(Snapshot(2, large), {})
        checkpoints.wait()
    assert "checkpoint at tick 2 not written: file too large (1.3 MB needed, " in said[0]
    assert "what came after tick 1 is lost" in checkpoints.lost(2)
    assert "the newest is of tick 1" in said[0]
    assert [p.name for p in tmp_path.iterdir()] == ["1"]
    same(read_newest(tmp_path, pytest.fail).snapshot.values, large)
    checkpoints.write(Snapshot(3, large), {})
    checkpoints.wait()
    assert ticks_in(tmp_path) == [1, 3]


def test_rows_are_written_whole_once_a_full_disk_has_room(tmp_path):
    path, said = tmp_path / "rows", []
    with Lines(path, said.append) as lines:
        lines.add('{"tick": 0}')
        with no_file_larger_than(20):
            lines.add('{"tick": 1}')
            lines.add('{"tick": 2}')
            assert lines.is_behind
            assert path.read_text() == '{"tick": 0}\n'
        lines.add('{"tick": 3}')
    assert len(said) == 1
    assert [json.loads(row)["tick"] for row in path.read_text().splitlines()] == [0, 1, 2, 3]


@pytest.mark.parametrize("tail", ["", '{"tick": 7}\n', '{"tick', "7\n"])
def test_rows_after_a_tick_and_partial_rows_are_removed(tmp_path, tail):
    path = tmp_path / "rows"
    path.write_text('{"tick": 0}\n{"tick": 1}\n' + tail)
    cut_rows(path, 2)
    assert path.read_text() == '{"tick": 0}\n{"tick": 1}\n'
    cut_rows(path, 1)
    assert path.read_text() == '{"tick": 0}\n'


@pytest.mark.parametrize(("text", "means"), [("100", Pace(100)), (7, Pace(7)), ("end", Pace())])
def test_an_interval_can_be_given_in_ticks(text, means):
    assert pace(text) == means


def test_an_interval_can_be_given_in_seconds_and_other_text_is_rejected():
    assert pace("1.5s") == Pace(seconds=1.5)
    for text in ("", "s", "0", "-3", "-1s", "often", "nans"):
        check_error(SettingError, lambda text=text: pace(text), "every", "60s")


def test_plain_objects_are_restored_from_json():
    presets = [preset.algorithm for named in PRESETS.values() for preset in named.values()]
    policies = [make() for make in POLICIES.values()]
    for thing in [*presets, *policies, Toy(plain), {"a": (1, [2.5, None])}]:
        assert make_again(json.loads(json.dumps(recipe_of(thing))), "here", trusted=True) == thing


@pytest.mark.parametrize("number", range(5))
def test_other_objects_have_no_recipe(number):
    things = [object(), lambda: 0, (1, object()), {1: 2}, Toy(lambda state: state)]
    assert recipe_of(things[number]) is NOT_PLAIN
