"""DataParallelTrainer: the constructor checks the arguments and picks the engine; ``fit`` hands the request on."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeVar, Union

from powertrain import functions
from powertrain.backend import BackendConfig
from powertrain.config.checks import as_config, replace
from powertrain.config.data import DataConfig
from powertrain.config.run import RunConfig
from powertrain.config.scaling import ScalingConfig
from powertrain.config.validation import ValidationConfig
from powertrain.driver.checks import (
    checked_datasets,
    checkpoint_to_begin_from,
    json_mapping,
    refuse_second_run_of_script,
)
from powertrain.driver.engines import pick_engine
from powertrain.driver.preparing import check_request
from powertrain.driver.request import TrainRequest
from powertrain.driver.resume import (
    existing_run,
    require_datasets,
    require_variables,
    split_run_path,
)
from powertrain.errors import (
    ConfigError,
    StorageError,
)

if TYPE_CHECKING:
    from powertrain.checkpoint.checkpoint import Checkpoint
    from powertrain.data.dataset import Dataset
    from powertrain.result.result import Result


TrainFunction = Union[Callable[[], Any], Callable[[dict[str, Any]], Any]]
_TrainerT = TypeVar("_TrainerT", bound="DataParallelTrainer")


class DataParallelTrainer:
    """Runs one function on every worker. Framework-neutral: ``backend_config`` connects the workers.

    Everything is checked here, before any process starts; then the process that workers are forked from begins to
    warm up, so that it is ready by the time ``fit`` needs it.

    Args:
        train_loop_per_worker: The training function, with one argument or none.
        train_loop_config: Its argument, a dict.
        backend_config: The framework of the workers, and its set-up.
        scaling_config: The number of workers, their resources and the engine.
        run_config: Name, storage and the other settings of the run.
        datasets: Datasets by name, for ``get_dataset_shard``; or functions that return them.
        dataset_config: Distribution of the datasets to ranks.
        metadata: JSON values, for ``get_context().get_metadata()``.
        resume_from_checkpoint: The checkpoint that a new run begins from.
        validation_config: Validation of checkpoints beside the training.

    Raises:
        ConfigError: An argument has a wrong value.

    Example::

        trainer = DataParallelTrainer(train_func, scaling_config=ScalingConfig(num_workers=4))
        result = trainer.fit()
    """

    #: The name of the argument for the backend's config.
    _backend_argument = "backend_config"

    def __init__(
        self,
        train_loop_per_worker: TrainFunction,
        *,
        train_loop_config: dict[str, Any] | None = None,
        backend_config: BackendConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, Dataset | Callable[[], Dataset]] | None = None,
        dataset_config: DataConfig | None = None,
        metadata: dict[str, Any] | None = None,
        resume_from_checkpoint: Checkpoint | None = None,
        validation_config: ValidationConfig | None = None,
    ) -> None:
        functions.check_shape(train_loop_per_worker)
        run = as_config(run_config, RunConfig, "run_config")
        scaling = as_config(scaling_config, ScalingConfig, "scaling_config")
        validation = None
        if validation_config is not None:
            validation = as_config(validation_config, ValidationConfig, "validation_config")
        engine = pick_engine(scaling)
        self._request = TrainRequest(
            trainer=type(self).__name__,
            function=train_loop_per_worker,
            config=train_loop_config,
            backend=as_config(backend_config, BackendConfig, self._backend_argument),
            scaling=replace(scaling, engine=engine),
            run=run,
            data=as_config(dataset_config, DataConfig, "dataset_config"),
            datasets=checked_datasets(datasets),
            validation=validation,
            metadata=json_mapping(metadata, "metadata"),
            begin_from=checkpoint_to_begin_from(resume_from_checkpoint),
            engine=engine,
            arguments={
                "train_loop_per_worker": train_loop_per_worker,
                "train_loop_config": train_loop_config,
                self._backend_argument: backend_config,
                "scaling_config": scaling_config,
                "run_config": run_config,
                "datasets": datasets,
                "dataset_config": dataset_config,
                "metadata": metadata,
                "validation_config": validation_config,
            },
        )
        check_request(self._request)

    @property
    def scaling_config(self) -> ScalingConfig:
        """The number of workers and their resources; ``engine`` is the chosen one."""
        return self._request.scaling

    @scaling_config.setter
    def scaling_config(self, config: ScalingConfig) -> None:
        self._request.scaling = config

    @property
    def run_config(self) -> RunConfig:
        """Name, storage and the other settings of the run."""
        return self._request.run

    @run_config.setter
    def run_config(self, config: RunConfig) -> None:
        self._request.run = config

    @classmethod
    def restore(
        cls: type[_TrainerT],
        path: str | os.PathLike[str],
        train_loop_per_worker: TrainFunction | None = None,
        *,
        storage_filesystem: Any = None,
        **changes: Any,
    ) -> _TrainerT:
        """Return a trainer that continues the run at ``path``, which is ``storage_path/name``.

        It is made as the run's own trainer was. The arguments kept in the run are only used if this user wrote them on
        this machine; otherwise, give the function and configs.

        Args:
            path: The run's directory.
            train_loop_per_worker: The training function; None for the one kept in the run.
            storage_filesystem: A pyarrow or fsspec file system that ``path`` is a path of.
            **changes: Arguments of the trainer in place of the original ones.

        Returns:
            The trainer; ``fit`` continues the run.

        Raises:
            ConfigError: There is no run, or its arguments are not kept, or another user or machine wrote them.
            StorageError: The run's directory cannot be read.

        Example::

            result = TorchTrainer.restore("~/powertrain_runs/digits").fit()
        """
        from powertrain.driver import blueprint

        storage = existing_run(path, storage_filesystem)
        arguments: dict[str, Any] = {}
        if train_loop_per_worker is None:
            arguments = blueprint.load(storage)
            require_variables(arguments.pop("needs_env", []), changes)
            require_datasets(arguments.pop("needs_datasets", []), changes)
        else:
            changes["train_loop_per_worker"] = train_loop_per_worker
        arguments |= changes
        root, name = split_run_path(os.fspath(path))
        run = as_config(arguments.get("run_config"), RunConfig, "run_config")
        arguments["run_config"] = replace(
            run, name=name, storage_path=root, storage_filesystem=storage_filesystem or run.storage_filesystem
        )
        return cls(**arguments)

    @classmethod
    def can_restore(cls, path: str | os.PathLike[str], storage_filesystem: Any = None) -> bool:
        """Return True when there is a run at ``path`` that :meth:`restore` can continue.

        Args:
            path: The run's directory.
            storage_filesystem: A pyarrow or fsspec file system that ``path`` is a path of.

        Returns:
            Whether there is one.

        Example::

            make = TorchTrainer.restore if TorchTrainer.can_restore(path) else new_trainer
        """
        try:
            existing_run(path, storage_filesystem)
        except (ConfigError, StorageError, OSError):
            return False
        return True

    def fit(self) -> Result:
        """Train to the end.

        Workers see the script as it is now: its modules, with their settings and patches. Where this process cannot be
        forked, because it has threads or an open GPU, workers import modules from their files, with a warning.

        Returns:
            The result: metrics, checkpoints and the return value of rank 0's function.

        Raises:
            TrainingFailedError: Training failed; its ``worker_failures`` and ``result`` say how far it came.
            ResourceError: The machine or cluster does not have the requested resources.
            CheckpointError: Training ended, and its last checkpoint could not be saved.
            PreemptedError: This process, or too many ranks, will be taken away; the run can be resumed.

        Example::

            result = trainer.fit()
            print(result.metrics["loss"])
        """
        refuse_second_run_of_script()
        if self._request.traits.has_launcher:
            from powertrain.engine import torchrun

            torchrun.check_num_workers(self.scaling_config.num_workers)
            if torchrun.own_rank() != 0:
                from powertrain.driver.torchrun_rank import fit_torchrun_rank

                return fit_torchrun_rank(self._request)
        from powertrain.driver.fit import fit_with_controller

        with ExitStack() as stack:
            return fit_with_controller(self._request, stack)
