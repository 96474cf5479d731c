"""Batches as a dataset of torch's, of features and labels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from powertrain.data.arguments import column_names
from powertrain.data.operations.columns import check_columns
from powertrain.errors import DataError


class TorchDatasets:
    """Torch's datasets of a shard, built on its batches of tensors."""

    iter_torch_batches: Callable[..., Iterable[Any]]

    def to_torch(
        self,
        *,
        label_column: str | None = None,
        feature_columns: str | Sequence[Any] | Mapping[str, Sequence[str]] | None = None,
        label_column_dtype: Any = None,
        feature_column_dtypes: Any = None,
        batch_size: int = 1,
        prefetch_batches: int = 1,
        drop_last: bool = False,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
        unsqueeze_label_tensor: bool = True,
        unsqueeze_feature_tensors: bool = True,
    ) -> Any:
        """Return a ``torch.utils.data.IterableDataset`` of (features, label), as older programs for Ray use it.

        New code is shorter with :meth:`DataShard.iter_torch_batches`.

        Args:
            label_column: The column of the labels; None for None in their place.
            feature_columns: Columns that are concatenated to one tensor; None for all but the label. A list of lists,
                or a dict of lists, gives a list or dict of tensors.
            label_column_dtype: The type of the labels.
            feature_column_dtypes: The type of the features, one for all of them.
            batch_size: Rows of one rank.
            prefetch_batches: Batches to prepare ahead.
            drop_last: Leave out rows that do not fill the last batch.
            local_shuffle_buffer_size: As for :meth:`DataShard.iter_torch_batches`.
            local_shuffle_seed: As for :meth:`DataShard.iter_torch_batches`.
            unsqueeze_label_tensor: Return labels of shape (rows, 1).
            unsqueeze_feature_tensors: Let each feature of one number be a column of (rows, 1) before concatenation.

        Returns:
            The dataset; each iteration over it is one epoch. In a ``DataLoader`` it needs ``num_workers`` of 0 or 1.

        Raises:
            DataError: There is no such column, or an argument has a wrong value; while iterating, in a ``DataLoader``
                with several workers.
        """
        if isinstance(feature_column_dtypes, (Mapping, list, tuple)):
            raise DataError(
                "to_torch(feature_column_dtypes=...) takes one type for all. Use iter_torch_batches(dtypes=...) "
                "for a type of each column."
            )
        batches = self.iter_torch_batches(
            batch_size=batch_size,
            prefetch_batches=prefetch_batches,
            drop_last=drop_last,
            local_shuffle_buffer_size=local_shuffle_buffer_size,
            local_shuffle_seed=local_shuffle_seed,
        )
        label = None if label_column is None else column_names("to_torch", label_column)[0]

        def parts() -> Iterator[tuple[Any, Any]]:
            for batch in batches:
                if label is not None:
                    check_columns("to_torch", [label], batch)
                labels = None if label is None else batch[label]
                if labels is not None and label_column_dtype is not None:
                    labels = labels.to(label_column_dtype)
                if labels is not None and unsqueeze_label_tensor and labels.dim() == 1:
                    labels = labels.unsqueeze(1)
                chosen = feature_columns
                if chosen is None:
                    chosen = [name for name in batch if name != label]
                yield _features(batch, chosen, feature_column_dtypes, unsqueeze_feature_tensors), labels

        return _iterable_class()(parts)


@functools.cache
def _iterable_class() -> Any:
    """Return the class of the datasets, made once: a class of each call would keep its rows for longer."""
    from torch.utils.data import IterableDataset, get_worker_info

    class TorchRows(IterableDataset[Any]):
        def __init__(self, parts: Callable[[], Iterator[tuple[Any, Any]]]) -> None:
            self._parts = parts

        def __iter__(self) -> Iterator[tuple[Any, Any]]:
            worker = get_worker_info()
            if worker is not None and worker.num_workers > 1:
                raise DataError(
                    f"The dataset of to_torch() is in a DataLoader with num_workers={worker.num_workers}, and each of "
                    "them would read every row. Use num_workers=0: batches are prepared ahead on threads in any case, "
                    "and map_batches(concurrency=...) runs functions in processes."
                )
            return self._parts()

    return TorchRows


def _features(batch: Mapping[str, Any], chosen: Any, dtype: Any, unsqueeze: bool) -> Any:
    import torch

    if isinstance(chosen, Mapping):
        return {name: _features(batch, columns, dtype, unsqueeze) for name, columns in chosen.items()}
    if not isinstance(chosen, str) and chosen and not isinstance(chosen[0], str):
        return [_features(batch, columns, dtype, unsqueeze) for columns in chosen]
    names = column_names("to_torch", chosen)
    check_columns("to_torch", names, batch)
    tensors = [batch[name] if dtype is None else batch[name].to(dtype) for name in names]
    if unsqueeze:
        tensors = [tensor.unsqueeze(1) if tensor.dim() == 1 else tensor for tensor in tensors]
    return torch.cat(tensors, dim=1) if tensors[0].dim() > 1 else torch.stack(tensors, dim=1)
