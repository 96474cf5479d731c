"""Requests to a run over its socket: real sockets, real threads."""

from __future__ import annotations

import socket
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from powertrain.run.remote import protocol
from powertrain.run.remote.protocol import (
    Answer,
    Card,
    ControlClient,
    Describe,
    Description,
    LookAround,
    RankSeen,
    ResizeRequest,
    StopRequest,
)
from powertrain.wire.values import ProcessStack

_CARD = Card(name="digits", path="/runs/digits", pid=7, files="/runs/digits")


@pytest.fixture
def root() -> Iterator[Path]:
    """A short path: sockets need that."""
    with tempfile.TemporaryDirectory(prefix="c-", dir="/tmp") as directory:
        yield Path(directory)


@pytest.fixture
def room(root: Path) -> Path:
    """The runtime directory of a run."""
    (root / "run").mkdir()
    return root / "run"


def answer_with_the_question(question: protocol.Request, client: ControlClient) -> None:
    client.answer(msgspec.json.encode(question).decode())


@pytest.mark.parametrize(
    "question",
    [
        ResizeRequest(workers=3),
        StopRequest(by="me", now=True, within=2.5),
        LookAround(ranks=(0, 7)),
        Describe(),
    ],
)
def test_every_question_arrives_as_it_was_asked(room: Path, question: protocol.Request) -> None:
    with protocol.listening(room, _CARD, answer_with_the_question):
        (answer,) = protocol.send_request(room, question)
    assert isinstance(answer, Answer)
    assert msgspec.json.decode(answer.message, type=protocol.Request) == question


def test_a_reply_in_many_large_parts_arrives_whole_and_in_order(room: Path) -> None:
    wide = ProcessStack(pid=1, title="x" * (1 << 20), state="running")

    def look(_: protocol.Request, client: ControlClient) -> None:
        for rank in range(8):
            client.send_part(RankSeen(rank=rank, processes=[wide]))
        client.answer("that was all")

    with protocol.listening(room, _CARD, look):
        *parts, last = protocol.send_request(room, LookAround())
    assert [part.rank for part in parts if isinstance(part, RankSeen)] == list(range(8))
    assert all(isinstance(part, RankSeen) and part.processes == [wide] for part in parts)
    assert last == Answer(ok=True, message="that was all")


def test_a_waiting_client_holds_nothing_up(room: Path) -> None:
    waiting: list[ControlClient] = []

    def ask(question: protocol.Request, client: ControlClient) -> None:
        if isinstance(question, LookAround):
            waiting.append(client)
        else:
            client.answer("at once")
            waiting[0].answer("at last")

    said: list[protocol.Reply] = []
    with protocol.listening(room, _CARD, ask):
        first = threading.Thread(target=lambda: said.extend(protocol.send_request(room, LookAround())))
        first.start()
        while not waiting:
            first.join(0.01)
        assert list(protocol.send_request(room, Describe())) == [Answer(ok=True, message="at once")]
        first.join()
    assert said == [Answer(ok=True, message="at last")]


def test_more_than_the_run_can_attend_to_are_turned_away_in_words(
    room: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "_MAX_CLIENTS", 1)
    with protocol.listening(room, _CARD, answer_with_the_question), socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(room / "control.sock"))
        (refused,) = protocol.send_request(room, Describe())
    assert refused == Answer(ok=False, message="1 other requests to the run are open. Try again soon.")


def test_an_answer_is_read_from_a_run_that_hung_up_before_the_question(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "control.sock"))
        listener.listen()

        def hang_up_first(connection: socket.socket) -> bool:
            client, _ = listener.accept()
            with client:
                client.sendall(msgspec.json.encode(Answer(ok=False, message="too many")) + b"\n")
            return True

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(protocol, "_is_own_peer", hang_up_first)  # called between connecting and asking
            assert list(protocol.send_request(tmp_path, Describe())) == [Answer(ok=False, message="too many")]


@pytest.mark.parametrize(
    "line", [b"", b"\xff", b"{", b"[]", b'{"type":"sing"}', b'{"type":"resize"}', b"x" * 100_000]
)
def test_what_is_no_question_is_answered_in_words(room: Path, line: bytes) -> None:
    with (
        protocol.listening(room, _CARD, answer_with_the_question),
        socket.socket(socket.AF_UNIX) as connection,
    ):
        connection.settimeout(10)
        connection.connect(str(room / "control.sock"))
        connection.sendall(line + b"\n")
        answer = msgspec.json.decode(connection.makefile("rb").readline(), type=Answer)
    assert not answer.ok
    assert answer.message.startswith("The run does not understand the request")


def test_what_a_later_version_adds_to_a_question_is_passed_over(room: Path) -> None:
    with (
        protocol.listening(room, _CARD, answer_with_the_question),
        socket.socket(socket.AF_UNIX) as connection,
    ):
        connection.connect(str(room / "control.sock"))
        connection.sendall(b'{"type":"resize","workers":2,"gently":true}\n')
        answer = msgspec.json.decode(connection.makefile("rb").readline(), type=Answer)
    assert msgspec.json.decode(answer.message, type=ResizeRequest) == ResizeRequest(workers=2)


def test_a_reply_of_another_version_is_reported_as_it_came(room: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(room / "control.sock"))
        listener.listen()

        def reply() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b'{"ok":false,"message":"of old"}\n')

        run = threading.Thread(target=reply)
        run.start()
        (answer,) = protocol.send_request(room, Describe())
        run.join()
    assert isinstance(answer, Answer)
    assert not answer.ok
    assert '"message":"of old"' in answer.message


def test_clients_that_still_wait_are_notified_when_the_run_ends(room: Path) -> None:
    asked = threading.Event()
    said: list[protocol.Reply] = []
    with protocol.listening(room, _CARD, lambda _, __: asked.set()):
        waiting = threading.Thread(target=lambda: said.extend(protocol.send_request(room, Describe())))
        waiting.start()
        assert asked.wait(10)
    waiting.join(10)
    assert said == [Answer(ok=False, message="The run has ended.")]


def test_a_client_that_does_not_read_its_answer_does_not_hold_up_the_end_of_the_run(
    room: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "_EXIT_TIMEOUT_S", 0.2)
    told = threading.Event()

    def ask(_: protocol.Request, client: ControlClient) -> None:
        client.answer("x" * (16 << 20))  # more than a socket holds
        told.set()

    began = time.monotonic()
    with socket.socket(socket.AF_UNIX) as deaf, protocol.listening(room, _CARD, ask):
        deaf.connect(str(room / "control.sock"))
        deaf.sendall(msgspec.json.encode(Describe()) + b"\n")
        assert told.wait(10)
    assert time.monotonic() - began < 30.0


def test_a_run_that_hangs_up_is_an_error(room: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(room / "control.sock"))
        listener.listen()
        hang_up = threading.Thread(target=lambda: listener.accept()[0].close())
        hang_up.start()
        with pytest.raises(OSError, match=r"closed the connection|Broken pipe|reset"):
            list(protocol.send_request(room, Describe()))
        hang_up.join()


def test_only_this_user_can_talk_to_it_and_nothing_is_left(room: Path) -> None:
    with protocol.listening(room, _CARD, answer_with_the_question):
        for name in ("control.sock", "control.json"):
            assert stat.S_IMODE((room / name).stat().st_mode) == 0o600
        assert [live.card for live in protocol.live_runs(room.parent)] == [_CARD]
    assert list(room.iterdir()) == []


def test_the_card_of_a_process_that_was_killed_is_no_live_run(room: Path) -> None:
    (room / "control.json").write_bytes(msgspec.json.encode(_CARD))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(room / "control.sock"))  # without a listener
    assert protocol.live_runs(room.parent) == []


def test_a_description_survives_the_way(room: Path) -> None:
    stands = Description(state="training", row=3, row_age=0.25, awaited=[1], uploads=1, debugged=[0])

    def describe(_: protocol.Request, client: ControlClient) -> None:
        client.send_part(stands)
        client.answer("")

    with protocol.listening(room, _CARD, describe):
        assert list(protocol.send_request(room, Describe())) == [stands, Answer(ok=True)]
