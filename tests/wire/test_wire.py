"""The wire: only those who hold a key are heard, by their key; what is sent arrives once and in order."""

from __future__ import annotations

import contextlib
import math
import os
import re
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.examples import scaled
from tests.wire.ears import (
    HEADER,
    PATIENCE,
    Ear,
    RawClient,
    connect,
    envelope,
    frame,
    note,
    pump,
    wait_acknowledged,
)

from powertrain.errors import WireError
from powertrain.wire import frames
from powertrain.wire.envelope import FromController
from powertrain.wire.from_controller import Dismissed, Hold, RowClosed, Train
from powertrain.wire.from_worker import Noted
from powertrain.wire.keys import ConnectionInfo, KeyPair
from powertrain.wire.link import Link
from powertrain.wire.values import Point

# --------------------------------------------------------------------------- who is heard


def test_nothing_is_received_from_a_link_with_an_unknown_key(ear: Ear) -> None:
    stranger = connect(
        ConnectionInfo(endpoint=ear.hub.endpoint, hub_key=ear.hub.keys.public, keys=KeyPair.new()), 0, 0
    )
    friend = connect(ear.hub.admit(), 0, 0)
    try:
        stranger.send(note("let me in"), 0, 0)
        for number in range(5):
            stranger.poll(0.01)
            friend.send(note(f"friend {number}"), 0, 0)
        ear.wait_until(lambda: len(ear.notes()) == 5)
        assert ear.notes() == [f"friend {number}" for number in range(5)]
        assert not stranger.is_acknowledged
    finally:
        stranger.close()
        friend.close()


def test_nothing_is_received_from_a_socket_without_encryption(ear: Ear) -> None:
    context = zmq.Context()
    plain = context.socket(zmq.DEALER)
    plain.linger = 0
    plain.connect(ear.hub.endpoint)
    with contextlib.suppress(zmq.Again):  # the hub may have hung up already, and a send would wait for ever
        plain.send(envelope(1), zmq.NOBLOCK)
    link = connect(ear.hub.admit(), 0, 0)
    link.send(note("me"), 0, 0)
    ear.wait_until(lambda: bool(ear.received))
    assert ear.notes() == ["me"]
    plain.close()
    context.term()
    link.close()


def test_a_sender_is_known_by_its_key_whatever_its_envelope_claims(ear: Ear) -> None:
    connection, other = ear.hub.admit(), ear.hub.admit()
    with RawClient(connection) as client:
        client.socket.send(envelope(1, rank=7))
        ear.wait_until(lambda: bool(ear.received))
    assert ear.received[0].sender == connection.keys.public != other.keys.public
    assert ear.received[0].envelope.rank == 7


def test_a_message_with_a_forged_number_does_not_silence_another_sender(ear: Ear) -> None:
    link = connect(ear.hub.admit(), 0, 0)
    with RawClient(ear.hub.admit()) as client:
        client.socket.send(envelope(1))
        link.send(note("mine"), 0, 0)
        ear.wait_until(lambda: len(ear.received) == 2)
        pump(link, lambda: link.is_acknowledged)
    link.close()


def test_the_controller_may_admit_a_key_that_was_made_elsewhere(ear: Ear) -> None:
    keys = KeyPair.new()
    connection = ear.hub.admit(keys.public)
    assert connection.keys.secret == b""
    link = connect(ConnectionInfo(endpoint=connection.endpoint, hub_key=connection.hub_key, keys=keys), 0, 0)
    link.send(note("own key"), 0, 0)
    ear.wait_until(lambda: ear.notes() == ["own key"])
    link.close()


# --------------------------------------------------------------------------- what cannot be read


GARBAGE = {
    "nothing": b"",
    "no msgpack": b"\xc1\xc1\xc1",
    "half a message": envelope(1)[:-3],
    "another shape": frame(1, msgspec.msgpack.encode({"hello": 1})),
    "an unknown message": frame(
        1,
        msgspec.msgpack.encode(
            {"rank": 0, "attempt": 0, "boundary": 0, "row": 0, "messages": [{"m": "no such"}]}
        ),
    ),
    "text that is no UTF-8": frame(1, b"\x81\xa4\xff\xff\xff\xff\x01"),
    "nested beyond reason": frame(1, b"\x91" * 100_000 + b"\x90"),
    "nested in an envelope": envelope(1)[:-1] + b"\x81\xa1x" + b"\x91" * 100_000 + b"\x90",
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
def test_a_sender_of_garbage_with_a_good_key_is_refused(ear: Ear, garbage: bytes) -> None:
    with RawClient(ear.hub.admit()) as client:
        client.socket.send(garbage)
        client.socket.send(envelope(1))
        ear.wait_until(lambda: envelope(1) in ear.done)
    assert ear.received == []
    assert "cannot be read" in ear.rejected[0]


def test_a_sender_of_a_message_of_several_frames_is_refused(ear: Ear) -> None:
    with RawClient(ear.hub.admit()) as client:
        client.socket.send_multipart([b"one", b"two"])
        client.socket.send(envelope(1))
        ear.wait_until(lambda: envelope(1) in ear.done)
    assert ear.received == []
    assert "frames" in ear.rejected[0]


@settings(max_examples=scaled(200))
@given(st.binary(max_size=60), st.integers(0, 200))
def test_no_bytes_make_the_decoder_raise_anything_but_a_decode_error(noise: bytes, cut: int) -> None:
    messages = [Noted(message="x"), Point(row=1, at=0.0, metrics={"a": [1]})]
    whole = envelope(1, messages=messages)[HEADER:]
    try:
        frames.read_envelope(memoryview(whole[:cut] + noise + whole[cut:]))
    except WireError:
        pass


# --------------------------------------------------------------------------- once and in order


def test_messages_arrive_in_order_with_where_the_rank_stands(ear: Ear) -> None:
    link = connect(ear.hub.admit(), 3, 2)
    sent = 0
    while sent < 100:
        if link.room > 0:
            sent += 1
            link.send(note(str(sent)), boundary=sent, row=2 * sent, extras={"n": sent})
        else:
            link.poll(0.02)
    pump(link, lambda: link.is_acknowledged)
    assert ear.notes() == [str(number) for number in range(1, 101)]
    last = ear.received[-1].envelope
    assert (last.rank, last.attempt, last.boundary, last.row, last.extras) == (3, 2, 100, 200, {"n": 100})
    link.close()


def test_numbers_that_json_cannot_hold_survive(ear: Ear) -> None:
    link = connect(ear.hub.admit(), 0, 0)
    metrics = {
        "nan": math.nan,
        "inf": -math.inf,
        "big": 2**64 - 1,
        "text": "ä\x00",
        "none": None,
        "deep": [{"a": [1.5]}],
    }
    link.send([Point(row=1, at=1.0, metrics=metrics)], 0, 0)
    ear.wait_until(lambda: bool(ear.received))
    (point,) = ear.received[0].envelope.messages
    assert isinstance(point, Point)
    assert math.isnan(point.metrics.pop("nan"))
    assert point.metrics == {key: value for key, value in metrics.items() if key != "nan"}
    link.close()


def test_nothing_is_lost_while_the_hub_reads_slowly(ear: Ear) -> None:
    ear.reads.clear()
    link = connect(ear.hub.admit(), 0, 0)
    for number in range(link.WINDOW):
        link.send(note(str(number)), 0, 0)
    assert link.room == 0
    link.poll(0.05)
    assert link.room == 0
    ear.reads.set()
    pump(link, lambda: link.is_acknowledged)
    assert ear.notes() == [str(number) for number in range(link.WINDOW)]
    link.close()


def test_what_is_not_acknowledged_is_sent_again_and_delivered_once(ear: Ear) -> None:
    ear.reads.clear()
    link = connect(ear.hub.admit(), 0, 0)
    link.RESEND_INTERVAL_S = 0.0
    for number in range(3):
        link.send(note(str(number)), 0, 0)
    for _ in range(5):  # each poll sends all of it again
        link.poll(0.002)
    ear.reads.set()
    pump(link, lambda: link.is_acknowledged)
    link.RESEND_INTERVAL_S = 60.0
    link.send(note("last"), 0, 0)
    pump(link, lambda: link.is_acknowledged)
    assert ear.notes() == ["0", "1", "2", "last"]
    link.close()


def test_a_batch_whose_acknowledgement_got_lost_is_acknowledged_again_and_not_delivered_again(
    ear: Ear,
) -> None:
    with RawClient(ear.hub.admit()) as client:
        for _ in range(3):
            client.socket.send(envelope(1))
            assert client.acknowledged() == 1
    assert ear.seqs() == [1]


def test_a_batch_is_acknowledged_when_it_has_been_dealt_with_and_not_before(ear: Ear) -> None:
    ear.acknowledges = False
    link = connect(ear.hub.admit(), 0, 0)
    link.send(note("one"), 0, 0)
    ear.wait_until(lambda: bool(ear.received))
    link.poll(0.02)
    assert not link.is_acknowledged
    ear.hub.acknowledge(ear.received[0])
    pump(link, lambda: link.is_acknowledged)
    link.close()


def test_a_batch_that_got_lost_on_the_way_is_not_passed_over(ear: Ear) -> None:
    """A broken connection may lose batch 2 and deliver batch 3: then 3 must wait until 2 is sent again."""
    with RawClient(ear.hub.admit()) as client:
        client.socket.send(envelope(1))
        assert client.acknowledged() == 1
        client.socket.send(envelope(3))
        client.socket.send(envelope(2))
        client.socket.send(envelope(3))
        ear.wait_until(lambda: len(ear.received) >= 3)
    assert ear.seqs() == [1, 2, 3]


def test_commands_arrive_in_order_also_those_sent_before_the_worker_came(ear: Ear) -> None:
    connection = ear.hub.admit()
    ear.hub.send(connection.keys.public, Train())
    ear.hub.send(connection.keys.public, Hold(hold=1))
    link = connect(connection, 0, 0)
    link.send(note("here"), 0, 0)
    got: list[FromController] = []
    for number in range(50):
        ear.hub.send(connection.keys.public, RowClosed(row=number))
    deadline = time.monotonic() + PATIENCE
    while len(got) < 52 and time.monotonic() < deadline:
        got += link.poll(0.02)[0]
    assert got == [Train(), Hold(hold=1), *[RowClosed(row=number) for number in range(50)]]
    link.close()


def test_a_command_reaches_only_the_worker_it_is_for(ear: Ear) -> None:
    connections = [ear.hub.admit(), ear.hub.admit()]
    links = [connect(connection, rank, 0) for rank, connection in enumerate(connections)]
    for link in links:
        link.send(note("here"), 0, 0)
        wait_acknowledged(link)
    ear.hub.send(connections[1].keys.public, Train())
    ear.hub.send(connections[0].keys.public, Hold(hold=1))
    assert [link.poll(PATIENCE)[0] for link in links] == [[Hold(hold=1)], [Train()]]
    for link in links:
        link.close()


def test_what_was_sent_before_the_hub_closes_still_arrives(directory: str) -> None:
    ear = Ear(directory)
    connection = ear.hub.admit()
    link = connect(connection, 0, 0)
    link.send(note("here"), 0, 0)
    pump(link, lambda: link.is_acknowledged)
    ear.hub.send(connection.keys.public, Dismissed(summary={"rows": 3}))
    ear.hub.close()
    assert link.poll(PATIENCE)[0] == [Dismissed(summary={"rows": 3})]
    link.close()


# --------------------------------------------------------------------------- waking


def test_a_poll_ends_when_it_is_woken_or_a_watched_descriptor_is_ready(ear: Ear) -> None:
    link = connect(ear.hub.admit(), 0, 0)
    link.wake()
    assert link.poll(PATIENCE) == ([], set())
    read, write = os.pipe()
    link.watch(read)
    os.write(write, b"x")
    assert link.poll(PATIENCE) == ([], {read})
    link.close()
    os.close(read)
    os.close(write)


@pytest.mark.parametrize("side", ["hub", "link"])
def test_calls_after_closing_touch_no_other_descriptor(directory: str, side: str) -> None:
    ear = Ear(directory)
    connection = ear.hub.admit()
    link = connect(connection, 0, 0)
    link.close()
    ear.hub.close()
    files = [tempfile.TemporaryFile() for _ in range(12)]  # noqa: SIM115 - they take the numbers that have become free
    if side == "hub":
        ear.hub.send(connection.keys.public, Train())
        ear.hub.close()
    else:
        link.wake()
    assert [file.seek(0, os.SEEK_END) for file in files] == [0] * 12
    for file in files:
        file.close()


# --------------------------------------------------------------------------- the socket


def test_the_socket_file_is_for_this_user_only_and_gone_after_closing(directory: str) -> None:
    ear = Ear(directory)
    (path,) = Path(directory).iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert ear.hub.endpoint == f"ipc://{path}"
    ear.hub.close()
    assert list(Path(directory).iterdir()) == []


def test_a_socket_path_that_is_too_long_is_a_clear_error_after_which_the_process_can_end(
    directory: str,
) -> None:
    deep = Path(directory, "a" * 60, "b" * 60)
    deep.mkdir(parents=True)
    code = f"from powertrain.wire.hub import Hub; Hub('ipc', print, directory={str(deep)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)
    assert done.returncode == 1
    assert re.search("WireError.*107 bytes.*XDG_RUNTIME_DIR", done.stderr)
    assert list(deep.iterdir()) == []


def test_closing_twice_is_fine(directory: str) -> None:
    ear = Ear(directory)
    ear.hub.close()
    ear.hub.close()


def test_an_address_makes_it_listen_on_tcp_there_and_nowhere_else(directory: str) -> None:
    ear = Ear(directory, "127.0.0.1")
    assert ear.hub.endpoint.startswith("tcp://127.0.0.1:")
    link = connect(ear.hub.admit(), 0, 0)
    link.send(note("over tcp"), 0, 0)
    ear.wait_until(lambda: ear.notes() == ["over tcp"])
    assert list(Path(directory).iterdir()) == []
    link.close()
    ear.hub.close()


def test_a_command_lost_with_its_connection_comes_again_and_only_once(ear: Ear) -> None:
    connection = ear.hub.admit()
    link = Link(connection, 0, 0)
    link.send(note("first"), 0, 0)
    pump(link, lambda: link.is_acknowledged)
    link._socket.disconnect(connection.endpoint)
    ear.hub.send(connection.keys.public, Train())
    link._socket.connect(connection.endpoint)
    link.send(note("here again"), 0, 0)
    got = pump(link, lambda: link.is_acknowledged)
    link.send(note("heard"), 0, 0)
    got += pump(link, lambda: link.is_acknowledged)
    assert got == [Train()]
    assert ear.received[-1].envelope.heard == 1
    link.close()
