"""Programs in the manner of PyTorch's examples and of its tutorial of DDP survive the deaths of their ranks.

They are written as for Ray Train, with its imports renamed, and know nothing of the stories: each saves what it needs
and goes on from there. Killed three times on the way, it must end with the very weights of an undisturbed run.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from powertrain.run import events as ev
from powertrain.testing import faults

PROGRAMS = Path(__file__).parent / "programs_of_examples"


@dataclass(frozen=True)
class Moment:
    """When, and which, ranks of an attempt are killed."""

    #: After so many commits of this attempt; 0 for as soon as the training function is called.
    commits: int
    ranks: tuple[int, ...]


#: One for each attempt: while nothing is saved; the rank that saves; all at once. Six saves at most come before the
#: last kill (see below), and each program makes at least seven.
MOMENTS = (Moment(0, (1,)), Moment(1, (0,)), Moment(2, (0, 1)))


def hold_late_attempts(directory: Path) -> dict[str, str]:
    """Variables with which rank 1 stops (SIGSTOP) at the second report after its attempt's moment, if it gets there.

    Usually the kill is faster. Where it is not, the attempt waits for it: none is over before its ranks are killed.
    """
    stops = [
        faults.Fault(faults.Step(rank=1, attempt=attempt, step=moment.commits + 2), faults.Stop())
        for attempt, moment in enumerate(MOMENTS)
    ]
    return faults.environment(*stops, directory=directory)


def kill_ranks(driver: Any, name: str, attempt: int, moment: Moment) -> None:
    """Wait for the moment, kill by the pids in the journal, and wait until the failure is there as well."""
    driver.await_facts(name, ev.TrainingStarted, attempt=attempt)
    if moment.commits:
        driver.await_facts(name, ev.Committed, moment.commits, attempt=attempt)
    started = driver.await_facts(name, ev.WorkerStarted, 2, attempt=attempt)
    pids = {fact.rank: fact.pid for fact in started}
    for rank in moment.ranks:
        with contextlib.suppress(ProcessLookupError):  # it was ended because of the one before
            os.kill(pids[rank], signal.SIGKILL)
    driver.await_facts(name, ev.Failed, attempt=attempt)


def outcome_of(driver: Any) -> dict[str, Any]:
    """What the program printed last."""
    assert driver.ended() == 0, driver.output
    outcome: dict[str, Any] = json.loads(driver.output.splitlines()[-1])
    return outcome


def remove_what_killed_ranks_left(temporary: Path) -> None:
    """SIGKILL gives a rank no time to leave its ``with tempfile.TemporaryDirectory()``."""
    for path in temporary.glob("tmp????????"):
        shutil.rmtree(path)


@pytest.mark.parametrize("program", ["mnist", "mingpt", "imagenet", "ddp_tutorial"])
def test_a_program_whose_ranks_are_killed_three_times_ends_with_the_weights_of_an_undisturbed_one(
    stories: Any, program: str
) -> None:
    def start(name: str, variables: dict[str, str]) -> Any:
        options = ("--storage", str(stories.storage), "--name", name)
        return stories.start_program(PROGRAMS / f"{program}.py", *options, variables=variables)

    expected = outcome_of(start("undisturbed", {}))
    driver = start("disturbed", hold_late_attempts(stories.root / "chronicle"))
    for attempt, moment in enumerate(MOMENTS):
        kill_ranks(driver, "disturbed", attempt, moment)
    assert outcome_of(driver) == expected

    facts = stories.facts("disturbed")
    failed = [fact for fact in facts if isinstance(fact, ev.Failed)]
    assert [(fact.attempt, fact.decision) for fact in failed] == [(0, "retry"), (1, "retry"), (2, "retry")]
    for fact, moment in zip(failed, MOMENTS, strict=True):
        assert fact.failures[0].kind == "signal", fact
        assert fact.failures[0].rank in moment.ranks, fact
    starts = [fact.first_row for fact in facts if isinstance(fact, ev.AttemptStarted)]
    assert starts[2] > 1, "the third attempt goes on from what the second has committed"
    assert starts[3] > starts[2] + 1, "the fourth from what the third has"
    rows = [fact.row for fact in stories.facts("undisturbed") if isinstance(fact, ev.Committed)]
    assert [fact.row for fact in facts if isinstance(fact, ev.Committed)] == rows, "each row once"
    remove_what_killed_ranks_left(stories.temporary)
