"""Validations of committed checkpoints: what was asked for, whose turn it is, what the run waits for."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.run.scripted_run import Run
from tests.support.scripted_engine import ScriptedClaim, ScriptedEngine
from tests.support.scripted_worker import ScriptedProcess, ScriptedWorker

from powertrain.checkpoint import committed as checkpoint_committed
from powertrain.checkpoint.checkpoint import Checkpoint
from powertrain.checkpoint.manifest import Manifest
from powertrain.config.checkpoint import CheckpointConfig
from powertrain.config.validation import ValidationConfig, ValidationTaskConfig
from powertrain.engine import base
from powertrain.errors import ResourceError
from powertrain.run import events as ev
from powertrain.run.checkpoints import validations
from powertrain.wire.from_controller import CheckpointReply
from powertrain.wire.from_worker import Validated
from powertrain.wire.link import Link
from powertrain.wire.values import ErrorReport, ValidationRequest
from powertrain.worker import validation as process


def anything(checkpoint: Any, **options: Any) -> dict[str, Any]:
    """Never called: the processes are played."""
    return {}


CONFIG = ValidationConfig(fn=anything)


def manifest(row: int = 1, extras: dict[str, Any] | None = None) -> Manifest:
    return Manifest(
        name=f"checkpoint_{row:06d}",
        row=row,
        attempt=0,
        metrics={},
        world_size=1,
        lease=1,
        parent="",
        created=0.0,
        files=[],
        extras=extras or {},
    )


# --------------------------------------------------------------------------- pure


@given(asked=st.dictionaries(st.text(), st.integers()))
def test_settings_of_a_report_go_over_those_of_the_trainer(asked: dict[str, int]) -> None:
    config = ValidationConfig(fn=anything, task_config=ValidationTaskConfig(timeout_s=5))
    task = validations.task_of(config, ValidationRequest(arguments=asked), manifest(), Checkpoint("/x"))
    assert task.arguments == asked
    assert task.timeout == 5
    hurried = ValidationRequest(arguments=asked, timeout=2)
    assert validations.task_of(config, hurried, manifest(), Checkpoint("/x")).timeout == 2
    assert validations.task_of(CONFIG, ValidationRequest(), manifest(), Checkpoint("/x")).timeout == float(
        "inf"
    )


def test_only_validations_without_an_end_are_made_again() -> None:
    asked = {"validation": {"arguments": {"batch": 8}, "timeout": 2}}
    made = [manifest(row, asked) for row in range(1, 6)] + [manifest(6)]
    words = [
        "VALIDATED",
        "PENDING_VALIDATION",
        "VALIDATION_FAILED",
        "COMMITTED",
        "VALIDATION_TIMEOUT",
        "COMMITTED",
    ]
    status = {m.name: word for m, word in zip(made, words, strict=True)}

    again = validations.cut_off(made, lambda m: status[m.name])

    assert [m.row for m in again] == [2, 4]
    assert validations.requested_validation(again[0]) == ValidationRequest(
        arguments={"batch": 8}, timeout=2.0
    )


def test_an_extra_that_is_no_request_is_none() -> None:
    assert validations.requested_validation(manifest(1, {"validation": "yes"})) is None


@pytest.mark.parametrize(
    ("asked", "shape"),
    [
        ({}, None),
        ({"num_gpus": 0}, None),
        ({"num_gpus": 1}, base.SlotShape(cpus=1.0, gpus=1.0, explicit=True)),
        ({"num_cpus": 2}, base.SlotShape(cpus=2.0, explicit=True)),
    ],
)
def test_a_slot_is_reserved_only_where_amounts_are_asked_for(
    asked: dict[str, float], shape: base.SlotShape | None
) -> None:
    assert validations.shape_of(ValidationConfig(fn=anything, ray_remote_kwargs=asked)) == shape


def test_an_error_is_reported_with_the_users_own_line() -> None:
    error = ErrorReport(
        type="ValueError",
        message="bad",
        traceback="...",
        file="eval.py",
        line=7,
        function="check",
        source="raise it",
    )
    outcome = validations.found(Validated(checkpoint="c", error=error, seconds=1.5))
    assert outcome.status == "VALIDATION_FAILED"
    assert outcome.error == "ValueError: bad (eval.py:7 in check: raise it)"


# --------------------------------------------------------------------------- in a run


class Player:
    """Plays the processes of validations. ``before`` is called with each checkpoint's row before it is answered."""

    def __init__(self, before: Callable[[ScriptedProcess, int], None] = lambda process, row: None) -> None:
        self._before = before
        #: (what, row) as it happened.
        self.log: list[tuple[str, int]] = []

    def __call__(self, played: ScriptedProcess) -> int:
        spec = msgspec.msgpack.decode(played.spec.payload, type=process.ValidationSpec)
        row = int(spec.checkpoint.removeprefix("checkpoint_")[:6])
        self.log.append(("begins", row))
        self._before(played, row)
        played.check()  # it may have been killed, and then sends nothing
        link = Link(spec.connection, -1, 0)
        try:
            link.send([Validated(checkpoint=spec.checkpoint, metrics={"score": -row})], 0, 0)
            while not link.is_acknowledged:
                played.check()
                link.poll(0.05)
        finally:
            link.close()
        self.log.append(("ends", row))
        return 0


def three_saves(worker: ScriptedWorker) -> None:
    for row in range(worker.row + 1, 4):
        save(worker, row)


def save(worker: ScriptedWorker, row: int, asked: ValidationRequest | None = None) -> None:
    """A report with a checkpoint that is to be validated."""
    stage = ScriptedWorker._stage
    worker._stage = lambda files, name: msgspec.structs.replace(  # type: ignore[method-assign]
        stage(worker, files, name), validation=asked or ValidationRequest()
    )
    worker.report({"row": row}, files={"model": b"x"})


def engine_of(
    player: Player, play: Callable[[ScriptedWorker], Any] = three_saves, **more: Any
) -> ScriptedEngine:
    return ScriptedEngine(play, programs={process.ENTRY: player}, **more)


def statuses(run: Run) -> list[str]:
    return [found.status.value for found in checkpoint_committed.reported(run.storage)]


def test_one_validation_runs_at_a_time_in_the_order_of_rows(run: Run) -> None:
    player = Player()
    outcome = run.go(engine_of(player), workers=1, validation=CONFIG)

    assert outcome.state == "finished"
    assert player.log == [(what, row) for row in (1, 2, 3) for what in ("begins", "ends")]
    assert [(e.row, e.metrics) for e in run.watcher.all_of(ev.ValidationEnded)] == [
        (row, {"score": -row}) for row in (1, 2, 3)
    ]
    assert statuses(run) == ["VALIDATED"] * 3


def test_a_checkpoint_that_waits_for_its_validation_is_not_deleted(run: Run) -> None:
    committed = threading.Event()
    run.watcher.on_event = lambda event: (
        committed.set() if isinstance(event, ev.Committed) and event.row == 3 else None
    )
    player = Player(lambda played, row: played.wait_for(committed))
    keep = CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="score")
    run.go(engine_of(player), workers=1, validation=CONFIG, checkpoints=keep)

    assert [e.row for e in run.watcher.all_of(ev.ValidationEnded)] == [1, 2, 3]
    assert [m.row for m in checkpoint_committed.committed(run.storage)] == [1, 3], "the best and the newest"


def test_a_validation_without_a_result_fails_and_the_next_one_runs(run: Run) -> None:
    player = Player(lambda played, row: played.kill(-signal.SIGSEGV) if row == 1 else None)
    outcome = run.go(engine_of(player), workers=1, validation=CONFIG)

    assert outcome.state == "finished"
    assert statuses(run) == ["VALIDATION_FAILED", "VALIDATED", "VALIDATED"]
    assert "was killed by SIGSEGV" in run.watcher.all_of(ev.ValidationEnded)[0].reason


def test_a_validation_that_takes_too_long_is_killed_and_the_next_one_runs(run: Run) -> None:
    player = Player(lambda played, row: played.wait_for() if row == 1 else None)
    engine = engine_of(
        player, lambda worker: [save(worker, row, ValidationRequest(timeout=0.2)) for row in (1, 2)]
    )
    outcome = run.go(engine, workers=1, validation=CONFIG)

    assert outcome.state == "finished"
    assert statuses(run) == ["VALIDATION_TIMEOUT", "VALIDATED"]


def test_a_failed_run_still_waits_for_its_validations(run: Run) -> None:
    def save_and_raise(worker: ScriptedWorker) -> None:
        three_saves(worker)
        raise ValueError("after the last save")

    outcome = run.go(engine_of(Player(), save_and_raise), workers=1, validation=CONFIG)

    assert outcome.state == "failed"
    assert statuses(run) == ["VALIDATED"] * 3


class StingyEngine(ScriptedEngine):
    """Has one slot: a second claim waits until the first is given back."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, on_request=self._answer, **more)
        self._owed: ScriptedClaim | None = None

    def _answer(self, _: ScriptedEngine, claim: ScriptedClaim) -> None:
        if not self._held_slots():
            self.grant(claim, claim.count)
        else:
            self._owed = claim
            self.say_waiting(claim, "waiting for 1 GPU(s), 0 free")

    def release(self, slots: Sequence[base.Slot]) -> None:
        super().release(slots)
        if self._owed is not None and not self._held_slots():
            owed, self._owed = self._owed, None
            self.grant(owed, owed.count)

    def _held_slots(self) -> list[str]:
        return [slot for slot in self._held if not slot.startswith("attendants/")]


def test_a_validation_gets_the_slot_of_the_ranks_when_those_have_left(run: Run) -> None:
    """And the ranks do not wait for it: that would be for ever."""
    told: list[list[CheckpointReply]] = []

    def play(worker: ScriptedWorker) -> None:
        three_saves(worker)
        told.append(worker.service.query_checkpoints(worker.row, True, -1.0))

    config = ValidationConfig(fn=anything, ray_remote_kwargs={"num_gpus": 1})
    engine = StingyEngine(play, programs={process.ENTRY: Player()})
    outcome = run.go(engine, workers=1, validation=config)

    assert outcome.state == "finished"
    assert [found.status for found in told[0]] == ["PENDING_VALIDATION"] * 3
    assert statuses(run) == ["VALIDATED"] * 3
    assert [w for w in run.watcher.warnings() if "waiting for 1 GPU(s), 0 free" in w]


def test_a_slot_that_can_never_be_had_fails_the_validation_only(run: Run) -> None:
    class NoGpus(ScriptedEngine):
        def request(self, count: int, shape: base.SlotShape) -> ScriptedClaim:
            if shape.gpus:
                raise ResourceError("this machine has no GPU")
            return super().request(count, shape)

    config = ValidationConfig(fn=anything, ray_remote_kwargs={"num_gpus": 1})
    outcome = run.go(NoGpus(three_saves), workers=1, validation=config)

    assert outcome.state == "finished"
    assert statuses(run) == ["VALIDATION_FAILED"] * 3
    assert "this machine has no GPU" in run.watcher.all_of(ev.ValidationEnded)[0].reason


def test_a_slot_that_the_engine_takes_back_its_word_on_fails_the_validation_only(run: Run) -> None:
    """As a cluster does that finds out late that it cannot give what it had room for."""

    def answer(engine: ScriptedEngine, claim: ScriptedClaim) -> None:
        if claim.shape.gpus:
            engine._events(base.ClaimRefused(claim.id, "the node with the GPU sees another storage"))
        else:
            engine.grant(claim, claim.count)

    config = ValidationConfig(fn=anything, ray_remote_kwargs={"num_gpus": 1})
    outcome = run.go(ScriptedEngine(three_saves, on_request=answer), workers=1, validation=config)

    assert outcome.state == "finished"
    assert statuses(run) == ["VALIDATION_FAILED"] * 3
    assert "sees another storage" in run.watcher.all_of(ev.ValidationEnded)[0].reason


def test_a_validation_waits_for_a_slot_after_the_training_no_longer_than_a_run_would(run: Run) -> None:
    def answer(engine: ScriptedEngine, claim: ScriptedClaim) -> None:
        if claim.shape.gpus:
            engine._events(base.Waiting(claim.id, 0, "waiting for 1 GPU"))
        else:
            engine.grant(claim, claim.count)

    config = ValidationConfig(fn=anything, ray_remote_kwargs={"num_gpus": 1})
    engine = ScriptedEngine(three_saves, on_request=answer)
    outcome = run.go(engine, workers=1, validation=config, queue_timeout=0.05)

    assert outcome.state == "finished"
    assert statuses(run) == ["VALIDATION_FAILED"] * 3
    reasons = [ended.reason for ended in run.watcher.all_of(ev.ValidationEnded)]
    assert (
        reasons
        == ["there was no room for it within queue_timeout_s=0.05 s after the training: waiting for 1 GPU"]
        * 3
    )
    assert all(claim.withdrawn for claim in engine.claims if claim.shape.gpus)


def ranks_are_gone(engine: ScriptedEngine) -> None:
    """Wait until the end of every rank is in the controller's inbox."""
    with engine._changed:
        engine._changed.wait_for(
            lambda: not [p for p in engine._processes.values() if "rank" in p.spec.title]
        )


def test_ctrl_c_while_only_validations_are_left_cuts_them_off_and_the_next_start_makes_them_again(
    run: Run,
) -> None:
    engines: list[ScriptedEngine] = []

    def interrupt_the_end(played: ScriptedProcess, row: int) -> None:
        ranks_are_gone(engines[0])
        run.interrupt()
        played.wait_for()

    engines.append(engine_of(Player(interrupt_the_end)))
    outcome = run.go(engines[0], workers=1, validation=CONFIG)

    assert (outcome.state, outcome.interrupted) == ("finished", False)
    assert statuses(run) == ["PENDING_VALIDATION"] * 3
    assert [w for w in run.watcher.warnings() if "It is started again when the run is resumed" in w]

    player = Player()
    run.go(engine_of(player), workers=1, validation=CONFIG)
    assert [row for what, row in player.log if what == "begins"] == [1, 2, 3]
    assert statuses(run) == ["VALIDATED"] * 3

    player = Player()
    run.go(engine_of(player), workers=1, validation=CONFIG)
    assert player.log == [], "what is over is not made again"


def test_an_interrupted_run_does_not_wait_for_its_validations(run: Run) -> None:
    begun = threading.Event()

    def play(worker: ScriptedWorker) -> None:
        save(worker, 1)
        worker.wait_for(begun)
        run.interrupt()
        while True:
            worker.report({}, barrier=True)

    def begin_and_hang(played: ScriptedProcess, row: int) -> None:
        begun.set()
        played.wait_for()

    outcome = run.go(engine_of(Player(begin_and_hang), play), workers=1, validation=CONFIG)

    assert outcome.interrupted
    assert statuses(run) == ["PENDING_VALIDATION"]
