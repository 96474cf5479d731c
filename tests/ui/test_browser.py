"""The dashboard in a real browser: live charts, marks, the straggler, hostile names, keyboard, narrow screens."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from tests.recorded_run import at, attempt, training_run, write
from tests.ui import sample_runs
from tests.ui.in_browser import browsing, find_browser, pixels_of_phase, serving

from powertrain.run import events as ev
from powertrain.run.metrics.points import PointRecord
from powertrain.run.metrics.store import MetricsStore
from powertrain.storage import open_storage

pytestmark = [
    pytest.mark.skipif(not find_browser(), reason="no Chromium is installed: apt-get install chromium"),
    pytest.mark.skipif(importlib.util.find_spec("playwright") is None, reason="playwright is not installed"),
]
ATTACK = "<img src=x onerror=alert(1)><script>alert(2)</script>"


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    sample_runs.write_all(tmp_path)
    return tmp_path


@pytest.mark.smoke
def test_the_list_leads_to_a_run_and_no_request_leaves_the_machine(samples: Path) -> None:
    with serving(samples) as address, browsing() as visit:
        visit.open(address)
        assert "token" not in visit.page.url
        visit.page.wait_for_selector("tr[data-run=resnet50-imagenet] .spark")
        assert visit.page.locator("tbody tr[data-run]").count() == 6
        visit.page.get_by_label("Filter by name").fill("gpt")
        assert visit.page.locator("tbody tr[data-run]").count() == 2
        visit.page.get_by_label("Filter by name").fill("")
        visit.page.get_by_role("link", name="resnet50-imagenet").click()
        visit.page.wait_for_selector("figure.chart .line")
        assert visit.page.title().startswith("resnet50-imagenet")
        host = address.partition("/?")[0]
        assert {url.partition("/static")[0].partition("/api")[0][: len(host)] for url in visit.requests} <= {
            host,
            "data:,",
        }
        assert visit.errors == []


def test_a_restart_is_marked_on_all_charts_and_the_stragglers_row_is_the_odd_one(samples: Path) -> None:
    with serving(samples) as address, browsing() as visit:
        visit.open(address)
        visit.go(address, "/runs/resnet50-imagenet")
        visit.page.wait_for_selector("#resources .line")
        charts = visit.page.locator("#metrics figure.chart").count()
        assert charts == 6
        assert visit.page.locator("#metrics .mark.failure").count() == charts
        assert visit.page.locator("#resources .mark.failure").count() > 0
        visit.page.wait_for_selector(".rank-labels span")
        yellow = pixels_of_phase(visit.page, "input", 4)
        assert yellow[sample_runs.STRAGGLER] > 3 * max(yellow[:2] + yellow[3:])
        assert visit.errors == []


def report_rows(store: MetricsStore, rows: range) -> None:
    """Report rows of rank 0, and wait until they are in the run's directory."""
    store.add(
        [
            PointRecord(rank=0, attempt=0, row=row, at=at(row), solo=False, metrics={"loss": 1.0 / row})
            for row in rows
        ]
    )


def last_row_shown(page: Any) -> int:
    return int(
        page.evaluate(
            """() => {
              const labels = [...document.querySelectorAll("#metrics .tick")].map((one) => one.textContent);
              return Math.max(0, ...labels.map((text) => Number(text.replace(/,/g, ""))).filter(Number.isInteger));
            }"""
        )
    )


def test_charts_move_and_marks_appear_while_a_run_goes_on(tmp_path: Path) -> None:
    storage = open_storage(tmp_path / "run")
    journal = training_run(storage)
    store = MetricsStore(storage, 1)
    report_rows(store, range(1, 20))
    store.close()
    with serving(tmp_path) as address, browsing() as visit:
        visit.open(address)
        visit.go(address, "/runs/run")
        visit.page.wait_for_selector("#metrics .line")
        before = last_row_shown(visit.page)
        assert 0 < before < 20
        more = MetricsStore(storage, 2)
        report_rows(more, range(20, 400))
        more.close()
        visit.page.locator("#metrics .tick", has_text="200").first.wait_for()
        assert visit.page.locator("#metrics .mark").count() == 0
        killed = ev.WorkerFailure(rank=0, kind="signal", summary="rank 0 was killed by SIGKILL", row=200)
        journal.append(
            ev.Failed(time=at(400), attempt=0, failures=(killed,), decision="retry", reason="failure 1 of 3")
        )
        visit.page.wait_for_selector("#metrics .mark.failure")
        assert "recovering" in visit.page.locator("h1").inner_text()
        journal.close()
        assert visit.errors == []


def test_names_metrics_and_log_lines_with_a_script_do_nothing(tmp_path: Path) -> None:
    name = ATTACK.replace("/", "\u2215")
    made = [
        PointRecord(rank=0, attempt=0, row=row, at=at(row), solo=False, metrics={ATTACK: row, "x": ATTACK})
        for row in range(1, 5)
    ]
    failure = ev.WorkerFailure(
        rank=0, kind="raised", summary=ATTACK, error_type=ATTACK, message=ATTACK, row=3
    )
    facts = (
        attempt(0, 1, 1),
        ev.TrainingStarted(time=at(0.6), attempt=0),
        ev.Failed(time=at(4), attempt=0, failures=(failure,), decision="give_up", reason=ATTACK),
    )
    end = ev.Ended(time=at(5), state="failed", reason=ATTACK)
    storage = write(tmp_path / name, made, facts=facts, end=end, checkpoints={4: {ATTACK: 1.0}})
    storage.put("logs/attempt-0/rank-0.log", f"{ATTACK}\n".encode())
    with serving(tmp_path) as address, browsing() as visit:
        visit.open(address)
        visit.page.wait_for_selector(".spark")
        visit.page.locator("tbody a").first.click()
        visit.page.wait_for_selector("figure.chart .line")
        visit.page.wait_for_selector(".log span")
        visit.page.locator(".plot").first.hover()
        assert visit.page.locator("h1").inner_text().startswith(name)
        assert visit.page.locator("figure.chart h3").first.inner_text() == ATTACK
        assert visit.page.locator(".log").inner_text().strip() == ATTACK
        assert visit.page.locator("img, main script").count() == 0
        assert visit.errors == []


def test_charts_are_used_with_the_keyboard_and_read_as_tables(samples: Path) -> None:
    with serving(samples) as address, browsing() as visit:
        visit.open(address)
        visit.go(address, "/runs/resnet50-imagenet")
        visit.page.wait_for_selector("#metrics .line")
        plot = visit.page.locator("#metrics .plot").first
        assert "from 6.7" in (plot.get_attribute("aria-label") or "")
        plot.focus()
        visit.page.keyboard.press("ArrowRight")
        assert plot.get_attribute("role") == "slider"
        assert (plot.get_attribute("aria-valuetext") or "").startswith("row ")
        visit.page.keyboard.press("+")
        visit.page.wait_for_selector(".reset:not([hidden])")
        visit.page.keyboard.press("Escape")
        visit.page.wait_for_selector(".reset", state="hidden")
        visit.page.locator("#metrics summary").first.click()
        assert visit.page.locator("#metrics figure.chart").first.locator("tbody tr").count() > 10
        assert visit.errors == []


@pytest.mark.parametrize("width", [390, 768, 2560])
def test_pages_fit_narrow_and_wide_screens(samples: Path, width: int) -> None:
    with serving(samples) as address, browsing(viewport={"width": width, "height": 900}) as visit:
        visit.open(address)
        for path in ("/", "/runs/resnet50-imagenet", "/sweeps/lr-search"):
            visit.go(address, path)
            visit.page.wait_for_selector("main svg")
            assert visit.page.evaluate("document.documentElement.scrollWidth") <= width, path
        assert visit.errors == []


#: Elements that a screen reader announces and that have no name.
NAMELESS = """() => [...document.querySelectorAll("button, a, input, select, svg[role], canvas, section")]
  .filter((one) => !one.hidden && !(one.getAttribute("aria-label") || one.textContent.trim()
    || one.getAttribute("aria-labelledby") || one.labels?.length))
  .map((one) => one.outerHTML.slice(0, 120))"""


def test_every_control_has_a_name_and_every_page_its_landmarks(samples: Path) -> None:
    with serving(samples) as address, browsing() as visit:
        visit.open(address)
        for path in ("/", "/runs/resnet50-imagenet", "/sweeps/lr-search"):
            visit.go(address, path)
            visit.page.wait_for_selector("main svg")
            assert visit.page.evaluate(NAMELESS) == [], path
            assert visit.page.locator("main, header.top, nav").count() >= 3
            assert visit.page.locator("h1").count() == 1


def test_charts_have_names_before_their_data_arrives(samples: Path) -> None:
    with serving(samples) as address, browsing() as visit:
        visit.open(address)
        visit.page.route("**/api/**", lambda route: None)
        visit.page.goto(address.partition("/?")[0] + "/sweeps/lr-search")
        visit.page.wait_for_selector("main svg.plot", state="attached")
        assert visit.page.evaluate(NAMELESS) == []


def test_of_many_metrics_some_last_values_are_shown_and_the_others_on_request(tmp_path: Path) -> None:
    storage = open_storage(tmp_path / "run")
    journal = training_run(storage)
    store = MetricsStore(storage, 1)
    metrics = {f"metric_{number:02}": float(number) for number in range(40)}
    store.add([PointRecord(rank=0, attempt=0, row=1, at=at(1), solo=False, metrics=metrics)])
    store.close()
    journal.close()
    with serving(tmp_path) as address, browsing() as visit:
        visit.open(address)
        visit.go(address, "/runs/run")
        shown = visit.page.locator(".side .pairs dt:visible", has_text="metric_")
        shown.first.wait_for()
        assert shown.count() == 12
        visit.page.get_by_text("28 more").click()
        assert shown.count() == 40
        assert visit.errors == []
