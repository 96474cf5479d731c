"""Every public name of Ray Train 2.60 has a counterpart here, or is listed with the reason why it has none."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import powertrain
import powertrain.huggingface.transformers
import powertrain.jax
import powertrain.lightgbm
import powertrain.lightning
import powertrain.tensorflow
import powertrain.torch
import powertrain.xgboost

GUIDE = Path(__file__).parents[1] / "docs" / "migration.md"
#: Modules of Ray's, and where their names are here.
MODULES = {
    "ray.train": powertrain,
    "ray.train.lightning": powertrain.lightning,
    "ray.train.torch": powertrain.torch,
    "ray.train.huggingface.transformers": powertrain.huggingface.transformers,
    "ray.train.xgboost": powertrain.xgboost,
    "ray.train.lightgbm": powertrain.lightgbm,
    "ray.train.v2.jax": powertrain.jax,
    "ray.train.v2.api.callback": powertrain,
    "ray.train.v2.api.config": powertrain,
    "ray.train.v2.api.context": powertrain,
    "ray.train.v2.api.data_parallel_trainer": powertrain,
    "ray.train.v2.api.exceptions": powertrain,
    "ray.train.v2.api.preemption": powertrain,
    "ray.train.v2.api.report_config": powertrain,
    "ray.train.v2.api.reported_checkpoint": powertrain,
    "ray.train.v2.api.result": powertrain,
    "ray.train.v2.api.train_fn_utils": powertrain,
    "ray.train.v2.api.validation_config": powertrain,
    "ray.train.v2.torch.torchft_config": powertrain.torch,
}
_TUNE = "converts to a placement group of Ray Tune, which a run here never is"
_TELEMETRY = "describes a backend to the telemetry of Ray, which is not collected here"
_BACKENDS = "a hook of the frameworks that Ray itself has; a backend here has on_start and on_training_start"
_PREPROCESSORS = "preprocessors are kept in the metadata, by update_metadata() and serialize()"
_CONTEXTS = "the base class or a variant of TrainContext, which users never name"
#: What has no counterpart, and why: "name", "Class.member" or "function(parameter)".
LEFT_OUT = {
    "ScalingConfig.as_placement_group_factory": _TUNE,
    "ScalingConfig.from_placement_group_factory": _TUNE,
    "BackendConfig.framework": _TELEMETRY,
    "BackendConfig.to_dict": _TELEMETRY,
    "BackendConfig.train_func_context": _BACKENDS,
    **{
        f"{framework}Config.{member}": reason
        for framework in ("Torch", "XGBoost", "LightGBM", "Jax")
        for member, reason in (
            ("framework", _TELEMETRY),
            ("to_dict", _TELEMETRY),
            ("train_func_context", _BACKENDS),
        )
    },
    "RunConfig.storage_context": "the storage of a run is get_context().get_storage() and Result.filesystem",
    "RayTrainCallback": "the empty base class of Ray's internal callbacks; users derive from UserCallback",
    "TorchCheckpoint.set_preprocessor": _PREPROCESSORS,
    "XGBoostCheckpoint.set_preprocessor": _PREPROCESSORS,
    "LightGBMCheckpoint.set_preprocessor": _PREPROCESSORS,
    "DistributedTrainContext": _CONTEXTS,
    "LocalTrainContext": _CONTEXTS,
    "TorchftConfig": "refused by name: recovery here is by checkpoint and restart, not inside a step",
}
#: Gives by module the names of ``__all__``, or of what is defined there, each with members and parameters.
COLLECT = """
import inspect, json, sys
from importlib import import_module

def members(kind):
    return sorted(name for name in dir(kind) if not name.startswith("_") and not hasattr(object, name))

def parameters(value):
    try:
        found = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in found if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]

def described(value):
    if inspect.isclass(value):
        exceptions = issubclass(value, BaseException)
        return {"members": [m for m in members(value) if not (exceptions and hasattr(Exception, m))],
                "parameters": parameters(value)}
    return {"members": [], "parameters": parameters(value) if callable(value) else []}

found = {}
for name in json.loads(sys.argv[1]):
    module = import_module(name)
    names = getattr(module, "__all__", None) or [
        n for n, v in vars(module).items()
        if not n.startswith("_") and callable(v) and getattr(v, "__module__", "") in (name, "ray.train")
        and name == sys.modules[name].__name__ and (inspect.isclass(v) or inspect.isfunction(v))
    ]
    found[name] = {n: described(getattr(module, n)) for n in names}
print("\\n" + json.dumps(found))
"""


@pytest.fixture(scope="module")
def of_ray() -> dict[str, dict[str, dict[str, list[str]]]]:
    """The public names of Ray Train, by module. In a process of its own: importing Ray changes the one it is in."""
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    done = subprocess.run(
        [sys.executable, "-c", COLLECT, json.dumps(list(MODULES))],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, dict[str, list[str]]]] = json.loads(done.stdout.splitlines()[-1])
    return found


def ours(module: str, name: str) -> Any:
    """What a name of Ray's is here; None where there is nothing."""
    try:
        return getattr(MODULES[module], name)
    except (AttributeError, ImportError):
        return None


def missing_members(kind: Any, members: list[str]) -> list[str]:
    return [member for member in members if not hasattr(kind, member) and member not in _fields(kind)]


def _fields(kind: Any) -> set[str]:
    """Attributes that objects have although the class does not: fields, and what ``__init__`` sets."""
    source = inspect.getsource(kind) if inspect.isclass(kind) else ""
    return {*getattr(kind, "__annotations__", {}), *(w.partition(" ")[0] for w in source.split("self.")[1:])}


def missing_parameters(value: Any, parameters: list[str]) -> list[str]:
    try:
        found = inspect.signature(value).parameters
    except (TypeError, ValueError):
        return []
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    known = {*found, *(field.name for field in fields)}
    return [name for name in parameters if name not in known]


def differences(of_ray: dict[str, dict[str, dict[str, list[str]]]]) -> set[str]:
    """What Ray has and is not here."""
    found: set[str] = set()
    for module, names in of_ray.items():
        for name, described in names.items():
            value = ours(module, name)
            if value is None:
                found.add(name)
                continue
            found |= {f"{name}.{member}" for member in missing_members(value, described["members"])}
            found |= {f"{name}({one})" for one in missing_parameters(value, described["parameters"])}
    return found


@pytest.mark.timeout(600)
def test_every_public_name_of_ray_train_is_here_or_is_left_out_for_a_reason(of_ray: Any) -> None:
    assert sum(map(len, of_ray.values())) > 60, "the names of Ray Train were not found"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # Accelerate sets it when it is imported
        found = differences(of_ray)
    assert found == LEFT_OUT.keys()
    assert all(LEFT_OUT.values())


def test_what_is_refused_by_name_says_what_to_use_instead() -> None:
    with pytest.raises(ImportError, match=r"torchft is not supported.*TorchConfig"):
        import_module("powertrain.torch").TorchftConfig  # noqa: B018


def test_the_guide_lists_every_name_that_is_left_out_with_the_same_reason() -> None:
    _, _, rest = GUIDE.read_text("utf-8").partition("\n## Missing names\n")
    rows = re.findall(r"^\| (`.*`) \| (.*) \|$", rest.partition("\n## ")[0], re.MULTILINE)
    assert {name: reason for names, reason in rows for name in re.findall(r"`(.+?)`", names)} == LEFT_OUT
