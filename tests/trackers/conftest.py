"""Runs that were written down, for trackers to read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.trackers.recorded import RecordedRun


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RecordedRun]:
    """A run under way, in its attempt 0."""
    recorded = RecordedRun(tmp_path / "runs" / "run")
    recorded.begin(0)
    yield recorded
    with contextlib.suppress(Exception):  # a test may have closed it
        recorded.close()
