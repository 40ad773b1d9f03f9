"""The report has all that a run has left; the live page is for this machine, and only reads."""

import http.client
import json
import re
import shutil
import threading
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import shoal
from shoal.algorithms import PPO
from shoal.cli.main import main
from shoal.errors import SettingError
from shoal.pages import RunView, report_page
from shoal.pages.live import Server
from shoal.runs.files.folder import locked, write_json

pytest.importorskip("gymnax")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    trained = shoal.train(
        PPO(num_steps=16, num_minibatches=2), "CartPole-v1", shoal.impala(actors=2),
        ticks=6, envs=4, evaluate=3, folder=str(tmp_path_factory.mktemp("runs")), name="mine",
    )  # fmt: skip
    return trained.folder


def data_of(html, name):
    return json.loads(re.search(rf'id="data-{name}">(.*?)</script>', html, re.DOTALL)[1])


def test_a_report_holds_what_the_run_has_left(folder):
    html = report_page([RunView(folder)])
    (run,) = data_of(html, "runs")
    summary = json.loads((folder / "summary.json").read_text())
    assert run["facts"]["status"] == "done"
    assert run["facts"]["return_mean"] == summary["return_mean"]
    assert run["facts"]["lag"] == summary["lag"]
    assert len(run["evaluations"]) == len((folder / "evaluation.jsonl").read_text().splitlines())
    columns = run["curves"]["columns"]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert columns["tick"][0] == [row["tick"] for row in rows]
    assert columns["loss"][0] == pytest.approx([row["loss"] for row in rows], rel=1e-5)
    assert [box["label"] for box in run["plan"]["boxes"]][:2] == ["actor", "learner"]
    titles = [title for title, _ in run["facts"]["settings"]]
    assert "Algorithm: PPO" in titles
    assert ["num_steps", "16"] in dict(run["facts"]["settings"])["Algorithm: PPO"]
    origin = dict(dict(run["facts"]["settings"])["Where it comes from"])
    assert {"command", "host", "started", "python", "packages.jax"} <= set(origin)


def test_a_report_loads_nothing(folder):
    html = report_page([RunView(folder)]).replace("http://www.w3.org/2000/svg", "")
    assert "connect-src 'none'" in html
    assert not re.search(r"<[^>]*\b(src|srcset)=", html.split("<script", maxsplit=1)[0])
    assert not re.search(r"https?://", re.sub(r'type="application/json".*?</script>', "", html))


def test_names_and_lines_of_a_run_cannot_add_elements(tmp_path):
    nasty = "</script><script>alert(1)</script>"
    write_json(tmp_path / "summary.json", {"status": "failed", "error": nasty, "ticks": 1})
    (tmp_path / "workers.log").write_text(f"{nasty}\n")
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"tick": 0, nasty: 1.0}) + "\n")
    html = report_page([RunView(tmp_path)])
    assert "<script>alert" not in html
    (run,) = data_of(html, "runs")
    assert run["log"] == [nasty]
    assert run["facts"]["error"] == nasty


@pytest.mark.parametrize("name", ["plan.json", "run.json", "load.jsonl", "evaluation.jsonl"])
@pytest.mark.parametrize("text", ["", "{", "[1]", '{"graph": 3}', "\xff", '{"at": null}\n[]\n'])
def test_a_damaged_file_leaves_the_rest_of_the_report(folder, tmp_path, name, text):
    for path in folder.iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    (run,) = data_of(report_page([RunView(tmp_path)]), "runs")
    assert len(run["curves"]["columns"]["tick"][0]) == 6
    if name.endswith(".json") and not text.startswith('{"'):
        assert f"{name} can't be read" in run["facts"]["note"]


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(SettingError, match="there is no run"):
        RunView(tmp_path)


def test_the_report_is_written_into_the_folder_of_the_run(folder, capsys):
    assert main(["report", str(folder)]) == 0
    assert str(folder / "report.html") in capsys.readouterr().out
    assert "</html>" in (folder / "report.html").read_text()


def test_several_runs_are_in_one_report(folder, tmp_path):
    assert main(["report", str(folder), str(folder), "--out", str(tmp_path / "two.html")]) == 0
    html = (tmp_path / "two.html").read_text()
    assert len(data_of(html, "runs")) == 2


def test_a_group_of_seeds_is_in_one_report(folder, tmp_path):
    for seed in (0, 1):
        shutil.copytree(folder, tmp_path / "group" / f"seed-{seed}")
    out = tmp_path / "group.html"
    assert main(["report", str(tmp_path / "group"), "--out", str(out)]) == 0
    names = [run["facts"]["name"] for run in data_of(out.read_text(), "runs")]
    assert names == ["group/seed-0", "group/seed-1"]


@contextmanager
def served(*folders: Path):
    with Server(folders) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server, path, method="GET", host=None):
    link = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    link.request(method, path, headers={"Host": host} if host else {})
    return link.getresponse()


def test_the_live_page_is_for_those_who_know_the_token(folder):
    with served(folder) as server:
        assert server.server_address[0] == "127.0.0.1"
        path = urlsplit(server.url).path + "?" + urlsplit(server.url).query
        answer = ask(server, path)
        assert answer.status == 200
        assert answer.getheader("Cache-Control") == "no-store"
        assert answer.getheader("Referrer-Policy") == "no-referrer"
        page = answer.read().decode()
        assert "connect-src 'self'" in page
        assert server.token not in page
        for wrong in ("/", "/?token=", "/?token=x", f"/events?token={server.token}x", "/events"):
            assert ask(server, wrong).status == 403
        assert ask(server, path, host="elsewhere.example").status == 403
        assert ask(server, f"/nothing?token={server.token}").status == 404
        for method in ("POST", "PUT", "DELETE"):
            assert ask(server, path, method).status == 501


def events_of(answer):
    """The news of an event stream, one list after the other."""
    for line in answer:
        if line.startswith(b"data: "):
            yield json.loads(line[6:])


def test_the_live_page_is_sent_what_is_added(tmp_path):
    write_json(tmp_path / "summary.json", {"status": "running", "ticks": 0})
    write_json(tmp_path / "run.json", {"form": 1, "ticks": 100})
    with open(tmp_path / "metrics.jsonl", "a", buffering=1) as rows, locked(tmp_path):
        rows.write('{"tick": 0, "env_steps": 8, "seconds": 0.1, "loss": 0.5}\n')
        with served(tmp_path) as server:
            events = events_of(ask(server, f"/events?token={server.token}"))
            ((first),) = next(events)
            assert first["facts"]["running"]
            assert first["curves"]["columns"]["loss"] == [[0.5]]
            rows.write('{"tick": 1, "env_steps": 16, "seconds": 0.2, "loss": 0.25}\n')
            ((second),) = next(events)
            assert second["curves"]["first"] == 0
            assert second["curves"]["columns"]["loss"][0][-1] == 0.25
            assert second["facts"]["ticks"] == 2


def test_a_page_looks_rarely_where_no_run_is_in_progress(folder, tmp_path):
    with served(folder) as server:
        next(events_of(ask(server, f"/events?token={server.token}")))
        assert server.watched.pause == 1.0
    write_json(tmp_path / "summary.json", {"status": "running", "ticks": 0})
    with locked(tmp_path), served(tmp_path) as server:
        next(events_of(ask(server, f"/events?token={server.token}")))
        assert server.watched.pause == 0.1


def test_a_port_that_is_taken_is_refused(folder):
    with served(folder) as server, pytest.raises(SettingError, match="can't be used"):
        Server([folder], server.server_port)
