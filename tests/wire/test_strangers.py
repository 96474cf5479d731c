"""Who proves no key cannot use up the open files of the process that listens, nor keep workers out."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import IO, Any

import pytest
from tests.wire.ears import PATIENCE, Ear, connect, note, pump

from powertrain.wire import hub
from powertrain.wire.connections import UnprovenConnections
from powertrain.wire.keys import ConnectionInfo, KeyPair

STRANGERS, FILES, RANKS = 5_000, 2_048, 12
#: Files that the listening process has open beside its connections.
OTHERS = 64

LISTENS = f"""
import json, os, resource, sys, threading
resource.setrlimit(resource.RLIMIT_NOFILE, ({FILES}, {FILES}))
from powertrain.wire.hub import Hub
heard, told = [], []
def deliver(received):
    heard.append(received.envelope.rank)
    hub.acknowledge(received)
hub = Hub("127.0.0.1", deliver, told.append)
connections = [hub.admit(speaks_as=(rank, 0)) for rank in range({RANKS})]
keys = [[connection.keys.public.decode(), connection.keys.secret.decode()] for connection in connections]
print(json.dumps({{"endpoint": hub.endpoint, "key": hub.keys.public.decode(), "keys": keys}}), flush=True)
asked, refused, most = threading.Event(), 0, 0
def wait():
    sys.stdin.readline()
    asked.set()
threading.Thread(target=wait, daemon=True).start()
while not asked.wait(0.001):
    try:
        most = max(most, len(os.listdir("/proc/self/fd")))
    except OSError:
        refused += 1
print(json.dumps({{"refused": refused, "most": most, "told": told, "heard": sorted(set(heard))}}), flush=True)
hub.close()
print("closed", flush=True)
"""

HOLDS = f"""
import resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({STRANGERS + 200}, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
held = []
for _ in range({STRANGERS}):
    plain = socket.socket()
    plain.settimeout(10)
    plain.connect(("127.0.0.1", int(sys.argv[1])))
    held.append(plain)
print("holding", flush=True)
sys.stdin.readline()
"""


@contextlib.contextmanager
def running(script: str, *arguments: str) -> Iterator[tuple[Callable[[], Any], IO[str]]]:
    """A Python process: a function that reads its next line, and its input."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    output = process.stdout
    try:
        yield lambda: output.readline().strip(), process.stdin
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        output.close()


def test_five_thousand_idle_connections_use_up_no_files_and_keep_no_rank_out() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < STRANGERS + 200:
        pytest.skip(f"this user may open only {hard} files")
    with running(LISTENS) as (told_by_hub, to_hub):
        connection = json.loads(told_by_hub())
        with running(HOLDS, connection["endpoint"].rpartition(":")[2]) as (told_by_stranger, _):
            assert told_by_stranger() == "holding"
            for rank, (public, secret) in enumerate(connection["keys"]):
                keys = KeyPair(public.encode(), secret.encode())
                link = connect(
                    ConnectionInfo(
                        endpoint=connection["endpoint"], hub_key=connection["key"].encode(), keys=keys
                    ),
                    rank,
                    0,
                )
                link.send(note("here"), 0, 0)
                pump(link, lambda link=link: link.is_acknowledged)  # type: ignore[misc]
            to_hub.write("\n")
            to_hub.flush()
            seen = json.loads(told_by_hub())
            assert told_by_hub() == "closed", "also while the strangers are still connected"
    assert seen["heard"] == list(range(RANKS))
    assert seen["refused"] == 0, seen
    # ZeroMQ accepts no more before the events of those that it has accepted are read.
    assert seen["most"] <= hub.MOST_UNPROVEN + RANKS + hub._EVENTS_AHEAD + OTHERS, seen
    (line,) = seen["told"]
    assert f"More than {hub.MOST_UNPROVEN} connections to {connection['endpoint']} have not proved" in line


def test_a_stranger_that_says_nothing_is_hung_up_on_in_time(
    directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_HANDSHAKE_TIMEOUT_S", 0.2)
    ear = Ear(directory, "127.0.0.1")
    try:
        port = int(ear.hub.endpoint.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), PATIENCE) as plain:
            while plain.recv(4096):  # ZeroMQ's greeting, then the end; a timeout would raise
                pass
        assert ear.rejected == []
    finally:
        ear.hub.close()


def test_workers_that_come_all_at_once_are_no_flood(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "MOST_UNPROVEN", 0)
    ear = Ear(directory, "127.0.0.1")
    try:
        links = [connect(ear.hub.admit(), rank, 0) for rank in range(40)]
        for link in links:
            link.send(note("here"), 0, 0)
        for link in links:
            pump(link, lambda link=link: link.is_acknowledged)  # type: ignore[misc]
        assert ear.rejected == []
    finally:
        ear.hub.close()


# --------------------------------------------------------------------------- which are closed


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


@pytest.fixture
def unproven() -> Iterator[UnprovenConnections]:
    connections = UnprovenConnections()
    yield connections
    connections.close()


class Pair:
    """Both ends of a connection."""

    def __init__(self, listener: socket.socket, host: str) -> None:
        self.far = socket.socket()
        self.far.settimeout(PATIENCE)
        self.far.bind((host, 0))
        self.far.connect(listener.getsockname())
        self.near, _ = listener.accept()

    def is_open(self) -> bool:
        self.far.setblocking(False)
        try:
            return bool(self.far.recv(1))
        except BlockingIOError:
            return True

    def close(self) -> None:
        self.far.close()
        self.near.close()


def test_the_oldest_of_the_host_that_has_most_are_closed(
    listener: socket.socket, unproven: UnprovenConnections
) -> None:
    hosts = ["127.0.0.2", "127.0.0.1", "127.0.0.1", "127.0.0.1"]
    pairs = [Pair(listener, host) for host in hosts]
    try:
        for pair in pairs:
            unproven.add(pair.near.fileno())
        assert unproven.close_beyond(4) == 0
        assert unproven.close_beyond(2) == 2
        assert [pair.is_open() for pair in pairs] == [True, False, False, True]
        assert len(unproven) == 2
    finally:
        for pair in pairs:
            pair.close()


def test_a_descriptor_that_has_become_another_connection_is_left_alone(
    listener: socket.socket, unproven: UnprovenConnections
) -> None:
    ended, other = Pair(listener, "127.0.0.1"), Pair(listener, "127.0.0.1")
    try:
        unproven.add(ended.near.fileno())
        os.dup2(other.near.fileno(), ended.near.fileno())  # as when it was closed, and the number used again
        assert unproven.close_beyond(0) == 1
        assert other.is_open()
    finally:
        ended.close()
        other.close()


def test_a_connection_that_ended_before_it_was_counted_is_not(
    listener: socket.socket, unproven: UnprovenConnections
) -> None:
    pair = Pair(listener, "127.0.0.1")
    descriptor = pair.near.fileno()
    pair.close()
    unproven.add(descriptor)
    assert len(unproven) == 0


def test_counting_keeps_no_connection_open(listener: socket.socket, unproven: UnprovenConnections) -> None:
    pair = Pair(listener, "127.0.0.1")
    unproven.add(pair.near.fileno())
    pair.near.close()
    deadline = time.monotonic() + PATIENCE
    while pair.is_open():
        assert time.monotonic() < deadline
    pair.close()
