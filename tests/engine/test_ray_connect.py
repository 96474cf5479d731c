"""Connecting to Ray: which cluster is meant, and one error at once where it cannot be."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.ray_nodes import RayNodes

from powertrain.engine.ray import client
from powertrain.errors import ConfigError, EngineError

ray = pytest.importorskip("ray")


@pytest.fixture
def environment() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        yield patch


@pytest.fixture
def without_ray(environment: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Ray itself is not asked: it would try for minutes."""

    def init(**_: Any) -> None:
        raise AssertionError("Ray was asked")

    environment.setattr(ray, "init", init)
    environment.setattr(ray, "is_initialized", lambda: False)
    environment.setattr(client, "_REPLY_TIMEOUT_S", 0.5)
    return environment


@contextlib.contextmanager
def unused_port() -> Iterator[int]:
    """A port without a listener that no other process can take."""
    with socket.socket() as held:
        held.bind(("", 0))
        yield held.getsockname()[1]


# --------------------------------------------------------------------------- a cluster that was left


@pytest.mark.usefixtures("without_ray")
def test_a_query_joins_no_cluster_that_its_process_has_left() -> None:
    """Ray joins one, or starts one, with whatever it is asked; and an engine may be about to ask when its process
    leaves. The first test of this file: later ones are connected."""
    with client.without_joining():
        with pytest.raises(Exception, match=r"^(?!Ray was asked)."):
            ray.nodes()
        with client.without_joining(), pytest.raises(Exception, match=r"^(?!Ray was asked)."):
            ray.util.placement_group([{"CPU": 1}])
        with pytest.raises(Exception, match=r"^(?!Ray was asked)."):
            ray.put(1)
    with pytest.raises(AssertionError, match="Ray was asked"):
        ray.put(1)


# --------------------------------------------------------------------------- no cluster at the address


@pytest.mark.usefixtures("without_ray")
def test_an_address_without_an_answer_is_one_error() -> None:
    with (
        unused_port() as port,
        pytest.raises(
            EngineError, match=rf"at 'localhost:{port}': no process answers there \(Connection refused\)\. "
        ),
    ):
        client.connect(f"localhost:{port}")


@pytest.mark.usefixtures("without_ray")
@pytest.mark.parametrize("address", ["no-such-host.invalid:6379", "localhost:99999"])
def test_an_address_that_cannot_be_is_one_error(address: str) -> None:
    with pytest.raises(
        EngineError, match=f"cannot connect to the Ray cluster at '{address}'.*ray start --head"
    ):
        client.connect(address)


def test_an_address_of_the_environment_is_named_as_such(without_ray: pytest.MonkeyPatch) -> None:
    with unused_port() as port:
        without_ray.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
        for address in (None, "auto"):
            with pytest.raises(
                EngineError, match=rf"RAY_ADDRESS='127.0.0.1:{port}': no process answers there"
            ):
                client.connect(address)


def test_a_head_that_is_just_starting_is_waited_for(without_ray: pytest.MonkeyPatch) -> None:
    without_ray.setattr(client, "_REPLY_TIMEOUT_S", 30.0)
    with socket.socket() as head:
        head.bind(("", 0))
        address = f"localhost:{head.getsockname()[1]}"

        def listen_at_the_second_look(seconds: float) -> None:
            head.listen()

        without_ray.setattr(time, "sleep", listen_at_the_second_look)
        with pytest.raises(AssertionError, match="Ray was asked"):
            client.connect(address)


def test_what_ray_says_of_an_address_is_a_sentence(environment: pytest.MonkeyPatch) -> None:
    environment.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(EngineError, match=r"Invalid address format: nonsense\. Check the address"):
        client.connect("nonsense")


# --------------------------------------------------------------------------- Ray's client


def test_an_address_for_rays_client_is_refused_wherever_it_comes_from(
    without_ray: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(
        EngineError, match=r"^'ray://head:10001' is an address for Ray's client.*ray job submit"
    ):
        client.connect("ray://head:10001")
    without_ray.setenv("RAY_ADDRESS", "ray://head:10001")
    for address in (None, "auto"):
        with pytest.raises(
            EngineError, match=r"^RAY_ADDRESS='ray://head:10001' is an address for Ray's client"
        ):
            client.connect(address)
    without_ray.setenv("RAY_ADDRESS", "http://head:8265")
    with pytest.raises(
        EngineError, match=r"^RAY_ADDRESS='http://head:8265' is the address of Ray's dashboard"
    ):
        client.connect()


def test_a_process_that_is_connected_through_rays_client_is_refused(environment: pytest.MonkeyPatch) -> None:
    environment.setattr(ray.util.client.ray, "is_connected", lambda: True)
    environment.setattr(ray, "is_initialized", lambda: True)
    with pytest.raises(
        EngineError, match="This process is connected through Ray's client, and so is not part"
    ):
        client.connect()


# --------------------------------------------------------------------------- one process, one cluster


@pytest.mark.usefixtures("ray_cluster", "environment")
class TestConnected:
    def test_every_address_of_the_same_cluster_is_accepted(self, ray_cluster: RayNodes) -> None:
        port = ray_cluster.address.rpartition(":")[2]
        hosts = ["localhost", "127.0.0.1", socket.gethostname()]
        for address in (None, "auto", "local", ray_cluster.address, *(f"{host}:{port}" for host in hosts)):
            client.connect(address)

    @pytest.mark.parametrize("address", ["nonsense", "localhost:1", "no-such-host.invalid:{port}"])
    def test_that_of_another_is_a_contradiction(self, ray_cluster: RayNodes, address: str) -> None:
        address = address.format(port=ray_cluster.address.rpartition(":")[2])
        with pytest.raises(EngineError, match=f"'{address}' was given.*'{ray_cluster.address}' already"):
            client.connect(address)

    def test_the_environment_contradicts_nothing(self, environment: pytest.MonkeyPatch) -> None:
        environment.setenv("RAY_ADDRESS", "ray://elsewhere:10001")
        client.connect()


# --------------------------------------------------------------------------- what is said and checked


def test_a_cluster_that_was_started_for_the_script_is_reported() -> None:
    code = (
        "from powertrain.engine.ray.client import connect\n"
        "connect(num_cpus=1, include_dashboard=False, _temp_dir=__import__('sys').argv[1])\n"
    )
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as directory:
        variables = {**os.environ, "RAY_TMPDIR": directory}
        variables.pop("RAY_ADDRESS", None)
        script = subprocess.run(
            [sys.executable, "-c", code, directory],
            env=variables,
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert script.returncode == 0, script.stderr
    assert "No Ray cluster was found: one was started on this machine for this script." in script.stderr


def test_a_field_of_a_runtime_env_that_ray_does_not_have_is_refused(without_ray: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"^init\(runtime_env=...\) has the field 'envvars'.*mean 'env_vars'\?"
    ):
        client.connect(runtime_env={"envvars": {"A": "b"}})
    without_ray.setenv("RAY_RUNTIME_ENV_PLUGINS", '[{"class": "a.Plugin"}]')
    with pytest.raises(AssertionError, match="Ray was asked"):
        client.connect(runtime_env={"field_of_the_plugin": 1})
