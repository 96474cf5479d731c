"""The service thread: nothing posted is lost, memory stays bounded, the training thread never waits."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from powertrain.wire.envelope import Envelope, FromController, FromWorker
from powertrain.wire.from_controller import Dismissed, Execute, Goto, Hold, Opened, RowClosed, Train
from powertrain.wire.from_worker import Arrived, Beat, Held, Noted, Outcome
from powertrain.wire.hub import Hub
from powertrain.wire.keys import ConnectionInfo, KeyPair, Received
from powertrain.wire.link import Link
from powertrain.wire.values import Point
from powertrain.worker.progress import BoundaryCrossing, Gate, Progress
from powertrain.worker.service import service as service_module
from powertrain.worker.service import spill as service_spill
from powertrain.worker.service.service import Service
from powertrain.worker.service.spill import Spill

PATIENCE = 30.0


class Controller:
    """A hub that remembers; it can be made to stand still, so that nothing is acknowledged."""

    def __init__(self, directory: str) -> None:
        self.envelopes: list[Envelope] = []
        self.reads = threading.Event()
        self.reads.set()
        self._changed = threading.Condition()
        self.hub = Hub("ipc", self._deliver, directory=directory)
        self.connection = self.hub.admit()

    def _deliver(self, received: Received) -> None:
        self.reads.wait(PATIENCE)
        self.hub.acknowledge(received)
        with self._changed:
            self.envelopes.append(received.envelope)
            self._changed.notify_all()
        self.hub.acknowledge(received)

    def send(self, command: FromController) -> None:
        self.hub.send(self.connection.keys.public, command)

    def messages(self, kind: type[Any]) -> list[Any]:
        return [m for envelope in self.envelopes for m in envelope.messages if isinstance(m, kind)]

    def wait_until(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, PATIENCE)


@pytest.fixture
def directory() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="pt-") as path:
        yield path


@pytest.fixture
def controller(directory: str) -> Iterator[Controller]:
    controller = Controller(directory)
    yield controller
    controller.reads.set()
    controller.hub.close()


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def service(controller: Controller, gate: Gate, directory: str) -> Iterator[Service]:
    service = Service(controller.connection, 0, 0, gate, Progress(), spill_directory=directory)
    yield service
    service.close(timeout=2.0)


def point(row: int) -> Point:
    return Point(row=row, at=0.0, metrics={"row": row})


def test_reports_arrive_in_order_in_batches(controller: Controller, service: Service) -> None:
    for row in range(1, 3001):
        service.post(point(row))
    controller.wait_until(lambda: len(controller.messages(Point)) == 3000)
    assert [p.row for p in controller.messages(Point)] == list(range(1, 3001))
    assert len(controller.envelopes) < 300
    assert max(len(e.messages) for e in controller.envelopes) <= service_spill.BATCH + 10


def test_a_single_report_is_sent_without_waiting_for_more(controller: Controller, service: Service) -> None:
    service.post(point(1))
    controller.wait_until(lambda: len(controller.messages(Point)) == 1)


def test_a_heartbeat_reports_where_the_rank_stands(controller: Controller, service: Service) -> None:
    controller.wait_until(lambda: bool(controller.messages(Beat)))
    assert controller.messages(Beat)[0].phase == "set-up"


def test_what_is_said_goes_ahead_of_what_waits(controller: Controller, service: Service) -> None:
    controller.reads.clear()
    for row in range(1, 20_001):
        service.post(point(row))
    service.send_now(Noted(message="urgent"))
    controller.reads.set()
    controller.wait_until(lambda: len(controller.messages(Point)) == 20_000)
    before = [type(m) for e in controller.envelopes for m in e.messages].index(Noted)
    assert before < 19_000


def test_nothing_is_lost_and_memory_is_bounded_without_acknowledgements(
    controller: Controller, gate: Gate, directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "_MEMORY_LIMIT", 500)
    controller.reads.clear()
    spilled = threading.Event()
    most_in_memory: list[int] = []
    put = Spill.put

    def watch(spill: Spill, messages: list[FromWorker]) -> None:
        put(spill, messages)
        most_in_memory.append(len(messages))
        spilled.set()

    monkeypatch.setattr(Spill, "put", watch)
    service = Service(controller.connection, 0, 0, gate, Progress(), spill_directory=directory)
    under_way = Link.WINDOW * service_spill.BATCH
    total = under_way + 5_000
    for row in range(1, total + 1):
        service.post(point(row))
    assert spilled.wait(PATIENCE)
    service.post(point(total + 1))
    controller.reads.set()
    controller.wait_until(lambda: len(controller.messages(Point)) == total + 1)
    service.close()
    assert [p.row for p in controller.messages(Point)] == list(range(1, total + 2))
    assert not service._spill


def test_close_sends_what_is_queued_and_waits_for_its_acknowledgement(
    controller: Controller, gate: Gate
) -> None:
    service = Service(controller.connection, 0, 0, gate, Progress())
    for row in range(1, 2001):
        service.post(point(row))
    service.post(Outcome(status="returned"))
    service.close()
    assert len(controller.messages(Point)) == 2000
    assert controller.envelopes[-1].messages[-1] == Outcome(status="returned")


def test_close_gives_up_after_its_timeout_without_a_listener(directory: str, gate: Gate) -> None:
    connection = ConnectionInfo(
        endpoint=f"ipc://{directory}/nobody", hub_key=KeyPair.new().public, keys=KeyPair.new()
    )
    service = Service(connection, 0, 0, gate, Progress())
    service.post(point(1))
    service.close(timeout=0.05)
    service._thread.join(8.0)  # less than the timeout that it has by default
    assert not service._thread.is_alive()


def test_a_message_that_cannot_be_encoded_does_not_silence_the_rank(
    controller: Controller, service: Service
) -> None:
    service.post(Noted(message="half a character: \udcff"))
    service.post(point(1))
    controller.wait_until(lambda: len(controller.messages(Point)) == 1)


def test_commands_for_the_main_thread_come_in_order(controller: Controller, service: Service) -> None:
    for command in (Execute(call=1, function=b""), Train(), Dismissed()):
        controller.send(command)
    got = [service.commands.get(timeout=PATIENCE) for _ in range(3)]
    assert got == [Execute(call=1, function=b""), Train(), Dismissed()]


def test_a_hold_is_answered_with_the_boundaries_passed_and_acted_on(
    controller: Controller, service: Service, gate: Gate
) -> None:
    gate.cross()
    gate.cross()
    controller.send(Hold(hold=4))
    controller.wait_until(lambda: bool(controller.messages(Held)))
    assert controller.messages(Held) == [Held(hold=4, boundary=2)]
    controller.send(Goto(hold=4, boundary=4, action="stop", reason="enough"))
    assert [gate.cross().action, gate.cross()] == ["go", BoundaryCrossing("stop", "enough")]


def test_an_envelope_reports_the_boundaries_passed(
    controller: Controller, service: Service, gate: Gate
) -> None:
    gate.cross()
    service.post(point(1))
    controller.wait_until(lambda: bool(controller.messages(Point)))
    assert controller.envelopes[-1].boundary == 1


def test_meeting_waits_for_the_answer_and_returns_what_rank_zero_brought(
    controller: Controller, service: Service
) -> None:
    answers: list[Opened] = []
    thread = threading.Thread(target=lambda: answers.append(service.meet(Arrived(sync=1, kind="barrier"))))
    thread.start()
    controller.wait_until(lambda: bool(controller.messages(Arrived)))
    assert not answers
    controller.send(Opened(sync=1, data=b"brought"))
    thread.join(PATIENCE)
    assert [answer.data for answer in answers] == [b"brought"]


def test_waiting_for_a_row_ends_when_that_row_or_a_later_one_is_closed(
    controller: Controller, service: Service
) -> None:
    thread = threading.Thread(target=service.wait_for_row, args=(2,))
    thread.start()
    controller.send(RowClosed(row=1))
    controller.send(RowClosed(row=3))
    thread.join(PATIENCE)
    assert not thread.is_alive()
    service.wait_for_row(3)


def test_waiting_threads_are_let_go_when_the_service_ends(controller: Controller, gate: Gate) -> None:
    service = Service(controller.connection, 0, 0, gate, Progress())
    gate.arm(1)
    waits: list[Callable[[], object]] = [
        lambda: service.wait_for_row(9),
        lambda: service.meet(Arrived(sync=1, kind="barrier")),
        gate.cross,
    ]
    threads = [threading.Thread(target=wait) for wait in waits]
    for thread in threads:
        thread.start()
    controller.wait_until(lambda: bool(controller.messages(Arrived)))
    service.close()
    for thread in threads:
        thread.join(PATIENCE)
    assert not [thread for thread in threads if thread.is_alive()]


def test_a_watched_descriptor_means_that_the_run_is_gone(controller: Controller, gate: Gate) -> None:
    import os

    read, write = os.pipe()
    orphaned = threading.Event()
    service = Service(controller.connection, 0, 0, gate, Progress(), watch=read, orphaned=orphaned.set)
    os.close(write)
    assert orphaned.wait(PATIENCE)
    service.close()
    os.close(read)


def test_the_spill_file_gives_back_what_was_put_in_order_and_empties_itself(directory: str) -> None:
    spill = Spill(directory)
    assert not spill
    spill.put([point(row) for row in range(1, 601)])
    first = spill.take()
    spill.put([point(row) for row in range(601, 701)])
    rest = []
    while spill:
        rest += spill.take()
    assert [m.row for m in [*first, *rest] if isinstance(m, Point)] == list(range(1, 701))
    spill.put([point(1)])
    assert spill.take() == [point(1)]
