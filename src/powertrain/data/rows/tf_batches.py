"""Batches as TensorFlow tensors; TensorFlow is imported on use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from powertrain.data.arguments import shown
from powertrain.errors import DataError


class TensorflowBatches:
    """The TensorFlow methods of a shard, built on its numpy batches."""

    iter_batches: Callable[..., Iterable[Any]]
    peek: Callable[..., Any]

    def to_tf(
        self,
        feature_columns: str | Sequence[str],
        label_columns: str | Sequence[str],
        *,
        additional_columns: str | Sequence[str] | None = None,
        prefetch_batches: int = 1,
        batch_size: int = 1,
        drop_last: bool = False,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
        feature_type_spec: Any = None,
        label_type_spec: Any = None,
        additional_type_spec: Any = None,
    ) -> Any:
        """Return a ``tf.data.Dataset`` of (features, labels), each iteration of which is one epoch.

        TensorFlow reads ahead of the model: save checkpoints at the end of an epoch, when all rows that were read have
        been trained on. A rank without rows in the last step gets a row once more, as every other rank makes that step.

        Args:
            feature_columns: A column, which is a tensor then, or a list of columns, which are a dict of tensors.
            label_columns: As the features.
            additional_columns: A third part of each batch, such as weights of rows.
            prefetch_batches: Batches to read ahead.
            batch_size: Rows of one rank.
            drop_last: Leave out rows that do not fill the last batch.
            local_shuffle_buffer_size: As for :meth:`DataShard.iter_torch_batches`.
            local_shuffle_seed: As for :meth:`DataShard.iter_torch_batches`.
            feature_type_spec: The type of the features; by default that of the first batch.
            label_type_spec: The type of the labels; by default that of the first batch.
            additional_type_spec: The type of the additional columns; by default that of the first batch.

        Raises:
            DataError: There is no such column, or tensorflow is not installed.

        Example::

            batches = prepare_dataset_shard(shard.to_tf("features", "label", batch_size=32))
        """
        return _to_tf(
            self,
            feature_columns,
            label_columns,
            additional_columns,
            (feature_type_spec, label_type_spec, additional_type_spec),
            prefetch_batches=prefetch_batches,
            batch_size=batch_size,
            drop_last=drop_last,
            local_shuffle_buffer_size=local_shuffle_buffer_size,
            local_shuffle_seed=local_shuffle_seed,
        )

    def iter_tf_batches(self, *, dtypes: Any = None, **options: Any) -> Iterable[dict[str, Any]]:
        """Return batches as a dict from column to TensorFlow tensor.

        Args:
            dtypes: A TensorFlow type for all columns, or a dict from column to type; None to keep them.
            **options: Those of :meth:`DataShard.iter_batches`, without ``batch_format``.

        Raises:
            DataError: tensorflow is not installed.
        """
        made = self.iter_batches(batch_format="numpy", **options)
        return _TensorBatches(made, dtypes, _tensorflow("iter_tf_batches"))


def _to_tf(
    shard: Any,
    feature_columns: str | Sequence[str],
    label_columns: str | Sequence[str],
    additional_columns: str | Sequence[str] | None,
    type_specs: tuple[Any, Any, Any],
    **options: Any,
) -> Any:
    """Return a ``tf.data.Dataset`` of (features, labels) or (features, labels, additional columns).

    Args:
        shard: A rank's part of a dataset.
        feature_columns: A column, which is a tensor then, or columns, which are a dict of tensors.
        label_columns: As the features.
        additional_columns: As the features; None for none.
        type_specs: The types of the three; one that is None follows from the first batch.
        **options: Those of ``shard.iter_batches``.
    """
    chosen = [feature_columns, label_columns]
    if additional_columns is not None:
        chosen.append(additional_columns)
    checked = [_columns(columns) for columns in chosen]
    tf = _tensorflow("to_tf")
    specs: list[Any] = list(type_specs[: len(checked)])
    if any(spec is None for spec in specs):
        first = shard.peek(batch_format="numpy", batch_size=1)
        specs = [
            _pick(columns, first, lambda array: _spec(tf, array)) if spec is None else spec
            for columns, spec in zip(checked, specs, strict=True)
        ]

    def batches() -> Iterator[tuple[Any, ...]]:
        for batch in shard.iter_batches(batch_format="numpy", **options):
            yield tuple(_pick(columns, batch, lambda array: array) for columns in checked)

    return tf.data.Dataset.from_generator(batches, output_signature=tuple(specs))


class _TensorBatches:
    def __init__(self, batches: Iterable[Mapping[str, Any]], dtypes: Any, tf: Any) -> None:
        self._batches, self._dtypes, self._tf = batches, dtypes, tf

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self._batches:
            yield {name: self._tensor(name, array) for name, array in batch.items()}

    def _tensor(self, name: str, array: Any) -> Any:
        dtype = self._dtypes.get(name) if isinstance(self._dtypes, Mapping) else self._dtypes
        tensor = self._tf.convert_to_tensor(array)
        return tensor if dtype is None else self._tf.cast(tensor, dtype)


def _tensorflow(caller: str) -> Any:
    try:
        import tensorflow
    except ImportError as error:
        raise DataError(
            f"{caller} needs tensorflow, which cannot be imported ({error}): pip install tensorflow tf-keras"
        ) from error
    return tensorflow


def _columns(given: Any) -> str | list[str]:
    if isinstance(given, str):
        return given
    if isinstance(given, Sequence) and given and all(isinstance(name, str) for name in given):
        return list(given)
    raise DataError(f"{shown(given)} names no columns. Give the name of a column, or a list of names.")


def _pick(columns: str | list[str], batch: Mapping[str, Any], make: Callable[[Any], Any]) -> Any:
    names = [columns] if isinstance(columns, str) else columns
    if missing := [name for name in names if name not in batch]:
        raise DataError(
            f"{missing[0]!r} is no column of the dataset, which has {', '.join(map(repr, batch))}."
        )
    if isinstance(columns, str):
        return make(batch[columns])
    return {name: make(batch[name]) for name in columns}


def _spec(tf: Any, array: Any) -> Any:
    """Return the type of a column of which ``array`` is a batch: any number of rows of its shape."""
    dtype = tf.string if array.dtype.kind in "OUS" else tf.dtypes.as_dtype(array.dtype)
    return tf.TensorSpec(shape=(None, *array.shape[1:]), dtype=dtype)
