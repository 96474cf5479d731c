"""A server of the dashboard, and a client that asks for what a browser asks for."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import psutil

_ADDRESS = re.compile(r"http://([\w.-]+):(\d+)/\?token=(\S+)")
_COMMAND = (sys.executable, "-c", "from powertrain.cli.main import main; main()", "ui")
#: Pixels of a chart on a screen of 1,280 pixels, those of the step timeline, and its rows.
PIXELS, COLUMNS, ROWS = 400, 800, 96


class ServerFailed(Exception):
    """The server ended, or has refused a request."""


@dataclass
class Browser:
    """One signed-in browser. Each request has a connection of its own, as parallel ones have."""

    port: int
    headers: dict[str, str]
    key: str
    received: int = 0

    def get(self, path: str, **query: Any) -> Any:
        """Return a reply, and count its bytes."""
        text = urlencode(query, doseq=True)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET", f"{path}?{text}", headers=self.headers)
            reply = connection.getresponse()
            data = reply.read()
        finally:
            connection.close()
        if reply.status != 200:
            raise ServerFailed(f"{path} was answered with {reply.status}: {data[:200]!r}")
        self.received += len(data)
        return json.loads(data)

    def paint(self, run: str) -> None:
        """Ask for all that the page of a run asks for at first."""
        page = self.get("/api/run", run=run)
        jobs = (
            ("/api/lines", {"metric": page["metrics"][:12], "rank": 0, "pixels": PIXELS}),
            ("/api/steps", {"columns": COLUMNS, "rows": ROWS}),
            ("/api/resources", {"columns": 200}),
            ("/api/logs", {}),
        )
        with ThreadPoolExecutor(len(jobs)) as pool:
            for job in [pool.submit(self.get, path, run=run, **query) for path, query in jobs]:
                job.result()

    def follow(self, run: str, ended: threading.Event) -> int:
        """Ask again whenever the run has changed, as an open page does; returns how often."""
        query = urlencode({"run": run, "key": self.key})
        lines = [
            f"GET /api/events?{query} HTTP/1.1",
            *(f"{name}: {value}" for name, value in self.headers.items()),
        ]
        looks, before = 0, b""
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            connection.sendall("\r\n".join([*lines, "", ""]).encode())
            while not ended.is_set():
                if not select.select([connection], [], [], 0.2)[0]:
                    continue
                data = connection.recv(65536)
                if not data or (not before and not data.startswith(b"HTTP/1.1 200")):
                    raise ServerFailed(f"the events of {run} were refused or ended: {data[:80]!r}")
                if b"event: changed" in before[-20:] + data:
                    self.paint(run)
                    looks += 1
                before = data
        return looks


@contextlib.contextmanager
def serving(
    root: Path, token: str = "a-token-for-the-benchmark"
) -> Iterator[tuple[int, str, psutil.Process]]:
    """Run ``powertrain ui``; yields its port, its host name and its process. It is ended in any case."""
    process = subprocess.Popen(
        [*_COMMAND, str(root), "--token", token], stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if found := _ADDRESS.search(line):
                yield int(found[2]), found[1], psutil.Process(process.pid)
                return
        raise ServerFailed("the server has ended before it told its address")
    finally:
        process.terminate()
        process.wait(30)
        process.stderr.close()


def wait_for_start(process: psutil.Process) -> None:
    """Wait until the server has loaded what it loads by itself: a person's browser is not faster."""
    before, now = -1.0, processor_seconds(process)
    while now > before:
        time.sleep(1.0)
        before, now = now, processor_seconds(process)


def processor_seconds(process: psutil.Process) -> float:
    """Return the processor time of a process so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


def sign_in(port: int, name: str, token: str = "a-token-for-the-benchmark") -> Browser:
    """Return a browser that has shown the token."""
    host = {"Host": f"{name}:{port}"}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", f"/?token={token}", headers=host)
        reply = connection.getresponse()
        page = reply.read().decode()
    finally:
        connection.close()
    found, cookie = re.search(r'data-key="([\w-]+)"', page), reply.headers.get("Set-Cookie")
    if found is None or cookie is None:
        raise ServerFailed(f"the token was refused with {reply.status}")
    return Browser(port, {**host, "Cookie": cookie.partition(";")[0], "X-Powertrain-Key": found[1]}, found[1])
