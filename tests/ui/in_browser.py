"""The dashboard as a person uses it: the command in a process of its own, and a real browser."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import ConsoleMessage, Dialog, Page

_ADDRESS = re.compile(r"http://[\w.-]+:\d+/\?token=\S+")
_COMMAND = (sys.executable, "-c", "from powertrain.cli.main import main; main()", "ui")


def find_browser() -> str:
    """Return the path of the system's Chromium; "" if there is none."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or ""


@contextlib.contextmanager
def serving(root: Path, *options: str) -> Iterator[str]:
    """Run ``powertrain ui`` on a directory; yields the address with its token."""
    process = subprocess.Popen(
        [*_COMMAND, str(root), *options], stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    try:
        assert process.stderr is not None
        told = ""
        for line in process.stderr:
            told += line
            if found := _ADDRESS.search(line):
                yield found[0]
                return
        raise AssertionError(f"the server ended before it had told its address:\n{told}")
    finally:
        process.terminate()
        process.wait(30)
        if process.stderr is not None:
            process.stderr.close()


@dataclass
class Visit:
    """A browser with one page, and everything that it asked for or complained about."""

    page: Page
    #: Addresses of all requests.
    requests: list[str]
    #: Errors of scripts, and violations of the policy.
    errors: list[str]

    def open(self, address: str) -> None:
        """Open an address with its token, and wait until the dashboard is there."""
        self.page.goto(address)
        self.page.wait_for_selector("h1")

    def go(self, address: str, path: str) -> None:
        """Open another page of the same server."""
        self.page.goto(address.partition("/?")[0] + path)
        self.page.wait_for_selector("h1")


def _watch(page: Page, visit: Visit) -> None:
    def dismiss(dialog: Dialog) -> None:
        visit.errors.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def note(message: ConsoleMessage) -> None:
        if message.type == "error":
            visit.errors.append(message.text)

    page.on("request", lambda request: visit.requests.append(request.url))
    page.on("pageerror", lambda error: visit.errors.append(str(error)))
    page.on("console", note)
    page.on("dialog", dismiss)


@contextlib.contextmanager
def browsing(**options: Any) -> Iterator[Visit]:
    """A headless Chromium with one page."""
    from playwright.sync_api import sync_playwright

    # Chromium has no sandbox for root, and the pages are our own.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_browser(), args=arguments)
        page = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options}).new_page()
        page.set_default_timeout(20_000)
        visit = Visit(page, [], [])
        _watch(page, visit)
        try:
            yield visit
        finally:
            browser.close()


def pixels_of_phase(page: Page, phase: str, rows: int) -> list[int]:
    """Return how many pixels of each row of the step timeline have the colour of a phase."""
    return list(
        page.evaluate(
            """([phase, count]) => {
              const canvas = document.querySelector("canvas"), context = canvas.getContext("2d");
              const probe = document.createElement("canvas").getContext("2d");
              probe.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(`--phase-${phase}`);
              probe.fillRect(0, 0, 1, 1);
              const wanted = probe.getImageData(0, 0, 1, 1).data, rows = Array(count).fill(0);
              const image = context.getImageData(0, 0, canvas.width, canvas.height);
              for (let at = 0; at < image.data.length; at += 4) {
                const isSame = [0, 1, 2].every((place) => image.data[at + place] === wanted[place]);
                if (isSame) rows[Math.floor(at / 4 / canvas.width / (canvas.height / count))] += 1;
              }
              return rows;
            }""",
            [phase, rows],
        )
    )


def wait_until(page: Page, condition: str, timeout_s: float = 120.0) -> None:
    """Wait until an expression is true. Playwright's own wait needs ``eval``, which the pages forbid."""
    deadline = time.monotonic() + timeout_s
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {condition}"
        page.wait_for_timeout(100)
