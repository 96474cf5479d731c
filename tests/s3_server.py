"""A real S3 protocol server for tests (moto's, in a child process), and a proxy that spoils what passes through it."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator

BUCKET = "bucket"
#: Keys that the server lists in one answer.
PAGE = 20
_STARTS_WITHIN = 30.0


class S3Server:
    """moto's server on a free port of this machine, with the bucket :data:`BUCKET`. Use it with ``with``."""

    def __init__(self) -> None:
        self.port = _free_port()
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        small_pages = {**os.environ, "MOTO_S3_DEFAULT_MAX_KEYS": str(PAGE)}
        self._process = subprocess.Popen(
            command, env=small_pages, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            self._await_start()
            self.make_bucket(BUCKET)
        except BaseException:
            self.stop()
            raise

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to reach this server with plain ``s3://bucket/...`` addresses."""
        return environment(self.endpoint)

    def uri(self, path: str) -> str:
        """An address of this server that needs no environment."""
        return uri(self.port, path)

    def make_bucket(self, name: str) -> None:
        self._send("PUT", name)

    def empty(self) -> None:
        """Remove everything but an empty :data:`BUCKET`."""
        self._send("POST", "moto-api/reset")
        self.make_bucket(BUCKET)

    def _send(self, method: str, path: str) -> None:
        request = urllib.request.Request(f"{self.endpoint}/{path}", method=method)
        with _direct.open(request, timeout=10):
            pass

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def _await_start(self) -> None:
        deadline = time.monotonic() + _STARTS_WITHIN
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(
                        "moto's server did not start; run 'python -m moto.server' to see why"
                    ) from None
                time.sleep(0.02)

    def __enter__(self) -> S3Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def environment(endpoint: str) -> dict[str, str]:
    return {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_CA_BUNDLE": "",
    }


def uri(port: int, path: str, bucket: str = BUCKET) -> str:
    """``s3://`` address of ``path`` on a server at a port of this machine."""
    query = f"endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1&access_key=testing&secret_key=testing"
    return f"s3://{bucket}/{path}?{query}"


#: The machine's proxies are for other machines.
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _free_port() -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Proxy:
    """Passes TCP connections on to a port of this machine, with the faults that a test sets. Use it with ``with``.

    - ``refuse()``: nobody listens on its port.
    - ``hang()``: connections are taken and nothing is passed on, either way.
    - ``throttle(rate)``: this many bytes a second, of all connections together.
    - ``cut(after)``: each connection is broken off after so many bytes from the client.
    - ``mute(count)``: this many answers are lost: the server gets the request, the client a broken connection.
    - ``mend()``: all is well again; connections that hang are broken off.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._mode, self._rate, self._after, self._answers_to_lose = "pass", 0.0, 0, 0
        self._guard = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._stopped = False
        #: Connections taken so far.
        self.connections = 0
        self._listener = _listen(0)
        self.port = int(self._listener.getsockname()[1])
        self._start(self._accept, self._listener)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def uri(self, path: str) -> str:
        return uri(self.port, path)

    def refuse(self) -> None:
        self._mode = "refuse"
        self._close_listener()
        self._break_all()

    def hang(self) -> None:
        self._mode = "hang"

    def throttle(self, rate: float) -> None:
        self._mode, self._rate = "throttle", rate

    def cut(self, after: int = 0) -> None:
        self._mode, self._after = "cut", after

    def mute(self, count: int) -> None:
        self._mode, self._answers_to_lose = "mute", count

    def mend(self) -> None:
        before, self._mode = self._mode, "pass"
        self._break_all()
        if before == "refuse":
            self._listener = _listen(self.port)
            self._start(self._accept, self._listener)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self._close_listener()
        self._break_all()
        for thread in self._threads:
            thread.join(10)

    def _start(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            if self._mode == "refuse" or self._stopped:
                client.close()
                return
            self.connections += 1
            self._start(self._forward, client)

    def _forward(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(("127.0.0.1", self._target), timeout=10)
        except OSError:
            client.close()
            return
        with self._guard:
            self._open |= {client, server}
        sent = 0
        with contextlib.suppress(OSError, ValueError):
            while not self._stopped:
                ready, _, _ = select.select([client, server], [], [], 0.05)
                if self._mode == "hang":
                    time.sleep(0.02)
                    continue
                for source in ready:
                    data = source.recv(65536)
                    sent += len(data) if source is client else 0
                    if not data:
                        raise ConnectionError("one side has ended it")
                    if self._mode == "cut" and sent > self._after:
                        raise ConnectionError("told to cut it")
                    if self._mode == "mute" and source is server and self._loses_answer():
                        raise ConnectionError("told to lose it")
                    if self._mode == "throttle":
                        with self._guard:
                            time.sleep(len(data) / self._rate)
                    (server if source is client else client).sendall(data)
        self._drop(client, server)

    def _loses_answer(self) -> bool:
        with self._guard:
            self._answers_to_lose -= 1
            return self._answers_to_lose >= 0

    def _drop(self, *sockets: socket.socket) -> None:
        with self._guard:
            self._open -= set(sockets)
        for each in sockets:
            each.close()

    def _break_all(self) -> None:
        with self._guard:
            sockets, self._open = self._open, set()
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _close_listener(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept
        self._listener.close()


def _listen(port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(64)
    return listener


@contextlib.contextmanager
def served_with_proxy() -> Iterator[tuple[S3Server, Proxy]]:
    """A server and a proxy before it."""
    with S3Server() as server, Proxy(server.port) as proxy:
        yield server, proxy
