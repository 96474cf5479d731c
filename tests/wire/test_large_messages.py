"""What is longer than a frame goes in several; what is longer than a message is reported, and nothing else is lost."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.wire.ears import HEADER, Ear, RawClient, connect, envelope, frame, note, pump

from powertrain.errors import EngineError, WireError
from powertrain.wire import frames as wire_frames
from powertrain.wire import limits
from powertrain.wire.envelope import FromController, FromWorker
from powertrain.wire.frames import Gathering, TooLarge
from powertrain.wire.from_controller import CheckpointSettled, Execute, Opened, Train
from powertrain.wire.from_worker import Arrived, Executed, Noted, Outcome, Telemetry, Validated
from powertrain.wire.values import Point

FRAME, LARGEST = 1024, 8192


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FRAME_LIMIT", FRAME)
    monkeypatch.setattr(limits, "MESSAGE_LIMIT", LARGEST)
    monkeypatch.setattr(limits, "COMMAND_ROOM", FRAME)


def arrived(ear: Ear) -> list[FromWorker]:
    return [message for received in ear.received for message in received.envelope.messages]


# --------------------------------------------------------------------------- in pieces


@given(st.binary(min_size=1, max_size=5000), st.integers(1, 2**63))
def test_the_frames_of_a_message_make_up_the_message(body: bytes, first: int) -> None:
    frames = list(wire_frames.cut_into_frames(body, first))
    assert len(frames) == wire_frames.frame_count(body)
    assert max(len(data) for _, data in frames) <= HEADER + limits.FRAME_LIMIT
    gathering, whole = Gathering(len(body)), None
    for number, data in frames:
        assert whole is None
        read, ends, piece = wire_frames.read_frame(memoryview(data))
        assert read == number
        whole = gathering.add(number, ends, piece)
    assert whole is not None
    assert bytes(whole) == body
    assert gathering.first == 0


@given(st.lists(st.binary(max_size=40), max_size=12), st.integers(0, 100))
def test_never_more_is_gathered_than_a_message_may_have(pieces: list[bytes], limit: int) -> None:
    gathering = Gathering(limit)
    for number, piece in enumerate(pieces, 1):
        held, problem = len(gathering._held), ""
        try:
            gathering.add(number, False, memoryview(piece))
        except WireError as error:
            problem = str(error)
        fits = held + len(piece) <= limit
        assert problem == "" if fits else f"longer than the {limit} that a message may have" in problem
        assert len(gathering._held) == (held + len(piece) if fits else 0)


def test_messages_of_any_length_arrive_once_and_in_order(ear: Ear) -> None:
    link = connect(ear.hub.admit(), 0, 0)
    values = [bytes([size % 251]) * size for size in (0, 1, FRAME - 60, FRAME, 5 * FRAME, 7, 7 * FRAME + 1)]
    for call, value in enumerate(values):
        pump(link, lambda: link.room > 0)
        link.send([Executed(call=call, value=value)], 0, 0)
    pump(link, lambda: link.is_acknowledged)
    assert arrived(ear) == [Executed(call=call, value=value) for call, value in enumerate(values)]
    assert max(len(data) for data in ear.done) == HEADER + FRAME


def test_there_is_no_room_for_more_while_a_long_message_is_under_way(ear: Ear) -> None:
    ear.reads.clear()
    link = connect(ear.hub.admit(), 0, 0)
    link.send(note("first"), 0, 0)
    link.WINDOW = 3
    link.send([Executed(call=1, value=bytes(6 * FRAME))], 0, 0)
    assert link.room == 0
    ear.reads.set()
    pump(link, lambda: link.is_acknowledged)
    assert link.room == 3


def test_a_long_message_survives_the_loss_of_its_connection(ear: Ear) -> None:
    connection = ear.hub.admit()
    link = connect(connection, 0, 0)
    link.RESEND_INTERVAL_S = 0.02
    ear.acknowledges = False  # so that what comes after the first batch is taken and not acknowledged
    link.send(note("first"), 0, 0)
    value = bytes(range(256)) * 28
    link.send([Executed(call=1, value=value)], 0, 0)
    ear.wait_until(lambda: len(ear.done) > 3)
    link._socket.disconnect(connection.endpoint)
    link._socket.connect(connection.endpoint)
    ear.acknowledges = True
    ear.hub.acknowledge(ear.received[0])
    pump(link, lambda: link.is_acknowledged)
    assert arrived(ear) == [Noted(message="first"), Executed(call=1, value=value)]


def test_pieces_are_not_acknowledged_before_what_was_sent_before_them(ear: Ear) -> None:
    ear.acknowledges = False
    with RawClient(ear.hub.admit()) as client:
        client.socket.send(envelope(1))
        client.socket.send(frame(2, envelope(2)[HEADER:][:5], ends=0))
        assert client.acknowledged() == 0
        ear.hub.acknowledge(ear.received[0])
        assert client.acknowledged() == 2
        client.socket.send(frame(3, envelope(2)[HEADER:][5:]))
        ear.wait_until(lambda: len(ear.received) == 2)
        ear.hub.acknowledge(ear.received[1])
        assert client.acknowledged() == 3


def test_long_commands_arrive_in_order_also_over_a_new_connection(ear: Ear) -> None:
    connection = ear.hub.admit()
    sent: list[FromController] = [
        Execute(call=1, function=bytes(5 * FRAME)),
        Train(),
        Execute(call=2, function=b"f" * 3 * FRAME),
    ]
    for command in sent:
        ear.hub.send(connection.keys.public, command)
    link = connect(connection, 0, 0)
    link.send(note("here"), 0, 0)
    got: list[FromController] = []
    while not got:
        got += link.poll(1.0)[0]
    link._socket.disconnect(connection.endpoint)
    link._socket.connect(connection.endpoint)
    link.RESEND_INTERVAL_S = 0.02
    link.send(note("again"), 0, 0)
    got += pump(link, lambda: link.is_acknowledged)
    while len(got) < 3:
        got += link.poll(1.0)[0]
    assert got == sent
    link.send(note("heard"), 0, 0)
    pump(link, lambda: link.is_acknowledged)
    assert ear.received[-1].envelope.heard == 6 + 1 + 4
    assert not ear.hub._peers[connection.keys.public].unheard


# --------------------------------------------------------------------------- too large at the sender


def shortened(ear: Ear, message: FromWorker) -> list[FromWorker]:
    """What arrives of a message, between two that fit."""
    link = connect(ear.hub.admit(), 0, 0)
    link.send([Noted(message="before"), message, Noted(message="after")], 0, 0)
    pump(link, lambda: link.is_acknowledged)
    link.send(note("later"), 0, 0)
    pump(link, lambda: link.is_acknowledged)
    first, *between, after, later = arrived(ear)
    assert [first, after, later] == [Noted(message=text) for text in ("before", "after", "later")]
    assert ear.rejected == []
    return between


def test_a_return_value_that_is_too_large_is_left_out_and_reported_with_its_size(ear: Ear) -> None:
    told, outcome = shortened(ear, Outcome(status="returned", value=bytes(2 * LARGEST), data="epoch 1"))
    assert outcome == Outcome(status="returned", data="epoch 1")
    assert isinstance(told, Noted)
    assert "returned a value of 0.0157 MiB, more than the 0.00781 MiB that" in told.message
    assert "Result.return_value will be None. Report it as a checkpoint" in told.message


def test_metrics_that_are_too_large_are_left_out_and_their_row_is_not(ear: Ear) -> None:
    point = Point(row=7, at=1.0, metrics={"text": "x" * LARGEST}, barrier=True)
    told, kept = shortened(ear, point)
    assert kept == msgspec.structs.replace(point, metrics={})
    assert isinstance(told, Noted)
    assert "The metrics of row 7 come to 0.00" in told.message


@pytest.mark.parametrize(
    "message",
    [
        Executed(call=1, value=bytes(LARGEST)),
        Validated(checkpoint="c", metrics={"text": "x" * LARGEST}),
    ],
    ids=["of a call", "of a validation"],
)
def test_an_answer_that_is_too_large_is_an_error_for_the_client(ear: Ear, message: Any) -> None:
    (answer,) = shortened(ear, message)
    assert isinstance(answer, (Executed, Validated))
    assert answer.error is not None
    assert "more than the 0.00781 MiB that a message to the run may have" in answer.error.message


def test_telemetry_that_is_too_large_is_left_out_and_reported(ear: Ear) -> None:
    (told,) = shortened(ear, Telemetry(steps=bytes(LARGEST)))
    assert isinstance(told, Noted)
    assert "A message to the run (Telemetry) came to" in told.message


def test_an_awaited_message_that_is_too_large_is_an_error_at_once(ear: Ear) -> None:
    link = connect(ear.hub.admit(), 0, 0)
    with pytest.raises(WireError, match=r"to the run \(Arrived\) comes to 0\.00"):
        link.send([Arrived(sync=1, kind="broadcast_from_rank_zero", data=bytes(LARGEST))], 0, 0)
    link.send(note("still here"), 0, 0)
    pump(link, lambda: link.is_acknowledged)
    assert ear.notes() == ["still here"]


def test_more_than_msgpack_can_write_is_too_large_too() -> None:
    assert wire_frames.encoded(b"x", 10)
    with pytest.raises(TooLarge, match="more than 4 GiB"):
        wire_frames.encoded(bytes(2**32), 2**40)  # zeros that are never touched: they take no memory


def test_messages_that_are_too_large_only_together_go_in_several_batches(ear: Ear) -> None:
    link = connect(ear.hub.admit(), 0, 0)
    points: list[FromWorker] = [Point(row=row, at=0.0, metrics={"text": "x" * 1000}) for row in range(1, 40)]
    link.send(points, boundary=39, row=39)
    pump(link, lambda: link.is_acknowledged)
    assert arrived(ear) == points
    assert len(ear.received) > 4
    assert {r.envelope.row for r in ear.received} == {39}


def test_a_command_that_is_too_large_is_an_error_of_its_sender_only(ear: Ear) -> None:
    connection = ear.hub.admit()
    with pytest.raises(EngineError, match=r"too large: 0\.0157 MiB \(Execute\); the limit is 0\.00781 MiB"):
        ear.hub.send(connection.keys.public, Execute(call=1, function=bytes(2 * LARGEST)))
    ear.hub.send(connection.keys.public, Train())
    link = connect(connection, 0, 0)
    link.send(note("here"), 0, 0)
    got: list[FromController] = []
    while not got:
        got += link.poll(1.0)[0]
    assert got == [Train()]


def test_what_rank_zero_could_bring_can_be_passed_on(ear: Ear) -> None:
    """The command that brings data to the others may be a little longer than the message that brought them."""
    body = len(msgspec.msgpack.encode(Arrived(sync=1, kind="broadcast_from_rank_zero", data=b"")))
    assert body < limits.COMMAND_ROOM
    ear.hub.send(ear.hub.admit().keys.public, Opened(sync=1, data=bytes(LARGEST)))


def test_words_that_msgpack_cannot_hold_are_made_plain_in_commands_too(ear: Ear) -> None:
    connection = ear.hub.admit()
    ear.hub.send(connection.keys.public, CheckpointSettled(row=1, error="no such file: \udcff"))
    link = connect(connection, 0, 0)
    link.send(note("here"), 0, 0)
    got: list[FromController] = []
    while not got:
        got += link.poll(1.0)[0]
    assert got == [CheckpointSettled(row=1, error="no such file: \\udcff")]


# --------------------------------------------------------------------------- too large at the receiver


def test_a_message_in_too_many_pieces_is_refused_and_forgotten(ear: Ear) -> None:
    connection = ear.hub.admit()
    with RawClient(connection) as client:
        pieces = LARGEST // FRAME
        for number in range(1, pieces + 2):
            client.socket.send(frame(number, bytes(FRAME), ends=0))
        ear.wait_until(lambda: bool(ear.rejected))
        peer = ear.hub._peers[connection.keys.public]
        assert (peer.seen, peer.acknowledged, peer.gathering.first) == (pieces, pieces, 0)
        client.socket.send(envelope(pieces + 1))
        ear.wait_until(lambda: envelope(pieces + 1) in ear.done)
    assert ear.received == []
    assert "with 9,216 bytes it is longer than the 8,192 that a message may have" in ear.rejected[0]


def test_pieces_that_make_no_envelope_are_refused_once_all_are_there(ear: Ear) -> None:
    with RawClient(ear.hub.admit()) as client:
        client.socket.send(frame(1, envelope(1)[HEADER:], ends=0))
        client.socket.send(envelope(2))
        ear.wait_until(lambda: bool(ear.rejected))
    assert ear.received == []
    assert "trailing" in ear.rejected[0]


# --------------------------------------------------------------------------- a hub that stands still


def test_a_hub_that_stands_still_does_not_make_its_workers_pile_up_copies(
    ear: Ear, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was 120 times in ten minutes."""
    link = connect(ear.hub.admit(), 0, 0)
    now = 0.0
    sent: list[bytes] = []

    class Queue:
        closed = True

        def send(self, data: bytes, _: int) -> None:
            sent.append(data)

    link.close()
    monkeypatch.setattr(link, "_socket", Queue())
    monkeypatch.setattr("powertrain.wire.link.time.monotonic", lambda: now)
    link.send(note("anybody there?"), 0, 0)
    for _ in range(600):
        now += 1.0
        link._resend_if_silent()
        if now == 20.0:
            assert len(sent) == 4, "a cut of some seconds must heal soon"
    assert 10 < len(sent) < 25
