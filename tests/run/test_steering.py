"""Notices, resizes and restarts: the real controller on a scripted engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.run.scripted_run import Run
from tests.support.scripted_engine import ScriptedEngine
from tests.support.scripted_worker import ScriptedWorker

from powertrain.checkpoint import committed as checkpoint_committed
from powertrain.run import events as ev
from powertrain.run.metrics.store import MetricsStore
from powertrain.run.remote import protocol
from powertrain.run.scaling import policy, steering


class AnswerHandler(protocol.ControlClient):
    """Passes the answer on."""

    def __init__(self, take: Callable[[str, bool], Any]) -> None:
        super().__init__()
        self._take = take

    def answer(self, message: str, ok: bool = True) -> None:
        self._take(message, ok)


def ask_to_resize(run: Run, workers: int, take: Callable[[str, bool], Any]) -> None:
    run.controller.post_request(protocol.ResizeRequest(workers=workers), AnswerHandler(take))


class Elastic:
    """A loop of ``steps`` rows that saves every ``every`` rows; counts what each attempt did.

    With ``lingers`` the second half of attempt 0 takes 0.2 s a row, so that a controller that is held up for a second
    still stops it before it ends.
    """

    def __init__(
        self, steps: int, every: int, asks: bool = False, pace: float = 0.0, lingers: bool = False
    ) -> None:
        self.steps, self.every, self.asks, self.pace = steps, every, asks, pace
        self.lingers = lingers
        self.rows: list[tuple[int, int, int]] = []
        self.before: dict[tuple[int, int], threading.Event] = {}

    def __call__(self, worker: ScriptedWorker) -> None:
        while worker.row < self.steps:
            is_late = self.lingers and worker.attempt == 0 and worker.row >= self.steps // 2
            time.sleep(0.2 if is_late else self.pace)
            save = worker.row + 1 if (worker.row + 1) % self.every == 0 else 0
            if self.asks and worker.should_checkpoint():
                save = worker.row + 1
            self.rows.append((worker.attempt, worker.rank, worker.row + 1))
            files = {f"{worker.rank}.txt": b"x"} if save else None
            worker.report({"row": worker.row + 1}, files=files)

    def of(self, attempt: int, rank: int = 0) -> list[int]:
        return [row for a, r, row in self.rows if (a, r) == (attempt, rank)]

    @property
    def attempts(self) -> list[int]:
        return sorted({attempt for attempt, _, _ in self.rows})


def with_capacity(play: Any, count: int) -> ScriptedEngine:
    engine = ScriptedEngine(play)
    engine.tell_capacity(count)
    return engine


def sizes(run: Run) -> list[int]:
    return [event.world_size for event in run.watcher.all_of(ev.AttemptStarted)]


@pytest.fixture
def _no_grow_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "GROW_DELAY_S", 0.0)


def at_row(run: Run, row: int, act: Any) -> None:
    """Do something once row ``row`` has closed."""
    done: list[int] = []

    def look(closed: int) -> None:
        if closed >= row and not done:
            done.append(closed)
            act()

    run.watcher.on_row = look


# --------------------------------------------------------------------------- notices


def test_a_notice_to_the_driver_ends_the_run_at_a_saved_boundary(run: Run) -> None:
    play = Elastic(steps=10_000, every=10_000, asks=True, pace=0.001)
    at_row(run, 5, lambda: run.controller.notify("the driver was asked to end"))
    outcome = run.go(ScriptedEngine(play))
    assert outcome.state == "preempted"
    (committed,) = run.watcher.all_of(ev.Committed)
    assert {play.of(0, 0)[-1], play.of(0, 1)[-1]} == {committed.row}, "nothing is redone"
    assert outcome.reason == "the driver was asked to end"


def test_a_loop_that_cannot_save_ends_at_its_newest_commit(run: Run) -> None:
    play = Elastic(steps=10_000, every=3, pace=0.001)
    at_row(run, 5, lambda: run.controller.notify("the driver was asked to end"))
    outcome = run.go(ScriptedEngine(play))
    assert outcome.state == "preempted"
    assert run.watcher.all_of(ev.Committed)
    assert play.of(0, 0)[-1] == play.of(0, 1)[-1], "both ranks end at the same boundary"


def test_a_second_notice_ends_a_run_that_does_not_come_to_a_boundary(run: Run) -> None:
    def hangs(worker: ScriptedWorker) -> None:
        worker.report({"row": 1})
        worker.hang()

    def again(event: ev.Event) -> None:
        # A second one within 0.3 s would count as the first.
        if isinstance(event, ev.Notified) and len(run.watcher.all_of(ev.Notified)) == 1:
            threading.Timer(0.4, lambda: run.controller.notify("asked")).start()

    run.watcher.on_event = again
    at_row(run, 1, lambda: run.controller.notify("asked"))
    began = time.monotonic()
    assert run.go(ScriptedEngine(hangs)).state == "preempted"
    assert time.monotonic() - began < 20.0


def test_a_run_that_does_not_come_to_a_boundary_in_time_is_ended(run: Run) -> None:
    def hangs(worker: ScriptedWorker) -> None:
        worker.report({"row": 1})
        worker.hang()

    at_row(run, 1, lambda: run.controller.notify("asked"))
    assert run.go(ScriptedEngine(hangs), signal_grace=0.5).state == "preempted"


def test_a_notice_before_training_ends_the_run_cleanly(run: Run) -> None:
    engine = ScriptedEngine(lambda worker: None)

    def early(event: ev.Event) -> None:
        if isinstance(event, ev.AttemptStarted):
            run.controller.notify("asked")

    run.watcher.on_event = early
    assert run.go(engine).state == "preempted"


def test_a_rank_that_is_asked_to_end_ends_a_run_of_fixed_size(run: Run) -> None:
    play = Elastic(steps=10_000, every=10_000, asks=True, pace=0.001)

    def noticed(worker: ScriptedWorker) -> None:
        if worker.rank == 1:
            worker.notice()
        play(worker)

    outcome = run.go(ScriptedEngine(noticed))
    assert outcome.state == "preempted"
    assert outcome.reason == "rank 1 was asked to end by SIGTERM"
    (told,) = run.watcher.all_of(ev.Notified)
    assert told.ranks == (1,)


def test_an_elastic_run_goes_on_without_the_rank_that_is_asked_to_end(run: Run) -> None:
    play = Elastic(steps=40, every=1000, asks=True, pace=0.001, lingers=True)

    def noticed(worker: ScriptedWorker) -> None:
        if worker.attempt == 0 and worker.rank == 2:
            worker.notice()
        play(worker)

    outcome = run.go(ScriptedEngine(noticed), 3, min_workers=1)
    assert (outcome.state, sizes(run)) == ("finished", [3, 2])
    first, second = play.of(0), play.of(1)
    assert second[0] == first[-1] + 1, "nothing is redone"
    assert [lost.preempted for lost in run.watcher.all_of(ev.Lost)] == [True]


def test_preemptions_have_a_budget_of_their_own(run: Run) -> None:
    play = Elastic(steps=10_000, every=1000, asks=True, pace=0.001)

    def noticed(worker: ScriptedWorker) -> None:
        if worker.rank == worker.world_size - 1:
            worker.notice()
        play(worker)

    outcome = run.go(ScriptedEngine(noticed), 4, min_workers=1, max_preemptions=1)
    assert (outcome.state, sizes(run)) == ("preempted", [4, 3])
    assert "max_preemption_failures=1" in outcome.reason


def test_what_is_known_of_a_notice_is_the_same_on_every_rank_at_the_same_place(run: Run) -> None:
    seen: dict[int, int] = {}

    def asks(worker: ScriptedWorker) -> None:
        for step in range(1, 10_000):
            time.sleep(0.001 * worker.rank)
            known = worker.preemption()
            if known is not None:
                seen[worker.rank] = step
                assert known.ranks == {worker.process.slot.host: [0, 1]}
            worker.report({"step": step})

    at_row(run, 5, lambda: run.controller.notify("asked"))
    assert run.go(ScriptedEngine(asks)).state == "preempted"
    assert seen[0] == seen[1]


# --------------------------------------------------------------------------- another number of workers


@pytest.mark.usefixtures("_no_grow_delay")
@pytest.mark.parametrize("asks", [True, False], ids=["loop that asks", "plain loop"])
def test_a_run_grows_where_nothing_is_redone(run: Run, asks: bool) -> None:
    play = Elastic(steps=60, every=10, asks=asks, pace=0.002, lingers=True)
    engine = with_capacity(play, 2)
    at_row(run, 12, lambda: engine.tell_capacity(3))
    outcome = run.go(engine, 4, min_workers=1)
    assert (outcome.state, sizes(run)) == ("finished", [2, 3])
    first, second = play.of(0), play.of(1)
    assert second[0] == first[-1] + 1, "nothing is redone"
    if not asks:
        assert first[-1] % 10 == 0, "it was stopped at a checkpoint of its own"
    assert [event.world_size for event in run.watcher.all_of(ev.Resized)] == [3]


@pytest.mark.usefixtures("_no_grow_delay")
def test_a_run_that_never_commits_is_not_grown_and_says_so_once(run: Run) -> None:
    play = Elastic(steps=60, every=1000, pace=0.002)
    engine = with_capacity(play, 2)
    at_row(run, 5, lambda: (engine.tell_capacity(3), engine.tell_capacity(4)))
    outcome = run.go(engine, 4, min_workers=1)
    assert (outcome.state, sizes(run)) == ("finished", [2])
    assert len([text for text in run.watcher.warnings() if "has not committed a checkpoint yet" in text]) == 1


@pytest.mark.usefixtures("_no_grow_delay")
def test_ranks_that_do_not_report_together_are_let_go(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steering, "_TOGETHER_TIMEOUT_S", 0.1)
    monkeypatch.setattr(steering, "_RETRY_INTERVAL_S", 0.02)

    def only_rank_0(worker: ScriptedWorker) -> None:
        if worker.rank == 0:
            Elastic(steps=200, every=5, pace=0.005)(worker)
        worker.meet()

    engine = with_capacity(only_rank_0, 2)
    at_row(run, 12, lambda: engine.tell_capacity(3))
    monkeypatch.setattr("powertrain.run.workers.reports.ABSENT_TIMEOUT_S", 0.01)
    outcome = run.go(engine, 4, min_workers=1)
    assert (outcome.state, sizes(run)) == ("finished", [2])
    assert any("times ranks [1] did not come to the report" in text for text in run.watcher.warnings())


def test_a_lost_slot_shrinks_an_elastic_run_and_counts_as_no_failure(run: Run) -> None:
    play = Elastic(steps=30, every=5, pace=0.002, lingers=True)
    engine = ScriptedEngine(play)
    at_row(run, 12, lambda: engine.lose(engine.claims[0].slots[-1]))
    outcome = run.go(engine, 3, min_workers=1)
    assert (outcome.state, sizes(run)) == ("finished", [3, 2])
    assert not run.watcher.all_of(ev.Failed)


def test_workers_asked_for_by_hand(run: Run) -> None:
    play = Elastic(steps=200, every=1000, asks=True, pace=0.002)
    answers: list[tuple[str, bool]] = []

    def ask(workers: int) -> None:
        ask_to_resize(run, workers, lambda message, ok: answers.append((message, ok)))

    def later(event: ev.Event) -> None:
        if isinstance(event, ev.TrainingStarted):
            at_row(run, event.attempt * 30 + 20, lambda: ask([2, 3, 3, 3][event.attempt]))

    run.watcher.on_event = later
    engine = with_capacity(play, 4)
    outcome = run.go(engine, 4, min_workers=1)
    assert (outcome.state, sizes(run)) == ("finished", [4, 2, 3])
    rows = [play.of(attempt) for attempt in play.attempts]
    assert [row for part in rows for row in part] == list(range(1, 201)), "every row once"
    assert answers[0] == ("It goes on with 2 workers instead of 4 after its next checkpoint.", True)
    assert answers[-1] == ("It has 3 workers, and keeps them.", True)
    assert engine.wanted[:3] == [4, 2, 3], "so many it would use, if there were room"


def test_a_size_out_of_bounds_or_of_a_fixed_run_is_refused(run: Run) -> None:
    answers: list[tuple[str, bool]] = []
    at_row(run, 1, lambda: ask_to_resize(run, 9, lambda *answer: answers.append(answer)))
    run.go(ScriptedEngine(Elastic(steps=20, every=5, pace=0.002)), 4, min_workers=2)
    at_row(run, 21, lambda: ask_to_resize(run, 3, lambda *answer: answers.append(answer)))
    run.go(ScriptedEngine(Elastic(steps=40, every=5, pace=0.002)), 2)
    assert answers == [
        ("The run 'scripted' trains with 2 to 4 workers.", False),
        (
            "The run 'scripted' has a fixed number of workers. Start it with ScalingConfig(num_workers=(min, max)) "
            "to be able to change it.",
            False,
        ),
    ]


# --------------------------------------------------------------------------- a size asked for at an awkward moment


def ask_when_it_starts(run: Run, sizes_by_attempt: dict[int, int]) -> list[str]:
    """Ask for another number of workers while an attempt is being started; returns what is answered."""
    answers: list[str] = []

    def started(event: ev.Event) -> None:
        if isinstance(event, ev.AttemptStarted) and event.attempt in sizes_by_attempt:
            ask_to_resize(run, sizes_by_attempt[event.attempt], lambda text, ok: answers.append(text))

    run.watcher.on_event = started
    return answers


def test_a_size_asked_for_before_training_is_taken_once_the_loop_can_save(run: Run) -> None:
    play = Elastic(steps=60, every=1000, asks=True, pace=0.01, lingers=True)

    def late(worker: ScriptedWorker) -> None:
        time.sleep(0.3)  # it cannot be known yet that this loop saves on request
        play(worker)

    answers = ask_when_it_starts(run, {0: 1})
    outcome = run.go(with_capacity(late, 2), 2, min_workers=1)
    assert (outcome.state, sizes(run)) == ("finished", [2, 1])
    assert len(play.of(0)) < 40, "as soon as it could"
    assert play.of(0) + play.of(1) == list(range(1, 61)), "nothing is redone"
    assert answers == ["It goes on with 1 worker instead of 2 after its next checkpoint."]
    assert [event.reason for event in run.watcher.all_of(ev.Resized)] == ["1 worker was asked for"]
    assert run.watcher.warnings() == []


def test_a_size_requested_during_a_restart_is_taken_without_a_commit(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(steering, "_ASK_INTERVAL_S", 0.1)
    rows: list[int] = []

    def reports_first(worker: ScriptedWorker) -> None:
        """The run has committed before, but this loop saves only on request, and asks after its reports."""
        save = False
        while worker.row < 150:
            time.sleep(0.005)
            if worker.rank == 0:
                rows.append(worker.row + 1)
            worker.report({"row": worker.row + 1}, files={f"{worker.rank}.txt": b"x"} if save else None)
            save = worker.should_checkpoint()

    ask_when_it_starts(run, {0: 1, 1: 2})
    outcome = run.go(with_capacity(reports_first, 2), 2, min_workers=1)
    assert (outcome.state, sizes(run)) == ("finished", [2, 1, 2])
    assert rows == list(range(1, 151)), "nothing is redone"


def test_a_loop_that_learns_to_save_later_is_asked_again(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(steering, "_ASK_INTERVAL_S", 0.1)
    play = Elastic(steps=100, every=1000, asks=True, pace=0.01)

    def warms_up(worker: ScriptedWorker) -> None:
        while worker.row < 30:
            time.sleep(0.005)
            worker.report({"row": worker.row + 1})
        play(worker)

    at_row(run, 5, lambda: ask_to_resize(run, 1, lambda text, ok: None))
    outcome = run.go(with_capacity(warms_up, 2), 2, min_workers=1)
    assert (outcome.state, sizes(run)) == ("finished", [2, 1])
    (told,) = run.watcher.warnings()
    assert told.startswith(
        "The number of workers is to change, but this run has not committed a checkpoint yet"
    )


def test_a_size_asked_for_before_there_are_slots_is_what_the_run_starts_with(run: Run) -> None:
    engine = ScriptedEngine(Elastic(steps=5, every=1))
    answers: list[str] = []

    def started(event: ev.Event) -> None:
        if isinstance(event, ev.RunStarted):
            ask_to_resize(run, 1, lambda text, ok: (answers.append(text), engine.tell_capacity(3)))

    run.watcher.on_event = started
    assert run.go(engine, 3, min_workers=1).state == "finished"
    assert sizes(run) == [1]
    assert answers == ["It has not started yet, and starts with at most 1 worker."]


# --------------------------------------------------------------------------- restarts


def test_a_run_that_dies_before_its_first_boundary_is_tried_again_later_and_later(run: Run) -> None:
    def dies(worker: ScriptedWorker) -> None:
        if worker.attempt < 2:
            worker.die(-9)
        Elastic(steps=3, every=1)(worker)

    assert run.go(ScriptedEngine(dies), 1, max_failures=5).state == "finished"
    assert [failed.delay for failed in run.watcher.all_of(ev.Failed)] == [0.5, 1.0]


def test_a_run_that_has_trained_is_tried_again_at_once(run: Run) -> None:
    def dies(worker: ScriptedWorker) -> None:
        worker.report({"row": worker.row + 1})
        if worker.attempt < 2:
            worker.die(-9)

    assert run.go(ScriptedEngine(dies), 1, max_failures=5).state == "finished"
    assert [failed.delay for failed in run.watcher.all_of(ev.Failed)] == [0.0, 0.0]


# --------------------------------------------------------------------------- slots that will be taken away


@pytest.mark.parametrize("workers", [(2, 2), (1, 2)], ids=["fixed size", "elastic"])
@pytest.mark.parametrize("left", [30.0, 0.0], ids=["half a minute", "nobody says when"])
def test_a_drained_slot_is_left_at_a_saved_boundary(
    run: Run,
    workers: tuple[int, int],
    left: float,
) -> None:
    play = Elastic(steps=60, every=1000, asks=True, pace=0.002, lingers=True)
    engine = ScriptedEngine(play, replaces=True)
    at_row(run, 10, lambda: engine.drain(engine.claims[0].slots[1], time.time() + left if left else 0.0))
    outcome = run.go(engine, 2, min_workers=workers[0])
    assert (outcome.state, sizes(run)) == ("finished", [2, 2 if workers[0] == 2 else 1])
    assert play.of(1)[0] == play.of(0)[-1] + 1, "nothing is redone"
    drained = engine.claims[0].slots[1]
    assert all(process.slot.id != drained.id for process in engine.forked[3:]), "it is not used again"
    assert [lost.preempted for lost in run.watcher.all_of(ev.Lost)] == [True]


def test_a_slot_that_is_drained_while_others_are_awaited_is_given_back(run: Run) -> None:
    def first_one_then_all(engine: ScriptedEngine, claim: Any) -> None:
        if len(engine.claims) == 1:
            (slot,) = engine.grant(claim, 1)
            engine.drain(slot, time.time() + 30)
        else:
            engine.grant(claim, claim.count)

    engine = ScriptedEngine(Elastic(steps=3, every=1), on_request=first_one_then_all, replaces=True)
    assert run.go(engine).state == "finished"
    assert engine.claims[0].withdrawn


def test_a_rank_that_is_killed_after_a_notice_is_a_loss_and_not_a_failure(run: Run) -> None:
    def killed(worker: ScriptedWorker) -> None:
        Elastic(steps=5, every=5)(worker)
        if worker.attempt == 0 and worker.rank == 1:
            worker.notice()
            while not run.watcher.all_of(ev.Notified):
                time.sleep(0.001)
            worker.die(-9)
        if worker.attempt == 0:
            worker.hang()

    outcome = run.go(ScriptedEngine(killed), 2, min_workers=1)
    assert (outcome.state, sizes(run)) == ("finished", [2, 1])
    assert not run.watcher.all_of(ev.Failed)


def test_a_notice_during_the_back_off_ends_the_run(run: Run) -> None:
    def dies(worker: ScriptedWorker) -> None:
        worker.die(-9)

    def during(event: ev.Event) -> None:
        if isinstance(event, ev.Failed) and event.delay > 1:
            threading.Timer(0.05, lambda: run.controller.notify("asked")).start()

    run.watcher.on_event = during
    began = time.monotonic()
    assert run.go(ScriptedEngine(dies), 1, max_failures=-1).state == "preempted"
    assert time.monotonic() - began < 20.0


@pytest.mark.usefixtures("_no_grow_delay")
def test_a_loop_knows_that_a_resize_is_pending(run: Run) -> None:
    seen: dict[int, list[int]] = {0: [], 1: []}

    def looks(worker: ScriptedWorker) -> None:
        while worker.row < 420:
            time.sleep(0.002)
            if worker.attempt == 0:
                seen[worker.rank].append(worker.resize_to)
            save = {"x": b"x"} if worker.row % 200 == 199 else None
            worker.report({"row": worker.row + 1}, files=save)

    engine = with_capacity(looks, 2)
    at_row(run, 205, lambda: engine.tell_capacity(3))
    run.go(engine, 4, min_workers=1)
    assert sizes(run) == [2, 3]
    assert seen[0] == seen[1], "the same on every rank at the same place"
    assert set(seen[0]) == {0, 3}


@pytest.mark.usefixtures("_no_grow_delay")
def test_a_run_that_ends_while_it_is_to_be_resized_just_ends(run: Run) -> None:
    play = Elastic(steps=25, every=10, pace=0.002)
    engine = with_capacity(play, 2)
    at_row(run, 21, lambda: engine.tell_capacity(3))
    began = time.monotonic()
    outcome = run.go(engine, 4, min_workers=1)
    assert (outcome.state, sizes(run)) == ("finished", [2])
    assert time.monotonic() - began < 20.0, "nobody waited for ranks that had returned"


# --------------------------------------------------------------------------- several things at once


@pytest.fixture
def _slow_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every commit takes a second more."""
    wait = MetricsStore.wait_spooled

    def slowly(store: MetricsStore, timeout: float | None = None) -> bool:
        time.sleep(1.0)
        return wait(store, timeout)

    monkeypatch.setattr(MetricsStore, "wait_spooled", slowly)


@pytest.mark.usefixtures("_slow_storage")
def test_storage_slower_than_the_grace_costs_an_elastic_run_nothing(run: Run) -> None:
    play = Elastic(steps=60, every=1000, asks=True, pace=0.005, lingers=True)

    def noticed(worker: ScriptedWorker) -> None:
        if worker.attempt == 0 and worker.rank == 1:
            worker.notice()
        play(worker)

    outcome = run.go(with_capacity(noticed, 2), 2, min_workers=1, signal_grace=0.8)
    assert (outcome.state, sizes(run)) == ("finished", [2, 1])
    assert play.of(1)[0] == play.of(0)[-1] + 1


@pytest.mark.usefixtures("_slow_storage")
def test_a_run_that_has_failed_is_not_made_a_preempted_one_by_a_notice(run: Run) -> None:
    def fails(worker: ScriptedWorker) -> None:
        worker.report({"row": 1}, files={f"{worker.rank}": b"x"})
        if worker.rank == 0:
            raise ValueError("a fault of the user's")
        worker.hang()

    def notify(event: ev.Event) -> None:
        if isinstance(event, ev.Failed):
            run.controller.notify("asked")

    run.watcher.on_event = notify
    assert run.go(ScriptedEngine(fails)).state == "failed"


def test_a_second_notice_does_not_end_the_others_before_the_ranks_that_ended_for_the_first(run: Run) -> None:
    ended = threading.Event()
    saved: dict[int, int] = {}

    def apart(worker: ScriptedWorker) -> None:
        """Rank 0 is far ahead; rank 1 is noticed when it has ended for the notice to rank 2."""
        second = False
        while worker.attempt == 0 and worker.row < 1000:
            time.sleep(0.002 if worker.rank == 0 else 0.01)
            save = worker.should_checkpoint()
            if save:
                saved[worker.rank] = worker.row + 1
            if save and worker.rank == 0:
                ended.set()
            worker.report({"row": worker.row + 1}, files={f"{worker.rank}": b"x"} if save else None)
            if worker.rank == 2 and worker.row == 3:
                worker.notice()
            if worker.rank == 1 and ended.is_set() and not second:
                second = True
                worker.notice()

    run.go(with_capacity(apart, 3), 3, min_workers=1)
    assert len(set(saved.values())) == 1, saved
    newest = checkpoint_committed.newest(run.storage)
    assert newest is not None
    assert len(newest.files) == 3


def test_every_rank_that_was_asked_to_end_is_known_to_all(run: Run) -> None:
    seen: list[list[int]] = []

    def looks(worker: ScriptedWorker) -> None:
        while worker.attempt == 0 and worker.row < 1000:
            time.sleep(0.01)
            known = worker.preemption()
            if known is not None:
                seen.append(sorted(rank for ranks in known.ranks.values() for rank in ranks))
            worker.report({"row": worker.row + 1}, files={f"{worker.rank}": b"x"} if known else None)

    engine = with_capacity(looks, 3)
    drained = (1, 2)
    at_row(run, 3, lambda: [engine.drain(engine.claims[0].slots[r], time.time() + 30) for r in drained])
    run.go(engine, 3, min_workers=1)
    assert seen == [[1, 2]] * 3


def test_a_second_signal_to_one_rank_ends_its_part_and_the_others_go_on(run: Run) -> None:
    def stubborn(worker: ScriptedWorker) -> None:
        if worker.attempt == 0 and worker.rank == 1:
            worker.report({"row": 1})
            worker.notice()
            worker.notice(times=2)
            worker.hang()
        Elastic(steps=20, every=5, pace=0.002)(worker)

    outcome = run.go(with_capacity(stubborn, 2), 2, min_workers=1)
    assert (outcome.state, sizes(run)) == ("finished", [2, 1])


@pytest.mark.usefixtures("_no_grow_delay")
def test_a_loop_that_looks_for_preemptions_only_loses_nothing_by_a_resize(run: Run) -> None:
    done: list[tuple[int, int]] = []

    def looks(worker: ScriptedWorker) -> None:
        while worker.row < 40:
            # Slow in its second half, so that it is resized before it ends even if the controller is held up.
            time.sleep(0.2 if worker.attempt == 0 and worker.row >= 20 else 0.002)
            worker.preemption()
            if worker.rank == 0:
                done.append((worker.attempt, worker.row + 1))
            worker.report({"row": worker.row + 1}, files={"x": b"x"} if worker.row % 10 == 9 else None)

    engine = with_capacity(looks, 2)
    at_row(run, 12, lambda: engine.tell_capacity(3))
    run.go(engine, 4, min_workers=1)
    assert sizes(run) == [2, 3]
    assert [row for _, row in done] == list(range(1, 41)), "every row once"


@pytest.mark.usefixtures("_no_grow_delay")
def test_a_resize_that_is_put_off_while_a_rank_saves_leaves_no_rank_waiting(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(steering, "_TOGETHER_TIMEOUT_S", 0.05)
    stage = ScriptedWorker._stage

    def slowly(worker: ScriptedWorker, *rest: Any) -> Any:
        time.sleep(0.4 if worker.rank == 0 else 0.0)
        return stage(worker, *rest)

    monkeypatch.setattr(ScriptedWorker, "_stage", slowly)
    play = Elastic(steps=24, every=5, pace=0.002)
    engine = with_capacity(play, 2)
    at_row(run, 7, lambda: engine.tell_capacity(3))
    assert run.go(engine, 4, min_workers=1).state == "finished"


@pytest.mark.usefixtures("_no_grow_delay")
def test_a_rank_that_returns_does_not_call_off_a_resize_that_others_have_ended_for(run: Run) -> None:
    stopped = threading.Event()

    def uneven(worker: ScriptedWorker) -> None:
        if worker.attempt:
            return
        worker.should_checkpoint()
        worker.report({"row": 1})
        if worker.rank == 0:
            worker.wait_for(stopped)
            return
        try:
            while worker.row < 1000:
                time.sleep(0.002)
                save = worker.should_checkpoint()
                worker.report({"row": worker.row + 1}, files={"x": b"x"} if save else None)
        finally:
            stopped.set()

    engine = with_capacity(uneven, 2)
    at_row(run, 1, lambda: engine.tell_capacity(3))
    assert run.go(engine, 3, min_workers=1).state == "finished"
    assert sizes(run) == [2, 3]
