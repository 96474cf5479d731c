"""Numbers as the intervals that they lie in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from powertrain.data.arguments import flag, one_of, shown, whole
from powertrain.data.preprocessors.base import ColumnPreprocessor
from powertrain.data.preprocessors.fitting import statistics
from powertrain.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

    from powertrain.data.dataset import Dataset


class _Discretizer(ColumnPreprocessor):
    def __init__(
        self,
        columns: Sequence[str],
        bins: Any,
        *,
        right: bool = True,
        include_lowest: bool = False,
        duplicates: str = "raise",
        dtypes: Mapping[str, Any] | None = None,
        output_columns: Sequence[str] | None = None,
    ) -> None:
        super().__init__(columns, output_columns)
        self.bins = bins
        self.right, self.include_lowest = flag("right", right), flag("include_lowest", include_lowest)
        self.duplicates: str = one_of("duplicates", duplicates, ("raise", "drop"))
        self.dtypes = dict(dtypes or {})
        if isinstance(bins, Mapping):
            missing = [name for name in self.columns if name not in bins]
            if missing:
                raise DataError(
                    f"bins={shown(bins)} has nothing for the columns {missing}. Give all of them."
                )

    def _bins_of(self, column: str) -> Any:
        return self.bins[column] if isinstance(self.bins, Mapping) else self.bins

    def _edges(self, column: str) -> Any:
        return self._bins_of(column)

    def _transform_pandas(self, df: pd.DataFrame) -> pd.DataFrame:
        import pandas as pd

        made: dict[str, Any] = {}
        for column, output in self._pairs():
            kind = self.dtypes.get(column)
            cut: Any = pd.cut
            labels = list(kind.categories) if isinstance(kind, pd.CategoricalDtype) else False
            try:
                made[output] = cut(
                    df[column],
                    self._edges(column),
                    right=self.right,
                    labels=labels,
                    ordered=bool(kind.ordered) if isinstance(kind, pd.CategoricalDtype) else True,
                    include_lowest=self.include_lowest,
                    duplicates=self.duplicates,
                )
            except (TypeError, ValueError) as error:
                raise DataError(
                    f"{type(self).__name__}: the column {column!r} cannot be cut ({error}). Check bins and dtypes."
                ) from error
        return df.assign(**made)


class CustomKBinsDiscretizer(_Discretizer):
    """Replaces each number by the number of its interval, of those given; null outside of them.

    Args:
        columns: The columns.
        bins: The edges of the intervals, in ascending order, or an ``IntervalIndex``; also a dict of them by column.
        right: Intervals contain their upper edge, and not their lower one.
        include_lowest: The first interval contains its lower edge, too.
        duplicates: "raise" or "drop" for edges that occur twice.
        dtypes: By column, a ``CategoricalDtype`` whose categories name the intervals.
        output_columns: Names of the results; None replaces the columns.

    Raises:
        DataError: An argument has a wrong value.
    """

    _is_fittable = False


class UniformKBinsDiscretizer(_Discretizer):
    """Replaces each number by the number of its interval, of equally wide ones from the least to the greatest value.

    Args:
        columns: The columns.
        bins: The number of intervals, also by column.
        right: As for :class:`CustomKBinsDiscretizer`, like those below.
        include_lowest: Likewise.
        duplicates: Likewise.
        dtypes: Likewise.
        output_columns: Likewise.

    Raises:
        DataError: An argument has a wrong value.
    """

    def __init__(self, columns: Sequence[str], bins: Any, **options: Any) -> None:
        super().__init__(columns, bins, **options)
        for name in self.columns:
            whole("bins", self._bins_of(name), 1)

    def _fit(self, ds: Dataset) -> UniformKBinsDiscretizer:
        for name, found in statistics("UniformKBinsDiscretizer", ds, self.columns).items():
            if found.least is None:
                raise DataError(
                    f"UniformKBinsDiscretizer: the column {name!r} has no values to cut. Check the data that it is "
                    "fitted to."
                )
            self.stats_[name] = _equal_edges(name, found.least, found.most, self._bins_of(name), self.right)
        return self

    def _edges(self, column: str) -> Any:
        return self.stats_[column]


def _equal_edges(name: str, least: float, most: float, count: int, right: bool) -> Any:
    """Return the edges that ``pandas.cut`` makes: a little wider, so that both extremes lie within."""
    import numpy as np

    least, most = float(least), float(most)
    if np.isinf(least) or np.isinf(most):
        raise DataError(
            f"The column {name!r} has infinite values, which no interval contains. Leave them out first."
        )
    if least == most:
        least -= 0.001 * abs(least) if least else 0.001
        most += 0.001 * abs(most) if most else 0.001
        return np.linspace(least, most, count + 1)
    edges = np.linspace(least, most, count + 1)
    if right:
        edges[0] -= (most - least) * 0.001
    else:
        edges[-1] += (most - least) * 0.001
    return edges
