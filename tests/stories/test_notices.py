"""Runs that are asked to leave: by a signal to the driver, to a rank, to every process of a job.

Signals to a rank and to the driver play on the cluster too. A rank that is asked to end takes a run of a fixed size
with it on one machine, which has no other place for it, and not on a cluster. A job of a batch scheduler is one
machine's.
"""

from __future__ import annotations

import os
import pty
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import elastic
import pytest
import story
from tests.stories.engines import ON_BOTH, ON_ONE_MACHINE, on, on_cases
from tests.stories.going import changes_of_size

from powertrain.result.result import Result
from powertrain.run import events as ev
from powertrain.torch import TorchTrainer


def steps_made(directory: Path, ranks: int = 2) -> list[int]:
    return [int((directory / f"steps-{rank}").read_text()) for rank in range(ranks)]


def when_at(step: int, act: Callable[[], None], directory: Path) -> threading.Thread:
    """Act once rank 0 has made so many steps."""

    def wait() -> None:
        deadline = time.monotonic() + story.PATIENCE
        while time.monotonic() < deadline:
            made = directory / "steps-0"
            if made.exists() and int(made.read_text() or 0) >= step:
                act()
                return
            time.sleep(0.005)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def send(directory: Path, rank: int, number: signal.Signals = signal.SIGTERM, attempt: int = 0) -> None:
    os.kill(int((directory / f"pid-{rank}-{attempt}").read_text()), number)


@pytest.mark.parametrize("saves", ["registered", "asks", "ray's idiom"])
def test_a_rank_that_is_asked_to_end_leaves_a_checkpoint_of_its_last_step(fits: Any, saves: str) -> None:
    rank = random.Random(saves).randrange(2)
    trainer = fits.trainer(elastic.until_told, kind=TorchTrainer, train_loop_config={"saves": saves})
    asking = when_at(7, lambda: send(fits.directory, rank), fits.directory)
    outcome = story.outcome_of(trainer.fit)
    asking.join()
    assert outcome["raised"] == "PreemptedError", outcome
    assert outcome["message"].startswith(
        f"the run was preempted and can be resumed: rank {rank} was asked to end by SIGTERM"
    )
    run = fits.directory / "storage" / "until_told"
    facts = fits.facts("until_told")
    (committed,) = [fact for fact in facts if isinstance(fact, ev.Committed)]
    made = steps_made(fits.directory)
    assert [made[0] - committed.row, made[1] - committed.row] == [0, 0], "no step is redone"
    assert isinstance(facts[-1], ev.Ended)
    assert facts[-1].state == "preempted"
    assert Result.from_path(run).state == "preempted"


def test_what_cannot_be_saved_ends_at_the_newest_commit(fits: Any) -> None:
    trainer = fits.trainer(elastic.until_told, kind=TorchTrainer, train_loop_config={"saves": "no"})
    asking = when_at(5, lambda: send(fits.directory, 0), fits.directory)
    outcome = story.outcome_of(trainer.fit)
    asking.join()
    assert outcome["raised"] == "PreemptedError"
    facts = fits.facts("until_told")
    (notified,) = [fact for fact in facts if isinstance(fact, ev.Notified)]
    assert facts[-1].time - notified.time < 20, (
        "it does not wait for what cannot come until its grace is over"
    )


@pytest.mark.smoke
def test_a_preempted_run_goes_on_where_it_was_when_it_is_started_again(fits: Any) -> None:
    config = {"saves": "asks", "steps": 30}
    trainer = fits.trainer(elastic.until_told, kind=TorchTrainer, train_loop_config=config)
    asking = when_at(9, lambda: send(fits.directory, 1), fits.directory)
    assert story.outcome_of(trainer.fit)["raised"] == "PreemptedError"
    asking.join()
    left = steps_made(fits.directory)[0]
    outcome = fits.outcome(elastic.until_told, kind=TorchTrainer, train_loop_config=config)
    assert (outcome["raised"], outcome["metrics"]) == ("", {"steps": left + 30})


@on("ray")
def test_a_cluster_has_another_place_for_the_rank_that_is_asked_to_end(fits: Any) -> None:
    config = {"saves": "asks", "steps": 30}
    trainer = fits.trainer(elastic.until_told, kind=TorchTrainer, train_loop_config=config)
    asking = when_at(9, lambda: send(fits.directory, 1), fits.directory)
    outcome = story.outcome_of(trainer.fit)
    asking.join()
    facts = fits.facts("until_told")
    (committed,) = [fact for fact in facts if isinstance(fact, ev.Committed)]
    started = [fact for fact in facts if isinstance(fact, ev.AttemptStarted)]
    assert [(fact.world_size, fact.first_row) for fact in started] == [(2, 1), (2, committed.row + 1)]
    assert (outcome["raised"], outcome["metrics"]) == ("", {"steps": committed.row + 30}), "no step is redone"
    assert [fact.ranks for fact in facts if isinstance(fact, ev.Lost)] == [(1,)]


@ON_BOTH
def test_an_elastic_run_goes_on_without_the_rank_that_is_asked_to_end(fits: Any, engine: str) -> None:
    config = {"saves": "asks", "steps": 150}
    trainer = fits.trainer(elastic.until_told, kind=TorchTrainer, workers=(1, 3), train_loop_config=config)
    asking = when_at(9, lambda: send(fits.directory, 2), fits.directory)
    outcome = story.outcome_of(trainer.fit)
    asking.join()
    assert outcome["raised"] == ""
    assert changes_of_size(fits, "until_told") in ([[3, 2], [3, 2, 3]] if engine == "ray" else [[3, 2]]), (
        "on a cluster it may have grown again by the end"
    )


def test_processes_that_a_rank_has_forked_are_ended_by_a_signal_as_ever(fits: Any) -> None:
    outcome = fits.outcome(terminate_a_child, workers=1)
    assert (outcome["raised"], outcome["return_value"]) == ("", -signal.SIGTERM)


def terminate_a_child() -> int:
    import multiprocessing

    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    child.terminate()
    child.join()
    assert child.exitcode is not None
    return child.exitcode


# --------------------------------------------------------------------------- drivers of their own


@on_cases(
    ("engine", "number"),
    [
        *((engine, signal.SIGTERM) for engine in ("local", "inline", "torchrun", "ray")),
        *((engine, signal.SIGHUP) for engine in ("local", "inline", "torchrun")),
    ],
)
def test_a_signal_to_the_driver_saves_and_ends_with_143(
    stories: Any, engine: str, number: signal.Signals
) -> None:
    driver = stories.start("leave_when_asked", engine)
    driver.await_told("steps-0")
    driver.process.send_signal(number)
    code = driver.ended()
    # torchrun says in its own way that it was asked to end.
    assert code == (1 if engine == "torchrun" else 143), driver.output
    facts = stories.facts("leaves")
    assert facts[-1].state == "preempted"
    (committed,) = [fact for fact in facts if isinstance(fact, ev.Committed)]
    assert int((stories.root / "steps-0").read_text()) == committed.row


def test_a_run_whose_terminal_is_closed_saves_and_ends(stories: Any) -> None:
    ours, theirs = pty.openpty()
    try:
        driver = stories.start("leave_when_asked", "local", terminal=theirs, shows_there=True)
        driver.await_told("steps-0")
    finally:
        os.close(theirs)
        os.close(ours)
    assert driver.ended() == 143
    facts = stories.facts("leaves")
    assert facts[-1].state == "preempted"
    (committed,) = [fact for fact in facts if isinstance(fact, ev.Committed)]
    assert int((stories.root / "steps-0").read_text()) == committed.row


@pytest.mark.parametrize("scenario", ["leave_when_asked", "leave_a_loader_when_asked"])
def test_a_signal_to_every_process_of_the_job_is_one_notice(stories: Any, scenario: str) -> None:
    """As a batch scheduler sends it: driver, warm server, uploader, ranks, their loaders' processes, all at once."""
    driver = stories.start(scenario, "local")
    driver.await_told("steps-0", "steps-1")
    for pid in stories._processes():
        os.kill(pid, signal.SIGTERM)
    assert driver.ended() == 143, driver.output
    facts = stories.facts("leaves")
    assert facts[-1].state == "preempted"
    assert [fact for fact in facts if isinstance(fact, ev.Committed)]
    assert not [fact for fact in facts if isinstance(fact, (ev.Failed, ev.Lost))]


def test_slurms_grace_signal_is_a_notice(stories: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_JOB_ID", "1")
        driver = stories.start("leave_when_asked", "local")
    driver.await_told("steps-0")
    driver.process.send_signal(signal.SIGUSR1)
    assert driver.ended() == 143, driver.output
    assert "SIGUSR1" in stories.facts("leaves")[-1].reason


@ON_ONE_MACHINE
def test_a_second_signal_ends_a_run_that_never_comes_to_a_boundary(stories: Any, engine: str) -> None:
    driver = stories.start("never_at_a_boundary", engine)
    driver.await_told("rank 0 trains")
    driver.process.send_signal(signal.SIGTERM)
    driver.await_fact("killed", "Notified")
    time.sleep(0.4)  # what comes sooner is the same one
    driver.process.send_signal(signal.SIGTERM)
    outcome = driver.outcome()
    assert outcome["raised"] == "PreemptedError"
