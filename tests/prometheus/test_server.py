"""The server of figures: what it serves to whom, and a real run that is scraped while it trains."""

from __future__ import annotations

import http.client
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from tests.prometheus.test_exposition import FAMILY, parse

from powertrain import RunConfig, ScalingConfig, report
from powertrain.driver.prometheus.exposition import OPEN_METRICS, TEXT
from powertrain.driver.prometheus.server import host_of, is_loopback, serving
from powertrain.torch import TorchTrainer

_DEADLINE_S = 60.0


def fetch(port: int, path: str = "/metrics", **headers: str) -> tuple[int, str, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_DEADLINE_S)
    try:
        connection.request("GET", path, headers=headers)
        reply = connection.getresponse()
        return reply.status, reply.headers.get("Content-Type", ""), reply.read().decode()
    finally:
        connection.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_both_formats_are_served_and_nothing_else() -> None:
    with serving("127.0.0.1", 0, lambda: [FAMILY]) as port:
        status, kind, text = fetch(port)
        assert (status, kind, parse(text)) == (200, TEXT, [("powertrain_rows_total", {"run": "a"}, 3.0)])
        assert fetch(port, Accept=OPEN_METRICS)[1:] == (OPEN_METRICS, text.replace("rows_total R", "rows R").replace(
            "TYPE powertrain_rows_total", "TYPE powertrain_rows").replace('"it"', '\\"it\\"') + "# EOF\n")  # fmt: skip
        assert fetch(port, "/")[0] == fetch(port, "/metrics/x")[0] == 404
        assert fetch(port, "/metrics?x=1")[0] == 200
    with pytest.raises(ConnectionRefusedError):
        fetch(port)


def test_a_page_of_another_site_cannot_read_a_private_server() -> None:
    with serving("127.0.0.1", 0, lambda: [FAMILY]) as port:
        assert fetch(port, Host="evil.example")[0] == 403
        assert fetch(port, Host=f"localhost:{port}")[0] == fetch(port, Host="[::1]")[0] == 200
    with serving("0.0.0.0", 0, lambda: [FAMILY]) as port:
        assert fetch(port, Host="node-3:9400")[0] == 200


def test_a_client_that_sends_nothing_or_leaves_does_not_end_the_server() -> None:
    with serving("127.0.0.1", 0, lambda: [FAMILY]) as port:
        socket.create_connection(("127.0.0.1", port)).close()
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(b"nonsense\r\n\r\n")
            assert connection.recv(100)
        assert fetch(port)[0] == 200


@pytest.mark.parametrize(
    ("header", "host", "private"),
    [
        ("localhost:80", "localhost", True),
        ("127.0.0.1", "127.0.0.1", True),
        ("[::1]:80", "::1", True),
        ("example.org:80", "example.org", False),
        ("", "", False),
        ("10.0.0.1:1", "10.0.0.1", False),
    ],
)
def test_hosts_of_headers(header: str, host: str, private: bool) -> None:
    assert host_of(header) == host
    assert is_loopback(host) == private


def train_and_scrape(config: dict[str, Any]) -> None:
    """Report two rows, and wait until the server of the run tells the second."""
    for row in (1, 2):
        report({"loss": 1.0 / row, 'odd "name"\n': 7})
    deadline = time.monotonic() + _DEADLINE_S
    while True:
        samples = parse(fetch(config["port"])[2])
        found = {(name, labels.get("name", "")): value for name, labels, value in samples}
        if found.get(("powertrain_row", "")) == 2:
            break
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    assert found["powertrain_metric", "loss"] == 0.5
    assert found["powertrain_metric", 'odd "name"\n'] == 7
    assert found["powertrain_workers", ""] == 1


def fit(tmp_path: Path, port: int, loop: Any) -> Any:
    return TorchTrainer(
        loop,
        train_loop_config={"port": port},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="r", storage_path=str(tmp_path), metrics_port=port),
    ).fit()


def test_a_run_is_scraped_while_it_trains_and_the_port_is_free_afterwards(tmp_path: Path) -> None:
    port = free_port()
    assert fit(tmp_path, port, train_and_scrape).error is None
    with pytest.raises(ConnectionRefusedError):
        fetch(port)


def test_a_port_in_use_is_one_warning_and_the_run_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = fit(tmp_path, taken.getsockname()[1], lambda config: report({"loss": 1.0}))
    assert result.metrics["loss"] == 1.0
    shown = "".join(capfd.readouterr())
    assert shown.count("Metrics are not served") == 1
    assert os.strerror(98) in shown
