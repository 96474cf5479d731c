"""A plugin of pytest: writes down how far a session has come, runs only what is wanted of it, and tells of a failure at
once, because a session that is ended from outside never comes to the place where pytest does.

``python -m tests`` reads what is written.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

#: Name the file, and one with the tests that are to be run, where it is not all of them.
VARIABLE, ONLY = "POWERTRAIN_TESTS_PROGRESS", "POWERTRAIN_TESTS_ONLY"
#: Names the share of the tests that are to be run: those that need Ray, or the others.
SHARE = "POWERTRAIN_TESTS_SHARE"
SHARES = RAY, REST = "ray", "rest"
COLLECTED, BEGUN, PASSED, FAILED, OVER = "collected", "begun", "passed", "failed", "over"


class Progress:
    """What the file says: which test runs, which are done, and whether pytest has come to its own end."""

    def __init__(self, text: str) -> None:
        lines = [line.split("\t", 1) for line in text.splitlines() if "\t" in line]
        self.passed = {test for word, test in lines if word == PASSED}
        self.failed = {test for word, test in lines if word == FAILED}
        self.running = next((t for word, t in reversed(lines) if word == BEGUN), "")
        if self.running in self.passed | self.failed:
            self.running = ""
        self.is_over = any(word == OVER for word, _ in lines)
        #: Whether all that was to be run was, and not only until somebody or something stopped it.
        wanted = [int(count) for word, count in lines if word == COLLECTED]
        self.is_complete = bool(wanted) and len(self.passed | self.failed) >= wanted[-1]


def _write(word: str, what: str) -> None:
    with Path(os.environ[VARIABLE]).open("a") as file:
        file.write(f"{word}\t{what}\n")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    progress = Progress(Path(os.environ[VARIABLE]).read_text())
    done = progress.passed | progress.failed
    only = set(Path(os.environ[ONLY]).read_text().splitlines()) if ONLY in os.environ else None
    share = os.environ.get(SHARE)
    wanted, left_out = [], []
    for item in items:
        is_wanted = item.nodeid not in done and (only is None or item.nodeid in only)
        (wanted if is_wanted and share in (None, share_of(item)) else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = wanted
    _write(COLLECTED, str(len(done) + len(wanted)))


def share_of(item: pytest.Item) -> str:
    """Told by its name, and by the names of its fixtures."""
    names = [item.nodeid, *getattr(item, "fixturenames", ())]
    return RAY if any(word == "ray" for name in names for word in re.split(r"[^a-z]+", name)) else REST


class _Failures:
    """Of the test that runs; and where to tell of them."""

    def __init__(self) -> None:
        self.has_failed = False
        self.terminal: Any = None


_failures = _Failures()


@pytest.hookimpl(trylast=True)  # after the terminal's own
def pytest_configure(config: pytest.Config) -> None:
    _failures.terminal = config.pluginmanager.getplugin("terminalreporter")


def pytest_runtest_logstart(nodeid: str, location: Any) -> None:
    _failures.has_failed = False
    _write(BEGUN, nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _failures.has_failed = True
        _failures.terminal.write_line(f"\n{report.nodeid} ({report.when}):\n{report.longreprtext}")


def pytest_runtest_logfinish(nodeid: str, location: Any) -> None:
    _write(FAILED if _failures.has_failed else PASSED, nodeid)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    _write(OVER, str(int(exitstatus)))
