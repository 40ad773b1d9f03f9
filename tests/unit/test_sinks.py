"""Sinks get the scalars of a run under CleanRL's names, on their own threads."""

import csv
import json
import threading
import urllib.request

import pytest

import shoal
from shoal.errors import MissingExtraError, SettingError, UnknownNameError
from shoal.runs.sinks import feeding
from shoal.runs.sinks.feeding import Feeds, check_log
from shoal.runs.sinks.sink import About, name_of, point_of
from unit.test_evaluation import WORLD, Greedy
from unit.toy_loop import check_error


class Kept:
    """Keeps what it sees, and on which thread."""

    def __init__(self):
        self.points, self.threads, self.closed = [], set(), 0

    def see(self, point):
        self.points.append(point)
        self.threads.add(threading.current_thread())

    def close(self):
        self.closed += 1


def row(tick, **more):
    return {"tick": tick, "env_steps": 8 * (tick + 1), "seconds": 0.5 * (tick + 1), **more}


def fed(rows, *sinks, say=print, folder=None):
    feeds = Feeds(sinks, About(folder, {"seed": 3}), say)
    for each in rows:
        feeds.tick(each)
    feeds.close()


def test_names_are_those_of_cleanrl():
    names = {
        "episode_return": "charts/episodic_return",
        "episode_length": "charts/episodic_length",
        "learning_rate": "charts/learning_rate",
        "value_loss": "losses/value_loss",
        "clip_fraction": "losses/clipfrac",
        "approx_kl": "losses/approx_kl",
        "entropy": "losses/entropy",
        "mine": "charts/mine",
    }
    assert {name: name_of(name) for name in names} == names


def test_a_point_is_the_mean_of_its_rows_and_returns_count_by_episodes():
    rows = [
        row(0, loss=1.0, episodes=1.0, episode_return=10.0),
        row(1, loss=2.0, episodes=0.0, episode_return=None),
        row(2, loss=3.0, episodes=3.0, episode_return=2.0),
    ]
    point = point_of(rows, None, 7.0)
    assert (point.tick, point.env_steps, point.seconds, point.at) == (2, 24, 1.5, 7.0)
    assert point.scalars["losses/loss"] == 2.0
    assert point.scalars["charts/episodic_return"] == 4.0
    after = point_of([row(3, loss=1.0, episode_return=None, episodes=0.0)], point, 8.0)
    assert after.scalars["charts/SPS"] == 16.0
    assert "charts/episodic_return" not in after.scalars


def test_a_sink_sees_every_part_of_a_run_on_its_own_thread_and_is_closed(tmp_path):
    sink = Kept()
    done = shoal.train(Greedy(), WORLD, envs=2, folder=tmp_path, ticks=6, evaluate=3, log=sink)
    assert sink.closed == 1
    assert threading.main_thread() not in sink.threads
    assert len(sink.threads) == 1
    ticks = [p for p in sink.points if "charts/paid" in p.scalars]
    assert ticks[-1].env_steps == done.summary["env_steps"]
    evaluated = [p.tick for p in sink.points if "eval/episodic_return" in p.scalars]
    assert evaluated == [0, 3, 6]
    assert json.loads((done.folder / "run.json").read_text())["log"] == []


def test_a_sink_that_fails_is_reported_and_ends_nothing_else():
    class Failing(Kept):
        def see(self, point):
            raise OSError("no network")

    said, good = [], Kept()
    fed([row(0, loss=1.0)], Failing(), good, say=said.append)
    assert said == [
        "Failing gets no more values (OSError: no network); training and metrics.jsonl continue"
    ]
    assert good.points[-1].scalars["losses/loss"] == 1.0


def test_a_sink_that_hangs_holds_up_the_end_for_a_limited_time(monkeypatch):
    monkeypatch.setattr(feeding, "CLOSING_S", 0.01)
    free = threading.Event()

    class Hanging(Kept):
        def see(self, point):
            free.wait()

    said = []
    fed([row(0, loss=1.0)], Hanging(), say=said.append)
    free.set()
    assert said == ["Hanging has not taken everything in 0.01 s; left behind"]


def test_many_rows_become_one_point_that_ends_with_the_last():
    sink = Kept()
    fed([row(tick, loss=float(tick)) for tick in range(1000)], sink)
    assert sink.points[-1].tick == 999
    assert len(sink.points) <= 3
    assert sink.points[-1].scalars["losses/loss"] == pytest.approx(499.5, abs=20)


def test_a_table_has_a_column_a_scalar_also_of_later_ones(tmp_path):
    for tick, more in enumerate(({"loss": 1.0}, {"loss": 2.0, "mine": 5.0})):
        fed([row(tick, **more)], "csv", folder=tmp_path)
    with open(tmp_path / "metrics.csv", encoding="utf-8", newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["losses/loss"], first["charts/mine"]) == ("1.0", "")
    assert (second["losses/loss"], second["charts/mine"]) == ("2.0", "5.0")
    assert (second["tick"], second["env_steps"]) == ("1", "16")


def test_tensorboard_files_read_back_by_steps_and_wall_time(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.event_file_writer import EventFileWriter  # noqa: F401
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    fed([row(4, loss=2.5)], "tensorboard", folder=tmp_path)
    (path,) = (tmp_path / "tensorboard").iterdir()
    found = {}
    for event in events(path.read_bytes(), Event, masked_crc32c):
        for value in event.summary.value:
            found[value.tag] = (event.step, value.simple_value, event.wall_time)
    step, value, at = found["losses/loss"]
    assert (step, value) == (40, 2.5)
    assert at > 1e9
    assert "hyperparameters/text_summary" in found


def test_a_resumed_run_continues_the_same_run_of_mlflow(tmp_path, monkeypatch):
    tracking = pytest.importorskip("mlflow.tracking")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for tick in (4, 5):
        fed([row(tick, loss=0.5 * tick)], "mlflow", folder=tmp_path)
    client = tracking.MlflowClient((tmp_path / "mlflow").as_uri())
    (experiment,) = (e for e in client.search_experiments() if e.name == "shoal")
    (run,) = client.search_runs([experiment.experiment_id])
    found = client.get_metric_history(run.info.run_id, "losses/loss")
    assert [(metric.step, metric.value) for metric in found] == [(40, 2.0), (48, 2.5)]
    assert run.info.status == "FINISHED"


def events(data, kind, crc):
    """The events of a file of TFRecords, whose checksums are right."""
    while data:
        length = int.from_bytes(data[:8], "little")
        assert int.from_bytes(data[8:12], "little") == crc(data[:8])
        yield kind.FromString(data[12 : 12 + length])
        data = data[16 + length :]


@pytest.mark.slow
def test_weights_and_biases_keeps_a_run_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    for tick in range(2):
        fed([row(tick, loss=2.5)], "wandb", folder=tmp_path, say=pytest.fail)
    runs = list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(runs) >= 1
    name = json.loads((tmp_path / "wandb.json").read_text())["id"]
    assert all(path.name == f"run-{name}.wandb" for path in runs)
    assert b"losses/loss" in b"".join(path.read_bytes() for path in runs)


def test_prometheus_is_served_the_newest_scalars_on_this_machine(tmp_path):
    pytest.importorskip("prometheus_client")
    from shoal.runs.sinks.prometheus import Prometheus

    said = []
    sink = Prometheus(About(tmp_path / "mine", {}, said.append))
    try:
        for tick, loss in enumerate((1.0, 2.5)):
            sink.see(point_of([row(tick, value_loss=loss)], None, 0.0))
        url = said[0].partition(": ")[2]
        assert url.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(url) as page:
            lines = page.read().decode().splitlines()
    finally:
        sink.close()
    assert 'shoal_losses_value_loss{run="mine"} 2.5' in lines
    assert 'shoal_env_steps{run="mine"} 16.0' in lines


def test_sinks_are_named_or_given_or_refused(monkeypatch):
    sink = Kept()
    assert check_log("csv, csv") == ("csv",)
    assert check_log(["csv", sink]) == ("csv", sink)
    check_error(UnknownNameError, lambda: check_log("tensorbord"), "tensorboard")
    check_error(SettingError, lambda: check_log(3), "see(point) and close()")
    monkeypatch.setitem(feeding.SINKS, "wandb", ("x", "X", "no_such_package", "wandb"))
    check_error(MissingExtraError, lambda: check_log("wandb"), 'pip install "shoal[wandb]"')
