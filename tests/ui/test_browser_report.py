"""A report in a real browser: opened from a file, with the same charts, and nothing that a run wrote does anything."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from tests.recorded_run import at, attempt, write
from tests.ui import sample_runs
from tests.ui.in_browser import Visit, browsing, find_browser, wait_until
from typer.testing import CliRunner

from powertrain.cli.main import app
from powertrain.run import events as ev
from powertrain.run.metrics.points import PointRecord
from powertrain.storage import open_storage
from powertrain.views.report.writing import keep_report

pytestmark = [
    pytest.mark.skipif(not find_browser(), reason="no Chromium is installed: apt-get install chromium"),
    pytest.mark.skipif(importlib.util.find_spec("playwright") is None, reason="playwright is not installed"),
]

ATTACK = "<img src=x onerror=alert(1)><script>alert(2)</script></script><!--"


def open_file(visit: Visit, path: Path) -> None:
    visit.page.goto(path.as_uri())
    visit.page.wait_for_selector("h1 .state")


def only_itself(visit: Visit, path: Path) -> bool:
    """Whether the file was all that the browser asked for, and no script complained."""
    return set(visit.requests) == {path.as_uri()} and visit.errors == []


def test_a_report_has_the_charts_of_the_page_without_a_server(tmp_path: Path) -> None:
    storage = open_storage(tmp_path / "eventful")
    sample_runs.write_eventful(storage, 1.7e9)
    keep_report(storage, "eventful")
    report = tmp_path / "moved away.html"
    (tmp_path / "eventful" / "report.html").rename(report)
    with browsing() as visit:
        open_file(visit, report)
        page = visit.page
        page.wait_for_selector("#metrics .line")
        assert page.locator("#metrics figure.chart").count() == 6
        assert page.locator("#metrics figure").first.locator(".mark.failure").count() == 1
        page.get_by_label("Ranks", exact=True).select_option("all")
        wait_until(page, "document.querySelector('#metrics figure').querySelectorAll('.line').length === 4")
        assert page.locator("#resources figure.chart").count() > 5
        assert page.locator(".findings li").count() > 1
        assert page.locator("#events .cause-redone").count() == 1
        assert page.locator("#checkpoints .tag", has_text="best").count() == 1
        # The timeline is cut to the chosen time, also where no server has a finer one.
        canvas = page.locator("#steps canvas")
        before = canvas.evaluate("one => one.width")
        canvas.press("+")
        wait_until(page, f"document.querySelector('#steps canvas').width < {before}")
        page.get_by_label("Attempt", exact=True).select_option("0")
        page.get_by_label("Search lines").fill("step  260")
        page.locator("#logs [role=status]", has_text="1 matching").wait_for()
        assert "As of 20" in page.locator("#connection").inner_text()
        assert page.get_by_role("button", name="Stop").count() == 0
        assert only_itself(visit, report)


def test_nothing_of_a_run_runs_in_its_report(tmp_path: Path) -> None:
    made = [
        PointRecord(rank=0, attempt=0, row=row, at=at(row), solo=False, metrics={ATTACK: row, "x": ATTACK})
        for row in range(1, 5)
    ]
    failure = ev.WorkerFailure(
        rank=0, kind="raised", summary=ATTACK, error_type=ATTACK, message=ATTACK, row=3
    )
    facts = (
        attempt(0, 1, 1),
        ev.Failed(time=at(4), attempt=0, failures=(failure,), decision="give_up", reason=ATTACK),
    )
    end = ev.Ended(time=at(5), state="failed", reason=ATTACK)
    storage = write(tmp_path / "run", made, facts=facts, end=end, checkpoints={4: {ATTACK: 1.0}})
    storage.put("logs/attempt-0/rank-0.log", f"{ATTACK}\n".encode())
    keep_report(storage, ATTACK)
    report = tmp_path / "run" / "report.html"
    with browsing() as visit:
        open_file(visit, report)
        visit.page.wait_for_selector("figure.chart .line")
        assert visit.page.locator("h1").inner_text().startswith(ATTACK)
        assert visit.page.locator("figure.chart h3").first.inner_text() == ATTACK
        assert visit.page.locator(".log").inner_text().strip() == ATTACK
        assert visit.page.locator("img, main script").count() == 0
        assert visit.page.title().startswith(ATTACK)
        assert only_itself(visit, report)
        # Neither an inline script nor a request is possible, whatever gets into the page.
        visit.page.evaluate(
            """() => { const script = document.createElement("script"); script.append("window.ran = true");
            document.body.append(script); fetch("https://example.invalid/").catch(() => {}); }"""
        )
        assert visit.page.evaluate("window.ran") is None
        assert any("Content Security Policy" in error for error in visit.errors)
        assert not [url for url in visit.requests if "example" in url]


def test_the_report_of_a_sweep_has_its_trials_without_links(tmp_path: Path) -> None:
    sample_runs.write_search(open_storage(tmp_path / "search"), 1.7e9, trials=6)
    report = tmp_path / "search.html"
    told = CliRunner().invoke(app, ["report", str(tmp_path / "search"), "-o", str(report)])
    assert told.exit_code == 0, told.output
    with browsing() as visit:
        open_file(visit, report)
        visit.page.wait_for_selector(".parallel .trial")
        assert visit.page.locator("#trials tbody tr").count() == 6
        assert visit.page.locator("main a").count() == 0
        assert only_itself(visit, report)
