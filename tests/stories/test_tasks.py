"""``powertrain.remote`` and ``powertrain.get``: one function in one process.

What a task gives, how it fails and how it is waited for is the same on a cluster, where tasks are Ray's own; what only
those have is told in ``tests/test_tasks_on_ray.py``.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import powertrain
from powertrain import tasks
from powertrain.engine import resources
from powertrain.errors import ConfigError, ResourceError, TaskError


@pytest.mark.smoke
def test_a_task_runs_in_a_process_of_its_own_and_gives_its_value(place: str) -> None:
    @powertrain.remote
    def add(a: int, b: int = 1) -> tuple[int, int]:
        return a + b, os.getpid()

    first, second = powertrain.get([add.remote(1, b=2), add.remote(5)])
    assert (first[0], second[0]) == (3, 6)
    assert os.getpid() not in (first[1], second[1])
    assert first[1] != second[1] or place != "here", "Ray's processes run one task after another"


@pytest.mark.usefixtures("place")
def test_an_error_in_a_task_is_reported_with_its_traceback_and_caught_by_its_class() -> None:
    @powertrain.remote
    def divide(a: int) -> float:
        return a / 0

    with pytest.raises(TaskError, match="ZeroDivisionError") as error:
        powertrain.get(divide.remote(1))
    assert "return a / 0" in str(error.value)
    assert isinstance(error.value, ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        powertrain.get(divide.remote(divide.remote(1)))


def test_options_of_a_cluster_do_not_keep_a_task_from_running_here(
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = {"max_retries": 2, "memory": 2**20, "runtime_env": {"env_vars": {"FLAVOUR": "plain"}}}
    task = powertrain.remote(**options)(os.getenv)
    assert powertrain.get(task.remote("FLAVOUR")) == "plain"
    assert "without effect on one machine: max_retries" in caplog.text
    with pytest.raises(ConfigError, match=r"no option 'nun_gpus'. Did you mean 'num_gpus'\?"):
        powertrain.remote(nun_gpus=1)(os.getenv)


def test_the_death_of_a_task_is_decoded() -> None:
    @powertrain.remote
    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(TaskError, match="die was killed by SIGKILL"):
        powertrain.get(die.remote())


def test_a_gpu_asked_for_on_a_machine_without_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "_gpu_names", tuple)

    task = powertrain.remote(num_gpus=1)(os.getpid)

    with pytest.raises(ResourceError, match="no NVIDIA GPU"):
        task.remote()


def test_a_task_that_takes_too_long_is_a_timeout(tmp_path: Any, place: str) -> None:
    fifo = tmp_path / "go"
    os.mkfifo(fifo)

    @powertrain.remote
    def wait_for(path: str) -> str:
        with open(path) as file:
            return file.read()

    task = wait_for.remote(str(fifo))
    with pytest.raises(TimeoutError, match="wait_for" if place == "here" else "on the Ray cluster"):
        powertrain.get(task, timeout=0.1)
    fifo.write_text("gone on")
    assert powertrain.get(task) == "gone on"


def test_a_task_that_had_to_wait_starts_in_the_directory_in_which_it_was_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "go")
    powertrain.init("local", resources={"seat": 1})
    try:
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path)
            first = powertrain.remote(resources={"seat": 1})(Path.read_text).remote(tmp_path / "go")
            second = powertrain.remote(resources={"seat": 1})(os.getcwd).remote()
        (tmp_path / "go").write_text("gone on")
        assert powertrain.get([first, second]) == ["gone on", str(tmp_path)]
    finally:
        powertrain.shutdown()


def test_init_takes_what_rays_takes_and_nothing_else() -> None:
    with pytest.raises(ConfigError, match="no option 'nonsense'"):
        powertrain.init(nonsense=3)
    assert not powertrain.is_initialized()
    try:
        powertrain.init(num_cpus=2, include_dashboard=False, logging_level="error", _temp_dir="/tmp")
        assert powertrain.is_initialized()
    finally:
        powertrain.shutdown()


@pytest.mark.parametrize("amount", [float("inf"), float("nan"), -1, "2", True, None])
def test_init_refuses_resources_that_no_other_process_could_know(amount: Any) -> None:
    with pytest.raises(ConfigError, match=r"init\(resources=\{'license': .*\}\) is not an amount"):
        powertrain.init("local", resources={"license": amount})
    with pytest.raises(ConfigError, match="the GPUs of this machine are counted by themselves"):
        powertrain.init("local", resources={"GPU": 2})
    assert not powertrain.is_initialized()


def test_init_knows_every_option_of_the_ray_that_is_installed() -> None:
    ray = importlib.util.find_spec("ray")  # importing it would change this process
    if ray is None or not ray.submodule_search_locations:
        pytest.skip("Ray is not installed")
    source = Path(ray.submodule_search_locations[0], "_private", "worker.py").read_text()
    (init,) = (n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == "init")
    names = {argument.arg for argument in init.args.kwonlyargs}
    assert names - tasks._OPTIONS_OF_A_CLUSTER == {"resources", "ignore_reinit_error"}
