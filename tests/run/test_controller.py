"""The real controller, driven from its first request to its end by a scripted engine: no processes, no waiting."""

from __future__ import annotations

import pickle
import signal
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.run.scripted_run import PATIENCE, Run, Watcher
from tests.support.clock import ManualClock
from tests.support.scripted_engine import ScriptedClaim, ScriptedEngine
from tests.support.scripted_worker import ScriptedWorker

from powertrain.backend import Backend, BackendConfig
from powertrain.checkpoint import commit, committed, uploader
from powertrain.config.checkpoint import CheckpointConfig
from powertrain.engine import base
from powertrain.errors import ResourceError, WireError
from powertrain.lookup.summaries import summarize
from powertrain.run import events as ev
from powertrain.run import lifecycle
from powertrain.run.health.clearing import ABANDON_TIMEOUT_S, CUT_SHORT_KILL_TIMEOUT_S, KILL_TIMEOUT_S
from powertrain.run.record import journal
from powertrain.run.workers import attempt as attempt_module
from powertrain.run.workers.reports import Reports
from powertrain.run.workers.starting import START_TIMEOUT_S
from powertrain.storage import boundaries
from powertrain.wire.from_worker import Arrived, DebugClosed, DebugOpened, DebugQuit
from powertrain.wire.values import Frame
from powertrain.worker.checkpoints import newest_reports
from powertrain.worker.place import DataSettings


def two_reports(worker: ScriptedWorker) -> str:
    worker.report({"loss": 1.0 + worker.rank})
    worker.report({"loss": 0.5 + worker.rank})
    return f"value of rank {worker.rank}"


# --------------------------------------------------------------------------- the good path


def test_a_run_ends_finished_with_the_metrics_and_the_value_of_rank_zero(run: Run) -> None:
    outcome = run.go(ScriptedEngine(two_reports))
    assert (outcome.state, outcome.metrics, outcome.failures) == ("finished", {"loss": 0.5}, ())
    assert pickle.loads(outcome.value) == "value of rank 0"
    assert run.watcher.rows == [(1, [{"loss": 1.0}, {"loss": 2.0}]), (2, [{"loss": 0.5}, {"loss": 1.5}])]
    assert run.points == [(0, 0, 1), (0, 0, 2), (0, 1, 1), (0, 1, 2)]


def test_the_journal_of_a_run_replays_to_the_state_it_ended_in(run: Run) -> None:
    run.go(ScriptedEngine(two_reports))
    assert journal.read(run.storage) == run.watcher.events
    state = journal.replay(journal.read(run.storage))
    assert (state.state, state.attempt, state.world_size) == ("finished", 0, 2)


def test_slots_that_come_in_parts_are_waited_for_and_the_reason_is_reported(run: Run) -> None:
    def in_parts(engine: ScriptedEngine, claim: ScriptedClaim) -> None:
        engine.grant(claim, 1)
        engine.say_waiting(claim, "two nodes are starting")
        engine.grant(claim, 1)
        engine.grant(claim, 1)

    engine = ScriptedEngine(two_reports, on_request=in_parts, hosts=("a", "b"))
    assert run.go(engine, workers=3).state == "finished"
    (waited,) = run.watcher.all_of(ev.SlotsWaited)
    reason = "two nodes are starting; it waits as long as it takes (queue_timeout_s sets an end)"
    assert (waited.granted, waited.count, waited.reason) == (1, 3, reason)
    (started,) = run.watcher.all_of(ev.AttemptStarted)
    assert started.hosts == ("a", "a", "b")


def test_metrics_that_died_with_their_ranks_are_named_once_unless_they_are_made_again(run: Run) -> None:
    """Rank 1 keeps a report that it never sends, too large for the file beside it; a checkpoint comes after it."""
    large = {"text": "x" * newest_reports.HALF_BYTES}
    is_reported = threading.Event()

    def play(worker: ScriptedWorker) -> None:
        if worker.attempt > 0:
            return
        if worker.rank == 1:
            worker.service.post = lambda message, **_: None  # type: ignore[method-assign]
        worker.report({"row": 1})
        worker.report(large if worker.rank == 1 else {"row": 2})
        worker.report({"row": 3}, files={"state": b"saved"} if worker.rank == 0 else None)
        if worker.rank == 0:
            is_reported.set()
        worker.report(large if worker.rank == 1 else {"row": 4})
        if worker.rank == 1:
            worker.wait_for(is_reported)
            worker.die(-signal.SIGKILL)
        worker.hang()

    assert run.go(ScriptedEngine(play), max_failures=1).state == "finished"
    said = [text for text in run.watcher.warnings() if "ended before all reports" in text]
    assert said == [
        "Rank 1 ended before all reports of row 2 were sent: metrics in them are missing in the results."
    ]


def test_a_remark_about_waiting_that_comes_after_the_last_grant_harms_nothing(run: Run) -> None:
    def late_remark(engine: ScriptedEngine, claim: ScriptedClaim) -> None:
        engine.grant(claim, claim.count)
        engine.say_waiting(claim, "this was true a moment ago")

    assert run.go(ScriptedEngine(two_reports, on_request=late_remark)).state == "finished"


def test_fewer_workers_are_asked_for_where_the_engine_can_never_give_more(run: Run) -> None:
    outcome = run.go(ScriptedEngine(two_reports, most=2), min_workers=1, max_workers=4)
    assert outcome.state == "finished"
    assert [e.count for e in run.watcher.all_of(ev.SlotsRequested)] == [4, 3, 2]
    assert run.watcher.all_of(ev.AttemptStarted)[0].world_size == 2


def test_a_request_that_can_never_be_met_is_the_callers_error(run: Run) -> None:
    engine = ScriptedEngine(two_reports, most=1)
    with pytest.raises(ResourceError, match="2 slot"):
        run.go(engine)
    assert engine.forked == []


def waits(engine: ScriptedEngine, claim: ScriptedClaim) -> None:
    engine.say_waiting(claim, "two GPUs are missing")


def refuses(engine: ScriptedEngine, claim: ScriptedClaim) -> None:
    engine._tell(base.ClaimRefused("scripted-1", "a node cannot reach the run"))


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (lambda: ScriptedEngine(most=1), "2 slot"),
        (
            lambda: ScriptedEngine(on_request=waits),
            "There was no room for the run within 0.2 s: two GPUs are",
        ),
        (lambda: ScriptedEngine(on_request=refuses), "a node cannot reach the run"),
    ],
    ids=["can never be met", "no room in time", "refused"],
)
def test_a_run_without_room_is_written_down_as_failed_and_can_be_started_again(
    run: Run, engine: Callable[[], ScriptedEngine], words: str
) -> None:
    with pytest.raises(ResourceError, match=words) as refused:
        run.go(engine(), queue_timeout=0.2)
    state = journal.replay(journal.read(run.storage))
    assert (state.state, state.reason) == ("failed", str(refused.value))
    assert isinstance(run.watcher.events[-1], ev.Ended)
    summary = summarize("scripted", journal.read(run.storage))
    assert (summary.state, summary.seconds < 60.0) == ("failed", True)
    assert run.go(ScriptedEngine(two_reports)).state == "finished"
    assert journal.replay(journal.read(run.storage)).state == "finished"


def test_a_run_that_finds_no_room_after_a_failure_keeps_what_it_has_and_says_why(run: Run) -> None:
    def saves_and_hangs(worker: ScriptedWorker) -> None:
        worker.report({"row": 1}, files={f"{worker.rank}": b"x"})
        worker.hang()

    def only_once(engine: ScriptedEngine, claim: ScriptedClaim) -> None:
        if len(engine.claims) > 1:
            raise ResourceError("the other node is gone")
        engine.grant(claim, claim.count)

    def lose_a_slot(event: ev.Event) -> None:
        if isinstance(event, ev.Committed):
            engine.lose(engine.claims[0].slots[-1])

    engine = ScriptedEngine(saves_and_hangs, on_request=only_once)
    run.watcher.on_event = lose_a_slot
    with pytest.raises(ResourceError, match="the other node is gone"):
        run.go(engine)
    state = journal.replay(journal.read(run.storage))
    assert (state.state, state.reason, len(state.committed)) == ("failed", "the other node is gone", 1)


def test_ranks_meet_at_a_collective_and_get_what_rank_zero_brought(run: Run) -> None:
    received: dict[int, bytes] = {}

    def play(worker: ScriptedWorker) -> None:
        for turn in range(3):
            received[worker.rank] = worker.meet(b"%d" % turn if worker.rank == 0 else b"ignored")

    assert run.go(ScriptedEngine(play), workers=3).state == "finished"
    assert received == {0: b"2", 1: b"2", 2: b"2"}


def test_a_report_with_a_barrier_returns_when_the_row_is_complete(run: Run) -> None:
    order: list[str] = []
    may_report = threading.Event()

    def play(worker: ScriptedWorker) -> None:
        if worker.rank == 1:
            worker.wait_for(may_report)
            order.append("rank 1 reports")
            worker.report({"x": 1}, barrier=True)
        else:
            worker.report({"x": 0}, solo=True)
            may_report.set()
            worker.report({"x": 0}, barrier=True)
            order.append("rank 0 goes on")

    assert run.go(ScriptedEngine(play)).state == "finished"
    assert order == ["rank 1 reports", "rank 0 goes on"]


def test_all_ranks_but_the_first_let_reports_gather_and_none_is_lost(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt_module, "gathering_seconds", lambda ranks: 1e6)
    told: dict[int, float] = {}

    def play(worker: ScriptedWorker) -> None:
        told[worker.rank] = worker.service.gather
        for _ in range(3):
            worker.report({"loss": 1.0})

    assert run.go(ScriptedEngine(play), workers=3).state == "finished"
    assert told == {0: 0.0, 1: 1e6, 2: 1e6}
    assert run.points == [(0, rank, row) for rank in range(3) for row in (1, 2, 3)]
    assert [(row, None in metrics) for row, metrics in run.watcher.rows] == [
        (1, False),
        (2, False),
        (3, False),
    ]


def test_a_rank_that_waits_for_a_row_alone_waits_no_longer_than_the_others_gather(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt_module, "gathering_seconds", lambda ranks: 0.2)
    complete = threading.Event()

    def play(worker: ScriptedWorker) -> None:
        worker.report({}, barrier=worker.rank == 0)
        if worker.rank == 0:
            complete.set()
        worker.wait_for(complete)  # nothing else sends what the others have reported

    assert run.go(ScriptedEngine(play), workers=3).state == "finished"


class HookConfig(BackendConfig):
    def __init__(self, backend: type[Backend]) -> None:
        self._backend = backend

    @property
    def backend_cls(self) -> type[Backend]:
        return self._backend


def test_hooks_reach_every_worker_before_and_after_training(run: Run) -> None:
    seen: list[Any] = []

    class Hooks(Backend):
        def on_start(self, worker_group: Any, backend_config: Any) -> None:
            seen.append(("start", len(worker_group), worker_group.execute(max, 3, 4)))

        def on_training_start(self, worker_group: Any, backend_config: Any) -> None:
            seen.append(("training", worker_group.execute_single(1, min, 3, 4)))

        def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
            seen.append(("shutdown", [f.result() for f in worker_group.execute_async(abs, -2)]))

    assert run.go(ScriptedEngine(two_reports), backend=HookConfig(Hooks)).state == "finished"
    assert seen == [("start", 2, [4, 4]), ("training", 3), ("shutdown", [2, 2])]


def test_a_hook_that_fails_in_a_worker_is_that_ranks_failure(run: Run) -> None:
    class Hooks(Backend):
        def on_start(self, worker_group: Any, backend_config: Any) -> None:
            worker_group.execute_single(1, int, "not a number")

    outcome = run.go(ScriptedEngine(two_reports), backend=HookConfig(Hooks))
    assert outcome.state == "failed"
    assert [(f.rank, f.kind, f.error_type) for f in outcome.failures] == [(1, "start", "ValueError")]
    (start,) = run.watcher.all_of(ev.StartupMeasured)
    assert (start.unfinished, list(start.phases)[-1]) == ((0, 1), "process group")


def test_a_worker_that_dies_while_a_hook_waits_for_it_ends_the_wait(run: Run) -> None:
    class Hooks(Backend):
        def on_start(self, worker_group: Any, backend_config: Any) -> None:
            engine.end(engine.forked[1].slot, -signal.SIGSEGV)
            worker_group.execute(abs, -1)

    engine = ScriptedEngine(two_reports)
    outcome = run.go(engine, backend=HookConfig(Hooks))
    assert outcome.state == "failed"
    assert [(f.rank, f.kind) for f in outcome.failures] == [(1, "signal")]


# --------------------------------------------------------------------------- failures


def saves_each_row(fails: Callable[[ScriptedWorker], None], rows: int = 4) -> Callable[[ScriptedWorker], Any]:
    """A play that commits a checkpoint with every row, all ranks in step, and may fail after any."""

    def play(worker: ScriptedWorker) -> None:
        while worker.row < rows:
            row = worker.row + 1
            worker.report({"row": row}, files={f"rank-{worker.rank}": b"%d" % row}, barrier=True)
            fails(worker)

    return play


def test_a_retry_starts_from_the_newest_commit_and_rows_go_on_from_it(run: Run) -> None:
    began_with: list[tuple[int, int, str]] = []

    def fails(worker: ScriptedWorker) -> None:
        if worker.attempt == 0 and worker.row == 2 and worker.rank == 1:
            raise ZeroDivisionError("division by zero")
        if worker.attempt == 0 and worker.row == 2:
            worker.hang()

    def play(worker: ScriptedWorker) -> None:
        began_with.append((worker.attempt, worker.row, worker.checkpoint and Path(worker.checkpoint).name))
        saves_each_row(fails)(worker)

    outcome = run.go(ScriptedEngine(play), max_failures=1)
    assert (outcome.state, outcome.metrics) == ("finished", {"row": 4})
    assert sorted(began_with) == [(0, 0, ""), (0, 0, ""), *[(1, 2, "checkpoint_000002")] * 2]
    (failed,) = run.watcher.all_of(ev.Failed)
    assert (failed.decision, failed.failures[0].rank, failed.failures[0].row) == ("retry", 1, 2)
    assert failed.failures[0].summary == "rank 1 raised ZeroDivisionError: division by zero"
    assert failed.failures[0].source.startswith("raise ZeroDivisionError")
    assert [e.row for e in run.watcher.all_of(ev.Committed)] == [1, 2, 3, 4]
    assert [e.first_row for e in run.watcher.all_of(ev.AttemptStarted)] == [1, 3]
    assert [e.attempt for e in run.watcher.all_of(ev.StartupMeasured)] == [0, 1], "one for each attempt"
    state = journal.replay(journal.read(run.storage))
    assert [state.is_live(0, 2), state.is_live(0, 3), state.is_live(1, 3)] == [True, False, True]


def test_points_beyond_the_restored_commit_stay_on_disk_and_their_rows_are_reported_again(run: Run) -> None:
    def play(worker: ScriptedWorker) -> None:
        if worker.attempt == 0:
            worker.report({"row": 1}, files={"state": b"1"}, barrier=True)
            worker.report({"row": 2}, barrier=True)
            worker.die(3)
        while worker.row < 3:
            worker.report({"row": worker.row + 1})

    assert run.go(ScriptedEngine(play), workers=1, max_failures=1).state == "finished"
    assert run.points == [(0, 0, 1), (0, 0, 2), (1, 0, 2), (1, 0, 3)]


def test_a_failure_beyond_the_budget_ends_the_run_and_keeps_what_it_had(run: Run) -> None:
    def play(worker: ScriptedWorker) -> None:
        worker.report({"loss": 1.0}, barrier=True)
        raise ValueError("always")

    outcome = run.go(ScriptedEngine(play), max_failures=2)
    assert (outcome.state, outcome.metrics) == ("failed", {"loss": 1.0})
    assert [e.decision for e in run.watcher.all_of(ev.Failed)] == ["retry", "retry", "give_up"]
    assert "max_failures=2" in outcome.reason
    assert outcome.failures[0].error_type == "ValueError"


@pytest.mark.parametrize(
    ("code", "oom", "kind", "words"),
    [
        (-signal.SIGSEGV, False, "signal", "SIGSEGV (segmentation fault"),
        (-signal.SIGKILL, False, "signal", "SIGKILL"),
        (-signal.SIGKILL, True, "oom", "memory ran out"),
        (3, False, "exit", "exited with code 3"),
        (0, False, "exit", "exited with code 0"),
    ],
)
def test_a_death_without_a_word_is_decoded(run: Run, code: int, oom: bool, kind: str, words: str) -> None:
    def play(worker: ScriptedWorker) -> None:
        worker.report({"x": 1}, barrier=True)
        if worker.rank == 1:
            worker.die(code, oom)
        worker.hang()

    outcome = run.go(ScriptedEngine(play))
    assert outcome.state == "failed"
    (failure,) = outcome.failures
    assert (failure.rank, failure.kind, failure.row) == (1, kind, 1)
    assert words in failure.summary


def test_the_cause_is_found_though_its_echo_arrives_first(run: Run) -> None:
    echo_sent = threading.Event()

    def play(worker: ScriptedWorker) -> None:
        if worker.rank == 0:
            raise RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:4711")
        worker.wait_for(echo_sent)
        worker.die(-signal.SIGSEGV)

    engine = ScriptedEngine(play)
    original = Reports.on_outcome

    def on_outcome(reports: Reports, member: Any, message: Any) -> None:
        original(reports, member, message)
        echo_sent.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reports, "on_outcome", on_outcome)
        patch.setattr("powertrain.run.health.recovery.CAUSE_TIMEOUT_S", 30.0)
        outcome = run.go(engine)
    assert [(f.rank, f.kind, f.secondary) for f in outcome.failures] == [
        (1, "signal", False),
        (0, "raised", True),
    ]


def test_an_echo_is_not_taken_for_the_cause_while_the_engine_is_in_doubt(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("powertrain.run.health.recovery.CAUSE_TIMEOUT_S", 0.05)
    asked = threading.Event()

    class Doubtful(ScriptedEngine):
        def is_in_doubt(self, since: float) -> bool:
            asked.set()
            return True

    def play(worker: ScriptedWorker) -> None:
        if worker.rank == 0:
            raise ConnectionResetError("Connection reset by peer")
        worker.wait_for(asked)
        worker.die(-signal.SIGSEGV)

    outcome = run.go(Doubtful(play))
    assert [(f.rank, f.kind, f.secondary) for f in outcome.failures] == [
        (1, "signal", False),
        (0, "raised", True),
    ]


def test_an_echo_without_a_cause_is_taken_for_the_cause_after_a_moment(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("powertrain.run.health.recovery.CAUSE_TIMEOUT_S", 0.05)

    def play(worker: ScriptedWorker) -> None:
        if worker.rank == 0:
            raise ConnectionResetError("Connection reset by peer")
        worker.hang()

    outcome = run.go(ScriptedEngine(play))
    assert (outcome.state, outcome.failures[0].rank) == ("failed", 0)


def test_system_exit_with_a_code_is_a_failure_of_kind_exit(run: Run) -> None:
    def play(worker: ScriptedWorker) -> None:
        raise SystemExit(3)

    outcome = run.go(ScriptedEngine(play), workers=1)
    assert (outcome.state, outcome.failures[0].kind) == ("failed", "exit")


def test_an_engine_that_does_not_restart_ends_the_run_whatever_the_budget(run: Run) -> None:
    def play(worker: ScriptedWorker) -> None:
        raise ValueError("once")

    outcome = run.go(ScriptedEngine(play, restarts=False), max_failures=5)
    assert outcome.state == "failed"
    assert len(run.watcher.all_of(ev.AttemptStarted)) == 1


# --------------------------------------------------------------------------- losses


def loses(engine_of: Callable[[], ScriptedEngine], times: int) -> Callable[[ScriptedWorker], None]:
    """Rank 1's slot is taken away in each of the first ``times`` attempts."""

    def fails(worker: ScriptedWorker) -> None:
        if worker.attempt < times:
            if worker.rank == 1:
                taken = threading.Thread(target=engine_of().lose, args=(worker.process.slot, "spot instance"))
                taken.start()
            worker.hang()

    return fails


def test_a_loss_is_free_of_max_failures(run: Run) -> None:
    engine = ScriptedEngine(saves_each_row(loses(lambda: engine, times=3), rows=5))
    outcome = run.go(engine, max_failures=0)
    assert outcome.state == "finished"
    lost = run.watcher.all_of(ev.Lost)
    assert [(e.ranks, e.decision) for e in lost] == [((1,), "retry")] * 3
    assert "spot instance" in lost[0].reason
    assert len(engine.claims) == 4


def test_three_losses_without_a_commit_between_them_end_the_run(run: Run) -> None:
    def play(worker: ScriptedWorker) -> None:
        worker.report({"x": 1}, barrier=True)
        loses(lambda: engine, times=9)(worker)

    engine = ScriptedEngine(play)
    outcome = run.go(engine, max_failures=-1)
    assert outcome.state == "failed"
    assert [e.decision for e in run.watcher.all_of(ev.Lost)] == ["retry", "retry", "give_up"]
    assert "3 losses" in outcome.reason


def test_a_slot_lost_before_all_are_there_is_asked_for_again(run: Run) -> None:
    def gives_and_takes(engine: ScriptedEngine, claim: ScriptedClaim) -> None:
        if len(engine.claims) == 1:
            (slot,) = engine.grant(claim, 1)
            engine.lose(slot)
            engine.grant(claim, claim.count - 1)
        else:
            engine.grant(claim, claim.count)

    assert run.go(ScriptedEngine(two_reports, on_request=gives_and_takes)).state == "finished"


def test_a_slot_lost_after_every_function_has_returned_does_not_start_the_run_again(run: Run) -> None:
    class Hooks(Backend):
        def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
            engine.lose(engine.forked[1].slot)

    engine = ScriptedEngine(two_reports)
    assert run.go(engine, backend=HookConfig(Hooks)).state == "finished"
    assert len(run.watcher.all_of(ev.AttemptStarted)) == 1


# --------------------------------------------------------------------------- absent and late ranks


def test_a_rank_that_never_reports_is_recorded_absent_and_rows_go_on(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Longer than a busy machine takes between the reports of the other two.
    monkeypatch.setattr("powertrain.run.workers.reports.ABSENT_TIMEOUT_S", 1.0)
    seen = threading.Event()
    run.watcher.on_row = lambda row: seen.set() if row == 2 else None

    def play(worker: ScriptedWorker) -> None:
        if worker.rank != 1:
            worker.report({"x": worker.rank}, files={"state": b""} if worker.rank == 0 else None)
            worker.report({"x": worker.rank})
        worker.wait_for(seen)

    assert run.go(ScriptedEngine(play), workers=3).state == "finished"
    (absent,) = run.watcher.all_of(ev.RanksAbsent)
    assert (absent.ranks, absent.row) == ((1,), 1)
    assert [row for row, _ in run.watcher.rows] == [1, 2]
    assert [e.row for e in run.watcher.all_of(ev.Committed)] == [1]


def test_a_rank_declared_absent_can_still_report_and_is_not_left_at_its_barrier(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("powertrain.run.workers.reports.ABSENT_TIMEOUT_S", 0.02)
    seen = threading.Event()
    run.watcher.on_row = lambda row: seen.set() if row == 2 else None

    def play(worker: ScriptedWorker) -> None:
        if worker.rank == 1:
            worker.wait_for(seen)
        worker.report({"x": worker.rank}, barrier=worker.rank == 1)
        worker.report({"x": worker.rank})

    assert run.go(ScriptedEngine(play)).state == "finished"


# --------------------------------------------------------------------------- debuggers


def stop_in_a_debugger(worker: ScriptedWorker, seconds: float, opened: threading.Event | None = None) -> None:
    """Be held for so long by a debugger that has this process's own terminal."""
    opened, frame = opened or threading.Event(), Frame(file="train.py", line=31, function="train_func")
    worker.service.on_debug = lambda _: opened.set()
    worker.service.send_now(DebugOpened(frame=frame, native=True))
    worker.wait_for(opened)
    enough = threading.Event()
    threading.Timer(seconds, enough.set).start()
    worker.wait_for(enough)
    worker.service.send_now(DebugClosed())


def test_no_rank_is_absent_while_a_debugger_is_open(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("powertrain.run.workers.reports.ABSENT_TIMEOUT_S", 1.0)

    def play(worker: ScriptedWorker) -> None:
        if worker.rank == 1:
            stop_in_a_debugger(worker, seconds=1.5)
        worker.report({"x": worker.rank})

    assert run.go(ScriptedEngine(play)).state == "finished"
    assert run.watcher.all_of(ev.RanksAbsent) == []
    assert not run.watcher.is_held


def test_a_failure_waits_until_the_debugger_of_another_rank_is_left(run: Run) -> None:
    left: list[int] = []
    opened = threading.Event()

    def play(worker: ScriptedWorker) -> None:
        if worker.rank == 0:
            worker.wait_for(opened)
            raise ValueError("shard 7 is empty")
        stop_in_a_debugger(worker, seconds=0.2, opened=opened)
        left.append(worker.rank)
        worker.hang()

    outcome = run.go(ScriptedEngine(play))
    assert (outcome.state, [failure.rank for failure in outcome.failures]) == ("failed", [0])
    assert left == [1]


def test_a_run_that_is_taken_over_while_a_failure_waits_for_a_debugger_does_not_start_again(run: Run) -> None:
    opened, failed = threading.Event(), threading.Event()

    def play(worker: ScriptedWorker) -> None:
        if worker.attempt == 0 and worker.rank == 0:
            worker.wait_for(opened)
            failed.set()
            raise ValueError("shard 7 is empty")
        if worker.attempt == 0:
            worker.service.on_debug = lambda _: opened.set()
            frame = Frame(file="train.py", line=31, function="f")
            worker.service.send_now(DebugOpened(frame=frame, native=True))
            worker.wait_for(failed)
            threading.Timer(0.2, run.controller.post_lease_lost, ["somebody else has it"]).start()
            worker.hang()

    outcome = run.go(ScriptedEngine(play), max_failures=3)
    assert (outcome.state, len(run.watcher.all_of(ev.AttemptStarted))) == ("failed", 1)


def test_a_run_whose_debugger_is_quit_is_stopped_and_says_where(run: Run) -> None:
    def play(worker: ScriptedWorker) -> None:
        if worker.rank == 1:
            frame = Frame(file="/home/me/train.py", line=31, function="train_func")
            worker.service.send_now(DebugQuit(frame=frame))
        worker.hang()

    outcome = run.go(ScriptedEngine(play))
    assert (outcome.state, outcome.interrupted) == ("stopped", False)
    assert outcome.reason == "rank 1 was quit in its debugger at train.py:31"


# --------------------------------------------------------------------------- data


def saves_its_place(worker: ScriptedWorker, position: int) -> None:
    """Report a checkpoint that keeps where data stand."""
    stage = worker._stage
    extras = {"data": {"train": {"epoch": 0, "position": position, "rows": 100}}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            worker,
            "_stage",
            lambda *args: msgspec.structs.replace(stage(*args), extras=extras),
            raising=False,
        )
        worker.report({"position": position}, files={f"rank-{worker.rank}": b"x"}, barrier=True)


def test_an_attempt_gets_the_data_position_of_its_own_runs_checkpoint(run: Run) -> None:
    told: dict[int, Any] = {}

    def play(worker: ScriptedWorker) -> None:
        told[worker.attempt] = worker.place.start.data_positions
        saves_its_place(worker, 40 + worker.attempt)
        if worker.attempt == 0:
            worker.die(3) if worker.rank == 1 else worker.hang()

    assert run.go(ScriptedEngine(play), max_failures=1, begin_from="/elsewhere").state == "finished"
    assert told[0] == {}  # what another run's checkpoint says of data is not meant for this one
    assert told[1] == {"train": {"epoch": 0, "position": 40, "rows": 100}}


def test_a_rank_gets_the_settings_of_its_data(run: Run) -> None:
    places: list[Any] = []
    spec: dict[str, Any] = {
        "datasets": b"pickled",
        "data": DataSettings(
            seed=7,
            cache="/blocks",
            fingerprints={"train": "f"},
            memory_bytes=2**21,
            on_change="restart_epoch",
        ),
    }
    run.go(
        ScriptedEngine(lambda worker: places.append((worker.place, worker.spec.datasets))), workers=1, **spec
    )
    ((place, datasets),) = places
    assert datasets == b"pickled"
    assert place.data == spec["data"]


def test_watchers_of_the_data_learn_how_far_rank_zero_has_read(run: Run) -> None:
    heard = threading.Event()

    class Hearing(Watcher):
        def data(self, text: str) -> None:
            super().data(text)
            heard.set()

    run.watcher = Hearing()

    def play(worker: ScriptedWorker) -> None:
        worker.service.describe_data = lambda: f"train: epoch {worker.rank}, 45 %"
        worker.wait_for(heard)

    assert run.go(ScriptedEngine(play)).state == "finished"
    assert set(run.watcher.read) == {"train: epoch 0, 45 %"}


def test_it_is_said_which_rank_is_late(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("powertrain.run.workers.reports.LATE_INTERVAL_S", 0.01)
    told = threading.Event()

    class Told(Watcher):
        def waiting(self, row: int, ranks: Sequence[int], seconds: float) -> None:
            super().waiting(row, ranks, seconds)
            if row == 2:  # on a busy machine a rank may be late with the first row too
                told.set()

    run.watcher = Told()

    def play(worker: ScriptedWorker) -> None:
        worker.report({"x": 1}, barrier=True)
        if worker.rank == 1:
            worker.wait_for(told)
        worker.report({"x": 2})

    assert run.go(ScriptedEngine(play)).state == "finished"
    assert (2, [1]) in run.watcher.late


# --------------------------------------------------------------------------- ending early


def reports_for_ever(stopped_at: dict[int, int]) -> Callable[[ScriptedWorker], None]:
    """Ranks run apart by up to 20 rows and stop nowhere by themselves."""

    def play(worker: ScriptedWorker) -> None:
        try:
            while True:
                row = worker.row + 1
                worker.report({"row": row}, barrier=row % 20 == 0)
        finally:
            stopped_at[worker.rank] = worker.row

    return play


def test_a_stop_criterion_acts_at_one_boundary_on_every_rank(run: Run) -> None:
    stopped_at: dict[int, int] = {}
    outcome = run.go(ScriptedEngine(reports_for_ever(stopped_at)), workers=4, stop={"row": 5})
    assert outcome.state == "finished"
    assert "row=5 has reached 5" in outcome.reason
    assert len(set(stopped_at.values())) == 1
    assert outcome.metrics == {"row": stopped_at[0]}
    assert run.watcher.rows[-1][0] == stopped_at[0]
    assert not outcome.interrupted


def test_a_loop_that_asks_can_save_before_it_is_stopped(run: Run) -> None:
    def play(worker: ScriptedWorker) -> None:
        while True:
            if worker.should_checkpoint():
                worker.report({"saved": True}, files={f"rank-{worker.rank}": b"state"})
            worker.report({"saved": False}, barrier=worker.row % 5 == 0)

    outcome = run.go(ScriptedEngine(play), stop={"training_iteration": 3})
    assert (outcome.state, outcome.metrics) == ("finished", {"saved": True})
    assert len(run.watcher.all_of(ev.Committed)) == 1


def test_a_stop_function_that_raises_is_reported_and_the_run_goes_on(run: Run) -> None:
    def stop(name: str, result: dict[str, Any]) -> bool:
        raise KeyError("accuracy")

    assert run.go(ScriptedEngine(two_reports), stop=stop).state == "finished"
    assert any("KeyError" in message for message in run.watcher.warnings())


def test_one_interrupt_ends_the_run_at_a_boundary(run: Run) -> None:
    stopped_at: dict[int, int] = {}
    run.watcher.on_row = lambda row: run.interrupt() if row == 3 else None
    outcome = run.go(ScriptedEngine(reports_for_ever(stopped_at)))
    assert (outcome.state, outcome.reason, outcome.interrupted) == ("stopped", "interrupted", True)
    assert len(set(stopped_at.values())) == 1


def test_a_second_interrupt_ends_a_run_that_does_not_come_to_a_boundary(run: Run) -> None:
    def once_more(event: ev.Event) -> None:
        if isinstance(event, ev.Stopping):
            run.interrupt()

    run.watcher.on_event = once_more
    run.watcher.on_row = lambda _: run.interrupt()

    def play(worker: ScriptedWorker) -> None:
        worker.report({"x": 1})
        worker.hang()

    outcome = run.go(ScriptedEngine(play))
    assert (outcome.state, outcome.interrupted, outcome.metrics) == ("stopped", True, {"x": 1})


class Unkillable(ScriptedEngine):
    """Its processes do not end when they are killed, as where their node or their server does not answer."""

    def __init__(
        self,
        *arguments: Any,
        ends_at: int = 0,
        on_first_kill: Callable[[], None] = lambda: None,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._on_first_kill = on_first_kill
        #: The SIGKILL that ends a process, counted for each; 0 for none.
        self.ends_at, self.kills = ends_at, Counter[str]()

    def signal(self, slot: base.Slot, number: signal.Signals) -> None:
        if not self.kills and number == signal.SIGKILL:
            self._on_first_kill()
        self.kills[slot.id] += number == signal.SIGKILL
        if self.kills[slot.id] == self.ends_at:
            super().signal(slot, number)


@pytest.mark.parametrize("ends_at", [0, 2])
def test_a_second_interrupt_ends_a_run_whose_processes_do_not_end(run: Run, ends_at: int) -> None:
    """They are killed again, and then no longer waited for."""
    run.clock = ManualClock(start=1e6)
    timeouts = [CUT_SHORT_KILL_TIMEOUT_S, *([] if ends_at else [ABANDON_TIMEOUT_S])]

    def play(worker: ScriptedWorker) -> None:
        worker.report({"x": 1})
        if worker.rank == 0:
            run.interrupt()
        worker.hang()

    run.watcher.on_row = lambda _: run.interrupt()
    engine = Unkillable(play, ends_at=ends_at, on_first_kill=lambda: run.pass_time(*timeouts))
    outcome = run.go(engine)
    assert (outcome.state, outcome.interrupted) == ("stopped", True)
    assert set(engine.kills.values()) == {2}
    abandoned = [text for text in run.watcher.warnings() if "no longer waits for them" in text]
    assert abandoned == (
        [] if ends_at else ["Ranks [0, 1] were killed and did not end; the run no longer waits for them."]
    )


def test_a_failed_attempt_is_begun_again_though_its_processes_do_not_end(run: Run) -> None:
    run.clock = ManualClock(start=1e6)

    def play(worker: ScriptedWorker) -> None:
        worker.report({"x": 1}, barrier=True)  # a rank that has trained is started again without a delay
        if worker.attempt == 0 and worker.rank == 0:
            raise ValueError("no")
        if worker.attempt == 0:
            worker.hang()

    engine = Unkillable(play, ends_at=2, on_first_kill=lambda: run.pass_time(KILL_TIMEOUT_S))
    assert run.go(engine, max_failures=1).state == "finished"


def test_an_interrupt_while_slots_are_waited_for_ends_at_once(run: Run) -> None:
    def busy(engine: ScriptedEngine, claim: ScriptedClaim) -> None:
        engine.say_waiting(claim, "nothing is free")
        run.interrupt()

    outcome = run.go(ScriptedEngine(two_reports, on_request=busy))
    assert (outcome.state, outcome.interrupted) == ("stopped", True)
    assert run.watcher.all_of(ev.AttemptStarted) == []


def test_an_interrupt_during_the_start_hooks_ends_at_once(run: Run) -> None:
    class Hooks(Backend):
        def on_start(self, worker_group: Any, backend_config: Any) -> None:
            run.interrupt()

    outcome = run.go(ScriptedEngine(lambda worker: worker.hang()), backend=HookConfig(Hooks))
    assert (outcome.state, outcome.interrupted) == ("stopped", True)


def test_an_interrupted_run_goes_on_where_it_was_committed(run: Run) -> None:
    def interrupt_once(event: ev.Event) -> None:
        if isinstance(event, ev.Committed) and len(run.watcher.all_of(ev.Committed)) == 1:
            run.interrupt()

    run.watcher.on_event = interrupt_once
    assert run.go(ScriptedEngine(saves_each_row(lambda _: None, rows=10_000))).state == "stopped"
    last = run.watcher.all_of(ev.Committed)[-1].row
    run.watcher.on_event = lambda event: None
    began_at: list[int] = []

    def play(worker: ScriptedWorker) -> None:
        began_at.append(worker.row)
        worker.report({"row": worker.row + 1})

    assert run.go(ScriptedEngine(play)).state == "finished"
    assert began_at == [last, last]
    assert [e.attempt for e in run.watcher.all_of(ev.AttemptStarted)] == [0, 1]


# --------------------------------------------------------------------------- faults outside the workers


class Careless:
    """A callback that raises whenever it is called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def after_report(self, context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        self.calls.append("after_report")
        raise RuntimeError("a fault in my own callback")

    def on_event(self, context: Any, event: ev.Event) -> None:
        self.calls.append("on_event")
        raise LookupError("another fault")


def test_a_callback_that_raises_is_survived_and_reported_once_per_method(run: Run) -> None:
    callback = Careless()
    assert run.go(ScriptedEngine(two_reports), callbacks=[callback]).state == "finished"
    assert callback.calls.count("after_report") == 2
    told = [message for message in run.watcher.warnings() if "Careless." in message]
    assert len(told) == 2
    assert any("a fault in my own callback" in message for message in told)


def test_callbacks_get_rows_checkpoints_failures_and_events(run: Run) -> None:
    heard: list[Any] = []

    class Listener:
        def after_report(self, context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
            heard.append((context.name, metrics, checkpoint is not None))

        def after_exception(self, context: Any, failures: Mapping[int, BaseException]) -> None:
            heard.append([(rank, type(failure).__name__) for rank, failure in failures.items()])

    def play(worker: ScriptedWorker) -> None:
        worker.report({"x": worker.rank}, files={"state": b""} if worker.rank == 0 else None, barrier=True)
        if worker.rank == 1:
            raise ValueError("no")
        worker.hang()

    run.go(ScriptedEngine(play), callbacks=[Listener()])
    assert [(1, "ValueError")] in heard
    assert ("scripted", [{"x": 0}, {"x": 1}], True) in heard
    assert len(heard) == 2


def test_an_error_of_the_controllers_own_closes_everything(run: Run) -> None:
    def broken(row: int) -> None:
        raise MemoryError("a fault of our own")

    run.watcher.on_row = broken
    engine = ScriptedEngine(reports_for_ever({}))
    with pytest.raises(MemoryError):
        run.go(engine)
    assert all(engine.inspect(process.slot).state == "gone" for process in engine.forked)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("powertrain-")]
    ended = journal.replay(journal.read(run.storage))
    assert (ended.state, ended.reason) == (lifecycle.FAILED, "MemoryError: a fault of our own")


def test_output_is_passed_on_with_its_rank(run: Run) -> None:
    def play(worker: ScriptedWorker) -> None:
        worker.process.write(f"hello from {worker.rank}\n")

    run.go(ScriptedEngine(play))
    assert sorted(run.watcher.printed) == [(0, b"hello from 0\n"), (1, b"hello from 1\n")]
    assert (run.path / "logs" / "attempt-0" / "rank-00001.log").read_text() == "hello from 1\n"


def test_a_checkpoint_that_cannot_be_committed_is_reported_and_the_run_goes_on(run: Run) -> None:
    def play(worker: ScriptedWorker) -> None:
        worker.report({"x": 1}, files={"state": b"1"}, barrier=True)
        worker.report({"x": 2})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit, "commit", _disk_is_full)
        assert run.go(ScriptedEngine(play), workers=1, sync_timeout=0.3).state == "finished"
    (failed,) = run.watcher.all_of(ev.CheckpointFailed)
    assert failed.row == 1
    assert "No space left on device" in failed.reason


def _disk_is_full(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


# --------------------------------------------------------------------------- ends that once went wrong


def test_a_rank_that_raises_while_the_run_stops_makes_it_a_failure(run: Run) -> None:
    def play(worker: ScriptedWorker) -> None:
        try:
            while True:
                worker.report({"x": 1})
                threading.Event().wait(0.002)  # a flood would have to be written down before the end
        finally:
            if worker.rank == 1:
                raise ValueError("the last save failed")

    outcome = run.go(ScriptedEngine(play), stop={"training_iteration": 3}, max_failures=3)
    assert (outcome.state, outcome.interrupted) == ("failed", False)
    assert outcome.failures[0].message == "the last save failed"


def test_interrupts_after_every_function_has_returned_only_cut_the_ending_short(run: Run) -> None:
    class Hooks(Backend):
        def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
            run.interrupt()
            run.interrupt()
            threading.Event().wait(1.0)

    outcome = run.go(ScriptedEngine(two_reports), backend=HookConfig(Hooks))
    assert (outcome.state, outcome.interrupted) == ("finished", False)


def test_one_backend_serves_all_hooks_of_an_attempt_and_a_failing_shutdown_is_reported(run: Run) -> None:
    class Hooks(Backend):
        started = False

        def on_start(self, worker_group: Any, backend_config: Any) -> None:
            self.started = True

        def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
            raise RuntimeError(f"started: {self.started}")

    assert run.go(ScriptedEngine(two_reports), backend=HookConfig(Hooks)).state == "finished"
    assert any("RuntimeError: started: True" in warning for warning in run.watcher.warnings())


def test_a_collective_that_a_rank_will_never_reach_is_an_error_that_names_it(run: Run) -> None:
    def play(worker: ScriptedWorker) -> None:
        if worker.rank == 0:
            worker.meet()

    outcome = run.go(ScriptedEngine(play))
    assert outcome.state == "failed"
    assert "Rank 1 has ended without calling this barrier()" in outcome.failures[0].message


def test_ranks_that_call_different_collectives_are_reported_with_what_each_called(run: Run) -> None:
    def play(worker: ScriptedWorker) -> None:
        kind = ("barrier", "broadcast_from_rank_zero")[worker.rank]
        opened = worker.service.meet(Arrived(sync=1, kind=kind))
        worker.process.check()
        raise RuntimeError(opened.error)

    outcome = run.go(ScriptedEngine(play))
    assert "rank 0 called barrier(), rank 1 called broadcast_from_rank_zero()" in outcome.failures[0].message


def test_a_rank_that_is_steadily_one_row_behind_is_not_called_late(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("powertrain.run.workers.reports.LATE_INTERVAL_S", 0.6)
    run.clock = clock = ManualClock(start=1e6)
    ahead = threading.Semaphore(1)

    def pass_time(row: int) -> None:
        clock.advance(0.01)

    run.watcher.on_row = pass_time

    def play(worker: ScriptedWorker) -> None:
        for _ in range(120):
            if worker.rank == 0:
                worker.report({"x": 0})
                ahead.release()
            else:
                threading.Event().wait(0.01)
                ahead.acquire()
                worker.report({"x": 1})

    run.go(ScriptedEngine(play))
    assert run.watcher.late == []


def test_a_journal_that_cannot_be_written_does_not_end_the_run(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, fail = journal.Journal.append, [True]

    def refuse(self: journal.Journal, event: ev.Event) -> None:
        if isinstance(event, ev.TrainingStarted) and fail:
            fail.clear()
            raise OSError(28, "No space left on device")
        write(self, event)

    monkeypatch.setattr(journal.Journal, "append", refuse)
    assert run.go(ScriptedEngine(two_reports)).state == "finished"
    assert any("No space left" in warning for warning in run.watcher.warnings())
    written = [type(event) for event in journal.read(run.storage)]
    assert ev.TrainingStarted in written, "it was tried again"
    assert written[-1] is ev.Ended


def test_a_wire_that_cannot_listen_closes_the_engine_and_leaves_no_thread(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ScriptedEngine(two_reports)
    closed = []
    monkeypatch.setattr(engine, "close", lambda: closed.append(True))
    run.runtime += "/" + "deep" * 40
    with pytest.raises(WireError):
        run.go(engine)
    assert closed
    run.runtime = run.runtime.partition("/deep")[0]


def test_a_rank_that_never_says_a_word_fails_the_start(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.pass_time_after(ev.AttemptStarted, START_TIMEOUT_S)
    monkeypatch.setattr(ScriptedWorker, "live", lambda self, play: self.hang())
    outcome = run.go(ScriptedEngine(two_reports))
    assert outcome.state == "failed"
    assert "did not connect" in outcome.failures[0].summary


# --------------------------------------------------------------------------- shares that are late


def test_a_share_that_arrives_after_its_attempt_was_given_up_does_no_harm(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row is done again while the first try's file still hangs in storage; it must not land in the second's."""
    monkeypatch.setattr("powertrain.run.checkpoints.settling.SETTLE_TIMEOUT_S", 0.1)
    hanging, release = threading.Event(), threading.Event()

    def hang_once(kind: str, target: str) -> None:
        if (
            kind == "rename"
            and target.endswith("checkpoints/checkpoint_000001/state")
            and not hanging.is_set()
        ):
            hanging.set()
            release.wait(PATIENCE)

    def play(worker: ScriptedWorker) -> None:
        worker.report({"attempt": worker.attempt}, files={"state": str(worker.attempt).encode()})
        if worker.attempt == 0:
            worker.wait_for(hanging)
            raise RuntimeError("the first attempt fails")

    boundaries.install(hang_once)
    try:
        run.watcher.on_event = lambda event: release.set() if isinstance(event, ev.Committed) else None
        assert run.go(ScriptedEngine(play), workers=1, max_failures=1).state == "finished"
    finally:
        boundaries.install(None)
        release.set()
    (failed,) = run.watcher.all_of(ev.CheckpointFailed)
    assert "before the restart" in failed.reason
    (manifest,) = committed.committed(run.storage)
    committed.verify(run.storage, manifest)
    assert run.storage.get(f"checkpoints/{manifest.name}/state") == b"1"


def test_two_checkpoints_never_share_a_name(run: Run) -> None:
    def play(worker: ScriptedWorker) -> None:
        for content in (b"1", b"2"):
            worker.report({}, files={"state": content}, name="same")

    assert run.go(ScriptedEngine(play), workers=1).state == "finished"
    (failed,) = run.watcher.all_of(ev.CheckpointFailed)
    assert "named 'same' already" in failed.reason
    (manifest,) = committed.committed(run.storage)
    committed.verify(run.storage, manifest)
    assert run.storage.get("checkpoints/same/state") == b"1"


def test_a_commit_that_comes_through_after_it_was_given_up_does_not_count(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its manifest is removed again, so nothing may rely on it: neither retention nor the next attempt."""
    monkeypatch.setattr("powertrain.run.checkpoints.settling.SETTLE_TIMEOUT_S", 0.1)
    hanging, release, real = threading.Event(), threading.Event(), commit.commit

    def hang_in_row_2(*arguments: Any, **fields: Any) -> Any:
        if fields["row"] == 2 and not hanging.is_set():
            hanging.set()
            release.wait(PATIENCE)
        return real(*arguments, **fields)

    def play(worker: ScriptedWorker) -> None:
        while worker.row < 3:
            worker.report({}, files={"state": b"%d" % worker.attempt})
            if worker.attempt == 0 and worker.row == 2:
                worker.wait_for(hanging)
                raise RuntimeError("the first attempt fails")

    monkeypatch.setattr(commit, "commit", hang_in_row_2)
    run.watcher.on_event = lambda event: (
        release.set() if isinstance(event, ev.AttemptStarted) and event.attempt else None
    )
    outcome = run.go(
        ScriptedEngine(play), workers=1, max_failures=1, checkpoints=CheckpointConfig(num_to_keep=1)
    )
    assert outcome.state == "finished"
    starts = run.watcher.all_of(ev.AttemptStarted)
    assert [start.checkpoint for start in starts] == ["", "checkpoint_000001"]
    (manifest,) = committed.committed(run.storage)
    assert manifest.row == 3
    committed.verify(run.storage, manifest)


def test_files_of_a_rank_that_comes_after_its_row_was_closed_do_not_replace_those_that_are_there(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("powertrain.run.workers.reports.ABSENT_TIMEOUT_S", 0.05)
    closed = threading.Event()

    def play(worker: ScriptedWorker) -> None:
        if worker.rank == 1:
            worker.wait_for(closed)
        worker.report({"rank": worker.rank}, files={f"rank-{worker.rank}": b"1"})

    run.watcher.on_event = lambda event: closed.set() if isinstance(event, ev.RanksAbsent) else None
    assert run.go(ScriptedEngine(play)).state == "finished"
    (manifest,) = committed.committed(run.storage)
    assert [file.name for file in manifest.files] == ["rank-0"]
    assert manifest.metrics == {"rank": 0}
    (failed,) = run.watcher.all_of(ev.CheckpointFailed)
    assert "ranks [1] made this report after the row had been closed" in failed.reason


def test_an_uploader_that_never_comes_up_costs_checkpoints_and_not_the_run(run: Run) -> None:
    def play(worker: ScriptedWorker) -> None:
        worker.report({}, files={"state": b"1"})

    engine = ScriptedEngine(play, programs={uploader.ENTRY: lambda process: 1})
    assert run.go(engine, workers=1).state == "finished"
    (failed,) = run.watcher.all_of(ev.CheckpointFailed)
    assert "uploader process of its node ended several times in a row" in failed.reason


def test_an_interrupt_while_a_failed_run_waits_for_storage_leaves_it_failed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging, release, real = threading.Event(), threading.Event(), commit.commit

    def hang(*arguments: Any, **fields: Any) -> Any:
        hanging.set()
        release.wait(PATIENCE)
        return real(*arguments, **fields)

    def play(worker: ScriptedWorker) -> None:
        worker.report({}, files={"state": b"1"})
        worker.wait_for(hanging)
        raise RuntimeError("it fails")

    def on_event(event: ev.Event) -> None:
        if isinstance(event, ev.Failed):
            run.interrupt()
        elif isinstance(event, ev.Warned) and "still on their way" in event.message:
            release.set()

    monkeypatch.setattr(commit, "commit", hang)
    run.watcher.on_event = on_event
    outcome = run.go(ScriptedEngine(play), workers=1)
    assert (outcome.state, outcome.interrupted) == ("failed", False)
    assert [manifest.row for manifest in committed.committed(run.storage)] == [1]


def test_what_storage_did_not_take_stays_when_a_failed_run_ends(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("powertrain.run.checkpoints.settling.SETTLE_TIMEOUT_S", 2.0)

    def refuse(kind: str, target: str) -> None:
        if "/checkpoints/" in target:
            raise OSError(5, "Input/output error")

    def play(worker: ScriptedWorker) -> None:
        worker.report({}, files={"state": b"1"})
        raise RuntimeError("it fails")

    boundaries.install(refuse)
    try:
        outcome = run.go(ScriptedEngine(play), workers=1)
    finally:
        boundaries.install(None)
    assert outcome.state == "failed"
    (failed,) = run.watcher.all_of(ev.CheckpointFailed)
    assert "Input/output error" in failed.reason
    (left,) = outcome.left
    assert left in failed.reason
    assert Path(left, "files", "state").read_bytes() == b"1"
