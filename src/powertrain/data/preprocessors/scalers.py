"""Columns of numbers on a common scale."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from powertrain.data.arguments import number, values_of, whole
from powertrain.data.preprocessors.base import ColumnPreprocessor
from powertrain.data.preprocessors.fitting import statistics
from powertrain.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

    from powertrain.data.dataset import Dataset

#: Spreads below this are those of a constant column, which is divided by 1.
_LEAST_SPREAD = 1e-8


class _Scaler(ColumnPreprocessor, ABC):
    """``(x - centre) / spread`` of each column."""

    def __init__(self, columns: Sequence[str], output_columns: Sequence[str] | None = None) -> None:
        super().__init__(columns, output_columns)

    @abstractmethod
    def _scale(self, column: str) -> tuple[float | None, float | None]:
        """Return centre and spread of a column; None where it had no values."""

    def _transform_pandas(self, df: pd.DataFrame) -> pd.DataFrame:
        made: dict[str, Any] = {}
        for column, output in self._pairs():
            centre, spread = self._scale(column)
            values = df[column]
            if values.dtype == object:  # numbers with None among them
                values = values.astype("float64")
            if centre is None or spread is None:
                made[output] = values * float("nan")
            else:
                made[output] = (values - centre) / spread
        return df.assign(**made)


class StandardScaler(_Scaler):
    """Subtracts the mean of each column and divides by its standard deviation (of the population).

    Args:
        columns: The columns.
        output_columns: Names of the results; None replaces the columns.

    Raises:
        DataError: An argument has a wrong value.
    """

    def _fit(self, ds: Dataset) -> StandardScaler:
        for name, found in statistics("StandardScaler", ds, self.columns).items():
            self.stats_[f"mean({name})"] = found.mean if found.count else None
            self.stats_[f"std({name})"] = found.std(0)
        return self

    def _scale(self, column: str) -> tuple[float | None, float | None]:
        spread = self.stats_[f"std({column})"]
        return self.stats_[
            f"mean({column})"
        ], 1.0 if spread is not None and spread < _LEAST_SPREAD else spread


class MinMaxScaler(_Scaler):
    """Scales each column to values from 0 to 1.

    Args:
        columns: The columns.
        output_columns: Names of the results; None replaces the columns.

    Raises:
        DataError: An argument has a wrong value.
    """

    def _fit(self, ds: Dataset) -> MinMaxScaler:
        for name, found in statistics("MinMaxScaler", ds, self.columns).items():
            self.stats_[f"min({name})"], self.stats_[f"max({name})"] = found.least, found.most
        return self

    def _scale(self, column: str) -> tuple[float | None, float | None]:
        least, most = self.stats_[f"min({column})"], self.stats_[f"max({column})"]
        if least is None:
            return None, None
        return least, 1.0 if most - least < _LEAST_SPREAD else most - least


class MaxAbsScaler(_Scaler):
    """Divides each column by its greatest absolute value.

    Args:
        columns: The columns.
        output_columns: Names of the results; None replaces the columns.

    Raises:
        DataError: An argument has a wrong value.
    """

    def _fit(self, ds: Dataset) -> MaxAbsScaler:
        for name, found in statistics("MaxAbsScaler", ds, self.columns).items():
            most = None if found.least is None else max(abs(found.least), abs(found.most))
            self.stats_[f"abs_max({name})"] = most
        return self

    def _scale(self, column: str) -> tuple[float | None, float | None]:
        most = self.stats_[f"abs_max({column})"]
        return 0, 1 if most == 0 else most


class RobustScaler(_Scaler):
    """Subtracts the median of each column and divides by the distance of two quantiles.

    The quantiles are exact. Needs ``pip install 'powertrain[duckdb]'``.

    Args:
        columns: The columns.
        quantile_range: The lower and the upper quantile.
        output_columns: Names of the results; None replaces the columns.
        quantile_precision: Accepted for compatibility, without effect.

    Raises:
        DataError: An argument has a wrong value.
    """

    def __init__(
        self,
        columns: Sequence[str],
        quantile_range: tuple[float, float] = (0.25, 0.75),
        output_columns: Sequence[str] | None = None,
        quantile_precision: int = 800,
    ) -> None:
        super().__init__(columns, output_columns)
        what = "Give two numbers from 0 to 1, the lower one first."
        given = values_of("quantile_range", quantile_range, what)
        limits = [float(number("a value of quantile_range", each, what)) for each in given]
        if len(limits) != 2 or not 0 <= limits[0] < limits[1] <= 1:
            raise DataError(f"quantile_range={quantile_range!r} is not valid. {what}")
        self.quantile_range = (limits[0], limits[1])
        self.quantile_precision = whole("quantile_precision", quantile_precision, 1)

    def _fit(self, ds: Dataset) -> RobustScaler:
        from powertrain.data.aggregate import Quantile

        names = {
            "low_quantile": self.quantile_range[0],
            "median": 0.5,
            "high_quantile": self.quantile_range[1],
        }
        self.stats_ = ds.aggregate(
            *(
                Quantile(column, q=share, alias_name=f"{name}({column})")
                for column in self.columns
                for name, share in names.items()
            )
        )
        return self

    def _scale(self, column: str) -> tuple[float | None, float | None]:
        low, high = self.stats_[f"low_quantile({column})"], self.stats_[f"high_quantile({column})"]
        if low is None:
            return None, None
        return self.stats_[f"median({column})"], 1.0 if high == low else high - low
