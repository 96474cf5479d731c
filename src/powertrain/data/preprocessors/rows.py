"""Changes of rows that need no statistics: norms, powers, columns put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from powertrain.data.arguments import column_names, flag, number, one_of
from powertrain.data.preprocessors.base import ColumnPreprocessor, Preprocessor
from powertrain.errors import DataError
from powertrain.text.loggers import module_logger

if TYPE_CHECKING:
    import pandas as pd

_logger = module_logger(__name__)


class Normalizer(ColumnPreprocessor):
    """Divides the columns of each row by their norm, so that they have the norm 1; rows of zeros stay.

    Args:
        columns: The columns that make up the vector of a row.
        norm: "l1" (sum of absolute values), "l2" (root of the sum of squares) or "max" (greatest absolute value).
        output_columns: Names of the results; None replaces the columns.

    Raises:
        DataError: An argument has a wrong value.
    """

    _is_fittable = False

    def __init__(
        self, columns: Sequence[str], norm: str = "l2", *, output_columns: Sequence[str] | None = None
    ) -> None:
        super().__init__(columns, output_columns)
        self.norm: str = one_of("norm", norm, ("l1", "l2", "max"))

    def _transform_pandas(self, df: pd.DataFrame) -> pd.DataFrame:
        import numpy as np

        values = np.column_stack([df[name].to_numpy(dtype=np.float64) for name in self.columns])
        sizes = np.abs(values)
        norms = {
            "l1": lambda: sizes.sum(axis=1),
            "l2": lambda: np.sqrt((sizes**2).sum(axis=1)),
            "max": lambda: sizes.max(axis=1),
        }[self.norm]()
        norms[norms == 0] = 1
        return df.assign(
            **{output: values[:, place] / norms for place, (_, output) in enumerate(self._pairs())}
        )


class PowerTransformer(ColumnPreprocessor):
    """Applies a power to each column, which makes skewed values more normal.

    Args:
        columns: The columns.
        power: The parameter of the transformation (lambda).
        method: "yeo-johnson", or "box-cox" for values above 0.
        output_columns: Names of the results; None replaces the columns.

    Raises:
        DataError: An argument has a wrong value.
    """

    _is_fittable = False

    def __init__(
        self,
        columns: Sequence[str],
        power: float,
        method: str = "yeo-johnson",
        *,
        output_columns: Sequence[str] | None = None,
    ) -> None:
        super().__init__(columns, output_columns)
        self.power = float(number("power", power, "must be a number."))
        self.method: str = one_of("method", method, ("yeo-johnson", "box-cox"))

    def _transform_pandas(self, df: pd.DataFrame) -> pd.DataFrame:
        import numpy as np

        change = self._yeo_johnson if self.method == "yeo-johnson" else self._box_cox
        return df.assign(
            **{output: change(df[column].to_numpy(dtype=np.float64)) for column, output in self._pairs()}
        )

    def _box_cox(self, values: Any) -> Any:
        import numpy as np

        with np.errstate(divide="ignore", invalid="ignore"):
            return np.log(values) if self.power == 0 else (values**self.power - 1) / self.power

    def _yeo_johnson(self, values: Any) -> Any:
        import numpy as np

        made = np.full_like(values, np.nan)
        above, below = values >= 0, values < 0
        if self.power == 0:
            made[above] = np.log1p(values[above])
        else:
            made[above] = ((values[above] + 1) ** self.power - 1) / self.power
        rest = 2 - self.power
        if rest == 0:
            made[below] = -np.log1p(-values[below])
        else:
            made[below] = -((1 - values[below]) ** rest - 1) / rest
        return made


class Concatenator(Preprocessor):
    """Puts columns together into one column of vectors, and drops them.

    Args:
        columns: The columns, in the order of their values.
        output_column_name: The name of the new column.
        dtype: The type of its values; None for the common one.
        raise_if_missing: Raise where a column does not exist, in place of a warning.
        flatten: Put vectors in columns together, too. They always are; True is for compatibility.

    Raises:
        DataError: An argument has a wrong value.
    """

    _is_fittable = False

    def __init__(
        self,
        columns: Sequence[str],
        output_column_name: str = "concat_out",
        dtype: Any = None,
        raise_if_missing: bool = False,
        flatten: bool = False,
    ) -> None:
        super().__init__()
        self.columns = list(column_names("Concatenator", columns))
        [self.output_column_name] = column_names("Concatenator", output_column_name)
        self.dtype = dtype
        self.raise_if_missing = flag("raise_if_missing", raise_if_missing)
        self.flatten = flag("flatten", flatten)

    def get_output_columns(self) -> list[str]:
        """Return the column that it makes."""
        return [self.output_column_name]

    def _transform_pandas(self, df: pd.DataFrame) -> pd.DataFrame:
        import numpy as np
        import pandas as pd

        missing = [name for name in self.columns if name not in df.columns]
        there = [name for name in self.columns if name in df.columns]
        if missing and (self.raise_if_missing or not there):
            raise DataError(
                f"Concatenator: the columns {missing} do not exist. The rows have {list(map(str, df.columns))}."
            )
        if missing:
            _logger.warning("Concatenator: the columns %s do not exist and are left out.", missing)
        values = np.column_stack([_vectors(df[name]) for name in there])
        if self.dtype is not None:
            values = values.astype(self.dtype)
        kept = df.drop(columns=there)
        kept[self.output_column_name] = pd.Series(list(values), index=df.index, dtype=object)
        return kept


def _vectors(values: pd.Series[Any]) -> Any:
    """Return a column as an array of one or two dimensions."""
    import numpy as np

    array = values.to_numpy()
    if array.dtype != object:
        return array
    try:
        stacked = np.stack([np.asarray(each) for each in array])
    except ValueError as error:
        raise DataError(
            f"Concatenator: the vectors of the column {values.name!r} have different lengths. Give them one length "
            "with map() first."
        ) from error
    return stacked.reshape(len(stacked), -1) if stacked.ndim > 1 else stacked
