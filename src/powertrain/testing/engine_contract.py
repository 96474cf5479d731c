"""Contract of every engine, as tests. Subclass one of the two classes and give it an ``engine``.

Example::

    class TestMyEngine(EngineContract):
        @pytest.fixture
        def engine(self):
            engine = MyEngine()
            yield engine
            engine.close()

:class:`EngineContract` holds for any engine. :class:`ProcessContract` adds what holds where a slot's process is a
real process of this machine. Methods of the class that a subclass may override say how to bring about what an
engine cannot be asked for by its protocol; those left alone skip their tests.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from powertrain.engine.base import (
    Capacity,
    Drain,
    Engine,
    EngineEvent,
    Exited,
    Granted,
    ProcessSpec,
    Slot,
    SlotLost,
    SlotShape,
    Started,
    Waiting,
    describe_exit,
)
from powertrain.errors import EngineError, ResourceError

#: Seconds within which an engine must do what it was asked to. Generous: a server may have to warm up first.
PATIENCE = 60.0
#: Seconds within which a call that "returns at once" must return.
AT_ONCE = 1.0

E = TypeVar("E")


def program(name: str, argument: Any = None, **options: Any) -> ProcessSpec:
    """One of :mod:`powertrain.testing.programs`, ready to be forked."""
    options.setdefault("env", {})
    return ProcessSpec(
        entry=f"powertrain.testing.programs:{name}",
        payload=json.dumps(argument).encode(),
        title=name,
        **options,
    )


@dataclass(frozen=True)
class ClaimOf:
    """The claim that an event names, for calls that take one."""

    id: str


class Stage:
    """An engine that has been started, and all its events."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.events: list[EngineEvent] = []
        #: What was heard, in order: an event, or (slot id, output).
        self.heard: list[EngineEvent | tuple[str, bytes]] = []
        #: Called with each event as it is delivered, on the engine's thread.
        self.on_event: Callable[[EngineEvent], None] = lambda _: None
        self._changed = threading.Condition()
        engine.start(self._event, self._output)

    def _event(self, event: EngineEvent) -> None:
        self.on_event(event)
        with self._changed:
            self.events.append(event)
            self.heard.append(event)
            self._changed.notify_all()

    def _output(self, slot: Slot, data: bytes) -> None:
        with self._changed:
            self.heard.append((slot.id, data))
            self._changed.notify_all()

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until ``condition`` holds, looking again after each event; fails with ``what`` in words."""
        with self._changed:
            held = self._changed.wait_for(condition, timeout=PATIENCE)
        assert held, f"{what} did not happen within {PATIENCE:g} s; heard so far: {self.heard}"

    def all_of(self, kind: type[E], slot: Slot | None = None) -> list[E]:
        return [
            e
            for e in self.events
            if isinstance(e, kind) and (slot is None or getattr(e, "slot", None) == slot)
        ]

    def wait_for(self, kind: type[E], slot: Slot | None = None, count: int = 1) -> E:
        """The ``count``-th event of a kind, of one slot or of any."""
        self.wait_until(lambda: len(self.all_of(kind, slot)) >= count, f"{kind.__name__} number {count}")
        return self.all_of(kind, slot)[count - 1]

    def slots(self, count: int = 1, shape: SlotShape | None = None) -> list[Slot]:
        """Request slots and wait until all are granted."""
        claim = self.engine.request(count, shape or SlotShape())

        def granted() -> list[Slot]:
            return [slot for e in self.all_of(Granted) if e.claim == claim.id for slot in e.slots]

        self.wait_until(lambda: len(granted()) >= count, f"the grant of {count} slot(s)")
        return granted()

    def output_of(self, slot: Slot) -> bytes:
        return b"".join(e[1] for e in self.heard if isinstance(e, tuple) and e[0] == slot.id)

    def wait_for_output(self, slot: Slot, text: bytes) -> bytes:
        self.wait_until(lambda: text in self.output_of(slot), f"the output {text!r}")
        return self.output_of(slot)

    def run(self, slot: Slot, spec: ProcessSpec) -> Exited:
        """Fork and wait for the end."""
        before = len(self.all_of(Exited, slot))
        self.engine.fork(slot, spec)
        return self.wait_for(Exited, slot, before + 1)


class EngineContract:
    """Holds for every engine."""

    @pytest.fixture
    def engine(self) -> Iterator[Engine]:
        """An engine that has not been started; closed afterwards."""
        raise NotImplementedError("give the contract an engine")

    @pytest.fixture
    def stage(self, engine: Engine) -> Stage:
        return Stage(engine)

    def impossible_request(self) -> tuple[int, SlotShape]:
        """A request that this engine can never meet."""
        return 1, SlotShape(custom={"a-resource-nobody-has": 1.0}, explicit=True)

    def lose(self, engine: Engine, slot: Slot) -> None:
        """Make the engine lose a slot."""
        pytest.skip("this engine cannot be made to lose a slot")

    def drain(self, engine: Engine, slot: Slot, deadline: float) -> None:
        """Make the engine announce the loss of a slot."""
        pytest.skip("this engine cannot be made to drain a slot")

    def request_that_waits(self, stage: Stage) -> Callable[[], None]:
        """Request slots that are not to be had now; the answer makes them available."""
        pytest.skip("this engine cannot be made to wait")

    def changing_capacity(self, stage: Stage) -> tuple[SlotShape, Callable[[], None]]:
        """A shape whose capacity can be watched, and what changes that capacity."""
        pytest.skip("this engine's capacity does not change")

    # -- requests

    def test_slots_of_a_request_arrive_as_granted_events(self, stage: Stage) -> None:
        slots = stage.slots(3)
        assert len({slot.id for slot in slots}) == 3
        assert all(slot.host and slot.address for slot in slots)

    def test_each_request_gets_slots_of_its_own(self, stage: Stage) -> None:
        first, second = stage.slots(2), stage.slots(2)
        assert len({slot.id for slot in [*first, *second]}) == 4

    def test_a_request_returns_at_once(self, stage: Stage) -> None:
        began = time.monotonic()
        stage.engine.request(2, SlotShape())
        assert time.monotonic() - began < AT_ONCE

    def test_a_request_that_can_never_be_met_raises_and_grants_nothing(self, stage: Stage) -> None:
        with pytest.raises(ResourceError):
            stage.engine.request(*self.impossible_request())
        assert not stage.all_of(Granted)

    def test_a_request_that_must_wait_says_why_and_is_granted_later(self, stage: Stage) -> None:
        free = self.request_that_waits(stage)
        waiting = stage.wait_for(Waiting)
        assert waiting.reason
        before = sum(len(e.slots) for e in stage.all_of(Granted) if e.claim == waiting.claim)
        assert before == waiting.granted
        free()
        stage.wait_until(
            lambda: sum(len(e.slots) for e in stage.all_of(Granted) if e.claim == waiting.claim) > before,
            "the grant of what was waited for",
        )

    def test_a_withdrawn_request_is_not_granted_when_there_is_room(self, stage: Stage) -> None:
        free = self.request_that_waits(stage)
        waiting = stage.wait_for(Waiting)
        stage.engine.withdraw(ClaimOf(waiting.claim))
        free()
        stage.engine.close()
        granted = [slot for e in stage.all_of(Granted) if e.claim == waiting.claim for slot in e.slots]
        assert len(granted) == waiting.granted

    def test_withdrawing_a_request_leaves_the_slots_that_it_was_granted(self, stage: Stage) -> None:
        claim = stage.engine.request(1, SlotShape())
        (slot,) = stage.wait_for(Granted).slots
        for _ in range(2):
            stage.engine.withdraw(claim)
        assert stage.run(slot, program("exit_with", 6)).code == 6

    # -- capacity

    def test_capacity_is_told_soon_after_it_is_watched_and_again_when_it_changes(self, stage: Stage) -> None:
        shape, change = self.changing_capacity(stage)
        began = time.monotonic()
        stage.engine.watch_capacity(shape)
        assert time.monotonic() - began < AT_ONCE
        first = stage.wait_for(Capacity)
        change()
        second = stage.wait_for(Capacity, count=2)
        assert second.count != first.count

    def test_no_capacity_is_told_to_one_who_does_not_watch(self, stage: Stage) -> None:
        _, change = self.changing_capacity(stage)
        change()
        stage.engine.close()
        assert not stage.all_of(Capacity)

    def test_no_capacity_is_told_after_the_close(self, stage: Stage) -> None:
        shape, change = self.changing_capacity(stage)
        stage.engine.watch_capacity(shape)
        stage.wait_for(Capacity)
        stage.engine.close()
        told = len(stage.all_of(Capacity))
        change()
        assert len(stage.all_of(Capacity)) == told

    # -- processes

    def test_fork_returns_at_once_and_the_start_is_told(self, stage: Stage) -> None:
        (slot,) = stage.slots()
        began = time.monotonic()
        stage.engine.fork(slot, program("wait"))
        assert time.monotonic() - began < AT_ONCE
        assert stage.wait_for(Started, slot).pid > 0

    @pytest.mark.parametrize("code", [0, 3, 255])
    def test_the_exit_code_is_told(self, stage: Stage, code: int) -> None:
        (slot,) = stage.slots()
        ended = stage.run(slot, program("exit_with", code))
        assert (ended.code, ended.out_of_memory) == (code, False)
        assert ended.pid == stage.wait_for(Started, slot).pid

    def test_an_entry_that_raises_ends_with_code_1_and_its_traceback(self, stage: Stage) -> None:
        (slot,) = stage.slots()
        assert stage.run(slot, program("raise_error")).code == 1
        assert b"this program was made to fail" in stage.output_of(slot)

    def test_an_entry_that_does_not_exist_ends_with_code_1_and_names_it(self, stage: Stage) -> None:
        (slot,) = stage.slots()
        assert stage.run(slot, program("no_such_program")).code == 1
        assert b"no_such_program" in stage.output_of(slot)

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
    def test_a_signal_ends_the_process_and_is_the_negative_code(
        self, stage: Stage, number: signal.Signals
    ) -> None:
        (slot,) = stage.slots()
        stage.engine.fork(slot, program("wait"))
        stage.wait_for_output(slot, b"waiting")
        stage.engine.signal(slot, number)
        ended = stage.wait_for(Exited, slot)
        assert ended.code == -number
        assert number.name in describe_exit(ended)[1]

    def test_a_signal_to_a_slot_without_a_process_has_no_effect(self, stage: Stage) -> None:
        (slot,) = stage.slots()
        stage.engine.signal(slot, signal.SIGKILL)
        assert stage.run(slot, program("exit_with", 0)).code == 0
        stage.engine.signal(slot, signal.SIGKILL)
        assert stage.run(slot, program("exit_with", 4)).code == 4

    def test_a_slot_can_be_used_again_after_each_exit(self, stage: Stage) -> None:
        (slot,) = stage.slots()
        assert [stage.run(slot, program("exit_with", code)).code for code in (1, 0, 2)] == [1, 0, 2]
        assert len({e.pid for e in stage.all_of(Started, slot)}) == 3

    def test_a_slot_holds_one_process(self, stage: Stage) -> None:
        (slot,) = stage.slots()
        stage.engine.fork(slot, program("wait"))
        with pytest.raises(EngineError):
            stage.engine.fork(slot, program("wait"))

    def test_every_fork_has_exactly_one_start_and_one_end_in_that_order(self, stage: Stage) -> None:
        slots = stage.slots(4)
        for number, slot in enumerate(slots):
            stage.engine.fork(slot, program("exit_with", number))
        for slot in slots:
            stage.wait_for(Exited, slot)
        stage.engine.close()
        for number, slot in enumerate(slots):
            told = [e for e in stage.events if isinstance(e, (Started, Exited, SlotLost)) and e.slot == slot]
            assert [type(e) for e in told] == [Started, Exited]
            assert told[1].code == number  # type: ignore[union-attr]

    def test_a_process_can_be_looked_at(self, stage: Stage) -> None:
        (slot,) = stage.slots()
        assert stage.engine.inspect(slot).state == "gone"
        stage.engine.fork(slot, program("wait"))
        stage.wait_for_output(slot, b"waiting")
        seen = stage.engine.inspect(slot)
        assert seen.pid == stage.wait_for(Started, slot).pid
        assert seen.state in ("running", "sleeping")
        assert (seen.processes, seen.debugged) == ((), False)
        stage.engine.signal(slot, signal.SIGKILL)
        stage.wait_for(Exited, slot)
        assert stage.engine.inspect(slot).state == "gone"

    def test_a_process_goes_on_after_a_look_at_what_it_is_doing(self, stage: Stage) -> None:
        (slot,) = stage.slots()
        assert stage.engine.inspect(slot, stacks=True).processes == ()
        stage.engine.fork(slot, program("wait"))
        stage.wait_for_output(slot, b"waiting")
        pid = stage.wait_for(Started, slot).pid
        seen = stage.engine.inspect(slot, stacks=True)
        assert seen.pid == pid
        assert [stack.pid for stack in seen.processes[:1]] in ([], [pid]), "itself comes first"
        assert stage.engine.inspect(slot).state in ("running", "sleeping")
        assert not stage.all_of(Exited, slot)

    # -- output

    def test_output_arrives_in_order_before_the_end_and_in_the_log(
        self, stage: Stage, tmp_path: Path
    ) -> None:
        (slot,) = stage.slots()
        log = tmp_path / "below" / "rank.log"
        texts = [f"line {number}\n" for number in range(20)]
        stage.run(slot, program("write", texts, log_path=str(log)))
        heard_before_end = list(stage.heard[: stage.heard.index(stage.all_of(Exited)[0])])
        whole = b"".join(e[1] for e in heard_before_end if isinstance(e, tuple))
        assert whole == "".join(texts).encode() == log.read_bytes()

    def test_a_log_is_appended_to(self, stage: Stage, tmp_path: Path) -> None:
        (slot,) = stage.slots()
        log = tmp_path / "rank.log"
        for text in ("first\n", "second\n"):
            stage.run(slot, program("write", [text], log_path=str(log)))
        assert log.read_text() == "first\nsecond\n"

    # -- endings

    def test_release_ends_what_runs(self, stage: Stage) -> None:
        kept, given_back = stage.slots(2)
        for slot in (kept, given_back):
            stage.engine.fork(slot, program("wait"))
            stage.wait_for_output(slot, b"waiting")
        stage.engine.release([given_back])
        assert stage.wait_for(Exited, given_back).code == -signal.SIGKILL
        assert not stage.all_of(Exited, kept)

    def test_close_ends_everything_and_no_event_follows(self, stage: Stage) -> None:
        slots = stage.slots(2)
        for slot in slots:
            stage.engine.fork(slot, program("wait"))
            stage.wait_for_output(slot, b"waiting")
        stage.engine.close()
        told = len(stage.events)
        assert all(stage.engine.inspect(slot).state == "gone" for slot in slots)
        assert len(stage.events) == told
        assert not stage.all_of(SlotLost)

    def test_close_without_any_request_and_a_second_close_are_fine(self, stage: Stage) -> None:
        stage.engine.close()
        stage.engine.close()
        assert stage.events == []

    # -- losses

    def test_a_lost_slot_is_told_once_instead_of_an_exit(self, stage: Stage) -> None:
        lost, kept = stage.slots(2)
        for slot in (lost, kept):
            stage.engine.fork(slot, program("wait"))
            stage.wait_for_output(slot, b"waiting")
        self.lose(stage.engine, lost)
        assert stage.wait_for(SlotLost, lost).reason
        stage.engine.close()
        assert len(stage.all_of(SlotLost, lost)) == 1
        assert not stage.all_of(Exited, lost)

    def test_slots_can_be_requested_anew_after_a_loss(self, stage: Stage) -> None:
        (slot,) = stage.slots()
        stage.engine.fork(slot, program("wait"))
        stage.wait_for_output(slot, b"waiting")
        self.lose(stage.engine, slot)
        stage.wait_for(SlotLost, slot)
        stage.engine.release([slot])
        (fresh,) = stage.slots()
        assert fresh.id != slot.id
        assert stage.run(fresh, program("exit_with", 5)).code == 5

    def test_a_drain_is_announced_with_its_deadline_and_the_process_goes_on(self, stage: Stage) -> None:
        (slot,) = stage.slots()
        stage.engine.fork(slot, program("wait"))
        stage.wait_for_output(slot, b"waiting")
        deadline = time.time() + 60
        self.drain(stage.engine, slot, deadline)
        told = stage.wait_for(Drain, slot)
        assert told.deadline == deadline
        assert told.reason
        assert stage.engine.inspect(slot).state != "gone"

    # -- beside the slots

    def attendant(self, stage: Stage, beside: Slot) -> Slot:
        """A process that waits, beside the slots; skips for engines that start none."""
        slot = stage.engine.attend(beside, program("wait"))
        if slot is None:
            pytest.skip("this engine starts no process beside its slots")
        stage.wait_for_output(slot, b"waiting")
        return slot

    def test_a_process_beside_the_slots_has_a_slot_and_events_of_its_own(self, stage: Stage) -> None:
        (beside,) = stage.slots()
        slot = self.attendant(stage, beside)
        assert slot.id != beside.id
        assert slot.host == beside.host
        stage.engine.signal(slot, signal.SIGKILL)
        assert stage.wait_for(Exited, slot).code == -signal.SIGKILL
        assert not stage.all_of(Exited, beside)

    def test_a_process_beside_the_slots_outlives_what_runs_on_them(self, stage: Stage) -> None:
        (beside,) = stage.slots()
        slot = self.attendant(stage, beside)
        stage.engine.fork(beside, program("wait"))
        stage.wait_for_output(beside, b"waiting")
        stage.engine.signal(beside, signal.SIGKILL)
        stage.wait_for(Exited, beside)
        stage.engine.release([beside])
        assert not stage.all_of(Exited, slot)
        assert stage.engine.inspect(slot).state != "gone"

    def test_close_ends_a_process_beside_the_slots(self, stage: Stage) -> None:
        (beside,) = stage.slots()
        slot = self.attendant(stage, beside)
        stage.engine.close()
        assert stage.engine.inspect(slot).state == "gone"


class ProcessContract(EngineContract):
    """Holds in addition where slots have real processes on this machine. They need not be this process's children."""

    def test_a_segmentation_fault_is_told_as_its_signal(self, stage: Stage) -> None:
        (slot,) = stage.slots()
        ended = stage.run(slot, program("segfault"))
        assert ended.code == -signal.SIGSEGV
        assert "segmentation fault" in describe_exit(ended)[1]

    def test_variables_are_set_and_removed_and_the_directory_is_made(
        self, stage: Stage, tmp_path: Path
    ) -> None:
        (slot,) = stage.slots()
        env = {"CONTRACT_SET": "äöü with spaces", "PATH": None}
        cwd = tmp_path / "made" / "for it"
        stage.run(slot, program("show_surroundings", [*env], env=env, cwd=str(cwd)))
        seen = json.loads(stage.output_of(slot))
        assert seen["env"] == env
        assert seen["cwd"] == str(cwd)
        assert seen["stdin"] == ""
        assert seen["pid"] == stage.wait_for(Started, slot).pid

    def test_a_large_payload_arrives_whole(self, stage: Stage) -> None:
        (slot,) = stage.slots()
        spec = program("count_payload")
        big = ProcessSpec(entry=spec.entry, payload=bytes(20_000_000), env={})
        stage.run(slot, big)
        assert stage.output_of(slot) == b"20000000\n"

    def test_much_output_arrives_whole(self, stage: Stage) -> None:
        (slot,) = stage.slots()
        stage.run(slot, program("write_much", 100_000))
        assert stage.output_of(slot) == b"".join(b"%d\n" % number for number in range(100_000))

    def test_a_signal_from_somebody_else_is_told_as_well(self, stage: Stage) -> None:
        (slot,) = stage.slots()
        stage.engine.fork(slot, program("wait"))
        stage.wait_for_output(slot, b"waiting")
        os.kill(stage.wait_for(Started, slot).pid, signal.SIGTERM)
        assert stage.wait_for(Exited, slot).code == -signal.SIGTERM

    def test_nothing_a_process_started_is_running_when_its_end_is_told(self, stage: Stage) -> None:
        (slot,) = stage.slots()
        alive_at_exit: list[int] = []

        def look(event: EngineEvent) -> None:
            if isinstance(event, Exited):
                alive_at_exit.extend(pid for pid in _pids_in(stage.output_of(slot)) if is_running(pid))

        stage.on_event = look
        stage.run(slot, program("leave_children", "exit"))
        assert len(_pids_in(stage.output_of(slot))) == 3
        assert alive_at_exit == []

    def test_sigkill_reaches_all_that_the_process_started(self, stage: Stage) -> None:
        (slot,) = stage.slots()
        stage.engine.fork(slot, program("leave_children", "wait"))
        pids = _pids_in(stage.wait_for_output(slot, b"waiting"))
        assert all(map(is_running, pids))
        stage.engine.signal(slot, signal.SIGKILL)
        stage.wait_for(Exited, slot)
        assert not [pid for pid in pids if is_running(pid)]

    def test_close_ends_all_that_the_processes_started(self, stage: Stage) -> None:
        (slot,) = stage.slots()
        stage.engine.fork(slot, program("leave_children", "wait"))
        pids = _pids_in(stage.wait_for_output(slot, b"waiting"))
        stage.engine.close()
        assert not [pid for pid in pids if is_running(pid)]

    def test_the_end_of_one_process_leaves_the_children_of_another_alone(self, stage: Stage) -> None:
        one, other = stage.slots(2)
        stage.engine.fork(one, program("daemonise"))
        child = int(stage.wait_for_output(one, b"waiting").split()[0])
        assert is_running(child)
        stage.run(other, program("exit_with", 0))
        assert is_running(child)
        stage.engine.signal(one, signal.SIGKILL)
        stage.wait_for(Exited, one)
        assert not is_running(child)


def _pids_in(output: bytes) -> list[int]:
    pids: list[int] = json.loads(output.splitlines()[0])
    return pids


def is_running(pid: int) -> bool:
    """True while ``pid`` exists and is not merely waiting to be reaped."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False
