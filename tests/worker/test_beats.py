"""What beats say of a rank: how far it has come, what it waits for, for how long it has not moved."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powertrain.trace.stacks import stacks
from powertrain.wire.envelope import FromController
from powertrain.wire.from_controller import CheckpointSettled, Inspect, Opened, Reported, RowClosed
from powertrain.wire.from_worker import Arrived, Beat, Stacks
from powertrain.wire.hub import Hub
from powertrain.wire.keys import Received
from powertrain.worker.progress import Gate, Progress
from powertrain.worker.service import service as service_module
from powertrain.worker.service.service import Service
from powertrain.worker.service.standstill import StoodStill

PATIENCE = 30.0


class Listener:
    """A hub that keeps what a rank says."""

    def __init__(self, directory: str) -> None:
        self._said: list[Any] = []
        self._changed = threading.Condition()
        self.hub = Hub("ipc", self._deliver, directory=directory)
        self.connection = self.hub.admit()

    def _deliver(self, received: Received) -> None:
        self.hub.acknowledge(received)
        with self._changed:
            self._said += received.envelope.messages
            self._changed.notify_all()

    def hears(self, kind: type[Any], such: Callable[[Any], bool] = lambda _: True) -> Any:
        """The first message of this kind that is such."""

        def found() -> list[Any]:
            return [message for message in self._said if isinstance(message, kind) and such(message)]

        with self._changed:
            assert self._changed.wait_for(lambda: bool(found()), PATIENCE)
            return found()[0]


@pytest.fixture
def listener() -> Iterator[Listener]:
    with tempfile.TemporaryDirectory(prefix="pt-") as directory:
        listener = Listener(directory)
        yield listener
        listener.hub.close()


@pytest.fixture
def progress() -> Progress:
    return Progress()


@pytest.fixture
def service(listener: Listener, progress: Progress, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setattr(service_module, "_BEAT_INTERVAL_S", 0.02)
    service = Service(listener.connection, 3, 0, Gate(), progress)
    yield service
    service.close(timeout=2.0)


def test_a_beat_says_how_far_the_rank_has_come_and_where_it_is(
    listener: Listener, service: Service, progress: Progress
) -> None:
    service.row = 7
    progress.report()
    progress.step()
    progress.batch()
    beat = listener.hears(Beat, lambda beat: beat.batches == 1)
    assert (beat.reports, beat.steps, beat.row, beat.phase) == (1, 1, 7, "set-up")
    assert (beat.awaits, beat.debugged) == ("", False)
    assert beat.where.frame.file == __file__
    assert 0.0 <= beat.idle < PATIENCE


@pytest.mark.parametrize("count", ["report", "step", "batch"])
def test_every_counter_that_grows_is_progress(count: str) -> None:
    progress = Progress()
    before = progress.moved = progress.moved - 100.0
    getattr(progress, count)()
    assert progress.moved >= before + 100.0


@pytest.mark.parametrize(
    ("wait", "answer", "awaits"),
    [
        (
            lambda service: service.meet(Arrived(sync=1, kind="barrier")),
            Opened(sync=1),
            "barrier",
        ),
        (lambda service: service.wait_for_row(7), RowClosed(row=7), "row 7"),
        (
            lambda service: service.wait_settled(7),
            CheckpointSettled(row=7, path="c"),
            "commit of row 7",
        ),
        (
            lambda service: service.query_checkpoints(7, False, -1.0),
            Reported(ask=1, checkpoints=[]),
            "checkpoints",
        ),
    ],
)
def test_a_beat_says_what_the_rank_waits_for(
    listener: Listener,
    service: Service,
    progress: Progress,
    wait: Callable[[Service], object],
    answer: FromController,
    awaits: str,
) -> None:
    waiting = threading.Thread(target=wait, args=(service,))
    waiting.start()
    listener.hears(Beat, lambda beat: beat.awaits == awaits)
    listener.hub.send(listener.connection.keys.public, answer)
    waiting.join(PATIENCE)
    assert not waiting.is_alive()
    assert progress.awaits == ""


def test_a_beat_says_how_far_data_have_been_read_and_a_fault_in_that_ends_no_beats(
    listener: Listener, service: Service, progress: Progress
) -> None:
    service.describe_data = lambda: "train: epoch 3, 45 %"
    assert listener.hears(Beat, lambda beat: beat.data != "").data == "train: epoch 3, 45 %"

    def broken() -> str:
        raise RuntimeError("dictionary changed size during iteration")

    service.describe_data = broken
    progress.report()
    assert listener.hears(Beat, lambda beat: beat.reports == 1 and not beat.data).batches == 0


def test_a_rank_that_is_asked_says_what_its_threads_are_doing(listener: Listener, service: Service) -> None:
    listener.hub.send(listener.connection.keys.public, Inspect(ask=5))
    answer = listener.hears(Stacks)
    assert answer.ask == 5
    assert answer.processes[0].title == "rank 3"
    assert {"MainThread", "powertrain-service"} <= {thread.name for thread in answer.processes[0].threads}


def test_a_fault_in_looking_ends_neither_beats_nor_answers(
    listener: Listener, service: Service, progress: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no stacks today")

    monkeypatch.setattr(stacks, "main_frame", broken)
    monkeypatch.setattr(stacks, "own_stacks", broken)
    progress.step()
    assert listener.hears(Beat, lambda beat: beat.steps == 1 and beat.where is None)
    listener.hub.send(listener.connection.keys.public, Inspect(ask=5))
    (answer,) = listener.hears(Stacks).processes
    assert answer.remark == "It could not look at itself: RuntimeError: no stacks today."


def test_time_in_which_the_process_stood_still_is_not_idle_time(
    listener: Listener, service: Service, progress: Progress
) -> None:
    now = time.monotonic()
    service._stood.woke(now - 50.0, now)
    progress.steps, progress.moved = 1, now - 60.0
    beat = listener.hears(Beat, lambda beat: beat.steps == 1 and beat.idle > 5.0)
    assert 10.0 <= beat.idle < 10.0 + PATIENCE


@given(
    st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(0.0, 5.0)), max_size=20),
    st.floats(0.0, 100.0),
)
def test_stood_time_is_never_more_than_there_was(sleeps: list[tuple[float, float]], moment: float) -> None:
    stood, now, counted = StoodStill(), 0.0, 0.0
    for asked, late in sleeps:
        due = now + asked
        now = due + late
        stood.woke(due, now)
        counted += max(0.0, now - max(due, moment)) if now - due > 1.0 else 0.0
    assert stood.since(moment) == pytest.approx(counted)
    assert stood.since(moment) <= max(0.0, now - moment) + 1e-9
