"""A run that grows trains until it has every slot for its new size: the real controller on a scripted engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from tests.run.scripted_run import Run
from tests.support.scripted_engine import ScriptedClaim, ScriptedEngine
from tests.support.scripted_worker import ScriptedWorker

from powertrain.run import events as ev
from powertrain.run.scaling import policy, reservation


@pytest.fixture(autouse=True)
def _no_grow_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "GROW_DELAY_S", 0.0)


class Loop:
    """Trains, and can save at each boundary, until ``enough`` is set; counts the rows of rank 0 in each attempt."""

    def __init__(self) -> None:
        self.enough = threading.Event()
        self.fails = threading.Event()
        self.rows: dict[int, int] = {}
        self.sizes: dict[int, int] = {}

    def __call__(self, worker: ScriptedWorker) -> None:
        self.sizes[worker.attempt] = worker.world_size
        while not self.enough.is_set():
            time.sleep(0.001)
            if worker.attempt == 0 and worker.rank == 0 and self.fails.is_set():
                raise RuntimeError("as the test wants")
            files = {f"{worker.rank}.txt": b"x"} if worker.should_checkpoint() else None
            worker.report({"row": worker.row + 1}, files=files)
            if worker.rank == 0:
                self.rows[worker.attempt] = self.rows.get(worker.attempt, 0) + 1

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait within a thread of the test until ``condition`` holds."""
        while not condition() and not self.enough.is_set():
            time.sleep(0.001)

    def wait_for_rows(self, attempt: int, more: int) -> None:
        goal = self.rows.get(attempt, 0) + more
        self.wait_for(lambda: self.rows.get(attempt, 0) >= goal)


class LateEngine(ScriptedEngine):
    """Grants the first request at once, and leaves all others to the test."""

    def __init__(self, play: Loop) -> None:
        self.late: list[ScriptedClaim] = []
        super().__init__(play, on_request=lambda _, claim: self._answer(claim))
        self.tell_capacity(2)

    def _answer(self, claim: ScriptedClaim) -> None:
        if len(self.claims) == 1:
            self.grant(claim, claim.count)
        else:
            self.late.append(claim)


def go(run: Run, engine: LateEngine, play: Loop, act: Callable[[], None]) -> str:
    """Run with room for four workers from the tenth row on, and do ``act`` beside it."""

    problems: list[BaseException] = []

    def beside() -> None:
        try:
            play.wait_for(lambda: play.rows.get(0, 0) >= 10)
            engine.tell_capacity(4)
            play.wait_for(lambda: len(engine.late) > 0)
            act()
        except BaseException as problem:
            problems.append(problem)
        finally:
            play.enough.set()

    acting = threading.Thread(target=beside)
    acting.start()
    try:
        state = run.go(engine, 4, min_workers=1, max_failures=1).state
    finally:
        play.enough.set()
        acting.join()
    for problem in problems:
        raise problem
    return state


def test_ranks_train_until_all_additional_slots_are_granted(run: Run) -> None:
    play = Loop()
    engine = LateEngine(play)

    def grant_one_after_the_other() -> None:
        for _ in range(2):
            play.wait_for_rows(0, 20)
            assert play.sizes == {0: 2}, "two ranks train on"
            engine.grant(engine.late[0], 1)
        play.wait_for_rows(1, 5)

    assert go(run, engine, play, grant_one_after_the_other) == "finished"
    assert play.sizes == {0: 2, 1: 4}
    assert [claim.count for claim in engine.late] == [2]
    assert [event.world_size for event in run.watcher.all_of(ev.Resized)] == [4]


def test_ranks_are_never_stopped_for_slots_that_do_not_come(run: Run) -> None:
    play = Loop()
    engine = LateEngine(play)
    assert go(run, engine, play, lambda: play.wait_for_rows(0, 100)) == "finished"
    assert play.sizes == {0: 2}
    assert run.watcher.all_of(ev.Resized) == []


def test_a_request_for_room_that_is_gone_is_withdrawn(run: Run) -> None:
    play = Loop()
    engine = LateEngine(play)

    def room_goes() -> None:
        (slot,) = engine.grant(engine.late[0], 1)
        engine.tell_capacity(2)
        play.wait_for(lambda: not engine.is_held(slot))
        play.wait_for_rows(0, 20)

    assert go(run, engine, play, room_goes) == "finished"
    assert engine.late[0].withdrawn
    assert play.sizes == {0: 2}


@pytest.mark.parametrize("is_drained", [True, False], ids=["drained", "lost"])
def test_a_reserved_slot_that_goes_is_requested_again_and_no_rank_notices(run: Run, is_drained: bool) -> None:
    play = Loop()
    engine = LateEngine(play)

    def lose_one() -> None:
        (slot,) = engine.grant(engine.late[0], 1)
        if is_drained:
            engine.drain(slot, 0.0)
        else:
            engine.lose(slot)
        play.wait_for(lambda: len(engine.late) == 2)
        assert play.sizes == {0: 2}
        engine.grant(engine.late[1], engine.late[1].count)
        play.wait_for_rows(1, 5)

    assert go(run, engine, play, lose_one) == "finished"
    assert [claim.count for claim in engine.late] == [2, 2]
    assert play.sizes == {0: 2, 1: 4}
    assert run.watcher.all_of(ev.Lost) == []
    assert run.watcher.all_of(ev.Notified) == []


def test_a_failed_attempt_keeps_its_size_and_grows_afterwards(run: Run) -> None:
    play = Loop()
    engine = LateEngine(play)

    def fail_with_one_more() -> None:
        engine.grant(engine.late[0], 1)
        play.wait_for_rows(0, 5)
        play.fails.set()
        play.wait_for(lambda: len(engine.late) == 2)
        engine.grant(engine.late[1], 1)
        play.wait_for_rows(2, 5)

    assert go(run, engine, play, fail_with_one_more) == "finished"
    assert play.sizes == {0: 2, 1: 2, 2: 4}
    assert [claim.count for claim in engine.late] == [2, 1], "the granted slot is kept"
    assert [event.world_size for event in run.watcher.all_of(ev.Resized)] == [4]


def test_a_lost_worker_is_replaced_by_a_reserved_slot(run: Run) -> None:
    play = Loop()
    engine = LateEngine(play)

    def lose_a_worker() -> None:
        engine.grant(engine.late[0], 1)
        play.wait_for_rows(0, 5)
        engine.lose(engine.claims[0].slots[0])
        play.wait_for_rows(1, 5)

    assert go(run, engine, play, lose_a_worker) == "finished"
    assert play.sizes[1] == 2
    assert run.watcher.all_of(ev.Resized) == []


def test_a_run_grows_by_what_it_got_when_the_rest_does_not_come(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reservation, "_PROGRESS_TIMEOUT_S", 2.0)
    play = Loop()
    engine = LateEngine(play)

    def grant_one() -> None:
        engine.grant(engine.late[0], 1)
        play.wait_for_rows(1, 5)

    assert go(run, engine, play, grant_one) == "finished"
    assert play.sizes == {0: 2, 1: 3}
    assert engine.late[0].withdrawn


@pytest.mark.parametrize("is_refused", [True, False], ids=["refused", "overdue"])
def test_a_request_that_is_not_met_is_made_again_later(
    run: Run, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reservation, "_PROGRESS_TIMEOUT_S", 600.0 if is_refused else 0.1)
    monkeypatch.setattr(reservation, "_RETRY_RANGE_S", (0.05, 0.1))
    play = Loop()
    engine = LateEngine(play)

    def wait_for_the_next() -> None:
        if is_refused:
            engine.refuse(engine.late[0], "the script has no such slot")
        play.wait_for(lambda: len(engine.late) >= 2)
        granted: set[str] = set()

        def grant_the_newest() -> bool:
            """On a busy machine a request may be overdue before it is granted; then the next one is."""
            newest = engine.late[-1]
            if newest.id not in granted and engine.grant(newest, 2):
                granted.add(newest.id)
            return bool(play.rows.get(1))

        play.wait_for(grant_the_newest)
        play.wait_for_rows(1, 5)

    assert go(run, engine, play, wait_for_the_next) == "finished"
    assert play.sizes == {0: 2, 1: 4}


def test_a_run_that_ends_gives_reserved_slots_back_before_it_waits_for_storage(run: Run) -> None:
    play = Loop()
    engine = LateEngine(play)
    held: list[bool] = []

    def stop() -> None:
        (slot,) = engine.grant(engine.late[0], 1)
        play.wait_for_rows(0, 5)
        run.controller.notify("asked to end")
        play.wait_for(lambda: not engine.is_held(slot))
        held.append(engine.is_held(slot))

    assert go(run, engine, play, stop) == "preempted"
    assert held == [False]
    assert engine.late[0].withdrawn
