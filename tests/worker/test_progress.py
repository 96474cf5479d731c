"""The gate: whatever the interleaving, all ranks act at the same boundary, no rank passes it, none waits for ever."""

from __future__ import annotations

import threading

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.examples import scaled

from powertrain.wire.from_controller import Goto, Preemption
from powertrain.worker.progress import Boundaries, BoundaryCrossing, Gate, Progress, StopRun

PATIENCE = 30.0
GO = BoundaryCrossing()


def goto(hold: int, boundary: int, reason: str = "", action: str = "stop") -> Goto:
    return Goto(hold=hold, boundary=boundary, action=action, reason=reason)


class Rank:
    """A training thread that crosses boundaries one at a time, on request."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.crossed = 0
        self.acted_at: int | None = None
        self._thread: threading.Thread | None = None

    def begin_crossing(self) -> None:
        """Cross one boundary, on a thread of its own; it may have to wait there."""
        if self.acted_at is None and not self.is_waiting():
            self._thread = threading.Thread(target=self._cross, daemon=True)
            self._thread.start()
            self._thread.join(0.0 if self.gate._hold is not None else PATIENCE)

    def _cross(self) -> None:
        action = self.gate.cross().action
        self.crossed += 1
        if action == "stop":
            self.acted_at = self.crossed

    def is_waiting(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def run_on(self) -> None:
        """Cross until the action comes."""
        while self.acted_at is None:
            if self._thread is not None:
                self._thread.join(PATIENCE)
                assert not self._thread.is_alive(), "a rank waits for ever"
            if self.acted_at is None:
                self.begin_crossing()
                assert self._thread is not None
                self._thread.join(PATIENCE)
                assert not self._thread.is_alive(), "a rank waits for ever"
            assert self.crossed < 1000, "a rank passes the agreed boundary"


@settings(max_examples=scaled(60))
@given(st.integers(1, 4), st.lists(st.integers(0, 50), max_size=30))
def test_all_ranks_act_at_the_same_boundary(size: int, choices: list[int]) -> None:
    ranks = [Rank() for _ in range(size)]
    try:
        agreed = _agree(ranks, choices)
        for each in ranks:
            each.run_on()
        assert {each.acted_at for each in ranks} == {agreed}
        assert all(each.gate.passed == agreed for each in ranks)
    finally:
        for each in ranks:
            each.gate.open()


def _agree(ranks: list[Rank], choices: list[int]) -> int:
    """Arm every rank and send it on, with crossings in between as ``choices`` has them; returns the boundary."""
    answers: dict[int, int] = {}
    sent: set[int] = set()
    left = list(choices)
    while len(sent) < len(ranks):
        moves = [("arm", r) for r in range(len(ranks)) if r not in answers]
        moves = moves or [("goto", r) for r in range(len(ranks)) if r not in sent]
        moves += [("cross", r) for r in range(len(ranks))]
        kind, rank = moves[(left.pop() if left else 0) % len(moves)]
        if kind == "cross":
            ranks[rank].begin_crossing()
        elif kind == "arm":
            answers[rank] = ranks[rank].gate.arm(1)
        else:
            ranks[rank].gate.go_to(goto(1, max(answers.values()) + 1, "why"))
            sent.add(rank)
    return max(answers.values()) + 1


def test_a_boundary_without_a_hold_is_passed_at_once() -> None:
    gate = Gate()
    assert [gate.cross() for _ in range(3)] == [GO] * 3
    assert gate.passed == 3


def test_a_rank_behind_runs_on_to_the_agreed_boundary_and_acts_there_with_the_reason() -> None:
    gate = Gate()
    gate.cross()
    assert gate.arm(1) == 1
    gate.go_to(goto(1, 4, "loss is low enough"))
    assert [gate.cross() for _ in range(3)] == [GO, GO, BoundaryCrossing("stop", "loss is low enough")]
    assert gate.cross() == GO


def test_an_answer_to_an_older_hold_is_not_heeded() -> None:
    gate = Gate()
    gate.arm(1)
    gate.arm(2)
    gate.go_to(goto(1, 1, "too old"))
    gate.go_to(goto(2, 2, "current"))
    assert [gate.cross(), gate.cross()] == [GO, BoundaryCrossing("stop", "current")]


def test_a_rank_held_at_a_boundary_is_let_go_when_the_run_ends() -> None:
    gate = Gate()
    gate.arm(1)
    action: list[BoundaryCrossing] = []
    thread = threading.Thread(target=lambda: action.append(gate.cross()))
    thread.start()
    gate.open()
    thread.join(PATIENCE)
    assert action == [GO]


class Loop:
    """A loop's boundaries, with what the run has asked for so far."""

    def __init__(self, registered: bool = False) -> None:
        self.gate = Gate()
        self.stands: list[tuple[int, int]] = []
        self.boundaries = Boundaries(self.gate, lambda: registered, lambda *where: self.stands.append(where))

    def stop_at(self, boundary: int, **more: object) -> None:
        self.gate.arm(1)
        self.gate.go_to(Goto(hold=1, boundary=boundary, action="stop", reason="why", **more))  # type: ignore[arg-type]

    def report(self) -> str:
        saves = self.boundaries.enter_report()
        try:
            self.boundaries.leave_report()
        except StopRun:
            return "saves and ends" if saves else "ends"
        return "saves" if saves else "goes on"


def test_a_plain_loop_ends_at_the_agreed_report() -> None:
    loop = Loop()
    loop.stop_at(2)
    assert not loop.gate.can_save()
    assert [loop.report(), loop.report()] == ["goes on", "ends"]


def test_registered_state_is_saved_with_the_agreed_report() -> None:
    loop = Loop(registered=True)
    loop.stop_at(2)
    assert loop.gate.can_save()
    assert [loop.report(), loop.report()] == ["goes on", "saves and ends"]


def test_a_loop_that_asks_is_notified_first_and_ends_at_the_report_after() -> None:
    loop = Loop()
    assert loop.boundaries.check_save() is False
    assert loop.gate.can_save()
    loop.stop_at(2)
    assert loop.report() == "goes on", "it has not been told yet"
    assert loop.boundaries.check_save() is True
    assert loop.report() == "ends"


def test_what_is_known_of_a_preemption_appears_at_the_agreed_boundary() -> None:
    loop, coming = Loop(), Preemption(deadline_ms=5, ranks={"node": [1]})
    loop.stop_at(2, preemption=coming, resize_to=3)
    loop.boundaries.check_save()
    assert (loop.boundaries.preemption, loop.boundaries.resize_to) == (None, 0)
    loop.boundaries.check_save()
    assert (loop.boundaries.preemption, loop.boundaries.resize_to) == (coming, 3)


def test_a_rank_that_steps_waits_after_its_report_until_it_is_sent_on_and_ends_where_requested() -> None:
    loop = Loop()
    loop.gate.arm(1)
    loop.gate.go_to(goto(1, 1, action="step"))
    done: list[str] = []
    arrived = threading.Event()
    loop.boundaries = Boundaries(loop.gate, arrived=lambda *_: arrived.set())
    thread = threading.Thread(target=lambda: done.extend([loop.report(), loop.report()]))
    thread.start()
    assert arrived.wait(PATIENCE)
    arrived.clear()
    loop.gate.go_to(goto(1, 2, action="step"))
    assert arrived.wait(PATIENCE)
    loop.gate.go_to(goto(1, 2, "enough"))
    thread.join(PATIENCE)
    assert done == ["goes on", "ends"]


def test_a_message_that_comes_while_a_rank_makes_its_report_is_not_lost() -> None:
    loop = Loop()
    loop.gate.arm(1)
    loop.gate.go_to(goto(1, 1, action="step"))
    loop.boundaries.enter_report()
    loop.gate.go_to(goto(1, 1, action="go"))  # the others would not wait any longer
    loop.boundaries.leave_report()
    assert loop.stands == []


def test_a_loop_that_only_looks_for_a_preemption_is_notified_of_one_and_cannot_save_for_anything_else() -> (
    None
):
    for preemption, ends in ((None, "ends"), (Preemption(deadline_ms=5, ranks={"node": [1]}), "goes on")):
        loop = Loop()
        loop.boundaries.check_preemption()
        assert not loop.gate.can_save()
        loop.stop_at(2, preemption=preemption)
        assert loop.report() == ends
        if preemption is not None:
            assert loop.boundaries.check_preemption() == preemption
            assert loop.report() == "ends"


def test_a_rank_that_steps_is_let_go_by_go_and_by_a_new_hold() -> None:
    loop = Loop()
    loop.gate.arm(1)
    loop.gate.go_to(goto(1, 1, action="step"))
    arrived = threading.Event()
    loop.boundaries = Boundaries(loop.gate, arrived=lambda *_: arrived.set())
    done: list[str] = []
    thread = threading.Thread(target=lambda: done.extend([loop.report(), loop.report(), loop.report()]))
    thread.start()
    assert arrived.wait(PATIENCE)
    assert loop.gate.arm(2) == 1
    loop.gate.go_to(goto(1, 1, "too old"))
    loop.gate.go_to(goto(2, 2, action="go"))
    thread.join(PATIENCE)
    assert done == ["goes on"] * 3


def test_progress_counts_reports_steps_and_batches_and_can_begin_anew() -> None:
    progress = Progress()
    progress.report()
    progress.report()
    progress.step("optimizer", (), {})
    progress.batch()
    assert progress.snapshot() == (2, 1, 1)
    progress.reset()
    assert (progress.snapshot(), progress.phase) == ((0, 0, 0), "set-up")


def test_a_program_without_boundaries_is_asked_to_end_once() -> None:
    gate, told = Gate(), list[str]()
    gate.deliver_stop(lambda stop: told.append(stop.reason))
    gate.arm(1)
    gate.go_to(goto(1, 1, "later", action="step"))
    assert told == []
    gate.go_to(goto(1, 1, "it is time"))
    gate.arm(2)
    gate.go_to(goto(2, 1, "again"))
    assert told == ["it is time"]


def test_a_request_that_came_before_the_program_began_is_delivered_when_it_begins() -> None:
    gate, told = Gate(), list[str]()
    gate.arm(1)
    gate.go_to(goto(1, 1, "it is time"))
    gate.deliver_stop(lambda stop: told.append(stop.reason))
    assert told == ["it is time"]


def test_a_program_that_has_come_to_a_boundary_ends_at_the_next_one() -> None:
    gate, told = Gate(), list[str]()
    gate.deliver_stop(lambda stop: told.append(stop.reason))
    gate.cross()
    gate.arm(1)
    gate.go_to(goto(1, 2, "it is time"))
    assert told == []
    assert gate.cross().action == "stop"
