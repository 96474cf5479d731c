"""A run of the real controller on a scripted engine."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.run.scripted_run import Run


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    runtime = tempfile.mkdtemp(prefix="pt-")
    (tmp_path / "scripted").mkdir()
    yield Run(tmp_path / "scripted", runtime)
    assert not list(Path(runtime).glob("wire")), "the wire's socket was left behind"
    shutil.rmtree(runtime)


@pytest.fixture(autouse=True)
def _unknown_capacity_is_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scripted engine never reports its capacity by itself."""
    monkeypatch.setattr("powertrain.run.scaling.slots._CAPACITY_TIMEOUT_S", 0.01)
