"""A plugin of pytest: writes down how far a session has come, runs only what is wanted of it, and tells of a failure at
once, because a session that is ended from outside never comes to the place where pytest does.

``python -m tests`` reads what is written.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

#: Name the file, and one with the tests that are to be run, where it is not all of them.
VARIABLE, ONLY = "POWERTRAIN_TESTS_PROGRESS", "POWERTRAIN_TESTS_ONLY"
BEGUN, PASSED, FAILED, OVER = "begun", "passed", "failed", "over"


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


def _write(word: str, what: str) -> None:
    with Path(os.environ[VARIABLE]).open("a") as file:
        file.write(f"{word}\t{what}\n")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    progress = Progress(Path(os.environ[VARIABLE]).read_text())
    done = progress.passed | progress.failed
    only = Path(os.environ[ONLY]).read_text().splitlines() if ONLY in os.environ else None
    left_out = [
        item for item in items if item.nodeid in done or (only is not None and item.nodeid not in only)
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


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
