"""prepare_trainer: a Trainer that resumes with its run, and reads the run's datasets. Imports transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from powertrain.errors import ConfigError
from powertrain.huggingface.library import load
from powertrain.huggingface.transformers.loading import ShardSource, is_of_run, loader_of
from powertrain.huggingface.transformers.resume import resumed
from powertrain.values.arguments import shorten
from powertrain.worker.session import current


def prepare_trainer(trainer: Any) -> Any:
    """Prepare a Trainer of Transformers for a training function.

    From then on, ``train()`` resumes from the run's newest checkpoint after a restart (``train(False)`` begins anew),
    ``train(resume_from_checkpoint=True)`` does so too, and ``train_dataset`` and ``eval_dataset`` may be shards of the
    run's datasets, or what their ``iter_torch_batches`` returns. A shard is batched by ``per_device_train_batch_size``
    and collated by the Trainer's ``data_collator``; its rows come exactly once per epoch, also after a restart in
    mid-epoch. Anything else of the Trainer stays as it is.

    Args:
        trainer: A ``transformers.Trainer``, or one of a class that is derived from it.

    Returns:
        The same Trainer.

    Raises:
        ConfigError: ``trainer`` is something else.
        OutsideWorkerError: It is called outside of a training function.

    Example::

        trainer = transformers.Trainer(
            model=model, args=args, train_dataset=powertrain.get_dataset_shard("train"), callbacks=[ReportCallback()]
        )
        prepare_trainer(trainer).train()
    """
    kind = load("transformers").Trainer
    current("prepare_trainer")
    if not isinstance(trainer, kind):
        raise ConfigError(
            f"prepare_trainer was given {shorten(trainer)}. Give the transformers.Trainer that is to be trained."
        )
    if not isinstance(trainer, PreparedTrainer):
        base = type(trainer)
        trainer.__class__ = type(base.__name__, (PreparedTrainer, base), {"__module__": base.__module__})
    return trainer


class PreparedTrainer:
    """The overrides of a prepared Trainer; they come before its class."""

    #: Set by this class and by transformers.Trainer.
    args: Any
    accelerator: Any
    train_dataset: Any
    eval_dataset: Any
    gather_function: Any
    model_accepts_loss_kwargs: Any
    compute_loss_func: Any
    #: True while it trains on from a checkpoint.
    has_resumed = False
    #: True while it evaluates on a shard.
    _evaluates_shard = False

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train, from the run's checkpoint after a restart."""
        with resumed(self, resume_from_checkpoint) as directory:
            return super().train(directory, *args, **kwargs)  # type: ignore[misc]

    def get_train_dataloader(self) -> Any:
        """Return the loader of the training data; for a dataset of the run, one of this rank's shard."""
        if is_of_run(self.train_dataset):
            return loader_of(self, self.train_dataset, is_training=True)
        return super().get_train_dataloader()  # type: ignore[misc]

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the loader of the evaluation data; for a dataset of the run, one of this rank's shard."""
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(chosen, str):
            chosen = self.eval_dataset[chosen]
        if is_of_run(chosen):
            return loader_of(self, chosen, is_training=False)
        return super().get_eval_dataloader(eval_dataset)  # type: ignore[misc]

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Return the loader of test data; for a dataset of the run, one of this rank's shard."""
        if is_of_run(test_dataset):
            return loader_of(self, test_dataset, is_training=False)
        return super().get_test_dataloader(test_dataset)  # type: ignore[misc]

    def num_examples(self, dataloader: Any) -> int:
        """Count rows, of which a source of batches has more than its length."""
        source = getattr(dataloader, "dataset", None)
        if isinstance(source, ShardSource):
            return source.rows_source.count()
        return int(super().num_examples(dataloader))  # type: ignore[misc]

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate, with each row of a shard counted once: ranks' last batches differ in size."""
        source = getattr(dataloader, "dataset", None)
        if not isinstance(source, ShardSource):
            return super().evaluation_loop(dataloader, *args, **kwargs)  # type: ignore[misc]
        self.gather_function = _gathering(self.accelerator, source)  # which the loop sets back at its end
        self._evaluates_shard = True
        try:
            output = super().evaluation_loop(dataloader, *args, **kwargs)  # type: ignore[misc]
        finally:
            self._evaluates_shard = False
        return output._replace(num_samples=source.rows_source.count())

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute a batch's loss.

        Where it counts in the average over ranks by its tokens, that average is returned: ranks' losses are weighted by
        their rows later.
        """
        is_by_tokens = (
            self._evaluates_shard
            and self.args.average_tokens_across_devices
            and (self.model_accepts_loss_kwargs or self.compute_loss_func)
            and "labels" in inputs
        )
        loss, *others = super().prediction_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
        if loss is not None and is_by_tokens:
            loss = self.accelerator.gather(loss.reshape(1)).mean()
        return loss, *others


def _gathering(accelerator: Any, source: ShardSource) -> Callable[..., Any]:
    """Return what gathers the ranks' values of a batch, row by row, without those of rows that do not count."""
    operations = load("accelerate").utils.operations

    def gather_one(value: torch.Tensor) -> torch.Tensor:
        if value.dim() == 1 and len(value) != source.size:
            value = value[:1].repeat(source.size)  # the batch's loss, once for each row of a usual batch
        rows = accelerator.gather(torch.tensor([source.rows], device=value.device)).tolist()
        longest = max(*rows, 1)
        padded = value.new_zeros((longest, *value.shape[1:]))
        padded[: source.rows] = value[: source.rows]
        parts = accelerator.gather(padded).split(longest)
        return torch.cat([part[:count] for part, count in zip(parts, rows, strict=True)])

    def gather(value: Any, use_gather_object: bool = False) -> Any:
        return operations.recursively_apply(gather_one, value, error_on_other_type=True)

    return gather
