"""Beats and what is recorded of a rank's time ride with its reports; without reports they go by themselves. In a large
run reports ride with beats."""

from __future__ import annotations

import itertools
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powertrain.trace.recording import current
from powertrain.wire.envelope import Envelope, FromWorker
from powertrain.wire.from_controller import Hold, Train
from powertrain.wire.from_worker import AskCheckpoints, Beat, Held, Noted, Outcome, Reached, Telemetry
from powertrain.wire.hub import Hub
from powertrain.wire.keys import Received
from powertrain.wire.values import CheckpointPart, Point
from powertrain.worker import tracing as tracing_module
from powertrain.worker.progress import Gate, Progress
from powertrain.worker.service import service as service_module
from powertrain.worker.service.beats import MOST_GATHERED, BeatTimes, SharedTimes, can_gather
from powertrain.worker.service.service import Service
from powertrain.worker.service.spill import BATCH
from powertrain.worker.tracing import TraceSettings, Tracing

PATIENCE = 30.0
EVERY = 0.1


# --------------------------------------------------------------------------- when a beat goes


def play(reports: list[float], until: float, every: float = 1.0) -> list[tuple[float, bool]]:
    """The beats of a rank that reports at these moments: when each goes, and whether by itself."""
    times, beats, coming = BeatTimes(every), [], sorted(reports)
    now = 0.0
    while now <= until:
        rides = bool(coming) and coming[0] <= now
        if rides:
            coming.pop(0)
            times.on_other_sent(now)
        if times.is_due(now, rides=rides):
            times.sent(now)
            beats.append((now, not rides))
        now = min([times.alone_at, *coming[:1]])
    return beats


def test_a_rank_that_reports_once_a_second_soon_sends_no_beat_by_itself() -> None:
    reports = [0.3 + second + (0.05 if second % 2 else 0.0) for second in range(30)]
    beats = play(reports, until=29.5)
    assert [at for at, alone in beats if alone] == [0.0, 1.0]
    assert [at for at, alone in beats if not alone] == pytest.approx(reports[2:])


def test_a_rank_that_reports_nothing_beats_once_a_second() -> None:
    assert play([], until=10.0) == [(float(second), True) for second in range(11)]


def test_a_rank_that_reports_often_keeps_the_time_of_its_beats() -> None:
    """So that where they find the main thread does not depend on its reports."""
    beats = play([step / 10 for step in range(30)], until=10.0)
    assert [at for at, _ in beats] == pytest.approx(list(range(11)))


def test_a_rank_whose_reports_stop_still_sends_heartbeats() -> None:
    beats = play([0.0, 1.0, 2.0], until=8.0)
    assert [at for at, alone in beats if alone] == pytest.approx([3.25, 4.25, 5.25, 6.25, 7.25])


@given(st.lists(st.floats(0.0, 50.0), max_size=100))
def test_beats_are_never_further_apart_than_one_and_a_half_nor_closer_than_four_fifths(
    reports: list[float],
) -> None:
    moments = [at for at, _ in play(reports, until=50.0)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(moments)]
    assert all(0.8 - 1e-9 <= gap <= 1.5 + 1e-9 for gap in gaps)
    assert moments[0] == 0.0
    assert moments[-1] >= 50.0 - 1.5


# --------------------------------------------------------------------------- when a rank of thousands sends


@given(st.lists(st.floats(0.0, 3.0), max_size=30), st.integers(0, 10_000))
def test_beats_of_a_rank_keep_to_moments_of_its_own(pauses: list[float], rank: int) -> None:
    times, now = SharedTimes(4.0, rank, 0.0), 0.0
    first = times.alone_at
    assert 0.0 <= first < 4.0
    for pause in pauses:
        now += pause
        before = times.alone_at
        times.on_other_sent(now)
        assert times.alone_at == before
        assert times.is_due(now, rides=True) == times.is_due(now, rides=False) == (now >= before)
        if now >= before:
            times.sent(now)
            assert now < times.alone_at <= now + 4.0
            periods = (times.alone_at - first) / 4.0
            assert periods == pytest.approx(round(periods))


@pytest.mark.parametrize("ranks", [600, 2048, 5000])
def test_ranks_are_spread_over_the_time_between_two_beats(ranks: int) -> None:
    moments = sorted(SharedTimes(1.0, rank, 0.0).alone_at for rank in range(ranks))
    gaps = [later - earlier for earlier, later in itertools.pairwise(moments)]
    assert max(gaps) < 3.0 / ranks


def test_only_reports_that_are_not_waited_for_gather() -> None:
    plain = Point(row=1, at=0.0, metrics={})
    part = CheckpointPart(checkpoint="", files=[])
    assert can_gather(plain)
    assert can_gather(Point(row=0, at=0.0, metrics={}, solo=True))
    for pressing in (
        Point(row=1, at=0.0, metrics={}, barrier=True),
        Point(row=1, at=0.0, metrics={}, part=part),
        Outcome(status="returned"),
        AskCheckpoints(ask=1, row=1),
        Noted(message="look"),
        Telemetry(),
    ):
        assert not can_gather(pressing)


# --------------------------------------------------------------------------- over the wire


class Listener:
    """A hub that keeps the envelopes of a rank."""

    def __init__(self, directory: str) -> None:
        self.envelopes: list[Envelope] = []
        self._changed = threading.Condition()
        self.hub = Hub("ipc", self._deliver, directory=directory)
        self.connection = self.hub.admit()

    def _deliver(self, received: Received) -> None:
        self.hub.acknowledge(received)
        with self._changed:
            self.envelopes.append(received.envelope)
            self._changed.notify_all()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, PATIENCE)

    def train(self, gather: float) -> None:
        self.hub.send(self.connection.keys.public, Train(gather=gather))

    def rows(self) -> list[list[int]]:
        """The reports of each envelope that brings any."""
        found = [[m.row for m in e.messages if isinstance(m, Point)] for e in self.envelopes]
        return [rows for rows in found if rows]

    def of(self, kind: type) -> list[Envelope]:
        """The envelopes that bring such a message."""
        return [e for e in self.envelopes if any(isinstance(message, kind) for message in e.messages)]


@pytest.fixture
def listener() -> Iterator[Listener]:
    with tempfile.TemporaryDirectory(prefix="pt-") as directory:
        listener = Listener(directory)
        yield listener
        listener.hub.close()


@pytest.fixture
def service(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setattr(service_module, "_BEAT_INTERVAL_S", EVERY)
    service = Service(listener.connection, 0, 0, Gate(), Progress())
    yield service
    service.close(timeout=2.0)


def test_without_reports_beats_go_by_themselves(listener: Listener, service: Service) -> None:
    listener.wait_until(lambda: len(listener.of(Beat)) >= 3)
    assert not listener.of(Point)


def test_a_beat_that_is_nearly_due_goes_in_the_envelope_of_a_report(
    listener: Listener, service: Service
) -> None:
    """Each report is made as soon as a beat is nearly due, whenever that is on this machine."""
    listener.wait_until(lambda: bool(listener.of(Beat)))
    nearly, rode, row = threading.Event(), list[bool](), 0
    while sum(rode) < 3:
        row += 1
        assert row < 200, "no beat ever rode with a report"
        nearly.wait(0.9 * EVERY)
        service.post(Point(row=row, at=0.0, metrics={}))
        listener.wait_until(lambda: len(listener.of(Point)) == row)  # noqa: B023 (waits here)
        rode.append(any(isinstance(m, Beat) for m in listener.of(Point)[-1].messages))


def test_a_lone_report_leaves_at_once_and_waits_for_no_beat(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "_BEAT_INTERVAL_S", 1e6)
    service = Service(listener.connection, 0, 0, Gate(), Progress())
    service.post(Point(row=1, at=0.0, metrics={}))
    listener.wait_until(lambda: bool(listener.of(Point)))
    service.close()


# --------------------------------------------------------------------------- reports that survive their process

NEVER = 1e6


@pytest.fixture
def patient(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """A rank that has sent one report, and sends those that may wait only with one that may not."""
    monkeypatch.setattr(service_module, "_BEAT_INTERVAL_S", NEVER)
    monkeypatch.setattr(service_module, "_REPORT_DELAY_S", NEVER)
    service = Service(listener.connection, 0, 0, Gate(), Progress())
    service.post(safe(1))
    listener.wait_until(lambda: listener.rows() == [[1]])
    yield service
    service.close(timeout=PATIENCE)


def safe(row: int) -> Point:
    return Point(row=row, at=0.0, metrics={})


def test_safe_reports_gather_and_go_with_the_first_that_must_not_wait(
    listener: Listener, patient: Service
) -> None:
    patient.post(safe(2), may_wait=True)
    patient.post(safe(3), may_wait=True)
    patient.post(safe(4))
    listener.wait_until(lambda: listener.rows() == [[1], [2, 3, 4]])


def test_safe_reports_go_with_a_report_that_other_ranks_wait_for(
    listener: Listener, patient: Service
) -> None:
    patient.post(safe(2), may_wait=True)
    patient.post(Point(row=3, at=0.0, metrics={}, barrier=True), may_wait=True)
    listener.wait_until(lambda: listener.rows() == [[1], [2, 3]])


def test_safe_reports_go_when_they_are_many_enough_for_a_batch(listener: Listener, patient: Service) -> None:
    for row in range(2, BATCH + 2):
        patient.post(safe(row), may_wait=True)
    listener.wait_until(lambda: sum(map(len, listener.rows())) == BATCH + 1)
    assert [*itertools.chain(*listener.rows())] == [*range(1, BATCH + 2)]


def test_safe_reports_go_when_their_delay_is_over(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "_BEAT_INTERVAL_S", NEVER)
    service = Service(listener.connection, 0, 0, Gate(), Progress())
    for row in range(1, 41):
        service.post(safe(row), may_wait=True)
        listener.wait_until(lambda: bool(listener.rows()))
    listener.wait_until(lambda: sum(map(len, listener.rows())) == 40)
    assert len(listener.rows()) < 40, "some had gathered"
    service.close()


def test_safe_reports_are_sent_before_the_process_ends(listener: Listener, patient: Service) -> None:
    patient.post(safe(2), may_wait=True)
    patient.close(timeout=PATIENCE)
    assert listener.rows() == [[1], [2]]


# --------------------------------------------------------------------------- a rank of thousands, over the wire


def post(service: Service, *rows: int, **more: Any) -> None:
    for row in rows:
        service.post(Point(row=row, at=0.0, metrics={}, **more))


@pytest.fixture
def gathering(listener: Listener) -> Iterator[Callable[[float], Service]]:
    """A rank that trains and lets its reports gather for so long. It is not rank 0, whose moment for
    a beat is the beginning."""
    services = []

    def start(gather: float) -> Service:
        service = Service(listener.connection, 1, 0, Gate(), Progress())
        services.append(service)
        listener.wait_until(lambda: bool(listener.of(Beat)))
        listener.train(gather)
        assert service.commands.get(timeout=PATIENCE) == Train(gather=gather)
        return service

    yield start
    for service in services:
        service.close(timeout=2.0)


def test_reports_that_are_not_waited_for_gather_and_go_with_the_next_heartbeat(
    listener: Listener, gathering: Callable[[float], Service]
) -> None:
    service = gathering(0.5)
    post(service, *range(1, 11))
    listener.wait_until(lambda: bool(listener.rows()))
    assert listener.rows() == [list(range(1, 11))]
    (envelope,) = listener.of(Point)
    assert isinstance(envelope.messages[0], Beat)
    assert envelope.row == service.row


@pytest.mark.parametrize(
    "last",
    [
        Point(row=3, at=0.0, metrics={}, barrier=True),
        Point(row=3, at=0.0, metrics={}, part=CheckpointPart(checkpoint="", files=[])),
        Outcome(status="returned"),
        AskCheckpoints(ask=1, row=2),
    ],
    ids=lambda message: type(message).__name__,
)
def test_an_awaited_message_goes_at_once_and_takes_along_what_has_gathered(
    last: FromWorker, listener: Listener, gathering: Callable[[float], Service]
) -> None:
    service = gathering(NEVER)
    post(service, 1, 2)
    service.post(last)
    listener.wait_until(lambda: listener.envelopes[-1].messages[-1] == last)
    assert [m.row for m in listener.envelopes[-1].messages[:2] if isinstance(m, Point)] == [1, 2]


def test_what_is_urgent_goes_at_once_and_takes_along_what_has_gathered(
    listener: Listener, gathering: Callable[[float], Service]
) -> None:
    service = gathering(NEVER)
    post(service, 1, 2)
    listener.hub.send(listener.connection.keys.public, Hold(hold=1))
    listener.wait_until(lambda: bool(listener.of(Held)))
    assert listener.rows() == [[1, 2]]
    post(service, 3)
    service.send_now(Reached(hold=1, boundary=3, row=3))
    listener.wait_until(lambda: bool(listener.of(Reached)))
    assert listener.rows() == [[1, 2], [3]]


def test_reports_that_come_fast_do_not_wait_and_keep_their_order(
    listener: Listener, gathering: Callable[[float], Service]
) -> None:
    service = gathering(NEVER)
    count = 40 * MOST_GATHERED
    post(service, *range(1, count + 1))
    listener.wait_until(lambda: sum(map(len, listener.rows())) == count)
    assert list(itertools.chain(*listener.rows())) == list(range(1, count + 1))


def test_a_rank_that_ends_keeps_nothing_back(
    listener: Listener, gathering: Callable[[float], Service]
) -> None:
    service = gathering(NEVER)
    post(service, 1, 2, 3)
    service.close(timeout=PATIENCE)
    assert listener.rows() == [[1, 2, 3]]


def test_the_training_thread_wakes_no_thread_for_a_report_that_can_wait(
    listener: Listener, gathering: Callable[[float], Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    service, woken = gathering(NEVER), []
    wake = service._link.wake
    monkeypatch.setattr(service._link, "wake", lambda: (woken.append(1), wake()))
    post(service, *range(1, MOST_GATHERED))
    assert not woken
    post(service, MOST_GATHERED)
    listener.wait_until(lambda: listener.rows() == [list(range(1, MOST_GATHERED + 1))])


# --------------------------------------------------------------------------- what is recorded


def test_what_is_recorded_goes_as_seldom_as_the_rank_sends_unless_there_are_many_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tracing = Tracing.begin(TraceSettings(mode="manual"), lambda _: None, every=1000.0)
    assert tracing is not None
    try:
        tracing._next_sample = tracing._next_place = time.monotonic() + 1e6
        tracing._next_send = time.monotonic() + 500.0
        tracing._facts["device"] = "news"
        assert tracing.due > time.monotonic() + 500.0
        assert tracing.collect(rides=True) is None
        assert tracing.collect(rides=False) is None
        monkeypatch.setattr(tracing_module, "_MOST_STEPS", 0)
        assert tracing.collect(rides=False) is not None
    finally:
        tracing.end()
        current.use(None)


def test_what_is_recorded_rides_a_little_early_and_goes_by_itself_a_little_late() -> None:
    tracing = Tracing.begin(TraceSettings(mode="manual"), lambda _: None)
    assert tracing is not None
    try:
        tracing._next_sample = tracing._next_place = time.monotonic() + 1000.0
        tracing._next_send = time.monotonic() + 0.1
        assert tracing.rides_from < time.monotonic() < tracing._next_send < tracing.due
        tracing._facts["device"] = "news"
        assert tracing.collect(rides=False) is None
        assert tracing.collect(rides=True) is not None
        tracing._next_send = time.monotonic() - 0.1  # due, but it may still find a ride
        tracing._facts["device"] = "other news"
        assert tracing.collect(rides=False) is None
        tracing._next_send = time.monotonic() - 1.0
        assert tracing.collect(rides=False) is not None
    finally:
        tracing.end()
        current.use(None)
