"""Values of columns as numbers and vectors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from powertrain.data.arguments import column_names, flag, shown, whole
from powertrain.data.preprocessors.base import ColumnPreprocessor, Preprocessor, check_no_nulls
from powertrain.data.preprocessors.fitting import numbered_values, value_counts
from powertrain.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

    from powertrain.data.dataset import Dataset


def _key(value: Any) -> Any:
    """Return a value as it is in the statistics: lists and arrays as tuples."""
    import numpy as np

    if isinstance(value, np.ndarray):
        return tuple(value.tolist())
    if isinstance(value, np.generic):
        return value.item()
    return tuple(value) if isinstance(value, list) else value


def _is_of_lists(values: pd.Series[Any]) -> bool:
    import numpy as np

    return values.dtype == object and any(isinstance(each, (list, np.ndarray)) for each in values[:100])


def _encoded(values: pd.Series[Any], places: Mapping[Any, int]) -> pd.Series[Any]:
    """Return the place of each value; null for one that was not there when it was fitted."""
    import pandas as pd

    found = [places.get(_key(value)) for value in values]
    if None in found:
        return pd.Series(found, index=values.index, dtype="float64")
    return pd.Series(found, index=values.index, dtype="int64")


class _Encoder(ColumnPreprocessor):
    """A preprocessor that numbers the different values of each column."""

    #: True where lists stand for the values in them.
    _of_lists = False

    def _fit(self, ds: Dataset) -> Any:
        most: Mapping[str, int] = getattr(self, "max_categories", {})
        for name, counts in value_counts(ds, self.columns, of_lists=self._of_lists).items():
            self.stats_[f"unique_values({name})"] = numbered_values(name, counts, most.get(name))
        return self


class OrdinalEncoder(_Encoder):
    """Replaces each value by its place among the sorted values of its column; unknown values become null.

    Args:
        columns: The columns.
        encode_lists: Of lists, replace their values; False replaces whole lists.
        output_columns: Names of the results; None replaces the columns.

    Raises:
        DataError: An argument has a wrong value.
    """

    def __init__(
        self,
        columns: Sequence[str],
        *,
        encode_lists: bool = True,
        output_columns: Sequence[str] | None = None,
    ) -> None:
        super().__init__(columns, output_columns)
        self.encode_lists = self._of_lists = flag("encode_lists", encode_lists)

    def _transform_pandas(self, df: pd.DataFrame) -> pd.DataFrame:
        check_no_nulls(df, self.columns)
        made: dict[str, Any] = {}
        for column, output in self._pairs():
            places = self.stats_[f"unique_values({column})"]
            if self.encode_lists and _is_of_lists(df[column]):
                made[output] = df[column].map(
                    lambda values, places=places: [places.get(_key(each)) for each in values]
                )
            else:
                made[output] = _encoded(df[column], places)
        return df.assign(**made)


class LabelEncoder(Preprocessor):
    """Replaces each label by its place among the sorted labels; unknown ones become null.

    Args:
        label_column: The column.
        output_column: Name of the result; None replaces the column.

    Raises:
        DataError: An argument has a wrong value.
    """

    def __init__(self, label_column: str, *, output_column: str | None = None) -> None:
        super().__init__()
        [self.label_column] = column_names("LabelEncoder", label_column)[:1]
        [self.output_column] = column_names("LabelEncoder", output_column or label_column)[:1]

    def get_input_columns(self) -> list[str]:
        """Return the column that it reads."""
        return [self.label_column]

    def get_output_columns(self) -> list[str]:
        """Return the column that it makes."""
        return [self.output_column]

    @property
    def _places(self) -> dict[Any, int]:
        return dict(self.stats_[f"unique_values({self.label_column})"])

    def _fit(self, ds: Dataset) -> LabelEncoder:
        counts = value_counts(ds, [self.label_column], of_lists=False)[self.label_column]
        self.stats_[f"unique_values({self.label_column})"] = numbered_values(self.label_column, counts)
        return self

    def _transform_pandas(self, df: pd.DataFrame) -> pd.DataFrame:
        check_no_nulls(df, [self.label_column])
        return df.assign(**{self.output_column: _encoded(df[self.label_column], self._places)})

    def inverse_transform(self, ds: Dataset) -> Dataset:
        """Return a dataset with the labels in place of their numbers.

        Args:
            ds: A dataset with the column of numbers.

        Raises:
            PreprocessorNotFittedException: It was not fitted.
        """
        self._check_fitted("inverse_transform")
        return ds.map_batches(
            self._inverse_transform_pandas, batch_format="pandas", udf_modifying_row_count=False
        )

    def _inverse_transform_pandas(self, df: pd.DataFrame) -> pd.DataFrame:
        labels = {place: label for label, place in self._places.items()}
        return df.assign(**{self.label_column: df[self.output_column].map(labels)})


class _HotEncoder(_Encoder):
    """Makes a vector with an element for each value of a column."""

    def __init__(
        self,
        columns: Sequence[str],
        *,
        max_categories: Mapping[str, int] | None = None,
        output_columns: Sequence[str] | None = None,
    ) -> None:
        super().__init__(columns, output_columns)
        self.max_categories: dict[str, int] = {}
        for name, most in (max_categories or {}).items():
            if name not in self.columns:
                raise DataError(
                    f"max_categories has {shown(name)}, which is not one of the columns {self.columns}. Name one."
                )
            self.max_categories[name] = whole("max_categories", most, 1)


class OneHotEncoder(_HotEncoder):
    """Replaces each value by a vector with 1 at its place among the sorted values; of zeros for an unknown value.

    Args:
        columns: The columns.
        max_categories: By column, the number of values to distinguish: the most frequent ones.
        output_columns: Names of the results; None replaces the columns.

    Raises:
        DataError: An argument has a wrong value.
    """

    def _transform_pandas(self, df: pd.DataFrame) -> pd.DataFrame:
        import numpy as np
        import pandas as pd

        check_no_nulls(df, self.columns)
        made: dict[str, Any] = {}
        for column, output in self._pairs():
            places = self.stats_[f"unique_values({column})"]
            vectors = np.zeros((len(df), len(places)), np.uint8)
            found = np.array([places.get(_key(value), -1) for value in df[column]], np.int64)
            known = np.flatnonzero(found >= 0)
            vectors[known, found[known]] = 1
            made[output] = pd.Series(list(vectors), index=df.index, dtype=object)
        return df.assign(**made)


class MultiHotEncoder(_HotEncoder):
    """Replaces each list by a vector with the number of times that each of the sorted values occurs in it.

    Args:
        columns: The columns.
        max_categories: By column, the number of values to distinguish: the most frequent ones.
        output_columns: Names of the results; None replaces the columns.

    Raises:
        DataError: An argument has a wrong value.
    """

    _of_lists = True

    def _transform_pandas(self, df: pd.DataFrame) -> pd.DataFrame:
        import numpy as np
        import pandas as pd

        check_no_nulls(df, self.columns)
        made: dict[str, Any] = {}
        for column, output in self._pairs():
            places = self.stats_[f"unique_values({column})"]
            vectors = np.zeros((len(df), len(places)), np.int64)
            for row, values in enumerate(df[column]):
                listed = values if isinstance(values, (list, tuple, np.ndarray)) else [values]
                for value, count in Counter(_key(each) for each in listed).items():
                    if value in places:
                        vectors[row, places[value]] = count
            made[output] = pd.Series(list(vectors), index=df.index, dtype=object)
        return df.assign(**made)


class Categorizer(ColumnPreprocessor):
    """Makes pandas' categories of columns. Batches have them; rows of a dataset hold the values themselves.

    Args:
        columns: The columns.
        dtypes: By column, a ``pandas.CategoricalDtype``; other columns get one of their values.
        output_columns: Names of the results; None replaces the columns.

    Raises:
        DataError: An argument has a wrong value.
    """

    def __init__(
        self,
        columns: Sequence[str],
        dtypes: Mapping[str, pd.CategoricalDtype] | None = None,
        output_columns: Sequence[str] | None = None,
    ) -> None:
        super().__init__(columns, output_columns)
        self.dtypes = dict(dtypes or {})

    def _fit(self, ds: Dataset) -> Categorizer:
        import pandas as pd

        self.stats_.update(self.dtypes)
        wanted = [name for name in self.columns if name not in self.dtypes]
        if wanted:
            for name, counts in value_counts(ds, wanted, of_lists=False).items():
                counts.pop(None, None)
                self.stats_[name] = pd.CategoricalDtype(list(numbered_values(name, counts)))
        return self

    def _transform_pandas(self, df: pd.DataFrame) -> pd.DataFrame:
        made: dict[str, Any] = {}
        for column, output in self._pairs():
            kind = self.stats_[column]
            # Values that are no category are null, as in Ray Data.
            made[output] = df[column].where(df[column].isin(kind.categories)).astype(kind)
        return df.assign(**made)
