"""Ends of ranks: the exit code that a shell would see, ends of whole scripts, and when the next attempt begins."""

from __future__ import annotations

import signal

import pytest
from tests.run.scripted_run import Run
from tests.support.scripted_engine import ScriptedEngine
from tests.support.scripted_worker import ScriptedWorker

from powertrain.engine.base import Exited, Slot
from powertrain.run import events as ev
from powertrain.run.health import failures
from powertrain.run.workers import placement
from powertrain.run.workers.attempt import Attempt, Member
from powertrain.wire.from_worker import Beat
from powertrain.wire.values import ErrorReport


@pytest.fixture
def member() -> Member:
    [place] = placement.arrange([Slot(id="s", host="here", address="127.0.0.1")])
    return Member(place, b"", Attempt(0, [place], 1), greeted=True)


@pytest.mark.parametrize(("code", "seen"), [(4, 4), (0, 1), (-signal.SIGKILL, 137), (-signal.SIGTERM, 143)])
def test_the_exit_code_of_a_process_that_ended_without_a_word(member: Member, code: int, seen: int) -> None:
    assert failures.died(member, Exited(member.placement.slot, 42, code)).exit_code == seen


@pytest.mark.parametrize(
    ("kind", "message", "seen"),
    [("exit", "3", 3), ("exit", "259", 3), ("exit", "-1", 255), ("exit", "no data", 1), ("raised", "7", 1)],
)
def test_the_exit_code_of_a_rank_that_has_said_why(
    member: Member, kind: str, message: str, seen: int
) -> None:
    report = ErrorReport(type="SystemExit", message=message, traceback="")
    assert failures.raised(member, report, kind).exit_code == seen


def test_exit_code_0_without_a_word_is_a_good_end_of_a_script(run: Run) -> None:
    def play(worker: ScriptedWorker) -> None:
        worker.die(0)

    assert run.go(ScriptedEngine(play), runs_scripts=True).state == "finished"


def test_exit_code_0_without_a_word_is_a_failure_of_a_function(run: Run) -> None:
    def play(worker: ScriptedWorker) -> None:
        worker.die(0)

    assert run.go(ScriptedEngine(play)).state == "failed"


def test_a_program_that_has_made_optimizer_steps_is_tried_again_at_once(run: Run) -> None:
    def play(worker: ScriptedWorker) -> None:
        if worker.attempt == 0:
            worker.service.send_now(Beat(reports=0, steps=1, batches=0, idle=0.0))
            worker.meet()  # by then the controller has read it
            worker.die(1)

    assert run.go(ScriptedEngine(play), workers=1, max_failures=1).state == "finished"
    (failed,) = run.watcher.all_of(ev.Failed)
    assert failed.delay == 0.0
