"""Pages fit any width, in light and dark, with the keyboard, without errors or a network."""

import json
import threading
from contextlib import contextmanager

import pytest

from shoal.pages import RunView, graph_page, plan_page, report_page
from shoal.pages.live import Server
from shoal.runs.files.folder import locked, write_json

pytestmark = pytest.mark.browser
WIDTHS = (390, 768, 1280, 1920, 2560)
SMALLEST = 0.5  # of its size, that text in a picture is shown at


@pytest.fixture(scope="module")
def files(run_folder, tmp_path_factory):
    """The pages that are files, by name."""
    folder = tmp_path_factory.mktemp("pages")
    plan = json.loads((run_folder / "plan.json").read_text())
    pages = {
        "plan": plan_page(plan),
        "graph": graph_page({**plan["graph"], "sources": plan["sources"]}),
        "report": report_page([RunView(run_folder)]),
        "compare": report_page([RunView(run_folder), RunView(run_folder)]),
    }
    for name, html in pages.items():
        (folder / f"{name}.html").write_text(html)
    return {name: (folder / f"{name}.html").as_uri() for name in pages}


@contextmanager
def served(*folders):
    with Server(folders) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def check_fits(page):
    """Nothing is wider than the window, and every box of a picture is inside of it and readable."""
    inside = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert inside[0] <= inside[1]
    boxes = page.evaluate("""() => [...document.querySelectorAll('svg.plan')].flatMap((svg) => {
        const frame = svg.getBoundingClientRect();
        return [...svg.querySelectorAll('.box > .card')].map((card) => {
            const at = card.getBoundingClientRect();
            return [at.left - frame.left, frame.right - at.right, at.top - frame.top,
                    frame.bottom - at.bottom, at.width / Number(card.getAttribute('width'))];
        });
    })""")
    assert boxes
    for left, right, top, bottom, scale in boxes:
        assert min(left, right, top, bottom) >= -1
        assert scale >= SMALLEST


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["plan", "graph", "report", "compare"])
def test_a_page_fits_every_width_without_errors_or_requests(opened, files, name, scheme):
    for width in WIDTHS:
        with opened(files[name], width, scheme, offline=True) as found:
            found.page.wait_for_selector("svg.plan .box")
            check_fits(found.page)
            found.shoot(f"{name}-{scheme}-{width}")
            assert found.page.evaluate("document.documentElement.dataset.theme") == scheme
            assert found.problems == []
            assert found.strangers(["file:"]) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_live_page_fits_every_width_and_asks_its_own_server_only(opened, run_folder, scheme):
    with served(run_folder) as server:
        for width in WIDTHS:
            with opened(server.url, width, scheme) as found:
                found.page.wait_for_selector("svg.plan .box")
                found.page.wait_for_selector(".chart canvas")
                check_fits(found.page)
                found.shoot(f"live-{scheme}-{width}")
                assert found.problems == []
                assert found.strangers([f"http://127.0.0.1:{server.server_port}/"]) == []


def test_the_live_page_follows_a_run(opened, tmp_path):
    write_json(tmp_path / "summary.json", {"status": "running", "ticks": 0, "env": "E"})
    write_json(tmp_path / "run.json", {"form": 1, "ticks": 50})
    log = (tmp_path / "workers.log").open("a", buffering=1)
    rows = (tmp_path / "metrics.jsonl").open("a", buffering=1)
    with log, rows, locked(tmp_path), served(tmp_path) as server, opened(server.url) as found:
        for tick in range(30):
            row = {
                "tick": tick,
                "env_steps": 8 * tick,
                "seconds": tick / 10,
                "loss": 1 / (tick + 1),
            }
            rows.write(json.dumps(row) + "\n")
        log.write("a worker says something\n")
        page = found.page
        page.wait_for_selector("text=a worker says something")
        page.wait_for_selector(".pill.running")
        page.wait_for_selector("article[aria-label^='loss: '][aria-label$='0.03333']")
        rows.write('{"tick": 30, "env_steps": 240, "seconds": 3.0, "loss": 7.5}\n')
        page.wait_for_selector("article[aria-label^='loss: '][aria-label$='7.5']")
        write_json(tmp_path / "summary.json", {"status": "done", "ticks": 31, "env": "E"})
        page.wait_for_selector(".pill.done")
        assert found.problems == []


def test_the_first_picture_of_a_million_rows_takes_no_longer_than_of_few(opened, tmp_path):
    write_json(tmp_path / "summary.json", {"status": "done", "ticks": 1_000_000})
    with open(tmp_path / "metrics.jsonl", "w") as file:
        for start in range(0, 1_000_000, 1000):
            file.writelines(
                f'{{"tick": {t}, "env_steps": {8 * t}, "seconds": {t / 100}, "loss": {t % 97}, '
                f'"return_mean": {t / 1e4}, "episode_return": null, "entropy": {1 / (t + 1)}}}\n'
                for t in range(start, start + 1000)
            )
    with served(tmp_path) as server, opened(server.url) as found:
        found.page.wait_for_selector(".chart canvas")
        painted = found.page.evaluate("performance.now()")
        print(f"first curves of a million rows after {painted:.0f} ms")
        shown = found.page.evaluate("[runs[0].columns.columns.tick[0].at(-1), runs[0].facts.read]")
        assert shown[0] == 999_999
        assert shown[1] < 1  # by a sample; the rest is read meanwhile
        found.page.wait_for_selector("#reading[hidden]", state="attached", timeout=120_000)
        _, low, high = found.page.evaluate("runs[0].columns.columns.loss")
        assert (min(low), max(high)) == (0, 96)
        assert found.problems == []


def test_boxes_open_and_close_zoom_and_show_their_source(opened, files):
    with opened(files["plan"], 1920) as found:
        page, count = found.page, "svg.plan .box"
        before = page.locator(count).count()
        page.get_by_label("Show the outer boxes only").click()
        closed = page.locator(count).count()
        assert closed < before
        page.get_by_label("Show what all boxes hold").click()
        assert page.locator(count).count() >= before
        size = page.locator("svg.plan .fragment").first.bounding_box()["width"]
        page.get_by_label("Zoom in").click()
        assert page.locator("svg.plan .fragment").first.bounding_box()["width"] > 1.2 * size
        page.get_by_label("Fit the picture").click()
        page.locator("svg.plan .box[data-id='learn'] > .card").click(position={"x": 60, "y": 14})
        assert "def learn(" in page.locator("dialog.source").inner_text()
        page.keyboard.press("Escape")
        assert not page.locator("dialog.source").is_visible()
        page.locator("a.source", has_text="act").first.click()
        assert "def act(" in page.locator("dialog.source").inner_text()
        assert found.problems == []


def test_the_keyboard_reaches_everything(opened, files):
    with opened(files["report"], 1280) as found:
        page = found.page
        page.locator("svg.plan").focus()
        where = "document.querySelector('svg.plan > g').getAttribute('transform')"
        before = page.evaluate(where)
        for key in ("ArrowLeft", "+"):
            page.keyboard.press(key)
            assert page.evaluate(where) != before
        page.keyboard.press("0")
        assert page.evaluate(where) == before
        page.locator("svg.plan .fragment").first.focus()
        assert page.locator("#tip").is_visible()
        page.keyboard.press(" ")
        assert page.evaluate("document.activeElement.getAttribute('aria-expanded')") == "false"
        page.locator("svg.plan .box[data-id='learn']").focus()
        page.keyboard.press("Enter")
        assert page.locator("dialog.source").is_visible()
        page.keyboard.press("Escape")
        chart = page.locator("article.chart").first
        chart.focus()
        last = chart.get_attribute("aria-label")
        for _ in range(20):
            page.keyboard.press("ArrowLeft")
        assert chart.get_attribute("aria-label") != last
        assert found.problems == []


def test_curves_change_their_axis_their_smoothing_and_their_choice(opened, files):
    with opened(files["report"], 1280) as found:
        page = found.page
        page.wait_for_selector(".chart canvas")
        everything = page.locator("article.chart").count()
        page.get_by_label("Filter curves").fill("loss")
        assert 0 < page.locator("article.chart").count() < everything
        page.get_by_label("Filter curves").fill("")
        for axis in ("seconds", "tick", "env_steps"):
            page.locator("#axis").select_option(axis)
            page.wait_for_selector(".chart canvas")
        chart = page.locator("article.chart").first
        chart.scroll_into_view_if_needed()
        box = chart.locator(".u-over").bounding_box()
        page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 50)
        page.mouse.down()
        page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 60, steps=5)
        page.mouse.up()
        assert page.locator("#unzoom").is_visible()
        page.locator("#unzoom").click()
        assert not page.locator("#unzoom").is_visible()
        chart.get_by_role("button", name="log").click()
        assert found.problems == []


def test_a_closed_server_is_reported_on_the_page(opened, run_folder):
    with served(run_folder) as server, opened(server.url) as found:
        found.page.wait_for_selector(".chart canvas")
        assert not found.page.locator(".pill.lost").is_visible()
        found.page.route("**/events*", lambda route: route.abort())
        found.page.reload()
        found.page.wait_for_selector(".pill.lost:visible")
