"""TransformersTrainer: a TorchTrainer whose function trains with the Trainer of Transformers."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from powertrain.errors import ConfigError
from powertrain.huggingface.library import load
from powertrain.torch.trainer import TorchTrainer
from powertrain.worker.context import get_dataset_shard

if TYPE_CHECKING:
    from powertrain.backend import BackendConfig
    from powertrain.checkpoint.checkpoint import Checkpoint
    from powertrain.config.data import DataConfig
    from powertrain.config.run import RunConfig
    from powertrain.config.scaling import ScalingConfig
    from powertrain.config.validation import ValidationConfig

#: Names of the datasets that ``trainer_init_per_worker`` is given.
TRAIN, EVALUATION = "train", "evaluation"
#: Marks a function that needs nothing more to be done to it, such as one that a run has kept.
_MARK = "_trains_with_transformers"


class TransformersTrainer(TorchTrainer):
    """Run a function that trains with ``transformers.Trainer`` on every worker.

    Every Trainer that trains in the function is prepared (:func:`prepare_trainer`) and reports to the run
    (:class:`ReportCallback`), so the function can be one that knows nothing of this package: its metrics and
    checkpoints are those of the run, and a restart resumes from them.

    Args:
        trainer_init_per_worker: A training function, with one parameter for the config or none; or one that returns a
            Trainer, ``f(train_dataset, eval_dataset, **config)``, which is then trained. The datasets are shards of
            ``datasets["train"]`` and ``datasets["evaluation"]``; the latter may be left out and is None then.
        train_loop_per_worker: The training function, by TorchTrainer's name for it.
        trainer_init_config: Config of the function, by the older name.
        train_loop_config: Config of the function.
        torch_config: As for :class:`~powertrain.torch.TorchTrainer`, and so are all others.
        scaling_config: How many workers, and what each gets.
        run_config: Name, storage and fault tolerance of the run.
        datasets: Datasets by name: of powertrain.data, of Ray, or a ``datasets.Dataset`` of Hugging Face.
        dataset_config: How datasets are divided.
        metadata: Values for ``get_context().get_metadata()``.
        resume_from_checkpoint: A checkpoint to begin from.
        validation_config: A function that validates checkpoints.

    Raises:
        ImportError: Transformers is not installed.
        ConfigError: No function, two functions or two configs were given, or an argument has a wrong value.

    Example::

        def train_func(config):
            trainer = transformers.Trainer(model=model, args=transformers.TrainingArguments(...), train_dataset=rows)
            trainer.train()

        result = TransformersTrainer(train_func, scaling_config=ScalingConfig(num_workers=2)).fit()
    """

    def __init__(
        self,
        trainer_init_per_worker: Callable[..., Any] | None = None,
        *,
        train_loop_per_worker: Callable[..., Any] | None = None,
        trainer_init_config: dict[str, Any] | None = None,
        train_loop_config: dict[str, Any] | None = None,
        torch_config: BackendConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, Any] | None = None,
        dataset_config: DataConfig | None = None,
        metadata: dict[str, Any] | None = None,
        resume_from_checkpoint: Checkpoint | None = None,
        validation_config: ValidationConfig | None = None,
    ) -> None:
        if find_spec("transformers") is None:
            load("transformers")
        function = _only(
            trainer_init_per_worker=trainer_init_per_worker, train_loop_per_worker=train_loop_per_worker
        )
        if function is None:
            raise ConfigError(
                "TransformersTrainer was given no function. Give one that trains, or that returns a "
                "transformers.Trainer: TransformersTrainer(train_func, ...)."
            )
        if takes_datasets(function) and TRAIN not in (datasets or {}):
            raise ConfigError(
                f"trainer_init_per_worker {getattr(function, '__name__', '')}() takes a train_dataset, and the trainer "
                f"was given none of that name. Give datasets={{'{TRAIN}': ...}}."
            )
        super().__init__(
            per_worker(function),
            train_loop_config=_only(
                trainer_init_config=trainer_init_config, train_loop_config=train_loop_config
            ),
            torch_config=torch_config,
            scaling_config=scaling_config,
            run_config=run_config,
            datasets=datasets,
            dataset_config=dataset_config,
            metadata=metadata,
            resume_from_checkpoint=resume_from_checkpoint,
            validation_config=validation_config,
        )


def _only(**given: Any) -> Any:
    """Return the one argument that was given; raises :class:`ConfigError` for two."""
    found = {name: value for name, value in given.items() if value is not None}
    if len(found) > 1:
        raise ConfigError(
            f"TransformersTrainer was given {' and '.join(found)}, which mean the same. Leave one out."
        )
    return next(iter(found.values()), None)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []


def takes_datasets(function: Callable[..., Any]) -> bool:
    """True for ``f(train_dataset, eval_dataset, **config)``, False for a function of a config or of nothing."""
    if getattr(function, _MARK, False):
        return False
    parameters = _parameters(function)
    required = [p for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    return len(required) > 1 or bool(parameters and parameters[0].name == "train_dataset")


def per_worker(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that each worker calls for the user's ``function``."""
    if getattr(function, _MARK, False) or not callable(function):
        return function
    with_datasets = takes_datasets(function)
    takes_config = bool(_parameters(function))

    @functools.wraps(function)
    def train(config: dict[str, Any]) -> Any:
        with every_trainer_reporting():
            if with_datasets:
                made = function(*_shards(), **config)
            else:
                made = function(config) if takes_config else function()
            return _trained(made)

    del train.__wrapped__  # its signature is not that of the user's function
    setattr(train, _MARK, True)
    return train


def _shards() -> tuple[Any, Any]:
    try:
        evaluation = get_dataset_shard(EVALUATION)
    except ConfigError:  # there is none of that name
        evaluation = None
    return get_dataset_shard(TRAIN), evaluation


def _trained(made: Any) -> Any:
    """Return what the user's function returned; a Trainer is trained unless it has been, and its metrics returned."""
    if not isinstance(made, load("transformers").Trainer):
        return made
    if not made.state.global_step:
        return dict(made.train().metrics)
    return None


@contextlib.contextmanager
def every_trainer_reporting() -> Iterator[None]:
    """Inside, each Trainer that trains is prepared and reports to the run, as if the function had asked for it."""
    from powertrain.huggingface.transformers.callback import ReportCallback
    from powertrain.huggingface.transformers.prepare import PreparedTrainer, prepare_trainer
    from powertrain.huggingface.transformers.resume import resumed

    base = load("transformers").Trainer
    original = base.train

    @functools.wraps(original)
    def train(trainer: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(callback, ReportCallback) for callback in trainer.callback_handler.callbacks):
            trainer.add_callback(ReportCallback())
        if isinstance(trainer, PreparedTrainer):  # its own train() has found where to resume
            return original(trainer, resume_from_checkpoint, *args, **kwargs)
        prepare_trainer(trainer)
        with resumed(trainer, resume_from_checkpoint) as directory:
            return original(trainer, directory, *args, **kwargs)

    base.train = train
    try:
        yield
    finally:
        base.train = original
