"""A real ``fit()`` in a real browser, while it trains and after it has ended."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.ui import watched_run
from tests.ui.in_browser import Visit, browsing, find_browser, pixels_of_phase, serving, wait_until
from tests.ui.watched_run import ATTACK, RANKS, STRAGGLER

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not find_browser(), reason="no Chromium is installed: apt-get install chromium"),
    pytest.mark.skipif(importlib.util.find_spec("playwright") is None, reason="playwright is not installed"),
]

#: Milliseconds for all that is waited for, on a machine that others use too.
PATIENCE_MS = 120_000


@contextlib.contextmanager
def training(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """A run that trains until the file "enough" is there. It is ended in any case."""
    process = subprocess.Popen(
        [sys.executable, watched_run.__file__, str(directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        (directory / "enough").touch()
        try:
            process.communicate(timeout=PATIENCE_MS / 1000)
        finally:
            process.kill()
            process.wait()


def wait_for_rows(visit: Visit, least: int) -> int:
    """Wait until the first chart has so many rows; returns the last one."""
    last = "Number(document.querySelector('#metrics .plot')?.getAttribute('aria-valuemax') || 0)"
    wait_until(visit.page, f"{last} >= {least}")
    return int(visit.page.evaluate(last))


def wait_for_waits_of_a_straggler(visit: Visit) -> None:
    """Wait until the straggler has waited least by far: it waits too for a rank that the machine holds up for once."""
    deadline = time.monotonic() + PATIENCE_MS / 1000
    while True:
        waits = pixels_of_phase(visit.page, "collective", RANKS)
        if waits[STRAGGLER] * 3 < min(waits[:STRAGGLER]):
            return
        assert time.monotonic() < deadline, waits
        visit.page.wait_for_timeout(200)


def test_a_run_is_watched_while_it_trains_loses_a_rank_and_ends(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    with training(tmp_path) as driver, serving(runs, "--control") as address, browsing() as visit:
        page = visit.page
        page.set_default_timeout(PATIENCE_MS)
        visit.open(address)
        page.locator("tbody a", has_text=ATTACK).click()
        page.locator("h1", has_text="training").wait_for()

        # Charts move while it trains.
        before = wait_for_rows(visit, 5)
        assert wait_for_rows(visit, before + 10) > before
        assert " of 100,000 (" in page.locator(".facts").inner_text()
        assert page.locator("#metrics .mark").count() == 0

        # The others wait for the straggler: its row is the one with least of that colour.
        page.wait_for_selector(".rank-labels span")
        wait_for_waits_of_a_straggler(visit)

        page.get_by_role("button", name="Stacks").click()
        page.locator("pre.stacks", has_text="watched_run.py").wait_for()

        # A kill appears as a mark, and training goes on.
        os.kill(int((tmp_path / "pid-1").read_text()), signal.SIGKILL)
        page.wait_for_selector("#metrics .mark.failure")
        page.locator("#events td.words", has_text="SIGKILL").first.wait_for()
        page.locator("#events td.words", has_text="attempt 1").first.wait_for()

        (tmp_path / "enough").touch()
        page.locator("h1", has_text="finished").wait_for()
        assert driver.wait(PATIENCE_MS / 1000) == 0
        page.locator("#logs .log", has_text=ATTACK).wait_for()
        assert page.locator("img, main script").count() == 0
        assert visit.errors == []
        assert {urlsplit(url).netloc for url in visit.requests} == {urlsplit(address).netloc}

    report = runs / ATTACK / "report.html"
    with browsing() as visit:
        visit.page.set_default_timeout(PATIENCE_MS)
        visit.page.goto(report.as_uri())
        visit.page.wait_for_selector("#metrics .mark.failure")
        assert visit.page.locator("figure.chart h3").nth(1).inner_text() == ATTACK
        waits = pixels_of_phase(visit.page, "collective", RANKS)
        assert waits[STRAGGLER] * 1.5 < min(waits[:STRAGGLER]), waits
        assert (visit.requests, visit.errors) == ([report.as_uri()], [])
