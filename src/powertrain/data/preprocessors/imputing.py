"""Missing values filled in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from powertrain.data.arguments import one_of
from powertrain.data.preprocessors.base import ColumnPreprocessor
from powertrain.data.preprocessors.fitting import statistics, value_counts
from powertrain.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

    from powertrain.data.dataset import Dataset


class SimpleImputer(ColumnPreprocessor):
    """Replaces nulls and NaN by the mean or the most frequent value of their column, or by a constant.

    Args:
        columns: The columns.
        strategy: "mean", "most_frequent" (the least of equally frequent values) or "constant".
        fill_value: The constant.
        output_columns: Names of the results; None replaces the columns.

    Raises:
        DataError: An argument has a wrong value.
    """

    def __init__(
        self,
        columns: Sequence[str],
        strategy: str = "mean",
        fill_value: Any = None,
        *,
        output_columns: Sequence[str] | None = None,
    ) -> None:
        super().__init__(columns, output_columns)
        self.strategy: str = one_of("strategy", strategy, ("mean", "most_frequent", "constant"))
        self.fill_value = fill_value
        if strategy == "constant":
            self._is_fittable = False
            if fill_value is None:
                raise DataError("SimpleImputer(strategy='constant') needs the constant. Give fill_value=...")

    def _fit(self, ds: Dataset) -> SimpleImputer:
        if self.strategy == "mean":
            for name, found in statistics("SimpleImputer", ds, self.columns).items():
                self.stats_[f"mean({name})"] = found.mean if found.count else None
        else:
            for name, counts in value_counts(ds, self.columns, of_lists=False).items():
                counts.pop(None, None)
                most = max(counts.values(), default=0)
                self.stats_[f"most_frequent({name})"] = min(
                    (value for value, count in counts.items() if count == most), default=None
                )
        return self

    def _filler(self, column: str) -> Any:
        value = self.fill_value if self.strategy == "constant" else self.stats_[f"{self.strategy}({column})"]
        if value is None:
            raise DataError(
                f"SimpleImputer: the column {column!r} had no values when it was fitted, so there is none to fill in. "
                "Give strategy='constant' and fill_value=..."
            )
        return value

    def _transform_pandas(self, df: pd.DataFrame) -> pd.DataFrame:
        import pandas as pd

        made: dict[str, Any] = {}
        for column, output in self._pairs():
            value = self._filler(column)
            if column not in df.columns:
                made[output] = value
                continue
            values = df[column]
            if isinstance(values.dtype, pd.CategoricalDtype) and value not in values.cat.categories:
                values = values.cat.add_categories([value])
            filled = values.where(values.notna(), value)
            made[output] = filled.infer_objects() if filled.dtype == object else filled
        return df.assign(**made)
