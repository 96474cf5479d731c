"""Who asks a run from outside: the real controller on a scripted engine, and what it says in words."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.run.scripted_run import Run
from tests.run.test_controller import waits
from tests.run.test_steering import Elastic, at_row
from tests.support.scripted_engine import ScriptedEngine
from tests.support.scripted_worker import ScriptedWorker

from powertrain.engine.base import Inspection, Slot
from powertrain.run import events as ev
from powertrain.run.lifecycle import RunState
from powertrain.run.remote import inspections, protocol, status
from powertrain.run.remote.protocol import (
    Answer,
    ControlClient,
    Description,
    LookAround,
    RankSeen,
    StopRequest,
)
from powertrain.run.workers.attempt import TRAINING, Attempt
from powertrain.wire.values import ProcessStack
from powertrain.worker.service.service import Service


class RunClient:
    """A client of the run that keeps the replies."""

    def __init__(self, run: Run, asked: protocol.Request, then: Callable[[], None] = lambda: None) -> None:
        self.replies: list[protocol.Reply] = []
        self._run, self._request, self._then = run, asked, then
        self._thread = threading.Thread(target=self._receive)

    def __call__(self) -> None:
        self._client = ControlClient()
        self._run.controller.post_request(self._request, self._client)
        self._thread.start()

    def _receive(self) -> None:
        self.replies += self._client.replies()
        self._then()

    @property
    def answer(self) -> Answer:
        self._thread.join(10)
        last = self.replies[-1]
        assert isinstance(last, Answer)
        return last

    def parts(self, kind: type[Any]) -> list[Any]:
        return [part for part in self.replies if isinstance(part, kind)]


def reports_then_hangs(worker: ScriptedWorker) -> None:
    worker.report({"row": 1})
    worker.hang()


# --------------------------------------------------------------------------- stop


def test_a_run_that_is_asked_to_stop_saves_at_the_boundary_and_ends_as_stopped(run: Run) -> None:
    play = Elastic(steps=10_000, every=10_000, asks=True, pace=0.001)
    asking = RunClient(run, StopRequest(by="me@here pid 7"))
    at_row(run, 5, asking)
    outcome = run.go(ScriptedEngine(play))
    assert (outcome.state, outcome.reason) == ("stopped", "powertrain stop, asked by me@here pid 7")
    assert not outcome.interrupted, "fit() returns"
    (committed,) = run.watcher.all_of(ev.Committed)
    assert {play.of(0, 0)[-1], play.of(0, 1)[-1]} == {committed.row}, "nothing is redone"
    assert run.watcher.all_of(ev.Stopping)[0].cause == "asked"
    assert asking.answer.ok


def test_a_run_that_is_not_to_wait_for_its_boundary_longer_is_ended(run: Run) -> None:
    asking = RunClient(run, StopRequest(by="me", within=0.2))
    at_row(run, 1, asking)
    began = time.monotonic()
    assert run.go(ScriptedEngine(reports_then_hangs)).state == "stopped"
    assert time.monotonic() - began < 20.0
    assert asking.answer.message.endswith("Should it not come to one within 0.2 s, it is ended.")


def test_more_patience_does_not_lengthen_a_grace_that_runs(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("powertrain.run.ending.INTERRUPT_TIMEOUT_S", 0.2)
    asking = RunClient(run, StopRequest(by="me", within=600.0))
    run.watcher.on_event = lambda event: asking() if isinstance(event, ev.Stopping) else None
    at_row(run, 1, lambda: run.controller.interrupt())
    assert run.go(ScriptedEngine(reports_then_hangs)).interrupted
    assert asking.answer.ok


def test_now_ends_what_was_asked_to_stop_before(run: Run) -> None:
    now = RunClient(run, StopRequest(by="me", now=True))
    first = RunClient(run, StopRequest(by="you"), then=now)
    at_row(run, 1, first)
    outcome = run.go(ScriptedEngine(reports_then_hangs))
    assert (outcome.state, outcome.reason) == ("stopped", "powertrain stop, asked by you")
    assert (
        now.answer.message == "The run 'scripted' ends at once, wherever its ranks are. It has no checkpoint."
    )


def test_a_run_that_waits_for_slots_ends_at_once(run: Run) -> None:
    asking = RunClient(run, StopRequest(by="me", now=True))

    def ask(event: ev.Event) -> None:
        if isinstance(event, ev.SlotsWaited):
            asking()

    run.watcher.on_event = ask
    assert run.go(ScriptedEngine(reports_then_hangs, on_request=waits)).state == "stopped"
    assert asking.answer.message == "The run 'scripted' is not training now (waiting), and ends at once."


def test_a_rank_that_raises_while_it_is_stopped_is_a_failure(run: Run) -> None:
    asked = threading.Event()

    def raises(worker: ScriptedWorker) -> None:
        worker.report({"row": 1})
        worker.wait_for(asked)
        raise ValueError("its own fault")

    at_row(run, 1, RunClient(run, StopRequest(by="me"), then=asked.set))
    assert run.go(ScriptedEngine(raises)).state == "failed"


@pytest.mark.parametrize(
    ("asked", "can_be_ended", "said"),
    [
        (
            StopRequest(by=""),
            True,
            "stops at its next boundary, and saves there if its loop can. Its newest checkpoint is",
        ),
        (
            StopRequest(by="", now=True),
            True,
            "ends at once, wherever its ranks are. Its newest checkpoint is that of row 3.",
        ),
        (
            StopRequest(by="", now=True),
            False,
            "stops at its next boundary, .* that it did not start, and cannot end.",
        ),
    ],
)
def test_what_will_come_of_it_is_said_before(asked: StopRequest, can_be_ended: bool, said: str) -> None:
    attempt = Attempt(0, [], 1)
    attempt.phase = TRAINING
    state = RunState(state="training", name="digits", committed=((3, "checkpoint_000003"),))
    words = status.stop_prospect(state, attempt, asked, ends_in_place=False, can_be_ended=can_be_ended)
    assert re.match(f"The run 'digits' {said}", words), words


@pytest.mark.parametrize(
    ("now", "said"), [(False, "only its ending is left"), (True, "what is left of its ending is cut short")]
)
def test_a_run_whose_training_is_over_says_so(now: bool, said: str) -> None:
    words = status.stop_prospect(
        RunState(name="digits"), None, StopRequest(by="", now=now), ends_in_place=True, can_be_ended=True
    )
    assert words == f"The training of 'digits' is over already: {said}."


# --------------------------------------------------------------------------- stacks


def test_every_rank_says_what_its_threads_are_doing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspections, "_ANSWER_TIMEOUT_S", 60.0)  # or a slow rank is looked at from outside
    monkeypatch.setattr(inspections, "INSPECTION_TIMEOUT_S", 60.0)
    asking = RunClient(run, LookAround(), then=lambda: run.interrupt())
    at_row(run, 1, asking)
    run.go(ScriptedEngine(Elastic(steps=10_000, every=10_000, pace=0.001)))
    (stands,) = asking.parts(Description)
    assert (stands.state, stands.workers) == ("training", 2)
    assert sorted(seen.rank for seen in asking.parts(RankSeen)) == [0, 1]
    assert all(seen.processes[0].threads for seen in asking.parts(RankSeen))
    assert asking.answer == Answer(ok=True)


def test_only_ranks_that_there_are_can_be_named(run: Run) -> None:
    some = RunClient(run, LookAround(ranks=(1,)), then=lambda: run.interrupt())
    wrong = RunClient(run, LookAround(ranks=(0, 5)), then=some)
    at_row(run, 1, wrong)
    run.go(ScriptedEngine(Elastic(steps=10_000, every=10_000, pace=0.001)))
    assert wrong.answer == Answer(ok=False, message="There is no rank 5 in attempt 0: its last is rank 1.")
    assert [seen.rank for seen in some.parts(RankSeen)] == [1]


class Blind(ScriptedEngine):
    """An engine that takes its time to look at a slot."""

    def __init__(self, play: Any, may_look: threading.Event) -> None:
        super().__init__(play)
        self._may_look = may_look

    def inspect(self, slot: Slot, stacks: bool = False) -> Inspection:
        self._may_look.wait(10)
        return Inspection(7, "stopped", (ProcessStack(pid=7, title="rank 1", state="stopped"),))


@pytest.fixture
def mute(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Rank 1 does not answer before this is set: its service thread stands still."""
    released, answers = threading.Event(), Service._stacks

    def silent(self: Service, ask: int) -> Any:
        if self._rank == 1:
            released.wait(10)
        return answers(self, ask)

    monkeypatch.setattr(Service, "_stacks", silent)
    monkeypatch.setattr(inspections, "_ANSWER_TIMEOUT_S", 1.0)
    return released


def test_a_rank_that_does_not_answer_is_looked_at_from_outside(run: Run, mute: threading.Event) -> None:
    def over() -> None:
        mute.set()
        run.interrupt()

    may_look = threading.Event()
    may_look.set()
    asking = RunClient(run, LookAround(), then=over)
    at_row(run, 1, asking)
    run.go(Blind(Elastic(steps=10_000, every=10_000, pace=0.001), may_look))
    assert asking.answer == Answer(ok=True)
    states = {seen.rank: seen.processes[0].state for seen in asking.parts(RankSeen)}
    assert states[1] == "stopped"


def test_a_rank_that_neither_answers_nor_can_be_seen_is_named_at_the_deadline(
    run: Run,
    mute: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inspections, "INSPECTION_TIMEOUT_S", 4.0)
    may_look = threading.Event()

    def over() -> None:
        mute.set()
        may_look.set()
        run.interrupt()

    asking = RunClient(run, LookAround(), then=over)
    at_row(run, 1, asking)
    run.go(Blind(Elastic(steps=10_000, every=10_000, pace=0.001), may_look))
    assert asking.answer == Answer(ok=True, message="Rank 1 did not answer within 4 s.")
    assert [seen.rank for seen in asking.parts(RankSeen)] == [0]


def test_a_run_without_ranks_has_no_stacks(run: Run) -> None:
    asking = RunClient(run, LookAround(), then=lambda: run.interrupt())

    def ask(event: ev.Event) -> None:
        if isinstance(event, ev.SlotsWaited):
            asking()

    run.watcher.on_event = ask
    run.go(ScriptedEngine(reports_then_hangs, on_request=waits))
    assert asking.answer == Answer(ok=False, message="The run 'scripted' has no ranks now: it is waiting.")
