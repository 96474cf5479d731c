"""A plugin of pytest: writes down how far a session has come, and leaves out what an earlier one has done.

``python -m tests`` reads it, should the process of a session end without a word.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

#: Names the file.
VARIABLE = "POWERTRAIN_TESTS_PROGRESS"
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
    done = Progress(Path(os.environ[VARIABLE]).read_text()).passed
    if left_out := [item for item in items if item.nodeid in done]:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.nodeid not in done]


_has_failed = False


def pytest_runtest_logstart(nodeid: str, location: Any) -> None:
    global _has_failed
    _has_failed = False
    _write(BEGUN, nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    global _has_failed
    _has_failed |= report.failed


def pytest_runtest_logfinish(nodeid: str, location: Any) -> None:
    _write(FAILED if _has_failed else PASSED, nodeid)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    _write(OVER, str(int(exitstatus)))
