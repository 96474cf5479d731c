"""The same messages over the same wire without a controller: python wire_alone.py DIRECTORY WORKERS REPORTS
CROWDS ADDRESS

A hub that acknowledges each batch. The controller's own load is its load beyond this.
"""

from __future__ import annotations

import sys
import tempfile
import threading

from crowds import PATIENCE, end_crowds, start_crowds, tell, tell_phase

from powertrain.run.workers.pacing import gathering_seconds
from powertrain.wire.from_controller import Train
from powertrain.wire.from_worker import Hello
from powertrain.wire.hub import Hub
from powertrain.wire.keys import Received
from powertrain.wire.values import Point


class Ear:
    """Receiver that counts handshakes and reports, and acknowledges."""

    def __init__(self, workers: int, reports: int, address: str, directory: str) -> None:
        self._workers, self._expected = workers, workers * reports
        self.all_greeted, self.all_reported = threading.Event(), threading.Event()
        self._greeted = self.reports = 0
        self.hub = Hub(address, self._deliver, directory=directory)

    def _deliver(self, received: Received) -> None:
        for message in received.envelope.messages:
            self._greeted += isinstance(message, Hello)
            self.reports += isinstance(message, Point)
        if self._greeted == self._workers:
            self.all_greeted.set()
        if self.reports == self._expected:
            self.all_reported.set()
        self.hub.acknowledge(received)


def main() -> None:
    address = sys.argv[5]
    workers, reports, crowds = (int(argument) for argument in sys.argv[2:5])
    with tempfile.TemporaryDirectory(prefix="pt-") as directory:
        ear = Ear(workers, reports, address, directory)
        connections = {rank: ear.hub.admit(speaks_as=(rank, 0)) for rank in range(workers)}
        processes = start_crowds(connections, reports, crowds, gathers=True)
        try:
            assert ear.all_greeted.wait(PATIENCE)
            for connection in connections.values():
                ear.hub.send(connection.keys.public, Train(gather=gathering_seconds(workers)))
            tell_phase("training")
            assert ear.all_reported.wait(PATIENCE + reports)
            tell_phase("rows")
        finally:
            end_crowds(processes)
            ear.hub.close()
    tell(points=ear.reports)


if __name__ == "__main__":
    main()
