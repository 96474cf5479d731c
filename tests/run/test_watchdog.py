"""When a run counts as hung, who is to blame, and what is said about it: on beats that are made up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.examples import scaled

from powertrain.run.health import watchdog
from powertrain.run.health.hang_report import Verdict, explain, rank_names
from powertrain.run.health.waits import RankState
from powertrain.run.health.watchdog import Act, Decision, HangNotice, Suspect, Watchdog, Withdrawn
from powertrain.wire.from_worker import Beat
from powertrain.wire.values import Frame, ProcessStack, ThreadStack, Where

SOURCES = {
    20: "for batch in loader:",
    31: "lock.acquire()",
    41: "dist.all_reduce(loss)",
    50: "powertrain.report({}, barrier=True)",
    60: "evaluate(model)",
    88: "loss.backward()",
}
TORCH = "/venv/lib/python3.11/site-packages/torch/utils/data"


def frame(line: int, file: str = "/home/me/train.py", function: str = "train") -> Frame:
    return Frame(file=file, line=line, function=function, source=SOURCES.get(line, ""))


def at(line: int, inside: str = "", call: str = "", **more: str) -> Where:
    return Where(frame=frame(line, **more), inside=inside, call=call)


IN_ALL_REDUCE = at(41, "collective", "all_reduce")
IN_BACKWARD = at(88, "collective", "backward")
IN_LOCK = at(31, file="/home/me/data.py", function="__getitem__")


@dataclass
class Fake:
    """A rank as it would describe itself."""

    rank: int
    moved: float
    reports: int = 0
    steps: int = 0
    batches: int = 0
    collectives: int = -1
    phase: str = "training"
    awaits: str = ""
    where: Where | None = field(default_factory=lambda: at(10))
    debugged: bool = False
    beats: bool = True

    def beat(self, now: float) -> Beat:
        return Beat(
            reports=self.reports,
            steps=self.steps,
            batches=self.batches,
            idle=now - self.moved,
            phase=self.phase,
            row=self.reports,
            collectives=self.collectives,
            awaits=self.awaits,
            where=self.where,
            debugged=self.debugged,
        )


class Run:
    """A run in made-up time: ranks that beat every second, or every ``gather`` seconds, and a watchdog that is asked
    whenever it wants to be."""

    def __init__(
        self, ranks: int = 2, timeout: float | None = None, collectives: bool = True, gather: float = 0.0
    ) -> None:
        self.now = self.began = 1000.0
        self.dog = Watchdog(ranks, self.now, timeout=timeout, gather=gather)
        self._beat_ticks = round(10 * (gather or 1.0))
        self.ranks = [Fake(rank, self.now, collectives=0 if collectives else -1) for rank in range(ranks)]
        self.seen: list[tuple[float, Decision]] = []
        self._ticks = 0

    def set(self, *ranks: int, **fields: Any) -> None:
        for rank in ranks:
            for name, value in fields.items():
                setattr(self.ranks[rank], name, value)

    def go(self, seconds: float, moving: Iterable[int] | None = None, step: float = 0.2) -> None:
        """Let time pass; ``moving`` ranks (all by default) make a step every ``step`` seconds."""
        movers = set(range(len(self.ranks)) if moving is None else moving)
        end = self._ticks + round(seconds * 10)
        every = round(step * 10)
        begin = self._ticks
        while self._ticks < end:
            self._ticks += 1
            self.look_until(self.began + self._ticks / 10)
            for fake in self.ranks:
                if fake.rank in movers and (self._ticks - begin) % every == 0:
                    self._step(fake)
                if fake.beats and (self._ticks + fake.rank) % self._beat_ticks == 0:
                    self.dog.on_beat(fake.rank, fake.beat(self.now), self.now)

    def _step(self, fake: Fake) -> None:
        fake.steps, fake.batches, fake.moved = fake.steps + 1, fake.batches + 1, self.now
        fake.collectives += 1 if fake.collectives >= 0 else 0

    def look_until(self, now: float) -> None:
        while self.dog.due() <= now:
            moment = max(self.now, self.dog.due())
            decision = self.dog.poll(moment)
            assert self.dog.due() > moment, "it would be asked again at once, for ever"
            if decision is not None:
                self.seen.append((moment, decision))
        self.now = now

    def all(self, kind: type[Any]) -> list[tuple[float, Any]]:
        return [(when, decision) for when, decision in self.seen if isinstance(decision, kind)]

    def only(self, kind: type[Any]) -> tuple[float, Any]:
        (found,) = self.all(kind)
        return found

    def quiet(self) -> bool:
        return not [decision for _, decision in self.seen if not isinstance(decision, Suspect)]


def process(
    state: str, *frames: Frame, title: str = "rank 1", pid: int = 77, name: str = "MainThread"
) -> ProcessStack:
    threads = [ThreadStack(name=name, main=True, frames=list(frames))] if frames else []
    return ProcessStack(pid=pid, title=title, state=state, threads=threads)


def verdict_of(run: Run, stacks: dict[int, list[ProcessStack]] | None = None) -> Verdict:
    _, notice = run.only(HangNotice)
    verdict = explain(notice.states, stacks or {}, notice.seconds)
    assert (verdict.culprits, verdict.waiting) == (notice.ranks, notice.waiting)
    assert 1 <= len(verdict.message.splitlines()) <= 4
    assert max(map(len, verdict.message.splitlines())) <= 200
    return verdict


def hang_while_others_average(where: Where, silent: bool = False) -> tuple[Run, float]:
    """Rank 1 of four stands at ``where`` from some moment on, and the others come to their next backward."""
    run = Run(4)
    run.go(10)
    began = run.now
    run.set(1, where=where, beats=not silent)
    for rank in (0, 2, 3):
        run.set(rank, where=IN_BACKWARD, collectives=run.ranks[rank].collectives + 1)
    run.go(12, moving=())
    return run, began


# --------------------------------------------------------------------------- what is no hang: compiling


def test_a_rank_that_compiles_is_not_called_hanging_nor_are_those_that_wait_for_it() -> None:
    run, _ = hang_while_others_average(at(60, "compiler", "_compile"))
    run.go(300, moving=())
    assert run.quiet()
    run.go(10)
    assert run.quiet()


def test_a_rank_that_stands_still_after_it_has_compiled_is_noticed() -> None:
    run, _ = hang_while_others_average(at(60, "compiler", "_compile"))
    run.go(60, moving=())
    compiled = run.now
    run.set(1, where=IN_LOCK)
    run.go(12, moving=())
    noticed, _ = run.only(HangNotice)
    assert noticed - compiled < 7.0
    assert verdict_of(run).culprits == (1,)


def test_a_compilation_that_does_not_end_for_half_an_hour_is_noticed() -> None:
    run, _ = hang_while_others_average(at(60, "compiler", "_compile"))
    run.go(watchdog.SLOW_ACT_TIMEOUT_S + 60, moving=())
    assert run.all(HangNotice)


# --------------------------------------------------------------------------- twelve kinds of hang


def test_a_lock_that_never_opens_is_reported_within_five_seconds_with_its_line() -> None:
    run, began = hang_while_others_average(IN_LOCK)
    suspected, _ = run.only(Suspect)
    noticed, _ = run.only(HangNotice)
    assert suspected - began == pytest.approx(3.0, abs=0.3)
    assert noticed - began == pytest.approx(4.8, abs=0.3)
    verdict = verdict_of(run, {1: [process("sleeping", IN_LOCK.frame)]})
    assert (verdict.culprits, verdict.waiting) == ((1,), (0, 2, 3))
    assert verdict.frame == IN_LOCK.frame
    assert verdict.message == (
        "No step for 4.8 s (usually 0.2 s). Rank 1 has not entered the gradient all-reduce that ranks 0, 2 and 3 "
        "wait in (/home/me/train.py:88: loss.backward()).\n"
        "Rank 1 is at /home/me/data.py:31 in __getitem__: lock.acquire(); it sleeps."
    )


def test_a_missed_all_reduce_names_the_returned_rank_and_the_line_where_the_other_waits() -> None:
    run = Run(2)
    run.go(10)
    run.set(0, where=IN_ALL_REDUCE, collectives=51)
    run.set(1, collectives=50)
    run.go(1, moving=())
    run.dog.on_rank_ended(1, run.now)
    run.set(1, beats=False)
    run.go(8, moving=())
    verdict = verdict_of(run)
    assert (verdict.culprits, verdict.waiting, verdict.frame) == ((1,), (0,), IN_ALL_REDUCE.frame)
    assert (
        "Rank 0 waits in all_reduce at /home/me/train.py:41: dist.all_reduce(loss); rank 1 has returned from the "
        "training function and will not take part (it began 50 collectives, rank 0 51)." in verdict.message
    )


def test_an_extra_all_reduce_is_blamed_on_the_one_rank_that_made_it() -> None:
    run = Run(4)
    run.go(10)
    run.set(2, where=IN_ALL_REDUCE, collectives=51)
    run.set(0, 1, 3, phase="end", collectives=-1)
    run.go(8, moving=())
    verdict = verdict_of(run)
    assert (verdict.culprits, verdict.waiting, verdict.frame) == ((2,), (), IN_ALL_REDUCE.frame)
    assert (
        "ranks 0, 1 and 3 have returned from the training function and will not take part "
        "(they began 50 collectives, rank 2 51)" in verdict.message
    )
    assert "or rank 2 called an extra one" in verdict.message


def test_a_rank_blocked_in_its_loader_is_reported_as_such() -> None:
    run, _ = hang_while_others_average(at(20, "loader", "__next__"))
    verdict = verdict_of(run, {1: [process("sleeping", frame(20))]})
    assert (verdict.culprits, verdict.frame) == ((1,), frame(20))
    assert (
        "Rank 1 waits for the DataLoader at /home/me/train.py:20 in train: for batch in loader:."
        in verdict.message
    )


def test_a_dataloader_worker_stuck_in_its_collate_is_found_behind_the_rank() -> None:
    collate = frame(31, "/home/me/data.py", "collate")
    loop = Frame(file=f"{TORCH}/_utils/worker.py", line=300, function="_worker_loop")
    fetch = Frame(file=f"{TORCH}/_utils/fetch.py", line=52, function="fetch")
    queue = Frame(
        file="/venv/lib/python3.11/site-packages/torch/multiprocessing/q.py", line=1, function="get"
    )
    title = "DataLoader worker of rank 1"
    stacks = [
        process("sleeping", frame(20)),
        process("sleeping", queue, loop, frame(20), title=title, pid=90),
        process("sleeping", collate, fetch, loop, frame(20), title=title, pid=91),
    ]
    run, _ = hang_while_others_average(at(20, "loader", "__next__"))
    verdict = verdict_of(run, {1: stacks})
    assert (verdict.culprits, verdict.frame) == ((1,), collate)
    assert (
        "for its DataLoader worker (pid 91), which is at /home/me/data.py:31 in collate: lock.acquire()"
        in (verdict.message)
    )


def test_a_stopped_dataloader_worker_is_found_behind_the_rank() -> None:
    stacks = [process("sleeping"), process("stopped", title="DataLoader worker of rank 1", pid=91)]
    run, _ = hang_while_others_average(at(20, "loader", "__next__"))
    assert (
        "DataLoader worker of rank 1 (pid 91); it is stopped (SIGSTOP)"
        in verdict_of(run, {1: stacks}).message
    )


def test_a_rank_that_sleeps_alone_is_to_blame_and_the_others_go_on() -> None:
    run = Run(3, collectives=False)
    run.go(10)
    began = run.now
    run.set(1, where=at(12))
    run.go(8, moving=(0, 2))
    noticed, _ = run.only(HangNotice)
    assert noticed - began == pytest.approx(4.8, abs=0.3)
    verdict = verdict_of(run)
    assert (verdict.culprits, verdict.waiting, verdict.frame) == ((1,), (), frame(12))
    assert verdict.message.startswith("No step of rank 1 for 4.8 s (usually 0.2 s); ranks 0 and 2 go on.")


def test_ranks_that_beat_every_four_seconds_are_not_suspected_between_their_beats() -> None:
    run = Run(4, gather=4.0)
    run.go(60)
    assert run.seen == []


@pytest.mark.parametrize(("gather", "suspected_after", "noticed_after"), [(0.0, 2.9, 4.8), (4.0, 8.9, 10.8)])
def test_messages_that_come_later_are_judged_later_and_not_otherwise(
    gather: float, suspected_after: float, noticed_after: float
) -> None:
    run = Run(3, collectives=False, gather=gather)
    run.go(20)
    began = run.now
    run.go(0.8 * suspected_after, moving=(0, 2))
    assert run.seen == []
    run.go(6, moving=(0, 2))
    (suspected, suspect), (noticed, notice) = run.only(Suspect), run.only(HangNotice)
    assert suspected - began == pytest.approx(suspected_after, abs=0.3)
    assert noticed - began == pytest.approx(noticed_after, abs=0.3)
    assert suspect.ranks == notice.ranks == (1,)
    assert notice.seconds == pytest.approx(noticed - began, abs=0.1)  # it says for how long, as it was


def test_a_rank_whose_connection_ended_is_silent_at_once_however_seldom_it_beats() -> None:
    run = Run(2, gather=4.0)
    run.go(20)
    run.dog.on_disconnect(1)
    run.set(1, beats=False)
    run.go(12, moving=())
    _, notice = run.only(HangNotice)
    assert [state.silent for state in notice.states] == [False, True]


def test_ranks_that_stand_at_the_same_place_are_reported_in_the_plural() -> None:
    run = Run(6)
    run.go(10)
    run.set(0, 1, 2, 3, 4, where=at(12))
    run.set(5, where=IN_BACKWARD, collectives=run.ranks[5].collectives + 1)
    run.go(8, moving=())
    stacks = {rank: [process("sleeping" if rank < 4 else "gone", frame(12))] for rank in range(5)}
    first, rest = verdict_of(run, stacks).message.splitlines()[-2:]
    assert first.startswith("Ranks 0 to 3 are at /home/me/train.py:12 in train")
    assert first.endswith("; they sleep.")
    assert rest.endswith("; its process has died.")


def test_a_single_rank_that_sleeps_after_its_first_steps_is_reported_in_five_seconds() -> None:
    run = Run(1, collectives=False)
    run.go(0.6)
    run.set(0, where=at(12))
    run.go(8, moving=())
    noticed, _ = run.only(HangNotice)
    assert noticed - run.began == pytest.approx(5.6, abs=0.3)
    assert verdict_of(run).culprits == (0,)


def test_a_stopped_rank_is_recognized_by_its_silence_and_its_state_in_the_kernel() -> None:
    run, _ = hang_while_others_average(at(10), silent=True)
    verdict = verdict_of(run, {1: [process("stopped")]})
    assert (verdict.culprits, verdict.frame) == ((1,), frame(10))
    assert "Rank 1 is stopped (SIGSTOP), last seen at /home/me/train.py:10 in train." in verdict.message


def test_a_rank_stopped_inside_a_collective_is_still_the_culprit() -> None:
    """Its last beat says that it waits for others, and is older than their waiting for it."""
    run = Run(3)
    run.set(0, 1, 2, where=IN_BACKWARD)
    run.go(10)
    run.set(1, beats=False)
    run.set(0, 2, collectives=54)
    run.go(8, moving=())
    assert verdict_of(run).culprits == (1,)


def test_a_rank_stuck_in_c_with_pythons_lock_is_located_by_the_frame_found_outside() -> None:
    run, _ = hang_while_others_average(at(10), silent=True)
    verdict = verdict_of(run, {1: [process("sleeping", frame(33))]})
    assert (verdict.culprits, verdict.frame) == ((1,), frame(33))
    assert "Rank 1 is in C code that holds Python's lock, at /home/me/train.py:33 in train; it sleeps." in (
        verdict.message
    )


def test_a_silent_rank_of_which_nothing_is_known_is_named_with_its_last_place() -> None:
    run, _ = hang_while_others_average(at(10), silent=True)
    assert "Rank 1 has sent no heartbeat for" in verdict_of(run).message


def test_a_rank_stuck_in_c_without_pythons_lock_is_located_by_its_own_heartbeats() -> None:
    run, _ = hang_while_others_average(at(34, call="sleep"))
    verdict = verdict_of(run, {1: [process("sleeping", frame(34))]})
    assert (verdict.culprits, verdict.frame) == ((1,), frame(34))


def test_mismatched_reports_are_shown_with_the_count_and_place_of_each_rank() -> None:
    run = Run(2)
    run.set(0, 1, reports=6)
    run.go(10)
    run.set(0, reports=7, awaits="row 7", where=at(50, "run", "report"), moved=run.now)
    run.set(1, where=IN_ALL_REDUCE, collectives=51)
    run.go(8, moving=())
    verdict = verdict_of(run)
    assert (verdict.culprits, verdict.waiting) == ((1,), (0,))
    assert (verdict.frame, verdict.row) == (IN_ALL_REDUCE.frame, 6)
    assert "Rank 1 has made 6 reports and waits in all_reduce at /home/me/train.py:41" in verdict.message
    assert (
        "Rank 0 has made 7 reports and waits for all ranks to report row 7 at /home/me/train.py:50"
        in verdict.message
    )


def test_ranks_that_wait_for_a_row_are_notified_of_the_rank_that_does_not_report() -> None:
    run = Run(2, collectives=False)
    run.go(10)
    run.set(0, reports=7, awaits="row 7", where=at(50, "run", "report"))
    run.set(1, where=IN_LOCK)
    run.go(8, moving=())
    verdict = verdict_of(run)
    assert (verdict.culprits, verdict.waiting, verdict.frame) == ((1,), (0,), IN_LOCK.frame)
    assert "Rank 0 waits for row 7 (/home/me/train.py:50" in verdict.message


def test_a_rank_that_does_not_come_to_the_runs_barrier_is_to_blame() -> None:
    run = Run(3, collectives=False)
    run.go(10)
    run.set(0, 2, awaits="barrier", where=at(50, "run", "barrier"))
    run.set(1, where=IN_LOCK)
    run.go(8, moving=())
    verdict = verdict_of(run)
    assert (verdict.culprits, verdict.waiting) == ((1,), (0, 2))
    assert "Rank 1 has not reached the barrier that ranks 0 and 2 wait at" in verdict.message


def test_a_barrier_of_the_run_against_a_collective_of_torch_is_a_circle() -> None:
    run = Run(3)
    run.go(10)
    run.set(0, 2, where=IN_ALL_REDUCE, collectives=51)
    run.set(1, awaits="barrier", where=at(50, "run", "barrier"))
    run.go(8, moving=())
    verdict = verdict_of(run)
    assert (verdict.culprits, verdict.waiting) == ((1,), (0, 2))
    assert "do not make the same calls" in verdict.message


def test_a_dead_slow_disk_read_is_reported_as_a_disk_wait() -> None:
    run, _ = hang_while_others_average(at(35))
    verdict = verdict_of(run, {1: [process("disk-sleep")]})
    assert (verdict.culprits, verdict.frame) == ((1,), frame(35))
    assert "it is in an uninterruptible disk wait" in verdict.message


def test_an_endless_loop_is_reported_although_its_line_keeps_changing() -> None:
    run = Run(2)
    run.go(10)
    run.set(0, where=IN_ALL_REDUCE, collectives=51)
    for second in range(8):
        run.set(1, where=at(70 + second % 3))
        run.go(1, moving=())
    verdict = verdict_of(run, {1: [process("running")]})
    assert verdict.culprits == (1,)
    assert verdict.frame in (frame(70), frame(71), frame(72))
    assert "it is computing" in verdict.message


def test_a_collective_that_all_have_come_to_has_no_culprit() -> None:
    run = Run(3)
    run.go(10)
    run.set(0, 1, 2, where=IN_ALL_REDUCE, collectives=51)
    run.go(8, moving=())
    verdict = verdict_of(run)
    assert (verdict.culprits, verdict.waiting) == ((), (0, 1, 2))
    assert verdict.frame == IN_ALL_REDUCE.frame
    assert "All ranks are inside the all_reduce at /home/me/train.py:41" in verdict.message


def test_ranks_in_different_collectives_are_distinguished() -> None:
    run = Run(2)
    run.go(10)
    run.set(0, where=IN_ALL_REDUCE, collectives=51)
    run.set(1, where=at(42, "collective", "broadcast"), collectives=51)
    run.go(8, moving=())
    assert "not the same one" in verdict_of(run).message


def test_a_rank_that_waits_on_its_gpu_is_not_blamed_for_one_that_began_fewer_collectives() -> None:
    run = Run(2)
    run.go(10)
    run.set(0, where=at(90), collectives=52)
    run.set(1, where=IN_LOCK)
    run.go(8, moving=())
    verdict = verdict_of(run)
    assert (verdict.culprits, verdict.waiting) == ((1,), (0,))
    assert "rank 0 began 52 collectives, rank 1 only 50" in verdict.message


def test_a_collective_of_another_group_waits_for_the_rank_that_is_in_none() -> None:
    run = Run(2, collectives=False)
    run.go(10)
    run.set(0, where=IN_ALL_REDUCE)
    run.set(1, where=IN_LOCK)
    run.go(8, moving=())
    assert verdict_of(run).culprits == (1,)


def test_slow_steps_are_given_five_of_them() -> None:
    run = Run(2)
    run.go(30, step=3.0)
    began = run.ranks[1].moved
    run.set(0, where=IN_ALL_REDUCE, collectives=11)
    run.set(1, where=IN_LOCK)
    run.go(20, moving=())
    noticed, _ = run.only(HangNotice)
    assert noticed - began == pytest.approx(15.0, abs=0.5)
    assert "(usually 3 s)" in verdict_of(run).message


# --------------------------------------------------------------------------- what is no hang


def test_a_first_step_of_25_seconds_is_no_hang() -> None:
    run = Run(2)
    run.set(0, 1, batches=1)
    run.go(25, moving=())
    run.go(20)
    assert run.quiet()


def test_a_first_step_that_takes_longer_is_reported_for_all_ranks() -> None:
    run = Run(2)
    run.go(32, moving=())
    noticed, notice = run.only(HangNotice)
    assert noticed - run.began == pytest.approx(30.0, abs=0.3)
    assert notice.ranks == (0, 1)
    assert verdict_of(run).message.startswith("No first step after 30 s.")


def test_a_long_first_step_of_one_rank_is_quiet_while_the_others_go_on() -> None:
    run = Run(3, collectives=False)
    run.go(25, moving=(0, 2))
    run.go(5)
    assert run.quiet()


def test_a_long_first_step_that_others_wait_for_is_reported_once_and_withdrawn() -> None:
    run = Run(2)
    run.set(0, where=IN_BACKWARD, collectives=1)
    run.go(60, moving=())
    noticed, notice = run.only(HangNotice)
    assert noticed - run.began == pytest.approx(6.0, abs=0.3)
    assert (notice.ranks, notice.waiting) == ((1,), (0,))
    run.go(3)
    _, withdrawn = run.only(Withdrawn)
    assert withdrawn.ranks == (1,)
    assert not run.all(Act)


def test_an_evaluation_whose_batches_grow_is_no_hang_however_long_others_wait() -> None:
    run = Run(4)
    run.go(10)
    run.set(1, 2, 3, where=IN_ALL_REDUCE, collectives=51)
    run.set(0, collectives=-1)
    run.dog.on_beat(0, run.ranks[0].beat(run.now), run.now)  # the evaluation of rank 0 begins no collectives
    for _ in range(150):
        run.set(0, batches=run.ranks[0].batches + 5, moved=run.now)
        run.go(1, moving=())
    run.set(0, collectives=50)
    run.go(5)
    assert run.quiet()


def test_an_evaluation_that_shows_nothing_is_reported_withdrawn_and_not_reported_again() -> None:
    run = Run(4)
    for _ in range(3):
        run.go(20)
        run.set(0, where=at(60))
        run.set(1, 2, 3, where=IN_ALL_REDUCE, collectives=run.ranks[0].collectives + 1)
        run.go(10, moving=())
        run.set(0, 1, 2, 3, where=at(10), collectives=run.ranks[0].collectives + 1)
    run.go(5)
    _, notice = run.only(HangNotice)
    assert (notice.ranks, notice.waiting) == ((0,), (1, 2, 3))
    _, withdrawn = run.only(Withdrawn)
    assert withdrawn.seconds == pytest.approx(10.0, abs=1.1)
    assert not run.all(Act)


def test_an_evaluation_in_many_lines_is_reported_once() -> None:
    run = Run(2, collectives=False)
    for _ in range(4):
        run.go(20)
        for second in range(20):
            run.set(0, where=at(60 + second % 7))
            run.go(1, moving=(1,))
    run.go(5)
    assert run.only(HangNotice)[1].ranks == (0,)


def test_a_hang_after_a_place_that_may_take_long_is_reported_with_its_own_place() -> None:
    run = Run(1, collectives=False)
    for _ in range(2):
        run.go(20)
        run.set(0, where=at(60))
        run.go(40, moving=())
    began = run.now
    run.set(0, where=IN_LOCK)
    run.go(30, moving=())
    second, notice = run.all(HangNotice)[-1]
    assert len(run.all(HangNotice)) == 2
    assert second - began == pytest.approx(6.0, abs=1.0)
    assert notice.states[0].frame == IN_LOCK.frame


def test_a_place_that_took_long_is_reported_when_it_takes_much_longer() -> None:
    run = Run(1, collectives=False)
    run.go(20)
    run.set(0, where=at(60))
    run.go(10, moving=())
    run.set(0, where=at(10))
    run.go(20)
    began = run.now
    run.set(0, where=at(60))
    run.go(30, moving=())
    assert run.all(HangNotice)[-1][0] - began == pytest.approx(16.0, abs=1.0)


def test_a_short_evaluation_is_quiet() -> None:
    run = Run(2)
    for _ in range(5):
        run.go(10)
        run.set(1, where=IN_ALL_REDUCE, collectives=run.ranks[0].collectives + 1)
        run.go(2.5, moving=())
        run.set(1, where=at(10), collectives=run.ranks[0].collectives)
    assert not run.all(HangNotice)


def test_a_long_checkpoint_is_reported_as_one_and_not_acted_on_for_half_an_hour() -> None:
    run = Run(2)
    run.go(10)
    run.set(0, phase="checkpoint", where=at(50))
    run.set(1, where=IN_ALL_REDUCE, collectives=51)
    run.go(1790, moving=())
    assert "Rank 0 is saving a checkpoint at /home/me/train.py:50" in verdict_of(run).message
    assert not run.all(Act)
    run.go(20, moving=())
    assert run.only(Act)[1].ranks == (0,)


def test_waiting_for_a_commit_is_reported_and_counts_as_saving() -> None:
    run = Run(2, collectives=False)
    run.set(0, 1, reports=7)
    run.go(10)
    run.set(0, 1, awaits="commit of row 7", where=at(50, "run", "report"))
    run.go(1000, moving=())
    assert "Ranks 0 and 1 are waiting for the commit of row 7" in verdict_of(run).message
    assert not run.all(Act)


def test_no_rank_is_reported_while_a_debugger_holds_one_and_clocks_start_again_after_it() -> None:
    run = Run(2, timeout=60)
    run.go(10)
    run.set(0, debugged=True)
    run.set(1, where=IN_ALL_REDUCE, collectives=51)
    run.go(600, moving=())
    assert run.seen == []
    run.set(0, debugged=False)
    run.go(4, moving=())
    assert run.quiet()
    run.go(4, moving=())
    assert run.only(HangNotice)[1].seconds == pytest.approx(5.0, abs=0.3)


def test_a_debugger_that_is_seen_from_outside_counts_too() -> None:
    run = Run(2)
    run.go(10)
    run.set(1, beats=False)
    run.dog.on_debugger_attached(1, run.now)
    run.go(60, moving=(0,))
    assert run.seen == []
    run.set(1, beats=True)
    run.go(20)
    assert run.seen == []


@pytest.mark.parametrize("seconds", [4, 60])
def test_a_stop_of_the_whole_machine_is_nobodys_fault(seconds: int) -> None:
    run = Run(2)
    run.go(10)
    run.dog.on_standstill(seconds)
    run.began += seconds  # the ranks' own clocks stood still too: their idle time does not grow
    for fake in run.ranks:
        fake.moved += seconds
    run.now += seconds
    run.go(20)
    assert run.seen == []


def test_ranks_that_stopped_together_are_recognized_by_their_idle_time() -> None:
    run = Run(2)
    run.go(10)
    run.set(0, 1, beats=False)
    run.go(4, moving=())
    run.set(0, 1, beats=True, moved=run.now)
    run.go(10)
    assert run.quiet()


def test_ranks_that_all_stay_silent_are_all_named() -> None:
    run = Run(2)
    run.go(10)
    run.set(0, 1, beats=False)
    run.go(10, moving=())
    assert run.only(HangNotice)[1].ranks == (0, 1)


def test_a_rank_that_ends_while_others_train_on_is_no_hang() -> None:
    run = Run(3, collectives=False)
    run.go(10)
    run.dog.on_rank_ended(2, run.now)
    run.set(2, beats=False)
    run.go(60, moving=(0, 1))
    assert run.seen == []


def test_reports_between_beats_are_moves() -> None:
    dog = Watchdog(1, 0.0, timeout=None)
    silent = Fake(0, 0.0)
    for second in range(1, 40):
        dog.on_report(0, second - 0.5)
        dog.on_beat(0, silent.beat(second), second)
        assert dog.poll(second) is None


def test_a_notice_has_the_row_of_the_newest_report_although_the_beats_are_older() -> None:
    dog = Watchdog(1, 0.0, timeout=None)
    rank = Fake(0, moved=0.0, reports=1)
    dog.on_beat(0, rank.beat(0.5), 0.5)
    dog.on_report(0, 1.0, 7)
    decision = None
    while not isinstance(decision, HangNotice):
        decision = dog.poll(dog.due())
    assert [state.row for state in decision.states] == [7]


# --------------------------------------------------------------------------- what follows a notice


def test_a_beat_that_only_counts_reports_which_have_come_withdraws_nothing() -> None:
    dog = Watchdog(1, 0.0, timeout=None)
    rank = Fake(0, moved=0.0, reports=1)
    dog.on_beat(0, rank.beat(0.5), 0.5)
    for number, now in ((2, 1.0), (3, 1.5), (4, 2.0)):
        rank.reports, rank.moved = number, now
        dog.on_report(0, now)
    dog.on_beat(0, rank.beat(2.0), 2.0)
    rank.reports, rank.moved = 5, 2.5
    dog.on_report(0, 2.51)
    told: list[Decision | None] = []
    while not any(isinstance(decision, HangNotice) for decision in told):
        told.append(dog.poll(dog.due()))
    later = dog.due()
    dog.on_beat(0, rank.beat(later), later)
    assert dog.poll(later) is None
    rank.reports, rank.moved = 6, later + 1
    dog.on_report(0, later + 1)
    assert isinstance(dog.poll(later + 1), Withdrawn)


def test_a_notice_is_withdrawn_when_the_culprit_moves_with_how_long_it_took() -> None:
    run, _ = hang_while_others_average(IN_LOCK)
    run.set(0, 1, 2, 3, where=at(10), collectives=51)
    run.go(5)
    _, withdrawn = run.only(Withdrawn)
    assert withdrawn.ranks == (1,)
    assert withdrawn.seconds == pytest.approx(12.2, abs=1.0)


def test_a_notice_comes_once_for_one_stall_and_the_act_once_after_two_minutes() -> None:
    run, began = hang_while_others_average(IN_LOCK)
    run.go(600, moving=())
    acted, act = run.only(Act)
    assert acted - began == pytest.approx(120, abs=0.5)
    assert (act.ranks, act.waiting) == ((1,), (0, 2, 3))
    assert explain(act.states, {}, act.seconds).message.startswith("No step for 2 min")
    assert len(run.all(HangNotice)) == 1


def test_the_act_waits_for_three_times_the_longest_pause_that_ended_by_itself() -> None:
    run = Run(1, collectives=False)
    run.go(70, moving=())
    run.go(10)
    began = run.now
    run.set(0, where=IN_LOCK)
    run.go(400, moving=())
    assert run.only(Act)[0] - began == pytest.approx(212, abs=3)


def test_the_act_waits_for_sixty_usual_steps() -> None:
    run = Run(1, collectives=False)
    run.go(60, step=5.0)
    began = run.now
    run.go(400, moving=())
    assert run.only(Act)[0] - began == pytest.approx(300, abs=1)


def test_a_timeout_shorter_than_a_notice_acts_first_and_requests_stacks_before() -> None:
    run = Run(2, timeout=2.0)
    run.go(10)
    began = run.now
    run.set(0, where=IN_ALL_REDUCE, collectives=51)
    run.set(1, where=IN_LOCK)
    run.go(30, moving=())
    acted, act = run.only(Act)
    assert acted - began == pytest.approx(2.0, abs=0.3)
    assert run.all(Suspect)[0][0] < acted
    assert act.ranks == (1,)
    assert acted < run.only(HangNotice)[0] < acted + 3  # for runs that only tell of hangs
    run.go(3)
    assert run.only(Withdrawn)[1].ranks == (1,)


def test_another_culprit_is_named_a_minute_after_the_first_at_the_earliest() -> None:
    run = Run(3, collectives=False)
    run.go(10)
    run.set(1, where=IN_LOCK)
    run.go(20, moving=(0, 2))
    run.set(2, where=at(12))
    run.go(90, moving=(0,))
    (first, one), (second, two) = run.all(HangNotice)
    assert (one.ranks, two.ranks) == ((1,), (1, 2))
    assert 60 <= second - first <= 62
    assert len(run.all(Suspect)) == 2


def test_a_rank_that_returns_while_another_waits_is_counted_from_its_end() -> None:
    run = Run(2)
    run.go(10)
    run.set(1, where=IN_ALL_REDUCE, collectives=51)
    run.set(0, collectives=-1)
    for _ in range(200):
        run.set(0, batches=run.ranks[0].batches + 1, moved=run.now)
        run.go(1, moving=())
    assert run.quiet()
    run.dog.on_rank_ended(0, run.now)
    ended = run.now
    run.set(0, beats=False)
    run.go(10, moving=())
    assert run.only(HangNotice)[0] - ended == pytest.approx(5.0, abs=1.5)
    assert not run.all(Act)


def test_nothing_is_due_when_all_are_over() -> None:
    run = Run(2)
    run.go(3)
    for rank in (0, 1):
        run.dog.on_rank_ended(rank, run.now)
    assert run.dog.poll(run.now) is None
    assert run.dog.due() == math.inf


def test_a_shorter_floor_is_taken_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "NOTICE_DELAY_S", 2.0)
    run = Run(2)
    run.go(10)
    began = run.now
    run.set(0, where=IN_ALL_REDUCE, collectives=51)
    run.set(1, where=IN_LOCK)
    run.go(5, moving=())
    assert run.only(HangNotice)[0] - began == pytest.approx(2.0, abs=0.3)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([1], "rank 1"),
        ([0, 2, 3], "ranks 0, 2 and 3"),
        (range(64), "ranks 0 to 63"),
        ([0, 1, 2, 3, 9], "ranks 0 to 3 and 9"),
        (range(0, 40, 2), "ranks 0, 2, 4, 6, 8, 10, 12 and 13 more"),
    ],
)
def test_ranks_are_named_as_in_a_sentence(ranks: Iterable[int], words: str) -> None:
    assert rank_names(list(ranks)) == words


# --------------------------------------------------------------------------- what holds always

#: Moments and durations on a grid that floats hold exactly, so that shifting them changes nothing.
GRID = 64
wheres = st.sampled_from([None, at(10), IN_LOCK, IN_ALL_REDUCE, IN_BACKWARD, at(20, "loader"), at(50, "run")])
beat_values = st.fixed_dictionaries(
    {
        "reports": st.integers(0, 3),
        "steps": st.integers(0, 3),
        "batches": st.integers(0, 3),
        "idle": st.integers(0, 12 * GRID).map(lambda n: n / GRID),
        "phase": st.sampled_from(["training", "training", "training", "checkpoint", "end"]),
        "row": st.integers(0, 8),
        "collectives": st.integers(-1, 4),
        "awaits": st.sampled_from(["", "", "barrier", "row 7", "commit of row 3", "checkpoints"]),
        "where": wheres,
        "debugged": st.sampled_from([False, False, False, True]),
    }
)
happenings = st.tuples(
    st.integers(1, 6 * GRID).map(lambda n: n / GRID),
    st.integers(0, 3),
    st.one_of(beat_values, beat_values, beat_values, st.sampled_from(["row", "ended", "look", "look"])),
)
histories = st.lists(happenings, max_size=40)


def replay(
    history: list[tuple[float, int, Any]],
    begin: float,
    timeout: float | None = None,
    pause: tuple[int, float] | None = None,
    check: Callable[[Watchdog, float, Decision | None], None] = lambda *_: None,
) -> list[tuple[float, Decision]]:
    """Run a history; what it decided, with moments counted from the beginning, the pause left out of them."""
    now, dog, found = begin, Watchdog(4, begin, timeout=timeout), []
    totals = {rank: [0, 0, 0] for rank in range(4)}
    for number, (seconds, rank, event) in enumerate(history):
        if pause is not None and number == pause[0]:
            dog.on_standstill(pause[1])
            now += pause[1]
            begin += pause[1]
        now += seconds
        while dog.due() <= now:
            moment = max(dog.due(), now - seconds)
            decision = dog.poll(moment)
            assert dog.due() > moment
            check(dog, moment, decision)
            if decision is not None:
                found.append((moment - begin, decision))
        if event == "row":
            dog.on_report(rank, now)
        elif event == "ended":
            dog.on_rank_ended(rank, now)
        elif isinstance(event, dict):
            for index, name in enumerate(("reports", "steps", "batches")):
                totals[rank][index] += event[name]
            counts = dict(zip(("reports", "steps", "batches"), totals[rank], strict=True))
            dog.on_beat(rank, Beat(**{**event, **counts}), now)
    return found


@settings(deadline=None, max_examples=scaled(60))
@given(histories, st.sampled_from([None, 2.0, 30.0]))
def test_ranks_that_are_named_exist_and_are_named_once(
    history: list[tuple[float, int, Any]], timeout: float | None
) -> None:
    for _, decision in replay(history, 1024.0, timeout):
        if isinstance(decision, (HangNotice, Act)):
            named = (*decision.ranks, *decision.waiting)
            assert len(set(named)) == len(named)
            assert set(named) <= set(range(4))
            verdict = explain(decision.states, {}, decision.seconds)
            assert (verdict.culprits, verdict.waiting) == (decision.ranks, decision.waiting)
            assert 1 <= len(verdict.message.splitlines()) <= 4
            assert decision.seconds >= 0


@settings(deadline=None, max_examples=scaled(60))
@given(histories)
def test_there_is_no_notice_while_every_rank_has_moved_within_the_floor(
    history: list[tuple[float, int, Any]],
) -> None:
    def check(dog: Watchdog, now: float, decision: Decision | None) -> None:
        if isinstance(decision, HangNotice):
            assert any(
                state.idle >= watchdog.NOTICE_DELAY_S - 1e-6 for state in decision.states if not state.over
            )

    replay(history, 1024.0, check=check)


@settings(deadline=None, max_examples=scaled(60))
@given(histories, st.sampled_from([None, 2.0, 30.0]), st.integers(0, 2**16))
def test_only_differences_of_time_matter(
    history: list[tuple[float, int, Any]], timeout: float | None, shift: int
) -> None:
    here, there = replay(history, 1024.0, timeout), replay(history, 1024.0 + shift, timeout)
    assert_same(here, there)


@settings(deadline=None, max_examples=scaled(60))
@given(histories, st.integers(0, 39), st.integers(1, 600))
def test_time_in_which_the_controller_stood_still_counts_for_no_rank(
    history: list[tuple[float, int, Any]], number: int, seconds: int
) -> None:
    """A beat tells of no more than the time since the pause: the ranks stood still with it."""
    assert_same(replay(history, 1024.0), replay(history, 1024.0, pause=(number, float(seconds))))


def assert_same(here: list[tuple[float, Decision]], there: list[tuple[float, Decision]]) -> None:
    assert [plain(decision) for _, decision in here] == [plain(decision) for _, decision in there]
    assert [when for when, _ in here] == pytest.approx([when for when, _ in there], abs=1e-6)


def plain(decision: Decision) -> tuple[Any, ...]:
    states: tuple[RankState, ...] = getattr(decision, "states", ())
    who = [(s.rank, s.still, s.silent, s.over, s.begun, rounded(s.idle)) for s in states]
    return type(decision), decision.ranks, rounded(decision.seconds), who


def rounded(seconds: float) -> float:
    """To the microsecond. Histories are made of 128ths of a second, which would often lie just between two."""
    return round(seconds + 3e-7, 6)
