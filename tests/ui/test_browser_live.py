"""The dashboard while a run changes: one load for each change, the focus, problems, logs, and many metrics."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.recorded_run import at, attempt, points, training_run, write
from tests.ui import sample_runs
from tests.ui.in_browser import Visit, browsing, find_browser, serving

from powertrain.run import events as ev
from powertrain.run.record.journal import Journal
from powertrain.storage import Storage, open_storage

pytestmark = [
    pytest.mark.skipif(not find_browser(), reason="no Chromium is installed: apt-get install chromium"),
    pytest.mark.skipif(importlib.util.find_spec("playwright") is None, reason="playwright is not installed"),
]
#: Errors that the browser logs for a reply that is an error on purpose.
REFUSED = "Failed to load resource"
FOCUSED = "document.activeElement.getAttribute('href') || document.activeElement.id"


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(tmp_path / "run")


@pytest.fixture
def journal(storage: Storage) -> Iterator[Journal]:
    """The journal of a run of another machine that goes on."""
    journal = training_run(storage)
    yield journal
    journal.close()


def requests_of(visit: Visit, path: str) -> int:
    return sum(urlsplit(url).path == path for url in visit.requests)


def wait_for_live(visit: Visit) -> None:
    visit.page.locator("#connection", has_text="Live").wait_for()


def fail(journal: Journal) -> None:
    killed = ev.WorkerFailure(rank=0, kind="signal", summary="rank 0 was killed by SIGKILL", row=2)
    journal.append(
        ev.Failed(time=at(4), attempt=0, failures=(killed,), decision="retry", reason="failure 1 of 3")
    )


def test_a_page_is_loaded_once_for_each_state(tmp_path: Path, journal: Journal) -> None:
    with serving(tmp_path) as address, browsing() as visit:
        visit.open(address)
        visit.go(address, "/runs/run")
        visit.page.locator("h1", has_text="training").wait_for()
        wait_for_live(visit)
        fail(journal)
        visit.page.locator("h1", has_text="recovering").wait_for()
        assert requests_of(visit, "/api/run") == 2, "the event of the first state did not load it again"
        assert visit.errors == []


def test_the_focus_stays_on_a_link_while_the_list_changes(tmp_path: Path, journal: Journal) -> None:
    write(tmp_path / "other", points(range(1, 4), lambda row, rank: {"loss": 1.0}))
    with serving(tmp_path) as address, browsing() as visit:
        visit.open(address)
        visit.page.get_by_role("link", name="run", exact=True).focus()
        journal.append(ev.Ended(time=at(9), state="failed", reason="no memory"))
        visit.page.locator("tr[data-run=run]", has_text="failed").wait_for()
        assert visit.page.evaluate(FOCUSED) == "/runs/run"
        assert visit.errors == []


def test_a_link_to_a_section_moves_the_focus_and_leaves_the_page_as_it_is(
    tmp_path: Path, journal: Journal
) -> None:
    with serving(tmp_path) as address, browsing() as visit:
        visit.open(address)
        visit.go(address, "/runs/run")
        wait_for_live(visit)
        visit.page.evaluate("document.getElementById('events').dataset.seen = '1'")
        before = requests_of(visit, "/api/run")
        visit.page.get_by_role("link", name="Events").click()
        visit.page.wait_for_function("document.activeElement.id === 'events'")
        assert visit.page.locator("#events[data-seen='1']").count() == 1
        visit.page.evaluate("document.querySelector('.skip').click()")
        visit.page.wait_for_function("document.activeElement.id === 'content'")
        assert visit.page.locator("#events[data-seen='1']").count() == 1
        assert requests_of(visit, "/api/run") == before


def test_a_run_that_is_removed_is_reported_in_an_alert(tmp_path: Path, journal: Journal) -> None:
    with serving(tmp_path) as address, browsing() as visit:
        visit.open(address)
        visit.go(address, "/runs/run")
        wait_for_live(visit)
        shutil.rmtree(tmp_path / "run")
        visit.page.locator("[role=alert]", has_text="There is no run 'run' here").wait_for()
        assert "Live" not in visit.page.locator("#connection").inner_text()
        visit.go(address, "/runs/nowhere")
        visit.page.locator("[role=alert]", has_text="There is no run 'nowhere' here").wait_for()
        assert all(error.startswith(REFUSED) for error in visit.errors)


def test_a_hidden_tab_has_no_connection_and_loads_when_it_is_seen_again(
    tmp_path: Path, journal: Journal
) -> None:
    hide = """(isHidden) => {
      Object.defineProperty(document, "hidden", { value: isHidden, configurable: true });
      document.dispatchEvent(new Event("visibilitychange"));
    }"""
    with serving(tmp_path) as address, browsing() as visit:
        visit.open(address)
        visit.go(address, "/runs/run")
        wait_for_live(visit)
        visit.page.evaluate(hide, True)
        assert visit.page.locator("#connection").inner_text() == "Paused"
        journal.append(ev.Ended(time=at(9), state="failed", reason="no memory"))
        visit.page.evaluate(hide, False)
        visit.page.locator("h1", has_text="failed").wait_for()
        wait_for_live(visit)
        assert visit.errors == []


def test_a_browser_that_signed_out_sees_nothing_more(tmp_path: Path, journal: Journal) -> None:
    with serving(tmp_path) as address, browsing() as visit:
        visit.open(address)
        visit.page.get_by_role("button", name="Sign out").click()
        visit.page.locator("h1", has_text="Not signed in").wait_for()
        assert visit.page.evaluate("localStorage.length") == 0


def test_all_of_many_metrics_of_all_ranks_are_drawn(tmp_path: Path) -> None:
    values = {f"metric-{number:02d}": float(number) for number in range(40)}
    made = points(
        range(1, 9),
        lambda row, rank: {name: value * row for name, value in values.items()},
        ranks=range(4),
    )
    write(tmp_path / "run", made, facts=(attempt(0, 4, 1),))
    with serving(tmp_path) as address, browsing() as visit:
        visit.open(address)
        visit.go(address, "/runs/run")
        visit.page.locator("#metrics figure.chart").first.scroll_into_view_if_needed()
        visit.page.locator("#metrics .line").first.wait_for(state="attached")
        visit.page.get_by_label("Ranks").select_option("all")
        visit.page.get_by_role("button", name="Show all 40 metrics").click()
        last = visit.page.locator("#metrics figure.chart").nth(39)
        last.scroll_into_view_if_needed()
        last.locator(".line").nth(3).wait_for(state="attached")
        assert visit.page.locator("#metrics figure.chart").count() == 40
        assert visit.page.locator("#metrics", has_text="No values").count() == 0
        assert visit.errors == []


def test_logs_show_a_progress_bar_and_go_over_to_a_new_attempt(
    tmp_path: Path, storage: Storage, journal: Journal
) -> None:
    log = tmp_path / "run" / "logs" / "attempt-0" / "rank-0.log"
    log.parent.mkdir(parents=True)
    log.write_bytes(b"begin\n\r 10 %\r 20 %")
    with serving(tmp_path) as address, browsing() as visit:
        visit.open(address)
        visit.go(address, "/runs/run")
        visit.page.locator(".log", has_text="begin\n 20 %").wait_for()
        with log.open("ab") as file:
            file.write(b"\r 90 %")
        visit.page.locator(".log", has_text="90 %").wait_for()
        assert "20 %" not in visit.page.locator(".log").inner_text()
        storage.put("logs/attempt-1/rank-0.log", b"the second attempt\n")
        fail(journal)
        journal.append(ev.SlotsRequested(time=at(5), attempt=1, count=1))
        journal.append(attempt(1, 1, 2))
        visit.page.locator(".log", has_text="the second attempt").wait_for()
        assert "begin" not in visit.page.locator(".log").inner_text()
        assert visit.errors == []


def test_a_search_of_a_long_log_is_continued(tmp_path: Path, storage: Storage, journal: Journal) -> None:
    storage.put("logs/attempt-0/rank-0.log", b"the needle\n" + b"a straw of the stack\n" * 100_000)
    with serving(tmp_path) as address, browsing() as visit:
        visit.open(address)
        visit.go(address, "/runs/run")
        visit.page.locator(".log", has_text="straw").wait_for()
        visit.page.get_by_label("Search lines").fill("needle")
        further = visit.page.get_by_role("button", name="Search further")
        visit.page.locator("p", has_text="0 matching lines").wait_for()
        while further.is_visible() and not visit.page.locator(".log", has_text="needle").count():
            asked = requests_of(visit, "/api/logs")
            with visit.page.expect_response(lambda reply: "before=" in reply.url):
                further.click()
            assert requests_of(visit, "/api/logs") > asked
        visit.page.locator(".log", has_text="the needle").wait_for()
        assert visit.errors == []


def test_values_outside_of_a_compared_run_are_not_made_up(tmp_path: Path) -> None:
    write(tmp_path / "long", points(range(1, 41), lambda row, rank: {"loss": float(row)}))
    write(tmp_path / "short", points(range(1, 6), lambda row, rank: {"loss": 1000.0 + row}))
    with serving(tmp_path) as address, browsing() as visit:
        visit.open(address)
        visit.go(address, "/runs/long?with=short")
        visit.page.locator("#metrics .line").nth(1).wait_for(state="attached")
        plot = visit.page.locator("#metrics .plot").first
        plot.focus()
        visit.page.keyboard.press("End")
        assert plot.get_attribute("aria-valuetext") == "row 40: long 40, short \N{EN DASH}"
        assert visit.errors == []


def test_the_step_timeline_is_read_with_the_keyboard(tmp_path: Path) -> None:
    sample_runs.write_eventful(open_storage(tmp_path / "run"), 1.7e9)
    with serving(tmp_path) as address, browsing() as visit:
        visit.open(address)
        visit.go(address, "/runs/run")
        visit.page.wait_for_selector(".rank-labels span")
        visit.page.locator("canvas").focus()
        visit.page.keyboard.press("ArrowDown")
        spoken = visit.page.locator("#steps [aria-live]")
        assert spoken.inner_text().startswith("Rank 0: 660 steps, median ")
        visit.page.keyboard.press("+")
        visit.page.locator("#steps [aria-live]", has_text="From ").wait_for(state="attached")
        visit.page.locator("#steps summary").click()
        assert visit.page.locator("#steps thead th").count() > 6
        assert visit.errors == []
