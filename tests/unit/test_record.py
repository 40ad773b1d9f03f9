"""A fragment replayed from its recording gives the same numbers, or a clear error."""

import zipfile

import numpy as np
import pytest

import shoal
from laws.cases import ONE, graph_of, start_of
from shoal.cli.main import main
from shoal.runtime.debug.record import Recording, read_tape, record, replay


@pytest.mark.parametrize("edge", ["actor>learner", "learner > actor"])
def test_a_replayed_fragment_gives_the_recorded_metrics(tmp_path, edge):
    plan = shoal.plan(graph_of("chase"), shoal.single_learner_coarse(2, lag=1), ONE)
    shown = {}
    shoal.run(plan, "inline", ticks=3, state=start_of("chase"), watch=shown.__setitem__)
    tape = tmp_path / "edge.tape"
    assert record(plan, Recording(edge, 3), tape, start_of("chase")) > 0
    again = dict(replay(plan, tape))
    if edge.endswith("learner"):
        assert set(again) == {0, 1, 2}
    for tick, metrics in again.items():
        for name, x in metrics.items():
            np.testing.assert_array_equal(x, shown[tick][name])


def test_an_unknown_edge_lists_the_existing_ones(tmp_path):
    plan = shoal.plan(graph_of("chase"), shoal.single_learner_coarse(2), ONE)
    with pytest.raises(shoal.ShoalError, match="actor>learner"):
        record(plan, Recording("actor>lerner", 1), tmp_path / "x", start_of("chase"))
    fused = shoal.plan(graph_of("chase"), shoal.fused(), ONE)
    with pytest.raises(shoal.ShoalError, match="nothing crosses"):
        record(fused, Recording("actor>learner", 1), tmp_path / "x", start_of("chase"))


def test_a_file_that_is_not_a_recording_is_rejected(tmp_path):
    other = tmp_path / "notes.txt"
    other.write_text("hello")
    with pytest.raises(shoal.ShoalError, match="can't be read as a recording"):
        read_tape(other)
    with zipfile.ZipFile(tmp_path / "old.tape", "w") as file:
        file.writestr("tape.json", '{"form": 0}')
    with pytest.raises(shoal.ShoalError, match="form 0"):
        read_tape(tmp_path / "old.tape")


def test_a_compressed_file_is_rejected_before_it_fills_the_memory(tmp_path):
    with zipfile.ZipFile(tmp_path / "bomb.tape", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("tape.json", '{"form": 2}')
        file.writestr("0/0.npy", bytes(10**6))
    with pytest.raises(shoal.ShoalError, match="it is compressed"):
        read_tape(tmp_path / "bomb.tape")
    with zipfile.ZipFile(tmp_path / "bomb.shoal", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("plan.json", bytes(2**26 + 1))
    with pytest.raises(shoal.ShoalError, match=r"plan\.json holds more than"):
        shoal.load_plan(tmp_path / "bomb.shoal")


def test_the_commands_record_and_replay(tmp_path, capsys):
    pytest.importorskip("gymnax")
    out = str(tmp_path / "edge.tape")
    words = "record ppo CartPole-v1 --envs 4 --ticks 2 --set num_steps=8 --set num_minibatches=2"
    cut = "--distribute single-learner-coarse --edge actor>learner --out"
    assert main([*words.split(), *cut.split(), out]) == 0
    assert main(["replay", out]) == 0
    said = capsys.readouterr().out
    assert "learner alone, 2 ticks" in said
    assert "tick 1:" in said
