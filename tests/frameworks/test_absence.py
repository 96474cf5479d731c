"""A framework is imported only when it is used, and its absence is one sentence with the pip line."""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib.util import find_spec
from types import ModuleType

import pytest

from powertrain import ScalingConfig

FRAMEWORKS = {
    "xgboost": ("xgboost", "XGBoostTrainer"),
    "lightgbm": ("lightgbm", "LightGBMTrainer"),
    "jax": ("jax", "JaxTrainer"),
    "tensorflow": ("tensorflow tf-keras", "TensorflowTrainer"),
}
#: Names that need the framework when they are imported, not only when they are called.
CALLBACKS = {"xgboost": "ReportCallback", "tensorflow": "ReportCheckpointCallback"}


def package(name: str) -> ModuleType:
    return importlib.import_module(f"powertrain.{name}")


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_importing_the_package_and_its_trainer_imports_neither_the_framework_nor_torch(name: str) -> None:
    code = (
        f"import sys, powertrain.{name}; powertrain.{name}.{FRAMEWORKS[name][1]}; "
        f"print({{{name!r}, 'torch'}} & set(sys.modules))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout == "set()\n"


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_trainer_without_its_framework_says_how_to_install_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install, trainer = FRAMEWORKS[name]
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError) as raised:
        getattr(package(name), trainer)(lambda: None, scaling_config=ScalingConfig(num_workers=0))
    assert str(raised.value) == f"{trainer} needs {name}, which cannot be imported: pip install {install}"


@pytest.mark.parametrize("name", CALLBACKS)
def test_a_callback_without_its_framework_says_how_to_install_it(name: str) -> None:
    code = f"import sys; sys.modules[{name!r}] = None; from powertrain.{name} import {CALLBACKS[name]}"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    last = answer.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: {CALLBACKS[name]} needs {name}, which cannot be imported (")
    assert last.endswith(f": pip install {FRAMEWORKS[name][0]}")


def test_several_workers_of_tensorflow_without_keras_2_say_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from powertrain.tensorflow import backend

    monkeypatch.delenv("TF_USE_LEGACY_KERAS", raising=False)
    monkeypatch.setattr(backend, "find_spec", lambda _: None)
    for workers, rank in ((["a:1"], 0), (["a:1", "b:2"], 1), (["a:1", "b:2"], 0)):
        backend._set_variables(workers, rank)
        backend._leave(1.0)
    [record] = caplog.records
    assert record.getMessage().endswith("does not train on several workers: pip install tf-keras")


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_public_name_can_be_had(name: str) -> None:
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed: make test-frameworks, or pip install {FRAMEWORKS[name][0]}")
    code = (
        f"import powertrain.{name} as found\n"
        "assert all(callable(getattr(found, name)) and name in dir(found) for name in found.__all__)\n"
        "print(hasattr(found, 'prepare_nothing'))"
    )  # in a process of its own: some frameworks set variables of their process
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout == "False\n"


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_their_configs_say_that_no_worker_needs_torch(name: str) -> None:
    configs = [
        getattr(package(name), public) for public in package(name).__all__ if public.endswith("Config")
    ]
    assert [config().uses_torch for config in configs] == [False]
