"""Shards of the run's datasets as loaders of a Trainer.

Accelerate does not prepare them: it would divide the rows a second time, and reads one batch ahead of the loop, so that
a checkpoint would count a batch as trained on that was not. Here the position of a shard is that of the batch which the
Trainer was given last.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from powertrain.data.collate_fn import RowsCollateFn
from powertrain.data.epochs import Batches, EpochReader
from powertrain.data.ray.shard import StreamedBatches, StreamedShard
from powertrain.data.rows.formats import row_dicts
from powertrain.data.rows.rows import Rows
from powertrain.data.shard import DataShard

_SHARDS = (DataShard, StreamedShard)
_BATCHES = (Batches, StreamedBatches)
_END = object()


def is_of_run(dataset: Any) -> bool:
    """True for a shard of a dataset of the run, and for what its ``iter_torch_batches`` returns."""
    return isinstance(dataset, (*_SHARDS, *_BATCHES))


def loader_of(trainer: Any, dataset: Any, *, is_training: bool) -> DataLoader[Any]:
    """Return a loader of a Trainer's batches from what :func:`is_of_run`."""
    batches, collate = dataset, None
    if isinstance(dataset, _SHARDS):
        description = "Training" if is_training else "Evaluation"
        collate = trainer._get_collator_with_removed_columns(trainer.data_collator, description=description)
        args = trainer.args
        batches = dataset.iter_torch_batches(
            batch_size=trainer._train_batch_size if is_training else args.eval_batch_size,
            drop_last=args.dataloader_drop_last if is_training else False,
            # A collator may draw random numbers, which are those of the loop: it is called on the loop's own thread.
            collate_fn=_AsDicts(),
            device="cpu",
        )
    source = ShardSource(trainer, batches, collate, is_training=is_training)
    return DataLoader(source, batch_size=None, collate_fn=_unchanged)


def _unchanged(batch: Any) -> Any:
    return batch


class _AsDicts(RowsCollateFn):
    """Rows as a list of dicts, which data collators take."""

    def collate_rows(self, rows: Rows) -> Any:
        return row_dicts(rows)


class ShardSource(IterableDataset[Any]):
    """The batches of a shard. Each iteration is an epoch.

    A Trainer that resumes in mid-epoch skips the batches it was given before. The shard begins behind them anyway, so
    as many stand-ins come first.
    """

    def __init__(
        self, trainer: Any, batches: Any, collate: Callable[[Any], Any] | None, *, is_training: bool
    ) -> None:
        self._trainer, self._batches, self._collate = weakref.ref(trainer), batches, collate
        self._is_training = is_training
        self._may_resume = is_training
        #: Rows of the batch given last that count: of one that only keeps this rank in step with others none does.
        self.rows = 0
        #: Rows of that batch.
        self.size = 0

    def __len__(self) -> int:
        """Batches of a whole epoch. Raises TypeError where their number is not known, as for streamed datasets."""
        return len(self._batches)

    @property
    def rows_source(self) -> EpochReader | StreamedShard:
        """The reader or shard that the batches come from."""
        source: EpochReader | StreamedShard = self._batches.source
        return source

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._batches)
        skipped, first = 0, _END
        may_resume, self._may_resume = self._may_resume, False
        if may_resume and _begins_later(batches):
            skipped = self._batches_to_be_skipped()
            first = next(batches, _END)
            if first is _END and not skipped:  # it was saved at the end of an epoch: the next one begins
                batches = iter(self._batches)
        for _ in range(skipped):
            yield None
        if first is not _END:
            yield self._made(first)
        for batch in batches:
            yield self._made(batch)

    def _made(self, batch: Any) -> Any:
        made = batch if self._collate is None else self._collate(batch)
        if not self._is_training:
            self.size = _rows_of(made)
            self.rows = self.size if self.rows_source.weight else 0
        return made

    def _batches_to_be_skipped(self) -> int:
        """The number that the Trainer computes from the step it resumes at."""
        trainer = self._trainer()
        if trainer is None or not trainer.has_resumed or trainer.args.ignore_data_skip:
            return 0
        accumulated = trainer.args.gradient_accumulation_steps
        steps = max(-(-len(self) // accumulated), 1)
        return int(trainer.state.global_step % steps) * int(accumulated)


def _begins_later(batches: Any) -> bool:
    """True for an epoch that goes on in its middle, or at its end, after a restart."""
    start = getattr(batches, "start", None)
    return start is not None and start.position > 0


def _rows_of(batch: Any) -> int:
    """Return the rows of a batch, by the first tensor in it; 0 where it holds none."""
    if isinstance(batch, torch.Tensor):
        return int(batch.shape[0]) if batch.dim() else 0
    values = batch.values() if hasattr(batch, "values") else batch if isinstance(batch, (list, tuple)) else ()
    return next((rows for value in values if (rows := _rows_of(value))), 0)
