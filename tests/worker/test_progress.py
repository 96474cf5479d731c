"""The gate: whatever the interleaving, all ranks act at the same boundary, nobody passes it, nobody waits for ever."""

from __future__ import annotations

import threading

from hypothesis import given, settings
from hypothesis import strategies as st

from powertrain.worker.progress import Gate, Progress

PATIENCE = 10.0


class Rank:
    """A training thread that crosses boundaries one at a time, when it is told to."""

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
        action, _ = self.gate.cross()
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


@settings(max_examples=60)
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
            ranks[rank].gate.go_to(1, max(answers.values()) + 1, "stop", "why")
            sent.add(rank)
    return max(answers.values()) + 1


def test_a_boundary_without_a_hold_is_passed_at_once() -> None:
    gate = Gate()
    assert [gate.cross() for _ in range(3)] == [("go", "")] * 3
    assert gate.passed == 3


def test_a_rank_behind_runs_on_to_the_agreed_boundary_and_acts_there_with_the_reason() -> None:
    gate = Gate()
    gate.cross()
    assert gate.arm(1) == 1
    gate.go_to(1, 4, "stop", "loss is low enough")
    assert [gate.cross() for _ in range(3)] == [("go", ""), ("go", ""), ("stop", "loss is low enough")]
    assert gate.cross() == ("go", "")


def test_an_answer_to_an_older_hold_is_not_heeded() -> None:
    gate = Gate()
    gate.arm(1)
    gate.arm(2)
    gate.go_to(1, 1, "stop", "too old")
    gate.go_to(2, 2, "stop", "current")
    assert [gate.cross(), gate.cross()] == [("go", ""), ("stop", "current")]


def test_a_rank_held_at_a_boundary_is_let_go_when_the_run_ends() -> None:
    gate = Gate()
    gate.arm(1)
    action: list[tuple[str, str]] = []
    thread = threading.Thread(target=lambda: action.append(gate.cross()))
    thread.start()
    gate.open()
    thread.join(PATIENCE)
    assert action == [("go", "")]


def test_progress_counts_reports_steps_and_batches_and_can_begin_anew() -> None:
    progress = Progress()
    progress.reports += 2
    progress.step("optimizer", (), {})
    progress.batch()
    assert progress.snapshot() == (2, 1, 1)
    progress.reset()
    assert (progress.snapshot(), progress.phase) == ((0, 0, 0), "set-up")
