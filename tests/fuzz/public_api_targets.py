"""Every public callable of the loop and of the driver, as something that can be called with hostile arguments."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.fuzz.public_api_values import HostileError

import powertrain
from powertrain import config as configs
from powertrain.calls import options as call_options
from powertrain.config import checks
from powertrain.torch import (
    TorchTrainer,
    accelerate,
    backward,
    enable_reproducibility,
    get_device,
    get_devices,
    prepare_data_loader,
    prepare_model,
    prepare_optimizer,
)
from powertrain.trainer import DataParallelTrainer


@dataclass(frozen=True)
class Target:
    """One callable, its parameters, and good values for some of them."""

    name: str
    call: Callable[..., Any]
    parameters: tuple[str, ...] = ()
    #: Made anew for each call; a hostile value replaces the good one of its parameter.
    good: Callable[[], Mapping[str, Any]] = dict
    #: Errors beside PowertrainError that its documentation promises.
    allowed: tuple[type[BaseException], ...] = ()
    #: Values (by name) that are no fault: they ask for something that takes long, such as another machine.
    spared: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def loop() -> None:
    """Train nothing."""


def loop_with_config(config: dict[str, Any]) -> None:
    """Train nothing."""


INLINE = powertrain.ScalingConfig(num_workers=0)
STRINGS = (
    "''", "' '", "text", "digits", "relative path", "huge text", "NUL", "lone surrogate", "escape", "braces", "np.str_",
)  # fmt: skip


def run_config(**options: Any) -> powertrain.RunConfig:
    return powertrain.RunConfig(
        **{"storage_path": os.path.join(os.getcwd(), "runs"), "name": "fuzz", **options}
    )


def directory() -> str:
    """A directory with a file, to be reported as a checkpoint."""
    made = tempfile.mkdtemp(dir=os.getcwd())
    with open(os.path.join(made, "state"), "w") as file:
        file.write("state")
    return made


def checkpoint() -> powertrain.Checkpoint:
    return powertrain.Checkpoint(directory())


# --------------------------------------------------------------------------- the driver

_CONFIGS = [
    getattr(configs, name)
    for name in configs.__all__
    if isinstance(getattr(configs, name), type)
    and dataclasses.is_dataclass(getattr(configs, name))
    and name != "Config"
] + [powertrain.TraceConfig]


def _config_target(cls: Any) -> Target:
    names = (*(field.name for field in dataclasses.fields(cls)), "no_such_field")
    good = (lambda: {"fn": loop_with_config}) if "fn" in names else dict
    return Target(f"{cls.__name__}", cls, names, good)


def _trainer(cls: Any, backend: str) -> Target:
    parameters = (
        "train_loop_per_worker", "train_loop_config", backend, "scaling_config", "run_config", "datasets",
        "dataset_config", "metadata", "resume_from_checkpoint", "validation_config", "no_such_argument",
    )  # fmt: skip

    def good() -> dict[str, Any]:
        return {"train_loop_per_worker": loop, "scaling_config": INLINE, "run_config": run_config()}

    return Target(cls.__name__, cls, parameters, good)


def _fit(**arguments: Any) -> Any:
    return DataParallelTrainer(loop_with_config, scaling_config=INLINE, **arguments).fit()


def _fit_named(**options: Any) -> Any:
    return DataParallelTrainer(loop, scaling_config=INLINE, run_config=run_config(**options)).fit()


_result: list[Any] = []
#: A loader takes any sequence, although its annotation says Dataset.
_ROWS: Any = [1, 2, 3, 4]


def result() -> Any:
    """The result of a small run, made once in a process."""
    if not _result:

        def small() -> None:
            powertrain.report({"loss": 1.0}, checkpoint())

        _result.append(
            DataParallelTrainer(small, scaling_config=INLINE, run_config=run_config(name="small")).fit()
        )
    return _result[0]


def _call_init(**arguments: Any) -> None:
    powertrain.shutdown()
    try:
        powertrain.init(**arguments)
    finally:
        powertrain.shutdown()


def _options_of_a_task(**options: Any) -> Any:
    return call_options.of_a_task(options, "loop")


def _make_remote(**options: Any) -> Any:
    return powertrain.remote(**options)(loop)


def _on_checkpoint(method: str) -> Callable[..., Any]:
    def call(**arguments: Any) -> Any:
        return getattr(checkpoint(), method)(**arguments)

    return call


DRIVER: list[Target] = [
    *map(_config_target, _CONFIGS),
    Target("config.replace", checks.replace, ("config", "name"), lambda: {"config": run_config()}),
    _trainer(DataParallelTrainer, "backend_config"),
    _trainer(TorchTrainer, "torch_config"),
    Target(
        "fit",
        _fit,
        ("train_loop_config", "metadata", "resume_from_checkpoint"),
        lambda: {"run_config": run_config()},
    ),
    Target(
        "fit(RunConfig)",
        _fit_named,
        (
            "name",
            "storage_path",
            "stop",
            "callbacks",
            "log_level",
            "verbose",
            "checkpoint_config",
            "failure_config",
        ),
    ),
    Target(
        "restore",
        DataParallelTrainer.restore,
        ("path", "train_loop_per_worker", "storage_filesystem", "run_config"),
    ),
    Target("can_restore", DataParallelTrainer.can_restore, ("path", "storage_filesystem")),
    Target("Checkpoint", powertrain.Checkpoint, ("path", "filesystem")),
    Target("Checkpoint.from_directory", powertrain.Checkpoint.from_directory, ("path",)),
    Target("Checkpoint.from_dict", powertrain.Checkpoint.from_dict, ("data",)),
    Target("Checkpoint.to_directory", _on_checkpoint("to_directory"), ("path",), allowed=(OSError,)),
    Target("Checkpoint.set_metadata", _on_checkpoint("set_metadata"), ("metadata",)),
    Target("Checkpoint.update_metadata", _on_checkpoint("update_metadata"), ("metadata",)),
    # Python asks the other value too, whose own error is not ours to hide.
    Target("Checkpoint == other", lambda other: checkpoint() == other, ("other",), allowed=(HostileError,)),
    Target("Result.from_path", powertrain.Result.from_path, ("path", "storage_filesystem")),
    Target("Result.get_best_checkpoint", lambda **a: result().get_best_checkpoint(**a), ("metric", "mode")),
    Target("Result.open_return_value", lambda **a: result().open_return_value(**a), ("trust",)),
    Target(
        "init",
        _call_init,
        ("address", "resources", "ignore_reinit_error", "num_cpus", "no_such_option"),
        spared={"address": STRINGS},
    ),
    Target("remote", _make_remote, ("num_cpus", "num_gpus", "resources", "memory", "no_such_option")),
    Target(
        "remote().remote()",
        _options_of_a_task,
        ("num_cpus", "num_gpus", "resources", "runtime_env", "max_retries"),
    ),
    Target("remote(function)", lambda function: powertrain.remote(function), ("function",)),
    Target("get", powertrain.get, ("refs", "timeout"), allowed=(TimeoutError,)),
    Target("is_initialized", powertrain.is_initialized),
    Target("load_state outside", powertrain.load_state, ("checkpoint", "model")),
    Target("report outside", powertrain.report, ("metrics",)),
]

# --------------------------------------------------------------------------- the loop


def _context_method(name: str, *parameters: str, **good: Any) -> Target:
    def call(**arguments: Any) -> Any:
        return getattr(powertrain.get_context(), name)(**arguments)

    return Target(f"context.{name}", call, parameters, lambda: good)


def _iterate_plan(**arguments: Any) -> Any:
    plan = powertrain.get_context().batch_plan(**arguments)
    return next(iter(plan))


_GETTERS = (
    "get_world_rank", "get_world_size", "get_local_rank", "get_local_world_size", "get_node_rank",
    "get_experiment_name", "get_trial_name", "get_trial_id", "get_trial_resources", "get_trial_dir", "get_storage",
    "get_metadata",
    "get_attempt", "resize_pending",
)  # fmt: skip
_REPORT = (
    "metrics", "checkpoint", "checkpoint_dir_name", "checkpoint_upload_mode", "delete_local_checkpoint_after_upload",
    "checkpoint_upload_fn", "validation", "barrier", "solo", "no_such_argument",
)  # fmt: skip


def _model() -> Any:
    """The same on every rank, as a model is that all of them save."""
    model = torch.nn.Linear(2, 2)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.5)
    return model


def _saved() -> Any:
    return powertrain.save_state(model=_model())


LOOP: list[Target] = [
    Target("report", powertrain.report, _REPORT, lambda: {"metrics": {"loss": 1.0}}),
    Target(
        "report with checkpoint",
        powertrain.report,
        _REPORT,
        lambda: {"metrics": {"loss": 1.0}, "checkpoint": checkpoint(), "checkpoint_upload_mode": "SYNC"},
    ),
    Target("report metrics", powertrain.report, ("metrics",)),
    Target("report one metric", lambda loss: powertrain.report({"loss": loss}), ("loss",)),
    Target("report nested metric", lambda x: powertrain.report({"a": {"b": [x]}}), ("x",)),
    Target("checkpoint_dir", powertrain.checkpoint_dir),
    Target(
        "get_all_reported_checkpoints",
        powertrain.get_all_reported_checkpoints,
        ("consistency_mode", "timeout_s"),
    ),
    Target("get_checkpoint", powertrain.get_checkpoint),
    Target("get_preemption_info", powertrain.get_preemption_info),
    Target("should_checkpoint", powertrain.should_checkpoint),
    Target("get_dataset_shard", powertrain.get_dataset_shard, ("dataset_name", "state_dict")),
    Target("register_state", powertrain.register_state, ("model", "other")),
    Target(
        "save_state",
        powertrain.save_state,
        ("model", "epoch", "other"),
        lambda: {"model": _model()},
        allowed=(HostileError,),
    ),
    Target("load_state", powertrain.load_state, ("checkpoint", "model"), lambda: {"checkpoint": _saved()}),
    Target("barrier", powertrain.collective.barrier),
    Target("broadcast_from_rank_zero", powertrain.collective.broadcast_from_rank_zero, ("data",)),
    *map(_context_method, _GETTERS),
    Target(
        "context.batch_plan",
        _iterate_plan,
        ("global_batch_size", "max_micro_batch"),
        lambda: {"global_batch_size": 8},
    ),
    Target("get_device", get_device),
    Target("get_devices", get_devices),
    Target("enable_reproducibility", enable_reproducibility, ("seed",)),
    Target("accelerate", accelerate, ("amp",)),
    Target("backward", backward, ("tensor",), allowed=(RuntimeError,)),
    Target(
        "prepare_model",
        prepare_model,
        ("model", "move_to_device", "parallel_strategy", "parallel_strategy_kwargs"),
        lambda: {"model": _model()},
    ),
    Target("prepare_optimizer", prepare_optimizer, ("optimizer",)),
    Target(
        "prepare_data_loader",
        prepare_data_loader,
        (
            "data_loader",
            "add_dist_sampler",
            "move_to_device",
            "auto_transfer",
            "global_batch_size",
            "tail",
            "name",
            "seed",
        ),
        lambda: {"data_loader": torch.utils.data.DataLoader(_ROWS)},
    ),
]
