"""A run that cannot be reached: who tries says so, with the address; a run that is only slow is waited for."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest

from powertrain.engine.base import Exited, Slot
from powertrain.run.health import failures
from powertrain.run.workers import placement
from powertrain.run.workers.attempt import Attempt, Member
from powertrain.wire.from_worker import Noted
from powertrain.wire.hub import Hub
from powertrain.wire.keys import ConnectionInfo, KeyPair
from powertrain.wire.link import Link
from powertrain.worker.main import UNREACHABLE, WorkerSpec
from powertrain.worker.place import Place
from powertrain.worker.progress import Gate, Progress
from powertrain.worker.service.service import Service

PATIENCE = 30.0


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Link, "REACH_TIMEOUT_S", 0.1)


def connection_to_nobody() -> ConnectionInfo:
    """Where a run was that is gone."""
    hub = Hub("127.0.0.1", lambda _: None)
    connection = hub.admit()
    hub.close()
    return connection


def until_told(link: Link, seconds: float = PATIENCE) -> str:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        link.poll(0.02)
        if why := link.why_unreachable():
            return why
    return ""


@pytest.fixture
def link_to_nobody(at_once: None) -> Iterator[Link]:
    link = Link(connection_to_nobody(), 0, 0)
    yield link
    link.close()


def test_a_link_without_anybody_at_the_other_end_says_why(link_to_nobody: Link) -> None:
    link_to_nobody._tried = time.monotonic()
    assert link_to_nobody.why_unreachable() == "", "at first there may only be nobody yet"
    assert until_told(link_to_nobody) == "Connection refused"


def test_a_link_to_a_socket_file_that_is_gone_says_why(at_once: None) -> None:
    keys = KeyPair.new()
    link = Link(ConnectionInfo(endpoint="ipc:///tmp/nobody-is-here", hub_key=keys.public, keys=keys), 0, 0)
    try:
        assert until_told(link) == "No such file or directory"
    finally:
        link.close()


def test_a_run_that_takes_the_connection_and_does_not_answer_is_waited_for(at_once: None) -> None:
    """Such as one whose process was stopped for a while."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        keys = KeyPair.new()
        connection = ConnectionInfo(
            endpoint=f"tcp://127.0.0.1:{silent.getsockname()[1]}", hub_key=keys.public, keys=keys
        )
        link = Link(connection, 0, 0)
        try:
            assert until_told(link, 0.5) == ""
            assert not link.reached
        finally:
            link.close()


def test_a_run_that_has_answered_once_is_not_looked_for_again(at_once: None) -> None:
    hub = Hub("127.0.0.1", lambda received: hub.acknowledge(received))
    link = Link(hub.admit(), 0, 0)
    try:
        link.send([Noted(message="here I am")], 0, 0)
        deadline = time.monotonic() + PATIENCE
        while not link.reached and time.monotonic() < deadline:
            link.poll(0.02)
        hub.close()
        assert until_told(link, 0.5) == ""
    finally:
        hub.close()
        link.close()


def test_silence_grows_however_often_everything_is_sent_again(link_to_nobody: Link) -> None:
    link_to_nobody.RESEND_INTERVAL_S = 0.02
    assert link_to_nobody.silence == 0.0
    link_to_nobody.send([Noted(message="hello?")], 0, 0)
    deadline = time.monotonic() + 0.4
    while time.monotonic() < deadline:
        link_to_nobody.poll(0.01)
    assert link_to_nobody.silence >= 0.39


def test_a_service_that_cannot_reach_its_run_says_so_and_ends(
    at_once: None, capsys: pytest.CaptureFixture[str]
) -> None:
    connection, told = connection_to_nobody(), threading.Event()
    service = Service(connection, 3, 0, Gate(), Progress(), unreachable=told.set)
    assert told.wait(PATIENCE)
    service.close(0.0)
    assert capsys.readouterr().err.startswith(
        f"Rank 3 cannot reach the run at {connection.endpoint}: Connection refused. A firewall may be in between"
    )


_RANK = """
import sys
from powertrain.wire.link import Link
from powertrain.worker import main
Link.REACH_TIMEOUT_S = 0.2
sys.exit(main.run(sys.stdin.buffer.read()))
"""


def test_a_rank_that_cannot_reach_its_run_ends_with_a_code_of_its_own() -> None:
    connection = connection_to_nobody()
    payload = msgspec.msgpack.encode(WorkerSpec(connection=connection, place=Place(rank=1)))
    done = subprocess.run([sys.executable, "-c", _RANK], input=payload, stderr=subprocess.PIPE, timeout=30)
    assert done.returncode == UNREACHABLE
    assert (
        f"Rank 1 cannot reach the run at {connection.endpoint}: Connection refused." in done.stderr.decode()
    )


def member(greeted: bool) -> Member:
    [place] = placement.arrange([Slot(id="s", host="node-7", address="10.0.0.7", node="7")])
    return Member(place, b"", Attempt(0, [place], 1), greeted=greeted)


def test_the_failure_of_such_a_rank_names_its_node_and_the_address() -> None:
    who = member(greeted=False)
    event = Exited(who.placement.slot, 42, UNREACHABLE)
    failure = failures.died(who, event, "tcp://10.0.0.1:29765")
    assert failure.kind == "start"
    assert (
        failure.summary == "rank 0 on node-7 cannot reach the run at tcp://10.0.0.1:29765; its log says why"
    )


def test_the_same_exit_code_means_nothing_of_the_sort_from_a_rank_that_has_sent_messages() -> None:
    who = member(greeted=True)
    event = Exited(who.placement.slot, 42, UNREACHABLE)
    assert failures.died(who, event, "tcp://10.0.0.1:29765").summary == "rank 0 exited with code 113"
