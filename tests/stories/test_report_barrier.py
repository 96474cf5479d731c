"""``report`` as a global barrier, and ``get_checkpoint`` after a report that waited."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from tests.stories.engines import ON_BOTH

import powertrain
from powertrain import Checkpoint
from powertrain.errors import ConfigError
from powertrain.run import events as ev


def arrive_late(config: dict[str, Any]) -> None:
    """Rank 1 makes each report only after a file says that rank 0 is about to make it; rank 0 then looks whether
    rank 1 has come."""
    marks, rank = Path(os.environ["STORY_DIRECTORY"]), powertrain.get_context().get_world_rank()
    seen = []
    for step in range(3):
        if rank == 1:
            while not (marks / f"rank-0-{step}").exists():
                time.sleep(0.005)
            time.sleep(config.get("delay", 0.0))
            (marks / f"rank-1-{step}").touch()
        else:
            (marks / f"rank-0-{step}").touch()
        powertrain.report({"step": step})
        seen.append((marks / f"rank-1-{step}").exists())
    if rank == 0:
        (marks / "all-seen").write_text(str(all(seen)))


@ON_BOTH
def test_with_report_barrier_no_rank_passes_a_report_before_all_have_made_it(fits: Any, engine: str) -> None:
    outcome = fits.outcome(arrive_late, report_barrier=True)
    assert outcome["raised"] == "", outcome
    assert (fits.directory / "all-seen").read_text() == "True"


def wait_for_word_of_rank_0(config: dict[str, Any]) -> None:
    """Without a barrier rank 0 makes all its reports while rank 1 waits for it before its first."""
    word = Path(os.environ["STORY_DIRECTORY"], "rank-0-is-through")
    if powertrain.get_context().get_world_rank() == 0:
        for step in range(3):
            powertrain.report({"step": step})
        word.touch()
        return
    while not word.exists():
        time.sleep(0.005)
    for step in range(3):
        powertrain.report({"step": step})


def test_without_it_a_report_does_not_wait(fits: Any) -> None:
    assert fits.outcome(wait_for_word_of_rank_0)["raised"] == ""


def test_the_environment_variable_makes_every_report_a_barrier(fits: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POWERTRAIN_REPORT_BARRIER", "1")
        assert fits.outcome(arrive_late)["raised"] == ""
        assert (fits.directory / "all-seen").read_text() == "True"
        assert fits.outcome(wait_for_word_of_rank_0, report_barrier=False)["raised"] == ""
        patch.setenv("POWERTRAIN_REPORT_BARRIER", "maybe")
        with pytest.raises(ConfigError, match="POWERTRAIN_REPORT_BARRIER='maybe'"):
            fits.trainer(arrive_late, name="other").fit()


def test_the_barrier_waits_for_a_rank_that_is_long_in_coming_to_its_first_report(
    fits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a barrier rows close without a rank that has never reported."""
    monkeypatch.setattr("powertrain.run.workers.reports.ABSENT_TIMEOUT_S", 0.0)
    outcome = fits.outcome(arrive_late, report_barrier=True, train_loop_config={"delay": 0.5})
    assert outcome["raised"] == "", outcome
    assert (fits.directory / "all-seen").read_text() == "True"
    assert not [fact for fact in fits.facts("arrive_late") if isinstance(fact, ev.RanksAbsent)]


def ask_after_each_report(config: dict[str, Any]) -> None:
    """Only rank 0 saves; every rank must find what was just reported."""
    rank = powertrain.get_context().get_world_rank()
    assert powertrain.get_checkpoint() is None
    for step in range(3):
        checkpoint = None
        with powertrain.checkpoint_dir() as directory:
            if rank == 0:
                Path(directory, "step").write_text(str(step))
                checkpoint = Checkpoint.from_directory(directory)
            powertrain.report({"step": step}, checkpoint=checkpoint, **config["options"])
        newest = powertrain.get_checkpoint()
        assert newest is not None
        with newest.as_directory() as found:
            assert Path(found, "step").read_text() == str(step)


@pytest.mark.parametrize(
    ("options", "run"),
    [
        ({"checkpoint_upload_mode": "SYNC"}, {}),
        ({"barrier": True}, {}),
        ({}, {"report_barrier": True}),
    ],
    ids=["sync", "barrier", "report_barrier"],
)
def test_get_checkpoint_after_a_report_that_waited_gives_the_newest_one(
    fits: Any, options: dict[str, Any], run: dict[str, Any]
) -> None:
    outcome = fits.outcome(ask_after_each_report, train_loop_config={"options": options}, **run)
    assert outcome["raised"] == "", outcome["message"]
