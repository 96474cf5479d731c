"""The common part of XGBoostTrainer and LightGBMTrainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from powertrain.backend import BackendConfig
from powertrain.config.checks import as_config
from powertrain.frameworks.boosting.loop import TrainFromParams
from powertrain.frameworks.boosting.recipe import about_unused, recipe, without_checkpoint_rules
from powertrain.trainer import DataParallelTrainer

if TYPE_CHECKING:
    from collections.abc import Callable

    from powertrain.checkpoint.checkpoint import Checkpoint
    from powertrain.frameworks.boosting.library import BoostingLibrary


class BoosterTrainer(DataParallelTrainer):
    """Runs a training function, or makes one of ``params``, ``label_column`` and ``datasets``."""

    library: ClassVar[BoostingLibrary]
    _loop: ClassVar[type[TrainFromParams]]

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any] | None,
        *,
        backend_config: BackendConfig,
        of_recipe: dict[str, Any],
        train_kwargs: dict[str, Any],
        **options: Any,
    ) -> None:
        """Check all arguments.

        Args:
            train_loop_per_worker: The training function, or None.
            backend_config: How the workers are connected.
            of_recipe: ``params``, ``label_column`` and ``num_boost_round``, None where one was not given.
            train_kwargs: Further arguments of the library's ``train``.
            **options: Arguments of :class:`~powertrain.DataParallelTrainer`.
        """
        name = type(self).__name__
        unused: list[str] = []
        if train_loop_per_worker is None:
            given = recipe(
                name,
                **of_recipe,
                datasets=options["datasets"],
                run_config=options["run_config"],
                options=train_kwargs,
            )
            options["run_config"] = without_checkpoint_rules(options["run_config"])
            if options["dataset_config"] is None:
                options["dataset_config"] = self._usual_dataset_config()
            train_loop_per_worker = self._loop(given)
        elif isinstance(train_loop_per_worker, TrainFromParams):  # of the run that restore() continues
            train_loop_per_worker = self._loop(train_loop_per_worker.recipe.changed(name, **of_recipe))
            unused = about_unused(name, train_kwargs)
        else:
            unused = about_unused(name, {**of_recipe, **train_kwargs})
        backend = as_config(backend_config, BackendConfig, self._backend_argument)
        super().__init__(train_loop_per_worker, backend_config=backend, **options)
        self._request.standing_remarks += unused
        if not self._request.traits.spans_nodes:  # on a cluster its nodes need it, and this process does not
            self.library.check_installed(name)

    @staticmethod
    def _usual_dataset_config() -> Any:
        """Return the default division of datasets without a training function; None for evenly."""
        return None

    @classmethod
    def get_model(cls, checkpoint: Checkpoint) -> Any:
        """Return the model of a checkpoint that the library's ``ReportCallback`` has reported.

        Args:
            checkpoint: The checkpoint.

        Returns:
            The model, a ``Booster`` of the library.

        Raises:
            CheckpointError: The checkpoint holds no such model.
            ImportError: The library is not installed.
        """
        return cls.library.load_model(checkpoint, cls.library.filename, f"{cls.__name__}.get_model")
