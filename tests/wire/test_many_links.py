"""Hundreds of links to one hub: everything comes once and in order, and who is gone is noticed."""

from __future__ import annotations

import resource
import threading
from collections import Counter
from collections.abc import Iterator

import pytest
import zmq
from tests.wire.ears import PATIENCE

from powertrain.wire import hub
from powertrain.wire.from_worker import Noted
from powertrain.wire.hub import Hub
from powertrain.wire.keys import Received
from powertrain.wire.link import Link

LINKS = 300
BATCHES = 3


class Crowd:
    """A hub with many links of this process to it, and the messages that came."""

    def __init__(self, directory: str, links: int) -> None:
        self.received: list[Received] = []
        self.rounds: list[int] = []
        self.parted: list[bytes] = []
        self._changed = threading.Condition()
        self.hub = Hub(
            "ipc",
            self.received.append,
            delivered=self._delivered,
            parted=self._part,
            directory=directory,
        )
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.connections = [self.hub.admit(speaks_as=(rank, 0)) for rank in range(links)]
        self.links = [
            Link(connection, rank, 0, self._context) for rank, connection in enumerate(self.connections)
        ]

    def _delivered(self) -> None:
        with self._changed:
            self.rounds.append(len(self.received))
            self._changed.notify_all()

    def _part(self, public: bytes) -> None:
        with self._changed:
            self.parted.append(public)
            self._changed.notify_all()

    def wait_until(self, number: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.received) >= number, 4 * PATIENCE)

    def wait_for_partings(self, number: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.parted) >= number, PATIENCE)

    def say(self, text: str) -> None:
        for link in self.links:
            link.send([Noted(message=text)], 0, 0)

    def close(self) -> None:
        for link in self.links:
            link.close()
        self._context.term()
        self.hub.close()


@pytest.fixture
def crowd(directory: str) -> Iterator[Crowd]:
    crowd = Crowd(directory, LINKS)
    yield crowd
    crowd.close()


def test_what_hundreds_of_links_say_comes_once_in_order_and_is_acknowledged(crowd: Crowd) -> None:
    for number in range(BATCHES):
        crowd.say(str(number))
    crowd.wait_until(LINKS * BATCHES)
    for received in crowd.received:
        crowd.hub.acknowledge(received)
    said: dict[int, list[str]] = {}
    for received in crowd.received:
        for message in received.envelope.messages:
            assert isinstance(message, Noted)
            said.setdefault(received.envelope.rank, []).append(message.message)
    assert said == {rank: ["0", "1", "2"] for rank in range(LINKS)}
    for link in crowd.links:
        for _ in range(int(PATIENCE / 0.05)):
            if link.is_acknowledged:
                break
            link.poll(0.05)
        assert link.is_acknowledged
    assert crowd.hub.count_connected() == LINKS


def test_the_reader_of_batches_is_woken_once_for_many(crowd: Crowd) -> None:
    crowd.say("at the same moment")
    crowd.wait_until(LINKS)
    assert crowd.rounds == sorted(set(crowd.rounds))  # never without something new
    assert crowd.rounds[-1] == LINKS


def test_the_end_of_one_connection_among_hundreds_is_noticed_and_its_return_too(crowd: Crowd) -> None:
    crowd.say("here")
    crowd.wait_until(LINKS)
    for received in crowd.received:
        crowd.hub.acknowledge(received)
    crowd.links[7].close()
    crowd.wait_for_partings(1)
    assert crowd.parted == [crowd.connections[7].keys.public]
    assert crowd.hub.count_connected() == LINKS - 1
    crowd.links[7] = Link(crowd.connections[7], 7, 0, crowd._context)
    # Its number was seen already: it brings nothing new, but shows that the sender is there.
    crowd.links[7].send([Noted(message="again")], 0, 0)
    for _ in range(int(PATIENCE / 0.05)):
        if crowd.links[7].is_acknowledged:
            break
        crowd.links[7].poll(0.05)
    assert crowd.hub.count_connected() == LINKS
    assert len(crowd.parted) == 1


def test_the_ends_of_many_connections_are_reported_once_each(crowd: Crowd) -> None:
    crowd.say("here")
    crowd.wait_until(LINKS)
    closed, crowd.links = crowd.links[:100], crowd.links[100:]
    for link in closed:
        link.close()
    crowd.wait_for_partings(100)
    assert Counter(crowd.parted) == Counter(connection.keys.public for connection in crowd.connections[:100])


@pytest.mark.parametrize("workers", [0, 1, 2, 64, 399, 400, 2048, 10_000])
def test_only_a_hub_of_many_workers_lets_messages_gather(workers: int) -> None:
    pause = hub.gathering_pause(workers)
    assert (pause == 0.0) == (workers < 400)
    assert pause <= 0.02


def test_room_for_connections_is_made_only_where_it_is_missing() -> None:
    soft, hard = before = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = 1024
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (low, hard))
        hub.make_room_for_connections(100)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == low
        hub.make_room_for_connections(2048)
        raised = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        assert raised > 2048 or raised == hard
        hub.make_room_for_connections(10**9)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] in (hard, raised)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert soft == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
