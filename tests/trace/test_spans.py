"""A rank's time adds up, whatever the loop does; steps are found or marked; the ring never shows half a step."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.examples import scaled

import powertrain
from powertrain.trace import recording
from powertrain.trace.recording import cuda, marks, phases
from powertrain.trace.recording import recorder as recording_recorder
from powertrain.trace.recording import ring as recording_ring
from powertrain.trace.recording.cuda import DeviceTimer
from powertrain.trace.recording.phases import (
    BACKWARD,
    COLLECTIVE,
    FORWARD,
    H2D,
    INPUT,
    INSIDE,
    OPTIMIZER,
    OUTSIDE,
    RECORD_SIZE,
    REPORT,
    StepRecord,
)
from powertrain.trace.recording.recorder import Recorder
from powertrain.trace.recording.ring import Ring, read_ring, ring_size

SOURCES = str(Path(powertrain.__file__).parents[1])
MILLISECOND = 1_000_000


class Loop:
    """A recorder whose clock only goes on when the loop says so; what it recorded, in whole milliseconds."""

    def __init__(self, records: int = 1000) -> None:
        self.time = 7 * MILLISECOND
        self.buffer = bytearray(ring_size(records))
        self.recorder = Recorder(self.buffer, clock=lambda: self.time, now=lambda: 1000.0)

    def spend(self, milliseconds: int) -> None:
        self.time += milliseconds * MILLISECOND

    def within(self, phase: int, milliseconds: int) -> None:
        with self.recorder.phase(phase):
            self.spend(milliseconds)

    def fetch(self, milliseconds: int, samples: int = 0) -> None:
        self.within(INPUT, milliseconds)
        self.recorder.batch(samples, 0, milliseconds / 1000)

    def optimize(self, milliseconds: int, key: int = 1) -> None:
        self.recorder.optimizer_begins(key)
        self.spend(milliseconds)
        self.recorder.optimizer_ended(key)

    def records(self) -> list[StepRecord]:
        self.recorder.process_marks()
        first, data = self.recorder.drain(0)
        assert first == 0
        return [phases.unpack_from(data, at) for at in range(0, len(data), RECORD_SIZE)]

    def steps(self) -> list[dict[str, int]]:
        """Milliseconds by the names of the phases, zeros left out."""
        return [named(record) for record in self.records()]


def named(record: StepRecord) -> dict[str, int]:
    return {
        name: round(seconds * 1000)
        for name, seconds in zip(phases.NAMES, record.phases, strict=True)
        if seconds
    }


@pytest.fixture
def loop() -> Loop:
    return Loop()


# --------------------------------------------------------------------------- found steps


def test_a_step_is_found_from_the_optimizer_and_closed_by_the_next_batch(loop: Loop) -> None:
    for _ in range(2):
        loop.spend(1)
        loop.fetch(2, samples=8)
        loop.spend(3)
        loop.within(H2D, 4)
        loop.within(FORWARD, 5)
        loop.spend(6)
        loop.within(BACKWARD, 7)
        loop.optimize(8)
        loop.within(REPORT, 9)
    first = {"outside": 1, "input": 2, "inside": 9, "h2d": 4, "forward": 5, "backward": 7, "optimizer": 8}
    assert loop.steps() == [first]
    loop.recorder.flush()
    assert loop.steps() == [first, first | {"report": 9}]
    assert [record.samples for record in loop.records()] == [8, 8]
    assert [round(record.fetch, 3) for record in loop.records()] == [0.002, 0.002]
    assert [record.start for record in loop.records()] == pytest.approx([1000.0, 1000.036])


def test_a_loop_without_a_loader_closes_a_step_when_its_optimizer_steps_again(loop: Loop) -> None:
    for _ in range(3):
        loop.within(FORWARD, 1)
        loop.optimize(2)
        loop.spend(4)
    assert loop.steps() == [
        {"forward": 1, "optimizer": 2},
        {"outside": 4, "forward": 1, "optimizer": 2},
    ]


def test_a_loop_that_learns_without_an_optimizer_has_a_step_for_each_report(loop: Loop) -> None:
    for _ in range(3):
        loop.within(FORWARD, 1)
        loop.within(BACKWARD, 2)
        loop.spend(4)
        loop.recorder.reported()
    assert loop.steps() == [{"forward": 1, "backward": 2, "inside": 4}] * 3


def test_two_optimizers_by_turns_make_one_step(loop: Loop) -> None:
    for _ in range(2):
        loop.fetch(1)
        for key in (1, 2):
            loop.within(FORWARD, 2)
            loop.within(BACKWARD, 3)
            loop.optimize(4, key)
    loop.recorder.flush()
    assert loop.steps() == [{"input": 1, "forward": 4, "backward": 6, "optimizer": 8}] * 2


def test_two_optimizers_without_a_loader_end_the_step_with_the_last_of_them(loop: Loop) -> None:
    for _ in range(2):
        loop.optimize(1, 1)
        loop.spend(2)
        loop.optimize(4, 2)
        loop.spend(8)
    assert loop.steps() == [{"optimizer": 5, "outside": 2}]


def test_accumulated_batches_belong_to_one_step(loop: Loop) -> None:
    for _ in range(3):
        loop.fetch(1, samples=4)
        loop.within(FORWARD, 2)
        loop.within(BACKWARD, 3)
    loop.optimize(4)
    loop.recorder.flush()
    assert loop.steps() == [{"input": 3, "forward": 6, "backward": 9, "optimizer": 4}]
    assert loop.records()[0].samples == 12


def test_forward_and_backward_within_a_closure_are_taken_out_of_the_optimizer(loop: Loop) -> None:
    loop.fetch(1)
    loop.recorder.optimizer_begins(1)
    loop.spend(10)
    for _ in range(2):
        loop.within(FORWARD, 2)
        loop.within(BACKWARD, 3)
        loop.spend(10)
    loop.recorder.optimizer_ended(1)
    loop.recorder.flush()
    assert loop.steps() == [{"input": 1, "optimizer": 30, "forward": 4, "backward": 6}]


def test_optimizers_that_step_within_backward_end_the_step_with_the_last(loop: Loop) -> None:
    for _ in range(2):
        loop.fetch(1)
        with loop.recorder.phase(BACKWARD):
            for key in range(3):
                loop.spend(2)
                loop.optimize(1, key)
        loop.spend(5)
    loop.recorder.flush()
    assert loop.steps() == [
        {"input": 1, "backward": 6, "optimizer": 3},
        {"outside": 5, "input": 1, "backward": 6, "optimizer": 3},
    ]


def test_a_loop_without_optimizers_has_a_step_for_each_report(loop: Loop) -> None:
    for _ in range(2):
        loop.fetch(1)
        loop.within(FORWARD, 2)
        loop.within(REPORT, 3)
        loop.recorder.reported()
    assert loop.steps() == [{"input": 1, "forward": 2, "report": 3}] * 2


def test_a_report_ends_no_step_of_a_loop_with_an_optimizer(loop: Loop) -> None:
    loop.optimize(1)
    loop.within(REPORT, 3)
    loop.recorder.reported()
    loop.optimize(1)
    loop.recorder.flush()
    assert loop.steps() == [{"optimizer": 1}, {"report": 3, "optimizer": 1}]


def test_an_epoch_that_ends_gives_no_batch_and_stays_outside(loop: Loop) -> None:
    loop.optimize(1)
    loop.within(INPUT, 2)  # which ends in StopIteration
    loop.spend(3)
    loop.fetch(4)
    loop.optimize(1)
    loop.recorder.flush()
    assert loop.steps()[1] == {"input": 6, "outside": 3, "optimizer": 1}


# --------------------------------------------------------------------------- evaluation


def evaluate(loop: Loop) -> None:
    loop.fetch(10, samples=100)
    loop.recorder.leave(loop.recorder.enter_forward(with_gradients=False))
    loop.within(H2D, 20)
    loop.spend(30)


def learn(loop: Loop) -> None:
    loop.fetch(1, samples=1)
    loop.recorder.leave(loop.recorder.enter_forward(with_gradients=True))
    loop.within(BACKWARD, 2)
    loop.optimize(3)


def test_batches_of_an_evaluation_lie_outside(loop: Loop) -> None:
    learn(loop)
    evaluate(loop)
    evaluate(loop)
    loop.within(INPUT, 4)  # the end of its loader
    learn(loop)
    loop.recorder.flush()
    learned = {"input": 1, "backward": 2, "optimizer": 3}
    assert loop.steps() == [learned, learned | {"input": 5, "outside": 120}]
    assert [record.samples for record in loop.records()] == [1, 1]


def test_a_teacher_that_looks_at_the_same_batch_is_part_of_the_step(loop: Loop) -> None:
    for _ in range(2):
        loop.fetch(1)
        depth = loop.recorder.enter_forward(with_gradients=False)
        loop.spend(5)
        loop.recorder.leave(depth)
        loop.within(BACKWARD, 2)
        loop.optimize(3)
    loop.recorder.flush()
    assert loop.steps() == [{"input": 1, "forward": 5, "backward": 2, "optimizer": 3}] * 2


def test_a_loop_that_never_learns_is_no_evaluation(loop: Loop) -> None:
    for _ in range(2):
        evaluate(loop)
    loop.recorder.reported()
    assert loop.steps() == [{"input": 20, "h2d": 40, "inside": 60}]


# --------------------------------------------------------------------------- marked steps


def test_marked_steps_end_where_their_block_does(loop: Loop) -> None:
    for _ in range(2):
        loop.fetch(1)
        loop.recorder.begin_marked_step()
        loop.spend(2)
        loop.within(FORWARD, 3)
        loop.optimize(4)
        loop.spend(5)
        loop.recorder.end_marked_step()
        loop.spend(6)
        loop.within(FORWARD, 7)
        loop.within(REPORT, 8)
    assert loop.steps() == [
        {"input": 1, "inside": 7, "forward": 3, "optimizer": 4},
        {"input": 1, "inside": 7, "forward": 3, "optimizer": 4, "outside": 13, "report": 8},
    ]
    assert all(record.flags == phases.MARKED for record in loop.records())


def test_evaluation_between_marked_steps_lies_outside(loop: Loop) -> None:
    for _ in range(2):
        loop.fetch(1)
        loop.recorder.begin_marked_step()
        loop.within(BACKWARD, 2)
        loop.recorder.end_marked_step()
        evaluate(loop)
    assert loop.steps() == [{"input": 1, "backward": 2}, {"outside": 60, "input": 1, "backward": 2}]


def test_a_found_step_is_closed_by_the_first_marked_one(loop: Loop) -> None:
    loop.optimize(1)
    loop.spend(2)
    loop.recorder.begin_marked_step()
    loop.spend(3)
    loop.recorder.end_marked_step()
    assert loop.steps() == [{"optimizer": 1}, {"outside": 2, "inside": 3}]


def test_a_marked_step_that_fails_is_not_counted_and_its_time_goes_to_the_next(loop: Loop) -> None:
    loop.recorder.begin_marked_step()
    loop.recorder.optimizer_begins(1)
    loop.spend(1)  # and it raises
    loop.recorder.end_marked_step(failed=True)
    loop.spend(2)
    loop.recorder.begin_marked_step()
    loop.spend(4)
    loop.recorder.end_marked_step()
    assert loop.steps() == [{"optimizer": 1, "outside": 2, "inside": 4}]


def test_a_marked_step_within_another_is_part_of_it(loop: Loop) -> None:
    loop.recorder.begin_marked_step()
    loop.spend(1)
    loop.recorder.begin_marked_step()
    loop.spend(2)
    loop.recorder.end_marked_step()
    loop.spend(4)
    loop.recorder.end_marked_step()
    assert loop.steps() == [{"inside": 7}]


# --------------------------------------------------------------------------- waiting for other ranks


def test_backward_is_waiting_once_the_last_gradients_are_there(loop: Loop) -> None:
    with loop.recorder.phase(BACKWARD):
        loop.spend(1)
        loop.recorder.gradients_are_there()
        loop.spend(2)
        loop.recorder.gradients_are_there()
        loop.spend(4)
    loop.recorder.gradients_are_there()  # which says nothing outside of a backward pass
    loop.optimize(8)
    loop.recorder.flush()
    assert loop.steps() == [{"backward": 3, "collective": 4, "optimizer": 8}]


# --------------------------------------------------------------------------- what goes wrong


def test_an_optimizer_that_raises_leaves_no_trace_once_the_next_batch_comes(loop: Loop) -> None:
    loop.fetch(1)
    loop.recorder.optimizer_begins(1)
    loop.spend(2)
    loop.fetch(4)
    loop.spend(8)
    loop.optimize(16)
    loop.recorder.flush()
    assert loop.steps() == [{"input": 5, "optimizer": 18, "inside": 8}]


def test_an_optimizer_that_raises_is_given_up_when_it_steps_again(loop: Loop) -> None:
    loop.recorder.optimizer_begins(1)
    loop.spend(2)
    loop.within(FORWARD, 4)
    loop.optimize(8)
    loop.spend(16)
    loop.optimize(1)
    assert loop.steps() == [{"optimizer": 10, "forward": 4}]


def test_leaving_a_phase_leaves_those_within_it_too(loop: Loop) -> None:
    outer = loop.recorder.enter(BACKWARD)
    inner = loop.recorder.enter(OPTIMIZER)
    loop.spend(1)
    loop.recorder.leave(outer)
    loop.recorder.leave(inner)
    loop.spend(2)
    loop.optimize(4)
    loop.recorder.flush()
    assert loop.steps() == [{"optimizer": 5, "inside": 2}]


def test_other_threads_change_nothing(loop: Loop) -> None:
    recorder = loop.recorder

    def meddle() -> None:
        depth = recorder.enter(FORWARD)
        assert depth == marks.IGNORED
        loop.spend(1)
        recorder.leave(depth)
        recorder.enter_forward(with_gradients=False)
        recorder.gradients_are_there()
        recorder.copies_pageable()
        recorder.batch(5)
        recorder.begin_marked_step()
        recorder.end_marked_step()
        recorder.optimizer_begins(1)
        recorder.optimizer_ended(1)
        recorder.reported()
        recorder.flush()

    loop.fetch(2)
    with recorder.phase(BACKWARD):
        thread = threading.Thread(target=meddle)
        thread.start()
        thread.join()
    loop.optimize(4)
    recorder.flush()
    assert loop.steps() == [{"input": 2, "backward": 1, "optimizer": 4}]
    assert loop.records()[0].samples == loop.records()[0].flags == 0


def test_a_forked_child_records_nothing(tmp_path: Path) -> None:
    program = (
        "import mmap, os, sys\n"
        "from powertrain.trace.recording import current, recorder as recorders, ring as rings\n"
        "file = open(sys.argv[1], 'w+b'); file.truncate(rings.ring_size(10)); ring = mmap.mmap(file.fileno(), 0)\n"
        "recorder = recorders.Recorder(ring)\n"
        "current.use(recorder)\n"
        "recorder.optimizer_ended(1)\n"
        "if os.fork() == 0:\n"
        "    recorder.flush(); recorder.enter(0); recorder.optimizer_ended(1); recorder.flush()\n"
        "    os._exit(0 if current.current() is not recorder else 1)\n"
        "assert os.wait()[1] == 0\n"
        "print(rings.read_ring(ring)[1] == b'')\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "ring")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": SOURCES})
    assert (done.stdout, done.stderr) == ("True\n", "")


# --------------------------------------------------------------------------- whatever the loop does

_CALLS = st.one_of(
    st.tuples(st.just("enter"), st.integers(0, phases.COUNT - 1)),
    st.tuples(st.just("leave"), st.integers(-1, 4)),
    st.tuples(st.just("optimizer_begins"), st.integers(0, 2)),
    st.tuples(st.just("optimizer_ended"), st.integers(0, 2)),
    st.tuples(st.just("enter_forward"), st.booleans()),
    st.tuples(st.just("end_marked_step"), st.booleans()),
    st.tuples(st.just("batch"), st.integers(0, 3)),
    st.tuples(st.sampled_from(["begin_marked_step", "reported", "gradients_are_there", "flush"])),
)


@settings(max_examples=scaled(300))
@given(st.lists(st.tuples(_CALLS, st.integers(0, 5)), max_size=60))
def test_no_order_of_calls_loses_time_or_makes_it_negative(calls: list[Any]) -> None:
    loop = Loop()
    began = loop.time
    for (name, *arguments), milliseconds in calls:
        getattr(loop.recorder, name)(*arguments)
        loop.spend(milliseconds)
    for _ in range(len(calls)):  # out of all marked steps, the outermost of which is then closed
        loop.recorder.end_marked_step()
    loop.recorder.begin_marked_step()
    loop.recorder.end_marked_step()
    records = loop.records()
    assert all(seconds >= 0 for record in records for seconds in record.phases)
    total = sum(sum(record.phases) for record in records)
    assert total == pytest.approx((loop.time - began) / 1e9, abs=1e-5)
    for record, following in pairwise(records):
        assert record.start + sum(record.phases) == pytest.approx(following.start, abs=1e-6)
    assert [record.step for record in records] == list(range(len(records)))


_PHASES = st.sampled_from([H2D, FORWARD, BACKWARD, COLLECTIVE, REPORT, marks.LEARN, marks.LOOK, INPUT])
_PARTS = st.one_of(
    st.tuples(st.just("within"), _PHASES),
    st.tuples(st.just("optimize"), st.integers(1, 2)),
    st.tuples(st.sampled_from(["backward", "fetched", "spend", "process_marks"])),
    st.tuples(st.just("plain"), _CALLS),
)
_BODIES = st.lists(_PARTS, max_size=6).map(lambda parts: [("fetched",), *parts, ("optimize", 1)])


def play(loop: Loop, body: list[Any], milliseconds: int) -> None:
    """Each part takes another time, so that none can be taken for another."""
    for number, (name, *arguments) in enumerate(body):
        took = milliseconds + number
        if name == "fetched":
            depth = loop.recorder.enter(INPUT)
            loop.spend(took)
            loop.recorder.fetched(depth, 4, 2, marks.MADE_HERE)
        elif name == "backward":
            with loop.recorder.phase(BACKWARD):
                for _ in range(2):
                    loop.spend(took)
                    loop.recorder.gradients_are_there()
                loop.spend(took)
        elif name == "plain":
            getattr(loop.recorder, arguments[0][0])(*arguments[0][1:])
        elif name == "process_marks":
            loop.recorder.process_marks()
        elif name == "spend":
            loop.spend(took)
        else:
            getattr(loop, name)(*(arguments if name == "within" else ()), took)
        loop.spend(1)


@settings(max_examples=scaled(300))
@given(st.lists(st.tuples(_BODIES, st.integers(1, 6)), min_size=1, max_size=4), st.integers(1, 20))
def test_what_is_done_over_and_over_is_recorded_as_if_it_were_done_once(
    bodies: list[tuple[list[Any], int]], between: int
) -> None:
    loops = [Loop(), Loop()]
    # Of one of them no state is ever the same, so that each thing is looked at by itself.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loops[1].recorder._steps, "_state", lambda: (object(),))
        for loop in loops:
            for number, (body, times) in enumerate(bodies):
                for time in range(times):
                    play(loop, body, 1 + (number + time) % between)
            loop.recorder.flush()
    assert loops[0].records() == loops[1].records()
    assert loops[0].recorder.phase_now() == loops[1].recorder.phase_now()


def test_a_usual_step_is_not_looked_at_part_by_part(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    body = [("fetched",), ("within", marks.LEARN), ("backward",), ("optimize", 1)]
    for _ in range(4):
        play(loop, body, 2)
    loop.recorder.process_marks()

    def is_looked_at(*_: Any) -> None:
        raise AssertionError

    steps = loop.recorder._steps
    monkeypatch.setattr(steps, "_handlers", (is_looked_at,) * len(steps._handlers))
    for _ in range(4):
        play(loop, body, 2)
    loop.recorder.process_marks()
    assert loop.recorder.trouble == ""
    assert len(loop.records()) == 7


@pytest.mark.parametrize("on_device", [False, True])
@settings(max_examples=scaled(60))
@given(calls=st.lists(_CALLS, min_size=1, max_size=5))
def test_whatever_is_called_over_and_over_little_is_noted_at_once(calls: list[Any], on_device: bool) -> None:
    loop, stream = Loop(), Stream()
    if on_device:
        loop.recorder.time_on(lambda: DeviceTimer(lambda: Event(stream), Event.record))
    for _ in range(2 * marks.MOST_MARKS // len(calls)):
        for name, *arguments in calls:
            getattr(loop.recorder, name)(*arguments)
            assert len(loop.recorder.log) <= marks.MOST_MARKS + 16
    assert loop.recorder.trouble == ""


@pytest.mark.parametrize("name", ["copies_pageable", "gradients_are_there", "batch", "begin_marked_step"])
def test_what_comes_alone_is_not_kept_forever(loop: Loop, name: str) -> None:
    for _ in range(2 * marks.MOST_MARKS):
        getattr(loop.recorder, name)()
    assert len(loop.recorder.log) <= marks.MOST_MARKS + 16


def test_a_loop_of_which_only_the_optimizer_is_known_gives_its_steps_as_they_come(loop: Loop) -> None:
    for number in range(2000):
        loop.optimize(10)
        made = len(loop.recorder.drain(0)[1]) // RECORD_SIZE + loop.recorder.drain(0)[0]
        assert number - made <= 11, "those of the last tenth of a second"
    assert loop.recorder.trouble == ""


# --------------------------------------------------------------------------- the ring


def whole(data: bytes, first: int) -> None:
    """Every record tells its own number in every field: none is half another's."""
    for index, at in enumerate(range(0, len(data), RECORD_SIZE)):
        record = phases.unpack_from(data, at)
        number = first + index
        assert record == record_of(number), number


def record_of(number: int) -> StepRecord:
    value = float(number % 1000)
    return StepRecord(number, number, value, value, value, value, (value,) * 9, (value,) * 9, number, number)


@given(records=st.integers(2, 7), written=st.integers(0, 20), after=st.integers(0, 25))
def test_a_ring_gives_the_newest_records_from_where_it_is_asked(
    records: int, written: int, after: int
) -> None:
    buffer = bytearray(os.urandom(ring_size(records)))
    ring = Ring(buffer)
    for number in range(written):
        ring.append(record_of(number))
    first, data = read_ring(buffer, after)
    whole(data, first)
    assert first >= after or not data
    assert first + len(data) // RECORD_SIZE == max(written, first)
    assert len(data) // RECORD_SIZE == max(0, min(written - after, records - 1, written))


@given(written=st.integers(0, 12), cut=st.integers(0, RECORD_SIZE))
def test_a_reader_sees_no_half_written_record(written: int, cut: int) -> None:
    buffer = bytearray(ring_size(4))
    ring = Ring(buffer)
    for number in range(written):
        ring.append(record_of(number))
    coming = bytearray(RECORD_SIZE)
    phases.pack_into(coming, 0, record_of(written))
    begin = recording_ring.HEADER_SIZE + (written % 4) * RECORD_SIZE
    buffer[begin : begin + cut] = coming[:cut]
    first, data = read_ring(buffer)
    whole(data, first)
    assert first + len(data) // RECORD_SIZE == written


def test_a_reader_in_another_thread_sees_only_whole_records() -> None:
    buffer = bytearray(ring_size(8))
    ring = Ring(buffer)
    is_over = threading.Event()

    def write() -> None:
        number = 0
        while not is_over.is_set():
            ring.append(record_of(number))
            number += 1

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = after = 0
        while seen < 2000:
            first, data = read_ring(buffer, after)
            whole(data, first)
            after = first + len(data) // RECORD_SIZE
            seen += len(data) // RECORD_SIZE
    finally:
        is_over.set()
        writer.join()
        sys.setswitchinterval(before)


WRITER = """
import mmap, sys
sys.path.insert(0, sys.argv[2])
from powertrain.trace.recording.ring import Ring
from powertrain.trace.recording.phases import StepRecord
file = open(sys.argv[1], "r+b")
ring = Ring(mmap.mmap(file.fileno(), 0))
number = 0
while True:
    value = float(number % 1000)
    ring.append(StepRecord(number, number, value, value, value, value, (value,) * 9, (value,) * 9, number, number))
    number += 1
    if number == 100:
        print("writes", flush=True)
"""


def test_a_mapped_ring_is_readable_while_another_process_writes_and_after_it_is_killed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "ring"
    for patience in (0, 50, 200):
        path.write_bytes(bytes(ring_size(5)))
        command = [sys.executable, "-c", WRITER, str(path), SOURCES]
        with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
            writer = subprocess.Popen(command, stdout=subprocess.PIPE)
            try:
                assert writer.stdout is not None
                assert writer.stdout.readline() == b"writes\n"
                after = 0
                for _ in range(patience):
                    first, data = read_ring(mapped, after)
                    whole(data, first)
                    after = first + len(data) // RECORD_SIZE
            finally:
                writer.send_signal(signal.SIGKILL)
                writer.wait()
                assert writer.stdout is not None
                writer.stdout.close()
            first, data = read_ring(mapped)
            whole(data, first)
            assert len(data) == 4 * RECORD_SIZE
            assert first > 90


def test_something_else_is_refused_as_a_ring() -> None:
    with pytest.raises(ValueError, match="not a step ring"):
        read_ring(b"something else entirely, of some length")
    with pytest.raises(ValueError, match="cannot hold two steps"):
        Recorder(bytearray(ring_size(1)))


def test_a_drain_goes_on_where_the_last_one_ended(loop: Loop) -> None:
    for _ in range(5):
        loop.optimize(1)
    loop.recorder.process_marks()
    first, data = loop.recorder.drain(0)
    assert (first, len(data)) == (0, 4 * RECORD_SIZE)
    loop.optimize(1)
    loop.recorder.process_marks()
    assert loop.recorder.drain(4)[0] == 4
    assert len(loop.recorder.drain(4)[1]) == RECORD_SIZE
    assert loop.recorder.drain(5) == (5, b"")
    assert loop.recorder.steps == 5


# --------------------------------------------------------------------------- a device


class Stream:
    """A device that is as far behind as the test wants; its time goes on with each event by what was put before it."""

    def __init__(self) -> None:
        self.work = 0.0
        self.done = 0
        self.recorded: list[Event] = []


class Event:
    def __init__(self, stream: Stream) -> None:
        self.stream, self.at, self.number = stream, -1.0, -1

    def record(self: Event) -> None:
        self.at, self.number = self.stream.work, len(self.stream.recorded)
        self.stream.recorded.append(self)

    def query(self) -> bool:
        return self.stream.done > self.number

    def elapsed_time(self, later: Event) -> float:
        assert later.query()
        return later.at - self.at


def device_step(loop: Loop, stream: Stream) -> None:
    loop.fetch(1)
    with loop.recorder.phase(FORWARD):
        stream.work += 10
    with loop.recorder.phase(BACKWARD):
        stream.work += 20
        for _ in range(2):  # the first was not the last, after all
            loop.recorder.gradients_are_there()
            stream.work += 5
    loop.recorder.optimizer_begins(1)
    stream.work += 7
    loop.recorder.optimizer_ended(1)
    stream.work += 100


def test_times_on_the_device_are_added_once_they_are_known(loop: Loop) -> None:
    stream = Stream()
    timer = DeviceTimer(lambda: Event(stream), Event.record, memory=lambda: (3.0, 5.0))
    loop.recorder.time_on(lambda: timer)
    device_step(loop, stream)
    device_step(loop, stream)
    loop.recorder.flush()
    assert loop.records() == [], "they wait for the device"
    loop.recorder.process_marks()
    final = phases.unpack_from(loop.recorder.drain(0, final=True)[1])
    assert final.flags == 0, "and are given without its times in the end"
    stream.done = len(stream.recorded) // 2 + 1
    (first,) = loop.records()
    assert first.flags == phases.TIMED_ON_DEVICE
    assert (first.memory, first.peak_memory) == (3.0, 5.0)
    seconds = [round(value, 3) for value in first.device]
    assert seconds[FORWARD] == 0.010
    assert seconds[BACKWARD] == 0.025
    assert seconds[COLLECTIVE] == 0.005
    assert seconds[OPTIMIZER] == 0.007
    assert seconds[INSIDE] == seconds[OUTSIDE] == seconds[INPUT] == 0
    stream.done = len(stream.recorded)
    assert len(loop.records()) == 2


def test_a_device_that_computes_the_loss_does_so_inside_the_step(loop: Loop) -> None:
    stream = Stream()
    loop.recorder.time_on(lambda: DeviceTimer(lambda: Event(stream), Event.record))
    for _ in range(2):
        loop.fetch(1)
        for phase in (FORWARD, BACKWARD):
            with loop.recorder.phase(phase):
                stream.work += 10
            stream.work += 3
        loop.optimize(1)
        stream.work += 100
    loop.recorder.flush()
    stream.done = len(stream.recorded)
    assert [round(record.device[INSIDE], 4) for record in loop.records()] == [0.006, 0.006]


def test_what_a_device_does_for_an_optimizer_with_a_closure_is_the_optimizers(loop: Loop) -> None:
    stream = Stream()
    loop.recorder.time_on(lambda: DeviceTimer(lambda: Event(stream), Event.record))
    loop.fetch(1)
    loop.recorder.optimizer_begins(1)
    stream.work += 2
    for phase in (FORWARD, BACKWARD):
        with loop.recorder.phase(phase):
            stream.work += 10
        stream.work += 4
    loop.recorder.optimizer_ended(1)
    loop.recorder.flush()
    stream.done = len(stream.recorded)
    (record,) = loop.records()
    assert [round(record.device[phase], 4) for phase in (FORWARD, OPTIMIZER, INSIDE)] == [0.01, 0.01, 0.0]


def test_events_are_used_again(loop: Loop) -> None:
    stream, made = Stream(), []

    def make() -> Event:
        made.append(Event(stream))
        return made[-1]

    loop.recorder.time_on(lambda: DeviceTimer(make, Event.record, clock=lambda: loop.time))
    for _ in range(20):
        device_step(loop, stream)
        stream.done = len(stream.recorded)
        loop.recorder.process_marks()
        loop.recorder.drain(0)
    assert len(made) <= 3 * len(stream.recorded) / 20


class Graph:
    """One that is captured, by its identity."""


def test_a_device_is_asked_nothing_while_a_graph_is_captured(loop: Loop) -> None:
    stream, captures, graph = Stream(), cuda.Captures(), Graph()
    asked: list[bool] = []

    class Asked(Event):
        def query(self) -> bool:
            asked.append(True)
            return super().query()

    timer = DeviceTimer(lambda: Asked(stream), Asked.record, captures=captures)
    loop.recorder.time_on(lambda: timer)
    device_step(loop, stream)
    loop.recorder.flush()
    stream.done = len(stream.recorded)
    captures.begins(graph)
    assert loop.records() == [], "they wait"
    assert asked == []
    captures.ended(graph)
    captures.ended(graph)
    assert [record.flags for record in loop.records()] == [phases.TIMED_ON_DEVICE]
    assert asked


def test_a_capture_waits_for_a_question_and_the_question_for_no_capture(loop: Loop) -> None:
    stream, captures, graph = Stream(), cuda.Captures(), Graph()
    is_asking, may_answer, has_begun = threading.Event(), threading.Event(), threading.Event()

    class Asked(Event):
        def query(self) -> bool:
            is_asking.set()
            assert may_answer.wait(10)
            assert not has_begun.is_set()
            return super().query()

    def capture() -> None:
        captures.begins(graph)
        has_begun.set()

    loop.recorder.time_on(lambda: DeviceTimer(lambda: Asked(stream), Asked.record, captures=captures))
    device_step(loop, stream)
    loop.recorder.flush()
    stream.done = len(stream.recorded)
    found: list[bytes] = []
    drains = threading.Thread(target=lambda: found.append(loop.recorder.drain(0)[1]))
    drains.start()
    assert is_asking.wait(10)
    captures_too = threading.Thread(target=capture)
    captures_too.start()
    assert loop.recorder.drain(0)[1] == b"", "and a second one that asks does not wait either"
    assert not has_begun.is_set()
    may_answer.set()
    drains.join()
    captures_too.join()
    assert has_begun.is_set()
    assert len(found[0]) == RECORD_SIZE


def test_a_graph_that_is_gone_is_not_captured_any_more() -> None:
    captures, graph = cuda.Captures(), Graph()
    captures.begins(graph)
    with captures.kept_out() as may_ask:
        assert not may_ask
    del graph
    with captures.kept_out() as may_ask:
        assert may_ask


def test_a_loop_that_ends_no_step_uses_events_again_too(loop: Loop) -> None:
    stream, made = Stream(), []

    def make() -> Event:
        made.append(Event(stream))
        return made[-1]

    loop.recorder.time_on(lambda: DeviceTimer(make, Event.record, memory=lambda: (3.0, 5.0)))
    for _ in range(2 * marks.MOST_STREAM_MARKS):
        loop.recorder.leave(loop.recorder.enter_forward(with_gradients=False))
    assert len(made) < 1.2 * marks.MOST_STREAM_MARKS
    loop.recorder.reported()
    device_step(loop, stream)
    loop.recorder.flush()
    stream.done = len(stream.recorded)
    assert [bool(record.flags & phases.TIMED_ON_DEVICE) for record in loop.records()] == [False, True]


def test_nothing_is_put_into_a_graph_that_is_being_captured(loop: Loop) -> None:
    stream = Stream()
    loop.recorder.time_on(lambda: DeviceTimer(lambda: Event(stream), Event.record, lambda: True))
    device_step(loop, stream)
    loop.recorder.flush()
    assert stream.recorded == []
    assert loop.records()[0].flags == 0


def costly(loop: Loop, stream: Stream, nanoseconds: int) -> DeviceTimer:
    """A timer for which an event takes that long to put on the stream."""

    def record(event: Event) -> None:
        loop.time += nanoseconds
        event.record()

    return DeviceTimer(lambda: Event(stream), record, memory=lambda: (3.0, 5.0), clock=lambda: loop.time)


def short_step(loop: Loop, stream: Stream, optimizers: tuple[int, ...] = (1,)) -> None:
    """5 ms, during which the device works for 4, and has done so when it ends."""
    loop.fetch(0)
    for key in optimizers:
        with loop.recorder.phase(FORWARD):
            stream.work += 4
        loop.optimize(5, key)
    stream.done = len(stream.recorded)


def is_own(record: StepRecord) -> bool:
    """Whether its times on the device were taken in the step itself."""
    return record.flags & (phases.TIMED_ON_DEVICE | phases.AS_USUAL_ON_DEVICE) == phases.TIMED_ON_DEVICE


def test_of_short_steps_few_are_timed_and_the_others_say_what_is_usual(loop: Loop) -> None:
    stream = Stream()
    loop.recorder.time_on(lambda: costly(loop, stream, 10_000))
    for number in range(360):
        short_step(loop, stream)
        if number % 20 == 19:
            loop.records()
    loop.recorder.flush()
    records = loop.records()
    assert len(records) == 360
    own = [record.step for record in records if is_own(record)]
    assert own[:10] == list(range(10)), "all of them, until it is known what is usual"
    later = [step for step in own if step >= 40]
    assert {step % 16 for step in later} == {0}, "40 us and as much again on the device: 1.6 % of 5 ms"
    assert len(later) == 20
    usual = phases.TIMED_ON_DEVICE | phases.AS_USUAL_ON_DEVICE
    assert {record.flags for record in records[40:]} == {phases.TIMED_ON_DEVICE, usual}
    assert {round(record.device[FORWARD], 4) for record in records} == {0.004}
    assert {record.peak_memory for record in records} == {5.0}


def test_steps_that_were_not_timed_are_judged_as_those_that_were(loop: Loop) -> None:
    """The thread runs ahead of the device and waits for it inside the step, whether it is timed or not."""
    import numpy as np

    from powertrain.diagnosis.tables.steady import spent
    from powertrain.diagnosis.tables.steps import RECORD, aligned

    stream = Stream()
    loop.recorder.time_on(lambda: costly(loop, stream, 10_000))
    for number in range(200):
        loop.fetch(1)
        with loop.recorder.phase(FORWARD):
            stream.work += 4
        loop.spend(4)
        loop.optimize(0)
        stream.done = len(stream.recorded)
        if number % 20 == 19:
            loop.records()
    table = spent(aligned({0: np.frombuffer(loop.recorder.drain(0)[1], RECORD)}, {}))[:, 0]
    assert len(table) == 199
    assert np.allclose(table[:, FORWARD], 0.004, atol=1e-4)
    assert np.allclose(table[:, INPUT], 0.001, atol=1e-4)
    assert (table[:, INSIDE] < 1e-4).all()


def test_a_step_that_was_timed_in_part_only_does_not_say_so(loop: Loop) -> None:
    stream = Stream()
    loop.recorder.time_on(lambda: costly(loop, stream, 10_000))
    for number in range(200):
        short_step(loop, stream, (1, 2, 3))
        if number % 20 == 19:
            loop.records()
    loop.recorder.flush()
    records = loop.records()
    own = [record for record in records[40:] if is_own(record)]
    assert 10 <= len(own) <= 100, "some of them, and not all"
    assert {round(record.device[FORWARD], 4) for record in own} == {0.012}


def test_marked_steps_are_timed_now_and_then_too(loop: Loop) -> None:
    stream = Stream()
    loop.recorder.time_on(lambda: costly(loop, stream, 10_000))
    for number in range(180):
        loop.recorder.begin_marked_step()
        short_step(loop, stream)
        loop.recorder.end_marked_step()
        if number % 20 == 19:
            loop.records()
    own = [record.step for record in loop.records()[40:] if is_own(record)]
    assert own == list(range(48, 180, 16))


@given(step=st.integers(50_000, 10**10), spent=st.integers(0, 10**6))
def test_timing_takes_at_most_a_thousandth_unless_steps_are_very_short(step: int, spent: int) -> None:
    rhythm, now = cuda.Rhythm(), 10**12
    for _ in range(200):
        now += step
        rhythm.spent += spent
        rhythm.ended(now, was_timed=True)
    assert rhythm.every & (rhythm.every - 1) == 0
    cost = 2 * spent / rhythm.every
    assert cost <= 0.001004 * step or rhythm.every == 64
    assert rhythm.every == 1 or 2 * cost > 0.000996 * step, "and no fewer are timed than must be"


def test_a_long_pause_does_not_change_how_often_steps_are_timed() -> None:
    rhythm, now = cuda.Rhythm(), 10**12
    for number in range(200):
        now += 5_000_000 if number != 150 else 10**11
        rhythm.spent += 40_000
        rhythm.ended(now, was_timed=True)
        if number > 20:
            assert rhythm.every == 16


def test_a_glance_from_another_thread_sees_the_phase_that_is_open(loop: Loop) -> None:
    recorder, seen = loop.recorder, []

    def glance() -> None:
        seen.append(phases.NAMES[recorder.phase_now()])

    for processes in (False, True):
        depth = recorder.enter(INPUT)
        glance()
        recorder.fetched(depth, 4)
        glance()
        depth = recorder.enter_forward(True)
        if processes:
            recorder.process_marks()
        glance()
        recorder.leave(depth)
        recorder.optimizer_begins(1)
        glance()
        recorder.optimizer_ended(1)
        glance()
    assert seen == ["input", "inside", "forward", "optimizer", "outside"] * 2


def test_a_batch_that_came_is_counted_as_waiting_that_is_over(loop: Loop) -> None:
    depth = loop.recorder.enter(INPUT)
    loop.spend(3)
    loop.recorder.fetched(depth, 16, 32, marks.MADE_HERE)
    loop.spend(2)
    loop.optimize(1)
    loop.recorder.flush()
    (record,) = loop.records()
    assert named(record) == {"input": 3, "inside": 2, "optimizer": 1}
    assert (record.samples, record.tokens, round(record.fetch, 4)) == (16, 32, 0.003)


def test_what_a_signals_handler_notes_while_steps_are_made_is_kept(loop: Loop) -> None:
    """The handlers of the recorder are called while more is noted, as from a signal's handler."""
    recorder = loop.recorder
    plain = recorder._steps._handlers
    fired: list[int] = []

    def interrupted(number: int, value: Any) -> None:
        plain[number](number, value)
        if not fired:
            fired.append(number)
            recorder.enter(phases.REPORT)

    recorder._steps._handlers = (interrupted, *plain[1:])
    loop.within(INPUT, 2)
    recorder.process_marks()
    loop.spend(5)
    recorder.leave(0)
    loop.optimize(1)
    recorder.flush()
    assert loop.steps() == [{"input": 2, "optimizer": 1, "report": 5}]


def test_a_fault_of_the_recorder_ends_recording_and_nothing_else() -> None:
    recorder = recording_recorder.Recorder()
    recorder.reported()
    recorder.note((10_000, 0))  # an unknown mark
    recorder.process_marks()
    assert "IndexError" in recorder.trouble
    for _ in range(3):
        recorder.leave(recorder.enter(phases.FORWARD))
        recorder.reported()
    assert recorder.steps == 1
    assert recorder.log == []


# --------------------------------------------------------------------------- exceptions that come from outside


class Interrupted(Exception):
    """Of the user's, as a handler of a signal raises it."""


class At:
    """Calls something at the ``number``-th line that is executed in the recorder, within a function of it."""

    def __init__(self, number: int, function: str, call: Callable[[], None]) -> None:
        self.left, self._function, self._call = number, function, call
        self._depth = 0

    def __enter__(self) -> At:
        sys.settrace(self._begins)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _begins(self, frame: FrameType, event: str, _: Any) -> Any:
        if Path(frame.f_code.co_filename).parent != Path(recording.__file__).parent:
            return None
        within: FrameType | None = frame
        while within is not None and within.f_code.co_name != self._function:
            within = within.f_back
        return None if within is None else self._line

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                self._call()
        return self._line


def interrupt() -> None:
    raise Interrupted


def steps_of_both_kinds(loop: Loop, marked: bool) -> None:
    for _ in range(2):
        loop.fetch(1, samples=4)
        if marked:
            loop.recorder.begin_marked_step()
        loop.within(FORWARD, 2)
        with loop.recorder.phase(BACKWARD):
            loop.spend(1)
            loop.within(COLLECTIVE, 2)
            loop.recorder.process_marks()
        loop.optimize(4)
        if marked:
            loop.recorder.end_marked_step()
    loop.recorder.process_marks()


@pytest.mark.parametrize("marked", [False, True])
def test_wherever_an_exception_of_the_users_comes_it_is_raised_and_recording_goes_on(marked: bool) -> None:
    number, is_left = 0, False
    while not is_left:
        number += 1
        loop = Loop()
        with At(number, "process_marks", interrupt) as at:
            try:
                steps_of_both_kinds(loop, marked)
            except Interrupted:
                if marked:
                    loop.recorder.end_marked_step(failed=True)
            is_left = at.left > 0
        assert (at.left == 0) != is_left
        steps_of_both_kinds(loop, marked)
        loop.recorder.flush()
        assert loop.recorder.trouble == ""
        usual = {"input": 1, "forward": 2, "backward": 1, "collective": 2, "optimizer": 4}
        assert loop.steps()[-1] == usual
        assert [record.samples for record in loop.records()][-1] == 4
        assert [record.step for record in loop.records()] == list(range(len(loop.records())))
    assert number > 100, "lines"


def test_a_phase_that_could_not_be_entered_is_left_with_the_next() -> None:
    for number in itertools.count(1):
        loop = Loop()
        with At(number, "enter", interrupt), contextlib.suppress(Interrupted):
            loop.recorder.leave(loop.recorder.enter(FORWARD))
        if loop.recorder.depth:
            break  # from this line on it has been entered
        for _ in range(3):
            loop.fetch(1)
            loop.within(BACKWARD, 2)
            loop.optimize(4)
        loop.recorder.flush()
        assert loop.steps()[1:] == [{"input": 1, "backward": 2, "optimizer": 4}] * 2
    assert number > 5, "lines"


@pytest.mark.parametrize("number", range(1, 6))
def test_a_handler_of_a_signal_may_train_while_a_phase_is_entered(loop: Loop, number: int) -> None:
    def train() -> None:
        loop.within(INPUT, 1)
        loop.optimize(1)

    for outer in (None, REPORT):
        depth = None if outer is None else loop.recorder.enter(outer)
        with At(number, "enter", train):
            loop.within(FORWARD, 2)
        if depth is not None:
            loop.recorder.leave(depth)
        for _ in range(2):
            loop.fetch(1)
            loop.within(BACKWARD, 2)
            loop.optimize(4)
        loop.recorder.flush()
        assert loop.recorder.trouble == ""
        assert loop.steps()[-1] == {"input": 1, "backward": 2, "optimizer": 4}


def test_a_signal_that_ends_a_training_is_not_taken_for_a_fault(loop: Loop) -> None:
    recorder = loop.recorder
    plain = recorder._steps._handlers

    def late(signum: int, frame: Any) -> None:
        raise TimeoutError("the epoch took too long")

    def signalled(number: int, value: Any) -> None:
        signal.raise_signal(signal.SIGUSR1)

    recorder._steps._handlers = (signalled, *plain[1:])
    before = signal.signal(signal.SIGUSR1, late)
    try:
        depth = recorder.enter(INPUT)
        with pytest.raises(TimeoutError, match="the epoch"):
            recorder.process_marks()
    finally:
        signal.signal(signal.SIGUSR1, before)
    recorder.leave(depth)
    loop.optimize(3)
    recorder.flush()
    assert loop.steps() == [{"optimizer": 3}]
    assert recorder.trouble == ""


def test_an_exception_that_another_thread_raises_here_is_distinguished_from_a_fault_by_its_class(
    loop: Loop,
) -> None:
    """Such an exception comes from no call, so its traceback shows the recorder's own lines only."""
    code = compile("def handler(number, value):\n    raise error", recording.__file__, "exec")
    for error, is_theirs in ((Interrupted(), True), (KeyError("a phase"), False)):
        recorder = Loop().recorder
        names: dict[str, Any] = {"error": error}
        exec(code, names)
        recorder._steps._handlers = (names["handler"], *recorder._steps._handlers[1:])
        recorder.enter(INPUT)
        with pytest.raises(Interrupted) if is_theirs else contextlib.nullcontext():
            recorder.process_marks()
        assert bool(recorder.trouble) is not is_theirs
