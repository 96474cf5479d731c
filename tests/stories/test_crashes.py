"""Runs that are killed while they save, and disks that lose what was not flushed: no committed checkpoint is lost.

This is the short form of ``benchmarks/crash_matrix.py``, which does the same at every step and at many moments.

It plays on this machine, whose every step towards storage it puts down. The processes that save are the same on a
cluster; that killing them there loses no commit is told in ``test_checkpoints.py`` (ranks, uploader) and
``test_drivers.py`` (drivers).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import crash_matrix
from crash_matrix import Recording, Trial


@pytest.fixture(scope="module", autouse=True)
def _without_torch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The scripts play as where torch is not installed: loading it would take each of their servers four seconds."""
    place = tmp_path_factory.mktemp("site")
    (place / "sitecustomize.py").write_text('import sys\nsys.modules["torch"] = None\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(place), prepend=os.pathsep)
        yield


@pytest.fixture(scope="module")
def recording() -> Iterator[Recording]:
    """One undisturbed run, and what was durable at each of its steps."""
    with crash_matrix.place() as here:
        yield Recording(here)


def assert_good(trials: list[Trial]) -> None:
    wrong = [f"{trial.what}: {sentence}" for trial in trials for sentence in trial.wrong]
    assert not wrong, "\n".join(wrong)
    assert any(trial.reached for trial in trials)


@pytest.mark.parametrize("names", crash_matrix.VIEWS)
def test_a_power_cut_at_any_step_loses_no_commit(recording: Recording, names: str) -> None:
    cuts = crash_matrix.cut_everywhere(recording, crash_matrix.VIEWS[names])
    assert_good([cut.trial for cut in cuts])
    assert {cut.row for cut in cuts} == set(range(crash_matrix.ROWS + 1)), "every save is seen to come"


@pytest.mark.parametrize(("victim", "steps"), [("controller", 2), ("uploader", 2), ("rank-0", 1)])
def test_a_killed_process_loses_no_commit_and_the_run_goes_on(
    recording: Recording, victim: str, steps: int
) -> None:
    places = crash_matrix.spread(recording.places(victim), steps + 2)[1:-1]
    assert len(places) == steps, f"the {victim} changes storage in a save"
    with ThreadPoolExecutor(steps) as lanes:
        assert_good(list(lanes.map(crash_matrix.killed_at, places)))


@pytest.mark.smoke
def test_a_checkpoint_that_all_ranks_have_reported_is_committed_although_one_is_killed_next() -> None:
    with ThreadPoolExecutor(crash_matrix.WORKERS) as lanes:
        trials = list(lanes.map(crash_matrix.rank_dies_after_report, range(crash_matrix.WORKERS)))
    assert_good(trials)
    assert all(trial.reached for trial in trials)
