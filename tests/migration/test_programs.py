"""Programs written for Ray Train run with their imports renamed and nothing else: one for each documented feature.

They are in ``programs``, as a user of Ray writes them. ``python -m tests.migration.on_ray`` runs them on Ray itself.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.migration import running
from tests.migration.rename import rename
from tests.support.warm_python import WarmPython

#: What `make test` runs of them, as plain scripts; `make test-rest` runs the others from a warm process.
SMOKE = ("checkpoints/rank_zero",)
_TIMEOUT_S = 100.0
_MOST_IN_A_FOLDER = 15
_LEAST_PROGRAMS = 60


@pytest.mark.smoke
@pytest.mark.parametrize("name", SMOKE)
def test_a_program_runs_as_a_script_with_its_imports_renamed(name: str, tmp_path: Path) -> None:
    ended = running.run(rename(running.read(name)), tmp_path, _TIMEOUT_S)
    assert ended.left_running == []
    assert ended.code == 0, ended.output


@pytest.mark.parametrize("name", [name for name in running.names() if name not in SMOKE])
def test_a_program_runs_with_its_imports_renamed(name: str, tmp_path: Path, warm_python: WarmPython) -> None:
    ended = running.run(rename(running.read(name)), tmp_path, _TIMEOUT_S, warm=warm_python)
    assert ended.left_running == []
    assert ended.code == 0, ended.output


def test_there_are_enough_programs_and_every_listed_one_exists() -> None:
    names = running.names()
    assert len(names) >= _LEAST_PROGRAMS
    assert set(SMOKE) <= set(names)
    for folder in running.PROGRAMS.iterdir():
        assert len(list(folder.glob("*.py"))) <= _MOST_IN_A_FOLDER, folder.name


def test_every_program_says_what_it_shows_and_checks_it() -> None:
    for name in running.names():
        text = running.read(name)
        assert text.startswith('"""'), name
        assert "\nassert " in text or "    assert " in text, name
        assert "import ray" in text or "from ray" in text, name
