"""The end of a hub, also where many connections end at the same moment."""

from __future__ import annotations

import subprocess
import sys

#: A hub whose thread has just ended, and more events of connections than ZeroMQ keeps: it waits for a reader then.
_FULL_OF_EVENTS = """
import socket, tempfile
from powertrain.wire.hub import Hub

with tempfile.TemporaryDirectory(prefix="pt-") as directory:
    hub = Hub("ipc", lambda received: None, directory=directory)
    hub._closing = True
    hub._wake.set()
    hub._thread.join()
    hub._closing = False
    for _ in range(3000):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(hub.endpoint.removeprefix("ipc://"))
            client.send(bytes(10))
    print("closing", flush=True)
    hub.close()
    print("closed", flush=True)
"""


def test_a_hub_closes_while_thousands_of_connections_end() -> None:
    # In a process of its own: a hub that hangs here keeps the interpreter's lock, and no timeout of a test could run.
    done = subprocess.run([sys.executable, "-c", _FULL_OF_EVENTS], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["closing", "closed"], done.stderr


_NEVER_CLOSED = """
import tempfile, zmq
from powertrain.wire import hub as hubs

hubs._CLOSE_TIMEOUT_S = 0.2
with tempfile.TemporaryDirectory(prefix="pt-") as directory:
    hub = hubs.Hub("ipc", lambda received: None, directory=directory)
    open_socket = hub._context.socket(zmq.PUSH)
    hub.close()
    print("closed", flush=True)
"""


def test_a_hub_closes_although_zeromq_does_not() -> None:
    done = subprocess.run([sys.executable, "-c", _NEVER_CLOSED], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["closed"], done.stderr
    assert "did not close" in done.stderr
    assert done.returncode == 0
