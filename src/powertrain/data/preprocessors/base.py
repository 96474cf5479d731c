"""``Preprocessor``: statistics of a dataset, and the change of rows that follows from them."""

from __future__ import annotations

import base64
import enum
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from powertrain.data.arguments import column_names, shown
from powertrain.errors import DataError
from powertrain.text.loggers import module_logger

if TYPE_CHECKING:
    import pandas as pd

    from powertrain.data.dataset import Dataset

_P = TypeVar("_P", bound="Preprocessor")
_logger = module_logger(__name__)


class PreprocessorNotFittedException(DataError, RuntimeError):
    """A preprocessor was to change rows before :meth:`Preprocessor.fit` was called."""


class FitStatus(str, enum.Enum):
    """Whether a preprocessor is ready to change rows."""

    NOT_FITTABLE = "NOT_FITTABLE"
    NOT_FITTED = "NOT_FITTED"
    PARTIALLY_FITTED = "PARTIALLY_FITTED"
    FITTED = "FITTED"


#: Inside of the class the name is that of its attribute.
_Status = FitStatus


class Preprocessor:
    """A change of rows that is learnt from a dataset: fitted once, and then the same for training and serving.

    A class of your own derives from it and defines ``_fit(dataset)``, which puts values into ``self.stats_`` and
    returns ``self``, and ``_transform_pandas(frame)`` or ``_transform_numpy(batch)``, which returns the changed batch.
    One that has nothing to learn sets ``_is_fittable = False``.

    Example::

        scaler = StandardScaler(["age"])
        train = scaler.fit_transform(train)
        test = scaler.transform(test)
    """

    #: Under its name in Ray Data.
    FitStatus: ClassVar[Any] = FitStatus
    _is_fittable = True

    def __init__(self) -> None:
        #: The fitted statistics, by names such as "mean(age)".
        self.stats_: dict[str, Any] = {}
        self._fitted = False

    def __repr__(self) -> str:
        hidden = ("stats_", "_fitted")
        given = [f"{name}={shown(value)}" for name, value in vars(self).items() if name not in hidden]
        return f"{type(self).__name__}({', '.join(given)})"

    # -- fitting

    def fit(self: _P, ds: Dataset) -> _P:
        """Compute the statistics of a dataset, in one pass over the columns that are needed.

        Args:
            ds: The dataset.

        Returns:
            This preprocessor, fitted.

        Raises:
            DataError: A column does not exist, or has values that it cannot be fitted to.
        """
        from powertrain.data.methods.statistics import StatisticsMethods

        if not isinstance(ds, StatisticsMethods):
            raise DataError(
                f"{type(self).__name__}.fit() takes a Dataset, and got a {type(ds).__name__}. Use "
                "powertrain.data.from_pandas(...) for a DataFrame."
            )
        status = self.fit_status()
        if status is FitStatus.NOT_FITTABLE:
            return self
        if status is not FitStatus.NOT_FITTED:
            _logger.warning("%s was fitted before: fit() replaces its statistics.", type(self).__name__)
        self.stats_ = {}
        fitted = self._fit(ds)
        self._fitted = True
        return fitted

    def fit_status(self) -> _Status:
        """Return whether it is fitted."""
        if not self._is_fittable:
            return FitStatus.NOT_FITTABLE
        return FitStatus.FITTED if getattr(self, "_fitted", False) else FitStatus.NOT_FITTED

    def has_stats(self) -> bool:
        """Return whether it has statistics."""
        return bool(getattr(self, "stats_", None))

    def fit_transform(
        self,
        ds: Dataset,
        *,
        transform_num_cpus: float | None = None,
        transform_memory: float | None = None,
        transform_batch_size: int | None = None,
        transform_concurrency: int | None = None,
    ) -> Dataset:
        """Fit it to a dataset, and return that dataset with its rows changed.

        Args:
            ds: The dataset.
            transform_num_cpus: As for :meth:`transform`, like those below.
            transform_memory: Likewise.
            transform_batch_size: Likewise.
            transform_concurrency: Likewise.

        Returns:
            The new dataset.
        """
        self.fit(ds)
        return self.transform(
            ds,
            num_cpus=transform_num_cpus,
            memory=transform_memory,
            batch_size=transform_batch_size,
            concurrency=transform_concurrency,
        )

    # -- changing rows

    def transform(
        self,
        ds: Dataset,
        *,
        batch_size: int | None = None,
        num_cpus: float | None = None,
        memory: float | None = None,
        concurrency: int | None = None,
    ) -> Dataset:
        """Return a dataset with its rows changed, when they are read.

        Args:
            ds: The dataset.
            batch_size: Rows that are changed at once; None for 1024.
            num_cpus: Accepted for compatibility, without effect.
            memory: Likewise.
            concurrency: Number of processes; None for the threads of the reader.

        Returns:
            The new dataset.

        Raises:
            PreprocessorNotFittedException: It was not fitted.
        """
        self._check_fitted("transform")
        form = self._batch_format()
        return ds.map_batches(
            self._transform_numpy if form == "numpy" else self._transform_pandas,
            batch_format=form,
            batch_size=batch_size,
            concurrency=concurrency,
            udf_modifying_row_count=False,
            num_cpus=num_cpus,
            memory=memory,
        )

    def transform_batch(self, data: Any) -> Any:
        """Return a batch with its rows changed; the given one stays as it is.

        Args:
            data: A DataFrame, a ``pyarrow.Table`` or a dict of arrays.

        Returns:
            A DataFrame; of a preprocessor with ``_transform_numpy`` a dict of arrays.

        Raises:
            PreprocessorNotFittedException: It was not fitted.
            DataError: ``data`` is not a batch.
        """
        self._check_fitted("transform_batch")
        frame = _frame(data)
        if self._batch_format() == "numpy":
            return self._transform_numpy({name: frame[name].to_numpy() for name in frame.columns})
        return self._transform_pandas(frame)

    def _check_fitted(self, method: str) -> None:
        if self.fit_status() in (FitStatus.NOT_FITTED, FitStatus.PARTIALLY_FITTED):
            raise PreprocessorNotFittedException(
                f"{type(self).__name__}.{method}() was called before fit(). Call fit(dataset) first, or use "
                "fit_transform(dataset)."
            )

    def _batch_format(self) -> str:
        cls = type(self)
        if cls._transform_pandas is not Preprocessor._transform_pandas:
            return "pandas"
        if cls._transform_numpy is not Preprocessor._transform_numpy:
            return "numpy"
        raise DataError(f"{cls.__name__} defines neither _transform_pandas nor _transform_numpy. Define one.")

    def _fit(self: _P, ds: Dataset) -> _P:
        raise DataError(f"{type(self).__name__} defines no _fit(). Define it, or set _is_fittable = False.")

    def _transform_pandas(self, df: pd.DataFrame) -> pd.DataFrame:
        raise DataError(f"{type(self).__name__} defines no _transform_pandas(). Define it.")

    def _transform_numpy(self, np_data: dict[str, Any]) -> dict[str, Any]:
        raise DataError(f"{type(self).__name__} defines no _transform_numpy(). Define it.")

    # -- columns

    def get_input_columns(self) -> list[str]:
        """Return the columns that it reads."""
        return list(getattr(self, "columns", []))

    def get_output_columns(self) -> list[str]:
        """Return the columns that it makes."""
        return list(getattr(self, "output_columns", []))

    # -- as text

    def serialize(self) -> str:
        """Return it as text, for example for ``Checkpoint.update_metadata``.

        Returns:
            Text for :meth:`deserialize`, pickled.
        """
        import cloudpickle

        return base64.b64encode(cloudpickle.dumps(self)).decode("ascii")

    @staticmethod
    def deserialize(serialized: str | bytes) -> Any:
        """Return the preprocessor of a text of :meth:`serialize`.

        It is unpickled, which runs code: give only text from a place that you trust.

        Args:
            serialized: The text.

        Raises:
            DataError: It is not the text of a preprocessor.
        """
        import cloudpickle

        try:
            found = cloudpickle.loads(base64.b64decode(serialized, validate=True))
        except Exception as error:  # unpickling may raise anything
            raise DataError(
                f"This text is not that of a preprocessor ({type(error).__name__}: {error}). Give what serialize() "
                "returned."
            ) from error
        if not isinstance(found, Preprocessor):
            raise DataError(f"This text is that of a {type(found).__name__}, and not of a preprocessor.")
        return found


class ColumnPreprocessor(Preprocessor):
    """A preprocessor that makes one column of each of its columns."""

    def __init__(self, columns: Sequence[str], output_columns: Sequence[str] | None) -> None:
        super().__init__()
        name = type(self).__name__
        self.columns = list(column_names(name, columns))
        self.output_columns = (
            self.columns if output_columns is None else list(column_names(name, output_columns))
        )
        if len(self.columns) != len(self.output_columns):
            raise DataError(
                f"{name}: output_columns has {len(self.output_columns)} names for {len(self.columns)} columns. Give "
                "one for each, or leave them out."
            )

    def _pairs(self) -> zip[tuple[str, str]]:
        """Return each column and the name of its result."""
        return zip(self.columns, self.output_columns, strict=True)


def _frame(data: Any) -> pd.DataFrame:
    """Return a batch as a DataFrame of its own."""
    import numpy as np
    import pandas as pd
    import pyarrow as pa

    if isinstance(data, pd.DataFrame):
        return data.copy(deep=False)
    if isinstance(data, pa.Table):
        return data.to_pandas()
    if isinstance(data, Mapping):
        columns = {str(name): np.asarray(values) for name, values in data.items()}
        return pd.DataFrame({name: list(each) if each.ndim > 1 else each for name, each in columns.items()})
    raise DataError(
        f"transform_batch() got a {type(data).__name__}. Give a DataFrame, a pyarrow.Table or a dict of arrays."
    )


def check_no_nulls(frame: pd.DataFrame, columns: Sequence[str]) -> None:
    """Raise :class:`DataError` for columns with nulls."""
    missing = [name for name in columns if frame[name].isna().any()]
    if missing:
        raise DataError(
            f"The columns {missing} have nulls, which cannot be encoded. Fill them first, for example with "
            "SimpleImputer."
        )
