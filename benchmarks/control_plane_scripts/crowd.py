"""A process of many simulated workers: python crowd.py, with a :class:`Crowd` on standard input.

Each worker is a real link with its own keys. It makes the handshake, waits for the order to train, then makes one
report a second and sends the batch with its newest heartbeat, at the interval of the order and by the rules of a
worker's service (``powertrain.worker.service.beats``). Without batching it sends one envelope a second instead, as
small runs do: the report with the heartbeat. After its last report a worker continues to send heartbeats.

On a line "close RANK" on standard input it closes that worker's link, and replies with the time. It exits at the end of
standard input.
"""

from __future__ import annotations

import heapq
import math
import os
import sys
import threading
import time

import msgspec
import zmq

from powertrain.wire import hub
from powertrain.wire.envelope import FromWorker
from powertrain.wire.from_controller import Train
from powertrain.wire.from_worker import Beat, FirstStep, Hello
from powertrain.wire.keys import ConnectionInfo
from powertrain.wire.link import Link
from powertrain.wire.values import Frame, Point, Where
from powertrain.worker.service.beats import MOST_GATHERED, SharedTimes, can_gather

#: Polling interval of a worker that waits for its order, in seconds.
_LOOK_EVERY = 0.2
#: Descriptors of the process that each link takes: a pipe, a connection, and a socket's own.
_FILES_EACH = 6


class Crowd(msgspec.Struct, frozen=True):
    """The input of a crowd: its workers' ranks and connections, the number of reports, and whether they are batched."""

    attempt: int
    world_size: int
    reports: int
    gathers: bool
    connections: dict[int, ConnectionInfo]


class SimulatedWorker:
    """One rank. ``tick`` is called when due and returns the next due time."""

    def __init__(self, crowd: Crowd, rank: int, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._link = Link(crowd.connections[rank], rank, crowd.attempt, context)
        self.rank, self._reports, self._gathers = rank, crowd.reports, crowd.gathers
        self._offset = rank / crowd.world_size
        self._row = self._steps = 0
        self._trains = False
        #: Unsent messages; and their send time, unless they are sent immediately.
        self._made: list[FromWorker] = []
        self._times: SharedTimes | None = None
        self._say([Hello(pid=os.getpid() * 100_000 + rank, host=f"node-{rank // 8:04d}")])

    def tick(self, now: float) -> float:
        """Receive messages, send due ones; return the next due time, inf for never."""
        if self._link is None:
            return math.inf
        commands, _ = self._link.poll(0)
        if not self._trains:
            for command in commands:
                if isinstance(command, Train):
                    self._begin(command, now)
            return math.ceil(now) + self._offset if self._trains else now + _LOOK_EVERY
        self._steps += 10
        if self._row < self._reports:
            self._row += 1
            self._made.append(Point(row=self._row, at=time.time(), metrics=self._metrics()))
        # If the controller is behind, messages wait, and none is dropped.
        if self._link.room > 0 and self._is_due(now):
            self._say([self._beat(), *self._made])
            self._made = []
        return now + 1.0

    def _begin(self, order: Train, now: float) -> None:
        self._trains = True
        self._made.append(FirstStep(function=0.1, setup=0.5, data=0.1, step=0.2))
        if self._gathers and order.gather > 0:
            self._times = SharedTimes(order.gather, self.rank, now)

    def _is_due(self, now: float) -> bool:
        if self._times is None:
            return True
        if self._times.is_due(now, rides=False):
            self._times.sent(now)
            return True
        return len(self._made) >= MOST_GATHERED or not all(map(can_gather, self._made))

    def close(self) -> None:
        self._link.close()
        self._link = None

    def _say(self, messages: list[FromWorker]) -> None:
        self._link.send(messages, self._row, self._row)

    def _metrics(self) -> dict[str, float]:
        step = self._row + self.rank * 1e-4
        return {"loss": 1 / step, "accuracy": 1 - 1 / step, "lr": 1e-3 * step, "tokens": self._row * 8192.0}

    def _beat(self) -> Beat:
        frame = Frame(file="/home/somebody/train.py", line=42, function="train", source="loss.backward()")
        return Beat(
            reports=self._row,
            steps=self._steps,
            batches=self._steps,
            idle=0.01,
            phase="training",
            row=self._row,
            collectives=self._steps,
            where=Where(frame=frame, inside="collective", call="backward"),
        )


def listen(asked: list[int]) -> None:
    """Read the links to close; exit at the end of input."""
    for line in sys.stdin:
        asked.append(int(line.split()[1]))
    os._exit(0)


def main() -> None:
    head = int(sys.stdin.readline())
    crowd = msgspec.json.decode(sys.stdin.read(head), type=Crowd)
    hub.make_room_for_connections(_FILES_EACH * len(crowd.connections))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, max(1024, 2 * len(crowd.connections)))
    workers = {rank: SimulatedWorker(crowd, rank, context) for rank in crowd.connections}
    asked: list[int] = []
    threading.Thread(target=listen, args=(asked,), daemon=True).start()
    due = [(time.monotonic(), rank) for rank in workers]
    heapq.heapify(due)
    while due:
        when, rank = heapq.heappop(due)
        while (now := time.monotonic()) < when:
            time.sleep(min(0.02, when - now))
            while asked:
                closing = time.monotonic()
                workers[asked.pop()].close()
                print(closing, flush=True)
        heapq.heappush(due, (workers[rank].tick(when), rank))


if __name__ == "__main__":
    main()
