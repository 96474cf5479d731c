"""``powertrain.init``, ``remote`` and ``get`` on a Ray cluster: tasks are Ray's own, errors and states are ours."""

from __future__ import annotations

import functools
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from tests.ray_nodes import RayNodes

import powertrain
from powertrain import tasks
from powertrain.calls import options
from powertrain.errors import ConfigError, EngineError, TaskError

ray = pytest.importorskip("ray")


@pytest.fixture
def environment() -> Iterator[pytest.MonkeyPatch]:
    """Variables of one test, undone before it is looked at what the test has left: Ray leaves two of them changed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONBREAKPOINT", "")
        patch.setenv("RAY_CLIENT_MODE", "0")
        yield patch
        powertrain.shutdown()


@pytest.fixture(scope="class")
def _connected(ray_nodes: RayNodes) -> Iterator[None]:
    powertrain.init(address=ray_nodes.address)
    yield
    powertrain.shutdown()
    assert not ray.is_initialized(), "init connected this process, so shutdown disconnects it"


@pytest.mark.usefixtures("_connected")
class TestConnected:
    def test_tasks_are_rays_and_give_their_values_in_order(self) -> None:
        @powertrain.remote
        def add(a: int, b: int = 1) -> tuple[int, int]:
            return a + b, os.getpid()

        references = [add.remote(1, b=2), add.remote(5)]
        assert all(isinstance(reference, ray.ObjectRef) for reference in references)
        values = powertrain.get(references)
        assert [value for value, _ in values] == [3, 6]
        assert os.getpid() not in {pid for _, pid in values}
        assert powertrain.get(references[1])[0] == 6
        assert powertrain.get([]) == []

    def test_a_reference_is_an_argument_like_any_other(self) -> None:
        @powertrain.remote
        def double(a: int) -> int:
            return 2 * a

        assert powertrain.get(double.remote(double.remote(ray.put(3)))) == 12

    def test_a_task_may_start_others(self) -> None:
        @powertrain.remote(num_cpus=0.5)
        def square(a: int) -> int:
            return a * a

        powertrain.get(square.remote(1))  # it has been used here, and travels none the less

        @powertrain.remote(num_cpus=0.5)
        def sum_of_squares(count: int) -> int:
            return sum(powertrain.get([square.remote(a) for a in range(count)]))

        assert powertrain.get(sum_of_squares.remote(4)) == 14
        assert isinstance(pickle.loads(cloudpickle.dumps(square)), tasks.RemoteFunction)

    def test_options_reach_ray_and_others_are_put_in_place_of_some(self) -> None:
        @powertrain.remote(num_cpus=2, resources={"custom": 1}, max_retries=0)
        def assigned() -> tuple[str, dict[str, float]]:
            context = ray.get_runtime_context()
            return context.get_task_name(), context.get_assigned_resources()

        other = assigned.options(num_cpus=1, name="other", num_gpus=None)
        assert powertrain.get(assigned.remote())[1] == {"CPU": 2.0, "custom": 1.0}
        assert powertrain.get(other.remote()) == ("other", {"CPU": 1.0, "custom": 1.0})

    def test_an_error_in_a_task_is_reported_with_its_traceback(self) -> None:
        @powertrain.remote
        def divide(a: int) -> float:
            return a / 0

        with pytest.raises(TaskError, match="ZeroDivisionError") as error:
            powertrain.get([divide.remote(1)])
        assert "return a / 0" in str(error.value)
        assert "divide" in str(error.value)
        assert isinstance(error.value.__cause__, ZeroDivisionError)

    def test_the_death_of_a_task_is_an_error(self) -> None:
        @powertrain.remote(max_retries=0)
        def die() -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        with pytest.raises(TaskError, match="did not end well"):
            powertrain.get(die.remote())

    def test_a_timeout_is_for_all_of_a_list(self, tmp_path: Path) -> None:
        fifo = tmp_path / "go"
        os.mkfifo(fifo)

        @powertrain.remote
        def read(path: str) -> str:
            return Path(path).read_text()

        task = read.remote(str(fifo))
        with pytest.raises(TimeoutError, match=r"within 0\.1 s"):
            powertrain.get([task], timeout=0.1)
        fifo.write_text("gone on")
        assert powertrain.get(task, timeout=60) == "gone on"

    def test_references_of_ray_and_of_this_machine_may_be_mixed(self) -> None:
        here = tasks.ObjectRef(cloudpickle.dumps((os.getpid, (), {})), options.shape_of({}), "here")
        pid, value = powertrain.get([here, ray.put("there")], timeout=60)
        assert pid != os.getpid()
        assert value == "there"

    def test_what_is_no_reference_is_refused(self) -> None:
        with pytest.raises(TypeError, match="given a int"):
            powertrain.get([ray.put(1), 2])

    def test_a_second_init_is_refused_unless_it_may_be(self, ray_nodes: RayNodes) -> None:
        assert powertrain.is_initialized()
        with pytest.raises(ConfigError, match="called twice"):
            powertrain.init()
        powertrain.init(address=ray_nodes.address, ignore_reinit_error=True)
        assert ray.is_initialized()

    def test_the_address_of_another_cluster_is_refused_by_init_and_by_a_trainer(
        self, ray_nodes: RayNodes
    ) -> None:
        refused = f"'10.255.255.1:1' was given.*connected to the one at '{ray_nodes.address}' already"
        with pytest.raises(EngineError, match=refused):
            powertrain.init(address="10.255.255.1:1", ignore_reinit_error=True)
        elsewhere = powertrain.ScalingConfig(engine="ray", engine_options={"address": "10.255.255.1:1"})
        with pytest.raises(EngineError, match=refused):
            powertrain.DataParallelTrainer(print, scaling_config=elsewhere)


def test_the_known_options_of_tasks_and_actors_are_rays() -> None:
    from ray._common.ray_option_utils import actor_options, task_options

    assert set(task_options) == options.OF_A_TASK
    assert set(actor_options) == options.OF_AN_ACTOR


def test_get_without_a_cluster_refuses_what_is_no_reference() -> None:
    with pytest.raises(TypeError, match="given a str"):
        powertrain.get("value")


def test_no_cluster_to_be_found_is_one_error(environment: pytest.MonkeyPatch) -> None:
    environment.setattr(ray._private.services, "_cached_find_gcs_addresses", functools.cache(set))
    environment.setattr(ray._private.services, "find_bootstrap_address", lambda _: None)
    with pytest.raises(EngineError, match=r"cannot connect to the Ray cluster at 'auto'.*ray start --head"):
        powertrain.init(address="auto")
    assert not powertrain.is_initialized()


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize(
    "given", [{"resources": {"seat": 1}}, {"num_cpus": 2}, {"labels": {"a": "b"}}], ids=str
)
def test_what_describes_a_machine_is_refused_beside_an_address(given: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=f"init.. was given {next(iter(given))} together with a Ray cluster"
    ):
        powertrain.init(address="10.0.0.1:6379", **given)
    assert not powertrain.is_initialized()


def test_breakpoint_stays_what_it_was_for_this_process(
    ray_nodes: RayNodes, environment: pytest.MonkeyPatch
) -> None:
    """Ray would have its own debugger there, which knows nothing of the processes that we start."""
    environment.delenv("PYTHONBREAKPOINT", raising=False)
    powertrain.init(address=ray_nodes.address)
    powertrain.shutdown()
    assert "PYTHONBREAKPOINT" not in os.environ


@pytest.mark.usefixtures("environment")
def test_a_connection_that_other_code_made_stays(ray_nodes: RayNodes) -> None:
    ray.init(address=ray_nodes.address, log_to_driver=False)
    try:
        assert powertrain.is_initialized(), "Ray is, and scripts ask before they call init"
        powertrain.init()
        powertrain.shutdown()
        assert ray.is_initialized()
    finally:
        ray.shutdown()
    assert not powertrain.is_initialized()


def test_the_environment_names_a_cluster_unless_init_says_here(
    ray_nodes: RayNodes, environment: pytest.MonkeyPatch
) -> None:
    environment.setenv("RAY_ADDRESS", ray_nodes.address)
    assert tasks.is_on_ray()
    powertrain.init(address="local")
    assert not tasks.is_on_ray()
    assert not ray.is_initialized()
    powertrain.shutdown()
    assert tasks.is_on_ray()

    try:
        node = powertrain.get(powertrain.remote(lambda: ray.get_runtime_context().get_node_id()).remote())
        assert node in {found["NodeID"] for found in ray.nodes()}
    finally:
        ray.shutdown()


def test_leaving_a_cluster_keeps_threads_of_ray_data_from_calling_ray(ray_nodes: RayNodes) -> None:
    """Ray's core ends the process when one of its threads calls it after the connection is gone."""
    script = """
import sys, threading
import ray.data
from ray.data._internal.usage import poller
import powertrain

poller.ClusterMetricsPoller.__init__.__defaults__ = (0.001,)
powertrain.init(address=sys.argv[1])
worker = ray._private.worker.global_worker.core_worker
poller.get_poller()._metrics["own"] = worker.get_worker_id
[polling] = [thread for thread in threading.enumerate() if thread.name == "data-usage-metrics-poller"]
powertrain.shutdown()
polling.join(1.0)
assert polling.is_alive()
print("alive")
"""
    done = subprocess.run(
        [sys.executable, "-c", script, ray_nodes.address], capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["alive"]), done.stderr[-2000:]
