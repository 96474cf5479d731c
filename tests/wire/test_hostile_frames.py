"""Whatever is sent: it is refused before it is decoded, or its sender is, and honest workers never notice."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import psutil
import pytest
import zmq
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.support.examples import scaled
from tests.wire.ears import HEADER, PATIENCE, Ear, RawClient, connect, envelope, frame, note, pump

from powertrain.errors import WireError
from powertrain.wire import frames as wire_frames
from powertrain.wire import limits
from powertrain.wire.envelope import Envelope, FromController, FromWorker
from powertrain.wire.frames import Gathering
from powertrain.wire.from_controller import MessageRefused, Train
from powertrain.wire.from_node import ProcessEnded
from powertrain.wire.from_worker import (
    Arrived,
    Beat,
    Executed,
    Hello,
    Noted,
    Outcome,
    ShareUploaded,
    Telemetry,
)
from powertrain.wire.keys import ConnectionInfo, KeyPair, Received
from powertrain.wire.values import ErrorReport, FilePart, Point

FUZZED = settings(max_examples=scaled(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
MIB = 2**20


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Everything that is decoded as an envelope from here on."""
    bodies: list[bytes] = []
    decode = wire_frames._decode_envelope

    def counting(body: Any) -> Envelope:
        bodies.append(bytes(body))
        return decode(body)

    monkeypatch.setattr(wire_frames, "_decode_envelope", counting)
    return bodies


class Honest:
    """A worker that goes on with its work, and of which every word must arrive once and in order."""

    def __init__(self, ear: Ear) -> None:
        self._ear = ear
        connection = ear.hub.admit()
        self._key = connection.keys.public
        self._link = connect(connection, 3, 0)
        self.said = 0

    def goes_on(self) -> None:
        self.said += 1
        self._link.send(note(str(self.said)), 0, 0)
        pump(self._link, lambda: self._link.is_acknowledged)
        assert self._ear.hub.is_alive
        assert self._heard() == [str(number + 1) for number in range(self.said)]

    def _heard(self) -> list[str]:
        batches = [r.envelope for r in self._ear.received if r.sender == self._key]
        return [m.message for e in batches for m in e.messages if isinstance(m, Noted)]


@pytest.fixture
def honest(ear: Ear) -> Honest:
    worker = Honest(ear)
    worker.goes_on()
    return worker


# --------------------------------------------------------------------------- any bytes, with a good key

POINT = Point(row=1, at=2.0, metrics={"loss": 0.5, "deep": [{"a": [1, None, "ä"]}]})
MESSAGES: list[FromWorker] = [
    Hello(pid=1, host="here"),
    POINT,
    Beat(reports=1, steps=2, batches=3, idle=0.1, phase="training"),
    Telemetry(first=7, steps=b"\x00" * 40, facts=b"{}"),
    Arrived(sync=1, kind="barrier", data=b"x" * 20),
    Executed(call=1, error=ErrorReport(type="E", message="m", traceback="t")),
    Outcome(status="returned", value=b"\x80\x04N."),
    ShareUploaded(attempt=0, row=1, rank=0, files=[FilePart(name="a", size=3)]),
    ProcessEnded(id="1", pid=2, code=-9, reports=[POINT]),
]
VALID = st.builds(
    lambda number, messages: envelope(number, messages=messages),
    st.integers(0, 4),
    st.lists(st.sampled_from(MESSAGES), max_size=3),
)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A good frame with bits flipped, bytes put in, or its end cut off."""
    data = bytearray(draw(VALID))
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(data)))
        change = draw(st.sampled_from(["flip", "put in", "cut", "repeat"]))
        if change == "flip" and place < len(data):
            data[place] ^= 1 << draw(st.integers(0, 7))
        elif change == "put in":
            data[place:place] = draw(st.binary(min_size=1, max_size=9))
        elif change == "cut":
            del data[place:]
        elif change == "repeat":
            data += data[place:]
    return bytes(data)


PIECES = st.builds(frame, st.integers(0, 6) | st.integers(0, 2**64 - 1), st.binary(), st.integers(0, 255))
#: What is sent at once: mostly one frame, sometimes several in one message.
SENT = st.lists(st.binary(max_size=80) | VALID | mutated() | PIECES, min_size=1, max_size=1) | st.lists(
    st.binary(max_size=20) | VALID, min_size=2, max_size=4
)


def test_whatever_a_known_key_sends_the_hub_lives_and_honest_words_arrive(ear: Ear, honest: Honest) -> None:
    @FUZZED
    @given(st.lists(SENT, min_size=1, max_size=12))
    @example([[b""], [b"", b""], [envelope(1), envelope(2)]])
    @example([[envelope(1)], [envelope(1)], [envelope(2)], [envelope(1, rank=1)]])
    @example([[frame(1, b"\x91", ends=0)], [envelope(1)], [envelope(2)]])
    def sends(flood: list[list[bytes]]) -> None:
        told = len(ear.rejected)
        connection = ear.hub.admit()
        with RawClient(connection) as client:
            for frames in flood:
                client.socket.send_multipart(frames)
            end = frame(2**64 - 1, connection.keys.public)  # too early for ever, so it is never taken
            client.socket.send(end)
            ear.wait_until(lambda: end in ear.done)
        numbers = [r.number for r in ear.received if r.sender == connection.keys.public]
        assert numbers == sorted(set(numbers))
        assert len(ear.rejected) - told <= 1
        honest.goes_on()

    sends()


@given(st.binary(max_size=60) | VALID | mutated() | PIECES)
@settings(max_examples=scaled(300))
def test_reading_a_frame_ends_in_an_envelope_or_in_one_kind_of_error(data: bytes) -> None:
    problem, read = "", None
    try:
        _, _, body = wire_frames.read_frame(memoryview(data))
        read = wire_frames.read_envelope(body)
    except WireError as error:
        problem = str(error)
    if read is None:
        assert problem.startswith(("it is", "it does not"))
    else:
        assert read.rank >= -1
        assert min(read.attempt, read.boundary, read.row, read.heard) >= 0


BASE = {"rank": 0, "attempt": 0, "boundary": 0, "row": 0, "messages": [], "heard": 0}


def told(**fields: Any) -> bytes:
    return frame(1, msgspec.msgpack.encode({**BASE, **fields}))


#: The map of an envelope without its messages, and what it may claim of them.
_OPEN = (
    b"\x85" + msgspec.msgpack.encode({"rank": 0, "attempt": 0, "boundary": 0, "row": 0})[1:] + b"\xa8messages"
)
OUT_OF_RANGE = {
    "a rank below those there are": told(rank=-2),
    "an attempt below zero": told(attempt=-1),
    "a boundary below zero": told(boundary=-1),
    "a row beyond what columns hold": told(row=2**64 - 1),
    "a number that is none": told(row=True),
    "a command that was never sent": told(heard=1),
    "a report of a row below zero": told(messages=[{"m": "point", "row": -1, "at": 0.0, "metrics": {}}]),
    "a file of a size below zero": told(
        messages=[{"m": "carried", "attempt": 0, "row": 1, "rank": 0, "files": [{"name": "a", "size": -1}]}]
    ),
    "steps from below zero": told(messages=[{"m": "telemetry", "first": -1}]),
    "a kind of value of its own": told(extras={"x": msgspec.msgpack.Ext(5, b"x")}),
    "four thousand million messages": frame(1, _OPEN + b"\xdd\xff\xff\xff\xff"),
    "four thousand million bytes": frame(1, _OPEN + b"\xc6\xff\xff\xff\xff"),
}


@pytest.mark.parametrize("sent", OUT_OF_RANGE.values(), ids=OUT_OF_RANGE.keys())
def test_a_sender_of_values_out_of_range_is_refused_once_and_then_ignored(
    ear: Ear, honest: Honest, decoded: list[bytes], sent: bytes
) -> None:
    with RawClient(ear.hub.admit(speaks_as=(0, 0))) as client:
        for _ in range(3):
            client.socket.send(sent)
        client.socket.send(envelope(1))
        ear.wait_until(lambda: envelope(1) in ear.done)
        assert not client.socket.poll(0), "nothing of it is acknowledged"
    honest.goes_on()
    assert len(decoded) == 2, "one of them, and the honest one's"
    (line,) = ear.rejected
    assert "A message of rank 0 of attempt 0 cannot be read: it " in line


def test_the_handler_of_refused_messages_gets_the_key_and_can_still_answer(directory: str) -> None:
    refused: list[tuple[bytes, str]] = []
    is_refused = threading.Event()

    def on_refused(key: bytes, problem: str) -> None:
        refused.append((key, problem))
        is_refused.set()

    ear = Ear(directory, refused=on_refused)
    try:
        connection = ear.hub.admit(speaks_as=(1, 0))
        with RawClient(connection) as client:
            client.socket.send(OUT_OF_RANGE["a number that is none"])
            assert is_refused.wait(PATIENCE)
            ear.hub.send(connection.keys.public, MessageRefused(reason="why"))
            assert client.socket.poll(int(PATIENCE * 1000))
            command = msgspec.msgpack.decode(client.socket.recv()[HEADER:], type=FromController)
        assert command == MessageRefused(reason="why")
        assert [key for key, _ in refused] == [connection.keys.public]
        assert "Expected `int`, got `bool` - at `$.row`" in refused[0][1]
        assert ear.rejected == []
    finally:
        ear.hub.close()


def test_the_report_of_a_refused_message_is_short_and_holds_nothing_that_a_terminal_obeys(ear: Ear) -> None:
    with RawClient(ear.hub.admit()) as client:
        client.socket.send(told(messages=[{"m": "\x1b[2J\n" + "x" * 100_000}]))
        ear.wait_until(lambda: bool(ear.rejected))
    assert ear.rejected[0].isprintable()
    assert len(ear.rejected[0]) < 700


def test_a_message_for_which_there_is_no_memory_is_refused_and_may_come_again(
    ear: Ear, honest: Honest, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = Gathering.add

    def fails(*_: Any) -> None:
        monkeypatch.setattr(Gathering, "add", add)
        raise MemoryError

    with RawClient(ear.hub.admit()) as client:
        monkeypatch.setattr(Gathering, "add", fails)
        client.socket.send(envelope(1))
        ear.wait_until(lambda: bool(ear.rejected))
        client.socket.send(envelope(1))
        ear.wait_until(lambda: len(ear.received) == 2)
    assert "No memory is left for a message of" in ear.rejected[0]
    honest.goes_on()


@pytest.mark.parametrize("speaks_as", [(0, 0), None], ids=["as it was admitted", "as it said first"])
def test_a_worker_that_claims_to_be_another_is_ignored(ear: Ear, speaks_as: tuple[int, int] | None) -> None:
    with RawClient(ear.hub.admit(speaks_as=speaks_as)) as client:
        client.socket.send(envelope(1))
        client.socket.send(envelope(2, rank=1))
        client.socket.send(envelope(2))
        ear.wait_until(lambda: envelope(2) in ear.done)
    assert [r.envelope.rank for r in ear.received] == [0]
    assert "it claims to be of rank 1 of attempt 0" in ear.rejected[0]


def test_an_earlier_frame_that_is_sent_again_is_not_even_decoded(ear: Ear, decoded: list[bytes]) -> None:
    with RawClient(ear.hub.admit()) as client:
        first, second = envelope(1), envelope(2)
        for sent in (first, second, *[first] * 50, second, envelope(3)):
            client.socket.send(sent)
        ear.wait_until(lambda: len(ear.received) == 3)
    assert ear.seqs() == [1, 2, 3]
    assert len(decoded) == 3


def test_a_batch_that_cannot_be_dealt_with_ends_neither_the_hub_nor_the_others(
    ear: Ear, honest: Honest
) -> None:
    def breaks(_: Received) -> None:
        raise KeyError("no such process")

    with RawClient(ear.hub.admit(deliver=breaks)) as client:
        client.socket.send(envelope(1))
        ear.wait_until(lambda: bool(ear.rejected))
    assert "it could not be dealt with (KeyError: 'no such process')" in ear.rejected[0]
    honest.goes_on()


def test_a_process_that_takes_the_address_of_another_gets_none_of_its_messages(ear: Ear) -> None:
    connection = ear.hub.admit()
    victim = connect(connection, 0, 0)
    victim.send(note("here"), 0, 0)
    pump(victim, lambda: victim.is_acknowledged)
    route = ear.hub._peers[connection.keys.public].route
    assert route is not None
    with RawClient(ear.hub.admit(), routing_id=route) as thief:
        thief.socket.send(envelope(1))
        assert not thief.socket.poll(100)
        ear.hub.send(connection.keys.public, Train())
        assert victim.poll(PATIENCE)[0] == [Train()]
        assert not thief.socket.poll(0)


# --------------------------------------------------------------------------- those without a key


@contextlib.contextmanager
def stranger(ear: Ear, kind: str) -> Iterator[zmq.Socket[bytes]]:
    """A socket that cannot prove that it is one of the run's."""
    context = zmq.Context()
    plain = context.socket(zmq.DEALER)
    plain.linger = 0
    if kind == "PLAIN":
        plain.plain_username, plain.plain_password = b"rank", b"0"
    elif kind == "an unknown key":
        plain.curve_serverkey = ear.hub.keys.public
        plain.curve_publickey, plain.curve_secretkey = zmq.curve_keypair()
    elif kind == "a known key without its secret":
        plain.curve_serverkey = ear.hub.keys.public
        plain.curve_publickey, plain.curve_secretkey = ear.hub.admit().keys.public, zmq.curve_keypair()[1]
    elif kind == "another hub's key":
        plain.curve_serverkey = zmq.curve_keypair()[0]
        keys = ear.hub.admit().keys
        plain.curve_publickey, plain.curve_secretkey = keys.public, keys.secret
    plain.connect(ear.hub.endpoint)
    try:
        yield plain
    finally:
        plain.close()
        context.term()


STRANGERS = ["NULL", "PLAIN", "an unknown key", "a known key without its secret", "another hub's key"]


@pytest.mark.parametrize("kind", STRANGERS)
def test_nothing_of_a_stranger_is_decoded(ear: Ear, decoded: list[bytes], kind: str) -> None:
    honest = Honest(ear)
    with stranger(ear, kind) as plain:
        for sent in [envelope(1), b"", b"\xff" * 100, bytes(2 * MIB)] * 3:
            with contextlib.suppress(zmq.Again):  # the refusal closed it
                plain.send(sent, zmq.NOBLOCK)
            plain.poll(10)
            honest.goes_on()
    assert len(decoded) == honest.said
    assert ear.rejected == []


def test_a_link_that_is_not_let_in_stands_in_nobodys_way(ear: Ear) -> None:
    keys = KeyPair.new()
    link = connect(ConnectionInfo(endpoint=ear.hub.endpoint, hub_key=ear.hub.keys.public, keys=keys), 0, 0)
    pump(link, lambda: not link._socket.poll(20, zmq.POLLOUT))
    for _ in range(link.WINDOW):
        link.send(note("let me in"), 0, 0)
    link.RESEND_INTERVAL_S = 0.0
    pump(link, lambda: link.silence > 0.05)
    assert not link.is_acknowledged
    assert ear.done == []


def test_nothing_of_an_expelled_sender_is_decoded(ear: Ear, decoded: list[bytes]) -> None:
    connection = ear.hub.admit()
    with RawClient(connection) as client:
        client.socket.send(envelope(1))
        ear.wait_until(lambda: bool(ear.received))
        ear.hub.expel(connection.keys.public)
        sent = [envelope(2), b"garbage"]
        for data in sent:
            client.socket.send(data)
        ear.wait_until(lambda: set(sent) <= set(ear.done))
        client.socket.send_multipart([b"one", b"two"])
        Honest(ear).goes_on()
    assert len(decoded) == 2
    assert ear.rejected == []


#: How ZeroMQ's protocol begins, and the length of a frame that follows.
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\x00") + bytes(32)


def _claims(length: int) -> bytes:
    return _GREETING + b"\x06" + length.to_bytes(8, "big")


@pytest.fixture
def tcp_ear(directory: str) -> Iterator[Ear]:
    ear = Ear(directory, "127.0.0.1")
    yield ear
    ear.hub.close()


def _write_plainly(endpoint: str, *pieces: bytes) -> None:
    """Write to the hub's port until it hangs up."""
    host, port = endpoint.removeprefix("tcp://").split(":")
    with contextlib.suppress(ConnectionError), socket.create_connection((host, int(port)), PATIENCE) as plain:
        for piece in pieces:
            plain.sendall(piece)


def test_plain_bytes_on_the_port_of_a_hub_do_nothing(tcp_ear: Ear, decoded: list[bytes]) -> None:
    honest = Honest(tcp_ear)

    @FUZZED
    @given(st.sampled_from([b"", _GREETING, _GREETING[:10], _claims(64)]), st.binary(max_size=400))
    @example(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"")
    @example(_claims(2**63 - 1), b"\x05READY")
    @example(_claims(2**64 - 1), b"")
    def writes(beginning: bytes, noise: bytes) -> None:
        _write_plainly(tcp_ear.hub.endpoint, beginning, noise)
        honest.goes_on()

    writes()
    assert len(decoded) == honest.said
    assert tcp_ear.rejected == []


def _grown(during: Callable[[], None]) -> int:
    """Bytes that this process has more after something."""
    process = psutil.Process()
    before = process.memory_info().rss
    during()
    return int(process.memory_info().rss - before)


@pytest.mark.parametrize("length", [64 * MIB, 2**40, 2**63 - 1], ids=["64 MiB", "1 TiB", "all there is"])
def test_a_stranger_that_claims_to_send_much_is_hung_up_on_before_it_is_stored(
    tcp_ear: Ear, length: int
) -> None:
    block = bytes(MIB)
    honest = Honest(tcp_ear)
    honest.goes_on()
    grown = _grown(lambda: _write_plainly(tcp_ear.hub.endpoint, _claims(length), *[block] * 64))
    assert grown < 16 * MIB
    honest.goes_on()


SENDS_TOO_MUCH = """
import sys, zmq
from zmq.utils.monitor import recv_monitor_message
endpoint, hub, public, secret, good = sys.argv[1:]
client = zmq.Context().socket(zmq.DEALER)
client.linger = 0
client.curve_serverkey = hub.encode()
client.curve_publickey, client.curve_secretkey = public.encode(), secret.encode()
monitor = client.get_monitor_socket()
client.connect(endpoint)
client.send(bytes(128 * 2**20))
while recv_monitor_message(monitor)["event"] != zmq.EVENT_DISCONNECTED:
    pass
client.send(bytes.fromhex(good))
assert client.poll(5000)
client.disable_monitor()
client.close()
"""


def test_a_known_worker_that_sends_too_much_at_once_is_hung_up_on_before_it_is_stored(
    ear: Ear, honest: Honest
) -> None:
    connection = ear.hub.admit()
    keys = [key.decode() for key in (connection.hub_key, connection.keys.public, connection.keys.secret)]

    def sends() -> None:
        command = [sys.executable, "-c", SENDS_TOO_MUCH, connection.endpoint, *keys, envelope(1).hex()]
        subprocess.run(command, check=True, timeout=20)

    assert _grown(sends) < 32 * MIB
    assert [r.number for r in ear.received if r.sender == connection.keys.public] == [1]
    honest.goes_on()


def test_the_longest_frame_that_a_link_sends_is_let_in(ear: Ear) -> None:
    link = connect(ear.hub.admit(), 0, 0)
    value = b"v" * (3 * limits.FRAME_LIMIT)
    link.send([Outcome(status="returned", value=value)], 0, 0)
    pump(link, lambda: link.is_acknowledged)
    assert max(len(data) for data in ear.done) == HEADER + limits.FRAME_LIMIT
    (outcome,) = ear.received[0].envelope.messages
    assert isinstance(outcome, Outcome)
    assert outcome.value == value
