"""The HTTP server that Prometheus scrapes: one thread, one page."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import socketserver
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler
from typing import Any

from powertrain.config.run import RunConfig
from powertrain.driver.prometheus.exposition import FigureFamily, choose_format, render
from powertrain.driver.prometheus.figures import MeasuredRun, RunFigures
from powertrain.engine.forking import ServiceThread, working
from powertrain.run.outcome import Observer

#: Seconds for a client to send its request and take the reply; others wait meanwhile.
_CLIENT_TIMEOUT_S = 5.0
_SHUTDOWN_POLL_S = 0.5


class _Server(socketserver.TCPServer):
    allow_reuse_address = True

    def __init__(self, host: str, port: int, families: Callable[[], Sequence[FigureFamily]]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.families = families
        self.is_private = is_loopback(host)
        super().__init__((host, port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that has gone: it asks again."""


class _Handler(BaseHTTPRequestHandler):
    timeout = _CLIENT_TIMEOUT_S
    server: _Server

    def do_GET(self) -> None:
        """Reply to GET /metrics."""
        with working():
            if self.server.is_private and not is_loopback(host_of(self.headers.get("Host", ""))):
                self.send_error(403, "The Host header names another machine")
            elif self.path.partition("?")[0] != "/metrics":
                self.send_error(404, "The figures are at /metrics")
            else:
                content_type = choose_format(self.headers.get("Accept", ""))
                body = render(self.server.families(), content_type)
                self.send_response(200)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a scrape every few seconds is no news."""

    def version_string(self) -> str:
        return "powertrain"


def is_loopback(host: str) -> bool:
    """Return True for names and addresses that only this machine reaches."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_of(header: str) -> str:
    """Return the host of a Host header, without its port and brackets."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.rpartition(":")[0] if ":" in header else header


@contextlib.contextmanager
def serving(host: str, port: int, families: Callable[[], Sequence[FigureFamily]]) -> Iterator[int]:
    """Serve the figures while the block lasts; yields the port. Raises ``OSError`` where it cannot be listened at."""
    with _Server(host, port, families) as server:
        thread = ServiceThread(
            target=server.serve_forever, args=(_SHUTDOWN_POLL_S,), name="powertrain-metrics", daemon=True
        )
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def measured(
    run: RunConfig, name: str, observer: Observer, stack: contextlib.ExitStack, remarks: list[str]
) -> Observer:
    """Return an observer that also feeds the figures of ``RunConfig(metrics_port=...)``, served until ``stack`` closes.

    Where the port cannot be listened at, ``remarks`` gets a warning and the run goes on without figures.
    """
    if run.metrics_port is None:
        return observer
    figures = RunFigures(name)
    try:
        stack.enter_context(serving(run.metrics_host, run.metrics_port, figures.families))
    except OSError as error:
        remarks.append(
            f"Metrics are not served: {run.metrics_host}:{run.metrics_port} cannot be listened at "
            f"({error.strerror or error}). Choose another RunConfig(metrics_port=...); the run goes on without."
        )
        return observer
    return MeasuredRun(figures, observer)
